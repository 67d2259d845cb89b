"""Sampling: parameters (params.py, which imports no torch), logits_processors.py, and sampler.py."""
