"""Attention kernels and their plain-torch reference."""
