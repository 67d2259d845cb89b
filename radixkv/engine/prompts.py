"""What a caller may pass as a prompt, turned into token ids or refused by name.

Knows: text, token ids and chat messages, and a tokenizer that may be missing. Knows no cache and no session.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from radixkv.engine.chat_template import rendered
from radixkv.engine.guard import Guard, Message, checked_text
from radixkv.engine.pinned_date import today
from radixkv.engine.request import TokenIds
from radixkv.errors import InvalidInput, InvalidTokens

Prompt: TypeAlias = str | Sequence[int] | npt.NDArray[np.integer[Any]] | Sequence[Message]


def encode(prompt: Prompt, tokenizer: Any | None, vocab_size: int, *, reply: bool = True) -> TokenIds:
    """Token ids int32[n] of a text, of token ids, or of chat messages.

    `reply` says that a chat prompt is to end where the assistant's turn begins.
    Raises InvalidTokens (empty, not ints, outside the vocabulary), InvalidInput (text without a tokenizer) or
    ChatError (messages that the template does not take).
    """
    if isinstance(prompt, str):
        ids: Any = _need(tokenizer, "text").encode(checked_text(prompt))
    elif is_chat(prompt):
        ids = encode_chat(prompt, tokenizer, reply=reply)
    else:
        ids = prompt
    return checked_ids(ids, vocab_size)


def is_chat(prompt: object) -> bool:
    """Whether this looks like a list of chat messages."""
    return isinstance(prompt, Sequence) and len(prompt) > 0 and all(isinstance(item, Mapping) for item in prompt)


def encode_chat(messages: Any, tokenizer: Any | None, *, reply: bool) -> list[int]:
    """Render messages through the tokenizer's chat template, as a session that begins today does, and encode them.

    Control tokens are the template's only: those that a user or a tool spells stay text. Raises ChatError if the
    template takes no such messages.
    """
    tokenizer = _need(tokenizer, "chat messages")
    if not getattr(tokenizer, "chat_template", None):
        raise InvalidInput("this tokenizer has no chat template: pass text or token ids instead of chat messages")
    guard = Guard(tokenizer)
    guarded = [guard.message(message) for message in messages]
    return guard.encode(rendered(tokenizer, guarded, today(), reply=reply))


def checked_ids(ids: Any, vocab_size: int) -> TokenIds:
    """The ids as int32[n] if each is an int in [0, vocab_size), else InvalidTokens. O(n)."""
    array = _as_array(ids)
    if array.size == 0:
        raise InvalidTokens("the prompt is empty: pass at least one token (a beginning-of-text token, say)")
    outside = (array < 0) | (array >= vocab_size)
    if outside.any():
        at = int(outside.argmax())
        raise InvalidTokens(
            f"token {array[at]} at position {at} is outside the vocabulary: allowed is 0..{vocab_size - 1}"
        )
    return np.ascontiguousarray(array, dtype=np.int32)


def check_batch(prompts: Any) -> list[Prompt]:
    """The prompts of `generate` as a list; a single text counts as one prompt.

    Raises InvalidInput for what looks like one prompt where a list of prompts is meant.
    """
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, np.ndarray) or not isinstance(prompts, Sequence):
        raise InvalidInput(f"generate takes a list of prompts, got {type(prompts).__name__}: wrap one prompt in a list")
    if any(isinstance(prompt, (int, np.integer)) for prompt in prompts):
        raise InvalidInput(
            "generate takes a list of prompts and got a bare list of token ids: for one prompt of token ids write "
            "engine.generate([ids])"
        )
    if is_chat(prompts):
        raise InvalidInput(
            "generate takes a list of prompts and got one list of chat messages: write engine.generate([messages])"
        )
    return list(prompts)


def _as_array(ids: Any) -> npt.NDArray[np.integer[Any]]:
    try:
        array = np.asarray(ids)
    except ValueError as error:
        raise InvalidTokens("a prompt of token ids must be one flat sequence of ints") from error
    if array.size == 0:
        return np.empty(0, dtype=np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidTokens(
            f"a prompt is a text, a flat sequence of int token ids or a list of chat messages, got "
            f"{type(ids).__name__} that numpy reads as {array.dtype} of shape {array.shape}"
        )
    return array


def _need(tokenizer: Any | None, what: str) -> Any:
    if tokenizer is None:
        raise InvalidInput(f"this model has no tokenizer, so it cannot read {what}: pass token ids")
    return tokenizer
