"""A trace is the simulated step: one named track per device and engine, no overlap on a track, as long as the step."""

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from hwprofiles import load_profile
from tests.worlds import flash_next
from twin.ask.case import Case
from twin.ask.question import Question
from twin.cost.breakdown import Breakdown
from twin.cost.prefill import chunk_at, chunk_count
from twin.cost.roofline import Roofs
from twin.cost.schedule import schedule
from twin.operations.ops import Carried, Engine, Op, OpGraph
from twin.prediction import chunk_breakdown, predict
from twin.render.trace import trace_events, trace_json, write_trace
from twin.units import US

MACHINE = load_profile("3x-rtx3090")
CASES = [
    {"ctx_tokens": 100_000, "layout": "vram"},
    {"ctx_tokens": 100_000, "layout": "offload"},
    {"ctx_tokens": 1000, "layout": "offload"},
    {"ctx_tokens": 60_000, "layout": "offload", "copies": "overlapped", "ngram": "ram"},
    {"ctx_tokens": 60_000, "layout": "offload", "prefill": "naive", "pooled": "host"},
    {"ctx_tokens": 3000, "layout": "offload", "batch": 4},
]
ROUNDING = 1e-9


def traced(case: Case, phase: str) -> list[dict[str, Any]]:
    document = json.loads(trace_json(case, Roofs(MACHINE), phase=phase))
    assert document["displayTimeUnit"] == "ms"
    events: list[dict[str, Any]] = document["traceEvents"]
    return events


def spans_of(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[tuple[float, float]]]:
    """Start and end of every span, in microseconds, by track."""
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    return tracks


def assert_well_formed(events: list[dict[str, Any]]) -> float:
    """Every track is named once and holds one span at a time; the length in seconds."""
    tracks = spans_of(events)
    named = [(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"]
    assert sorted(named) == sorted(tracks)
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert len(set(names)) == len(names)
    end = max(stop for spans in tracks.values() for _, stop in spans)
    for spans in tracks.values():
        for (_, stop), (start, _) in pairwise(sorted(spans)):
            assert start >= stop - ROUNDING * end
    assert min(start for spans in tracks.values() for start, _ in spans) == 0
    return end * US


@pytest.mark.parametrize("asked", CASES)
def test_a_trace_is_as_long_as_the_predicted_step_or_the_last_chunk(asked: dict[str, Any]) -> None:
    prediction, case = predict(Question(**asked), MACHINE), flash_next(**asked)
    assert prediction.decode is not None
    length_s = assert_well_formed(traced(prediction.case, "decode"))
    assert length_s == pytest.approx(prediction.decode.seconds.value, rel=ROUNDING)
    last = chunk_at(case, asked["ctx_tokens"], chunk_count(case, asked["ctx_tokens"]) - 1)
    alone = chunk_breakdown(case, last, Roofs(MACHINE), fetch=Breakdown())  # without what is fetched beside it
    assert assert_well_formed(traced(case, "prefill")) == pytest.approx(alone.seconds, rel=ROUNDING)


def test_a_trace_shows_all_layers_in_order_with_their_counts_on_the_device_that_has_them() -> None:
    """A device's tracks share a process, and the host is one of its own."""
    events = traced(flash_next(1 << 20), "decode")
    weights = [event for event in events if event["name"] == "weights"]
    assert len(weights) == 48 * 2 + 1  # of each layer its experts apart, and the output head
    devices = [event["pid"] - 1 for event in sorted(weights, key=lambda event: event["ts"])]
    assert devices == [0] * 32 + [1] * 32 + [2] * 33
    assert sum(event["name"] == "hop" for event in events) == 2 * 2
    gathers = [event["args"] for event in events if event["name"] == "kv_gather"]
    # token 1,048,577 is the one that is decoded: 512 blocks of 4 tokens and one of the open block, 2,048 B each
    assert [each["link_bytes"] for each in gathers] == [(2048 + 1) * 2048] * 12
    assert all("flops" not in each for each in gathers)  # what is zero is left out
    processes = {(event["pid"], event["args"]["name"]) for event in events if event["name"] == "process_name"}
    assert processes == {(0, "host"), (1, "gpu0"), (2, "gpu1"), (3, "gpu2")}
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"gpu0 SM", "gpu0 H2D", "gpu2 D2H", "host DISK"} <= names
    assert traced(flash_next(1), "prefill") == []  # of nothing


def test_a_pipeline_is_traced_iteration_by_iteration() -> None:
    """Copies of 1 s and kernels of 2 s with two buffers: kernels back to back after the first copy."""
    copy = Op(part="copy", engine=Engine.H2D, device=0)
    work = Op(part="work", engine=Engine.SM, device=0, after=(0,))
    program = (OpGraph(ops=(copy, work), iterations=5, carried=(Carried(0, 1, 2),)),)
    tracks = spans_of(trace_events(schedule(program, [[1.0, 2.0]], spans=True)))
    seconds = {tid: [(start * US, stop * US) for start, stop in sorted(spans)] for (_, tid), spans in tracks.items()}
    kernels, copies = sorted(seconds.values(), key=lambda spans: spans[0][0], reverse=True)
    assert [start for start, _ in kernels] == pytest.approx([1, 3, 5, 7, 9])
    assert len(copies) == 5


def test_what_does_not_fit_leaves_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    assert not write_trace(predict(Question(ctx_tokens=1 << 28), MACHINE), path, phase="decode")
    assert not path.exists()


def test_a_speculating_step_is_traced_from_the_draft_to_the_verification_that_comes_most_often() -> None:
    """As long as the predicted step where there is one kind of it."""
    question, found = Question(ctx_tokens=8192, model="qwen3.8-27b", kv_dtype="fp8"), []
    for speculation, accepted in (("mtp:3", 2.0), ("dflash2:15", 2.0), ("dflash2:15", 12.0)):
        each = predict(replace(question, speculation=speculation, accepted=accepted))
        found.append((each, json.loads(trace_json(each.case, Roofs(each.machine)))["traceEvents"]))
    (prediction, events), *others = found
    assert prediction.decode is not None
    assert assert_well_formed(events) == pytest.approx(prediction.decode.seconds.value, rel=1e-6)
    names = [event["name"] for event in sorted(events, key=lambda event: event.get("ts", -1)) if event["ph"] == "X"]
    assert names.index("draft") < names.index("weights")
    short_s, long_s = (assert_well_formed(events) for _, events in others)
    assert short_s < long_s
