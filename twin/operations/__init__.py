"""Counts: what a forward pass reads, multiplies and moves, as ops."""
