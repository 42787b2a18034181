"""Sparse decode and prefill against float64: odd sizes, every tail, both tiers and types, poisoned surroundings."""

import math

import pytest
import torch

from realkernels import reference
from realkernels.caches.qsa import Tier
from realkernels.kernels.sparse_prefill import NO_BLOCK, select_rows
from realkernels.timed.sparse import Copies, DecodeGather, DecodeSelect, DecodeStep, PrefillAttend, PrefillSelect
from tests.realkernels.worlds import FORMS, HALVES, SMALL, TIERS, TOLERANCE, filled, poison

HALF = torch.float16


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("tail", [0, 1, 2, 3])
@pytest.mark.parametrize("kernels", FORMS)
def test_a_decode_step_agrees_with_float64(kernels: str, tail: int, dtype: torch.dtype) -> None:
    """Twice, so that the second owes nothing to the first; with products in between."""
    with filled(kernels, tokens=203, dtype=dtype, layers=2) as cache:
        step = DecodeStep(cache, ctx_tokens=196 + tail, backbone_bytes=2**13)
        assert step.verify() < TOLERANCE[dtype]
        assert 0 < step.verify() < TOLERANCE[dtype]


@pytest.mark.parametrize("kernels", FORMS)
def test_the_shortest_sparse_context_and_the_whole_cache(kernels: str) -> None:
    with filled(kernels, tokens=67) as cache:
        for ctx_tokens in (64, 67):
            assert DecodeStep(cache, ctx_tokens=ctx_tokens).verify() < TOLERANCE[HALF]
            assert DecodeSelect(cache, ctx_tokens=ctx_tokens).verify() == 0
        for ctx_tokens, words in ((63, "15 complete blocks, fewer than the 16"), (68, "does not fit planes of 67")):
            with pytest.raises(ValueError, match=words):
                DecodeStep(cache, ctx_tokens=ctx_tokens)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("kernels", FORMS)
