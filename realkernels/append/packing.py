"""Codes as little-endian bit streams, whole bytes or 32-bit words of them."""

import triton
import triton.language as tl


@triton.jit
def store_codes(at, codes, keep, ROWS: tl.constexpr, SIZE: tl.constexpr, BITS: tl.constexpr):
    """Codes int32 [ROWS, SIZE] of 2, 3, 4 or 8 bits behind the byte pointers `at` [ROWS, 1], where `keep` [ROWS, SIZE].

    What is kept of a row are its first codes, whole bytes of them (8 codes together of 3 bits).
    """
    if BITS == 8:
        tl.store(at + tl.arange(0, SIZE)[None, :], codes.to(tl.uint8), mask=keep)
    else:
        TOGETHER: tl.constexpr = 8 if BITS == 3 else 8 // BITS
        RUNS: tl.constexpr = SIZE // TOGETHER
        place = tl.arange(0, SIZE) % TOGETHER * BITS
        runs = tl.sum(tl.reshape(codes << place[None, :], [ROWS, RUNS, TOGETHER]), axis=2)
        kept = tl.max(tl.reshape(keep.to(tl.int32), [ROWS, RUNS, TOGETHER]), axis=2) != 0
        BYTES: tl.constexpr = TOGETHER * BITS // 8
        for byte in tl.static_range(BYTES):
            part = (runs >> (8 * byte)) & 0xFF
            tl.store(at + (tl.arange(0, RUNS) * BYTES + byte)[None, :], part.to(tl.uint8), mask=kept)


@triton.jit
def store_words(at, codes, keep, BITS: tl.constexpr):
    """32 codes a row, int32 [ROWS, 32] below 2^BITS, as BITS words behind the int32 pointers `at` [ROWS] where `keep`.

    Code i has the bits from BITS x i on, so that one may lie in two words.
    """
    first = tl.arange(0, 32)[None, :] * BITS
    for number in tl.static_range(BITS):
        shift = first - 32 * number
        above = tl.where((shift >= 0) & (shift < 32), codes << (shift & 31), 0)
        below = tl.where((shift < 0) & (shift > -BITS), codes >> ((-shift) & 31), 0)
        tl.store(at + number, tl.sum(above | below, axis=1), mask=keep)
