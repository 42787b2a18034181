"""Rates of prefill over quantised caches: unpacking a piece of each format, and attention over what was unpacked.

Unpacking is a latency a piece and a share of the memory's rate over codes read and numbers written. Attention over
pieces is the same kernel for all formats: a latency a call and a share of the tensor roof, from whole chunks of several
formats less what unpacking and folding take of them. On a GPU that share goes by how full the waves of its programs
are, which depends on rows in steps; elsewhere by the rows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from calibrate.fits import (
    EVERY,
    LATENCY_SHARE,
    LEAST_EFFICIENCY,
    LEAST_LATENCY_S,
    Shape,
    latency_and_efficiency,
    solve,
)
from calibrate.kernel_entry import kernel_entry, residual_rows
from calibrate.probes.probe import ProbeRecord, Sample
from hwprofiles.profile import WAVE_FILL, HardwareProfile, Kernel
from twin.case import Case
from twin.format_ops import Heads, format_case, prefill_ops
from twin.ops import Op
from twin.roofline import Roofs

Provenance = Callable[[Sequence[Sample], float, str], dict[str, Any]]

EXPAND, CHUNKS = "format_expand", "format_prefill"
LEAST_SHARE = 0.05
"""Of a chunk's time that is left to attention at the least."""


def expand_rates(
    records: Mapping[str, ProbeRecord], base: HardwareProfile, provenance: Provenance
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(kernels of the profile, residuals of each fit); both empty where nothing was unpacked."""
    kernels: dict[str, Any] = {}
    fitted: dict[str, Any] = {}
    for samples in _by(_samples(records, EXPAND), "format", "arrangement"):
        key, shape = _unpacked(samples, Roofs(base))
        note = "codes and scales read, numbers of 16 bits written; latency of a piece"
        kernels[key] = kernel_entry(shape, provenance(samples, shape.spread, note), over="tokens")
        fitted[key] = residual_rows(samples, shape)
    for samples in _by(_samples(records, CHUNKS), "operands"):
        usable = [sample for sample in samples if _ops(sample)[0].kernel in kernels]
        if usable and _ops(usable[0])[1].dtype in base.gpu.tensor:
            key, shape = _attended(usable, base, kernels)
            note = "whole chunks of several formats, less unpacking and folding; latency of a piece"
            over = WAVE_FILL if _by_waves(base) else "rows"
            kernels[key] = kernel_entry(shape, provenance(usable, shape.spread, note), over=over)
            fitted[key] = residual_rows(usable, shape)
    return kernels, fitted


def _by_waves(base: HardwareProfile) -> bool:
    """Whether this is a GPU, which is known by its rate of instructions."""
    return base.gpu.instructions is not None


def _samples(records: Mapping[str, ProbeRecord], name: str) -> tuple[Sample, ...]:
    record = records.get(name)
    return record.samples if record is not None else ()


def _by(samples: Sequence[Sample], *names: str) -> Iterator[list[Sample]]:
    """Samples that agree in what is named; `operands` are the type of attention's products."""
    groups: dict[tuple[object, ...], list[Sample]] = {}
    for sample in samples:
        place = tuple(_case_of(sample).operand_dtype if name == "operands" else sample.at[name] for name in names)
        groups.setdefault(place, []).append(sample)
    yield from groups.values()


def _case_of(sample: Sample) -> Case:
    heads = Heads(**{name: int(sample.at[name]) for name in Heads._fields})
    inline = sample.at.get("arrangement") == "inline"
    case = format_case(str(sample.at["format"]), inline=inline, heads=heads)
    return replace(case, rules=replace(case.rules, prefill_piece_tokens=int(sample.at["piece_tokens"])))


def _ops(sample: Sample) -> tuple[Op, ...]:
    """Unpacking, attention and folding of a sample; of a sample of unpacking its tokens are one row's context."""
    rows = int(sample.at.get("rows", 1))
    ctx = int(sample.at["tokens"]) if "tokens" in sample.at else int(sample.at["past"]) + rows
    return prefill_ops(_case_of(sample), ctx_tokens=ctx, rows=rows)


def _unpacked(samples: Sequence[Sample], roofs: Roofs) -> tuple[str, Shape]:
    """(key, the seconds of one piece)."""
    ops = [_ops(sample)[0] for sample in samples]
    seconds = [sample.median_s / op.calls for sample, op in zip(samples, ops, strict=True)]
    bare = [roofs.cost(replace(op, kernel="")).bound_s / op.calls for op in ops]
    alone = len({op.grain for op in ops}) == 1
    shape = latency_and_efficiency([op.grain for op in ops], seconds, bare, latency_s=0 if alone else None)
    return ops[0].kernel, shape


def _attended(samples: Sequence[Sample], base: HardwareProfile, kernels: Mapping[str, Any]) -> tuple[str, Shape]:
    """(key, latency of a call and share of the tensor roof by fill or rows); residuals are of whole chunks."""
    roofs = Roofs(replace(base, kernels=msgspec.convert(dict(kernels), dict[str, Kernel])))
    chains = [_ops(sample) for sample in samples]
    beside = [roofs.cost(unpack).seconds + roofs.cost(fold).seconds for unpack, _, fold in chains]
    left = [
        max(sample.median_s - other, LEAST_SHARE * sample.median_s)
        for sample, other in zip(samples, beside, strict=True)
    ]
    attends = [attend for _, attend, _ in chains]
    products = [attend.flops * attend.calls / base.gpu.tensor[attend.dtype].rate.value for attend in attends]
    calls = [attend.calls for attend in attends]
    places = [_place(attend, base) for attend in attends]
    at = sorted(set(places))
    columns = [[roof if place == one else 0.0 for place, roof in zip(places, products, strict=True)] for one in at]
    most_latency = LATENCY_SHARE * min(seconds / count for seconds, count in zip(left, calls, strict=True))
    together = len(samples) <= len(at)  # then a latency cannot be told from an efficiency
    found = solve(
        [calls, *columns], left, least=[LEAST_LATENCY_S, *[1.0] * len(at)],
        most=[2 * LEAST_LATENCY_S if together else max(2 * LEAST_LATENCY_S, most_latency)]
        + [1 / LEAST_EFFICIENCY] * len(at), huber=EVERY,
    )  # fmt: skip
    latency, *inverse = found.coefficients
    by_place = dict(zip(at, inverse, strict=True))
    residuals = [
        (other + latency * count + roof * by_place[place]) / sample.median_s - 1
        for sample, other, count, place, roof in zip(samples, beside, calls, places, products, strict=True)
    ]
    efficiency = tuple(1 / value for value in inverse)
    return attends[0].kernel, Shape(
        latency_s=latency, at=tuple(float(place) for place in at), efficiency=efficiency, residuals=tuple(residuals)
    )


def _place(attend: Op, base: HardwareProfile) -> float:
    """Where a call lies on the curve of efficiencies."""
    if attend.grid is None or not _by_waves(base):
        return attend.grain
    return attend.grid.fill(base.gpu.sm_count)
