"""The shape of a model: enough to count its parameters, its cache and its work, and nothing more.

A model is a list of layers, each with mixers of tokens (side by side where there are several) and a feed-forward; equal
layers are of one kind. What depends on the engine that runs it (where the embedding lies, in what type a state is kept,
whether windows get pages of their own) is the engine's.
"""

from collections.abc import Iterable
from functools import cached_property
from itertools import cycle, islice
from typing import Annotated, Literal

from msgspec import Meta, Struct

from twin.models.mixers import (
    Attending,
    Attention,
    Count,
    Few,
    Heads,
    Indexer,
    Mixer,
    Recurrent,
    Tokens,
    Width,
)

SCHEMA = "twin.model/2"
Layers = Annotated[int, Meta(ge=1, le=4096)]
Experts = Annotated[int, Meta(ge=1, le=65536)]
Vocabulary = Annotated[int, Meta(ge=1, le=2**24)]
Bits = Annotated[float, Meta(ge=0.01, le=64)]
Bytes = Annotated[int, Meta(ge=1, le=2**50)]
Part = Literal["attention", "feed_forward", "experts", "router", "embedding", "head", "vectors"]
"""Parts of a checkpoint's language model. `attention` is mixers of all kinds; a shared expert is `feed_forward`."""

Parameters = dict[Part, float]
"""Parameters by part; whole numbers, except of experts that are chosen by chance."""


