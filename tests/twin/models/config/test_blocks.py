"""Ways to scale positions."""

import pytest

from tests.twin.models.config.sums import row, spec_of
from twin.errors import BadFile
from twin.models.config.blocks import ROPE_KINDS


@pytest.mark.parametrize("kind", sorted(ROPE_KINDS))
def test_a_known_way_to_scale_positions_changes_nothing(kind: str) -> None:
    plain = spec_of(row("LlamaForCausalLM"))
    for table in ({"rope_scaling": {"type": kind, "factor": 2.0}}, {"rope_parameters": {"rope_type": kind}}):
        assert spec_of(row("LlamaForCausalLM"), **table) == plain


def test_positions_may_be_scaled_by_kind_of_layer() -> None:
    by_kind = {"full_attention": {"rope_type": "yarn"}, "sliding_attention": {"rope_type": "spiral"}}
    with pytest.raises(BadFile, match=r"rope_parameters\.sliding_attention\.rope_type: is 'spiral'"):
        spec_of(row("Olmo3ForCausalLM"), rope_parameters=by_kind)
