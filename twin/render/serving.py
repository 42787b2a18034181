"""A simulation of serving as text, as twin.simulation/1 and as a trace for Perfetto and chrome://tracing.

Source of the trace: "Trace Event Format" (Chromium project), JSON object form, in microseconds.
"""

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any, TextIO

from twin.serving.metrics import Histogram, Rejection, RequestRecord, ServingResult, Steps
from twin.units import US, format_seconds

SIMULATION_SCHEMA = "twin.simulation/1"
CHART_COLUMNS = 64
CHART_ROWS = 6
SHOWN_REJECTIONS = 3
SPAN_REQUESTS = 10_000
"""Requests that a trace shows, the first to finish; Perfetto becomes slow with more."""
SPAN_STEPS = 100_000
"""Stretches of steps that a trace shows, from the start."""

Interval = Callable[[Callable[[ServingResult], float]], tuple[float, float]]
"""Ends of the 90 % interval of a figure."""

_REJECTED_FOR = {"max_model_tokens": "longer than the model takes", "pool": "larger than the whole pool"}
_PIECES = ("queue", "prefill", "decode")


def serving_text(result: ServingResult, interval: Interval | None = None) -> str:
    """Headline numbers, and who was running when."""
    pool = f"{result.pool_peak_blocks:,} of {result.pool_blocks:,} blocks at most"
    share = result.pool_peak_blocks / result.pool_blocks if result.pool_blocks else 0.0
    lines = [
        f"{_count(result.completed, 'request')} in {format_seconds(result.total_s)}: "
        f"{result.prompt_tokens:,} prompt tokens, {result.output_tokens:,} output tokens",
        "",
        _row("throughput", _throughput(result, interval)),
        _row("first token", _spread(result.ttft_s)),
        _row("between", _spread(result.itl_s)),
        _row("per token", _spread(result.tpot_s)),
        _row("end to end", _spread(result.e2e_s)),
        _row("queue", _spread(result.queue_s)),
        _row("running", f"{result.resident_max:,} at most, {_figures(result.resident_mean)} on average"),
        _row("pool", f"{pool} ({100 * share:.0f} %)"),
        _row("preemptions", _preemptions(result)),
    ]
    if result.cached_tokens:
        cached = result.cached_tokens / result.prompt_tokens
        lines.append(_row("prefix cache", f"{result.cached_tokens:,} prompt tokens skipped ({100 * cached:.0f} %)"))
    return "\n".join([*lines, *_rejected_rows(result), *_chart(result)]) + "\n"


def _throughput(result: ServingResult, interval: Interval | None) -> str:
    low, high = interval(lambda each: each.output_tokens_per_s) if interval else (0.0, 0.0)
    within = f" ({_figures(low)} to {_figures(high)})" if _figures(low) != _figures(high) else ""
    return f"{_figures(result.output_tokens_per_s)} tok/s out{within}, {_figures(result.requests_per_s)} req/s"


def _preemptions(result: ServingResult) -> str:
    if not result.preemptions:
        return "none"
    return f"{result.preemptions:,}, {result.recomputed_tokens:,} tokens computed again"


def _rejected_rows(result: ServingResult) -> list[str]:
    kinds = [f"{count:,} {_REJECTED_FOR[kind]}" for kind, count in sorted(result.rejected.items())]
    rows = [_row("rejected", ", ".join(kinds))] if kinds else []
    for each in result.rejections[:SHOWN_REJECTIONS]:
        where = f" (line {each.line:,})" if each.line else ""
        rows.append(_row("", f"request {each.id}{where}: {each.reason}"))
    if result.rejected_count > SHOWN_REJECTIONS:
        rows.append(_row("", f"and {result.rejected_count - SHOWN_REJECTIONS:,} more"))
    return rows


def _chart(result: ServingResult) -> list[str]:
    """Mean running sequences over time, a column for each share of the time."""
    levels = _columns([level for _, level in result.timeline])
    top = max(levels, default=0.0)
    if not top:
        return []
    edge = len(f"{top:.1f}")
    rows = ["", "  running sequences over time"]
    for row in range(CHART_ROWS, 0, -1):
        bars = "".join("#" if level >= top * (row - 0.5) / CHART_ROWS else " " for level in levels)
        label = f"{top:.1f}" if row == CHART_ROWS else ""
        rows.append(f"  {label:>{edge}} |{bars}".rstrip())
    end = format_seconds(result.total_s)
    return [
        *rows,
        f"  {'':{edge}} +{'-' * len(levels)}",
        f"  {'':{edge}}  0{end:>{max(len(levels), len(end) + 2) - 1}}",
    ]


