"""Format cases: a balanced grid beside calibration, the same counts on both sides, measured, recorded and compared."""

import json
from collections import Counter
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from calibrate import live_run, measure_formats
from calibrate.format_grid import FORMATS, format_grid
from calibrate.kernel_cases import KernelCase, program_of
from calibrate.live import TOLERANCES, compare_rows
from calibrate.live_run import validate_live
from calibrate.measure import LeftOut, Measurement, WrongResult
from calibrate.measurements import SCHEMA, LeftOutRow, MeasuredRow, Measurements, merged, row_of
from calibrate.prefill_grid import prefill_grid
from calibrate.records_grid import records_grid
from hwprofiles import load_profile
from hwprofiles.profile import HardwareProfile
from tests.calibrate import format_worlds as formats
from tests.calibrate.measure_worlds import FakeBackend
from tests.calibrate.test_format_fits import built
from twin.cuts import even_splits
from twin.engines import load_engine
from twin.engines.twin import INLINE

ONE = KernelCase(
    metric="decode_format", tier="vram", ctx_tokens=769, layers=1, rows=2, format="q8_0", batch=3, heads="4x2x64"
)
STEP = KernelCase(metric="decode_step", tier="vram", ctx_tokens=6_145)


@pytest.fixture(scope="module")
def cuda() -> list[KernelCase]:
    return format_grid(quick=False, device="cuda")


# The grid


def test_the_grid_is_large_enough_and_balanced(cuda: list[KernelCase]) -> None:
    assert len(cuda) >= 120
    by_format = Counter((case.format, case.inline) for case in cuda)
    assert set(by_format) == {(name, False) for name in FORMATS} | {(name, True) for name in INLINE}
    assert all(10 <= count <= 12 for count in by_format.values())
    for sizes in ("ctx_tokens", "batch", "rows"):
        counts = Counter(getattr(case, sizes) for case in cuda)
        assert len(counts) >= 4
        assert min(counts.values()) >= len(cuda) / 9, sizes
    for name in FORMATS:
        own = [case for case in cuda if case.format == name and not case.inline]
        assert {case.ctx_tokens for case in own} == {6_145, 24_576, 49_153, 98_306, 196_608}
        assert {case.batch for case in own} == {1, 3, 6, 12}
        assert len({case.rows for case in own}) >= 4


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_quick_grid_is_a_part_of_the_whole_and_ids_are_unique(device: str) -> None:
    quick, whole = (format_grid(quick=quick, device=device) for quick in (True, False))
    assert set(quick) < set(whole)
    assert len({case.id for case in whole}) == len(whole)
    assert {case.format for case in quick} == set(FORMATS)


def test_every_case_fits_the_device_that_it_is_for(cuda: list[KernelCase]) -> None:
    assert max(case.ctx_tokens * case.batch for case in cuda) * 4 * 256 * 2 * 2 < 8e9


# A case


def test_a_case_is_its_plain_values_and_back(cuda: list[KernelCase]) -> None:
    for case in (*cuda, ONE):
        assert KernelCase(**json.loads(json.dumps(case.to_dict()))) == case


def test_a_format_belongs_to_its_own_kind_of_case() -> None:
    with pytest.raises(ValueError, match="decode_format"):
        replace(ONE, format="")
    with pytest.raises(ValueError, match="decode_format"):
        replace(STEP, format="q8_0")


def test_ids_say_what_differs() -> None:
    assert ONE.id == "decode_format.q8_0.769.b3.q2.h4x2x64"
    assert replace(ONE, inline=True, heads="").id == "decode_format.q8_0.inline.769.b3.q2"


def test_its_program_is_one_read_of_the_cache_as_predictions_count_it() -> None:
    (block,) = program_of(replace(ONE, heads=""), kv_dtype="fp16")
    (op,) = block.ops
    assert op.kernel == "attend_decode/twin/q8_0"
    assert (op.vram_bytes, op.decoded, op.grain) == (3 * 769 * 2_176, 3 * 769 * 2_048, 2)
    assert op.flops == 4 * 4 * 16 * 256 * 769 * 3  # 12 query rows of a KV head, in a program of 16
    inline = replace(ONE, format="int8_per_token_head", inline=True, heads="")
    assert program_of(inline, kv_dtype="fp16")[0].ops[0].kernel == "attend_decode/twin_inline/int8_per_token_head"


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_predicted_are_the_bytes_of_the_cache(name: str) -> None:
    torch = pytest.importorskip("torch")
    from realkernels.shape import AttentionShape
    from realkernels.timed.attend_decode import AttendDecode

    timed = AttendDecode(
        name, shape=AttentionShape(query_heads=4, kv_heads=2, head_dim=64), batch=3, ctx_tokens=256, calls=1,
        device=torch.device("cpu"),
    )  # fmt: skip
    case = replace(ONE, format=name, ctx_tokens=256, rows=1)
    assert program_of(case, kv_dtype="fp16")[0].ops[0].vram_bytes == timed.cache_bytes
    assert timed.pool.planes.nbytes == timed.cache_bytes


