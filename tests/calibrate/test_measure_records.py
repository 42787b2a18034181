"""Gathers over records, calibrated and measured on this processor: right ones are timed, broken ones are noticed."""

import math
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from calibrate.build import build, checked
from calibrate.kernel_cases import KernelCase
from calibrate.live import predict_case
from calibrate.measure import LeftOut, Measurement, WrongResult
from calibrate.measure_formats import measure_formats
from calibrate.probes import Context, Probe, ProbeRecord, WrongData, all_probes
from calibrate.probes.machine import describe
from tests.calibrate import probe_worlds as worlds
from twin.engines.twin import RECORDS

ONE = KernelCase(metric="decode_gather", tier="host", ctx_tokens=2_307, layers=2, format="q4_0")
LATENCY_S = 12e-6


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("torch")
    from realkernels.device import CpuDevice

    monkeypatch.setattr("calibrate.measure.LEAST_MEASURED_S", 0.0)
    return CpuDevice(threads=1)


def probe_of(name: str) -> Probe:
    return next(probe for probe in all_probes() if probe.name == f"gather_host_{name}")


def context(folder: Path, backend: Any, **changes: Any) -> Context:
    fields = {"machine": describe("cpu", dtype="fp16"), "folder": folder, "quick": True, "estimate_s": 0.01}
    return Context(backend=backend, **fields | changes)


# Probes


@pytest.mark.parametrize("name", RECORDS)
def test_every_format_has_a_probe_that_checks_its_result(tmp_path: Path, cpu: Any, name: str) -> None:
    made = context(tmp_path, cpu)
    samples = probe_of(name).run(made)
    assert made.left_out > 0
    assert [sample.at["budget"] for sample in samples] == [2048, 128]
    for sample in samples:
        assert "relative error" in sample.checked
        assert sample.at["format"] == name
        ctx = int(sample.at["ctx_tokens"])
        assert ctx & (ctx - 1) == 0
    assert samples[0].moved_bytes == 16 * samples[1].moved_bytes
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_result_is_not_timed(tmp_path: Path, cpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realkernels.kernels.in_torch.InterleavedGather.run", lambda *_given, **_named: None)
    monkeypatch.setattr(Context, "seconds", lambda *_given, **_named: pytest.fail("timed"))
    with pytest.raises(WrongData, match="q4_0 at 4096"):
        probe_of("q4_0").run(context(tmp_path, cpu))


def test_old_devices_are_told_what_is_needed() -> None:
    pytest.importorskip("torch")
    assert "8.0, this device has 7.5" in probe_of("q4_0").supported(worlds.machine(compute_capability="7.5"))
    assert probe_of("q4_0").supported(worlds.machine(compute_capability="8.6")) == ""


# Fits


def records_of(name: str, token_bytes: int) -> ProbeRecord:
    """A gather of known latency and shares of the link, on the machine of `probe_worlds`."""
    made = []
    for ctx, share in worlds.EFFICIENCY.items():
        for budget in (2048, 128, 512, 1024) if ctx == 2**15 else (2048,):
            moved = budget * token_bytes
            run_share = 0.4 + 0.6 * min(1.0, math.log(4 * token_bytes / 512) / math.log(4096 / 512))  # one run a block
            seconds = LATENCY_S + moved / (worlds.LINK * run_share * share)
            made.append(worlds.sample(seconds, moved=moved, format=name, ctx_tokens=ctx, budget=budget, layers=12))
    return ProbeRecord(samples=tuple(made), took_s=1.0)


@pytest.mark.parametrize(("name", "token_bytes"), [("int4_per_token_head", 528), ("q8_0", 1088)])
def test_rates_come_out_as_they_went_in(name: str, token_bytes: int) -> None:
    records = worlds.records() | {f"gather_host_{name}": records_of(name, token_bytes)}
    made, record = build(machine=worlds.machine(), records=records, name="toy", date="2026-11-29")
    profile = checked(made)
    gather = profile.kernels[f"gather_host/twin/{name}"]
    assert gather.latency is not None
    assert gather.efficiency is not None
    assert gather.latency.value == pytest.approx(LATENCY_S, rel=0.02)
    for ctx, share in worlds.EFFICIENCY.items():
        assert gather.efficiency(ctx) == pytest.approx(share, rel=0.02)
    assert len(record["fitted"][f"gather_host/twin/{name}"]) == len(worlds.EFFICIENCY)
    for sample in records[f"gather_host_{name}"].samples:
        if sample.at["budget"] == 2048:
            case = replace(ONE, format=name, ctx_tokens=sample.at["ctx_tokens"], layers=12)
            _, seconds, low, high = predict_case(case, profile, kv_dtype="fp16")
            assert seconds == pytest.approx(12 * sample.median_s, rel=1e-3)
            assert low <= seconds <= high


def test_a_profile_without_the_probe_has_no_rate_of_it() -> None:
    made, _ = build(machine=worlds.machine(), records=worlds.records(), name="toy", date="2026-11-29")
    assert [key for key in made["kernels"] if key.startswith("gather_host/")] == ["gather_host/twin/fp16"]


def test_what_the_probe_measures_predicts_a_case(tmp_path: Path, cpu: Any) -> None:
    samples = tuple(probe_of("q4_0").run(context(tmp_path, cpu)))
    records = worlds.records() | {"gather_host_q4_0": ProbeRecord(samples=samples)}
    made, _ = build(machine=worlds.machine(device="cpu"), records=records, name="toy", date="2026-11-29")
    _, seconds, _, _ = predict_case(replace(ONE, ctx_tokens=6_144), checked(made), kv_dtype="fp16")
    assert seconds == pytest.approx(2 * samples[0].median_s, rel=0.02)  # one context: the same at any other


# Measuring


@pytest.mark.parametrize("name", RECORDS)
def test_every_format_is_measured_and_right_on_this_processor(cpu: Any, name: str) -> None:
    case = replace(ONE, format=name)
    told: list[KernelCase] = []
    (outcome,) = measure_formats([case], cpu, progress=told.append)
    assert isinstance(outcome, Measurement)
    assert told == [case]
    assert 0 < outcome.error < 2e-3
    assert min(outcome.samples_s) > 0
    token_bytes = {"int8_per_token_head": 1040, "int4_per_token_head": 528, "q8_0": 1088}.get(name, 576)
    assert outcome.link_bytes == 2 * 2_051 * token_bytes


def test_contexts_of_a_format_share_records(cpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from realkernels.caches import interleaved

    opened: list[int] = []
    cached = interleaved.interleaved_cache
    monkeypatch.setattr(
        interleaved, "interleaved_cache", lambda name, **given: opened.append(given["tokens"]) or cached(name, **given)
    )
    cases = [ONE, replace(ONE, ctx_tokens=2_562)]
    assert [outcome.case for outcome in measure_formats(cases, cpu)] == cases
    assert opened == [2_562]


def test_a_kernel_that_does_nothing_is_a_wrong_result(cpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realkernels.kernels.in_torch.InterleavedGather.run", lambda *_given, **_named: None)
    with pytest.raises(WrongResult, match=r"decode_gather\.host\.q4_0"):
        list(measure_formats([ONE], cpu))


def test_records_without_room_leave_their_cases_out(cpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_given: Any, **_named: Any) -> Any:
        raise RuntimeError("no room\nat all")

    monkeypatch.setattr("realkernels.caches.interleaved.interleaved_cache", full)
    assert list(measure_formats([ONE], cpu)) == [LeftOut(case=ONE, reason="no room")]
