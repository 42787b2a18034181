"""Cutting sequences into splits, and merging what the splits give."""

import pytest
import torch

from realkernels.attend.merge import merge
from realkernels.attend.plan import TilePlan, alignment
from realkernels.attend.splits import MAX_SPLITS, Workspace, choose_splits

CPU = torch.device("cpu")


def test_splits_fill_the_device_once_and_never_outnumber_the_tiles() -> None:
    assert choose_splits(pairs=4, max_tokens=131072, tile=64, programs=264) == 66
    assert choose_splits(pairs=32, max_tokens=131072, tile=64, programs=264) == 8
    assert choose_splits(pairs=4, max_tokens=100, tile=64, programs=264) == 2
    assert choose_splits(pairs=1000, max_tokens=131072, tile=64, programs=264) == 1
    assert choose_splits(pairs=1, max_tokens=0, tile=64, programs=264) == 1
    assert choose_splits(pairs=1, max_tokens=10**7, tile=16, programs=10**5) == MAX_SPLITS
    assert choose_splits(pairs=4, max_tokens=131072, tile=64, programs=264, waves=2) == 132
    with pytest.raises(ValueError, match="pairs 0"):
        choose_splits(pairs=0, max_tokens=1, tile=64, programs=1)


def test_rows_beyond_a_program_are_more_blocks_and_fewer_splits() -> None:
    plan = TilePlan(tile=64, rows=16, sets=3, num_warps=4, stages=3, per_multiprocessor=2, wide=True)
    assert [plan.blocks(rows) for rows in (1, 48, 49, 192)] == [1, 1, 2, 4]
    one, two = (plan.splits(batch=1, kv_heads=2, query_rows=r, max_tokens=10**6, device=CPU) for r in (48, 96))
    assert (one, two) == (4, 2)  # 8 slots in the interpreter


def test_merged_parts_agree_with_float64_and_what_saw_nothing_counts_for_nothing() -> None:
    parts = Workspace.allocate(batch=2, q_tokens=3, query_heads=4, head_dim=32, splits=70, device=CPU)
    parts.partial.normal_()
    parts.statistics.uniform_(0.5, 3.0)
    parts.statistics[:, :, :, 5, 0] = -torch.inf  # this split saw nothing: what lies there is not read
    parts.statistics[:, :, :, 5, 1] = torch.nan
    parts.partial[:, :, :, 5] = torch.nan
    parts.statistics[1, 1, 1, :, 0] = -torch.inf  # this row saw nothing at all
    out = torch.full((2, 3, 4, 32), torch.nan)
    merge(parts, out)
    top, mass = parts.statistics.double().unbind(-1)
    best = top.amax(-1, keepdim=True).nan_to_num(0.0, neginf=0.0)
    weights = torch.exp2(top - best)
    sums = (weights[..., None] * parts.partial.double().nan_to_num(0.0)).sum(-2)
    truth = (sums / (weights * mass.nan_to_num(0.0)).sum(-1, keepdim=True)).nan_to_num(0.0)
    assert torch.allclose(out.double(), truth, rtol=1e-5, atol=1e-5)
    assert out[1, 1, 1].eq(0).all()


@pytest.mark.parametrize("piece", [16, 64])
@pytest.mark.parametrize(("per_word", "ggml"), [(2, False), (4, False), (4, True)])
def test_parts_that_lie_code_by_code_are_put_in_their_places(per_word: int, ggml: bool, piece: int) -> None:
    """The first codes of all words come first; GGML's word w of a group of 32 holds 2w, 2w + 16, 2w + 1, 2w + 17."""
    parts = Workspace.allocate(batch=1, q_tokens=2, query_heads=3, head_dim=64, splits=1, device=CPU)
    parts.statistics[..., 0], parts.statistics[..., 1] = 0.0, 1.0
    parts.partial.copy_(torch.arange(parts.partial.numel()).view(parts.partial.shape))
    out = torch.full((1, 2, 3, 64), torch.nan)
    merge(parts, out, per_word=per_word, ggml=ggml, piece=piece)
    places = {}
    for word in range(64 // per_word):
        for number in range(per_word):
            group, within = divmod(word, 8)
            mixed = 32 * group + (2 * within, 2 * within + 16, 2 * within + 1, 2 * within + 17)[number]
            places[mixed if ggml else word * per_word + number] = number * (64 // per_word) + word
    order = torch.tensor([places[at] for at in range(64)])
    assert torch.equal(out[0], parts.partial[0, :, :, 0][..., order])


def test_a_nan_of_one_split_reaches_its_row_and_no_other() -> None:
    parts = Workspace.allocate(batch=1, q_tokens=1, query_heads=2, head_dim=32, splits=3, device=CPU)
    parts.partial.normal_()
    parts.statistics.fill_(1.0)
    parts.statistics[0, 0, 1, 2] = torch.nan
    out = torch.zeros(1, 1, 2, 32)
    merge(parts, out)
    assert out[0, 0, 0].isfinite().all()
    assert out[0, 0, 1].isnan().all()


def test_a_workspace_of_another_call_is_refused() -> None:
    parts = Workspace.allocate(batch=1, q_tokens=1, query_heads=2, head_dim=32, splits=3, device=CPU)
    assert parts.bytes == 4 * (2 * 3 * 32 + 2 * 3 * 2)
    with pytest.raises(ValueError, match="does not belong"):
        merge(parts, torch.zeros(1, 2, 2, 32))


def test_alignment_is_that_of_the_worst_row() -> None:
    base = torch.zeros(4, 520, dtype=torch.uint8)
    assert alignment(base[:, :256]) == 8
    assert alignment(base[:, :256], base[:, 260:516]) == 4
    assert alignment(torch.zeros(4, 256, dtype=torch.uint8)) == 16
