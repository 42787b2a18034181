"""Every recorded row is predicted or listed with a reason; rows that set a rate are no evidence; all come near."""

import json
from collections.abc import Iterator

import pytest
from msgspec import Struct
from msgspec.structs import replace

from calibrate.published.cases import load_recorded, read_published
from calibrate.published.recorded import role_reasons, validate, validate_recorded
from calibrate.validation import Comparison, Validation, to_json
from hwprofiles import HardwareProfile, load_profile
from hwprofiles.rates import Provenance
from twin.engines import engine_names, load_engine
from twin.errors import BadFile, UnknownName

MACHINE = "3x-rtx3090"

KEYS = [
    "id",
    "machine",
    "metric",
    "unit",
    "predicted",
    "low",
    "high",
    "measured",
    "error",
    "naive_error",
    "role",
    "tolerance",
    "within",
]

SAME_MEASUREMENT = {"blog.ttft_1M", "blog.vram_left"}
INPUTS = {"blog.link", "blog.vram_bw", "blog.vram_total"}


@pytest.fixture(scope="module")
def validation() -> Validation:
    return validate_recorded(MACHINE)


@pytest.fixture(scope="module")
def by_id(validation: Validation) -> dict[str, Comparison]:
    return {case.id: case for case in validation.cases}


def named_in_fitted_on(part: object) -> Iterator[str]:
    if isinstance(part, Provenance):
        yield from part.fitted_on
    elif isinstance(part, Struct):
        for name in part.__struct_fields__:
            yield from named_in_fitted_on(getattr(part, name))
    elif isinstance(part, dict):
        for value in part.values():
            yield from named_in_fitted_on(value)


def link_at(profile: HardwareProfile, share: float) -> HardwareProfile:
    rate = replace(profile.gpu.h2d.rate, value=profile.gpu.h2d.rate.value * share)
    return replace(profile, gpu=replace(profile.gpu, h2d=replace(profile.gpu.h2d, rate=rate)))


def vram_at(profile: HardwareProfile, share: float) -> HardwareProfile:
    vram = replace(profile.gpu.vram, value=profile.gpu.vram.value * share)
    return replace(profile, gpu=replace(profile.gpu, vram=vram))


def test_every_row_is_compared_or_listed_exactly_once(validation: Validation) -> None:
    rows = [row.id for row in load_recorded(MACHINE).rows]
    assert rows
    told = [case.id for case in validation.cases] + [row.id for row in validation.skipped]
    assert sorted(told) == sorted(rows)


def test_counts_add_up(validation: Validation) -> None:
    counts = validation.counts
    assert counts.predicted == len(validation.cases)
    assert counts.carried + counts.not_predicted == len(validation.skipped) == sum(counts.reasons.values())
    assert validation.summary.fit.n + validation.summary.held_out.n == counts.predicted


def test_every_row_of_the_blog_is_compared_and_within_its_tolerance(validation: Validation) -> None:
    blog = {row.id for row in load_recorded(MACHINE).rows}
    assert len(blog) == 30
    assert {case.id for case in validation.cases} == blog
    assert [case.id for case in validation.outside] == []
    assert validation.within


def test_a_row_that_sets_a_rate_is_never_held_out(by_id: dict[str, Comparison]) -> None:
    published = {row.id for row in read_published("published_rtx3090.json").rows}
    fitted = set(named_in_fitted_on(load_profile(MACHINE)))
    for engine in engine_names():
        fitted |= set(named_in_fitted_on(load_engine(engine)))
    assert {"blog.decode_1M", "blog.decode_fixed", "blog.prefill_32k", "blog.prefill_1M", "blog.vram_model"} <= fitted
    assert fitted <= published
    assert all(by_id[row].role == "fit" for row in fitted & by_id.keys())


def test_only_rows_that_set_are_or_repeat_a_rate_are_fit(by_id: dict[str, Comparison]) -> None:
    fit = {case.id for case in by_id.values() if case.role == "fit"}
    blog = {row for row in named_in_fitted_on(load_profile(MACHINE)) if row in by_id}
    blog |= {row for row in named_in_fitted_on(load_engine("exllamav3")) if row in by_id}
    assert fit == blog | SAME_MEASUREMENT | INPUTS
    assert all(by_id[row].role_reason for row in fit)
    assert not any(case.role_reason for case in by_id.values() if case.role == "held_out")


def test_an_input_that_was_measured_anew_is_evidence_again() -> None:
    profile = load_profile(MACHINE)
    rate = replace(profile.gpu.h2d.rate, source="measured")
    measured = replace(profile, gpu=replace(profile.gpu, h2d=replace(profile.gpu.h2d, rate=rate)))
    assert "blog.link" not in role_reasons(load_recorded(MACHINE), measured)


