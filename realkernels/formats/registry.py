"""Formats by their names: those of the command line."""

from realkernels.formats import (
    exl3,
    fp8,
    fp8_per_token_head,
    gguf,
    int4_per_token_head,
    int8_per_token_head,
    kvarn,
    plain,
    turboquant,
)  # fmt: skip
from realkernels.formats.format import Format
from realkernels.formats.planes import Arrangement

_CLASSES: dict[str, type[Format]] = {
    **plain.FORMATS,
    **fp8.FORMATS,
    **int8_per_token_head.FORMATS,
    **fp8_per_token_head.FORMATS,
    **int4_per_token_head.FORMATS,
    **kvarn.FORMATS,
    **turboquant.FORMATS,
    **gguf.FORMATS,
    **exl3.FORMATS,
}


def format_names() -> list[str]:
    """Names of all formats, sorted."""
    return sorted(_CLASSES)


def arrangements(name: str) -> tuple[Arrangement, ...]:
    """In which arrangements a format is kept, the published one first; ValueError for another name."""
    return _class(name).arrangements


def format_named(name: str, *, arrangement: Arrangement | None = None) -> Format:
    """The format called `name`, as published unless an arrangement is asked for; ValueError for other names."""
    kind = _class(name)
    return kind(name=name, arrangement=arrangement or kind.arrangements[0])


def _class(name: str) -> type[Format]:
    if name not in _CLASSES:
        few = [known for known in format_names() if not known.startswith("exl3_")]
        raise ValueError(f"no format {name!r}; there are {', '.join(few)} and exl3_k2v2 to exl3_k8v8")
    return _CLASSES[name]
