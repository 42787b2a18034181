"""A device without hardware, and timed calls that know which result belongs to which data: a stale one is noticed."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

STALE = -1


class FakeDevice:
    """Repeat number i takes `seconds_of(i)`."""

    rounds = 1
    device = SimpleNamespace(type="cpu")
    dtype = "torch.float16"

    def __init__(self, seconds_of: Callable[[int], float] = lambda _repeat: 0.01, *, captures: bool = True) -> None:
        self.seconds_of, self.captures = seconds_of, captures
        self.timed: list[str] = []
        """What was run inside the timed part."""

    def capture(self, work: Callable[[], object]) -> Callable[[], object]:
        """The work, or nothing: a graph that is empty."""
        return work if self.captures else lambda: None

    def seconds(self, work: Callable[[], object], *, repeats: int, warm_up: int = 0, before: Any = None) -> list[float]:
        """As told, after doing it."""
        for _repeat in range(-warm_up, repeats):
            if before is not None:
                before()
            work()
        return [self.seconds_of(repeat) for repeat in range(repeats)]


class FakeCall:
    """`calls` calls of something that is off by `error`; `fails` is raised where it is made."""

    capturable, moved_bytes, flops = True, 7.0, 5.0

    def __init__(self, *, calls: int = 1, error: float = 1e-4, link_bytes: float = 0.0) -> None:
        self.calls, self.off, self.link_bytes = calls, error, link_bytes
        self.data, self.result, self.seen = 0, STALE, list[int]()

    def poison(self) -> None:
        """Fresh data, no result."""
        self.data, self.result = self.data + 1, STALE

    def run(self) -> None:
        """A result of the present data."""
        self.result = self.data
        self.seen.append(self.data)

    def error(self) -> float:
        """Infinite where the result is of other data."""
        return self.off if self.result == self.data else math.inf

    def verify(self) -> float:
        """Of a fresh run."""
        self.poison()
        self.run()
        return self.error()
