"""Kernel rates of a profile: what the timed kernels make of the roofs, counted by the same ops that predict them.

Each fit turns the prediction round: the ops of a kernel case give its roofs on the machine as measured so far, and the
latency and efficiency are those with which `twin.cost.roofline.Roofs.cost` gives the measured seconds back.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from calibrate.fits import AttendSample, Shape, attend_fit, latency_and_efficiency, latency_and_rate
from calibrate.kernel_cases import KernelCase, program_of
from calibrate.kernel_entry import kernel_entry, residual_rows
from calibrate.machine.description import Machine
from calibrate.probes.probe import ProbeRecord, Sample
from hwprofiles.profile import HardwareProfile
from twin.cost.roofline import ATTENTION_OPS, Roofs
from twin.engines.twin import INTERLEAVED
from twin.operations.ops import Op, OpGraph

Provenance = Callable[[Sequence[Sample], float, str], dict[str, Any]]
BUDGET = 2048
"""Tokens that the predicted model selects; other sizes only tell latency from bytes."""


class _Fits:
    """The fits of one machine, each adding its keys to `kernels` and what it was made from to `fitted`."""

    def __init__(
        self, machine: Machine, records: Mapping[str, ProbeRecord], base: HardwareProfile, provenance: Provenance
    ) -> None:
        self.records, self.provenance, self.base = records, provenance, base
        self.dtype = machine.dtype
        self.roofs = Roofs(base)
        self.kernels: dict[str, Any] = {}
        self.fitted: dict[str, Any] = {}

    def samples(self, name: str) -> list[Sample]:
        """Samples of a probe; none if it did not run."""
        return list(self.records[name].samples) if name in self.records else []

    def blocks(self, **case: Any) -> tuple[OpGraph, ...]:
        """The program of a kernel case of the cache's own type."""
        return program_of(KernelCase(**case), kv_dtype=self.dtype)

    def roof_s(self, op: Op) -> float:
        """Seconds of all calls of an op at the roofs that its efficiency is a share of: no latency, efficiency 1."""
        if op.kernel.startswith(ATTENTION_OPS):
            op = replace(op, vram_bytes=0, link_bytes=0)
        return self.roofs.cost(replace(op, kernel="")).bound_s

    def add(self, key: str, shape: Shape, samples: Sequence[Sample], note: str, *, over: str) -> None:
        """An entry with efficiency, and with a latency where the shape has one."""
        self.kernels[key] = kernel_entry(shape, self.provenance(samples, shape.spread, note), over=over)
        self.fitted[key] = residual_rows(samples, shape)

    # The fits, in the order in which later ones need earlier ones

    def linear(self, dtype: str) -> None:
        """Products with weights, from one token on."""
        samples = [s for s in self.samples("matrix_vector") if s.at["dtype"] == dtype]
        vectors = len(samples)
        samples += self.samples(f"tensor_{dtype}")
        if not samples or dtype not in self.base.gpu.tensor:
            return
        tensor, vram = self.base.gpu.tensor[dtype].rate.value, self.base.gpu.vram_read.rate.value
        latency = None
        if len({s.moved_bytes for s in samples[:vectors]}) > 1:
            latency = latency_and_rate(*_line(samples[:vectors])).latency_s
        shape = latency_and_efficiency(
            [float(s.at["tokens"]) for s in samples],
            [s.median_s for s in samples],
            [max(s.moved_bytes / vram, s.flops / tensor) for s in samples],
            latency_s=latency,
            keep=latency is not None,
        )
        note = "weights read once from memory, 2 operations per weight and token"
        self.add(f"linear/twin/{dtype}", shape, samples, note, over="tokens")

    def selection(self) -> None:
        """Scan and selection of a decode step: one latency for both, an efficiency for the scan."""
        samples = self.samples("select")
        if not samples:
            return
        scans, rest = [], []
        for sample in samples:
            (block,) = self.blocks(metric="decode_select", tier="vram", ctx_tokens=_ctx(sample), layers=1)
            scan, select = block.ops
            scans.append(self.roof_s(scan))
            rest.append(_above(sample.median_s, self.roof_s(select)))
        shape = latency_and_efficiency([_ctx(s) for s in samples], rest, scans)
        key = f"scan/twin/{self.dtype}"
        self.add(key, shape, samples, "all layers in one graph; the latency is with select", over="ctx_tokens")
        latency = self.kernels[key].pop("latency", None)
        if latency is not None:
            note = "score, pick and finish of one layer beyond their bytes"
            self.kernels[f"select/twin/{self.dtype}"] = {"latency": latency | {"note": note}}

    def gather(self, probe: str, fmt: str = "") -> None:
        """Sparse attention of a decode step; its latency from selections of several sizes.

        `fmt`: of a format in records, rotations of queries and outputs included; empty: of the cache's own type.
        """
        every = self.samples(f"{probe}_{fmt}" if fmt else probe)
        samples = [s for s in every if s.at["budget"] == BUDGET]
        if not samples:
            return
        sized_at = {_ctx(s) for s in every if s.at["budget"] != BUDGET}
        sized = [s for s in every if _ctx(s) in sized_at]
        latency = latency_and_rate(*_line(sized)).latency_s if len(sized) > 1 else None
        tier = "vram" if probe == "gather_vram" else "host"
        roofs = []
        for sample in samples:
            (block,) = self.blocks(metric="decode_gather", tier=tier, ctx_tokens=_ctx(sample), layers=1, format=fmt)
            roofs.append(self.roof_s(block.ops[0]))
        shape = latency_and_efficiency(
            [_ctx(s) for s in samples], [s.median_s for s in samples], roofs, latency_s=latency
        )
        note = "all layers in one graph, fresh selections; latency from selections of several sizes"
        self.add(f"{probe}/twin/{fmt or self.dtype}", shape, samples, note, over="ctx_tokens")

    def score(self) -> None:
        """Selection of a chunk's rows: scoring and keeping the best in one rate."""
        samples = self.samples("score_rows")
        select = self.kernels.get(f"select/twin/{self.dtype}", {}).get("latency", {}).get("value", 0.0)
        if not samples:
            return
        seconds, roofs = [], []
        for sample in samples:
            case = {"tier": "vram", "ctx_tokens": _ctx(sample), "rows": int(sample.at["rows"])}
            score, best = (op for block in self.blocks(metric="prefill_select", **case) for op in block.ops)
            seconds.append(_above(sample.median_s / score.calls, select + self.roof_s(best) / best.calls))
            roofs.append(self.roof_s(score) / score.calls)
        shape = latency_and_efficiency([_ctx(s) for s in samples], seconds, roofs)
        note = "a slab of rows scored and selected; beyond one call of select"
        self.add(f"score/twin/{self.dtype}", shape, samples, note, over="ctx_tokens")

    def attend(self) -> None:
        """Sparse attention of a chunk, whole or by buckets, and carrying its partial results."""
        samples = self.samples("attend_rows")
        if not samples:
            return
        fit = attend_fit([self._attended(sample) for sample in samples])
        provenance = self.provenance(samples, fit.spread, "in place and by buckets, on planes in device memory")
        key = f"attend_sparse/twin/{self.dtype}"
        curve = {"over": "region_tokens", "at": list(fit.regions), "efficiency": list(fit.efficiency)}
        self.kernels[key] = {
            "efficiency": curve | provenance,
            "latency": {"value": fit.latency_s, "unit": "s", **provenance},
        }
        merge = {
            "over": "rows",
            "at": [max(float(s.at["rows"]) for s in samples)],
            "efficiency": [fit.merge_efficiency],
        }
        note = "the running softmax between buckets, from the same fit"
        self.kernels[f"combine/twin/{self.dtype}"] = {"efficiency": merge | provenance | {"note": note}}
        self.fitted[key] = [
            {"at": sample.at, "measured_s": sample.median_s, "residual": residual}
            for sample, residual in zip(samples, fit.residuals, strict=True)
        ]
        self.fitted[f"{key}#copies"] = {"efficiency": fit.copy_efficiency}

    def _attended(self, sample: Sample) -> AttendSample:
        bucket, rows = int(sample.at["bucket_tokens"]), int(sample.at["rows"])
        place: dict[str, Any] = {"tier": "vram"}
        if bucket:
            place = {"tier": "host", "mode": "staged", "bucket_tokens": bucket, "copies": "serial"}
        blocks = self.blocks(metric="prefill_attention", ctx_tokens=_ctx(sample), rows=rows, **place)
        ops = {op.part: op for op in blocks[0].ops}
        copies = self.samples("vram_copy") or self.samples("vram_read")
        rate = max(copy.moved_bytes / copy.median_s for copy in copies)
        return AttendSample(
            region=float(bucket or _ctx(sample)),
            buckets=blocks[0].iterations,
            attend_s=self.roof_s(ops["attention"]),
            merge_s=self.roof_s(ops["combine"]) if "combine" in ops else 0.0,
            copied_s=2 * sample.moved_bytes / rate,  # read and written
            seconds=sample.median_s,
        )

    def rows_from_host(self) -> None:
        """A chunk whose rows each read their own selection over the link."""
        samples = self.samples("gather_rows_host")
        if not samples:
            return
        roofs = []
        for sample in samples:
            case = {"tier": "host", "ctx_tokens": _ctx(sample), "rows": int(sample.at["rows"])}
            (block,) = self.blocks(metric="prefill_attention", **case)
            roofs.append(self.roof_s(block.ops[0]))
        shape = latency_and_efficiency([_ctx(s) for s in samples], [s.median_s for s in samples], roofs)
        note = "few rows, each gathering for itself"
        self.add(f"gather_rows_host/twin/{self.dtype}", shape, samples, note, over="ctx_tokens")


