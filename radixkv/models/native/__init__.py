"""Layers of our own for Llama-like models, which equal transformers' models by test.

switches.py   the sizes and options of a model, from its `config.json` or from the header of a GGUF file
rotary.py     rotary frequencies
layers.py     the model: one class of layer for all options
operators.py  the operators of a layer in plain torch
compiled.py   the same as compiled products, for weights of 8 or 4 bits on a CPU
places.py     the choice between them
files.py      a model from the weights of files

A model with an option that no test compares with transformers' model is not listed, and takes transformers' code.
"""
