"""Whether tiles of a KVarN cache are quantised right, whatever order the sums of their normalisation were taken in.

The iteration converges, and the unevenness of its last states ties within rounding: two correct implementations may
keep different states, whose column scales differ in nearly every bit and serve equally well. So a tile is right if

* its column scales are those of a state (worked out in float64) that is as even as the most even one, and
* its row scales, zeros and codes are what these column scales make of its rows.

Neither leaves room for scales that are 1 % off, for codes that are shifted or for rows that are swapped.
"""

from collections.abc import Iterator, Sequence

import torch

from realkernels.codecs.arithmetic import affine_codes, over, unpack
from realkernels.codecs.codec import Planes
from realkernels.codecs.kvarn import LARGEST_HALF, SIZES, KVarN, states

AS_EVEN = 1e-5
"""Relative difference of two states' unevenness that some ten roundings of float32 leave."""

TWO_ULP = 2.0**-9
"""Relative difference of column scales of one state: float32 sums, then float16."""

ONE_ULP = 2.0**-10
"""Of row scales and zeros, which follow from the column scales as they are stored."""

MOST_MOVED = 0.002
"""Share of a tile's codes that the last bit of a quotient by the stored scale may move, by one."""


def tile_faults(
    codec: KVarN, planes: Planes, tiles: Sequence[int], keys: torch.Tensor, values: torch.Tensor
) -> list[str]:  # fmt: skip
    """In a line each what is wrong with tiles that hold these rows [tiles x G, kv_heads, head_dim]; empty if nothing.

    Rows are in the model's basis, as they were appended. Of a row that is not finite only the codes are looked at.
    """
    key_bits, value_bits, tokens = SIZES[codec.name]
    at = torch.tensor(list(tiles), device=planes.device)
    parts = {name: part[at] for name, part in planes.parts.items()}
    found = []
    for plane, rows, bits in (("K", keys, key_bits), ("V", values, value_bits)):
        x = codec.rotate_query(rows.to(planes.device).float()).half().float().unflatten(0, (-1, tokens)).transpose(1, 2)
        lost = ~x.isfinite().all(dim=-1)
        x = torch.where(lost[..., None], 0.0, x)
        all_own = torch.ones_like(x[..., 0, :], dtype=torch.bool)
        if plane == "K":
            x, column, kept, own = x.mT, parts["key_token_scale"], all_own, ~lost
            codes, scale, zero = (parts[name] for name in ("key_data", "key_scale", "key_zero"))
        else:
            column, kept, own = parts["value_channel_scale"], ~lost, all_own
            codes, scale, zero = (parts[name] for name in ("value_data", "value_scale", "value_zero"))
        found += [f"{plane}: {what}" for what in _faults(x, unpack(codes, bits), scale, zero, column, bits, kept, own)]
    return found


def _faults(
    x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, column: torch.Tensor, bits: int,
    kept: torch.Tensor, own: torch.Tensor,
) -> Iterator[str]:  # fmt: skip
    """Of tiles x [..., rows, columns]; `kept` and `own` are False for rows and columns whose scale is a mark of NaN."""
    passed = list(states(x.double()))
    least = torch.stack([unevenness for unevenness, _ in passed]).amin(dim=0)
    fits = torch.zeros_like(least, dtype=torch.bool)
    for unevenness, logs in passed:
        near = ((column.double() / logs.exp().squeeze(-2) - 1).abs() <= TWO_ULP) | ~own
        fits |= near.all(dim=-1)[..., None, None] & (unevenness <= least * (1 + AS_EVEN))
    if not fits.all():
        yield f"column scales of {int((~fits).sum())} of {fits.numel()} tiles are those of no even state"
    whole = torch.where(own, column.float(), passed[-1][1].exp().squeeze(-2).half().float())
    y = x / whole[..., None, :]
    low, high = y.amin(dim=-1), y.amax(dim=-1)
    wanted = over(high - low, 2.0**bits - 1).clamp(max=LARGEST_HALF)
    for name, stored, truth in (("row scales", scale, wanted), ("zeros", zero, low.clamp(-LARGEST_HALF, LARGEST_HALF))):
        apart = (stored.double() - truth.double()).abs() > ONE_ULP * truth.double().abs() + 2.0**-24
        if (apart & kept).any():
            yield f"{int((apart & kept).sum())} {name} do not follow from the column scales"
    shown = torch.where(kept, scale, wanted.half()).float()[..., None]
    moved = (codes - affine_codes(y, shown, zero.float()[..., None], bits)).abs()
    if moved.max() > 1:
        yield f"codes are off by up to {int(moved.max())}"
    share = (moved > 0).double().mean(dim=(-1, -2)).max()
    if share > MOST_MOVED:
        yield f"{100 * float(share):.2f} % of the codes of a tile are off by one"
