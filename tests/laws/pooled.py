"""Questions about dense models on an engine with a pool of blocks."""

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st
from msgspec.structs import replace

from hwprofiles import HardwareProfile, load_profile
from tests.laws.drawn import flattened, log_uniform, machines, questions, with_memory
from tests.twin.memory.pool_worlds import BATCH, FAST, LLAMA
from twin.ask.question import Question
from twin.engines import load_engine
from twin.units import TIB

RTX3090, H200 = (with_memory(load_profile(name), 4 * TIB) for name in ("rtx3090", "h200"))
"""Machines on which nearly everything fits."""
FLAT = flattened(RTX3090)

HYBRIDS = ("qwen3.8-27b", "qwen3.8-27b-fast", "qwen3.8-27b-int8-mlp")
DENSE = "llama-3.1-8b"
FORMATS = ("bf16", "fp8", "int8_per_token_head", "int4_per_token_head", "kvarn_k4v2_g128")
"""What the 3090 has rates for in decode, verification and prefill."""
DRAFTERS = ("mtp:1", "mtp:3", "mtp:7", "dflash2:3", "dflash2:7", "dflash2:15")
POOL_FORMATS = tuple(name for name in load_engine("vllm").formats if name != "fp8_per_token_head")
LONGEST = 1 << 18


@st.composite
def hybrid_questions(
    draw: st.DrawFn, /, *, drafters: tuple[str | None, ...] = (None, *DRAFTERS), **fixed: Any
) -> Question:
    """Any question of the 27B that the 3090 has rates for; `fixed` fields are not drawn."""
    speculation = draw(st.sampled_from(drafters))
    most = int(speculation.partition(":")[2]) if speculation else 0
    asked: dict[str, Any] = {
        "model": draw(st.sampled_from(HYBRIDS)),
        "ctx_tokens": int(draw(log_uniform(1, LONGEST))),
        "kv_dtype": draw(st.sampled_from(FORMATS)),
        "batch": draw(st.sampled_from((1, 1, 2, 7, 64, 500))),
        "prefix_caching": draw(st.booleans()),
        "state_dtype": draw(st.sampled_from((None, "fp32"))),
        "speculation": speculation,
        "accepted": 1 + most * draw(st.floats(0, 1)) if speculation else None,
    }
    question = Question(**(asked | fixed))
    if question.prefix_caching and draw(st.booleans()):
        question = replace(question, cached_tokens=draw(st.integers(0, question.ctx_tokens)))
    return question


@st.composite
def dense_questions(draw: st.DrawFn, /, **fixed: Any) -> Question:
    """Any question of Llama that the H200 has rates for."""
    asked: dict[str, Any] = {
        "model": DENSE,
        "ctx_tokens": int(draw(log_uniform(1, LONGEST))),
        "batch": draw(st.sampled_from((1, 1, 2, 7, 64))),
        "prefix_caching": draw(st.booleans()),
    }
    question = Question(**(asked | fixed))
    if question.prefix_caching:
        question = replace(question, cached_tokens=draw(st.integers(0, question.ctx_tokens)))
    return question


@st.composite
def pool_questions(draw: st.DrawFn, /, formats: Sequence[str] = POOL_FORMATS, **fixed: Any) -> Question:
    """Any question of the 27B or of Llama on vLLM that says how its pool is shared."""
    name = draw(st.sampled_from((FAST, BATCH, "qwen3.8-27b", LLAMA)))
    drafters = [""] if name == LLAMA else ["", "", "mtp:1", "mtp:3", "mtp:7", "dflash2:7", "dflash2:15"]
    speculation = draw(st.sampled_from(drafters))
    question: dict[str, Any] = {
        "model": name,
        "ctx_tokens": draw(st.integers(1, 300_000)),
        "kv_dtype": draw(st.sampled_from(formats)),
        "batch": draw(st.sampled_from((1, 1, 2, 5))),
        "utilisation": draw(st.sampled_from((None, 0.8, 0.93, 0.972, 1.0))),
        "max_sequences": draw(st.sampled_from((None, 5, 8, 200))),
        "prefix_caching": draw(st.booleans()),
        "cold_start": draw(st.booleans()),
        "async_scheduling": draw(st.booleans()),
        "state_dtype": draw(st.sampled_from((None, "fp32"))),
        "speculation": speculation or None,
        "accepted": 1.0 if speculation else None,
    }
    return Question(**(question | fixed))


@st.composite
def anywhere(draw: st.DrawFn) -> tuple[Question, HardwareProfile]:
    """A question of any model and engine, with a machine on which nearly everything fits."""
    kind = draw(st.sampled_from(("sparse", "hybrid", "dense")))
    if kind == "sparse":
        return draw(questions()), draw(machines(roomy=True))
    return (draw(hybrid_questions()), RTX3090) if kind == "hybrid" else (draw(dense_questions()), H200)
