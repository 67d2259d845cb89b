"""The former name of `radixkv.sizing.kv_size`, which warns; for one release."""

import warnings

from radixkv.sizing.kv_size import KVShape, LayerKV, parse_bytes, parse_size

__all__ = ["KVShape", "LayerKV", "parse_bytes", "parse_size"]

warnings.warn("radixkv.kv_size moved to radixkv.sizing.kv_size", DeprecationWarning, stacklevel=2)
