"""A backend without a device: it knows which result belongs to which data, so that a stale or wrong one is noticed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

STALE = -1


class Values:
    """Stands for a tensor: its version is that of the data that it holds, or was computed from."""

    def __init__(self) -> None:
        self.version = 0

    def normal_(self) -> None:
        """Fresh data."""
        self.version += 1

    def fill_(self, _value: float) -> None:
        """Poisoned: computed from nothing."""
        self.version = STALE


class FakeStep:
    """Selection and gather of one token."""

    def __init__(self, backend: "FakeBackend") -> None:
        self.backend = backend
        self.query, self.index_query, self.output, self.selected = Values(), Values(), Values(), Values()

    def select(self) -> None:
        """From the present index query."""
        self.backend.did("select")
        self.selected.version = self.index_query.version

    def gather(self) -> None:
        """From the present query and selection."""
        self.backend.did("gather")
        self.output.version = self.query.version if self.selected.version == self.index_query.version else STALE

    def run(self, *, before_layer: Callable[[int], object] | None = None) -> None:
        """Both."""
        del before_layer
        self.select()
        self.gather()

    def verify(self) -> tuple[bool, float]:
        """What the backend was told to answer, if the output belongs to the query."""
        fresh = self.output.version == self.query.version and self.selected.version == self.index_query.version
        return self.backend.exact, self.backend.error if fresh else float("nan")


class FakeChunk:
    """Attention of the rows of a chunk."""

    def __init__(self, backend: "FakeBackend", link_bytes: int) -> None:
        self.backend, self.link_bytes = backend, link_bytes
        self.seed, self.attended, self.selected = 0, STALE, 0
        self.output = SimpleNamespace(fill_=self._poison_output)
        self.selection = SimpleNamespace(fill_=self._poison_selection)

    def _poison_output(self, _value: float) -> None:
        self.attended = STALE

    def _poison_selection(self, _value: float) -> None:
        self.selected = STALE

    def refresh(self, seed: int) -> None:
        """Fresh queries, their selection, a poisoned output."""
        self.seed, self.selected, self.attended = seed, seed, STALE

    def select(self) -> None:
        """Of every row."""
        self.backend.did("select rows")
        self.selected = self.seed

    def run(self) -> None:
        """Of every row."""
        self.backend.did("attend rows")
        self.attended = self.selected

    def verify(self) -> float:
        """What the backend was told to answer, if the output belongs to the queries."""
        return self.backend.error if self.attended == self.seed else float("nan")

    def verify_selection(self) -> bool:
        """What the backend was told to answer, if the selection belongs to the queries."""
        return self.backend.exact and self.selected == self.seed


class FakeBackend:
    """Repeat number i takes `seconds_of(i)`; `refusals` are raised as planes of their tier are opened."""

    name = "fake"
    rounds = 1
    device = SimpleNamespace(type="cpu")
    dtype = "torch.float16"

    def __init__(
        self,
        *,
        seconds_of: Callable[[int], float] = lambda _repeat: 0.01,
        exact: bool = True,
        error: float = 1e-4,
        refusals: dict[str, Exception] | None = None,
    ) -> None:
        self.seconds_of, self.exact, self.error = seconds_of, exact, error
        self.refusals = refusals or {}
        self.opened: list[dict[str, Any]] = []
        self.closed = 0
        self.timed: list[str] = []
        """What was done inside the timed part of the last timing."""
        self.fails_at: int | None = None
        """Context at which a step cannot be made."""
        self._inside = False

    def did(self, what: str) -> None:
        """Note a piece of work if it is being timed."""
        if self._inside:
            self.timed.append(what)

    @contextmanager
    def cache(self, _shape: Any, **asked: Any) -> Iterator[Any]:
        """Planes, or the refusal of their tier."""
        if asked["tier"] in self.refusals:
            raise self.refusals[asked["tier"]]
        self.opened.append(asked)
        try:
            yield SimpleNamespace(fill_random=lambda seed: None, **asked)  # noqa: ARG005
        finally:
            self.closed += 1

    def decode_step(self, cache: Any, *, end: int) -> FakeStep:
        """A step, unless it is the one that fails."""
        assert end <= cache.tokens
        if end == self.fails_at:
            raise RuntimeError("out of memory\nwith details")
        return FakeStep(self)

    def prefill_chunk(self, cache: Any, **asked: Any) -> FakeChunk:
        """A chunk whose link bytes are told from the question."""
        assert asked["past"] + asked["rows"] <= cache.tokens
        return FakeChunk(self, asked["bucket_tokens"] * 10)

    def capture(self, work: Callable[[], object]) -> Callable[[], object]:
        """The work itself."""
        return work

    def seconds(
        self,
        work: Callable[[], object],
        *,
        repeats: int,
        warm_up: int = 3,
        before: Callable[[int], object] | None = None,
    ) -> list[float]:
        """Does the work and says that it took what it was told."""
        self.timed = []
        for index in range(-warm_up, repeats):
            if before is not None:
                before(index)
            self._inside = index >= 0
            work()
            self._inside = False
        return [self.seconds_of(index) for index in range(repeats)]
