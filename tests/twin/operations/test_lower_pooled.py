"""Which ops a pass is made of under an engine with backends: products apart, tiles, glue, states, sampling."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.twin.cost.programs import ops, same
from tests.twin.memory.pool_worlds import W4A16, dense, pool_machine, pooled
from tests.worlds import LAWS, case, step
from twin.cost.breakdown import Breakdown
from twin.cost.roofline import Roofs
from twin.models import load_model
from twin.operations.counts import (
    elementwise_elements,
    head_bytes,
    layer_active_parameters,
    mixer_parameters,
    parameters,
    state_bytes,
)
from twin.operations.lower import (
    backbone_program,
    decode_program,
    head_program,
    prefill_attention_program,
    prefill_program,
)

SIX = dense(layers=6, every=3)
INT8_MLP = dense(weights=replace(W4A16, mlp_operands="int8"))
BF16 = dense(weights=replace(W4A16, format="bf16", bits=16, head_bits=None))
LOWERED = [
    pytest.param(lambda case: decode_program(case, step(100, batch=3), 1), 3, id="decode"),
    pytest.param(lambda case: prefill_program(case, step(32, 16, batch=2), 1), 32, id="prefill"),
]


@pytest.mark.parametrize(("lower", "tokens"), LOWERED)
def test_a_feed_forward_that_multiplies_in_another_type_is_a_product_of_its_own(lower: Any, tokens: int) -> None:
    """Same bytes and operations as one product of all of them, shared between two operand types."""
    split, whole = (ops(lower(pooled(spec=spec)), "weights") for spec in (INT8_MLP, dense()))
    feed = 3 * 8 * 16
    int8 = [(op, times) for op, times in split if op.dtype == "int8"]
    assert sum(times for _, times in int8) == 4
    for op, _ in int8:
        assert (op.vram_bytes, op.flops) == (feed / 2, 2 * feed * -(-tokens // 16) * 16)
        assert op.after == (0,)
    for total in ("vram_bytes", "flops"):
        assert sum(getattr(op, total) * times for op, times in split) == sum(
            getattr(op, total) * times for op, times in whole
        )
    assert {op.dtype for op, _ in whole} == {"bf16"}
    assert {op.grain for op, _ in split} == {tokens}


def test_mixers_stay_in_the_engines_operand_type() -> None:
    program = decode_program(pooled(spec=INT8_MLP), step(100), 1, grouped=False)
    mixers = [block.ops[0] for block in program[:-1]]
    spec = dense()
    assert [op.vram_bytes for op in mixers] == [mixer_parameters(spec, kind) / 2 for kind in spec.layer_kinds]
    assert {op.dtype for op in mixers} == {"bf16"}
    assert program[-1].ops[0].dtype == "bf16"


def test_a_feed_forward_in_the_engines_own_type_is_no_product_apart() -> None:
    same = dense(weights=replace(W4A16, mlp_operands="bf16"))
    programs = [decode_program(pooled(spec=spec), step(100), 1) for spec in (same, dense())]
    assert programs[0] == programs[1]


@pytest.mark.parametrize(
    ("tokens", "issued"), [(1, 16), (15, 16), (16, 16), (17, 32), (32, 32), (33, 48), (2048, 2048)]
)
def test_a_product_of_4_bit_weights_computes_whole_tiles_of_16_rows(tokens: int, issued: int) -> None:
    """The 17th query token costs a second tile (39.5 -> 47.8 ms, published); bytes do not change."""
    active = sum(layer_active_parameters(dense(), kind) for kind in dense().layer_kinds)
    head = parameters(dense()).head
    program = decode_program(pooled(), step(100, batch=tokens), 1)
    products = ops(program, "weights")
    assert sum(op.flops * times for op, times in products) == 2 * (active + head) * issued
    assert sum(op.vram_bytes * times for op, times in products) == active / 2 + head
    assert {op.grain for op, _ in products} == {tokens}


@pytest.mark.parametrize("tokens", [1, 17, 100])
def test_other_weights_are_multiplied_row_by_row(tokens: int) -> None:
    active = sum(layer_active_parameters(BF16, kind) for kind in BF16.layer_kinds)
    program = decode_program(pooled(spec=BF16), step(100, batch=tokens), 1)
    assert (
        sum(op.flops * times for op, times in ops(program, "weights")) == 2 * (active + parameters(BF16).head) * tokens
    )


@pytest.mark.parametrize(("lower", "tokens"), LOWERED)
def test_what_lies_between_products_is_apart_where_their_rate_leaves_it_out(lower: Any, tokens: int) -> None:
    """Two residual adds with norms (8 x 8 elements), rotation (2 x 6 x 8) and gating (3 x 16), in 16 bits a token."""
    program = lower(pooled(spec=BF16))
    glue = ops(program, "elementwise")
    assert sum(times for _, times in glue) == 4
    found = {(op.vram_bytes, times) for op, times in glue}
    assert found == {(2 * tokens * (64 + 48), 2), (2 * tokens * (64 + 96 + 48), 2)}
    assert {op.kernel for op, _ in glue} == {"elementwise/library/bf16"}
    assert [op.after for op, _ in glue] == [(0,), (0,)]
    assert not ops(lower(pooled()), "elementwise")


def test_the_mixer_waits_for_what_lies_between() -> None:
    for block in decode_program(pooled(spec=BF16), step(100), 1)[:-1]:
        assert [op.after for op in block.ops] == [(), (0,), (1,)]
    for block in decode_program(pooled(spec=INT8_MLP), step(100), 1)[:-1]:
        assert [op.after for op in block.ops] == [(), (0,), (1,)]


def test_glue_of_the_published_model_by_hand() -> None:
    """Llama 3.1 8B, one token: 32 x (8 x 4096 + 2 x 40 x 128 + 3 x 14336) elements of 2 B."""
    llama = load_model("llama-3.1-8b")
    assert elementwise_elements(llama, "attention") == 8 * 4096 + 2 * 40 * 128 + 3 * 14_336
    program = decode_program(pooled(spec=llama), step(100), 1)
    (glue,) = ops(program, "elementwise")
    assert glue[0].vram_bytes * glue[1] == 32 * 2 * (8 * 4096 + 2 * 40 * 128 + 3 * 14_336)


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("state_dtype", "element_bytes"), [("fp16", 2), ("fp32", 4)])
def test_a_state_is_read_once_and_written_after_every_token_that_may_be_the_last(
    rows: int, batch: int, state_dtype: str, element_bytes: int
) -> None:
    """2 heads of 4 x 4 and a convolution's tail of 3 x 16 inputs in 16 bits; four recurrent layers of six."""
    asked = pooled(spec=SIX, state_dtype=state_dtype)
    program = decode_program(asked, step(100, rows, batch=batch), 1)
    held = 2 * 16 * element_bytes + 3 * 16 * 2
    assert state_bytes(SIX, element_bytes) == held
    (state,) = ops(program, "state")
    assert state[0].vram_bytes * state[1] == 4 * (1 + rows) * held * batch
    assert state[0].kernel == f"recurrent/vllm/{state_dtype}"
    assert state[0].grain == batch


