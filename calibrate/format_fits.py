"""Kernel rates of attention over quantised caches and of appending to them, one entry a format and arrangement.

Where a machine's rate of instructions is known, a kernel that is cut into thread blocks
(`twin/operations/occupancy.py`) has a latency, a share of the memory's rate for what it reads, one for the
partial results of its splits, and operations an element:

* `operations`: so many, and so many for each query row of a program;
* `rows`: a number for each kind of program, taken only where it lowers the error of left-out samples by a fifth.

Any other (on a processor) has a latency, and a share of the slower of bytes and products for each number of query
tokens: `efficiency`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from calibrate.expand_fits import expand_rates
from calibrate.format_forms import Form, Sampled, efficiency_form, programs_form
from calibrate.kernel_entry import kernel_entry, residual_rows
from calibrate.library_fits import streamed_shape
from calibrate.probes.probe import ProbeRecord, Sample
from hwprofiles.profile import HardwareProfile, Kernel
from twin.ask.case import Case
from twin.cost.roofline import Cost, Roofs
from twin.formats import kv_format
from twin.operations.format_ops import Heads, append_op, decode_op, format_case
from twin.operations.ops import Op
from twin.prediction import Z90

Provenance = Callable[[Sequence[Sample], float, str], dict[str, Any]]

DECODE, APPEND = "format_decode_", "format_append"
PLAIN_KEY = "attend_decode/twin/bf16"
"""The kernel that takes nothing apart: what reading alone reaches."""

WORTH = 0.8
"""A form is taken in place of one before it if it lowers the left-out error to this share."""

FEW_ROWS = 2
"""Kinds of programs through which a line always goes."""

SAME = 0.005
"""Left-out errors below this are not told apart."""

HELD = 0.9
"""Of the left-out samples that an interval of 90 % must hold."""

WORDS = {
    "efficiency": "a share of bytes or products at each number of query tokens",
    "operations": "reads beside the operations of programs: so many an element, and more for each query row",
    "rows": "reads beside the operations of programs: a number for each kind of program",
}


class Judged(NamedTuple):
    """A form fitted on all samples, and its errors on samples that it was not fitted on."""

    form: Form
    left_out: dict[int, float]
    """(predicted - measured) / measured, by sample."""
    weights: dict[int, float]
    """Relative standard deviation of such a prediction where each of the kernel's rates has one of 1."""

    @property
    def error(self) -> float:
        """Root mean square of the left-out errors; of the residuals where nothing could be left out."""
        return _root_mean_square(tuple(self.left_out.values()) or self.form.residuals)

    @property
    def spread(self) -> float:
        """Of each rate, so that intervals of 90 % hold nine of ten left-out samples; no less than the residuals."""
        least = _root_mean_square(self.form.residuals)
        if not self.left_out:
            return least
        needed = [abs(error) / self.weights[number] / Z90 for number, error in self.left_out.items()]
        return max(least, float(np.quantile(needed, HELD)))


def _root_mean_square(errors: Sequence[float]) -> float:
    return math.sqrt(sum(error**2 for error in errors) / len(errors))


def _weight(cost: Cost) -> float:
    """Relative standard deviation of a cost whose kernel's rates err by 1, independently."""
    latencies = len(cost.latency_rates) * cost.latency_s**2
    return math.sqrt(latencies + cost.bound_s**2) / cost.seconds


