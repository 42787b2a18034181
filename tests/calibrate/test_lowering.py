"""Points as ops: exactly what is timed, counted as whole predictions count it, and as the kernels hold and move it."""

from itertools import product
from typing import Any

import pytest
from msgspec.structs import replace

from calibrate.operations import lowering
from calibrate.operations.operation import Point
from calibrate.operations.table import BY_NAME, Case
from twin.models.mixers import Attention
from twin.models.spec import FeedForward
from twin.operations.lower import decode_program, prefill_program
from twin.operations.ops import Carried, Engine, Op, Program, Step

FP16 = "fp16"
PLANE_BYTES = 2 * 2 * 256 * 2
"""K and V of one token in one layer: 2 planes x 2 heads x 256 x 2 bytes."""

STEP: dict[str, Any] = {"tier": "host", "ctx_tokens": 12_288, "layers": 7}
CHUNK: dict[str, Any] = {"tier": "vram", "ctx_tokens": 12_288, "q_tokens": 768}
STAGED = CHUNK | {"tier": "host", "copies": "overlapped", "bucket_tokens": 4_096}


def program(operation: str, point: Point, dtype: str = FP16) -> Program:
    return Case(operation=operation, at=dict(point)).program(dtype)


def link_bytes(ops: Program) -> float:
    return sum(op.link_bytes * op.calls * block.iterations * block.times for block in ops for op in block.ops)


@pytest.mark.parametrize(
    ("operation", "point", "wanted"),
    [
        ("decode_step", STEP, ["weights", "pooled_scan", "select", "kv_gather"]),
        ("decode_select", STEP, ["pooled_scan", "select"]),
        ("decode_gather", STEP | {"tier": "vram"}, ["kv_gather"]),
        ("prefill_attention", CHUNK, ["attention"]),
        ("prefill_attention", CHUNK | {"tier": "host"}, ["kv_gather"]),
        ("prefill_attention", STAGED, ["kv_copy", "attention", "combine"]),
        ("prefill_attention", STAGED | {"bucket_tokens": 16_384}, ["kv_copy", "attention"]),
        ("prefill_select", CHUNK, ["score", "select"]),
    ],
)
def test_a_case_is_what_it_times_of_one_layer_or_a_chain_of_it_for_each(
    operation: str, point: Point, wanted: list[str]
) -> None:
    (block,) = program(operation, point)
    assert [op.part for op in block.ops] == wanted
    assert block.times == point.get("layers", 1)
    if "layers" in point:
        assert [op.after for op in block.ops] == [(at - 1,) if at else () for at in range(len(wanted))]
        assert (block.iterations, block.carried) == (1, ())


def test_a_step_is_its_selection_and_its_gather_before_each_layer_of_a_backbone() -> None:
    matrix = program("decode_step", STEP | {"backbone_mib": 1})[0].ops[0]
    assert (matrix.vram_bytes, matrix.flops, matrix.kernel) == (2**20, 2**20, "linear/twin/bf16")
    bare = program("decode_step", STEP)[0].ops[0]
    assert (bare.vram_bytes, bare.kernel) == (0, "")

    def ops(operation: str) -> list[Op]:
        return [replace(op, after=()) for op in program(operation, STEP)[0].ops]

    assert ops("decode_step")[1:] == ops("decode_select") + ops("decode_gather")


def test_a_staged_loop_is_the_layout_s_own_and_waits_for_the_iterations_before() -> None:
    serial, overlapped = (
        program("prefill_attention", STAGED | {"copies": each})[0] for each in ("serial", "overlapped")
    )
    case = lowering.sparse_case(STAGED, FP16)
    blocks = case.layout.prefill_graphs(case, Step(kv_tokens=12_288 - 768, q_tokens=768), 0, times=1)
    assert overlapped == blocks[-1]
    assert serial.carried == (Carried(0, 2, 1),)
    assert set(overlapped.carried) == {Carried(1, 2, 1), Carried(0, 1, 2)}
    assert serial.ops == overlapped.ops


