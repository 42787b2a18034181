"""Traces for Perfetto and chrome://tracing: a simulated program, a track per device and engine, or a served workload.

Source: "Trace Event Format" (Chromium project), JSON object form, in microseconds.
"""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

from hwprofiles.profile import Split
from twin.ask.case import Case
from twin.cli.outputs import write_atomic
from twin.cost.mixed import roofs_of
from twin.cost.prefill import chunk_at, chunk_count
from twin.cost.roofline import Roofs
from twin.cost.schedule import Span, Timeline, schedule
from twin.operations.lower import decode_program, draft_program, last_device, prefill_program
from twin.operations.ops import HOST_DEVICE, Engine, Program, Step
from twin.prediction import Prediction
from twin.serving.metrics import RequestRecord, Steps
from twin.units import US

SPAN_REQUESTS = 10_000  # requests that a trace of serving shows, the first to finish; Perfetto becomes slow with more
SPAN_STEPS = 100_000  # stretches of steps that it shows, from the start

_COUNTS = ("kernel", "calls", "vram_bytes", "link_bytes", "host_bytes", "flops")
_REQUEST_SPANS = ("queue", "prefill", "decode")
_TRACK_ORDER = {engine: index for index, engine in enumerate(Engine)}


def trace_json(case: Case, roofs: Roofs, *, phase: str = "decode") -> str:
    """The decode step, or the last chunk of the prefill if it has any, layer by layer in true order."""
    program = (_decode if phase == "decode" else _last_chunk)(case, roofs.profile.stages(case.tp))
    seconds = [[roofs.cost(op).seconds for op in block.ops] for block in program]
    events = trace_events(schedule(program, seconds, spans=True))
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":")) + "\n"


def _decode(case: Case, split: Split) -> Program:
    """One step; where tokens are drafted, the draft and then the kind of verify step that comes most often."""
    step = Step(kv_tokens=case.question.ctx_tokens, q_tokens=1, batch=case.question.batch)
    if case.speculation is None:
        return decode_program(case, step, split, grouped=False)
    kind = max(case.speculation.steps, key=lambda each: each.share)
    verify = Step(kv_tokens=step.kv_tokens, q_tokens=kind.query_tokens, batch=step.batch)
    draft = draft_program(case, case.speculation, step, last_device(split))
    return (*draft, *decode_program(case, verify, split, grouped=False))


def _last_chunk(case: Case, split: Split) -> Program:
    prompt = case.question.ctx_tokens
    chunks = chunk_count(case, prompt)
    return prefill_program(case, chunk_at(case, prompt, chunks - 1), split, grouped=False) if chunks else ()


def trace_events(timeline: Timeline) -> list[dict[str, Any]]:
    """Names of all tracks, then one complete event per call."""
    spans = [span for span in timeline.spans() if span.end_s > span.start_s]
    tracks = sorted({(span.op.device, span.op.engine) for span in spans}, key=lambda track: (track[0], str(track[1])))
    names = [event for device, engine in tracks for event in _track_names(device, engine)]
    return names + [_event(span) for span in spans]


def _track_names(device: int, engine: Engine) -> list[dict[str, Any]]:
    process = {"ph": "M", "pid": device + 1, "tid": _TRACK_ORDER[engine]}
    where = "host" if device == HOST_DEVICE else f"gpu{device}"
    names = {"process_name": where, "thread_name": f"{where} {engine}"}
    return [{**process, "name": kind, "args": {"name": name}} for kind, name in names.items()]


def _event(span: Span) -> dict[str, Any]:
    op = span.op
    where = {"ph": "X", "name": op.part, "pid": op.device + 1, "tid": _TRACK_ORDER[op.engine]}
    args = {name: getattr(op, name) for name in _COUNTS if getattr(op, name)}
    return {**where, "ts": span.start_s / US, "dur": (span.end_s - span.start_s) / US, "args": args}


def write_trace(prediction: Prediction, path: Path, *, phase: str) -> bool:
    """Write the trace of one phase to `path`; False, and no file touched, where the question does not fit."""
    if not prediction.fits:
        return False
    write_atomic(path, trace_json(prediction.case, roofs_of(prediction.machine, strict=False), phase=phase))
    return True


class ServingTrace:
    """Writes a trace of serving as it is simulated, holding nothing back: `steps`, `finished`, at the end `close`."""

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
        for name, (begin_s, end_s) in zip(_REQUEST_SPANS, pairwise(edges), strict=True):
            if end_s > begin_s:
                self._span(name, begin_s, end_s, {})

    def close(self) -> None:
        """Complete the JSON; the file itself stays open."""
        self._begin()
        self._counter(self._end_s, 0)
        requests, steps = max(0, self._requests - SPAN_REQUESTS), max(0, self._steps - SPAN_STEPS)
        left = {"requests_left_out": requests, "steps_left_out": steps}
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
