"""Add conversations to the request engine: `Engine.chat` and `Engine.resume`.

Everything else belongs to `radixkv.engine.RequestEngine`, which must not import this package.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

from radixkv.chat import saved
from radixkv.chat.history_mode import HistoryMode
from radixkv.chat.messages import Message
from radixkv.chat.saved import Overflow, SessionState
from radixkv.chat.session import ChatSession
from radixkv.chat.template import ChatTemplate
from radixkv.engine import CompressedPrefix, RequestEngine, Run
from radixkv.engine.chat_messages import check_messages
from radixkv.engine.chat_prompts import template_text
from radixkv.engine.engine import explained_methods
from radixkv.engine.input_processor import is_chat
from radixkv.errors import EngineError, InvalidInput

_log = logging.getLogger(__name__)


@explained_methods
class Engine(RequestEngine):
    """Make an engine with `Engine.load("tiny")`: a model, a KV pool and its prefix cache, owned by one thread.

    Then call `generate`, `submit` or `chat`. Every method may be called from any thread. A context manager: `close`
    ends running requests and frees the pool. `config` has its settings. `client` posts calls to the engine's thread
    without waiting.
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
        prefix: CompressedPrefix | None = None,
    ) -> ChatSession:
        """Begin a conversation; nothing is computed before its first message.

        `system` is the system prompt, `messages` follow it (for example few-shot examples), and `tools` are JSON
        schemas in the form that chat templates take. If the template does not write tools, the system prompt does.
        `history` selects how the ids of a new turn are made: "append" adds them after the present ids; "template"
        renders the whole history again around the sampled ids; "auto" appends unless the template drops the thinking of
        earlier turns, or appending would lose text that it writes.
        `overflow` selects the behaviour when the context is full: "error", or "drop_oldest", which drops the oldest
        turns until half of the context is left.
        `prefix` is a compressed prefix of a session, with which the conversation begins.
        Raises ChatError for a model without a chat template, and for "append" if text would be lost; EngineClosed.
        """
        self.client.thread.post(lambda: None, begins=True)  # raises EngineClosed now, not at the first message
        if system is not None and not isinstance(system, str):
            raise InvalidInput(f"the system prompt must be a text, got {system!r:.100}: pass messages=[...] instead")
        if not is_chat(messages) and messages:
            raise InvalidInput(f"messages must be a list of dicts with role and content, got {messages!r}")
        if prefix is not None:
            if getattr(prefix, "source", None) is None or any(given is not None for given in (system, messages, tools)):
                raise InvalidInput("a chat begins with a prefix of a chat session, and no other messages or tools")
            options: dict[str, Any] = {"namespace": namespace, "history": history, "overflow": overflow}
            begun: SessionState = replace(prefix.source, prefix=prefix, **options)
            return ChatSession(self, self._template(begun.tools, begun.date), begun)
        check_messages(messages or (), template_text(self.model.codec))
        opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        opening += messages or []
        template = self._template(tools)
        state = SessionState(template.tools, template.date, namespace, history, overflow, opening)
        return ChatSession(self, template, state)

    def resume(self, path: str | os.PathLike[str], *, namespace: Hashable = None) -> ChatSession:
        """Return the conversation that `ChatSession.save` wrote to `path`; it continues in `namespace`.

        Its prefix is computed again unless it is still cached, or was saved with its KV. Raises InvalidInput, with the
        reason, for a file that is damaged, cannot be read or belongs to another model or chat template, and for a
        conversation of a namespace if none is given.
        """
        model = self.model
        self.client.inputs.namespaces.number(namespace)  # an unusable one is refused now
        state = saved.read(path, model.name, model.vocab_size, namespace)
        if state.prefix is not None:
            text, method, keep = state.prefix
            state = replace(state, prefix=self.client.prefixes.plan(text, method, keep, namespace, None))
        with saved.damaged(path):
            session = ChatSession(self, self._template(state.tools, state.date), state)
        try:
            run = Run.read(saved.kv_path(path))
            if list(run.tokens) != list(state.token_ids[: len(run.tokens)]):
                raise InvalidInput("it belongs to another conversation")
            self.import_run(run, namespace)
        except FileNotFoundError:
            pass  # it was saved without its KV
        except (InvalidInput, EngineError, OSError) as error:
            _log.warning("%s is computed again, because its KV cannot be used: %s", path, error)
        return session

    def _template(self, tools: Sequence[Any] | None, date: str | None = None) -> ChatTemplate:
        model, limit, form = self.model, self.context_limit, self.config.tool_format
        return ChatTemplate(model.codec, model.stop_token_ids, tools, date, limit, tool_format=form)
