"""Decode attention over TurboQuant's 4bit_nc against float64 over what the format reads back, and its polynomial."""

import pytest
import torch
import triton
import triton.language as tl

from realkernels.attend.decode_turboquant import UNIT, plan_words
from realkernels.attend.word_tiles import TURBOQUANT, key_number
from realkernels.codecs.turboquant import unit_centroids
from tests.realkernels.attend.coded import CPU, Coded, a_plan
from tests.realkernels.attend.worlds import World, relative_error

NAME = "turboquant_4bit_nc"
TOLERANCE = 4e-3
"""The polynomial misses centroids by 2e-3 of a standard deviation, which scores of about 1 keep."""


@triton.jit
def _centroids(words, out, NUMBER: tl.constexpr, FORMAT: tl.constexpr) -> None:  # noqa: N803
    at = tl.arange(0, 16)
    tl.store(out + at, key_number(tl.load(words + at), 0.0, NUMBER, FORMAT, 4, 0.0, 0, False))


@pytest.mark.parametrize("number", range(4))
def test_the_polynomial_is_far_below_the_format_s_own_error(number: int) -> None:
    words, out = (torch.arange(16) << 4 * number).short(), torch.empty(16, dtype=torch.float16)
    _centroids[(1,)](words, out, number, TURBOQUANT)
    exact = torch.tensor(unit_centroids(4), dtype=torch.float64)
    missed = out.double() * UNIT - exact
    edges = torch.cat((torch.tensor([-torch.inf]), (exact[1:] + exact[:-1]) / 2, torch.tensor([torch.inf])))
    share = torch.special.ndtr(edges).diff()  # of a normal variable, by centroid
    own = 1 - (share * exact**2).sum()  # mean squared error of centroids
    assert (share * missed**2).sum() < 5e-4 * own
    assert missed.abs().max() < 6e-3


@pytest.mark.parametrize("arrangement", ["aligned", "inline"])
def test_lengths_off_pages_and_tiles(arrangement: str) -> None:
    out, truth = Coded(World(lengths=(37, 1, 0, 64)), NAME, arrangement).attend()
    assert relative_error(out, truth) < TOLERANCE
    assert not out[2].any()


@pytest.mark.parametrize(("rows", "sets"), [(8, 2), (16, 1)])
def test_new_tokens_see_what_is_before_them(rows: int, sets: int) -> None:
    out, truth = Coded(World(lengths=(2, 21), q_tokens=4, query_heads=6), NAME).attend(a_plan(rows=rows, sets=sets))
    assert relative_error(out, truth) < TOLERANCE


def test_a_row_of_equal_values_has_the_scale_zero() -> None:
    cache = Coded(World(lengths=(9,), query_heads=2), NAME)
    cache.views["value_scale"].fill_(0.0)
    out, truth = cache.attend()
    assert relative_error(out, truth) < TOLERANCE


def test_nan_stays_in_its_head() -> None:
    cache = Coded(World(lengths=(20,), query_heads=4), NAME)
    cache.views["key_norm"][cache.table[0, 0].long(), 0, 7] = torch.nan
    out, _ = cache.attend()
    assert out[0, 0, :2].isnan().all()
    assert out[0, 0, 2:].isfinite().all()


def test_plan_covers_all_rows() -> None:
    assert plan_words(query_rows=48, head_dim=256, device=CPU).blocks(48) == 1
    rows = [plan_words(query_rows=count, head_dim=256, device=CPU).rows for count in (6, 24, 30, 48, 96)]
    assert rows == [8, 8, 32, 16, 16]
    assert plan_words(query_rows=30, head_dim=256, device=CPU, aligned=2).rows == 16
