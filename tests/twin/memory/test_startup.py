"""The start-up peak against what engines printed, row by row, and its form on paper."""

import math
from statistics import fmean
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from hwprofiles import load_profile
from hwprofiles.rates import Rate
from tests.twin.memory.pool_worlds import MODELS, RTX3090, asked, dense, pooled
from twin.ask.question import Question
from twin.ask.resolve import on_machine, settled
from twin.engines import load_engine
from twin.memory.block_pool import pool_stages
from twin.memory.startup import activations, captured_tokens, layer_elements, startup_parts
from twin.models.spec import FeedForward
from twin.units import GIB, MIB

POOL = load_engine("vllm").block_pool
assert POOL is not None
STARTUP = POOL.startup
CUBLAS = STARTUP.libraries["0.0"]
NONE: dict[str, Any] = {}


class Printed(NamedTuple):
    """A figure of a log, in GiB, and what was asked for."""

    gib: float
    parts: tuple[str, ...]
    model: str
    machine: str
    asked: dict[str, Any]
    tolerance: float = 0.005
    """Of the printed figure; a hundredth of a GiB is what a log rounds to."""


PEAK, WITH_GRAPHS = ("activations",), ("activations", "graphs")
SORTED, DECODING = {"engine": "vllm==0.11"}, {"speculation": "mtp:3", "accepted": 2.0, "max_sequences": 8}
LONE = DECODING | {"kv_dtype": "fp8", "backend": "triton", "graph_tokens": 32}
PAGE = "llm-d-planner docs/empirical-vllm-memory-results.md"
PRINTED = {
    f"8B, {PAGE}": Printed(4.76, PEAK, "llama-3.1-8b", "h100-sxm", SORTED),
    f"70B, {PAGE}": Printed(4.84, PEAK, "llama-3.1-70b", "h100-sxm", SORTED | {"tp": 2}),
    f"0.6B, {PAGE}": Printed(5.56, PEAK, "qwen3-0.6b", "h100-sxm", SORTED),
    f"32B, {PAGE}": Printed(5.64, PEAK, "qwen3-32b", "h100-sxm", SORTED),
    f"32B on two, {PAGE}": Printed(5.64, PEAK, "qwen3-32b", "h100-sxm", SORTED | {"tp": 2}),
    f"20B with experts, {PAGE}": Printed(7.38, PEAK, "gpt-oss-20b", "h100-sxm", SORTED),
    f"120B with experts, {PAGE}": Printed(7.38, PEAK, "gpt-oss-120b", "h100-sxm", SORTED),
    "8B on 24 GB, 0.10.2": Printed(1.40, PEAK, "qwen3-8b", "rtx4090", SORTED),
    "80B with experts on two H200, 0.11": Printed(5.58, PEAK, "qwen3-next-80b-a3b", "h200", SORTED | {"tp": 2}),
    "4B with a tower, vllm-project/vllm#21489": Printed(
        9.96, PEAK, "gemma-3-4b", "b200", SORTED | {"chunk_tokens": 16_384}
    ),
    "8B at 16,384 tokens": Printed(1.44, PEAK, "llama-3.1-8b", "h100-sxm", {"chunk_tokens": 16_384}, tolerance=0.03),
    "0.5B, 0.27": Printed(0.25, PEAK, "qwen2.5-0.5b", "rtx4090", {"engine": "vllm==0.27"}, tolerance=0.1),
    "27B of 256 sequences, its maker's receipts": Printed(2.40, WITH_GRAPHS, "qwen3.8-27b", "rtx4090", NONE),
    "27B warm, syv-ai/qwen38-27b-rtx3090#107": Printed(
        0.48, WITH_GRAPHS, "qwen3.8-27b", "rtx3090", LONE, tolerance=0.05
    ),
    "27B cold, syv-ai/qwen38-27b-rtx3090#107": Printed(
        1.37, WITH_GRAPHS, "qwen3.8-27b", "rtx4090", LONE | {"cold_start": True}, tolerance=0.1
    ),
    "8B cold on an H200, 0.26": Printed(
        1.01, PEAK, "llama-3.1-8b", "h200",
        {"engine": "vllm==0.26", "chunk_tokens": 2048, "max_sequences": 64, "cold_start": True}, tolerance=0.06,
    ),
    "27B with a tower on two, noonghunna/club-3090#1087": Printed(
        1.59, WITH_GRAPHS, "qwen3.5-27b", "rtx5090",
        {"engine": "vllm==0.27", "chunk_tokens": 8192, "max_sequences": 2, "graph_tokens": 32, "tp": 2}, tolerance=0.06,
    ),
}  # fmt: skip
"""Where nothing is asked, the engine's defaults on that card."""


