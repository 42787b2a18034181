"""Qwen4-Exp: parameters to the unit, its indexer, its streams and its table of n-grams."""

from typing import Any

import pytest

from tests.twin.models.config.counted import Counted, counted, one, spec
from twin.errors import BadFile
from twin.models.config.qwen4 import qwen4_exp
from twin.models.fields import Fields
from twin.models.mixers import Attention


@pytest.mark.parametrize("row", counted("qwen4"), ids=lambda row: row.name)
def test_parameters_are_those_of_the_class_with_the_table(row: Counted) -> None:
    ngram = qwen4_exp(Fields(row.config, "config.json")).ngram
    assert sum(spec(row.config).parameters.values()) + (ngram.parameters if ngram else 0) == row.parameters


def test_every_fourth_layer_attends_to_blocks_that_it_chooses() -> None:
    model = spec(one("qwen4", "q4"))
    assert model.indexer is not None
    assert (model.indexer.budget, model.indexer.ratio, model.indexer.weighted) == (64, 4, False)
    assert isinstance(model.attention, Attention)
    assert (model.attention_layers, model.attention.output_gate, model.residual_streams) == (2, True, 4)


def test_rows_of_the_table_are_primes_from_the_base_on_and_padded() -> None:
    primes = [503, 509, 521, 523, 541, 547, 557, 563, 569, 571, 577, 587, 593, 599, 601, 607]
    table = spec(one("qwen4", "q4ple")).ngram
    assert table is not None
    assert (table.rows_per_token, table.row_bytes, table.before_layer) == (16, 4, 1)
    assert table.table_bytes == 4 * (-(-sum(primes) // 4) * 4)


def test_flash_next_has_16_rows_of_160_and_51_billion_of_parameters_in_the_table() -> None:
    sizes = {"ple_embed_dim": 2560, "ngram_vocab_size_base": 20_000_000, "make_ngram_vocab_size_divisible_by": 128}
    ngram = qwen4_exp(Fields(one("qwen4", "q4ple", **sizes), "config.json")).ngram
    assert ngram is not None
    assert (ngram.row_elements, ngram.rows_per_token) == (160, 16)
    assert ngram.parameters == pytest.approx(51.2e9, rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"indexer_budget": 63}, "indexer_budget 63 and indexer_compress_ratio 4 contradict"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads: is not 1"),
        ({"ple_layer_ids": [2, 3]}, "ple_layer_ids: names several layers"),
        ({"ple_embed_dim": 33}, "ple_embed_dim 33 and heads_per_ngram 8 contradict"),
        ({"hc_count": None}, "hc_count is missing"),
    ],
)
def test_what_contradicts_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(BadFile, match=said):
        spec(one("qwen4", "q4ple", **changes))
