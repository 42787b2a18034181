"""What the twin counts is what the kernels hold and move: bytes by tier, link bytes, selected tokens; never a fit."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from calibrate.operations.operation import KV_DTYPE, Value
from calibrate.operations.table import BY_NAME
from twin.ask.case import Case
from twin.ask.question import Question
from twin.ask.resolve import resolve
from twin.engines import load_engine
from twin.engines.twin import INLINE, QUANTISED
from twin.layouts import load_layout
from twin.models.mixers import Attention
from twin.operations import occupancy
from twin.operations.counts import complete_blocks, is_sparse, selected_tokens
from twin.operations.ops import Op, Program

torch = pytest.importorskip("torch", reason="needs torch: pip install 'kv-twin[kernels]'")


from realkernels.caches.interleaved import BLOCK_CODECS, block_layout  # noqa: E402
from realkernels.caches.qsa import DTYPE, PAGE_TOKENS, TIERS, QsaCache, qsa_cache  # noqa: E402 - after the skip
from realkernels.codecs import codec_named  # noqa: E402
from realkernels.shape import QsaShape  # noqa: E402
from realkernels.timed.sparse import DecodeGather, DecodeSelect, PrefillAttend  # noqa: E402

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
OFFERED = [("cpu", "fp16"), ("cpu", "bf16"), ("cpu", "fp32"), ("triton", "fp16"), ("triton", "bf16")]
"""Formats of each backend's planes."""

SHAPE = QsaShape()


@contextmanager
def cache_of(fmt: str, *, name: str = "cpu", tier: str = "vram", layers: int = 1, tokens: int) -> Iterator[QsaCache]:
    """A cache whose planes are in `fmt`; filled, unless it is Triton's, which needs its interpreter for that."""
    given: Any = {"layers": layers, "tokens": tokens, "tier": tier, "dtype": DTYPES[fmt], "triton": name == "triton"}
    with qsa_cache(SHAPE, device=torch.device("cpu"), **given) as cache:
        if name == "cpu":
            cache.fill_random(1)
        yield cache


def case_of(layout: str, fmt: str, ctx_tokens: int) -> Case:
    return resolve(Question(ctx_tokens=ctx_tokens, engine="twin", layout=layout, kv_dtype=fmt))


def by_formula(layout: str, fmt: str, *, tokens: int, layers: int) -> dict[str, int]:
    case = case_of(layout, fmt, tokens)
    placement = case.layout.placement(case)
    return {"vram": placement.vram_bytes * tokens * layers, "host": placement.host_bytes * tokens * layers}


def held(name: str, layout: str, fmt: str, *, tokens: int, layers: int) -> dict[str, int]:
    with cache_of(fmt, name=name, tier=TIERS[layout], layers=layers, tokens=tokens) as cache:
        return dict(cache.bytes_by_tier())


def program_of(operation: str, dtype: str, **at: Value) -> Program:
    return BY_NAME[operation].lower(at, dtype)


def ops(program: Program) -> dict[str, Op]:
    return {op.part: op for block in program for op in block.ops}


def link_bytes(program: Program) -> float:
    return sum(op.link_bytes * op.calls * block.iterations * block.times for block in program for op in block.ops)


def test_both_rooms_have_the_same_layouts() -> None:
    """But for those that only other engines have."""
    assert sorted(TIERS) == sorted(load_engine("twin").layouts)
    assert {load_layout(name).name for name in TIERS} == set(TIERS)


def test_every_format_of_the_rulebook_is_one_that_a_backend_keeps() -> None:
    """As planes of sparse attention, in either tier; what else it keeps is read whole, see `test_format_cases`."""
    rules = load_engine("twin")
    assert set(rules.own_kernels.interleaved_formats) == set(BLOCK_CODECS)
    assert set(rules.host_formats) == {fmt for _, fmt in OFFERED} | set(rules.own_kernels.interleaved_formats)


