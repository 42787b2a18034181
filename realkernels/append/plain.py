"""New tokens into caches of fp16, bf16, fp32 and of fp8 with a scale a layer: a program a block of tokens and head."""

import triton
import triton.language as tl

from realkernels.append.numbers import bfloat16, e4m3_bits
from realkernels.append.places import load_rows, page_and_offset, place


@triton.jit
def _write(x, data, scale, slots, tokens, there, head, PAGE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
           KIND: tl.constexpr, DEVICE: tl.constexpr):  # fmt: skip
    page, offset = page_and_offset(slots, tokens, there, PAGE)
    lane = tl.arange(0, WIDTH)[None, :]
    keep = there[:, None] & (lane < DIM)
    x = load_rows(x, tokens, head, keep, WIDTH)
    at = place(data, page, head, offset)[:, None] + lane
    if KIND == "fp8":
        y = e4m3_bits(tl.div_rn(x, tl.load(scale))).to(tl.uint8)
    elif KIND == "bf16":
        y = bfloat16(x, DEVICE)
    elif KIND == "fp16":
        y = x.to(tl.float16)
    else:
        y = x
    tl.store(at, y, mask=keep)


@triton.jit(do_not_specialize=["count"])
def append_plain(
    keys, values, slots, key_data, value_data, key_scale, value_scale, count, PAGE: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, DEVICE: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of BLOCK tokens, heads, 2 for K and V); KIND fp16, bf16, fp32 or fp8, which alone reads scales."""
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there, head = tokens < count, tl.program_id(1)
    if tl.program_id(2) == 0:
        _write(keys, key_data, key_scale, slots, tokens, there, head, PAGE, DIM, WIDTH, KIND, DEVICE)
    else:
        _write(values, value_data, value_scale, slots, tokens, there, head, PAGE, DIM, WIDTH, KIND, DEVICE)