@pytest.mark.parametrize(("ctx_tokens", "pages"), [(12_288, 48), (12_289, 49), (12_543, 49), (2_052, 9)])
def test_a_staged_case_pulls_every_page_in_use_once_in_the_same_buckets_in_every_type(
    ctx_tokens: int, pages: int
) -> None:
    for bucket_tokens, (dtype, scale) in product((256, 4_096, 16_384), (("fp16", 1), ("bf16", 1), ("fp32", 2))):
        sizes = {"ctx_tokens": ctx_tokens, "q_tokens": 96, "bucket_tokens": bucket_tokens}
        made = program("prefill_attention", STAGED | sizes, dtype)
        assert link_bytes(made) == pytest.approx(pages * 256 * PLANE_BYTES * scale, rel=1e-12)
        assert made[0].iterations == -(-ctx_tokens // bucket_tokens)


@pytest.mark.parametrize("ctx_tokens", [1, 2_048, 2_051, 2_052, 2_055, 98_306])
@pytest.mark.parametrize("tier", ["vram", "host"])
def test_a_gather_reads_all_below_the_threshold_and_its_budget_and_tail_above(tier: str, ctx_tokens: int) -> None:
    (gather,) = program("decode_gather", STEP | {"tier": tier, "ctx_tokens": ctx_tokens})[0].ops
    read = ctx_tokens if ctx_tokens <= 2_051 else 2_048 + ctx_tokens % 4
    assert gather.vram_bytes + gather.link_bytes == read * PLANE_BYTES
    if ctx_tokens > 2_051:
        assert gather.run_bytes == 4 * PLANE_BYTES / 2


@pytest.mark.parametrize(
    ("changes", "kernel"),
    [
        ({"tier": "vram"}, "gather_vram/twin/fp16"), ({"tier": "host"}, "gather_host/twin/fp16"),
        ({"tier": "host4k"}, "gather_host_4k/twin/fp16"), ({"format": "q4_0"}, "gather_host/twin/q4_0"),
    ],
)  # fmt: skip
def test_a_gather_is_asked_for_at_the_rate_of_its_memory_and_the_size_of_its_selection(
    changes: Point, kernel: str
) -> None:
    whole, small = (program("decode_gather", {**STEP, **changes, **more})[0].ops[0] for more in ({}, {"budget": 512}))
    assert whole.kernel == small.kernel == kernel
    assert (small.vram_bytes + small.link_bytes) * 4 == whole.vram_bytes + whole.link_bytes


def test_selection_of_a_context_that_is_read_whole_is_nothing_to_time() -> None:
    with pytest.raises(ValueError, match="nothing to time"):
        program("decode_select", STEP | {"ctx_tokens": 2_048})


# Formats


def test_attention_over_a_format_is_one_read_of_the_cache_as_predictions_count_it() -> None:
    at = {"format": "q8_0", "ctx_tokens": 769, "batch": 3, "q_tokens": 2}
    (op,) = program("decode_format", at)[0].ops
    assert op.kernel == "attend_decode/twin/q8_0"
    assert (op.vram_bytes, op.dequantised_elements, op.grain) == (3 * 769 * 2_176, 3 * 769 * 2_048, 2)
    assert op.flops == 4 * 4 * 16 * 256 * 769 * 3  # 12 query rows of a KV head, in a thread block of 16
    inline = at | {"format": "int8_per_token_head", "arrangement": "inline"}
    assert program("decode_format", inline)[0].ops[0].kernel == "attend_decode/twin_inline/int8_per_token_head"


def test_a_chunk_over_a_format_is_dequantised_attended_to_and_combined() -> None:
    point = {"format": "q8_0", "ctx_tokens": 24_576, "q_tokens": 768}
    ops = program("prefill_format", point)[0].ops
    assert [op.part for op in ops] == ["dequantise", "attention", "combine"]
    assert ops[0] == program("dequantise_format", {"format": "q8_0", "tokens": 24_576})[0].ops[0]


@pytest.mark.parametrize("name", ["bf16", "q8_0", "kvarn_k4v2_g128"])
def test_counted_bytes_are_those_of_the_timed_calls(name: str) -> None:
    torch = pytest.importorskip("torch", reason="needs torch: pip install 'kv-twin[kernels]'")
    from calibrate.operations.timing import loaded
    from realkernels.shape import AttentionShape

    given = {"shape": AttentionShape(query_heads=4, kv_heads=2, head_dim=64), "device": torch.device("cpu")}
    at = {"format": name, "ctx_tokens": 256, "q_tokens": 3, "heads": "4x2x64"}
    decode = loaded("timed.attend_decode", "AttendDecode")(name, ctx_tokens=256, q_tokens=3, batch=2, **given)
    assert program("decode_format", at | {"batch": 2})[0].ops[0].vram_bytes == decode.moved_bytes
    chunk = loaded("timed.prefill", "AttendChunk")(name, ctx_tokens=256, q_tokens=3, caches=1, **given)
    attend = program("prefill_format", at)[0].ops[1]
    assert attend.flops * attend.calls == chunk.flops
    written = loaded("timed.append", "Append")(name, tokens=5, layers=1, **given)
    append = program("append_format", {"format": name, "tokens": 5, "heads": "4x2x64"})[0].ops[0]
    assert append.vram_bytes == written.moved_bytes


# A dense layer

SMALL = "48x6x2x16x72"
"""3 query heads to a KV head, no width a power of two."""


def dense(shape: str = "", **sizes: int) -> dict[str, Op]:
    at: dict[str, Any] = {"dtype": "bf16", "batch": 1, "q_tokens": 1, "past_tokens": 0} | sizes
    return {op.part: op for op in program("layer", at | ({"shape": shape} if shape else {}))[0].ops}


@pytest.mark.parametrize("shape", ["", SMALL])
@pytest.mark.parametrize(("batch", "q_tokens", "past"), [(1, 1, 40), (6, 1, 3_071), (1, 64, 0), (1, 768, 1_024)])
def test_a_layer_is_the_ops_of_a_whole_prediction(shape: str, batch: int, q_tokens: int, past: int) -> None:
    case = lowering._dense_case(shape)
    step = Step(kv_tokens=past, q_tokens=q_tokens, batch=batch)
    whole = decode_program(case, step, 1) if q_tokens == 1 else prefill_program(case, step, 1)
    counted = {op.part: op for block in reversed(whole) for op in block.ops}
    timed = dense(shape, batch=batch, q_tokens=q_tokens, past_tokens=past)
    assert set(timed) == {"weights", "elementwise", "append", "attention"}
    for part in set(timed) & set(counted):
        assert replace(timed[part], after=()) == replace(counted[part], after=(), dtype="bf16"), part


@pytest.mark.parametrize("shape", ["", SMALL])
def test_its_kernels_move_what_is_counted(shape: str) -> None:
    from realkernels.shape import DenseShape

    held = DenseShape(hidden=48, query_heads=6, kv_heads=2, head_dim=16, intermediate=72) if shape else DenseShape()
    ops = dense(shape, batch=2, q_tokens=1, past_tokens=99)
    assert ops["weights"].vram_bytes == 2 * held.parameters
    assert ops["weights"].flops == 2 * 2 * held.parameters
    assert ops["elementwise"].vram_bytes == 2 * 2 * held.elementwise
    assert ops["append"].vram_bytes == 2 * 2 * held.appended
    assert ops["attention"].vram_bytes == 2 * 2 * 100 * held.kv_width * 2
    chunk = dense(shape, q_tokens=8, past_tokens=4)["attention"]
    assert (chunk.grain, chunk.flops) == (8, held.attend_flops(batch=1, q_tokens=8, past_tokens=4))


def test_the_default_shape_is_the_model_s_and_another_type_has_its_own_kernels_and_bytes() -> None:
    model = lowering._dense_case("").model
    assert model.hidden == 4_096
    (layer,) = model.kinds.values()
    assert layer.mixers == (Attention(query_heads=32, kv_heads=8, head_dim=128),)
    assert layer.feed_forward == FeedForward(intermediate=14_336)
    half, single = (program("linear", {"dtype": dtype, "tokens": 3})[0].ops[0] for dtype in ("bf16", "fp32"))
    assert (half.kernel, single.kernel) == ("linear/library/bf16", "linear/library/fp32")
    assert (single.vram_bytes, single.flops) == (2 * half.vram_bytes, half.flops)


# The host


def test_rows_of_a_token_are_read_alone_from_ram_and_by_pages_from_disk() -> None:
    for source, engine, run_bytes in (("ram", Engine.HOST, 102), ("disk", Engine.DISK, 4_096)):
        op = program("disk_rows", {"source": source, "tokens": 3})[0].ops[0]
        assert (op.engine, op.host_bytes, op.run_bytes) == (engine, 3 * 16 * run_bytes, run_bytes)
        assert (op.kernel, op.grain) == (f"rows_{source}/twin/uint8", 3 if source == "ram" else 1)


@pytest.mark.parametrize("rows", [256, 96])
@pytest.mark.parametrize(("name", "engine"), [("evict_page", Engine.D2H), ("restore_page", Engine.H2D)])
def test_an_image_is_every_plane_of_a_page_over_the_link_or_in_host_memory(
    name: str, engine: Engine, rows: int
) -> None:
    token_bytes, pooled = PLANE_BYTES + 128 * 2, rows // 4 * 128 * 2
    part = {} if rows == 256 else {"rows": rows}
    (over_link,) = program(name, {"tier": "vram", "layers": 3} | part)[0].ops
    assert (over_link.engine, over_link.kernel, over_link.calls) == (engine, f"{name}/twin/uint8", 3 * 4 + 1)
    assert over_link.link_bytes * over_link.calls == pytest.approx(3 * (rows * token_bytes + pooled), rel=1e-12)
    pooled_alone, in_host = program(name, {"tier": "host", "layers": 3} | part)[0].ops
    assert (pooled_alone.kernel, pooled_alone.calls, pooled_alone.link_bytes) == (over_link.kernel, 3, pooled)
    assert (in_host.engine, in_host.kernel) == (Engine.HOST, f"{name}_in_host/twin/uint8")
    assert in_host.calls == 3 * 3 + 1
    assert in_host.host_bytes * in_host.calls == pytest.approx(2 * 3 * rows * token_bytes, rel=1e-12)


def test_every_operation_s_fits_name_parts_that_its_points_have() -> None:
    for operation in BY_NAME.values():
        lowered = [operation.lower(point, FP16) for point in operation.calibrated.gpu]
        seen = {op.part for made in lowered for block in made for op in block.ops}
        for fit in operation.fits:
            assert {fit.part, *(part for part, _, _ in fit.jointly)} - seen <= set(), operation.name
            assert not fit.latency_of or fit.latency_of in seen
