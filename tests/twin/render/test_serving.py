"""What a reader, a script and a trace viewer get to see of a served workload."""

import io
import json
import math
from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace

from tests.twin.serving import worlds
from tests.twin.serving.worlds import PLENTY, PagedPool, request
from twin.answers.service import Service, serve
from twin.ask.question import Question
from twin.cli.delivery import dump
from twin.render import serving
from twin.render import trace as traces
from twin.render.serving import service_json, service_text, serving_json, serving_text
from twin.render.trace import ServingTrace
from twin.serving.metrics import ServingResult
from twin.serving.requests import Lengths, Workload

WHAT = "20 requests, all at once"


def served(*, output: int = 20, count: int = 20, intervals: bool = True, **asked: Any) -> Service:
    workload = Workload(count=count, prompt=Lengths(mean=200), output=Lengths(mean=output))
    question = Question(**{"ctx_tokens": 8192, "model": "qwen3.8-27b", "kv_dtype": "fp8"} | asked)
    return serve(question, workload.requests, intervals=intervals)


SERVICE = served()
EMPTY = served(count=3, pool_bytes=1)
ONE_RUN = served(intervals=False)


def test_a_text_says_what_wholewhat_and_its_interval_unless_one_run_was_asked_for() -> None:
    text, pool = service_text(SERVICE, WHAT), SERVICE.kv_pool
    first, second, *rest = text.splitlines()
    assert first == "qwen3.8-27b on rtx3090, vllm 0.28"
    assert second == (
        f"fp8 cache on flashinfer; {pool.blocks:,} blocks of {pool.plan.block_tokens} tokens, "
        "at most 256 sequences, 2,048 tokens a step"
    )
    assert rest[:2] == [WHAT, ""]
    low, high = SERVICE.ends(lambda each: each.output_tokens_per_s)
    assert f"({low:.3g} to {high:.3g})" in text
    row = next(line for line in service_text(ONE_RUN, WHAT).splitlines() if "throughput" in line)
    assert " to " not in row


def test_a_pool_without_a_block_says_what_takes_the_memory_or_what_is_not_there() -> None:
    told = {
        "weights and buffers take ": EMPTY,
        "a block takes ": EMPTY,
        "of VRAM, the machine has 23.56 GiB": served(count=3, pool_bytes=100 * 10**9),
    }
    for says, service in told.items():
        text = service_text(service, WHAT)
        assert says in next(line for line in text.splitlines() if line.startswith("no cache fits: "))
        assert "3 larger than the whole pool" in text
        assert (service.result.completed, service_json(service, WHAT)["pool"]["blocks"]) == (0, 0)
    assert "no cache fits" not in service_text(SERVICE, WHAT)


def test_intervals_hold_their_figures_and_are_null_where_nobody_asked_or_nothing_is_between() -> None:
    whole, empty, one_run, single = (
        service_json(service, WHAT) for service in (SERVICE, EMPTY, ONE_RUN, served(output=1))
    )
    for document in (whole, empty, one_run):
        assert json.loads(json.dumps(document, allow_nan=False)) == document
        assert next(iter(document.items())) == ("schema", "twin.simulation/1")
    for name, ends in whole["interval_90"].items():
        value = whole[name.replace("_p50", "")]["p50"] if "_p50" in name else whole[name]
        assert ends["low"] <= value <= ends["high"], name
    assert one_run["interval_90"] is empty["interval_90"] is None
    assert single["itl_s"]["p50"] is None
    assert single["interval_90"]["itl_p50_s"] == {"low": None, "high": None}
    assert math.isfinite(single["interval_90"]["ttft_p50_s"]["low"])


def test_requests_longer_than_the_model_takes_by_itself_are_noted() -> None:
    own, beyond = (served(count=2, ctx_tokens=ctx) for ctx in (262_144, 262_145))
    assert not own.notes
    assert "beyond the model's own 262,144" in service_text(beyond, WHAT)
    assert service_json(beyond, WHAT)["notes"] == list(beyond.notes)
    assert service_json(own, WHAT)["notes"] == []


def busy() -> ServingResult:
    requests = [request(index, 8, 12, at=index / 2, prefix=4) for index in range(20)]
    misfits = [request(20 + index, 200, 1, at=10.0) for index in range(5)]
    return worlds.serve([*requests, *misfits], pool=PagedPool(blocks=20, block_tokens=4), max_model_tokens=300)


