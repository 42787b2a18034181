"""What attention issues, on paper: dense and sparse, selection, and prefill over a dequantised history."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from hwprofiles import load_profile
from tests.twin.memory.pool_worlds import pooled
from tests.worlds import LAWS, case, flash_next, model, step, with_rules
from twin.ask.question import Question
from twin.ask.resolve import resolve
from twin.cost.roofline import Roofs
from twin.engines.rules import OwnKernelRules
from twin.errors import MissingRate
from twin.layouts.vram import LAYOUT
from twin.memory.plan import plan_memory
from twin.operations import attention
from twin.operations.format_ops import Heads, format_case, prefill_ops
from twin.operations.occupancy import DecodePlan, ThreadBlock
from twin.operations.ops import Engine


@pytest.mark.parametrize(("name", "token_bytes", "dequantised", "verifies"), [
    ("bf16", 64, 0, "split_kv"), ("fp8", 32, 32, "flashinfer"), ("int8_per_token_head", 48, 32, "split_kv"),
])  # fmt: skip
@pytest.mark.parametrize(("q_tokens", "batch"), [(1, 3), (4, 1)])
def test_a_step_reads_and_dequantises_every_cached_token_once_however_many_ask(
    name: str, token_bytes: int, dequantised: int, verifies: str, *, q_tokens: int, batch: int
) -> None:
    """2 x 2 x 8 elements of K and V a token, read with the tokens before; 4 x 4 x 8 operations a pair."""
    of_case = pooled(kv_dtype=name)
    read = attention.decode_attention(of_case, step(100, q_tokens, batch), 2, after=(5,))
    tokens = (100 + q_tokens) * batch
    assert (read.vram_bytes, read.dequantised_elements) == (tokens * token_bytes, tokens * dequantised)
    assert read.flops == 4 * 4 * 8 * q_tokens * tokens
    assert (read.grain, read.device, read.after, read.part, read.dtype) == (q_tokens, 2, (5,), "attention", "bf16")
    assert read.kernel == f"attend_decode/{of_case.backend if q_tokens == 1 else verifies}/{name}"
    assert read.split_kv is None  # vLLM's plans are not known


@pytest.mark.parametrize("q_tokens", [1, 2, 4, 8])
def test_more_query_rows_than_a_thread_block_holds_dequantise_the_cache_again(q_tokens: int) -> None:
    """Groups of 2 query heads in thread blocks of 2 or 4 rows: rows are padded, partial results kept for each."""
    plan = DecodePlan(thread_blocks=(ThreadBlock(64, 2, 1, 2), ThreadBlock(64, 4, 1, 2)))
    rules = replace(pooled().rules, own_kernels=OwnKernelRules(decode_plans={"fp8": plan}))
    of_case = replace(pooled(kv_dtype="fp8"), rules=rules)
    read = attention.decode_attention(of_case, step(100 - q_tokens, q_tokens), 0, after=())
    count = -(-q_tokens * 2 // 4)
    held = 2 if q_tokens == 1 else 4
    elements = 100 * 2 * 8
    assert (read.dequantised_elements, read.flops) == (2 * elements * count, 4 * elements * count * held)
    assert read.vram_bytes == 100 * of_case.plane_bytes
    assert read.split_kv is not None
    assert (read.split_kv.pairs, read.split_kv.q_rows) == (2 * count, held)
    assert read.split_kv.partial_bytes == q_tokens * 4 * (8 + 2) * 4


@pytest.mark.parametrize(("kv_heads", "head_dim", "batch"), [(1, 8, 1), (4, 16, 2), (8, 128, 1)])
def test_a_chunk_is_written_once_in_16_bits_and_once_in_its_format(kv_heads: int, head_dim: int, batch: int) -> None:
    asked = pooled(kv_dtype="fp8")
    shape = replace(asked.attention, query_heads=8, kv_heads=kv_heads, head_dim=head_dim)
    write = attention.append(asked.of(shape), step(1000, 6, batch), 1)
    assert write.vram_bytes == 2 * kv_heads * head_dim * (2 + 1) * 6 * batch
    assert (write.grain, write.device, write.after, write.flops) == (6 * batch, 1, (), 0)
    assert write.kernel == "append/flashinfer/fp8"


@pytest.mark.parametrize(("kv_tokens", "q_tokens", "pairs"), [(0, 1, 1), (0, 4, 10), (6, 1, 7), (6, 3, 7 + 8 + 9)])
@pytest.mark.parametrize("batch", [1, 2])
def test_dense_attention_multiplies_each_token_with_all_before_it(
    kv_tokens: int, q_tokens: int, pairs: int, batch: int
) -> None:
    """An engine with backends writes the chunk first; exllamav3's kernels do both in one."""
    chunk = step(kv_tokens, q_tokens, batch)
    (alone,) = attention.dense_graph(case(), chunk, 0, times=1, link_bytes=10).ops
    assert alone.vram_bytes + alone.link_bytes == (kv_tokens + q_tokens) * 64 * batch
    assert alone.link_bytes == 10
    graph = attention.dense_graph(pooled(), chunk, 0, times=5, link_bytes=0)
    write, attend = graph.ops
    assert (write.part, attend.part, attend.after, graph.times) == ("append", "attention", (0,), 5)
    assert attend.kernel == "attend_dense/flash_attention/bf16"
    assert alone.flops == attend.flops == 4 * 4 * 8 * pairs * batch


