"""A data sheet alone makes a machine: every number known or assumed with a spread, and nothing measured claimed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from hwprofiles import HardwareProfile, load_profile, profile_names
from hwprofiles.errors import BadFile
from hwprofiles.files import read_json
from hwprofiles.profile import Roof
from hwprofiles.sheets import REACHED, expanded
from hwprofiles.store import MACHINES
from twin.ask.question import Question
from twin.errors import Impossible, MissingRate
from twin.prediction import predict

SHORT: dict[str, Any] = {
    "schema": "twin.hardware/1",
    "name": "mine",
    "summary": "a card",
    "datasheet": {
        "device": "A card",
        "compute_capability": "8.9",
        "multiprocessors": 10,
        "memory_gib": 8,
        "memory_gb_per_s": 400,
        "tensor_tflops": {"fp16": 80, "bf16": 40},
        "link": "PCIe 4.0 x8",
        "sources": ["the box it came in"],
        "date": "2026-12-01",
    },
}
SHEETS = [name for name in profile_names() if "datasheet" in read_json(MACHINES / f"{name}.json")]
GIB = 2**30


def loaded(folder: Path, document: dict[str, Any]) -> HardwareProfile:
    path = folder / "own.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return load_profile(str(path))


def sheet(**changes: Any) -> dict[str, Any]:
    told = SHORT["datasheet"] | changes
    return {**SHORT, "datasheet": {key: value for key, value in told.items() if value is not None}}


def leaves(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        if "source" in node:
            yield node
        for child in node.values():
            yield from leaves(child)


def test_a_sheet_is_a_machine_at_assumed_shares_of_its_peaks(tmp_path: Path) -> None:
    machine = loaded(tmp_path, SHORT)
    gpu = machine.gpu
    assert (machine.gpu_count, machine.kernels, gpu.instructions) == (1, {}, None)
    assert gpu.vram.value == pytest.approx(0.98 * 8 * GIB)
    assert (gpu.vram_read.rate.value, gpu.vram_read.datasheet.value) == (360e9, 400e9)
    assert gpu.tensor["bf16"].rate.value == pytest.approx(28e12)
    assert gpu.h2d.datasheet.value == 8 * 1.969e9
    assert gpu.h2d == gpu.d2h
    assert gpu.h2d.run_length(64) == pytest.approx(42e6 * 64 / (0.85 * 8 * 1.969e9))
    assert "a default" in machine.host.memory.note
    assert machine.host.memory.spread == 0.5


def test_what_a_sheet_says_itself_is_taken_and_what_lies_beside_it_lies_over_it(tmp_path: Path) -> None:
    told = sheet(usable_gib=7.5, clock_ghz=2.0, host_gib=32, reached={"bf16": 0.5, "vram": 0.8})
    machine = loaded(tmp_path, told)
    assert machine.gpu.vram.value == 7.5 * GIB
    assert machine.host.memory.value == 32 * GIB
    assert machine.gpu.instructions is not None
    assert machine.gpu.instructions.datasheet.value == 10 * 64 * 2e9
    rates = {name: roof.rate.value for name, roof in machine.gpu.tensor.items()}
    assert rates == pytest.approx({"fp16": 56e12, "bf16": 20e12})
    assert machine.gpu.vram_read.rate.value == 320e9
    measured = {"value": 7e9, "unit": "B", "spread": 0.0, "n": 3, "source": "measured", "date": "2026-12-01"}
    over = loaded(tmp_path, {**told, "gpu_count": 2, "gpu": {"vram": measured, "link": ""}})
    assert (over.gpu_count, over.gpu.vram.value, over.gpu.vram.source) == (2, 7e9, "measured")
    assert over.gpu.vram_read == machine.gpu.vram_read


def test_a_file_extends_a_sheet_key_by_key_and_a_sheet_replaces_a_measured_device(tmp_path: Path) -> None:
    base = load_profile("rtx4090")
    less = loaded(tmp_path, {"extends": "rtx4090", "name": "less", "datasheet": {"usable_gib": 20}})
    assert (less.name, less.gpu.vram.value, less.gpu.tensor) == ("less", 20 * GIB, base.gpu.tensor)
    other = loaded(tmp_path, {"extends": "h200", **SHORT})
    assert other.gpu == loaded(tmp_path, SHORT).gpu
    assert other.kernels == load_profile("h200").kernels


def test_the_smallest_file_that_extends_replaces_one_rate(tmp_path: Path) -> None:
    vram = {"value": 1.2e11, "unit": "B", "spread": 0.01, "n": 1, "source": "measured", "date": "2026-12-01"}
    own = {"schema": "twin.hardware/1", "extends": "h200", "name": "x", "summary": "x", "gpu": {"vram": vram}}
    machine, base = loaded(tmp_path, own), load_profile("h200")
    assert (machine.name, machine.gpu.vram.value, machine.gpu.vram_read) == ("x", 1.2e11, base.gpu.vram_read)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"memory_gib": None}, "missing required field `memory_gib` - at `$.datasheet`"),
        ({"colour": 1}, "unknown field `colour` - at `$.datasheet`"),
        ({"compute_capability": "8"}, "$.datasheet.compute_capability"),
        ({"link": "AGP"}, "'AGP' is neither like 'PCIe 4.0 x16' nor 'NVLink-C2C' - at `$.datasheet`"),
        ({"link": None}, "a device has a link, or with 'unified'"),
        ({"unified": True}, "a device has a link, or with 'unified'"),
        ({"reached": {"fp8": 0.5}}, "reached: 'fp8' is none of bf16, fp16, instructions, link, peer, tensor, vram"),
        ({"reached": {"vram": 1.5}}, "$.datasheet.reached"),
        ({"usable_gib": 9}, "usable_gib: 9 is above memory_gib, 8"),
        ({"peer": "a cable"}, "'a cable' begins like none of 'NVLink', 'Infinity Fabric', 'PCIe'"),
        ({"peer": "NVLink 4"}, "peer_gb_per_s: needed of any peer but PCIe"),
        ({"peer": "PCIe", "peer_gb_per_s": 20}, "peer_gb_per_s: needed of any peer but PCIe"),
        ({"memory_bits": 32}, "memory_gb_per_s: 100 Gbit/s over each of 32 bits"),
        ({"memory_gb_per_s": 4e11}, "$.gpu.vram_read.rate.value"),
        ({"sources": []}, "$.datasheet.sources"),
        ({"date": "today"}, "$.datasheet.date"),
    ],
)
def test_a_sheet_that_cannot_be_is_refused_by_its_key(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(BadFile) as refused:
        loaded(tmp_path, sheet(**changes))
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", SHEETS)
def test_a_shipped_sheet_is_in_physical_order(name: str) -> None:
    machine, told = load_profile(name), read_json(MACHINES / f"{name}.json")["datasheet"]
    gpu, tensor = machine.gpu, {dtype: roof.datasheet.value for dtype, roof in machine.gpu.tensor.items()}
    assert told["sources"]
    assert 0.9 * told["memory_gib"] <= gpu.vram.value / GIB <= told["memory_gib"] or gpu.unified_memory
    assert tensor["fp16"] >= tensor.get("bf16", 0)
    for narrow, wide, most in (("fp8", "bf16", 4.05), ("int8", "fp16", 2.03), ("fp4", "fp8", 4.05)):
        if narrow in tensor:
            assert 0.99 <= tensor[narrow] / tensor[wide] <= most, (narrow, wide)
    for leaf in leaves(expanded(read_json(MACHINES / f"{name}.json"))):
        assert leaf["source"] == "datasheet"
        assert leaf["note"]
    for roof in (gpu.vram_read, gpu.h2d, *gpu.tensor.values(), machine.host.dram, machine.host.disk):
        assert isinstance(roof, Roof)
        assert roof.rate.spread >= 0.05


@pytest.mark.parametrize("name", SHEETS)
def test_memory_is_answered_on_a_sheet_and_speed_by_borrowed_rates(name: str) -> None:
    question = Question(model="llama-3.1-8b", hw=name, ctx_tokens=8192, utilisation=0.9)
    if load_profile(name).gpu.name.startswith("Apple"):
        with pytest.raises(Impossible, match="has neither CUDA nor ROCm"):
            predict(question)
        return
    answer = predict(question)
    assert answer.machine.name == name
    if answer.fits:
        assert answer.memory.max_ctx_tokens() >= 8192
        assert answer.not_predicted == {}
        assert set(answer.standing()) & {"carried", "typical"}
        with pytest.raises(MissingRate, match=f"^not measured on {name}: "):
            predict(replace(question, strict=True))
    else:
        assert "short)" in answer.memory.shortage()
    assert answer.fits == (answer.machine.gpu.vram.value > 19 * GIB)


def test_assumed_shares_are_those_of_the_measured_machines() -> None:
    """The pairs that they are said to come from, as the shipped profiles have them."""
    for name in ("rtx3090", "h200"):
        gpu = load_profile(name).gpu
        for kind, roofs in (("vram", [gpu.vram_read]), ("link", [gpu.h2d]), ("tensor", [gpu.tensor["bf16"]])):
            for roof in roofs:
                share = roof.rate.value / roof.datasheet.value
                assert share == pytest.approx(REACHED[kind].value, abs=2 * REACHED[kind].spread), (name, kind)
