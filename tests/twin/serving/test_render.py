"""What a reader, a script and a trace viewer get to see of a simulation."""

import io
import json
from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace

from tests.twin.serving.worlds import PLENTY, request, serve
from twin.cli.delivery import dump
from twin.render import serving
from twin.render import trace as traces
from twin.render.serving import SIMULATION_SCHEMA, serving_json, serving_text
from twin.render.trace import ServingTrace
from twin.serving.blocks import PagedPool
from twin.serving.metrics import ServingResult


def busy() -> ServingResult:
    requests = [request(index, 8, 12, at=index / 2, prefix=4) for index in range(20)]
    misfits = [request(20 + index, 200, 1, at=10.0) for index in range(5)]
    return serve([*requests, *misfits], pool=PagedPool(blocks=20, block_tokens=4), max_model_tokens=300)


def test_the_headline_says_how_much_in_what_time() -> None:
    text = serving_text(serve([request(0, 5, 4), request(1, 5, 4, at=20.0)]))
    assert text.splitlines()[0] == "2 requests in 29.00 s: 10 prompt tokens, 8 output tokens"
    assert "  throughput   0.276 tok/s out, 0.069 req/s\n" in text
    assert "  first token  p50 6.00 s, p90 6.00 s, p99 6.00 s; mean 6.00 s, max 6.00 s\n" in text
    assert "  running      1 at most, 0.621 on average\n" in text
    assert "  preemptions  none\n" in text
    assert "rejected" not in text
    assert "prefix cache" not in text
    assert serving_text(serve([request(0, 1, 1)])).startswith("1 request in 2.00 s: ")


def test_preemptions_prefixes_and_rejections_are_told() -> None:
    result = busy()
    text = serving_text(result)
    assert f"  preemptions  {result.preemptions:,}, {result.recomputed_tokens:,} tokens computed again\n" in text
    assert f"  prefix cache {result.cached_tokens:,} prompt tokens skipped (" in text
    assert "  rejected     5 larger than the whole pool\n" in text
    assert "request 20: needs 50 blocks, the pool has 20\n" in text
    assert "and 2 more\n" in text


def test_a_rejection_names_its_line() -> None:
    text = serving_text(serve([replace(request(0, 9, 9), line=1234)], max_model_tokens=10))
    assert "  rejected     1 longer than the model takes\n" in text
    assert "request 0 (line 1,234): 18 tokens, the model takes 10\n" in text


def test_the_chart_is_as_high_as_the_residents_and_as_wide_as_a_terminal() -> None:
    lines = serving_text(busy()).splitlines()
    chart = lines[lines.index("  running sequences over time") + 1 :]
    assert all(len(line) <= 80 for line in chart)
    assert len(chart) == serving.CHART_ROWS + 2
    assert "#" in chart[0]
    assert chart[-2].strip().startswith("+---")
    assert chart[-1].strip().startswith("0")


@pytest.mark.parametrize("requests", [[], [request(0, 99, 1)]])
def test_nothing_served_is_still_a_text_and_a_document(requests: list[Any]) -> None:
    result = serve(requests, pool=PagedPool(blocks=2, block_tokens=4))
    assert "  first token  -\n" in serving_text(result)
    document = json.loads(dump(serving_json(result)))
    assert document["ttft_s"] == dict.fromkeys(("p50", "p90", "p99", "mean", "min", "max"))
    assert document["timeline"]["points"] == []


def test_the_document_keeps_its_contract() -> None:
    result = busy()
    document = json.loads(dump(serving_json(result)))
    assert document["schema"] == SIMULATION_SCHEMA == "twin.simulation/1"
    for key in ("ttft_s", "itl_s", "tpot_s", "e2e_s"):
        assert {"p50", "p90", "p99", "mean", "max"} <= document[key].keys()
    assert document["total_s"] == result.total_s
    assert document["output_tokens_per_s"] == 240 / result.total_s
    assert (document["completed"], document["prompt_tokens"], document["output_tokens"]) == (20, 160, 240)
    assert (document["resident_max"], document["preemptions"]) == (result.resident_max, result.preemptions)
    assert document["pool"] == {"blocks": 20, "peak_blocks": 20}
    assert (document["rejected_count"], document["rejected_kinds"]) == (5, {"pool": 5})
    assert document["rejected"][0]["reason"] == "needs 50 blocks, the pool has 20"
    assert len(document["requests"]) == 20
    assert document["requests"][0].keys() >= {"id", "arrival_s", "ttft_s", "tpot_s", "e2e_s", "queue_s", "preemptions"}
    assert document["timeline"]["points"][0]["start_s"] == 0.0


def traced(*, apart_s: float = 0.5) -> tuple[ServingResult, dict[str, Any]]:
    out = io.StringIO()
    trace = ServingTrace(out)
    requests = [request(index, 5, 5, at=index * apart_s) for index in range(5)]
    result = serve(requests, pool=PLENTY, calls={"on_finish": trace.finished, "on_steps": trace.steps})
    trace.close()
    return result, json.loads(out.getvalue())


def test_a_trace_has_all_steps_counters_and_requests() -> None:
    result, document = traced()
    events = document["traceEvents"]
    steps = [event for event in events if event["ph"] == "X"]
    assert sum(event["dur"] for event in steps) == pytest.approx(result.busy_s * 1e6)
    assert sum(event["args"]["steps"] for event in steps) == result.steps
    assert {event["name"].split()[0] for event in steps} == {"prefill", "decode"}
    counts = [event["args"]["sequences"] for event in events if event["ph"] == "C"]
    assert (max(counts), counts[-1]) == (result.resident_max, 0)
    assert document["otherData"] == {"requests_left_out": 0, "steps_left_out": 0}


def test_nobody_runs_while_the_engine_sleeps() -> None:
    _, document = traced(apart_s=20.0)
    counts = [(event["ts"], event["args"]["sequences"]) for event in document["traceEvents"] if event["ph"] == "C"]
    assert counts[:4] == [(0.0, 1), (10e6, 0), (20e6, 1), (30e6, 0)]


def test_spans_of_a_request_begin_and_end_in_pairs() -> None:
    _, document = traced()
    spans = [event for event in document["traceEvents"] if event["ph"] in "be"]
    begun = Counter((event["id"], event["name"]) for event in spans if event["ph"] == "b")
    assert begun == Counter((event["id"], event["name"]) for event in spans if event["ph"] == "e")
    assert {name for _, name in begun} == {*(f"request {index}" for index in range(5)), "queue", "prefill", "decode"}


def test_a_long_trace_says_what_it_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "SPAN_REQUESTS", 2)
    monkeypatch.setattr(traces, "SPAN_STEPS", 3)
    result, document = traced()
    steps = [event for event in document["traceEvents"] if event["ph"] == "X"]
    requests = {event["id"] for event in document["traceEvents"] if event["ph"] == "b"}
    assert (len(steps), len(requests)) == (3, 2)
    assert document["otherData"]["requests_left_out"] == 3
    assert document["otherData"]["steps_left_out"] > 0
    assert result.completed == 5
