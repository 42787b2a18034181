"""Model files of schema twin.model/1, of version 0.1.0: attention every n-th layer, recurrence in the others."""

from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import asdict

from twin.models.mixers import Attention, Few, GatedDeltaNet, Heads, Indexer, Taps, Tokens, Width
from twin.models.spec import (
    SCHEMA,
    Bits,
    Drafter,
    FeedForward,
    Layer,
    Layers,
    ModelSpec,
    NgramTable,
    Part,
    Stored,
    Vocabulary,
    Weights,
)


class AttentionV1(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Every `every`-th layer's."""

    every: Layers
    query_heads: Heads
    kv_heads: Heads
    head_dim: Width
    output_gate: bool


class RecurrentV1(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The other layers'."""

    key_heads: Heads
    value_heads: Heads
    head_dim: Width
    conv_kernel: Taps


class IndexerV1(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Of sparse attention."""

    query_heads: Heads
    head_dim: Width
    budget: Tokens
    ratio: Few


class WeightsV1(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One `bits` for all but the two ends. Where the embedding lies is the engine's affair today."""

    format: str
    bits: Bits
    embedding_on_host: bool
    embedding_bits: Bits
    head_bits: Bits | None = None
    mlp_operands: str = ""


class ModelV1(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A whole file."""

    schema: Literal["twin.model/1"]
    name: str
    summary: str
    source: str
    family: str = ""
    hidden: Width
    vocab: Vocabulary
    layers: Layers
    residual_streams: Few
    native_ctx_tokens: Tokens
    attention: AttentionV1
    feed_forward: FeedForward
    weights: WeightsV1
    indexer: IndexerV1 | None = None
    recurrent: RecurrentV1 | None = None
    ngram: NgramTable | None = None
    drafters: tuple[Drafter, ...] = ()

    def renewed(self) -> ModelSpec:
        """The same model as it is described today. Raises ValueError where its parts contradict each other."""
        every, old = self.attention.every, self.weights
        if self.layers % every:
            raise ValueError(f"{self.layers} layers are not a multiple of attention.every {every}")
        heads = {key: value for key, value in asdict(self.attention).items() if key != "every"}
        indexer = Indexer(**asdict(self.indexer)) if self.indexer else None
        kinds = {"attention": Layer(mixers=(Attention(**heads, indexer=indexer),), feed_forward=self.feed_forward)}
        order: tuple[tuple[str, int], ...] = (("attention", 1),)
        if every > 1:
            if self.recurrent is None:
                raise ValueError("layers without attention need 'recurrent'")
            mixer = GatedDeltaNet(**asdict(self.recurrent))
            kinds["recurrent"] = Layer(mixers=(mixer,), feed_forward=self.feed_forward)
            order = (("recurrent", every - 1), *order)
        parts: dict[Part, Stored] = {"embedding": Stored(format="bf16", bits=old.embedding_bits)}
        if old.head_bits is not None:
            parts["head"] = Stored(format=old.format, bits=old.head_bits)
        weights = Weights(format=old.format, bits=old.bits, parts=parts, mlp_operands=old.mlp_operands)
        same = {"name", "summary", "source", "family", "hidden", "vocab", "layers", "residual_streams"}
        same |= {"native_ctx_tokens", "ngram", "drafters"}
        kept: dict[str, Any] = {key: value for key, value in asdict(self).items() if key in same}
        return ModelSpec(schema=SCHEMA, kinds=kinds, order=order, weights=weights, **kept)
