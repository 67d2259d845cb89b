"""What a sequence is opened for. Knows no more than the words; PrefixCache.open says what follows from each."""

from __future__ import annotations

from typing import Literal, get_args

# A request; a request that comes back after it was preempted; a look at what is cached.
Purpose = Literal["request", "resume", "audit"]
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)
