"""The files of kept answers: JSON with sorted keys, a line for every part that fits one, so that diffs are short."""

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
WIDE = 800
"""Characters of the longest part that stands on one line."""

Answers = dict[str, dict[str, Any]]
"""By question, its words as they are typed after `twin`."""


def path_of(name: str) -> Path:
    return FOLDER / f"{name}.json"


def read(name: str) -> Answers:
    """The kept answers of that file; none where there is no file yet."""
    path = path_of(name)
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write(name: str, answers: Answers) -> None:
    path_of(name).write_text(folded(answers) + "\n", encoding="utf-8")


def folded(value: Any, depth: int = 0) -> str:
    """JSON on one line where that is short, otherwise a line for each entry; the questions always have lines."""
    flat = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    if not isinstance(value, dict) or not value or (depth > 1 and len(flat) <= WIDE):
        return flat
    indent = " " * (depth + 1)
    lines = [f"{indent}{json.dumps(key, ensure_ascii=False)}: {folded(value[key], depth + 1)}" for key in sorted(value)]
    return "{\n" + ",\n".join(lines) + "\n" + " " * depth + "}"
