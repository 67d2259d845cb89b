"""Serve the app to browsers on this machine through textual-serve; each page has an app process of its own.

Every local user and every web page can reach a plain port. So a request needs the token of the printed URL, or the
cookie that the first page sets, and it must name this machine as its host and come from a page of this server. The app
runs read-only and writes no files. Needs the extra `radixkv[web]`.
"""

from __future__ import annotations

import asyncio
import secrets
import shlex
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from radixkv.server_settings import is_loopback

if TYPE_CHECKING:
    from aiohttp import web

ENDINGS = (signal.SIGINT, signal.SIGTERM)
GRACE = 5.0
"""The seconds in which the apps of all pages may end."""
COMMAND = "import sys; from radixkv_monitor.cli import main; sys.exit(main())"
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; script-src 'self' 'unsafe-inline'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data:; connect-src 'self' ws://{host}; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""The headers of every reply. The policy keeps the page of textual-serve from loading a font from another server."""

Handler = Callable[[Any], Awaitable[Any]]


def serve(arguments: Sequence[str], host: str, port: int, title: str, ready: Callable[[str], None]) -> int:
    """Serve `radixkv-monitor` with these arguments until SIGINT or SIGTERM, and return the exit status of a shell.

    `ready` is called with the URL, which has the token; port 0 means any free port. Raises OSError if the port is in
    use, and ModuleNotFoundError with a remedy without the extra `radixkv[web]`.
    """
    try:
        from textual_serve import server  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("--web needs more packages: pip install 'radixkv[web]'") from error
    return asyncio.run(_serve(Pages(arguments, title), host, port, ready))


async def _serve(pages: Pages, host: str, port: int, ready: Callable[[str], None]) -> int:
    from aiohttp import web

    ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def end(number: int) -> None:
        if not ended.done():
            ended.set_result(number)

    for number in ENDINGS:
        asyncio.get_running_loop().add_signal_handler(number, end, number)
    # Without an access log, since its lines would have the token.
    runner = web.AppRunner(pages.application(), access_log=None, shutdown_timeout=1.0)
    try:
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise OSError(f"{host}, port {port}: {error.strerror}. Name another port with --port") from error
        name = f"[{host}]" if ":" in host else host
        ready(f"http://{name}:{runner.addresses[0][1]}/?token={quote(pages.token)}")
        return 128 + await ended
    finally:
        await pages.close()
        await runner.cleanup()


class Pages:
    """The web application, and the connections of its pages. `token` admits a browser; it is new for each server.

    So is the name of the `cookie`, because browsers send cookies to all ports of a host.
    """

    def __init__(self, arguments: Sequence[str], title: str) -> None:
        from textual_serve.server import Server

        self._new_server = Server
        self.token = secrets.token_urlsafe(32)
        self.cookie = f"radixkv-monitor-{secrets.token_hex(4)}"
        self._title = title
        self._command = f"exec {shlex.join((sys.executable, '-P', '-c', COMMAND, *arguments))}"
        self._server = Server(self._command, title=title)
        self._open: set[asyncio.Task[Any]] = set()

    def application(self) -> web.Application:
        """Return the application: textual-serve's pages, files and websocket, all of them guarded."""
        import aiohttp_jinja2
        import jinja2
        from aiohttp import web

        async def guard(request: web.Request, handler: Handler) -> Any:
            if reason := self._refusal(request):
                raise web.HTTPForbidden(text=f"radixkv-monitor: {reason}\n")
            return await handler(request)

        made = web.Application(middlewares=[web.middleware(guard)])
        aiohttp_jinja2.setup(made, loader=jinja2.FileSystemLoader(self._server.templates_path))
        made.add_routes(
            [
                web.get("/", self._page, name="index"),
                web.get("/ws", self._websocket, name="websocket"),
                web.get("/download/{key}", self._server.handle_download, name="download"),
                web.static("/static", self._server.statics_path, name="static"),
            ]
        )
        made.on_response_prepare.append(_add_headers)
        return made

    async def close(self) -> None:
        """End the apps of all pages, and wait for them at most `GRACE` seconds."""
        for task in self._open:
            task.cancel()
        if self._open:
            await asyncio.wait(self._open, timeout=GRACE)

    # ---- the guard

    def _refusal(self, request: web.Request) -> str:
        """Return why a request is refused; empty if it is not."""
        if not _names_this_machine(request.host):
            return "this server has the names of this machine only, such as 127.0.0.1 and localhost"
        origin = request.headers.get("Origin")
        if origin is not None and origin != f"http://{request.host}":
            return "the request comes from a page of another server"
        given = self._given_token(request)
        if not secrets.compare_digest(given.encode("utf-8", "surrogateescape"), self.token.encode()):
            return "open the URL that the command printed, with its token"
        return ""

    def _given_token(self, request: web.Request) -> str:
        """Return the token of the first page's URL, or the cookie's."""
        found = request.query.get("token") if request.path == "/" else None
        return str(request.cookies.get(self.cookie, "") if found is None else found)

    # ---- the replies

    async def _page(self, request: web.Request) -> Any:
        """Reply with the page, or first exchange the token of the URL for a cookie."""
        from aiohttp import web

        if "token" in request.query:
            reply = web.HTTPSeeOther("/")
            reply.set_cookie(self.cookie, self.token, path="/", httponly=True, samesite="Strict")
            raise reply
        # The page's links have the host by which the browser reached it; a tunnel may have another port.
        page = self._new_server(self._command, title=self._title, public_url=f"http://{request.host}")
        return await page.handle_index(request)

    async def _websocket(self, request: web.Request) -> Any:
        """Run an app as long as its page is open."""
        from aiohttp import web

        if not web.WebSocketResponse().can_prepare(request).ok:
            raise web.HTTPBadRequest(text="radixkv-monitor: this address is for websockets\n")
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            return await self._server.handle_websocket(request)
        finally:
            self._open.discard(task)


async def _add_headers(request: web.Request, reply: web.StreamResponse) -> None:
    host = request.host if _names_this_machine(request.host) else ""
    for name, value in HEADERS.items():
        reply.headers[name] = value.format(host=host)


def _names_this_machine(authority: str) -> bool:
    """Return whether a Host header names this machine, with any port or none.

    >>> [_names_this_machine(each) for each in ("localhost:8000", "[::1]", "127.0.0.1:1", "evil.test", "127.0.0.1.x:1")]
    [True, True, True, False, False]
    """
    try:
        parts = urlsplit(f"//{authority}")
        plain = parts.netloc == authority and "@" not in authority and parts.port != 0
        return plain and is_loopback(parts.hostname or "")
    except ValueError:
        return False
