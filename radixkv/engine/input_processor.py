"""Turn the arguments of a call into a request that can run, or refuse them with an error that names the allowed values.

A prompt is a text, token ids or chat messages. Any thread may call.
"""

from __future__ import annotations

import itertools
import math
import reprlib
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from radixkv.engine.admission import Admission
from radixkv.engine.bad_words import spellings_of
from radixkv.engine.beams import BeamSearch
from radixkv.engine.chat_messages import Message
from radixkv.engine.chat_prompts import checked_text, encode_chat
from radixkv.engine.compressed import CompressedPrefix, CompressedPrefixes
from radixkv.engine.constrained import ConstrainedTokens
from radixkv.engine.namespaces import NamespaceTable
from radixkv.engine.output import MAX_UNREAD, OutputChannel
from radixkv.engine.request import (
    ONE_SAMPLE,
    SAMPLED,
    BadWords,
    Continuation,
    Replies,
    Request,
    SampledTokens,
    Samples,
    TokenIds,
    derive_seed,
)
from radixkv.engine.request_facts import NO_ORIGIN, Origin, PromptParts, Reported
from radixkv.engine.scores import NO_SCORES, PromptScores, Scores
from radixkv.engine.speculation import DraftedTokens
from radixkv.engine.text_stream import decoder
from radixkv.errors import InvalidInput, InvalidTokens, PrefixGone, PromptTooLong
from radixkv.grammar.compiler import GrammarCompiler
from radixkv.sampling.logits_processors import LogitsProcessor, read_history
from radixkv.sampling.params import SamplingParams, checked_params, suggested
from radixkv.sampling.row_scores import max_logit_rows
from radixkv.sampling.token_mask import TokenMatcher
from radixkv.settings.kinds import is_int

if TYPE_CHECKING:
    from radixkv.models.adapter import LoadedModel


Ids: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]
Prompt: TypeAlias = str | Ids | Sequence[Message]
_SPARE = 32  # tokens per stream, for a block that a fork copies, and for a partly filled one

Params = SamplingParams | Sequence[SamplingParams] | None


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """The token ids of a chat prompt, and how many of them end with the last message before the reply; 0 if unknown.

    A later turn of the conversation begins with these tokens, so models with recurrent state keep the state after them.
    After a compressed `prefix`, `ids` are the rest of the prompt.
    """

    ids: Ids
    reply_start: int = 0
    prefix: CompressedPrefix | None = None


def unbounded(params: SamplingParams, room: int) -> SamplingParams:
    """Return parameters whose replies share the rest of the context. Each reply has at least one token."""
    if params.width > 1:
        room = room // params.width - _SPARE
    return params.but(max_tokens=max(room, params.min_tokens, 1))


