"""Appending new tokens to paged caches of any codec, as it is timed and checked.

On a GPU the kernels of `kernels/append.py` quantise them, on a CPU the codec itself, in torch, which is also what
either is checked against.
"""

from functools import partial

import torch

from realkernels.caches.paged import PAGE_TOKENS, allocated, random_rows
from realkernels.codecs import PLANES, Arrangement, KVarN, Planes, codec_named, default_arrangement
from realkernels.codecs.kvarn import QUANTISED
from realkernels.codecs.kvarn_check import tile_faults
from realkernels.shape import AttentionShape
from realkernels.timed.attend_decode import query_dtype
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
        seed: int = 0,
    ) -> None:  # fmt: skip
        self.shape = shape or AttentionShape()
        self.codec = codec_named(codec_name, arrangement=arrangement or default_arrangement(codec_name))
        self.tokens, self.calls = tokens, layers
        fused = device.type == "cuda" if fused is None else fused
        self._append = self.codec.append
        if fused:
            from realkernels.kernels import append  # noqa: PLC0415 - needs triton

            self._append = partial(append.append, self.codec)
        self._by_tiles = fused and isinstance(self.codec, KVarN)
        source = torch.Generator(device).manual_seed(seed)
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
        `codecs/kvarn_check.py` instead. And it must be a quantisation of the tokens at all.
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
