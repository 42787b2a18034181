"""The fit turns the cost function round: rates put into samples come out, for every operation of the table."""

import json
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from calibrate.build import Evidence, build, checked
from calibrate.estimators import UNSEEN, Timing, _folds
from calibrate.operations.operation import Operation, Point
from calibrate.operations.table import BY_NAME, OPERATIONS
from calibrate.probes import ProbeRecord, Sample
from calibrate.refit import Records
from hwprofiles import HardwareProfile, load_profile
from hwprofiles.profile import Kernel
from tests.calibrate import probe_worlds as worlds
from tests.worlds import curve
from twin.cost.breakdown import Breakdown
from twin.cost.roofline import Roofs
from twin.operations.ops import Program

MACHINE, DTYPE = "h200", "fp16"
FITTED = [operation for operation in OPERATIONS if operation.fits]
COPIED = 0.9
"""Of the memory's rate, by copies within the device."""

BF16, INT4, FP8 = (f"attend_decode/twin/{name}" for name in ("bf16", "int4_per_token_head", "fp8"))
Fitted = tuple[HardwareProfile, dict[str, Any]]
"""A machine and the residuals of what its rates were fitted on."""

Change = Callable[[Operation, Point, float], float]


@pytest.fixture(scope="module")
def truth() -> HardwareProfile:
    """A machine with a rate for everything that is calibrated."""
    profile = load_profile(MACHINE)
    calibrated = {key: kernel for key, kernel in profile.kernels.items() if not kernel.is_fitted}
    return replace(profile, kernels=calibrated)


def seconds(program: Program, profile: HardwareProfile) -> float:
    """Of one run; planes in device memory are copied there."""
    roofs = Roofs(profile)
    total = 0.0
    for block in program:
        for op in block.ops:
            on_device = op.part == "kv_copy"
            copied_s = 2 * op.link_bytes * op.calls / profile.gpu.vram_read.rate.value / COPIED
            total += block.iterations * (copied_s if on_device else roofs.cost(op).seconds)
    return total


def rated(operation: Operation, point: Point, truth: HardwareProfile) -> bool:
    """Whether the machine has all rates of a point: it may be older than a format."""
    keys = {op.kernel for block in operation.lower(point, DTYPE) for op in block.ops if op.kernel}
    return keys <= set(truth.kernels)


def records_of(
    truth: HardwareProfile, *, change: Change = lambda _operation, _point, time: time,
    points: Callable[[Operation], tuple[Point, ...]] | None = None,
) -> Records:  # fmt: skip
    """What the machine would measure at every point of the table."""
    size = truth.gpu.vram_read.rate.value
    samples: dict[str, list[Sample]] = {"vram_copy": [worlds.sample(1.0, moved=size)]}
    for operation in FITTED:
        own = operation.calibration(cuda=True, quick=False, multiprocessors=truth.gpu.sm_count)
        for point in own if points is None else points(operation):
            if not rated(operation, point, truth):
                continue
            time = change(operation, point, seconds(operation.lower(point, DTYPE), truth))
            samples.setdefault(operation.probe(point), []).append(worlds.sample(time, **point))
    return {name: ProbeRecord(samples=tuple(own), took_s=1.0) for name, own in samples.items()}


def fitted(truth: HardwareProfile, records: Records, **gpu: Any) -> Fitted:
    bare = replace(truth, kernels={}, gpu=replace(truth.gpu, **gpu))
    evidence = Evidence(machine=worlds.machine(), records=records, date="2026-12-01")
    kernels, parts = evidence.kernels(bare)
    plain = json.loads(json.dumps({"kernels": kernels, "parts": parts}, allow_nan=False))
    return msgspec.convert(msgspec.to_builtins(bare) | {"kernels": plain["kernels"]}, HardwareProfile), plain["parts"]


@pytest.fixture(scope="module")
def records(truth: HardwareProfile) -> Records:
    """What the machine would measure."""
    return records_of(truth)


@pytest.fixture(scope="module")
def again(truth: HardwareProfile, records: Records) -> Fitted:
    """The machine as its own samples make it."""
    return fitted(truth, records)


def test_every_kernel_of_the_machine_comes_out(truth: HardwareProfile, again: Fitted) -> None:
    assert set(again[0].kernels) == set(truth.kernels)
    for key, kernel in truth.kernels.items():
        found = again[0].kernels[key]
        for rate in ("latency", "combine", "operations", "efficiency"):
            assert (getattr(found, rate) is None) == (getattr(kernel, rate) is None), (key, rate)
        if kernel.efficiency is not None and found.efficiency is not None:
            assert (found.efficiency.over, found.efficiency.at) == (kernel.efficiency.over, kernel.efficiency.at), key


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda one: one.name)
def test_points_that_were_not_measured_are_predicted_as_by_the_machine(
    truth: HardwareProfile, again: Fitted, operation: Operation
) -> None:
    for point in (point for points in operation.held_out.values() for point in points.gpu):
        if rated(operation, point, truth):
            program = operation.lower(point, DTYPE)
            wanted, found = (Breakdown().run(program, Roofs(machine)).seconds for machine in (truth, again[0]))
            assert found == pytest.approx(wanted, rel=0.03), point


