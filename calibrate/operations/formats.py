"""Rows of the table: attention over caches that are read whole, and writing to them, by cache format."""

from itertools import product as every

from calibrate.fit import Fit
from calibrate.operations import lowering, shared
from calibrate.operations.operation import Operation, Parameter, Point, Points, Timed, Value, format_supported
from calibrate.operations.shared import FORMAT_RATES, HEADS, KEPT, alike, dealt, exactly, lasting, of_each, sizes
from twin.formats import kv_format
from twin.operations.format_ops import Heads
from twin.operations.occupancy import FLASH_ROWS_WIDE, FlashGrid

DECODE_NAMES = ("ctx_tokens", "batch", "q_tokens")
DECODE_FULL = sizes(*DECODE_NAMES, of=(
    (8192, 1, 1), (131072, 1, 1), (8192, 8, 1), (131072, 8, 1), (32768, 1, 1), (65536, 16, 1),
    (16384, 8, 2), (131072, 2, 2), (8192, 1, 4), (131072, 1, 4), (8192, 4, 8),
    (8192, 1, 16), (131072, 1, 16), (32768, 8, 16), (8192, 8, 32), (131072, 1, 32),
))  # fmt: skip
DECODE_QUICK = sizes(*DECODE_NAMES, of=(
    (8192, 1, 1), (131072, 1, 1), (32768, 8, 1), (131072, 1, 4), (8192, 1, 32), (131072, 1, 32),
))  # fmt: skip
DECODE_INLINE = tuple(point for point in DECODE_FULL if point["q_tokens"] in {1, 2, 16})
DECODE_CPU = sizes(
    *DECODE_NAMES, of=((1024, 1, 1), (4096, 1, 1), (2048, 4, 1), (1024, 1, 4), (4096, 1, 4)), heads=shared.CPU_HEADS
)
DECODE_DESIGN = (
    (6_145, 1, 1), (98_306, 3, 6), (24_576, 6, 2), (196_608, 1, 12), (49_153, 12, 1),
    (6_145, 12, 12), (98_306, 1, 1), (24_576, 1, 32), (196_608, 6, 1), (49_153, 3, 2),
    (6_145, 3, 6), (98_306, 12, 2), (24_576, 3, 1), (196_608, 3, 32), (49_153, 6, 12),
)  # fmt: skip
DECODE_DESIGN_CPU = sizes(
    *DECODE_NAMES, of=((1_537, 1, 1), (769, 3, 2), (3_073, 1, 1), (1_537, 2, 3)), heads=shared.CPU_HEADS
)
DEFAULT = tuple(one for one in KEPT if "arrangement" not in one)
NOT_DEFAULT = tuple(one for one in KEPT if "arrangement" in one)

INLINE_FIRST = 12
"""Place of the first arrangement beside the default ones, whatever formats come later: its cases were measured so."""


def decode_design(*, each: int) -> tuple[Point, ...]:
    """Cases of every format and arrangement."""
    return (
        *dealt(DECODE_DESIGN, DEFAULT, DECODE_NAMES, each=each, step=4),
        *dealt(DECODE_DESIGN, NOT_DEFAULT, DECODE_NAMES, each=each, step=4, first=INLINE_FIRST),
    )


DECODE_FORMAT = Operation(
    name="decode_format",
    parameters=(shared.FORMAT, shared.ARRANGEMENT, shared.CTX, shared.BATCH, Parameter("q_tokens", "q{}"), HEADS),
    probes=("format", "arrangement"),
    lower=lowering.decode_format,
    timed=Timed("attend_decode", "AttendDecode", "format", DECODE_NAMES),
    calibrated=Points(
        (*of_each(DEFAULT, DECODE_FULL), *of_each(NOT_DEFAULT, DECODE_INLINE)), of_each(KEPT, DECODE_QUICK),
        (*of_each(DEFAULT, DECODE_CPU), *of_each(NOT_DEFAULT, DECODE_CPU[:2])),
        (*of_each(DEFAULT, DECODE_CPU[::2]), *of_each(NOT_DEFAULT, DECODE_CPU[:2]))
    ),
    held_out={"formats": Points(
        decode_design(each=11), decode_design(each=4),
        of_each(KEPT, DECODE_DESIGN_CPU), of_each(KEPT, DECODE_DESIGN_CPU[:2])
    )},
    tolerance=lambda point: (
        shared.OPEN_TILE if int(point["ctx_tokens"]) % kv_format(str(point["format"])).tile_tokens else FORMAT_RATES
    ),
    fits=(Fit(part="attention", form="thread_blocks", over="query_tokens", note=""),),
    supported=format_supported, probe_s=lasting(1.2, 3.5),
)  # fmt: skip


FEW_TOKENS, WHOLE_TILES = 8, 3


def appended(*tokens: int, **same: Value) -> tuple[Point, ...]:
    """New tokens into every format in its default arrangement: a few, or whole tiles, which are quantised when full."""
    points: list[Point] = []
    for one, count in every(DEFAULT, tokens):
        tile = kv_format(str(one["format"])).tile_tokens
        whole = count < FEW_TOKENS or count % tile == 0
        points.append({**one, "tokens": count if whole else WHOLE_TILES * tile, **same})
    return tuple(points)


