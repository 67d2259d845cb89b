"""Count the launches of torch operators, as a GPU would get them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

WAITING = ("_local_scalar_dense", "nonzero", "_unique2", "masked_select", "index", "index_put_")
UNLAUNCHED = ("empty", "new_empty", "detach", "_unsafe_view")


class Launches(TorchDispatchMode):
    """Counts the operators that compute or copy, and refuses those that make the host wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # else torch imports its compiler first
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:  # in inference mode torch calls the mode before it decomposes the operator
                return func.decompose(*args, **(kwargs or {}))
        assert name not in WAITING, name
        views = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
        self.found[name] += not (views or name in UNLAUNCHED)
        return func(*args, **(kwargs or {}))
