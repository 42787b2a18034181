"""In how many bits a cache keeps K and V: one row a format."""

from msgspec import Struct

from twin.errors import UnknownName


class KVFormat(Struct, frozen=True, kw_only=True):
    """Bytes of one K or V element and whether it is plain (no groups, scales or rotation)."""

    name: str
    bits: int
    summary: str

    def plane_bytes(self, *, kv_heads: int, head_dim: int) -> int:
        """Bytes of K and V together, for one token in one layer."""
        return 2 * kv_heads * head_dim * self.bits // 8


_FORMATS = {
    row.name: row
    for row in (
        KVFormat(name="fp16", bits=16, summary="IEEE half, as exllamav3 keeps its cache by default"),
        KVFormat(name="fp32", bits=32, summary="float32, where a processor has no fast half precision"),
        KVFormat(name="bf16", bits=16, summary="bfloat16, as vLLM keeps its cache by default"),
    )
}


def format_names() -> list[str]:
    """Names of all formats."""
    return sorted(_FORMATS)


def kv_format(name: str) -> KVFormat:
    """The format called `name`; UnknownName otherwise."""
    if name not in _FORMATS:
        raise UnknownName("KV format", name, _FORMATS)
    return _FORMATS[name]
