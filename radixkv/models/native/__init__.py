"""Layers of our own for Llama-like models, which equal transformers' models by test.

switches.py   the sizes and options of a model, from its `config.json` or from the header of a GGUF file
rotary.py     rotary frequencies
layers.py     the model: one class of layer for all options, and its operators in plain torch
compiled.py   operators as compiled products, for weights of 8 or 4 bits on a CPU
fused.py      operators in Triton, for a GPU
places.py     the choice between them
files.py      a model from the weights of files
borrow.py     a model around the weights of a model of transformers

A model with an option that no test compares with transformers' model is not listed, and takes transformers' code.
"""
