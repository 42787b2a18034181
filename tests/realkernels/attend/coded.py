"""Caches of coded formats with poison around what is stored, attended over by their kernels in the interpreter."""

from dataclasses import dataclass, field
from typing import Any

import torch

from realkernels.attend.decode_groups import CODES, attend_groups
from realkernels.attend.decode_kvarn import attend_kvarn
from realkernels.attend.decode_nibble import attend_int4
from realkernels.attend.decode_turboquant import attend_turboquant
from realkernels.attend.plan import TilePlan
from realkernels.attend.splits import Workspace
from realkernels.codecs import codec_named
from tests.realkernels.attend.worlds import World

CPU = torch.device("cpu")


def a_plan(tile: int = 16, rows: int = 8, *, sets: int = 1, num_warps: int = 2) -> TilePlan:
    return TilePlan(tile=tile, rows=rows, sets=sets, num_warps=num_warps, stages=2, per_multiprocessor=1, wide=True)


@dataclass
class Coded:
    """A world's tokens in a format; every slot that keeps none has NaN for its scales and arbitrary codes."""

    world: World
    name: str
    arrangement: str = "aligned"
    spread: float = 0.5
    """Of the logarithm of the tokens' lengths."""
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        world, source = self.world, torch.Generator().manual_seed(3)
        self.table = world.table()
        self.format = codec_named(self.name, arrangement=self.arrangement)
        more: dict[str, Any] = {}
        if self.name.startswith("kvarn"):
            tiles = world.page_tokens // self.format.tile_tokens
            more = {"side_tiles": 4 * len(world.lengths), "sinks": [int(page) * tiles for page in self.table[:, 0]]}
        self.planes = self.format.allocate(world.pages, world.page_tokens, world.kv_heads, world.head_dim, CPU, **more)
        self.views = self.format.views(self.planes)
        for name, view in self.views.items():
            if name in {"key_data", "value_data"}:
                view.copy_(torch.randint(0, 256, view.shape, dtype=torch.uint8, generator=source))
            elif view.is_floating_point() and not self.name.startswith("kvarn"):
                view.fill_(torch.nan)
        for row, length in enumerate(world.lengths):
            if length:
                tokens = torch.randn(2, length, world.kv_heads, world.head_dim, generator=source)
                tokens *= torch.exp(self.spread * torch.randn(2, length, world.kv_heads, 1, generator=source))
                self.format.append(self.planes, self.slots(row, length), tokens[0], tokens[1])

    def slots(self, row: int, length: int) -> torch.Tensor:
        """Where a sequence's tokens lie."""
        token, tokens = torch.arange(length), self.world.page_tokens
        return self.table[row, token // tokens].long() * tokens + token % tokens

    def call(self, query: torch.Tensor, out: torch.Tensor, workspace: Workspace, plan: TilePlan | None) -> None:
        """The format's kernel."""
        world, views = self.world, self.views
        rest = (self.table, world.lengths_tensor(), out, workspace)
        named = {"softmax_scale": world.head_dim**-0.5, "plan": plan}
        pair = (views["key_data"], views["value_data"])
        if self.name.startswith("kvarn"):
            attend_kvarn(query, views, *rest, page_tokens=world.page_tokens, **named)
        elif self.name.startswith("turboquant"):
            attend_turboquant(
                query, *pair, views["key_norm"], views["value_scale"], views["value_zero"], *rest, **named
            )
        elif self.name.startswith("int4"):
            attend_int4(query, *pair, views["key_scale"], views["value_scale"], *rest, **named)
        else:
            names = (self.name,) * 2 if self.name in CODES else (f"exl3_{self.name[6]}", f"exl3_{self.name[8]}")
            attend_groups(
                query, *pair, views["key_scale"], views["value_scale"], *rest,
                key_codes=CODES[names[0]], value_codes=CODES[names[1]], **named,
            )  # fmt: skip

    def attend(
        self, plan: TilePlan | None = None, *, splits: int = 3, amplify: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and truth."""
        world, query = self.world, self.world.query() * amplify
        workspace = Workspace.allocate(
            batch=len(world.lengths), q_tokens=world.q_tokens, query_heads=world.query_heads,
            head_dim=world.head_dim, splits=splits, device=CPU,
        )  # fmt: skip
        workspace.partial.fill_(torch.nan)
        workspace.statistics.fill_(torch.nan)
        out = torch.full_like(query, torch.nan)
        self.call(query, out, workspace, plan or a_plan())
        every = torch.arange(self.planes.slots)
        shape = (world.pages, world.page_tokens, world.kv_heads, world.head_dim)
        keys, values = (rows.view(shape).transpose(1, 2) for rows in self.codec.dequantise(self.planes, every))
        return out, world.truth(query, keys, values, self.table)
