"""The settings of a server, each declared once: its type, its default, its range and its meaning.

`radixkv serve` makes its options from the declarations, before it imports any package of the extra `radixkv[serve]`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Literal

from radixkv.errors import InvalidInput
from radixkv.settings.declared import check, described, setting
from radixkv.settings.kinds import Bytes, Duration, Integer, Kind, Number, OneOf, Switch

Mode = Literal["auto", "append", "template"]
MODES = ("auto", "append", "template")
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@,*]+")
HOST = re.compile(r"\[[0-9a-fA-F:.]+\]|[a-zA-Z0-9][a-zA-Z0-9._-]*")
_LEAST = "{name} must be a number, at least {kind.low:g}, got {value!r}"
_PORT = "{name} must be a number from 0 (any that is free) to 65535, got {value!r}"
_MODE = "{name} must be one of auto, append, template, not {value!r}"
_CONNECTIONS = 800  # below 1,024, the usual limit of open files


@described
@dataclass(frozen=True)
class Settings:
    """Address, API keys and limits of a server; raises InvalidInput for values that are wrong or unsafe.

    A request has one reply for each prompt and each of `n`. It counts before its body is read, which also limits the
    bodies in memory. Beyond `max_running + max_waiting` replies, or `max_per_key` of one tenant, requests get status
    429.
    """

    host: str = setting("127.0.0.1", Kind(), "address to listen on; the default is this machine only")
    port: int = setting(8000, Integer(low=0, high=65535, message=_PORT), "port; 0 picks a free one")
    api_keys: Mapping[str, str] = setting(
        dict,
        Kind(),
        "key of each tenant; without keys all clients are one tenant, and host must be loopback",
        option="api_key",
        repr=False,
    )
    allowed_origins: Sequence[str] = setting(
        (),
        Kind(metavar="ORIGIN"),
        "origin of web pages that may send requests, such as https://app.example:8443 or chrome-extension://ID; repeat "
        "for more. * is all pages, and needs API keys",
        option="allowed_origin",
    )
    allowed_hosts: Sequence[str] = setting(
        (),
        Kind(metavar="NAME"),
        "further name of this machine, such as host.docker.internal, for servers without keys; repeat for more",
        option="allowed_host",
    )
    tls_cert: str | None = setting(None, Kind(metavar="FILE"), "PEM file with the certificate chain, for https")
    tls_key: str | None = setting(
        None, Kind(metavar="FILE"), "PEM file with the private key of the certificate, not encrypted"
    )
    model_name: str | None = setting(
        None,
        Kind(metavar="NAME"),
        "name of the model in the API (default: its own name; of a GGUF file, without .gguf)",
    )
    max_running: int = setting(64, Integer(low=1, message=_LEAST), "replies that run at once", option="max_sequences")
    max_waiting: int = setting(256, Integer(low=0, message=_LEAST), "most waiting replies; further ones get status 429")
    max_per_key: int | None = setting(
        None,
        Integer(low=1, optional=True, message=_LEAST),
        "most replies of one tenant, running or waiting (default: half of all replies if there are several keys, so "
        "that one tenant cannot take them all, else no limit)",
    )
    max_connections: int | None = setting(
        None,
        Integer(low=1, optional=True, message=_LEAST),
        "most open connections, half of them for one of several keys (default: twice the replies, at least 800)",
    )
    max_body: int = setting("8MiB", Bytes(low=1, message=_LEAST), "largest request body")
    max_prompt_tokens: int | None = setting(
        None, Integer(low=1, optional=True, message=_LEAST), "longest prompt (default: the context)"
    )
    head_timeout: float = setting(
        30.0, Number(low=0.001, message=_LEAST), "seconds until the headers of a request must be there"
    )
    body_timeout: float = setting(30.0, Number(low=0.001, message=_LEAST), "seconds until a body must be there")
    send_timeout: float = setting(
        120.0, Number(low=0.001, message=_LEAST), "seconds for which a client may read nothing"
    )
    timeout: float | None = setting(
        None,
        Number(low=0.001, optional=True, message=_LEAST),
        "seconds from the arrival of a body to the end of its request (default: no limit)",
    )
    drain_timeout: float = setting(
        30.0,
        Number(low=0, message=_LEAST),
        "seconds that running requests have to finish at shutdown; a second signal ends them at once",
        option="drain",
    )
    retry_after: int = setting(
        1, Integer(low=1, message=_LEAST), "seconds in Retry-After of a response with status 429"
    )
    history_bytes: int = setting(
        "64MiB",
        Bytes(low=0, message=_LEAST),
        "memory for past conversations, so that resent conversations hit the cache; 0 for none",
        option="history_memory",
    )
    history: Mode = setting(  # noqa: RUF009 - it returns a field
        "auto",
        OneOf(members=MODES, metavar="MODE", message=_MODE),
        "how new messages are added to a known conversation: append them to its token ids, or render the whole "
        "conversation by the chat template, with the ids of the known replies. auto (the default) appends, unless the "
        "template drops the thinking of earlier replies or appending would lose text",
    )
    strict_fields: bool = setting(
        False,
        Switch(),
        "refuse unknown fields of a request with status 400, instead of ignoring them with a warning header",
    )
    keep_billing_header: bool = setting(
        False,
        Switch(),
        "keep the line for billing that Claude Code writes before its system prompt; it may change with each session "
        "or request, and then nothing after it hits the cache",
    )
    response_bytes: int = setting(
        "64MiB",
        Bytes(low=0, message=_LEAST),
        "memory of each tenant for stored responses of /v1/responses; 0 for none",
        option="response_memory",
    )
    keep_alive: float = setting(
        "5m",
        Duration(),
        "how long an idle model of several stays in memory: seconds, or a duration such as 90s, 5m or 1h; "
        "-1 for ever, 0 not at all. A request of Ollama's API may set it",
    )
    load_timeout: float = setting(
        60.0,
        Number(low=0.001, message=_LEAST),
        "seconds for which a request waits until its model, one of several, is loaded",
    )
    max_loaded: int | None = setting(
        None,
        Integer(low=1, optional=True, message=_LEAST),
        "most models in memory at once; the idle one that was used least recently makes room",
    )
    model_memory: int | None = setting(
        None,
        Bytes(low=1, optional=True, message=_LEAST),
        "memory that all loaded models may take: weights, pools and host memory (default: no limit)",
    )
    fim_order: str = setting(
        "psm",
        OneOf(members=("psm", "spm"), message="{name} must be psm or spm, not {value!r}"),
        "order of a prompt that fills in the middle: psm, or spm for models trained with it, which hits more",
    )
    vllm_metrics: bool = setting(False, Switch(), "export the metrics under vLLM's names as well")
    record_text: str | None = setting(
        None,
        Kind(metavar="FILE"),
        "new file that gets the texts of all chat requests, for radixkv-replay lint; only its owner may read it "
        "(default: no text is written)",
    )

    def __post_init__(self) -> None:
        """Check all values, and refuse to be reachable from other machines without keys."""
        check(self)
        self._check_keys()
        self._check_names()

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

    def _check_names(self) -> None:
        if wrong := [each for each in self.allowed_origins if each != "*" and not ORIGIN.fullmatch(each)]:
            raise InvalidInput(
                f"allowed_origins must be scheme://host or scheme://host:port, without a path, not {wrong[0]!r}"
            )
        if "*" in self.allowed_origins and not self.api_keys:
            raise InvalidInput("allowed_origins cannot be * without keys: give an API key, or name each origin")
        if wrong := [each for each in self.allowed_hosts if not HOST.fullmatch(each)]:
            raise InvalidInput(
                f"allowed_hosts must be names, or [IPv6] addresses, without scheme and port, not {wrong[0]!r}"
            )
        if self.record_text is not None and (path := Path(self.record_text)).exists():
            raise InvalidInput(f"record_text: {path} exists, name a new file")
        if self.record_text is not None and not path.parent.is_dir():
            raise InvalidInput(f"record_text: there is no folder {path.parent}")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidInput("tls_cert and --tls-key belong together: give both")


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
