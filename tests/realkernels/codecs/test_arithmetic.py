"""Streams of codes, rotations, folded sums, rounding and centroids, each against its definition."""

from itertools import pairwise
from math import erf, exp, pi, sqrt

import numpy as np
import pytest
import torch

from realkernels.codecs.arithmetic import (
    folded_sum,
    from_e4m3,
    hadamard,
    half_away_from_zero,
    norms,
    pack,
    to_e4m3,
    unpack,
)
from realkernels.codecs.kvarn import put_where
from realkernels.codecs.turboquant import centroids, midpoints, unit_centroids
from tests.realkernels.codecs import slow
from tests.realkernels.codecs.kept import CPU


@pytest.mark.parametrize("bits", range(1, 9))
def test_streams_are_little_endian(bits: int) -> None:
    codes = torch.randint(0, 2**bits, (3, 64), generator=torch.Generator().manual_seed(bits))
    packed = pack(codes.float(), bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (3, 8 * bits)
    for row in range(3):
        raw = bytes(packed[row].tolist())
        assert [slow.stream(raw, 0, at, bits) for at in range(64)] == codes[row].tolist()
        assert int.from_bytes(raw, "little") == sum(int(code) << (bits * at) for at, code in enumerate(codes[row]))
    assert torch.equal(unpack(packed, bits), codes)


@pytest.mark.parametrize("size", [1, 2, 32, 256])
def test_the_butterfly_is_sylvester_s_matrix(size: int) -> None:
    x = torch.randn(5, 2, size, generator=torch.Generator().manual_seed(1))
    np.testing.assert_allclose(hadamard(x), x.double().numpy() @ slow.sylvester(size), rtol=1e-5, atol=1e-4)
    whole = torch.randint(-8, 8, (3, size)).float()
    assert torch.equal(hadamard(hadamard(whole)), size * whole)


def test_folded_sums() -> None:
    x = torch.randn(3, 16, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(folded_sum(x, -1), x.sum(dim=-1, keepdim=True))
    torch.testing.assert_close(folded_sum(x, -2), x.sum(dim=-2, keepdim=True))
    torch.testing.assert_close(norms(x), x.norm(dim=-1, keepdim=True))


def test_rounding_half_away_from_zero() -> None:
    below = torch.tensor(0.5).nextafter(torch.tensor(0.0)).item()
    x = torch.tensor([0.5, -0.5, 1.5, -1.5, 2.5, below, -below, 0.0, 126.5, 3.2, -3.8])
    assert half_away_from_zero(x).tolist() == [1.0, -1.0, 2.0, -2.0, 3.0, 0.0, 0.0, 0.0, 127.0, 3.0, -4.0]


def test_every_code_of_e4m3() -> None:
    codes = torch.arange(256, dtype=torch.int64).to(torch.uint8)
    values = from_e4m3(codes)
    np.testing.assert_array_equal(values, [slow.e4m3(code) for code in range(256)])
    kept = ~values.isnan()
    assert torch.equal(to_e4m3(values)[kept], codes[kept])
    assert bool(from_e4m3(to_e4m3(values[~kept])).isnan().all())


def test_e4m3_takes_the_nearest_code() -> None:
    finite = sorted({slow.e4m3(code) for code in range(256) if code not in {0x7F, 0xFF}})
    x = torch.randn(500, generator=torch.Generator().manual_seed(2)) * torch.logspace(-4, 2, 500)
    got = from_e4m3(to_e4m3(x))
    table = np.array(finite)
    nearest = np.abs(table[None, :] - x.double().numpy()[:, None]).min(axis=1)
    np.testing.assert_allclose(np.abs(got.double().numpy() - x.double().numpy()), nearest, rtol=1e-6)


def test_put_where_writes_what_is_valid_and_nothing_else() -> None:
    index, rows = torch.tensor([3, 1, 0, 3]), torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    for valid, expected in (
        ([True, True, False, False], [9, 2, 9, 1]),
        ([False, False, True, False], [3, 9, 9, 9]),
        ([False, False, False, True], [9, 9, 9, 4]),
        ([False] * 4, [9, 9, 9, 9]),
    ):
        target = torch.full((4, 1), 9.0)
        put_where(target, index, rows, torch.tensor(valid))
        assert target[:, 0].tolist() == expected
    target = torch.full((4, 1), 9.0)
    put_where(target, torch.tensor([-1, 2, -2, -1]), rows, torch.tensor([False, True, False, False]))
    assert target[:, 0].tolist() == [9, 9, 2, 9]


def phi(x: float) -> float:
    return exp(-x * x / 2) / sqrt(2 * pi)


def below(x: float) -> float:
    return (1 + erf(x / sqrt(2))) / 2


@pytest.mark.parametrize(
    ("bits", "squared_error"), [(1, 1 - 2 / pi), (2, 0.1175), (3, 0.03454), (4, 0.009497), (5, 0.002505)]
)
def test_centroids_are_those_of_lloyd_and_max(bits: int, squared_error: float) -> None:
    """Symmetric, ascending, each the mean of its cell, and of the known mean squared error on N(0, 1)."""
    table = unit_centroids(bits)
    assert len(table) == 2**bits
    assert list(table) == sorted(table)
    assert [-value for value in reversed(table)] == list(table)
    edges = [-50.0, *((low + high) / 2 for low, high in pairwise(table)), 50.0]
    error = 1.0
    for (low, high), centroid in zip(pairwise(edges), table, strict=True):
        share = below(high) - below(low)
        assert (phi(low) - phi(high)) / share == pytest.approx(centroid, abs=1e-9)
        error -= share * centroid**2  # at the optimum the error is 1 less the centroids' own variance
    assert error == pytest.approx(squared_error, rel=1e-3)


def test_centroids_shrink_with_the_head() -> None:
    table, edges = centroids(3, 64, CPU), midpoints(3, 64, CPU)
    assert table.tolist() == pytest.approx([value / 8 for value in unit_centroids(3)])
    assert edges.tolist() == pytest.approx([(low + high) / 2 for low, high in pairwise(table.tolist())])
    assert float(edges[3]) == 0.0
