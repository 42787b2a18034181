"""The base of every refusal, and the two that reading a data file can raise. `twin/errors.py` draws the whole tree."""

from collections.abc import Iterable

from hwprofiles.spelling import match, suggestions

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
    """A name that stands for nothing here; the hint has those that may be meant, and the known ones or `listed`."""

    def __init__(self, kind: str, name: str, known: Iterable[str], *, listed: str = "") -> None:
        names = sorted(known)
        near = suggestions(name, names)
        meant = f"did you mean {' or '.join(near)}? " if near else ""
        super().__init__(f"unknown {kind} {name!r}", hint=f"{meant}known: {listed or ', '.join(names)}")


class NotShipped(UnknownName):
    """A name of something that exists, but not here: another one is no misspelling of it."""

    def __init__(self, kind: str, name: str, hint: str) -> None:
        TwinError.__init__(self, f"{kind} {name!r} is not shipped", hint=hint)


class BadFile(TwinError, ValueError):
    """A data file that cannot be read as what it claims to be; the message names the file and the key."""


def find(kind: str, name: str, known: Iterable[str], *, listed: str = "") -> str:
    """The known name that `name` stands for, whatever its case and separators; UnknownName where there is none."""
    names = list(known)
    found = match(name, names)
    if found is None:
        raise UnknownName(kind, name, names, listed=listed)
    return found
