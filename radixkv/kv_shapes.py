"""The former name of `radixkv.sizing.kv_shapes`, which warns; for one release."""

import warnings

from radixkv.sizing.kv_shapes import kv_shape

__all__ = ["kv_shape"]

warnings.warn("radixkv.kv_shapes moved to radixkv.sizing.kv_shapes", DeprecationWarning, stacklevel=2)