@pytest.mark.parametrize("rows", [1, 16, 2048])
def test_a_chunk_leaves_one_state_behind_however_long_it_is(rows: int) -> None:
    program = prefill_program(pooled(spec=SIX), step(0, rows, batch=2), 1)
    (state,) = ops(program, "state")
    assert (state[0].vram_bytes, state[1]) == (2 * state_bytes(SIX, 2) * 2, 4)
    assert [times for _, times in ops(program, "attention")] == [2]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("batch", [1, 4])
def test_logits_of_every_query_token_are_sampled_from(rows: int, batch: int) -> None:
    """A head of 8 x 32 in 8 bits, then 32 logits of 4 B a token; only where the engine's sampling has a rate."""
    tokens = rows * batch
    head, sample = decode_program(pooled(), step(100, rows, batch=batch), 1)[-1].ops
    assert (head.vram_bytes, head.flops, head.grain) == (256, 2 * 256 * 16, tokens)
    assert (sample.part, sample.vram_bytes, sample.grain) == ("sampling", tokens * 32 * 4, tokens)
    assert (sample.kernel, sample.after) == ("sample/library/fp32", (0,))
    assert not ops(decode_program(case(), step(100), 1), "sampling")
    assert not ops(prefill_program(pooled(), step(0, 16), 1), "sampling")


