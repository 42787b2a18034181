"""Questions about dense models on an engine with a pool of blocks, and how fast physics lets them go.

The floors are written down again from the models' shapes, without the twin's own counts.
"""

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st
from msgspec.structs import replace

from hwprofiles import HardwareProfile, load_profile
from tests.laws.drawn import flattened, log_uniform, machines, questions, with_memory
from tests.twin.memory.pool_worlds import BATCH, FAST, LLAMA
from twin.ask.question import Question
from twin.engines import load_engine
from twin.models import ModelSpec
from twin.models.mixers import Attention, GatedDeltaNet
from twin.models.speculation import Speculation
from twin.prediction import Prediction
from twin.units import TIB

RTX3090, H200 = (with_memory(load_profile(name), 4 * TIB) for name in ("rtx3090", "h200"))
"""Machines on which nearly everything fits."""
FLAT = flattened(RTX3090)

HYBRIDS = ("qwen3.8-27b", "qwen3.8-27b-fast", "qwen3.8-27b-int8-mlp")
DENSE = "llama-3.1-8b"
FORMATS = ("bf16", "fp8", "int8_per_token_head", "int4_per_token_head", "kvarn_k4v2_g128")
"""What the 3090 has rates for in decode, verification and prefill."""
BITS = {"bf16": 16, "fp8": 8, "int8_per_token_head": 8, "int4_per_token_head": 4, "kvarn_k4v2_g128": 3}
"""Codes of K and V on average: scales come on top."""
DRAFTERS = ("mtp:1", "mtp:3", "mtp:7", "dflash2:3", "dflash2:7", "dflash2:15")
POOL_FORMATS = tuple(name for name in load_engine("vllm").formats if name != "fp8_per_token_head")
LONGEST = 1 << 18
HALF = 2


@st.composite
def hybrid_questions(
    draw: st.DrawFn, /, *, drafters: tuple[str | None, ...] = (None, *DRAFTERS), **fixed: Any
) -> Question:
    """Any question of the 27B that the 3090 has rates for; `fixed` fields are not drawn."""
    speculation = draw(st.sampled_from(drafters))
    name = draw(st.sampled_from(HYBRIDS))
    most = int(speculation.partition(":")[2]) if speculation else 0
    asked: dict[str, Any] = {
        "model": name,
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
    ctx_tokens = draw(st.integers(1, 300_000))
    drafters = [""] if name == LLAMA else ["", "", "mtp:1", "mtp:3", "mtp:7", "dflash2:7", "dflash2:15"]
    speculation = draw(st.sampled_from(drafters))
    question: dict[str, Any] = {
        "model": name,
        "ctx_tokens": ctx_tokens,
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


class Shape:
    """Parameters by part and cache bytes of a dense model, recurrent in some layers or none."""

    def __init__(self, spec: ModelSpec) -> None:
        attention, feed_forward, hidden = spec.attention, spec.kinds["attention"].feed_forward, spec.hidden
        assert isinstance(attention, Attention)
        assert feed_forward is not None
        wide, kv = attention.query_heads * attention.head_dim, attention.kv_heads * attention.head_dim
        self.feed = spec.layers * 3 * hidden * feed_forward.intermediate
        self.mixers = spec.attention_layers * hidden * (wide * (2 + attention.output_gate) + 2 * kv)
        self.state = 0
        for recurrent, layers in spec.states.items():
            assert isinstance(recurrent, GatedDeltaNet)
            inner, keys = recurrent.value_heads * recurrent.head_dim, recurrent.key_heads * recurrent.head_dim
            self.mixers += layers * hidden * (2 * keys + 3 * inner)
            self.state = layers * inner * recurrent.head_dim
        self.head = hidden * spec.vocab
        self.elements = 2 * spec.attention_layers * kv
        self.pair_flops = 4 * spec.attention_layers * wide
        self.layer_bytes = (self.mixers + self.feed) * spec.weights.bits / 8
        self.head_bytes = self.head * spec.part_bits["head"] / 8


def _products_s(prediction: Prediction, *, tokens: float, logits: float, pairs: float) -> float:
    """Products at datasheet peaks, the feed-forward's in its own operand type."""
    spec, shape = prediction.case.model, Shape(prediction.case.model)
    peaks = {name: roof.datasheet.value for name, roof in prediction.machine.gpu.tensor.items()}
    plain = 2 * (shape.mixers * tokens + shape.head * logits) + shape.pair_flops * pairs
    feed = 2 * shape.feed * tokens
    return plain / peaks["bf16"] + feed / peaks[spec.weights.mlp_operands or "bf16"]


def _step_floor_s(prediction: Prediction, rows: int) -> float:
    """Weights once, every state once and once more a query token, every cached code once; or the products."""
    case, shape = prediction.case, Shape(prediction.case.model)
    batch, past = case.question.batch, case.question.ctx_tokens
    states = batch * shape.state * case.state_element_bytes * (1 + rows)
    cache = batch * past * shape.elements * BITS[case.fmt.name] / 8
    moved = shape.layer_bytes + shape.head_bytes + states + cache
    tokens = batch * rows
    products_s = _products_s(prediction, tokens=tokens, logits=tokens, pairs=tokens * past)
    return max(moved / prediction.machine.gpu.vram_read.datasheet.value, products_s)


def _draft_floor_s(prediction: Prediction, speculation: Speculation) -> float:
    drafter = speculation.drafter
    passes = speculation.tokens if drafter.kind == "sequential" else 1
    read = passes * (drafter.weight_bytes + drafter.head_bytes)
    return read / prediction.machine.gpu.vram_read.datasheet.value


def decode_floor_s(prediction: Prediction) -> float:
    """No decode step can be faster; under speculation one of the fewest query tokens and its draft."""
    speculation = prediction.case.speculation
    if speculation is None:
        return _step_floor_s(prediction, 1)
    drafter = speculation.drafter
    rows = speculation.tokens + 1
    fewest = min(rows, drafter.block_tokens) if drafter.kind == "block" else rows
    return _draft_floor_s(prediction, speculation) + _step_floor_s(prediction, fewest)


def prefill_floor_s(prediction: Prediction) -> float:
    """Products of every token that is not cached with the weights and all tokens before it; weights once a chunk."""
    case, shape = prediction.case, Shape(prediction.case.model)
    batch, prompt, past = case.question.batch, case.question.ctx_tokens, case.cached_tokens
    new = prompt - past
    pairs = batch * (prompt**2 - past**2) / 2
    chunks = -(-new // case.chunk_tokens)
    read_s = shape.layer_bytes * chunks / prediction.machine.gpu.vram_read.datasheet.value
    return max(_products_s(prediction, tokens=batch * new, logits=0, pairs=pairs), read_s)
