"""Format probes on this processor: every format is checked and timed; what a device cannot run is skipped, told why."""

from pathlib import Path

import pytest

from calibrate.format_grid import CPU_DESIGN, DESIGN
from calibrate.probes import CannotRun, Context, ProbeRecord, WrongData, all_probes
from calibrate.probes.machine import describe
from tests.calibrate import probe_worlds as worlds
from tests.calibrate.cpu_probes import context, probe_of
from twin.engines.twin import INLINE, QUANTISED

pytest.importorskip("torch")

NAMES = ("bf16", "fp16", *QUANTISED)


@pytest.mark.parametrize("name", NAMES)
def test_every_format_has_a_probe_that_checks_its_result(tmp_path: Path, name: str) -> None:
    made = context(tmp_path)
    (sample,) = probe_of(f"format_decode_{name}").run(made)
    assert made.left_out > 0
    assert "relative error" in sample.checked
    assert (sample.at["format"], sample.at["query_heads"]) == (name, 8)
    pairs = int(sample.at["ctx_tokens"]) * int(sample.at["batch"]) * int(sample.at["query_tokens"])
    assert sample.flops == 4 * 8 * 64 * pairs


@pytest.mark.parametrize("name", INLINE)
def test_a_published_arrangement_has_a_probe_of_its_own(tmp_path: Path, name: str) -> None:
    (own,) = probe_of(f"format_decode_{name}").run(context(tmp_path))
    (inline,) = probe_of(f"format_decode_{name}_inline").run(context(tmp_path))
    assert (own.at["arrangement"], inline.at["arrangement"]) == ("aligned", "inline")
    assert own.moved_bytes == inline.moved_bytes


def test_appends_are_equal_to_appends_in_pieces(tmp_path: Path) -> None:
    made = context(tmp_path, estimate_s=60.0)
    samples = probe_of("format_append").run(made)
    assert {sample.at["format"] for sample in samples} == set(NAMES)
    assert {sample.at["tokens"] for sample in samples} == {1, 512}
    assert all("in other pieces" in sample.checked for sample in samples)


def test_kernels_are_compiled_first_and_only_on_a_gpu() -> None:
    names = [probe.name for probe in all_probes()]
    assert names.index("instructions") < names.index("format_kernels") < names.index("format_decode_bf16")
    assert probe_of("format_kernels").supported(worlds.machine()) == ""
    for name in ("format_kernels", "instructions"):
        assert "CUDA" in probe_of(name).supported(worlds.machine(device="cpu"))


@pytest.mark.parametrize("name", ["fp8", "fp8_per_token_head"])
def test_fp8_kernels_need_an_8_9(name: str) -> None:
    supported = probe_of(f"format_decode_{name}").supported
    assert "compute capability 8.9, this device has 8.6" in supported(worlds.machine(compute_capability="8.6"))
    assert supported(worlds.machine(compute_capability="8.9")) == ""
    assert supported(worlds.machine(device="cpu", compute_capability="0.0")) == ""


@pytest.mark.parametrize("name", ["bf16", "int4_per_token_head"])
def test_others_need_an_8_0(name: str) -> None:
    supported = probe_of(f"format_decode_{name}").supported
    assert "8.0, this device has 7.5" in supported(worlds.machine(compute_capability="7.5"))
    assert supported(worlds.machine(compute_capability="8.6")) == ""


def test_a_format_without_a_kernel_is_skipped_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from realkernels.caches.paged import NoKernel
    from realkernels.timed import attend_decode

    def refuse(*_given: object) -> None:
        raise NoKernel("the kernel of q4_0 is not there: decode_words")

    monkeypatch.setattr(attend_decode, "_refuse", refuse)
    with pytest.raises(CannotRun, match="q4_0 is not there"):
        probe_of("format_decode_q4_0").run(context(tmp_path))


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("format_decode_q8_0", "realkernels.timed.attend_decode.attend_blocks"),
        ("format_decode_int4_per_token_head", "realkernels.timed.attend_decode.rotate"),
        ("format_append", "realkernels.timed.append.Append.run"),
    ],
)
def test_a_wrong_result_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, broken: str) -> None:
    monkeypatch.setattr(broken, lambda *_given, **_named: None)
    monkeypatch.setattr(Context, "seconds", lambda *_given, **_named: pytest.fail("timed"))
    with pytest.raises(WrongData):
        probe_of(name).run(context(tmp_path))


