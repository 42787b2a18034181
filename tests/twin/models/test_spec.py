"""A model's shape: order of layers, derived sizes, and what a shape may not be."""

from typing import Any

import msgspec
import pytest

from tests.worlds import model
from twin.models import ModelSpec, load_model, model_names
from twin.models.spec import Drafter


def test_attention_closes_every_group_of_layers() -> None:
    assert model(layers=4, every=2).layer_kinds == ("recurrent", "attention") * 2
    assert model(layers=3, every=3).layer_kinds == ("recurrent", "recurrent", "attention")
    assert set(model(layers=3, every=1).layer_kinds) == {"attention"}


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("", {"schema": "twin.model/2"}, "schema must be 'twin.model/1'"),
    ("", {"layers": 5}, "5 layers are not a multiple of attention.every 2"),
    ("", {"layers": 0}, r"\$\.layers"),
    ("", {"hidden": 2.5}, r"\$\.hidden"),
    ("", {"vocab": 2**24 + 1}, r"<= 16777216 - at `\$\.vocab`"),
    ("attention", {"query_heads": 4098}, r"<= 4096 - at `\$\.attention\.query_heads`"),
    ("feed_forward", {"experts": 65_537}, r"<= 65536 - at `\$\.feed_forward\.experts`"),
    ("indexer", {"budget": 2**30, "ratio": 2**20}, r"<= 65536 - at `\$\.indexer\.ratio`"),
    ("", {"recurrent": None}, "layers without attention need 'recurrent'"),
    ("", {"colour": "red"}, "unknown field `colour`"),
    ("attention", {"query_heads": 3}, "3 query heads are not a multiple of 2 kv heads"),
    ("indexer", {"budget": 18}, "budget 18 is not a multiple of ratio 4"),
    ("recurrent", {"conv_kernel": 1}, r"\$\.recurrent\.conv_kernel"),
    ("feed_forward", {"active": 2}, "active 2 is more than experts 1"),
    ("weights", {"bits": 0}, r"\$\.weights\.bits"),
    ("ngram", {"row_bytes": 0}, r"\$\.ngram\.row_bytes"),
]


@pytest.mark.parametrize(("table", "change", "message"), WRONG, ids=[str(row[1]) for row in WRONG])
def test_a_wrong_shape_is_refused_by_its_key(table: str, change: dict[str, Any], message: str) -> None:
    data = msgspec.to_builtins(model(ngram=True))
    (data[table] if table else data).update(change)
    with pytest.raises(ValueError, match=message):
        msgspec.convert(data, ModelSpec)


DRAFTER: dict[str, Any] = {
    "name": "toy", "kind": "sequential", "summary": "a drafter for sums on paper", "layers": 1, "query_heads": 4,
    "kv_heads": 2, "head_dim": 8, "window": 0, "parameters": 100, "weight_bytes": 50, "head_bytes": 20,
    "own_head": True, "max_tokens": 4, "default_tokens": 2,
}  # fmt: skip

WRONG_DRAFTERS: list[tuple[dict[str, Any], str]] = [
    ({"query_heads": 3}, "3 query heads are not a multiple of 2 kv heads"),
    ({"default_tokens": 5}, "default_tokens 5 is more than max_tokens 4"),
    ({"lookup_accepts": 1.0}, "lookup_accepts must be above block_accepts"),
    ({"block_accepts": 3.0, "lookup_accepts": 2.5}, "lookup_accepts must be above block_accepts"),
    ({"kind": "tree"}, r"\$\.kind"),
    ({"layers": 0}, r"\$\.layers"),
    ({"max_tokens": 65}, r"\$\.max_tokens"),
    ({"own_head": 1}, r"\$\.own_head"),
    ({"parameters": 10**400}, r"\$\.parameters"),
    ({"speed": 1}, "unknown field `speed`"),
]


@pytest.mark.parametrize(("change", "message"), WRONG_DRAFTERS, ids=[str(row[0]) for row in WRONG_DRAFTERS])
def test_a_wrong_drafter_is_refused_by_its_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        msgspec.convert(DRAFTER | change, Drafter)


@pytest.mark.parametrize("name", model_names())
def test_shipped_drafters_have_names_of_their_own_and_draft_what_their_block_holds(name: str) -> None:
    drafters = load_model(name).drafters
    assert len({drafter.name for drafter in drafters}) == len(drafters)
    for drafter in drafters:
        if drafter.kind == "block":
            assert drafter.default_tokens == drafter.block_tokens - 1  # an anchor and what it proposes
            assert drafter.block_accepts <= drafter.block_tokens
        assert drafter.lookup_accepts <= drafter.max_tokens + 1


def test_the_layer_of_mtp_is_an_attention_layer_and_a_projection_of_two_hidden_states() -> None:
    """2 x 5120 -> 5120, attention as in the model, its feed-forward: 424.7M, a byte each in the base checkpoint."""
    spec = load_model("qwen3.8-27b")
    joined, mixer, feed = 2 * 5120 * 5120, 5120 * (2 * 6144 + 2 * 1024) + 6144 * 5120, 3 * 5120 * 17_408
    assert spec.drafters[0].parameters == joined + mixer + feed == 424_673_280
    assert spec.drafters[0].weight_bytes == pytest.approx(424_673_280, rel=1e-3)


def test_a_block_drafter_reads_the_head_of_its_model_and_mtp_one_of_40960_rows() -> None:
    base, fast = load_model("qwen3.8-27b"), load_model("qwen3.8-27b-fast")
    for spec in (base, fast):
        bits = spec.weights.head_bits
        assert bits is not None
        mtp, dflash = spec.drafters
        assert dflash.head_bytes == pytest.approx(5120 * 248_320 * bits / 8, rel=0.01)
        assert mtp.head_bytes == pytest.approx(5120 * 40_960 * bits / 8, rel=0.01)
