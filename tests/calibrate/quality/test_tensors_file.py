"""Dumped tensors are read exactly, from a map of the file, and nothing in it is taken on trust."""

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from calibrate.quality.tensors_file import read_layers
from tests.calibrate.quality.dumped import header_of, packed, some, stored, whole, write
from twin.errors import BadFile
from twin.models.safetensors import LONGEST_HEADER

K, V = some(seed=1), some(seed=2)
RIGHT = {"k": ("F32", K), "v": ("F32", V)}
DATA = stored("F32", K) + stored("F32", V)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "dumped.safetensors"


@pytest.mark.parametrize("blanks", range(8))
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_elements_come_back_exactly_wherever_the_data_begins(path: Path, dtype: str, blanks: int) -> None:
    values = some()
    path.write_bytes(whole({"v": (dtype, V), "k": (dtype, values), "q": (dtype, some(heads := 20, 4))}, blanks=blanks))
    (layer,) = read_layers(path)
    assert (layer.name, layer.keys.shape, layer.keys.dtype) == ("tensors", values.shape, dtype)
    np.testing.assert_array_equal(layer.keys.rows(0, 20), values)
    np.testing.assert_array_equal(layer.values.rows(3, 5), V[3:5])
    assert layer.queries is not None
    assert layer.queries.shape == (heads, 4, 4)
    assert layer.keys.rows(0, 20).dtype == np.float32


def test_the_file_is_mapped_and_not_read(path: Path) -> None:
    (layer,) = read_layers(write(path, k=K, v=V))
    root: Any = layer.keys.raw
    while isinstance(root, np.ndarray):
        assert not root.flags.writeable
        root = root.base
    assert isinstance(root.obj if isinstance(root, memoryview) else root, mmap.mmap)


def test_layers_come_in_the_order_of_their_numbers_and_metadata_and_other_tensors_are_left_alone(path: Path) -> None:
    tensors = {f"layers.{number}.{letter}": ("F32", K) for number in (10, 2, 0) for letter in "vk"}
    tensors |= {"layers.2.q": ("F32", K), "model.embed": ("I64", np.arange(5)), "layers.x.k": ("F64", np.zeros(3))}
    data = b"".join(stored(dtype, values) for dtype, values in tensors.values())
    path.write_bytes(packed({"__metadata__": {"format": "pt"}, **header_of(tensors)}, data))
    layers = read_layers(path)
    assert [layer.name for layer in layers] == ["layer 0", "layer 2", "layer 10"]
    assert [layer.queries is not None for layer in layers] == [False, True, False]


def entry(name: str, **changes: Any) -> dict[str, Any]:
    header = header_of(RIGHT)
    header[name] |= changes
    return header


