"""Any server with OpenAI's HTTP API, as the target of a replay, so that other engines are measured by the same tool.

It uses `/v1/models`, `/v1/completions` (token ids) and `/v1/chat/completions` (messages), streamed.
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
from radixkv_traces.live.requests import Answer, Messages, Moment, OnPiece, PlannedRequest, TokenIds
from radixkv_traces.records import is_count

P = ParamSpec("P")
T = TypeVar("T")

MAX_CONNECTIONS = 1024
_CONNECTING = 10.0  # seconds for a server to accept a connection
_SHOWN = 300  # characters of a server's error message that are shown
_MAX_EVENT = 1 << 22  # bytes of one line of a stream


class TargetError(RadixKVError):
    """The server refused a request, closed the connection early, or sent an invalid answer."""


@dataclass(frozen=True, slots=True)
class Server:
    """The address of a server, and the longest silence that is accepted."""

    url: str
    api_key: str | None = None
    timeout: float = 600.0

    def connect(self) -> http.client.HTTPConnection:
        """Return a connection that is not yet open."""
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        return kind(str(parts.hostname), parts.port, timeout=_CONNECTING)

    def path(self, verb: str) -> str:
        """Return the path of an endpoint; the URL may end in /v1 or not."""
        base = urlsplit(self.url).path.rstrip("/")
        return f"{base.removesuffix('/v1')}/v1/{verb}"

    def headers(self) -> dict[str, str]:
        """Return the headers of every request."""
        key = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        return {"Content-Type": "application/json", "Accept": "text/event-stream, application/json", **key}


class HttpTarget:
    """Send requests to a server; each running request has a connection and a thread of its own.

    `extra` is added to every request's body. `ignore_eos` is sent so that answers have their recorded length; pass None
    for it where a server refuses it.
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
        """Return the server at a URL, with one of its models; the first one where `model` is None.

        Raises InvalidInput for an invalid URL or an unknown model, TargetError where no server answers.
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

    async def send(self, request: PlannedRequest, prompt: TokenIds | Messages, on_piece: OnPiece) -> Answer:
        """Send one request and stream its answer."""
        call = _Call(self._server)
        return await call.on(self._threads, self._stream, call, request, prompt, on_piece)

    async def moment(self, at: float) -> Moment | None:
        """Return None: a server does not report its pool."""
        return None

    async def facts(self) -> dict[str, Any]:
        """Return the URL and the model."""
        return {"url": self._server.url, "model": self._model}

    async def close(self) -> None:
        """Release the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _stream(self, call: _Call, request: PlannedRequest, prompt: TokenIds | Messages, on_piece: OnPiece) -> Answer:
        verb, said = _request_body(request, prompt)
        body = json.dumps({**self._body, **said, "max_tokens": request.output_tokens})
        try:
            response = call.send("POST", verb, body)
            if response.status != 200:
                raise TargetError(f"HTTP {response.status}: {_error_message(response.read(1 << 16))}")
            return _answer(_events(response), on_piece)
        except http.client.HTTPException as error:
            raise TargetError(f"{type(error).__name__}: {error}") from error
        finally:
            call.connection.close()


@dataclass(slots=True)
class _Call:
    """A request's connection. The socket is kept here, because http.client drops it while an answer is read."""

    server: Server
    connection: http.client.HTTPConnection = field(init=False)
    sock: socket.socket | None = None
    over: bool = False

    def __post_init__(self) -> None:
        self.connection = self.server.connect()

    async def on(self, threads: ThreadPoolExecutor, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Run `work` on another thread. Cancelling closes the connection, so that the thread ends."""
        try:
            return await asyncio.get_running_loop().run_in_executor(threads, partial(work, *args, **options))
        except asyncio.CancelledError:
            self.cancel()
            raise

    def send(self, method: str, verb: str, body: str | None = None) -> http.client.HTTPResponse:
        """Connect, unless the call was cancelled, and send; returns at the head of the answer."""
        self.connection.connect()
        self.sock = self.connection.sock
        self.sock.settimeout(self.server.timeout)
        if self.over:
            self.cancel()
        self.connection.request(method, self.server.path(verb), body, self.server.headers())
        return self.connection.getresponse()

    def cancel(self) -> None:
        """Cancel the request: its thread wakes with an error, and the server sees a closed connection."""
        self.over = True
        if self.sock is not None:
            with suppress(OSError):  # it has already ended
                self.sock.shutdown(socket.SHUT_RDWR)


def _checked(url: str, api_key: str | None, timeout: float) -> Server:
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an invalid port
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
            raise TargetError(f"{server.url}: HTTP {response.status}: {_error_message(body)}")
        return [str(model["id"]) for model in json.loads(body)["data"]]
    except (OSError, http.client.HTTPException) as error:
        raise TargetError(f"{server.url} does not answer: {error}") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise TargetError(f"{server.url}: its answer to /v1/models is not a list of models") from error
    finally:
        call.connection.close()


def _request_body(request: PlannedRequest, prompt: TokenIds | Messages) -> tuple[str, dict[str, Any]]:
    """Return the endpoint for this kind of prompt, and the fields of its body."""
    if isinstance(prompt, np.ndarray):
        return "completions", {"prompt": prompt.tolist()}
    tools = request.recorded.tools if isinstance(request.recorded, ChatRequest) else ()
    return "chat/completions", {"messages": prompt, **({"tools": list(tools)} if tools else {})}


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Return the events of a stream of server-sent events, up to its [DONE]."""
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
            raise TargetError(_error_message(data))
        yield event
    raise TargetError("the stream broke off before [DONE]")


def _answer(events: Iterator[dict[str, Any]], on_piece: OnPiece) -> Answer:
    pieces = 0
    usage: dict[str, Any] = {}
    for event in events:
        usage = _object(event.get("usage"), "usage") or usage
        choices = event.get("choices") or []
        if not isinstance(choices, list):
            raise TargetError(f"choices is a JSON {type(choices).__name__}, not a list")
        if any(_has_content(_object(choice, "a choice")) for choice in choices):
            pieces += 1
            on_piece()
    if not pieces:
        raise TargetError("the stream held no token")
    details = _object(usage.get("prompt_tokens_details"), "prompt_tokens_details")
    return Answer(
        _count(usage, "completion_tokens") or pieces, _count(usage, "prompt_tokens"), _count(details, "cached_tokens")
    )


def _object(value: Any, name: str) -> dict[str, Any]:
    """Return an object of an event, or an empty one if it is missing."""
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


def _has_content(choice: Mapping[str, Any]) -> bool:
    delta = _object(choice.get("delta"), "delta")
    return bool(
        choice.get("text")
        or delta.get("content")
        or delta.get("reasoning_content")
        or delta.get("reasoning")
        or delta.get("tool_calls")
    )


def _error_message(body: bytes) -> str:
    """Return the server's error message, in one line."""
    try:
        said = json.loads(body)
        error = said.get("error", said)
        text = error["message"] if isinstance(error, dict) and "message" in error else json.dumps(error)
    except (ValueError, AttributeError, RecursionError):
        text = body.decode("utf-8", "replace")
    return " ".join(str(text).split())[:_SHOWN] or "no message"
