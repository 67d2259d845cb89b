"""What an engine tells of itself while it runs: records, their sum, frames, a socket. Never imports torch."""
