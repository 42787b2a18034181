"""Every published row is predicted or listed with a reason, as near as was asked; what sets a rate is no evidence."""

import json
from collections import Counter
from functools import cache
from itertools import combinations, product
from statistics import median
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from calibrate.published.cases import load_recorded, read_published, recorded_machines
from calibrate.published.fit import BLOG, VLLM
from calibrate.published.recorded import role_reasons, validate_recorded
from calibrate.validation import Comparison, Validation
from hwprofiles import load_profile
from twin.engines import engine_names, load_engine
from twin.errors import UnknownName
from twin.units import GIB

KEYS = [
    "id", "machine", "metric", "unit", "predicted", "low", "high", "measured", "error", "naive_error", "role",
    "tolerance", "within",
]  # fmt: skip

SAME_MEASUREMENT = {"blog.ttft_1M", "blog.vram_left"}
INPUTS = {"blog.link", "blog.vram_bw", "blog.vram_total"}

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
"""Largest relative error by metric of vLLM's rows; where a range was published, the prediction must lie in it."""

SPECULATION = {"decode", "time_per_token", "ttft_cold", "ttft_prefix_cached", "step"}
"""Metrics of speed that are published under speculation only."""

CARRIED = {"perplexity", "accepted_tokens_per_step"}
ROWS = read_published("published_rtx3090.json").rows
machines = pytest.mark.parametrize("machine", recorded_machines())


@cache
def validation(machine: str) -> Validation:
    return validate_recorded(machine)


def by_id(machine: str) -> dict[str, Comparison]:
    return {case.id: case for case in validation(machine).cases}


def with_shares(machine: str, **shares: float) -> Validation:
    """Of the machine with a share of its VRAM (`vram`), its read rate, its link or its tensor cores."""
    profile = load_profile(machine)
    plain = msgspec.to_builtins(profile)
    gpu = plain["gpu"]
    roofs = [("read", gpu["vram_read"]), ("link", gpu["h2d"]), *(("tensor", roof) for roof in gpu["tensor"].values())]
    for name, rate in (("vram", gpu["vram"]), *((name, roof["rate"]) for name, roof in roofs)):
        rate["value"] *= shares.get(name, 1.0)
    return validate_recorded(machine, profile=msgspec.convert(plain, type(profile)))


def named_in_fitted_on(plain: object) -> set[str]:
    """Every id in a profile or rulebook, whatever it sets."""
    if isinstance(plain, dict):
        own = set(plain.get("fitted_on", ()))
        return own.union(*(named_in_fitted_on(value) for value in plain.values()))
    return set().union(*map(named_in_fitted_on, plain)) if isinstance(plain, (list, tuple)) else set()


def fitted_on(part: Any) -> set[str]:
    return named_in_fitted_on(msgspec.to_builtins(part))


# Every row ends once.


def test_every_published_row_ends_exactly_once_over_all_machines() -> None:
    assert len(ROWS) == 160
    ends: Counter[str] = Counter()
    for machine in recorded_machines():
        found = validation(machine)
        own = [case.id for case in found.cases] + [row.id for row in found.skipped]
        assert sorted(own) == sorted(row.id for row in load_recorded(machine).rows)
        ends.update(own)
        counts = found.counts
        assert (counts.predicted, counts.carried + counts.not_predicted) == (len(found.cases), len(found.skipped))
        assert sum(counts.reasons.values()) == len(found.skipped)
        assert found.summary.fit.n + found.summary.held_out.n == counts.predicted
    assert ends == Counter({row.id: 1 for row in ROWS})
    systems = [{row.system for row in load_recorded(name).rows} for name in recorded_machines()]
    assert Counter(name for own in systems for name in own) == Counter({row.system for row in ROWS})


@machines
def test_every_case_is_within_its_tolerance_and_says_why_with_the_keys_that_scripts_rely_on(machine: str) -> None:
    found = validation(machine)
    assert [(case.id, case.error) for case in found.outside] == []
    assert all(case.tolerance_reason for case in found.cases)
    assert all(row.reason for row in found.skipped)
    plain = json.loads(json.dumps(msgspec.to_builtins(found), allow_nan=False))
    assert plain["schema"] == "twin.validation/1"
    assert all(list(case)[: len(KEYS)] == KEYS for case in plain["cases"])
    assert {case["role"] for case in plain["cases"]} == plain["summary"].keys() == {"fit", "held_out"}
    for summary in plain["summary"].values():
        assert summary.keys() >= {"n", "median_abs_error", "p95_abs_error", "worst", "coverage_90"}
    assert plain["counts"].keys() >= {"predicted", "carried", "not_predicted"}


