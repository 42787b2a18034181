"""A served workload says what served it and how fast, in a text that stands alone and in twin.simulation/1."""

import json
import math
from typing import Any

import pytest

from twin.answers.service import Service, serve
from twin.ask.question import Question
from twin.render.serving import service_json, service_text
from twin.serving.requests import Lengths, Workload

WHAT = "20 requests, all at once"


def served(*, output: int = 20, count: int = 20, intervals: bool = True, **asked: Any) -> Service:
    workload = Workload(count=count, prompt=Lengths(mean=200), output=Lengths(mean=output))
    question = Question(**{"ctx_tokens": 8192, "model": "qwen3.8-27b", "kv_dtype": "fp8"} | asked)
    return serve(question, workload.requests, intervals=intervals)


SERVICE = served()
EMPTY = served(count=3, pool_bytes=1)
ALL = pytest.mark.parametrize("service", [SERVICE, EMPTY, served(intervals=False)], ids=["served", "empty", "one run"])


def test_a_text_says_what_served_what() -> None:
    lines = service_text(SERVICE, WHAT).splitlines()
    assert lines[0] == "qwen3.8-27b on rtx3090, vllm"
    pool = SERVICE.kv_pool
    assert lines[1] == (
        f"fp8 cache on flashinfer; {pool.blocks:,} blocks of {pool.plan.block_tokens} tokens, "
        "at most 64 sequences, 2,048 tokens a step"
    )
    assert lines[2:4] == [WHAT, ""]


def test_a_text_names_the_drafter() -> None:
    assert ", mtp drafts 3; " in service_text(served(speculation="mtp:3", accepted=2.0), WHAT)


def test_a_throughput_has_its_interval_unless_one_run_was_asked_for() -> None:
    low, high = SERVICE.ends(lambda each: each.output_tokens_per_s)
    assert f"({low:.3g} to {high:.3g})" in service_text(SERVICE, WHAT)
    row = next(line for line in service_text(served(intervals=False), WHAT).splitlines() if "throughput" in line)
    assert " to " not in row


def test_a_pool_without_a_block_says_what_takes_the_memory() -> None:
    text = service_text(EMPTY, WHAT)
    line = next(line for line in text.splitlines() if line.startswith("no cache fits: "))
    assert "weights and buffers take " in line
    assert "a block takes " in line
    assert "3 larger than the whole pool" in text
    assert "no cache fits" not in service_text(SERVICE, WHAT)


def test_a_pool_that_the_device_does_not_hold_serves_nothing_and_names_both_sides() -> None:
    service = served(count=3, pool_bytes=100 * 10**9)
    line = next(line for line in service_text(service, WHAT).splitlines() if line.startswith("no cache fits: "))
    assert "of VRAM, the machine has 23.56 GiB" in line
    assert (service.result.completed, service_json(service, WHAT)["pool"]["blocks"]) == (0, 0)


@ALL
def test_a_document_survives_json(service: Service) -> None:
    document = service_json(service, WHAT)
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert next(iter(document)) == "schema"
    assert document["schema"] == "twin.simulation/1"


def test_a_document_holds_the_question_with_every_default() -> None:
    question = service_json(SERVICE, WHAT)["question"]
    assert question == {
        "model": "qwen3.8-27b",
        "hw": "rtx3090",
        "engine": "vllm",
        "layout": "vram",
        "kv_dtype": "fp8",
        "backend": "flashinfer",
        "workload": WHAT,
        "trace": None,
        "max_sequences": 64,
        "batched_tokens": 2048,
        "max_model_tokens": 8192,
        "prefix_caching": False,
        "speculative_tokens": 0,
        "tokens_per_step": 1.0,
    }


def test_a_pool_is_told_as_the_engine_prints_it_and_as_it_is_used() -> None:
    pool = service_json(SERVICE, WHAT)["pool"]
    assert pool["kv_pool_tokens"] == SERVICE.kv_pool.printed_tokens
    assert pool["blocks"] == SERVICE.kv_pool.blocks - 1
    assert 0 < pool["peak_blocks"] <= pool["blocks"]


def test_intervals_hold_their_figures_and_are_null_where_nobody_asked() -> None:
    document = service_json(SERVICE, WHAT)
    for name, ends in document["interval_90"].items():
        base, _, quantile = name.removesuffix("_s").rpartition("_p50") if "_p50" in name else (name, "", "")
        value = document[f"{base}_s"]["p50"] if "_p50" in name else document[name]
        assert ends["low"] <= value <= ends["high"], (name, quantile)
    assert service_json(served(intervals=False), WHAT)["interval_90"] is None
    assert service_json(EMPTY, WHAT)["interval_90"] is None


def test_the_time_between_tokens_of_single_tokens_is_null() -> None:
    document = service_json(served(output=1), WHAT)
    assert document["itl_s"]["p50"] is None
    assert document["interval_90"]["itl_p50_s"] == {"low": None, "high": None}
    assert math.isfinite(document["interval_90"]["ttft_p50_s"]["low"])


def test_requests_longer_than_the_model_takes_by_itself_are_noted() -> None:
    own, beyond = (served(count=2, ctx_tokens=ctx) for ctx in (262_144, 262_145))
    assert not own.notes
    assert "beyond the model's own 262,144" in service_text(beyond, WHAT)
    assert service_json(beyond, WHAT)["notes"] == list(beyond.notes)
    assert service_json(own, WHAT)["notes"] == []
