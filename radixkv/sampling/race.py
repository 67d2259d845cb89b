"""Random numbers of the exponential race, by which every sampler draws tokens.

A draw of (seed, position) assigns an exponentially distributed number to each token. The token with the largest ratio
of weight and number wins, which draws tokens in proportion to their weights.
"""

from __future__ import annotations

import hashlib
import struct

import torch
from torch import Tensor

PAGE = 256
"""Tokens whose weights are summed together if no filter applies: first a page is drawn, then a token of the page."""

# The constants of SplitMix64 (Steele, Lea, Flood 2014), as signed integers.
STEP, FIRST, SECOND = (number - 2**64 for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def draw_key(seed: int, position: int) -> int:
    """Return the signed 64 bits from which the random numbers of (seed, position) are made."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed % 2**64, position % 2**64), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def exponential(keys: Tensor, ids: Tensor) -> Tensor:
    """Return the exponentially distributed float64 of each (key, id), greater than 0; int64s that broadcast.

    SplitMix64 in integers that wrap around: the same numbers on every device.
    """
    bits = keys + ids * STEP
    bits = (bits ^ (bits >> 30 & 2**34 - 1)) * FIRST  # the masks turn arithmetic shifts into logical ones
    bits = (bits ^ (bits >> 27 & 2**37 - 1)) * SECOND
    bits = bits ^ (bits >> 31 & 2**33 - 1)
    uniform = ((bits >> 12 & 2**52 - 1).double() + 0.5) * 2.0**-52
    return -uniform.log()


def race(weights: Tensor, keys: Tensor, ids: Tensor) -> Tensor:
    """Return the places [rows, 1] of one id per row, drawn in proportion to the weights [rows, n], not all 0.

    `keys` are int64 [rows, 1]; `ids` are int64 [n] or [rows, n].
    """
    return (weights.double() / exponential(keys, ids)).argmax(dim=1, keepdim=True)


def race_all(weights: Tensor, keys: Tensor) -> Tensor:
    """Return an id [rows] per row like `race`, of weights of all ids: first a page by the sums of the pages, then one
    of its ids."""
    pages = torch.nn.functional.pad(weights, (0, -weights.shape[1] % PAGE)).view(len(weights), -1, PAGE)
    sums = pages.sum(dim=2, dtype=torch.float64)
    # Pages are numbered from -1 downwards: tokens have the other ids.
    page = race(sums, keys, -1 - torch.arange(sums.shape[1], device=sums.device))
    ids = page * PAGE + torch.arange(PAGE, device=page.device)
    place = race(pages.take_along_dim(page[:, :, None], dim=1)[:, 0], keys, ids)
    return ids.gather(1, place)[:, 0]