@LAWS
@given(st.integers(0, 10**5), st.integers(1, 500), st.integers(1, 500))
def test_a_prompt_in_two_chunks_pairs_as_many_tokens_as_in_one(kv_tokens: int, one: int, two: int) -> None:
    chunks = step(kv_tokens, one + two), step(kv_tokens, one), step(kv_tokens + one, two)
    whole, *parts = (attention.dense_graph(pooled(), chunk, 0, times=1, link_bytes=0).ops for chunk in chunks)
    for op in (0, 1):
        assert whole[op].flops == sum(part[op].flops for part in parts)
    assert whole[0].vram_bytes == sum(part[0].vram_bytes for part in parts)
    assert whole[1].vram_bytes <= sum(part[1].vram_bytes for part in parts)


# Selection

KEY_BYTES = 4 * 2
"""A pooled key of the toy model: 4 elements in fp16."""

SCORE_FLOPS = 2 * 2 * 4
"""Two index heads of 4 elements."""


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("where", ["vram", "host"])
def test_a_decode_step_scores_every_complete_block_once(batch: int, where: str) -> None:
    """103 tokens of each sequence hold 25 complete blocks; a score is written and read in fp16."""
    scan, select = attention.decode_selection(case(pooled=where), step(102, batch=batch), 0, first=1)
    keys = 25 * batch * KEY_BYTES
    engine, vram_bytes, link_bytes = (Engine.SM, keys, 0) if where == "vram" else (Engine.H2D, 0, keys)
    assert (scan.engine, scan.vram_bytes, scan.link_bytes) == (engine, vram_bytes, link_bytes)
    assert scan.flops == 25 * batch * SCORE_FLOPS
    assert select.vram_bytes == 25 * batch * 2 * 2
    assert (scan.after, select.after) == ((0,), (1,))


