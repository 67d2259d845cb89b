"""The exceptions that radixkv raises on purpose.

RadixKVError
├── InvalidInput (ValueError)      an argument is out of range; the message names the allowed values
│   ├── InvalidTokens              token ids that are not ints, negative or >= 2**31; or an empty prompt
│   ├── InvalidConstraint          a schema, regex, grammar or choice cannot be compiled, or is too expensive
│   ├── PromptTooLong              longer than the model's context or than the whole pool
│   └── UnknownPolicy              there is no eviction policy of that name
├── CacheError
│   ├── OutOfBlocks                free + evictable blocks do not suffice; nothing has changed
│   │   └── OutOfStates            all rows of recurrent state are in use; nothing has changed
│   ├── PlanPending                the sequence's last plan was neither committed nor voided
│   ├── UnknownToken               a token of the sequence is not known yet, so it cannot be published
│   ├── SequenceClosed             the sequence (or pin) was closed before
│   ├── PinBudgetExceeded          pinning this would hold more of the pool than the budget allows
│   ├── PrefixHeld                 a sequence or a pin holds the prefix to be discarded; nothing has changed
│   └── PrefixGone                 a compressed prefix was released or dropped; compress its text again
├── UnsupportedModel               the model cannot be run exactly; the message says why
├── EngineError
│   ├── EngineClosed               the engine was closed before or during the call
│   ├── RequestCancelled           `.result()` of a request that was cancelled
│   │   └── CancelledByMonitor     a user of radixkv-monitor cancelled it
│   ├── RequestTimedOut            the request's own timeout ended it
│   ├── RequestFailed              an exception inside a step; `__cause__` holds it
│   ├── DeviceLost                 the device computes nothing more in this process; the engine has ended
│   └── WeightsChanged             new weights were loaded, or failed to load, while the request ran
├── ChatError
│   ├── SessionClosed              the chat session was closed before
│   ├── SessionInUse               another thread or task is in a call of the chat session
│   ├── ContextOverflow            the conversation no longer fits the model's context
│   └── UnparsedReply              a reply with a schema was cut, or refused by the caller's class
└── TelemetryError
    ├── ProtocolError              bytes of a socket or a recording are not a valid frame; the message says why
    ├── EngineNotFound             no running engine answers there
    └── UnsafeFolder               there is no folder for sockets that other users can neither read nor write
"""

from __future__ import annotations

import typing


class RadixKVError(Exception):
    """The root of every error that radixkv raises on purpose."""


class InvalidInput(RadixKVError, ValueError):
    """An argument is out of range; the message names the allowed values."""


class InvalidTokens(InvalidInput):
    """Token ids are not ints, negative or >= 2**31; or the prompt is empty."""


class InvalidConstraint(InvalidInput):
    """A JSON schema, regular expression, grammar or choice cannot be compiled, or is too expensive.

    `parameter` is the sampling parameter, and `place` a JSON pointer into a schema, None where it is unknown.
    """

    def __init__(self, message: str, *, parameter: str | None = None, place: str | None = None) -> None:
        """Store the place for programs."""
        super().__init__(message)
        self.parameter, self.place = parameter, place


class PromptTooLong(InvalidInput):
    """The prompt is longer than the model's context or than the whole pool.

    `tokens` is its length, or a lower bound of it, and `limit` the longest prompt; both are None if pins or several
    streams limit it.
    """

    def __init__(self, message: str, *, tokens: int | None = None, limit: int | None = None) -> None:
        """Store the numbers for programs."""
        super().__init__(message)
        self.tokens, self.limit = tokens, limit


class UnknownPolicy(InvalidInput):
    """There is no eviction policy of that name."""


class CacheError(RadixKVError):
    """The prefix cache refused a call; its state is unchanged."""


class OutOfBlocks(CacheError):
    """Free and evictable blocks together do not suffice. Nothing has changed."""


class OutOfStates(OutOfBlocks):
    """All rows of recurrent state are in use. Nothing has changed."""


class PlanPending(CacheError):
    """The sequence's last plan was neither committed nor voided."""


class UnknownToken(CacheError):
    """A token of the sequence is not known yet, so it cannot be published; or no token is unknown."""


class SequenceClosed(CacheError):
    """The sequence or pin was closed before."""


class PinBudgetExceeded(CacheError):
    """Pinning this would hold more of the pool than the pin budget allows."""


class PrefixHeld(CacheError):
    """A sequence or a pin holds the prefix to be discarded. Nothing has changed."""


class PrefixGone(CacheError):
    """A compressed prefix was released or dropped. The message says how to compress its text again."""


class UnsupportedModel(RadixKVError):
    """The model cannot be run exactly; the message says why."""


class EngineError(RadixKVError):
    """A request could not be served."""


class EngineClosed(EngineError):
    """The engine was closed before or during the call."""


class RequestCancelled(EngineError):
    """The request was cancelled before it finished."""


class CancelledByMonitor(RequestCancelled):
    """A user of radixkv-monitor cancelled the request. Do not send it again without that user's consent."""


class RequestTimedOut(EngineError):
    """The request did not finish within the timeout that it was submitted with."""


class RequestFailed(EngineError):
    """An exception inside a step ended the request; `__cause__` holds it."""


class DeviceLost(EngineError):
    """The device computes nothing more in this process: the engine has ended. Restart the process."""


class WeightsChanged(EngineError):
    """New weights were loaded while a request ran or a run moved, or failed to load: see `Engine.reload_weights`."""


class ChatError(RadixKVError):
    """A chat session refused a call; its history is unchanged."""


class SessionClosed(ChatError):
    """The chat session was closed before."""


class SessionInUse(ChatError):
    """Another thread or task is in a call of the chat session, or reads its stream."""


class ContextOverflow(ChatError):
    """The conversation no longer fits the model's context."""


class UnparsedReply(ChatError):
    """A reply that a schema constrains was cut by `max_tokens` or a stop string, or the caller's class refuses it.

    `reply` is the `radixkv.chat.Reply` so far; its turn is not recorded. `__cause__` is the error of the class.
    """

    def __init__(self, message: str, reply: typing.Any) -> None:
        """Store the reply."""
        super().__init__(message)
        self.reply = reply


class TelemetryError(RadixKVError):
    """An engine cannot be watched; the engine itself goes on."""


class ProtocolError(TelemetryError):
    """Bytes of a socket or of a recording are not a valid frame; the message says why."""


class EngineNotFound(TelemetryError):
    """No running engine answers there."""


class UnsafeFolder(TelemetryError):
    """There is no folder for sockets that other users can neither read nor write."""
