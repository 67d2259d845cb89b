"""The engine that people use: requests, and conversations on top of them.

Knows: how a session is made, or read from a file. Everything else is `radixkv.engine.RequestEngine`'s, which must not
know this package.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from typing import Any

from radixkv.chat import saved
from radixkv.chat.history_mode import HistoryMode
from radixkv.chat.messages import Message
from radixkv.chat.session import ChatSession, Overflow
from radixkv.chat.template import ChatTemplate
from radixkv.engine import RequestEngine
from radixkv.engine.input_processor import is_chat
from radixkv.errors import InvalidInput


class Engine(RequestEngine):
    """A model, a pool of KV and a prefix cache over it, on a thread of their own.

    `load` one, then `generate`, `submit` or `chat`. Every method may be called from any thread.
    """

    def chat(
        self,
        system: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        tools: Sequence[Any] | None = None,
        namespace: Hashable = None,
        history: HistoryMode = "auto",
        overflow: Overflow = "error",
    ) -> ChatSession:
        """Begin a conversation; nothing is computed before its first message.

        `system` is the system prompt, `messages` stand behind it (examples, say), `tools` are JSON schemas as chat
        templates take them. `history` says how a new turn's ids are made: "append" puts them behind what is there,
        "template" renders everything anew around the sampled ids, as the template wants it; "auto" appends unless
        the template drops the thinking of earlier turns, or writes something that appending would lose. `overflow`
        says what happens when the context is full: "error", or "drop_oldest" turns down to half of it.
        Raises ChatError for a model without a chat template, and for "append" where something would be lost;
        InvalidInput for tools that the template does not write.
        """
        if system is not None and not isinstance(system, str):
            raise InvalidInput(
                f"the system prompt must be a text, got {type(system).__name__}: pass messages=[...] instead"
            )
        if not is_chat(messages) and messages:
            raise InvalidInput(f"messages must be a list of dicts with role and content, got {messages!r}")
        opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        model = self.model
        template = ChatTemplate(model.tokenizer, model.stop_token_ids, tools, limit=self.context_limit)
        return ChatSession(
            self, template, [*opening, *(messages or [])], namespace=namespace, history=history, overflow=overflow
        )

    def resume(self, path: str | os.PathLike[str]) -> ChatSession:
        """The conversation that `ChatSession.save` wrote to `path`.

        Its prefix is computed again unless it is still cached. Raises InvalidInput for another format, version or
        model, OSError for a file that cannot be read.
        """
        return saved.resume(self, path)
