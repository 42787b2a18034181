"""Rates of unpacking and of attention over pieces: what was put into samples comes out again."""

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from calibrate.build import build, checked
from calibrate.expand_fits import UNSEEN
from calibrate.kernel_cases import KernelCase, missing_rate, program_of
from calibrate.prefill_grid import prefill_grid
from calibrate.probes import ProbeRecord, Sample
from hwprofiles import HardwareProfile
from tests.calibrate import format_worlds as formats
from tests.calibrate import probe_worlds as worlds
from twin.format_ops import Heads, format_case, prefill_ops
from twin.roofline import Roofs

EXPAND_S, READS = 3e-6, 0.8
ATTEND_S, PRODUCTS, MERGING = 20e-6, {1: 0.25, 2: 0.5}, 0.6
"""Latency; share of the tensor roof with one and with two programs a multiprocessor; of the memory's for partials."""

NAMES = ("bf16", "int4_per_token_head")
CHUNKS = ((512, 16_384), (576, 65_536), (64, 65_536), (512, 65_536))
"""Of 200 places 512 rows fill nearly all; 576 are 216 programs, 16 of them alone; 64 are 24, divided over keys."""


def at(name: str, **sizes: int) -> dict[str, Any]:
    return {"format": name, "piece_tokens": 8_192, **Heads()._asdict(), **sizes}


def expand_s(name: str, ctx: int) -> float:
    op = prefill_ops(format_case(name), ctx_tokens=ctx, rows=1)[0]
    return op.calls * (EXPAND_S + op.vram_bytes / worlds.VRAM / READS)


def chunk_s(name: str, rows: int, ctx: int) -> float:
    _, attend, fold = prefill_ops(format_case(name), ctx_tokens=ctx, rows=rows)
    assert attend.grid is not None
    count = worlds.machine().sm_count
    waves = attend.grid.on(count)
    one_s = attend.flops / waves.programs / (worlds.TENSOR / count)
    products = attend.calls * (
        ATTEND_S
        + one_s * (2 * waves.full / PRODUCTS[2] + waves.alone / PRODUCTS[1])
        + waves.merged_bytes / (worlds.VRAM * MERGING)
    )
    return expand_s(name, ctx) + products + fold.calls * fold.vram_bytes / worlds.VRAM


def expand_record() -> ProbeRecord:
    made: list[Sample] = [
        worlds.sample(expand_s(name, tokens), arrangement="aligned", **at(name, tokens=tokens))
        for name in NAMES
        for tokens in (512, 32_768, 65_536)
    ]
    return ProbeRecord(samples=tuple(made), took_s=1.0)


def chunk_record(sizes: Sequence[tuple[int, int]] = CHUNKS) -> ProbeRecord:
    made = [
        worlds.sample(chunk_s(name, rows, past + rows), **at(name, rows=rows, past=past))
        for name in NAMES
        for rows, past in sizes
    ]
    return ProbeRecord(samples=tuple(made), took_s=1.0)


def built(**changes: ProbeRecord) -> tuple[HardwareProfile, dict[str, Any]]:
    records = formats.records(**changes)
    profile, record = build(machine=worlds.machine(), records=records, name="toy", date="2026-11-29")
    return checked(profile), record


@pytest.fixture(scope="module")
def toy() -> tuple[HardwareProfile, dict[str, Any]]:
    return built(format_expand=expand_record(), format_prefill=chunk_record())


@pytest.mark.parametrize("name", NAMES)
def test_unpacking_comes_out_as_it_went_in(toy: tuple[HardwareProfile, dict[str, Any]], name: str) -> None:
    kernel = toy[0].kernels[f"expand/twin/{name}"]
    assert kernel.latency is not None
    assert kernel.efficiency is not None
    assert kernel.latency.value == pytest.approx(EXPAND_S, rel=0.02)
    assert kernel.efficiency.over == "tokens"
    assert kernel.efficiency(8_192) == pytest.approx(READS, rel=0.02)


def test_attention_over_pieces_is_what_unpacking_and_folding_leave(toy: tuple[HardwareProfile, dict[str, Any]]) -> None:
    kernel = toy[0].kernels["attend_dense/twin/bf16"]
    assert kernel.latency is not None
    assert kernel.efficiency is not None
    assert kernel.latency.value == pytest.approx(ATTEND_S, rel=0.1)
    assert kernel.efficiency.over == "resident_programs"
    assert kernel.efficiency.at == tuple(PRODUCTS)
    for held, share in PRODUCTS.items():
        assert kernel.efficiency(held) == pytest.approx(share, rel=0.02)
    assert kernel.merging is not None
    assert kernel.merging.value == pytest.approx(MERGING, rel=0.1)
    assert all(abs(row["residual"]) < 0.01 for row in toy[1]["fitted"]["attend_dense/twin/bf16"])
    assert kernel.efficiency.spread == UNSEEN  # four sizes of chunks and four numbers: residuals say nothing


