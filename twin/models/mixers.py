"""What mixes tokens in a layer: attention in its kinds, and the recurrent kinds whose state does not grow.

A mixer says its parameters, the elements that it caches of a token, how many tokens back it sees, and its state.
Parameters are those of its matrices; `vectors` counts the elements of norms, biases and sinks, which engines keep in 16
bits whatever the weights are stored in. Sources: the modeling files of transformers 5.24, by the names of the classes.
"""

from typing import Annotated, ClassVar

from msgspec import Meta, Struct

Tokens = Annotated[int, Meta(ge=1, le=2**31)]
Reach = Annotated[int, Meta(ge=0, le=2**31)]  # tokens; 0: all
Heads = Annotated[int, Meta(ge=1, le=4096)]
Width = Annotated[int, Meta(ge=1, le=2**20)]  # elements of a vector, or bytes of a row
Few = Annotated[int, Meta(ge=1, le=65536)]  # tokens of a block, rows of a token, streams: what a loop may go over
Count = Annotated[int, Meta(ge=0, le=2**50)]  # parameters
Taps = Annotated[int, Meta(ge=2, le=64)]  # inputs that a short convolution sees


class Indexer(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Scores one key for every `ratio` tokens and attends to the best `budget` tokens.

    Qwen Sparse Attention pools keys of blocks of 4; DeepSeek's indexer has ratio 1, and weights its heads by the token.
    """

    query_heads: Heads
    head_dim: Width
    budget: Tokens
    ratio: Few
    weighted: bool = False
    shared: bool = False  # attends to what an earlier layer's indexer chose, and has no keys and scores of its own

    def __post_init__(self) -> None:
        if self.budget % self.ratio:
            raise ValueError(f"budget {self.budget} is not a multiple of ratio {self.ratio}")

    @property
    def block_topk(self) -> int:
        """Blocks selected per query token."""
        return self.budget // self.ratio

    @property
    def threshold_tokens(self) -> int:
        """Longest context that is still read whole. 4 is literal in exllamav3's `modules/qsa_indexer.py`."""
        return self.budget if self.ratio == 1 else 4 * self.block_topk + 3

    def key_bytes(self, element_bytes: int) -> int:
        """Bytes that are kept of a token, pooled keys of blocks left out.

        Weighted heads score keys in 8 bits with a scale for every 128 elements (DeepSeek-V3.2's `inference/model.py`).
        """
        if self.shared:
            return 0
        return self.head_dim + 4 * -(-self.head_dim // 128) if self.weighted else self.head_dim * element_bytes

    def cached_bytes(self, element_bytes: int) -> int:
        """The same with a token's share of pooled keys."""
        key = self.key_bytes(element_bytes)
        return key + (key // self.ratio if self.ratio > 1 else 0)

    def matrices(self, hidden: int, query_rank: int = 0) -> int:
        """Parameters: queries (from the compressed query where there is one), one key, and the heads' weights."""
        if self.shared:
            return 0
        queries = (query_rank or hidden) * self.query_heads * self.head_dim
        return queries + hidden * self.head_dim + (hidden * self.query_heads if self.weighted else 0)


class _Mixer(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True, tag_field="kind"):
    """What all mixers have."""

    vectors: Count = 0  # elements of norms, biases and sinks
    other_matrices: Count = 0  # parameters of matrices that the shape does not imply, such as low-rank gates


class Attention(_Mixer, frozen=True, kw_only=True, tag="attention"):
    """Grouped-query attention over all tokens, over a sliding window, or over the query's own chunk."""

    query_heads: Heads
    kv_heads: Heads
    head_dim: Width  # of queries and keys
    value_dim: Width | None = None  # of values, where it is another
    output_gate: bool = False  # as many gates as outputs, from the same product as the queries
    window: Reach = 0  # tokens that a query sees, itself included
    local_chunk: Reach = 0  # tokens of the chunks outside of which nothing is seen
    indexer: Indexer | None = None
    shares_kv: bool = False  # reads the cache of an earlier layer and has no keys and values of its own
    values_from_keys: bool = False  # one matrix makes both; what is cached of them still differs by norms and positions

    def __post_init__(self) -> None:
        if self.query_heads % self.kv_heads:
            raise ValueError(f"{self.query_heads} query heads are not a multiple of {self.kv_heads} kv heads")
        if self.window and self.local_chunk:
            raise ValueError("attention has a window or local chunks, not both")
        if self.values_from_keys and self.value_width != self.head_dim:
            raise ValueError("values made by the matrix of keys are as wide as keys")

    @property
    def value_width(self) -> int:
        """Elements of one head's value."""
        return self.value_dim or self.head_dim

    @property
    def kv_elements(self) -> int:
        """Elements of K and V of one token that are read."""
        return self.kv_heads * (self.head_dim + self.value_width)

    @property
    def keeps_cache(self) -> bool:
        """Whether it has a cache of its own."""
        return not self.shares_kv

    def cached_bytes(self, element_bytes: int) -> int:
        """Bytes of one token in a plain format, an indexer's keys included."""
        return self.kv_elements * element_bytes + (self.indexer.cached_bytes(element_bytes) if self.indexer else 0)

    @property
    def rotated_elements(self) -> int:
        """Elements of a token's queries and keys."""
        return (self.query_heads + (0 if self.shares_kv else self.kv_heads)) * self.head_dim

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.query_heads // self.kv_heads

    @property
    def reach(self) -> int:
        """Tokens after which its cache stops growing; 0: it never does."""
        return self.window or self.local_chunk

    def matrices(self, hidden: int) -> int:
        """Parameters of its matrices."""
        queries = hidden * self.query_heads * (self.head_dim + (self.value_width if self.output_gate else 0))
        made = self.kv_heads * self.head_dim if self.values_from_keys else self.kv_elements
        keys_values = 0 if self.shares_kv else hidden * made
        index = self.indexer.matrices(hidden) if self.indexer else 0
        return queries + keys_values + self.query_heads * self.value_width * hidden + index + self.other_matrices


class LatentAttention(_Mixer, frozen=True, kw_only=True, tag="latent_attention"):
    """Multi-head latent attention: one compressed vector and one roped key a token serve all heads."""

    query_heads: Heads
    kv_rank: Width  # elements of the compressed vector
    rope_dim: Width  # of a head's query and of the key that all heads share
    nope_dim: Width  # of a head's query and key that is not roped
    value_dim: Width
    query_rank: Annotated[int, Meta(ge=0, le=2**20)] = 0  # elements of the compressed query; 0: none
    indexer: Indexer | None = None
    reach: ClassVar[int] = 0
    keeps_cache: ClassVar[bool] = True

    @property
    def kv_elements(self) -> int:
        """Cached elements of one token."""
        return self.kv_rank + self.rope_dim

    def cached_bytes(self, element_bytes: int) -> int:
        """Bytes of one token in a plain format, an indexer's keys included."""
        return self.kv_elements * element_bytes + (self.indexer.cached_bytes(element_bytes) if self.indexer else 0)

    @property
    def rotated_elements(self) -> int:
        """Elements of a token's queries and of its key that are roped."""
        return (self.query_heads + 1) * self.rope_dim

    def matrices(self, hidden: int) -> int:
        """Parameters of its matrices."""
        query = self.query_heads * (self.nope_dim + self.rope_dim)
        queries = self.query_rank * (hidden + query) if self.query_rank else hidden * query
        expanded = self.kv_rank * self.query_heads * (self.nope_dim + self.value_dim)
        index = self.indexer.matrices(hidden, self.query_rank) if self.indexer else 0
        compressed, output = hidden * self.kv_elements, self.query_heads * self.value_dim * hidden
        return queries + compressed + expanded + output + index + self.other_matrices


class GatedDeltaNet(_Mixer, frozen=True, kw_only=True, tag="gated_delta_net"):
    """Gated DeltaNet: a state of head_dim x head_dim per value head and a short convolution."""

    key_heads: Heads
    value_heads: Heads
    head_dim: Width
    conv_kernel: Taps

    @property
    def conv_channels(self) -> int:
        """Channels of the short convolution: queries, keys and values."""
        return (2 * self.key_heads + self.value_heads) * self.head_dim

    @property
    def state_elements(self) -> int:
        """Elements of one layer's recurrent state for one sequence, without the convolution's tail."""
        return self.value_heads * self.head_dim**2

    def matrices(self, hidden: int) -> int:
        """Parameters of its matrices: projections with gates, the convolution, the output."""
        values = self.value_heads * self.head_dim
        projections = hidden * (self.conv_channels + values + 2 * self.value_heads)
        return projections + values * hidden + self.conv_channels * self.conv_kernel + self.other_matrices


class KimiDelta(_Mixer, frozen=True, kw_only=True, tag="kimi_delta"):
    """Kimi Delta Attention: as Gated DeltaNet, with a decay per channel and low-rank gates."""

    heads: Heads
    head_dim: Width
    conv_kernel: Taps

    @property
    def conv_channels(self) -> int:
        """Channels of the three short convolutions: queries, keys and values."""
        return 3 * self.heads * self.head_dim

    @property
    def state_elements(self) -> int:
        """Elements of one layer's recurrent state for one sequence, without the convolutions' tails."""
        return self.heads * self.head_dim**2

    def matrices(self, hidden: int) -> int:
        """Parameters of its matrices: Q, K and V, two gates of rank head_dim, a write strength a head, the output."""
        width = self.heads * self.head_dim
        gates = 2 * (hidden * self.head_dim + self.head_dim * width) + hidden * self.heads
        return 4 * hidden * width + gates + self.conv_channels * self.conv_kernel + self.other_matrices


class Mamba(_Mixer, frozen=True, kw_only=True, tag="mamba"):
    """Mamba: `state` elements for each of `inner` channels; the decay matrix counts as a matrix."""

    inner: Width
    state: Few
    conv_kernel: Taps
    time_rank: Width

    @property
    def conv_channels(self) -> int:
        """Channels of the short convolution."""
        return self.inner

    @property
    def state_elements(self) -> int:
        """Elements of one layer's state for one sequence, without the convolution's tail."""
        return self.inner * self.state

    def matrices(self, hidden: int) -> int:
        """Parameters of its matrices: in, convolution, time step and B and C, decay, out."""
        selective = self.inner * (self.time_rank + 2 * self.state) + self.time_rank * self.inner
        projections = 3 * hidden * self.inner
        return projections + selective + self.inner * (self.conv_kernel + self.state) + self.other_matrices


class Mamba2(_Mixer, frozen=True, kw_only=True, tag="mamba2"):
    """Mamba-2: `state` elements for each channel of each head; B and C are shared by groups of heads."""

    heads: Heads
    head_dim: Width
    groups: Few
    state: Few
    conv_kernel: Taps

    @property
    def inner(self) -> int:
        """Channels of all heads."""
        return self.heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the short convolution: the input, B and C."""
        return self.inner + 2 * self.groups * self.state

    @property
    def state_elements(self) -> int:
        """Elements of one layer's state for one sequence, without the convolution's tail."""
        return self.inner * self.state

    def matrices(self, hidden: int) -> int:
        """Parameters of its matrices: in (gate, input, B, C, time steps), convolution, out."""
        projections = hidden * (self.inner + self.conv_channels + self.heads) + self.inner * hidden
        return projections + self.conv_channels * self.conv_kernel + self.other_matrices


class LightningAttention(_Mixer, frozen=True, kw_only=True, tag="lightning_attention"):
    """Linear attention with a fixed decay a head, and an output gate."""

    heads: Heads
    head_dim: Width
    conv_channels: ClassVar[int] = 0
    conv_kernel: ClassVar[int] = 1

    @property
    def state_elements(self) -> int:
        """Elements of one layer's state for one sequence."""
        return self.heads * self.head_dim**2

    def matrices(self, hidden: int) -> int:
        """Parameters of its matrices: Q, K, V, gate and output."""
        return 5 * hidden * self.heads * self.head_dim + self.other_matrices


class ShortConvolution(_Mixer, frozen=True, kw_only=True, tag="short_convolution"):
    """A gated convolution over the last few tokens (LFM2): its state is the convolution's tail alone."""

    channels: Width
    conv_kernel: Taps

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution."""
        return self.channels

    @property
    def state_elements(self) -> int:
        """None beside the convolution's tail."""
        return 0

    def matrices(self, hidden: int) -> int:
        """Parameters of its matrices: in (two gates and the input), convolution, out."""
        return 4 * hidden * self.channels + self.channels * self.conv_kernel + self.other_matrices


Attending = Attention | LatentAttention
Recurrent = GatedDeltaNet | KimiDelta | Mamba | Mamba2 | LightningAttention | ShortConvolution
Mixer = Attending | Recurrent


def conv_elements(mixer: Recurrent) -> int:
    """Elements of the convolution's tail: the last conv_kernel - 1 inputs of each channel."""
    return mixer.conv_channels * (mixer.conv_kernel - 1)


def mixer_tag(mixer: Mixer) -> str:
    """Its `kind` in a model file."""
    return str(mixer.__struct_config__.tag)


def mixer_name(mixer: Mixer) -> str:
    """What people call it, such as "sliding window of 1,024 tokens"."""
    if isinstance(mixer, Attention):
        kind = "full attention"
        if mixer.window:
            kind = f"sliding window of {mixer.window:,} tokens"
        elif mixer.local_chunk:
            kind = f"local chunks of {mixer.local_chunk:,} tokens"
        elif mixer.indexer:
            kind = "sparse attention"
        return f"{kind}, cache shared" if mixer.shares_kv else kind
    if isinstance(mixer, LatentAttention):
        return "sparse latent attention" if mixer.indexer else "latent attention"
    return mixer_tag(mixer).replace("_", " ")