def test_a_gather_reads_only_what_was_selected(kernels: str, tier: Tier) -> None:
    """Everything else is NaN: blocks that were not selected, and the tokens beyond the context."""
    with filled(kernels, tokens=203, tier=tier) as cache:
        gather = DecodeGather(cache, ctx_tokens=198)
        poison([cache.keys[0], cache.values[0]], reference.selected_tokens(gather.selected[0].long(), 198, 4))
        gather.run()
        assert gather.error() < TOLERANCE[HALF]
        assert gather.moved_bytes == 64 * 2 * 2 * 32 * 2
        assert gather.link_bytes == (gather.moved_bytes if tier == "host" else 0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's on NaN, inside the interpreter
@pytest.mark.parametrize("plane", ["keys", "values"])
@pytest.mark.parametrize("kernels", FORMS)
def test_a_nan_stays_with_the_heads_that_share_its_kv_head(kernels: str, plane: str) -> None:
    with filled(kernels, tokens=200, layers=2) as cache:
        gather = DecodeGather(cache, ctx_tokens=200)
        getattr(cache, plane)[0][int(gather.selected[0, 3]) * 4 + 1, 1, 5] = float("nan")
        gather.run()
        bad = gather.output.isnan().any(dim=2)
        assert bad[0].tolist() == [False] * 3 + [True] * 3
        assert not bad[1].any()
        assert gather.error() == math.inf


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("past", [0, 61, 130])
@pytest.mark.parametrize("kernels", FORMS)
def test_a_prefill_chunk_agrees_with_float64(
    kernels: str, past: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first token, across the length at which selection begins, and well beyond."""
    monkeypatch.setattr("realkernels.timed.sparse.CHECKED_ROWS", 64)
    with filled(kernels, tokens=past + 13, dtype=dtype) as cache:
        assert PrefillAttend(cache, ctx_tokens=past + 11, q_tokens=11).verify() < TOLERANCE[dtype]
        assert PrefillSelect(cache, ctx_tokens=past + 11, q_tokens=11).verify() == 0


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("copies", ["serial", "overlapped"])
@pytest.mark.parametrize("kernels", FORMS)
def test_staged_is_in_place(kernels: str, copies: Copies, tier: Tier) -> None:
    """With buckets of one block, of an odd number, of exactly the context and of more; beyond the context lies NaN."""
    with filled(kernels, tokens=300, tier=tier) as cache:
        for plane in (cache.keys[0], cache.values[0]):
            plane[207:] = float("nan")
        direct = PrefillAttend(cache, ctx_tokens=207, q_tokens=7)
        assert direct.verify() < TOLERANCE[HALF]
        assert direct.link_bytes == (7 * 64 * 2 * 2 * 32 * 2 if tier == "host" else 0)
        for bucket_tokens in (12, 100, 256, 300, 1024):
            staged = PrefillAttend(cache, ctx_tokens=207, q_tokens=7, bucket_tokens=bucket_tokens, copies=copies)
            staged.query.copy_(direct.query)
            staged.selection.copy_(direct.selection)
            staged.run()
            assert staged.error() < TOLERANCE[HALF]
            torch.testing.assert_close(staged.output, direct.output, rtol=2e-3, atol=2e-3)
            assert staged.moved_bytes == 2 * 256 * 2 * 32 * 2  # K and V of one page
            assert staged.link_bytes == (staged.moved_bytes if tier == "host" else 0)


def test_wrong_results_do_not_pass() -> None:
    with filled("torch", tokens=200) as cache:
        step = DecodeStep(cache, ctx_tokens=200)
        assert step.error() == math.inf  # nothing is selected yet
        step.run()
        assert step.error() < TOLERANCE[HALF]
        step.output[0, 0] += 1.0
        assert 0.1 < step.error() < math.inf
        select = DecodeSelect(cache, ctx_tokens=200)
        assert not select.finite()
        select.run()
        left_out = min(set(range(50)) - set(select.selected[0].tolist()))
        for wrong in (left_out, 50, int(select.selected[0, 1])):
            select.selected[0, 0] = wrong
            assert select.error() == math.inf
        chunk = PrefillAttend(cache, ctx_tokens=192, q_tokens=2)
        assert chunk.error() == math.inf  # the output is still poisoned
        chunk.run()
        chunk.blank()
        assert not chunk.finite()
        rows = PrefillSelect(cache, ctx_tokens=192, q_tokens=2)
        assert rows.error() == math.inf
        rows.run()
        assert rows.error() == 0
        rows.selection[0] = torch.tensor([*range(16), 47], dtype=torch.int32)
        assert rows.error() == math.inf
        rows.selection[0] = torch.tensor([0, 47, *[NO_BLOCK] * 15], dtype=torch.int32)
        assert rows.error() == math.inf


def test_rows_short_of_blocks_are_filled_up() -> None:
    selection = select_rows(torch.randn(6, 4, 16).half(), torch.randn(3, 16).half(), 3, SMALL)
    short, whole = [0, 1, NO_BLOCK, NO_BLOCK], [0, 1, 2, NO_BLOCK]
    assert selection[:, :4].tolist() == [*[short] * 4, *[whole] * 2]
    assert bool((selection[:, 4:] == NO_BLOCK).all())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_nan_in_a_pooled_key_does_not_spend_the_budget() -> None:
    pooled = torch.rand(50, 16).half()
    pooled[7] = float("nan")
    selection = select_rows(torch.rand(3, 4, 16).half(), pooled, 197, SMALL)
    assert not bool((selection == 7).any())
    assert bool(((selection != NO_BLOCK).sum(dim=1) == 17).all())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q_tokens": 0}, "do not lie in planes"),
        ({"ctx_tokens": 202}, "rows 195 to 201 do not lie in planes of 200"),
        ({"bucket_tokens": -4}, "bucket_tokens is -4"),
        ({"bucket_tokens": 6}, "bucket_tokens is 6, not a multiple of 4"),
        ({"bucket_tokens": 8, "copies": "twice"}, "no copies 'twice'"),
    ],
)
def test_impossible_chunks_are_refused(change: dict[str, object], words: str) -> None:
    with filled("torch", tokens=200) as cache, pytest.raises(ValueError, match=words):
        PrefillAttend(cache, **{"ctx_tokens": 107, "q_tokens": 7} | change)  # type: ignore[arg-type]
