"""A model's shape: order of layers, derived sizes, and what a shape may not be."""

from typing import Any

import msgspec
import pytest

from tests.worlds import model
from twin.models import ModelSpec, load_model, model_names


@pytest.mark.parametrize("name", model_names())
def test_every_shipped_model_loads_under_its_own_name(name: str) -> None:
    spec = load_model(name)
    assert spec.name == name
    assert spec.source
    assert len(spec.layer_kinds) == spec.layers == spec.attention_layers + spec.recurrent_layers


def test_attention_closes_every_group_of_layers() -> None:
    assert model(layers=4, every=2).layer_kinds == ("recurrent", "attention") * 2
    assert model(layers=3, every=3).layer_kinds == ("recurrent", "recurrent", "attention")
    assert set(model(layers=3, every=1).layer_kinds) == {"attention"}


def test_flash_next_keeps_a_cache_in_every_fourth_of_48_layers() -> None:
    spec = load_model("qwen3.8-flash-next")
    assert [index for index, kind in enumerate(spec.layer_kinds) if kind == "attention"] == list(range(3, 48, 4))
    assert spec.indexer is not None
    assert spec.indexer.block_topk == 512
    assert spec.recurrent is not None
    assert spec.recurrent.conv_channels == (16 + 16 + 48) * 128


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("", {"schema": "twin.model/2"}, "schema must be 'twin.model/1'"),
    ("", {"layers": 5}, "5 layers are not a multiple of attention.every 2"),
    ("", {"layers": 0}, r"\$\.layers"),
    ("", {"hidden": -1}, r"\$\.hidden"),
    ("", {"hidden": 2.5}, r"\$\.hidden"),
    ("", {"vocab": 2**31 + 1}, r"\$\.vocab"),
    ("", {"layers": 2**31}, r"<= 4096 - at `\$\.layers`"),
    ("", {"vocab": 2**24 + 1}, r"<= 16777216 - at `\$\.vocab`"),
    ("", {"hidden": 2**20 + 1}, r"<= 1048576 - at `\$\.hidden`"),
    ("attention", {"query_heads": 4098}, r"<= 4096 - at `\$\.attention\.query_heads`"),
    ("feed_forward", {"experts": 65_537}, r"<= 65536 - at `\$\.feed_forward\.experts`"),
    ("indexer", {"budget": 2**30, "ratio": 2**20}, r"<= 65536 - at `\$\.indexer\.ratio`"),
    ("", {"recurrent": None}, "layers without attention need 'recurrent'"),
    ("", {"colour": "red"}, "unknown field `colour`"),
    ("attention", {"query_heads": 3}, "3 query heads are not a multiple of 2 kv heads"),
    ("attention", {"kv_heads": "2"}, r"\$\.attention\.kv_heads"),
    ("indexer", {"budget": 18}, "budget 18 is not a multiple of ratio 4"),
    ("recurrent", {"conv_kernel": 1}, r"\$\.recurrent\.conv_kernel"),
    ("feed_forward", {"active": 2}, "active 2 is more than experts 1"),
    ("feed_forward", {"shared_intermediate": -1}, r"\$\.feed_forward\.shared_intermediate"),
    ("weights", {"bits": 0}, r"\$\.weights\.bits"),
    ("weights", {"embedding_bits": 65}, r"\$\.weights\.embedding_bits"),
    ("ngram", {"row_bytes": 0}, r"\$\.ngram\.row_bytes"),
    ("ngram", {"before_layer": -1}, r"\$\.ngram\.before_layer"),
]


@pytest.mark.parametrize(("table", "change", "message"), WRONG, ids=[str(row[1]) for row in WRONG])
def test_a_wrong_shape_is_refused_by_its_key(table: str, change: dict[str, Any], message: str) -> None:
    data = msgspec.to_builtins(model(ngram=True))
    (data[table] if table else data).update(change)
    with pytest.raises(ValueError, match=message):
        msgspec.convert(data, ModelSpec)


@pytest.mark.parametrize("key", ["hidden", "layers", "attention", "feed_forward", "weights", "source"])
def test_a_shape_without_a_key_is_refused(key: str) -> None:
    data = msgspec.to_builtins(model())
    del data[key]
    with pytest.raises(ValueError, match=f"missing required field `{key}`"):
        msgspec.convert(data, ModelSpec)
