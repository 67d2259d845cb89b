"""The collectives of tensor-parallel ranks, over connections that can be replaced.

A rank that fails inside a forward leaves the others in a collective that never ends. It therefore closes its
connections, so that theirs fail too, and all connect again. The group itself, which torch and transformers hold by
name, stays. torchft reconfigures its groups in the same way.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from radixkv.device import GPU, gpu_count
from radixkv.errors import InvalidInput

dist: Any = torch.distributed  # its stubs lack some of its classes
_BACKEND = "radixkv"
_PASSED = (
    "allreduce", "allreduce_coalesced", "broadcast", "barrier", "allgather", "_allgather_base",
    "allgather_into_tensor_coalesced", "all_gather_single", "all_gather_single_coalesced", "reduce_scatter",
    "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "reduce_scatter_single", "alltoall_base",
    "all_to_all_single",
)  # fmt: skip


class _World:
    """The groups of this process, and the connections to the other ranks, which groups of all ranks share."""

    def __init__(self) -> None:
        self.groups: list[RankGroup] = []
        self.connection: Any | None = None


_world = _World()  # torch has one, too


class RankGroup(dist.ProcessGroup):  # type: ignore[misc]  # its stubs lack the constructor
    """A process group of all ranks, or of this rank alone, whose connections may be closed and made again."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.store, self._name = store, ""
        self._alone = _connection(dist.HashStore(), 0, 1, timeout) if size == 1 else None
        _world.groups.append(self)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the name under which torch makes such groups."""
        return _BACKEND

    def _set_group_name(self, name: str) -> None:
        self._name = name
        super()._set_group_name(name)

    @property
    def group_name(self) -> str:
        """The name by which torch's operators find the group."""
        return self._name

    @property
    def connection(self) -> Any:
        """The group that computes. Raises RuntimeError while the ranks are not connected."""
        found = self._alone or _world.connection
        if found is None:
            raise RuntimeError("the ranks are not connected")
        return found

    def close(self) -> None:
        """Free the threads and sockets, since torch may hold the group for longer."""
        self._alone = None


def _passed(name: str) -> Callable[..., Any]:
    def collective(self: RankGroup, *args: Any, **options: Any) -> Any:
        return getattr(self.connection, name)(*args, **options)

    return collective


for _name in _PASSED:
    setattr(RankGroup, _name, _passed(_name))


def _connection(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a group with connections to all its ranks, within this machine: gloo, and nccl where there are GPUs."""
    made, kinds = dist.ProcessGroup(store, rank, size), dist.ProcessGroup.BackendType
    options = dist.ProcessGroupGloo._Options()
    local = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    for name, value in (("_devices", local), ("_timeout", timeout)):
        setattr(options, name, value)  # torch has no other way to choose an interface
    gloo = dist.ProcessGroupGloo(store, rank, size, options)
    made._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
    if gpu_count():
        nccl = dist.ProcessGroupNCCL(store, rank, size, timeout)
        made._register_backend(torch.device(GPU), kinds.NCCL, nccl)
    return made


def refuse_second_world() -> None:
    """Raise InvalidInput if this process takes part in a world of torch.distributed, such as another engine's."""
    if dist.is_initialized():
        raise InvalidInput("tensor_parallel: this process already takes part in a torch.distributed world")


def open_world(rank: int, size: int, folder: str, seconds: float) -> None:
    """Make torch's world of ranks, which meet in a private folder."""
    if not hasattr(dist.Backend, _BACKEND.upper()):
        dist.Backend.register_backend(_BACKEND, RankGroup, devices=["cpu", GPU])
    store, timeout = dist.FileStore(str(Path(folder) / "ranks"), size), timedelta(seconds=seconds)
    hook = sys.excepthook  # which torch replaces
    dist.init_process_group(_BACKEND, store=store, rank=rank, world_size=size, timeout=timeout)
    sys.excepthook = hook
    connect(0, seconds)


def connect(number: int, seconds: float) -> None:
    """Connect with all other ranks. Every rank must call this; a collective fails after `seconds`.

    `number` counts the connections, and is equal on all ranks.
    """
    disconnect()
    timeout, store = timedelta(seconds=seconds), dist.PrefixStore(str(number), _world.groups[0].store)
    store.set_timeout(timeout)
    _world.connection = _connection(store, dist.get_rank(), dist.get_world_size(), timeout)


@torch.inference_mode()
def share(tensor: Tensor) -> None:
    """Copy a tensor of rank 0 to all ranks, in place."""
    dist.broadcast(tensor, 0)


def disconnect() -> None:
    """Close the connections, which ends the collectives of the other ranks with an error."""
    _world.connection = None


def close_world() -> None:
    """Close all connections, and leave torch's world."""
    disconnect()
    if _world.groups:
        for each in _world.groups:
            each.close()
        dist.destroy_process_group()
        _world.groups.clear()
