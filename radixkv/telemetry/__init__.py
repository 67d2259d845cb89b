"""Telemetry of a running engine: records, their sum, frames, a socket, recordings. It never imports torch."""