def test_only_what_is_a_fact_of_quality_or_an_input_is_not_predicted() -> None:
    assert (len(validation(BLOG).cases), validation(BLOG).skipped) == (30, ())
    carried = [row for row in validation(VLLM).skipped if row.status == "carried"]
    assert {row.metric for row in carried} == CARRIED
    assert all(row.reason.startswith("carried: ") for row in carried)
    assert {case.metric for case in validation(VLLM).cases} == ASKED.keys()
    assert not ASKED.keys() & CARRIED


# Roles.


@machines
def test_a_row_that_sets_a_rate_is_never_held_out(machine: str) -> None:
    fitted = fitted_on(load_profile(machine)).union(*(fitted_on(load_engine(engine)) for engine in engine_names()))
    assert {row for row in fitted if row.startswith(("blog.", "vllm."))} <= {row.id for row in ROWS}
    assert all(by_id(machine)[row].role == "fit" for row in fitted & by_id(machine).keys())
    assert all(bool(case.role_reason) is (case.role == "fit") for case in validation(machine).cases)


def test_only_rows_that_set_are_or_repeat_a_rate_are_fit_and_an_input_measured_anew_is_evidence_again() -> None:
    profile = load_profile(BLOG)
    fit = {case.id for case in validation(BLOG).cases if case.role == "fit"}
    setting = (fitted_on(profile) | fitted_on(load_engine("exllamav3"))) & by_id(BLOG).keys()
    assert {"blog.decode_1M", "blog.decode_fixed", "blog.prefill_32k", "blog.prefill_1M", "blog.vram_model"} <= setting
    assert fit == setting | SAME_MEASUREMENT | INPUTS
    rate = replace(profile.gpu.h2d.rate, source="measured")
    measured = replace(profile, gpu=replace(profile.gpu, h2d=replace(profile.gpu.h2d, rate=rate)))
    assert "blog.link" not in role_reasons(load_recorded(BLOG), measured)


def test_a_repeat_of_what_sets_a_rate_is_no_evidence_and_what_is_alike_is_said_to_be_a_repeat() -> None:
    """In whichever direction the two are said to be the same."""
    for case in load_recorded(VLLM).cases:
        if case.same_as:
            assert len({by_id(VLLM)[id_].role for id_ in (case.id, *case.same_as)}) == 1, case.id
    groups = [{case.id, *case.same_as} for case in load_recorded(VLLM).cases if case.same_as]
    said = {frozenset(pair) for one, other in product(groups, groups) if one & other for pair in product(one, other)}
    timed = [case for case in validation(VLLM).cases if case.has_interval]
    for one, other in combinations(timed, 2):
        if (one.metric, one.predicted, one.measured) == (other.metric, other.predicted, other.measured):
            assert frozenset((one.id, other.id)) in said, (one.id, other.id)


# How near.


@pytest.mark.parametrize("metric", ASKED)
def test_rows_come_as_near_as_was_asked(metric: str) -> None:
    cases = [case for case in validation(VLLM).cases if case.metric == metric]
    assert len(cases) == sum(row.metric == metric for row in load_recorded(VLLM).rows)
    for case in cases:
        if case.measured_low < case.measured_high:
            assert case.measured_low <= case.predicted <= case.measured_high, case.id
        else:
            assert abs(case.error) <= case.tolerance + 1e-9 <= ASKED[metric] + 2e-9, case.id


def test_a_pinned_pool_is_exact() -> None:
    pinned = [c for c in load_recorded(VLLM).cases if c.figure == "kv_pool" and c.ask.pool_bytes is not None]
    assert len(pinned) >= 7
    for case in pinned:
        assert case.tolerance == 0, case.id
        assert by_id(VLLM)[case.id].predicted == by_id(VLLM)[case.id].measured, case.id


def test_predictions_are_nearer_than_the_usual_estimate_and_half_of_those_under_speculation_within_five_per_cent() -> (
    None
):
    summary = validation(VLLM).summary
    assert summary.held_out.n > 1.5 * summary.fit.n
    assert summary.held_out.naive.n == summary.held_out.beside_naive.n >= 40
    assert summary.held_out.beside_naive.median_abs_error < summary.held_out.naive.median_abs_error / 10
    assert summary.held_out.coverage_90 >= 0.85
    for roles in (("fit",), ("held_out",), ("fit", "held_out")):
        cases = [case for case in validation(VLLM).cases if case.metric in SPECULATION and case.role in roles]
        errors = [abs(case.error) for case in cases if case.error is not None]
        assert len(errors) >= 5
        assert median(errors) <= 0.05