HALF = len(DATA) // 2
TOLD = b'{"dtype": "F32", "shape": [8], "data_offsets": [%d, %d]}'
WRONG: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cut short: it has 0 bytes"),
    "seven bytes": (b"1234567", "cut short: it has 7 bytes"),
    "no header": (b"\x10" + bytes(7), "cut short: it has 8 bytes, its header alone ends at byte 24"),
    "another format": (b"PK\x03\x04 and so on, a zip file", "a header of "),
    "a header without end": ((LONGEST_HEADER + 1).to_bytes(8, "little") + b"{}", "at most 16,777,216 are allowed"),
    "a header beyond the end": ((500).to_bytes(8, "little") + b"{}", "its header alone ends at byte 508"),
    "no JSON": (packed(b"{k: 1}", b""), "the header is not valid JSON: "),
    "no text": (packed(b'{"\xff": 1}', b""), "the header is not UTF-8 text (byte 2)"),
    "nested without end": (packed(b"[" * 100_000, b""), "the header is no JSON object"),
    "a number without end": (packed(b'{"k": ' + b"9" * 5000 + b"}", b""), "tensor 'k': Number out of range"),
    "a list": (packed([], b""), "the header is no JSON object"),
    "a name twice": (packed(b'{"k": %s, "k": %s}' % (TOLD % (0, 32), TOLD % (32, 64)), bytes(64)),
     "bytes 0 to 32 of the data, before tensor 'k', belong to no tensor"),
    "no tensors": (packed({}, b""), "no tensors 'k' and 'v', nor 'layers.N.k' and 'layers.N.v'; it holds none"),
    "other tensors": (whole({"weight": ("F32", K)}), "it holds 'weight'"),
    "no V": (whole({"k": ("F32", K)}), "no tensor 'v'"),
    "no K": (whole({"layers.3.v": ("F32", K)}), "no tensor 'layers.3.k'"),
    "no V of a layer": (whole({"layers.0.k": ("F32", K), "layers.0.v": ("F32", V), "layers.1.k": ("F32", K)}),
     "no tensor 'layers.1.v'"),
    "both namings": (whole({**RIGHT, "layers.0.k": ("F32", K)}), "tensor 'k' beside those of layer 0"),
    "no shape": (packed({"k": {"dtype": "F32"}}, b""), "tensor 'k': Object missing required field `shape`"),
    "an unknown key": (packed(entry("k", order="C"), DATA), "tensor 'k': Object contains unknown field `order`"),
    "a shape of words": (packed(entry("v", shape=["a"]), DATA), "tensor 'v': Expected `int`, got `str` - at `$.shape"),
    "a negative size": (packed(entry("v", shape=[-20, 2, 4]), DATA), "tensor 'v': Expected `int` >= 0"),
    "a negative offset": (packed(entry("v", data_offsets=[-1, 4]), DATA), "tensor 'v': Expected `int` >= 0"),
    "one offset": (packed(entry("v", data_offsets=[0]), DATA), "tensor 'v': Expected `array` of length 2"),
    "an unknown dtype": (packed(entry("k", dtype="Q4"), DATA), "tensor 'k': unknown dtype 'Q4'"),
    "another dtype": (whole({**RIGHT, "k": ("F64", K)}), "tensor 'k' is F64; read are F32, F16, BF16"),
    "too short for its shape": (packed(entry("v", shape=[21, 2, 4]), DATA),
     "do not hold the 672 bytes of F32 [21, 2, 4"),
    "too long for its shape": (packed(entry("v", shape=[19, 2, 4]), DATA),
     "do not hold the 608 bytes of F32 [19, 2, 4"),
    "a shape without end": (packed(entry("v", shape=[1] * 17), DATA), "tensor 'v': Expected `array` of length <= 16"),
    "tensors without end": (packed(b"{" + b'"a":1,' * 600_000 + b"}", b""), "names more than 131,072 tensors"),
    "a huge shape": (packed(entry("v", shape=[2**50] * 5), DATA), "tensor 'v': data_offsets ["),
    "backwards": (packed(entry("v", data_offsets=[1280, 640]), DATA), "tensor 'v': data_offsets [1280, 640]"),
    "cut off": (whole(RIGHT)[:-1], f"tensor 'v' ends at byte {2 * HALF:,} of the data, of which the file has 1,279"),
    "out of range": (packed(entry("v", data_offsets=[HALF + 64, 2 * HALF + 64]), DATA),
     "tensor 'v' ends at byte 1,344 of the data"),
    "overlapping": (packed(entry("v", data_offsets=[HALF - 4, 2 * HALF - 4]), DATA),
     "tensor 'v' begins at byte 636 of the data, within 'k'"),
    "a gap": (packed(entry("v", data_offsets=[HALF + 4, 2 * HALF + 4]), DATA + bytes(4)),
     "bytes 640 to 644 of the data, before tensor 'v', belong to no tensor"),
    "bytes left over": (packed(header_of(RIGHT), DATA + b"123"), "the data's last 3 bytes belong to no tensor"),
    "two axes": (whole({**RIGHT, "k": ("F32", K[0])}), "tensor 'k' is [2, 4], it must be [tokens, heads, head_dim]"),
    "no tokens": (whole({**RIGHT, "k": ("F32", K[:0])}), "tensor 'k' is [0, 2, 4]"),
    "few tokens": (whole({"k": ("F32", K[:15]), "v": ("F32", V[:15])}),
     "tensor 'k' has 15 tokens, at least 16 are needed"),
    "V of other tokens": (whole({**RIGHT, "v": ("F32", V[:19])}), "tensor 'v' is [19, 2, 4], 'k' is [20, 2, 4]"),
    "V of other heads": (whole({**RIGHT, "v": ("F32", some(20, 1))}), "tensor 'v' is [20, 1, 4], 'k' is [20, 2, 4]"),
    "Q of other tokens": (whole({**RIGHT, "q": ("F32", K[:19])}),
     "tensor 'q' is [19, 2, 4], beside 'k' it must be [20, a multiple of 2, 4]"),
    "Q of odd heads": (whole({**RIGHT, "q": ("F32", some(20, 3))}), "tensor 'q' is [20, 3, 4]"),
    "Q of longer heads": (whole({**RIGHT, "q": ("F32", some(20, 2, 8))}), "tensor 'q' is [20, 2, 8]"),
    "layers unlike": (whole({f"layers.{n}.{x}": ("F32", some(20, 1 + n)) for n in (0, 1) for x in "kv"}),
     "tensor 'layers.1.k' has 2 heads of 4, 'layers.0.k' has 1 of 4"),
    "a name in colours": (whole({"\x1b[31m": ("F32", K)}), "it holds '\\x1b[31m'"),
    "half a character": (packed(b'{"\\ud800": {}}', b""), "the header is not valid JSON: "),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_is_refused_by_its_name_in_one_line(path: Path, case: str) -> None:
    content, says = WRONG[case]
    path.write_bytes(content)
    with pytest.raises(BadFile) as refused:
        read_layers(path)
    assert refused.value.message.startswith(f"{path}: ")
    assert says in refused.value.message
    assert "\n" not in refused.value.message
    refused.value.message.encode()


