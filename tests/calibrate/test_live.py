"""The shipped H200: its profile predicts what was measured there, none of which it was fitted on."""

import statistics
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from calibrate.live import compare, predict_case, tolerance_of, validate_measured
from calibrate.measurements import MeasuredRow, Measurements, row_of, shipped_measurements
from calibrate.operations import shared
from calibrate.operations.operation import FORMATS, Group
from calibrate.operations.table import Case, held_out_cases
from calibrate.refit import LIBRARY, OWN, probes, rate_records
from calibrate.validation import Comparison, Validation
from hwprofiles import HardwareProfile, load_profile
from hwprofiles.files import read_json
from hwprofiles.profile import CPU_CAPABILITY
from hwprofiles.store import RECORDS
from twin.cost.roofline import WALLS
from twin.errors import MissingRate

MACHINE = "h200"
LAYER_TOLERANCE = 0.15
"""Largest distance of a whole layer from the sum of its parts, at points that no part was fitted on."""

STEP = Case(operation="decode_step", at={"tier": "host", "ctx_tokens": 98_306, "layers": 12})

SETS = (
    "gpu.vram_read", "gpu.h2d", "gpu.tensor", "linear/twin/bf16", "scan/twin/fp16", "select/twin/fp16",
    "gather_vram/twin/fp16", "gather_host/twin/fp16", "gather_host_4k/twin/fp16", "gather_rows_host/twin/fp16",
    "score/twin/fp16", "attend_sparse/twin/fp16",
)  # fmt: skip
"""Rates of the profile that rows of the grid hang on."""


Joined = list[tuple[MeasuredRow, Comparison]]
"""Each row and what became of it."""


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
def joined(measured: Measurements, validation: Validation) -> Joined:
    return list(zip(measured.rows, validation.cases, strict=True))


def of_group(joined: Joined, group: str) -> list[Comparison]:
    return [case for row, case in joined if row.group == group]


def at_half(profile: HardwareProfile, place: str) -> HardwareProfile:
    """The machine with the one rate at `place` halved; of a kernel its efficiency or, without one, its latency."""
    plain = msgspec.to_builtins(profile)
    if place.startswith("gpu."):
        part = plain["gpu"][place.removeprefix("gpu.")]
        for roof in part.values() if place == "gpu.tensor" else [part]:
            roof["rate"]["value"] /= 2
    elif efficiency := plain["kernels"][place].get("efficiency"):
        efficiency["efficiency"] = [share / 2 for share in efficiency["efficiency"]]
    else:
        plain["kernels"][place]["latency"]["value"] /= 2
    return msgspec.convert(plain, HardwareProfile)


def rates(plain: Any) -> Iterator[dict[str, Any]]:
    """Everything in plain values that says where it is from."""
    if isinstance(plain, dict):
        if "source" in plain:
            yield plain
        yield from (rate for value in plain.values() for rate in rates(value))


def test_nothing_that_is_calibrated_is_fitted_on_figures_and_no_record_says_which_card_it_was(
    profile: HardwareProfile,
) -> None:
    """Kernels that published figures set are other engines': no case of ours is told by one."""
    fitted = {key for key, kernel in profile.kernels.items() if kernel.is_fitted}
    calibrated = {key: kernel for key, kernel in profile.kernels.items() if key not in fitted}
    assert not {key.split("/")[1] for key in fitted} & {key.split("/")[1] for key in calibrated}
    found = list(rates(msgspec.to_builtins(replace(profile, kernels=calibrated))))
    assert len(found) > 30
    assert not any(rate.get("fitted_on") for rate in found)
    assert {rate["source"] for rate in found} == {"measured", "datasheet"}
    assert {read_json(RECORDS / MACHINE / name)["machine"]["device_id"] for name in (OWN, *rate_records(MACHINE))} == {
        ""
    }


@pytest.mark.parametrize("group", ["grid", "long_curve", "formats"])
def test_the_shipped_rows_are_the_whole_group(measured: Measurements, profile: HardwareProfile, group: Group) -> None:
    """Beside those that the profile has no rate for."""
    ids = {row.case.id for row in measured.rows if row.group == group}
    cases = {case.id: case for case in held_out_cases(group, cuda=True, quick=False)}
    assert ids <= set(cases)
    assert all(cases[id_].missing_rate(profile, measured.kv_dtype) for id_ in set(cases) - ids)
    assert set(measured.made) >= {group}


def test_samples_were_right_of_every_format_and_their_medians_are_told(measured: Measurements) -> None:
    for row in measured.rows:
        assert len(row.samples_s) >= 5
        assert row.median_s == pytest.approx(statistics.median(row.samples_s), rel=1e-12)
        assert row.error <= row.case.row.worst_error(row.case.at)
    assert {row.case.at["format"] for row in measured.rows if row.group == "formats"} == set(FORMATS)


def test_every_shipped_row_is_held_out_within_its_tolerance_and_nearer_than_the_usual_estimate(
    validation: Validation,
) -> None:
    assert validation.outside == []
    assert {case.role for case in validation.cases} == {"held_out"}
    assert validation.summary.fit.n == 0
    summary = validation.summary.held_out
    assert summary.naive.n == len(validation.cases)
    assert (summary.naive.median_abs_error or 0.0) > 5 * (summary.beside_naive.median_abs_error or 1.0)


@pytest.mark.parametrize(("group", "least"), [("grid", 80), ("formats", 120)])
def test_a_group_is_predicted_to_a_few_per_cent_and_its_intervals_hold(joined: Joined, group: str, least: int) -> None:
    cases = of_group(joined, group)
    median, p95 = np.quantile([abs(case.error or 0.0) for case in cases], (0.5, 0.95))
    assert len(cases) >= least
    assert median <= 0.04
    assert p95 <= 0.12
    assert all(case.has_interval for case in cases)
    assert 0.80 <= sum(case.covered for case in cases) / len(cases) <= 0.97


