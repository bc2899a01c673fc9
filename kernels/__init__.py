"""Quantisers, checksum and gather/scatter kernels, with their torch references."""
