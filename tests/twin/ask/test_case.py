"""Names are looked up, defaults filled in, and every combination that cannot be asked is refused in one line."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from tests.worlds import flash_next, model
from twin.ask.question import Question
from twin.ask.resolve import resolve
from twin.errors import BadValue, Impossible, TwinError, UnknownName
from twin.models import ModelSpec
from twin.units import MIB


def written(folder: Path, spec: ModelSpec) -> str:
    path = folder / "toy.json"
    path.write_bytes(msgspec.json.encode(spec))
    return str(path)


def test_defaults_are_the_engines() -> None:
    asked = flash_next(1000)
    assert (asked.layout.name, asked.fmt.name, asked.chunk_tokens, asked.staging_bytes) == (
        "offload",
        "fp16",
        2048,
        32 * MIB,
    )
    assert (asked.prefill, asked.copies, asked.pooled, asked.ngram) == ("auto", "serial", "vram", "disk")
    assert asked.plane_bytes == 2048


def test_what_is_asked_replaces_the_defaults() -> None:
    options = {"prefill": "staged", "copies": "overlapped", "pooled": "host", "ngram": "ram"}
    asked = flash_next(1000, chunk_tokens=4096, staging_bytes=64 * MIB, **options)
    assert (asked.chunk_tokens, asked.staging_bytes) == (4096, 64 * MIB)
    assert {name: getattr(asked, name) for name in options} == options


REFUSED: list[tuple[dict[str, Any], type[TwinError], str]] = [
    ({"ctx_tokens": 0}, BadValue, "context 0 is outside the range of 1 to 2,147,483,647 tokens"),
    ({"ctx_tokens": -5}, BadValue, "context -5"),
    ({"ctx_tokens": 2**31}, BadValue, "context 2147483648"),
    ({"ctx_tokens": True}, BadValue, "context True"),
    ({"ctx_tokens": 1.5}, BadValue, "context 1.5"),
    ({"ctx_tokens": float("nan")}, BadValue, "context nan"),
    ({"batch": 0}, BadValue, "batch 0 is outside the range of 1 to 4,096 sequences"),
    ({"batch": 4097}, BadValue, "batch 4097"),
    ({"chunk_tokens": 0}, BadValue, "chunk 0"),
    ({"chunk_tokens": 1000}, BadValue, "chunk of 1,000 tokens is not a multiple of exllamav3's page of 256"),
    ({"lanes": 3}, BadValue, "3 PCIe lanes"),
    ({"staging_bytes": 1}, BadValue, "staging of 1 B is below the smallest of 524,288 B"),
    ({"prefill": "fast"}, BadValue, "prefill 'fast' is not known"),
    ({"copies": "both"}, BadValue, "copies 'both' is not known"),
    ({"pooled": "disk"}, BadValue, "pooled 'disk' is not known"),
    ({"host_pages": "2MiB"}, BadValue, "host pages '2MiB' is not known"),
    ({"ngram": "vram"}, BadValue, "ngram 'vram' is not known"),
    ({"kv_dtype": "bf16"}, Impossible, "exllamav3 keeps no bf16 cache"),
    ({"prefill": "staged", "batch": 2}, Impossible, "only for one sequence"),
    ({"layout": "vram", "staging_bytes": 32 * MIB}, Impossible, "--staging means nothing under layout 'vram'"),
    ({"layout": "vram", "prefill": "auto"}, Impossible, "--prefill means nothing"),
    ({"layout": "vram", "copies": "serial"}, Impossible, "--copies means nothing"),
    ({"layout": "vram", "pooled": "vram"}, Impossible, "--pooled means nothing"),
    ({"layout": "vram", "host_pages": "huge"}, Impossible, "--host-pages means nothing"),
]


@pytest.mark.parametrize(("asked", "error", "message"), REFUSED, ids=[str(row[0]) for row in REFUSED])
def test_what_cannot_be_asked_is_refused_in_one_line(
    asked: dict[str, Any], error: type[TwinError], message: str
) -> None:
    with pytest.raises(error) as refused:
        resolve(Question(**({"ctx_tokens": 1000} | asked)))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value) + refused.value.hint


@pytest.mark.parametrize(
    ("asked", "message", "nearest"),
    [
        ({"model": "qwen3.8-flash-nxt"}, "unknown model 'qwen3.8-flash-nxt'", "qwen3.8-flash-next"),
        ({"engine": "exllama3"}, "unknown engine 'exllama3'", "exllamav3"),
        ({"layout": "offlaod"}, "unknown layout 'offlaod'", "offload"),
        ({"layout": "layout"}, "unknown layout 'layout'", "offload"),
        ({"engine": "rules"}, "unknown engine 'rules'", "exllamav3"),
        ({"kv_dtype": "fp61"}, "unknown KV format 'fp61'", "fp16"),
    ],
)
def test_an_unknown_name_says_what_is_known(asked: dict[str, str], message: str, nearest: str) -> None:
    with pytest.raises(UnknownName) as refused:
        resolve(Question(ctx_tokens=1000, **asked))  # type: ignore[arg-type]
    assert str(refused.value) == message
    assert nearest in refused.value.hint


@pytest.mark.parametrize("staging", [524_288, 64 * MIB])
@pytest.mark.parametrize("copies", ["serial", "overlapped"])
def test_staging_may_be_as_small_as_one_page(staging: int, copies: str) -> None:
    assert flash_next(1000, staging_bytes=staging, copies=copies).staging_bytes == staging


def test_offload_needs_sparse_attention(tmp_path: Path) -> None:
    dense = written(tmp_path, model(every=1, sparse=False))
    with pytest.raises(Impossible, match="toy reads its whole cache at every step: offload needs sparse attention"):
        resolve(Question(ctx_tokens=1, model=dense, engine="exllamav3", layout="offload"))
    assert resolve(Question(ctx_tokens=1, model=dense)).layout.name == "vram"


@pytest.mark.parametrize("where", ["ram", "disk"])
def test_a_place_for_a_table_that_is_not_there_is_refused(tmp_path: Path, where: str) -> None:
    path = written(tmp_path, model())
    with pytest.raises(Impossible, match="toy has no n-gram table"):
        resolve(Question(ctx_tokens=1, model=path, engine="exllamav3", ngram=where))  # type: ignore[arg-type]


def test_an_engine_without_the_layout_says_which_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = replace(flash_next().rules, layouts=("vram",))
    monkeypatch.setattr("twin.ask.resolve.load_engine", lambda _: rules)
    with pytest.raises(Impossible, match="exllamav3 has no layout 'offload'") as refused:
        flash_next(1, engine="exllamav3", layout="offload")
    assert refused.value.hint == "it has vram"
