"""Recorded and made-up workloads, replayed against the real prefix cache. Only `live` imports torch, and only to load
an engine.
"""
