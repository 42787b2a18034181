"""vLLM's published rows on one RTX 3090: every row ends once, and as near as was asked; repeats are no evidence."""

import json
from collections import Counter
from collections.abc import Iterator
from itertools import combinations, product
from statistics import median

import pytest
from msgspec.structs import replace

from calibrate.published.cases import Recorded, Row, load_recorded, read_published, recorded_machines
from calibrate.published.recorded import validate_recorded
from calibrate.validation import Comparison, Validation, to_json
from hwprofiles import HardwareProfile, load_profile
from twin.units import GIB

MACHINE = "rtx3090"
ALL_ROWS = 160

EXACT = 0.0
HALF_A_DIGIT = 0.003
"""Of a number published to three figures."""

ASKED = {
    "prefill": 0.03, "ttft": 0.05, "tpot": 0.05,
    "total_time": 0.03, "itl": 0.10, "resident_requests": EXACT, "throughput": 0.08,
    "decode": 0.10, "time_per_token": 0.10, "ttft_cold": 0.10, "ttft_prefix_cached": 0.10, "step": 0.10,
    "verify_attention_per_layer": 0.10, "decode_slowdown_vs_fp8": 0.05,
    "kv_pool": 0.015, "max_context": EXACT, "max_context_shipped": EXACT, "max_context_ceiling": 0.015,
    "max_concurrency_at_262144": 0.015, "block_size": EXACT, "promoted_block": EXACT, "drafter_blocks": EXACT,
    "kv_bytes_per_token": EXACT, "kv_bytes_per_token_per_layer": EXACT, "out_of_memory": EXACT, "starts": EXACT,
    "kv_memory_for_32768_tokens": HALF_A_DIGIT, "drafter_page_use": HALF_A_DIGIT, "primary_page": HALF_A_DIGIT,
}  # fmt: skip
"""Largest relative error by metric; where a range was published, the prediction must lie in it instead."""

SPECULATION = {"decode", "time_per_token", "ttft_cold", "ttft_prefix_cached", "step"}
"""Metrics of speed that are published under speculation only."""

CARRIED = {"perplexity", "accepted_tokens_per_step"}


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    return load_recorded(MACHINE)


@pytest.fixture(scope="module")
def validation() -> Validation:
    return validate_recorded(MACHINE)


@pytest.fixture(scope="module")
def by_id(validation: Validation) -> dict[str, Comparison]:
    return {case.id: case for case in validation.cases}


def machine(*, vram: float = 1.0, read: float = 1.0, tensor: float = 1.0) -> HardwareProfile:
    """The machine with a share of its VRAM, of the rate at which it is read, and of its tensor cores."""
    profile = load_profile(MACHINE)
    gpu = profile.gpu
    roofs = {
        name: replace(roof, rate=replace(roof.rate, value=roof.rate.value * tensor))
        for name, roof in gpu.tensor.items()
    }
    vram_read = replace(gpu.vram_read, rate=replace(gpu.vram_read.rate, value=gpu.vram_read.rate.value * read))
    bytes_ = replace(gpu.vram, value=gpu.vram.value * vram)
    return replace(profile, gpu=replace(gpu, vram=bytes_, vram_read=vram_read, tensor=roofs))


def outside(profile: HardwareProfile) -> set[str]:
    """Metrics of which some row leaves its tolerance."""
    return {case.metric for case in validate_recorded(profile=profile).outside}


def test_every_published_row_ends_exactly_once_over_all_machines() -> None:
    rows = read_published("published_rtx3090.json").rows
    ends: Counter[str] = Counter()
    for name in recorded_machines():
        found = validate_recorded(name)
        ends.update([case.id for case in found.cases] + [row.id for row in found.skipped])
        counts = found.counts
        assert counts.predicted + counts.carried + counts.not_predicted == len(found.cases) + len(found.skipped)
    assert len(rows) == ALL_ROWS
    assert ends == Counter({row.id: 1 for row in rows})


def test_every_system_belongs_to_one_machine() -> None:
    systems = {name: {row.system for row in load_recorded(name).rows} for name in recorded_machines()}
    assert Counter(name for own in systems.values() for name in own) == Counter(
        {row.system for row in read_published("published_rtx3090.json").rows}
    )


