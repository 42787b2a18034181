"""Asking the product in this process, what of its JSON answers is kept, and the files that keep it.

All fields are, with these reductions, so that the files stay small and nothing but what an answer says can move them:
- floats have 12 digits;
- of `sources` and `assumptions` the names remain, and remarks (`note` and the like) are left out;
- of the cases of `validate` what is predicted and how it is judged remains, not what was measured or how far off it is;
- a list whose entries have names becomes a table by `[name]`, which tells equal entries once;
- a list of requests, or of points in time, becomes a digest: how many, and for every field the sum of its numbers and
  the sum of numbers x place in the list: an entry that moves by 1e-9 of its field's sum is seen.
"""

import io
import json
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import cli
from twin.cli.delivery import end

FOLDER = Path(__file__).parent
WIDE = 800
"""Characters of the longest part of a file that stands on one line."""
DIGITS = 12
LEFT_OUT = {"note", "tolerance_reason", "role_reason"}
NAMED_ONLY = {"sources": "rate", "skipped": "id"}
SHORTENED = {"cases": ("predicted", "low", "high", "naive_error", "role", "within", "wall", "also")}
DIGESTED = {"requests", "points", "rejected"}
NAMES = ("name", "id", "kv_dtype")
HOMES = "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "HOME", "USERPROFILE", "APPDATA"

TRACES = {
    "trace.jsonl": [
        {"id": f"r{at}", "arrival_s": 0.3 * at, "prompt_tokens": 100 + 700 * at % 2300, "output_tokens": 5 + 9 * at}
        for at in range(20)
    ],
    "hashed.jsonl": [
        {"timestamp": 2 * at, "input_length": 40 + at, "output_length": 9, "hash_ids": [1, 2, 3 * at]}
        for at in range(8)
    ],
    "prompts.jsonl": [{"prompt": "What is it? " * (1 + 50 * at), "output_tokens": 30 + at} for at in range(8)],
}
"""What lies in the folder: requests in seconds, hashes of 16 tokens with arrivals in what an option says, and text."""

Document = dict[str, Any]
Answers = dict[str, Document]
"""By question, its words as they are typed after `twin`."""


@contextmanager
def nobodys_home() -> Iterator[None]:
    """An empty home and configuration folder, no variable of the product's own, and a folder with TRACES."""
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryDirectory() as folder:
        for name, requests in TRACES.items():
            lines = "".join(json.dumps(request) + "\n" for request in requests)
            (Path(folder) / name).write_text(lines, encoding="utf-8")
        variables = {name: value for name, value in os.environ.items() if "TWIN" not in name}
        with patch.dict(os.environ, variables | dict.fromkeys(HOMES, home), clear=True), chdir(folder):
            yield


def answer(words: Sequence[str]) -> Document:
    """What `twin` says to the words: the exit code and what is kept of the document. A bug leaves as its exception."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = end(cli.twin, [*words, "--json"])
        document = json.loads(out.getvalue())
    except Exception as bug:
        bug.add_note(f"twin {' '.join(words)}")
        raise
    told = document if isinstance(document, dict) else {"list": document}
    return {"exit": code, **kept(told), **({"stderr": err.getvalue()} if err.getvalue() else {})}


def kept(value: Any, key: str = "") -> Any:
    """The part of a value that is compared."""
    if isinstance(value, dict):
        return {name: kept(each, name) for name, each in value.items() if name not in LEFT_OUT}
    if isinstance(value, list):
        return _kept_list(value, key)
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _kept_list(entries: list[Any], key: str) -> Any:
    if key == "assumptions":
        return [text.partition(":")[0] for text in entries]
    if key in NAMED_ONLY:
        return [entry[NAMED_ONLY[key]] for entry in entries]
    if key in DIGESTED:
        return digest(entries)
    names = [_name(entry) for entry in entries]
    if key in SHORTENED:
        entries = [{name: entry[name] for name in SHORTENED[key] if name in entry} for entry in entries]
    if entries and all(names) and len(set(names)) == len(names):
        return _table({f"[{name}]": kept(entry) for name, entry in zip(names, entries, strict=True)})
    return [kept(entry) for entry in entries]


def _table(entries: Document) -> Document:
    """The same, with "as [name]" in place of an entry that says what an earlier one says, such as an equal device's."""
    shown: dict[str, str] = {}
    table = {}
    for name, entry in entries.items():
        own = {key: value for key, value in entry.items() if key not in NAMES}
        told = json.dumps(own, sort_keys=True)
        table[name] = f"as {shown[told]}" if told in shown else own
        shown.setdefault(told, name)
    return table


def _name(entry: Any) -> str:
    """What an entry of a list is called; empty where it has no name."""
    if not isinstance(entry, dict):
        return ""
    if "question" in entry:
        return f"{entry['question']['layout']} {entry['question']['kv_dtype']}"
    return next((str(entry[name]) for name in NAMES if name in entry), "")


def digest(entries: list[Document]) -> Document:
    """Few numbers for a long list of like entries: if one of its numbers moves, so does a sum."""
    fields: dict[str, list[tuple[int, float]]] = {}
    texts: dict[str, set[str]] = {}
    for at, entry in enumerate(entries, start=1):
        for name, value in entry.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                fields.setdefault(name, []).append((at, value))
            else:
                texts.setdefault(f"{name}_texts", set()).add(json.dumps(value))
    made: Document = {"count": len(entries)}
    for name, pairs in fields.items():
        sums = {"sum": math.fsum(value for _, value in pairs), "by_place": math.fsum(at * value for at, value in pairs)}
        made[name] = {"count": len(pairs), **kept(sums)}
    return made | {name: sorted(values)[:20] for name, values in texts.items()}


def read(name: str) -> Answers:
    """The kept answers of that file; none where there is no file yet."""
    path = FOLDER / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write(name: str, answers: Answers) -> None:
    """Keep them: sorted keys, a line for every part that fits one, so that diffs are short."""
    (FOLDER / f"{name}.json").write_text(folded(answers) + "\n", encoding="utf-8")


def folded(value: Any, depth: int = 0) -> str:
    """JSON on one line where that is short, otherwise a line for each entry; the questions always have lines."""
    flat = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    if not isinstance(value, dict) or not value or (depth > 1 and len(flat) <= WIDE):
        return flat
    indent = " " * (depth + 1)
    lines = [f"{indent}{json.dumps(key, ensure_ascii=False)}: {folded(value[key], depth + 1)}" for key in sorted(value)]
    return "{\n" + ",\n".join(lines) + "\n" + " " * depth + "}"
