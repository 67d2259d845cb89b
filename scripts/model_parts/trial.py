"""Try one model in a real engine, against itself alone: every row of logits, and every greedy token.

Knows prompts that share prefixes, branch inside blocks and fork, and what the model says about each of them when
nothing is cached, chunked or batched. Does not know how a model was built, nor what becomes of the finding.
"""

from __future__ import annotations

import copy
import logging
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from model_parts.exact import exact
from model_parts.witness import Row, Witness
from radixkv import Engine, RadixKVError, SamplingParams
from radixkv.errors import UnsupportedModel

EXACT, LOOSE = 1e-9, 1e-4
"""Allowed error of logits in float64; and where the model itself computes in float32."""

_PADDING = 0
_NEVER = {_PADDING: -100.0}  # padding is no text: some models count no position for it
_GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logit_bias=_NEVER)
_FORKED = SamplingParams(max_tokens=6, temperature=1.0, seed=5, n=3, ignore_eos=True, logit_bias=_NEVER)


class Wrong(Exception):
    """The model was loaded, and answers something else than it does alone."""


@dataclass(frozen=True)
class Found:
    """How a model fared: "paged", or "fallback" or "refused" with the reason.

    `error` is the largest difference of any logit, `layers` what the engine says about each attention call.
    """

    result: str
    reason: str = ""
    error: float = math.nan
    layers: tuple[Any, ...] = ()
    note: str = ""


def attempt(model: Any) -> Found:
    """Load `model` into an engine and try it, as exactly as the model's own code allows.

    Raises Wrong, ArithmeticError for a model that says the same whatever it reads, or whatever the engine raises that
    it should not.
    """
    try:
        with exact():
            listens(model)
    except RuntimeError:  # it adds float64 to what it has made in float32
        return _in_float32(model)
    with exact():
        return _loaded(model, EXACT)


def _in_float32(model: Any) -> Found:
    """The trial of a model whose own forward cannot be made to compute in float64 throughout."""
    try:
        listens(model)
        note = ""
    except RuntimeError:
        listens(model.float())
        note = "tried in float32: its own forward does not run in float64"
    found = _loaded(model, LOOSE)
    return replace(found, note="; ".join(filter(None, [note, found.note])))


def _loaded(model: Any, tolerance: float) -> Found:
    """What comes of loading a model, and of asking it if it is loaded."""
    own = copy.deepcopy(model)
    options: dict[str, Any] = {
        "num_blocks": 240,
        "block_size": 4,
        "prefill_chunk": 17,
        "max_batch_tokens": 60,
        "max_sequences": 8,
    }
    try:
        with _heard() as warnings:
            engine = Engine.load(model, monitor=False, **options)
    except UnsupportedModel as reason:
        return Found("refused", str(reason))
    with engine:
        found = _tried(engine, own, tolerance)
    return replace(found, reason=_why_fallback(warnings) if found.result == "fallback" else "")


@contextmanager
def _heard() -> Iterator[list[str]]:
    """What radixkv warns of while this is open."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("radixkv").addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger("radixkv").removeHandler(handler)


def _why_fallback(warnings: list[str]) -> str:
    """The reason that loading gave; it says so in one warning."""
    return next(text for text in warnings if "by the fallback: " in text).partition("by the fallback: ")[2]


def _tried(engine: Engine, own: Any, tolerance: float) -> Found:
    """What came of an engine's answers."""
    witness = Witness(engine)
    try:
        spoken = _talk(engine)
    except RadixKVError as error:
        raise Wrong(f"the engine failed: {error!r} from {error.__cause__!r}") from error
    engine.core.cache.check()
    _check_reach(engine, witness)
    frozen = _frozen(own.config.get_text_config())
    for prompt, reply in spoken:
        if len(prompt) > frozen:
            _check_greedy(own, prompt, reply)
    rows = [row for row in witness.rows if len(row.history) > frozen]
    worst = _largest([_worst(own, rows), _among_themselves(witness.rows), _between_ways(own, spoken[0][0])])
    if not worst <= tolerance:  # NaN is wrong, too
        raise Wrong(f"logits differ by {worst:.1e}")
    result = "fallback" if engine.model.attention == "fallback" else "paged"
    return Found(result, error=worst, layers=engine.model.layers, note=_generates(own, spoken))


# ---- what is asked


def _talk(engine: Engine) -> list[tuple[list[int], list[int]]]:
    """Ask for prompts, one and several at once; (prompt, reply) of what was answered greedily.

    The first is cached. Then come at once one that leaves it inside a block, a short one, a single token, one that goes
    on behind its reply, and one that falls into three streams behind a prefix: they part inside a block, too. At last
    one that goes on to the end of the context, and the short one again with nobody beside it and nothing cached.
    """
    rng = random.Random(7)

    def text(count: int) -> list[int]:
        return [rng.randrange(3, engine.model.vocab_size) for _ in range(count)]

    stem = text(71)
    first = stem + text(6)
    spoken = _answered(engine, [first], [_GREEDY])
    beside = [stem[:59] + text(17), text(9), text(1), [*first, *spoken[0][1], *text(5)], stem[:66]]
    spoken += _answered(engine, beside, [_GREEDY, _GREEDY, _GREEDY, _GREEDY, _FORKED])[:4]
    again = _answered(engine, [first, beside[0]], [_GREEDY, _GREEDY])
    if again != spoken[:2]:
        raise Wrong("asked again, with everything cached, it answers something else")
    rest = min(engine.context_limit, 2 * len(first)) - len(first) - 2
    spoken += _answered(engine, [first + text(rest)], [replace(_GREEDY, max_tokens=2)])
    if _answered(engine, [beside[1]], [_GREEDY], namespace="another") != spoken[2:3]:
        raise Wrong("a short prompt gets another answer beside long ones than alone")
    return spoken