# Plans of both rooms


@pytest.mark.parametrize(("name", "inline"), [*((name, False) for name in FORMATS), *((name, True) for name in INLINE)])
def test_programs_are_those_of_the_kernel_s_plan(name: str, inline: bool) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from realkernels.caches.paged import PagedCache
    from realkernels.codecs import codec_named, default_arrangement
    from realkernels.kernels import decode
    from realkernels.shape import AttentionShape

    fmt = codec_named(name, arrangement="inline" if inline else default_arrangement(name))
    if reason := decode.missing(fmt, torch.device("cpu")):
        pytest.skip(reason)
    pool = PagedCache.fill(fmt, AttentionShape(), sequences=1, tokens=256, device=torch.device("cpu"))
    mirrored = load_engine("twin").plan(name, "twin_inline" if inline else "twin")
    assert mirrored is not None
    assert mirrored.other_splits == fmt.decode_form.other_splits
    for rows in range(1, 193):
        plan = decode.plan_for(pool, rows)
        program = plan.tile, plan.rows, plan.sets, plan.per_multiprocessor, plan.prologue_tiles
        assert mirrored.programs_of(rows) == (plan.blocks(rows), program), rows


@pytest.mark.parametrize(("slots", "extra", "prologue"), [(132, 0, 3), (264, 0, 40), (396, 1, 3), (528, 0, 3)])
def test_splits_are_those_of_the_kernels(slots: int, extra: int, prologue: int) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    from realkernels.kernels import split_kv

    for pairs in (4, 8, 12, 24, 48, 96, 192, 768):
        for tiles in (1, 2, 48, 97, 385, 769, 2048, 16_384):
            sizes = {"pairs": pairs, "tiles": tiles, "slots": slots, "extra": extra, "prologue": prologue}
            assert even_splits(**sizes) == split_kv.even_splits(**sizes), sizes


# Measuring


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("torch")
    from realkernels.device import CpuDevice

    monkeypatch.setattr("calibrate.measure.LEAST_MEASURED_S", 0.0)
    return CpuDevice(threads=1)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_measured_and_right_on_this_processor(cpu: Any, name: str) -> None:
    case = replace(ONE, format=name, inline=name in INLINE)
    told: list[KernelCase] = []
    (outcome,) = measure_formats.measure_formats([case], cpu, progress=told.append)
    assert isinstance(outcome, Measurement)
    assert told == [case]
    assert outcome.error < 1e-4
    assert min(outcome.samples_s) > 0


def test_seconds_are_of_one_call(cpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_formats, "samples_of", lambda *_given: (1.0, 1.0))
    (outcome,) = measure_formats.measure_formats([ONE], cpu)
    assert isinstance(outcome, Measurement)
    assert outcome.median_s == 0.5  # two caches in turn


