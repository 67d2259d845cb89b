"""Errors of HTTP requests, in OpenAI's form: each error of radixkv has a status, a message, a parameter and a code."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from starlette.responses import Response

from radixkv.errors import (
    CancelledByMonitor,
    ChatError,
    EngineClosed,
    InvalidConstraint,
    InvalidInput,
    OutOfBlocks,
    PinBudgetExceeded,
    PrefixGone,
    PromptTooLong,
    RadixKVError,
    RequestCancelled,
    RequestFailed,
    RequestTimedOut,
)

TOO_LONG = "context_length_exceeded"  # the code of a prompt that is too long
_log = logging.getLogger(__name__)
_PARAMETER = re.compile(r"(logit_bias|stop_token_ids|stop|bad_words|beam_width|n|tools|prediction|keep|method)\b")
_FIELDS = {"beam_width": "n"}  # parameters that have another name in bodies
_LONGEST = 2000  # characters of a message, which may quote a long value


class ApiError(Exception):
    """A request that failed: an HTTP status, a message, the parameter at fault, and a code for programs."""

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
        """`kind` is the `type` of OpenAI's errors."""
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.kind = status, message, param, code, kind
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """Return the JSON of a response, or of a stream's last event."""
        message = self.message if len(self.message) <= _LONGEST else self.message[:_LONGEST] + "..."
        return {"error": {"message": message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """Return the whole response."""
        # Escaped to ASCII, since a message may quote half of a surrogate pair.
        return Response(json.dumps(self.body()), self.status, self.headers, "application/json")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return an ApiError 400 for a wrong body."""
    return ApiError(400, message, param=param, code=code)


def too_many(why: str, retry_after: int, **headers: str) -> ApiError:
    """Return an ApiError 429 for a request beyond a limit, which may be sent again after some seconds."""
    headers["Retry-After"] = str(retry_after)
    message = f"{why}: try again in {retry_after} s"
    return ApiError(429, message, code="rate_limit_exceeded", kind="rate_limit_error", headers=headers)


def no_prefix() -> ApiError:
    """Return an ApiError 404 for a compressed prefix that is not there, or not for this caller."""
    message = "there is no such compressed prefix: make it, or make it again, with POST /v1/prefixes"
    return ApiError(404, message, param="prefix", code="prefix_not_found")


@contextmanager
def errors_about(param: str, constraint: str | None = None) -> Iterator[None]:
    """Convert errors of the engine or the template to ApiError 400 with a field's name.

    The field is `param`, unless the message begins with the name of another field. `constraint` is the field of the
    reply's constraint; without one, tools constrain it.
    """
    try:
        yield
    except InvalidConstraint as error:
        field = constraint if constraint is not None and not _of_tool(error) else "tools"
        reason = str(error).removeprefix(error.parameter or "")
        message = f"{field}{reason}" if reason != str(error) and not _of_tool(error) else str(error)
        raise bad_request(message, field, "invalid_value") from error
    except (InvalidInput, ChatError) as error:
        converted, named = as_api_error(error), _PARAMETER.match(str(error))
        converted.param = _FIELDS.get(named[0], named[0]) if named else param
        converted.code = converted.code or "invalid_value"
        raise converted from error


def _of_tool(error: InvalidConstraint) -> bool:
    return (error.parameter or "").startswith("tools.")


def as_api_error(error: BaseException) -> ApiError:
    """Convert any error for the client. An internal error is logged, and not described to the client."""
    match error:
        case ApiError():
            return error
        case PromptTooLong():
            return bad_request(str(error), code=TOO_LONG)
        case InvalidInput() | ChatError():
            return bad_request(str(error))
        case PrefixGone():
            return no_prefix()
        case PinBudgetExceeded() | OutOfBlocks():
            return ApiError(503, str(error), code="pool_full", kind="server_error")
        case RequestFailed() if isinstance(error.__cause__, InvalidConstraint):
            return bad_request(str(error.__cause__), code="invalid_value")
        case RequestTimedOut():
            return ApiError(504, str(error), code="timeout", kind="timeout_error")
        case CancelledByMonitor():  # the clients of both vendors would send it again
            message = "an operator of the server cancelled the request"
            return ApiError(503, message, code="cancelled", kind="server_error", headers={"x-should-retry": "false"})
        case EngineClosed() | RequestCancelled():
            message = "the server is shutting down: try again soon, or elsewhere"
            return ApiError(503, message, code="shutting_down", kind="server_error", headers={"Retry-After": "5"})
    if not isinstance(error, RadixKVError):  # the engine has logged its own
        _log.error("a request failed", exc_info=error)
    return ApiError(500, "the request failed; the server's log says why", code="internal_error", kind="server_error")
