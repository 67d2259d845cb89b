"""The settings of a server, each declared once: its type, its default, its range and its meaning.

`radixkv serve` makes its options from the declarations, before it imports any package of the extra `radixkv[serve]`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal

from radixkv.durations import parse_duration
from radixkv.errors import InvalidInput
from radixkv.sizing.kv_size import parse_size

Mode = Literal["auto", "append", "template"]
MODES = ("auto", "append", "template")
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@,*]+")
HOST = re.compile(r"\[[0-9a-fA-F:.]+\]|[a-zA-Z0-9][a-zA-Z0-9._-]*")
_CONNECTIONS = 800  # below 1,024, the usual limit of open files


def _setting(default: Any, help: str, kind: type = str, *, least: float | None = None, option: str = "") -> Any:
    """Declare a field: its meaning, its type and its smallest value; `option` is its name on the command line."""
    return field(default=default, metadata={"help": help, "kind": kind, "least": least, "option": option})


def _size(default: str | None, help: str, *, least: int = 0, option: str = "") -> Any:
    """Declare a number of bytes, which is a size such as 8MiB on the command line."""
    metadata = {"help": help, "kind": str, "least": least, "option": option, "size": True, "text": default}
    return field(default=None if default is None else parse_size(default), metadata=metadata)


@dataclass(frozen=True)
class Settings:
    """Address, API keys and limits of a server; raises InvalidInput for values that are wrong or unsafe.

    A request has one reply for each prompt and each of `n`. It counts before its body is read, which also limits the
    bodies in memory. Beyond `max_running + max_waiting` replies, or `max_per_key` of one tenant, requests get status
    429.
    """

    host: str = _setting("127.0.0.1", "address to listen on; the default is this machine only")
    port: int = _setting(8000, "port; 0 picks a free one", int, least=0)
    api_keys: Mapping[str, str] = field(
        default_factory=dict,
        repr=False,
        metadata={"help": "key of each tenant; without keys all clients are one tenant, and host must be loopback"},
    )
    allowed_origins: Sequence[str] = _setting(
        (),
        "origin of web pages that may send requests, such as https://app.example:8443 or chrome-extension://ID; repeat "
        "for more. * is all pages, and needs API keys",
        option="allowed_origin",
    )
    allowed_hosts: Sequence[str] = _setting(
        (),
        "further name of this machine, such as host.docker.internal, for servers without keys; repeat for more",
        option="allowed_host",
    )
    tls_cert: str | None = _setting(None, "PEM file with the certificate chain, for https")
    tls_key: str | None = _setting(None, "PEM file with the private key of the certificate, not encrypted")
    model_name: str | None = _setting(
        None, "name of the model in the API (default: its own name; of a GGUF file, without .gguf)"
    )
    max_running: int = _setting(64, "replies that run at once", int, least=1, option="max_sequences")
    max_waiting: int = _setting(256, "most waiting replies; further ones get status 429", int, least=0)
    max_per_key: int | None = _setting(
        None,
        "most replies of one tenant, running or waiting (default: half of all replies if there are several keys, so "
        "that one tenant cannot take them all, else no limit)",
        int,
        least=1,
    )
    max_connections: int | None = _setting(
        None,
        "most open connections, half of them for one of several keys (default: twice the replies, at least 800)",
        int,
        least=1,
    )
    max_body: int = _size("8MiB", "largest request body", least=1)
    max_prompt_tokens: int | None = _setting(None, "longest prompt (default: the context)", int, least=1)
    head_timeout: float = _setting(30.0, "seconds until the headers of a request must be there", float, least=0.001)
    body_timeout: float = _setting(30.0, "seconds until a body must be there", float, least=0.001)
    send_timeout: float = _setting(120.0, "seconds for which a client may read nothing", float, least=0.001)
    timeout: float | None = _setting(
        None, "seconds from the arrival of a body to the end of its request (default: no limit)", float, least=0.001
    )
    drain_timeout: float = _setting(
        30.0,
        "seconds that running requests have to finish at shutdown; a second signal ends them at once",
        float,
        least=0,
        option="drain",
    )
    retry_after: int = _setting(1, "seconds in Retry-After of a response with status 429", int, least=1)
    history_bytes: int = _size(
        "64MiB",
        "memory for past conversations, so that resent conversations hit the cache; 0 for none",
        option="history_memory",
    )
    history: Mode = _setting(  # noqa: RUF009 - it returns a field
        "auto",
        "how new messages are added to a known conversation: append them to its token ids, or render the whole "
        "conversation by the chat template, with the ids of the known replies. auto (the default) appends, unless the "
        "template drops the thinking of earlier replies or appending would lose text",
    )
    strict_fields: bool = _setting(
        False, "refuse unknown fields of a request with status 400, instead of ignoring them with a warning header"
    )
    keep_billing_header: bool = _setting(
        False,
        "keep the line for billing that Claude Code writes before its system prompt; it may change with each session "
        "or request, and then nothing after it hits the cache",
    )
    response_bytes: int = _size(
        "64MiB", "memory of each tenant for stored responses of /v1/responses; 0 for none", option="response_memory"
    )
    keep_alive: float = field(
        default=300.0,
        metadata={
            "help": "how long an idle model of several stays in memory: seconds, or a duration such as 90s, 5m or 1h; "
            "-1 for ever, 0 not at all. A request of Ollama's API may set it",
            "kind": str,
            "text": "5m",
        },
    )
    load_timeout: float = _setting(
        60.0, "seconds for which a request waits until its model, one of several, is loaded", float, least=0.001
    )
    max_loaded: int | None = _setting(
        None, "most models in memory at once; the idle one that was used least recently makes room", int, least=1
    )
    model_memory: int | None = _size(
        None, "memory that all loaded models may take: weights, pools and host memory (default: no limit)", least=1
    )
    fim_order: str = _setting(
        "psm", "order of a prompt that fills in the middle: psm, or spm for models trained with it, which hits more"
    )
    vllm_metrics: bool = _setting(False, "export the metrics under vLLM's names as well")
    record_text: str | None = _setting(
        None,
        "new file that gets the texts of all chat requests, for radixkv-replay lint; only its owner may read it "
        "(default: no text is written)",
    )

    def __post_init__(self) -> None:
        """Check all values, and refuse to be reachable from other machines without keys."""
        for each in fields(self):
            value, least = getattr(self, each.name), each.metadata.get("least")
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if least is None or (value is None and each.default is None):
                continue
            if not is_number or not least <= value < float("inf"):
                raise InvalidInput(f"{each.name} must be a number, at least {least:g}, got {value!r}")
        if self.port > 65535:
            raise InvalidInput(f"port must be a number from 0 (any that is free) to 65535, got {self.port}")
        if self.history not in MODES:
            raise InvalidInput(f"history must be one of {', '.join(MODES)}, not {self.history!r}")
        if self.fim_order not in ("psm", "spm"):
            raise InvalidInput(f"fim_order must be psm or spm, not {self.fim_order!r}")
        object.__setattr__(self, "keep_alive", parse_duration(self.keep_alive))
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


Settings.__doc__ = f"{Settings.__doc__}\n" + "".join(
    f"    {each.name:20}{each.metadata['help']}\n" for each in fields(Settings)
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