def _answered(
    engine: Engine, prompts: list[list[int]], params: list[SamplingParams], **options: Any
) -> list[tuple[list[int], list[int]]]:
    done = engine.generate(prompts, params, **options)
    return [(prompt, list(each.token_ids)) for prompt, each in zip(prompts, done, strict=True)]


def _check_reach(engine: Engine, witness: Witness) -> None:
    """The trial is only worth something if it met what it is about."""
    stats = engine.stats()
    met = {
        "cached tokens": stats.cache.hit_tokens >= 100,
        "copied blocks": witness.copied >= 3,
        "decodes of several sequences in one step": witness.joint_decodes >= 3,
        "decodes beside a prefill": witness.mixed_steps >= 1,
        "chunks behind others": any(0 < row.start < len(row.history) - 1 for row in witness.rows),
    }
    missed = [name for name, reached in met.items() if not reached]
    assert not missed, f"the trial had no {', '.join(missed)}"


# ---- what the model says alone


def _logits(own: Any, tokens: Sequence[int]) -> Tensor:
    """The model's own logits [tokens, vocab] of one forward without cache, as anybody would call it."""
    with torch.inference_mode():
        found: Tensor = own(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return found


def listens(own: Any) -> None:
    """Raise ArithmeticError if the model's answer hardly depends on what it was told: it would pass any trial."""
    rng = random.Random(1)
    tokens = [rng.randrange(3, own.get_input_embeddings().num_embeddings) for _ in range(30)]
    other = [*tokens[:24], tokens[24] % 50 + 4, *tokens[25:]]
    one, two = _logits(own, tokens), _logits(own, other)
    change, spread = float((one[-1] - two[-1]).abs().max()), float(one[-1].std())
    if not (spread > 1e-2 and change > 1e-3 * spread):
        raise ArithmeticError(f"its logits spread by {spread:.1e}, and change by {change:.1e} with an earlier token")


def _check_greedy(own: Any, prompt: list[int], reply: list[int]) -> None:
    """Each token of a reply is the one that the model itself finds most likely behind all before it."""
    logits = _logits(own, prompt + reply[:-1])[len(prompt) - 1 :].clone()
    logits[:, _PADDING] = -torch.inf
    expected = logits.argmax(-1).tolist()
    if expected != reply:
        raise Wrong(f"greedy tokens {reply} instead of {expected} behind a prompt of {len(prompt)}")


def _worst(own: Any, rows: Sequence[Row]) -> float:
    """The largest difference between a row and the model's own; each longest history takes a forward of its own."""
    known: dict[tuple[int, ...], Tensor] = {}
    for row in sorted(rows, key=lambda each: len(each.history), reverse=True):
        if row.history not in known:
            for end, logits in enumerate(_logits(own, row.history), 1):
                known.setdefault(row.history[:end], logits)
    worst = 0.0
    for number, row in enumerate(rows):
        expected = [known[row.history]] + ([_logits(own, row.history)[-1]] if number % 8 == 0 else [])
        worst = _largest([worst, *(float((row.logits - each[: len(row.logits)]).abs().max()) for each in expected)])
    return worst


def _largest(differences: Sequence[float]) -> float:
    """The largest of them, and NaN if there is one."""
    return max(differences, key=lambda each: (math.isnan(each), each))


def _frozen(config: Any) -> int:
    """Up to how many tokens radixkv differs from the model's own forward on purpose: see `radixkv.models.rope`."""
    rope = getattr(config, "rope_parameters", None) or {}
    return int(rope["original_max_position_embeddings"]) if rope.get("rope_type") == "longrope" else 0


def _among_themselves(rows: Sequence[Row]) -> float:
    """The largest difference between two rows that are behind the same tokens, whoever was beside them."""
    first: dict[tuple[int, ...], Tensor] = {}
    same = [(row.logits, first.setdefault(row.history, row.logits)) for row in rows]
    return _largest([float((one - other).abs().max()) for one, other in same])


def _between_ways(own: Any, tokens: Sequence[int]) -> float:
    """How far the model's logits differ with sdpa, which is what transformers takes unasked; 0.0 where it has none."""
    eager = _logits(own, tokens)
    try:
        own.set_attn_implementation("sdpa")
    except (ValueError, ImportError):
        return 0.0
    try:
        return float((_logits(own, tokens) - eager).abs().max())
    finally:
        own.set_attn_implementation("eager")


def _generates(own: Any, spoken: list[tuple[list[int], list[int]]]) -> str:
    """What is to be said about transformers' `generate`: nothing where it says the same."""
    prompt, reply = spoken[0]
    own.generation_config.eos_token_id = own.generation_config.forced_eos_token_id = None
    try:
        done = own.generate(
            torch.tensor([prompt]), max_new_tokens=len(reply), do_sample=False, suppress_tokens=[_PADDING]
        )[0, len(prompt) :].tolist()
    except Exception as error:
        return f"its own generate fails ({type(error).__name__})"
    return "" if done == reply else "its own generate differs from its own forward"
