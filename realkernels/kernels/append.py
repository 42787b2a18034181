"""Appending to a cache of any codec: one kernel that takes the codec's `encode` functions, and KVarN's own.

The bytes are those of `codec.append`, which is the reference. Of NaN in bf16 and fp16 only that it is NaN is the same.
KVarN's tiles are summed in another order than torch's, so that scales may be a last bit apart and some codes move by
one: what is dequantised then differs by about 1 % of its norm. Its sidecar is the same in every byte.
"""

import torch

from realkernels.codecs import PLANES, Codec, KVarN, Planes, RowCodec, Slots
from realkernels.codecs.codec import check_rows, slot_tensor
from realkernels.codecs.kvarn import plan
from realkernels.codecs.kvarn_append import append_tokens
from realkernels.codecs.on_device import rows_and_steps, strided, tokens_of_a_block, warps
from realkernels.jit import tl, triton

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MOST_SLOTS = 2**31
"""Slots are divided in 32 bits."""

BLOCK_GROUPS = 64


@triton.jit
def _write(
    x, parts, slots, count, ENCODE: tl.constexpr, BITS: tl.constexpr, PAGE: tl.constexpr, HEADS: tl.constexpr,
    DIM: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if GROUPS == 0:
        there, token, head, group = row < count, row, tl.program_id(1), 0
    else:
        there, token = row < count * (HEADS * GROUPS), row // (HEADS * GROUPS)
        head, group = row // GROUPS % HEADS, row % GROUPS
    slot = tl.load(slots + token, mask=there, other=0).to(tl.int32)
    place = (slot // PAGE).to(tl.int64), head, slot % PAGE, group
    lane = tl.arange(0, WIDTH)[None, :]
    if GROUPS == 0:
        keep = there[:, None] & (lane < DIM)
        at = x[0] + token.to(tl.int64)[:, None] * x[1] + head * x[2] + lane
    else:
        keep = there[:, None]
        at = (x[0] + token.to(tl.int64) * x[1] + head * x[2] + group * WIDTH)[:, None] + lane
    ENCODE(tl.load(at, mask=keep, other=0.0).to(tl.float32), parts, place, there, keep, BITS, BLOCK, WIDTH)


@triton.jit(do_not_specialize=["count"])
def _append(
    keys, values, key_parts, value_parts, slots, count, KEY: tl.constexpr, VALUE: tl.constexpr, KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr, PAGE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, GROUPS: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of BLOCK tokens, heads, 2 for K and V); of groups (blocks of BLOCK groups of all heads, 1, 2).

    KEY and VALUE are the codec's functions; GROUPS is 0 where a whole head of WIDTH lanes is quantised together.
    """
    if tl.program_id(2) == 0:
        _write(keys, key_parts, slots, count, KEY, KEY_BITS, PAGE, HEADS, DIM, GROUPS, WIDTH, BLOCK)
    else:
        _write(values, value_parts, slots, count, VALUE, VALUE_BITS, PAGE, HEADS, DIM, GROUPS, WIDTH, BLOCK)


def append(
    codec: Codec, planes: Planes, slots: Slots, keys: torch.Tensor, values: torch.Tensor, *, checked: bool = True
) -> None:
    """Quantise rows [n, kv_heads, head_dim], n >= 1, into slots, as `codec.append` does.

    ValueError, with nothing written, for what does not fit. `checked=False` vouches for slots on the device, int64, in
    range and each once: nothing is read back then and it can be captured in a graph. Rows are float16, bfloat16 or
    float32 with any strides but the last, which is 1.
    """
    index = slot_tensor(planes, slots, checked=checked, distinct=True)
    check_rows(planes, index.numel(), keys, values)
    for name, given in (("keys", keys), ("values", values)):
        if given.dtype not in DTYPES:
            raise ValueError(f"{name} are {given.dtype}: the kernels take float16, bfloat16 and float32")
        if given.stride(-1) != 1:
            raise ValueError(f"elements of a row of {name} must be neighbours, they are {given.stride(-1)} apart")
    if planes.slots >= MOST_SLOTS:
        raise ValueError(f"the planes have {planes.slots} slots, the kernels take fewer than {MOST_SLOTS}")
    index, keys, values = index.contiguous(), keys.detach(), values.detach()
    if isinstance(codec, KVarN):
        if checked:
            plan(planes, index.tolist(), codec.tile_tokens)
        append_tokens(codec, planes, index, keys, values)
    elif isinstance(codec, RowCodec):
        _append_rows(codec, planes, index, keys, values)


def _append_rows(
    codec: RowCodec, planes: Planes, index: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> None:
    count, heads, dim = index.numel(), planes.kv_heads, planes.head_dim
    groups = dim // codec.group if codec.group else 0
    rows, width = (count * heads * groups, codec.group) if groups else (count, triton.next_power_of_2(dim))
    block = tokens_of_a_block(count, planes.device)
    if groups:
        block = tokens_of_a_block(rows, planes.device, few=0, block=8 if block == 1 else BLOCK_GROUPS)
    key, value = (codec.kernels_of(plane) for plane in PLANES)
    parts = [tuple(strided(part, 4 if groups else 3) for part in codec.kernel_parts(plane, planes)) for plane in PLANES]
    _append[(-(-rows // block), 1 if groups else heads, 2)](
        rows_and_steps(keys), rows_and_steps(values), *parts, index, count, KEY=key.encode, VALUE=value.encode,
        KEY_BITS=key.bits, VALUE_BITS=value.bits, PAGE=planes.page_tokens, HEADS=heads, DIM=dim, GROUPS=groups,
        WIDTH=width, BLOCK=block, num_warps=warps(block * width, most=8), enable_fp_fusion=False,
    )  # fmt: skip