def kernel_rates(
    machine: Machine, records: Mapping[str, ProbeRecord], base: HardwareProfile, provenance: Provenance
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(kernels of the profile, residuals of each fit). `base` is the machine without kernels."""
    fits = _Fits(machine, records, base, provenance)
    for dtype in base.gpu.tensor:
        fits.linear(dtype)
    fits.selection()
    for probe in ("gather_vram", "gather_host", "gather_host_4k"):
        fits.gather(probe)
    fits.score()
    fits.attend()
    fits.rows_from_host()
    of_records, parts = record_rates(machine, records, base, provenance)
    return fits.kernels | of_records, fits.fitted | parts


def record_rates(
    machine: Machine, records: Mapping[str, ProbeRecord], base: HardwareProfile, provenance: Provenance
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(kernels, residuals) of gathers over quantised records in host memory alone, of every format that was timed."""
    fits = _Fits(machine, records, base, provenance)
    for fmt in INTERLEAVED:
        fits.gather("gather_host", fmt)
    return fits.kernels, fits.fitted


def _line(samples: Sequence[Sample]) -> tuple[list[float], list[float], list[float]]:
    return [1.0] * len(samples), [s.moved_bytes for s in samples], [s.median_s for s in samples]


def _ctx(sample: Sample) -> int:
    return int(sample.at["ctx_tokens"])


def _above(seconds: float, known_s: float) -> float:
    """What is left of a measurement after what is already known; never less than a tenth."""
    return max(seconds - known_s, 0.1 * seconds)
