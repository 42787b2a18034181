"""Caches of 4-bit and coded formats on a device, filled, attended over, and read back for float64."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from realkernels.attend.decode_groups import CODES, attend_groups
from realkernels.attend.decode_groups import plan_words as plan_groups
from realkernels.attend.decode_kvarn import attend_kvarn
from realkernels.attend.decode_kvarn import plan_words as plan_kvarn
from realkernels.attend.decode_nibble import attend_int4
from realkernels.attend.decode_nibble import plan_words as plan_int4
from realkernels.attend.decode_plain import attend_plain, plan_plain
from realkernels.attend.decode_turboquant import attend_turboquant
from realkernels.attend.decode_turboquant import plan_words as plan_turboquant
from realkernels.attend.plan import TilePlan
from realkernels.codecs import codec_named
from tests.realkernels.attend.worlds import World, relative_error

CONTEXT, SEQUENCES = 131072, 8
DEVICE = torch.device("cuda:0")
SCALED = ("key_data", "value_data", "key_scale", "value_scale")


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A format's kernel, its plan and its arguments."""

    attend: Callable[..., Any]
    plan: Callable[..., TilePlan]
    views: tuple[str, ...] = SCALED
    options: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 2e-3


def kernel_of(name: str) -> Kernel:
    if name == "bf16":
        return Kernel(attend=attend_plain, plan=plan_plain, views=SCALED[:2])
    if name == "int4_per_token_head":
        return Kernel(attend=attend_int4, plan=plan_int4)
    if name.startswith("kvarn"):
        return Kernel(attend=attend_kvarn, plan=plan_kvarn, views=())
    if name.startswith("turboquant"):  # the polynomial: 1.9e-3 of K, more at rare codes
        views = ("key_data", "value_data", "key_norm", "value_scale", "value_zero")
        return Kernel(attend=attend_turboquant, plan=plan_turboquant, views=views, tolerance=1.5e-2)
    names = (name, name) if name in CODES else (f"exl3_{name[6]}", f"exl3_{name[8]}")
    codes = {"key_codes": CODES[names[0]], "value_codes": CODES[names[1]]}
    return Kernel(attend=attend_groups, plan=lambda **sizes: plan_groups(**sizes, **codes), options=codes)


@dataclass
class Case:
    """A world's caches in a format."""

    name: str
    arrangement: str
    world: World

    def __post_init__(self) -> None:
        world = self.world
        self.kernel = kernel_of(self.name)
        self.format = codec_named(self.name, arrangement=self.arrangement)
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
        world, options = self.world, dict(self.kernel.options)
        planes = [self.views[name] for name in self.kernel.views] or [self.views]
        if self.name.startswith("kvarn"):
            options["page_tokens"] = world.page_tokens
        self.kernel.attend(
            query, *planes, table, lengths, out, workspace, softmax_scale=world.head_dim**-0.5, **options
        )

    def workspace(self, query: torch.Tensor, *, splits: int | None = None) -> Any:
        """Poisoned."""
        world = self.world
        rows = world.query_heads // world.kv_heads * query.shape[1]
        plan = self.kernel.plan(query_rows=rows, head_dim=world.head_dim, device=DEVICE)
        made = plan.workspace(query, kv_heads=world.kv_heads, max_tokens=max(world.lengths))
        if splits or made.splits < 2:
            made = type(made).allocate(
                batch=query.shape[0], q_tokens=query.shape[1], query_heads=world.query_heads,
                head_dim=world.head_dim, splits=splits or 2, device=DEVICE,
            )  # fmt: skip
        made.partial.fill_(torch.nan)
        made.statistics.fill_(torch.nan)
        return made

    def read(self) -> list[torch.Tensor]:
        """K and V [pages, kv_heads, page_tokens, head_dim] as a kernel sees them."""
        every = torch.arange(self.planes.slots, device=DEVICE)
        shape = (self.world.pages, self.world.page_tokens, self.world.kv_heads, self.world.head_dim)
        return [rows.view(shape).transpose(1, 2) for rows in self.codec.dequantise(self.planes, every, checked=False)]

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
