"""radixkv: a prefix-caching inference engine that lives inside your Python process."""
