"""What exllamav3's `eval/perf.py` prints: tokens a second of prompts by length, and of steps by context.

Source: `eval/perf.py` of github.com/turboderp-org/exllamav3 at 0d3893fa: a prompt of two chunks or more is timed from
its middle on, after the time of its half; steps are the mean of 100 after each context.
"""

import re

from calibrate.benchmarks.points import Given, Point, Read, Reading, Told
from hwprofiles.errors import BadFile
from twin.units import MAX_TOKENS

STEPS = 100
MOST_PER_S = 1e9
UNIT = "tokens/s"

_COLOUR = re.compile("\x1b\\[[0-9;]*[A-Za-z]")
_LINE = re.compile(r"(Length|Context)\s+(\d{1,12}):\s+(\S+)\s+" + UNIT)
_BEGUN = re.compile(r"\b(Length|Context)\s+\d")
_BITS = re.compile(r"-- Bitrate:\s+(\d{1,2}\.\d{2}) bpw")
_CHUNK = re.compile(r"-- Chunk size:\s+(\d{1,7})\b")


def printed_points(text: str, name: str, given: Given) -> Read:
    """A point a line. BadFile for a line that is cut short or holds no speed."""
    del given
    plain = _COLOUR.sub("", text)
    bits, chunk = _BITS.search(plain), _CHUNK.search(plain)
    told = Told(engine="exllamav3", weights=f"{bits[1]}bpw" if bits else "", chunk_tokens=int(chunk[1]) if chunk else 0)
    found: Read = []
    for number, line in enumerate(plain.splitlines(), start=1):
        for part in line.split("\r"):
            if _BEGUN.search(part):
                found.append(Reading(told, _point(part, f"{name}:{number}")))
    return found


def _point(line: str, where: str) -> Point:
    read = _LINE.search(line)
    if read is None:
        raise BadFile(f"{where}: cut short: {line.strip()[:60]!r} tells no {UNIT}")
    what, tokens, value = read[1], int(read[2]), read[3]
    try:
        per_s = float(value)
    except ValueError:
        per_s = 0.0
    if not 0 < per_s <= MOST_PER_S or tokens > MAX_TOKENS or (what == "Length" and not tokens):
        raise BadFile(f"{where}: {what.lower()} {tokens} at {value} {UNIT} is no measurement")
    if what == "Length":
        return Point(id=f"{where} pp{tokens}", metric="prefill", seconds=tokens / per_s, prompt_tokens=tokens)
    return Point(id=f"{where} tg@{tokens}", metric="step", seconds=1 / per_s, n=STEPS, kv_tokens=tokens, steps=STEPS)
