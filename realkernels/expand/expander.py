"""Which kernel unpacks a format, and a pool's planes unpacked piece by piece by it."""

from collections.abc import Callable
from functools import partial

import torch

from realkernels.expand import codes
from realkernels.expand.kvarn import expand_kvarn
from realkernels.expand.plain import expand_plain
from realkernels.expand.rows import Codes, expand_rows
from realkernels.formats import Format, KVarN, Planes

Expand = Callable[..., None]
"""(table, keys, values, first=, last=): tokens of a sequence into the first rows of keys and values."""

GROUP = 32


def _codes(key: int, value: int, **given: object) -> Callable[[int], Codes]:
    return lambda _head_dim: Codes(key=key, value=value, **given)  # type: ignore[arg-type]


def _grouped(key: int, value: int) -> Callable[[int], Codes]:
    return lambda head_dim: Codes(key=key, value=value, groups=head_dim // GROUP)


_CELLS = {4: codes.CELLS4.value, 8: codes.CELLS8.value}
ROWS = {
    "fp8": _codes(codes.E4M3.value, codes.E4M3.value, of_layer=True),
    "fp8_per_token_head": _codes(codes.E4M3.value, codes.E4M3.value),
    "int8_per_token_head": _codes(codes.INT8.value, codes.INT8.value),
    "int4_per_token_head": _codes(codes.INT4.value, codes.INT4.value),
    "q8_0": _grouped(codes.INT8.value, codes.INT8.value),
    "q4_0": _grouped(codes.CENTRED.value, codes.CENTRED.value),
    **{f"exl3_k{key}v{value}": _grouped(_CELLS[key], _CELLS[value]) for key in (4, 8) for value in (4, 8)},
    "turboquant_4bit_nc": _codes(
        codes.CENTROIDS.value, codes.AFFINE.value, key_scale="key_norm", value_zero="value_zero"
    ),
}
"""Formats whose tokens are quantised on their own, by name, with what their planes hold at a head size."""

PLAIN = ("bf16", "fp16", "fp32")


def missing(fmt: Format) -> str:
    """Empty, or in one line why no kernel unpacks this format."""
    if fmt.name in ROWS or fmt.name in PLAIN or isinstance(fmt, KVarN):
        return ""
    return f"no kernel unpacks {fmt.name}: there are {', '.join((*PLAIN, *ROWS))} and kvarn"


def expander(fmt: Format, planes: Planes) -> Expand:
    """The kernel of a format on planes of it; ValueError where there is none, or where parts are not aligned."""
    reason = missing(fmt)
    if reason:
        raise ValueError(reason)
    views = fmt.views(planes)
    for name, view in views.items():
        if view.data_ptr() % view.element_size():
            raise ValueError(f"{name} begins {view.data_ptr() % view.element_size()} B off its type of {view.dtype}")
    if isinstance(fmt, KVarN):
        return partial(expand_kvarn, views, page_tokens=planes.page_tokens)
    if fmt.name in PLAIN:
        return partial(expand_plain, views, page_tokens=planes.page_tokens)
    table: torch.Tensor | None = None
    if fmt.name.startswith("turboquant"):
        table = fmt.centroids(planes.head_dim, planes.device)  # type: ignore[attr-defined]
    given = {"page_tokens": planes.page_tokens, "centroids": table}
    return partial(expand_rows, views, ROWS[fmt.name](planes.head_dim), **given)
