"""The shipped H200: its profile predicts what was measured there, none of which it was fitted on."""

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from msgspec import Struct
from msgspec.structs import replace

from calibrate.live import compare_rows, predict_case, tolerance_of, validate_measured
from calibrate.measurements import MeasuredRow, Measurements, row_of, shipped_measurements
from calibrate.operations import points
from calibrate.operations.operation import FORMATS, Group
from calibrate.operations.table import Case, held_out_cases
from calibrate.validation import Comparison, Validation
from hwprofiles import HardwareProfile, load_profile
from hwprofiles.profile import CPU_CAPABILITY, Kernel
from hwprofiles.rates import Provenance, Rate
from twin.cost.roofline import WALLS
from twin.errors import MissingRate

MACHINE = "h200"
STEP = Case(operation="decode_step", at={"tier": "host", "ctx_tokens": 98_306, "layers": 12})

SETS: dict[str, str] = {
    "vram": "gpu.vram_read",
    "h2d": "gpu.h2d",
    "tensor": "gpu.tensor",
    "linear": "linear/twin/bf16",
    "scan": "scan/twin/fp16",
    "select": "select/twin/fp16",
    "gather_vram": "gather_vram/twin/fp16",
    "gather_host": "gather_host/twin/fp16",
    "gather_host_4k": "gather_host_4k/twin/fp16",
    "gather_rows_host": "gather_rows_host/twin/fp16",
    "score": "score/twin/fp16",
    "attend_sparse": "attend_sparse/twin/fp16",
}
"""Rates of the profile that rows of the grid hang on."""


@pytest.fixture(scope="module")
def profile() -> HardwareProfile:
    return load_profile(MACHINE)


@pytest.fixture(scope="module")
def measured() -> Measurements:
    return shipped_measurements(MACHINE)


@pytest.fixture(scope="module")
def validation(measured: Measurements, profile: HardwareProfile) -> Validation:
    return validate_measured(measured, profile)


@pytest.fixture(scope="module")
def joined(measured: Measurements, validation: Validation) -> list[tuple[MeasuredRow, Comparison]]:
    return list(zip(measured.rows, validation.cases, strict=True))


def of_group(joined: list[tuple[MeasuredRow, Comparison]], group: str) -> list[Comparison]:
    return [case for row, case in joined if row.group == group]


def provenances(part: object) -> Iterator[Provenance]:
    if isinstance(part, Provenance):
        yield part
    elif isinstance(part, Struct):
        for name in part.__struct_fields__:
            yield from provenances(getattr(part, name))
    elif isinstance(part, dict):
        for value in part.values():
            yield from provenances(value)


def halved(rate: Rate) -> Rate:
    return replace(rate, value=rate.value / 2)


def halved_kernel(kernel: Kernel) -> Kernel:
    """Half the efficiency; where there is none, half the latency."""
    if kernel.efficiency is None:
        assert kernel.latency is not None
        return replace(kernel, latency=halved(kernel.latency))
    shares = tuple(share / 2 for share in kernel.efficiency.efficiency)
    return replace(kernel, efficiency=replace(kernel.efficiency, efficiency=shares))


def at_half(profile: HardwareProfile, place: str) -> HardwareProfile:
    """The machine with the one rate at `place` halved."""
    gpu = profile.gpu
    changes: dict[str, Callable[[], Any]] = {
        "gpu.vram_read": lambda: replace(gpu.vram_read, rate=halved(gpu.vram_read.rate)),
        "gpu.h2d": lambda: replace(gpu.h2d, rate=halved(gpu.h2d.rate)),
        "gpu.d2h": lambda: replace(gpu.d2h, rate=halved(gpu.d2h.rate)),
        "gpu.tensor": lambda: {name: replace(roof, rate=halved(roof.rate)) for name, roof in gpu.tensor.items()},
    }
    if place in changes:
        return replace(profile, gpu=replace(gpu, **{place.removeprefix("gpu."): changes[place]()}))
    return replace(profile, kernels=profile.kernels | {place: halved_kernel(profile.kernels[place])})


