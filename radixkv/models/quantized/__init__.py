"""Weights of 8 and 4 bits on a CPU, multiplied by float32 activations: compiled products, and modules that use them."""