def of(row: Printed) -> tuple[float, float]:
    path = MODELS / f"{row.model}.json"
    question = {"engine": "vllm", "ctx_tokens": 1000, "model": str(path) if path.exists() else row.model} | row.asked
    case, machine = settled(Question(**question), load_profile(row.machine))
    found = startup_parts(case, machine.gpu)
    size = sum(found[part].value for part in row.parts if part in found) / GIB
    return size, sum(found[part].deviation for part in row.parts if part in found) / GIB


@pytest.mark.parametrize("name", PRINTED)
def test_a_printed_peak_follows_from_the_shape(name: str) -> None:
    """Ten that sorted all logits come out to a hundredth of a GiB; none is further off than two deviations."""
    row = PRINTED[name]
    size, deviation = of(row)
    assert size == pytest.approx(row.gib, rel=row.tolerance, abs=0.005)
    assert abs(size - row.gib) < 2 * deviation + 0.005


def test_batched_tokens_add_what_the_widest_layer_holds() -> None:
    """2,048 to 8,192 tokens of a 27B add 0.63 GiB (vllm-project/vllm#52872); its shape says 0.66."""
    few, many = (
        activations(asked(chunk_tokens=tokens, model="qwen3.8-27b", max_sequences=1), RTX3090.gpu)
        for tokens in (2048, 8192)
    )
    assert many.value - few.value == pytest.approx(0.656 * GIB, rel=0.001)
    assert many.value - few.value == pytest.approx(0.63 * GIB, rel=0.05)


def test_the_peak_is_the_larger_of_a_pass_and_of_sampling() -> None:
    """With a hundred words 2 sequences sample less than 64 tokens pass, with a million more."""
    case = pooled(chunk_tokens=64, max_sequences=2, spec=replace(dense(), vocab=100))
    width = layer_elements(case.model)
    assert activations(case, RTX3090.gpu).value == pytest.approx(64 * 2 * width + CUBLAS)
    wide = replace(case.model, vocab=10**6)
    sampled = activations(replace(case, model=wide), RTX3090.gpu).value - CUBLAS
    copies = STARTUP.sampled_copies.value  # the toy model has states
    assert sampled == pytest.approx(copies * 2 * 10**6 * 4 + (64 + 2 * 2) * wide.hidden * 2)


@pytest.mark.parametrize(
    ("feed_forward", "elements"),
    [
        (FeedForward(intermediate=100), 3 * 100),
        (FeedForward(intermediate=100, gated=False), 2 * 100),
        (FeedForward(intermediate=10, experts=8, active=3), 3 * (64 + 64) + 64),
        (FeedForward(intermediate=100, experts=8, active=3), 3 * (200 + 100) + 64),
    ],
)
def test_gates_and_chosen_experts_count_side_by_side(feed_forward: FeedForward, elements: int) -> None:
    spec = dense()
    kinds = {name: replace(layer, feed_forward=feed_forward) for name, layer in spec.kinds.items()}
    spec = replace(spec, hidden=64, kinds=kinds)
    assert layer_elements(spec) == spec.residual_streams * 64 + elements


def test_ranks_share_feed_forwards_and_not_logits() -> None:
    alone, shared = (asked(model="llama-3.1-8b", tp=ranks) for ranks in (1, 2))
    assert layer_elements(alone.model) - layer_elements(shared.model) == 3 * 14_336 // 2
    sampling = {"model": "llama-3.1-8b", "chunk_tokens": 1024, "max_sequences": 1024}
    assert len({activations(asked(tp=ranks, **sampling), RTX3090.gpu).value for ranks in (1, 2, 8)}) == 1
    context = [startup_parts(case, RTX3090.gpu)["context"] for case in (alone, shared)]
    assert context == [STARTUP.context, STARTUP.rank_context]