def test_no_point_of_calibration_is_one_of_validation() -> None:
    from calibrate.probes import formats

    calibrated = {*formats.GPU_POINTS, *formats.QUICK_POINTS}
    assert not {point.ctx_tokens for point in calibrated} & {ctx for ctx, _, _ in DESIGN}
    assert not {point.ctx_tokens for point in formats.CPU_POINTS} & {ctx for ctx, _, _ in CPU_DESIGN}
    assert all(ctx & (ctx - 1) == 0 for ctx, _, _ in calibrated)


def test_points_span_the_query_tokens_of_validation_and_tell_latency_from_rate() -> None:
    from calibrate.probes import formats

    for points in (formats.GPU_POINTS, formats.QUICK_POINTS):
        tokens = [point.query_tokens for point in points]
        assert (min(tokens), max(tokens)) == (1, max(rows for _, _, rows in DESIGN))
        assert tokens.count(1) >= 3
        assert len({point.ctx_tokens * point.batch for point in points if point.query_tokens == max(tokens)}) > 1


def test_caches_that_do_not_fit_are_left_out(tmp_path: Path) -> None:
    from msgspec.structs import replace

    tiny = replace(describe("cpu", dtype="fp16"), device_free_bytes=700_000)
    samples = probe_of("format_decode_bf16").run(context(tmp_path, machine=tiny, estimate_s=60.0, quick=False))
    assert {sample.at["ctx_tokens"] for sample in samples} == {1024}


def test_what_the_probes_measure_makes_a_profile(tmp_path: Path) -> None:
    from calibrate.build import build, checked

    made = {
        f"format_decode_{name}": ProbeRecord(samples=tuple(probe_of(f"format_decode_{name}").run(context(tmp_path))))
        for name in NAMES[:4]
    }
    roof = worlds.sample(1.0, flops=1e15, dtype="bf16", tokens=8, rows=8, columns=8)
    records = worlds.records() | made | {"tensor_bf16": ProbeRecord(samples=(roof,))}
    profile, _ = build(machine=worlds.machine(device="cpu"), records=records, name="toy", date="2026-11-29")
    found = {key for key in checked(profile).kernels if key.startswith("attend_decode/")}
    assert found == {f"attend_decode/twin/{name}" for name in NAMES[:4]}


# Operations a second


def test_a_chain_is_what_the_instructions_say() -> None:
    pytest.importorskip("triton")
    from calibrate.probes.instruction_kernels import chained

    assert chained(0b1011, (0b0110, 0b1000), 1) == ((0b1011 & 0b0110) ^ 0b1000) << 7
    assert chained(0xFFFFFFFF, (0xFFFFFFFF, 0), 5) == 0xFFFFFFFF
    assert chained(1, (0xFFFFFFFF, 0), 32) == 1


def test_every_operation_of_a_run_is_counted() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from calibrate.probes.instruction_kernels import _ASSEMBLY, Chains

    timed = Chains(chains=4, device=torch.device("cpu"), steps=3, programs=2)
    assert timed.operations == 2 * 4 * 256 * 3 * 16
    assert (_ASSEMBLY.count("lop3"), _ASSEMBLY.count("shf")) == (8, 8)


def test_wrong_chains_are_noticed() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from calibrate.probes.instruction_kernels import ROUNDS, Chains, chained

    timed = Chains(chains=4, device=torch.device("cpu"), steps=2, programs=1)
    first, second = (int(mask) & 0xFFFFFFFF for mask in timed.masks.tolist())
    right = [chained(start & 0xFFFFFFFF, (first, second), 2 * ROUNDS) for start in timed.data.tolist()]
    timed.out.copy_(torch.tensor(right).int())
    assert timed.right()
    timed.out[0] += 1
    assert not timed.right()
