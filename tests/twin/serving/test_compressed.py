"""Compressed bytes come out as they went in, in bounded memory; damaged ones are refused."""

import gzip
import importlib
import io
import tracemalloc
from collections.abc import Callable
from io import BufferedReader
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worlds import LAWS
from twin.serving import compressed
from twin.serving.compressed import Broken, plain

TEXT = b"".join(b"%d,%d\n" % (index, index * index) for index in range(20_000))


def zstd(content: bytes) -> bytes:
    try:
        return bytes(importlib.import_module("compression.zstd").compress(content))
    except ImportError:
        return bytes(pytest.importorskip("zstandard").ZstdCompressor().compress(content))


def read(content: bytes) -> bytes:
    return plain(BufferedReader(io.BytesIO(content))).read()  # type: ignore[arg-type]


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstd])
def test_what_was_packed_is_read_also_in_several_pieces(pack: Callable[[bytes], bytes]) -> None:
    assert read(pack(TEXT)) == TEXT
    assert read(pack(TEXT) + pack(TEXT)) == 2 * TEXT
    assert read(pack(b"")) == b""


@pytest.mark.parametrize(("pack", "says"), [(gzip.compress, "broken gzip data: "), (zstd, "broken zstd data: ")])
def test_data_that_end_early_or_are_damaged_are_refused(pack: Callable[[bytes], bytes], says: str) -> None:
    whole = pack(TEXT)
    for content in (whole[:-20], whole[: len(whole) // 2], whole[:10] + b"\xff" * 3000):
        with pytest.raises(Broken, match=says):
            read(content)


@LAWS
@given(st.sampled_from([b"", compressed.GZIP_MAGIC, compressed.ZSTD_MAGIC]), st.binary(max_size=100))
def test_any_bytes_are_read_or_refused(magic: bytes, content: bytes) -> None:
    if magic == compressed.ZSTD_MAGIC:
        zstd(b"")
    try:
        read(magic + content)
    except Broken:
        assert magic or content.startswith((compressed.GZIP_MAGIC, compressed.ZSTD_MAGIC))


def test_little_that_stands_for_much_takes_no_more_memory() -> None:
    bomb = BufferedReader(io.BytesIO(zstd(bytes(2**28))))  # type: ignore[arg-type]
    tracemalloc.start()
    stream, size = plain(bomb), 0
    while data := stream.read(2**16):
        size += len(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size == 2**28
    assert peak < 2**27


def test_a_missing_package_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(compressed, "import_module", missing)
    with pytest.raises(Broken, match=r"needs Python 3.14 or the package zstandard: pip install 'kv-twin\[zstd\]'"):
        plain(BufferedReader(io.BytesIO(compressed.ZSTD_MAGIC)))  # type: ignore[arg-type]
