"""The header of a GGUF byte by byte: what is kept and skipped, and one line for whatever is wrong with it."""

import os
import random
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from tests.twin.models.gguf.shapes import MODELS
from tests.twin.models.gguf.written import write
from twin.errors import BadFile
from twin.models.gguf import read_gguf
from twin.models.gguf.header import Unread, read_header
from twin.models.store import understand

U32, TEXT, ARRAY, FLAG = 4, 8, 9, 7


def text(said: str | bytes) -> bytes:
    raw = said.encode() if isinstance(said, str) else said
    return struct.pack("<Q", len(raw)) + raw


def key(name: str | bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def number(name: str, value: int) -> bytes:
    return key(name, U32, struct.pack("<I", value))


def array(name: str, kind: int, count: int, values: bytes = b"") -> bytes:
    return key(name, ARRAY, struct.pack("<IQ", kind, count) + values)


def tensor(name: str | bytes, *dims: int, kind: int = 0, at: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, at)


def file(
    folder: Path, *parts: bytes, keys: int | None = None, tensors: int | None = None, version: int = 3, data: int = 4096
) -> Path:
    """A file of metadata (`key`) and then tensors (`tensor`), counted where the counts are not given."""
    path = folder / "model.gguf"
    body = b"".join(parts)
    head = b"GGUF" + struct.pack("<IQQ", version, tensors or 0, len(parts) if keys is None else keys) + body
    path.write_bytes(head + bytes(-len(head) % 32))
    os.truncate(path, path.stat().st_size + data)
    return path


def named(value: object) -> str:
    """A case is called by what is said about it."""
    return value if isinstance(value, str) else ""


def refused(path: Path) -> str:
    began = time.process_time()
    with pytest.raises(BadFile) as wrong:
        read_header(path)
    assert time.process_time() - began < 1.0
    said = str(wrong.value)
    assert "\n" not in said
    assert said.startswith(f"{path}: ")
    return said.removeprefix(f"{path}: ")


def test_values_of_all_types_are_read(tmp_path: Path) -> None:
    kinds: list[tuple[int, str, Any]] = [
        (0, "B", 255), (1, "b", -1), (2, "H", 65535), (3, "h", -2), (4, "I", 2**32 - 1), (5, "i", -3), (6, "f", 0.5),
        (10, "Q", 2**64 - 1), (11, "q", -4), (12, "d", 0.25),
    ]  # fmt: skip
    parts = [key(f"n{kind}", kind, struct.pack(f"<{code}", value)) for kind, code, value in kinds]
    parts += [key("yes", FLAG, b"\1"), key("no", FLAG, b"\0"), key("text", TEXT, text("größer"))]
    parts += [array("texts", TEXT, 2, text("a") + text("")), array("flags", FLAG, 2, b"\1\0"), array("none", U32, 0)]
    parts += [array("numbers", 3, 2, struct.pack("<2h", -1, 7)), number("general.alignment", 64)]
    for version in (2, 3):
        held = read_header(file(tmp_path, *parts, version=version)).metadata
        assert {name: held[name] for name in held if name.startswith("n") and name[1:].isdigit()} == {
            f"n{kind}": value for kind, _, value in kinds
        }
        assert (held["yes"], held["no"], held["text"], held["texts"]) == (True, False, "größer", ["a", ""])
        assert (held["flags"], held["none"], held["numbers"]) == ([1, 0], [], [-1, 7])


def test_long_arrays_are_skipped_wherever_blocks_of_the_file_end(tmp_path: Path) -> None:
    words = random.Random(0)  # noqa: S311
    vocabulary = [words.randbytes(words.choice((0, 3, 40, 3000))) for _ in range(5000)]
    merges = [b"x" * (2**20 - 4), b"y" * 3_000_000, *[b"z"] * 5000]
    held = read_header(
        file(
            tmp_path,
            array("tokens", TEXT, len(vocabulary), b"".join(map(text, vocabulary))),
            array("scores", 6, 300_000, bytes(1_200_000)),
            array("merges", TEXT, len(merges), b"".join(map(text, merges))),
            number("last", 7),
        )
    ).metadata
    assert held == {"tokens": Unread(5000), "scores": Unread(300_000), "merges": Unread(5002), "last": 7}
    assert repr(held["scores"]) == "an array of 300,000 elements"


def test_a_vocabulary_of_a_hundred_gigabytes_is_passed_quickly_and_in_little_memory(tmp_path: Path) -> None:
    words = b"".join(text(f"word {number}") for number in range(250_000))
    path = file(tmp_path, array("tokens", TEXT, 250_000, words), tensor("a", 25 * 10**9), keys=1, tensors=1)
    os.truncate(path, 10**11 + 10**7)
    tracemalloc.start()
    began = time.process_time()
    assert read_header(path).tensors["a"].size_bytes == 10**11
    assert time.process_time() - began < 2.0
    assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    tracemalloc.stop()


WRONG_METADATA: list[tuple[list[bytes], str]] = [
    ([number("a", 1), number("a", 2)], "metadata key 'a' appears twice"),
    ([key(b"\xff", U32, bytes(4))], "metadata key 1 of 1: a text that is not UTF-8 (byte 0)"),
    ([key("a", TEXT, text(b"ab\xc3"))], "metadata key 'a': a text that is not UTF-8 (byte 2)"),
    ([key("a", 13, b"")], "metadata key 'a': unknown value type 13"),
    ([key("a", FLAG, b"\2")], "metadata key 'a': 2 is neither true nor false"),
    ([array("a", FLAG, 2, b"\0\3")], "metadata key 'a': 3 is neither true nor false"),
    ([array("a", ARRAY, 1, struct.pack("<IQ", U32, 0))], "metadata key 'a': an array of arrays, which no model has"),
    ([array("a", 77, 1)], "metadata key 'a': an array of unknown value type 77"),
    ([key("a" * 65536, U32, bytes(4))], "metadata key 1 of 1: a text of 65,536 bytes, at most 65,535 are allowed"),
    ([key("a", TEXT, struct.pack("<Q", 2**24 + 1))], "metadata key 'a': a text of 16,777,217 bytes, at most"),
    ([key("a", TEXT, struct.pack("<Q", 2**63))], "metadata key 'a': a text of 9,223,372,036,854,775,808 bytes"),
    ([key("a", TEXT, struct.pack("<Q", 9999))], "cut short: it has"),
    ([array("a", TEXT, 2**22 + 1)], "metadata key 'a': 4,194,305 texts in arrays, at most 4,194,304 are allowed"),
    ([array("a", TEXT, 2**64 - 1)], "metadata key 'a': 18,446,744,073,709,551,615 texts in arrays"),
    ([array("a", TEXT, 5000, struct.pack("<Q", 2**64 - 1))], "metadata key 'a' goes on beyond them"),
    ([array("a", TEXT, 5000, struct.pack("<Q", 2**40))], "metadata key 'a' goes on beyond them"),
    ([array("a", 0, 2**64 - 1)], "metadata key 'a' goes on beyond them"),
    ([array("a", 12, 2**61)], "metadata key 'a' goes on beyond them"),
    ([number("general.alignment", 0)], "general.alignment is 0, not a power of two from 8 to 1,048,576"),
    ([number("general.alignment", 24)], "general.alignment is 24, not a power of two"),
    ([key("general.alignment", FLAG, b"\1")], "general.alignment is True, not a power of two"),
    ([key("general.alignment", TEXT, text("32"))], "general.alignment is '32', not a power of two"),
    ([array("general.alignment", U32, 1, bytes(4))], "general.alignment is [0], not a power of two"),
]


def test_long_and_strange_names_are_shown_on_one_short_line(tmp_path: Path) -> None:
    for name in ("a" * 60_000, "\n\x1b[31m" * 5000, "ä" * 30_000):
        assert len(refused(file(tmp_path, key(name, 99, b"")))) < 200
        assert len(refused(file(tmp_path, tensor(name, 8, kind=99), keys=0, tensors=1))) < 200
    path = file(tmp_path, number("a\nb.c", 1), key("general.architecture", TEXT, text("llama")))
    assert read_header(path).metadata["a\nb.c"] == 1


@pytest.mark.parametrize(("parts", "says"), WRONG_METADATA, ids=named)
def test_metadata_that_are_wrong_are_refused_by_their_key(parts: list[bytes], says: str, tmp_path: Path) -> None:
    assert says in refused(file(tmp_path, *parts))


def test_many_short_arrays_have_a_limit_together(tmp_path: Path) -> None:
    parts = [array(f"a{index}", 0, 4096, bytes(4096)) for index in range(257)]
    assert "1,052,672 elements of short arrays, at most 1,048,576 are allowed" in refused(file(tmp_path, *parts))


WRONG_TENSORS: list[tuple[list[bytes], str]] = [
    ([tensor("a", 8), tensor("a", 8, at=32)], "tensor 'a' appears twice"),
    ([tensor(b"\xfe", 8)], "tensor 1 of 1: a text that is not UTF-8 (byte 0)"),
    ([tensor("a", 1, 1, 1, 1, 1)], "tensor 'a': 5 dimensions, at most 4 are allowed"),
    ([tensor("a", 0)], "tensor 'a': [0] are 0 elements, outside of 1 to"),
    ([tensor("a", 2**32, 2**32)], "tensor 'a': [4294967296, 4294967296] are 18,446,744,073,709,551,616 elements"),
    ([tensor("a", 8, kind=4)], "tensor 'a': unknown ggml type 4"),
    ([tensor("a", 8, kind=2**32 - 1)], "tensor 'a': unknown ggml type 4294967295"),
    ([tensor("a", 48, kind=8)], "tensor 'a': rows of 48 are no whole blocks of 32 of q8_0"),
    ([tensor("a", kind=12)], "tensor 'a': rows of 1 are no whole blocks of 256 of q4_k"),
    ([tensor("a", 8, at=4)], "tensor 'a': offset 4 is not a multiple of 32"),
    ([tensor("a", 16), tensor("b", 8, at=32)], "tensor 'b': offset 32 lies within 'a'"),
    ([tensor("b", 8, at=32), tensor("a", 16)], "tensor 'b': offset 32 lies within 'a'"),
    ([tensor("a", 8), tensor("b", 8)], "tensor 'b': offset 0 lies within 'a'"),
    ([tensor("a", 8, at=4096)], "tensor 'a' ends at byte"),
    ([tensor("a", 1025)], "cut short: it has"),
    ([tensor("a", 8, at=2**64 - 32)], "tensor 'a' ends at byte 18,446,744,073,709,551,"),
]


@pytest.mark.parametrize(("parts", "says"), WRONG_TENSORS, ids=named)
def test_tensors_that_are_wrong_are_refused_by_their_name(parts: list[bytes], says: str, tmp_path: Path) -> None:
    assert says in refused(file(tmp_path, *parts, keys=0, tensors=len(parts)))


def test_tensors_may_lie_in_any_order_and_end_where_the_file_ends(tmp_path: Path) -> None:
    parts = [tensor("a", 8, at=64), tensor("b", 32, 2, kind=8, at=96), tensor("c", 16), tensor("one", at=192)]
    tensors = read_header(file(tmp_path, *parts, keys=0, tensors=4, data=196)).tensors
    assert {name: each.size_bytes for name, each in tensors.items()} == {"a": 32, "b": 68, "c": 64, "one": 4}
    assert "tensor 'one' ends at byte" in refused(file(tmp_path, *parts, keys=0, tensors=4, data=195))


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "cut short: it has 0 bytes, its first bytes goes on beyond them"),
        (b"GGU", "cut short: it has 3 bytes"),
        (b"GGML" + bytes(100), "begins with b'GGML' and not with b'GGUF': no GGUF file"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(100), "is of GGUF version 1; 2 and 3, little endian, are read"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(100), "is of GGUF version 3, big endian; 2 and 3, little endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 65537, 0), "claims 65,537 tensors, at most 65,536 are allowed"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "claims 1,152,921,504,606,846,976 metadata keys, at most 65,536"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 5), "cut short: it has 24 bytes, metadata key 1 of 5 goes on beyond them"),
        (b"GGUF" + struct.pack("<IQQ", 3, 7, 0), "cut short: it has 24 bytes, tensor 1 of 7 goes on beyond them"),
    ],
)
def test_files_that_begin_otherwise_are_refused(raw: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(raw)
    assert says in refused(path)


def test_a_header_longer_than_any_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = file(tmp_path, array("a", 0, 2**27))
    os.truncate(path, 2**30)
    assert refused(path).startswith("metadata key 'a' goes on beyond byte 67,108,864, where the longest header allowed")
    path = file(tmp_path, array("a", TEXT, 2**22))
    os.truncate(path, 2**35)
    assert read_header(path).metadata == {"a": Unread(2**22)}


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "loop.gguf").symlink_to(tmp_path / "loop.gguf")
    (tmp_path / "folder.gguf").mkdir()
    for name, says in (
        ("pipe.gguf", "is no file whose size is known"),
        ("loop.gguf", "cannot be read: Too many levels of symbolic links"),
        ("folder.gguf", "cannot be read: Is a directory"),
        ("nothing.gguf", "cannot be read: No such file or directory"),
    ):
        assert refused(tmp_path / name) == says
    assert refused(Path("/dev/null")) == "is no file whose size is known"
    with pytest.raises(BadFile):
        understand(str(tmp_path / "loop.gguf"))


