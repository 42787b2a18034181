"""Decode attention over llama.cpp's iq4_nl and q5_1 against float64 over what their bytes stand for."""

import pytest
import torch

from realkernels.codecs.decode.groups import AWAITED
from realkernels.kernels.split_kv import PlanCase, TilePlan, Workspace
from tests.realkernels.kernels.coded import CPU, a_plan
from tests.realkernels.kernels.worlds import World, relative_error

TABLE = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]).double()


def planes_of(world: World, name: str, table: torch.Tensor) -> dict[str, torch.Tensor]:
    """Random groups; NaN for scales and minima of slots that keep no token."""
    source, planes = torch.Generator().manual_seed(5), {}
    shape = (world.pages, world.kv_heads, world.page_tokens, world.head_dim // 32)
    nowhere = ~world.stored(table)[:, None, :, None].expand(shape)
    for side in ("key", "value"):
        planes[f"{side}_data"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=source)
        unit = 0.02 if name == "iq4_nl" else 0.1
        planes[f"{side}_scale"] = (unit * torch.randn(shape, generator=source).exp()).half()
        planes[f"{side}_scale"][nowhere] = torch.nan
        if name == "q5_1":
            planes[f"{side}_min"] = (-15.0 * planes[f"{side}_scale"] * torch.rand(shape, generator=source)).half()
            planes[f"{side}_high"] = torch.randint(0, 256, (*shape, 4), dtype=torch.uint8, generator=source)
    return planes


def dequantised(planes: dict[str, torch.Tensor], name: str, side: str) -> torch.Tensor:
    """Element j of a group is the low nibble of byte j, element j + 16 the high one; its fifth bit is bit j."""
    codes, scale = planes[f"{side}_data"], planes[f"{side}_scale"].double()[..., None]
    codes = torch.cat((codes & 15, codes >> 4), -1).long()
    if name == "iq4_nl":
        return (TABLE[codes] * scale).flatten(-2)
    high = planes[f"{side}_high"].view(torch.int32) >> torch.arange(32) & 1
    return ((codes + 16 * high) * scale + planes[f"{side}_min"].double()[..., None]).flatten(-2)


@pytest.mark.parametrize("name", AWAITED)
@pytest.mark.parametrize("plan", [a_plan(num_warps=2), a_plan(sets=3), a_plan(rows=24), a_plan(rows=32)])
def test_new_tokens_see_what_is_before_them(name: str, plan: TilePlan) -> None:
    world = World(lengths=(3, 0, 37), q_tokens=5, query_heads=8, head_dim=64)
    table, query = world.table(), world.query()
    planes, out = planes_of(world, name, table), torch.full_like(query, torch.nan)
    workspace = Workspace.allocate(batch=3, q_tokens=5, query_heads=8, head_dim=64, splits=3, device=CPU)
    AWAITED[name].attend(
        query, planes, table, world.lengths_tensor(), out, workspace, plan=plan, page_tokens=32, softmax_scale=1 / 8
    )
    truth = world.truth(query, dequantised(planes, name, "key"), dequantised(planes, name, "value"), table)
    assert relative_error(out, truth) < 1e-3
    assert not out[0, :2].any()
    assert not out[1].any()


def test_minima_that_do_not_fit_are_refused() -> None:
    world = World(lengths=(3,), query_heads=8, head_dim=64)
    planes, query = planes_of(world, "q5_1", world.table()), world.query()
    workspace = Workspace.allocate(batch=1, q_tokens=1, query_heads=8, head_dim=64, splits=1, device=CPU)
    given = (world.table(), world.lengths_tensor(), torch.empty_like(query), workspace)
    named = {"page_tokens": 32, "softmax_scale": 1.0}
    with pytest.raises(ValueError, match="as columns"):
        AWAITED["q5_1"].attend(query, planes, *given, plan=a_plan(rows=16), **named)
    planes["key_min"] = planes["key_min"].transpose(0, 1).contiguous().transpose(0, 1)
    with pytest.raises(ValueError, match="same strides"):
        AWAITED["q5_1"].attend(query, planes, *given, plan=a_plan(), **named)


@pytest.mark.parametrize("name", AWAITED)
def test_plans_take_rows_as_columns(name: str) -> None:
    plans = [AWAITED[name].plan(PlanCase(q_rows=rows, head_dim=256)) for rows in (6, 16, 24, 48, 96)]
    assert [(plan.rows, plan.sets) for plan in plans] == [(8, 1), (8, 2), (32, 1), (32, 1), (32, 1)]
    small = AWAITED[name].plan(PlanCase(q_rows=24, head_dim=256, large=False))
    assert (small.rows, small.sets, small.per_multiprocessor) == (8, 3, 1)
