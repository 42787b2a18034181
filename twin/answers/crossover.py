"""From where on attention over one cache format is faster than over another, and what holds it there.

Only the attention of one layer is compared, read by this project's kernels: weights and states cost the same whatever
the cache is kept in. A machine that these kernels were never measured on takes them over from one where they were: the
same share of its own roofs and as many operations for each stored element, at its own rates, with a wide spread.
"""

from collections.abc import Sequence
from math import hypot

from msgspec import Struct
from msgspec.structs import replace

from hwprofiles import HardwareProfile, load_profile, profile_names
from hwprofiles.profile import Kernel
from twin.ask.case import Case
from twin.ask.resolve import check_capability
from twin.cost.roofline import KERNEL_RATES, WALLS, Roofs
from twin.engines.twin import QUANTISED, RULES
from twin.errors import Impossible, MissingRate
from twin.formats import kv_format
from twin.operations.format_ops import decode_op, format_case

PLAIN = "bf16"
Q_TOKENS = 1
BATCHES = (1, 4, 16)
CONTEXTS = tuple(2**power for power in range(10, 21))
SHOWN_CTX = 131_072  # context, at batch 1, for which seconds are told
CARRIED_SPREAD = 0.3  # how far a kernel's rates may be off on a machine that it was not measured on


class Crossing(Struct, frozen=True, kw_only=True):
    """One format against another at one batch."""

    batch: int
    ctx_tokens: int | None  # from this context of the ladder on the format is always faster; None: from none
    wall: str  # what holds the format there; at the longest context where it is never faster
    ratio: float  # its seconds over the other's, there


class FormatLine(Struct, frozen=True, kw_only=True):
    """All that is told of one format on one machine."""

    kv_dtype: str
    kernel: str  # key of the kernel whose time this is
    seconds: float  # attention of one layer at the shown context, batch 1
    ratio: float  # over the other format's
    spread: float  # of the ratio, relative: both kernels' rates
    wall: str
    crossings: tuple[Crossing, ...]


class Crossover(Struct, frozen=True, kw_only=True):
    """Every quantised format of this project's kernels against one other on one machine."""

    machine: str
    engine: str  # whose kernels these are
    others: tuple[str, ...]  # back ends whose decode kernels the machine has rates of, too: their order may be another
    against: str
    query_tokens: int
    ctx_tokens: int
    lines: tuple[FormatLine, ...]
    refused: dict[str, str]  # formats that this machine does not run, and why
    carried_from: str  # the machine whose kernels some of these are, where they were not measured here; else empty
    carried: tuple[str, ...] = ()  # the formats whose kernels those are, `against` included


def crossover(hw: str, *, formats: Sequence[str] = QUANTISED) -> Crossover:
    """Compare every format with 16 bits on the machine `hw`. MissingRate where nobody has measured the kernels."""
    own = load_profile(hw)
    profile, donor = with_kernels(own, [PLAIN, *formats])
    taken = profile.kernels.keys() - own.kernels.keys()
    roofs = Roofs(profile)
    lines, refused = [], {}
    for name in formats:
        case = format_case(name)
        try:
            check_capability(case, profile)
            lines.append(_line(roofs, case, format_case(PLAIN)))
        except (Impossible, MissingRate) as why:
            refused[name] = why.message
    if not lines:
        raise MissingRate(next(iter(refused.values())))
    backends = {key.split("/")[1] for key in own.kernels if key.startswith("attend_decode/")}
    return Crossover(
        machine=profile.name,
        engine=RULES.name,
        others=tuple(sorted(backends - {RULES.name, *RULES.all_backends()})),
        against=PLAIN,
        query_tokens=Q_TOKENS,
        ctx_tokens=SHOWN_CTX,
        lines=tuple(lines),
        refused=refused,
        carried_from=donor,
        carried=tuple(name for name in (PLAIN, *formats) if _key(name) in taken),
    )


