"""Laying a file over the shipped one that it extends."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hwprofiles.errors import BadFile

Table = dict[str, Any]


def extended(
    raw: Any,
    path: Path,
    *,
    kind: str,
    names: Sequence[str],
    shipped: Callable[[str], Any],
    lay_over: Callable[[Table, Table], Table],
) -> Any:
    """`raw`, read from `path`, laid over the one that its key `extends` names, and that over its own parent.

    `shipped` reads what is shipped under one of `names`. BadFile for another parent, or for parents that form a ring.
    """
    layers = []
    above: list[str] = []
    while isinstance(raw, dict) and "extends" in raw:
        parent = raw["extends"]
        if parent not in names:
            raise BadFile(f"{path}: extends {parent!r}, which is not a shipped {kind}", hint=", ".join(names))
        if parent in above:
            raise BadFile(f"{path}: extends {parent!r}, which extends itself", hint=", ".join(names))
        layers.append({key: value for key, value in raw.items() if key != "extends"})
        above.append(parent)
        raw = shipped(parent)
    for layer in reversed(layers):
        raw = lay_over(raw, layer)
    return raw
