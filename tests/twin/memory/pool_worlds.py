"""Worlds of an engine with a block pool: four layers and drafters of a few bytes to solve on paper, and a 3090."""

from pathlib import Path
from typing import Any

from msgspec.structs import replace

from hwprofiles import HardwareProfile, load_profile
from hwprofiles.profile import KERNEL_AXES, Kernel, Roof
from tests.worlds import FLOP_PER_S, PEAK, at_its_roof, kernel, machine, model, rate
from twin.ask.case import Case
from twin.ask.question import Question
from twin.ask.resolve import on_machine, resolve
from twin.engines import load_engine
from twin.memory.block_pool import KVPool
from twin.memory.plan import MemoryPlan, plan_memory
from twin.models import ModelSpec
from twin.models.spec import Drafter, Stored, Weights
from twin.models.speculation import Speculation

SEQUENTIAL = Drafter(
    name="toy-mtp", kind="sequential", summary="one layer like the model's, a token a pass", layers=1, query_heads=4,
    kv_heads=2, head_dim=8, window=0, parameters=100, weight_bytes=50, head_bytes=24, own_head=True, max_tokens=4,
    default_tokens=2,
)  # fmt: skip
BLOCK = Drafter(
    name="toy-block", kind="block", summary="two layers with a window of 16 tokens, four tokens at once", layers=2,
    query_heads=2, kv_heads=1, head_dim=16, window=16, parameters=1000, weight_bytes=500, head_bytes=32,
    own_head=False, max_tokens=8, default_tokens=3, block_tokens=4, block_accepts=2.0, lookup_accepts=6.0,
)  # fmt: skip

ENDS = {"embedding": Stored(format="bf16", bits=8), "head": Stored(format="w4a16", bits=8)}
W4A16 = Weights(format="w4a16", bits=4, parts=ENDS)

FORMATS = ("bf16", "fp8", "int8_per_token_head")
HOST_S = 1e-8
BACKENDS = ("flash_attention", "flashinfer", "triton", "split_kv", "kvarn")


def dense(*, weights: Weights = W4A16, **shape: Any) -> ModelSpec:
    """The toy model without selection: two attention layers among four, in 4 bits with a head in 8."""
    return replace(model(sparse=False, **shape), weights=weights)


def drafted(drafter: Drafter = SEQUENTIAL, tokens: int = 2, accepted: float = 1.5) -> Speculation:
    return Speculation(drafter=drafter, tokens=tokens, accepted=accepted, source="given")


def pooled(
    ctx_tokens: int = 64,
    *,
    spec: ModelSpec | None = None,
    speculation: Speculation | None = None,
    rules: dict[str, Any] | None = None,
    **asked: Any,
) -> Case:
    """A question about the toy model under vLLM's rules."""
    whole = resolve(Question(ctx_tokens=ctx_tokens, model="qwen3.8-27b", **asked))
    small = replace(load_engine("vllm"), **(rules or {}))
    spec = spec or dense()
    return replace(whole, model=spec, mixer=spec.attention, rules=small, speculation=speculation)


def pool_machine(*, kernels: dict[str, Kernel] | None = None, **parts: Any) -> HardwareProfile:
    """The toy machine with every kernel of vLLM's at its roof, and steps whose host takes `HOST_S`."""
    attention = ("attend_decode", "attend_dense", "append")
    keys = [f"{operation}/{backend}/{fmt}" for operation in attention for backend in BACKENDS for fmt in FORMATS]
    keys += ["linear/marlin/w4a16", "linear/library/bf16", "elementwise/library/bf16", "sample/library/fp32"]
    keys += ["recurrent/vllm/fp16", "recurrent/vllm/fp32"]
    assert all(key.split("/", maxsplit=1)[0] in KERNEL_AXES for key in keys)
    known = {key: at_its_roof(key) for key in keys}
    known |= {f"{what}/vllm/step": kernel(latency_s=1e-6) for what in ("speculate", "piecewise")}
    known["step/vllm/decode"] = kernel(latency_s=HOST_S)
    whole = machine(kernels=known | (kernels or {}), **parts)
    tensor = {
        dtype: Roof(rate=rate(share * FLOP_PER_S, "FLOP/s"), datasheet=rate(PEAK * share * FLOP_PER_S, "FLOP/s"))
        for dtype, share in (("fp16", 1), ("bf16", 1), ("int8", 2))
    }
    return replace(whole, gpu=replace(whole.gpu, tensor=tensor))


RTX3090 = load_profile("rtx3090")
FAST, BATCH, LLAMA = "qwen3.8-27b-fast", "qwen3.8-27b-int8-mlp", "llama-3.1-8b"
"""The published lane: one 3090, its single-user and its batch checkpoint; and a model without recurrence."""


def asked(ctx_tokens: int = 1000, **question: Any) -> Case:
    return on_machine(resolve(Question(ctx_tokens=ctx_tokens, **({"model": BATCH} | question))), RTX3090)


def planned(ctx_tokens: int = 1000, **question: Any) -> MemoryPlan:
    return plan_memory(asked(ctx_tokens, **question), RTX3090)


def pool_of(plan: MemoryPlan) -> KVPool:
    assert plan.kv_pool is not None
    return plan.kv_pool


def pool(ctx_tokens: int = 1000, **question: Any) -> KVPool:
    return pool_of(planned(ctx_tokens, **question))


MODELS = Path(__file__).parents[2] / "data" / "models"


def configured(name: str, *, ctx_tokens: int = 1000, **question: Any) -> Case:
    """A question under vLLM about a published configuration."""
    return asked(ctx_tokens, **({"engine": "vllm"} | question | {"model": str(MODELS / f"{name}.json")}))
