"""Library probes on this processor: results are checked, what does not fit or cannot run is left out with a reason."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from calibrate.build import build, checked
from calibrate.library_fits import library_key
from calibrate.probes import CannotRun, Context, Probe, ProbeRecord, Sample, WrongData, all_probes
from calibrate.probes.machine import describe
from tests.calibrate import probe_worlds as worlds

pytest.importorskip("torch")

NAMES = ("library_linear", "library_elementwise", "library_append", "library_sample", "library_attend_dense",
         "library_attend_decode", "layer_check")  # fmt: skip


def probe_of(name: str) -> Probe:
    return next(probe for probe in all_probes() if probe.name == name)


def context(folder: Path, **changes: Any) -> Context:
    from realkernels.device import CpuDevice

    backend = CpuDevice(threads=1)
    fields = {"machine": describe("cpu", dtype="fp16"), "folder": folder, "quick": True, "estimate_s": 0.01}
    return Context(backend=backend, **fields | changes)


def few(name: str, folder: Path) -> list[Sample]:
    """What its first points give."""
    return probe_of(name).run(context(folder))


@pytest.mark.parametrize("name", NAMES)
def test_a_library_probe_runs_on_the_cpu_and_checks_its_result(tmp_path: Path, name: str) -> None:
    made = context(tmp_path)
    samples = probe_of(name).run(made)
    assert samples
    assert made.left_out
    assert all(sample.median_s > 0 and "relative error" in sample.checked for sample in samples)
    assert {sample.at["dtype"] for sample in samples} == {"fp32"}
    assert list(tmp_path.iterdir()) == []


def test_what_it_measures_makes_a_profile(tmp_path: Path) -> None:
    made = {name: ProbeRecord(samples=tuple(few(name, tmp_path)), took_s=1.0) for name in NAMES}
    roof = worlds.sample(1.0, flops=1e15, dtype="fp32", tokens=8, rows=8, columns=8)
    records = worlds.records() | made | {"tensor_fp32": ProbeRecord(samples=(roof,))}
    profile, record = build(machine=worlds.machine(device="cpu"), records=records, name="toy", date="2026-11-29")
    kernels = {key for key in checked(profile).kernels if "/twin/" not in key}
    parts = [name.removeprefix("library_") for name in NAMES if name != "layer_check"]
    assert kernels == {library_key(part, "fp32") for part in parts}
    assert len(record["fitted"]["layer_check"]) == 1


def test_the_points_of_a_check_are_those_of_no_part(tmp_path: Path) -> None:
    from calibrate.probes import library

    asked: dict[str, list[tuple[int, int, int]]] = {}

    def noted(name: str) -> Any:
        def take(_context: Context, points: Any) -> Any:
            asked[name] = list(points)
            return iter(())

        return take

    for name in ("library_attend_dense", "library_attend_decode", "layer_check"):
        for quick in (True, False):
            made = context(tmp_path, quick=quick, machine=worlds.machine())
            made.points = noted(f"{name} {quick}").__get__(made)  # type: ignore[method-assign]
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(library, "flash_missing", lambda *_args, **_named: "")
                assert probe_of(name).run(made) == []
    for quick in (True, False):
        whole = set(asked[f"layer_check {quick}"])
        parts = {point for name, points in asked.items() if not name.startswith("layer") for point in points}
        assert whole
        assert not whole & parts


def test_a_gpu_has_the_layer_of_a_known_model_and_all_its_tokens(tmp_path: Path) -> None:
    from calibrate.probes import library

    made = context(tmp_path, machine=worlds.machine(), quick=False)
    assert library._tokens(made, library.GPU_TOKENS, library.QUICK_TOKENS) == [2**power for power in range(14)]
    assert library._layers(made) == 4
    small = context(tmp_path, machine=worlds.machine(device_free_bytes=2 * 2**30), quick=False)
    assert library._layers(small) == 1
    assert max(library._tokens(small, library.GPU_TOKENS, library.QUICK_TOKENS)) < 8192
    assert library.dtype_name(made.machine) == "bf16"


@pytest.mark.parametrize("name", NAMES)
def test_a_device_without_bf16_products_is_told_so(name: str) -> None:
    supported = probe_of(name).supported
    assert "compute capability 8.0, this device has 7.5" in supported(worlds.machine(compute_capability="7.5"))
    for able in (worlds.machine(compute_capability="12.0"), worlds.machine(device="cpu", compute_capability="0.0")):
        assert supported(able) == ""


@pytest.mark.parametrize("name", ["library_attend_dense", "library_attend_decode", "layer_check"])
def test_without_flash_attention_a_probe_is_skipped_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    from calibrate.probes import library

    monkeypatch.setattr(library, "flash_missing", lambda *_args, **_named: "no flash attention here: sm75")
    with pytest.raises(CannotRun, match="sm75"):
        few(name, tmp_path)


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("library_linear", "realkernels.timed.library.product"),
        ("layer_check", "realkernels.timed.library.product"),
        ("library_attend_decode", "realkernels.reference.attend"),
        ("library_sample", "realkernels.timed.library.torch.argmax"),
    ],
)
def test_a_wrong_result_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, broken: str) -> None:
    def nothing(query: Any, *_args: object, **_named: object) -> Any:
        return query * 0 + 1

    monkeypatch.setattr(broken, nothing)
    monkeypatch.setattr(Context, "seconds", lambda *_args, **_named: pytest.fail("timed"))
    with pytest.raises(WrongData, match="relative error"):
        few(name, tmp_path)


def test_a_result_that_is_not_written_while_timed_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Context, "seconds", lambda *_args, **_named: (1.0,))
    with pytest.raises(WrongData, match="all results written"):
        few("library_elementwise", tmp_path)


def test_caches_that_do_not_fit_are_left_out(tmp_path: Path) -> None:
    tiny = replace(describe("cpu", dtype="fp16"), host_free_bytes=40 * 2**20)
    samples = probe_of("library_attend_decode").run(context(tmp_path, machine=tiny, estimate_s=60.0))
    assert [sample.at["past_tokens"] for sample in samples] == [511]
