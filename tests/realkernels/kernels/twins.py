"""Two planes of a format, one appended to by torch and one by the kernels, and rows that are hard to quantise."""

import torch

from realkernels.codecs import Codec, Planes
from realkernels.kernels.append import append

CPU = torch.device("cpu")
Rows = tuple[torch.Tensor, torch.Tensor]


def noise(planes: Planes) -> None:
    """Random bytes wherever tokens lie."""
    source = torch.Generator().manual_seed(7)
    for tensor in planes.tensors.values():
        every = tensor.view(torch.uint8)
        every.copy_(torch.randint(0, 256, every.shape, dtype=torch.uint8, generator=source))


def twins(fmt: Codec, *, pages: int = 3, page_tokens: int = 16, heads: int = 2, dims: int = 128) -> list[Planes]:
    """Two planes of the same noise."""
    pair = [fmt.allocate(pages, page_tokens, heads, dims, CPU) for _ in range(2)]
    for planes in pair:
        noise(planes)
    return pair


def appended(fmt: Codec, slots: object, keys: torch.Tensor, values: torch.Tensor, **sizes: int) -> list[Planes]:
    """Planes as torch and as the kernels leave them."""
    pair = twins(fmt, heads=keys.shape[1], dims=keys.shape[2], **sizes)
    fmt.append(pair[0], slots, keys, values)
    append(fmt, pair[1], slots, keys, values)
    return pair


def hard_rows(tokens: int, heads: int, dims: int) -> Rows:
    """Outliers, zeros, one value alone, ties between codes, the largest and the smallest numbers: one kind a token."""
    source = torch.Generator().manual_seed(5)
    keys, values = (torch.randn(tokens, heads, dims, generator=source) for _ in range(2))
    keys[..., 3::13] *= 9
    for rows in (keys, values):
        kinds = (
            torch.zeros(dims), torch.full((dims,), -0.75), torch.eye(dims)[1] * 3, torch.arange(dims) % 31 - 15.5,
            (torch.arange(dims) % 15 - 7) / 7 * 127, torch.full((dims,), 3e38), rows[5 % tokens, 0] * 1e-40,
            rows[6 % tokens, 0] * 1e5, rows[7 % tokens, 0].abs(), -rows[8 % tokens, 0].abs() - 3,
        )  # fmt: skip
        for token, kind in enumerate(kinds[: max(0, tokens - 1)]):
            rows[token, token % heads] = kind
    return keys, values
