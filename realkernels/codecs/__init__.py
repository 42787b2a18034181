"""In how many bits K and V really lie: one file a family of formats, with all that is known of it.

A family's file has its bytes, its reference in torch, its Triton functions (they encode rows, dequantise them, and take
codes to numbers in the loops of decode attention and in a gather) and its plans. To add one: write it, and name it in
`_FAMILIES`.
"""

from realkernels.codecs import exl3, fp8, ggml, kvarn, per_token_head, plain, turboquant
from realkernels.codecs.codec import PLANES, Arrangement, Codec, Plane, Planes, RowCodec, Slots
from realkernels.codecs.kvarn import KVarN

__all__ = [
    "PLANES", "Arrangement", "Codec", "KVarN", "Plane", "Planes", "RowCodec", "Slots", "arrangements", "codec_named",
    "codec_names", "default_arrangement",
]  # fmt: skip

_FAMILIES = (plain, fp8, per_token_head, kvarn, turboquant, ggml, exl3)
_CLASSES: dict[str, type[Codec]] = {name: kind for family in _FAMILIES for name, kind in family.CODECS.items()}


def codec_names() -> list[str]:
    """Names of all codecs, sorted: those of the command line."""
    return sorted(_CLASSES)


def arrangements(name: str) -> tuple[Arrangement, ...]:
    """In which arrangements a codec keeps its bytes, the published one first; ValueError for another name."""
    return _class(name).arrangements


def default_arrangement(name: str) -> Arrangement:
    """That of this project's own kernels: aligned where the codec can be kept so."""
    kept = arrangements(name)
    return "aligned" if "aligned" in kept else kept[0]


def codec_named(name: str, *, arrangement: Arrangement | None = None) -> Codec:
    """The codec called `name`, as published unless an arrangement is asked for; ValueError for other names."""
    kind = _class(name)
    return kind(name=name, arrangement=arrangement or kind.arrangements[0])


def _class(name: str) -> type[Codec]:
    if name not in _CLASSES:
        few = [known for known in codec_names() if not known.startswith("exl3_")]
        raise ValueError(f"no format {name!r}; there are {', '.join(few)} and exl3_k2v2 to exl3_k8v8")
    return _CLASSES[name]