def test_a_misfit_is_shown_a_range_judged_by_its_ends_and_what_else_the_twin_says_stands_beside() -> None:
    case = {name: by_id(BLOG)[f"blog.{name}"] for name in (
        "naive_chunk", "decode_base_ms", "decode_drop", "decode_fixed", "maxctx_offload", "staging"
    )}  # fmt: skip
    assert case["naive_chunk"].tolerance_reason.startswith("not explained:")
    assert "not explained" in case["staging"].note
    step, claim, staging = case["decode_base_ms"], case["maxctx_offload"], case["staging"]
    assert (step.measured_low, step.measured, step.measured_high) == (15, 17.5, 20)
    assert step.tolerance * step.measured == pytest.approx(2.5)
    assert case["decode_drop"].also["drop_from_a_step_that_selects_percent"] < (case["decode_drop"].predicted or 0)
    assert case["decode_fixed"].also == {}
    assert claim.predicted == claim.measured == 3_145_728
    assert claim.also["max_ctx_tokens"] > claim.also["ngram_in_ram_max_ctx_tokens"] > claim.measured
    assert claim.also["ngram_in_ram_host_used_bytes"] < claim.also["host_capacity_bytes"]
    left = [staging.also[f"staging_{size}_mib_vram_left_bytes"] for size in (32, 64, 128)]
    assert left == sorted(left, reverse=True)
    assert left[-1] > 0


# A question is the one that was measured.


def test_the_question_is_the_one_that_a_row_s_conditions_name() -> None:
    recorded, told = load_recorded(VLLM), Counter[str]()
    accepted = {row.id.removesuffix("accept"): row.middle for row in recorded.rows if row.id.endswith(".accept")}
    for case in recorded.cases:
        said, ask, load = recorded.row_of[case.id].conditions, case.ask, case.workload
        told.update(said.keys())
        assert (load is not None) == ("requests" in said), case.id
        if load is not None:
            assert (load.prompt_tokens, load.output_tokens) == (said["prompt"], said["output"])
            assert said["requests"] in (load.requests, ask.max_sequences), case.id
        if "query_tokens" in said:
            assert int((ask.speculation or "").partition(":")[2]) + 1 == said["query_tokens"], case.id
        if "pool_gib" in said:
            assert ask.pool_bytes == int(float(str(said["pool_gib"])) * GIB), case.id
        group, _, metric = case.id.rpartition(".")
        if metric in ("decode", "ms", "both") and f"{group}." in accepted:
            told["accepted"] += 1
            assert ask.accepted == accepted[f"{group}."], case.id
    assert (told["query_tokens"], told["accepted"] >= 18, told["pool_gib"] > 0) == (3, True, True)


# Other machines.


@pytest.mark.parametrize(
    ("machine", "shares", "moved", "kept"),
    [
        (
            BLOG,
            {"link": 0.5},
            {"blog.link", "blog.decode_transfer", "blog.pooled_scan_host_ms_1M", "blog.naive_1M", "blog.decode_fixed",
             "blog.decode_1M"},
            {"blog.kv_all", "blog.decode_bytes", "blog.staged_ratio", "blog.maxctx_vram"},
        ),
        (
            VLLM,
            {"read": 0.5},
            {"tpot", "decode", "step", "verify_attention_per_layer", "throughput"},
            {"kv_pool", "max_context", "block_size", "resident_requests", "out_of_memory", "primary_page"},
        ),
        (
            VLLM,
            {"tensor": 0.8},
            {"prefill", "ttft", "total_time", "ttft_cold"},
            {"tpot", "kv_pool", "max_context", "block_size"},
        ),
    ],
)  # fmt: skip
def test_a_slower_roof_moves_what_hangs_on_it_and_nothing_else(
    machine: str, shares: dict[str, float], moved: set[str], kept: set[str]
) -> None:
    outside = with_shares(machine, **shares).outside
    named = {case.id for case in outside} | {case.metric for case in outside}
    assert moved <= named
    assert not kept & named


@pytest.mark.parametrize(("machine", "share"), [(BLOG, 0.5), (VLLM, 0.9), (VLLM, 0.75), (VLLM, 0.5)])
def test_what_does_not_fit_is_a_row_outside_with_no_number(machine: str, share: float) -> None:
    """Among them workloads of which no request, or not every one, finds its blocks."""
    found = with_shares(machine, vram=share)
    unanswered = {case.id: case for case in found.cases if case.predicted is None}
    assert unanswered
    assert not any(case.within for case in unanswered.values())
    assert all("do not fit" in case.note or "block" in case.note for case in unanswered.values())
    json.dumps(msgspec.to_builtins(found), allow_nan=False)
    if (machine, share) == (VLLM, 0.5):  # no room for weights: no request is served
        served = [case.id for case in load_recorded(VLLM).cases if case.workload is not None]
        assert len(served) >= 10
        assert all(unanswered[id_].note.endswith("the pool has 0") for id_ in served)


@pytest.mark.parametrize("machine", ["3x-rtx3091", "h200"])
def test_a_machine_without_recorded_rows_is_refused(machine: str) -> None:
    with pytest.raises(UnknownName) as refusal:
        validate_recorded(machine)
    assert machine in refusal.value.message
    assert BLOG in refusal.value.hint
