"""Models: load, probe and self-test a decoder, run batches of chunks."""