class _FormatFits:
    """The fits of one machine, each adding its key to `kernels` and what it was made from to `fitted`."""

    def __init__(self, records: Mapping[str, ProbeRecord], base: HardwareProfile, provenance: Provenance) -> None:
        self.records, self.base, self.provenance = records, base, provenance
        self.roofs = Roofs(base)
        self.lines: dict[tuple[Sampled, ...], Form] = {}
        """Fits with a line of operations, by samples: a number for each kind of program is looked for near them."""
        self.kernels: dict[str, Any] = {}
        self.fitted: dict[str, Any] = {}

    def decode(self) -> None:
        """Attention of every format that was timed, plain ones first: the others read as they do."""
        found = [list(record.samples) for name, record in self.records.items() if name.startswith(DECODE)]
        known = [samples for samples in found if samples and self._has_roof(samples[0])]
        for samples in sorted(known, key=lambda each: kv_format(str(each[0].at["format"])).kind != "plain"):
            self._decode_of(samples)

    def _has_roof(self, sample: Sample) -> bool:
        return _case_of(sample).operand_dtype in self.base.gpu.tensor

    def _decode_of(self, samples: Sequence[Sample]) -> None:
        case = _case_of(samples[0])
        points = [Sampled(op=_op(sample), seconds=sample.median_s) for sample in samples]
        chosen, others = self.chosen(points)
        key, form = case.attention_kernel("attend_decode"), chosen.form
        provenance = self.provenance(samples, chosen.spread, WORDS[form.name])
        self.kernels[key] = form.entry(provenance)
        self.fitted[key] = [
            {
                "at": sample.at,
                "measured_s": sample.median_s,
                "residual": residual,
                **({"left_out": chosen.left_out[number]} if number in chosen.left_out else {}),
            }
            for number, (sample, residual) in enumerate(zip(samples, form.residuals, strict=True))
        ]
        self.fitted[f"{key}#left_out"] = {name: judged.error for name, judged in others.items()}

    def chosen(self, points: Sequence[Sampled]) -> tuple[Judged, dict[str, Judged]]:
        """(the form that predicts left-out samples best, all that were tried by name)."""
        if self.base.gpu.instructions is None or any(point.op.split_kv is None for point in points):
            judged = self._judged(lambda these, _near: efficiency_form(these, roofs=self.roofs), points)
            return judged, {"efficiency": judged}
        tried = {"operations": self._judged(self._operations, points)}
        if len({_held(point) for point in points}) > FEW_ROWS:
            tried["rows"] = self._judged(self._rows, points)
        best = next(iter(tried.values()))
        for judged in tried.values():
            best = judged if max(judged.error, SAME) < WORTH * best.error else best
        return best, tried

    def _operations(self, points: Sequence[Sampled], near: Form | None) -> Form:
        known = tuple(points)
        if known not in self.lines:
            self.lines[known] = programs_form(points, roofs=self.roofs, plain_read=self._plain_read(), near=near)
        return self.lines[known]

    def _rows(self, points: Sequence[Sampled], near: Form | None) -> Form:
        line = self._operations(points, None if near is None else near.line)
        return programs_form(points, roofs=self.roofs, plain_read=self._plain_read(), near=near, line=line)

    def _plain_read(self) -> float | None:
        """Of the memory's rate, by the kernel that only reads."""
        entry = self.kernels.get(PLAIN_KEY)
        return float(entry["efficiency"]["efficiency"][0]) if entry is not None and "operations" in entry else None

    def _judged(self, kind: Callable[[Sequence[Sampled], Form | None], Form], points: Sequence[Sampled]) -> Judged:
        whole = kind(points, None)
        errors: dict[int, float] = {}
        weights: dict[int, float] = {}
        for left in _folds(points):
            form = kind([point for number, point in enumerate(points) if number != left], whole)
            trial = Roofs(replace(self.base, kernels={points[0].op.kernel: _kernel(form)}))
            cost = trial.cost(points[left].op)
            errors[left], weights[left] = cost.seconds / points[left].seconds - 1, _weight(cost)
        return Judged(form=whole, left_out=errors, weights=weights)

    def append(self) -> None:
        """A latency a layer, from one token, and the share of the memory's rate that more tokens reach."""
        record = self.records.get(APPEND)
        by_format: dict[str, list[Sample]] = {}
        for sample in record.samples if record is not None else ():
            by_format.setdefault(str(sample.at["format"]), []).append(sample)
        for found in by_format.values():
            samples = sorted(found, key=lambda sample: sample.at["tokens"])
            ops = [append_op(_case_of(sample), tokens=int(sample.at["tokens"])) for sample in samples]
            shape = streamed_shape(samples, [self.roofs.cost(replace(op, kernel="")).bound_s for op in ops])
            provenance = self.provenance(samples, shape.spread, "quantised in fused kernels; on a CPU in torch")
            self.kernels[ops[0].kernel] = kernel_entry(shape, provenance, over="tokens")
            self.fitted[ops[0].kernel] = residual_rows(samples, shape)


def _kernel(form: Form) -> Kernel:
    """A form's entry without a history."""
    nothing = {"spread": 0.0, "n": 1, "source": "measured", "date": "2026-01-01"}
    return msgspec.convert(form.entry(nothing), Kernel)


def _held(point: Sampled) -> float:
    """What samples of one kind share: query rows of a program where they are known, else query tokens."""
    return point.op.split_kv.q_rows if point.op.split_kv is not None else point.op.grain


def _folds(points: Sequence[Sampled]) -> Iterator[int]:
    """Samples to leave out, one at a time: each of whose kind there are others."""
    kinds = [_held(point) for point in points]
    for number, kind in enumerate(kinds):
        if kinds.count(kind) > 1 and len(points) > 2:
            yield number


def _case_of(sample: Sample) -> Case:
    heads = Heads(**{name: int(sample.at[name]) for name in Heads._fields})
    inline = sample.at.get("arrangement") == "inline"
    return format_case(str(sample.at["format"]), inline=inline, heads=heads)


def _op(sample: Sample) -> Op:
    sizes = {name: int(sample.at[name]) for name in ("ctx_tokens", "batch", "query_tokens")}
    return decode_op(_case_of(sample), **sizes)


def format_rates(
    records: Mapping[str, ProbeRecord], base: HardwareProfile, provenance: Provenance
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(kernels of the profile, residuals of each fit); both empty where no format was measured."""
    fits = _FormatFits(records, base, provenance)
    fits.decode()
    fits.append()
    expanded, parts = expand_rates(records, base, provenance)
    return fits.kernels | expanded, fits.fitted | parts
