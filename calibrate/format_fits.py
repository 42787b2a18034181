"""Kernel rates of attention over quantised caches and of appending to them, one entry a format and arrangement.

Attention reads bytes, multiplies and takes codes apart at the same time. Of three forms each format is given the one
that predicts its own samples best when they are left out of the fit:

* `decoding`: a latency, one share of the products, operations for each stored element, and the share of the bytes that
  the kernel of plain caches reaches;
* `shares`: a latency, one share of the bytes and one of the products;
* `efficiency`: a latency, and a share of the slower of bytes and products for each number of query tokens.

Each with a latency that grows with the query tokens (the splits' partial results are written and merged for each of
them), and without. In this order, what follows is taken only where it lowers the error of what was left out by a fifth:
the first says most about other machines, the last least.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from calibrate.format_forms import Form, OpAt, Sampled, decoding_form, efficiency_form, shares_form
from calibrate.kernel_entry import kernel_entry, residual_rows
from calibrate.library_fits import streamed_shape
from calibrate.probes.probe import ProbeRecord, Sample
from hwprofiles.profile import HardwareProfile, Kernel
from twin.case import Case
from twin.format_ops import Heads, append_op, decode_op, format_case
from twin.formats import kv_format
from twin.ops import Op
from twin.roofline import Roofs

Provenance = Callable[[Sequence[Sample], float, str], dict[str, Any]]

DECODE, APPEND = "format_decode_", "format_append"
PLAIN_KEY = "attend_decode/twin/bf16"
"""The kernel that takes nothing apart: what reading alone reaches."""

OF_CTX = 2**16
WORTH = 0.8
"""A form is taken in place of one before it if it lowers the left-out error to this share."""

SAME = 0.005
"""Left-out errors below this are not told apart."""

NORMAL = 1.4826
"""Standard deviations of a normal distribution in its median absolute deviation."""

WORDS = {
    "efficiency": "a share of bytes or products at each number of query tokens",
    "shares": "one share of bytes, one of products",
    "decoding": "held by taking codes apart; reads as the kernel of plain caches, one share of the products",
}


class Judged(NamedTuple):
    """A form fitted on all samples, and its errors on samples that it was not fitted on."""

    form: Form
    left_out: dict[int, float]
    """(predicted - measured) / measured, by sample."""

    @property
    def error(self) -> float:
        """Root mean square of the left-out errors; of the residuals where nothing could be left out."""
        return _root_mean_square(tuple(self.left_out.values()) or self.form.residuals)

    @property
    def spread(self) -> float:
        """From the median of the left-out errors, as some samples cannot be told from the others at all.

        No less than the residuals.
        """
        sizes = [abs(error) for error in self.left_out.values()]
        return max(_root_mean_square(self.form.residuals), NORMAL * statistics.median(sizes) if sizes else 0.0)


def _root_mean_square(errors: Sequence[float]) -> float:
    return math.sqrt(sum(error**2 for error in errors) / len(errors))


class _FormatFits:
    """The fits of one machine, each adding its key to `kernels` and what it was made from to `fitted`."""

    def __init__(self, records: Mapping[str, ProbeRecord], base: HardwareProfile, provenance: Provenance) -> None:
        self.records, self.base, self.provenance = records, base, provenance
        self.roofs = Roofs(base)
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
        chosen, others = self.chosen(points, partial(_op_at, case))
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

    def chosen(self, points: Sequence[Sampled], op_at: OpAt) -> tuple[Judged, dict[str, Judged]]:
        """(the form that predicts left-out samples best, all that were tried by name)."""
        kinds: dict[str, Callable[..., Form]] = {"shares": shares_form, "efficiency": efficiency_form}
        if self.base.gpu.instructions is not None and points[0].op.decoded:
            kinds = {"decoding": partial(decoding_form, read_share=self._read_share()), **kinds}
        tried: dict[str, Judged] = {}
        for name, form in kinds.items():
            kind = partial(form, roofs=self.roofs, op_at=op_at)
            tried[f"{name} and each"] = self._judged(kind, points, each=True)
            tried[name] = self._judged(kind, points, each=False)
        best = next(iter(tried.values()))
        for judged in tried.values():
            best = judged if max(judged.error, SAME) < WORTH * best.error else best
        return best, tried

    def _judged(self, kind: Callable[..., Form], points: Sequence[Sampled], *, each: bool) -> Judged:
        whole = kind(points, each=each)
        errors: dict[int, float] = {}
        for left in _folds(points):
            others = [point for number, point in enumerate(points) if number not in left]
            form = kind(others, each=each, near=whole)
            trial = Roofs(replace(self.base, kernels={points[0].op.kernel: _kernel(form)}))
            for number in left:
                error = trial.cost(points[number].op).seconds / points[number].seconds - 1
                errors[number] = max(errors.get(number, 0.0), error, key=abs)
        return Judged(form=whole, left_out=errors)

    def _read_share(self) -> float:
        """Of the memory's rate, by the kernel that only reads."""
        entry = self.kernels.get(PLAIN_KEY)
        return float(entry["efficiency"]["efficiency"][0]) if entry is not None else 1.0

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
            provenance = self.provenance(samples, shape.spread, "quantised by torch, one kernel an operation")
            self.kernels[ops[0].kernel] = kernel_entry(shape, provenance, over="tokens")
            self.fitted[ops[0].kernel] = residual_rows(samples, shape)


def _kernel(form: Form) -> Kernel:
    """A form's entry without a history."""
    nothing = {"spread": 0.0, "n": 1, "source": "measured", "date": "2026-01-01"}
    return msgspec.convert(form.entry(nothing), Kernel)


def _folds(points: Sequence[Sampled]) -> Iterator[set[int]]:
    """Samples to leave out together: each one whose number of query tokens others have, and each inner number whole."""
    grains = [point.op.grain for point in points]
    for number, grain in enumerate(grains):
        if grains.count(grain) > 1 and len(points) > 2:
            yield {number}
    for inner in sorted(set(grains))[1:-1]:
        yield {number for number, grain in enumerate(grains) if grain == inner}


def _case_of(sample: Sample) -> Case:
    heads = Heads(**{name: int(sample.at[name]) for name in Heads._fields})
    inline = sample.at.get("arrangement") == "inline"
    return format_case(str(sample.at["format"]), inline=inline, heads=heads)


def _op_at(case: Case, query_tokens: int) -> Op:
    """Of some context: what shares are made of depends on the query tokens alone."""
    return decode_op(case, ctx_tokens=OF_CTX, batch=1, query_tokens=query_tokens)


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
    return fits.kernels, fits.fitted
