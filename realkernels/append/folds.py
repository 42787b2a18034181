"""Sums and Hadamard products by halves, in the order of `realkernels/formats/arithmetic.py`: the same bits."""

import triton
import triton.language as tl


@triton.constexpr_function
def log2(size):
    """Of a power of two."""
    return size.bit_length() - 1


@triton.jit
def hadamard(x, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Rows x [ROWS, SIZE] times Sylvester's matrix over the last axis, not normalised.

    A step adds and subtracts neighbours and moves the lowest bit of the index to the top, so that the next step finds
    the next bit lowest; after the last one everything is where it was.
    """
    for _ in tl.static_range(log2(SIZE)):
        first, second = tl.split(tl.reshape(x, [ROWS, SIZE // 2, 2]))
        both = tl.join(first + second, first - second)
        x = tl.reshape(tl.permute(both, [0, 2, 1]), [ROWS, SIZE])
    return x


@triton.jit
def sum_of_columns(x, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """[ROWS, 1]: x [ROWS, SIZE] along its last axis."""
    for step in tl.static_range(log2(SIZE)):
        low, high = tl.split(tl.permute(tl.reshape(x, [ROWS, 2, SIZE >> (step + 1)]), [0, 2, 1]))
        x = low + high
    return x