class InputProcessor:
    """Makes requests from prompts and parameters, for one model and one pool."""

    def __init__(
        self,
        model: LoadedModel,
        pool_tokens: int,
        seed: int,
        admission: Admission,
        namespaces: NamespaceTable,
        processors: Sequence[LogitsProcessor] = (),
        *,
        prefixes: CompressedPrefixes,
        speculates: bool = False,
        host_sampler: bool = True,
    ) -> None:
        """Process prompts for a model and a pool of `pool_tokens`; `seed` is the root of the requests' seeds.

        A request is refused if `admission` says that it would not fit into an empty pool. Requests have the numbers of
        their `namespaces`, and may follow one of `prefixes`. `processors` are the engine's custom ones. If the engine
        `speculates`, so do requests, but those that read a history which only a `host_sampler` has in each row.
        """
        self.namespaces, self.prefixes = namespaces, prefixes
        self.context_limit = min(model.max_length, pool_tokens)
        self._model = model.without_weights()
        self._pool_tokens, self._admission = pool_tokens, admission
        self._processors, self._speculates, self._host_sampler = processors, speculates, host_sampler
        self._bad_words = lru_cache(maxsize=64)(partial(spellings_of, model.codec, model.vocab_size))
        self._decode = None if model.codec is None else decoder(model.codec)
        self._seed, self._numbers = seed, itertools.count(1)
        self.default_params = suggested(model.model)
        self.grammars = GrammarCompiler(model.codec, model.vocab_size, model.stop_token_ids)

    def encode(self, prompt: Prompt, *, reply: bool = False) -> TokenIds:
        """Return the token ids of a prompt; `reply` ends chat messages where the assistant's turn begins."""
        return encode(prompt, self._model.codec, self._model.vocab_size, reply=reply)

    def after_prefix(self, prefix: CompressedPrefix, prompt: Any, number: Hashable) -> TokenIds:
        """Return the ids of a compressed prefix and of the text after it, in the namespace with this number.

        A text has no special tokens. Raises as `encode`, and PrefixGone.
        """
        if not isinstance(prefix, CompressedPrefix) or self.namespaces.number(prefix.namespace) != number:
            raise InvalidInput(f"prefix is what engine.compress returns for the same namespace, got {prefix!r:.100}")
        if self.prefixes.find(prefix.name, number) is None:
            raise PrefixGone(prefix.gone)
        if is_chat(prompt):
            raise InvalidInput("chat messages follow a compressed prefix in a chat only: engine.chat(prefix=...)")
        ids = encode(prompt, self._model.codec, self._model.vocab_size, special=False)
        return np.concatenate([prefix.ids, ids])

    def encode_after(self, prompt: Prompt, ids: TokenIds, continuation: str | Ids) -> TokenIds:
        """Return the token ids of a continuation of a prompt with these `ids`; [] if its text has no tokens.

        A text after a text is encoded together with it, and cut where the prompt's ids end. If these ids do not begin
        the whole text's, it is encoded alone, without special tokens, as after other prompts. Raises as `encode`.
        """
        tokenizer, vocab_size = self._model.codec, self._model.vocab_size
        if not isinstance(continuation, str):
            return checked_ids(continuation, vocab_size)
        if isinstance(prompt, str):
            whole = encode(prompt + continuation, tokenizer, vocab_size)
            if np.array_equal(whole[: len(ids)], ids):
                return whole[len(ids) :]
        if tokenizer is None:
            raise InvalidInput("this model has no tokenizer, so it cannot read text: pass token ids")
        return np.array(tokenizer.encode(checked_text(continuation), add_special_tokens=False), np.int32)

    def request(
        self,
        prompt: Prompt | EncodedPrompt,
        params: SamplingParams | None = None,
        *,
        namespace: Hashable = None,
        priority: int = 0,
        timeout: float | None = None,
        session: int | None = None,
        sample: bool = True,
        scores: Scores = NO_SCORES,
        origin: Origin = NO_ORIGIN,
        prefix: CompressedPrefix | None = None,
    ) -> Request:
        """Make a request; without `sample` it only computes the prompt. Raises InvalidInput and its subclasses.

        The prompt follows a compressed `prefix`, if one is given. `scores` are of params without prompt_logprobs. Waits
        until the constraint of `params` is compiled.
        """
        reply_start = 0
        if isinstance(prompt, EncodedPrompt):
            reply_start, prefix, prompt = prompt.reply_start, prompt.prefix or prefix, prompt.ids
        model, submitted = self._model, time.perf_counter()
        if timeout is not None or session is not None or not type(priority) is type(reply_start) is int:
            _check_numbers(timeout, priority, session, reply_start)
        if not isinstance(params, SamplingParams):
            params = checked_params(params, self.default_params)
        number = None if namespace is None else self.namespaces.number(namespace)
        if prefix is None:
            ids, parts = encode(prompt, model.codec, model.vocab_size), PromptParts(reply_start)
        elif params.prompt_logprobs is not None:
            raise InvalidInput("prompt_logprobs scores the whole prompt, and a compressed prefix has no logits")
        else:
            ids = self.after_prefix(prefix, prompt, number)
            parts = PromptParts(0, prefix.slots, prefix.offset, prefix.gone)
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else model.stop_token_ids)
        self._check_params(params, stop_ids)
        limit = min(model.max_length - parts.offset, self._pool_tokens)
        room = limit - len(ids)
        if room < sample:
            left_out = f", and {parts.offset} more positions in its prefix," if parts.offset else ""
            no_room = " and leaves no room for a reply" if sample else ""
            raise PromptTooLong(
                f"the prompt has {len(ids)} tokens{left_out}{no_room}: the model takes {model.max_length} tokens, the "
                f"pool holds {self._pool_tokens}",
                tokens=len(ids),
                limit=limit - sample,
            )
        max_tokens = min(params.max_tokens, room) if sample else 0
        matcher = None if params.constraint is None or not sample else self.grammars.matcher(params)
        bad_words = self._bad_words(params.bad_words)
        reads_history = bool(self._processors) and read_history(self._processors, params)
        drafts = self._speculates and params.speculate and not scores.wanted and params.prompt_logprobs is None
        if drafts and not self._host_sampler:
            drafts = not (params.adjusts_logits or self._processors)
        request = Request(
            prompt=ids,
            params=params,
            max_tokens=max_tokens,
            stop_ids=stop_ids,
            replies=replies_of(
                params,
                max_tokens,
                stop_ids,
                bad_words,
                matcher,
                reads_history=reads_history,
                prediction=self._prediction(params, limit) if drafts else None,
            ),
            seed=derive_seed(self._seed, next(self._numbers)) if params.seed is None else params.seed,
            decode=self._decode,
            namespace=number,
            priority=priority,
            channel=OutputChannel(MAX_UNREAD * params.n * params.beam_width),
            origin=origin if session is None else replace(origin, session=session),
            parts=parts if sample else PromptParts(len(ids), *parts[1:]),
            reported=Reported(submitted),
            scores=scores if params.prompt_logprobs is None else self._scores(ids, 1, params.prompt_logprobs),
            deadline=None if timeout is None else submitted + timeout,
        )
        self._admission.check_fits(request)
        return request

    def _prediction(self, params: SamplingParams, limit: int) -> Sequence[int]:
        """Return the token ids of a prediction. Raises InvalidInput if it has more than a context of `limit` tokens."""
        if not params.prediction:
            return ()
        if self._model.codec is None:
            raise InvalidInput("prediction is a text, and this model has no tokenizer to read it")
        ids: list[int] = self._model.codec.encode(params.prediction, add_special_tokens=False)
        if len(ids) > limit:
            raise InvalidInput(f"prediction has {len(ids)} tokens, and prompt and reply together at most {limit}")
        return checked_ids(ids, self._model.vocab_size).tolist() if ids else ()

    def scored(
        self, ids: TokenIds, first: int, targets: tuple[int, ...], *, namespace: Hashable, timeout: float | None
    ) -> Request:
        """Make a request that scores the tokens from position `first` on, and each of `targets` after the last one.

        It samples nothing. Raises as `request`.
        """
        scores = self._scores(ids, first, 1, targets)
        return self.request(ids, namespace=namespace, timeout=timeout, sample=False, scores=scores)

    def _scores(self, ids: TokenIds, first: int, top: int, targets: tuple[int, ...] = ()) -> PromptScores:
        vocab_size = self._model.vocab_size
        return PromptScores(
            ids, first, min(top, vocab_size), most_rows=max_logit_rows(vocab_size), last_targets=targets
        )

    def room_for_reply(self, prompt: int, prefix: CompressedPrefix | None = None) -> int:
        """Return the most tokens of a reply without a limit of its own, after a `prefix` and `prompt` tokens.

        Where not the context but the pool is the limit, a 16th of the room stays free for the part-filled blocks on the
        path to the hit. Else the hit would be cut until the longest reply fits.
        """
        limit, most = self.context_limit, self._model.max_length
        if prefix is not None:
            prompt, most = prompt + prefix.slots, most - prefix.offset
        room = min(limit, most) - prompt
        return room - room // 16 if limit < most else room

    def batch(self, prompts: str | Sequence[Prompt], params: Params, **options: Any) -> list[Request]:
        """Make a request per prompt; a single text is one, `params` is one for all or one for each.

        The options are those of `request`, for all.

        Raises as `request`, and InvalidInput for an argument that looks like one prompt in place of a list.
        """
        given: Any = [prompts] if isinstance(prompts, str) else prompts
        if isinstance(given, np.ndarray) or not isinstance(given, Sequence) or isinstance(given, bytes):
            shown = reprlib.repr(given)
            raise InvalidInput(f"generate takes a list of prompts, got {shown}: wrap one prompt in a list")
        if is_chat(given) or any(isinstance(prompt, (int, np.integer)) for prompt in given):
            name = "messages" if is_chat(given) else "ids"
            raise InvalidInput(f"generate takes a list of prompts, got one prompt: write engine.generate([{name}])")
        each_params = params if isinstance(params, Sequence) else [params] * len(given)
        if len(each_params) != len(given):
            raise InvalidInput(
                f"{len(each_params)} sampling params for {len(given)} prompts: pass one for all, or one for each"
            )
        pairs = zip(given, each_params, strict=True)
        return [self.request(prompt, each, **options) for prompt, each in pairs]

    def _check_params(self, params: SamplingParams, stop_ids: frozenset[int]) -> None:
        """Raise InvalidInput for sampling parameters that do not fit the model."""
        if params.stop and self._model.codec is None:
            raise InvalidInput("stop strings need a tokenizer, and this model has none: use stop_token_ids")
        for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            if max(ids, default=0) >= self._model.vocab_size:
                raise InvalidInput(
                    f"{name} names token {max(ids)}, this model's vocabulary is 0..{self._model.vocab_size - 1}"
                )
        if params.min_tokens and len(stop_ids) >= self._model.vocab_size:
            raise InvalidInput("every token is a stop token, so that min_tokens leaves nothing to draw")