def _columns(levels: list[float]) -> list[float]:
    """As many as fit, each the mean of its share."""
    columns = min(CHART_COLUMNS, len(levels))
    edges = [index * len(levels) // columns for index in range(columns + 1)] if columns else [0]
    shares = [levels[start:end] for start, end in pairwise(edges)]
    return [sum(share) / len(share) for share in shares]


def _spread(times: Histogram) -> str:
    if not times.count:
        return "-"
    named = (
        f"{name} {format_seconds(times.quantile(share))}" for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
    )
    return f"{', '.join(named)}; mean {format_seconds(times.mean)}, max {format_seconds(times.most)}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _row(name: str, text: str) -> str:
    return f"  {name:12s} {text}".rstrip()


def _figures(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def serving_json(result: ServingResult) -> dict[str, Any]:
    """The result as twin.simulation/1; times of nothing are null."""
    return {
        "schema": SIMULATION_SCHEMA,
        "limits": {name: getattr(result.limits, name) for name in result.limits.__struct_fields__},
        "total_s": result.total_s,
        "busy_s": result.busy_s,
        "steps": result.steps,
        "completed": result.completed,
        "prompt_tokens": result.prompt_tokens,
        "output_tokens": result.output_tokens,
        "output_tokens_per_s": result.output_tokens_per_s,
        "requests_per_s": result.requests_per_s,
        "ttft_s": result.ttft_s.summary(),
        "itl_s": result.itl_s.summary(),
        "tpot_s": result.tpot_s.summary(),
        "e2e_s": result.e2e_s.summary(),
        "queue_s": result.queue_s.summary(),
        "resident_max": result.resident_max,
        "resident_mean": result.resident_mean,
        "preemptions": result.preemptions,
        "recomputed_tokens": result.recomputed_tokens,
        "cached_tokens": result.cached_tokens,
        "pool": {"blocks": result.pool_blocks, "peak_blocks": result.pool_peak_blocks},
        "rejected_count": result.rejected_count,
        "rejected_kinds": dict(result.rejected),
        "rejected": [rejection_json(each) for each in result.rejections],
        "timeline": {
            "bin_s": result.residency.bin_s,
            "points": [{"start_s": start, "residents": level} for start, level in result.timeline],
        },
        "requests": [record_json(each) for each in result.requests],
    }


def interval_json(interval: Interval) -> dict[str, dict[str, float]]:
    """The 90 % interval of the headline figures: the same workload with all steps shorter or longer."""
    figures: dict[str, Callable[[ServingResult], float]] = {
        "total_s": lambda each: each.total_s,
        "output_tokens_per_s": lambda each: each.output_tokens_per_s,
        "ttft_p50_s": lambda each: each.ttft_s.quantile(0.5),
        "itl_p50_s": lambda each: each.itl_s.quantile(0.5),
        "e2e_p50_s": lambda each: each.e2e_s.quantile(0.5),
    }
    return {name: dict(zip(("low", "high"), interval(figure), strict=True)) for name, figure in figures.items()}


def record_json(record: RequestRecord) -> dict[str, Any]:
    """A completed request."""
    return {name: getattr(record, name) for name in record.__struct_fields__}


def rejection_json(rejection: Rejection) -> dict[str, Any]:
    """A request that can never run."""
    return {name: getattr(rejection, name) for name in rejection.__struct_fields__}


class ServingTrace:
    """Writes a trace while the simulation runs: give `steps` and `finished` to it as `on_steps` and `on_finish`.

    Nothing is held back, so that memory does not grow. `close` completes the JSON and says what was left out.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._separator = ""
        self._running = 0
        self._end_s = 0.0
        self._steps = self._requests = 0

    def steps(self, steps: Steps) -> None:
        """A stretch of steps, and how many sequences were running in it."""
        self._steps += 1
        if self._steps > SPAN_STEPS:
            return
        if steps.start_s > self._end_s:
            self._counter(self._end_s, 0)
        self._counter(steps.start_s, steps.running)
        self._end_s = steps.end_s
        parts = [f"prefill {steps.prefill_tokens}"] if steps.prefill_tokens else []
        parts += [f"decode {steps.decoding}"] if steps.decoding else []
        args = {"steps": steps.steps, "decoding": steps.decoding, "prefill_tokens": steps.prefill_tokens}
        times = {"ts": steps.start_s / US, "dur": (steps.end_s - steps.start_s) / US}
        self._write({"ph": "X", "pid": 1, "tid": 1, "name": " + ".join(parts), **times, "args": args})

    def finished(self, record: RequestRecord) -> None:
        """A request from its arrival to its last token, and in it queue, prefill and decode."""
        self._requests += 1
        if self._requests > SPAN_REQUESTS:
            return
        start_s = record.arrival_s
        edges = (start_s, start_s + record.queue_s, start_s + record.ttft_s, start_s + record.e2e_s)
        args = {"prompt_tokens": record.prompt_tokens, "output_tokens": record.output_tokens}
        self._span(f"request {record.id}", edges[0], edges[-1], {**args, "preemptions": record.preemptions})
        for name, (begin_s, end_s) in zip(_PIECES, pairwise(edges), strict=True):
            if end_s > begin_s:
                self._span(name, begin_s, end_s, {})

    def close(self) -> None:
        """Complete the JSON; the file itself stays open."""
        self._begin()
        self._counter(self._end_s, 0)
        left = {
            "requests_left_out": max(0, self._requests - SPAN_REQUESTS),
            "steps_left_out": max(0, self._steps - SPAN_STEPS),
        }
        self._out.write(f'\n],"otherData":{json.dumps(left)}}}\n')

    def _counter(self, at_s: float, running: int) -> None:
        if running == self._running:
            return
        self._running = running
        self._write({"ph": "C", "pid": 1, "name": "running", "ts": at_s / US, "args": {"sequences": running}})

    def _span(self, name: str, start_s: float, end_s: float, args: dict[str, Any]) -> None:
        both = {"cat": "request", "id": self._requests, "pid": 2, "tid": 0, "name": name}
        self._write({"ph": "b", **both, "ts": start_s / US, "args": args})
        self._write({"ph": "e", **both, "ts": end_s / US})

    def _begin(self) -> None:
        """The head of the JSON, with the first event: what is refused before leaves a stream as it was."""
        if self._separator:
            return
        self._out.write('{"displayTimeUnit":"ms","traceEvents":[')
        self._separator = "\n"
        for process, name in ((1, "engine"), (2, "requests")):
            self._write({"ph": "M", "pid": process, "tid": 0, "name": "process_name", "args": {"name": name}})

    def _write(self, event: dict[str, Any]) -> None:
        self._begin()
        self._out.write(self._separator + json.dumps(event, separators=(",", ":"), allow_nan=False))
        self._separator = ",\n"
