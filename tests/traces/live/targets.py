"""Targets that answer without a model: one in this process, one over HTTP."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from radixkv.errors import PromptTooLong, RequestFailed
from radixkv_traces.live.requests import Answer, Moment


@dataclass
class FakeTarget:
    """Answers each request with as many tokens as it asks for, `pause` seconds between them."""

    pause: float = 0.0
    name: str = "fake"
    broken: frozenset[int] = frozenset()
    too_long: frozenset[int] = frozenset()
    moments: int = 0
    sent: list[int] = field(default_factory=list)
    running: set[int] = field(default_factory=set)
    ended: list[int] = field(default_factory=list)
    most: int = 0

    async def send(self, request, prompt, on_piece):
        self.sent.append(request.number)
        self.running.add(request.number)
        self.most = max(self.most, len(self.running))
        try:
            await asyncio.sleep(self.pause)
            if request.number in self.broken:
                raise RequestFailed("it broke")
            if request.number in self.too_long:
                raise PromptTooLong("it is too long")
            for _ in range(request.output_tokens):
                await asyncio.sleep(self.pause)
                on_piece()
            return Answer(request.output_tokens, len(prompt), len(prompt) // 2, 0)
        finally:
            self.running.discard(request.number)
            self.ended.append(request.number)

    async def moment(self, at):
        if not self.moments:
            return None
        self.moments -= 1
        return Moment(at, 3, 2, 10, len(self.running), 0, 100, 50)


class Replies(BaseHTTPRequestHandler):
    """Streams `max_tokens` pieces and reports cached tokens; `server.fault` chooses an error."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if self.server.fault == "no models ever":
            self.server.hanging.set()
            self.server.go_on.wait()
        models = {"object": "list", "data": [{"id": "small"}, {"id": "large"}]}
        self._whole(200 if self.server.fault != "no models" else 404, models)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append((self.path, body, self.headers.get("Authorization")))
        fault = self.server.fault
        if fault == "refused":
            return self._whole(400, {"error": {"message": "unknown field\nignore_eos"}})
        if fault == "html":
            return self._whole(502, b"<html>bad gateway</html>")
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for number in range(body["max_tokens"]):
            if fault == "hangs" and number == 1:
                self.server.hanging.set()
                self.server.go_on.wait()
            if fault == "breaks off" and number == 1:
                return None
            self._event(self._piece(body))
        if fault == "garbage":
            self.wfile.write(b"data: {no json\n\n")
        if fault == "odd event":
            odd = self.server.event
            self.wfile.write(b"data: " + (odd if isinstance(odd, str) else json.dumps(odd)).encode() + b"\n\n")
        if fault == "error in the stream":
            self._event({"error": {"message": "out of memory"}})
        if fault not in ("tells nothing", "odd event"):
            length = len(body.get("prompt") or body["messages"])
            details = {"prompt_tokens_details": {"cached_tokens": length // 2}}
            usage = {"prompt_tokens": length, "completion_tokens": body["max_tokens"], **details}
            self._event({"choices": [], "usage": usage})
        self.wfile.write(b": a comment\n\ndata: [DONE]\n\n")
        return None

    def log_message(self, *_):
        """Log nothing."""

    def _piece(self, body):
        if "messages" in body:
            return {"choices": [{"index": 0, "delta": {"content": "word "}, "finish_reason": None}]}
        return {"choices": [{"index": 0, "text": "word ", "finish_reason": None}]}

    def _event(self, event):
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.flush()

    def _whole(self, status, body):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def http_server(fault=None):
    """A server on a free local port; `url`, the received `bodies`, and the events of its faults."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Replies)
    server.daemon_threads = True
    server.fault, server.bodies = fault, []
    server.hanging, server.go_on = threading.Event(), threading.Event()
    server.handle_error = lambda *_: None  # clients that disconnect do so on purpose
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.go_on.set()
        server.shutdown()
        server.server_close()
        thread.join()
