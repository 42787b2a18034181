"""The only place where 1024 and 10^9 are spelled out: parsing what people type, formatting what they read."""

import re
from fractions import Fraction

from hwprofiles.links import FULL_LANES
from twin.errors import BadValue

KIB, MIB, GIB, TIB = 1024, 1024**2, 1024**3, 1024**4
GB = 10**9
MS, US, NS = 1e-3, 1e-6, 1e-9
MINUTE, HOUR = 60.0, 3600.0
YEAR = 365.25 * 24 * HOUR

_SIZES = ((TIB, ",.2f", "TiB"), (GIB, ",.2f", "GiB"), (MIB, ",.1f", "MiB"), (KIB, ",.2f", "KiB"))
"""From how many bytes on a size is written in which unit, and with which figures."""

_TIMES = (
    (2 * YEAR, YEAR, ".3g", "years"),
    (2 * HOUR, HOUR, ",.1f", "h"),
    (2 * MINUTE, MINUTE, ",.1f", "min"),
    (1.0, 1.0, ",.2f", "s"),
    (MS, MS, ",.2f", "ms"),
    (0.1 * US, US, ",.1f", "us"),
)
"""From how many seconds on a time is written in which unit, and with which figures."""

MAX_TOKENS = 2**31 - 1  # longest context of a question: page tables and indices of today's engines are 32-bit

_TOKEN_SUFFIXES = {"": 1, "k": 1024, "m": 1024**2}
_BYTE_SUFFIXES = {
    "b": 1, "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB, "kb": 10**3, "mb": 10**6, "gb": GB, "tb": 10**12,
}  # fmt: skip
LEAST_BARE_BYTES = MIB  # from here on a whole number is bytes, as engines print them; below, a unit was forgotten
MAX_BYTES = 2**50
LONGEST_NUMBER = 100  # characters of a number that is read at all
SHOWN_CHARACTERS = 40
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d[\d_]*)"  # 1048576, 1_048_576 or 1,048,576
_LINK = re.compile(r"(?:(?:pcie\s*)?(?:gen\s*)?(?P<generation>[1-6])(?:\.0)?)?\s*(?:x(?P<lanes>16|8|4|2|1))?")
_NUMBER = re.compile(rf"([+-]?(?:{_DIGITS}(?:\.\d+)?|\.\d+)(?:e[+-]?\d{{1,3}})?)\s*([a-z]*)", re.IGNORECASE)


def parse_tokens(text: str) -> int:
    """Token count from '32768', '1_048_576', '256k' or '1M' (k and M are powers of two: 1M = 1,048,576)."""
    number, suffix = _split(text, "token count")
    if suffix not in _TOKEN_SUFFIXES:
        raise BadValue(f"{_shown(text)} is not a token count", hint="write 32768, 256k or 1M (1M = 1,048,576 tokens)")
    tokens = number * _TOKEN_SUFFIXES[suffix]
    if not 1 <= tokens <= MAX_TOKENS:
        raise BadValue(f"{_shown(text)} is outside the range of 1 to {MAX_TOKENS:,} tokens")
    if tokens != int(tokens):
        raise BadValue(f"{_shown(text)} is {float(tokens):g} tokens, not a whole number")
    return int(tokens)


def parse_bytes(text: str) -> int:
    """Byte count from '32MiB', '1.56GiB', '2GB' or '1675037245', rounded down to whole bytes.

    Only a large whole number may go without a unit: GB and GiB differ by 7 %, and 32 alone is no 32 bytes.
    """
    number, suffix = _split(text, "size")
    bare = not suffix and number >= LEAST_BARE_BYTES and number == int(number)
    if suffix not in _BYTE_SUFFIXES and not bare:
        hint = f"write 32MiB, 0.5GiB or 2GB; only a whole number from {LEAST_BARE_BYTES:,} on is bytes by itself"
        raise BadValue(f"{_shown(text)} is not a size with a unit", hint=hint)
    size = number * _BYTE_SUFFIXES.get(suffix, 1)
    if not 1 <= size <= MAX_BYTES:
        raise BadValue(f"{_shown(text)} is outside the range of 1 byte to 1 PiB")
    return int(size)


def parse_link(text: str) -> tuple[int | None, int]:
    """(generation, lanes) of 'x8', 'gen3', 'gen3x4' or '4.0x8'; no generation where none is named, else all lanes."""
    found = _LINK.fullmatch(text.strip().lower())
    if found is None or not any(found.groups()):
        raise BadValue(f"{_shown(text)} is not a PCIe link", hint="write x8, gen3 or gen4x8: x16, x8, x4, x2 or x1")
    generation, lanes = found["generation"], found["lanes"]
    return int(generation) if generation else None, int(lanes or FULL_LANES)


def _split(text: str, what: str) -> tuple[Fraction, str]:
    match = _NUMBER.fullmatch(text.strip()) if len(text) <= LONGEST_NUMBER else None
    if match is None:
        raise BadValue(f"{_shown(text)} is not a {what}")
    return Fraction(match[1].replace("_", "").replace(",", "")), match[2].lower()


def _shown(text: str) -> str:
    """What was typed, cut where it is too long for a line."""
    return repr(text) if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]!r}... ({len(text):,} characters)"


def format_bytes(size: float) -> str:
    """'6.01 TiB', '81.00 GiB', '32.0 MiB', '27.75 KiB' or '512 B'."""
    for unit, figures, name in _SIZES:
        if abs(size) >= unit:
            return f"{size / unit:{figures}} {name}"
    return f"{size:,.0f} B"


def format_rate(value: float, unit: str) -> str:
    """A rate of a profile by its unit: '46.7 us', '23.56 GiB', '835 GB/s' or '63 TFLOP/s'."""
    if unit == "s":
        return format_seconds(value)
    if unit == "B":
        return format_bytes(value)
    if unit == "1":
        return f"{value:.4g}"
    scale, name = {"FLOP/s": (10**12, "TFLOP/s"), "op/s": (10**12, "Top/s")}.get(unit, (GB, "GB/s"))
    return f"{value / scale:.4g} {name}"


def format_seconds(seconds: float) -> str:
    """'3 years', '2.4 h', '29.5 min', '20.0 s', '19.7 ms', '46.7 us', '< 0.1 us' or '0 s'."""
    for least, unit, figures, name in _TIMES:
        if seconds >= least:
            return f"{seconds / unit:{figures}} {name}"
    return "< 0.1 us" if seconds else "0 s"