def test_a_head_with_bits_of_its_own_is_read_in_those() -> None:
    fast, base = load_model("qwen3.8-27b-fast"), load_model("qwen3.8-27b")
    for spec, bits in ((fast, 4.125), (base, 8.125)):
        (block,) = head_program(pooled(spec=spec), 1, 1)
        assert block.ops[0].vram_bytes == head_bytes(spec) == 5120 * 248_320 * bits / 8


def test_attention_of_a_dense_model_is_one_read_of_the_whole_cache_after_its_weights() -> None:
    program = decode_program(pooled(spec=SIX), step(100, 4), 1)
    (attend,) = ops(program, "attention")
    assert (attend[0].vram_bytes, attend[1], attend[0].after) == (104 * 64, 2, (0,))
    assert not ops(program, "kv_gather")


@pytest.mark.parametrize("spec", [dense(), INT8_MLP, BF16], ids=["w4a16", "int8 mlp", "bf16"])
@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 5])
def test_merged_layers_of_an_engine_with_backends_take_as_long_too(spec: Any, devices: int, rows: int) -> None:
    asked, roofs = pooled(spec=spec), Roofs(pool_machine(gpu_count=devices))
    for lower, at_step in (
        (decode_program, step(300, rows, batch=2)),
        (prefill_program, step(32, 16)),
    ):
        merged, single = (
            Breakdown().run(lower(asked, at_step, devices, grouped=each), roofs) for each in (True, False)
        )
        assert same(merged, single)


@pytest.mark.parametrize("spec", [SIX, INT8_MLP, BF16], ids=["w4a16", "int8 mlp", "bf16"])
def test_a_step_is_its_backbone_its_head_and_its_attention(spec: Any) -> None:
    """What serving sums from parts is what a single prediction lowers whole."""
    asked, roofs = pooled(spec=spec), Roofs(pool_machine())
    chunk = step(32, 16)
    whole = Breakdown().run(prefill_program(asked, chunk, 1), roofs)
    parts = Breakdown().run(backbone_program(asked, 16, 1, 1), roofs)
    parts.run(prefill_attention_program(asked, chunk, 1), roofs)
    assert same(whole, parts)
    at_step = step(300, batch=5)
    decode = decode_program(asked, at_step, 1)
    backbone = (*backbone_program(asked, 5, 5, 1), *head_program(asked, 5, 1))
    attention = sum(op.vram_bytes * times for op, times in ops(decode, "attention"))
    assert Breakdown().run(decode, roofs).seconds == pytest.approx(
        Breakdown().run(backbone, roofs).seconds + attention / 1e9, rel=1e-9
    )


@LAWS
@given(st.integers(1, 5000), st.integers(1, 5000))
def test_more_tokens_issue_no_fewer_operations_and_read_the_same_weights(one: int, other: int) -> None:
    few, many = sorted((one, other))
    less, more = (ops(head_program(pooled(), tokens, 1), "weights")[0][0] for tokens in (few, many))
    assert less.flops <= more.flops
    assert less.vram_bytes == more.vram_bytes
    assert 0 <= more.flops / (2 * 256) - many < 16
