"""Kernel cases: told apart by their ids, written and read back, and asked of the twin as exactly what is timed."""

import json

import pytest
from msgspec.structs import replace

from calibrate.grid import long_curve, validation_grid
from calibrate.kernel_cases import KernelCase, program_of, question_of
from twin.ask.case import Case
from twin.ask.resolve import resolve
from twin.operations.counts import selected_tokens, sparse_threshold
from twin.operations.ops import Carried, OpGraph, Program, Step

FP16 = "fp16"
PLANE_BYTES = 2 * 2 * 256 * 2
"""K and V of one token in one layer: 2 planes x 2 heads x 256 x 2 bytes."""

PAGE_TOKENS = 256

DECODE = KernelCase(metric="decode_step", tier="host", ctx_tokens=12_288)
CHUNK = KernelCase(metric="prefill_attention", tier="vram", ctx_tokens=12_288, rows=768)
STAGED = replace(CHUNK, tier="host", mode="staged", bucket_tokens=4_096)


def all_cases() -> list[KernelCase]:
    cases = [case for device in ("cuda", "cpu") for case in validation_grid(quick=False, device=device)]
    return cases + [case for tier in ("vram", "host") for case in long_curve(tier, most_tokens=2**31)]


def parts(program: Program) -> list[list[str]]:
    return [[op.part for op in block.ops] for block in program]


def edges(block: OpGraph) -> list[tuple[int, ...]]:
    return [op.after for op in block.ops]


def link_bytes(program: Program) -> float:
    return sum(op.link_bytes * op.calls * block.iterations * block.times for block in program for op in block.ops)


def resolved(case: KernelCase) -> Case:
    return resolve(question_of(case, kv_dtype=FP16))


def test_cases_that_differ_have_ids_that_differ() -> None:
    cases = set(all_cases())
    assert len({case.id for case in cases}) == len(cases)


@pytest.mark.parametrize(
    "change",
    [
        {"tier": "host"},
        {"ctx_tokens": 12_289},
        {"rows": 767},
        {"metric": "prefill_select"},
        {"tier": "host", "huge_pages": False},
        {"tier": "host", "mode": "staged", "bucket_tokens": 4_096},
        {"tier": "host", "mode": "staged", "bucket_tokens": 8_192},
        {"tier": "host", "mode": "staged", "bucket_tokens": 8_192, "copies": "serial"},
    ],
)
def test_whatever_changes_the_work_changes_the_id(change: dict[str, object]) -> None:
    assert replace(CHUNK, **change).id != CHUNK.id


@pytest.mark.parametrize("change", [{"layers": 11}, {"backbone_bytes": 2**20}, {"backbone_bytes": 2**21}])
def test_layers_and_backbone_of_a_decode_step_are_in_its_id(change: dict[str, int]) -> None:
    assert replace(DECODE, **change).id != DECODE.id


