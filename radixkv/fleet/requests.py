"""Translate Dynamo's requests to the engine's, and the engine's chunks to Dynamo's.

What the engine does not have is refused by its name; nothing is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from radixkv.engine import Chunk, Completion
from radixkv.errors import InvalidInput
from radixkv.sampling.params import SamplingParams, TokenLogprobs
from radixkv.serve.access import LONGEST_NAME, SALT

_SAMPLING = (
    "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p",
    "seed",
)  # fmt: skip
_STOPPING = ("max_tokens", "min_tokens", "ignore_eos", "stop")
_CONSTRAINTS = {"json": "json_schema", "regex": "regex", "grammar": "grammar", "choice": "choice"}
_OF_FRONTEND = {  # fields that the frontend itself carries out, and hints for its router
    "sampling_options": ("include_stop_str_in_output",),
    "output_options": ("skip_special_tokens", "return_tokens_as_token_ids"),
    "routing": ("expected_output_tokens", "priority_jump", "dp_rank"),
    "": (
        "model", "eos_token_ids", "mdc_sum", "annotations", "router_config_override", "agent_context", "extra_args",
        "image_cache_scope", "tracker", "request_timestamp_ms", "_HEALTH_CHECK",
    ),
}  # fmt: skip
_IDS = ("stop_token_ids", "stop_token_ids_hidden", "stop_token_ids_visible")
_GROUPS = ("stop_conditions", "sampling_options", "output_options", "routing")


@dataclass(frozen=True, slots=True)
class Call:
    """A request for the engine. `bounded` says whether it has a `max_tokens`; `session` is the client's name for it."""

    tokens: Sequence[int]
    params: SamplingParams
    bounded: bool
    namespace: str | None
    priority: int
    session: str | None


def call_of(request: Mapping[str, Any], default: SamplingParams) -> Call:
    """Translate a request of Dynamo's. Raises InvalidInput that names a field which is wrong or unknown.

    `default` has the values of absent parameters. `cache_salt` is the namespace.
    """
    rest = _Fields(request, "")
    stopping, sampling, output, routing = (_Fields(rest.take(group) or {}, group) for group in _GROUPS)
    given: dict[str, Any] = {name: _decimal(sampling.take(name)) for name in _SAMPLING}
    given |= {name: stopping.take(name) for name in _STOPPING}
    given["stop_token_ids"] = tuple(dict.fromkeys(id_ for name in _IDS for id_ in stopping.take(name) or ())) or None
    given |= {name: output.take(name) for name in ("logprobs", "prompt_logprobs")}
    guided = _Fields(sampling.take("guided_decoding") or {}, "guided_decoding")
    given |= {ours: guided.take(theirs) for theirs, ours in _CONSTRAINTS.items()}
    best_of = sampling.take("best_of")
    if best_of not in (None, given["n"] or 1):
        raise InvalidInput(f"best_of={best_of}: only n replies are computed, and n is {given['n'] or 1}")
    if given["choice"] == []:
        raise InvalidInput("choice is empty: the reply would have no constraint")
    salt = routing.take(SALT)
    if salt and len(salt) > LONGEST_NAME:
        raise InvalidInput(f"{SALT} has {len(salt)} characters: at most {LONGEST_NAME} are allowed")
    made = Call(
        tokens=rest.take("token_ids") or (),
        params=default.but(**{name: value for name, value in given.items() if value is not None}),
        bounded=given["max_tokens"] is not None,
        namespace=salt,
        priority=int(routing.take("priority") or 0),
        session=(request.get("agent_context") or {}).get("session_id"),
    )
    for each in (stopping, sampling, output, guided, routing, rest):
        each.refuse_rest()
    return made


class _Fields:
    """The fields of one part of a request that are set, each of which must be taken."""

    def __init__(self, fields: Mapping[str, Any], part: str) -> None:
        self._rest = {name: value for name, value in fields.items() if value is not None}
        self._part = part

    def take(self, name: str) -> Any:
        return self._rest.pop(name, None)

    def refuse_rest(self) -> None:
        for name, value in self._rest.items():
            if value is not False and name not in _OF_FRONTEND.get(self._part, ()):
                raise InvalidInput(f"{name} is not supported by radixkv's worker")


def _decimal(value: Any) -> Any:
    """Return a number that the frontend has rounded to 32 bits as its client wrote it: 0.1, not 0.10000000149."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def chunk_of(chunk: Chunk) -> dict[str, Any]:
    """Translate a chunk."""
    tokens = list(chunk.token_ids)
    made: dict[str, Any] = {"token_ids": tokens, "index": chunk.index}
    if chunk.logprobs is not None and tokens:
        made["log_probs"] = [chunk.logprobs.chosen]
        made["top_logprobs"] = [_top(tokens[0], chunk.logprobs)]
    if chunk.finish_reason is not None:
        made["finish_reason"] = chunk.finish_reason
    return made


def _top(token: int, logprobs: TokenLogprobs) -> list[dict[str, Any]]:
    """Return the chosen token and the most likely ones; the frontend decodes their texts."""
    pairs = [(token, logprobs.chosen), *(pair for pair in logprobs.top if pair[0] != token)]
    ranks = {id_: rank for rank, (id_, _) in enumerate(logprobs.top, 1)}
    return [{"rank": ranks.get(id_, 0), "token_id": id_, "token": None, "logprob": value} for id_, value in pairs]


def end_of(completion: Completion, prompt: Sequence[int]) -> dict[str, Any]:
    """Return the cost of a request, and the log probabilities of its prompt, for its last chunk."""
    streams = (completion, *completion.alternatives)
    output, prompt_tokens = sum(each.usage.output_tokens for each in streams), completion.usage.prompt_tokens
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output,
        "total_tokens": prompt_tokens + output,
        "prompt_tokens_details": {"cached_tokens": completion.usage.cached_tokens},
    }
    made: dict[str, Any] = {"completion_usage": usage}
    if completion.prompt_logprobs is not None:
        entries = [
            None if each is None else _prompt_entry(token, each)
            for token, each in zip(prompt, completion.prompt_logprobs, strict=True)
        ]
        made["engine_data"] = {"prompt_logprobs": entries}
    return made


def _prompt_entry(token: int, logprobs: TokenLogprobs) -> dict[str, dict[str, Any]]:
    """Return the log probabilities at one position of a prompt, by token id."""
    found = {id_: {"logprob": value, "rank": rank} for rank, (id_, value) in enumerate(logprobs.top, 1)}
    found[token] = {"logprob": logprobs.chosen, "rank": logprobs.rank or 0}
    return {str(id_): entry for id_, entry in found.items()}
