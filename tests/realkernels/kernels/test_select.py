"""Selection is exact: the best by float32 score, ties to the lower index, on the interpreter and on the CPU backend."""

from collections.abc import Sequence

import pytest
import torch

from realkernels import reference
from realkernels.kernels.in_torch import best_blocks, score_blocks
from realkernels.kernels.select import STATE, Selection
from realkernels.shape import QsaShape

CPU = torch.device("cpu")
HALF = torch.float16


def shape(topk: int, *, heads: int = 4, dim: int = 16) -> QsaShape:
    return QsaShape(budget=4 * topk, index_heads=heads, index_dim=dim)


def triton_selection(query: torch.Tensor, pooled: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Selected indices, ascending, and the scores; everything poisoned before, `_state` zero again behind."""
    spec = shape(topk, heads=query.shape[0], dim=query.shape[1])
    made = Selection(spec, most_blocks=len(pooled) + 3, device=CPU)
    made._scores.fill_(float("nan"))
    made._candidates.fill_(2**31 - 1)
    selected = torch.full((topk,), -1, dtype=torch.int32)
    scores = made.run(query, pooled, selected)
    assert torch.equal(made._state, torch.zeros(STATE, dtype=torch.int32))
    return selected.long().sort().values, scores


def cpu_selection(query: torch.Tensor, pooled: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.full((len(pooled),), float("nan"))
    score_blocks(query, pooled, scores)
    selected = torch.full((topk,), -1, dtype=torch.int32)
    best_blocks(scores, selected)
    return selected.long().sort().values, scores


def check_both(query: torch.Tensor, pooled: torch.Tensor, topk: int) -> torch.Tensor:
    """Both are exact on their own scores, and these are the reference's."""
    chosen, own = triton_selection(query, pooled, topk)
    truth = reference.block_scores(query, pooled)
    torch.testing.assert_close(own.double(), truth, rtol=1e-5, atol=1e-6)
    assert torch.equal(chosen, reference.select_blocks(own, topk))
    on_cpu, scores = cpu_selection(query, pooled, topk)
    torch.testing.assert_close(scores.double(), truth, rtol=1e-5, atol=1e-6)
    assert torch.equal(on_cpu, reference.select_blocks(scores, topk))
    return chosen


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16])
@pytest.mark.parametrize(("blocks", "topk"), [(512, 512), (513, 512), (1031, 512), (300, 7), (129, 128), (1, 1)])
def test_random_keys(blocks: int, topk: int, dtype: torch.dtype) -> None:
    source = torch.Generator().manual_seed(blocks)
    check_both(
        torch.randn(4, 16, generator=source).to(dtype), torch.randn(blocks, 16, generator=source).to(dtype), topk
    )


@pytest.mark.parametrize("topk", [1, 5, 512, 600])
def test_among_equals_the_lower_index_wins(topk: int) -> None:
    """Three levels of score only, so that the limit always falls among equals."""
    pooled = torch.zeros(700, 16, dtype=HALF)
    pooled[:, 0] = (torch.arange(700) * 7 % 3).to(HALF)
    query = torch.zeros(4, 16, dtype=HALF)
    query[:, 0] = 1.0
    chosen = check_both(query, pooled, topk)
    level = pooled[:, 0]
    by_hand = sorted(range(700), key=lambda block: (-float(level[block]), block))[:topk]
    assert chosen.tolist() == sorted(by_hand)


def two_levels(most: float, block: slice, other: float, *, blocks: int) -> torch.Tensor:
    pooled = torch.full((blocks, 16), other, dtype=HALF)
    pooled[block] = most
    return pooled


@pytest.mark.parametrize(
    ("query", "pooled", "expected"),
    [
        *((zero, two_levels(-1.0, slice(0), -1.0, blocks=300), range(100)) for zero in (0.0, -0.0)),
        (1.0, two_levels(1.0, slice(123, 124), -1.0, blocks=300), [0, 1, 2, 3, 123]),
        (65504.0, two_levels(65472.0, slice(100), 65504.0, blocks=200), range(100, 160)),
    ],
)
def test_zeros_one_positive_score_and_the_largest_halves(
    query: float, pooled: torch.Tensor, expected: Sequence[int]
) -> None:
    heads = torch.full((16, 16), query, dtype=HALF)  # 16 heads: no padding that could hide a negative zero
    assert check_both(heads, pooled, len(expected)).tolist() == list(expected)


def test_scores_beyond_the_bins_are_still_exact() -> None:
    """Scores from 1e-10 to 1e9, far outside of the 16 octaves that the histogram resolves."""
    source = torch.Generator().manual_seed(5)
    scale = 10.0 ** torch.linspace(-5, 4.5, 400)[torch.randperm(400, generator=source)]
    pooled = (torch.rand(400, 16, generator=source) * scale[:, None]).to(HALF)
    for magnitude in (1e-4, 1.0, 1e4):
        check_both(torch.full((4, 16), magnitude, dtype=HALF), pooled, 50)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, inside the interpreter
def test_nan_counts_as_zero_and_infinity_wins() -> None:
    pooled = torch.ones(300, 16, dtype=HALF)
    pooled[10], pooled[20], pooled[30] = float("nan"), float("inf"), float("-inf")
    query = torch.ones(4, 16, dtype=HALF)
    for chosen in (triton_selection(query, pooled, 297)[0], cpu_selection(query, pooled, 297)[0]):
        missing = set(range(300)) - set(chosen.tolist())
        assert missing == {10, 30, 299}
    for chosen in (triton_selection(query, pooled, 1)[0], cpu_selection(query, pooled, 1)[0]):
        assert chosen.tolist() == [20]


def test_a_context_that_is_read_whole_is_refused() -> None:
    made = Selection(shape(512), most_blocks=600, device=CPU)
    selected, query = torch.empty(512, dtype=torch.int32), torch.zeros(4, 16, dtype=HALF)
    with pytest.raises(ValueError, match="511 blocks are fewer than the 512"):
        made.run(query, torch.zeros(511, 16, dtype=HALF), selected)
    with pytest.raises(ValueError, match="601 blocks do not fit buffers for 600"):
        made.run(query, torch.zeros(601, 16, dtype=HALF), selected)
