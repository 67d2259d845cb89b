"""A tokenizer's chat template, and messages rendered with it on a given day.

Knows: which template is meant, and that its clock stands still. Knows no ids, no session, and not what a reply is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from radixkv.engine.pinned_date import pinned
from radixkv.errors import ChatError


def template_source(tokenizer: Any, tools: Sequence[Any] | None = None) -> str:
    """The template's source; raises ChatError if the tokenizer has several and none for such a conversation."""
    try:
        return str(tokenizer.get_chat_template(None, tools=tools))
    except ValueError as error:
        raise ChatError(f"the model's chat template cannot be read: {error}") from error


def rendered(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    date: str,
    tools: Sequence[Any] | None = None,
    *,
    reply: bool,
) -> str:
    """The text of a conversation that began on `date`; with `reply` up to where the next reply begins.

    Raises ChatError if the template takes no such messages.
    """
    template, values = pinned(template_source(tokenizer, tools), date)
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tools=tools, chat_template=template, add_generation_prompt=reply, tokenize=False, **values
        )
    except Exception as error:  # templates raise what they like, jinja's own errors among it
        raise ChatError(f"the model's chat template refuses this conversation: {error}") from error
    return str(text)
