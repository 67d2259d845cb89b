"""From what a caller passes to a request that can run, or to an error that says what is allowed.

Knows: the model's vocabulary, context and stop tokens, and the seeds of requests that bring none. Knows no thread: any
may call.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from radixkv.engine import prompts as forms
from radixkv.engine.handle import MAX_UNREAD, Outlet
from radixkv.engine.prompts import Prompt
from radixkv.engine.request import Request, TokenIds, derive_seed
from radixkv.errors import InvalidInput, PromptTooLong
from radixkv.models.sampling_params import SamplingParams, checked_params, is_int
from radixkv.models.suggested import suggested

if TYPE_CHECKING:
    from radixkv.models.adapter import LoadedModel

Params = SamplingParams | Sequence[SamplingParams] | None


class Intake:
    """Turns prompts and parameters into requests."""

    def __init__(self, model: LoadedModel, pool_tokens: int, seed: int) -> None:
        """For a model and a pool that holds `pool_tokens`; `seed` is the root of the requests' seeds."""
        self._model = model
        self._pool_tokens = pool_tokens
        self._seed = seed
        self._numbers = itertools.count(1)
        self.default_params = suggested(getattr(model, "model", None))

    @property
    def context_limit(self) -> int:
        """Tokens that prompt and reply may have together: what the model allows, or what the pool holds."""
        return min(self._model.max_length, self._pool_tokens)

    def encode(self, prompt: Prompt, *, reply: bool = False) -> TokenIds:
        """Token ids of a prompt; `reply` ends chat messages where the assistant's turn begins."""
        return forms.encode(prompt, self._model.tokenizer, self._model.vocab_size, reply=reply)

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        namespace: Hashable = None,
        priority: int = 0,
        timeout: float | None = None,
        session: int | None = None,
        sample: bool = True,
    ) -> Request:
        """A request; without `sample` it only computes the prompt. Raises InvalidInput and its kinds."""
        ids = self.encode(prompt, reply=True)
        params = checked_params(params, self.default_params)
        self._check(params)
        check_namespace(namespace)
        check_seconds("timeout", timeout)
        if not is_int(priority):
            raise InvalidInput(f"priority must be an int, got {priority!r}")
        if session is not None and not is_int(session):
            raise InvalidInput(f"session is a number that the requests of a conversation share, got {session!r}")
        request = Request(
            prompt=ids,
            params=params,
            max_tokens=min(params.max_tokens, self._room_behind(ids)) if sample else 0,
            stop_ids=_stop_ids(params, self._model.stop_token_ids),
            seed=derive_seed(self._seed, next(self._numbers)) if params.seed is None else params.seed,
            tokenizer=self._model.tokenizer,
            namespace=namespace,
            priority=priority,
            outlet=Outlet(MAX_UNREAD * params.n),
            session=session,
        )
        if timeout is not None:
            request.deadline = request.submitted + timeout
        return request

    def batch(
        self, prompts: str | Sequence[Prompt], params: Params, namespace: Hashable, timeout: float | None
    ) -> list[Request]:
        """One request a prompt; `params` is one for all or one for each. Raises InvalidInput and its kinds."""
        checked = forms.check_batch(prompts)
        pairs = zip(checked, _per_prompt(params, len(checked)), strict=True)
        return [self.request(prompt, each, namespace=namespace, timeout=timeout) for prompt, each in pairs]

    def _check(self, params: SamplingParams) -> None:
        """What only the model can tell about sampling parameters: whether they fit it."""
        if params.stop and self._model.tokenizer is None:
            raise InvalidInput("stop strings need a tokenizer, and this model has none: use stop_token_ids")
        for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            if max(ids, default=0) >= self._model.vocab_size:
                raise InvalidInput(
                    f"{name} names token {max(ids)}, this model's vocabulary is 0..{self._model.vocab_size - 1}"
                )
        if params.min_tokens and len(_stop_ids(params, self._model.stop_token_ids)) >= self._model.vocab_size:
            raise InvalidInput("every token is a stop token, so that min_tokens leaves nothing to draw")

    def _room_behind(self, ids: TokenIds) -> int:
        room = self.context_limit - len(ids)
        if room < 1:
            raise PromptTooLong(
                f"the prompt has {len(ids)} tokens and leaves no room for a reply: the model takes "
                f"{self._model.max_length} tokens, the pool holds {self._pool_tokens}"
            )
        return room


def check_namespace(namespace: object) -> None:
    """Raise InvalidInput for a namespace that cannot be told from others."""
    try:
        hash(namespace)
    except Exception as error:  # a tuple may hold what is not hashable, and a class of the caller's may raise anything
        raise InvalidInput(
            f"a namespace must be hashable (a string, say), and {type(namespace).__name__} is not: {error}"
        ) from error


def check_seconds(name: str, value: Any) -> None:
    """Raise InvalidInput unless `value` is None or a number of seconds, finite and more than 0."""
    if value is None:
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:
        raise InvalidInput(f"{name} must be a number of seconds above 0, or None for no limit; got {value!r}")


def check_flag(name: str, value: object) -> bool:
    """Raise InvalidInput unless this is True or False."""
    if not isinstance(value, bool):
        raise InvalidInput(f"{name} must be True or False, got {value!r}")
    return value


def check_sizes(num_blocks: object, block_size: object, seed: object) -> None:
    """Raise InvalidInput for a pool of no blocks, blocks of no tokens, or a seed that is no int."""
    for name, value in (("num_blocks", 1 if num_blocks is None else num_blocks), ("block_size", block_size)):
        if not is_int(value) or value < 1:
            raise InvalidInput(f"{name} must be an int, at least 1, got {value!r}")
    if not is_int(seed):
        raise InvalidInput(f"seed must be an int, got {seed!r}")


def _stop_ids(params: SamplingParams, of_model: frozenset[int]) -> frozenset[int]:
    own = frozenset(params.stop_token_ids)
    return own if params.ignore_eos else own | of_model


def _per_prompt(params: Params, count: int) -> list[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence):
        return [checked_params(params)] * count
    if len(params) != count:
        raise InvalidInput(f"{len(params)} sampling params for {count} prompts: pass one for all, or one for each")
    return list(params)
