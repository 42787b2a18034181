"""The numbers that a sparse-attention cache and a dense layer are made of, in plain integers."""

from collections.abc import Mapping
from dataclasses import dataclass, replace


def _check(sizes: Mapping[str, int]) -> None:
    """Raise ValueError for a size below 1, or query heads that do not share their KV heads evenly."""
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} is {value}, which is below 1")
    if sizes["query_heads"] % sizes["kv_heads"]:
        raise ValueError(f"{sizes['query_heads']} query heads are not a multiple of {sizes['kv_heads']} kv heads")


@dataclass(frozen=True, kw_only=True)
class QsaShape:
    """Qwen Sparse Attention: `index_heads` score a pooled key per block of `ratio` tokens; `budget` tokens are read."""

    layers: int = 12
    query_heads: int = 24
    kv_heads: int = 2
    head_dim: int = 256
    index_heads: int = 4
    index_dim: int = 128
    budget: int = 2048
    ratio: int = 4

    def __post_init__(self) -> None:
        _check(vars(self))
        if self.budget % self.ratio:
            raise ValueError(f"budget {self.budget} is not a multiple of ratio {self.ratio}")

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.query_heads // self.kv_heads

    @property
    def topk(self) -> int:
        """Blocks selected per query token."""
        return self.budget // self.ratio

    def blocks(self, tokens: int) -> int:
        """Complete blocks of a context, each with a pooled key."""
        return tokens // self.ratio


@dataclass(frozen=True, kw_only=True)
class DenseShape:
    """One layer of a dense transformer with grouped-query attention and a gated feed-forward; Llama 3.1 8B's here.

    Counts are elements and operations: whoever knows the type makes bytes of them.
    """

    hidden: int = 4096
    query_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    intermediate: int = 14336

    def __post_init__(self) -> None:
        _check(vars(self))

    def shared_by(self, ranks: int) -> "DenseShape":
        """What each of so many ranks has of it: heads and intermediates divided, the hidden width whole."""
        if any(whole % ranks for whole in (self.query_heads, self.kv_heads, self.intermediate)):
            raise ValueError(f"{ranks} ranks do not share heads and intermediates evenly")
        parts = {"query_heads": self.query_heads, "kv_heads": self.kv_heads, "intermediate": self.intermediate}
        return replace(self, **{name: whole // ranks for name, whole in parts.items()})

    @property
    def query_width(self) -> int:
        """Elements of all query heads of a token."""
        return self.query_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Elements of a token's K, and of its V."""
        return self.kv_heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        """Elements of queries, keys and values of a token, which one product makes."""
        return self.query_width + 2 * self.kv_width

    @property
    def parameters(self) -> int:
        """Weights of the four products: qkv, output, gate and up, down."""
        return self.hidden * (self.qkv_width + self.query_width + 3 * self.intermediate)

    @property
    def activations(self) -> int:
        """Elements of a token that a layer's products and what lies between them read and write."""
        return 3 * self.hidden + self.qkv_width + self.query_width + 3 * self.intermediate

    @property
    def elementwise(self) -> int:
        """Elements a token read and written by two residual adds with norms, rotation of q and k, and gating."""
        norms = 2 * 4 * self.hidden  # branch and residual read, residual and norm written
        rotation = 2 * (self.query_width + self.kv_width)
        gating = 3 * self.intermediate
        return norms + rotation + gating

    @property
    def appended(self) -> int:
        """Elements a token read and written when its K and V go to the cache."""
        return 2 * 2 * self.kv_width

    def attend_flops(self, *, batch: int, q_tokens: int, past_tokens: int, causal: bool = True) -> float:
        """Operations of q k and p v, 2 each per pair of tokens and element; `causal` leaves the future out."""
        pairs = q_tokens * past_tokens + (q_tokens * (q_tokens + 1) // 2 if causal else q_tokens**2)
        return 4.0 * batch * self.query_width * pairs


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Heads of one layer of decode attention that reads its whole cache; Qwen3.8 27B's here."""

    query_heads: int = 24
    kv_heads: int = 4
    head_dim: int = 256

    def __post_init__(self) -> None:
        _check(vars(self))

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.query_heads // self.kv_heads
