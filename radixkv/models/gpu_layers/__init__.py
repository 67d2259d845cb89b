"""Layers of Llama-like models on a GPU, of at most eleven launches each; `fuse.fuse_layers` installs them."""
