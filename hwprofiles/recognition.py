"""What a file is that was taken for another: told by its first bytes, once reading it has failed."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from os.path import isdir, isfile
from pathlib import Path

from hwprofiles.errors import BadFile
from hwprofiles.traces import JSON_LINES, PROMPTS, TABLES

HEAD_BYTES = 4096  # bytes that are looked at

PROFILE, MODEL, TRACE = "a twin machine profile", "a twin model file", JSON_LINES.name
CONFIG = "a Hugging Face config.json"

_MAGIC = (
    (b"GGUF", "a GGUF model"),
    (b"PAR1", "a Parquet file"),
    (b"\x1f\x8b", "a gzip file"),
    (b"\x28\xb5\x2f\xfd", "a zstd file"),
    (b"\xfd7zXZ\x00", "an xz file"),
    (b"BZh", "a bzip2 file"),
    (b"\x89HDF", "an HDF5 file"),
    (b"PK\x03\x04", "a zip archive"),
    (b"\x80\x02", "a pickle, as old PyTorch checkpoints are"),
    (b"version https://git-lfs", "a pointer of Git LFS, not the file that it stands for"),
    (b"<", "a web page or other markup"),
)
_SCHEMAS = {
    "hardware": PROFILE,
    "model": MODEL,
    "prediction": "a prediction of twin predict",
    "comparison": "a comparison of twin compare",
    "simulation": "an answer of twin simulate",
    "validation": "an answer of twin validate",
    "machine": "an answer of twin machine",
}
_KEYS = (
    (("traceEvents",), "a trace of events for Perfetto"),
    (("weight_map",), "the index of a safetensors checkpoint"),
    (("architectures",), CONFIG),
    (("model_type", "hidden_size"), CONFIG),
    *((names, layout.name) for layout in (JSON_LINES, *PROMPTS) for names in layout.marks),
)
_COLUMNS = tuple((names, layout.name) for layout in TABLES for names in layout.marks)
_SCHEMA = re.compile(rb'"schema"\s*:\s*"twin\.([a-z]+)/')
_KEY = re.compile(r'"([^"\\]{1,40})"\s*:')
_MOST_SAFETENSORS_HEADER = 10**8  # bytes: the limit of the format


@contextmanager
def recognised(path: Path, *wanted: str, instead: str) -> Iterator[None]:
    """Say of a file that cannot be read what it is, where that is known and not `wanted`; `instead` is the hint then.

    What is wanted first is what an error names.
    """
    try:
        yield
    except BadFile:
        known = kind_of(path)
        if known in ("", *wanted):
            raise
        raise BadFile(f"{path}: {known}, not {wanted[0]}", hint=instead) from None


def kind_of(path: Path) -> str:
    """As `kind_of_head`, of what lies under `path`; only a regular file is opened."""
    if isdir(path):
        return "a folder"
    if not isfile(path):
        return ""
    try:
        with path.open("rb") as file:
            return kind_of_head(file.read(HEAD_BYTES))
    except OSError:
        return ""


def kind_of_head(head: bytes) -> str:
    """What begins with these bytes, such as "a GGUF model"; empty where that is not known."""
    head = head[:HEAD_BYTES].removeprefix(b"\xef\xbb\xbf").lstrip()
    if b"/data.pkl" in head and head.startswith(b"PK"):
        return "a PyTorch checkpoint"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= _MOST_SAFETENSORS_HEADER:
        return "a safetensors checkpoint"
    for magic, known in _MAGIC:
        if head.startswith(magic):
            return known
    return _kind_of_json(head) if head.startswith((b"{", b"[")) else _kind_of_table(head)


def _kind_of_json(head: bytes) -> str:
    schema = _SCHEMA.search(head)
    if schema is not None:
        return _SCHEMAS.get(schema[1].decode(), "")
    keys = set(_KEY.findall(head.decode(errors="ignore")))
    return next((known for needed, known in _KEYS if keys.issuperset(needed)), "")


def _kind_of_table(head: bytes) -> str:
    """A known table by the names of its columns, or any where two lines have as many cells."""
    lines = [line.split(",") for line in head.decode(errors="ignore").splitlines()[:2]]
    columns = {cell.strip().lower() for cell in (lines[0] if lines else ())}
    for needed, known in _COLUMNS:
        if columns.issuperset(needed):
            return known
    return "a CSV file" if len(lines) == 2 and len(lines[0]) == len(lines[1]) > 1 else ""
