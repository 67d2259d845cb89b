"""Read GGUF files, the single-file model format of llama.cpp, without torch, transformers or the `gguf` package."""
