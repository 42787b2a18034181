"""Appending new tokens to paged caches of any format, as it is timed and checked.

On a GPU the fused kernels of `realkernels/append/` quantise them, on a CPU the format itself, in torch, which is also
what either is checked against.
"""

from functools import partial

import torch

from realkernels.format_pool import default_arrangement, random_rows
from realkernels.formats import Arrangement, KVarN, Planes, format_named
from realkernels.formats.kvarn_check import tile_faults
from realkernels.formats.kvarn_sidecar import QUANTISED
from realkernels.library import relative_error
from realkernels.shape import AttentionShape
from realkernels.timed.attend_decode import query_dtype

LEAST_BITS_ERROR = {8: 0.05, 7: 0.06, 6: 0.08, 5: 0.15, 4: 0.25, 3: 0.45, 2: 0.8}
"""Relative error of a plane beyond which it cannot have been quantised right, by its bits; 16 bits and more: 0.01."""

PAGE_TOKENS = 256


class FormatAppend:
    """New tokens quantised into a cache that holds `past`, over several layers in turn.

    `fused`: by the kernels, by torch, or (None) by the kernels where there is a GPU.
    """

    def __init__(
        self, name: str, *, arrangement: Arrangement | None = None, shape: AttentionShape | None = None,
        tokens: int, past: int = 0, layers: int = 8, fused: bool | None = None, device: torch.device, seed: int = 0,
    ) -> None:  # fmt: skip
        self.shape = shape or AttentionShape()
        self.format = format_named(name, arrangement=arrangement or default_arrangement(name))
        self.tokens, self.layers = tokens, layers
        self.fused = device.type == "cuda" if fused is None else fused
        source = torch.Generator(device).manual_seed(seed)
        dtype = query_dtype(name, device)
        self.keys, self.values = (rows.to(dtype) for rows in random_rows(tokens, self.shape, device, source))
        self.planes = [self._allocated(past + tokens, device) for _ in range(layers)]
        self.slots = torch.arange(past, past + tokens, device=device)
        self._before = random_rows(past, self.shape, device, source)
        if past:
            for planes in self.planes:
                self.format.append(planes, torch.arange(past), *self._before)
        self._beside = [{name: part.clone() for name, part in planes.sidecar.items()} for planes in self.planes]

    def _allocated(self, tokens: int, device: torch.device) -> Planes:
        pages, sizes = -(-tokens // PAGE_TOKENS), (PAGE_TOKENS, self.shape.kv_heads, self.shape.head_dim, device)
        if isinstance(self.format, KVarN):
            room = pages * PAGE_TOKENS // self.format.tile_tokens
            return self.format.allocate(pages, *sizes, side_tiles=room, sinks=())
        return self.format.allocate(pages, *sizes)

    @property
    def moved_bytes(self) -> float:
        """K and V of a layer's tokens in 16 bits, read, and as they are stored, written."""
        computed = 2 * self.shape.kv_heads * self.shape.head_dim * 2
        return self.tokens * (computed + self.format.token_bytes(self.shape.kv_heads, self.shape.head_dim))

    def run(self) -> None:
        """Every layer."""
        append = self.format.append
        if self.fused:
            from realkernels import append_kernels  # noqa: PLC0415 - needs triton

            append = partial(append_kernels.append, self.format)
        for planes in self.planes:
            append(planes, self.slots, self.keys, self.values, checked=False)

    def poison(self) -> None:
        """Forget what was appended: 0xFF in every byte of the planes, what lies beside as it was."""
        for planes, beside in zip(self.planes, self._beside, strict=True):
            for tensor in planes.tensors.values():
                tensor.view(torch.uint8).fill_(255)
            for name, part in beside.items():
                planes.sidecar[name].copy_(part)

    def finite(self) -> bool:
        """Whether every layer's tokens can be read."""
        return all(
            bool(part.isfinite().all())
            for planes in self.planes
            for part in self.format.unpack(planes, self.slots, checked=False)
        )

    def verify(self) -> str:
        """Run on forgotten planes; empty, or in one line how the last layer differs from tokens appended by torch.

        Those come one by one, or in 16 pieces, and all bytes must be equal; tiles that kernels quantise must pass
        `formats/kvarn_check.py` instead. And it must be a quantisation of the tokens at all.
        """
        self.poison()
        self.run()
        last, fmt = self.planes[-1], self.format
        found = fmt.unpack(last, self.slots, checked=False)
        faults = self._tile_faults(fmt, last) if isinstance(fmt, KVarN) and self.fused else self._byte_faults(last)
        self.poison()
        self.run()
        for made, given, bits in zip(found, (self.keys, self.values), self._bits(), strict=True):
            error = relative_error(made, given.double())
            if not error < LEAST_BITS_ERROR.get(bits, 0.01):
                faults.append(f"{error:.2f} off in {bits} bits")
        return "; ".join(faults)

    def _byte_faults(self, planes: Planes) -> list[str]:
        """Tensors that differ from what torch makes of the same tokens, in pieces."""
        found = {name: tensor.clone() for name, tensor in planes.tensors.items()}
        self.poison()
        step = max(1, self.tokens // 16)
        for first in range(0, self.tokens, step):
            part = slice(first, first + step)
            self.format.append(planes, self.slots[part], self.keys[part], self.values[part])
        return [f"{name} differs" for name, part in found.items() if not _same_bytes(part, planes.tensors[name])]

    def _tile_faults(self, fmt: KVarN, planes: Planes) -> list[str]:
        """Of the tiles that this append completed, and whether the others' tokens are as torch rotates them."""
        size, past = fmt.tile_tokens, self._before[0].shape[0]
        keys, values = map(torch.cat, zip(self._before, (self.keys.float(), self.values.float()), strict=True))
        first, last = past // size, (past + self.tokens) // size
        rows = slice(first * size, last * size)
        faults = tile_faults(fmt, planes, range(first, last), keys[rows], values[rows]) if first < last else []
        if not bool((planes.sidecar["side_of_tile"][first:last] == QUANTISED).all()):
            faults.append("complete tiles are not marked as quantised")
        opened = torch.arange(max(past, last * size), past + self.tokens, device=planes.device)
        if opened.numel():
            for read, given in zip(fmt.read(planes, opened), (keys, values), strict=True):
                if not torch.equal(read, fmt.rotate_query(given[opened].float()).half().float()):
                    faults.append("tokens of the open tile differ")
        return faults

    def _bits(self) -> tuple[int, int]:
        """Bits of a number of K and of V, scales included, rounded down."""
        names = self.planes[0].parts
        each = self.planes[0].slots * self.shape.kv_heads * self.shape.head_dim
        key, value = (8 * names[f"{plane}_data"].nbytes // each for plane in ("key", "value"))
        return int(key), int(value)


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
