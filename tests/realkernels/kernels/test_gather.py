"""Gathers over planes and interleaved blocks against float64 attention: every tail, odd splits, NaN, bad indices."""

import pytest
import torch

from realkernels import reference
from realkernels.caches.interleaved import BLOCK_CODECS, block_layout, block_planes
from realkernels.codecs import Planes, codec_named
from realkernels.kernels.gather import GatherPlan, InterleavedGather, PlaneGather
from realkernels.shape import QsaShape
from tests.realkernels.worlds import CPU, SMALL, TOLERANCE

PLAN = GatherPlan(blocks_per_split=4)
WIDE = QsaShape(query_heads=6, kv_heads=2, head_dim=128, index_heads=4, index_dim=16, budget=64)


class World:
    """A cache of `end` tokens, everything around them poisoned, and a selection in random order."""

    def __init__(self, name: str, shape: QsaShape, end: int) -> None:
        self.fmt, self.shape, self.end = codec_named(name), shape, end
        size = {"block_tokens": shape.ratio, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
        blocks = -(-end // shape.ratio)
        memory = torch.full((blocks, block_layout(self.fmt, **size).stride), 0xFF, dtype=torch.uint8)
        self.planes: Planes = block_planes(self.fmt, blocks=blocks, memory=memory, **size)
        self.keys, self.values = torch.randn(2, end, shape.kv_heads, shape.head_dim)
        self.fmt.append(self.planes, list(range(end)), self.keys, self.values)
        self.query = torch.randn(shape.query_heads, shape.head_dim).half()
        self.selected = torch.randperm(shape.blocks(end))[: shape.topk].int()
        self.output = torch.full_like(self.query, float("nan"))

    def run(self, *, plan: GatherPlan = PLAN, checked: bool = True) -> torch.Tensor:
        """The output of one call."""
        gather = InterleavedGather(self.fmt, self.shape, device=CPU, plan=plan)
        gather.run(self.query, self.planes, self.selected, self.end, self.output, checked=checked)
        return self.output

    @property
    def read(self) -> torch.Tensor:
        """Tokens of the selection and of the open tail."""
        return reference.selected_tokens(self.selected.long(), self.end, self.shape.ratio)

    def error(self) -> float:
        """Of the output as it is."""
        truth = reference.attend(self.query, *self.fmt.restore(self.planes, self.read))
        return float((self.output.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("name", BLOCK_CODECS)
def test_attention_over_large_heads_is_that_over_the_dequantised_cache(name: str) -> None:
    """Heads of 32 and what lies around them: with the timed call."""
    world = World(name, WIDE, 98)
    world.run()
    assert world.error() < TOLERANCE[torch.float16]


@pytest.mark.parametrize("name", BLOCK_CODECS)
@pytest.mark.parametrize("plane", ["keys", "values"])
def test_a_nan_reaches_the_heads_of_its_kv_head_only(name: str, plane: str) -> None:
    world = World(name, SMALL, 131)
    token = int(world.read[-1])  # of the open tail
    lost = {"keys": world.keys[token].clone(), "values": world.values[token].clone()}
    lost[plane][1, 3] = float("nan")
    world.fmt.append(world.planes, [token], lost["keys"][None], lost["values"][None])
    out = world.run()
    assert bool(out[: SMALL.group].isfinite().all())
    assert bool(out[SMALL.group :].isnan().any(dim=-1).all())


@pytest.mark.parametrize("plan", [GatherPlan(blocks_per_split=4), GatherPlan(blocks_per_split=16, combined_columns=16)])
def test_splits_that_hold_nothing_live_weigh_nothing(plan: GatherPlan) -> None:
    """Five blocks: the last split is mostly, or for a closed tail wholly, beyond the selection."""
    shape = QsaShape(query_heads=40, kv_heads=2, head_dim=32, index_dim=16, budget=16)
    keys, values = torch.randn(2, 40, 2, 32).half()
    query = torch.randn(40, 32).half()
    selected = torch.tensor([7, 0, 9, 3], dtype=torch.int32)
    gather, output = PlaneGather(shape, device=CPU, plan=plan), torch.full_like(query, float("nan"))
    gather._partial.fill_(float("nan"))
    gather.run(query, keys, values, selected, 40, output)
    truth = reference.sparse_attend(query, keys, values, selected.long(), 40, shape)
    torch.testing.assert_close(output.double(), truth, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("wrong", [-1, 32])
def test_a_block_beyond_the_context_is_refused_before_anything_is_written(wrong: int) -> None:
    world = World("q4_0", SMALL, 131)
    world.selected[2] = wrong
    with pytest.raises(IndexError, match=f"selected block {wrong} is out of range"):
        world.run()
    assert bool(world.output.isnan().all())


@pytest.mark.parametrize(
    ("end", "blocks_per_split", "words"),
    [
        (133, 4, "133 tokens in blocks of 4 does not fit 33 blocks"), (63, 4, "it is read whole"),
        (131, 2, "below 16 tokens"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(end: int, blocks_per_split: int, words: str) -> None:
    world = World("q8_0", SMALL, 131)
    world.end = end
    with pytest.raises(ValueError, match=words):
        world.run(plan=GatherPlan(blocks_per_split=blocks_per_split), checked=False)
