"""Tensor parallelism: processes that hold a part of each layer of one model, and compute its steps together."""
