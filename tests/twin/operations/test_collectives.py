"""Sums and gathers of ranks that share layers: how many, of what size, and what they cost on a link."""

import pytest
from msgspec.structs import replace

from tests.worlds import machine, rate
from twin.ask.case import Case
from twin.ask.question import Question
from twin.ask.resolve import resolve
from twin.cost.roofline import Roofs
from twin.operations.lower import (
    decode_program,
    draft_prefill_program,
    draft_program,
    head_program,
    prefill_program,
)
from twin.operations.ops import Engine, Op, Program, Step

HIDDEN, VOCAB, LAYERS = 4096, 128_256, 32


def llama(tp: int) -> Case:
    return resolve(Question(ctx_tokens=1024, model="llama-3.1-8b", engine="vllm", hw="h200", tp=tp))


def over_links(program: Program) -> list[tuple[str, float, float, float]]:
    """Operation, calls, bytes a call, further hops of a call."""
    return [
        (op.part, op.calls * graph.times, op.link_bytes, op.hops)
        for graph in program
        for op in graph.ops
        if op.engine is Engine.PEER
    ]


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_a_step_sums_twice_a_layer_and_once_for_the_embedding_and_gathers_logits(tp: int) -> None:
    batch = 3
    message, ring = batch * HIDDEN * 2, (tp - 1) / tp
    once, twice = tp - 2, 2 * (tp - 2)
    found = over_links(decode_program(llama(tp), Step(kv_tokens=1024, q_tokens=1, batch=batch), 1))
    assert found == [
        ("all_reduce", 1, pytest.approx(2 * ring * message), twice),
        ("all_reduce", 2 * LAYERS, pytest.approx(2 * ring * message), twice),
        ("all_gather", 1, pytest.approx(ring * batch * VOCAB * 2), once),
    ]


def test_a_chunk_sums_all_its_tokens_and_one_rank_sums_nothing() -> None:
    chunk = Step(kv_tokens=0, q_tokens=512)
    sums = over_links(prefill_program(llama(2), chunk, 1))
    assert [size for _, _, size, _ in sums] == [512 * HIDDEN * 2] * 2
    assert over_links(prefill_program(llama(1), chunk, 1)) == []
    assert over_links(decode_program(llama(1), chunk, 1)) == []


def test_products_are_divided_and_the_whole_vocabulary_is_sampled_from() -> None:
    def products(tp: int) -> list[Op]:
        ops = [op for graph in decode_program(llama(tp), Step(kv_tokens=1024, q_tokens=1), 1) for op in graph.ops]
        return [op for op in ops if op.part == "weights"]

    for whole, rank in zip(products(1), products(4), strict=True):
        assert 4 * rank.vram_bytes == pytest.approx(whole.vram_bytes, rel=1e-5)
        assert 4 * rank.flops == pytest.approx(whole.flops, rel=1e-5)
    heads = [[op for op in head_program(llama(tp), 2, 1)[0].ops if op.part == "sampling"] for tp in (1, 4)]
    assert [[op.vram_bytes for op in ops] for ops in heads] == [[2 * VOCAB * 4]] * 2


def test_a_message_pays_its_latencies_and_then_the_link_between_devices() -> None:
    """Without a link of their own: 1 GB/s to the host, of which sums reach the share that is assumed."""
    alone = machine()
    op = Op("all_reduce", 0, engine=Engine.PEER, kernel="all_reduce/nccl/peer", link_bytes=1e6, calls=3, hops=2,
            or_plain=True)  # fmt: skip
    through = alone.gpu.between
    wanted = 3 * (1.5 * through.latency.value + 1e6 / through.rate.value)
    assert Roofs(alone).cost(op).seconds == pytest.approx(wanted)
    assert through.rate.value < alone.gpu.h2d.rate.value
    direct = replace(alone.gpu.h2d, rate=rate(5e8, "B/s"), latency=rate(1e-5, "s"))
    linked = replace(alone, gpu=replace(alone.gpu, peer=direct, peer_link="NVLink 4"))
    assert Roofs(linked).cost(op).seconds == pytest.approx(3 * (1.24e-5 + 2e-3))


def test_a_drafters_layers_are_summed_too_in_every_pass() -> None:
    case = resolve(
        Question(ctx_tokens=1024, model="qwen3.8-27b", engine="vllm", tp=2, speculation="mtp:3", accepted=3.0)
    )
    assert case.speculation is not None
    step, layers = Step(kv_tokens=1024, q_tokens=1, batch=2), case.speculation.drafter.layers
    message = 2 * case.model.hidden * 2
    drafted = over_links(draft_program(case, case.speculation, step, 0))
    assert drafted == [("all_reduce", 2 * layers * case.speculation.passes, message, 0)]
    chunk = Step(kv_tokens=0, q_tokens=64)
    assert over_links(draft_prefill_program(case, case.speculation, chunk, 0)) == [
        ("all_reduce", 2 * layers, 64 * case.model.hidden * 2, 0)
    ]