def test_what_is_not_predicted_is_a_fact_of_quality_or_an_input(validation: Validation) -> None:
    carried = [row for row in validation.skipped if row.status == "carried"]
    assert {row.metric for row in carried} == CARRIED
    assert all(row.reason.startswith("carried: ") for row in carried)
    assert not {case.metric for case in validation.cases} & CARRIED
    assert all(row.reason for row in validation.skipped)


def test_every_case_is_within_its_tolerance(validation: Validation) -> None:
    assert [(case.id, case.error) for case in validation.outside] == []
    assert all(case.tolerance_reason for case in validation.cases)


def test_every_metric_has_a_largest_error_that_was_asked_for(validation: Validation) -> None:
    assert {case.metric for case in validation.cases} == ASKED.keys()


@pytest.mark.parametrize("metric", ASKED)
def test_rows_come_as_near_as_was_asked(validation: Validation, metric: str) -> None:
    cases = [case for case in validation.cases if case.metric == metric]
    assert len(cases) == sum(row.metric == metric for row in load_recorded(MACHINE).rows)
    for case in cases:
        assert case.predicted is not None, case.id
        assert case.error is not None, case.id
        if case.measured_low < case.measured_high:
            assert case.measured_low <= case.predicted <= case.measured_high, case.id
        else:
            assert abs(case.error) <= case.tolerance + 1e-9 <= ASKED[metric] + 2e-9, case.id


def test_a_pinned_pool_is_exact(recorded: Recorded, by_id: dict[str, Comparison]) -> None:
    pinned = [case for case in recorded.cases if case.figure == "kv_pool" and case.ask.pool_bytes is not None]
    assert len(pinned) >= 7
    for case in pinned:
        assert case.tolerance == 0, case.id
        assert by_id[case.id].predicted == by_id[case.id].measured, case.id


@pytest.mark.parametrize("role", ["fit", "held_out", "both"])
def test_half_of_the_speculation_rows_come_within_five_per_cent(validation: Validation, role: str) -> None:
    errors = [
        abs(case.error)
        for case in validation.cases
        if case.metric in SPECULATION and role in (case.role, "both") and case.error is not None
    ]
    assert len(errors) >= 5
    assert median(errors) <= 0.05


def test_fit_and_held_out_are_told_apart(validation: Validation) -> None:
    roles = Counter(case.role for case in validation.cases)
    summary = validation.summary
    assert (summary.fit.n, summary.held_out.n) == (roles["fit"], roles["held_out"])
    assert roles["held_out"] > 1.5 * roles["fit"]
    assert all(bool(case.role_reason) is (case.role == "fit") for case in validation.cases)
    worst = {role: max(abs(c.error) for c in validation.cases if c.role == role and c.error is not None)
             for role in roles}  # fmt: skip
    for role, found in (("fit", summary.fit), ("held_out", summary.held_out)):
        assert found.worst is not None
        assert abs(next(c.error or 0 for c in validation.cases if c.id == found.worst)) == worst[role]


def test_predictions_are_nearer_than_the_usual_estimate(validation: Validation) -> None:
    summary = validation.summary.held_out
    assert summary.naive.n == summary.beside_naive.n >= 40
    assert summary.beside_naive.median_abs_error is not None
    assert summary.naive.median_abs_error is not None
    assert summary.beside_naive.median_abs_error < summary.naive.median_abs_error / 10
    assert summary.coverage_90 is not None
    assert summary.coverage_90 >= 0.85


def test_a_repeat_of_what_sets_a_rate_is_no_evidence(recorded: Recorded, by_id: dict[str, Comparison]) -> None:
    """In whichever direction the two are said to be the same."""
    for case in recorded.cases:
        if case.same_as:
            roles = {by_id[id_].role for id_ in (case.id, *case.same_as)}
            assert len(roles) == 1, case.id


