"""How names are compared: case and separators do not matter, digits always do.

A digit tells products apart: h100 is no misspelt h200 and 70b no misspelt 8b. So a spelling is only suggested where all
digits are as written, or where the name is a known one cut short.
"""

import re
from collections.abc import Iterable

MOST_SUGGESTED = 6  # names that a short one may stand for; where there are more, the list of all says as much
MISSPELT = 0.7  # share of letters in common, in order, from which on a name passes for a misspelt one

_SEPARATORS = re.compile(r"[\s_.-]+")
_BETWEEN_DIGITS = re.compile(r"(?<=\d)[\s_.-]+(?=\d)")
_TOKENS = re.compile(r"\d+|[^\W\d_]+")
_VENDORS = {"nvidia", "geforce", "tesla", "quadro", "amd", "radeon", "instinct", "apple", "intel"}
_ACCELERATOR = re.compile(r"(?:\d+x)?(?:rtx|gtx|rx|mi|gh|gb|[abhlmptv])\d+[a-z\d/]*|\d{3,4}(?:ti|super|xtx?)?")
"""A number of graphics cards and processors, as their makers write it, without its separators."""


def plain(name: str) -> str:
    """The name without case and separators; two numbers stay apart, so that 3.1 is not 31."""
    return _SEPARATORS.sub("", _BETWEEN_DIGITS.sub("/", name.casefold()))


def match(name: str, known: Iterable[str]) -> str | None:
    """The known name that is meant: an equal one before one that differs in case and separators; None without any."""
    names = list(known)
    if name in names:
        return name
    asked = plain(name)
    return next((each for each in names if asked and plain(each) == asked), None)


def is_accelerator(name: str) -> bool:
    """Whether it reads like the name of a card or processor: one that exists, but perhaps not here."""
    return _ACCELERATOR.fullmatch(plain(without_vendor(name))) is not None


def suggestions(name: str, known: Iterable[str]) -> list[str]:
    """Known names that may be meant, in order: those that it shortens, or else one that it misspells (no card is)."""
    names = sorted(known)
    found = _shortened(name, names)
    if found or is_accelerator(name):
        return found if len(found) <= MOST_SUGGESTED else []
    digits = _numbers(name)
    near = nearest(name, [each for each in names if not digits or _numbers(each) == digits], alike=MISSPELT)
    return [near] if near else []


def _shortened(name: str, names: list[str]) -> list[str]:
    """Names that begin with it, or else that hold it: words may be cut short and left out, numbers may not."""
    asked = _tokens(without_vendor(name))
    if not asked:
        return []
    tokens = {each: _tokens(each) for each in names}
    whole = [each for each in names if tokens[each] == asked]
    begun = [each for each in names if _starts(tokens[each], asked)]
    return (
        whole
        or begun
        or [each for each in names if any(_starts(tokens[each][at:], asked) for at in range(len(tokens[each])))]
    )


def nearest(name: str, known: Iterable[str], *, alike: float = 0.5) -> str | None:
    """The known name that looks most like it, whatever its digits; None where none is as much `alike`, of 1."""
    from difflib import get_close_matches  # noqa: PLC0415 - only a refusal needs it

    by_plain = {plain(each): each for each in sorted(known)}
    return next((by_plain[each] for each in get_close_matches(plain(name), by_plain, n=1, cutoff=alike)), None)


def _numbers(name: str) -> list[str]:
    return [part for part in _tokens(name) if part.isdecimal()]


def without_vendor(name: str) -> str:
    """The name without its maker and its maker's lines of products."""
    return " ".join(part for part in _SEPARATORS.split(name.casefold()) if part not in _VENDORS)


def _tokens(name: str) -> list[str]:
    """Its numbers and words."""
    return _TOKENS.findall(name.casefold())


def _starts(tokens: list[str], asked: list[str]) -> bool:
    """Whether `asked` is a beginning of `tokens`, as `_shortened` has it."""
    left = iter(tokens)
    for place, each in enumerate(asked):
        for token in left:
            if token == each if each.isdecimal() else token.startswith(each):
                break
            if place == 0 or token.isdecimal():
                return False
        else:
            return False
    return True
