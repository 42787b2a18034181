"""Decoders of 4-bit and coded words on a real GPU: assembly and plain Triton give the same bits for every word."""

import sys
from pathlib import Path

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).parents[2]))

from realkernels.kernels.arithmetic import centred_code, odd_polynomial, scaled_code, tiny_code

PARTS = (4, 8, 4, 4, 2, 2, 4, 4)
"""Numbers in a word, by kind."""


@triton.jit
def _decode_all(words, scales, out, KIND: tl.constexpr, NUMBER: tl.constexpr, ASM: tl.constexpr):  # noqa: N803, PLR0917
    at = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    w, scale = tl.load(words + at), tl.load(scales + at)
    if KIND == 0:
        x = tiny_code(w, NUMBER, 4, ASM)
    elif KIND == 1:
        x = tiny_code(w, NUMBER, 8, ASM)
    elif KIND == 2:
        x = scaled_code(w, scale, NUMBER, 4, 8.0, 0, ASM)
    elif KIND == 3:
        x = scaled_code(w, scale, NUMBER, 4, 7.5, 0, ASM)
    elif KIND == 4:
        x = scaled_code(w, scale, NUMBER, 2, 127.5, 0, ASM)
    elif KIND == 5:
        x = scaled_code(w, scale, NUMBER, 2, 128.0, 128, ASM)
    elif KIND == 6:
        x = centred_code(w, NUMBER, ASM)
    else:
        x = odd_polynomial(w, NUMBER, 0.050140380859375, 0.045318603515625, ASM)
    tl.store(out + at, x)


def main() -> int:
    """0 if all bits are the same."""
    words = torch.arange(-(2**15), 2**15, device="cuda").short()
    scales, wrong = (0.2 * torch.exp(torch.randn(2**16, device="cuda"))).half(), []
    for kind, parts in enumerate(PARTS):
        for number in range(parts):
            both = [torch.full((2**16,), torch.nan, dtype=torch.float16, device="cuda") for _ in range(2)]
            for assembly, out in zip((True, False), both, strict=True):
                _decode_all[(64,)](words, scales, out, kind, number, assembly)
            if not torch.equal(both[0].view(torch.int16), both[1].view(torch.int16)):
                wrong.append((kind, number))
    print(f"they differ for {wrong}" if wrong else "the same bits")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
