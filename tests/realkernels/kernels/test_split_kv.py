"""Splits of sequences, the codecs' plans, and combining what the splits give."""

import pytest
import torch

from realkernels.codecs import codec_named
from realkernels.kernels.query_sets import set_count, set_first, set_width
from realkernels.kernels.split_kv import PlanCase, TilePlan, Workspace, alignment, combine_splits, even_splits

CPU = torch.device("cpu")


@pytest.mark.parametrize("pairs", [1, 4, 12, 32, 48, 96, 144])
@pytest.mark.parametrize("tiles", [1, 7, 97, 769, 3_072])
def test_splits_leave_little_of_a_device_idle(pairs: int, tiles: int) -> None:
    splits = even_splits(pairs=pairs, tiles=tiles, slots=264)
    assert 1 <= splits <= min(tiles, 256)
    rounds = -(-pairs * splits // 264)
    if pairs * tiles >= 264 * 4:
        assert pairs * tiles / (264 * rounds * -(-tiles // splits)) > 0.7


def test_rows_beyond_a_thread_block_are_more_blocks_and_fewer_splits() -> None:
    plan = TilePlan(tile=64, rows=16, sets=3, num_warps=4, stages=3, per_multiprocessor=2)
    assert [plan.blocks(rows) for rows in (1, 48, 49, 192)] == [1, 1, 2, 4]
    sizes = {"batch": 1, "query_heads": 24, "kv_heads": 2, "head_dim": 16, "tokens": 10**6, "device": CPU}
    splits = [plan.workspace(q_tokens=tokens, **sizes).splits for tokens in (4, 8)]
    assert splits == [4, 2]  # 8 slots in the interpreter


@pytest.mark.parametrize(
    ("name", "sizes", "expected"),
    [
        ("bf16", {"q_rows": 6, "large": False}, {"stages": 2}),
        ("int8_per_token_head", {"q_rows": 6, "aligned": 4}, {"stages": 2}),
        ("int8_per_token_head", {"q_rows": 24}, {"rows": 32, "across": True}),
        ("int8_per_token_head", {"q_rows": 24, "head_dim": 128}, {"across": False, "tile": 128}),
        ("int8_per_token_head", {"q_rows": 24, "aligned": 4}, {"across": False}),
        ("int8_per_token_head", {"q_rows": 24, "warpgroups": False}, {"across": False}),
        ("int8_per_token_head", {"q_rows": 48}, {"rows": 16, "sets": 3, "across": False}),
        ("fp8", {"q_rows": 48, "per_token": False}, {"rows": 48, "sets": 1, "across": True}),
        ("int4_per_token_head", {"q_rows": 48, "large": False}, {"rows": 8, "sets": 3, "tile": 64}),
        ("q4_0", {"q_rows": 48, "aligned": 2}, {"rows": 16, "num_warps": 8}),
        ("q5_1", {"q_rows": 16}, {"rows": 8, "sets": 2}),
        ("q5_1", {"q_rows": 24}, {"rows": 8, "sets": 3}), ("q5_1", {"q_rows": 25}, {"rows": 32, "sets": 1}),
        ("iq4_nl", {"q_rows": 24, "large": False}, {"rows": 8, "sets": 3, "per_multiprocessor": 1}),
        ("q8_0", {"q_rows": 6, "large": False}, {"stages": 2, "per_multiprocessor": 1}),
        ("turboquant_4bit_nc", {"q_rows": 30, "aligned": 2}, {"rows": 16}),
        ("turboquant_4bit_nc", {"q_rows": 30, "large": False}, {"rows": 8, "sets": 2}),
        ("kvarn_k4v2_g64", {"q_rows": 48, "large": False, "tile_tokens": 64}, {"tile": 64, "per_multiprocessor": 2}),
    ],
)  # fmt: skip
def test_plans_know_small_devices_and_how_rows_are_aligned(
    name: str, sizes: dict[str, int], expected: dict[str, object]
) -> None:
    """Plans of large devices for all numbers of rows are held equal to the twin's copy of them elsewhere."""
    plan = codec_named(name).decode_form.plan(PlanCase(**{"head_dim": 256, **sizes}))
    assert {key: getattr(plan, key) for key in expected} == expected


@pytest.mark.parametrize("rows", [8, 16, 24, 32, 40, 48, 64, 112])
@pytest.mark.parametrize("most", [8, 16, 64])
def test_sets_are_powers_of_two_side_by_side(rows: int, most: int) -> None:
    widths = [set_width(rows, most, i) for i in range(set_count(rows, most))]
    assert sum(widths) == rows
    assert all(width.bit_count() == 1 and width <= most for width in widths)
    assert [set_first(rows, most, i) for i in range(len(widths))] == [sum(widths[:i]) for i in range(len(widths))]


def parts_of(splits: int, *sizes: int) -> Workspace:
    batch, q_tokens, query_heads, head_dim = sizes
    return Workspace.allocate(
        batch=batch, q_tokens=q_tokens, query_heads=query_heads, head_dim=head_dim, splits=splits, device=CPU
    )


def test_combined_parts_agree_with_float64_and_what_saw_nothing_counts_for_nothing() -> None:
    parts = parts_of(70, 2, 3, 4, 32)
    parts.partial.normal_()
    parts.statistics.uniform_(0.5, 3.0)
    parts.statistics[:, :, :, 5, 0] = -torch.inf  # this split saw nothing: what lies there is not read
    parts.statistics[:, :, :, 5, 1] = torch.nan
    parts.partial[:, :, :, 5] = torch.nan
    parts.statistics[1, 1, 1, :, 0] = -torch.inf  # this row saw nothing at all
    out = torch.full((2, 3, 4, 32), torch.nan)
    combine_splits(parts, out)
    top, mass = parts.statistics.double().unbind(-1)
    best = top.amax(-1, keepdim=True).nan_to_num(0.0, neginf=0.0)
    weights = torch.exp2(top - best)
    sums = (weights[..., None] * parts.partial.double().nan_to_num(0.0)).sum(-2)
    truth = (sums / (weights * mass.nan_to_num(0.0)).sum(-1, keepdim=True)).nan_to_num(0.0)
    assert torch.allclose(out.double(), truth, rtol=1e-5, atol=1e-5)
    assert out[1, 1, 1].eq(0).all()


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize(("per_word", "ggml"), [(2, False), (4, False), (4, True)])
def test_parts_that_lie_code_by_code_are_put_in_their_places(per_word: int, ggml: bool, block: int) -> None:
    """The first codes of all words come first; GGML's word w of a group of 32 holds 2w, 2w + 16, 2w + 1, 2w + 17."""
    parts = parts_of(1, 1, 2, 3, 64)
    parts.statistics[..., 0], parts.statistics[..., 1] = 0.0, 1.0
    parts.partial.copy_(torch.arange(parts.partial.numel()).view(parts.partial.shape))
    out = torch.full((1, 2, 3, 64), torch.nan)
    combine_splits(parts, out, per_word=per_word, ggml=ggml, block=block)
    places = {}
    for word in range(64 // per_word):
        for number in range(per_word):
            group, within = divmod(word, 8)
            mixed = 32 * group + (2 * within, 2 * within + 16, 2 * within + 1, 2 * within + 17)[number]
            places[mixed if ggml else word * per_word + number] = number * (64 // per_word) + word
    order = torch.tensor([places[at] for at in range(64)])
    assert torch.equal(out[0], parts.partial[0, :, :, 0][..., order])


def test_a_nan_of_one_split_reaches_its_row_and_no_other() -> None:
    parts = parts_of(3, 1, 1, 2, 32)
    parts.partial.normal_()
    parts.statistics.fill_(1.0)
    parts.statistics[0, 0, 1, 2] = torch.nan
    out = torch.zeros(1, 1, 2, 32)
    combine_splits(parts, out)
    assert out[0, 0, 0].isfinite().all()
    assert out[0, 0, 1].isnan().all()


def test_a_workspace_of_another_call_is_refused() -> None:
    with pytest.raises(ValueError, match="does not belong"):
        combine_splits(parts_of(3, 1, 1, 2, 32), torch.zeros(1, 2, 2, 32))


def test_alignment_is_that_of_the_worst_row() -> None:
    base = torch.zeros(4, 520, dtype=torch.uint8)
    assert alignment(base[:, :256]) == 8
    assert alignment(base[:, :256], base[:, 260:516]) == 4
    assert alignment(torch.zeros(4, 256, dtype=torch.uint8)) == 16