def test_a_case_is_its_plain_values_and_back() -> None:
    for case in all_cases():
        assert KernelCase(**json.loads(json.dumps(case.to_dict()))) == case


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"rows": 0}, "0 rows"),
        ({"rows": 12_289}, "12289 rows do not end a context of 12288"),
        ({"mode": "staged", "bucket_tokens": 4_096}, "staged"),
        ({"tier": "host", "mode": "staged"}, "staged"),
    ],
)
def test_a_case_that_cannot_be_is_refused(change: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        replace(CHUNK, **change)


def test_selection_of_a_context_that_is_read_whole_is_nothing_to_time() -> None:
    with pytest.raises(ValueError, match="nothing to time"):
        program_of(replace(DECODE, metric="decode_select", ctx_tokens=2_048), kv_dtype=FP16)


@pytest.mark.parametrize("tier", ["vram", "host"])
@pytest.mark.parametrize(
    ("metric", "wanted", "after"),
    [
        ("decode_step", ["weights", "pooled_scan", "select", "kv_gather"], [(), (0,), (1,), (2,)]),
        ("decode_select", ["pooled_scan", "select"], [(), (0,)]),
        ("decode_gather", ["kv_gather"], [()]),
    ],
)
def test_a_decode_case_is_a_chain_of_what_it_times_for_each_layer(
    metric: str, tier: str, wanted: list[str], after: list[tuple[int, ...]]
) -> None:
    program = program_of(replace(DECODE, metric=metric, tier=tier, layers=7), kv_dtype=FP16)
    assert parts(program) == [wanted]
    assert edges(program[0]) == after
    assert (program[0].times, program[0].iterations, program[0].carried) == (7, 1, ())


def test_a_backbone_is_a_matrix_read_once_before_each_layer() -> None:
    matrix = program_of(replace(DECODE, backbone_bytes=2**20), kv_dtype=FP16)[0].ops[0]
    assert (matrix.vram_bytes, matrix.flops, matrix.kernel) == (2**20, 2**20, "linear/twin/bf16")
    assert program_of(DECODE, kv_dtype=FP16)[0].ops[0].vram_bytes == 0


def test_a_decode_step_is_its_selection_and_its_gather() -> None:
    def ops(metric: str) -> list[object]:
        block = program_of(replace(DECODE, metric=metric), kv_dtype=FP16)[0]
        return [(op.part, op.kernel, op.engine, op.vram_bytes, op.link_bytes, op.run_bytes) for op in block.ops]

    assert ops("decode_step")[1:] == ops("decode_select") + ops("decode_gather")


@pytest.mark.parametrize(
    ("case", "wanted", "after"),
    [
        (CHUNK, ["attention"], [()]),
        (replace(CHUNK, metric="prefill_select"), ["score", "select"], [(), (0,)]),
        (replace(CHUNK, metric="prefill_select", tier="host"), ["score", "select"], [(), (0,)]),
        (replace(CHUNK, tier="host"), ["kv_gather"], [()]),
        (replace(CHUNK, ctx_tokens=1_024), ["attention"], [()]),
        (STAGED, ["kv_copy", "attention", "combine"], [(), (0,), (1,)]),
        (replace(STAGED, bucket_tokens=16_384), ["kv_copy", "attention"], [(), (0,)]),
    ],
)
def test_a_prefill_case_is_what_it_times_of_one_layer(
    case: KernelCase, wanted: list[str], after: list[tuple[int, ...]]
) -> None:
    program = program_of(case, kv_dtype=FP16)
    assert parts(program) == [wanted]
    assert edges(program[0]) == after
    assert program[0].times == 1


@pytest.mark.parametrize("copies", ["serial", "overlapped"])
def test_a_staged_case_is_the_layout_s_own_loop(copies: str) -> None:
    case = replace(STAGED, copies=copies)
    asked = resolved(case)
    blocks = asked.layout.prefill_graphs(asked, Step(kv_tokens=12_288 - 768, q_tokens=768), 0, times=1)
    assert program_of(case, kv_dtype=FP16) == (blocks[-1],)


def test_a_staged_loop_waits_for_the_iterations_before() -> None:
    serial, overlapped = (
        program_of(replace(STAGED, copies=copies), kv_dtype=FP16)[0] for copies in ("serial", "overlapped")
    )
    assert serial.carried == (Carried(0, 2, 1),)
    assert set(overlapped.carried) == {Carried(1, 2, 1), Carried(0, 1, 2)}
    assert serial.ops == overlapped.ops
    assert serial.iterations == overlapped.iterations == 3


@pytest.mark.parametrize(("ctx_tokens", "pages"), [(12_288, 48), (12_289, 49), (12_543, 49), (2_052, 9)])
@pytest.mark.parametrize("bucket_tokens", [256, 4_096, 6_144, 16_384])
@pytest.mark.parametrize("copies", ["serial", "overlapped"])
def test_a_staged_case_pulls_every_page_in_use_once(
    ctx_tokens: int, pages: int, bucket_tokens: int, copies: str
) -> None:
    case = replace(STAGED, ctx_tokens=ctx_tokens, rows=96, bucket_tokens=bucket_tokens, copies=copies)
    program = program_of(case, kv_dtype=FP16)
    assert link_bytes(program) == pytest.approx(pages * PAGE_TOKENS * PLANE_BYTES, rel=1e-12)
    assert program[0].iterations == -(-ctx_tokens // bucket_tokens)


@pytest.mark.parametrize("tier", ["vram", "host"])
def test_a_gather_below_the_sparse_threshold_reads_everything(tier: str) -> None:
    threshold = sparse_threshold(resolved(DECODE).model)
    assert threshold == 2_051
    for ctx_tokens in (1, 255, 2_048, threshold):
        case = replace(DECODE, metric="decode_gather", tier=tier, ctx_tokens=ctx_tokens, layers=1)
        gather = program_of(case, kv_dtype=FP16)[0].ops[0]
        assert gather.vram_bytes + gather.link_bytes == ctx_tokens * PLANE_BYTES
        assert gather.run_bytes == (0 if tier == "vram" else 256 * PLANE_BYTES / 2)  # whole pages


@pytest.mark.parametrize("ctx_tokens", [2_052, 2_055, 98_306, 3_145_728])
def test_a_gather_above_the_threshold_reads_its_budget_and_the_open_tail(ctx_tokens: int) -> None:
    case = replace(DECODE, metric="decode_gather", ctx_tokens=ctx_tokens)
    gather = program_of(case, kv_dtype=FP16)[0].ops[0]
    assert gather.link_bytes == (2_048 + ctx_tokens % 4) * PLANE_BYTES
    assert gather.link_bytes == selected_tokens(resolved(case).model, ctx_tokens) * PLANE_BYTES
    assert gather.run_bytes == 4 * PLANE_BYTES / 2


@pytest.mark.parametrize(
    ("tier", "huge_pages", "kernel"),
    [("vram", True, "gather_vram"), ("host", True, "gather_host"), ("host", False, "gather_host_4k")],
)
def test_a_gather_is_asked_for_at_the_rate_of_its_memory(*, tier: str, huge_pages: bool, kernel: str) -> None:
    case = replace(DECODE, metric="decode_gather", tier=tier, huge_pages=huge_pages)
    assert program_of(case, kv_dtype=FP16)[0].ops[0].kernel == f"{kernel}/twin/fp16"


@pytest.mark.parametrize(("kv_dtype", "scale"), [("fp16", 1), ("bf16", 1), ("fp32", 2)])
def test_a_staged_case_has_the_same_buckets_in_every_format(kv_dtype: str, scale: int) -> None:
    program = program_of(STAGED, kv_dtype=kv_dtype)
    assert program[0].iterations == 3
    assert link_bytes(program) == 12_288 * PLANE_BYTES * scale


def test_every_case_of_the_grids_has_a_program() -> None:
    for case in all_cases():
        program = program_of(case, kv_dtype=FP16)
        assert program
        assert all(block.ops for block in program)


RECORDS = KernelCase(metric="decode_gather", tier="host", ctx_tokens=98_306, format="q4_0")


def test_a_gather_over_records_is_the_gather_of_its_own_format() -> None:
    assert RECORDS.id == "decode_gather.host.q4_0.98306.x12"
    (block,) = program_of(RECORDS, kv_dtype=FP16)
    (gather,) = block.ops
    assert (gather.kernel, block.times) == ("gather_host/twin/q4_0", 12)
    assert (gather.link_bytes, gather.run_bytes) == ((2_048 + 2) * 576, 4 * 576)
    assert KernelCase(**json.loads(json.dumps(RECORDS.to_dict()))) == RECORDS


@pytest.mark.parametrize(
    "change", [{"tier": "vram"}, {"huge_pages": False}, {"inline": True}, {"batch": 2}, {"heads": "8x2x64"}]
)
def test_records_are_gathered_from_the_host_and_for_one_sequence(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="reads records on the host"):
        replace(RECORDS, **change)
