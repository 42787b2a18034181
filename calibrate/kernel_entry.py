"""What a fit leaves behind: a kernel's entry in a profile, and in the record how far each sample is from it."""

from collections.abc import Mapping, Sequence
from typing import Any

from calibrate.fits import Shape
from calibrate.probes.probe import Sample


def kernel_entry(shape: Shape, provenance: Mapping[str, Any], *, over: str) -> dict[str, Any]:
    """An efficiency over `over`, and a latency where the shape has one."""
    curve = {"over": over, "at": list(shape.at), "efficiency": list(shape.efficiency), **provenance}
    entry: dict[str, Any] = {"efficiency": curve}
    if shape.latency_s > 0:
        entry["latency"] = {"value": shape.latency_s, "unit": "s", **provenance}
    return entry


def residual_rows(samples: Sequence[Sample], shape: Shape) -> list[dict[str, Any]]:
    """Where each sample was taken, its seconds and its relative residual."""
    return [
        {"at": sample.at, "measured_s": sample.median_s, "residual": residual}
        for sample, residual in zip(samples, shape.residuals, strict=True)
    ]
