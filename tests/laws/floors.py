"""How fast physics lets models go, written down again from their shapes, without the twin's own counts."""

from twin.models import ModelSpec, load_model
from twin.models.mixers import Attention, GatedDeltaNet
from twin.prediction import Prediction

FP16_BYTES = 2
BUDGET, PAGE = 2048, 256
"""Tokens that a sparse query reads at most, the open block aside, and those of a page of exllamav3's."""
BITS = {"fp16": 16, "bf16": 16, "fp8": 8, "int8_per_token_head": 8, "int4_per_token_head": 4, "kvarn_k4v2_g128": 3}
"""Codes of K and V on average: scales come on top."""


class Shape:
    """Parameters by part that a token runs through, norms and biases left out, and elements of a model's caches."""

    def __init__(self, spec: ModelSpec) -> None:
        (feed, *others), hidden = {layer.feed_forward for layer in spec.kinds.values()}, spec.hidden
        attention = spec.attention
        assert not others  # one feed-forward for all layers
        assert isinstance(attention, Attention)
        assert feed is not None
        wide, kv = attention.query_heads * attention.head_dim, attention.kv_heads * attention.head_dim
        router = hidden * feed.experts if feed.experts > 1 else 0
        self.feed = spec.layers * (3 * hidden * (feed.active * feed.intermediate + feed.shared_intermediate) + router)
        indexer = 5 * spec.indexer.head_dim if spec.indexer else 0
        self.mixers = spec.attention_layers * hidden * (wide * (2 + attention.output_gate) + 2 * kv + indexer)
        self.state = 0
        for recurrent, layers in spec.states.items():
            assert isinstance(recurrent, GatedDeltaNet)
            inner, keys = recurrent.value_heads * recurrent.head_dim, recurrent.key_heads * recurrent.head_dim
            self.mixers += layers * hidden * (2 * keys + 3 * inner + 2 * recurrent.value_heads)
            self.state = layers * inner * recurrent.head_dim
        self.head = hidden * spec.vocab
        self.elements = 2 * spec.attention_layers * kv
        self.pair_flops = 4 * spec.attention_layers * wide
        self.layer_bytes = (self.mixers + self.feed) * spec.weights.bits / 8
        self.head_bytes = self.head * spec.part_bits["head"] / 8


PLANES = Shape(load_model("qwen3.8-flash-next")).elements * FP16_BYTES
"""K and V of one token in all layers of the sparse model."""
KEPT_ON_HOST = PLANES + 12 * 128 * FP16_BYTES
"""K, V and raw indexer key."""


class Floor:
    """A prediction's model against datasheet peaks of its machine, whose devices do not all work at once."""

    def __init__(self, prediction: Prediction) -> None:
        self.case, self.gpu = prediction.case, prediction.machine.gpu
        self.spec, self.batch = self.case.model, self.case.question.batch
        self.shape = Shape(self.spec)
        self.offloads = self.case.layout.name == "offload"
        self.vram = self.gpu.vram_read.datasheet.value

    def products_s(self, *, tokens: float, logits: float, pairs: float) -> float:
        """Those of the feed-forward in its own operand type."""
        operand = self.case.operand_dtype
        plain = 2 * (self.shape.mixers * tokens + self.shape.head * logits) + self.shape.pair_flops * pairs
        feed = 2 * self.shape.feed * tokens / self.gpu.tensor[self.spec.weights.mlp_operands or operand].datasheet.value
        return plain / self.gpu.tensor[operand].datasheet.value + feed

    def step_s(self, rows: int) -> float:
        """Weights once, states once and once more a query token, codes that are read once; or the products."""
        past, tokens = self.case.question.ctx_tokens, self.batch * rows
        read = min(past, BUDGET) if self.spec.indexer else past
        cache = self.batch * read * self.shape.elements * BITS[self.case.fmt.name] / 8
        moved = self.shape.layer_bytes + self.shape.head_bytes
        moved += self.batch * self.shape.state * self.case.state_element_bytes * (1 + rows)
        products_s = self.products_s(tokens=tokens, logits=tokens, pairs=0 if self.spec.indexer else tokens * past)
        if self.offloads:
            return max(moved / self.vram, products_s, cache / self.gpu.h2d.datasheet.value)
        return max((moved + cache) / self.vram, products_s)

    def pairs(self, tokens: int) -> float:
        """Tokens of a prompt times those before them that they read."""
        whole = min(tokens, BUDGET) if self.spec.indexer else tokens
        return whole**2 / 2 + (tokens - whole) * BUDGET


def decode_floor_s(prediction: Prediction) -> float:
    """No decode step can be faster; under speculation one of the fewest query tokens and its draft."""
    floor, speculation = Floor(prediction), prediction.case.speculation
    if speculation is None:
        return floor.step_s(1)
    drafter, rows = speculation.drafter, speculation.tokens + 1
    passes, rows = (1, min(rows, drafter.block_tokens)) if drafter.kind == "block" else (speculation.tokens, rows)
    return passes * (drafter.weight_bytes + drafter.head_bytes) / floor.vram + floor.step_s(rows)


def prefill_floor_s(prediction: Prediction) -> float:
    """Products of every new token, weights once a chunk; offloaded, the cache out and the history in."""
    floor, case = Floor(prediction), prediction.case
    end, past = case.question.ctx_tokens - case.rules.unprefilled_tokens, case.cached_tokens
    chunks = -(-(end - past) // case.chunk_tokens)
    pairs = floor.batch * (floor.pairs(end) - floor.pairs(past))
    products_s = floor.products_s(tokens=floor.batch * (end - past), logits=0, pairs=pairs)
    floor_s = max(products_s, floor.shape.layer_bytes * chunks / floor.vram)
    if not floor.offloads:
        return floor_s
    written_s = end * KEPT_ON_HOST * floor.batch / floor.gpu.d2h.datasheet.value
    history = sum(min(index * case.chunk_tokens, BUDGET - PAGE) for index in range(min(chunks, 64)))
    return max(floor_s, written_s, history * PLANES * floor.batch / floor.gpu.h2d.datasheet.value)
