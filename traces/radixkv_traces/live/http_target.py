"""Any server that speaks OpenAI's HTTP, asked by a replay, so that others are measured by the same tool.

Knows `/v1/models`, `/v1/completions` (token ids) and `/v1/chat/completions` (messages), streamed. Knows no engine.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ParamSpec, TypeVar
from urllib.parse import urlsplit

import numpy as np

from radixkv.errors import InvalidInput, RadixKVError
from radixkv_traces.chats import ChatRequest
from radixkv_traces.live.requests import Answer, Ask, Messages, Moment, Seen, TokenIds
from radixkv_traces.records import is_count

P = ParamSpec("P")
T = TypeVar("T")

MAX_CONNECTIONS = 1024
_CONNECTING = 10.0  # seconds until a server must have taken a connection
_SHOWN = 300  # characters of a server's complaint that are shown
_MAX_EVENT = 1 << 22  # bytes of one line of a stream


class TargetError(RadixKVError):
    """The server refused, broke off, or said what is no answer; the message says which."""


@dataclass(frozen=True, slots=True)
class Server:
    """Where a server is, and how long it may be silent."""

    url: str
    api_key: str | None = None
    timeout: float = 600.0

    def connect(self) -> http.client.HTTPConnection:
        """A connection that is not yet open."""
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        return kind(str(parts.hostname), parts.port, timeout=_CONNECTING)

    def path(self, verb: str) -> str:
        """The path of a verb; the URL may end in /v1 or not."""
        base = urlsplit(self.url).path.rstrip("/")
        return f"{base.removesuffix('/v1')}/v1/{verb}"

    def headers(self) -> dict[str, str]:
        """What every request carries."""
        key = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        return {"Content-Type": "application/json", "Accept": "text/event-stream, application/json", **key}


class HttpTarget:
    """Asks a server; each running request has a connection and a thread of its own.

    `extra` goes into every request's body: `ignore_eos` is there unless it is taken out by None, since answers are to
    be as long as recorded; a server that does not know it may refuse it.
    """

    def __init__(self, server: Server, model: str, *, extra: Mapping[str, Any] | None = None) -> None:
        self._server = server
        self._model = model
        body = {"model": model, "stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
        body |= {"ignore_eos": True} | dict(extra or {})
        self._body = {name: value for name, value in body.items() if value is not None}
        self._threads = ThreadPoolExecutor(MAX_CONNECTIONS, "radixkv-replay")
        self.name = server.url

    @classmethod
    async def at(
        cls,
        url: str,
        model: str | None = None,
        *,
        api_key: str | None = None,
        extra: Mapping[str, Any] | None = None,
        timeout: float = 600.0,
    ) -> HttpTarget:
        """The server at a URL, asked which models it has; its first where `model` is None.

        Raises InvalidInput for what is no URL or no model of its, TargetError where nothing answers.
        """
        server = _checked(url, api_key, timeout)
        call = _Call(server)
        with ThreadPoolExecutor(1, "radixkv-replay") as thread:
            models = await call.on(thread, _models, server, call)
        if model is None and not models:
            raise InvalidInput(f"{url} names no model: say which with --model")
        if model is not None and models and model not in models:
            raise InvalidInput(f"{url} has no model {model!r}: it has {', '.join(models)}")
        return cls(server, model or models[0], extra=extra)

    async def ask(self, ask: Ask, prompt: TokenIds | Messages, seen: Seen) -> Answer:
        """Stream one request."""
        call = _Call(self._server)
        return await call.on(self._threads, self._stream, call, ask, prompt, seen)

    async def moment(self, at: float) -> Moment | None:
        """Nothing: a server does not tell."""
        return None

    async def facts(self) -> dict[str, Any]:
        """What was asked."""
        return {"url": self._server.url, "model": self._model}

    async def close(self) -> None:
        """Let the threads go."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _stream(self, call: _Call, ask: Ask, prompt: TokenIds | Messages, seen: Seen) -> Answer:
        verb, said = _said(ask, prompt)
        body = json.dumps({**self._body, **said, "max_tokens": ask.output_tokens})
        try:
            response = call.send("POST", verb, body)
            if response.status != 200:
                raise TargetError(f"HTTP {response.status}: {_complaint(response.read(1 << 16))}")
            return _answer(_events(response), seen)
        except http.client.HTTPException as error:
            raise TargetError(f"{type(error).__name__}: {error}") from error
        finally:
            call.connection.close()


