"""Paged caches with random pages, poison around what is stored, and attention over them in float64."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class World:
    """Sizes of a decode attention call."""

    lengths: tuple[int, ...]
    q_tokens: int = 1
    query_heads: int = 12
    kv_heads: int = 2
    head_dim: int = 32
    page_tokens: int = 32
    dtype: torch.dtype = torch.float16
    device: str = "cpu"

    @property
    def max_pages(self) -> int:
        """Pages of the longest sequence."""
        return max(1, -(-max(self.lengths) // self.page_tokens))

    @property
    def pages(self) -> int:
        """One more than the table names: page 0 belongs to nobody."""
        return len(self.lengths) * self.max_pages + 1

    def table(self, seed: int = 0) -> torch.Tensor:
        """Page numbers, int32 [batch, max_pages]: a random permutation of pages 1.. ."""
        source = torch.Generator().manual_seed(seed)
        pages = torch.randperm(self.pages - 1, generator=source) + 1
        return pages.view(len(self.lengths), self.max_pages).int().to(self.device)

    def lengths_tensor(self) -> torch.Tensor:
        """As the kernels take them: int32 [batch]."""
        return torch.tensor(self.lengths, dtype=torch.int32, device=self.device)

    def query(self, seed: int = 1) -> torch.Tensor:
        """Standard normal [batch, q_tokens, query_heads, head_dim]."""
        source = torch.Generator().manual_seed(seed)
        shape = (len(self.lengths), self.q_tokens, self.query_heads, self.head_dim)
        return torch.randn(shape, generator=source).to(self.dtype).to(self.device)

    def stored(self, table: torch.Tensor) -> torch.Tensor:
        """Slots, bool [pages, page_tokens], that a sequence keeps a token in."""
        held = torch.zeros(self.pages, self.page_tokens, dtype=torch.bool, device=self.device)
        for row, length in enumerate(self.lengths):
            for number in range(-(-length // self.page_tokens)):
                held[table[row, number].long(), : length - number * self.page_tokens] = True
        return held

    def truth(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Attention in float64; keys and values [pages, kv_heads, page_tokens, head_dim] as they are to be seen."""
        group = self.query_heads // self.kv_heads
        out = torch.zeros(query.shape, dtype=torch.float64, device=query.device)
        for row, length in enumerate(self.lengths):
            pages = table[row, : -(-length // self.page_tokens)].long()
            k, v = (part[pages].double().transpose(0, 1).flatten(1, 2)[:, :length] for part in (keys, values))
            for token in range(self.q_tokens):
                seen = length - self.q_tokens + token + 1
                if seen <= 0:
                    continue
                q = query[row, token].double().view(self.kv_heads, group, self.head_dim)
                weights = (q @ k[:, :seen].mT * self.head_dim**-0.5).softmax(-1)
                out[row, token] = (weights @ v[:, :seen]).view(self.query_heads, self.head_dim)
        return out


def relative_error(out: torch.Tensor, truth: torch.Tensor) -> float:
    """Norm of the difference over the norm of the truth; NaN stays NaN."""
    return float((out.double() - truth).norm() / truth.norm().clamp(min=1e-30))
