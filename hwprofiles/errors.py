"""The base of every refusal, and the two that reading a data file can raise. `twin/errors.py` draws the whole tree."""

import difflib
from collections.abc import Iterable

EXIT_BAD_INPUT = 2


class TwinError(Exception):
    """An expected outcome: shown in one line, never as a traceback."""

    exit_code = EXIT_BAD_INPUT

    def __init__(self, message: str, *, hint: str = "") -> None:
        message = " ".join(message.split())  # a key or path may hold line breaks
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message


class UnknownName(TwinError, KeyError):
    """A name that stands for nothing here; the hint has the nearest one, and the known ones or what `listed` says."""

    def __init__(self, kind: str, name: str, known: Iterable[str], *, listed: str = "") -> None:
        names = sorted(known)
        extended = [known_name for known_name in names if known_name.startswith(name) and name]
        near = extended or difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        nearest = f"did you mean {near[0]}? " if near else ""
        super().__init__(f"unknown {kind} {name!r}", hint=f"{nearest}known: {listed or ', '.join(names)}")


class BadFile(TwinError, ValueError):
    """A data file that cannot be read as what it claims to be; the message names the file and the key."""
