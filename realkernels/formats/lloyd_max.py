"""The scalar quantiser of least mean squared error for a normal variable, after Lloyd and Max; computed, not copied."""

from functools import lru_cache
from itertools import pairwise
from math import erfc, exp, pi, sqrt

import torch


@lru_cache(maxsize=8)
def unit_centroids(bits: int) -> tuple[float, ...]:
    """2^bits centroids for N(0, 1), ascending and symmetric: each the mean of its cell, cut half-way to its neighbours.

    ValueError below 1 and above 8 bits.
    """
    if not 1 <= bits <= 8:
        raise ValueError(f"{bits} bits: centroids are computed for 1 to 8")
    count = 2 ** (bits - 1)  # of the positive half; the other is its mirror image
    centroids = [4.0 * (index + 0.5) / count for index in range(count)]
    moved = 1.0
    while moved > 1e-12:
        edges = [0.0, *((low + high) / 2 for low, high in pairwise(centroids)), float("inf")]
        means = [_mean(low, high) for low, high in pairwise(edges)]
        moved = max(abs(new - old) for new, old in zip(means, centroids, strict=True))
        centroids = means
    return (*(-value for value in reversed(centroids)), *centroids)


def _mean(low: float, high: float) -> float:
    """Of N(0, 1) between two positive values."""
    density = (exp(-low * low / 2) - exp(-high * high / 2)) / sqrt(2 * pi)
    return density / ((erfc(low / sqrt(2)) - erfc(high / sqrt(2))) / 2)


@lru_cache(maxsize=64)
def centroids(bits: int, head_dim: int, device: torch.device) -> torch.Tensor:
    """float32 [2^bits] for N(0, 1 / head_dim), one coordinate of a rotated vector of length 1."""
    return torch.tensor([value / sqrt(head_dim) for value in unit_centroids(bits)], dtype=torch.float32, device=device)


@lru_cache(maxsize=64)
def midpoints(bits: int, head_dim: int, device: torch.device) -> torch.Tensor:
    """float32 [2^bits - 1]: where one cell ends and the next begins."""
    table = centroids(bits, head_dim, device)
    return (table[1:] + table[:-1]) / 2
