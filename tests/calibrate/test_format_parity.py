"""Bytes of a format by the twin's row and by the planes that are really allocated: the same for every format."""

import pytest

from twin.engines import load_engine
from twin.formats import format_names as counted_names
from twin.formats import kv_format

torch = pytest.importorskip("torch", reason="needs torch: pip install 'kv-twin[kernels]'")

from realkernels.codecs import arrangements, codec_named, codec_names  # noqa: E402 - after the skip

CASES = [(name, arrangement) for name in codec_names() for arrangement in arrangements(name)]
SHAPES = [(1, 128), (2, 256), (4, 256), (3, 512), (8, 128)]
SMALL = [(1, 16), (1, 32), (2, 32), (3, 64)]
"""Which not every format takes."""


def test_every_format_of_this_projects_kernels_is_in_both_rooms() -> None:
    """The twin counts others', too, of which its own engine keeps none."""
    assert set(load_engine("twin").formats) <= set(codec_names()) <= set(counted_names())


@pytest.mark.parametrize(("name", "arrangement"), CASES)
def test_bytes_by_formula_are_the_bytes_of_the_tensors(name: str, arrangement: str) -> None:
    fmt, row = codec_named(name, arrangement=arrangement), kv_format(name)
    assert fmt.tile_tokens == row.tile_tokens
    for kv_heads, head_dim in SHAPES + SMALL:
        counted = row.plane_bytes(kv_heads=kv_heads, head_dim=head_dim)
        try:
            held = fmt.token_bytes(kv_heads, head_dim)
        except ValueError:
            assert (kv_heads, head_dim) in SMALL
            continue
        assert (row.check(head_dim=head_dim), held) == ("", counted)
        planes = fmt.allocate(2, 2 * fmt.tile_tokens, kv_heads, head_dim, torch.device("cpu"))
        assert sum(tensor.nbytes for tensor in planes.tensors.values()) == planes.nbytes == planes.slots * counted


@pytest.mark.parametrize("name", [name for name in codec_names() if kv_format(name).sidecar_bytes])
def test_waiting_tokens_are_counted_alike(name: str) -> None:
    """A side slot holds K and V of a tile's tokens at the row's bytes an element."""
    fmt, row = codec_named(name), kv_format(name)
    one, two = (
        fmt.allocate(2, fmt.tile_tokens, 2, 64, torch.device("cpu"), side_tiles=side_tiles) for side_tiles in (1, 2)
    )
    pools = [sum(planes.sidecar[name].nbytes for name in ("side_keys", "side_values")) for planes in (one, two)]
    assert pools[1] - pools[0] == pools[0] == row.tile_tokens * 2 * 64 * 2 * row.sidecar_bytes


def test_only_tiles_wait() -> None:
    for name in codec_names():
        assert bool(kv_format(name).sidecar_bytes) == (codec_named(name).tile_tokens > 1)