def test_what_is_measured_and_predicted_alike_is_said_to_be_the_same(
    recorded: Recorded, by_id: dict[str, Comparison]
) -> None:
    groups = [{case.id, *case.same_as} for case in recorded.cases if case.same_as]
    said = {frozenset(pair) for one, other in product(groups, groups) if one & other for pair in product(one, other)}
    timed = [case for case in by_id.values() if case.has_interval]
    for one, other in combinations(timed, 2):
        if (one.metric, one.predicted, one.measured) == (other.metric, other.predicted, other.measured):
            assert frozenset((one.id, other.id)) in said, (one.id, other.id)


def conditions(recorded: Recorded, key: str) -> Iterator[tuple[Row, object]]:
    """Rows with a case whose conditions name `key`, and what they say."""
    for case in recorded.cases:
        row = recorded.row_of[case.id]
        if key in row.conditions:
            yield row, row.conditions[key]


def test_a_workload_is_the_one_that_was_served(recorded: Recorded) -> None:
    served = list(conditions(recorded, "requests"))
    assert {row.id for row, _ in served} == {case.id for case in recorded.cases if case.workload is not None}
    for row, requests in served:
        case = recorded.case_of[row.id]
        load = case.workload
        assert load is not None
        assert (load.prompt_tokens, load.output_tokens) == (row.conditions["prompt"], row.conditions["output"])
        in_flight = case.ask.max_sequences if load.requests != requests else load.requests
        assert in_flight == requests, row.id


def test_a_verify_step_has_the_query_tokens_that_were_timed(recorded: Recorded) -> None:
    timed = list(conditions(recorded, "query_tokens"))
    assert len(timed) == 3
    for row, rows in timed:
        speculation = recorded.case_of[row.id].ask.speculation
        assert speculation is not None
        assert int(speculation.partition(":")[2]) + 1 == rows


def test_a_pool_that_a_row_names_is_the_one_asked_about(recorded: Recorded) -> None:
    for row, gib in conditions(recorded, "pool_gib"):
        assert isinstance(gib, float)
        assert recorded.case_of[row.id].ask.pool_bytes == int(gib * GIB)


def test_an_acceptance_is_the_one_published_beside_the_speed(recorded: Recorded) -> None:
    accepted = {row.id.removesuffix("accept"): row.middle for row in recorded.rows if row.id.endswith(".accept")}
    beside = [case for case in recorded.cases if case.id.rpartition(".")[2] in ("decode", "ms", "both")]
    compared = [case for case in beside if f"{case.id.rpartition('.')[0]}." in accepted]
    assert len(compared) >= 18
    for case in compared:
        assert case.ask.accepted == accepted[f"{case.id.rpartition('.')[0]}."], case.id


def test_a_slower_memory_moves_what_reads_it_and_no_count() -> None:
    moved = outside(machine(read=0.5))
    assert moved >= {"tpot", "decode", "step", "verify_attention_per_layer", "throughput"}
    assert not moved & {"kv_pool", "max_context", "block_size", "resident_requests", "out_of_memory", "primary_page"}


def test_slower_tensor_cores_move_prefill_and_no_single_token_step() -> None:
    moved = outside(machine(tensor=0.8))
    assert moved >= {"prefill", "ttft", "total_time", "ttft_cold"}
    assert not moved & {"tpot", "kv_pool", "max_context", "block_size"}


@pytest.mark.parametrize("share", [0.9, 0.75, 0.5])
def test_what_does_not_fit_is_a_row_outside_with_no_number(share: float) -> None:
    """Among them workloads of which no request, or not every one, finds its blocks."""
    found = validate_recorded(profile=machine(vram=share))
    unanswered = [case for case in found.cases if case.predicted is None]
    assert unanswered
    assert not any(case.within for case in unanswered)
    assert all("do not fit" in case.note or "block" in case.note for case in unanswered)
    json.dumps(to_json(found), allow_nan=False)


def test_without_room_for_weights_no_request_is_served() -> None:
    cases = load_recorded(MACHINE).cases
    served = {case.id for case in cases if case.workload is not None}
    found = [case for case in validate_recorded(profile=machine(vram=0.5)).cases if case.id in served]
    assert len(found) == len(served) >= 10
    assert all(case.note.endswith("the pool has 0") for case in found)
