"""Engines' own benchmarks as evidence: read, asked about, compared with predictions, and fitted to."""