def replies_of(
    params: SamplingParams,
    max_tokens: int,
    stop_ids: frozenset[int] = frozenset(),
    bad_words: BadWords = (),
    matcher: TokenMatcher | None = None,
    *,
    reads_history: bool = False,
    prediction: Sequence[int] | None = None,
) -> Replies:
    """Return how the streams of a request continue its prompt.

    `bad_words` are the token ids of `params.bad_words`. `matcher` constrains the first stream, and is forked for the
    others. `reads_history` means that a custom processor reads the tokens before. Streams draft tokens if there is a
    `prediction`, which may be empty. Without `max_tokens` there is one stream, which samples nothing.
    """
    if not max_tokens:
        return ONE_SAMPLE
    if params.beam_width > 1:
        return BeamSearch(params, max_tokens, stop_ids, bad_words)
    continuation: Continuation = SAMPLED
    if matcher is not None:
        continuation = ConstrainedTokens(matcher, stop_ids, bad_words)
    elif bad_words or reads_history:
        continuation = SampledTokens(bad_words, reads_history=reads_history)
    if prediction is not None:
        continuation = DraftedTokens(continuation, prediction)
    return ONE_SAMPLE if params.n == 1 and continuation is SAMPLED else Samples(params.n, continuation)


def check_seconds(name: str, value: Any) -> None:
    """Raise InvalidInput unless `value` is None or a number of seconds, finite and more than 0."""
    if value is None:
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:
        raise InvalidInput(f"{name} must be a number of seconds above 0, or None for no limit; got {value!r}")


