"""Who asks, and which part of the cache is theirs.

Knows: API keys and namespaces. Knows no engine: a namespace is only a name here.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Hashable, Mapping
from hashlib import sha256

from starlette.datastructures import Headers

from radixkv.serve.errors import ApiError, bad_request
from radixkv.serve.settings import is_loopback

NAMESPACE_HEADER = "X-RadixKV-Namespace"
LONGEST_NAME = 256
_AUTHORITY = re.compile(r"(\[[0-9a-fA-F:.]+\]|[a-zA-Z0-9.-]+)(?::[0-9]{1,5})?")


class Auth:
    """Tells tenants by their keys; without keys there is one tenant, None, and nobody may ask from elsewhere.

    A server without keys listens to its own machine only, but a page from elsewhere that a browser shows there can send
    requests, too, and with a DNS name of its own that leads to 127.0.0.1 it can read the answers. So the names that it
    was asked by, and that it was asked from, must be this machine's.
    """

    def __init__(self, api_keys: Mapping[str, str]) -> None:
        """`api_keys` maps names to keys; digests of equal length are kept, not the keys."""
        self._digests = {name: _digest(key) for name, key in api_keys.items()}

    def tenant(self, headers: Headers) -> str | None:
        """The name of whoever sent these headers; raises ApiError 401 or, without keys, 403.

        Compares with every key, each in a time that does not depend on where they differ.
        """
        if not self._digests:
            _check_local(headers)
            return None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = _digest(key.strip() if scheme.lower() == "bearer" else "")
        found = [name for name, digest in self._digests.items() if hmac.compare_digest(given, digest)]
        if not found:
            what = "this API key is not known" if key else "send an API key: Authorization: Bearer KEY"
            raise ApiError(401, what, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return found[0]


def namespace(tenant: str | None, headers: Headers, cache_key: str | None) -> Hashable:
    """What the cache knows a request's prefixes by: the tenant's own, or one within it that the client names.

    The header goes before the body's prompt_cache_key. No name that a client sends can be another tenant's namespace.
    Raises ApiError for a name that is too long, or has bytes that mean nothing in a header.
    """
    sent = headers.get(NAMESPACE_HEADER)
    if sent and not (sent.isascii() and sent.isprintable()):
        raise bad_request(f"{NAMESPACE_HEADER} must be printable ASCII", NAMESPACE_HEADER, "invalid_value")
    name = sent or cache_key
    if name is not None and len(name) > LONGEST_NAME:
        param = NAMESPACE_HEADER if sent else "prompt_cache_key"
        raise bad_request(f"{param} is at most {LONGEST_NAME} characters long", param, "invalid_value")
    own = () if tenant is None else (tenant,)
    return (*own, name) if name else own or None


def _check_local(headers: Headers) -> None:
    """Raise ApiError 403 for a request that a page from elsewhere may have sent."""
    hosts, origins = headers.getlist("host") or [""], headers.getlist("origin")
    for name in (*hosts, *(re.sub("^https?://", "", origin) for origin in origins)):
        authority = _AUTHORITY.fullmatch(name)
        if authority is None or not is_loopback(authority[1].strip("[]").lower()):
            message = "this server has no API keys, so it answers to localhost only, and to no page from elsewhere"
            raise ApiError(403, message, code="not_local")


def _digest(key: str) -> bytes:
    return sha256(key.encode()).digest()
