"""Rates of the library kernels that a dense model runs on, and how the sum of these parts compares with whole layers.

Written so that `twin.roofline.Roofs.cost` turns them round: products and decode attention are a share of the slowest
roof, a chunk's attention a share of the tensor roof alone.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from calibrate.fits import EVERY, LATENCY_SHARE, LEAST_EFFICIENCY, LEAST_LATENCY_S, Shape, latency_and_efficiency, solve
from calibrate.kernel_entry import kernel_entry, residual_rows
from calibrate.probes.probe import ProbeRecord, Sample
from hwprofiles.profile import HardwareProfile, Kernel
from realkernels.shape import DenseShape
from twin.ops import Engine, Op
from twin.roofline import Roofs

Provenance = Callable[[Sequence[Sample], float, str], dict[str, Any]]

ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
SHAPE_KEYS = tuple(DenseShape.__dataclass_fields__)
IMPLEMENTATIONS = {"append": "flash_attention", "attend_dense": "flash_attention", "attend_decode": "flash_attention"}
"""Whose kernels they are, where not the `library` of matrix products and pointwise kernels."""

PARTS = ("linear", "elementwise", "append", "attend_dense", "attend_decode")


class _LibraryFits:
    """The fits of one machine, each adding its key to `kernels` and what it was made from to `fitted`."""

    def __init__(self, records: Mapping[str, ProbeRecord], base: HardwareProfile, provenance: Provenance) -> None:
        self.records, self.base, self.provenance = records, base, provenance
        self.vram = base.gpu.vram_read.rate.value
        self.kernels: dict[str, Any] = {}
        self.fitted: dict[str, Any] = {}

    def samples(self, name: str) -> list[Sample]:
        """Samples of a probe; none if it did not run, or computes in a type whose roof was not measured."""
        record = self.records.get(name)
        return [s for s in record.samples if s.at["dtype"] in self.base.gpu.tensor] if record is not None else []

    def tensor(self, sample: Sample) -> float:
        """The roof of a sample's products."""
        return self.base.gpu.tensor[str(sample.at["dtype"])].rate.value

    def add(self, operation: str, shape: Shape, samples: Sequence[Sample], note: str, *, over: str) -> None:
        """An entry with an efficiency, and with a latency where the shape has one."""
        key = library_key(operation, "fp32" if operation == "sample" else str(samples[0].at["dtype"]))
        self.kernels[key] = kernel_entry(shape, self.provenance(samples, shape.spread, note), over=over)
        self.fitted[key] = residual_rows(samples, shape)

    def linear(self) -> None:
        """The four products of a layer: all of their time is efficiency."""
        samples = self.samples("library_linear")
        if samples:
            roofs = [max(s.moved_bytes / self.vram, s.flops / self.tensor(s)) for s in samples]
            shape = latency_and_efficiency(_tokens(samples), _seconds(samples), roofs, latency_s=0)
            note = "the four products of a layer in a chain; weights read once, 2 operations per weight and token"
            self.add("linear", shape, samples, note, over="tokens")

    def streamed(self, operation: str, note: str) -> None:
        """One latency a layer, from the fewest tokens, and the share of the memory's rate that larger passes reach."""
        samples = sorted(self.samples(f"library_{operation}"), key=lambda s: s.at["tokens"])
        if samples:
            roofs = [s.moved_bytes / self.vram for s in samples]
            self.add(operation, streamed_shape(samples, roofs), samples, note, over="tokens")

    def attend_dense(self) -> None:
        """A chunk's attention: a latency, and the share of the tensor roof at each number of rows."""
        samples = self.samples("library_attend_dense")
        if not samples:
            return
        rows = [float(s.at["rows"]) for s in samples]
        roofs = [s.flops / self.tensor(s) for s in samples]
        note = "causal chunks over several pasts; operations of masked pairs are not counted"
        self.add("attend_dense", _by_group(rows, _seconds(samples), roofs), samples, note, over="rows")

    def attend_decode(self) -> None:
        """One query token a sequence: a latency, and the share of the memory's rate at which K and V are read."""
        samples = self.samples("library_attend_decode")
        if not samples:
            return
        roofs = [max(s.moved_bytes / self.vram, s.flops / self.tensor(s)) for s in samples]
        shape = _by_group([1.0] * len(samples), _seconds(samples), roofs)
        self.add("attend_decode", shape, samples, "all batches and contexts in one fit", over="query_tokens")

    def layer_check(self) -> None:
        """What the parts add up to at each whole layer that was timed; fits nothing."""
        samples = self.samples("layer_check")
        kernels = msgspec.convert(self.kernels, dict[str, Kernel])
        roofs = Roofs(replace(self.base, kernels=kernels))
        rows = []
        for sample in samples:
            ops = layer_ops(sample)
            if all(op.kernel in kernels for op in ops):
                parts = {op.part: roofs.cost(op).seconds for op in ops}
                measured, total = sample.median_s, sum(parts.values())
                residual = total / measured - 1
                rows.append({"at": sample.at, "measured_s": measured, "parts_s": parts, "residual": residual})
        if rows:
            self.fitted["layer_check"] = rows


