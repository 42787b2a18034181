"""What the kernel probes share: which contexts and layers fit, and how wrong an output may be."""

from contextlib import AbstractContextManager
from typing import Literal, NamedTuple

from calibrate.probes.probe import Context
from realkernels.caches.qsa import DTYPE, QsaCache, qsa_cache
from realkernels.shape import QsaShape

WORST_ERROR = 2e-2
"""Largest relative error against float64 of an output in half precision that is still called right."""

SHAPE = QsaShape()
LAYERS = SHAPE.layers
LEAST_LAYERS = 2
MIB_TOKENS = 2**20

Tier = Literal["vram", "host"]


class Plan(NamedTuple):
    """Contexts to time, ascending, on planes of `layers` layers."""

    contexts: list[int]
    layers: int


def element_bytes() -> int:
    """Bytes of an element of the planes."""
    return int(DTYPE.itemsize)


def token_bytes(tier: Tier) -> int:
    """K, V and raw key of one token in one layer, and in VRAM its share of a pooled key."""
    elements = 2 * SHAPE.kv_heads * SHAPE.head_dim + SHAPE.index_dim
    pooled = SHAPE.index_dim // SHAPE.ratio if tier == "vram" else 0
    return (elements + pooled) * element_bytes()


def room(context: Context, tier: Tier) -> float:
    """Bytes that planes may take: half of what is free, on the CPU a fifth, where both tiers share one memory."""
    machine = context.machine
    if not context.cuda:
        return 0.2 * machine.host_free_bytes
    return 0.5 * (machine.device_free_bytes if tier == "vram" else machine.host_free_bytes)


def decode_plan(context: Context, tier: Tier, *, most_tokens: int) -> Plan:
    """Powers of two from 4,096 on; fewer layers before shorter contexts, and no context that two layers cannot hold."""
    powers = (12, 15, 18, 20) if context.quick and context.cuda else range(12, 22)
    wanted = [2**power for power in powers if 2**power <= most_tokens]
    layers = LAYERS if context.cuda else LEAST_LAYERS
    per_token = token_bytes(tier)
    contexts = [ctx for ctx in wanted if ctx * per_token * LEAST_LAYERS <= room(context, tier)] or wanted[:1]
    fitting = int(room(context, tier) // (contexts[-1] * per_token))
    return Plan(contexts, max(1, min(layers, fitting)))


def planes(
    context: Context, *, layers: int, tokens: int, tier: Tier, shape: QsaShape = SHAPE, huge_pages: bool = True
) -> AbstractContextManager[QsaCache]:
    """A cache on the device that is calibrated."""
    device, folder = context.backend.device, str(context.folder)
    return qsa_cache(
        shape, layers=layers, tokens=tokens, tier=tier, device=device, huge_pages=huge_pages, folder=folder
    )
