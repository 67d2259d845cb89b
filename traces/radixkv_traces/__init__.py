"""Recorded and simulated workloads, replayed against the real prefix cache. Imports no torch, but for `live`
when it is asked for an engine."""
