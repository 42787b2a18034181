"""Kernels that unpack a piece of a paged cache into rows of 16-bit numbers, in the stored basis."""
