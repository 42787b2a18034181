"""Reading a file of benchmark results, whichever engine wrote it: formats are told by their own keys."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from calibrate.benchmarks import exllamav3_perf, llama_bench, sglang_bench, vllm_bench
from calibrate.benchmarks.points import Given, Left, Read, Reading
from hwprofiles.errors import BadFile
from hwprofiles.files import Table, read_whole, refuse_repeats
from hwprofiles.recognition import kind_of_head

MOST_BYTES = 2**26
"""Of a file: a server's with the times of every token of a thousand requests has some 10 MB."""
MOST_ROWS = 10_000
INSTEAD = (
    "--from reads llama-bench -o json or jsonl, vllm bench latency, throughput and serve, SGLang's bench_one_batch, "
    "bench_one_batch_server and bench_serving, and what exllamav3's eval/perf.py prints"
)


class Format(NamedTuple):
    """One kind of row: the keys by which it is known, its schema, and what makes points of it."""

    marks: tuple[str, ...]
    schema: type[Struct]
    points: Callable[[Any, str, Given], Read]


FORMATS = (
    Format(llama_bench.MARKS, llama_bench.Test, llama_bench.points),
    Format(sglang_bench.BATCH_MARKS, sglang_bench.Batch, sglang_bench.batch_points),
    Format(sglang_bench.SERVER_MARKS, sglang_bench.Server, sglang_bench.server_points),
    Format(sglang_bench.SERVING_MARKS, sglang_bench.Serving, sglang_bench.serving_points),
    Format(vllm_bench.SERVE_MARKS, vllm_bench.Serve, vllm_bench.serve_points),
    Format(vllm_bench.LATENCY_MARKS, vllm_bench.Latency, vllm_bench.latency_points),
    Format(vllm_bench.THROUGHPUT_MARKS, vllm_bench.Throughput, vllm_bench.throughput_points),
)


def read_benchmark(path: Path, given: Given) -> tuple[list[Reading], list[Left]]:
    """All points of a file, and the lines that are none. BadFile where it holds no point, or one that is wrong."""
    content = read_whole(path, most_bytes=MOST_BYTES)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise _unknown(path, content) from None
    if text.lstrip()[:1] in ("{", "["):
        found = [each for where, row in _rows(text, path) for each in _points(row, where, given)]
    else:
        found = exllamav3_perf.printed_points(text, path.name, given) if exllamav3_perf.UNIT in text else []
        if not found:
            raise _unknown(path, content)
    readings = [each for each in found if isinstance(each, Reading)]
    left = [each for each in found if isinstance(each, Left)]
    if not readings:
        why = f": {left[0].where}: {left[0].reason}" if left else ""
        raise BadFile(f"{path}: holds no measurement that can be asked about{why}", hint=INSTEAD)
    return readings, left


def _unknown(path: Path, content: bytes) -> BadFile:
    known = kind_of_head(content)
    return BadFile(f"{path}: {known or 'no results of a benchmark that is known'}" + (
        ", not results of a benchmark" if known else ""), hint=INSTEAD)  # fmt: skip


def _rows(text: str, path: Path) -> Iterator[tuple[str, Table]]:
    """Objects of one JSON document, or of JSON lines, each with its place."""
    try:
        document = _parsed(text)
    except ValueError as wrong:
        lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
        if len(lines) < 2 or not all(line.lstrip().startswith("{") for _, line in lines[:2]):
            raise BadFile(f"{path}: not valid JSON, perhaps cut short: {wrong}") from None
        yield from _of_lines(lines, path)
        return
    rows = document if isinstance(document, list) else [document]
    for number, row in enumerate(_counted(rows, path), start=1):
        if not isinstance(row, dict):
            raise BadFile(f"{path}: entry {number} is no JSON object")
        yield f"{path.name}:{number}", row


def _of_lines(lines: list[tuple[int, str]], path: Path) -> Iterator[tuple[str, Table]]:
    for number, line in _counted(lines, path):
        try:
            row = _parsed(line)
        except ValueError as wrong:
            raise BadFile(f"{path}: line {number} is not valid JSON, perhaps cut short: {wrong}") from None
        if not isinstance(row, dict):
            raise BadFile(f"{path}: line {number} is no JSON object")
        yield f"{path.name}:{number}", row


def _parsed(text: str) -> Any:
    """ValueError for what is no JSON, and for what nests too deep."""
    try:
        return json.loads(text, object_pairs_hook=refuse_repeats)
    except RecursionError:
        raise ValueError("too deeply nested") from None


def _counted(rows: list[Any], path: Path) -> list[Any]:
    if len(rows) > MOST_ROWS:
        raise BadFile(f"{path}: {len(rows):,} results, more than the {MOST_ROWS:,} that a file may hold")
    return rows


def _points(row: Table, where: str, given: Given) -> Read:
    """By the first format whose keys are all there. BadFile names the key that is wrong."""
    for known in FORMATS:
        if row.keys() >= set(known.marks):
            try:
                parsed = msgspec.convert(row, known.schema)
            except msgspec.ValidationError as wrong:
                raise BadFile(f"{where}: {wrong}") from None
            return known.points(parsed, where, given)
    known_as = kind_of_head(json.dumps(row).encode(errors="replace"))
    raise BadFile(f"{where}: {known_as or 'no result of a benchmark that is known'}", hint=INSTEAD)
