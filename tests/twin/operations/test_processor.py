"""What the host's processor does in a device's place: bytes by hand, chains of ops, and speeds as measured."""

from typing import Any

import pytest

from hwprofiles import load_profile
from twin.ask.case import Case
from twin.ask.question import Question
from twin.ask.resolve import resolve
from twin.cost.breakdown import Breakdown
from twin.cost.roofline import Roofs
from twin.operations.lower import decode_program, prefill_program
from twin.operations.ops import HOST_DEVICE, Engine, Op, Program, Step
from twin.prediction import predict

LAYERS, HIDDEN, KV_TOKEN_BYTES = 32, 4096, 8 * 128 * 2 * 2
STEP = Step(kv_tokens=4095, q_tokens=1)


def case_of(**asked: Any) -> Case:
    named = {"ctx_tokens": 4096, "model": "llama-3.1-8b", "engine": "llama.cpp", "weights": "q4_0"}
    return resolve(Question(**(named | asked)))


def host_ops(program: Program, part: str) -> list[tuple[Op, int]]:
    return [(op, graph.times) for graph in program for op in graph.ops if op.engine is Engine.HOST and op.part == part]


def total(program: Program, part: str) -> float:
    return sum(op.host_bytes * times for op, times in host_ops(program, part))


@pytest.mark.parametrize(("gpu_layers", "on_host"), [(33, 0), (32, 1), (20, 13), (1, 32), (0, 32)])
def test_layers_of_the_processor_read_their_weights_and_caches_there(gpu_layers: int, on_host: int) -> None:
    """Each row of queries, 4 to a KV head, reads the cache once more; only without layers on devices the head."""
    case, whole = case_of(gpu_layers=gpu_layers), case_of()
    program = decode_program(case, STEP, 1)
    layer = sum(op.vram_bytes for op in decode_program(whole, STEP, 1)[0].ops if op.part == "weights")
    head = decode_program(whole, STEP, 1)[-1].ops[0].vram_bytes
    assert total(program, "weights") == pytest.approx(on_host * layer + (head if gpu_layers == 0 else 0))
    assert total(program, "attention") == pytest.approx(on_host * 4 * 4096 * KV_TOKEN_BYTES)
    assert all(op.device == HOST_DEVICE for op, _ in host_ops(program, "weights"))


@pytest.mark.parametrize("grouped", [True, False])
def test_what_the_processors_layers_leave_goes_up_once(grouped: bool) -> None:
    for gpu_layers, hops in ((33, 0), (20, 1), (1, 0)):
        program = decode_program(case_of(gpu_layers=gpu_layers), STEP, 1, grouped=grouped)
        ups = [graph for graph in program if graph.ops[0].part == "hop"]
        assert [(len(graph.ops), graph.ops[0].link_bytes) for graph in ups] == [(1, HIDDEN * 4)] * hops
    placed = [graph.ops[0].device for graph in decode_program(case_of(gpu_layers=20), STEP, 1, grouped=False)]
    assert placed.count(HOST_DEVICE) == 13


@pytest.mark.parametrize("part", ["weights", "attention"])
def test_many_tokens_are_the_devices_to_which_weights_and_caches_come_up(part: str) -> None:
    for tokens, ups in ((31, 0), (32, 13)):
        program = prefill_program(case_of(gpu_layers=20), Step(kv_tokens=0, q_tokens=tokens), 1)
        coming = [(op, graph) for graph in program for op in graph.ops if op.part == part and op.link_bytes]
        assert sum(graph.times for _, graph in coming) == ups
        for op, graph in coming:
            work = graph.ops[graph.ops.index(op) + 1]
            assert (work.engine, work.vram_bytes, work.device) == (Engine.SM, op.link_bytes, 0)


def test_experts_of_the_processor_are_visited_between_ops_of_the_device() -> None:
    case = case_of(model="qwen3-30b-a3b", cpu_experts=5)
    graphs = [graph for graph in decode_program(case, STEP, 1) if any(op.engine is Engine.HOST for op in graph.ops)]
    assert [graph.times for graph in graphs] == [5]
    (graph,) = graphs
    at = next(at for at, op in enumerate(graph.ops) if op.engine is Engine.HOST)
    assert [op.engine for op in graph.ops[at - 1 : at + 2]] == [Engine.D2H, Engine.HOST, Engine.H2D]
    assert graph.ops[at].kernel == "experts/llama.cpp_cpu/quantised"
    assert graph.ops[at].host_bytes == pytest.approx(8 * 3 * 2048 * 768 * 4.5 / 8)
    assert [op.after for op in graph.ops] == [(), *((before,) for before in range(len(graph.ops) - 1))]


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize(
    "asked",
    [{"gpu_layers": 20}, {"gpu_layers": 0}, {"layout": "nkvo"}, {"model": "qwen3-30b-a3b", "cpu_experts": 7}],
    ids=str,
)
def test_grouped_layers_take_as_long_as_layers_one_by_one(asked: dict[str, Any], devices: int) -> None:
    case, roofs = case_of(**asked), Roofs(load_profile("rtx3090").repeated(devices), strict=False)
    for program_of, step in ((decode_program, STEP), (prefill_program, Step(kv_tokens=512, q_tokens=512))):
        grouped, alone = (
            Breakdown().run(program_of(case, step, devices, grouped=each), roofs) for each in (True, False)
        )
        assert grouped.seconds == pytest.approx(alone.seconds, rel=1e-9)
        assert grouped.link_bytes == pytest.approx(alone.link_bytes)


def test_a_prompt_with_its_cache_on_the_host_reads_it_once_for_every_token_and_head() -> None:
    """512 x 513 / 2 pairs of 32 heads of 2 x 128 in 16 bits, 32 layers: 68.8 GB, of which a host reads 34 a second."""
    program = prefill_program(case_of(ctx_tokens=512, layout="nkvo"), Step(kv_tokens=0, q_tokens=512), 1)
    assert total(program, "attention") == pytest.approx(512 * 513 / 2 * 32 * 256 * 2 * 32)


@pytest.mark.parametrize(
    ("asked", "measured"),
    [
        # llama-cpp-python 0.3.36 on an H200 with 16 cores, all experts on the processor: another run, at 512 tokens, of
        # what set the experts' share at 16
        ({"model": "qwen3-30b-a3b", "weights": "q4_k_m", "hw": "h200", "ctx_tokens": 512, "cpu_experts": 48}, 46.0),
        # the same machine: under 2 tokens a second, at 16 times the context that set the share of attention
        ({"model": "llama-3.1-8b", "weights": "q8_0", "hw": "h200", "ctx_tokens": 32_768, "layout": "nkvo"}, 2.0),
    ],
)
def test_speeds_of_the_processor_are_as_measured_within_the_interval(asked: dict[str, Any], measured: float) -> None:
    """On the one machine whose processor was measured: of another one's docs/unexplained.md tells."""
    decode = predict(Question(engine="llama.cpp", **asked)).decode
    assert decode is not None
    assert decode.tokens_per_s.low <= measured <= decode.tokens_per_s.high
