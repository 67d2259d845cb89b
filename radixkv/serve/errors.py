"""What went wrong, as an OpenAI client expects to be told.

Knows: which status and which words each of radixkv's errors gets. Knows no route.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from starlette.responses import Response

from radixkv.errors import (
    ChatError,
    EngineClosed,
    InvalidInput,
    PromptTooLong,
    RadixKVError,
    RequestCancelled,
    RequestTimedOut,
)

_log = logging.getLogger(__name__)
_PARAMETER = re.compile(r"(logit_bias|stop_token_ids|stop|n|tools)\b")
_LONGEST = 2000  # characters of a message: what is wrong may itself be long


class ApiError(Exception):
    """A request that is not answered as asked: an HTTP status, a message, which parameter, and a code to test for."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`kind` is what OpenAI calls the type of an error."""
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.kind = status, message, param, code, kind
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """What the client gets, whether as a response or as the last event of a stream."""
        message = self.message if len(self.message) <= _LONGEST else self.message[:_LONGEST] + "..."
        return {"error": {"message": message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The whole response."""
        # ASCII, so that half of a surrogate pair in what was sent cannot keep its sender from being told.
        return Response(json.dumps(self.body()), self.status, self.headers, "application/json")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A body that is not as it should be."""
    return ApiError(400, message, param=param, code=code)


@contextmanager
def about(param: str) -> Iterator[None]:
    """Raise what the engine or the template refuses as ApiError 400 that names a field.

    That is `param`, unless the message begins with the name of another.
    """
    try:
        yield
    except (InvalidInput, ChatError) as error:
        told, named = as_api_error(error), _PARAMETER.match(str(error))
        told.param, told.code = named[0] if named else param, told.code or "invalid_value"
        raise told from error


def as_api_error(error: BaseException) -> ApiError:
    """What a client is told of `error`; a fault of ours is not described to strangers."""
    match error:
        case ApiError():
            return error
        case PromptTooLong():
            return bad_request(str(error), code="context_length_exceeded")
        case InvalidInput() | ChatError():
            return bad_request(str(error))
        case RequestTimedOut():
            return ApiError(504, str(error), code="timeout", kind="timeout_error")
        case EngineClosed() | RequestCancelled():
            message = "the server is shutting down: try again soon, or elsewhere"
            return ApiError(503, message, code="shutting_down", kind="server_error", headers={"Retry-After": "5"})
    if not isinstance(error, RadixKVError):  # the engine has logged its own
        _log.error("a request failed", exc_info=error)
    return ApiError(500, "the request failed; the server's log says why", code="internal_error", kind="server_error")