def test_a_kernel_that_does_nothing_is_a_wrong_result(cpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realkernels.timed.attend_decode.attend_blocks", lambda *_given: None)
    with pytest.raises(WrongResult, match=r"decode_format\.q8_0"):
        list(measure_formats.measure_formats([ONE], cpu))


@pytest.mark.parametrize("refused", [MemoryError("no room"), RuntimeError("the kernel of q8_0 is not there\nat all")])
def test_what_cannot_be_run_is_left_out_and_the_next_is_tried(
    cpu: Any, monkeypatch: pytest.MonkeyPatch, refused: Exception
) -> None:
    opened = measure_formats._opened

    def first_refused(case: KernelCase, backend: Any) -> Any:
        if case == ONE:
            raise refused
        return opened(case, backend)

    monkeypatch.setattr(measure_formats, "_opened", first_refused)
    left, measured = measure_formats.measure_formats([ONE, replace(ONE, format="bf16")], cpu)
    assert left == LeftOut(case=ONE, reason=str(refused).splitlines()[0])
    assert isinstance(measured, Measurement)


# Recording and comparing


def measurements(*rows: MeasuredRow, code: str = "a", of_formats: bool = False, **more: Any) -> Measurements:
    made = {"date": "2026-11-29", "code": code}
    given: dict[str, Any] = {"made": {}, "made_formats": made} if of_formats else {"made": made}
    return Measurements(schema=SCHEMA, machine="toy", kv_dtype="fp16", rows=rows, **given, **more)


def row(case: KernelCase, median_s: float) -> MeasuredRow:
    group = "formats" if case.format else "grid"
    return MeasuredRow(
        case=case, median_s=median_s, spread=0.0, samples_s=(median_s,), error=0.0, link_bytes=0, group=group
    )  # fmt: skip


def test_formats_measured_by_other_code_leave_the_grid_as_it_is() -> None:
    old = measurements(row(STEP, 1.0), code="old")
    both = merged(old, measurements(row(ONE, 2.0), code="new", of_formats=True))
    assert {each.case.id: each.median_s for each in both.rows} == {STEP.id: 1.0, ONE.id: 2.0}
    assert (both.made["code"], both.made_formats["code"]) == ("old", "new")
    grid_again = merged(both, measurements(row(STEP, 3.0), code="newer"))
    assert {each.case.id: each.median_s for each in grid_again.rows} == {STEP.id: 3.0, ONE.id: 2.0}
    formats_again = merged(grid_again, measurements(row(replace(ONE, batch=1), 4.0), code="newest", of_formats=True))
    assert {each.case.id for each in formats_again.rows} == {STEP.id, replace(ONE, batch=1).id}


def test_left_out_cases_of_one_kind_stay_when_the_other_is_measured() -> None:
    old = measurements(row(STEP, 1.0), left_out=(LeftOutRow(case=ONE, reason="no room"),))
    assert merged(old, measurements(row(STEP, 2.0), code="b")).left_out == old.left_out
    assert merged(old, measurements(row(ONE, 2.0), of_formats=True)).left_out == ()


@pytest.fixture(scope="module")
def toy() -> HardwareProfile:
    return built()[0]


@pytest.mark.parametrize("name", formats.DECODING)
def test_a_measured_row_is_held_against_the_prediction(toy: HardwareProfile, name: str) -> None:
    case = replace(ONE, format=name, ctx_tokens=49_153, rows=6, heads="")
    truth = formats.seconds(name, 49_153, 3, 6)
    (compared,) = compare_rows([row(case, truth)], toy, kv_dtype="fp16")
    assert compared.error == pytest.approx(0.0, abs=0.02)
    assert compared.tolerance == TOLERANCES["format"][0]
    assert compared.covered
    assert compared.id == f"toy.{case.id}"


def test_measurements_with_formats_are_a_data_file_and_back() -> None:
    made = measurements(row(ONE, 1.0), of_formats=True)
    assert msgspec.convert(json.loads(json.dumps(msgspec.to_builtins(made))), Measurements) == made


def test_formats_are_measured_in_place_of_the_grid(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, toy: HardwareProfile
) -> None:
    path = tmp_path / "toy.json"
    path.write_bytes(msgspec.json.encode(toy))
    case = replace(ONE, format="bf16", ctx_tokens=49_153, heads="")

    def found(cases: list[KernelCase], _backend: Any, *, progress: Any) -> Any:
        for each in cases:
            progress(each)
            yield Measurement(case=each, median_s=1.0, spread=0.0, samples_s=(1.0,), error=0.0, link_bytes=0)

    monkeypatch.setattr(live_run, "_backend", lambda _device: FakeBackend())
    monkeypatch.setattr(live_run, "check_same_machine", lambda *_given: None)
    monkeypatch.setattr(live_run, "format_grid", lambda **_asked: [case])
    monkeypatch.setattr(live_run, "measure_formats", found)
    monkeypatch.setattr(live_run, "measure", lambda *_given, **_named: pytest.fail("the grid was measured"))
    monkeypatch.setattr(live_run, "provenance", lambda device, options="": {"command": f"{device}{options}"})
    seen: list[tuple[int, int, str]] = []
    validation, made = validate_live(
        str(path), "cuda", quick=False, curve=False, formats=True, progress=lambda *at: seen.append(at)
    )
    assert [each.group for each in made.rows] == ["formats"]
    later = (*prefill_grid(quick=False, device="cuda"), *records_grid(quick=False, device="cuda"))
    assert {each.case for each in made.left_out} == set(later)
    assert all("profile toy has no rate for " in each.reason for each in made.left_out)
    assert (made.made, made.made_formats) == ({}, {"command": "cuda --formats"})
    assert seen == [(0, 1, case.id)]
    assert validation.cases[0].measured == 1.0


def test_a_measured_case_is_a_row_of_its_group() -> None:
    measurement = Measurement(case=ONE, median_s=1.0, spread=0.0, samples_s=(1.0,), error=0.0, link_bytes=0)
    assert row_of(measurement, "formats").group == "formats"


def test_the_profile_of_a_gpu_without_format_kernels_says_which_rate_is_missing() -> None:
    from twin.errors import MissingRate

    with pytest.raises(MissingRate, match="attend_decode/twin/q8_0"):
        compare_rows([row(replace(ONE, heads=""), 1.0)], load_profile("3x-rtx3090"), kv_dtype="fp16")
