"""Decode attention over groups of 32 codes, as the formats lay them out, against float64 over what they read back."""

import pytest
import torch

from realkernels.attend.decode_groups import CODES, plan_words
from tests.realkernels.attend.coded import CPU, Coded, a_plan
from tests.realkernels.attend.worlds import World, relative_error

TOLERANCE = 1e-3
NAMES = [
    ("q4_0", "aligned"), ("q4_0", "inline"), ("q8_0", "inline"),
    ("exl3_k4v4", "aligned"), ("exl3_k8v8", "aligned"), ("exl3_k8v4", "aligned"), ("exl3_k4v8", "aligned"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arrangement"), NAMES)
def test_lengths_off_pages_and_tiles(name: str, arrangement: str) -> None:
    world = World(lengths=(37, 1, 0), head_dim=64, query_heads=4)
    out, truth = Coded(world, name, arrangement).attend()
    assert relative_error(out, truth) < TOLERANCE
    assert not out[2].any()


@pytest.mark.parametrize(("name", "rows", "sets"), [("q4_0", 8, 2), ("exl3_k4v4", 16, 1), ("exl3_k8v8", 16, 2)])
def test_new_tokens_see_what_is_before_them(name: str, rows: int, sets: int) -> None:
    world = World(lengths=(2, 21), q_tokens=4, query_heads=4)
    out, truth = Coded(world, name).attend(a_plan(rows=rows, sets=sets))
    assert relative_error(out, truth) < TOLERANCE


def test_groups_far_apart() -> None:
    out, truth = Coded(World(lengths=(50,), head_dim=64), "exl3_k4v4", spread=2.0).attend(amplify=0.05)
    assert relative_error(out, truth) < 2 * TOLERANCE


def test_nan_in_a_group_of_v_stays_there() -> None:
    world = World(lengths=(20,), query_heads=4, head_dim=64)
    cache = Coded(world, "q4_0")
    cache.views["value_scale"][cache.table[0, 0].long(), 0, 7, 1] = torch.nan
    out, _ = cache.attend()
    assert out[0, 0, :2, 32:].isnan().all()
    out[0, 0, :2, 32:] = 0.0
    assert out.isfinite().all()


def test_plan_knows_wide_codes() -> None:
    sizes = {"query_rows": 6, "head_dim": 256, "device": CPU}
    assert plan_words(**sizes).per_multiprocessor > plan_words(**sizes, key_codes=CODES["q8_0"]).per_multiprocessor
    assert [plan_words(**sizes | {"query_rows": rows}).rows for rows in (16, 24, 48)] == [8, 32, 32]
    assert plan_words(**sizes | {"query_rows": 48}, aligned=2).rows == 16
