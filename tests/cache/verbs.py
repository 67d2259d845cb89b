"""The verbs of one request in one call."""

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from radixkv.cache import Hint, PrefixCache
from radixkv.cache import Sequence as CacheSequence

Ids = Sequence[int] | npt.NDArray[np.integer[Any]]


def held(cache: PrefixCache, tokens: Ids, namespace: Hashable = None, priority: int = 0) -> CacheSequence:
    """An open sequence whose tokens are all computed and published."""
    seq = cache.open(tokens, namespace, priority=priority)
    seq.extend(tokens[seq.length :])
    seq.commit()
    return seq


def publish(
    cache: PrefixCache,
    tokens: Ids,
    namespace: Hashable = None,
    hint: Hint | None = None,
    priority: int = 0,
) -> int:
    """Serve one request from beginning to end; returns how many tokens it hit."""
    seq = held(cache, tokens, namespace, priority)
    seq.close(hint)
    return seq.cached_length


def cached(cache: PrefixCache, tokens: Ids, namespace: Hashable = None) -> int:
    return cache.match(tokens, namespace).length


def prompt(name: int, length: int) -> list[int]:
    """A text that shares not even its first token with a text of another name."""
    return [1000 + name, *range(length - 1)]


def forked() -> tuple[PrefixCache, CacheSequence]:
    """Return a cache that has `prompt(1, 10)`, and a fork that has not published the same tokens."""
    cache = PrefixCache(16, 4)
    first = cache.open([])
    first.extend(prompt(1, 10))
    first.commit(publish=False)
    twin = first.fork()
    first.commit()
    first.close()
    return cache, twin