@pytest.mark.parametrize(("q_tokens", "batch", "slabs"), [(8, 3, 6), (9, 1, 3), (4, 2, 2), (1, 1, 1)])
@pytest.mark.parametrize(("first", "after"), [(0, ()), (3, (2,))])
def test_a_chunk_is_scored_slab_by_slab(
    q_tokens: int, batch: int, slabs: int, first: int, after: tuple[int, ...]
) -> None:
    """Slabs of 4 each read all pooled keys; all of them together score every token against all before it, once."""
    chunk = step(32, q_tokens, batch)
    score, select = attention.prefill_selection(case(rules={"score_rows": 4}), chunk, 0, first=first)
    scores = batch * sum(range(33, 33 + q_tokens)) / 4
    keys = slabs * ((32 + q_tokens) // 4) * KEY_BYTES
    assert score.calls == select.calls == slabs
    assert score.flops * slabs == pytest.approx(scores * SCORE_FLOPS)
    assert score.vram_bytes * slabs == pytest.approx(keys + 2 * scores)
    assert select.vram_bytes * slabs == pytest.approx(2 * scores)
    assert (score.after, select.after) == (after, (first,))
    over_link, _ = attention.prefill_selection(case(pooled="host", rules={"score_rows": 4}), chunk, 0, first=first)
    assert (over_link.engine, over_link.link_bytes * slabs) == (Engine.H2D, keys)


SPLIT = {"splits_selection": True}


def test_groups_of_heads_are_padded_to_whole_tiles_and_partials_and_sums_pass_through_memory() -> None:
    """12 query heads a KV head fill a tile of 16; 2 of the toy model too.

    fp32 partials are written and read unless the kernel carries the sum itself, which is read and written.
    """
    assert attention.padded_heads(flash_next()) == attention.padded_heads(case()) == 2 * 16
    assert [attention.padded_heads(case(rules={"head_tile": tile})) for tile in (1, 2, 3)] == [4, 4, 6]
    for rules, elements in (({}, 2 * 32 + 2 * 4), (SPLIT, 2 * 4)):
        combine = attention.combine_partials(case(rules=rules), step(100, 8), 0, after=(1,))
        assert combine.vram_bytes == 8 * elements * 8 * 4


@LAWS
@given(st.integers(1, 5000))
def test_an_engine_masks_its_padded_selection_in_every_bucket_or_splits_it(buckets: int) -> None:
    """Split, at least the 513 blocks of 4 over all buckets, at most a tile of 32 tokens more in each."""
    whole = flash_next()
    assert attention.issued_tokens(whole, buckets) == 2080
    assert attention.issued_flops(whole, 1024, buckets) == 4 * 1024 * 2080 * 32 * 256
    split = replace(whole, rules=with_rules(whole.rules, **SPLIT))
    assert 513 * 4 * (1 - 1e-9) <= buckets * attention.issued_tokens(split, buckets) <= 513 * 4 + 32 * buckets
    assert attention.issued_tokens(case(layout="vram", spec=model(every=1, sparse=False)), buckets) == 0


@pytest.mark.parametrize("mean", [0.01, 0.3, 1.0, 2.0, 7.9, 40.0, 63.9, 64.1, 300.0])
def test_rounding_a_count_up_to_tiles(mean: float) -> None:
    """Against drawn Poisson counts; continuous where the sum gives way to its limit."""
    drawn = np.random.default_rng(1).poisson(mean, 400_000)
    assert attention.expected_rounded(mean, 8) == pytest.approx(float((-(-drawn // 8) * 8).mean()), rel=0.02)


# Prefill over a dequantised history

KV_CHUNK = 8_192
INT4 = "int4_per_token_head"


def test_a_chunk_appends_dequantises_its_history_attends_and_combines_in_turn() -> None:
    """The history is read, dequantised, written and read again; operations are those of each token and what it sees."""
    (graph,) = LAYOUT.prefill_graphs(format_case(INT4), step(3 * KV_CHUNK - 512, 512), 0, times=16)
    assert [op.part for op in graph.ops] == ["append", "dequantise", "attention", "combine"]
    assert [op.after for op in graph.ops] == [(), (0,), (1,), (2,)]
    assert graph.times == 16
    dequantise, attend, _ = prefill_ops(format_case(INT4), ctx_tokens=3 * KV_CHUNK, rows=512)
    codes, numbers = 2 * 4 * (128 + 4), 2 * 4 * 256 * 2
    assert (dequantise.kernel, dequantise.part, dequantise.calls) == (f"dequantise/twin/{INT4}", "dequantise", 3)
    assert dequantise.vram_bytes * 3 == 3 * KV_CHUNK * (codes + numbers)
    assert attend.vram_bytes * attend.calls == 3 * KV_CHUNK * numbers
    assert (attend.kernel, attend.dtype) == ("attend_dense/twin/bf16", "bf16")
    pairs = sum(3 * KV_CHUNK - 512 + token + 1 for token in range(512))
    assert attend.flops * attend.calls == pytest.approx(4 * 24 * 256 * pairs)
    assert attend.flash_grid == (8 * 24, KV_CHUNK // 64, 512 * 24 * 257 * 4)
    one, two = (attention.dequantised_ops(format_case(INT4), step(KV_CHUNK, 512, batch), 0) for batch in (1, 2))
    for single, double in zip(one, two, strict=True):
        assert (double.calls, double.vram_bytes) == (2 * single.calls, pytest.approx(single.vram_bytes))
    heads = Heads(query_heads=4, kv_heads=2, head_dim=64)
    fp32, _, _ = prefill_ops(format_case("fp32", heads=heads), ctx_tokens=1_024, rows=1)
    assert fp32.vram_bytes == 1_024 * 2 * (2 * 2 * 64 * 4)
    with pytest.raises(MissingRate, match=f"no rate for dequantise/twin/{INT4}"):
        Roofs(replace(load_profile("h200"), kernels={})).cost(dequantise)


@pytest.mark.parametrize(
    ("kv_tokens", "q_tokens"), [(0, 1), (0, 20_000), (100, 8_092), (8_191, 2), (8_192, 8_192), (40_000, 300)]
)
def test_calls_and_combinations_are_those_of_the_kernel_s_own_loop(kv_tokens: int, q_tokens: int) -> None:
    chunk = pytest.importorskip("realkernels.kernels.prefill", exc_type=ImportError)
    calls = [
        call
        for first, last in chunk.kv_chunks(kv_tokens + q_tokens, KV_CHUNK)
        for call in chunk.calls_of(first, last, past_tokens=kv_tokens, q_tokens=q_tokens)
    ]
    of_case = format_case(INT4)
    assert attention.attention_calls(of_case, step(kv_tokens, q_tokens)) == len(calls)
    results = sum(call.q_to - call.q_from for call in calls)
    moved = 24 * 256 * ((results + q_tokens) * 2 + 2 * (results - q_tokens) * 4)
    assert attention.combined_bytes(of_case, step(kv_tokens, q_tokens)) == moved
    assert KV_CHUNK == chunk.KV_CHUNK_TOKENS == of_case.rules.own_kernels.kv_chunk_tokens


def test_scratch_is_that_of_the_kernel_in_every_plan_and_other_engines_and_sparse_models_need_none() -> None:
    own = format_case("bf16")
    assert attention.dequantises_history(own)
    assert LAYOUT.working_bytes(own) == {"prefill scratch": attention.prefill_scratch_bytes(own)}
    assert LAYOUT.bucket_tokens(own) == KV_CHUNK
    other = Question(ctx_tokens=4_096, model="qwen3.8-27b", engine="vllm", kv_dtype="fp8")
    sparse = Question(ctx_tokens=4_096, engine="twin", layout="vram", kv_dtype="fp16")
    for asked in map(resolve, (other, sparse)):
        assert not attention.dequantises_history(asked)
        assert LAYOUT.working_bytes(asked) == {}
        assert LAYOUT.bucket_tokens(asked) == 0
    for ctx in (4_096, 131_072):
        asked = resolve(replace(other, ctx_tokens=ctx, engine="twin", layout="vram", kv_dtype="q8_0"))
        fixed = plan_memory(asked, load_profile("h200")).devices()[0].fixed
        assert fixed["prefill scratch"] == KV_CHUNK * 2 * 4 * 256 * 2 + 4_096 * 24 * (256 * (4 + 2) + 4)
    torch = pytest.importorskip("torch")
    from realkernels.kernels.prefill import ChunkScratch

    sizes = {"kv_chunk_tokens": KV_CHUNK, "q_tokens": 64, "query_heads": 24, "kv_heads": 4, "head_dim": 256}
    made = ChunkScratch.allocate(**sizes, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert (
        attention.prefill_scratch_bytes(replace(format_case(INT4), chunk_tokens=64)) == made.bytes + 64 * 24 * 256 * 2
    )
