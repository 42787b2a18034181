"""From the words of a command to requests: a trace, or a made-up workload; both can be read again from the start."""

import json
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from msgspec import Struct

from twin.answers.service import Service, serve
from twin.ask.question import Question
from twin.cli.common import progress_bar
from twin.errors import Impossible
from twin.models import load_model
from twin.render.output import open_atomic
from twin.render.serving import ServingTrace, record_json
from twin.serving.metrics import RequestRecord
from twin.serving.requests import Distribution, Lengths, Request, Workload
from twin.serving.traces import Reading, read_trace

DEFAULT_REQUESTS = 1000
DEFAULT_PROMPT_TOKENS = 512
DEFAULT_OUTPUT_TOKENS = 256

_FLAGS = {
    "requests": "--requests",
    "rate": "--rate",
    "prompt": "--prompt",
    "output_length": "--output",
    "lengths": "--lengths",
    "cv": "--cv",
    "arrivals": "--arrivals",
    "burstiness": "--burstiness",
    "prefix_tokens": "--prefix",
}
_TRACE_FLAGS = {"time_unit": "--time-unit", "hash_tokens": "--hash-tokens"}


class Source(Struct, frozen=True, kw_only=True):
    """Where requests come from."""

    text: str
    """What is served, in a line."""
    trace: Path | None
    workload: Workload | None
    once: bool = False
    """Whether it can be read but once."""
    asked: Reading = Reading()
    """What is said of the trace."""
    readings: list[Reading] = []
    """How the trace was read, each time that it was."""

    def requests(self) -> Iterable[Request]:
        """The requests from the first on; BadFile where a trace is not one."""
        if self.trace is not None:
            return read_trace(self.trace, self.asked, understood=self.readings.append)
        return self.workload.requests() if self.workload else ()

    @property
    def reading(self) -> Reading | None:
        """How the trace was read; None before that, and of a made-up workload."""
        return self.readings[0] if self.readings else None


def source_of(trace: Path | None, asked: dict[str, Any]) -> Source:
    """The trace, or the workload that the options `asked` describe; Impossible where both are asked for."""
    given = [flag for name, flag in _FLAGS.items() if asked.get(name) is not None]
    if trace is not None:
        if given:
            raise Impossible(f"{given[0]} means nothing beside --trace-in: the trace says what comes when")
        once = os.path.exists(trace) and not (os.path.isfile(trace) or os.path.isdir(trace))
        text = "trace from a pipe: read once, so no intervals" if once else f"trace {trace.name}"
        said = Reading(time_unit=asked.get("time_unit"), hash_tokens=asked.get("hash_tokens"))
        return Source(text=text, trace=trace, workload=None, once=once, asked=said)
    for name, flag in _TRACE_FLAGS.items():
        if asked.get(name) is not None:
            raise Impossible(f"{flag} means nothing without --trace-in")
    kind: Distribution = asked["lengths"] or "exponential"
    workload = Workload(
        count=_or(asked["requests"], DEFAULT_REQUESTS),
        prompt=Lengths(mean=_or(asked["prompt"], DEFAULT_PROMPT_TOKENS), distribution=kind, cv=asked["cv"]),
        output=Lengths(mean=_or(asked["output_length"], DEFAULT_OUTPUT_TOKENS), distribution=kind, cv=asked["cv"]),
        rate_per_s=asked["rate"],
        arrivals=asked["arrivals"] or "poisson",
        burstiness=1.0 if asked["burstiness"] is None else asked["burstiness"],
        prefix_tokens=asked["prefix_tokens"] or 0,
        seed=asked["seed"],
    )
    when = "all at once" if workload.at_once else f"{workload.rate_per_s:g} a second"
    shape = f"{kind} lengths of {workload.prompt.mean:,} and {workload.output.mean:,} tokens"
    count = f"{workload.count:,} request{'s' if workload.count > 1 else ''}"
    return Source(text=f"{count}, {when}, {shape}", trace=None, workload=workload)


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def _progress(update: Callable[[int, int, str], None], source: Source) -> Callable[[int, float], None]:
    """Completed requests of all, or just their number where a trace says no total."""
    count = source.workload.count if source.workload else 0
    return lambda done, now_s: update(done, max(count, done), f"{done:,} requests, {now_s:,.0f} s simulated")


def serve_asked(asked: dict[str, Any], question_of: Callable[[dict[str, Any]], Question]) -> tuple[Service, Source]:
    """Serve what the options of `twin simulate` describe; files that they name are complete or not there at all.

    Raises as `twin.answers.service.serve` does; CannotWrite where a file cannot be written.
    """
    asked = dict(asked)
    workload = {name: asked.pop(name, None) for name in (*_FLAGS, *_TRACE_FLAGS, "seed")}
    source = source_of(asked.pop("trace_in"), workload)
    trace, finished, intervals = asked.pop("trace"), asked.pop("requests_out"), not asked.pop("no_interval")
    longest = asked["max_model_tokens"] or load_model(asked["model"]).native_ctx_tokens
    question = question_of(asked | {"ctx_tokens": longest})
    with ExitStack() as files:
        watch: dict[str, Any] = {}
        listeners: list[Callable[[RequestRecord], None]] = []
        if trace is not None:
            drawn = ServingTrace(files.enter_context(open_atomic(trace)))
            watch["on_steps"] = drawn.steps
            listeners.append(drawn.finished)
        if finished is not None:
            out = files.enter_context(open_atomic(finished))
            listeners.append(lambda record: print(json.dumps(record_json(record)), file=out))
        if listeners:
            watch["on_finish"] = lambda record: [listen(record) for listen in listeners]
        if sys.stderr.isatty():
            watch["progress"] = _progress(files.enter_context(progress_bar("serving")), source)
        service = serve(question, source.requests, intervals=intervals and not source.once, watch=watch)
        if trace is not None:
            drawn.close()
    return service, source
