"""Paged caches of any codec with poison around what is stored, and attention over them in float64."""

from dataclasses import dataclass
from typing import Any

import torch

from realkernels.codecs import codec_named
from realkernels.kernels.split_kv import PlanCase, TilePlan, Workspace

CPU = torch.device("cpu")


def a_plan(tile: int = 16, rows: int = 8, *, num_warps: int = 4, **given: Any) -> TilePlan:
    return TilePlan(tile=tile, rows=rows, num_warps=num_warps, stages=2, per_multiprocessor=1, **given)


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
        return pages.view(len(self.lengths), self.max_pages).int()

    def lengths_tensor(self) -> torch.Tensor:
        """As the kernels take them: int32 [batch]."""
        return torch.tensor(self.lengths, dtype=torch.int32)

    def query(self, seed: int = 1) -> torch.Tensor:
        """Standard normal [batch, q_tokens, query_heads, head_dim]."""
        source = torch.Generator().manual_seed(seed)
        shape = (len(self.lengths), self.q_tokens, self.query_heads, self.head_dim)
        return torch.randn(shape, generator=source).to(self.dtype)

    def truth(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Attention in float64; keys and values [pages, kv_heads, page_tokens, head_dim] as they are to be seen."""
        group = self.query_heads // self.kv_heads
        out = torch.zeros(query.shape, dtype=torch.float64)
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


@dataclass
class Coded:
    """A world's tokens in a codec; every slot that keeps none has NaN for its numbers or scales and arbitrary codes."""

    world: World
    name: str
    arrangement: str = "aligned"
    spread: float = 0.5
    """Of the logarithm of the tokens' lengths."""

    def __post_init__(self) -> None:
        world, source = self.world, torch.Generator().manual_seed(3)
        self.table, self.codec = world.table(), codec_named(self.name, arrangement=self.arrangement)
        self.form = self.codec.decode_form
        tiled, more = self.name.startswith("kvarn"), {}
        if tiled:
            tiles = world.page_tokens // self.codec.tile_tokens
            more = {"side_tiles": 4 * len(world.lengths), "sinks": [int(page) * tiles for page in self.table[:, 0]]}
        self.planes = self.codec.allocate(world.pages, world.page_tokens, world.kv_heads, world.head_dim, CPU, **more)
        self.views = self.codec.views(self.planes)
        for name, view in self.views.items():
            if view.is_floating_point() and not tiled and view.dim() > 1:
                view.fill_(torch.nan)
            elif name in {"key_data", "value_data"}:
                view.copy_(torch.randint(0, 256, view.shape, dtype=torch.uint8, generator=source))
                if self.name.startswith("fp8"):
                    view.fill_(0x7F)  # NaN
        source = torch.Generator().manual_seed(4)
        for row, length in enumerate(world.lengths):
            if length:
                tokens = torch.randn(2, length, world.kv_heads, world.head_dim, generator=source)
                tokens *= torch.exp(self.spread * torch.randn(2, length, world.kv_heads, 1, generator=source))
                self.codec.append(self.planes, self.slots(row, length), tokens[0], tokens[1])

    def slots(self, row: int, length: int) -> torch.Tensor:
        """Where a sequence's tokens lie."""
        token, tokens = torch.arange(length), self.world.page_tokens
        return self.table[row, token // tokens].long() * tokens + token % tokens

    def poison(self, plane: str, *, row: int, token: int, head: int) -> None:
        """NaN in a plane for a token that is stored."""
        tokens = self.world.page_tokens
        self.views[plane][self.table[row, token // tokens].long(), head, token % tokens] = torch.nan

    def stored(self) -> list[torch.Tensor]:
        """K and V [pages, kv_heads, page_tokens, head_dim] float64 as the codec reads them; NaN where none is kept."""
        world = self.world
        shape = (world.pages, world.page_tokens, world.kv_heads, world.head_dim)
        slots = torch.cat([self.slots(row, length) for row, length in enumerate(world.lengths)])
        seen = torch.full((2, *shape), torch.nan, dtype=torch.float64)
        for part, read in zip(seen, self.codec.dequantise(self.planes, slots), strict=True):
            part.view(-1, *shape[2:])[slots] = read.double()
        return list(seen.transpose(2, 3))

    def attend(
        self, plan: TilePlan | None = None, *, splits: int = 3, amplify: float | torch.Tensor = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and truth; by the codec's own plan where none is given."""
        world, query = self.world, self.world.query() * amplify
        workspace = Workspace.allocate(
            batch=len(world.lengths), q_tokens=world.q_tokens, query_heads=world.query_heads,
            head_dim=world.head_dim, splits=splits, device=CPU,
        )  # fmt: skip
        workspace.partial.fill_(torch.nan)
        workspace.statistics.fill_(torch.nan)
        rows = world.query_heads // world.kv_heads * world.q_tokens
        plan = plan or self.form.plan(PlanCase(q_rows=rows, head_dim=world.head_dim))
        out = torch.full_like(query, torch.nan)
        self.form.attend(
            query, self.views, self.table, world.lengths_tensor(), out, workspace, plan=plan,
            page_tokens=world.page_tokens, softmax_scale=world.head_dim**-0.5,
        )  # fmt: skip
        return out, world.truth(query, *self.stored(), self.table)
