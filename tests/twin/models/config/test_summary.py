"""The line about a model: its size, what runs, and what mixes its tokens."""

import pytest

from tests.twin.models.config.sums import row, spec_of


@pytest.mark.parametrize(
    ("architecture", "changes", "line"),
    [
        ("LlamaForCausalLM", {}, "98.5K dense, full attention"),
        ("MixtralForCausalLM", {}, "272K with 152K active, 4 experts, full attention"),
        (
            "Cohere2ForCausalLM",
            {},
            "93.5K dense, 4 layers of sliding window of 64 tokens, 1 layer of full attention",
        ),
    ],
)
def test_a_model_is_said_in_one_line(architecture: str, changes: dict[str, object], line: str) -> None:
    assert spec_of(row(architecture), **changes).summary == line
