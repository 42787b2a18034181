"""A search ends where the gradient is zero, wherever it began; what samples do not tell is as its prior has it."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from calibrate.searches import Array, Law, Prior, minimum, slower

SIZES = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
WIDE = math.log(4)


def beside(seconds: Sequence[float], other: float | Array = 4.0) -> Law:
    """Seconds = constant + max(sizes x slope, other x height), in logarithms of the three."""
    measured = np.array(seconds)

    def law(at: Array, sharpness: float) -> tuple[Array, Array]:
        constant, slope, height = np.exp(at)
        held, follows = slower(SIZES * slope, np.full_like(SIZES, height) * other, sharpness)
        jacobian = np.stack([np.full_like(SIZES, constant), held * follows, held * (1 - follows)], axis=1)
        return (constant + held) / measured - 1, jacobian / measured[:, None]

    return law


def priors(*centres: float) -> list[Prior]:
    return [Prior(math.log(centre), WIDE) for centre in centres]


TRUE = 0.5 + np.maximum(SIZES, 4.0 * 1.5)


@pytest.mark.parametrize("centres", [(1.0, 1.0, 1.0), (0.1, 4.0, 0.3), (3.0, 0.3, 4.0)])
def test_what_was_put_in_comes_out_wherever_it_begins_also_near_its_end(centres: tuple[float, float, float]) -> None:
    law, known = beside(TRUE.tolist()), priors(*centres)
    found = minimum(law, known)
    assert np.exp(found.parameters) == pytest.approx([0.5, 1.0, 1.5], rel=0.02)
    assert minimum(law, known, near=found).parameters == pytest.approx(found.parameters, rel=1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_the_end_has_no_slope(seed: int) -> None:
    noise = np.random.default_rng(seed).normal(1.0, 0.1, len(SIZES))
    law, known = beside((TRUE * noise).tolist()), priors(1.0, 1.0, 1.0)
    found = minimum(law, known)
    pull = found.noise / np.array([prior.deviation for prior in known])
    centres = np.array([prior.centre for prior in known])

    def cost(at: Array) -> float:
        bent = 2 * 0.05**2 * (np.sqrt(1 + (law(at, 4096.0)[0] / 0.05) ** 2) - 1)
        return float(bent.sum() + ((pull * (at - centres)) ** 2).sum())

    least = cost(found.parameters)
    for step in np.vstack([np.eye(3), -np.eye(3)]):
        assert cost(found.parameters + 1e-5 * step) > least
        slope = (cost(found.parameters + 1e-7 * step) - cost(found.parameters - 1e-7 * step)) / 2e-7
        assert abs(slope) < 1e-6


def test_a_minimum_on_the_edge_of_a_maximum_is_found() -> None:
    """Both sides want to be larger than the samples allow: neither alone is a minimum."""
    tied = minimum(beside((SIZES * 0.9).tolist(), other=SIZES), [Prior(math.log(1e-3), 0.01), *priors(1.0, 1.0)])
    _, slope, height = np.exp(tied.parameters)
    assert slope == pytest.approx(height, rel=1e-3)
    assert slope == pytest.approx(0.9, rel=0.01)


def test_what_holds_no_sample_is_as_its_prior_has_it_and_priors_tell_more_where_the_law_does_not_fit() -> None:
    found = minimum(beside((0.5 + SIZES).tolist(), other=1e-3), priors(1.0, 1.0, 1.7))
    assert math.exp(found.parameters[2]) == pytest.approx(1.7, rel=1e-9)
    exact = minimum(beside((0.5 + SIZES).tolist(), other=1e-3), priors(5.0, 1.0, 1.0))
    rough = minimum(beside((0.5 + SIZES * (1 + 0.2 * np.sin(SIZES))).tolist(), other=1e-3), priors(5.0, 1.0, 1.0))
    assert exact.noise < rough.noise
    assert math.exp(exact.parameters[0]) == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize("sharpness", [8.0, 4096.0])
def test_the_smooth_maximum_is_one(sharpness: float) -> None:
    one, other = np.array([1.0, 3.0, 2.0, 1e-9]), np.array([2.0, 1.0, 2.0, 1e9])
    held, follows = slower(one, other, sharpness)
    assert (held >= np.maximum(one, other)).all()
    assert held == pytest.approx(np.maximum(one, other), rel=1.01 * (2 ** (1 / sharpness) - 1))
    assert follows[1] > 0.99
    assert follows[0] < 0.01
    assert follows[2] == 0.5
