"""Rows of the table: sparse attention of one sequence, whose tokens select what they read."""

from collections.abc import Iterable
from functools import partial
from itertools import product as every

from calibrate.fit import Fit
from calibrate.operations import lowering, shared
from calibrate.operations.operation import Operation, Parameter, Point, Points, Timed, Value, planes_supported
from calibrate.operations.shared import exactly, lasting, powers, sizes
from twin.engines.twin import INTERLEAVED

DECODE_CTX = (6_145, 12_288, 49_153, 98_306, 196_608, 393_217, 786_435, 1_179_648)
DECODE_CTX_CPU = (6_145, 12_288, 24_576, 98_306)
CURVE_CTX = (2_048, 8_192, 24_576, 98_304, 393_216, 786_432, 1_048_320, 1_572_864, 2_359_296, 3_145_728)
"""Contexts of the long curve; the first is still read whole, so that its step is the gather alone."""
BLOCKS_CTX, BLOCKS_CTX_CPU = (6_145, 49_154, 196_608, 786_435), (6_145, 24_578, 98_304)
BUDGET_CTX = 2**15
"""Context at which the selection's size is varied, to tell the fixed part of a gather from its bytes."""
SELECTED = 2048
"""Tokens that the predicted model selects."""
GATHER_S = {"vram": (4.0, 25.0), "host": (6.5, 65.0), "host4k": (7.0, 25.0)}
GATHER_NOTE = "all layers in one graph, fresh selections; latency from selections of several sizes"


def decoded(contexts: Iterable[int], *tiers: str, layers: int, **same: Value) -> tuple[Point, ...]:
    """A decode step's contexts, each from every tier."""
    return sizes("ctx_tokens", "tier", of=every(contexts, tiers), layers=layers, **same)


def step_grid(*tiers: str) -> Points:
    """Held-out contexts; pages of 4 KiB hold no context beyond a million tokens, and no GPU's CPU has them."""
    cpu = tuple(tier for tier in tiers if tier != "host4k")

    def of(contexts: tuple[int, ...]) -> tuple[Point, ...]:
        return tuple(
            point for point in decoded(contexts, *tiers, layers=12)
            if point["tier"] != "host4k" or int(point["ctx_tokens"]) <= shared.MIB
        )  # fmt: skip

    return Points(
        of(DECODE_CTX), of(DECODE_CTX[:4]), decoded(DECODE_CTX_CPU, *cpu, layers=2),
        decoded(DECODE_CTX_CPU[:3], *cpu, layers=2),
    )  # fmt: skip


def with_backbone(points: Points) -> Points:
    """Steps of several layers, and some behind a backbone of as many MiB a layer."""
    whole = sizes("ctx_tokens", "backbone_mib", "tier", of=((98_306, 48, "vram"), (98_306, 48, "host")), layers=12)
    more = sizes("ctx_tokens", "backbone_mib", "tier", of=((786_435, 96, "vram"), (786_435, 96, "host")), layers=12)
    return points._replace(gpu=(*points.gpu, *whole, *more), gpu_quick=(*points.gpu_quick, *whole))


def gathered(*, cpu: bool, quick: bool) -> tuple[Point, ...]:
    """Contexts of every tier, then sizes of the selection at one of them; of interleaved blocks fewer contexts."""
    last = (15 if quick else 18) if cpu else 20 if quick else 21
    few = tuple(2**power for power in (12, 15, 18, 20) if power <= last)
    whole = few if quick and not cpu else powers(12, last)
    layers = 2 if cpu else 12
    on_host = 4 if quick and not cpu else layers  # registering takes its time
    budgets = (128,) if quick else (128, 512, 1024)

    def of(contexts: tuple[int, ...], layers: int, **same: Value) -> tuple[Point, ...]:
        pairs = [*((ctx, SELECTED) for ctx in contexts), *((BUDGET_CTX, budget) for budget in budgets)]
        return sizes("ctx_tokens", "budget", of=pairs, layers=layers, **same)

    points = [*of(whole, layers, tier="vram"), *of(whole, on_host, tier="host")]
    if not cpu:
        points += of(tuple(ctx for ctx in whole if ctx <= shared.MIB), on_host, tier="host4k")
    return (*points, *(point for name in INTERLEAVED for point in of(few, on_host, tier="host", format=name)))


def blocks(contexts: Iterable[int], *, layers: int) -> tuple[Point, ...]:
    """Contexts of every format that lies on the host in interleaved blocks."""
    return sizes("format", "ctx_tokens", of=every(INTERLEAVED, contexts), tier="host", layers=layers)


