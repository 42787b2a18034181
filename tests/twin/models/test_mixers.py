"""What a mixer's shape implies where layers share, and where one matrix makes two things."""

import pytest
from msgspec.structs import replace

from twin.models.mixers import Attention, Indexer, LatentAttention

HIDDEN, RANK = 64, 40
INDEXER = Indexer(query_heads=6, head_dim=12, budget=64, ratio=1, weighted=True)
LATENT = LatentAttention(
    query_heads=4, kv_rank=32, rope_dim=8, nope_dim=16, value_dim=20, query_rank=RANK, indexer=INDEXER
)
PLAIN = Attention(query_heads=4, kv_heads=2, head_dim=24)


def test_a_shared_choice_costs_no_matrices_and_no_keys() -> None:
    without = replace(LATENT, indexer=None)
    shared = replace(LATENT, indexer=replace(INDEXER, shared=True))
    assert shared.matrices(HIDDEN) == without.matrices(HIDDEN)
    assert shared.cached_bytes(2) == without.cached_bytes(2)
    own = RANK * 6 * 12 + HIDDEN * 12 + HIDDEN * 6
    assert LATENT.matrices(HIDDEN) - without.matrices(HIDDEN) == own


def test_values_from_the_matrix_of_keys_save_a_matrix_and_no_cache() -> None:
    alike = replace(PLAIN, values_from_keys=True)
    assert PLAIN.matrices(HIDDEN) - alike.matrices(HIDDEN) == HIDDEN * 2 * 24
    assert alike.kv_elements == PLAIN.kv_elements
    with pytest.raises(ValueError, match="as wide as keys"):
        replace(alike, value_dim=8)


def test_a_layer_that_shares_its_cache_has_neither_matrix() -> None:
    shared = replace(PLAIN, shares_kv=True)
    assert PLAIN.matrices(HIDDEN) - shared.matrices(HIDDEN) == 2 * HIDDEN * 2 * 24
    assert not shared.keeps_cache
