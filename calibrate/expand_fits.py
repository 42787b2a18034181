"""Rates of prefill over quantised caches: unpacking a piece of each format, and attention over what was unpacked.

Unpacking is a latency a piece and a share of the memory's rate over codes read and numbers written. Attention over
pieces is the same kernel for all formats, from whole chunks of several formats less what unpacking and folding take of
them. On a GPU it is a latency a call, a share of the tensor roof in waves of one or of two programs a multiprocessor
(`twin/operations/occupancy.py`), and a share of the memory's rate for partial results; elsewhere a latency and a share
by rows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import mul
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
from hwprofiles.profile import RESIDENT_PROGRAMS, HardwareProfile, Kernel
from twin.ask.case import Case
from twin.cost.roofline import Roofs
from twin.operations.format_ops import Heads, format_case, prefill_ops
from twin.operations.occupancy import RESIDENT
from twin.operations.ops import Op

Provenance = Callable[[Sequence[Sample], float, str], dict[str, Any]]

EXPAND, CHUNKS = "format_expand", "format_prefill"
MERGING = (2e-2, 2.0)
"""Least and most of the share of the memory's rate for partial results that a fit may claim."""

LEAST_SHARE = 0.05
"""Of a chunk's time that is left to attention at the least."""

UNSEEN = 0.04
"""Spread that a fit through all of its points does not show: of an H200's chunks of twice as many sizes."""


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
            key, shape, merging = _attended(usable, base, kernels)
            note = "whole chunks of several formats, less unpacking and folding; latency of a piece"
            over = RESIDENT_PROGRAMS if _by_waves(base) else "rows"
            source = provenance(usable, _spread(usable, shape, merging), note)
            kernels[key] = kernel_entry(shape, source, over=over)
            if merging is not None:
                kernels[key]["combine"] = {"value": merging, "unit": "1", **source}
            fitted[key] = residual_rows(usable, shape)
    return kernels, fitted


def _spread(samples: Sequence[Sample], shape: Shape, merging: float | None) -> float:
    """That of the residuals; UNSEEN at the least where there are no more sizes of chunks than numbers that fit them."""
    sizes = {(sample.at["rows"], sample.at["past"]) for sample in samples}
    fitted = 1 + len(shape.at) + (merging is not None)
    return max(shape.spread, UNSEEN) if len(sizes) <= fitted else shape.spread


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
    own = replace(case.rules.own_kernels, kv_chunk_tokens=int(sample.at["piece_tokens"]))
    return replace(case, rules=replace(case.rules, own_kernels=own))


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


def _attended(
    samples: Sequence[Sample], base: HardwareProfile, kernels: Mapping[str, Any]
) -> tuple[str, Shape, float | None]:
    """(key, latency of a call and shares of the tensor roof, share of the memory's rate for partial results).

    Residuals are of whole chunks.
    """
    roofs = Roofs(replace(base, kernels=msgspec.convert(dict(kernels), dict[str, Kernel])))
    chains = [_ops(sample) for sample in samples]
    beside = [roofs.cost(unpack).seconds + roofs.cost(fold).seconds for unpack, _, fold in chains]
    left = [
        max(sample.median_s - other, LEAST_SHARE * sample.median_s)
        for sample, other in zip(samples, beside, strict=True)
    ]
    attends = [attend for _, attend, _ in chains]
    calls = [attend.calls for attend in attends]
    shares, merged = _in_waves(attends, base) if _by_waves(base) else (_by_rows(attends, base), [])
    most_latency = LATENCY_SHARE * min(seconds / count for seconds, count in zip(left, calls, strict=True))
    together = len(samples) <= len(shares)  # then a latency cannot be told from an efficiency
    merges = [merged] if any(merged) else []
    columns = [calls, *shares.values(), *merges]
    found = solve(
        columns, left,
        least=[LEAST_LATENCY_S, *[1.0] * len(shares), *[1 / MERGING[1]] * len(merges)],
        most=[2 * LEAST_LATENCY_S if together else max(2 * LEAST_LATENCY_S, most_latency)]
        + [1 / LEAST_EFFICIENCY] * len(shares) + [1 / MERGING[0]] * len(merges), huber=EVERY,
    )  # fmt: skip
    latency_s, *inverse = found.coefficients
    fitted = [sum(map(mul, found.coefficients, terms)) for terms in zip(*columns, strict=True)]
    shape = Shape(
        latency_s=latency_s,
        at=tuple(float(place) for place in shares),
        efficiency=tuple(1 / value for value in inverse[: len(shares)]),
        residuals=tuple(
            (other + seconds) / sample.median_s - 1
            for sample, other, seconds in zip(samples, beside, fitted, strict=True)
        ),
    )
    return attends[0].kernel, shape, 1 / inverse[-1] if merges else None


def _by_rows(attends: Sequence[Op], base: HardwareProfile) -> dict[float, list[float]]:
    """By number of rows: seconds at the whole tensor roof, of calls with other rows 0."""
    return {
        rows: [_products_s(attend, base) if attend.grain == rows else 0.0 for attend in attends]
        for rows in sorted({attend.grain for attend in attends})
    }


def _in_waves(attends: Sequence[Op], base: HardwareProfile) -> tuple[dict[float, list[float]], list[float]]:
    """(seconds in waves of 1 and of RESIDENT programs a multiprocessor at the whole roof, those of partial results)."""
    multiprocessors = base.gpu.sm_count
    alone, full, merged = [], [], []
    for attend in attends:
        if attend.flash_grid is None:
            raise ValueError(f"{attend.kernel}: a call that says nothing of its programs")
        waves = attend.flash_grid.on(multiprocessors)
        of_one_s = _products_s(attend, base) * multiprocessors / waves.thread_blocks
        alone.append(of_one_s * waves.alone)
        full.append(of_one_s * waves.full * RESIDENT)
        merged.append(attend.calls * waves.combined_bytes / base.gpu.vram_read.rate.value)
    columns = {1.0: alone, float(RESIDENT): full}
    return {held: column for held, column in columns.items() if any(column)}, merged


def _products_s(attend: Op, base: HardwareProfile) -> float:
    """Of all calls, at the measured peak of the tensor cores."""
    return attend.flops * attend.calls / base.gpu.tensor[attend.dtype].rate.value
