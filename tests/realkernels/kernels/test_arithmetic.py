"""Numbers that codes become in registers: V's lie about zero, TurboQuant's polynomial is near its centroids."""

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from realkernels.codecs.per_token_head import CENTRE, centred
from realkernels.codecs.turboquant import UNIT, centroid, unit_centroids

TOKENS, STEP = 32768, 16
"""Of a split at batch 8, and those that one matrix instruction adds up."""


@triton.jit
def _numbers(words, out, FUNCTION: tl.constexpr, NUMBER: tl.constexpr) -> None:  # noqa: N803
    at = tl.arange(0, 16)
    tl.store(out + at, FUNCTION(tl.load(words + at), 0.0, NUMBER, False))


def numbers(function: Any, number: int = 0) -> np.ndarray:
    """What a product sees of the codes 0 to 15."""
    words, out = (torch.arange(16) << 4 * number).short(), torch.empty(16, dtype=torch.float16)
    _numbers[(1,)](words, out, function, number)
    return out.double().numpy()


def truncated_sum(weights: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Weights [TOKENS, 1] by codes [TOKENS, ELEMENTS], summed in fp32 that drops what does not fit, STEP at a time."""
    total = np.zeros(codes.shape[1], dtype=np.float32)
    for part in (weights * codes).reshape(-1, STEP, codes.shape[1]).sum(1):
        exact = total.astype(np.float64) + part
        near = exact.astype(np.float32)
        total = np.where(np.abs(near) > np.abs(exact), np.nextafter(near, np.float32(0)), near)
    return total.astype(np.float64)


@pytest.mark.parametrize("number", range(4))
def test_codes_of_v_are_exact_and_about_zero(number: int) -> None:
    assert np.array_equal(numbers(centred, number), np.arange(16) - CENTRE.value)


def test_nearly_even_weights_keep_their_small_output() -> None:
    """Matrix units truncate what they add up, and that adds up too."""
    source = np.random.default_rng(1)
    codes = source.integers(0, 16, (TOKENS, 32))
    weights = np.exp(source.normal(size=(TOKENS, 1))).astype(np.float16).astype(np.float64)
    truth = (weights * (codes - 7.5)).sum(0)

    def error(seen: np.ndarray) -> float:
        zero = 7.5 - (np.arange(16) - seen)[0]  # of these numbers
        out = truncated_sum(weights, seen[codes]) - zero * weights.sum()
        return float(np.linalg.norm(out - truth) / np.linalg.norm(truth))

    assert error(numbers(centred)) < 1e-3
    assert error(np.arange(16.0)) > 5e-3  # what the products would give without it


@pytest.mark.parametrize("number", range(4))
def test_the_polynomial_is_far_below_the_format_s_own_error(number: int) -> None:
    exact = torch.tensor(unit_centroids(4), dtype=torch.float64)
    missed = torch.tensor(numbers(centroid, number)) * UNIT - exact
    edges = torch.cat((torch.tensor([-torch.inf]), (exact[1:] + exact[:-1]) / 2, torch.tensor([torch.inf])))
    share = torch.special.ndtr(edges).diff()  # of a normal variable, by centroid
    own = 1 - (share * exact**2).sum()  # mean squared error of centroids
    assert (share * missed**2).sum() < 5e-4 * own
    assert missed.abs().max() < 6e-3
