"""Models: load, probe and self-test a decoder, run a batch of chunks through it, sample. Knows no request and no tree."""
