"""Sums, rotations and packing whose bits do not depend on how many rows are worked on together.

A matrix product or a library's reduction may order its sums by the size of the batch; these are folded by halves, in
elementwise operations, and are therefore the same for one token and for a thousand, on any device.
"""

from functools import lru_cache
from hashlib import sha256

import torch


def over(x: torch.Tensor, divisor: float) -> torch.Tensor:
    """The quotient, rounded once: by a plain number a GPU multiplies with its reciprocal, and may miss the last bit."""
    return x / torch.full_like(x, divisor)


def folded_sum(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The sum over an axis whose length is a power of two; the axis stays, with length 1."""
    while x.shape[dim] > 1:
        low, high = x.chunk(2, dim=dim)
        x = low + high
    return x


def norms(x: torch.Tensor) -> torch.Tensor:
    """Euclidean length over the last axis, whose size is a power of two; it stays, with length 1."""
    return folded_sum(x * x, -1).sqrt()


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Product with Sylvester's Hadamard matrix over the last axis, not normalised: twice it multiplies by the size."""
    size, half = x.shape[-1], 1
    while half < size:
        first, second = x.unflatten(-1, (size // (2 * half), 2, half)).unbind(-2)
        x = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        half *= 2
    return x


@lru_cache(maxsize=64)
def fixed_signs(size: int, device: torch.device) -> torch.Tensor:
    """+1 and -1, float32 [size], the same on every machine: bits of SHA-256 over a counter."""
    blocks = b"".join(sha256(f"signs {number}".encode()).digest() for number in range(-(-size // 256)))
    bits = [blocks[index // 8] >> (index % 8) & 1 for index in range(size)]
    return torch.tensor([1.0 - 2.0 * bit for bit in bits], dtype=torch.float32, device=device)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [..., n] below 2^bits as one little-endian stream, uint8 [..., n x bits / 8].

    Code i has the bits from bits x i on: of two codes of 4 bits the first is in the low nibble. n is a multiple of 8,
    or of 8 / bits where that is whole.
    """
    if bits == 8:
        return codes.to(torch.uint8)
    together = 8 // bits if 8 % bits == 0 else 8  # codes that fill whole bytes
    words = codes.to(torch.int64).unflatten(-1, (-1, together))
    words = (words << (bits * torch.arange(together, device=codes.device))).sum(dim=-1)
    size = together * bits // 8
    return (words[..., None] >> (8 * torch.arange(size, device=codes.device)) & 255).to(torch.uint8).flatten(-2)


def unpack(stream: torch.Tensor, bits: int) -> torch.Tensor:
    """The codes of `pack`, int64 [..., n] of bytes [..., n x bits / 8]."""
    together = 8 // bits if 8 % bits == 0 else 8
    size = together * bits // 8
    words = stream.to(torch.int64).unflatten(-1, (-1, size))
    words = (words << (8 * torch.arange(size, device=stream.device))).sum(dim=-1)
    return (words[..., None] >> (bits * torch.arange(together, device=stream.device)) & (2**bits - 1)).flatten(-2)


def half_away_from_zero(x: torch.Tensor) -> torch.Tensor:
    """The nearest integer; of two as near, the larger in magnitude."""
    whole = x.trunc()
    return whole + torch.where((x - whole).abs() >= 0.5, x.sign(), 0.0)


def half_scale(x: torch.Tensor) -> torch.Tensor:
    """float16, NaN where it is not finite there: one mark for what cannot be kept."""
    half = x.half()
    return torch.where(half.isfinite(), half, float("nan"))


def affine_codes(x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int) -> torch.Tensor:
    """Nearest q of 0 .. 2^bits - 1 for x = q scale + zero; 0 where the scale is 0 or anything is NaN."""
    q = ((x - zero) / scale).nan_to_num(0.0, posinf=0.0, neginf=0.0).round()
    return q.clamp(0, 2**bits - 1)


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Bits of float8_e4m3fn as uint8, saturating at 448 (infinities too); NaN stays NaN."""
    return x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)


def from_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """float32 of bits."""
    return codes.contiguous().view(torch.float8_e4m3fn).float()
