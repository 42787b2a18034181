"""What a draft is made of: passes, bytes and operations of two drafters by hand, launches, and the drafter's cache."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.twin.memory.pool_worlds import BLOCK, SEQUENTIAL, dense, drafted, pooled
from tests.worlds import LAWS, step
from twin.formats import kv_format
from twin.models import load_model
from twin.models.spec import Drafter
from twin.models.speculation import Speculation
from twin.operations.lower import draft_prefill_program, draft_program, draft_token_bytes, draft_weight_bytes
from twin.operations.ops import Engine, Op, OpGraph, Program, Step

DRAFTERS = pytest.mark.parametrize("drafter", [SEQUENTIAL, BLOCK], ids=lambda drafter: drafter.name)
TOKEN_BYTES = 64
"""K and V of one token in one layer of either drafter, in bf16: 2 x 2 x 8 or 2 x 1 x 16 elements."""


def passes_of(program: Program) -> OpGraph:
    """The block of the drafter's passes, without its overheads."""
    launches, passes = program
    assert {op.part for op in launches.ops} == {"launches"}
    return passes


def decode(speculation: Speculation, past: int = 40, batch: int = 1, **asked: str) -> OpGraph:
    case = pooled(spec=dense(), speculation=speculation, **asked)
    return passes_of(draft_program(case, speculation, step(past, batch=batch), 0))


@pytest.mark.parametrize("tokens", [1, 2, 4])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_sequential_drafter_passes_once_for_every_token(tokens: int, batch: int) -> None:
    """Layers of 50 B and 100 parameters, a token a sequence; a head of 24 B, 24 parameters at the model's 8 bits."""
    passes = decode(drafted(SEQUENTIAL, tokens), batch=batch)
    layers, attend, head = passes.ops
    assert passes.times == tokens
    assert (layers.vram_bytes, layers.flops, layers.grain) == (50, 2 * 100 * batch, batch)
    assert (head.vram_bytes, head.flops, head.grain) == (24, 2 * 24 * batch, batch)
    assert attend.vram_bytes == 41 * TOKEN_BYTES * batch
    assert attend.flops == 4 * 1 * 4 * 8 * 41 * batch


def test_a_sequential_drafter_has_one_row_a_pass_whatever_its_block_says() -> None:
    passes = decode(drafted(replace(SEQUENTIAL, block_tokens=4), 2))
    assert passes.ops == decode(drafted(SEQUENTIAL, 2)).ops


@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_block_drafter_passes_once_over_its_block_however_much_is_looked_up(tokens: int, batch: int) -> None:
    """Two layers over 4 rows and a full window of 16 tokens: the rows' own tokens are read beside it."""
    passes = decode(drafted(BLOCK, tokens), batch=batch)
    layers, attend, head = passes.ops
    assert passes.times == 1
    assert (layers.vram_bytes, layers.flops, layers.grain) == (500, 2 * 1000 * 4 * batch, 4 * batch)
    assert (head.vram_bytes, head.flops, head.grain) == (32, 2 * 32 * 4 * batch, 4 * batch)
    assert attend.vram_bytes == 2 * (16 + 4) * TOKEN_BYTES * batch
    assert attend.flops == 4 * 2 * 2 * 16 * 4 * 16 * batch
    assert attend.grain == 1


@pytest.mark.parametrize(("past", "read", "seen"), [(0, 4, 4), (5, 9, 9), (12, 16, 16), (16, 20, 16), (10**6, 20, 16)])
def test_a_window_fills_and_then_slides(past: int, read: int, seen: int) -> None:
    attend = decode(drafted(BLOCK, 3), past=past).ops[1]
    assert attend.vram_bytes == 2 * read * TOKEN_BYTES
    assert attend.flops == 4 * 2 * 2 * 16 * 4 * seen


@DRAFTERS
def test_layers_attention_and_head_of_a_pass_follow_each_other(drafter: Drafter) -> None:
    passes = decode(drafted(drafter))
    assert [op.after for op in passes.ops] == [(), (0,), (1,)]
    assert {op.part for op in passes.ops} == {"draft"}
    assert {op.engine for op in passes.ops} == {Engine.SM}
    assert {op.dtype for op in passes.ops} == {"bf16"}


def test_a_drafter_like_the_models_layers_runs_the_models_kernels() -> None:
    layers, attend, head = decode(drafted(SEQUENTIAL)).ops
    assert layers.kernel == head.kernel == "linear/marlin/w4a16"
    assert attend.kernel == "attend_decode/flash_attention/bf16"
    assert decode(drafted(SEQUENTIAL), kv_dtype="fp8").ops[1].kernel == "attend_decode/flashinfer/fp8"
    assert decode(drafted(BLOCK)).ops[1].kernel == ""  # a window is read at the memory's own rate


@pytest.mark.parametrize("head_bits", [4.0, 8.0, None])
def test_a_head_has_as_many_parameters_as_its_bytes_hold_at_the_models_bits(head_bits: float | None) -> None:
    spec = dense(weights=replace(dense().weights, head_bits=head_bits))
    speculation = drafted(SEQUENTIAL)
    case = pooled(spec=spec, speculation=speculation)
    head = passes_of(draft_program(case, speculation, step(0), 0)).ops[2]
    assert head.flops == 2 * 24 * 8 / (head_bits or 4)


