"""What is wrong with how a call ended: nothing but documented exit codes, one line for a refusal, strict JSON."""

import json
from typing import NamedTuple

DOCUMENTED = {0, 2, 3, 4, 5, 130, 141, 143}
REFUSED = {2, 5}


class Ended(NamedTuple):
    """What a call left behind."""

    code: int
    out: str
    err: str
    left: tuple[str, ...]
    """Names in its folder that were not there before."""


def wrong_with(ended: Ended, words: tuple[str, ...]) -> str:
    """The defect in a few words; empty where there is none."""
    if "Traceback" in ended.err or "Exception ignored" in ended.err:
        return f"traceback: {ended.err.strip().splitlines()[-1][:200]}"
    if ended.code not in DOCUMENTED:
        return f"exit code {ended.code}"
    if unfinished := [name for name in ended.left if name.endswith(".twin-unfinished")]:
        return f"left behind: {unfinished}"
    if "--json" in words and "-h" not in words and "--help" not in words and ended.out.startswith("{"):
        return _not_json(ended.out)
    told = ended.err.splitlines(keepends=True)
    if any(word.endswith("/dev/stderr") for word in words):
        told = told[-1:]  # before it, what was written of the document that was sent there
    if ended.code in REFUSED and not ended.out and (len(told) != 1 or not told[0].startswith("twin: ")):
        return f"refused in {len(told)} lines: {ended.err[:100]!r}"
    return ""


def _not_json(text: str) -> str:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} in JSON")

    try:
        json.loads(text, parse_constant=refuse)
        text.encode()
    except (ValueError, RecursionError) as wrong:
        return f"no JSON: {wrong}"
    return ""