def test_every_tolerance_says_why(validation: Validation) -> None:
    assert all(case.tolerance_reason for case in validation.cases)


def test_the_misfit_that_nothing_explains_is_shown_and_not_bent(by_id: dict[str, Comparison]) -> None:
    chunk = by_id["blog.naive_chunk"]
    assert chunk.predicted == pytest.approx(192.14, abs=0.01)
    assert chunk.error == pytest.approx(-0.058, abs=0.001)
    assert chunk.tolerance_reason.startswith("not explained:")


def test_a_range_is_compared_with_its_middle_and_judged_by_its_ends(by_id: dict[str, Comparison]) -> None:
    step = by_id["blog.decode_base_ms"]
    assert (step.measured_low, step.measured, step.measured_high) == (15, 17.5, 20)
    assert step.tolerance * step.measured == pytest.approx(2.5)


def test_the_drop_with_context_tells_what_it_hangs_on(by_id: dict[str, Comparison]) -> None:
    drop = by_id["blog.decode_drop"]
    assert drop.predicted is not None
    assert drop.also["drop_from_a_step_that_selects_percent"] < drop.predicted
    assert by_id["blog.decode_fixed"].also == {}


def test_a_claim_that_a_context_fits_comes_with_the_limit_of_the_twin(by_id: dict[str, Comparison]) -> None:
    claim = by_id["blog.maxctx_offload"]
    assert claim.predicted == claim.measured == 3_145_728
    assert claim.also["max_ctx_tokens"] > claim.also["ngram_in_ram_max_ctx_tokens"] > claim.measured
    assert claim.also["ngram_in_ram_host_used_bytes"] < claim.also["host_capacity_bytes"]


def test_larger_staging_buffers_fit_in_the_twin_too(by_id: dict[str, Comparison]) -> None:
    left = [by_id["blog.staging"].also[f"staging_{size}_mib_vram_left_bytes"] for size in (32, 64, 128)]
    assert left == sorted(left, reverse=True)
    assert left[-1] > 0
    assert "not explained" in by_id["blog.staging"].note


def test_half_the_link_leaves_the_tolerance_of_rows_that_cross_it_and_of_no_count() -> None:
    slowed = validate_recorded(profile=link_at(load_profile(MACHINE), 0.5))
    outside = {case.id for case in slowed.outside}
    assert not slowed.within
    assert outside >= {"blog.link", "blog.decode_transfer", "blog.pooled_scan_host_ms_1M", "blog.naive_1M"}
    assert outside >= {"blog.decode_fixed", "blog.decode_1M"}
    assert not outside & {"blog.kv_all", "blog.decode_bytes", "blog.staged_ratio", "blog.maxctx_vram"}


def test_what_does_not_fit_is_a_row_outside_with_no_number() -> None:
    validation = validate_recorded(profile=vram_at(load_profile(MACHINE), 0.5))
    case = next(case for case in validation.cases if case.id == "blog.decode_1M")
    assert (case.predicted, case.error, case.within) == (None, None, False)
    assert "VRAM" in case.note
    assert validation.summary.fit.unanswered
    json.dumps(to_json(validation), allow_nan=False)


def test_json_has_the_keys_that_scripts_rely_on(validation: Validation) -> None:
    plain = json.loads(json.dumps(to_json(validation), allow_nan=False))
    assert plain["schema"] == "twin.validation/1"
    assert all(list(case)[: len(KEYS)] == KEYS for case in plain["cases"])
    assert {case["role"] for case in plain["cases"]} == {"fit", "held_out"}
    assert plain["summary"].keys() == {"fit", "held_out"}
    for summary in plain["summary"].values():
        assert summary.keys() >= {"n", "median_abs_error", "p95_abs_error", "worst", "coverage_90"}
    assert plain["counts"].keys() >= {"predicted", "carried", "not_predicted"}


def test_validation_is_deterministic(validation: Validation) -> None:
    assert to_json(validate_recorded(MACHINE)) == to_json(validation)


@pytest.mark.parametrize("machine", ["3x-rtx3091", "h200"])
def test_a_machine_without_recorded_rows_is_refused_by_name(machine: str) -> None:
    with pytest.raises(UnknownName) as refusal:
        validate_recorded(machine)
    assert machine in refusal.value.message
    assert MACHINE in refusal.value.hint


def test_cases_of_another_machine_are_refused() -> None:
    with pytest.raises(BadFile, match="rtx3090"):
        validate(load_recorded(MACHINE), load_profile("rtx3090"))
