"""Record the calls of a model's modules in a forward, to compare replacements of the modules with them.

Attention is answered with random numbers. Positions include the last one, because some models scale by the position.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from radixkv.models.architecture import ForwardSignature
from radixkv.models.attention_interface import AttentionCall, handled_by


@dataclass
class Use:
    """One call of a module in a forward: its arguments and output, and its attention calls with their answers."""

    args: tuple[Any, ...]
    named: dict[str, Any]
    calls: list[tuple[AttentionCall, Tensor]]
    output: Any


class _Observer:
    """Answers attention calls with random numbers, and records them and the calls of modules."""

    def __init__(self) -> None:
        self.uses: dict[int, list[Use]] = defaultdict(list)
        self._calls: list[tuple[AttentionCall, Tensor]] = []
        self._recorded: dict[int, int] = {}  # calls when a module was called last, by its id
        self._draw = torch.Generator().manual_seed(1)

    def attend(self, call: AttentionCall) -> Tensor:
        """Return random numbers [T, heads, dv]."""
        shape = call.query.shape[2], call.query.shape[1], call.value.shape[3]
        answer = torch.randn(shape, generator=self._draw).to(call.query.dtype).to(call.query.device)
        self._calls.append((call, answer))
        return answer

    def record(self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        """Record a call of a module, and the attention calls that it or its parts have made."""
        parts = set(map(id, module.modules()))
        new = self._calls[self._recorded.get(id(module), 0) :]
        self._recorded[id(module)] = len(self._calls)
        calls = [each for each in new if id(each[0].module) in parts]
        self.uses[id(module)].append(Use(args, named, calls, output))

    def forget(self) -> None:
        """Forget the attention calls, because a forward ends."""
        self._calls.clear()
        self._recorded.clear()


def observed(
    model: nn.Module, modules: Sequence[nn.Module], max_length: int, device: torch.device | None = None
) -> dict[int, list[Use]]:
    """Return the calls of each module, by id, in a forward of a few tokens and in one of a single token.

    The model attends by the function of `attention_interface`, to at most `max_length` tokens. It is on `device`.
    """
    observer, forward = _Observer(), ForwardSignature.of(model)
    hooks = [module.register_forward_hook(observer.record, with_kwargs=True) for module in modules]
    try:
        with handled_by(observer):
            for positions in ([0, 1, max_length // 3, max_length - 1], [max_length // 2]):
                at = torch.tensor(sorted(set(positions)), device=device)
                forward.logits(model, at % 7 + 3, at[:1] * 0, positions=at, use_cache=False)
                observer.forget()
    finally:
        for hook in hooks:
            hook.remove()
    return observer.uses


class Player:
    """Answers attention calls alike, and keeps them."""

    def __init__(self, answer: Tensor) -> None:
        self.calls: list[AttentionCall] = []
        self.answer = answer

    def attend(self, call: AttentionCall) -> Tensor:
        """Return the answer [T, heads, dv], and keep the call."""
        self.calls.append(call)
        return self.answer


# ---- comparisons


def is_plain(module: nn.Module) -> bool:
    """Return whether a module has no hooks, and the forward of its class."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def epsilon_of(norm: nn.Module) -> Any:
    """Return the epsilon of an RMS norm, as models call it; None if it has none."""
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Return whether two tensors are equal up to rounding, vector by vector; NaN is never equal."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    difference = (found.double() - expected.double()).norm(dim=-1)
    return bool((difference <= tolerance * expected.double().norm(dim=-1)).all())
