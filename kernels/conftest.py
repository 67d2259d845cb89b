"""Doctests are looked for in every module; those that need Triton are passed over where it is missing."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("triton") else ["radixkv_kernels/block*.py", "radixkv_kernels/attention*.py"]
