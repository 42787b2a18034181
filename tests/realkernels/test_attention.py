"""Decode and prefill attention against float64: odd sizes, every tail, both tiers and dtypes, poisoned surroundings."""

import pytest
import torch
from realkernels.backend import Copies, Tier
from realkernels.gather import GatherBuffers, GatherPlan, gather_attend

from realkernels import reference
from realkernels.bounds import check_rows
from realkernels.rows import NO_BLOCK, select_rows
from realkernels.shape import QsaShape
from tests.realkernels.worlds import BACKENDS, SMALL, TOLERANCE, filled, poison

HALVES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("tail", [0, 1, 2, 3])
@pytest.mark.parametrize("name", BACKENDS)
def test_a_decode_step_agrees_with_float64(name: str, tail: int, dtype: torch.dtype) -> None:
    with filled(name, tokens=203, dtype=dtype, layers=2) as (made, cache):
        step = made.decode_step(cache, end=196 + tail)
        step.run()
        exact, error = step.verify()
        assert exact
        assert error < TOLERANCE[dtype]


@pytest.mark.parametrize("name", BACKENDS)
def test_the_shortest_sparse_context_and_the_whole_cache(name: str) -> None:
    with filled(name, tokens=67) as (made, cache):
        for end in (64, 67):
            step = made.decode_step(cache, end=end)
            step.run()
            assert step.verify()[0]
            assert step.verify()[1] < TOLERANCE[torch.float16]
        for end, words in ((63, "15 complete blocks, fewer than the 16"), (68, "does not fit planes of 67")):
            with pytest.raises(ValueError, match=words):
                made.decode_step(cache, end=end)


@pytest.mark.parametrize("tier", ["vram", "host"])
@pytest.mark.parametrize("name", BACKENDS)
def test_a_decode_step_reads_only_what_it_selected(name: str, tier: Tier) -> None:
    """Everything else is NaN: blocks that were not selected, and the tokens beyond the context."""
    with filled(name, tokens=203, tier=tier) as (made, cache):
        step = made.decode_step(cache, end=198)
        step.select()
        read = reference.selected_tokens(step.selected[0].long(), 198, 4)
        poison([cache.keys[0], cache.values[0]], read)
        step.gather()
        assert step.verify()[1] < TOLERANCE[torch.float16]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's on NaN, inside the interpreter
@pytest.mark.parametrize("plane", ["keys", "values"])
@pytest.mark.parametrize("name", BACKENDS)
def test_a_nan_stays_with_the_heads_that_share_its_kv_head(name: str, plane: str) -> None:
    with filled(name, tokens=200, layers=2) as (made, cache):
        step = made.decode_step(cache, end=200)
        step.select()
        getattr(cache, plane)[0][int(step.selected[0, 3]) * 4 + 1, 1, 5] = float("nan")
        step.gather()
        bad = step.output.isnan().any(dim=2)
        assert bad[0].tolist() == [False] * 3 + [True] * 3
        assert not bad[1].any()


@pytest.mark.parametrize("plan", [GatherPlan(blocks_per_split=4), GatherPlan(blocks_per_split=16, piece=16)])
def test_splits_that_hold_nothing_live_weigh_nothing(plan: GatherPlan) -> None:
    """Five blocks: the last split is mostly, or for a closed tail wholly, beyond the selection."""
    shape = QsaShape(query_heads=40, kv_heads=2, head_dim=32, index_dim=16, budget=16)
    source = torch.Generator().manual_seed(3)
    keys, values = (torch.randn(40, 2, 32, generator=source).half() for _ in range(2))
    query = torch.randn(40, 32, generator=source).half()
    selected = torch.tensor([7, 0, 9, 3], dtype=torch.int32)
    buffers = GatherBuffers.allocate(shape, plan, torch.device("cpu"))
    buffers.partial.fill_(float("nan"))
    output = torch.full_like(query, float("nan"))
    gather_attend(query, keys, values, selected, 40, output, buffers, shape, plan)
    truth = reference.sparse_attend(query, keys, values, selected.long(), 40, shape)
    torch.testing.assert_close(output.double(), truth, rtol=2e-3, atol=2e-3)


def test_impossible_plans_are_refused() -> None:
    plan = GatherPlan(blocks_per_split=2)
    buffers = GatherBuffers.allocate(SMALL, plan, torch.device("cpu"))
    empty = torch.empty(0)
    with pytest.raises(ValueError, match="below 16 tokens"):
        gather_attend(empty, empty, empty, empty, 100, empty, buffers, SMALL, plan)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("past", [0, 61, 130])
@pytest.mark.parametrize("name", BACKENDS)
def test_a_prefill_chunk_agrees_with_float64(name: str, past: int, dtype: torch.dtype) -> None:
    """From the first token, across the length at which selection begins, and well beyond."""
    with filled(name, tokens=past + 13, dtype=dtype) as (made, cache):
        chunk = made.prefill_chunk(cache, layer=0, past=past, rows=11, mode="in_place")
        chunk.run()
        assert chunk.verify(rows=64) < TOLERANCE[dtype]
        assert chunk.verify_selection(rows=64)
        assert chunk.link_bytes == 0


