"""What a server is told when it starts. Knows names and numbers; knows no engine, no HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address

from radixkv.errors import InvalidInput
from radixkv.serve.conversations import MODES, Mode

MIB = 1 << 20


@dataclass(frozen=True)
class Settings:
    """Where to listen, who may ask, and how much; raises InvalidInput for what could not be served safely.

    `api_keys` maps a tenant's name to its key; without keys everybody is the same tenant, and `host` must be loopback.
    `model_name` is what clients call the model (default: the engine's own name for it).
    At most `max_running + max_waiting` streams are being answered at once (a request has one for each prompt and each
    of `n`), of one tenant at most `max_per_key`; whoever comes on top of that gets 429 and is told to wait
    `retry_after` seconds. A request counts from before its body is read, so at most `max_running + max_waiting` bodies
    are held.
    A body has at most `max_body` bytes and arrives within `body_timeout` seconds, a prompt has at most
    `max_prompt_tokens` (None: what fits the context). A request ends `timeout` seconds after its body has come (None:
    never), or once its reader has taken nothing for `send_timeout`. At the end, streams have `drain_timeout` to finish.
    `history_bytes` bounds what is remembered of conversations, so that a client that sends them again hits the cache;
    0 remembers nothing. `history` says where new messages go: "append" puts them behind the ids that are known,
    "template" renders everything around those of the replies, "auto" appends unless the template leaves the thinking of
    earlier replies out, or appending would lose what it writes. `vllm_metrics` adds vLLM's names to /metrics.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    model_name: str | None = None
    max_running: int = 64
    max_waiting: int = 256
    max_per_key: int | None = None
    max_body: int = 8 * MIB
    max_prompt_tokens: int | None = None
    body_timeout: float = 30.0
    send_timeout: float = 120.0
    timeout: float | None = None
    drain_timeout: float = 30.0
    retry_after: int = 1
    history_bytes: int = 64 * MIB
    history: Mode = "auto"
    vllm_metrics: bool = False

    def __post_init__(self) -> None:
        """Refuse to be open to the world, and what is no number."""
        for name in ("max_running", "max_body", "retry_after"):
            _at_least(name, getattr(self, name), 1)
        for name in ("max_per_key", "max_prompt_tokens"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        for name in ("max_waiting", "history_bytes", "port"):
            _at_least(name, getattr(self, name), 0)
        if self.port > 65535:
            raise InvalidInput(f"port must be a number from 0 (any that is free) to 65535, got {self.port}")
        for name in ("body_timeout", "send_timeout"):
            _at_least(name, getattr(self, name), 0.001)
        _at_least("drain_timeout", self.drain_timeout, 0)
        if self.timeout is not None:
            _at_least("timeout", self.timeout, 0.001)
        if self.history not in MODES:
            raise InvalidInput(f"history must be one of {', '.join(MODES)}, not {self.history!r}")
        self._check_keys()

    @property
    def max_streams(self) -> int:
        """How many streams may be running or waiting together."""
        return self.max_running + self.max_waiting

    def _check_keys(self) -> None:
        for name, key in self.api_keys.items():
            if not name or len(key) < 8 or not key.isascii() or not key.isprintable() or " " in key:
                raise InvalidInput(f"the API key of {name!r} must be at least 8 printable ASCII characters, no spaces")
        if len(set(self.api_keys.values())) < len(self.api_keys):
            raise InvalidInput("two names have the same API key: each tenant needs its own")
        if not self.api_keys and not is_loopback(self.host):
            raise InvalidInput(
                f"{self.host} can be reached from other machines: give an API key (--api-key name=@FILE), or listen on "
                "127.0.0.1"
            )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`; a name other than localhost is not trusted to be.

    >>> [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "example.org")]
    [True, True, True, False, False]
    """
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _at_least(name: str, value: object, low: float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and low <= value < float("inf")
    if not number:
        raise InvalidInput(f"{name} must be a number, at least {low:g}, got {value!r}")
