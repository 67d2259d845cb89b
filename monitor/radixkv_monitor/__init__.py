"""The terminal monitor of running radixkv engines. It imports neither torch nor transformers."""