@pytest.mark.parametrize("fmt", load_engine("twin").own_kernels.interleaved_formats)
def test_an_interleaved_block_is_the_run_that_is_counted(fmt: str) -> None:
    (block,) = program_of("decode_gather", "fp16", tier="host", ctx_tokens=98_306, format=fmt, layers=3)
    (op,) = block.ops
    shape = {"block_tokens": SHAPE.ratio, "kv_heads": SHAPE.kv_heads, "head_dim": SHAPE.head_dim}
    block_bytes = block_layout(codec_named(fmt), **shape).stride
    assert op.run_bytes == block_bytes
    assert op.link_bytes == (SHAPE.topk + 2 / SHAPE.ratio) * block_bytes
    placed = case_of("offload", fmt, 98_306)
    assert placed.layout.placement(placed).host_bytes == block_bytes // SHAPE.ratio + 2 * SHAPE.index_dim


def test_the_kernels_have_the_shape_of_the_model() -> None:
    model = case_of("vram", "fp16", 1).model
    attention, indexer = model.attention, model.indexer
    assert isinstance(attention, Attention)
    assert indexer is not None
    assert (SHAPE.query_heads, SHAPE.kv_heads, SHAPE.head_dim) == (
        attention.query_heads,
        attention.kv_heads,
        attention.head_dim,
    )
    assert (SHAPE.index_heads, SHAPE.index_dim) == (indexer.query_heads, indexer.head_dim)
    assert (SHAPE.budget, SHAPE.ratio, SHAPE.topk) == (indexer.budget, indexer.ratio, indexer.block_topk)
    assert SHAPE.layers == model.attention_layers
    assert 4 * SHAPE.topk + 3 == indexer.threshold_tokens


def test_the_kernels_have_the_pages_of_the_rulebook() -> None:
    assert load_engine("twin").page_tokens == PAGE_TOKENS
    assert DTYPES[KV_DTYPE] == DTYPE


@pytest.mark.parametrize("layout", ["vram", "offload"])
@pytest.mark.parametrize(("name", "fmt"), OFFERED)
@pytest.mark.parametrize(("tokens", "layers"), [(4, 1), (256, 12), (2_052, 2), (12_288, 3)])
def test_cache_bytes_by_formula_are_the_bytes_of_the_tensors(
    name: str, fmt: str, layout: str, tokens: int, layers: int
) -> None:
    formula = by_formula(layout, fmt, tokens=tokens, layers=layers)
    assert held(name, layout, fmt, tokens=tokens, layers=layers) == formula
    assert sum(formula.values()) > 0


@pytest.mark.parametrize("layout", ["vram", "offload"])
@pytest.mark.parametrize("open_tokens", [1, 2, 3])
def test_an_open_block_has_no_pooled_key_yet(layout: str, open_tokens: int) -> None:
    tokens = 2_052 + open_tokens
    formula = by_formula(layout, "fp16", tokens=tokens, layers=1)
    real = held("cpu", layout, "fp16", tokens=tokens, layers=1)
    pooled_bytes_per_token = SHAPE.index_dim * 2 // SHAPE.ratio
    assert formula["host"] == real["host"]
    assert formula["vram"] - real["vram"] == pooled_bytes_per_token * open_tokens