def small(folder: Path) -> bytes:
    """A whole small model."""
    return write(folder / "whole.gguf", *MODELS["qwen3moe"]).read_bytes()


def test_a_file_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    whole = small(tmp_path)
    path = tmp_path / "model.gguf"
    header = whole.index(b"blk.1.ffn_down_exps") + 100
    for length in [*range(0, header, 7), *range(header, len(whole) - 32, 100_003)]:
        path.write_bytes(whole[:length])
        with pytest.raises(BadFile) as wrong:
            read_gguf(path)
        assert str(wrong.value).startswith(f"{path}: cut short"), length


def test_flipped_bytes_are_refused_or_read_but_never_crash(tmp_path: Path) -> None:
    whole = bytearray(small(tmp_path))
    header = whole.index(b"blk.1.ffn_down_exps") + 100
    path = tmp_path / "model.gguf"
    path.write_bytes(whole)
    dice = random.Random(1)  # noqa: S311
    outcomes = []
    with path.open("r+b") as changed:
        for _ in range(600):
            places = {dice.randrange(header): dice.randrange(256) for _ in range(dice.choice((1, 1, 8)))}
            for place, value in places.items():
                changed.seek(place)
                changed.write(bytes([value]))
            changed.flush()
            try:
                read_gguf(path)
                outcomes.append("read")
            except BadFile as wrong:
                assert str(wrong).startswith(f"{path}: ")  # noqa: PT017
                assert "\n" not in str(wrong)  # noqa: PT017
                outcomes.append("refused")
            for place in places:
                changed.seek(place)
                changed.write(whole[place : place + 1])
    assert set(outcomes) == {"read", "refused"}
