"""Compare one model in a real engine with its own forward: every row of logits, and every greedy token.

The prompts share prefixes, branch inside blocks and fork. The model's own forward caches, chunks and batches nothing.
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
"""Allowed error of logits in float64, and for models that compute in float32 themselves."""

_PADDING = 0
_NEVER = {_PADDING: -100.0}  # padding is not text: some models count no position for it
_GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logit_bias=_NEVER)
_FORKED = SamplingParams(max_tokens=6, temperature=1.0, seed=5, n=3, ignore_eos=True, logit_bias=_NEVER)


class Wrong(Exception):
    """The model was loaded, and its answers differ from its own."""


@dataclass(frozen=True)
class Found:
    """The result of a trial: "paged", or "fallback" or "refused" with the reason.

    `error` is the largest difference of any logit, `layers` the engine's record of each attention call, and `stateful`
    the number of layers with recurrent state.
    """

    result: str
    reason: str = ""
    error: float = math.nan
    layers: tuple[Any, ...] = ()
    stateful: int = 0
    note: str = ""


def attempt(model: Any) -> Found:
    """Load `model` into an engine and try it, as exactly as the model's own code allows.

    Raises Wrong, ArithmeticError for a model whose logits do not depend on its input, and unexpected engine errors.
    """
    try:
        with exact():
            check_dependence(model)
    except RuntimeError:  # it adds float64 to float32 results of its own
        return _in_float32(model)
    except ValueError:  # its forward needs more than tokens, for which it is to be refused
        pass
    with exact():
        return _loaded(model, EXACT)


def _in_float32(model: Any) -> Found:
    """Try a model whose own forward cannot compute in float64 throughout."""
    try:
        check_dependence(model)
        note = ""
    except RuntimeError:
        check_dependence(model.float())
        note = "tried in float32: its own forward does not run in float64"
    found = _loaded(model, LOOSE)
    return replace(found, note="; ".join(filter(None, [note, found.note])))


def _loaded(model: Any, tolerance: float) -> Found:
    """Load a model, and try it if it loads."""
    own = copy.deepcopy(model)
    options: dict[str, Any] = {
        "num_blocks": 240,
        "block_size": 4,
        "prefill_chunk": 17,
        "max_batch_tokens": 60,
        "max_sequences": 8,
    }
    try:
        with _collected() as warnings:
            engine = Engine.load(model, monitor=False, **options)
    except UnsupportedModel as reason:
        return Found("refused", str(reason))
    with engine:
        found = _tried(engine, own, tolerance)
    return replace(found, reason=_why_fallback(warnings) if found.result == "fallback" else "")


@contextmanager
def _collected() -> Iterator[list[str]]:
    """Collect radixkv's warnings while this is open."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("radixkv").addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger("radixkv").removeHandler(handler)


def _why_fallback(warnings: list[str]) -> str:
    """Return the reason that loading gave in its warning."""
    return next(text for text in warnings if "by the fallback: " in text).partition("by the fallback: ")[2]


def _tried(engine: Engine, own: Any, tolerance: float) -> Found:
    """Ask the engine, and compare its logits and tokens."""
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
    stateful = len({spec.key.layer for spec in engine.model.state})
    return Found(result, error=worst, layers=engine.model.layers, stateful=stateful, note=_generates(own, spoken))


# ---- prompts


def _talk(engine: Engine) -> list[tuple[list[int], list[int]]]:
    """Ask for prompts, one and several at once; return (prompt, reply) of the greedy answers.

    The first prompt becomes cached. Then five run at once: one that leaves it inside a block, a short one, a single
    token, one that continues its reply, and one that forks into three streams inside a block. At last come one that
    continues to the end of the context, and the short one again, alone and with nothing cached.
    """
    rng = random.Random(7)

    def text(count: int) -> list[int]:
        return [rng.randrange(3, engine.model.vocab_size) for _ in range(count)]

    stem = text(71)
    first = stem + text(6)
    spoken = _answered(engine, [first], [_GREEDY])
    others = [stem[:59] + text(17), text(9), text(1), [*first, *spoken[0][1], *text(5)], stem[:66]]
    spoken += _answered(engine, others, [_GREEDY, _GREEDY, _GREEDY, _GREEDY, _FORKED])[:4]
    again = _answered(engine, [first, others[0]], [_GREEDY, _GREEDY])
    if again != spoken[:2]:
        raise Wrong("asked again, with everything cached, it gives another answer")
    rest = min(engine.context_limit, 2 * len(first)) - len(first) - 2
    spoken += _answered(engine, [first + text(rest)], [replace(_GREEDY, max_tokens=2)])
    if _answered(engine, [others[1]], [_GREEDY], namespace="another") != spoken[2:3]:
        raise Wrong("a short prompt gets another answer with long ones than alone")
    return spoken


