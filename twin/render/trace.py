"""A played program in the Trace Event Format, for Perfetto and chrome://tracing: one track per device and engine.

Source: "Trace Event Format" (Chromium project), JSON object form, "X" complete events in microseconds.
"""

import json
from pathlib import Path
from typing import Any

from twin.ask.case import Case
from twin.cost.prefill import chunk_at, chunk_count
from twin.cost.roofline import Roofs
from twin.cost.schedule import Span, Timeline, schedule
from twin.operations.lower import decode_program, draft_program, prefill_program
from twin.operations.ops import HOST_DEVICE, Engine, Op, Program, Step
from twin.prediction import Prediction
from twin.render.output import write_atomic
from twin.units import US

_TRACK_ORDER = {engine: index for index, engine in enumerate(Engine)}


def trace_json(case: Case, roofs: Roofs, *, phase: str = "decode") -> str:
    """The decode step, or the last chunk of the prefill if it has any, layer by layer in true order."""
    devices = roofs.profile.gpu_count
    if phase == "decode":
        program = _decode(case, devices)
    else:
        chunks = chunk_count(case, case.question.ctx_tokens)
        program = (
            prefill_program(case, chunk_at(case, case.question.ctx_tokens, chunks - 1), devices, grouped=False)
            if chunks
            else ()
        )
    seconds = [[roofs.cost(op).seconds for op in block.ops] for block in program]
    events = trace_events(schedule(program, seconds, spans=True))
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":")) + "\n"


def _decode(case: Case, devices: int) -> Program:
    """One step; where tokens are drafted, the draft and then the kind of verify step that comes most often."""
    step = Step(kv_tokens=case.question.ctx_tokens, q_tokens=1, batch=case.question.batch)
    if case.speculation is None:
        return decode_program(case, step, devices, grouped=False)
    kind = max(case.speculation.steps, key=lambda each: each.share)
    verify = Step(kv_tokens=step.kv_tokens, q_tokens=kind.query_tokens, batch=step.batch)
    draft = draft_program(case, case.speculation, step, devices - 1)
    return (*draft, *decode_program(case, verify, devices, grouped=False))


def trace_events(timeline: Timeline) -> list[dict[str, Any]]:
    """Names of all tracks, then one complete event per call."""
    spans = [span for span in timeline.spans() if span.end_s > span.start_s]
    tracks = sorted({(span.op.device, span.op.engine) for span in spans}, key=lambda track: (track[0], str(track[1])))
    names = [event for device, engine in tracks for event in _track_names(device, engine)]
    return names + [_event(span) for span in spans]


def _track_names(device: int, engine: Engine) -> list[dict[str, Any]]:
    process = {"ph": "M", "pid": device + 1, "tid": _TRACK_ORDER[engine]}
    where = "host" if device == HOST_DEVICE else f"gpu{device}"
    return [
        {**process, "name": "process_name", "args": {"name": where}},
        {**process, "name": "thread_name", "args": {"name": f"{where} {engine}"}},
    ]


def _event(span: Span) -> dict[str, Any]:
    op = span.op
    return {
        "ph": "X",
        "name": op.part,
        "pid": op.device + 1,
        "tid": _TRACK_ORDER[op.engine],
        "ts": span.start_s / US,
        "dur": (span.end_s - span.start_s) / US,
        "args": _counts(op),
    }


def _counts(op: Op) -> dict[str, Any]:
    counts = {
        "kernel": op.kernel,
        "calls": op.calls,
        "vram_bytes": op.vram_bytes,
        "link_bytes": op.link_bytes,
        "host_bytes": op.host_bytes,
        "flops": op.flops,
    }
    return {name: value for name, value in counts.items() if value}


def write_trace(prediction: Prediction, path: Path, *, phase: str) -> bool:
    """Write the trace of one phase to `path`; False, and no file touched, where the question does not fit."""
    if not prediction.fits:
        return False
    write_atomic(path, trace_json(prediction.case, Roofs(prediction.machine), phase=phase))
    return True