class FeedForward(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """An MLP; with experts > 1 a router picks `active` of them and `shared_intermediate` always runs."""

    intermediate: Width
    experts: Experts = 1
    active: Experts = 1
    shared_intermediate: Annotated[int, Meta(ge=0, le=2**20)] = 0
    expert_hidden: Annotated[int, Meta(ge=0, le=2**20)] = 0  # width that experts work on; 0: the model's
    gated: bool = True
    vectors: Count = 0  # elements of biases and norms outside experts
    expert_vectors: Count = 0  # elements of biases of one expert
    other_matrices: Count = 0  # parameters of matrices that always run and that the shape does not imply

    def __post_init__(self) -> None:
        if self.active > self.experts:
            raise ValueError(f"active {self.active} is more than experts {self.experts}")
        if self.expert_hidden and self.experts == 1:
            raise ValueError("expert_hidden is of experts, and there are none")

    def parameters(self, hidden: int, experts: float) -> Parameters:
        """By part, of so many of the experts, the router and what always runs."""
        matrices = 3 if self.gated else 2
        one = matrices * (self.expert_hidden or hidden) * self.intermediate
        always = matrices * hidden * self.shared_intermediate + self.other_matrices
        if self.experts == 1:
            return {"feed_forward": one + always, "vectors": self.vectors + self.expert_vectors}
        vectors = self.vectors + self.expert_vectors * experts
        return {"router": hidden * self.experts, "experts": one * experts, "feed_forward": always, "vectors": vectors}


class Layer(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A layer of one kind."""

    mixers: tuple[Mixer, ...] = ()  # side by side; none: a feed-forward alone
    feed_forward: FeedForward | None = None
    vectors: Count = 0  # elements of the norms around both

    @property
    def recurrent(self) -> tuple[Recurrent, ...]:
        """Mixers that keep a state."""
        return tuple(mixer for mixer in self.mixers if isinstance(mixer, Recurrent))

    @property
    def attending(self) -> tuple[Attending, ...]:
        """Mixers that attend to cached tokens."""
        return tuple(mixer for mixer in self.mixers if isinstance(mixer, Attending))

    def parameters(self, hidden: int, experts: float | None = None) -> Parameters:
        """By part, of so many of the experts, or of all."""
        feed_forward = self.feed_forward
        counts: Parameters = {}
        if feed_forward is not None:
            counts = feed_forward.parameters(hidden, feed_forward.experts if experts is None else experts)
        mixers = sum(mixer.matrices(hidden) for mixer in self.mixers)
        vectors = self.vectors + sum(mixer.vectors for mixer in self.mixers) + counts.get("vectors", 0)
        return counts | {"attention": mixers, "vectors": vectors}


class NgramTable(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of hashed n-gram embeddings, read by row on the host before layer `before_layer`."""

    table_bytes: Annotated[int, Meta(ge=1, le=2**45)]
    row_bytes: Width
    rows_per_token: Few
    before_layer: Annotated[int, Meta(ge=0, le=4096)]


class Stored(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How matrices are stored: the format, and the bits of an element with its scales."""

    format: str
    bits: Bits


class Weights(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """How the checkpoint stores its matrices."""

    format: str  # of every part that is not named below, and what engines that load it are asked for
    bits: Bits
    parts: dict[Part, Stored] = {}
    part_bytes: dict[Part, Annotated[int, Meta(ge=0, le=2**50)]] = {}  # exactly, where headers were read
    beside_bytes: dict[str, Annotated[int, Meta(ge=0, le=2**50)]] = {}
    """Of towers by name, and `unused`: what no engine loads, such as masks, or a tied head that is stored again."""
    mlp_operands: str = ""  # operand type of feed-forward products where not the engine's, such as int8

    def stored(self, part: Part) -> Stored:
        """How one part is stored; norms and biases in 16 bits unless said otherwise."""
        default = Stored(format="bf16", bits=16) if part == "vectors" else Stored(format=self.format, bits=self.bits)
        return self.parts.get(part, default)


class Drafter(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A small model that proposes tokens: one after the other, or a block at once."""

    name: str
    kind: Literal["sequential", "block"]
    summary: str
    layers: Layers
    query_heads: Heads
    kv_heads: Heads
    head_dim: Width
    window: Annotated[int, Meta(ge=0, le=2**31)]  # tokens of its cache that a layer keeps; 0: all
    parameters: Annotated[int, Meta(ge=1, le=2**50)]  # parameters that each token of the context runs through
    weight_bytes: Bytes  # bytes of the layers, read in every pass
    head_bytes: Annotated[int, Meta(ge=0, le=2**50)]
    """Bytes of the output head that a pass reads: a pruned vocabulary, or the model's own head."""
    own_head: bool  # whether that head takes memory of its own
    max_tokens: Annotated[int, Meta(ge=1, le=64)]
    default_tokens: Annotated[int, Meta(ge=1, le=64)]
    kv_dtype: str | None = None  # format of its cache; None: as the model's
    block_tokens: Annotated[int, Meta(ge=1, le=65)] = 1  # query tokens of a block: an anchor and what it proposes
    block_accepts: Annotated[float, Meta(ge=1, le=65)] = 1.0
    """Tokens that a step with its own block yields, where longer drafts are looked up in the context."""
    lookup_accepts: Annotated[float, Meta(ge=1, le=65)] = 2.0
    """Tokens that a step of the longer kind yields in a text that is copied in part: it outlasts what is copied."""

    def __post_init__(self) -> None:
        if self.query_heads % self.kv_heads:
            raise ValueError(f"{self.query_heads} query heads are not a multiple of {self.kv_heads} kv heads")
        if self.default_tokens > self.max_tokens:
            raise ValueError(f"default_tokens {self.default_tokens} is more than max_tokens {self.max_tokens}")
        if self.lookup_accepts <= self.block_accepts:
            raise ValueError("lookup_accepts must be above block_accepts")


def in_order(order: Iterable[tuple[str, int]], layers: int) -> tuple[str, ...]:
    """Kind of each layer, of kinds and how many of each in a row, which are begun again at the end."""
    return tuple(islice((kind for kind, count in cycle(order) for _ in range(count)), layers))


class ModelSpec(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True, dict=True):
    """A model and its checkpoint."""

    schema: str
    name: str
    summary: str
    source: str
    family: str = ""  # under which published acceptances and qualities are kept; empty: none are
    hidden: Width
    vocab: Vocabulary
    layers: Layers
    kinds: dict[str, Layer]
    order: tuple[tuple[str, Layers], ...]
    """Kinds and how many in a row, from the first layer on; begun again at the end."""
    residual_streams: Few = 1
    native_ctx_tokens: Tokens
    tied: bool = False  # whether the head multiplies with the embedding
    full_states: bool = False  # whether its makers want recurrent states in fp32, which an engine may heed
    vectors: Count = 0  # elements of norms outside layers
    tables: Count = 0  # parameters of tables read by row, beside the token embedding
    towers: dict[str, Count] = {}  # parameters of what is no part of the language model: vision, audio, mtp
    weights: Weights
    ngram: NgramTable | None = None
    drafters: tuple[Drafter, ...] = ()

    def __post_init__(self) -> None:
        if self.schema != SCHEMA:
            raise ValueError(f"schema must be {SCHEMA!r}, not {self.schema!r}")
        unknown = [kind for kind, _ in self.order if kind not in self.kinds]
        if unknown or not self.order:
            raise ValueError(f"order names {unknown[0]!r}, which is none of kinds" if unknown else "order is empty")
        unused = self.kinds.keys() - set(self.layer_kinds)
        if unused:
            raise ValueError(f"order never comes to {min(unused)!r} within {self.layers} layers")
        if self.ngram is not None and self.ngram.before_layer >= self.layers:
            raise ValueError(f"ngram.before_layer {self.ngram.before_layer} is not one of {self.layers} layers")

    @cached_property
    def layer_kinds(self) -> tuple[str, ...]:
        """Kind of each layer in order."""
        return in_order(self.order, self.layers)

    @cached_property
    def kind_counts(self) -> dict[str, int]:
        """Layers of each kind, by the first of them."""
        return {kind: self.layer_kinds.count(kind) for kind in dict.fromkeys(self.layer_kinds)}

    @cached_property
    def parameters(self) -> Parameters:
        """Of the language model: towers left out, a head that is the embedding counted once, as the embedding."""
        matrix = self.hidden * self.vocab
        total: Parameters = {"embedding": matrix + self.tables, "head": 0 if self.tied else matrix}
        total["vectors"] = self.vectors
        for kind, count in self.kind_counts.items():
            for part, number in self.kinds[kind].parameters(self.hidden).items():
                total[part] = total.get(part, 0) + number * count
        return total

    @property
    def head_part(self) -> Part:
        """The part that holds the output head's matrix."""
        return "embedding" if self.tied else "head"

    @property
    def active_parameters(self) -> int:
        """Those that one token runs through: of tables and the embedding no more than rows, of experts the chosen."""
        active = self.hidden * self.vocab + self.vectors
        for kind, count in self.kind_counts.items():
            layer = self.kinds[kind]
            experts = layer.feed_forward.active if layer.feed_forward else None
            active += count * int(sum(layer.parameters(self.hidden, experts).values()))
        return active

    @cached_property
    def part_bits(self) -> dict[Part, float]:
        """Bits of an element of each part, scales included: exactly, where the checkpoint's headers were read."""
        stored = {part: self.weights.stored(part).bits for part in self.parameters}
        exact = self.weights.part_bytes.items()
        return stored | {part: 8 * size / self.parameters[part] for part, size in exact if self.parameters.get(part)}

    def stored_bytes(self, counts: Parameters) -> float:
        """Bytes in which the checkpoint stores so many parameters of each part."""
        return sum(count * self.part_bits[part] for part, count in counts.items()) / 8

    @property
    def weight_bytes(self) -> dict[Part, float]:
        """Bytes of every part of the language model."""
        return {part: self.stored_bytes({part: count}) for part, count in self.parameters.items() if count}

    @cached_property
    def mixers(self) -> dict[Mixer, int]:
        """How many layers have each mixer."""
        counts: dict[Mixer, int] = {}
        for kind, count in self.kind_counts.items():
            for mixer in self.kinds[kind].mixers:
                counts[mixer] = counts.get(mixer, 0) + count
        return counts

    @cached_property
    def caches(self) -> dict[Attending, int]:
        """How many layers keep a cache of each kind of attention; those that read another layer's are left out."""
        return {mixer: n for mixer, n in self.mixers.items() if isinstance(mixer, Attending) and mixer.keeps_cache}

    @cached_property
    def attention(self) -> Attending | None:
        """The attention that sees furthest, against which cache formats and kernels are checked; None: no cache."""
        return max(self.caches, key=lambda mixer: (not mixer.reach, mixer.reach), default=None)

    @property
    def attention_layers(self) -> int:
        """Layers that keep a KV cache."""
        return sum(self.caches.values())

    @property
    def indexer(self) -> Indexer | None:
        """Of sparse attention, where the model has it."""
        return self.attention.indexer if self.attention else None

    @property
    def selects_blocks(self) -> bool:
        """Whether blocks of keys and values of heads are selected, which an offloaded cache needs."""
        return isinstance(self.attention, Attention) and self.attention.indexer is not None

    @cached_property
    def states(self) -> dict[Recurrent, int]:
        """How many layers keep a recurrent state of each kind."""
        return {mixer: n for mixer, n in self.mixers.items() if isinstance(mixer, Recurrent)}