CURVE = {tier: decoded(CURVE_CTX, tier, layers=12) for tier in ("vram", "host")}
DECODE_STEP = Operation(
    name="decode_step",
    parameters=(shared.TIER, shared.CTX, shared.LAYERS, Parameter("backbone_mib", "w{}MiB", optional=True)),
    lower=partial(lowering.sparse_decode, parts=("weights", "pooled_scan", "select", "kv_gather")),
    timed=Timed("sparse", "DecodeStep", "planes", ("ctx_tokens",), fresh=True),
    held_out={
        "grid": with_backbone(step_grid("vram", "host")),
        "long_curve": Points(gpu=(*CURVE["vram"][1:], *CURVE["host"][1:])),
    },
    tolerance=exactly(shared.KERNEL),
    layered=True,
)
DECODE_SELECT = Operation(
    name="decode_select",
    parameters=(shared.TIER, shared.CTX, shared.LAYERS),
    lower=partial(lowering.sparse_decode, parts=("pooled_scan", "select")),
    timed=Timed("sparse", "DecodeSelect", "planes", ("ctx_tokens",), fresh=True),
    calibrated=Points(
        decoded(powers(12, 21), "vram", layers=12), decoded((2**12, 2**15, 2**18, 2**20), "vram", layers=12),
        decoded(powers(12, 18), "vram", layers=2), decoded(powers(12, 15), "vram", layers=2)
    ),
    held_out={"grid": step_grid("vram")},
    tolerance=exactly(shared.KERNEL),
    fits=(Fit(
        part="pooled_scan", form="exact", over="ctx_tokens",
        note="all layers in one graph; the latency is with select",
        latency_of="select", latency_note="score, pick and finish of one layer beyond their bytes"
    ),),
    layered=True, probe_s=lasting(6, 25),
)  # fmt: skip
DECODE_GATHER = Operation(
    name="decode_gather",
    parameters=(
        shared.TIER, shared.FORMAT._replace(optional=True, choices=INTERLEAVED), shared.CTX, shared.LAYERS,
        shared.BUDGET,
    ),
    probes=("tier", "format"),
    lower=partial(lowering.sparse_decode, parts=("kv_gather",)),
    timed=Timed("sparse", "DecodeGather", "planes", ("ctx_tokens",), fresh=True),
    calibrated=Points(
        gathered(cpu=False, quick=False), gathered(cpu=False, quick=True),
        gathered(cpu=True, quick=False), gathered(cpu=True, quick=True)
    ),
    held_out={
        "grid": step_grid("vram", "host", "host4k"),
        "long_curve": Points(gpu=(CURVE["vram"][0], CURVE["host"][0])),
        "formats": Points(
            blocks(BLOCKS_CTX, layers=12), blocks(BLOCKS_CTX[:2], layers=12),
            blocks(BLOCKS_CTX_CPU, layers=2), blocks(BLOCKS_CTX_CPU[:2], layers=2)
        ),
    },
    tolerance=exactly(shared.KERNEL),
    fits=(Fit(
        part="kv_gather", form="exact", over="ctx_tokens", note=GATHER_NOTE, latency="of sizes",
        kept=lambda at: at.get("budget", SELECTED) == SELECTED
    ),),
    supported=planes_supported, layered=True,
    probe_s=lambda point: (3.7, 9) if "format" in point else GATHER_S[str(point["tier"])],
)  # fmt: skip


def chunks(*contexts: int, rows: Iterable[int], tier: str = "vram", **same: Value) -> tuple[Point, ...]:
    """A prefill chunk's sizes, by contexts and then by new tokens."""
    return sizes("ctx_tokens", "q_tokens", of=every(contexts, rows), tier=tier, **same)


def attended(
    contexts: tuple[int, ...], rows: tuple[int, ...], buckets: tuple[int, ...], *, hosted: tuple[Point, ...]
) -> tuple[Point, ...]:
    """In place, then by buckets copied within the device (chunks of more than 2,048 tokens in place only); the host."""
    points: list[Point] = []
    for q_tokens, ctx in every(rows, contexts):
        points += chunks(ctx, rows=(q_tokens,))
        for bucket in buckets:
            if bucket < ctx and q_tokens <= MOST_STAGED:
                points += chunks(ctx, rows=(q_tokens,), copies="serial", bucket_tokens=bucket)
    return (*points, *hosted)


MOST_STAGED = 2048
HELD_OUT_CHUNKS = ((12_288, 768), (49_152, 1_536), (98_304, 3_072), (196_608, 1_536))
BUCKETS = (6_144, 12_288, 24_576, 49_152)