@pytest.mark.parametrize("fmt", DTYPES)
@pytest.mark.parametrize("copies", ["serial", "overlapped"])
@pytest.mark.parametrize(
    ("ctx_tokens", "bucket_tokens"), [(2_304, 1_024), (2_305, 1_024), (3_071, 768), (2_560, 2_560), (2_304, 4_096)]
)
def test_a_staged_chunk_copies_the_bytes_of_its_program(
    fmt: str, copies: str, ctx_tokens: int, bucket_tokens: int
) -> None:
    at: dict[str, Value] = {"tier": "host", "ctx_tokens": ctx_tokens, "q_tokens": 4}
    at |= {"bucket_tokens": bucket_tokens, "copies": copies}
    whole_pages = -(-ctx_tokens // PAGE_TOKENS) * PAGE_TOKENS
    with cache_of(fmt, tier="host", tokens=whole_pages) as cache:
        chunk = PrefillAttend(
            cache, ctx_tokens=ctx_tokens, q_tokens=4, bucket_tokens=bucket_tokens, copies=copies  # type: ignore[arg-type]
        )  # fmt: skip
        copied: list[int] = []
        copy = chunk._attention._copy

        def noted(keys: Any, values: Any, bucket: int) -> Any:
            copied.append(bucket)
            return copy(keys, values, bucket)

        chunk._attention._copy = noted  # type: ignore[method-assign]
        assert chunk.verify() < 2e-2
        program = program_of("prefill_attention", fmt, **at)
        assert link_bytes(program) == pytest.approx(chunk.link_bytes, rel=1e-12)
        assert copied == list(range(program[0].iterations))


@pytest.mark.parametrize("end", [2_048, 2_049, 2_051, 2_052, 2_055, 4_097])
def test_a_decode_step_reads_the_tokens_that_are_counted(end: int) -> None:
    model = case_of("vram", "fp16", end).model
    with cache_of("fp16", tokens=end) as cache:
        step = DecodeGather(cache, ctx_tokens=end)
        blocks = step.selected[0].long().unique()
        read = torch.zeros(end, dtype=torch.bool)
        read[(blocks[:, None] * SHAPE.ratio + torch.arange(SHAPE.ratio)).flatten()] = True
        read[end - end % SHAPE.ratio :] = True
        assert int(read.sum()) == selected_tokens(model.indexer, end)
        for plane in (cache.keys[0], cache.values[0]):
            plane[~read] = float("nan")
        step.run()
        assert bool(step.output.isfinite().all())
        for token in (int(blocks[0]) * SHAPE.ratio, int(read.nonzero()[-1])):
            poisoned = cache.values[0][token].clone()
            cache.values[0][token] = float("nan")
            step.run()
            assert not bool(step.output.isfinite().any())
            cache.values[0][token] = poisoned


@pytest.mark.parametrize("fmt", DTYPES)
@pytest.mark.parametrize("end", [2_052, 4_097])
def test_a_decode_step_s_bytes_are_those_of_its_program(fmt: str, end: int) -> None:
    model = case_of("vram", fmt, end).model
    assert is_sparse(model.indexer, end)
    program = program_of("decode_step", fmt, tier="vram", ctx_tokens=end, layers=1)
    with cache_of(fmt, tokens=end) as cache:
        assert ops(program)["pooled_scan"].vram_bytes == DecodeSelect(cache, ctx_tokens=end).moved_bytes
        assert SHAPE.blocks(end) == complete_blocks(model.indexer, end)
        token_bytes = cache.keys[0][0].nbytes + cache.values[0][0].nbytes
        assert ops(program)["kv_gather"].vram_bytes == selected_tokens(model.indexer, end) * token_bytes


def test_a_context_below_the_budget_is_no_step_of_the_kernels() -> None:
    with cache_of("fp16", tokens=2_048) as cache, pytest.raises(ValueError, match="read whole"):
        DecodeGather(cache, ctx_tokens=2_047)


# How decode attention is divided into thread blocks


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("inline", [False, True])
def test_thread_blocks_are_those_of_the_kernel_s_plan(name: str, inline: bool) -> None:
    pytest.importorskip("triton")
    from realkernels.caches.paged import PagedCache
    from realkernels.codecs import default_arrangement
    from realkernels.shape import AttentionShape
    from realkernels.timed import attend_decode

    if inline and name not in INLINE:
        return
    codec = codec_named(name, arrangement="inline" if inline else default_arrangement(name))
    cache = PagedCache.fill(codec, AttentionShape(), sequences=1, tokens=256, device=torch.device("cpu"))
    rules, backend = load_engine("twin"), "twin_inline" if inline else "twin"
    plans = rules.own_kernels.decode_plans
    mirrored = plans.get(f"{backend}/{name}", plans[name])
    assert mirrored.other_splits == codec.decode_form.other_splits
    for q_rows in range(1, 193):
        plan = attend_decode.plan_for(cache, q_rows)
        block = plan.tile, plan.rows, plan.sets, plan.per_multiprocessor, plan.prologue_tiles
        assert mirrored.thread_blocks_of(q_rows) == (plan.blocks(q_rows), block), q_rows


@pytest.mark.parametrize(("slots", "extra", "prologue"), [(132, 0, 3), (264, 0, 40), (396, 1, 3), (528, 0, 3)])
def test_splits_are_those_of_the_kernels(slots: int, extra: int, prologue: int) -> None:
    pytest.importorskip("triton")
    from realkernels.kernels import split_kv

    for pairs in (1, 3, 4, 8, 32, 100, 528):
        for tiles in (1, 2, 7, 96, 384, 2_048):
            given = {"pairs": pairs, "tiles": tiles, "slots": slots, "extra": extra, "prologue": prologue}
            assert occupancy.even_splits(**given) == split_kv.even_splits(**given), given
