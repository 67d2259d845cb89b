"""Access control: API keys, cache namespaces, and limits on concurrent streams and on bodies."""

from __future__ import annotations

import asyncio
import hmac
import re
from collections import Counter
from collections.abc import AsyncGenerator, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import sha256

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request

from radixkv.serve.errors import ApiError, bad_request, too_many
from radixkv.server_settings import HOST, ORIGIN, Settings, is_loopback
from radixkv.sizing.kv_size import size_text

KEY_HEADER = "x-api-key"
NAMESPACE_HEADER = "X-RadixKV-Namespace"
SALT = "cache_salt"  # the field of a body that names the namespace too, as in vLLM
LONGEST_NAME = 256
_AUTHORITY = re.compile(rf"({HOST.pattern})(?::[0-9]{{1,5}})?")


class Auth:
    """Identify tenants by their API keys. Without keys there is one tenant, None."""

    def __init__(self, api_keys: Mapping[str, str]) -> None:
        """Store digests of equal length of `api_keys`, which maps tenants to keys."""
        self._digests = {name: _digest(key) for name, key in api_keys.items()}

    def tenant(self, headers: Headers) -> str | None:
        """Return the tenant of a request with these headers; raise ApiError 401.

        A key is in `Authorization: Bearer KEY`, or in `X-Api-Key` as Anthropic's clients send it. Compares with every
        key in constant time.
        """
        if not self._digests:
            return None
        key = _bearer(headers) or headers.get(KEY_HEADER, "")
        given = _digest(key)
        found = [name for name, digest in self._digests.items() if hmac.compare_digest(given, digest)]
        if not found:
            message = "this API key is not known" if key else "send an API key: Authorization: Bearer KEY, or X-Api-Key"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return found[0]


def check_local(settings: Settings, headers: Headers) -> None:
    """Raise ApiError 403 for a request that a foreign web page may have sent; for servers without keys.

    A server without keys listens on loopback only. Still, a foreign page in a local browser can send requests, and can
    read the responses if its own DNS name, which is then in `Host`, resolves to 127.0.0.1 (DNS rebinding). So `Host`
    and `Origin` must name this machine, with any port, or be allowed. Pages of an allowed host can read all responses
    once its DNS entry is this machine: allow only names whose entries are yours. Hosts are compared without case and a
    dot at the end, origins exactly. A page of an allowed host that sends an `Origin` needs both options.
    """
    for host in headers.getlist("host") or [""]:
        name = _host(host)
        if not is_loopback(name.strip("[]")) and name not in map(_host, settings.allowed_hosts):
            raise _not_local("--allowed-host", name)
    for origin in headers.getlist("origin"):
        page = _host(re.sub("^https?://", "", origin)).strip("[]")
        if not is_loopback(page) and origin not in settings.allowed_origins:
            raise _not_local("--allowed-origin", origin if ORIGIN.fullmatch(origin) else "")


def namespace(tenant: str | None, headers: Headers, salt: str | None = None) -> Hashable:
    """Return the cache namespace of a request: the tenant's own, or one within it that the header or `salt` names.

    Tenants and these names are all that isolates cached prefixes. No name gives access to another tenant's namespace.
    Raises ApiError for a name that is too long or not printable ASCII, and for two different names.
    """
    named = headers.get(NAMESPACE_HEADER)
    for field, each in ((NAMESPACE_HEADER, named), (SALT, salt)):
        if each and not (each.isascii() and each.isprintable()):
            raise bad_request(f"{field} must be printable ASCII", field, "invalid_value")
        if each and len(each) > LONGEST_NAME:
            raise bad_request(f"{field} is at most {LONGEST_NAME} characters long", field, "invalid_value")
    if named and salt and named != salt:
        raise bad_request(f"{SALT} differs from the header {NAMESPACE_HEADER}: send one of them", SALT, "invalid_value")
    name = named or salt
    own = () if tenant is None else tenant_namespace(tenant)
    return (*own, name) if name else own or None


def tenant_namespace(tenant: str) -> tuple[str]:
    """Return the namespace of a tenant; those within it begin with it, so they take turns as one."""
    return (tenant,)