def spoilt(values: np.ndarray, at: tuple[int, ...], value: float) -> np.ndarray:
    result = values.copy()
    result[at] = value
    return result


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize(("letter", "value"), [("k", "nan"), ("v", "inf"), ("q", "-inf")])
def test_what_is_no_number_is_refused_by_tensor_and_place(path: Path, dtype: str, letter: str, value: str) -> None:
    tensors = {name: (dtype, some()) for name in "kvq"}
    tensors[letter] = (dtype, spoilt(spoilt(some(), (17, 1, 2), float(value)), (19, 0, 0), float("nan")))
    path.write_bytes(whole(tensors))
    with pytest.raises(BadFile) as refused:
        read_layers(path)
    assert refused.value.message == f"{path}: tensor {letter!r} holds {value} at [17, 1, 2]"
    assert len(read_layers(path, tokens=17)) == 1  # what is not asked for is not looked at


def test_the_place_counts_from_the_first_row_however_many_are_checked_at_once(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("calibrate.quality.tensors_file.CHECKED_AT_ONCE", 24)
    broken = spoilt(K, (17, 1, 2), float("nan"))
    for wrong, says in ((broken, r"'k' holds nan at \[17, 1, 2\]"), (K * 0, "'k' is zero")):
        with pytest.raises(BadFile, match=says):
            read_layers(write(path, k=wrong, v=V))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda _: None, "cannot be read: No such file or directory"),
        (lambda path: path.mkdir(), "cannot be read: Is a directory"),
        (lambda path: path.symlink_to("/dev/null"), "is no file that can be mapped into memory"),
    ],
    ids=["nothing", "a folder", "a device"],
)
def test_what_is_no_file_is_refused(path: Path, make: Callable[[Path], object], says: str) -> None:
    make(path)
    with pytest.raises(BadFile, match=says):
        read_layers(path)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_read_or_refused_and_nothing_else(path: Path, data: st.DataObject) -> None:
    content = bytearray(whole(RIGHT))
    header_end = len(content) - len(DATA)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, header_end - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content)
    try:
        layers = read_layers(path)
    except BadFile:
        return
    assert layers[0].keys.rows(0, 16).shape == (16, *layers[0].keys.shape[1:])
