"""Open the disk cache of an engine: its folder, the fingerprint of the model, and the parts that use them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from radixkv.config import EngineConfig
from radixkv.disk.folder import DiskFolder, stamp
from radixkv.disk.store import Store
from radixkv.disk.tier import DiskTier
from radixkv.engine.disk_stage import DiskStage
from radixkv.engine.kv_facts import facts
from radixkv.models.identity import files_of, versions_of_tensors
from radixkv.sizing.memory import disk_blocks
from radixkv.telemetry.records import namespace_value

if TYPE_CHECKING:
    from radixkv.attention.host_store import HostStore
    from radixkv.engine.engine_thread import CoreClient
    from radixkv.models.adapter import LoadedModel


_OPENS_S = 0.25  # how long a load waits for the folder: enough if the digest of the weights is known


def refuse_busy(folder: str | os.PathLike[str]) -> None:
    """Raise InvalidInput for a folder that cannot be used, or that another engine uses."""
    DiskFolder(folder).close()


def connect(client: CoreClient, config: EngineConfig, loaded: LoadedModel, host: HostStore | None) -> None:
    """Give an engine that was just made a disk. Its folder is locked until the engine closes.

    The weights' digest is computed while the first requests run, which find nothing on disk until it is done. Raises
    InvalidInput, which names the setting, also for a model with recurrent state.
    """
    assert host is not None
    client.thread.ask(lambda: _connect(client, config, loaded, host)).settle(_OPENS_S)


def _connect(client: CoreClient, config: EngineConfig, loaded: LoadedModel, host: HostStore) -> Store:
    assert config.disk_cache is not None
    slots = disk_blocks(config.disk_memory, host.bytes_per_block, config.block_size, loaded.state_bytes)
    folder = DiskFolder(config.disk_cache)

    def store(files: tuple[Path, ...], old: Store | None = None) -> Store:
        stamps, versions = {file: stamp(file) for file in files}, versions_of_tensors(loaded.model)

        def place() -> Path:
            if old is not None:
                old.close(None)
            weights = folder.digest(stamps) if files else client.runs.weights.digest()
            if versions_of_tensors(loaded.model) != versions:
                raise OSError("the weights were changed while their digest was computed")
            return folder.place({"weights": weights, **facts(loaded, config, host.bytes_per_block)}, loaded.name)

        return Store(place, host.bytes_per_block, slots)

    try:
        tier = DiskTier(client.core.cache, store(files_of(loaded.model)), host, namespace_value)
    except BaseException:
        folder.close()
        raise
    post, number = client.thread.post, client.inputs.namespaces.number
    DiskStage(
        client.core, tier, host.put_image, post, reopen=lambda old: store((), old), number=number, released=folder.close
    )
    return tier.store
