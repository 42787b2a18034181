"""Where each byte lies and what it means: decoders that share no code with the formats, strides, shapes, sums."""

import numpy as np
import pytest
import torch

from realkernels.codecs import arrangements, codec_named
from realkernels.codecs.turboquant import unit_centroids
from tests.realkernels.codecs import slow
from tests.realkernels.codecs.kept import CPU, KVARN, ROWS, normal, place_of, raw, twins

BOTH = [name for name, arrangement in ROWS if arrangement == "inline"]


def decoded(name: str, arrangement: str, planes, slot: int, head: int, **more) -> slow.Vectors:
    bits = {"centroids": unit_centroids} if name.startswith("turboquant") else {}
    return slow.decode(name, arrangement, raw(planes), place_of(planes, slot, head), **bits, **more)


ODD = {"fp16": 7, "fp8": 5, "int8_per_token_head": 12, "int4_per_token_head": 8, "turboquant_k8v4": 48}
DECODED = [
    *((*case, *sizes) for case in ROWS for sizes in ((3, 128), (1, 256))),
    *((name, arrangements(name)[0], 5, dims) for name, dims in ODD.items()),
    *((name, "aligned", *sizes) for name in KVARN for sizes in ((2, 64), (1, 16))),
]


@pytest.mark.parametrize(("name", "arrangement", "heads", "dims"), DECODED)
def test_a_slow_decoder_reads_the_bytes_as_the_format_does(name: str, arrangement: str, heads: int, dims: int) -> None:
    fmt, more = codec_named(name, arrangement=arrangement), {}
    tile = fmt.tile_tokens
    if name in KVARN:
        planes = fmt.allocate(2, 2 * tile, heads, dims, CPU, sinks=())
        for first in (tile, 3 * tile):
            fmt.append(planes, range(first, first + tile), *normal(tile, heads, dims, seed=first))
        slots = [tile, tile + 1, 2 * tile - 1, 3 * tile + 10, 3 * tile + 31]
    else:
        planes, slots = twins(fmt, page_tokens=5, heads=heads, dims=dims)[0], [12, 0, 7, 14, 5]  # over other bytes
        if name == "fp8":
            fmt.set_scales(planes, key=0.5, value=0.125)
            more = {"scales": (0.5, 0.125)}
        fmt.append(planes, slots, *normal(5, heads, dims))
    found = fmt.dequantise(planes, slots)
    rtol, atol = (2e-6, 1e-6) if name in KVARN else (1e-6, 1e-7)
    for row, slot in enumerate(slots):
        for head in range(heads):
            for plane, expected in zip(found, decoded(name, arrangement, planes, slot, head, **more), strict=True):
                np.testing.assert_allclose(plane[row, head], expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", BOTH)
def test_both_arrangements_hold_the_same_codes_in_as_many_bytes(name: str) -> None:
    rows, held = normal(9, 2, 128), []
    for arrangement in arrangements(name):
        fmt = codec_named(name, arrangement=arrangement)
        planes = fmt.allocate(2, 8, 2, 128, CPU)
        fmt.append(planes, range(3, 12), *rows)
        held.append((planes.nbytes, fmt.views(planes)))
    (inline_bytes, inline), (aligned_bytes, aligned) = held
    assert inline_bytes == aligned_bytes
    assert inline.keys() == aligned.keys()
    for part, view in inline.items():
        assert torch.equal(view, aligned[part])
        assert aligned[part].is_contiguous()
        assert aligned[part].data_ptr() % 16 == 0


@pytest.mark.parametrize(("name", "arrangement"), ROWS)
def test_views_are_pages_heads_tokens_of_the_same_memory(name: str, arrangement: str) -> None:
    fmt = codec_named(name, arrangement=arrangement)
    planes = fmt.allocate(3, 5, 2, 128, CPU)
    covered = torch.zeros(planes.nbytes, dtype=torch.int64)
    start = {part: sum(t.nbytes for t in list(planes.tensors.values())[:n]) for n, part in enumerate(planes.tensors)}
    for part, view in planes.parts.items():
        assert view.shape[:3] == (3, 2, 5)
        if part.endswith("_data"):
            assert view.stride(-1) == 1
        if view.dtype == torch.uint8 and arrangement == "aligned":
            assert all(stride % 16 == 0 for stride in view.stride()[:3])
        base = next(
            base for base, t in planes.tensors.items() if 0 <= view.data_ptr() - t.data_ptr() < max(t.nbytes, 1)
        )
        first = start[base] + view.data_ptr() - planes.tensors[base].data_ptr()
        size = view.dtype.itemsize
        index = torch.zeros(view.shape, dtype=torch.int64)
        for axis, stride in enumerate(view.stride()):
            shape = [-1 if at == axis else 1 for at in range(view.dim())]
            index += (torch.arange(view.shape[axis]) * stride * size).view(shape)
        for byte in range(size):
            covered += torch.bincount((first + index + byte).flatten(), minlength=planes.nbytes)
        assert part in fmt.views(planes)
    assert bool((covered == 1).all()), "every byte belongs to one element of one view"


def test_exl3_planes_have_their_published_shapes() -> None:
    fmt = codec_named("exl3_k3v8")
    planes = fmt.allocate(2, 256, 2, 256, CPU)
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in planes.tensors.items()}
    assert shapes == {
        "qk": ((2, 256, 16 * 3), torch.int32), "sk": ((2, 256, 16), torch.float16),
        "qv": ((2, 256, 16 * 8), torch.int32), "sv": ((2, 256, 16), torch.float16),
    }  # fmt: skip
    assert fmt.views(planes)["key_words"].shape == (2, 2, 256, 8, 3)
    assert fmt.views(planes)["key_words"].data_ptr() == planes.tensors["qk"].data_ptr()


def test_a_kvarn_tile_has_its_published_parts() -> None:
    fmt = codec_named("kvarn_k4v2_g128")
    planes = fmt.allocate(1, 128, 4, 256, CPU)
    views = fmt.views(planes)
    assert fmt.tile_bytes(256) == 16_384 + 1280 + 8192 + 1024 == 26_880
    assert views["key_data"].stride() == (4 * 26_880, 26_880, 64, 1)
    assert views["key_data"].shape == (1, 4, 256, 64)
    assert views["value_data"].shape == (1, 4, 128, 64)
    assert views["side_keys"].shape == (1, 4, 128, 256)
    assert all(view.data_ptr() % 16 == 0 for view in planes.parts.values())