APPEND_FORMAT = Operation(
    name="append_format",
    parameters=(shared.FORMAT, shared.TOKENS, HEADS),
    probes=("format",),
    lower=lowering.append_format,
    timed=Timed("append", "Append", "format", ("tokens",), fresh=True),
    calibrated=alike(appended(1, 512, 4096), appended(1, 512, heads=shared.CPU_HEADS)),
    held_out={"operations": alike(
        appended(3, 96, 768, 3_072), appended(96, heads=shared.CPU_HEADS), quick=appended(96, 3_072)
    )},
    tolerance=exactly(shared.SMALL),
    fits=(Fit(part="append", form="streamed", over="tokens", note="quantised in fused kernels; on a CPU in torch"),),
    supported=format_supported, rounds_often=50.0,  # the call itself judges what is quantised, by its bits
    probe_s=lasting(0.3, 0.8),
)  # fmt: skip
DEQUANTISED, DEQUANTISED_CPU = ((512,), (32_768,), (65_536,)), ((256,), (2_048,))
"""One small kv chunk, whose time is a launch, and many whole ones, more than a device's L2 holds."""
DEQUANTISED_LATER = sizes("tokens", of=((24_576,), (768,)))
DEQUANTISE_FORMAT = Operation(
    name="dequantise_format",
    parameters=(shared.FORMAT, shared.ARRANGEMENT, shared.TOKENS, HEADS),
    probes=("format", "arrangement"),
    lower=lowering.dequantise_format,
    timed=Timed("prefill", "Dequantise", "format", ("tokens",)),
    calibrated=alike(
        of_each(KEPT, sizes("tokens", of=DEQUANTISED)),
        of_each(KEPT, sizes("tokens", of=DEQUANTISED_CPU, heads=shared.CPU_HEADS))
    ),
    held_out={"operations": Points(of_each(KEPT, DEQUANTISED_LATER), of_each(KEPT, DEQUANTISED_LATER[:1]))},
    tolerance=exactly(FORMAT_RATES),
    fits=(Fit(
        part="dequantise", form="exact", over="tokens",
        note="codes and scales read, numbers of 16 bits written; latency of a piece"
    ),),
    supported=format_supported, rounds_often=0.0,  # number by number
    probe_s=lasting(0.25, 0.5),
)  # fmt: skip

CHUNK_NAMES = ("q_tokens", "ctx_tokens")
CHUNK_FORMATS = tuple({"format": name} for name in ("bf16", "int8_per_token_head", "kvarn_k4v2_g128", "fp16"))
"""That dequantise at different costs; attention over their kv chunks is one kernel."""
CHUNK_QUICK = ((512, 16_896), (2_048, 18_432), (64, 32_832))
"""New tokens, few of which are divided over keys, and all tokens."""
CHUNK_FULL = (*CHUNK_QUICK, (2_048, 67_584), (512, 66_048), (192, 32_960), (512, 512))
ALONE_PAST = 16_384
"""Tokens before as many new ones as leave the last wave's thread blocks a multiprocessor each."""
ALONE_AFTER = 2
"""Full waves before them, at the least."""
MOST_BLOCKS = 64
"""Of FLASH_ROWS_WIDE new tokens that are tried."""
CHUNK_DESIGN = ((24_576, 768), (98_304, 1_536), (49_153, 3_072), (12_290, 1_536), (98_306, 768), (36_865, 3_072))
CHUNK_DESIGN_CPU = sizes("ctx_tokens", "q_tokens", of=((1_537, 96), (3_073, 48)), heads=shared.CPU_HEADS)
CHUNK_CPU = sizes(*CHUNK_NAMES, of=((32, 1_056), (128, 1_152), (128, 2_176)), heads=shared.CPU_HEADS)


def rows_with_some_alone(multiprocessors: int) -> int:
    """The fewest new tokens that leave a last wave at most a block a multiprocessor, after full waves; 0 if none do."""
    for blocks in range(1, MOST_BLOCKS):
        waves = FlashGrid(thread_blocks=blocks * Heads().query_heads).on(multiprocessors)
        if waves.full >= ALONE_AFTER and waves.alone:
            return blocks * FLASH_ROWS_WIDE
    return 0


def with_some_alone(multiprocessors: int) -> tuple[Point, ...]:
    """A chunk of so many new tokens, of each format."""
    rows = rows_with_some_alone(multiprocessors)
    return of_each(CHUNK_FORMATS, sizes(*CHUNK_NAMES, of=((rows, ALONE_PAST + rows),))) if rows else ()


PREFILL_FORMAT = Operation(
    name="prefill_format",
    parameters=(shared.FORMAT, shared.ARRANGEMENT, shared.CTX, shared.Q_TOKENS, HEADS),
    probes=("format",),
    lower=lowering.prefill_format,
    timed=Timed("prefill", "AttendChunk", "format", ("ctx_tokens", "q_tokens")),
    calibrated=Points(
        of_each(CHUNK_FORMATS, sizes(*CHUNK_NAMES, of=CHUNK_FULL)),
        of_each(CHUNK_FORMATS, sizes(*CHUNK_NAMES, of=CHUNK_QUICK)),
        of_each(CHUNK_FORMATS, CHUNK_CPU), of_each(CHUNK_FORMATS, CHUNK_CPU[:2])
    ),
    of_device=with_some_alone,
    held_out={"formats": Points(
        dealt(CHUNK_DESIGN, DEFAULT, ("ctx_tokens", "q_tokens"), each=3, step=2),
        dealt(CHUNK_DESIGN, DEFAULT, ("ctx_tokens", "q_tokens"), each=1, step=2),
        of_each(DEFAULT, CHUNK_DESIGN_CPU), of_each(DEFAULT, CHUNK_DESIGN_CPU[:1])
    )},
    tolerance=exactly(shared.KERNEL),
    fits=(Fit(
        part="attention", form="least_squares", over="rows",
        note="whole chunks of several formats, less unpacking and folding; latency of a piece"
    ),),
    supported=format_supported, probe_s=lasting(1.0, 2.5),
)  # fmt: skip
