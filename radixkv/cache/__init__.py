"""The prefix cache: token prefixes -> reference-counted KV blocks. Knows no tensor, no model and no thread."""
