"""Which fused kernel of `realkernels/attend/` reads a format, and its calls over the sequences of a pool.

A format that is not listed, or whose file is not there, has no kernel on a GPU: `missing` says so, nothing stands in.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from importlib import import_module
from inspect import signature
from types import ModuleType
from typing import Any

import torch
from triton.errors import TritonError

from realkernels.attend.plan import PROLOGUE_TILES, TilePlan, alignment
from realkernels.attend.splits import MAX_SPLITS, Workspace, resident_programs
from realkernels.bounds import check_pages
from realkernels.caches.paged import PAGE_TOKENS, NoKernel, PagedCache
from realkernels.codecs import Codec as Format

Options = Callable[[ModuleType], Mapping[str, Any]]


def _no_options(_module: ModuleType) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True, kw_only=True)
class Fused:
    """One kernel: its file in `realkernels/attend/`, its function, and the views that it takes in their order.

    No views: it takes all of them by name, and is told the tokens of a page.
    """

    module: str
    function: str
    views: tuple[str, ...] = ("key_data", "value_data", "key_scale", "value_scale")
    options: Options = field(default=_no_options)
    plan: str = "plan_words"
    """Of the same file: chooses a plan by query rows, head size, device and what else it asks for of what is known."""
    other_splits: int = 0
    """Splits of a sequence that do not read its run of tiles: KVarN's last, which reads the sidecar."""
    least_capability: tuple[int, int] = (8, 0)


def _kind(kind: str) -> Options:
    return lambda _module: {"kind": kind}


def _codes(key: str, value: str) -> Options:
    return lambda module: {"key_codes": module.CODES[key], "value_codes": module.CODES[value]}


def _paged(_module: ModuleType) -> Mapping[str, Any]:
    return {"page_tokens": PAGE_TOKENS}


_PLAIN = Fused(module="decode_plain", function="attend_plain", views=("key_data", "value_data"), plan="plan_plain")
_FP8 = Fused(
    module="decode_scaled", function="attend_scaled", options=_kind("fp8"), plan="plan_scaled", least_capability=(8, 9)
)


def _groups(key: str, value: str) -> Fused:
    return Fused(module="decode_groups", function="attend_groups", options=_codes(key, value))


KERNELS = {
    "bf16": _PLAIN,
    "fp16": _PLAIN,
    "fp8": _FP8,
    "fp8_per_token_head": _FP8,
    "int8_per_token_head": Fused(
        module="decode_scaled", function="attend_scaled", options=_kind("int8"), plan="plan_scaled",
    ),
    "int4_per_token_head": Fused(module="decode_nibble", function="attend_int4"),
    "q8_0": _groups("q8_0", "q8_0"),
    "q4_0": _groups("q4_0", "q4_0"),
    **{f"exl3_k{k}v{v}": _groups(f"exl3_{k}", f"exl3_{v}") for k in (4, 8) for v in (4, 8)},
    **dict.fromkeys(
        ("kvarn_k4v2_g128", "kvarn_k4v4_g128", "kvarn_k4v2_g64"),
        Fused(module="decode_kvarn", function="attend_kvarn", views=(), options=_paged, other_splits=1),
    ),
    "turboquant_4bit_nc": Fused(
        module="decode_turboquant", function="attend_turboquant",
        views=("key_data", "value_data", "key_norm", "value_scale", "value_zero"),
    ),
}  # fmt: skip
"""By the format's name."""


def missing(fmt: Format, device: torch.device) -> str:
    """Empty, or in one line why no kernel reads this format on `device`."""
    fused = KERNELS.get(fmt.name)
    if fused is None:
        return f"no fused kernel reads {fmt.name}: there are {', '.join(KERNELS)}"
    try:
        _function(fused)
    except (ImportError, AttributeError) as absent:
        return f"the kernel of {fmt.name} is not there: {str(absent).splitlines()[0]}"
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else fused.least_capability
    if capability < fused.least_capability:
        needs, has = (".".join(str(part) for part in each) for each in (fused.least_capability, capability))
        return f"the kernel of {fmt.name} needs compute capability {needs}, this device has {has}"
    return ""