def test_rows_and_images_come_out_as_a_latency_and_shares_of_their_links(truth: HardwareProfile) -> None:
    """Of two kernels in one call the one that other calls have alone is known first."""
    images = {f"{name}_page{where}/twin/uint8" for name in ("evict", "restore") for where in ("", "_in_host")}
    ram = (1, 16, 64, 256, 4096), (0.02, 0.02, 0.05, 0.1, 0.13)
    curves = dict.fromkeys((*images, "rows_disk/twin/uint8"), ((1,), (0.2,))) | {"rows_ram/twin/uint8": ram}
    own = {}
    for number, (key, (at, efficiency)) in enumerate(sorted(curves.items()), start=1):
        latency = replace(truth.gpu.h2d.latency, value=number * 4e-6)
        own[key] = Kernel(latency=latency, efficiency=curve(at, efficiency))
    rated_machine = replace(truth, kernels=truth.kernels | own)
    names = ("disk_rows", "evict_page", "restore_page")
    measured = records_of(
        rated_machine,
        points=lambda one: one.calibration(cuda=True, quick=False, multiprocessors=132) if one.name in names else (),
    )
    found = fitted(rated_machine, measured)[0]
    assert set(found.kernels) == set(own)
    for key, kernel in own.items():
        latency, efficiency = found.kernels[key].latency, found.kernels[key].efficiency
        assert latency is not None
        assert efficiency is not None
        assert latency.value == pytest.approx(kernel.latency.value, rel=0.01), key  # type: ignore[union-attr]
        assert efficiency.at == curves[key][0]
        assert efficiency.efficiency == pytest.approx(curves[key][1], rel=0.01), key


@pytest.mark.parametrize("name", ["product", "decode_select", "decode_gather", "linear", "dequantise_format"])
def test_a_calibrated_sample_is_given_back(truth: HardwareProfile, again: Fitted, name: str) -> None:
    """Where no two sizes share an efficiency, but for those that only tell a latency."""
    operation = BY_NAME[name]
    for point in operation.calibration(cuda=True, quick=False, multiprocessors=truth.gpu.sm_count):
        program = operation.lower(point, DTYPE)
        if rated(operation, point, truth) and point.get("budget", 2048) == 2048:
            assert seconds(program, again[0]) == pytest.approx(seconds(program, truth), rel=0.02), point


# What is measured beside the rates


def test_noise_is_told_as_spread(truth: HardwareProfile) -> None:
    chance = random.Random(5)  # noqa: S311

    def noisy(_operation: Operation, _point: Point, time: float) -> float:
        return time * chance.gauss(1.0, 0.03)

    profile, parts = fitted(truth, records_of(truth, change=noisy))
    for key in (BF16, INT4, "attend_dense/twin/bf16", "attend_dense/flash_attention/bf16"):
        efficiency = profile.kernels[key].efficiency
        assert efficiency is not None
        assert 0.01 <= efficiency.spread <= 0.12, key
    rows = parts[INT4]
    assert len(rows) == 16
    assert any("left_out" in row for row in rows)


def test_a_few_points_make_a_profile_too(truth: HardwareProfile) -> None:
    for count in (1, 2, 3):
        few = records_of(truth, points=lambda one, count=count: of_each_probe(one, count))  # type: ignore[misc]
        profile, _ = fitted(truth, few)
        for name in ("fp8", "int4_per_token_head"):
            for sample in few[f"decode_format.{name}"].samples:
                program = BY_NAME["decode_format"].lower(dict(sample.at), DTYPE)
                assert seconds(program, profile) == pytest.approx(sample.median_s, rel=0.05)


def of_each_probe(operation: Operation, count: int) -> tuple[Point, ...]:
    """The first points of every probe."""
    probes: dict[str, list[Point]] = {}
    for point in operation.calibration(cuda=True, quick=False, multiprocessors=132):
        probes.setdefault(operation.probe(point), []).append(point)
    return tuple(point for own in probes.values() for point in own[:count])


