"""The cache on the host: what VRAM would hold, read there for every row of queries, between a hop down and one up."""

import pytest

from twin.ask.case import Case
from twin.ask.question import Question
from twin.ask.resolve import resolve
from twin.layouts import load_layout
from twin.operations.ops import HOST_DEVICE, Engine, Step


def case_of(layout: str = "nkvo", **asked: object) -> Case:
    return resolve(Question(ctx_tokens=4096, model="llama-3.1-8b", engine="llama.cpp", layout=layout, **asked))  # type: ignore[arg-type]


@pytest.mark.parametrize("fmt", ["fp16", "q8_0", "q8_0/q4_0"])
def test_the_host_holds_what_vram_would(fmt: str) -> None:
    here, there = (load_layout(name).placement(case_of(name, kv_dtype=fmt)) for name in ("nkvo", "vram"))
    assert (here.host_bytes, here.vram_bytes) == (there.vram_bytes, 0)


@pytest.mark.parametrize(("tokens", "batch"), [(1, 1), (1, 3), (5, 1)])
def test_a_step_sends_queries_down_and_gets_outputs_back(tokens: int, batch: int) -> None:
    """32 heads of 128 in fp32; K and V of 8 heads in 16 bits, read by 4 rows of each token."""
    case = case_of(batch=batch)
    ops = case.layout.decode_ops(case, Step(kv_tokens=1000, q_tokens=tokens, batch=batch), 2, first=3)
    down, attend, up = ops
    assert [(op.engine, op.device) for op in ops] == [(Engine.D2H, 2), (Engine.HOST, HOST_DEVICE), (Engine.H2D, 2)]
    assert down.link_bytes == up.link_bytes == tokens * batch * 32 * 128 * 4
    assert attend.host_bytes == batch * (1000 + tokens) * 2 * 8 * 128 * 2 * 4 * tokens
    assert (attend.vram_bytes, attend.flops, attend.kernel) == (0, 0, "attend_decode/llama.cpp_cpu/fp16")
    assert [op.after for op in ops] == [(2,), (3,), (4,)]


def test_a_chunk_does_the_same_for_all_its_tokens() -> None:
    """Appending, then a pass over what each token sees."""
    case = case_of()
    (graph,) = case.layout.prefill_graphs(case, Step(kv_tokens=100, q_tokens=50), 0, times=7)
    assert [op.part for op in graph.ops] == ["hop", "append", "attention", "hop"]
    assert graph.ops[2].host_bytes == (50 * 100 + 50 * 51 / 2) * 32 * 256 * 2
    assert (graph.times, [op.after for op in graph.ops]) == (7, [(), (0,), (1,), (2,)])
    assert case.layout.working_bytes(case) == {}
