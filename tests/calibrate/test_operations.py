"""The table: nothing is validated where it is calibrated, every rate is validated somewhere, every point is right."""

import json
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from calibrate.measurements import shipped_measurements
from calibrate.operations.operation import FORMATS, Operation, Point
from calibrate.operations.shared import KEPT
from calibrate.operations.table import BY_NAME, GROUPS, OPERATIONS, Case, held_out_cases
from calibrate.probes import all_probes
from calibrate.refit import LIBRARY, OWN, probes, rate_records
from hwprofiles import load_profile
from hwprofiles.files import read_json
from hwprofiles.store import RECORDS
from tests.calibrate import probe_worlds as worlds
from twin.engines import load_engine
from twin.engines.twin import INLINE, INTERLEAVED

MACHINE = "h200"
MULTIPROCESSORS = 132
DEVICES = [(cuda, quick) for cuda in (True, False) for quick in (True, False)]
NAMES = [operation.name for operation in OPERATIONS]


def frozen(point: Point) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(point.items()))


def calibrated(operation: Operation) -> set[tuple[tuple[str, Any], ...]]:
    """Points of all devices and modes."""
    return {frozen(point) for point in (*operation.calibrated.every(), *operation.of_device(MULTIPROCESSORS))}


def rates(cases: Any) -> set[str]:
    return {op.kernel for case in cases for block in case.program("fp16") for op in block.ops if op.kernel}


@pytest.mark.parametrize("operation", OPERATIONS, ids=NAMES)
def test_no_point_is_calibrated_and_validated(operation: Operation) -> None:
    held_out = {frozen(point) for points in operation.held_out.values() for point in points.every()}
    assert held_out
    assert not held_out & calibrated(operation)


@pytest.mark.parametrize("size", ["ctx_tokens", "tokens", "bucket_tokens", "past_tokens"])
@pytest.mark.parametrize("operation", [one for one in OPERATIONS if one.fits], ids=lambda one: one.name)
def test_no_size_of_a_gpu_is_in_both_but_a_few_that_are_told(operation: Operation, size: str) -> None:
    """Few new tokens from the host, one new token and no past are what they are everywhere; products meet at one."""
    points = operation.calibration(cuda=True, quick=False, multiprocessors=MULTIPROCESSORS)
    held_out = [point for group in operation.held_out.values() for point in group.gpu]
    both = {point.get(size) for point in points} & {point.get(size) for point in held_out} - {None}
    assert both <= ({0} if size == "past_tokens" else {1} if operation.name == "product" else set())


def calibrated_kernels() -> set[str]:
    """Of the shipped machine, without those of engines that published figures set."""
    return {key for key, kernel in load_profile(MACHINE).kernels.items() if not kernel.is_fitted}


def test_every_rate_that_a_calibration_sets_has_held_out_points() -> None:
    assert calibrated_kernels() <= rates(
        case for group in GROUPS for case in held_out_cases(group, cuda=True, quick=False)
    )


def test_every_rate_that_a_calibration_sets_is_in_a_recorded_case() -> None:
    assert calibrated_kernels() <= rates(row.case for row in shipped_measurements(MACHINE).rows)


def test_the_shipped_samples_were_taken_at_the_points_of_the_table() -> None:
    for name in (OWN, LIBRARY, *rate_records(MACHINE)):
        for probe, record in probes(read_json(RECORDS / MACHINE / name)).items():
            operation = BY_NAME.get(probe.partition(".")[0])
            if operation is not None and operation.fits:
                points = operation.calibration(cuda=True, quick=False, multiprocessors=MULTIPROCESSORS)
                asked = {frozen(point) for point in points if operation.probe(point) == probe}
                assert {frozen(sample.at) for sample in record.samples} == asked, probe


@pytest.mark.parametrize(("cuda", "quick"), DEVICES)
def test_every_point_can_be_a_case_and_ids_are_unique(*, cuda: bool, quick: bool) -> None:
    for operation in OPERATIONS:
        points = operation.calibration(cuda=cuda, quick=quick, multiprocessors=MULTIPROCESSORS)
        for point in points:
            operation.check(point)
        assert len({operation.id(point) for point in points}) == len(points)
    cases = [case for group in GROUPS for case in held_out_cases(group, cuda=cuda, quick=quick)]
    assert len({case.id for case in cases}) == len(cases)
    assert all(case.program("fp16") for case in cases)


@pytest.mark.parametrize("cuda", [True, False])
@pytest.mark.parametrize("group", GROUPS)
def test_a_quick_group_is_a_part_of_the_whole(group: Any, *, cuda: bool) -> None:
    quick, whole = ({case.id for case in held_out_cases(group, cuda=cuda, quick=quick)} for quick in (True, False))
    assert quick <= whole
    assert bool(whole) == (cuda or group != "long_curve")
    assert not cuda or group == "long_curve" or len(quick) < len(whole)


def test_the_groups_are_large_enough_to_speak_of_percentiles() -> None:
    counts = {group: len(list(held_out_cases(group, cuda=True, quick=False))) for group in GROUPS}
    assert counts == {"grid": 87, "long_curve": 20, "formats": 235, "operations": counts["operations"]}
    assert counts["operations"] >= 100
    assert 10 <= len(list(held_out_cases("grid", cuda=False, quick=True))) <= 30


