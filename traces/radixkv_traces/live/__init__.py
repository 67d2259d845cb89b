"""Replay a recorded workload against a running engine: one in this process, or any server with OpenAI's HTTP API."""
