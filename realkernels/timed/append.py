"""Appending new tokens to paged caches of any codec, as it is timed and checked.

On a GPU the kernels of `kernels/append.py` quantise them, on a CPU the codec itself, in torch, which is also what
either is checked against.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from realkernels.caches.paged import PAGE_TOKENS, allocated, random_rows
from realkernels.codecs import PLANES, Arrangement, KVarN, Planes
from realkernels.codecs.arithmetic import affine_codes, over, unpack
from realkernels.codecs.kvarn import LARGEST_HALF, QUANTISED, SIZES, states
from realkernels.kernels.append import append
from realkernels.shape import AttentionShape
from realkernels.timed.attend_decode import own_codec, query_dtype
from realkernels.timed.call import TimedCall, relative_error

LARGEST_ERROR = {8: 0.05, 7: 0.06, 6: 0.08, 5: 0.15, 4: 0.25, 3: 0.45, 2: 0.8}
"""Relative error of a plane beyond which it cannot have been quantised right, by its bits; 16 bits and more: 0.01."""


class Append(TimedCall):
    """New tokens quantised into a cache that holds `past_tokens`, over several layers in turn.

    `fused`: by the kernels, by torch, or (None) by the kernels where there is a GPU.
    """

    def __init__(
        self, codec_name: str, *, arrangement: Arrangement | None = None, shape: AttentionShape | None = None,
        tokens: int, past_tokens: int = 0, layers: int = 8, fused: bool | None = None, device: torch.device,
    ) -> None:  # fmt: skip
        self.shape = shape or AttentionShape()
        self.codec = own_codec(codec_name, arrangement)
        self.tokens, self.calls = tokens, layers
        fused = device.type == "cuda" if fused is None else fused
        self._append = partial(append, self.codec) if fused else self.codec.append
        self._by_tiles = fused and isinstance(self.codec, KVarN)
        source = torch.Generator(device).manual_seed(0)
        dtype = query_dtype(codec_name, device)
        self.keys, self.values = (rows.to(dtype) for rows in random_rows(tokens, self.shape, device, source))
        pages = -(-(past_tokens + tokens) // PAGE_TOKENS)
        room = pages * PAGE_TOKENS // self.codec.tile_tokens
        self._allocate = partial(allocated, self.codec, self.shape, pages, device, side_tiles=room)
        self.planes = [self._allocate() for _ in range(layers)]
        self.slots = torch.arange(past_tokens, past_tokens + tokens, device=device)
        self._before = random_rows(past_tokens, self.shape, device, source)
        if past_tokens:
            for planes in self.planes:
                self.codec.append(planes, torch.arange(past_tokens), *self._before)
        self._beside = [{name: part.clone() for name, part in planes.sidecar.items()} for planes in self.planes]
        # K and V of a layer's tokens in 16 bits, read, and as they are stored, written
        computed = 2 * self.shape.kv_heads * self.shape.head_dim * 2
        self.moved_bytes = tokens * (computed + self.codec.token_bytes(self.shape.kv_heads, self.shape.head_dim))

    def run(self) -> None:
        """Every layer."""
        for planes in self.planes:
            self._append(planes, self.slots, self.keys, self.values, checked=False)

    def poison(self) -> None:
        """Forget what was appended."""
        for planes, beside in zip(self.planes, self._beside, strict=True):
            _forget(planes, beside)

    def finite(self) -> bool:
        """Whether every layer's tokens can be dequantised."""
        return all(
            bool(part.isfinite().all())
            for planes in self.planes
            for part in self.codec.restore(planes, self.slots, checked=False)
        )

    def error(self) -> float:
        """Of the last layer's tokens against what was given, the worse of K and V; infinite with any of `faults`."""
        if self.faults():
            return float("inf")
        return max(self._errors())

    def faults(self) -> str:
        """Empty, or in one line how the last layer differs from the same tokens appended by torch.

        Those come one by one, or in 16 parts, and all bytes must be equal; tiles that kernels quantise must pass
        `tile_faults` instead. And it must be a quantisation of the tokens at all.
        """
        errors = self._errors()
        last = self.planes[-1]
        faults = self._tile_faults(self.codec, last) if self._by_tiles else self._byte_faults(last)
        for error, bits in zip(errors, self._bits(), strict=True):
            if not error < LARGEST_ERROR.get(bits, 0.01):
                faults.append(f"{error:.2f} off in {bits} bits")
        return "; ".join(faults)

    def _errors(self) -> list[float]:
        """Of K and of V of the last layer."""
        found = self.codec.restore(self.planes[-1], self.slots, checked=False)
        return [
            relative_error(made, given.double()) for made, given in zip(found, (self.keys, self.values), strict=True)
        ]

    def _byte_faults(self, planes: Planes) -> list[str]:
        """Tensors that differ from what torch makes of the same tokens, in parts, on planes of its own."""
        truth = self._allocate()
        _forget(truth, self._beside[-1])
        step = max(1, self.tokens // 16)
        for first in range(0, self.tokens, step):
            part = slice(first, first + step)
            self.codec.append(truth, self.slots[part], self.keys[part], self.values[part])
        return [
            f"{name} differs" for name, tensor in truth.tensors.items()
            if not torch.equal(tensor.view(torch.uint8), planes.tensors[name].view(torch.uint8))
        ]  # fmt: skip

    def _tile_faults(self, codec: KVarN, planes: Planes) -> list[str]:
        """Of the tiles that this append completed, and whether the others' tokens are as torch rotates them."""
        size, past = codec.tile_tokens, self._before[0].shape[0]
        keys, values = map(torch.cat, zip(self._before, (self.keys.float(), self.values.float()), strict=True))
        first, last = past // size, (past + self.tokens) // size
        rows = slice(first * size, last * size)
        faults = tile_faults(codec, planes, range(first, last), keys[rows], values[rows]) if first < last else []
        if not bool((planes.sidecar["side_of_tile"][first:last] == QUANTISED).all()):
            faults.append("complete tiles are not marked as quantised")
        opened = torch.arange(max(past, last * size), past + self.tokens, device=planes.device)
        if opened.numel():
            for found, given in zip(codec.dequantise(planes, opened), (keys, values), strict=True):
                if not torch.equal(found, codec.rotate_query(given[opened].float()).half().float()):
                    faults.append("tokens of the open tile differ")
        return faults

    def _bits(self) -> tuple[int, ...]:
        """Bits of a code of K and of V, rounded down."""
        planes = self.planes[0]
        each = planes.slots * self.shape.kv_heads * self.shape.head_dim
        return tuple(int(8 * planes.parts[f"{plane}_data"].nbytes // each) for plane in PLANES)


def _forget(planes: Planes, beside: dict[str, torch.Tensor]) -> None:
    """0xFF in every byte of the planes, what lies beside as it was."""
    for tensor in planes.tensors.values():
        tensor.view(torch.uint8).fill_(255)
    for name, part in beside.items():
        planes.sidecar[name].copy_(part)


# Whether tiles of a KVarN cache are quantised right, whatever order the sums of their normalisation were taken in. The
# iteration converges, and the unevenness of its last states ties within rounding: two correct implementations may keep
# different states, whose column scales differ in nearly every bit and serve equally well. So a tile is right if
#
# - its column scales are those of a state (worked out in float64) that is as even as the most even one, and
# - its row scales, zeros and codes are what these column scales make of its rows.
#
# Neither leaves room for scales that are 1 % off, for codes that are shifted or for rows that are swapped.

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
