"""What moved between two sets of answers, field by field, and a table of it for a reader."""

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.golden.answers import Answers

RELATIVE = 1e-9
"""Numbers nearer than this are the same; whole numbers and texts have to be equal."""
LEAST = 1e-15
"""Differences below it are rounding: what should be nought after a subtraction. RELATIVE of a microsecond."""


class Absent:
    """Stands for a field that is not there."""

    def __repr__(self) -> str:
        return "(none)"


ABSENT = Absent()


class Move(NamedTuple):
    """A field of an answer that is not what it was."""

    question: str
    field: str
    old: Any
    new: Any

    @property
    def relative(self) -> float:
        """(new - old) / |old|, infinite from nought and for what is no number."""
        if not (_is_number(self.old) and _is_number(self.new)):
            return math.inf
        return (self.new - self.old) / abs(self.old) if self.old else math.copysign(math.inf, self.new)

    @property
    def kind(self) -> str:
        """The field without the names of entries: what like fields share."""
        return re.sub(r"\[[^\]]*\]", "[*]", self.field)


class Compared(NamedTuple):
    """Two sets of answers side by side."""

    asked: int
    moves: list[Move]
    new: list[str]
    gone: list[str]

    @property
    def moved(self) -> int:
        """Answers with a move in them."""
        return len({move.question for move in self.moves})

    def __bool__(self) -> bool:
        return bool(self.moves or self.new or self.gone)


def compared(old: Answers, new: Answers) -> Compared:
    """Everything that differs."""
    both = [question for question in new if question in old]
    return Compared(
        asked=len(new),
        moves=[move for question in both for move in moves(old[question], new[question], question=question)],
        new=[question for question in new if question not in old],
        gone=[question for question in old if question not in new],
    )


def moves(old: Any, new: Any, *, question: str, field: str = "") -> Iterator[Move]:
    """Every leaf in which two values differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            inner = f"{field}{key}" if key.startswith("[") or not field else f"{field}.{key}"
            yield from moves(old.get(key, ABSENT), new.get(key, ABSENT), question=question, field=inner)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for at, pair in enumerate(zip(old, new, strict=True)):
            yield from moves(*pair, question=question, field=f"{field}[{at}]")
    elif not same(old, new):
        yield Move(question, field, old, new)


def same(old: Any, new: Any) -> bool:
    """Whether two leaves count as equal."""
    if _is_number(old) and _is_number(new) and isinstance(old, float) | isinstance(new, float):
        return math.isclose(old, new, rel_tol=RELATIVE, abs_tol=LEAST)
    return type(old) is type(new) and bool(old == new)


def settled(old: Any, new: Any) -> Any:
    """The new value with the old number wherever they are the same: the last digits of a processor move no file."""
    if isinstance(old, dict) and isinstance(new, dict):
        return {key: settled(old.get(key, ABSENT), value) for key, value in new.items()}
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [settled(*pair) for pair in zip(old, new, strict=True)]
    return old if same(old, new) else new


def report(found: Compared, *, most: int) -> str:
    """How many answers moved, and a row for every field that did, the farthest first, with its largest move."""
    came, went = len(found.new), len(found.gone)
    lines = [f"{found.moved:,} of {found.asked:,} answers moved; {came:,} are new, {went:,} are gone"]
    grouped: dict[str, list[Move]] = {}
    for move in found.moves:
        grouped.setdefault(move.kind, []).append(move)
    farthest = {kind: max(each, key=lambda move: abs(move.relative)) for kind, each in grouped.items()}
    kinds = sorted(grouped, key=lambda kind: (-abs(farthest[kind].relative), kind))
    if kinds:
        lines += ["", "| field | moves | old | new | relative | the largest: `twin ...` |", "|---|---|---|---|---|---|"]
        lines += [_row(farthest[kind], len(grouped[kind])) for kind in kinds[:most]]
    if len(kinds) > most:
        lines.append(f"... and {len(kinds) - most:,} more fields")
    for what, listed in (("new", found.new), ("gone", found.gone)):
        lines += [f"{what}: twin {question}" for question in listed[:most]]
        if len(listed) > most:
            lines.append(f"... and {len(listed) - most:,} more are {what}")
    return "\n".join(lines)


def _row(move: Move, count: int) -> str:
    where = move.question if move.field == move.kind else f"{move.question} ({move.field})"
    relative = f"{100 * move.relative:+.3g} %" if math.isfinite(move.relative) else ""
    return f"| {move.kind} | {count:,} | {_shown(move.old)} | {_shown(move.new)} | {relative} | {where} |"


def _shown(value: Any) -> str:
    text = f"{value:.10g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