@pytest.mark.parametrize(
    ("kv_dtype", "kernels"),
    [
        ("bf16", ["speculate/vllm/step"]),
        ("int8_per_token_head", ["speculate/vllm/step"]),
        ("fp8", ["speculate/vllm/step", "piecewise/vllm/step"]),
        ("kvarn_k4v2_g128", ["speculate/vllm/step", "piecewise/vllm/step"]),
    ],
)
def test_a_speculating_step_pays_for_sampling_and_for_graphs_that_are_not_whole(
    kv_dtype: str, kernels: list[str]
) -> None:
    """FlashInfer and KVarN capture only single-token steps whole (facts of the published lane, section 1)."""
    speculation = drafted(SEQUENTIAL)
    case = pooled(kv_dtype=kv_dtype, speculation=speculation)
    launches, _ = draft_program(case, speculation, step(40), 0)
    assert [op.kernel for op in launches.ops] == kernels
    assert [op.after for op in launches.ops] == [(), (0,)][: len(kernels)]
    assert launches.times == 1
    assert not any(op.vram_bytes or op.flops for op in launches.ops)


def prefilled(drafter: Drafter, chunk: Step) -> tuple[Op, Op]:
    speculation = drafted(drafter)
    (block,) = draft_prefill_program(pooled(speculation=speculation), speculation, chunk, 0)
    product, attend = block.ops
    assert block.times == 1
    return product, attend


def test_a_drafter_follows_a_prompt_through_its_layers_and_computes_no_logits() -> None:
    """6 rows over 10: products of every row, causal attention over 10 + 3.5 tokens on average."""
    product, attend = prefilled(SEQUENTIAL, step(10, 6, batch=2))
    assert (product.vram_bytes, product.flops, product.grain) == (50, 2 * 100 * 12, 12)
    assert attend.flops == 4 * 4 * 8 * 2 * sum(range(11, 17))
    assert attend.vram_bytes == 16 * TOKEN_BYTES * 2
    assert (attend.kernel, attend.grain) == ("attend_dense/flash_attention/bf16", 6)


@pytest.mark.parametrize(("past", "seen", "read"), [(0, 3.5, 6), (5, 8.5, 11), (100, 16, 22)])
def test_a_window_follows_a_prompt_no_further_than_it_reaches(past: int, seen: float, read: int) -> None:
    product, attend = prefilled(BLOCK, step(past, 6))
    assert product.flops == 2 * 1000 * 6
    assert attend.flops == 4 * 2 * 2 * 16 * 6 * seen
    assert attend.vram_bytes == 2 * read * TOKEN_BYTES


@pytest.mark.parametrize(
    ("kv_dtype", "sequential", "block"),
    [
        ("bf16", 4096, 4096),
        ("fp8", 2048, 2048),
        ("int8_per_token_head", 2080, 2112),
        ("int4_per_token_head", 1056, 1088),
        ("kvarn_k4v2_g128", 840, 4096),
        ("turboquant_4bit_nc", 1048, 1072),
    ],
)
def test_a_drafter_keeps_its_cache_as_the_model_does_unless_its_window_slides_through_tiles(
    kv_dtype: str, sequential: int, block: int
) -> None:
    """MTP: 4 heads x 256 like the model; DFlash2: 8 heads x 128, in bf16 beside KVarN."""
    case = replace(pooled(kv_dtype=kv_dtype), model=load_model("qwen3.8-27b"))
    assert [draft_token_bytes(case, drafter) for drafter in case.model.drafters] == [sequential, block]


def test_a_drafter_with_a_format_of_its_own_keeps_it() -> None:
    own = replace(SEQUENTIAL, kv_dtype="fp8")
    assert draft_token_bytes(pooled(kv_dtype="bf16"), own) == 32
    assert draft_token_bytes(pooled(kv_dtype="kvarn_k4v2_g128"), replace(BLOCK, kv_dtype="fp8")) == 32
    assert draft_token_bytes(pooled(kv_dtype="kvarn_k4v2_g128"), BLOCK) == TOKEN_BYTES


def test_weights_of_a_drafter_are_its_layers_and_a_head_that_is_its_own() -> None:
    assert draft_weight_bytes(None) == 0
    assert draft_weight_bytes(drafted(SEQUENTIAL)) == 50 + 24
    assert draft_weight_bytes(drafted(BLOCK)) == 500


PAST = st.integers(0, 10**6)


@LAWS
@given(st.sampled_from([SEQUENTIAL, BLOCK]), PAST, PAST, st.integers(1, 16))
def test_a_draft_over_a_longer_context_reads_no_less(drafter: Drafter, one: int, other: int, batch: int) -> None:
    few, many = sorted((one, other))
    short, long = (decode(drafted(drafter), past=past, batch=batch) for past in (few, many))
    for before, after in zip(short.ops, long.ops, strict=True):
        assert before.vram_bytes <= after.vram_bytes
        assert before.flops <= after.flops
    assert short.ops[1].vram_bytes == batch * decode(drafted(drafter), past=few).ops[1].vram_bytes


@LAWS
@given(st.sampled_from([SEQUENTIAL, BLOCK]), st.integers(0, 5000), st.integers(1, 300), st.integers(1, 300))
def test_a_prompt_in_two_chunks_multiplies_what_it_does_in_one(drafter: Drafter, past: int, one: int, two: int) -> None:
    """Products exactly; attention too where nothing slides."""
    whole = prefilled(drafter, step(past, one + two))
    parts = [prefilled(drafter, chunk) for chunk in (step(past, one), step(past + one, two))]
    assert whole[0].flops == sum(part[0].flops for part in parts)
    if not drafter.window:
        assert whole[1].flops == pytest.approx(sum(part[1].flops for part in parts))


@pytest.mark.parametrize("name", ["fp8", "int8_per_token_head"])
def test_the_bytes_of_a_draft_are_those_of_its_format(name: str) -> None:
    attend = decode(drafted(SEQUENTIAL), past=9, kv_dtype=name).ops[1]
    assert attend.vram_bytes == 10 * kv_format(name).plane_bytes(kv_heads=2, head_dim=8)