def kept(name: str | None) -> tuple[str, ...]:
    """The format called `name`, or all quantised ones, of this project's kernels; Impossible for one that is not."""
    if name is None:
        return QUANTISED
    fmt = kv_format(name).name
    if fmt not in QUANTISED:
        raise Impossible(f"this project has no kernel for {fmt}", hint=f"it has them for {', '.join(QUANTISED)}")
    return (fmt,)


def _key(name: str) -> str:
    return format_case(name).attention_kernel("attend_decode")


def with_kernels(profile: HardwareProfile, formats: Sequence[str]) -> tuple[HardwareProfile, str]:
    """(`profile` with each format's decode kernel, from elsewhere if need be, and from where); MissingRate for none."""
    keys = [_key(name) for name in formats]
    absent = [key for key in keys if key not in profile.kernels]
    if not absent:
        return profile, ""
    donors = (load_profile(name) for name in profile_names() if name != profile.name)
    donor = next((each for each in donors if any(key in each.kernels for key in absent)), None)
    if donor is None:
        if len(absent) == len(keys):
            hint = "twin calibrate measures these kernels on a GPU"
            raise MissingRate(f"no machine has a rate for {absent[0]}", hint=hint)
        return profile, ""
    taken = {key: carried(donor.kernels[key], donor.name) for key in absent if key in donor.kernels}
    return replace(profile, kernels={**profile.kernels, **taken}), donor.name


def carried(kernel: Kernel, origin: str) -> Kernel:
    """A kernel's rates on another machine: the same numbers, far less certain."""
    note = f"carried over from {origin}, where it was measured"
    rates = {name: rate for name in KERNEL_RATES if (rate := getattr(kernel, name)) is not None}
    return replace(
        kernel,
        **{
            name: replace(rate, spread=min(1.0, hypot(rate.spread, CARRIED_SPREAD)), note=note)
            for name, rate in rates.items()
        },
    )


def _line(roofs: Roofs, case: Case, other: Case) -> FormatLine:
    """All that is told of a format, held against another."""
    seconds, wall, spread = _attention(roofs, case, SHOWN_CTX, 1)
    other_s, _, other_spread = _attention(roofs, other, SHOWN_CTX, 1)
    names = {"kv_dtype": case.fmt.name, "kernel": _key(case.fmt.name), "wall": wall}
    ratio, spread = seconds / other_s, hypot(spread, other_spread)
    crossings = tuple(_crossing(roofs, case, other, batch) for batch in BATCHES)
    return FormatLine(**names, seconds=seconds, ratio=ratio, spread=spread, crossings=crossings)


def _crossing(roofs: Roofs, case: Case, other: Case, batch: int) -> Crossing:
    """From the longest context downwards, as long as the format is faster."""
    found: list[Crossing] = []
    for ctx_tokens in reversed(CONTEXTS):
        seconds, wall, _ = _attention(roofs, case, ctx_tokens, batch)
        ratio = seconds / _attention(roofs, other, ctx_tokens, batch)[0]
        if ratio < 1:
            found.append(Crossing(batch=batch, ctx_tokens=ctx_tokens, wall=wall, ratio=ratio))
        else:
            found = found or [Crossing(batch=batch, ctx_tokens=None, wall=wall, ratio=ratio)]
            break
    return found[-1]


def _attention(roofs: Roofs, case: Case, ctx_tokens: int, batch: int) -> tuple[float, str, float]:
    """(seconds of one layer's attention, what holds it, relative spread of its kernel's rates)."""
    cost = roofs.cost(decode_op(case, ctx_tokens=ctx_tokens, batch=batch, query_tokens=Q_TOKENS))
    wall = "latency" if cost.latency_s > cost.bound_s else cost.wall
    of_bound = hypot(*(roofs.rates[name].spread for name in cost.bound_rates)) * cost.bound_s
    of_latency = hypot(*(roofs.rates[name].spread for name in cost.latency_rates)) * cost.latency_s
    return cost.seconds, WALLS[wall], hypot(of_bound, of_latency) / cost.seconds
