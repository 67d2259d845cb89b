"""Models: load, probe and self-test a decoder, run batches of chunks. Knows no request and no tree."""
