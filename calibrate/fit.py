"""From calibrated samples to kernel rates: the one fit of every operation in the table.

An operation names the part whose kernel is fitted and an estimator (`calibrate/estimators.py`); here its samples become
timings of that part: lowered to ops by the twin, known ops beside it taken off.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec.structs import replace as changed

from calibrate.estimators import Rates, ThreadBlocks, Timing, exact, latency_of_sizes, least_squares, streamed
from calibrate.probes import ProbeRecord, Sample
from hwprofiles.profile import HardwareProfile, Kernel
from twin.cost.roofline import ATTENTION_OPS, Roofs
from twin.operations.ops import Engine, Op, OpGraph

if TYPE_CHECKING:
    from calibrate.operations.operation import Operation

Provenance = Callable[[Sequence[Sample], float, str], dict[str, Any]]
Form = Literal["exact", "streamed", "least_squares", "thread_blocks"]

LEAST_LEFT = 0.05
"""Of a sample's time that is left to a kernel beside known ones, at the least."""
PLAIN_KEY = "attend_decode/twin/bf16"
"""The kernel that dequantises nothing: what reading alone reaches."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """How the rates of one kernel follow from an operation's samples."""

    part: str
    """Of the operation's ops: the one whose kernel it is. The others' known cost is taken off first."""
    form: Form
    over: str
    """Axis of the efficiency in a profile."""
    note: str
    latency: Literal["fitted", "none", "of sizes"] = "fitted"
    """Of `exact`: regressed from all samples; none, all of the time is efficiency; or from the several sizes that were
    timed at the smallest of the places that have some."""
    lowered: bool = True
    """Whether a latency of sizes is lowered until no sample is quicker than latency and roof together."""
    latency_of: str = ""
    """Part whose kernel the latency belongs to, where it is another: it had no rate when this one was fitted."""
    latency_note: str = ""
    kept: Callable[[Mapping[str, Any]], bool] = lambda _at: True
    """Whether a sample sets an efficiency; others tell the latency alone."""
    between_runs: float = 0.0
    """Relative standard deviation of the same call from one run to another, where samples of one run show less."""
    jointly: tuple[tuple[str, str, str], ...] = ()
    """Other parts of the same calls whose efficiency is fitted with it: (part, axis, note)."""


