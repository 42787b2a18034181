"""The table of ggml's types against the library's."""

from gguf.constants import GGML_QUANT_SIZES

from twin.models.ggml import TYPES

YOUNGER = {"q2_0"}  # than the library


def test_ids_names_and_sizes_are_those_of_the_library() -> None:
    theirs = {int(kind): (kind.name.lower(), *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}
    assert {number: tuple(kind) for number, kind in TYPES.items() if kind.name not in YOUNGER} == theirs
    assert TYPES[12].bits == 4.5
