"""Kernels in Triton, one file an operation, and the same operations in plain torch for a computer without a GPU."""