def _check_numbers(timeout: object, priority: object, session: object, reply_start: object) -> None:
    check_seconds("timeout", timeout)
    if not is_int(priority):
        raise InvalidInput(f"priority must be an int, got {priority!r}")
    if session is not None and not is_int(session):
        raise InvalidInput(f"session is a number that the requests of a conversation share, got {session!r}")
    if not is_int(reply_start):
        raise InvalidInput(f"reply_start must be an int, a number of tokens of the prompt, got {reply_start!r}")


def encode(
    prompt: Prompt, tokenizer: Any | None, vocab_size: int, *, reply: bool = True, special: bool = True
) -> TokenIds:
    """Return the token ids, int32[n], of a text, of token ids, or of chat messages.

    With `reply` a chat prompt ends where the assistant's turn begins. Without `special` a text has no special tokens.
    Raises InvalidTokens (empty, not ints, outside the vocabulary), InvalidInput (text without a tokenizer) or
    ChatError (the template refuses the messages).
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InvalidInput("this model has no tokenizer, so it cannot read text: pass token ids")
        if not prompt.isascii():
            checked_text(prompt)
        ids: Any = tokenizer.encode(prompt, **({} if special else {"add_special_tokens": False}))
    elif is_chat(prompt):
        ids = encode_chat(prompt, tokenizer, reply=reply)
    else:
        ids = prompt
    return checked_ids(ids, vocab_size)


def is_chat(prompt: object) -> bool:
    """Return whether this looks like a list of chat messages."""
    return isinstance(prompt, Sequence) and len(prompt) > 0 and all(isinstance(item, Mapping) for item in prompt)


def checked_ids(ids: Any, vocab_size: int) -> TokenIds:
    """Return the ids as int32[n] if each is an int in [0, vocab_size); raises InvalidTokens. O(n)."""
    try:
        array = np.asarray(ids)
    except ValueError as error:
        raise InvalidTokens(_no_prompt(ids)) from error
    if array.size == 0 and array.ndim == 1:
        raise InvalidTokens("the prompt is empty: pass at least one token (a beginning-of-text token, say)")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidTokens(_no_prompt(ids))
    outside = (array < 0) | (array >= vocab_size)
    if outside.any():
        at = int(outside.argmax())
        raise InvalidTokens(
            f"token {array[at]} at position {at} is outside the vocabulary: allowed is 0..{vocab_size - 1}"
        )
    return np.ascontiguousarray(array, dtype=np.int32)


def _no_prompt(given: Any) -> str:
    """Return the error for a value that is no prompt, with what was probably meant."""
    advice = ": put the message into a list" if isinstance(given, Mapping) else ""
    if isinstance(given, Sequence) and given and all(isinstance(each, str) for each in given):
        advice = ": pass several texts to generate()"
    allowed = "a text, a flat list of int token ids or a list of chat messages"
    return f"a prompt is {allowed}; got {reprlib.repr(given)}{advice}"
