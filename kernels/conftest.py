"""Collect doctests from every module; modules that need Triton are skipped if it is missing."""

from importlib.util import find_spec

collect_ignore = (
    [] if find_spec("triton") else [f"radixkv_kernels/{name}.py" for name in ("attention", "blocks", "triton_kernels")]
)
