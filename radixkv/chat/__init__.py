"""Chat: sessions whose token history only grows, and the tokenisation that keeps it so."""