def test_more_sizes_of_chunks_than_numbers_say_how_far_they_scatter() -> None:
    more = chunk_record((*CHUNKS, (2_048, 16_384)))
    profile, _ = built(format_expand=expand_record(), format_prefill=more)
    efficiency = profile.kernels["attend_dense/twin/bf16"].efficiency
    assert efficiency is not None
    assert efficiency.spread < UNSEEN


@pytest.mark.parametrize(("rows", "ctx"), [(512, 100_000), (576, 50_000), (832, 50_000), (96, 90_000), (2_048, 30_001)])
def test_a_chunk_that_was_not_measured_is_predicted(
    toy: tuple[HardwareProfile, dict[str, Any]], rows: int, ctx: int
) -> None:
    roofs = Roofs(toy[0])
    ops = prefill_ops(format_case("int4_per_token_head"), ctx_tokens=ctx, rows=rows)
    predicted = sum(roofs.cost(op).seconds for op in ops)
    assert predicted == pytest.approx(chunk_s("int4_per_token_head", rows, ctx), rel=0.02)


def test_where_there_are_no_waves_attention_goes_by_rows() -> None:
    records = formats.records(format_expand=expand_record(), format_prefill=chunk_record())
    del records["instructions"]
    profile, _ = build(machine=worlds.machine(), records=records, name="toy", date="2026-11-29")
    kernel = checked(profile).kernels["attend_dense/twin/bf16"]
    assert kernel.efficiency is not None
    assert (kernel.efficiency.over, kernel.efficiency.at) == ("rows", (64, 512, 576))


def test_without_a_second_size_of_rows_all_of_attention_is_efficiency() -> None:
    profile, _ = built(
        format_expand=expand_record(),
        format_prefill=ProbeRecord(samples=chunk_record(CHUNKS[:1]).samples[:1], took_s=1.0),
    )
    kernel = profile.kernels["attend_dense/twin/bf16"]
    assert kernel.latency is None or kernel.latency.value < 1e-7


def test_chunks_of_formats_that_were_not_unpacked_say_nothing() -> None:
    profile, _ = built(format_prefill=chunk_record())
    assert not [key for key in profile.kernels if key.startswith(("expand/", "attend_dense/twin"))]


# Cases


CASE = KernelCase(metric="prefill_format", tier="vram", ctx_tokens=24_576, layers=1, rows=768, format="q8_0")


def test_a_case_is_unpacking_attention_and_folding() -> None:
    (block,) = program_of(CASE, kv_dtype="fp16")
    assert [op.kernel for op in block.ops] == ["expand/twin/q8_0", "attend_dense/twin/bf16", ""]
    assert CASE.id == "prefill_format.q8_0.24576.r768"
    with pytest.raises(ValueError, match="one sequence"):
        replace(CASE, batch=2)
    with pytest.raises(ValueError, match="prefill_format"):
        replace(CASE, format="")


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_grid_has_every_format_and_no_size_that_is_calibrated(device: str) -> None:
    whole, quick = (prefill_grid(quick=quick, device=device) for quick in (False, True))
    assert set(quick) < set(whole)
    assert len({case.id for case in whole}) == len(whole)
    assert {case.format for case in quick} == {case.format for case in whole}
    for case in whole:
        assert case.rows not in {64, 192, 512, 1_472, 2_048}
        assert case.ctx_tokens - case.rows not in {0, 16_384, 32_768, 65_536}


def test_a_profile_of_before_chunks_were_calibrated_says_what_it_lacks(
    toy: tuple[HardwareProfile, dict[str, Any]],
) -> None:
    case = replace(CASE, format="int4_per_token_head")
    assert missing_rate(case, toy[0]) == ""
    older, _ = built()
    assert "no rate for expand/twin/int4_per_token_head, attend_dense/twin/bf16" in missing_rate(case, older)


def test_a_chunk_is_measured_and_predicted_with_the_same_bytes() -> None:
    torch = pytest.importorskip("torch")
    from realkernels.shape import AttentionShape
    from realkernels.timed.prefill import AttendChunk

    timed = AttendChunk(
        "q8_0", shape=AttentionShape(query_heads=4, kv_heads=2, head_dim=64), q_tokens=3, ctx_tokens=256, caches=1,
        dtype=torch.bfloat16, device=torch.device("cpu"),
    )  # fmt: skip
    (block,) = program_of(replace(CASE, ctx_tokens=256, rows=3, heads="4x2x64"), kv_dtype="fp16")
    unpack, attend, _ = block.ops
    assert unpack.vram_bytes * unpack.calls == timed.moved_bytes
    assert attend.flops * attend.calls == timed.flops
