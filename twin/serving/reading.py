"""How a trace is to be read: in which unit its timestamps are, and how many tokens a hash stands for.

Both are told from the first lines where these decide, and asked for where they do not:

    tokens a hash    a prompt of L tokens has ceil(L / h) hashes, or floor(L / h) where an unfinished piece has none. So
                     each line leaves a range of h: where a single number or power of two is left by all, it is taken.
    timestamp        Bailian's traces (chat_id and parent_chat_id in a line) are in seconds. Mooncake's (whole numbers,
                     512 tokens a hash) are in milliseconds, and so is a number that would be millennia in seconds.

Sources: what is written about both traces (github.com/alibaba-edu/qwen-bailian-usagetraces-anon, kvcache-ai/Mooncake).
"""

import math
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

TimeUnit = Literal["s", "ms"]

MOONCAKE_HASH_TOKENS = 512
BAILIAN_HASH_TOKENS = 16
USUAL_HASH_TOKENS = tuple(2**power for power in range(14))
MILLENNIA = 1e11
"""Seconds: no trace is that long, and none begins that long after 1970."""

_UNITS = {"s": "in seconds", "ms": "in milliseconds", None: "all at once"}


class Entry(Struct, frozen=True, kw_only=True, gc=False):
    """What a line of a trace says, with its numbers as they stand there."""

    line: int
    id: str | int
    arrival: float
    in_seconds: bool
    """By the name of the key."""
    prompt_tokens: int
    output_tokens: int
    prefix_ids: tuple[str | int, ...]
    prefix_tokens: int
    """0: `prefix_ids` are hashes, each for as many tokens."""
    in_chats: bool
    """Whether it names a chat and that chat's parent, as Bailian's traces do."""

    @property
    def hashes(self) -> int:
        """Hashes of its prompt."""
        return 0 if self.prefix_tokens else len(self.prefix_ids)


class Reading(Struct, frozen=True, kw_only=True):
    """What is known of a trace, or asked for."""

    time_unit: TimeUnit | None = None
    """None: not known, or all requests arrive at once and it does not matter."""
    hash_tokens: int | None = None
    """None: not known, or no line has hashes."""

    @property
    def text(self) -> str:
        """For a reader, after the name of the trace."""
        return _UNITS[self.time_unit] + (f", {self.hash_tokens:,} tokens a hash" if self.hash_tokens else "")


class Wrong(ValueError):
    """What is wrong with a trace; its path is added outside."""

    def __init__(self, message: str, *, hint: str = "", line: int | None = None) -> None:
        super().__init__(message)
        self.hint = hint
        self.line = line
        """0: all of it; None: the line that was read last."""


def understand(ahead: Sequence[Entry], asked: Reading, *, whole: bool) -> Reading:
    """How to read a trace that begins with the entries `ahead`, or is made of them; what is asked for comes first.

    Wrong where an option has to say it, or where hashes contradict each other.
    """
    hashed = [entry for entry in ahead if entry.hashes]
    bailian = all(entry.in_chats for entry in ahead)
    sizes, left = ([asked.hash_tokens], "") if asked.hash_tokens else hash_sizes(hashed)
    if bailian and BAILIAN_HASH_TOKENS in sizes:
        sizes = [BAILIAN_HASH_TOKENS]
    hash_tokens = sizes[0] if len(sizes) == 1 else None
    time_unit = _time_unit(ahead, asked, bailian=bailian, hash_tokens=hash_tokens)
    span = ahead[-1].arrival - ahead[0].arrival if ahead else 0.0
    what, how = [], []
    if time_unit is None and (span or not whole):
        what.append("timestamp may be in seconds or in milliseconds")
        how.append(f"--time-unit s or ms: {span:,.12g} s or ms from the first to the last of {len(ahead):,} requests")
    if hash_tokens is None and hashed:
        what.append(f"hash_ids may stand for {' or '.join(map(str, sizes)) or left} tokens each")
        how.append("--hash-tokens N")
    if what:
        raise Wrong("; ".join(what), hint="; ".join(how), line=0)
    return Reading(time_unit=time_unit, hash_tokens=hash_tokens)


def _time_unit(ahead: Sequence[Entry], asked: Reading, *, bailian: bool, hash_tokens: int | None) -> TimeUnit | None:
    """The unit, where it is decided."""
    if any(entry.in_seconds for entry in ahead):
        if asked.time_unit == "ms":
            raise Wrong("arrival_s is in seconds, not in milliseconds", hint="--time-unit is for timestamp", line=0)
        return "s"
    if asked.time_unit or bailian:
        return asked.time_unit or "s"
    mooncake = hash_tokens == MOONCAKE_HASH_TOKENS and all(type(entry.arrival) is int for entry in ahead)
    return "ms" if mooncake or ahead[-1].arrival >= MILLENNIA else None


def hash_sizes(hashed: Sequence[Entry]) -> tuple[list[int], str]:
    """Sizes that all entries with hashes allow, and in words their range: the only size, or else the usual ones.

    Where unfinished pieces cannot have been counted, one must be left. Wrong where an entry contradicts the others.
    """
    up: tuple[float, float] = (1, math.inf)
    down = up
    contradiction = None
    for entry in hashed:
        tokens, hashes = entry.prompt_tokens, entry.hashes
        before, most = up, -(-tokens // (hashes - 1)) - 1 if hashes > 1 else math.inf
        up = max(up[0], -(-tokens // hashes)), min(up[1], most)
        down = max(down[0], tokens // (hashes + 1) + 1), min(down[1], tokens // hashes)
        if contradiction is None and up[0] > up[1]:
            others = f", where the lines before mean {_range(*before)} tokens each" if before[1] < math.inf else ""
            contradiction = Wrong(f"{hashes:,} hash_ids for {tokens:,} prompt tokens{others}", line=entry.line)
    if contradiction is None:
        return _usual(*up), _range(*up)
    if len(_usual(*down)) != 1:
        raise contradiction
    return _usual(*down), _range(*down)


def _usual(low: float, high: float) -> list[int]:
    return [int(low)] if low == high else [size for size in USUAL_HASH_TOKENS if low <= size <= high]


def _range(low: float, high: float) -> str:
    return f"{low:,.0f} or more" if high == math.inf else f"{low:,.0f} to {high:,.0f}"
