"""The validation grid stands beside calibration, never on it."""

import json
from collections.abc import Iterator

import pytest

from calibrate.grid import LONG_CURVE, validation_grid
from calibrate.grid import long_curve as curve_of
from calibrate.kernel_cases import DECODE, KernelCase
from hwprofiles.store import RECORDS

TIERS = ("vram", "host")
CALIBRATED_CTX = {2**power for power in range(12, 23)}
CALIBRATED_ROWS = {512, 2_048, 8_192}
CALIBRATED_BUCKETS = {4_096, 16_384, 65_536}


@pytest.fixture(scope="module")
def cuda() -> list[KernelCase]:
    return validation_grid(quick=False, device="cuda")


@pytest.fixture(scope="module")
def cpu() -> list[KernelCase]:
    return validation_grid(quick=False, device="cpu")


def contexts(cases: list[KernelCase]) -> set[int]:
    return {case.ctx_tokens for case in cases}


def rows(cases: list[KernelCase]) -> set[int]:
    return {case.rows for case in cases if case.metric not in DECODE}


def buckets(cases: list[KernelCase]) -> set[int]:
    return {case.bucket_tokens for case in cases if case.mode == "staged"}


def sampled_at(key: str) -> set[float]:
    """Every value of `key` at which the shipped calibration of the h200 holds a sample."""

    def values() -> Iterator[float]:
        record = json.loads((RECORDS / "h200" / "calibration.json").read_text(encoding="utf-8"))
        for name, probe in record["probes"].items():
            if name != "matrix_vector" or key == "matrix_rows":
                wanted = "rows" if key == "matrix_rows" else key
                yield from (sample["at"][wanted] for sample in probe["samples"] if wanted in sample["at"])

    return set(values())


def test_the_grid_of_a_gpu_is_large_enough_to_speak_of_percentiles(cuda: list[KernelCase]) -> None:
    assert len(cuda) >= 80


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("quick", [True, False])
def test_ids_are_unique(*, device: str, quick: bool) -> None:
    ids = [case.id for case in validation_grid(quick=quick, device=device)]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_quick_grid_is_a_part_of_the_whole(device: str) -> None:
    quick, whole = (validation_grid(quick=quick, device=device) for quick in (True, False))
    assert len(quick) < len(whole)
    assert set(quick) < set(whole)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_nothing_is_validated_where_it_was_calibrated(device: str) -> None:
    cases = validation_grid(quick=False, device=device)
    assert not contexts(cases) & CALIBRATED_CTX
    assert not rows(cases) & CALIBRATED_ROWS
    assert not buckets(cases) & CALIBRATED_BUCKETS


def test_no_point_of_the_grid_is_one_that_the_shipped_calibration_holds(cuda: list[KernelCase]) -> None:
    for cases, key in ((contexts, "ctx_tokens"), (rows, "rows"), (buckets, "bucket_tokens")):
        calibrated = sampled_at(key)
        assert calibrated, key
        assert not cases(cuda) & calibrated, key
    matrices = {case.backbone_bytes / 2 / 4_096 for case in cuda if case.backbone_bytes}
    assert matrices
    assert not matrices & sampled_at("matrix_rows")


def test_a_gpu_s_grid_has_every_metric_in_both_tiers_and_both_ways_of_copying(cuda: list[KernelCase]) -> None:
    seen = {(case.metric, case.tier) for case in cuda}
    both = {(metric, tier) for metric in ("decode_step", "decode_gather", "prefill_attention") for tier in TIERS}
    assert seen >= both | {("decode_select", "vram"), ("prefill_select", "vram")}
    assert {case.copies for case in cuda if case.mode == "staged"} == {"serial", "overlapped"}
    assert any(not case.huge_pages for case in cuda)
    assert any(case.backbone_bytes for case in cuda)


def test_every_staged_case_takes_more_than_one_bucket(cuda: list[KernelCase], cpu: list[KernelCase]) -> None:
    staged = [case for case in (*cuda, *cpu) if case.mode == "staged"]
    assert staged
    assert all(case.bucket_tokens < case.ctx_tokens for case in staged)


def test_the_grid_of_a_cpu_is_small_and_never_asks_for_huge_pages_to_be_missing(cpu: list[KernelCase]) -> None:
    assert 10 <= len(cpu) <= 30
    assert len(validation_grid(quick=True, device="cpu")) >= 10
    assert {case.tier for case in cpu} == set(TIERS)
    assert {case.mode for case in cpu} == {"in_place", "staged"}
    assert all(case.huge_pages and not case.backbone_bytes for case in cpu)
    assert {case.layers for case in cpu if case.metric in DECODE} == {2}


@pytest.mark.parametrize("tier", TIERS)
def test_the_long_curve_goes_from_2k_to_3m(tier: str) -> None:
    cases = curve_of(tier, most_tokens=2**31)
    reached = [case.ctx_tokens for case in cases]
    assert reached == sorted(reached) == list(LONG_CURVE)
    assert (reached[0], reached[-1]) == (2_048, 3_145_728)
    assert {case.tier for case in cases} == {tier}
    assert [case.metric for case in cases] == ["decode_gather"] + ["decode_step"] * (len(cases) - 1)


def test_the_long_curve_ends_where_it_is_told_to() -> None:
    assert [case.ctx_tokens for case in curve_of("vram", most_tokens=24_576)] == [2_048, 8_192, 24_576]
    assert curve_of("vram", most_tokens=2_047) == []
