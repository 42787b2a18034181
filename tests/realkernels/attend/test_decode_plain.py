"""Decode attention over fp16 and bf16 caches against float64: odd lengths, new tokens, poisoned surroundings."""

import pytest
import torch

from realkernels.attend.decode_plain import attend_plain, plan_plain
from realkernels.attend.plan import TilePlan
from realkernels.attend.splits import Workspace
from tests.realkernels.attend.worlds import World, relative_error

CPU = torch.device("cpu")
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Relative error of an output rounded to these, p rounded before its product included."""


def a_plan(tile: int = 16, rows: int = 16, *, wide: bool = True) -> TilePlan:
    return TilePlan(tile=tile, rows=rows, num_warps=4, stages=2, per_multiprocessor=1, wide=wide)


def stored(world: World, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Random K and V [pages, kv_heads, page_tokens, head_dim], physically token by token; NaN where nothing is kept."""
    shape = (world.pages, world.page_tokens, world.kv_heads, world.head_dim)
    both = torch.randn(2, *shape, generator=torch.Generator().manual_seed(2)).to(world.dtype)
    both[:, ~world.stored(table)] = torch.nan
    return both[0].transpose(1, 2), both[1].transpose(1, 2)


def attend(
    world: World, plan: TilePlan | None = None, *, splits: int = 3, nan_key: tuple[int, int] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and truth; `nan_key` puts NaN into K of (sequence, token), KV head 0."""
    table, query = world.table(), world.query()
    keys, values = stored(world, table)
    if nan_key is not None:
        row, token = nan_key
        keys[table[row, token // world.page_tokens].long(), 0, token % world.page_tokens, 3] = torch.nan
    workspace = Workspace.allocate(
        batch=len(world.lengths), q_tokens=world.q_tokens, query_heads=world.query_heads, head_dim=world.head_dim,
        splits=splits, device=CPU,
    )  # fmt: skip
    workspace.partial.fill_(torch.nan)
    workspace.statistics.fill_(torch.nan)
    out = torch.full_like(query, torch.nan)
    attend_plain(
        query, keys, values, table, world.lengths_tensor(), out, workspace, softmax_scale=world.head_dim**-0.5,
        plan=plan,
    )  # fmt: skip
    return out, world.truth(query, keys, values, table)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("wide", [True, False])
def test_odd_lengths_and_an_empty_sequence(dtype: torch.dtype, wide: bool) -> None:
    world = World(lengths=(0, 1, 31, 32, 97), dtype=dtype)
    out, truth = attend(world, a_plan(wide=wide))
    assert relative_error(out, truth) < TOLERANCE[dtype]
    assert out[0].eq(0).all()


@pytest.mark.parametrize("q_tokens", [2, 8])
def test_new_tokens_see_what_came_before_them(q_tokens: int) -> None:
    world = World(lengths=(1, 5, 40, 101), q_tokens=q_tokens)  # the first query of length 1 sees nothing
    out, truth = attend(world, a_plan(rows=32))
    assert relative_error(out, truth) < TOLERANCE[torch.float16]


@pytest.mark.parametrize(("query_heads", "kv_heads", "page_tokens"), [(12, 1, 16), (8, 2, 128), (3, 3, 32)])
def test_other_groups_and_pages_larger_and_smaller_than_a_tile(
    query_heads: int, kv_heads: int, page_tokens: int
) -> None:
    world = World(lengths=(70, 33), query_heads=query_heads, kv_heads=kv_heads, page_tokens=page_tokens)
    out, truth = attend(world, a_plan(tile=32), splits=2)
    assert relative_error(out, truth) < TOLERANCE[torch.float16]


def test_one_split_and_more_splits_than_tiles() -> None:
    for splits in (1, 9):
        out, truth = attend(World(lengths=(50,)), a_plan(), splits=splits)
        assert relative_error(out, truth) < TOLERANCE[torch.float16]


def test_more_rows_than_a_program_holds() -> None:
    out, truth = attend(World(lengths=(40,), q_tokens=4), a_plan(rows=16))  # 24 rows in two blocks
    assert relative_error(out, truth) < TOLERANCE[torch.float16]


def test_the_plan_of_its_own_choice() -> None:
    world = World(lengths=(300,), page_tokens=128)
    assert plan_plain(query_rows=6, head_dim=256, device=CPU).tile == 64
    assert plan_plain(query_rows=48, head_dim=256, device=CPU).rows == 64
    out, truth = attend(world)
    assert relative_error(out, truth) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("token", [0, 39])
def test_nan_in_a_key_reaches_its_kv_head_of_its_sequence_only(token: int) -> None:
    world = World(lengths=(40, 40))
    out, truth = attend(world, a_plan(), nan_key=(0, token))
    assert out[0, 0, :6].isnan().all()
    assert relative_error(out[0, 0, 6:], truth[0, 0, 6:]) < TOLERANCE[torch.float16]
    assert relative_error(out[1], truth[1]) < TOLERANCE[torch.float16]


def test_nan_in_the_only_key_is_no_empty_sequence() -> None:
    out, _ = attend(World(lengths=(1,)), a_plan(), nan_key=(0, 0))
    assert out[0, 0, :6].isnan().all()
    assert out[0, 0, 6:].isfinite().all()


def test_tensors_that_do_not_fit_are_refused() -> None:
    world = World(lengths=(40,))
    table, query = world.table(), world.query()
    keys, values = stored(world, table)
    plan = a_plan()
    workspace = plan.workspace(query, kv_heads=2, max_tokens=64)
    call = (query, keys, values, table, world.lengths_tensor(), torch.empty_like(query), workspace)

    def refused(position: int, instead: torch.Tensor, match: str) -> None:
        changed = list(call)
        changed[position] = instead
        with pytest.raises(ValueError, match=match):
            attend_plain(*changed, softmax_scale=1.0, plan=plan)

    refused(1, keys[..., :16], "do not belong together")
    refused(3, table.long(), "must be int32")
    refused(4, world.lengths_tensor()[:0], "lengths")
    refused(5, torch.empty(1, 1, 12, 64)[..., ::2], "neighbours")
    refused(1, torch.zeros(world.pages, 2, 32, 40).half()[..., 1:33], "aligned")
