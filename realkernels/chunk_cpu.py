"""Attention over a piece of a context, its folding and the unpacking of pieces in plain torch: what needs no kernel."""

from collections.abc import Callable
from functools import partial
from math import log

import torch

from realkernels.formats import Format, Planes


def softmax_piece(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention written out in float32: (output [rows, heads, dim], log-sum-exp float32 [heads, rows]).

    query [rows, heads, dim], keys and values [tokens, kv_heads, dim]; causal: the last row sees the last token.
    """
    group = query.shape[1] // keys.shape[1]
    keys, values = (part.float().repeat_interleave(group, dim=1) for part in (keys, values))
    scores = torch.einsum("rhd,thd->hrt", query.float(), keys) * query.shape[-1] ** -0.5
    if causal:
        rows, tokens = scores.shape[1:]
        hidden = torch.ones(rows, tokens, dtype=torch.bool, device=query.device).triu(tokens - rows + 1)
        scores = scores.masked_fill(hidden, float("-inf"))
    lse = scores.logsumexp(dim=-1)
    output = torch.einsum("hrt,thd->rhd", (scores - lse[..., None]).exp(), values)
    return output.to(query.dtype).contiguous(), lse


def fold_in_torch(
    part: torch.Tensor, lse: torch.Tensor, total: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *,
    first: bool, last: bool,
) -> None:  # fmt: skip
    """`realkernels/fold.py` without a kernel."""
    o, mine = part.float(), lse.T / log(2)
    if not first:
        both = torch.logaddexp2(mine, weight)
        o = o * (mine - both).exp2()[..., None] + total * (weight - both).exp2()[..., None]
        mine = both
    if last:
        out.copy_(o)
    else:
        total.copy_(o)
        weight.copy_(mine)


def reader(fmt: Format, planes: Planes) -> Callable[..., None]:
    """What `realkernels.expand.expander` gives, by the format's own `read`."""
    return partial(_read, fmt, planes)


def _read(
    fmt: Format, planes: Planes, table: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, first: int, last: int
) -> None:  # fmt: skip
    token = torch.arange(first, last, device=table.device)
    slots = table[token // planes.page_tokens].long() * planes.page_tokens + token % planes.page_tokens
    for rows, read in zip((keys, values), fmt.read(planes, slots, checked=False), strict=True):
        rows[: last - first].copy_(read)