def test_nothing_in_the_profile_is_fitted_on_anything(profile: HardwareProfile) -> None:
    rates = list(provenances(profile))
    assert len(rates) > 30
    assert [rate for rate in rates if rate.fitted_on] == []
    assert {rate.source for rate in rates} == {"measured", "datasheet"}


@pytest.mark.parametrize("group", ["grid", "long_curve", "formats"])
def test_the_shipped_rows_are_the_whole_group(measured: Measurements, profile: HardwareProfile, group: Group) -> None:
    """Beside those that the profile has no rate for."""
    ids = {row.case.id for row in measured.rows if row.group == group}
    cases = {case.id: case for case in held_out_cases(group, cuda=True, quick=False)}
    assert ids <= set(cases)
    assert all(cases[id_].missing_rate(profile, measured.kv_dtype) for id_ in set(cases) - ids)
    assert set(measured.made) >= {group}


def test_medians_are_those_of_the_samples_and_results_were_right(measured: Measurements) -> None:
    for row in measured.rows:
        assert len(row.samples_s) >= 5
        assert row.median_s == pytest.approx(statistics.median(row.samples_s), rel=1e-12)
        assert row.error <= row.case.row.worst_error(row.case.at)


def test_every_shipped_row_is_held_out_and_within_its_tolerance(validation: Validation) -> None:
    assert validation.outside == []
    assert {case.role for case in validation.cases} == {"held_out"}
    assert validation.summary.fit.n == 0


@pytest.mark.parametrize(("group", "least"), [("grid", 80), ("formats", 120)])
def test_a_group_is_predicted_to_a_few_per_cent_and_its_intervals_hold(
    joined: list[tuple[MeasuredRow, Comparison]], group: str, least: int
) -> None:
    cases = of_group(joined, group)
    median, p95 = np.quantile([abs(case.error or 0.0) for case in cases], (0.5, 0.95))
    assert len(cases) >= least
    assert median <= 0.04
    assert p95 <= 0.12
    assert all(case.has_interval for case in cases)
    assert 0.80 <= sum(case.covered for case in cases) / len(cases) <= 0.97


def test_every_format_is_among_them(measured: Measurements) -> None:
    assert {row.case.at["format"] for row in measured.rows if row.group == "formats"} == set(FORMATS)


def test_the_twin_is_nearer_than_the_usual_estimate(validation: Validation) -> None:
    summary = validation.summary.held_out
    assert summary.naive.n == len(validation.cases)
    assert (summary.naive.median_abs_error or 0.0) > 5 * (summary.beside_naive.median_abs_error or 1.0)


def test_each_point_of_the_long_curve_is_within_6_per_cent(joined: list[tuple[MeasuredRow, Comparison]]) -> None:
    curve = of_group(joined, "long_curve")
    assert len(curve) >= 18
    assert {case.id: case.error for case in curve if abs(case.error or 1.0) > 0.06} == {}
    assert {case.tolerance for case in curve} == {0.06}


def test_what_a_staged_prefill_moves_is_predicted_exactly(joined: list[tuple[MeasuredRow, Comparison]]) -> None:
    staged = [case for row, case in joined if "bucket_tokens" in row.case.at]
    assert len(staged) >= 20
    for case in staged:
        assert case.also["link_bytes_predicted"] == pytest.approx(case.also["link_bytes_measured"], rel=1e-12)
        assert case.also["link_bytes_measured"] > 0


def test_whatever_lies_in_vram_moves_nothing(joined: list[tuple[MeasuredRow, Comparison]]) -> None:
    for row, case in joined:
        if row.case.at.get("tier", "vram") == "vram":
            assert (case.also["link_bytes_predicted"], case.also["link_bytes_measured"]) == (0, 0)


@pytest.mark.parametrize("place", SETS.values(), ids=SETS)
def test_half_of_any_rate_makes_rows_leave_their_tolerance(
    place: str, measured: Measurements, profile: HardwareProfile
) -> None:
    cases = compare_rows(measured.rows, at_half(profile, place), kv_dtype=measured.kv_dtype)
    assert [case.id for case in cases if not case.within]