def test_the_headline_says_how_much_in_what_time() -> None:
    text = serving_text(worlds.serve([request(0, 5, 4), request(1, 5, 4, at=20.0)]))
    assert text.splitlines()[0] == "2 requests in 29.00 s: 10 prompt tokens, 8 output tokens"
    assert "  throughput   0.276 tok/s out, 0.069 req/s\n" in text
    assert "  first token  p50 6.00 s, p90 6.00 s, p99 6.00 s; mean 6.00 s, max 6.00 s\n" in text
    assert "  running      1 at most, 0.621 on average\n" in text
    assert "  preemptions  none\n" in text
    assert "rejected" not in text
    assert "prefix cache" not in text
    assert serving_text(worlds.serve([request(0, 1, 1)])).startswith("1 request in 2.00 s: ")


def test_preemptions_prefixes_and_rejections_are_told() -> None:
    result = busy()
    text = serving_text(result)
    assert f"  preemptions  {result.preemptions:,}, {result.recomputed_tokens:,} tokens computed again\n" in text
    assert f"  prefix cache {result.cached_tokens:,} prompt tokens skipped (" in text
    assert "  rejected     5 larger than the whole pool\n" in text
    assert "request 20: needs 50 blocks, the pool has 20\n" in text
    assert "and 2 more\n" in text
    of_line = serving_text(worlds.serve([replace(request(0, 9, 9), line=1234)], max_model_tokens=10))
    assert "  rejected     1 longer than the model takes\n" in of_line
    assert "request 0 (line 1,234): 18 tokens, the model takes 10\n" in of_line


def test_the_chart_is_as_high_as_the_residents_and_as_wide_as_a_terminal() -> None:
    lines = serving_text(busy()).splitlines()
    chart = lines[lines.index("  running sequences over time") + 1 :]
    assert all(len(line) <= 80 for line in chart)
    assert len(chart) == serving.CHART_ROWS + 2
    assert "#" in chart[0]
    assert chart[-2].strip().startswith("+---")
    assert chart[-1].strip().startswith("0")


@pytest.mark.parametrize("requests", [[], [request(0, 99, 1)]])
def test_nothing_wholeis_still_a_text_and_a_document(requests: list[Any]) -> None:
    result = worlds.serve(requests, pool=PagedPool(blocks=2, block_tokens=4))
    assert "  first token  -\n" in serving_text(result)
    document = json.loads(dump(serving_json(result)))
    assert document["ttft_s"] == dict.fromkeys(("p50", "p90", "p99", "mean", "min", "max"))
    assert document["timeline"]["points"] == []


def traced(*, apart_s: float = 0.5) -> dict[str, Any]:
    trace = ServingTrace(out := io.StringIO())
    requests = [request(index, 5, 5, at=index * apart_s) for index in range(5)]
    worlds.serve(requests, pool=PLENTY, calls={"on_finish": trace.finished, "on_steps": trace.steps})
    trace.close()
    document: dict[str, Any] = json.loads(out.getvalue())
    return document


def test_spans_come_in_pairs_nobody_runs_in_between_and_a_long_trace_says_what_it_leaves_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spans = [event for event in traced()["traceEvents"] if event["ph"] in "be"]
    begun = Counter((event["id"], event["name"]) for event in spans if event["ph"] == "b")
    assert begun == Counter((event["id"], event["name"]) for event in spans if event["ph"] == "e")
    assert {name for _, name in begun} == {*(f"request {index}" for index in range(5)), "queue", "prefill", "decode"}
    apart = [event for event in traced(apart_s=20.0)["traceEvents"] if event["ph"] == "C"]
    counts = [(event["ts"], event["args"]["sequences"]) for event in apart]
    assert counts[:4] == [(0.0, 1), (10e6, 0), (20e6, 1), (30e6, 0)]
    monkeypatch.setattr(traces, "SPAN_REQUESTS", 2)
    monkeypatch.setattr(traces, "SPAN_STEPS", 3)
    document = traced()
    assert sum(event["ph"] == "X" for event in document["traceEvents"]) == 3
    assert len({event["id"] for event in document["traceEvents"] if event["ph"] == "b"}) == 2
    assert document["otherData"]["requests_left_out"] == 3
    assert document["otherData"]["steps_left_out"] > 0
