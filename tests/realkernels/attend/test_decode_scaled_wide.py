"""Decode attention over 8-bit caches with query rows as columns, against float64 over what the formats read back."""

import pytest
import torch

from realkernels.attend.decode_scaled_wide import set_columns, set_start, sets_of
from realkernels.attend.plan import TilePlan
from tests.realkernels.attend.test_decode_scaled import KINDS, TOLERANCE, Cache
from tests.realkernels.attend.worlds import World, relative_error


def a_plan(tile: int = 16, columns: int = 16) -> TilePlan:
    return TilePlan(
        tile=tile, rows=columns, num_warps=4, stages=2, per_multiprocessor=1, wide=True, across=True
    )  # fmt: skip


@pytest.mark.parametrize(("name", "arrangement"), KINDS)
def test_odd_lengths_and_an_empty_sequence(name: str, arrangement: str) -> None:
    out, truth = Cache(World(lengths=(0, 1, 31, 70)), name, arrangement).attend(a_plan())
    assert relative_error(out, truth) < TOLERANCE
    assert out[0].eq(0).all()


@pytest.mark.parametrize(("name", "arrangement"), KINDS[1:4])
@pytest.mark.parametrize("columns", [16, 32, 48, 64])
def test_new_tokens_in_sets_of_columns_and_in_blocks(name: str, arrangement: str, columns: int) -> None:
    world = World(lengths=(3, 45), q_tokens=9)  # 54 rows; the first queries of the first sequence see nothing
    out, truth = Cache(world, name, arrangement).attend(a_plan(columns=columns), splits=2)
    assert relative_error(out, truth) < TOLERANCE


@pytest.mark.parametrize(("head_dim", "page_tokens", "tile"), [(256, 16, 32), (128, 64, 64), (64, 128, 64)])
def test_other_head_sizes_and_pages_larger_and_smaller_than_a_tile(head_dim: int, page_tokens: int, tile: int) -> None:
    world = World(lengths=(140,), q_tokens=5, head_dim=head_dim, page_tokens=page_tokens)
    for name, arrangement in (KINDS[1], KINDS[4]):
        out, truth = Cache(world, name, arrangement).attend(a_plan(tile, columns=48), splits=2)
        assert relative_error(out, truth) < TOLERANCE


def test_scales_that_differ_by_orders_of_magnitude() -> None:
    cache = Cache(World(lengths=(70,), q_tokens=4), "int8_per_token_head", "aligned", spread=4.0)
    out, truth = cache.attend(a_plan(columns=32))
    assert relative_error(out, truth) < TOLERANCE


@pytest.mark.parametrize("amplify", [2.0**-12, 2.0**10])
def test_small_and_large_queries(amplify: float) -> None:
    out, truth = Cache(World(lengths=(70,), q_tokens=3), "fp8_per_token_head", "aligned").attend(
        a_plan(columns=32), amplify=amplify
    )
    assert relative_error(out, truth) < 2 * TOLERANCE


def test_a_large_query_beside_a_small_one() -> None:
    cache = Cache(World(lengths=(70,), q_tokens=2, query_heads=6, kv_heads=1), "int8_per_token_head", "aligned")
    factors = torch.tensor([2.0**8, 2.0**-8])[None, :, None, None]
    out, truth = cache.attend(a_plan(), amplify=factors)
    assert relative_error(out[:, 0], truth[:, 0]) < 2 * TOLERANCE
    assert relative_error(out[:, 1], truth[:, 1]) < TOLERANCE


@pytest.mark.parametrize("plane", ["key_scale", "value_scale"])
def test_a_nan_token_reaches_its_kv_head_of_its_sequence_only(plane: str) -> None:
    cache = Cache(World(lengths=(40, 40), q_tokens=3), "int8_per_token_head", "aligned")
    page, offset = cache.slot(0, 17)
    cache.views[plane][page, 0, offset] = torch.nan
    out, truth = cache.attend(a_plan(columns=32))
    assert out[0, :, :6].isnan().all()
    assert relative_error(out[0, :, 6:], truth[0, :, 6:]) < TOLERANCE
    assert relative_error(out[1], truth[1]) < TOLERANCE


@pytest.mark.parametrize("plane", ["key_scale", "value_scale"])
def test_a_nan_token_does_not_reach_queries_before_it(plane: str) -> None:
    cache = Cache(World(lengths=(40,), q_tokens=2, query_heads=6, kv_heads=1), "int8_per_token_head", "aligned")
    page, offset = cache.slot(0, 39)
    cache.views[plane][page, 0, offset] = torch.nan
    out, truth = cache.attend(a_plan())
    assert relative_error(out[0, 0], truth[0, 0]) < TOLERANCE
    assert out[0, 1].isnan().all()


def test_sets_are_powers_of_two_side_by_side() -> None:
    for columns in (16, 32, 48, 64, 112):
        sets = [(set_start(columns, i), set_columns(columns, i)) for i in range(sets_of(columns))]
        assert [start for start, _ in sets] == [sum(n for _, n in sets[:i]) for i in range(len(sets))]
        assert sum(n for _, n in sets) == columns
        assert all(n.bit_count() == 1 for _, n in sets)