def test_half_of_a_rate_that_no_kernel_asks_for_moves_nothing(
    measured: Measurements, profile: HardwareProfile, validation: Validation
) -> None:
    cases = compare_rows(measured.rows, at_half(profile, "gpu.d2h"), kv_dtype=measured.kv_dtype)
    assert [case.predicted for case in cases] == [case.predicted for case in validation.cases]


def test_a_prediction_lies_in_its_interval_and_not_below_the_floor(
    measured: Measurements, profile: HardwareProfile
) -> None:
    for row in measured.rows:
        breakdown, seconds, low, high = predict_case(row.case, profile, kv_dtype=measured.kv_dtype)
        assert breakdown.floor_s() <= low <= seconds <= high
        assert breakdown.bound() in WALLS.values()


@pytest.mark.parametrize("tier", ["vram", "host"])
def test_a_step_takes_its_selection_and_its_gather(profile: HardwareProfile, tier: str) -> None:
    def seconds(operation: str) -> float:
        at = {"tier": tier if operation != "decode_select" else "vram", "ctx_tokens": 98_306, "layers": 12}
        return predict_case(Case(operation=operation, at=at), profile, kv_dtype="fp16")[1]

    assert seconds("decode_step") == pytest.approx(seconds("decode_select") + seconds("decode_gather"))


def test_seconds_of_a_decode_step_grow_with_its_layers_in_proportion(profile: HardwareProfile) -> None:
    one = replace(STEP, at=STEP.at | {"layers": 1})
    twelve_s, one_s = (predict_case(case, profile, kv_dtype="fp16")[1] for case in (STEP, one))
    assert twelve_s == pytest.approx(12 * one_s)


def made(case: Case, median_s: float, group: Group = "grid") -> MeasuredRow:
    return row_of(case, [median_s], error=0.0, link_bytes=0, group=group)


def test_errors_are_signed_and_relative_to_the_measurement(profile: HardwareProfile) -> None:
    seconds = predict_case(STEP, profile, kv_dtype="fp16")[1]
    slow, quick = compare_rows([made(STEP, 2 * seconds), made(STEP, seconds / 2)], profile, kv_dtype="fp16")
    assert (slow.error, quick.error) == (pytest.approx(-0.5), pytest.approx(1.0))
    assert not slow.within
    assert not quick.within


def test_tolerances_go_by_what_is_timed_and_where(profile: HardwareProfile) -> None:
    coded = {"format": "kvarn_k4v2_g128", "batch": 1, "q_tokens": 1}
    rows = {
        points.KERNEL: made(STEP, 1.0), points.LONG_CURVE: made(STEP, 1.0, "long_curve"),
        points.LIBRARY: made(Case(operation="linear", at={"dtype": "bf16", "tokens": 3}), 1.0, "operations"),
        points.FORMAT_RATES: made(Case(operation="decode_format", at=coded | {"ctx_tokens": 24_576}), 1.0, "formats"),
        points.OPEN_TILE: made(Case(operation="decode_format", at=coded | {"ctx_tokens": 24_577}), 1.0, "formats"),
    }  # fmt: skip
    assert {tolerance: tolerance_of(row, profile) for tolerance, row in rows.items()} == {key: key for key in rows}
    on_cpu = replace(profile, gpu=replace(profile.gpu, compute_capability=CPU_CAPABILITY))
    assert {tolerance_of(row, on_cpu) for row in rows.values()} == {points.CPU}


def test_the_same_case_on_the_grid_and_on_the_curve_are_two_rows(profile: HardwareProfile) -> None:
    grid, curve = compare_rows([made(STEP, 1.0), made(STEP, 1.0, "long_curve")], profile, kv_dtype="fp16")
    assert grid.id == f"h200.{STEP.id}"
    assert curve.id == f"h200.curve.{STEP.id}"


def test_a_format_that_was_not_calibrated_is_refused(profile: HardwareProfile) -> None:
    with pytest.raises(MissingRate, match="bf16"):
        predict_case(STEP, profile, kv_dtype="bf16")