def _answered(
    engine: Engine, prompts: list[list[int]], params: list[SamplingParams], **options: Any
) -> list[tuple[list[int], list[int]]]:
    done = engine.generate(prompts, params, **options)
    return [(prompt, list(each.token_ids)) for prompt, each in zip(prompts, done, strict=True)]


def _check_reach(engine: Engine, witness: Witness) -> None:
    """Check that the trial covered all cases."""
    stats = engine.stats()
    met = {
        "cached tokens": stats.cache.hit_tokens >= 100,
        "copied blocks": witness.copied >= 3,
        "decodes of several sequences in one step": witness.joint_decodes >= 3,
        "decodes with a prefill": witness.mixed_steps >= 1,
        "chunks after others": any(0 < row.start < len(row.history) - 1 for row in witness.rows),
    }
    missed = [name for name, reached in met.items() if not reached]
    assert not missed, f"the trial had no {', '.join(missed)}"


# ---- the model's own forward


def _logits(own: Any, tokens: Sequence[int]) -> Tensor:
    """Return the model's own logits [tokens, vocab] of one plain forward without cache."""
    with torch.inference_mode():
        found: Tensor = own(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return found


def check_dependence(own: Any) -> None:
    """Raise ArithmeticError if the model's logits hardly depend on its input: it would pass any trial."""
    rng = random.Random(1)
    tokens = [rng.randrange(3, own.get_input_embeddings().num_embeddings) for _ in range(30)]
    other = [*tokens[:24], tokens[24] % 50 + 4, *tokens[25:]]
    one, two = _logits(own, tokens), _logits(own, other)
    change, spread = float((one[-1] - two[-1]).abs().max()), float(one[-1].std())
    if not (spread > 1e-2 and change > 1e-3 * spread):
        raise ArithmeticError(f"its logits spread by {spread:.1e}, and change by {change:.1e} with an earlier token")


def _check_greedy(own: Any, prompt: list[int], reply: list[int]) -> None:
    """Check that each token of a reply is the model's own most likely one."""
    logits = _logits(own, prompt + reply[:-1])[len(prompt) - 1 :].clone()
    logits[:, _PADDING] = -torch.inf
    expected = logits.argmax(-1).tolist()
    if expected != reply:
        raise Wrong(f"greedy tokens {reply} instead of {expected} after a prompt of {len(prompt)}")


def _worst(own: Any, rows: Sequence[Row]) -> float:
    """Return the largest difference between a row and the model's own; each longest history takes a forward."""
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
    """Return the largest difference, or NaN if there is one."""
    return max(differences, key=lambda each: (math.isnan(each), each))


def _frozen(config: Any) -> int:
    """Return the length up to which radixkv differs from the model's forward on purpose (`radixkv.models.rope`)."""
    rope = getattr(config, "rope_parameters", None) or {}
    return int(rope["original_max_position_embeddings"]) if rope.get("rope_type") == "longrope" else 0


def _among_themselves(rows: Sequence[Row]) -> float:
    """Return the largest difference between two rows after the same tokens, in any two batches."""
    first: dict[tuple[int, ...], Tensor] = {}
    same = [(row.logits, first.setdefault(row.history, row.logits)) for row in rows]
    return _largest([float((one - other).abs().max()) for one, other in same])


def _between_ways(own: Any, tokens: Sequence[int]) -> float:
    """Return the difference of the model's logits with sdpa, transformers' default; 0.0 for models without sdpa."""
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
    """Return a note if transformers' `generate` differs from the model's forward, else nothing."""
    prompt, reply = spoken[0]
    own.generation_config.eos_token_id = own.generation_config.forced_eos_token_id = None
    try:
        done = own.generate(
            torch.tensor([prompt]), max_new_tokens=len(reply), do_sample=False, suppress_tokens=[_PADDING]
        )[0, len(prompt) :].tolist()
    except Exception as error:
        return f"its own generate fails ({type(error).__name__})"
    return "" if done == reply else "its own generate differs from its own forward"
