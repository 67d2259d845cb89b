"""Sampling: a request's parameters (params.py), logits processors, and the sampler. Importing params needs no torch."""
