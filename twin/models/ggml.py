"""The types of ggml's tensors: elements of a block and its bytes.

Source: `ggml/include/ggml.h` and `ggml/src/ggml-common.h` of github.com/ggml-org/llama.cpp. Ids that are not here have
been withdrawn, or are of a later date.
"""

from typing import NamedTuple


class Type(NamedTuple):
    """A type by llama.cpp's name, in which `block_bytes` hold `block` elements that lie side by side in a row."""

    name: str
    block: int
    block_bytes: int

    @property
    def bits(self) -> float:
        """Of an element, scales included."""
        return 8 * self.block_bytes / self.block


TYPES = {
    0: Type("f32", 1, 4),
    1: Type("f16", 1, 2),
    2: Type("q4_0", 32, 18),
    3: Type("q4_1", 32, 20),
    6: Type("q5_0", 32, 22),
    7: Type("q5_1", 32, 24),
    8: Type("q8_0", 32, 34),
    9: Type("q8_1", 32, 40),
    10: Type("q2_k", 256, 84),
    11: Type("q3_k", 256, 110),
    12: Type("q4_k", 256, 144),
    13: Type("q5_k", 256, 176),
    14: Type("q6_k", 256, 210),
    15: Type("q8_k", 256, 292),
    16: Type("iq2_xxs", 256, 66),
    17: Type("iq2_xs", 256, 74),
    18: Type("iq3_xxs", 256, 98),
    19: Type("iq1_s", 256, 50),
    20: Type("iq4_nl", 32, 18),
    21: Type("iq3_s", 256, 110),
    22: Type("iq2_s", 256, 82),
    23: Type("iq4_xs", 256, 136),
    24: Type("i8", 1, 1),
    25: Type("i16", 1, 2),
    26: Type("i32", 1, 4),
    27: Type("i64", 1, 8),
    28: Type("f64", 1, 8),
    29: Type("iq1_m", 256, 56),
    30: Type("bf16", 1, 2),
    34: Type("tq1_0", 256, 54),
    35: Type("tq2_0", 256, 66),
    39: Type("mxfp4", 32, 17),
    40: Type("nvfp4", 64, 36),
    41: Type("q1_0", 128, 18),
    42: Type("q2_0", 64, 18),
}

BITS = {kind.name: kind.bits for kind in TYPES.values()}
"""Bits of an element by type."""

QUANTISED = tuple(
    name for name in BITS if name.startswith(("q", "iq")) and name not in ("q8_1", "q8_k", "q1_0", "q2_0")
)
"""Types of quantised weights that people's files have: q8_1 and q8_k are of activations, two are newer."""