class Fitter:
    """The fits of one machine, each adding its keys to `kernels` and its residuals to `fitted`.

    `base` is the machine without kernels.
    """

    def __init__(
        self, records: Mapping[str, ProbeRecord], base: HardwareProfile, dtype: str, provenance: Provenance
    ) -> None:
        self.records, self.base, self.dtype, self.provenance = records, base, dtype, provenance
        self.roofs = Roofs(base)
        self.kernels: dict[str, Any] = {}
        self.fitted: dict[str, Any] = {}

    def fit(self, operation: "Operation") -> None:
        """All kernels of an operation; of one without any, what its samples are predicted to take."""
        samples = [
            sample for name, record in self.records.items() if name.partition(".")[0] == operation.name
            for sample in record.samples
        ]  # fmt: skip
        if not operation.fits:
            self._compare(operation, samples, self._known())
        for fit in operation.fits:
            known = self._known()
            groups: dict[str, list[Timing]] = {}
            for sample in samples:
                timing = self._timing(fit, sample, operation.lower(sample.at, self.dtype), known)
                if timing is not None:
                    groups.setdefault(timing.op.kernel, []).append(timing)
            plain_first = sorted(groups.items(), key=lambda group: bool(group[1][0].op.dequantised_elements))
            for key, timings in plain_first:
                self._add(fit, key, timings)

    def _known(self) -> Roofs:
        """The machine with what has been fitted so far."""
        return Roofs(changed(self.base, kernels=msgspec.convert(self.kernels, dict[str, Kernel])))

    def _timing(self, fit: Fit, sample: Sample, program: Sequence[OpGraph], known: Roofs) -> Timing | None:
        """A sample for a fit; None where it has no such part, or something beside it has no rate yet."""
        found = [(block, op) for block in program for op in block.ops if op.part == fit.part]
        if not found or (found[0][1].flops and found[0][1].dtype not in self.base.gpu.tensor):
            return None
        block, op = found[0]
        calls = op.calls * block.iterations
        others = [other for each in program for other in each.ops if other is not op]
        joint = {part: 0.0 for part, _, _ in fit.jointly}
        beside_s = 0.0
        for other in others:
            if other.part in joint:
                joint[other.part] = self._joint_s(other)
            elif other.part == fit.latency_of:
                beside_s += self.roofs.cost(changed(other, kernel="")).bound_s
            elif other.kernel and other.kernel not in known.profile.kernels:
                return None
            else:
                beside_s += known.cost(other).seconds
        seconds = max(sample.median_s - beside_s, LEAST_LEFT * sample.median_s)
        return Timing(
            sample=sample, op=op, calls=calls, seconds=seconds / calls, roof_s=self._roof_s(op) / op.calls,
            beside_s=beside_s / calls, joint_s=tuple(joint.values()),
            keys={other.part: other.kernel for other in others},
        )  # fmt: skip

    def _roof_s(self, op: Op) -> float:
        """Seconds of all calls of an op at the roofs that its efficiency is a share of."""
        if op.kernel.startswith(ATTENTION_OPS):
            op = changed(op, vram_bytes=0, link_bytes=0)
        if op.or_plain:
            op = changed(op, run_bytes=0)
        return self.roofs.cost(changed(op, kernel="")).bound_s

    def _joint_s(self, op: Op) -> float:
        """The same of a part that is fitted jointly; planes in device memory are copied there: read and written."""
        if op.engine is not Engine.H2D:
            return self._roof_s(op)
        copies = (self.records.get("vram_copy") or self.records["vram_read"]).samples
        return 2 * op.link_bytes * op.calls / max(copy.moved_bytes / copy.median_s for copy in copies)

    def _add(self, fit: Fit, key: str, timings: list[Timing]) -> None:
        if fit.form == "streamed":
            timings = sorted(timings, key=lambda each: each.op.grain)
        kept = [each for each in timings if fit.kept(each.sample.at)]
        if not kept:
            return
        rates = self._rates(fit, timings, kept)
        samples = [each.sample for each in kept]
        source = self.provenance(samples, max(rates.spread, fit.between_runs), rates.note or fit.note)
        entry = rates.entry(fit.over, source)
        if fit.latency_of and "latency" in entry:
            latency = entry.pop("latency") | {"note": fit.latency_note}
            self.kernels[timings[0].keys[fit.latency_of]] = {"latency": latency}
        self.kernels[key] = entry
        for (part, over, note), efficiency in zip(fit.jointly, rates.beside, strict=True):
            if over:
                most = max(each.sample.at["q_tokens"] for each in kept)
                curve = {"over": over, "at": [float(most)], "efficiency": [efficiency]} | source | {"note": note}
                other = next((each.keys[part] for each in kept if part in each.keys), "")
                self.kernels |= {other: {"efficiency": curve}} if other else {}
            else:
                self.fitted[f"{key}#copies"] = {"efficiency": efficiency}
        self.fitted[key] = [
            {"at": each.sample.at, "measured_s": each.sample.median_s, "residual": residual}
            | ({"left_out": rates.left_out[number]} if number in (rates.left_out or {}) else {})  # type: ignore[index]
            for number, (each, residual) in enumerate(zip(kept, rates.residuals, strict=True))
        ]
        if rates.tried is not None:
            self.fitted[f"{key}#left_out"] = dict(rates.tried)

    def _rates(self, fit: Fit, timings: Sequence[Timing], kept: Sequence[Timing]) -> Rates:
        if fit.form == "streamed":
            return streamed(kept)
        if fit.form == "least_squares":
            return least_squares(kept, gpu=self.base.gpu)
        if fit.form == "thread_blocks":
            plain = self.kernels.get(PLAIN_KEY, {})
            read = float(plain["efficiency"]["efficiency"][0]) if "operations" in plain else None
            return ThreadBlocks(self.base, read).fit(kept)
        one_size = fit.latency == "fitted" and not fit.latency_of and len({each.roof_s for each in kept}) == 1
        if fit.latency == "none" or one_size:
            return exact(kept, latency_s=0)
        sized = latency_of_sizes(timings) if fit.latency == "of sizes" else None
        return exact(kept, latency_s=sized, keep=sized is not None and not fit.lowered)

    def _compare(self, operation: "Operation", samples: Sequence[Sample], known: Roofs) -> None:
        """What the parts of a whole add up to, at points on which none of them was fitted."""
        rows = []
        for sample in samples:
            ops = [op for block in operation.lower(sample.at, self.dtype) for op in block.ops]
            if all(op.kernel in known.profile.kernels for op in ops):
                parts = {op.part: known.cost(op).seconds for op in ops}
                residual = sum(parts.values()) / sample.median_s - 1
                rows.append({"at": sample.at, "measured_s": sample.median_s, "parts_s": parts, "residual": residual})
        if rows:
            self.fitted[operation.name] = rows
