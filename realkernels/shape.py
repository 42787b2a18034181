"""The numbers that a sparse-attention cache is made of, in plain integers."""

from dataclasses import dataclass


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
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} is {value}, which is below 1")
        if self.query_heads % self.kv_heads:
            raise ValueError(f"{self.query_heads} query heads are not a multiple of {self.kv_heads} kv heads")
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

    @property
    def dense_limit(self) -> int:
        """Longest context that is read whole: 4 x topk + 3 tokens."""
        return 4 * self.topk + 3

    def blocks(self, tokens: int) -> int:
        """Complete blocks of a context, each with a pooled key."""
        return tokens // self.ratio
