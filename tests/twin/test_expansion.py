"""Prefill that unpacks the cache piece by piece: bytes, operations and calls on paper, and a scratch of one size."""

import pytest
from msgspec.structs import replace

from hwprofiles import load_profile
from twin.case import Case
from twin.errors import MissingRate
from twin.expansion import attend_calls, expanded_ops, expands, fold_bytes, scratch_bytes
from twin.format_ops import Heads, format_case, prefill_ops
from twin.layouts.layout import Pass
from twin.layouts.vram import LAYOUT
from twin.memory import plan_memory
from twin.question import Question
from twin.resolve import resolve
from twin.roofline import Roofs

PIECE = 8_192


def case_of(name: str = "int4_per_token_head") -> Case:
    return format_case(name)


def test_bytes_are_codes_read_numbers_written_and_read_again() -> None:
    unpack, attend, _ = prefill_ops(case_of(), ctx_tokens=3 * PIECE, rows=512)
    codes, numbers = 2 * 4 * (128 + 4), 2 * 4 * 256 * 2
    assert (unpack.kernel, unpack.part, unpack.calls) == ("expand/twin/int4_per_token_head", "unpack", 3)
    assert unpack.vram_bytes * 3 == 3 * PIECE * (codes + numbers)
    assert attend.vram_bytes * attend.calls == 3 * PIECE * numbers
    assert attend.kernel == "attend_dense/twin/bf16"
    assert attend.dtype == "bf16"


@pytest.mark.parametrize(("rows", "programs"), [(1, 24), (64, 24), (65, 48), (2_048, 768)])
def test_programs_of_flash_attention_take_64_rows_of_a_wide_head(rows: int, programs: int) -> None:
    _, attend, _ = prefill_ops(case_of(), ctx_tokens=2 * PIECE, rows=rows)
    assert attend.grid == (programs, PIECE // 64, rows * 24 * 257 * 4)


def test_narrower_heads_have_larger_tiles() -> None:
    heads = Heads(query_heads=8, kv_heads=2, head_dim=128)
    _, attend, _ = prefill_ops(format_case("q8_0", heads=heads), ctx_tokens=1_000, rows=129)
    assert attend.grid == (2 * 8, 8, 129 * 8 * 129 * 4)


def test_operations_are_those_of_every_row_and_what_it_sees() -> None:
    past, rows = 2 * PIECE - 100, 512
    _, attend, _ = prefill_ops(case_of(), ctx_tokens=past + rows, rows=rows)
    pairs = sum(past + row + 1 for row in range(rows))
    assert attend.flops * attend.calls == pytest.approx(4 * 24 * 256 * pairs)


@pytest.mark.parametrize(
    ("past", "rows"), [(0, 1), (0, 20_000), (100, 8_092), (8_191, 2), (8_192, 8_192), (40_000, 300)]
)
def test_calls_and_folds_are_those_of_the_kernel_s_own_loop(past: int, rows: int) -> None:
    chunk = pytest.importorskip("realkernels.kernels.prefill", exc_type=ImportError)
    calls = [
        call
        for first, last in chunk.kv_chunks(past + rows, PIECE)
        for call in chunk.calls_of(first, last, past_tokens=past, q_tokens=rows)
    ]
    step = Pass(past=past, rows=rows)
    assert attend_calls(case_of(), step) == len(calls)
    results = sum(call.q_to - call.q_from for call in calls)
    assert fold_bytes(case_of(), step) == 24 * 256 * ((results + rows) * 2 + 2 * (results - rows) * 4)
    assert PIECE == chunk.KV_CHUNK_TOKENS == case_of().rules.prefill_piece_tokens


def test_the_scratch_is_that_of_the_kernel_and_has_one_size() -> None:
    torch = pytest.importorskip("torch")
    from realkernels.kernels.prefill import ChunkScratch

    case = case_of()
    made = ChunkScratch.allocate(
        kv_chunk_tokens=PIECE, q_tokens=64, query_heads=24, kv_heads=4, head_dim=256, dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )  # fmt: skip
    result = 64 * 24 * 256 * 2
    assert scratch_bytes(replace(case, chunk_tokens=64)) == made.bytes + result
    longer = replace(case, question=replace(case.question, ctx_tokens=10**6))
    assert LAYOUT.working_bytes(longer) == LAYOUT.working_bytes(case) == {"prefill scratch": scratch_bytes(case)}


def test_a_plan_holds_the_scratch() -> None:
    profile = load_profile("h200")
    plans = [
        plan_memory(
            resolve(Question(ctx_tokens=ctx, model="qwen3.8-27b", engine="twin", layout="vram", kv_dtype="q8_0")),
            profile,
        )
        for ctx in (4_096, 131_072)
    ]
    sizes = {plan.devices()[0].fixed["prefill scratch"] for plan in plans}
    assert sizes == {PIECE * 2 * 4 * 256 * 2 + 4_096 * 24 * (256 * (4 + 2) + 4)}


def test_other_engines_and_sparse_models_read_the_cache_as_it_is() -> None:
    assert expands(case_of())
    assert expands(case_of("bf16"))
    other = resolve(Question(ctx_tokens=4_096, model="qwen3.8-27b", engine="vllm", kv_dtype="fp8"))
    assert not expands(other)
    assert LAYOUT.working_bytes(other) == {}
    assert not expands(resolve(Question(ctx_tokens=4_096, engine="twin", layout="vram", kv_dtype="fp16")))
    assert LAYOUT.bucket_tokens(other) == 0
    assert LAYOUT.bucket_tokens(case_of()) == PIECE


def test_a_chunk_appends_unpacks_attends_and_folds_in_turn() -> None:
    (block,) = LAYOUT.prefill_blocks(case_of(), Pass(past=PIECE, rows=512), 0, times=16)
    assert [op.part for op in block.ops] == ["append", "unpack", "attention", "merge"]
    assert [op.after for op in block.ops] == [(), (0,), (1,), (2,)]
    assert block.times == 16


def test_work_grows_with_the_context_and_the_batch() -> None:
    case = case_of()
    one, two = (expanded_ops(case, Pass(past=PIECE, rows=512, batch=batch), 0) for batch in (1, 2))
    for single, double in zip(one, two, strict=True):
        assert double.calls == 2 * single.calls
        assert double.vram_bytes == pytest.approx(single.vram_bytes)
    shorter, longer = (prefill_ops(case, ctx_tokens=ctx, rows=512)[0] for ctx in (PIECE, PIECE + 1))
    assert longer.calls * longer.vram_bytes > shorter.calls * shorter.vram_bytes


def test_numbers_of_fp32_have_four_bytes() -> None:
    heads = Heads(query_heads=4, kv_heads=2, head_dim=64)
    unpack, _, _ = prefill_ops(format_case("fp32", heads=heads), ctx_tokens=1_024, rows=1)
    assert unpack.vram_bytes == 1_024 * 2 * (2 * 2 * 64 * 4)


def test_a_machine_without_the_rate_says_which_one_is_missing() -> None:
    unpack, _, _ = prefill_ops(case_of(), ctx_tokens=PIECE, rows=512)
    profile = replace(load_profile("h200"), kernels={})
    with pytest.raises(MissingRate, match="no rate for expand/twin/int4_per_token_head"):
        Roofs(profile).cost(unpack)
