"""How fast physics lets the shipped model go, written down again from its shape, without the twin's own counts."""

from hwprofiles import HardwareProfile
from tests.laws.drawn import PAGE
from twin.models import ModelSpec, load_model
from twin.models.mixers import Attention, GatedDeltaNet
from twin.prediction import Prediction

MODEL = load_model("qwen3.8-flash-next")
FP16_BYTES = 2
BUDGET = 2048
"""Tokens that a sparse query reads at most, the open block aside."""


def active_parameters(model: ModelSpec) -> int:
    """Parameters that one token runs through, the output head aside: norms and biases left out."""
    moe, attention, indexer = model.kinds["attention"].feed_forward, model.attention, model.indexer
    (recurrent,) = model.states
    assert moe is not None
    assert isinstance(attention, Attention)
    assert isinstance(recurrent, GatedDeltaNet)
    assert indexer is not None
    wide = attention.query_heads * attention.head_dim
    kv = 2 * attention.kv_heads * attention.head_dim
    heads = model.hidden * (2 * wide + kv) + wide * model.hidden + model.hidden * 5 * indexer.head_dim
    inner = recurrent.value_heads * recurrent.head_dim
    keys = 2 * recurrent.key_heads * recurrent.head_dim
    delta = model.hidden * (keys + inner + inner + 2 * recurrent.value_heads) + inner * model.hidden
    experts = 3 * model.hidden * (moe.active * moe.intermediate + moe.shared_intermediate) + model.hidden * moe.experts
    return 12 * heads + 36 * delta + 48 * experts


HEAD = MODEL.hidden * MODEL.vocab
ACTIVE = active_parameters(MODEL)
PLANES = 12 * 2 * 2 * 256 * FP16_BYTES
"""K and V of one token in all layers."""
KEPT_ON_HOST = PLANES + 12 * 128 * FP16_BYTES
"""K, V and raw indexer key of one token in all layers."""


class Peaks:
    """Datasheet peaks of the machine that was asked about, all of whose devices do not work at once."""

    def __init__(self, machine: HardwareProfile) -> None:
        gpu = machine.gpu
        self.vram = gpu.vram_read.datasheet.value
        self.flops = gpu.tensor["fp16"].datasheet.value
        self.h2d = gpu.h2d.datasheet.value
        self.d2h = gpu.d2h.datasheet.value


def decode_floor_s(prediction: Prediction) -> float:
    """Active weights once, their products, and what sparse attention reads over the link."""
    peaks, question = Peaks(prediction.machine), prediction.case.question
    weights_s = (ACTIVE + HEAD) * MODEL.weights.bits / 8 / peaks.vram
    products_s = 2 * (ACTIVE + HEAD) * question.batch / peaks.flops
    read = min(question.ctx_tokens, BUDGET) * PLANES * question.batch
    link_s = read / peaks.h2d if question.layout == "offload" else 0.0
    return max(weights_s, products_s, link_s)


def prefill_floor_s(prediction: Prediction) -> float:
    """Products of every prompt token, active weights once a chunk; offloaded, the cache out and the history in."""
    peaks, case = Peaks(prediction.machine), prediction.case
    question = case.question
    tokens = question.ctx_tokens - 1  # the last one belongs to the first decode step
    chunks = -(-tokens // case.chunk_tokens)
    pairs = (min(tokens, BUDGET) ** 2 / 2) + max(0, tokens - BUDGET) * BUDGET
    attention = 12 * 4 * 24 * 256 * pairs
    products_s = (2 * ACTIVE * tokens + attention) * question.batch / peaks.flops
    weights_s = ACTIVE * MODEL.weights.bits / 8 * chunks / peaks.vram
    if question.layout != "offload":
        return max(products_s, weights_s)
    written_s = tokens * KEPT_ON_HOST * question.batch / peaks.d2h
    history = sum(min(index * case.chunk_tokens, BUDGET - PAGE) for index in range(min(chunks, 64)))
    read_s = history * PLANES * question.batch / peaks.h2d
    return max(products_s, weights_s, written_s, read_s)
