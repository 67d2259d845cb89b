"""The records of a request that have no behaviour: its sender, the parts of its prompt, and what the engine notes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import NamedTuple

from radixkv.cache import Explanation


@dataclass(frozen=True, slots=True)
class Origin:
    """The names that the sender gave a request, for observers: the id of an API request, a tenant, and a label.

    `session` is the number of its conversation. `changed_part` is the first part of the prompt that differs from an
    earlier prompt of the conversation, and `changed_rule` the rule that it breaks.
    """

    request_id: str | None = None
    tenant: str | None = None
    label: str | None = None
    session: int | None = None
    changed_part: str | None = None
    changed_rule: str | None = None


NO_ORIGIN = Origin()


class PromptParts(NamedTuple):
    """The parts of a prompt: lengths in tokens, 0 if there is no such part.

    `reply_start` is the length of the part that a later turn of the conversation repeats for sure: up to the end of the
    last message before the reply. The first `slots` ids stand for a compressed prefix, which has `offset` tokens
    more; `gone` is the error's text if it is not cached.
    """

    reply_start: int = 0
    slots: int = 0
    offset: int = 0
    gone: str = ""


WHOLE = PromptParts()


@dataclass(slots=True)
class Reported:
    """The facts of a request that only counters and observers read."""

    submitted: float = field(default_factory=time.perf_counter)
    counted: bool = False  # its prompt is in the engine's counters
    coalesced: bool = False  # it hit more after a wait for a shared prefix
    started_at: float | None = None  # the time of its first admission
    miss: Explanation | None = None  # why it did not hit all
    disk_reads: int = 0  # that it waited for
    disk_tokens: int = 0  # that these brought into host memory


@dataclass(slots=True)
class StreamTimes:
    """When a stream got its first and its last token, and when it finished, in seconds of time.perf_counter.

    `TokenTimes` counts `last_token`.
    """

    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None
