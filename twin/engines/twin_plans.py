"""How this project's decode kernels are cut into programs, format by format: mirrored from their own plans.

The codecs in `realkernels/` have the plans themselves; a test holds the two equal for all query rows. They are those of
multiprocessors with 228 KiB of shared memory, taken over to smaller ones, which hold fewer programs or sets.
"""

from twin.cuts import Plan, Program

_PLAIN = Plan(alone=Program(64, 16, 1, 1), programs=(Program(32, 64, 1, 1),))
_SCALED = Plan(programs=(Program(64, 16, 1, 2, prologue=40), Program(64, 32, 1, 2), Program(64, 16, 3, 2)))
_WIDE = Program(64, 32, 1, 2)
_NIBBLE = Plan(programs=(*(Program(128, 8, sets, 2) for sets in (1, 2, 3)), _WIDE))
_BYTES = Plan(programs=(*(Program(64, 8, sets, 2) for sets in (1, 2, 3)), _WIDE))
_GROUPS = Plan(alone=Program(64, 8, 1, 4), programs=(Program(64, 8, 2, 2), _WIDE))
_TURBO = Plan(
    alone=Program(64, 8, 1, 3), programs=(Program(64, 8, 2, 2), Program(64, 8, 3, 2), _WIDE, Program(128, 16, 3, 1))
)

PLANS: dict[str, Plan] = {
    **dict.fromkeys(("fp16", "bf16"), _PLAIN),
    "fp8": Plan(programs=(*_SCALED.programs[:2], Program(64, 48, 1, 2))),
    **dict.fromkeys(("int8_per_token_head", "fp8_per_token_head"), _SCALED),
    "int4_per_token_head": _NIBBLE,
    **dict.fromkeys(("q8_0", "exl3_k8v8"), _BYTES),
    **dict.fromkeys(("q4_0", "exl3_k4v4"), _GROUPS),
    "turboquant_4bit_nc": _TURBO,
    "kvarn_k4v2_g128": Plan(alone=Program(128, 8, 1, 3), programs=(Program(128, 8, 1, 4),), other_splits=1),
}
"""By format; `<backend>/<format>` where an arrangement has a plan of its own."""
