"""Settings of a server, checked when they are created."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address

from radixkv.errors import InvalidInput
from radixkv.serve.conversations import MODES, Mode

MIB = 1 << 20
_CONNECTIONS = 800  # below 1,024, the usual limit of open files


@dataclass(frozen=True)
class Settings:
    """Address, API keys and limits of a server; raises InvalidInput for values that are wrong or unsafe.

    `api_keys` maps a tenant's name to its key. Without keys all clients are one tenant, and `host` must be loopback.
    `model_name` is the model's name for clients; the default is the engine's own name.

    At most `max_running + max_waiting` streams are served at once, and at most `max_per_key` of one tenant; a request
    has one stream for each prompt and each of `n`. Further requests get 429, with `retry_after` seconds as Retry-After.
    A request counts before its body is read, which also limits the bodies in memory. With two or more keys, the default
    of `max_per_key` is half of all streams, so that one tenant cannot take them all.

    At most `max_connections` are open at once, and at most half of them for one of several tenants. The default is
    twice the number of streams, at least 800. The headers of a request must arrive within `head_timeout` seconds.

    A body has at most `max_body` bytes and must arrive within `body_timeout` seconds. A prompt has at most
    `max_prompt_tokens`; None is the context. A request ends `timeout` seconds after its body has arrived (None: never),
    or when its client has read nothing for `send_timeout`. On shutdown, streams have `drain_timeout` to finish.

    `response_bytes` limits the stored responses of each tenant, which POST /v1/responses can continue; 0 stores none.

    `history_bytes` limits the history of conversations, with which a client that sends them again hits the cache; 0
    disables it. `history` is the mode: "append" appends new messages to the known ids; "template" renders the whole
    conversation around the ids of the replies; "auto" appends, unless that would lose text or the template omits the
    thinking of earlier replies. `strict_fields` refuses unknown fields, which are otherwise ignored with a warning.
    `keep_billing_header` keeps the line that Claude Code writes before the system prompt, for the billing of its
    provider; some versions change it with each request. `vllm_metrics` adds metrics with vLLM's names.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    model_name: str | None = None
    max_running: int = 64
    max_waiting: int = 256
    max_per_key: int | None = None
    max_connections: int | None = None
    max_body: int = 8 * MIB
    max_prompt_tokens: int | None = None
    head_timeout: float = 30.0
    body_timeout: float = 30.0
    send_timeout: float = 120.0
    timeout: float | None = None
    drain_timeout: float = 30.0
    retry_after: int = 1
    history_bytes: int = 64 * MIB
    history: Mode = "auto"
    strict_fields: bool = False
    keep_billing_header: bool = False
    response_bytes: int = 64 * MIB
    vllm_metrics: bool = False

    def __post_init__(self) -> None:
        """Check all values, and refuse to be reachable from other machines without keys."""
        for name in ("max_running", "max_body", "retry_after"):
            _at_least(name, getattr(self, name), 1)
        for name in ("max_per_key", "max_connections", "max_prompt_tokens"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        for name in ("max_waiting", "history_bytes", "response_bytes", "port"):
            _at_least(name, getattr(self, name), 0)
        if self.port > 65535:
            raise InvalidInput(f"port must be a number from 0 (any that is free) to 65535, got {self.port}")
        for name in ("head_timeout", "body_timeout", "send_timeout"):
            _at_least(name, getattr(self, name), 0.001)
        _at_least("drain_timeout", self.drain_timeout, 0)
        if self.timeout is not None:
            _at_least("timeout", self.timeout, 0.001)
        if self.history not in MODES:
            raise InvalidInput(f"history must be one of {', '.join(MODES)}, not {self.history!r}")
        self._check_keys()

    @property
    def max_streams(self) -> int:
        """The maximum number of streams, running and waiting."""
        return self.max_running + self.max_waiting

    @property
    def streams_per_key(self) -> int | None:
        """The maximum number of streams of one tenant, None for no limit of its own."""
        return self._share(self.max_streams) if self.max_per_key is None else self.max_per_key

    @property
    def connection_limit(self) -> int:
        """The maximum number of open connections."""
        return max(_CONNECTIONS, 2 * self.max_streams) if self.max_connections is None else self.max_connections

    @property
    def connections_per_key(self) -> int | None:
        """The maximum number of open connections of one tenant, None for no limit of its own."""
        return self._share(self.connection_limit)

    def _share(self, number: int) -> int | None:
        """Return half of a number where there are several tenants: the other half is left to them."""
        return max(number // 2, 1) if len(self.api_keys) > 1 else None

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
    """Whether only this machine can reach `host`. Names other than localhost are not resolved, and do not count.

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
