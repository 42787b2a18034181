"""Peaks that bound what was measured: data sheets of known devices, PCIe by generation, or the measurement itself."""

from typing import Any, NamedTuple

from calibrate.machine.description import Machine

HEADROOM = 1.05
"""Where no data sheet is known, the peak is the measured rate and this much: a bound to compare with, not a fact."""
SHEET_DATE = "2026-11-29"


class Sheet(NamedTuple):
    """Published peaks of one device."""

    vram: float
    """Bytes a second."""
    tensor: float
    """Dense fp16 and bf16 operations a second."""
    link: float
    """Bytes a second."""
    note: str


SHEETS = {
    "NVIDIA H200": Sheet(4.8e12, 989e12, 63.0e9, "NVIDIA H200 data sheet: HBM3e, dense fp16 and bf16, PCIe 5.0 x16"),
    "NVIDIA GeForce RTX 3090": Sheet(
        936.2e9, 142.3e12, 31.5e9, "GA102 whitepaper: GDDR6X, dense fp16 with fp16 accumulation, PCIe 4.0 x16"
    ),
}

LANE_BYTES_PER_S = {"1": 0.25e9, "2": 0.5e9, "3": 0.985e9, "4": 1.969e9, "5": 3.938e9, "6": 7.563e9}
"""One lane of PCI Express, one direction, after line coding."""
INTEGER_LANES = 64
"""32-bit integer and logic operations that a multiprocessor of compute capability 7.0 to 9.0 begins each clock."""


def peak(kind: str, measured: float, unit: str, machine: Machine, *, date: str) -> dict[str, Any]:
    """The peak of `kind` (vram, tensor, instructions, link, dram, disk) as a rate; never below what was measured."""
    known = _known(kind, machine)
    rate = {"unit": unit, "spread": 0.0, "n": 1}
    if known is not None and known[0] >= measured:
        value, note = known
        return {"value": value, **rate, "source": "datasheet", "date": SHEET_DATE, "note": note}
    why = f"measured above the {known[0]:g} of its data sheet" if known else "no data sheet is known here"
    note = f"{why}: the measured rate x {HEADROOM}, a bound and not a peak"
    return {"value": measured * HEADROOM, **rate, "source": "measured", "date": date, "note": note}


def _known(kind: str, machine: Machine) -> tuple[float, str] | None:
    sheet = SHEETS.get(machine.name)
    if sheet is not None and kind in ("vram", "tensor", "link"):
        return getattr(sheet, kind), sheet.note
    clock = machine.smi.get("clocks.max.sm", "")
    if kind == "instructions" and clock.isdigit():
        note = f"{machine.sm_count} multiprocessors x {INTEGER_LANES} lanes x {clock} MHz"
        return machine.sm_count * INTEGER_LANES * int(clock) * 1e6, note
    generation, lanes = (machine.smi.get(f"pcie.link.{what}.max", "") for what in ("gen", "width"))
    if kind == "link" and generation in LANE_BYTES_PER_S and lanes.isdigit():
        return LANE_BYTES_PER_S[generation] * int(lanes), f"PCIe {generation}.0 x{lanes}"
    return None