def _bearer(headers: Headers) -> str:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _host(authority: str) -> str:
    """Return the host of an authority in lower case; an empty text for a wrong authority."""
    found = _AUTHORITY.fullmatch(authority)
    return found[1].lower().removesuffix(".") if found else ""


def _not_local(option: str, value: str) -> ApiError:
    message = "this server has no API keys, so it answers to localhost only, and to no page from elsewhere"
    hint = f"; to allow this, start the server with {option} {value}" if value else ""
    return ApiError(403, message + hint, code="not_local")


def _digest(key: str) -> bytes:
    return sha256(key.encode()).digest()


_LINGER = 1.0  # seconds for which the rest of an oversized body is read


class StreamLimiter:
    """Count the concurrent streams, and refuse requests beyond the limits. For one event loop."""

    def __init__(self, settings: Settings) -> None:
        """Start with no streams."""
        self._most, self._most_per_key = settings.max_streams, settings.streams_per_key
        self._retry_after = settings.retry_after
        self._streams: Counter[str | None] = Counter()
        self.refused = 0

    @property
    def streams(self) -> int:
        """The number of current streams."""
        return self._streams.total()

    @contextmanager
    def admit(self, tenant: str | None) -> Iterator[StreamLease]:
        """Count one stream while the block runs; raise ApiError 429 beyond the limits."""
        place = StreamLease(self, tenant)
        place.resize(1)
        try:
            yield place
        finally:
            self._streams[tenant] -= place.streams

    def count(self, tenant: str | None, streams: int, more: int) -> None:
        """Count `more` streams of a request that will have `streams`; raise as `StreamLease.resize`."""
        if streams > min(self._most, self._most_per_key or self._most):
            message = f"{streams} streams at once are more than this server takes: lower n, or send fewer prompts"
            raise bad_request(message, "n", "invalid_value")
        if self.streams + more > self._most:
            self._refuse("the server is busy")
        if self._most_per_key is not None and self._streams[tenant] + more > self._most_per_key:
            self._refuse("too many requests of this API key are being answered")
        self._streams[tenant] += more

    def _refuse(self, why: str) -> None:
        self.refused += 1
        raise too_many(why, self._retry_after)


class StreamLease:
    """The streams that one request occupies."""

    def __init__(self, limiter: StreamLimiter, tenant: str | None) -> None:
        """Start with no streams."""
        self._limiter, self._tenant = limiter, tenant
        self.streams = 0

    def resize(self, streams: int) -> None:
        """Occupy `streams` from now on; raise ApiError 429, or 400 for a number that can never be admitted."""
        self._limiter.count(self._tenant, streams, streams - self.streams)
        self.streams = streams


async def read_body(request: Request, settings: Settings) -> bytes:
    """Read a request's body; raise ApiError 415 (compressed), 413 (too large) or 408 (too slow)."""
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        message = "this server takes no compressed bodies: send it without Content-Encoding"
        raise ApiError(415, message, param="Content-Encoding", code="unsupported_media_type")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > settings.max_body:
        if "expect" not in request.headers:  # with Expect, the client has not sent the body yet
            await _drop(request.stream())
        raise _too_large(settings)
    try:
        async with asyncio.timeout(settings.body_timeout):
            return await _received(request, settings)
    except TimeoutError as error:
        raise ApiError(408, f"the body did not arrive within {settings.body_timeout:g} s", code="timeout") from error
    except ClientDisconnect as error:
        raise ApiError(400, "the client left before its body had arrived", code="client_disconnected") from error


async def _received(request: Request, settings: Settings) -> bytes:
    body = bytearray()
    parts = request.stream()
    async for part in parts:
        body += part
        if len(body) > settings.max_body:
            await _drop(parts)
            raise _too_large(settings)
    return bytes(body)


async def _drop(parts: AsyncGenerator[bytes, None]) -> None:
    """Discard the rest of a body for a while: a client that is still sending would see a reset, and no response."""
    with suppress(TimeoutError, ClientDisconnect):
        async with asyncio.timeout(_LINGER):
            async for _ in parts:
                pass


def _too_large(settings: Settings) -> ApiError:
    message = f"the body is larger than {size_text(settings.max_body)}, the most that this server takes"
    return ApiError(413, message, code="body_too_large", headers={"Connection": "close"})