def test_a_format_without_samples_is_left_out_and_the_others_stay(truth: HardwareProfile, records: Records) -> None:
    fewer = records | {"decode_format.fp8": ProbeRecord(skipped="the kernel of fp8 is not there")}
    del fewer["dequantise_format.kvarn_k4v2_g128"]  # then nothing of its chunks is known
    profile, parts = fitted(truth, fewer)
    assert set(truth.kernels) - set(profile.kernels) == {FP8, "dequantise/twin/kvarn_k4v2_g128"}
    assert {row["at"]["format"] for row in parts["attend_dense/twin/bf16"]} == {"bf16", "int8_per_token_head"}


def test_a_type_without_a_measured_roof_is_left_out(truth: HardwareProfile, records: Records) -> None:
    profile, _ = fitted(truth, records, tensor={"fp16": truth.gpu.tensor["fp16"]})
    assert not {"linear/twin/bf16", "linear/library/bf16", BF16, INT4} & set(profile.kernels)
    assert {"linear/twin/fp16", "attend_decode/twin/fp16"} <= set(profile.kernels)


def test_without_a_rate_of_instructions_all_is_efficiency(truth: HardwareProfile, records: Records) -> None:
    profile, parts = fitted(truth, records, instructions=None)
    decode, dense = profile.kernels[INT4], profile.kernels["attend_dense/twin/bf16"]
    assert (decode.operations, decode.combine, dense.combine) == (None, None, None)
    assert list(parts[f"{INT4}#left_out"]) == ["efficiency"]
    assert dense.efficiency is not None
    assert dense.efficiency.over == "rows"
    assert 1_472 in dense.efficiency.at


def test_a_number_for_each_kind_of_block_is_kept_only_where_no_line_will_do(
    truth: HardwareProfile, again: Fitted
) -> None:
    """Blocks of 48 rows that take twice as long lie on no line between those of 16 and those of more."""

    def bent(operation: Operation, point: Point, time: float) -> float:
        (block, *_) = operation.lower(point, DTYPE)
        cut = block.ops[0].split_kv
        return 2 * time if cut is not None and cut.q_rows == 48 and point.get("format") == "fp8" else time

    kinked = fitted(truth, records_of(truth, change=bent))
    straight, broken = (made[0].kernels[FP8].operations for made in (again, kinked))
    assert straight is not None
    assert broken is not None
    assert "more for each query row" in straight.note
    assert "a number for each" in broken.note
    assert set(kinked[1][f"{FP8}#left_out"]) == {"operations", "rows"}


def test_as_many_sizes_as_numbers_say_nothing_of_how_far_they_scatter_and_layers_are_the_sum_of_their_parts(
    truth: HardwareProfile, records: Records
) -> None:
    fewer, keep = dict(records), {(512, 16_896), (2_048, 18_432), (64, 32_832)}
    for name in [name for name in fewer if name.startswith("prefill_format.")]:
        kept = [s for s in fewer[name].samples if (s.at["q_tokens"], s.at["ctx_tokens"]) in keep]
        fewer[name] = ProbeRecord(samples=tuple(kept))
    point = {"dtype": "bf16", "batch": 6, "q_tokens": 1, "past_tokens": 3_071}
    profile, parts = fitted(truth, fewer | {"layer": ProbeRecord(samples=(worlds.sample(1e-3, **point),))})
    efficiency = profile.kernels["attend_dense/twin/bf16"].efficiency
    assert efficiency is not None
    assert efficiency.spread == UNSEEN
    (row,) = parts["layer"]
    assert set(row["parts_s"]) == {"weights", "elementwise", "append", "attention"}
    assert row["residual"] == pytest.approx(sum(row["parts_s"].values()) / 1e-3 - 1)


def test_only_samples_of_whose_kind_there_are_others_are_left_out() -> None:
    sample = worlds.sample(1.0)
    (block,) = BY_NAME["decode_format"].lower({"format": "bf16", "ctx_tokens": 8_192, "batch": 1, "q_tokens": 1}, DTYPE)
    op = block.ops[0]
    assert op.split_kv is not None
    timings = [
        Timing(sample, replace(op, split_kv=replace(op.split_kv, q_rows=rows)), 1, 1.0, 1.0, 0.0, (), {})
        for rows in (16, 16, 32, 48, 48)
    ]
    assert list(_folds(timings)) == [0, 1, 3, 4]


def test_rates_of_a_whole_build_are_those_of_the_fit() -> None:
    profile, record = build(machine=worlds.machine(), records=worlds.records(), name="toy", date="2026-12-01")
    assert set(checked(profile).kernels) == {
        "linear/twin/fp16", "scan/twin/fp16", "select/twin/fp16", "gather_vram/twin/fp16", "gather_host/twin/fp16",
    }  # fmt: skip
    assert "instructions" not in profile["gpu"]
    assert set(record["fitted"]) == set(profile["kernels"]) - {"select/twin/fp16"}
