"""Appending to a cache of any format in fused kernels: which file of `realkernels/append/` writes it, and how.

The bytes are those of `fmt.append`, which is the reference. Of NaN in bf16 and fp16 only that it is NaN is the same.
KVarN's tiles are summed in another order than torch's, so that scales may be a last bit apart and some codes move by
one: what is read then differs by about 1 % of its norm. Its sidecar is the same in every byte.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from math import sqrt
from typing import Any

import torch
import triton

from realkernels.append.groups import append_groups
from realkernels.append.kvarn_aside import move_aside, rotate_rows, write_aside
from realkernels.append.kvarn_places import place_tokens
from realkernels.append.kvarn_tile import quantise_tiles
from realkernels.append.per_token_head import append_per_token_head
from realkernels.append.places import part, rows
from realkernels.append.plain import append_plain
from realkernels.append.turboquant import append_turboquant
from realkernels.formats import Format, KVarN, Planes, exl3, kvarn, turboquant
from realkernels.formats import kvarn_sidecar as sidecar
from realkernels.formats.arithmetic import fixed_signs
from realkernels.formats.lloyd_max import centroids, midpoints
from realkernels.formats.slots import Slots, check_rows, slot_tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MOST_SLOTS = 2**31
"""Slots are divided in 32 bits."""

FEW_TOKENS = 64
"""Up to so many tokens a program takes one; a block of BLOCK_TOKENS beyond."""

BLOCK_TOKENS = 8
BLOCK_GROUPS = 64
INTERPRETED = 64
"""Largest block of the interpreter, which takes the time of an operation, not of an element."""

Launch = Callable[..., None]


def append(
    fmt: Format, planes: Planes, slots: Slots, keys: torch.Tensor, values: torch.Tensor, *, checked: bool = True
) -> None:
    """Quantise rows [n, kv_heads, head_dim], n >= 1, into slots, as `fmt.append` does.

    ValueError, with nothing written, for what does not fit. `checked=False` vouches for slots on the device, int64, in
    range and each once: nothing is read back then and it can be captured in a graph. Rows are float16, bfloat16 or
    float32 with any strides but the last, which is 1.
    """
    index = slot_tensor(planes, slots, checked=checked, distinct=True)
    check_rows(planes, index.numel(), keys, values)
    for name, given in (("keys", keys), ("values", values)):
        if given.dtype not in DTYPES:
            raise ValueError(f"{name} are {given.dtype}: the kernels take float16, bfloat16 and float32")
        if given.stride(-1) != 1:
            raise ValueError(f"elements of a row of {name} must be neighbours, they are {given.stride(-1)} apart")
    if planes.slots >= MOST_SLOTS:
        raise ValueError(f"the planes have {planes.slots} slots, the kernels take fewer than {MOST_SLOTS}")
    index, keys, values = index.contiguous(), keys.detach(), values.detach()
    if isinstance(fmt, KVarN):
        if checked:
            sidecar.plan(planes, index.tolist(), fmt.tile_tokens)
        _kvarn(fmt, planes, index, keys, values)
    else:
        _launcher(fmt.name)(fmt, planes, index, keys, values)


@lru_cache(maxsize=128)
def _launcher(name: str) -> Launch:
    if name in exl3.BITS or name in {"q8_0", "q4_0"}:
        return _groups
    if name in turboquant.BITS:
        return _turboquant
    return _per_token_head if name.endswith("_per_token_head") else _plain


def _block(tokens: int, device: torch.device, *, few: int = FEW_TOKENS, block: int = BLOCK_TOKENS) -> int:
    """Tokens (or groups) of a program."""
    if device.type == "cpu":
        return min(INTERPRETED, triton.next_power_of_2(tokens))
    return 1 if tokens <= few else block


def _options(planes: Planes, block: int) -> dict[str, Any]:
    """What all kernels of tokens and heads are told; a warp for each 256 elements."""
    width = triton.next_power_of_2(planes.head_dim)
    return {
        "PAGE": planes.page_tokens, "DIM": planes.head_dim, "WIDTH": width, "BLOCK": block,
        "num_warps": max(1, min(8, block * width // 512)), "enable_fp_fusion": False,
    }  # fmt: skip


def _grid(planes: Planes, tokens: int, block: int) -> tuple[int, int, int]:
    return -(-tokens // block), planes.kv_heads, 2


def _plain(fmt: Format, planes: Planes, index: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    count, views = index.numel(), planes.parts
    block = _block(count, planes.device)
    scales = [planes.sidecar.get(f"{plane}_scale", index) for plane in ("key", "value")]  # read by fp8 alone
    append_plain[_grid(planes, count, block)](
        rows(keys), rows(values), index, part(views["key_data"]), part(views["value_data"]), *scales, count,
        KIND=fmt.name, DEVICE=planes.device.type != "cpu", **_options(planes, block),
    )  # fmt: skip


def _per_token_head(fmt: Format, planes: Planes, index: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    count, views = index.numel(), planes.parts
    block, kind = _block(count, planes.device), fmt.name.split("_")[0]
    signs = fixed_signs(planes.head_dim, planes.device) if kind == "int4" else index
    data = [part(views[f"{plane}_data"]) for plane in ("key", "value")]
    append_per_token_head[_grid(planes, count, block)](
        rows(keys), rows(values), index, *data, part(views["key_scale"]), part(views["value_scale"]), signs, count,
        KIND=kind, **_options(planes, block),
    )  # fmt: skip


def _groups(fmt: Format, planes: Planes, index: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    count, views = index.numel(), fmt.views(planes)
    groups = planes.head_dim // exl3.GROUP
    total = count * planes.kv_heads * groups
    block = _block(total, planes.device, few=0, block=8 if count <= FEW_TOKENS else BLOCK_GROUPS)
    is_exl3 = fmt.name in exl3.BITS
    data = [views[f"{plane}_words" if is_exl3 else f"{plane}_data"] for plane in ("key", "value")]
    scales = [views[f"{plane}_scale"] for plane in ("key", "value")]
    key_bits, value_bits = exl3.BITS.get(fmt.name, (0, 0))
    steps = [(codes.stride(3), scale.stride(3)) for codes, scale in zip(data, scales, strict=True)]
    append_groups[(-(-total // block), 2)](
        rows(keys), rows(values), index, *map(part, data), *map(part, scales), count, *steps,
        PAGE=planes.page_tokens, HEADS=planes.kv_heads, GROUPS=groups, KIND="exl3" if is_exl3 else fmt.name,
        KEY_BITS=key_bits, VALUE_BITS=value_bits, BLOCK=block, num_warps=max(1, min(4, block // 16)),
        enable_fp_fusion=False,
    )  # fmt: skip


def _turboquant(fmt: Format, planes: Planes, index: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    count, views = index.numel(), planes.parts
    block, dim = _block(count, planes.device), planes.head_dim
    key_bits, value_bits = turboquant.BITS[fmt.name]
    tables = (table(key_bits, dim, planes.device) for table in (centroids, midpoints)) if key_bits < 8 else (index,) * 2
    norm = views["key_norm"] if key_bits < 8 else views["value_scale"]
    append_turboquant[_grid(planes, count, block)](
        rows(keys), rows(values), index, part(views["key_data"]), part(views["value_data"]), part(norm),
        part(views["value_scale"]), part(views["value_zero"]), *tables, 1 / sqrt(dim), count,
        KEY_BITS=key_bits, VALUE_BITS=value_bits, **_options(planes, block),
    )  # fmt: skip


def _kvarn(fmt: KVarN, planes: Planes, index: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Three launches for up to a tile's tokens, four for any number: all tiles are quantised together."""
    side, views, count, dim = planes.sidecar, fmt.views(planes), index.numel(), planes.head_dim
    key_bits, value_bits, tile = kvarn.SIZES[fmt.name]
    sides, several = side["tile_of_side"].numel(), count > tile
    most = min(count, sides + count // tile)  # tiles that an append completes: those begun before, and whole ones
    integers = partial(torch.empty, dtype=torch.int32, device=planes.device)
    slot_of_token, done = integers(count), integers(most, 2)
    last, source = (integers(sides, tile), integers(most, tile)) if several else (done, done)
    present = side["present"].view(torch.uint8)
    place_tokens[(1,)](
        index, side["side_of_tile"], side["tile_of_side"], present, present.view(torch.int64),
        side["sink"].view(torch.uint8), slot_of_token, done, last, source, count, sides, most, TILE=tile,
        SIDES=triton.next_power_of_2(sides), BLOCK=min(tile, triton.next_power_of_2(count)), SEVERAL=several,
        num_warps=1 if count <= 8 else 8, num_stages=1,
    )  # fmt: skip
    block = _block(count, planes.device)
    options = {"DIM": dim, "BLOCK": block, "num_warps": max(1, min(8, block * dim // 512)), "enable_fp_fusion": False}
    grid, pools = _grid(planes, count, block), [part(views[name]) for name in ("side_keys", "side_values")]
    halves = partial(torch.empty, keys.shape, dtype=torch.float16, device=planes.device)
    new = [rows(halves() if several else side[name][0]) for name in ("side_keys", "side_values")]
    if several:
        rotate_rows[grid](rows(keys), rows(values), *new, 1 / sqrt(dim), count, **options)
    else:
        write_aside[grid](
            rows(keys), rows(values), index, slot_of_token, *pools, 1 / sqrt(dim), count, TILE=tile, **options
        )
    names = ("key_data", "key_scale", "key_zero", "key_token_scale", "value_data", "value_channel_scale", "value_scale",
             "value_zero")  # fmt: skip
    parts = [(views[name], *views[name].stride()[:2]) for name in names]
    quantise_tiles[(most, planes.kv_heads, 2)](
        done, source, *pools, *new, *parts, KEY_BITS=key_bits, VALUE_BITS=value_bits, TILE=tile, DIM=dim,
        FRESH=several, DEVICE=planes.device.type != "cpu", num_warps=max(1, min(16, tile * dim // 2048)),
        enable_fp_fusion=False,
    )  # fmt: skip
    if several:
        move_aside[grid](*new, index, slot_of_token, last, *pools, count, TILE=tile, **options)