def test_each_point_of_the_long_curve_is_within_6_per_cent(joined: Joined) -> None:
    curve = of_group(joined, "long_curve")
    assert len(curve) >= 18
    assert {case.id: case.error for case in curve if abs(case.error or 1.0) > 0.06} == {}
    assert {case.tolerance for case in curve} == {0.06}


def test_what_a_staged_prefill_moves_is_predicted_exactly_and_whatever_lies_in_vram_moves_nothing(
    joined: Joined,
) -> None:
    staged = [case.also for row, case in joined if "bucket_tokens" in row.case.at]
    assert len(staged) >= 20
    for moved in staged:
        assert moved["link_bytes_predicted"] == pytest.approx(moved["link_bytes_measured"], rel=1e-12)
        assert moved["link_bytes_measured"] > 0
    stays = ((row.case, case) for row, case in joined if row.case.row.timed.module != "page_images")
    for moved in (compared.also for case, compared in stays if case.at.get("tier", "vram") == "vram"):
        assert (moved["link_bytes_predicted"], moved["link_bytes_measured"]) == (0, 0)


@pytest.mark.parametrize("place", SETS)
def test_half_of_any_rate_makes_rows_leave_their_tolerance(
    place: str, measured: Measurements, profile: HardwareProfile
) -> None:
    assert not validate_measured(measured, at_half(profile, place)).within


def test_half_of_a_rate_that_no_kernel_asks_for_moves_nothing(measured: Measurements, profile: HardwareProfile) -> None:
    """Only images of pages are copied to the host."""
    attention = replace(measured, rows=tuple(row for row in measured.rows if row.group != "operations"))
    found, wanted = (validate_measured(attention, each) for each in (at_half(profile, "gpu.d2h"), profile))
    assert found == wanted


def test_a_prediction_lies_in_its_interval_and_not_below_the_floor(
    measured: Measurements, profile: HardwareProfile
) -> None:
    for row in measured.rows:
        breakdown, seconds, low, high = predict_case(row.case, profile, kv_dtype=measured.kv_dtype)
        assert breakdown.floor_s() <= low <= seconds <= high
        assert breakdown.bound() in WALLS.values()


def made(case: Case, median_s: float, group: Group = "grid") -> MeasuredRow:
    return row_of(case, [median_s], error=0.0, link_bytes=0, group=group)


def test_errors_are_signed_and_a_case_on_the_grid_and_on_the_curve_are_two_rows(profile: HardwareProfile) -> None:
    seconds = predict_case(STEP, profile, kv_dtype="fp16")[1]
    rows = [made(STEP, 2 * seconds), made(STEP, seconds / 2, "long_curve")]
    slow, quick = (compare(row, profile, kv_dtype="fp16") for row in rows)
    assert (slow.error, quick.error) == (pytest.approx(-0.5), pytest.approx(1.0))
    assert (slow.within, quick.within) == (False, False)
    assert (slow.id, quick.id) == (f"h200.{STEP.id}", f"h200.curve.{STEP.id}")


def test_tolerances_go_by_what_is_timed_and_where(profile: HardwareProfile) -> None:
    coded = {"format": "kvarn_k4v2_g128", "batch": 1, "q_tokens": 1}
    rows = {
        shared.KERNEL: made(STEP, 1.0), shared.LONG_CURVE: made(STEP, 1.0, "long_curve"),
        shared.LIBRARY: made(Case(operation="linear", at={"dtype": "bf16", "tokens": 3}), 1.0, "operations"),
        shared.FORMAT_RATES: made(Case(operation="decode_format", at=coded | {"ctx_tokens": 24_576}), 1.0, "formats"),
        shared.OPEN_TILE: made(Case(operation="decode_format", at=coded | {"ctx_tokens": 24_577}), 1.0, "formats"),
    }  # fmt: skip
    assert {tolerance: tolerance_of(row, profile) for tolerance, row in rows.items()} == {key: key for key in rows}
    on_cpu = replace(profile, gpu=replace(profile.gpu, compute_capability=CPU_CAPABILITY))
    assert {tolerance_of(row, on_cpu) for row in rows.values()} == {shared.CPU}


def test_a_format_that_was_not_calibrated_is_refused(profile: HardwareProfile) -> None:
    with pytest.raises(MissingRate, match="bf16"):
        predict_case(STEP, profile, kv_dtype="bf16")


# Records of library kernels and formats, which were measured on their own


def test_whole_layers_take_what_their_parts_add_up_to() -> None:
    layers = read_json(RECORDS / MACHINE / LIBRARY)["fitted"]["layer"]
    phases = {(row["at"]["q_tokens"] == 1, row["at"]["past_tokens"] > 0) for row in layers}
    assert phases >= {(True, True), (False, False)}
    for row in layers:
        off = sum(row["parts_s"].values()) / row["measured_s"] - 1
        assert row["residual"] == pytest.approx(off, abs=1e-9)
        assert abs(off) <= LAYER_TOLERANCE, row["at"]


@pytest.mark.parametrize("name", [LIBRARY, *rate_records(MACHINE)])
def test_every_probe_of_a_kernel_ran_to_its_end_and_was_checked(name: str) -> None:
    for probe, record in probes(read_json(RECORDS / MACHINE / name)).items():
        assert record.samples, probe
        assert (record.skipped, record.left_out) == ("", 0), probe
        assert all(sample.checked for sample in record.samples)