def chunk_grid(held: tuple[tuple[int, int], ...], buckets: tuple[int, ...]) -> tuple[Point, ...]:
    """Each in place, 96 tokens from the host, and staged through every bucket smaller than the context."""
    points: list[Point] = []
    for ctx, rows in held:
        points += [*chunks(ctx, rows=(rows,)), *chunks(ctx, rows=(96,), tier="host")]
        for bucket, copies in every(buckets, ("serial", "overlapped")):
            if bucket < ctx:
                points += chunks(ctx, rows=(rows,), tier="host", copies=copies, bucket_tokens=bucket)
    return tuple(points)


def chunk_grid_cpu(held: tuple[tuple[int, int], ...]) -> tuple[Point, ...]:
    """Each in place and staged."""
    points: list[Point] = []
    for ctx, rows in held:
        points += chunks(ctx, rows=(rows,))
        points += chunks(ctx, rows=(rows,), tier="host", copies="serial", bucket_tokens=6_144)
    return tuple(points)


CPU_CHUNKS = ((12_288, 48), (12_288, 96), (49_152, 192))
PREFILL_SELECT = Operation(
    name="prefill_select",
    parameters=(shared.TIER, shared.CTX, shared.Q_TOKENS),
    lower=partial(lowering.sparse_prefill, parts=("score", "select")),
    timed=Timed("sparse", "PrefillSelect", "planes", ("ctx_tokens", "q_tokens")),
    calibrated=Points(
        chunks(*powers(12, 20), rows=(512, 2048)), chunks(2**15, 2**18, rows=(512, 2048)),
        chunks(2**13, 2**15, 2**17, rows=(64, 256)), chunks(2**13, 2**15, rows=(64, 256))
    ),
    held_out={"grid": Points(
        sizes("ctx_tokens", "q_tokens", of=HELD_OUT_CHUNKS, tier="vram"),
        sizes("ctx_tokens", "q_tokens", of=HELD_OUT_CHUNKS[:2], tier="vram")
    )},
    tolerance=exactly(shared.LIBRARY),
    fits=(Fit(
        part="score", form="exact", over="ctx_tokens",
        note="a slab of rows scored and selected; beyond one call of select"
    ),),
    probe_s=lasting(2, 15),
)  # fmt: skip
PREFILL_ATTENTION = Operation(
    name="prefill_attention",
    parameters=(
        shared.TIER, shared.CTX, shared.Q_TOKENS, Parameter("copies", optional=True, choices=("serial", "overlapped")),
        Parameter("bucket_tokens", optional=True),
    ),
    probes=("tier",),
    lower=partial(lowering.sparse_prefill, parts=("attention", "combine", "kv_copy", "kv_gather")),
    timed=Timed("sparse", "PrefillAttend", "planes", ("ctx_tokens", "q_tokens", "bucket_tokens", "copies")),
    calibrated=Points(
        attended((2**15, 2**18), (512, 2048, 8192), (2**16, 2**14, 2**12),
                 hosted=chunks(2**15, 2**18, 2**20, rows=(32, 128), tier="host")),
        attended((2**15, 2**18), (512, 2048), (2**16, 2**14, 2**12),
                 hosted=chunks(2**15, 2**18, rows=(32, 128), tier="host")),
        attended((2**14, 2**16), (64, 256), (2**14, 2**12), hosted=chunks(2**14, 2**16, rows=(32, 128), tier="host")),
        attended((2**12, 2**14), (32, 64), (2**14, 2**12), hosted=chunks(2**14, rows=(16, 64), tier="host"))
    ),
    held_out={"grid": Points(
        chunk_grid(HELD_OUT_CHUNKS, BUCKETS), chunk_grid(HELD_OUT_CHUNKS[:2], BUCKETS[:2]),
        chunk_grid_cpu(CPU_CHUNKS), chunk_grid_cpu(CPU_CHUNKS[:2])
    )},
    tolerance=lambda point: shared.HOST_PREFILL if point["tier"] == "host" else shared.KERNEL,
    fits=(
        Fit(
            part="attention", form="least_squares", over="region_tokens",
            note="in place and by buckets, on planes in device memory",
            jointly=(
                ("combine", "rows", "the running softmax between buckets, from the same fit"), ("kv_copy", "", ""),
            )
        ),
        Fit(part="kv_gather", form="exact", over="ctx_tokens", note="few rows, each gathering for itself"),
    ),
    probe_s=lambda point: (14, 40) if point["tier"] == "vram" else (2, 15),
)  # fmt: skip
