"""What the decode kernels share inside their loops: rows of a tile in a paged cache, and one step of softmax."""

import triton
import triton.language as tl


@triton.jit
def page_of_tile(table, start, lane, length, PAGE: tl.constexpr, TILE: tl.constexpr, ASM: tl.constexpr = False):
    """Page number of a tile that lies in one page (a scalar), or of each of its tokens (int64 [TILE]).

    ASM reads the scalar in a way that loops are not pipelined by: a load that a pipelined load waits for would take one
    of its stages.
    """
    if PAGE % TILE == 0:
        at = table + start // PAGE
        if ASM:
            page = tl.inline_asm_elementwise(
                "ld.global.nc.b32 $0, [$1];", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=True, pack=1
            )
        else:
            page = tl.load(at)
    else:
        token = start + lane
        page = tl.load(table + token // PAGE, mask=token < length, other=0)
    return page.to(tl.int64)


@triton.jit
def exp2(x, ASM: tl.constexpr):
    """2^x; one instruction, to zero below 2^-126, where the hardware's may be used."""
    if ASM:
        y = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = tl.exp2(x)
    return y


@triton.jit
def log2(x, ASM: tl.constexpr):
    """Logarithm to base 2, likewise; x above 2^-126."""
    if ASM:
        y = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = tl.log2(x)
    return y


@triton.jit
def softmax_step(s, top, ASM: tl.constexpr):
    """One tile of running softmax: s [ROWS, TILE] and top [ROWS] in base 2, -inf for what a row does not see.

    Returns p [ROWS, TILE] = 2^(s - new top), the factor [ROWS] for everything accumulated so far, the new top [ROWS].
    """
    new = tl.maximum(top, tl.max(s, axis=1))
    base = tl.where(new == float("-inf"), 0.0, new)
    return exp2(s - base[:, None], ASM), exp2(top - base, ASM), new


@triton.jit
def _largest_of_2(a0, a1, b0, b1):
    return tl.maximum(a0, b0), tl.maximum(a1, b1)


@triton.jit
def _largest_of_3(a0, a1, a2, b0, b1, b2):
    return tl.maximum(a0, b0), tl.maximum(a1, b1), tl.maximum(a2, b2)


@triton.jit
def row_maxima(s, SETS: tl.constexpr):
    """Largest score of each row, for 1 to 3 sets [ROWS, TILE]: one exchange between warps for all of them."""
    if SETS == 1:
        best = (tl.max(s[0], axis=1),)
    elif SETS == 2:
        best = tl.reduce((s[0], s[1]), 1, _largest_of_2)
    else:
        best = tl.reduce((s[0], s[1], s[2]), 1, _largest_of_3)
    return best