def test_every_format_of_the_rulebook_is_calibrated_and_validated_without_an_edit_here() -> None:
    rules = load_engine("twin")
    assert {*FORMATS, "fp32"} == set(rules.formats)
    assert (*({"format": name} for name in FORMATS), *({"format": n, "arrangement": "inline"} for n in INLINE)) == KEPT
    for name in ("decode_format", "append_format", "dequantise_format"):
        operation = BY_NAME[name]
        for points in (*operation.calibrated, *(group for group in operation.held_out.values() for group in group[:2])):
            assert {point["format"] for point in points} == set(FORMATS)
    blocks = {point.get("format") for point in BY_NAME["decode_gather"].calibrated.gpu_quick}
    assert blocks == {None, *INTERLEAVED}


def test_held_out_points_meet_open_blocks_several_formats_and_more_than_one_bucket() -> None:
    for points in BY_NAME["decode_gather"].held_out["formats"]:
        contexts = {int(point["ctx_tokens"]) for point in points}
        assert all(ctx & (ctx - 1) for ctx in contexts)
        assert len({ctx % 4 for ctx in contexts}) >= 2
    points = BY_NAME["decode_format"].held_out["formats"].gpu
    for size in ("ctx_tokens", "batch", "q_tokens"):
        met = {value: {p["format"] for p in points if p[size] == value} for value in {p[size] for p in points}}
        assert min(map(len, met.values())) >= 5
    assert max(int(point["ctx_tokens"]) * int(point["batch"]) for point in points) * 4 * 256 * 2 * 2 < 8e9
    prefill = BY_NAME["prefill_attention"]
    points = (*prefill.calibrated.every(), *prefill.held_out["grid"].every())
    staged = [point for point in points if "bucket_tokens" in point]
    assert staged
    assert all(int(point["bucket_tokens"]) < int(point["ctx_tokens"]) for point in staged)


# Cases

ONE = Case(
    operation="decode_format", at={"format": "q8_0", "ctx_tokens": 769, "batch": 3, "q_tokens": 2, "heads": "4x2x64"}
)
STAGED = Case(
    operation="prefill_attention",
    at={"tier": "host", "ctx_tokens": 12_288, "q_tokens": 768, "copies": "serial", "bucket_tokens": 4_096},
)


def test_ids_say_what_differs_and_a_case_is_its_plain_values_and_back() -> None:
    step = {"tier": "host4k", "ctx_tokens": 6_145, "layers": 12, "backbone_mib": 48}
    for case, id_ in (
        (ONE, "decode_format.q8_0.769.b3.q2.h4x2x64"),
        (STAGED, "prefill_attention.host.12288.r768.serial.4096"),
        (Case(operation="decode_step", at=step), "decode_step.host4k.6145.x12.w48MiB"),
    ):
        assert case.id == id_
        assert msgspec.convert(json.loads(json.dumps(msgspec.to_builtins(case))), Case) == case


@pytest.mark.parametrize(
    ("case", "change", "told"),
    [
        (ONE, {"q_tokens": 770}, "770 new tokens do not end a context of 769"),
        (ONE, {"batch": 0}, "batch is 0, not a whole number from 1 to"),
        (ONE, {"batch": 1.5}, "batch is 1.5"),
        (ONE, {"format": "int3"}, "format is 'int3', not fp16 or bf16"),
        (ONE, {"heads": "4xtwox64"}, "heads is '4xtwox64', not numbers"),
        (ONE, {"rows": 2}, "decode_format has no parameter rows"),
        (STAGED, {"tier": "disk"}, "tier is 'disk', not vram or host"),
        (STAGED, {"copies": "twice"}, "copies is 'twice'"),
    ],
)
def test_a_case_that_cannot_be_is_refused(case: Case, change: Point, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        replace(case, at={**case.at, **change})
    with pytest.raises(ValueError, match="unknown operation 'decode'"):
        replace(case, operation="decode")
    with pytest.raises(ValueError, match="needs ctx_tokens"):
        replace(case, at={name: value for name, value in case.at.items() if name != "ctx_tokens"})


def test_a_profile_without_a_rate_is_told_it() -> None:
    case = next(case for case in held_out_cases("formats", cuda=True, quick=True) if case.operation == "decode_gather")
    assert case.missing_rate(load_profile("3x-rtx3090"), "fp16") == (
        f"profile 3x-rtx3090 has no rate for gather_host/twin/{case.at['format']}"
    )
    assert case.missing_rate(load_profile(MACHINE), "fp16") == ""


# Devices


def test_what_a_device_cannot_run_is_told_and_kernels_are_compiled_before_they_are_timed() -> None:
    pytest.importorskip("torch", reason="needs torch: pip install 'kv-twin[kernels]'")
    probe = {probe.name: probe for probe in all_probes()}
    old, ampere, ada = (worlds.machine(compute_capability=number) for number in ("7.5", "8.6", "8.9"))
    cpu = worlds.machine(device="cpu", compute_capability="0.0")
    for name in ("decode_format.bf16", "append_format.q4_0", "linear", "decode_gather.host.q4_0"):
        assert "8.0, this device has 7.5" in probe[name].supported(old)
        assert probe[name].supported(ampere) == probe[name].supported(cpu) == ""
    for name in ("fp8", "fp8_per_token_head"):
        assert "capability 8.9, this device has 8.6" in probe[f"decode_format.{name}"].supported(ampere)
        assert probe[f"decode_format.{name}"].supported(ada) == ""
    assert probe["product.fp32"].supported(ada) == "nothing on a GPU uses it"
    names = list(probe)
    assert names.index("instructions") < names.index("compiled_kernels") < names.index("decode_format.bf16")
