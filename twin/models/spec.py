"""The shape of a model: enough to count its parameters, its cache and its work, and nothing more."""

from functools import cached_property
from typing import Annotated, Literal

from msgspec import Meta, Struct

SCHEMA = "twin.model/1"
Tokens = Annotated[int, Meta(ge=1, le=2**31)]
Layers = Annotated[int, Meta(ge=1, le=4096)]
Heads = Annotated[int, Meta(ge=1, le=4096)]
Width = Annotated[int, Meta(ge=1, le=2**20)]  # elements of a vector, or bytes of a row
Experts = Annotated[int, Meta(ge=1, le=65536)]
Vocabulary = Annotated[int, Meta(ge=1, le=2**24)]
Few = Annotated[int, Meta(ge=1, le=65536)]  # tokens of a block, rows of a token, streams: what a loop may go over
Bits = Annotated[float, Meta(ge=0.01, le=64)]
Bytes = Annotated[int, Meta(ge=1, le=2**50)]
LayerKind = Literal["attention", "recurrent"]


class Attention(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Grouped-query attention; `every` n-th layer has it, the others are recurrent (every = 1: all of them)."""

    every: Layers
    query_heads: Heads
    kv_heads: Heads
    head_dim: Width
    output_gate: bool

    def __post_init__(self) -> None:
        if self.query_heads % self.kv_heads:
            raise ValueError(f"{self.query_heads} query heads are not a multiple of {self.kv_heads} kv heads")

    @property
    def kv_elements(self) -> int:
        """Elements of K and V of one token."""
        return 2 * self.kv_heads * self.head_dim

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.query_heads // self.kv_heads


class Indexer(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Qwen Sparse Attention: scores one pooled key per block of `ratio` tokens, attends to the best `budget` tokens."""

    query_heads: Heads
    head_dim: Width
    budget: Tokens
    ratio: Few

    def __post_init__(self) -> None:
        if self.budget % self.ratio:
            raise ValueError(f"budget {self.budget} is not a multiple of ratio {self.ratio}")

    @property
    def block_topk(self) -> int:
        """Blocks selected per query token."""
        return self.budget // self.ratio


class Recurrent(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Gated DeltaNet: a state of head_dim x head_dim per value head and a short convolution."""

    key_heads: Heads
    value_heads: Heads
    head_dim: Width
    conv_kernel: Annotated[int, Meta(ge=2, le=64)]

    @property
    def conv_channels(self) -> int:
        """Channels of the short convolution: queries, keys and values."""
        return (2 * self.key_heads + self.value_heads) * self.head_dim

    @property
    def state_elements(self) -> int:
        """Elements of one layer's recurrent state for one sequence, without the convolution's tail."""
        return self.value_heads * self.head_dim**2

    @property
    def conv_elements(self) -> int:
        """Elements of the convolution's tail: the last conv_kernel - 1 inputs."""
        return self.conv_channels * (self.conv_kernel - 1)


class FeedForward(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A gated MLP; with experts > 1 a router picks `active` of them and `shared_intermediate` always runs."""

    experts: Experts
    active: Experts
    intermediate: Width
    shared_intermediate: Annotated[int, Meta(ge=0, le=2**20)]

    def __post_init__(self) -> None:
        if self.active > self.experts:
            raise ValueError(f"active {self.active} is more than experts {self.experts}")


class NgramTable(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of hashed n-gram embeddings, read by row on the host before layer `before_layer`."""

    table_bytes: Annotated[int, Meta(ge=1, le=2**45)]
    row_bytes: Width
    rows_per_token: Few
    before_layer: Annotated[int, Meta(ge=0, le=4096)]


class Weights(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the checkpoint stores its matrices."""

    format: str
    bits: Bits
    embedding_on_host: bool
    embedding_bits: Bits
    head_bits: Bits | None = None  # None: as the layers
    mlp_operands: str = ""  # operand type of feed-forward products where not the engine's, such as int8


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


class ModelSpec(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """A model and its checkpoint."""

    schema: str
    name: str
    summary: str
    source: str
    family: str = ""  # under which published acceptances and qualities are kept; empty: none are
    hidden: Width
    vocab: Vocabulary
    layers: Layers
    residual_streams: Few
    native_ctx_tokens: Tokens
    attention: Attention
    feed_forward: FeedForward
    weights: Weights
    indexer: Indexer | None = None
    recurrent: Recurrent | None = None
    ngram: NgramTable | None = None
    drafters: tuple[Drafter, ...] = ()

    def __post_init__(self) -> None:
        if self.schema != SCHEMA:
            raise ValueError(f"schema must be {SCHEMA!r}, not {self.schema!r}")
        if self.layers % self.attention.every:
            raise ValueError(f"{self.layers} layers are not a multiple of attention.every {self.attention.every}")
        if self.attention.every > 1 and self.recurrent is None:
            raise ValueError("layers without attention need 'recurrent'")
        if self.ngram is not None and self.ngram.before_layer >= self.layers:
            raise ValueError(f"ngram.before_layer {self.ngram.before_layer} is not one of {self.layers} layers")

    @cached_property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Kind of each layer in order: attention closes every group of `every` layers."""
        every = self.attention.every
        return tuple("attention" if index % every == every - 1 else "recurrent" for index in range(self.layers))

    @property
    def attention_layers(self) -> int:
        """Layers that keep a KV cache."""
        return self.layers // self.attention.every

    @property
    def recurrent_layers(self) -> int:
        """Layers that keep a recurrent state."""
        return self.layers - self.attention_layers