def test_only_the_last_stage_samples() -> None:
    first, last = pool_stages(asked(model="llama-3.1-8b", max_sequences=1024), 2)
    passed = 2048 * 2 * layer_elements(first.model) * STARTUP.forward.value + CUBLAS
    assert activations(first, RTX3090.gpu).value == passed < activations(last, RTX3090.gpu).value


def test_a_first_start_compiles_and_an_eager_one_neither_compiles_nor_captures() -> None:
    warm, cold, eager = (
        startup_parts(asked(max_sequences=2, **more), RTX3090.gpu)
        for more in (NONE, {"cold_start": True}, {"cold_start": True, "eager": True})
    )
    assert cold["activations"].value - warm["activations"].value == pytest.approx(STARTUP.compiler.value)
    assert eager["activations"] == warm["activations"]
    assert "graphs" in cold
    assert "graphs" not in eager


def test_graphs_are_of_1_2_and_4_tokens_then_every_8_and_every_16() -> None:
    """51 in pieces up to 512 tokens and 35 whole ones of a token a sequence: 1.55 GiB of 64 layers."""
    assert captured_tokens(3) == [1, 2]
    assert captured_tokens(32) == [1, 2, 4, 8, 16, 24, 32]
    assert len(captured_tokens(512)) == 51
    assert sum(size <= 256 for size in captured_tokens(512)) == 35
    graphs = startup_parts(asked(), RTX3090.gpu)["graphs"].value
    assert graphs == pytest.approx(65 * (51 * 0.38 + 35 * 0.143) * MIB)
    pieces = startup_parts(asked(kv_dtype="fp8", graph_tokens=32, **DECODING), RTX3090.gpu)["graphs"].value
    assert pieces == pytest.approx(65 * 7 * 0.38 * MIB)  # FlashInfer's verify steps are not captured whole


def test_models_without_states_and_experts_reserve_no_graphs_since_0_25() -> None:
    for version, reserved in (("0.19", False), ("0.24", True), ("0.25", False)):
        about = asked(model="llama-3.1-8b", engine=f"vllm=={version}")
        assert ("graphs" in startup_parts(about, RTX3090.gpu)) is reserved
    assert "graphs" in startup_parts(asked(engine="vllm==0.25"), RTX3090.gpu)


@pytest.mark.parametrize(
    ("machine", "version", "tokens", "sequences"),
    [
        ("rtx3090", "0.28", 2048, 256), ("a100-sxm-80gb", "0.28", 2048, 256), ("h100-sxm", "0.28", 8192, 1024),
        ("b200", "0.28", 16_384, 1024), ("b200", "0.27", 8192, 1024),
    ],
)  # fmt: skip
def test_a_device_decides_how_much_a_step_takes(machine: str, version: str, tokens: int, sequences: int) -> None:
    """`engine/arg_utils.py`: from 70 GiB on, but for an A100, and from 160 GiB on since 0.28; what is asked wins."""
    profile = load_profile(machine)
    case = on_machine(asked(model="llama-3.1-8b", engine=f"vllm=={version}"), profile)
    pool = case.rules.block_pool
    assert pool is not None
    assert (case.chunk_tokens, pool.batched_tokens, pool.max_sequences) == (tokens, tokens, sequences)
    assert on_machine(case, profile) == case
    told = on_machine(asked(model="llama-3.1-8b", chunk_tokens=1024), profile)
    assert told.chunk_tokens == 1024


@pytest.mark.parametrize(
    ("rate", "rows"),
    [
        (STARTUP.compiler, [0.87 * GIB, 0.89 * GIB, 0.80 * GIB]),
        (STARTUP.graph_layer, [size * GIB / graphs / 65 for size, graphs in ((0.13, 5), (0.17, 7), (0.36, 16))]),
        (STARTUP.context, [0.20 * GIB, 0.22 * GIB, 0.22 * GIB, 0.26 * GIB]),
    ],
)
def test_a_fitted_size_is_the_mean_of_its_rows_and_its_spread_what_leaving_one_out_shows(
    rate: Rate, rows: list[float]
) -> None:
    """Each row against the mean of the others: no spread is below the root mean square, none above twice that."""
    assert rate.value == pytest.approx(fmean(rows), rel=0.03)
    off = [fmean([*rows[:at], *rows[at + 1 :]]) / row - 1 for at, row in enumerate(rows)]
    error = math.sqrt(fmean(each**2 for each in off))
    assert error <= rate.spread <= 2 * error
