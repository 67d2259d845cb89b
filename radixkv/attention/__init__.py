"""Attention over block tables: the KV store, the work list and the backends."""
