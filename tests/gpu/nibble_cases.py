"""Caches of 4-bit and coded formats on a device, filled, attended over, and read back for float64."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from realkernels.codecs.decode import FORMS
from realkernels.formats import format_named
from realkernels.kernels.split_kv import PlanCase, TilePlan
from tests.realkernels.kernels.worlds import World, relative_error

CONTEXT, SEQUENCES = 131072, 8
DEVICE = torch.device("cuda:0")


@dataclass
class Case:
    """A world's caches in a format."""

    name: str
    arrangement: str
    world: World

    def __post_init__(self) -> None:
        world = self.world
        self.form = FORMS[self.name]
        self.tolerance = 1.5e-2 if self.name.startswith("turboquant") else 2e-3  # a polynomial: more at rare codes
        self.format = format_named(self.name, arrangement=self.arrangement)
        more: dict[str, Any] = {}
        self.table = world.table(seed=time.time_ns() % 2**31)
        if self.name.startswith("kvarn"):
            tiles = world.page_tokens // self.format.tile_tokens
            sinks = [int(page) * tiles for page in self.table[:, 0]]
            more = {"side_tiles": 4 * len(sinks), "sinks": sinks}
        self.planes = self.format.allocate(
            world.pages, world.page_tokens, world.kv_heads, world.head_dim, DEVICE, **more
        )
        self.views = self.format.views(self.planes)

    def append(self) -> None:
        """Random tokens, each sequence's in order, of lengths that differ."""
        for row, length in enumerate(self.world.lengths):
            if not length:
                continue
            token = torch.arange(length, device=DEVICE)
            tokens = self.world.page_tokens
            slots = self.table[row, token // tokens].long() * tokens + token % tokens
            rows = torch.randn(2, length, self.world.kv_heads, self.world.head_dim, device=DEVICE)
            rows *= torch.exp(0.5 * torch.randn(2, length, self.world.kv_heads, 1, device=DEVICE))
            self.format.append(self.planes, slots, rows[0], rows[1])

    def fill(self) -> None:
        """Random codes and scales of tokens about 1: faster than quantising a million tokens."""
        for view, centre, spread in fillings(self.name):
            target = self.views[view]
            if centre is None:
                for part in target.split(256):
                    kind = part.dtype
                    part.copy_(torch.randn(part.shape, device=DEVICE) if kind.is_floating_point else bytes_like(part))
                continue
            noise = torch.randn(target.shape, device=DEVICE)
            target.copy_(centre * torch.exp(spread * noise) if centre > 0 else centre + spread * noise)
        if self.name.startswith("int4"):
            for scale in (self.views["key_scale"], self.views["value_scale"]):
                bits = scale.contiguous().view(torch.int32) & ~15
                scale.copy_((bits | torch.randint_like(bits, 5, 11)).view(torch.float32))
        if self.name.startswith("kvarn"):
            self.views["side_of_tile"].fill_(-1)
            for row in range(len(self.world.lengths)):
                for place, tile in enumerate((0, CONTEXT // 128 - 1)):
                    at = int(self.table[row, tile // 2]) * 2 + tile % 2
                    self.views["side_of_tile"][at] = 2 * row + place

    def attend(
        self, query: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor, workspace: Any
    ) -> None:
        """One call of the kernel with its own plan."""
        world = self.world
        self.form.attend(
            query, self.views, table, lengths, out, workspace, plan=self.plan(query), page_tokens=world.page_tokens,
            softmax_scale=world.head_dim**-0.5,
        )  # fmt: skip

    def plan(self, query: torch.Tensor) -> TilePlan:
        """The kernel's own, for aligned rows."""
        rows = self.world.query_heads // self.world.kv_heads * query.shape[1]
        sizes = {"head_dim": self.world.head_dim, "tile_tokens": self.format.tile_tokens}
        return self.form.plan(PlanCase.on(DEVICE, q_rows=rows, **sizes))

    def workspace(self, query: torch.Tensor, *, splits: int | None = None) -> Any:
        """Poisoned."""
        world = self.world
        sizes = {
            "batch": query.shape[0], "q_tokens": query.shape[1], "query_heads": world.query_heads,
            "head_dim": world.head_dim, "device": DEVICE,
        }  # fmt: skip
        made = self.plan(query).workspace(
            **sizes, kv_heads=world.kv_heads, tokens=max(world.lengths), other_splits=self.form.other_splits
        )
        if splits:
            made = type(made).allocate(**sizes, splits=splits)
        made.partial.fill_(torch.nan)
        made.statistics.fill_(torch.nan)
        return made

    def read(self) -> list[torch.Tensor]:
        """K and V [pages, kv_heads, page_tokens, head_dim] as a kernel sees them."""
        every = torch.arange(self.planes.slots, device=DEVICE)
        shape = (self.world.pages, self.world.page_tokens, self.world.kv_heads, self.world.head_dim)
        return [rows.view(shape).transpose(1, 2) for rows in self.format.read(self.planes, every, checked=False)]

    def error(self, query: torch.Tensor, out: torch.Tensor, seen: list[torch.Tensor]) -> float:
        """Largest of the sequences' relative errors."""
        truth = self.world.truth(query, seen[0], seen[1], self.table)
        return max(relative_error(a, b) for a, b in zip(out, truth, strict=True))


def bytes_like(part: torch.Tensor) -> torch.Tensor:
    return torch.randint(0, 256, part.shape, dtype=torch.uint8, device=DEVICE)


def fillings(name: str) -> Iterator[tuple[str, float | None, float]]:
    """View, centre (None: random throughout) and spread."""
    yield from (("key_data", None, 0.0), ("value_data", None, 0.0))
    if name.startswith("int4"):
        yield from (("key_scale", 0.2, 0.3), ("value_scale", 0.2, 0.3))
    elif name.startswith("turboquant"):
        yield from (("key_norm", 16.0, 0.2), ("value_scale", 0.2, 0.3), ("value_zero", -1.5, 0.3))
    elif name.startswith("kvarn"):
        yield from (("key_scale", 0.2, 0.2), ("key_zero", -1.5, 0.3), ("key_token_scale", 1.0, 0.2))
        yield from (("value_channel_scale", 1.0, 0.2), ("value_scale", 0.8, 0.3), ("value_zero", -1.2, 0.3))
        yield from (("side_keys", None, 0.0), ("side_values", None, 0.0))
    elif name != "bf16":
        for view in ("key_scale", "value_scale"):
            yield view, {"q4_0": 0.2, "q8_0": 0.0125}.get(name, 1.6), 0.3
