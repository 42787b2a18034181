"""Fused kernels that quantise new tokens into the planes of a cache: one file a family of formats."""
