"""Plain bytes of a file that may be compressed, by gzip or by zstd, in bounded memory."""

import gzip
import zlib
from importlib import import_module
from io import BufferedReader, RawIOBase
from typing import Any

from hwprofiles.recognition import HEAD_BYTES

GZIP_MAGIC, ZSTD_MAGIC = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_ZSTD_READ = 1024  # compressed bytes at a time: the most that a block stands for in 4 of them is 128 KiB


class Broken(ValueError):
    """Compressed data that is damaged, ends early, or needs a package that is not there."""


def plain(raw: BufferedReader) -> BufferedReader:
    """What is read: `raw`, or what is compressed in it. Reading raises Broken."""
    magic = raw.peek(4)[:4]
    if magic[:2] == GZIP_MAGIC:
        return BufferedReader(_Gzip(raw), HEAD_BYTES * 16)
    if magic == ZSTD_MAGIC:
        return BufferedReader(_Zstd(raw), HEAD_BYTES * 16)
    return raw


class _Gzip(RawIOBase):
    def __init__(self, raw: BufferedReader) -> None:
        self._file = gzip.GzipFile(fileobj=raw)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            return self._file.readinto(buffer)
        except (EOFError, zlib.error, gzip.BadGzipFile) as wrong:
            raise Broken(f"broken gzip data: {wrong}") from None


class _Zstd(RawIOBase):
    """Frames one after another. Both libraries have the same decompressor, that of the package knows no bound."""

    def __init__(self, raw: BufferedReader) -> None:
        self._raw = raw
        self._new, self._error = _zstd()
        self._frame = self._new()
        self._begun = False
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            data = self._raw.read(_ZSTD_READ)
            if not data and self._begun:
                raise Broken("broken zstd data: it ends early")
            if not data:
                return 0
            self._ready = memoryview(self._decompressed(data))
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size

    def _decompressed(self, data: bytes) -> bytes:
        pieces = []
        while data:
            try:
                pieces.append(self._frame.decompress(data))
            except self._error as wrong:
                raise Broken(f"broken zstd data: {wrong}") from None
            self._begun, data = not self._frame.eof, b""
            if self._frame.eof:
                data, self._frame = self._frame.unused_data, self._new()
        return b"".join(pieces)


def _zstd() -> tuple[Any, type[Exception]]:
    """What makes a decompressor of one frame, and what it raises: Python's own from 3.14 on, or the package."""
    try:
        own = import_module("compression.zstd")
    except ImportError:
        pass
    else:
        return own.ZstdDecompressor, own.ZstdError
    try:
        package = import_module("zstandard")
    except ImportError:
        wanted = "zstd data needs Python 3.14 or the package zstandard: pip install 'kv-twin[zstd]'"
        raise Broken(wanted) from None
    return package.ZstdDecompressor().decompressobj, package.ZstdError
