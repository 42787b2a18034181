"""Reading a table of somebody else's file key by key: each checked as it is taken, each remembered."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from msgspec import Struct

from twin.errors import BadFile
from twin.models.spec import ModelSpec

LARGEST = 2**31  # of whole numbers that say nothing else
LONGEST_WHY = 400  # characters of a reason, with what it cites of the file
BY_HAND = "any model can be described by hand (schema twin.model/2): `twin models NAME --save` writes one to start from"
_LONGEST_SHOWN = 60  # letters

T = TypeVar("T")


class Understood(Struct, frozen=True, kw_only=True):
    """A model as it was understood."""

    spec: ModelSpec
    origins: dict[str, str]  # keys of the file, and the values from which the model follows
    ignored: tuple[str, ...]  # keys that change neither bytes nor operations, as far as is known


class Fields:
    """The keys of one table of the file `where`; `prefix` is where in it the table lies, such as "text_config."."""

    def __init__(self, raw: dict[str, Any], where: str, prefix: str = "") -> None:
        self.raw, self.where, self.prefix = raw, where, prefix
        self.used: dict[str, str] = {}
        self.nested: list[Fields] = []

    def __contains__(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self.raw.get(key) is not None

    def wrong(self, key: str, why: str) -> BadFile:
        """What to raise about a key."""
        why = why if len(why) <= LONGEST_WHY else f"{why[: LONGEST_WHY // 2]}...{why[-LONGEST_WHY // 2 :]}"
        return BadFile(f"{self.where}: {self.prefix[:LONGEST_WHY]}{key[:LONGEST_WHY]}: {why}")

    def missing(self, *keys: str) -> BadFile:
        """What to raise where one of the keys has to be there."""
        return BadFile(f"{self.where}: {self.prefix}{' or '.join(keys)} is missing")

    def unknown(self, key: str, value: object, known: Iterable[str] = (), *, verb: str = "is") -> BadFile:
        """What to raise about a value, or one among others, that nobody here knows."""
        listed = ", ".join(known)
        return self.wrong(key, f"{verb} {shown(value)}, which is not known{listed and f'; known are {listed}'}")

    def contradiction(self, why: str, *keys: str) -> BadFile:
        """What to raise about keys that cannot all be right."""
        said = " and ".join(f"{self.prefix}{key} {shown(self.raw.get(key))}" for key in keys)
        return BadFile(f"{self.where}: {said} contradict each other: {why}")

    def only(self, key: str, *, expected: bool) -> None:
        """Takes a flag of which one value alone is known, and which has it where the key is missing. Raises BadFile."""
        if self.flag(key, default=expected) != expected:
            raise self.wrong(key, f"is {str(not expected).lower()}, which is not known of this architecture")

    def integer(self, *keys: str, default: int | None = None, low: int = 1, high: int = LARGEST) -> int:
        """The whole number under the first of the keys that is there. Raises BadFile."""
        return self._take(keys, default, lambda value: _integer(value, low, high))

    def number(self, *keys: str, default: float | None = None, low: float = 0.0, high: float = 1e12) -> float:
        """The same of any number."""
        return self._take(keys, default, lambda value: _number(value, low, high))

    def flag(self, *keys: str, default: bool | None = None) -> bool:
        """The same of true or false."""
        return self._take(keys, default, _flag)

    def text(self, *keys: str, default: str | None = None) -> str:
        """The same of a text."""
        return self._take(keys, default, _text)

    def texts(self, *keys: str, default: list[str] | None = None) -> list[str]:
        """The same of a list of texts."""
        return self._take(keys, default, lambda value: [_text(each) for each in _list(value)])

    def integers(self, *keys: str, default: list[int] | None = None, low: int = 0, high: int = LARGEST) -> list[int]:
        """The same of a list of whole numbers."""
        return self._take(keys, default, lambda value: [_integer(each, low, high) for each in _list(value)])

    def table(self, key: str) -> "Fields | None":
        """The table under a key, read on the same terms; None where there is none."""
        if key not in self:
            return None
        value = self.raw[key]
        if not isinstance(value, dict):
            raise self.wrong(key, f"is {shown(value)}, not a table")
        inner = Fields(value, self.where, f"{self.prefix}{key}.")
        self.nested.append(inner)
        self.used[key] = ""
        return inner

    def without_effect(self, *keys: str) -> None:
        """Keys that are known and change neither bytes nor operations, unless something else has asked for them."""
        self.used |= {key: "" for key in keys if key in self.raw and key not in self.used}

    def checked(self, *keys: str) -> None:
        """Keys that were asked for, and from which nothing follows but that the file can be read."""
        self.used |= {key: "" for key in keys if key in self.raw}

    def rest_without_effect(self) -> None:
        """The same of all keys that nothing asked for, here and in tables within."""
        self.without_effect(*self.raw)
        for inner in self.nested:
            inner.rest_without_effect()

    def origins(self) -> dict[str, str]:
        """Keys that were used, with their values."""
        own = {f"{self.prefix}{key}": value for key, value in self.used.items() if value}
        return own | {key: value for inner in self.nested for key, value in inner.origins().items()}

    def ignored(self) -> tuple[str, ...]:
        """Keys that nothing asked for."""
        return tuple(sorted(self._ignored()))

    def _ignored(self) -> Iterator[str]:
        yield from (f"{self.prefix}{key}" for key in self.raw if key not in self.used)
        for inner in self.nested:
            yield from inner._ignored()

    def _take(self, keys: tuple[str, ...], default: T | None, check: Callable[[Any], T]) -> T:
        key = next((key for key in keys if key in self), None)
        if key is None:
            if default is None:
                raise self.missing(*keys)
            return default
        value = self.raw[key]
        try:
            taken = check(value)
        except ValueError as wrong:
            raise self.wrong(key, f"is {shown(value)}, {wrong}") from None
        self.used[key] = shown(value)
        return taken


def _integer(value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("not a whole number")
    if not low <= value <= high:
        raise ValueError(f"outside the range of {low:,} to {high:,}")
    return value


def _number(value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("not a number")
    if not low <= value <= high:
        raise ValueError(f"outside the range of {low:g} to {high:g}")
    return float(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("neither true nor false")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("not a text")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError("not a list")
    return value


def shown(value: object) -> str:
    """A name or a value of a file on one line: a long one cut."""
    said = repr(value)
    return said if len(said) <= _LONGEST_SHOWN else f"{said[: _LONGEST_SHOWN - 3]}..."
