"""Decode attention over int4 caches against float64 over what the format reads back, and its plan."""

import pytest
import torch

from realkernels.attend.decode_nibble import attend_int4, plan_words
from realkernels.attend.splits import Workspace
from tests.realkernels.attend.coded import CPU, Coded, a_plan
from tests.realkernels.attend.worlds import World, relative_error

TOLERANCE = 1e-3
"""fp16 outputs, p rounded to fp16 before its product."""
NAME = "int4_per_token_head"


@pytest.mark.parametrize("arrangement", ["aligned", "inline"])
def test_lengths_off_pages_and_tiles(arrangement: str) -> None:
    out, truth = Coded(World(lengths=(37, 1, 0, 64)), NAME, arrangement).attend()
    assert relative_error(out, truth) < TOLERANCE
    assert not out[2].any()


@pytest.mark.parametrize(("rows", "sets"), [(8, 1), (8, 3), (8, 5), (16, 2)])
def test_new_tokens_see_what_is_before_them(rows: int, sets: int) -> None:
    world = World(lengths=(3, 21), q_tokens=5, query_heads=8)  # two tokens of the first sequence see nothing
    out, truth = Coded(world, NAME).attend(a_plan(rows=rows, sets=sets))
    assert relative_error(out, truth) < TOLERANCE
    assert not out[0, :2].any()


def test_one_tile_a_page_and_tiles_that_are_larger() -> None:
    for tile in (16, 32, 128):
        out, truth = Coded(World(lengths=(90,), query_heads=6, page_tokens=32), NAME).attend(a_plan(tile), splits=1)
        assert relative_error(out, truth) < TOLERANCE


def test_scales_far_apart() -> None:
    out, truth = Coded(World(lengths=(50, 33)), NAME, spread=3.0).attend(amplify=0.02)
    assert relative_error(out, truth) < 2 * TOLERANCE


def test_large_queries() -> None:
    out, truth = Coded(World(lengths=(40,)), NAME).attend(amplify=30.0)
    assert relative_error(out, truth) < 5 * TOLERANCE  # one token has nearly all of the weight


def test_the_largest_codes_are_exact() -> None:
    """Products of codes are exact however large: all codes 15, zero points 0, and one token's V stands out."""
    cache = Coded(World(lengths=(20,), query_heads=2), NAME)
    for view in ("key_data", "value_data"):
        cache.views[view].fill_(0xFF)
    cache.views["key_scale"].copy_((cache.views["key_scale"].view(torch.int32) & ~15).view(torch.float32))
    out, truth = cache.attend()
    assert relative_error(out, truth) < TOLERANCE


def test_nan_in_a_scale_stays_in_its_head_and_rows() -> None:
    world = World(lengths=(40, 21), q_tokens=2, query_heads=4)
    cache = Coded(world, NAME)
    cache.views["value_scale"][cache.table[0, 39 // 32].long(), 1, 39 % 32] = torch.nan  # the newest token, head 1
    out, _ = cache.attend()
    assert out[0, 1, 2:].isnan().all()
    out[0, 1, 2:] = 0.0
    assert out.isfinite().all()


def test_bf16_queries() -> None:
    out, truth = Coded(World(lengths=(37,), dtype=torch.bfloat16), NAME).attend()
    assert relative_error(out, truth) < 6e-3


def test_without_a_plan_the_file_s_own() -> None:
    cache = Coded(World(lengths=(37,), page_tokens=64), NAME)
    query = cache.world.query()
    out = torch.full_like(query, torch.nan)
    plan = plan_words(query_rows=6, head_dim=32, device=CPU)
    cache.call(query, out, plan.workspace(query, kv_heads=2, max_tokens=37), None)
    assert out.isfinite().all()


@pytest.mark.parametrize(
    ("rows", "blocks", "sets"), [(6, 1, 1), (12, 1, 2), (24, 1, 3), (30, 1, 1), (48, 2, 3), (192, 6, 1)]
)
def test_plan_covers_all_rows(rows: int, blocks: int, sets: int) -> None:
    plan = plan_words(query_rows=rows, head_dim=256, device=CPU)
    assert (plan.blocks(rows), plan.sets) == (blocks, sets)


def test_refusals() -> None:
    cache = Coded(World(lengths=(5,)), NAME)
    query = cache.world.query()
    workspace = Workspace.allocate(batch=1, q_tokens=1, query_heads=12, head_dim=32, splits=1, device=CPU)
    views, rest = cache.views, (cache.table, cache.world.lengths_tensor(), torch.empty_like(query), workspace)
    pair = (views["key_data"], views["value_data"])
    with pytest.raises(ValueError, match="sets have 8 or 16 rows"):
        cache.call(query, rest[2], workspace, a_plan(rows=20))
    with pytest.raises(ValueError, match="scales"):
        attend_int4(query, *pair, views["key_scale"], views["value_scale"][:, :1], *rest, softmax_scale=1.0)
    with pytest.raises(ValueError, match="do not belong together"):
        attend_int4(query, views["key_data"][..., :8], pair[1], *pair, *rest, softmax_scale=1.0)
