"""From the options of `twin simulate` to a served workload: a trace or made-up requests, read as often as needed."""

import json
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from twin.answers.service import Service, serve
from twin.ask.question import Question, flag
from twin.cli.outputs import open_atomic, progress_bar
from twin.errors import Impossible
from twin.models import load_model
from twin.render.trace import ServingTrace
from twin.serving.metrics import RequestRecord
from twin.serving.requests import Distribution, Lengths, Request, Workload
from twin.serving.traces import Lacks, Reading, lacks_of, read_trace

DEFAULT_REQUESTS = 1000
DEFAULT_PROMPT_TOKENS = 512
DEFAULT_OUTPUT_TOKENS = 256

_SHAPE = ("prompt", "output_length", "lengths", "cv", "prefix_tokens")
_OF_ARRIVALS = ("rate", "arrivals", "burstiness")
_OF_WORKLOADS = ("requests", *_OF_ARRIVALS, *_SHAPE)
_OF_TRACES = ("time_unit", "hash_tokens", "chars_per_token")


class Source(Struct, frozen=True, kw_only=True):
    """Where requests come from."""

    text: str  # what is served, in a line
    requests: Callable[[], Iterable[Request]]  # from the first on; BadFile where a trace is not one
    count: int = 0  # how many there are; 0 where a trace does not say
    once: bool = False  # whether they can be read but once
    readings: list[Reading] = []  # how the trace was read, each time that it was

    @property
    def reading(self) -> Reading | None:
        """How the trace was read; None before that, and of a made-up workload."""
        return self.readings[-1] if self.readings else None


def source_of(trace: Path | None, asked: dict[str, Any]) -> Source:
    """The trace, or the workload that the options `asked` describe; Impossible where both are asked for."""
    if trace is None:
        _refuse(asked, _OF_TRACES, "without --trace-in")
        return _made_up(asked)
    once = os.path.exists(trace) and not (os.path.isfile(trace) or os.path.isdir(trace))
    lacks = Lacks(arrivals=True, tokens=True) if once else lacks_of(trace)  # a pipe is not looked into
    lacking = {*(_OF_ARRIVALS if lacks.arrivals else ()), *(("output_length",) if lacks.tokens else ())}
    others = [name for name in _OF_WORKLOADS if name not in lacking]
    _refuse(asked, others, "beside --trace-in: the trace says what comes when")
    text = "trace from a pipe: read once, so no intervals" if once else f"trace {trace.name}"
    drawn = None
    if any(asked.get(name) is not None for name in _OF_ARRIVALS):
        named = {name: asked[name] for name in ("arrivals", "burstiness", "seed") if asked.get(name) is not None}
        nothing = Lengths(mean=1)
        drawn = Workload(count=1, prompt=nothing, output=nothing, rate_per_s=asked.get("rate"), **named)
    said = Reading(
        time_unit=asked.get("time_unit"),
        hash_tokens=asked.get("hash_tokens"),
        chars_per_token=asked.get("chars_per_token"),
        output_tokens=asked.get("output_length"),
        arrivals=f"drawn, {_when(drawn)}" if drawn else "",
    )
    readings: list[Reading] = []
    arrivals = drawn.arrivals_s if drawn else None
    requests = partial(read_trace, trace, said, drawn=arrivals, understood=readings.append)
    return Source(text=text, requests=requests, once=once, readings=readings)


def _refuse(asked: dict[str, Any], names: Iterable[str], where: str) -> None:
    refused = [flag(name) for name in names if asked.get(name) is not None]
    if refused:
        raise Impossible(f"{refused[0]} means nothing {where}")


def _when(workload: Workload) -> str:
    return "all at once" if workload.at_once else f"{workload.rate_per_s:g} a second"


def _made_up(asked: dict[str, Any]) -> Source:
    def given(name: str, default: Any) -> Any:
        return default if asked[name] is None else asked[name]

    kind: Distribution = given("lengths", "exponential")
    prompt, output = (
        Lengths(mean=given(name, default), distribution=kind, cv=asked["cv"])
        for name, default in (("prompt", DEFAULT_PROMPT_TOKENS), ("output_length", DEFAULT_OUTPUT_TOKENS))
    )
    named = ("arrivals", "burstiness", "prefix_tokens", "seed")
    others = {name: asked[name] for name in named if asked[name] is not None}
    count = given("requests", DEFAULT_REQUESTS)
    workload = Workload(count=count, prompt=prompt, output=output, rate_per_s=asked["rate"], **others)
    shape = f"{kind} lengths of {prompt.mean:,} and {output.mean:,} tokens"
    text = f"{workload.count:,} request{'s' if workload.count > 1 else ''}, {_when(workload)}, {shape}"
    return Source(text=text, requests=workload.requests, count=workload.count)


def serve_asked(asked: dict[str, Any]) -> tuple[Service, Source]:
    """Serve what the options of `twin simulate` describe, into whole files. Raises as `serve`, or CannotWrite."""
    asked = dict(asked)
    workload = {name: asked.pop(name, None) for name in (*_OF_WORKLOADS, *_OF_TRACES, "seed")}
    source = source_of(asked.pop("trace_in"), workload)
    trace, finished, intervals = asked.pop("trace"), asked.pop("requests_out"), not asked.pop("no_interval")
    longest = asked["max_model_tokens"] or load_model(asked["model"]).native_ctx_tokens
    question = Question(**asked, ctx_tokens=longest)
    with ExitStack() as files:
        watch: dict[str, Any] = {}
        listeners: list[Callable[[RequestRecord], None]] = []
        if trace is not None:
            drawn = ServingTrace(files.enter_context(open_atomic(trace)))
            watch["on_steps"] = drawn.steps
            listeners.append(drawn.finished)
        if finished is not None:
            out = files.enter_context(open_atomic(finished))
            listeners.append(lambda record: print(json.dumps(asdict(record)), file=out))
        if listeners:
            watch["on_finish"] = lambda record: [listen(record) for listen in listeners]
        if sys.stderr.isatty():
            update = files.enter_context(progress_bar("serving"))
            watch["progress"] = lambda done, now_s: update(
                done, max(source.count, done), f"{done:,} requests, {now_s:,.0f} s simulated"
            )
        service = serve(question, source.requests, intervals=intervals and not source.once, watch=watch)
        if trace is not None:
            drawn.close()
    return service, source