@pytest.mark.parametrize("tier", ["vram", "host"])
@pytest.mark.parametrize("copies", ["serial", "overlapped"])
@pytest.mark.parametrize("name", BACKENDS)
def test_staged_is_in_place(name: str, copies: Copies, tier: Tier) -> None:
    """With buckets of one block, of an odd number, of exactly the context and of more; beyond the context lies NaN."""
    with filled(name, tokens=300, tier=tier) as (made, cache):
        for plane in (cache.keys[0], cache.values[0]):
            plane[207:] = float("nan")
        direct = made.prefill_chunk(cache, layer=0, past=200, rows=7, mode="in_place")
        direct.run()
        assert direct.verify() < TOLERANCE[torch.float16]
        for bucket_tokens in (12, 100, 256, 300, 1024):
            staged = made.prefill_chunk(
                cache, layer=0, past=200, rows=7, mode="staged", bucket_tokens=bucket_tokens, copies=copies
            )
            staged.run()
            assert staged.verify() < TOLERANCE[torch.float16]
            torch.testing.assert_close(staged.output, direct.output, rtol=2e-3, atol=2e-3)
            assert staged.link_bytes == 2 * 256 * 2 * 32 * 2  # K and V of one page


@pytest.mark.parametrize("dtype", HALVES)
def test_both_backends_say_the_same(dtype: torch.dtype) -> None:
    results = []
    for name in BACKENDS:
        with filled(name, tokens=150, tier="host", dtype=dtype) as (made, cache):
            step = made.decode_step(cache, end=150)
            step.run()
            chunk = made.prefill_chunk(cache, layer=0, past=120, rows=9, mode="staged", bucket_tokens=40)
            chunk.run()
            results.append((step.selected.sort().values, step.output, chunk.selection, chunk.output))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("name", BACKENDS)
def test_a_second_run_with_fresh_data_owes_nothing_to_the_first(name: str) -> None:
    with filled(name, tokens=260) as (made, cache):
        step = made.decode_step(cache, end=259)
        chunk = made.prefill_chunk(
            cache, layer=0, past=250, rows=9, mode="staged", bucket_tokens=64, copies="overlapped"
        )
        for seed in (1, 2):
            step.query.normal_()
            step.index_query.normal_()
            step.output.fill_(float("nan"))
            made.capture(step.run)()
            assert step.verify()[0]
            assert step.verify()[1] < TOLERANCE[torch.float16]
            chunk.refresh(seed)
            chunk.run()
            assert chunk.verify() < TOLERANCE[torch.float16]


def test_a_wrong_result_does_not_pass_the_checks() -> None:
    with filled("cpu", tokens=200) as (made, cache):
        step = made.decode_step(cache, end=200)
        with pytest.raises(IndexError, match="block -1"):
            step.verify()
        step.run()
        left_out = min(set(range(50)) - set(step.selected[0].tolist()))
        step.selected[0, 0] = left_out
        assert not step.verify()[0]
        step.output[0, 0] += 1.0
        assert step.verify()[1] > 0.1
        chunk = made.prefill_chunk(cache, layer=0, past=190, rows=2, mode="in_place")
        assert chunk.verify() != chunk.verify()  # the output is still poisoned
        chunk.selection[0] = torch.tensor([*range(16), 47], dtype=torch.int32)
        assert not chunk.verify_selection()


def test_rows_short_of_blocks_are_filled_up() -> None:
    selection = select_rows(torch.randn(6, 4, 16).half(), torch.randn(3, 16).half(), 3, SMALL)
    assert selection[:, :4].tolist() == [
        [0, 1, NO_BLOCK, NO_BLOCK],
        *[[0, 1, NO_BLOCK, NO_BLOCK]] * 3,
        *[[0, 1, 2, NO_BLOCK]] * 2,
    ]
    assert bool((selection[:, 4:] == NO_BLOCK).all())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_nan_in_a_pooled_key_does_not_spend_the_budget() -> None:
    pooled = torch.rand(50, 16).half()
    pooled[7] = float("nan")
    selection = select_rows(torch.rand(3, 4, 16).half(), pooled, 197, SMALL)
    assert not bool((selection == 7).any())
    assert bool(((selection != NO_BLOCK).sum(dim=1) == 17).all())


@pytest.mark.parametrize("wrong", [[0, 1, 3], [-1, 0, 2], [1, 1, 2], [1, 0, 2]])
def test_the_check_of_rows_refuses_what_a_row_must_not_see(wrong: list[int]) -> None:
    shape = QsaShape(budget=8)
    check_rows(torch.tensor([[0, 2, NO_BLOCK]], dtype=torch.int32), past=9, shape=shape)
    with pytest.raises(IndexError):
        check_rows(torch.tensor([wrong], dtype=torch.int32), past=9, shape=shape)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rows": 0}, "do not lie in planes"),
        ({"past": 195}, "rows 195 to 201 do not lie in planes of 200"),
        ({"mode": "staged"}, "bucket_tokens is 0"),
        ({"mode": "staged", "bucket_tokens": 6}, "bucket_tokens is 6, not a positive multiple of 4"),
        ({"mode": "sideways"}, "no mode 'sideways'"),
        ({"mode": "staged", "bucket_tokens": 8, "copies": "twice"}, "no copies 'twice'"),
    ],
)
def test_impossible_chunks_are_refused(change: dict[str, object], words: str) -> None:
    asked = {"layer": 0, "past": 100, "rows": 7, "mode": "in_place"} | change
    with filled("cpu", tokens=200) as (made, cache), pytest.raises(ValueError, match=words):
        made.prefill_chunk(cache, **asked)  # type: ignore[arg-type]
