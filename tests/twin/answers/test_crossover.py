"""Where a format becomes faster than bf16: solved on paper, refused where nobody measured, carried over with doubt."""

import math
from typing import Any

import pytest
from msgspec.structs import replace

from hwprofiles import HardwareProfile
from hwprofiles.profile import Kernel, Roof
from tests.worlds import curve, machine, operations, rate
from twin.answers import crossover as module
from twin.answers.crossover import CARRIED_SPREAD, CONTEXTS, crossover, kept, with_kernels
from twin.engines.twin import QUANTISED
from twin.errors import Impossible, MissingRate
from twin.operations.occupancy import BEGUN_TILES
from twin.render.comparison import crossover_json, crossover_text

PLAIN, CODED, BYTES = "attend_decode/twin/bf16", "attend_decode/twin/int4_per_token_head", "attend_decode/twin/q8_0"
TOKEN_S = {"bf16": 4096e-9, "int4_per_token_head": 1056e-9, "q8_0": 2176e-9}
"""Seconds a token in a layer at 1 GB/s."""


def coded(latency_s: float, *, decoding: float | None = None, efficiency: float = 1.0) -> Kernel:
    return Kernel(
        efficiency=curve(efficiency=(efficiency,), over="query_tokens"),
        latency=rate(latency_s, "s"),
        operations=None if decoding is None else operations(decoding),
    )


def toy(name: str = "toy", **kernels: Kernel) -> HardwareProfile:
    """1 GB/s, products and operations for free, kernels by format."""
    bare = machine(kernels={f"attend_decode/twin/{fmt}": entry for fmt, entry in kernels.items()})
    free = Roof(rate=rate(1e16, "FLOP/s"), datasheet=rate(1e16, "FLOP/s"))
    fast = Roof(rate=rate(1e9, "op/s"), datasheet=rate(2e9, "op/s"))
    gpu = replace(bare.gpu, tensor={"bf16": free, "fp16": free}, instructions=fast, compute_capability="9.0")
    return replace(bare, name=name, gpu=gpu)


def found(monkeypatch: pytest.MonkeyPatch, profile: HardwareProfile, *others: HardwareProfile, **asked: Any) -> Any:
    machines = {each.name: each for each in (profile, *others)}
    monkeypatch.setattr(module, "load_profile", machines.__getitem__)
    monkeypatch.setattr(module, "profile_names", lambda: sorted(machines))
    return crossover(profile.name, **asked)


def q8_line(monkeypatch: pytest.MonkeyPatch, **kernels: Kernel) -> Any:
    (line,) = found(monkeypatch, toy(**kernels), formats=("q8_0",)).lines
    return line


