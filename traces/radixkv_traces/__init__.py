"""Recorded and simulated workloads, replayed against the real prefix cache. Imports no torch."""