def _function(fused: Fused) -> tuple[ModuleType, Callable[..., object]]:
    module = import_module(f"realkernels.attend.{fused.module}")
    return module, getattr(module, fused.function)


def attentions(
    pool: PagedCache, parts: Sequence[range], *, query_tokens: int
) -> list[Callable[[torch.Tensor, torch.Tensor], object]]:
    """A call for each part of the pool's sequences, all of one size; each takes (query, out) in the stored basis.

    IndexError, before anything is launched, for a page table that leaves the planes.
    """
    fused, shape, device = KERNELS[pool.format.name], pool.shape, pool.table.device
    module, function = _function(fused)
    rows, batch = shape.group * query_tokens, len(parts[0])
    plan = plan_for(pool, rows)
    tile = pool.format.tile_tokens if pool.format.tile_tokens > 1 else plan.tile
    splits = even_splits(
        pairs=batch * shape.kv_heads * plan.blocks(rows), tiles=-(-pool.tokens // tile),
        slots=resident_programs(device, plan.per_multiprocessor), extra=fused.other_splits,
        prologue=plan.prologue_tiles,
    )  # fmt: skip
    workspace = Workspace.allocate(
        batch=batch, q_tokens=query_tokens, query_heads=shape.query_heads, head_dim=shape.head_dim, splits=splits,
        device=device,
    )  # fmt: skip
    views = pool.format.views(pool.planes)
    planes = [views[name] for name in fused.views] or [views]
    lengths = torch.full((batch,), pool.tokens, dtype=torch.int32, device=device)
    for part in parts:
        check_pages(
            pool.table[part.start : part.stop], lengths, pages=pool.planes.pages, page_tokens=pool.planes.page_tokens
        )
    options = {"softmax_scale": shape.head_dim**-0.5, "plan": plan, **fused.options(module)}

    def call(table: torch.Tensor, query: torch.Tensor, out: torch.Tensor) -> None:
        try:
            function(query, *planes, table, lengths, out, workspace, **options)
        except TritonError as wrong:
            first = (str(wrong).strip() or type(wrong).__name__).splitlines()[0]
            raise NoKernel(f"the kernel of {pool.format.name} does not start here: {first}") from wrong

    return [partial(call, pool.table[part.start : part.stop]) for part in parts]


@lru_cache(maxsize=1024)
def even_splits(*, pairs: int, tiles: int, slots: int, extra: int = 0, prologue: int = PROLOGUE_TILES) -> int:
    """Splits of each of `pairs` (sequences x KV heads x row blocks) with which `slots` programs at a time end soonest.

    Filling the device once leaves up to half of it idle where the pairs do not divide it; more, shorter splits fill
    the last round better. `prologue`: tiles' time that a round costs beside. Of equals the fewest. `extra` splits of
    each pair, which are counted too, read other things.
    """

    def rounds(splits: int) -> int:
        return -(-pairs * (splits + extra) // slots) * (-(-tiles // splits) + prologue)

    return min(range(1, min(tiles, MAX_SPLITS) + 1), key=rounds) + extra


def plan_for(pool: PagedCache, query_rows: int) -> TilePlan:
    """How the kernel is cut into programs for `query_rows` rows of a KV head: as its own file says."""
    fused = KERNELS[pool.format.name]
    module, _ = _function(fused)
    chooser = getattr(module, fused.plan)
    views = pool.format.views(pool.planes)
    given = {
        "query_rows": query_rows, "head_dim": pool.shape.head_dim, "device": pool.table.device,
        "aligned": alignment(views["key_data"], views["value_data"]),
        "per_token": "key_scale" in views and views["key_scale"].dim() > 1, **fused.options(module),
    }  # fmt: skip
    return chooser(**{name: value for name, value in given.items() if name in signature(chooser).parameters})
