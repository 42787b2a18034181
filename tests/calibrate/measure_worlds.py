"""A device without kernels: it knows which result belongs to which data, so that a stale or wrong one is noticed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

STALE = -1


class FakeCall:
    """A timed call whose result is the number of the data that it was computed from."""

    def __init__(self, backend: "FakeBackend", what: str, *, link_bytes: int) -> None:
        self.backend, self.what, self.link_bytes = backend, what, link_bytes
        self.data, self.result = 0, STALE

    def poison(self) -> None:
        """Fresh data, no result."""
        self.data += 1
        self.blank()

    def blank(self) -> None:
        """No result."""
        self.result = STALE

    def run(self) -> None:
        """From the present data."""
        self.backend.did(self)
        self.result = self.data

    def error(self) -> float:
        """What the backend was told to answer, if the result belongs to the data."""
        return self.backend.error if self.result == self.data else float("nan")


class FakeBackend:
    """Repeat number i takes `seconds_of(i)`; `refusals` are raised as planes of their tier are opened."""

    rounds = 1

    def __init__(
        self,
        *,
        seconds_of: Callable[[int], float] = lambda _repeat: 0.01,
        error: float = 1e-4,
        refusals: dict[str, Exception] | None = None,
    ) -> None:
        self.seconds_of, self.error, self.refusals = seconds_of, error, refusals or {}
        self.device = SimpleNamespace(type="cpu", backend=self)
        self.opened: list[dict[str, Any]] = []
        self.closed = 0
        self.timed: list[tuple[str, int]] = []
        """What was run inside the timed part of the last timing, and on which data."""
        self.fails_at: int | None = None
        """Context of which no call can be made."""
        self._inside = False

    def did(self, call: FakeCall) -> None:
        """Note a run if it is being timed."""
        if self._inside:
            self.timed.append((call.what, call.data))

    def capture(self, work: Callable[[], object]) -> Callable[[], object]:
        """The work itself."""
        return work

    def seconds(
        self, work: Callable[[], object], *, repeats: int, warm_up: int = 3, before: Callable[[], object] | None = None
    ) -> list[float]:
        """Does the work and says that it took what it was told."""
        self.timed = []
        for index in range(-warm_up, repeats):
            if before is not None:
                before()
            self._inside = index >= 0
            work()
            self._inside = False
        return [self.seconds_of(index) for index in range(repeats)]


@contextmanager
def fake_cache(_shape: Any, *, device: Any, **asked: Any) -> Iterator[Any]:
    """Stands for `qsa_cache`: planes, or the refusal of their tier."""
    backend = device.backend
    if asked["tier"] in backend.refusals:
        raise backend.refusals[asked["tier"]]
    backend.opened.append(asked)
    try:
        yield SimpleNamespace(fill_random=lambda seed: None, backend=backend, **asked)  # noqa: ARG005
    finally:
        backend.closed += 1


def fake_call(case: Any, cache: Any) -> FakeCall:
    """Stands for `timed_call`: link bytes are told from the buckets."""
    assert case.ctx_tokens <= cache.tokens
    if case.ctx_tokens == cache.backend.fails_at:
        raise RuntimeError("out of memory\nwith details")
    return FakeCall(cache.backend, case.metric, link_bytes=case.bucket_tokens * 10)


def install_fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of caches and timed calls of sparse attention."""
    monkeypatch.setattr("realkernels.caches.qsa.qsa_cache", fake_cache)
    monkeypatch.setattr("calibrate.measure.timed_call", fake_call)
