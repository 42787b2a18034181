"""Many query rows as columns of one program, over every kind of word cache, against float64."""

from typing import Any

import pytest
import torch

from realkernels.attend.launch_words import plan_wide
from realkernels.attend.wide_tiles import set_count, set_first, set_width
from tests.realkernels.attend.coded import Coded, a_plan
from tests.realkernels.attend.worlds import World, relative_error

INT4 = "int4_per_token_head"
TOLERANCES = {INT4: 1e-3, "q4_0": 1e-3, "q8_0": 1e-3, "exl3_k8v4": 1e-3, "turboquant_4bit_nc": 4e-3}


def a_wide_plan(rows: int = 32, tile: int = 16) -> Any:
    return a_plan(tile, rows, num_warps=4)


@pytest.mark.parametrize("name", TOLERANCES)
@pytest.mark.parametrize("rows", [24, 32])
def test_new_tokens_see_what_is_before_them(name: str, rows: int) -> None:
    """Lengths off tiles and pages, rows that see nothing, a program that holds all rows or one of two blocks."""
    world = World(lengths=(3, 0, 37), q_tokens=7, query_heads=8)
    out, truth = Coded(world, name).attend(a_wide_plan(rows))
    assert relative_error(out, truth) < TOLERANCES[name]
    assert not out[0, :4].any()
    assert not out[1].any()


def test_larger_tiles_and_one_split() -> None:
    for tile in (32, 128):
        out, truth = Coded(World(lengths=(90,), q_tokens=5, page_tokens=64), INT4).attend(
            a_wide_plan(tile=tile), splits=1
        )
        assert relative_error(out, truth) < TOLERANCES[INT4]


@pytest.mark.parametrize("name", [INT4, "q4_0"])
def test_inline_records(name: str) -> None:
    out, truth = Coded(World(lengths=(37,), q_tokens=3, query_heads=16), name, "inline").attend(a_wide_plan(24))
    assert relative_error(out, truth) < TOLERANCES[name]


@pytest.mark.parametrize("falling", [False, True])
def test_scores_that_climb_or_fall_from_tile_to_tile(falling: bool) -> None:
    """Large keys at either end: what weights are relative to rises late, or is far above nearly all of them."""
    cache = Coded(World(lengths=(80,), q_tokens=3, query_heads=16), INT4)
    tokens = torch.randn(2, 80, 2, 32, generator=torch.Generator().manual_seed(5))
    size = torch.linspace(0.1, 12.0, 80)
    tokens[0] *= (size.flip(0) if falling else size)[:, None, None]
    cache.format.append(cache.planes, cache.slots(0, 80), tokens[0], tokens[1])
    out, truth = cache.attend(a_wide_plan(), splits=1)
    assert relative_error(out, truth) < 2 * TOLERANCES[INT4]


def test_nan_in_a_scale_stays_in_its_head_and_rows() -> None:
    world = World(lengths=(40, 21), q_tokens=5, query_heads=8)
    cache = Coded(world, INT4)
    cache.views["value_scale"][cache.table[0, 39 // 32].long(), 1, 39 % 32] = torch.nan  # the newest token, head 1
    out, _ = cache.attend(a_wide_plan())
    assert out[0, 4, 4:].isnan().all()
    out[0, 4, 4:] = 0.0
    assert out.isfinite().all()


@pytest.mark.parametrize("rows", [8, 24, 32, 40, 48, 64])
def test_sets_are_powers_of_two_side_by_side(rows: int) -> None:
    widths = [set_width.fn(rows, i) for i in range(set_count.fn(rows))]
    assert sum(widths) == rows
    assert all(width & (width - 1) == 0 for width in widths)
    assert [set_first.fn(rows, i) for i in range(len(widths))] == [sum(widths[:i]) for i in range(len(widths))]


def test_rows_that_no_program_takes_are_refused() -> None:
    for rows in (20, 72):
        with pytest.raises(ValueError, match="sets have 8 or 16 rows"):
            Coded(World(lengths=(5,)), INT4).attend(a_wide_plan(rows))


def test_the_plan_holds_32_rows() -> None:
    plan = plan_wide(head_dim=256)
    assert (plan.tile, plan.blocks(30), plan.blocks(96)) == (64, 1, 3)
