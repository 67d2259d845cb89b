"""Sampling: parameters (params.py, which imports no torch), logits_processors.py, token_mask.py and sampler.py.

To add a parameter, declare it in SamplingParams, and add its LogitsProcessor to PROCESSORS: validation, HTTP and the
OpenAPI document follow from the declaration.
"""