@dataclass(slots=True)
class _Call:
    """A request's connection. Its socket is kept apart: http.client forgets it while an answer is read."""

    server: Server
    connection: http.client.HTTPConnection = field(init=False)
    sock: socket.socket | None = None
    over: bool = False

    def __post_init__(self) -> None:
        self.connection = self.server.connect()

    async def on(self, threads: ThreadPoolExecutor, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """What `work` returns on another thread; who is cancelled meanwhile hangs up, so that the thread ends."""
        try:
            return await asyncio.get_running_loop().run_in_executor(threads, partial(work, *args, **options))
        except asyncio.CancelledError:
            self.hang_up()
            raise

    def send(self, method: str, verb: str, body: str | None = None) -> http.client.HTTPResponse:
        """Reach the server, unless nobody waits for it any more, and send; returns with the answer's head."""
        self.connection.connect()
        self.sock = self.connection.sock
        self.sock.settimeout(self.server.timeout)
        if self.over:
            self.hang_up()
        self.connection.request(method, self.server.path(verb), body, self.server.headers())
        return self.connection.getresponse()

    def hang_up(self) -> None:
        """End a request that nobody waits for: its thread wakes with an error, and the server learns of it."""
        self.over = True
        if self.sock is not None:
            with suppress(OSError):  # it has ended by itself
                self.sock.shutdown(socket.SHUT_RDWR)


def _checked(url: str, api_key: str | None, timeout: float) -> Server:
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of the port
        known = False
    if not known:
        raise InvalidInput(f"target {url!r}: allowed is a URL such as http://127.0.0.1:8000")
    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key):
        raise InvalidInput("the API key has characters that no HTTP header can have (a line's end, perhaps), or none")
    return Server(url, api_key, timeout)


def _models(server: Server, call: _Call) -> list[str]:
    try:
        response = call.send("GET", "models")
        body = response.read(1 << 22)
        if response.status == 404:
            return []
        if response.status != 200:
            raise TargetError(f"{server.url}: HTTP {response.status}: {_complaint(body)}")
        return [str(model["id"]) for model in json.loads(body)["data"]]
    except (OSError, http.client.HTTPException) as error:
        raise TargetError(f"{server.url} does not answer: {error}") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise TargetError(f"{server.url}: what it answers to /v1/models is no list of models") from error
    finally:
        call.connection.close()


def _said(ask: Ask, prompt: TokenIds | Messages) -> tuple[str, dict[str, Any]]:
    """The verb that takes this kind of prompt, and how it takes it."""
    if isinstance(prompt, np.ndarray):
        return "completions", {"prompt": prompt.tolist()}
    tools = ask.request.tools if isinstance(ask.request, ChatRequest) else ()
    return "chat/completions", {"messages": prompt, **({"tools": list(tools)} if tools else {})}


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """What a stream of server-sent events says, to its [DONE]."""
    while line := response.readline(_MAX_EVENT):
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        try:
            event = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise TargetError(f"no JSON in the stream: {data[:_SHOWN]!r}") from error
        if not isinstance(event, dict) or event.get("error"):
            raise TargetError(_complaint(data))
        yield event
    raise TargetError("the stream broke off before [DONE]")


def _answer(events: Iterator[dict[str, Any]], seen: Seen) -> Answer:
    pieces = 0
    usage: dict[str, Any] = {}
    for event in events:
        usage = _object(event.get("usage"), "usage") or usage
        choices = event.get("choices") or []
        if not isinstance(choices, list):
            raise TargetError(f"choices is a JSON {type(choices).__name__}, not a list")
        if any(_says_something(_object(choice, "a choice")) for choice in choices):
            pieces += 1
            seen()
    if not pieces:
        raise TargetError("the stream held no token")
    details = _object(usage.get("prompt_tokens_details"), "prompt_tokens_details")
    return Answer(
        _count(usage, "completion_tokens") or pieces,
        _count(usage, "prompt_tokens"),
        _count(details, "cached_tokens"),
    )


def _object(value: Any, name: str) -> dict[str, Any]:
    """An object of an event, or an empty one where there is none."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise TargetError(f"{name} is a JSON {type(value).__name__}, not an object")
    return value


def _count(fields: Mapping[str, Any], name: str) -> int | None:
    value = fields.get(name)
    if value is not None and not is_count(value):
        raise TargetError(f"{name}: {str(value)[:_SHOWN]!r} is not an int >= 0")
    return value


def _says_something(choice: Mapping[str, Any]) -> bool:
    delta = _object(choice.get("delta"), "delta")
    return bool(
        choice.get("text")
        or delta.get("content")
        or delta.get("reasoning_content")
        or delta.get("reasoning")
        or delta.get("tool_calls")
    )


def _complaint(body: bytes) -> str:
    """What a server says is wrong, in one line."""
    try:
        said = json.loads(body)
        error = said.get("error", said)
        text = error["message"] if isinstance(error, dict) and "message" in error else json.dumps(error)
    except (ValueError, AttributeError, RecursionError):
        text = body.decode("utf-8", "replace")
    return " ".join(str(text).split())[:_SHOWN] or "no message"
