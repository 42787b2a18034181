"""Decode attention over 8-bit caches, as the formats lay them out, against float64 over what the formats read back."""

import pytest
import torch

from realkernels.attend.decode_scaled import attend_scaled, plan_scaled
from realkernels.attend.plan import TilePlan
from realkernels.attend.splits import Workspace
from realkernels.codecs import codec_named
from tests.realkernels.attend.worlds import World, relative_error

CPU = torch.device("cpu")
TOLERANCE = 1e-3
"""fp16 outputs, p rounded to fp16 before its product."""
KINDS = [
    ("int8_per_token_head", "aligned"),
    ("int8_per_token_head", "inline"),
    ("fp8_per_token_head", "aligned"),
    ("fp8_per_token_head", "inline"),
    ("fp8", "aligned"),
]


def a_plan(tile: int = 16, rows: int = 16, *, sets: int = 1, wide: bool = True) -> TilePlan:
    return TilePlan(tile=tile, rows=rows, sets=sets, num_warps=4, stages=2, per_multiprocessor=1, wide=wide)


class Cache:
    """A world's tokens in a format; every slot that keeps none is poisoned."""

    def __init__(self, world: World, name: str, arrangement: str, *, spread: float = 1.0) -> None:
        self.world, self.table = world, world.table()
        self.format = codec_named(name, arrangement=arrangement)
        self.planes = self.format.allocate(world.pages, world.page_tokens, world.kv_heads, world.head_dim, CPU)
        self.views = self.format.views(self.planes)
        held = world.stored(self.table)
        if name.startswith("fp8"):
            self.views["key_data"].fill_(0x7F)  # NaN
            self.views["value_data"].fill_(0x7F)
        if self.views["key_scale"].dim() == 3:
            self.views["key_scale"].fill_(torch.nan)
            self.views["value_scale"].fill_(torch.nan)
        self.slots = held.flatten().nonzero().squeeze(1)
        shape = (2, len(self.slots), world.kv_heads, world.head_dim)
        source = torch.Generator().manual_seed(3)
        rows = torch.randn(shape, generator=source) * torch.exp(spread * torch.randn(*shape[:3], 1, generator=source))
        self.format.append(self.planes, self.slots, rows[0], rows[1])

    def slot(self, row: int, token: int) -> tuple[int, int]:
        """Page and token in it."""
        tokens = self.world.page_tokens
        return int(self.table[row, token // tokens]), token % tokens

    def attend(
        self, plan: TilePlan | None = None, *, splits: int = 3, amplify: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and truth."""
        world, query = self.world, self.world.query() * amplify
        workspace = Workspace.allocate(
            batch=len(world.lengths), q_tokens=world.q_tokens, query_heads=world.query_heads,
            head_dim=world.head_dim, splits=splits, device=CPU,
        )  # fmt: skip
        workspace.partial.fill_(torch.nan)
        workspace.statistics.fill_(torch.nan)
        out = torch.full_like(query, torch.nan)
        attend_scaled(
            query, self.views["key_data"], self.views["value_data"], self.views["key_scale"],
            self.views["value_scale"], self.table, world.lengths_tensor(), out, workspace,
            kind="fp8" if self.format.name.startswith("fp8") else "int8", softmax_scale=world.head_dim**-0.5,
            plan=plan,
        )  # fmt: skip
        shape = (world.pages, world.page_tokens, world.kv_heads, world.head_dim)
        seen = torch.full((2, *shape), torch.nan, dtype=torch.float64)
        for part, read in zip(seen, self.codec.dequantise(self.planes, self.slots), strict=True):
            part.view(-1, *shape[2:])[self.slots] = read.double()
        keys, values = seen.transpose(2, 3)
        return out, world.truth(query, keys, values, self.table)


@pytest.mark.parametrize(("name", "arrangement"), KINDS)
def test_odd_lengths_and_an_empty_sequence(name: str, arrangement: str) -> None:
    out, truth = Cache(World(lengths=(0, 1, 31, 70)), name, arrangement).attend(a_plan())
    assert relative_error(out, truth) < TOLERANCE
    assert out[0].eq(0).all()


@pytest.mark.parametrize(("name", "arrangement"), KINDS[1:3])
@pytest.mark.parametrize(("rows", "sets", "wide"), [(16, 3, True), (32, 2, False), (16, 1, True)])
def test_new_tokens_in_sets_of_rows_and_in_blocks(
    name: str, arrangement: str, rows: int, sets: int, wide: bool
) -> None:
    world = World(lengths=(3, 45), q_tokens=8)  # 48 rows; the first queries of the first sequence see nothing
    out, truth = Cache(world, name, arrangement).attend(a_plan(rows=rows, sets=sets, wide=wide), splits=2)
    assert relative_error(out, truth) < TOLERANCE


@pytest.mark.parametrize(("query_heads", "kv_heads", "page_tokens"), [(12, 1, 16), (8, 2, 128)])
def test_other_groups_and_pages_larger_and_smaller_than_a_tile(
    query_heads: int, kv_heads: int, page_tokens: int
) -> None:
    world = World(lengths=(70,), query_heads=query_heads, kv_heads=kv_heads, page_tokens=page_tokens)
    out, truth = Cache(world, "int8_per_token_head", "inline").attend(a_plan(tile=32), splits=2)
    assert relative_error(out, truth) < TOLERANCE


def test_bf16_queries() -> None:
    world = World(lengths=(70,), dtype=torch.bfloat16)
    out, truth = Cache(world, "int8_per_token_head", "aligned").attend(a_plan())
    assert relative_error(out, truth) < 6e-3  # the output's rounding


def test_scales_that_differ_by_orders_of_magnitude() -> None:
    out, truth = Cache(World(lengths=(70,)), "int8_per_token_head", "aligned", spread=4.0).attend(a_plan())
    assert relative_error(out, truth) < TOLERANCE


@pytest.mark.parametrize("amplify", [2.0**-12, 2.0**10])
def test_small_and_large_queries(amplify: float) -> None:
    out, truth = Cache(World(lengths=(70,)), "fp8_per_token_head", "aligned").attend(a_plan(), amplify=amplify)
    assert relative_error(out, truth) < 2 * TOLERANCE


def test_the_plan_of_its_own_choice() -> None:
    shapes = [(plan.rows, plan.sets) for plan in (plan_scaled(query_rows=n, head_dim=256, device=CPU) for n in ROWS)]
    assert shapes == [(16, 1), (16, 1), (32, 1), (16, 3), (32, 1), (16, 3), (16, 3)]
    assert plan_scaled(query_rows=6, head_dim=256, device=CPU, aligned=4).stages == 2
    across = [plan_scaled(query_rows=n, head_dim=256, device=CPU).across for n in ROWS]
    assert across == [False, False, True, False, True, False, False]
    for sizes in ({"head_dim": 128}, {"head_dim": 256, "aligned": 4}):
        assert not plan_scaled(query_rows=24, device=CPU, **sizes).across
    tensor = plan_scaled(query_rows=48, head_dim=256, device=CPU, per_token=False)
    assert (tensor.rows, tensor.sets, tensor.across) == (48, 1, True)
    assert plan_scaled(query_rows=6, head_dim=128, device=CPU).tile == 128
    out, truth = Cache(World(lengths=(200,), page_tokens=128), "int8_per_token_head", "inline").attend()
    assert relative_error(out, truth) < TOLERANCE


ROWS = (6, 16, 24, 48, 64, 96, 192)


@pytest.mark.parametrize("plane", ["key_scale", "value_scale"])
def test_a_nan_token_reaches_its_kv_head_of_its_sequence_only(plane: str) -> None:
    cache = Cache(World(lengths=(40, 40)), "int8_per_token_head", "aligned")
    page, offset = cache.slot(0, 17)
    cache.views[plane][page, 0, offset] = torch.nan
    out, truth = cache.attend(a_plan())
    assert out[0, 0, :6].isnan().all()
    assert relative_error(out[0, 0, 6:], truth[0, 0, 6:]) < TOLERANCE
    assert relative_error(out[1], truth[1]) < TOLERANCE


@pytest.mark.parametrize("plane", ["key_scale", "value_scale"])
def test_a_nan_token_does_not_reach_queries_before_it(plane: str) -> None:
    cache = Cache(World(lengths=(40,), q_tokens=2, query_heads=6, kv_heads=1), "int8_per_token_head", "aligned")
    page, offset = cache.slot(0, 39)
    cache.views[plane][page, 0, offset] = torch.nan
    out, truth = cache.attend(a_plan())
    assert relative_error(out[0, 0], truth[0, 0]) < TOLERANCE
    assert out[0, 1].isnan().all()


def test_scales_that_do_not_fit_are_refused() -> None:
    cache = Cache(World(lengths=(40,)), "int8_per_token_head", "aligned")
    cache.views["key_scale"] = torch.ones(1)
    with pytest.raises(ValueError, match="per token and head"):
        cache.attend(a_plan())
    cache.views["key_scale"] = torch.ones(1, 2, 3)
    with pytest.raises(ValueError, match="scales"):
        cache.attend(a_plan())