def library_key(operation: str, variant: str) -> str:
    """Key of a library kernel in a profile."""
    return f"{operation}/{IMPLEMENTATIONS.get(operation, 'library')}/{variant}"


def layer_ops(sample: Sample) -> tuple[Op, ...]:
    """The ops of a whole layer as it was timed, by part."""
    shape = DenseShape(**{name: int(sample.at[name]) for name in SHAPE_KEYS})
    batch, rows, past = (int(sample.at[name]) for name in ("batch", "rows", "past_tokens"))
    dtype, tokens = str(sample.at["dtype"]), batch * rows
    element = ELEMENT_BYTES[dtype]
    attend = "attend_decode" if rows == 1 else "attend_dense"
    counts: dict[str, dict[str, Any]] = {
        "linear": {
            "vram_bytes": shape.parameters * element, "flops": 2.0 * shape.parameters * tokens, "grain": tokens,
        },
        "elementwise": {"vram_bytes": shape.elementwise * tokens * element, "grain": tokens},
        "append": {"vram_bytes": shape.appended * tokens * element, "grain": tokens},
        attend: {
            "vram_bytes": 2.0 * batch * (past + rows) * shape.kv_width * element,
            "flops": shape.attend_flops(batch=batch, q_tokens=rows, past_tokens=past), "grain": rows,
        },
    }  # fmt: skip
    return tuple(
        Op(part=part, engine=Engine.SM, device=0, kernel=library_key(part, dtype), dtype=dtype, **counts[part])
        for part in PARTS
        if part in counts
    )


def library_rates(
    records: Mapping[str, ProbeRecord], base: HardwareProfile, provenance: Provenance
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(kernels of the profile, residuals of each fit); both empty where no library kernel was measured."""
    fits = _LibraryFits(records, base, provenance)
    fits.linear()
    fits.streamed("elementwise", "two residual adds with norms, rotation of q and k, and gating; latency of a layer")
    fits.streamed("append", "K and V of new tokens, read and written to their slots; latency of a layer")
    fits.streamed("sample", "softmax, noise and argmax over a row of fp32 logits, which are counted as read once")
    fits.attend_dense()
    fits.attend_decode()
    fits.layer_check()
    return fits.kernels, fits.fitted


def streamed_shape(samples: Sequence[Sample], roofs: Sequence[float]) -> Shape:
    """The latency is what the first sample takes beyond its bytes, at the efficiency between it and the second."""
    first, *rest = samples
    if not rest:
        return latency_and_efficiency(_tokens(samples), _seconds(samples), roofs, latency_s=0)
    slope = (rest[0].median_s - first.median_s) / (roofs[1] - roofs[0])
    latency = max(first.median_s - roofs[0] * max(1.0, slope), 0.5 * first.median_s)
    shape = latency_and_efficiency(_tokens(rest), _seconds(rest), roofs[1:], latency_s=latency, keep=True)
    at, efficiency = (_tokens([first])[0], *shape.at), (shape.efficiency[0], *shape.efficiency)
    residual = (shape.latency_s + roofs[0] / efficiency[0]) / first.median_s - 1
    return Shape(latency_s=shape.latency_s, at=at, efficiency=efficiency, residuals=(residual, *shape.residuals))


def _by_group(x: Sequence[float], seconds: Sequence[float], roofs: Sequence[float]) -> Shape:
    """Fit seconds = latency + roof / e(x), every e at most 1, by plain least squares of relative residuals.

    One law for all batches and contexts misses some of them, and none of them is a disturbance. Without a second size
    at any x no latency can be told from an efficiency, and all of the time is efficiency.
    """
    at = sorted(set(x))
    if len(x) == len(at):
        return latency_and_efficiency(x, seconds, roofs, latency_s=0)
    columns = [[roof if position == each else 0.0 for position, roof in zip(x, roofs, strict=True)] for each in at]
    least = [LEAST_LATENCY_S, *[1.0] * len(at)]
    most = [max(2 * LEAST_LATENCY_S, LATENCY_SHARE * min(seconds)), *[1 / LEAST_EFFICIENCY] * len(at)]
    found = solve([[1.0] * len(x), *columns], seconds, least=least, most=most, huber=EVERY)
    latency, *inverse = found.coefficients
    return Shape(
        latency_s=latency, at=tuple(at), efficiency=tuple(1 / value for value in inverse), residuals=found.residuals
    )


def _tokens(samples: Sequence[Sample]) -> list[float]:
    return [float(s.at["tokens"]) for s in samples]


def _seconds(samples: Sequence[Sample]) -> list[float]:
    return [s.median_s for s in samples]
