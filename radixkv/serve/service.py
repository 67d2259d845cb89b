"""One model as the endpoints use it: the engine, conversations, metrics, and facts about the model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request

from radixkv.chat import AsyncEngine
from radixkv.chat.calls.formats import HERMES
from radixkv.chat.rendering import at_least
from radixkv.chat.thinking import CHANNEL, TAGS, THINK_START
from radixkv.engine import Completion, CompressedPrefix
from radixkv.engine.chat_prompts import template_text
from radixkv.engine.input_processor import encode
from radixkv.engine.request import TokenIds
from radixkv.errors import PromptTooLong
from radixkv.sampling.params import SamplingParams
from radixkv.serve.bodies import without_effect
from radixkv.serve.conversations import ChatPrompt, Conversations
from radixkv.serve.errors import TOO_LONG, ApiError, errors_about, no_prefix
from radixkv.serve.fields import IgnoredFields
from radixkv.serve.fim import FillInMiddle
from radixkv.serve.gate import Caller, Gate
from radixkv.serve.history import HistoryIndex
from radixkv.serve.message_schemas import template_texts
from radixkv.serve.metrics import ServerMetrics
from radixkv.serve.openai_responses.store import ResponseStore
from radixkv.serve.responses import TurnUsage
from radixkv.serve.role_order import RoleOrder
from radixkv.serve.schemas import Dialogue
from radixkv.serve.token_texts import TokenTexts
from radixkv.server_settings import Settings

_LONG = 8  # characters per token of the context, beyond which the tokens of a text are counted before it is encoded
_TAIL = 16  # maximum tokens of a thinking tag and white space after it


@dataclass(frozen=True, slots=True)
class Kept:
    """The state of a model that outlives its engine: conversations, stored responses, and numbers of sessions."""

    history: HistoryIndex
    responses: ResponseStore
    new_session: Callable[[], int]

    @classmethod
    def empty(cls, settings: Settings, new_session: Callable[[], int]) -> Kept:
        """Return the state at the start of a server with these settings."""
        return cls(HistoryIndex(settings.history_bytes), ResponseStore(settings.response_bytes), new_session)


class Service:
    """Serve one engine, which the caller closes.

    `call_format` is the format of the model's tool calls, None if it is unknown. `hidden_tags` maps ids to the tags of
    thinking, channels and tool calls that are control tokens, which decoding leaves out. `has_channels` says that the
    model may write thinking and answer as separate messages. `role_order` is the template's.
    """

    def __init__(
        self, engine: AsyncEngine, gate: Gate, name: str, names: Collection[str] = (), kept: Kept | None = None
    ) -> None:
        """Serve `engine` to the requests that pass `gate`, as `name` and the other `names`."""
        self.engine, self.gate = engine, gate
        self.settings = settings = gate.settings
        self.model_name, self._names = name, frozenset([name, *names])
        kept = kept or Kept.empty(settings, engine.client.new_session)
        self.created = int(time.time())
        tokenizer = engine.model.codec
        self.conversations = Conversations(
            tokenizer,
            engine.model.stop_token_ids,
            kept.history,
            settings.history,
            new_session=kept.new_session,
            limit=min(engine.context_limit - 1, settings.max_prompt_tokens or engine.context_limit),
            tool_format=engine.config.tool_format,
        )
        self.responses = kept.responses
        self.metrics = ServerMetrics(
            engine,
            self.model_name,
            history=lambda: self.conversations.stats,
            refused=lambda: gate.limiter.refused,
            vllm=settings.vllm_metrics,
        )
        self.token_texts, self.fim = TokenTexts(tokenizer), FillInMiddle(tokenizer, settings.fim_order)
        self.call_format = self.conversations.call_format
        self.thinking_tags = self.conversations.thinking_tags
        self.role_order = RoleOrder(self.conversations.late_system, self.conversations.user_after_results)
        calls = self.call_format or HERMES  # in which required calls are written
        shown = (*self.thinking_tags, *TAGS, *calls.tags)
        self.hidden_tags = _hidden_tags(tokenizer, shown, engine.model.stop_token_ids)
        self.has_channels = CHANNEL in template_text(tokenizer)
        self._longest_token = _longest_token(tokenizer)

    async def compiled(self, request: Request, caller: Caller, params: SamplingParams) -> object:
        """Wait until the constraint of `params` is compiled, which later raises no other error than its refusal.

        Hold the result until the request is submitted: else the constraint may have to be compiled again. Tenants take
        turns. Raises as `cancellable`; a constraint that others wait for is compiled in any case.
        """
        compiling = self.engine.client.inputs.grammars.begin(params, caller.tenant)
        if compiling is not None and not compiling.done():
            await self.gate.cancellable(request, _finished(compiling))
        return compiling

    def check_model(self, name: str) -> None:
        """Raise ApiError 404 unless this is the model that is served; llama.vim sends an empty name."""
        if name and name not in self._names:
            message = f"model {name[:100]!r} not found: this server serves {self.model_name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def prefix(self, caller: Caller, name: str) -> CompressedPrefix:
        """Return the compressed prefix of this name in the caller's namespace; raise ApiError 404."""
        client = self.engine.client
        found = client.prefixes.find(name, client.inputs.namespaces.number(caller.namespace))
        if found is None:
            raise no_prefix()
        return found

    # ---- prompts and texts

    async def chat_prompt(
        self,
        caller: Caller,
        chat: Dialogue,
        session_key: str | None = None,
        *,
        ignored: IgnoredFields,
        compares: bool = False,
        prefix: CompressedPrefix | None = None,
    ) -> ChatPrompt:
        """Return a conversation as the caller's prompt; raise ApiError 400.

        Options that the chat template does not read are added to `ignored`; a strict server refuses them.
        Conversations of one namespace with the same `session_key` are one session for the monitor. `compares`: the
        prompt is compared with earlier ones of its conversation, and later ones with it. Replies after a compressed
        `prefix` are remembered apart, as their prompts have its ids and its date.
        """
        messages, tools, namespace, date = chat.messages, chat.tools, caller.namespace, None
        if prefix is not None:
            namespace, date = (namespace, prefix.name), prefix.source.date

        def encoded() -> ChatPrompt:
            with errors_about("messages"):
                texts = template_texts(messages, tools, thinking=self.conversations.keeps_thinking)
                self.check_length(texts, len(messages))
                arguments, unread = self.conversations.arguments(chat.template_options, tools)
                for name in unread:
                    why = "has no effect: this model's chat template does not read it"
                    without_effect(name, why, None if self.settings.strict_fields else ignored)
                asked = namespace, messages, tools, session_key, arguments
                prompt = self.conversations.prompt(*asked, prefill=chat.prefill, date=date)
                return self.conversations.compared(prompt, session_key) if compares else prompt

        return await self.gate.in_background(encoded)

    async def prompt_length(self, request: Request, chat: Dialogue) -> int:
        """Return the number of tokens of a conversation, which is encoded as for a reply; raise ApiError.

        A prompt that exceeds the context is counted in pieces, since clients decide by its length how much to leave
        out.
        """
        encoding = self.chat_prompt(self.gate.caller(request), chat, ignored=request.state.ignored)
        try:
            return len((await self.gate.cancellable(request, encoding)).ids)
        except ApiError as error:
            if error.code != TOO_LONG:
                raise
        return await self.gate.cancellable(request, self.count_tokens(chat))

    async def count_tokens(self, chat: Dialogue) -> int:
        """Return about the number of tokens of a conversation that may exceed the context; raise ApiError 400.

        Its pieces are encoded one at a time, so other prompts do not wait for all of it.
        """
        with errors_about("messages"):
            options, tools = chat.template_options, chat.tools
            arguments, _ = await self.gate.in_background(lambda: self.conversations.arguments(options, tools))
            counts = self.conversations.token_counts(chat.messages, tools, arguments)
            total = 0
            while (count := await self.gate.in_background(lambda: next(counts, None))) is not None:
                total += count
        return total

    def check_length(self, texts: Iterable[str], more: int = 0) -> None:
        """Raise PromptTooLong for texts that cannot fit even as the longest tokens, without encoding them.

        `more` is the number of tokens around the texts: a template marks each message with one or more.
        """
        self._check_tokens(more - (-sum(map(len, texts)) // self._longest_token))

    def encoded(self, text: str, *, special: bool = True) -> TokenIds:
        """Return the ids of a text; raise PromptTooLong, usually before much of a long text is encoded.

        Call on the background thread. Reads `special` and raises InvalidInput as `input_processor.encode`.
        """
        self.check_text(text)
        return encode(text, self.engine.model.codec, self.engine.model.vocab_size, special=special)

    def check_text(self, text: str) -> None:
        """Raise PromptTooLong for a long text that has too many tokens; call on the background thread. O(context)."""
        model = self.engine.model
        if model.codec is not None and len(text) > _LONG * self.engine.context_limit:
            pieces = partial(model.codec.encode, add_special_tokens=False)
            self._check_tokens(at_least(text, self.engine.context_limit, model.codec, pieces))

    def _check_tokens(self, tokens: int) -> None:
        if tokens > self.engine.context_limit:
            raise PromptTooLong(
                f"the prompt has at least {tokens} tokens, and the context {self.engine.context_limit}: shorten it",
                tokens=tokens,
                limit=self.engine.context_limit - 1,  # a reply has at least one token
            )

    def opens_thinking(self, prompt: ChatPrompt) -> bool:
        """Whether a prompt ends with an open tag or inside thinking, so that its reply begins with thinking."""
        if prompt.begun is not None:
            return prompt.in_thinking
        return "".join(self.token_texts[token] for token in prompt.ids[-_TAIL:]).rstrip().endswith(THINK_START)

    def log_usage(self, log_fields: dict[str, Any], completions: Sequence[Completion]) -> None:
        """Add the token counts of a complete request to its log line."""
        spent = TurnUsage.of(completions)
        log_fields.update(prompt=spent.prompt_tokens, output=spent.output_tokens, cached=spent.cached_tokens)


async def _finished(future: Future[Any]) -> None:
    """Wait for a future that does not refer to the waiting task: it is gone once no task waits for it."""
    loop, finished = asyncio.get_running_loop(), asyncio.Event()

    def finish(_: object) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(finished.set)

    future.add_done_callback(finish)
    await finished.wait()


def _hidden_tags(tokenizer: Any | None, tags: Collection[str], stops: Collection[int]) -> dict[int, str]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {number: token.content for number, token in added.items() if token.special}
    hidden = {number: text for number, text in special.items() if any(text in tag for tag in tags)}
    return {number: tag for number, tag in hidden.items() if number not in stops}  # a stop token is no tag


def _longest_token(tokenizer: Any | None) -> int:
    """Return the number of characters of the longest token."""
    return max(map(len, tokenizer.get_vocab()), default=1) if tokenizer is not None else 1
