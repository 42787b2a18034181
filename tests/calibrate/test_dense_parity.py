"""What the twin counts of a dense layer is what the library kernels hold and move: Llama 3.1 8B, and a small one."""

from typing import Any

import pytest
from msgspec.structs import replace

from calibrate.library_fits import layer_ops
from calibrate.probes import Sample
from realkernels.shape import DenseShape
from twin.case import Case
from twin.counts import elementwise_elements, layer_parameters, parameters
from twin.layouts.layout import Pass
from twin.lower import decode_program, prefill_program
from twin.models import ModelSpec, load_model
from twin.models.spec import Attention, FeedForward
from twin.ops import Op, Program
from twin.question import Question
from twin.resolve import resolve

LLAMA = load_model("llama-3.1-8b")
SMALL = replace(
    LLAMA,
    hidden=48,
    attention=Attention(every=1, query_heads=6, kv_heads=2, head_dim=16, output_gate=False),
    feed_forward=FeedForward(experts=1, active=1, intermediate=72, shared_intermediate=0),
)
"""3 query heads to a KV head, no width a power of two."""

MODELS = {"llama-3.1-8b": LLAMA, "small": SMALL}
BYTES = 2
"""Of an element in bf16."""


def shape_of(model: ModelSpec) -> DenseShape:
    """The kernels' shape of a layer of `model`."""
    attention = model.attention
    return DenseShape(
        hidden=model.hidden, query_heads=attention.query_heads, kv_heads=attention.kv_heads,
        head_dim=attention.head_dim, intermediate=model.feed_forward.intermediate,
    )  # fmt: skip


def case_of(model: ModelSpec) -> Case:
    return replace(resolve(Question(ctx_tokens=1, model=LLAMA.name, engine="vllm", kv_dtype="bf16")), model=model)


def ops(program: Program) -> dict[str, Op]:
    """Ops of a layer by part; the head's come first and are written over."""
    return {op.part: op for block in reversed(program) for op in block.ops}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> ModelSpec:
    return MODELS[request.param]


def test_the_kernels_shape_is_llama_s_own() -> None:
    assert shape_of(LLAMA) == DenseShape()


def test_what_lies_between_products_is_counted_alike(model: ModelSpec) -> None:
    assert elementwise_elements(model, "attention") == shape_of(model).elementwise


def test_parameters_are_counted_alike(model: ModelSpec) -> None:
    assert layer_parameters(model, "attention") == shape_of(model).parameters
    assert parameters(model).attention == model.hidden * (shape_of(model).qkv_width + shape_of(model).query_width)


def test_keys_and_values_are_counted_alike(model: ModelSpec) -> None:
    assert case_of(model).plane_bytes == 2 * shape_of(model).kv_width * BYTES


@pytest.mark.parametrize(("batch", "past"), [(1, 40), (6, 3071)])
def test_a_decode_step_is_the_ops_of_a_whole_layer(model: ModelSpec, batch: int, past: int) -> None:
    step = Pass(past=past, rows=1, batch=batch)
    counted, timed = ops(decode_program(case_of(model), step, 1)), ops_timed(model, batch=batch, rows=1, past=past)
    for ours, theirs in (("weights", "linear"), ("elementwise", "elementwise"), ("attention", "attend_decode")):
        compared(counted[ours], timed[theirs])


@pytest.mark.parametrize(("rows", "past"), [(64, 0), (768, 1024), (1, 512)])
def test_a_prefill_chunk_is_the_ops_of_a_whole_layer(model: ModelSpec, rows: int, past: int) -> None:
    counted = ops(prefill_program(case_of(model), Pass(past=past, rows=rows), 1))
    timed = ops_timed(model, batch=1, rows=rows, past=past)
    pairs = [("weights", "linear"), ("elementwise", "elementwise"), ("append", "append")]
    if rows > 1:
        pairs.append(("attention", "attend_dense"))
    for ours, theirs in pairs:
        compared(counted[ours], timed[theirs])


def ops_timed(model: ModelSpec, *, batch: int, rows: int, past: int) -> dict[str, Op]:
    """Counts of a layer as `calibrate` takes them from the kernels."""
    at: dict[str, Any] = {"dtype": "bf16", "batch": batch, "rows": rows, "past_tokens": past, **vars(shape_of(model))}
    return {op.part: op for op in layer_ops(Sample(at=at, seconds=(1.0,)))}


def compared(counted: Op, timed: Op) -> None:
    """The same kernel over the same bytes, operations and grain."""
    assert counted.kernel == timed.kernel
    assert counted.vram_bytes == pytest.approx(timed.vram_bytes, rel=1e-12)
    assert counted.flops == pytest.approx(timed.flops, rel=1e-12)
    assert counted.grain == timed.grain


# Tensors


@pytest.mark.parametrize("tokens", [1, 9])
def test_tensors_hold_what_is_counted(tokens: int) -> None:
    torch = pytest.importorskip("torch", reason="needs torch: pip install 'kv-twin[kernels]'")
    from realkernels.timed.library import FlashAttention, PlainAppend, random_weights

    shape, place = shape_of(SMALL), {"dtype": torch.bfloat16, "device": torch.device("cpu")}
    weights = random_weights(shape, **place)
    products = (weights.qkv, weights.output, weights.gate_up, weights.down)
    assert sum(part.numel() for part in products) == layer_parameters(SMALL, "attention")
    plane_bytes = case_of(SMALL).plane_bytes
    attention = FlashAttention(shape, batch=2, q_tokens=1, past_tokens=tokens - 1, caches=1, **place)
    assert sum(cache.nbytes for cache in attention.caches) == attention.moved_bytes == 2 * tokens * plane_bytes
    written = PlainAppend(shape, tokens=tokens, layers=1, **place)
    assert sum(plane.nbytes for plane in written.planes) == tokens * plane_bytes
    assert 2 * tokens * plane_bytes == shape.appended * tokens * BYTES  # read once, written once
