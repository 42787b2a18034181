"""Planes that come over the link a layer ahead, on the toy machine: 1 GB/s either way."""

from typing import Any

import pytest
from msgspec.structs import replace

from hwprofiles.profile import HardwareProfile
from tests.worlds import BYTES_PER_S, LATENCY_S, at_its_roof, link, machine, model
from twin.ask.case import Case
from twin.ask.question import Question
from twin.ask.resolve import resolve
from twin.cost.breakdown import Breakdown
from twin.cost.roofline import Roofs
from twin.engines import load_engine
from twin.errors import Impossible
from twin.memory.plan import plan_memory
from twin.models import ModelSpec
from twin.models.mixers import Attention
from twin.operations.lower import decode_program, prefill_program
from twin.operations.ops import Step

PLANES = 2 * 2 * 8 * 2  # bytes of K and V of one token in a layer of the toy model
KERNELS = ("linear/library/bf16", "elementwise/library/bf16", "sample/library/fp32")
KERNELS += ("attend_decode/sdpa/bf16", "attend_dense/sdpa/bf16")


def toy(layout: str = "stream", ctx_tokens: int = 1000, *, spec: ModelSpec | None = None, **asked: Any) -> Case:
    whole = resolve(Question(ctx_tokens=ctx_tokens, model="qwen3-8b", engine="transformers", layout=layout, **asked))
    spec = spec or model(sparse=False, every=1)
    return replace(whole, model=spec, mixer=spec.attention, rules=replace(whole.rules, host_step=False))


def toy_machine(**links: Any) -> HardwareProfile:
    whole = machine(kernels={key: at_its_roof(key) for key in KERNELS}, vram_bytes=2**33, **links)
    tensor = whole.gpu.tensor | {"bf16": whole.gpu.tensor["fp16"]}
    return replace(whole, gpu=replace(whole.gpu, tensor=tensor))


def seconds(case: Case, step: Step, **links: Any) -> float:
    build = prefill_program if step.q_tokens > 1 else decode_program
    return Breakdown().run(build(case, step, 1), Roofs(toy_machine(**links))).seconds


STEP = Step(kv_tokens=999, q_tokens=1)
FREE = {"h2d": link(bytes_per_s=4e11, latency_s=1e-8), "d2h": link(bytes_per_s=4e11, latency_s=1e-8)}


def test_a_layer_lasts_as_long_as_the_longer_of_its_planes_way_and_its_kernels() -> None:
    """Where copies take no time the step is that of planes that grow; where they are slow they are all that counts."""
    grown = seconds(toy("vram"), STEP)
    assert seconds(toy(), STEP, **FREE) == pytest.approx(grown, rel=1e-3)
    slow = {"h2d": link(bytes_per_s=BYTES_PER_S / 10), "d2h": FREE["d2h"]}
    copy_s = LATENCY_S + 999 * PLANES / (BYTES_PER_S / 10)
    head_s = grown - seconds_of_layers(toy("vram"), STEP)
    assert seconds(toy(), STEP, **slow) == pytest.approx(4 * copy_s + head_s, rel=1e-3)


def seconds_of_layers(case: Case, step: Step) -> float:
    """Without the head, which comes after all layers."""
    return Breakdown().run(decode_program(case, step, 1)[:-1], Roofs(toy_machine())).seconds


def test_planes_go_back_whole_after_the_kernels_that_read_them() -> None:
    slow_back = {"h2d": FREE["h2d"], "d2h": link(bytes_per_s=BYTES_PER_S)}
    back_s = LATENCY_S + 1000 * PLANES / BYTES_PER_S
    grown = seconds(toy("vram"), STEP)
    assert seconds(toy(), STEP, **slow_back) == pytest.approx(grown + 4 * back_s, rel=1e-3)


def test_a_whole_prompt_brings_nothing_and_sends_its_planes() -> None:
    prompt = Step(kv_tokens=0, q_tokens=500)
    parts = {op.part for graph in prefill_program(toy(), prompt, 1) for op in graph.ops}
    assert "kv_write" in parts
    assert "kv_copy" not in parts


def test_windows_stay_where_they_are_read() -> None:
    spec = model(sparse=False, every=1)
    sliding = Attention(query_heads=4, kv_heads=2, head_dim=8, window=16)
    spec = replace(spec, kinds={"attention": replace(spec.kinds["attention"], mixers=(sliding,))})
    parts = {op.part for graph in decode_program(toy(spec=spec), STEP, 1) for op in graph.ops}
    assert parts.isdisjoint({"kv_write", "kv_copy"})
    device, host = plan_memory(toy(spec=spec), toy_machine()).memories
    assert device.fixed["windows"] == 4 * 16 * PLANES
    assert not host.page_bytes["kv cache"]


def test_the_device_holds_the_layer_that_is_read_and_the_next_and_the_host_all() -> None:
    device, host = plan_memory(toy(batch=3), toy_machine()).memories
    assert device.fixed["planes in use"] == 2 * 1000 * PLANES * 3
    assert device.page_bytes["kv cache"] == 0
    assert host.page_bytes["kv cache"] == 4 * PLANES * 3
    static = plan_memory(toy("static", max_model_tokens=None), toy_machine()).memories[0]
    assert static.page_bytes["kv cache"] == 4 * PLANES


def test_an_engine_without_such_a_cache_and_compressed_vectors_are_refused() -> None:
    assert "stream" in load_engine("transformers").layouts
    with pytest.raises(Impossible, match="vllm has no layout 'stream'"):
        resolve(Question(ctx_tokens=1, model="qwen3-8b", engine="vllm", layout="stream"))
    with pytest.raises(Impossible, match="caches compressed vectors: stream is modelled for"):
        resolve(Question(ctx_tokens=1, model="deepseek-v3", engine="transformers", layout="stream"))
