"""Bytes of K and V by format."""

import pytest

from twin.errors import UnknownName
from twin.formats import format_names, kv_format


@pytest.mark.parametrize(
    ("name", "kv_heads", "head_dim", "plane_bytes"), [("fp16", 2, 256, 2048), ("bf16", 4, 256, 4096), ("fp16", 1, 1, 4)]
)
def test_planes_hold_k_and_v_of_every_head(name: str, kv_heads: int, head_dim: int, plane_bytes: int) -> None:
    assert kv_format(name).plane_bytes(kv_heads=kv_heads, head_dim=head_dim) == plane_bytes


@pytest.mark.parametrize("name", format_names())
def test_every_format_is_found_under_its_name(name: str) -> None:
    assert kv_format(name).name == name


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(UnknownName, match="unknown KV format 'fp17'") as refused:
        kv_format("fp17")
    assert "did you mean fp16?" in refused.value.hint