def test_a_latency_sets_the_context_from_which_on_fewer_bytes_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 ms more latency against 1,920 ns less a token: from 5,209 tokens on, at batch 1; from 1,303 at batch 4."""
    line = q8_line(monkeypatch, bf16=coded(1e-3), q8_0=coded(11e-3))
    assert [(crossing.batch, crossing.ctx_tokens) for crossing in line.crossings] == [(1, 8192), (4, 2048), (16, 1024)]
    assert {crossing.wall for crossing in line.crossings} == {"VRAM bandwidth"}
    seconds = {fmt: latency_s + 131_072 * TOKEN_S[fmt] for fmt, latency_s in (("bf16", 1e-3), ("q8_0", 11e-3))}
    assert line.seconds == pytest.approx(seconds["q8_0"])
    assert line.ratio == pytest.approx(seconds["q8_0"] / seconds["bf16"])
    held = q8_line(monkeypatch, bf16=coded(1.0), q8_0=coded(0.5)).crossings[0]
    assert (held.ctx_tokens, held.wall) == (1024, "launch and link latency")
    lost = q8_line(monkeypatch, bf16=coded(1e-3), q8_0=coded(1e-6, efficiency=0.5)).crossings[0]
    assert (lost.ctx_tokens, lost.ratio) == (None, pytest.approx(2 * 2176 / 4096, rel=1e-2))  # faster when short only
    uncertain = Kernel(efficiency=replace(curve(over="query_tokens"), spread=0.3), latency=rate(1e-8, "s"))
    spread = q8_line(monkeypatch, bf16=uncertain, q8_0=uncertain).spread
    assert spread == pytest.approx(math.hypot(0.3, 0.3), rel=1e-3)  # that of both kernels


@pytest.mark.parametrize(("operations", "ctx", "wall"), [(1.9, 8_192, "dequantisation"), (2.1, None, "dequantisation"),
                                                         (0.1, 1_024, "VRAM bandwidth")])  # fmt: skip
def test_taking_codes_apart_is_a_wall_of_its_own(
    monkeypatch: pytest.MonkeyPatch, operations: float, ctx: int | None, wall: str
) -> None:
    """2,048 elements a token at 1e9 operations a second: 2 each take as long as 4,096 bytes at 1 GB/s.

    Programs that begin and end in two tiles' time are slower up to 4,864 tokens: tiles have 128.
    """
    profile = toy(bf16=coded(1e-6), int4_per_token_head=coded(1e-6, decoding=operations))
    (line,) = found(monkeypatch, profile, formats=("int4_per_token_head",)).lines
    crossing = line.crossings[0]
    assert (crossing.ctx_tokens, crossing.wall) == (ctx, wall)
    begun = 1 + BEGUN_TILES * 128 / (crossing.ctx_tokens or CONTEXTS[-1])
    assert crossing.ratio == pytest.approx(
        max(operations * begun * 2048e-9, TOKEN_S["int4_per_token_head"]) / 4096e-9, rel=1e-2
    )


def test_what_a_machine_does_not_start_is_refused_and_the_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = toy(bf16=coded(1e-6), q8_0=coded(1e-6), fp8=coded(1e-6))
    old = replace(profile, gpu=replace(profile.gpu, compute_capability="8.6"))
    result = found(monkeypatch, old, formats=("fp8", "q8_0", "q4_0"))
    assert [line.kv_dtype for line in result.lines] == ["q8_0"]
    assert "SM 8.9" in result.refused["fp8"]
    assert "attend_decode/twin/q4_0" in result.refused["q4_0"]  # which nobody measured


def test_where_no_machine_has_a_rate_or_no_format_a_kernel_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingRate, match="no machine has a rate for attend_decode/twin/bf16") as missing:
        found(monkeypatch, toy())
    assert "twin calibrate" in missing.value.hint
    assert [kept(None), kept("q4_0")] == [QUANTISED, ("q4_0",)]
    with pytest.raises(Impossible, match="no kernel for exl3_k2v2"):
        kept("exl3_k2v2")


def test_kernels_are_taken_over_from_a_machine_where_they_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares of roofs and operations an element stay; rates are the machine's own; the spread is wide."""
    donor = toy("donor", bf16=coded(1e-6), int4_per_token_head=coded(1e-6, decoding=3.0))
    roof = Roof(rate=rate(2e9, "op/s"), datasheet=rate(2e9, "op/s"))
    faster = replace(toy(), gpu=replace(toy().gpu, instructions=roof))
    result = found(monkeypatch, faster, donor, formats=("int4_per_token_head",))
    assert result.carried_from == "donor"
    (line,) = result.lines
    assert line.seconds == pytest.approx(131_072 * 2048e-9 * 3.0 / 2, rel=3e-3)
    assert line.spread >= CARRIED_SPREAD
    assert "Not measured on toy" in crossover_text(result)
    profile, name = with_kernels(faster, ["bf16", "int4_per_token_head"])
    entry = profile.kernels[CODED]
    assert entry.operations is not None
    assert (name, entry.operations.spread) == ("donor", CARRIED_SPREAD)
    assert "carried over from donor" in entry.operations.note


def test_whose_kernels_these_are_is_said_first_and_those_of_others_are_pointed_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    donor = toy("donor", bf16=coded(1e-6), q8_0=coded(1e-6))
    bare = toy()
    others = {"attend_decode/flashinfer/fp8": coded(1e-6), "append/marlin/w4a16": Kernel(latency=rate(1e-6, "s"))}
    result = found(monkeypatch, replace(bare, kernels=others), donor, formats=("q8_0",))
    plain, lines = crossover_json(result), crossover_text(result).splitlines()
    assert lines[0].startswith("toy, kernels of engine twin (this project's own, carried over from donor): ")
    assert [line.split()[:2] for line in lines if line.startswith("  q8_0")] == [["q8_0", "*"]]
    assert "(flashinfer)" in lines[-1]
    assert "twin compare" in lines[-1]
    assert (plain["engine"], plain["carried_from"], plain["others"]) == ("twin", "donor", ("flashinfer",))
    assert [line["kernel"] for line in plain["lines"]] == [BYTES]


def test_text_and_json_of_own_kernels_tell_the_same_and_point_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = toy(bf16=coded(1e-6), q8_0=coded(1e-6), int4_per_token_head=coded(1e-6, decoding=5.0))
    result = found(
        monkeypatch,
        replace(profile, kernels={key: profile.kernels[key] for key in (PLAIN, CODED, BYTES)}),
        formats=("q8_0", "int4_per_token_head"),
    )
    plain, text = crossover_json(result), crossover_text(result)
    assert plain["schema"] == "twin.crossover/1"
    assert [line["kv_dtype"] for line in plain["lines"]] == ["q8_0", "int4_per_token_head"]
    assert "from 1,024 (VRAM bandwidth)" in text
    assert "never (dequantisation)" in text
    assert text.startswith("toy, kernels of engine twin (this project's own): ")
    assert "attention of one layer, 1 query token, against bf16" in text.splitlines()[0]
    assert not any(word in text for word in ("carried", "*", "twin compare"))
