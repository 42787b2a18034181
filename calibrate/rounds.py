"""Rounds apart in time: what a processor that others share does at one moment is not what it does at the next."""

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from calibrate.probes import Probe, ProbeRecord, Sample

LATER = re.compile(r"(?P<probe>.*)@\d+")


def round_name(probe: str, number: int) -> str:
    """Under which a probe's round, counted from 0, is kept."""
    return probe if number == 0 else f"{probe}@{number + 1}"


def in_order(probes: Sequence[Probe], number: int) -> list[Probe]:
    """As they come in the first round; later ones take every third first: if time ends, all kinds were seen again."""
    return list(probes) if number == 0 else [probe for first in range(3) for probe in probes[first::3]]


def joined_rounds(records: Mapping[str, ProbeRecord]) -> dict[str, ProbeRecord]:
    """One record a probe: the repeats of all of its rounds at each point, round after round."""
    probes: dict[str, list[ProbeRecord]] = {}
    for name, record in records.items():
        later = LATER.fullmatch(name)
        probes.setdefault(later["probe"] if later else name, []).append(record)
    return {name: rounds[0] if len(rounds) == 1 else _joined(rounds) for name, rounds in probes.items()}


def _joined(rounds: Sequence[ProbeRecord]) -> ProbeRecord:
    points: dict[tuple[tuple[str, int | float | str], ...], list[Sample]] = {}
    for record in rounds:
        for sample in record.samples:
            points.setdefault(tuple(sorted(sample.at.items())), []).append(sample)
    samples = []
    for same in points.values():
        seconds = tuple(second for sample in same for second in sample.seconds)
        samples.append(replace(same[-1], seconds=seconds, rounds=tuple(sample.n for sample in same)))
    return replace(rounds[0], samples=tuple(samples), took_s=sum(record.took_s for record in rounds))


def moment_spread(samples: Iterable[Sample]) -> float:
    """Relative standard deviation from one moment to another: of the rounds' medians, pooled over the samples.

    0 where there is one round.
    """
    variance, freedom = 0.0, 0
    for sample in samples:
        medians = sample.round_medians_s
        if len(medians) > 1:
            variance += (len(medians) - 1) * statistics.variance(medians) / statistics.mean(medians) ** 2
            freedom += len(medians) - 1
    return math.sqrt(variance / freedom) if freedom else 0.0


def typical_spread(records: Mapping[str, ProbeRecord]) -> float:
    """That of all samples of all probes: a few rounds of one probe may agree by chance.

    From the median of the samples' variances, so that a probe which found something else (a disk) does not count by
    its size. A variance of so many degrees of freedom has its median at (1 - 2/9 of their inverse)^3 of what is true.
    """
    variances = []
    for sample in (sample for record in records.values() for sample in record.samples):
        freedom = len(sample.round_medians_s) - 1
        if freedom:
            variances.append(moment_spread([sample]) ** 2 / (1 - 2 / (9 * freedom)) ** 3)
    return math.sqrt(statistics.median(variances)) if variances else 0.0


def between_calibrations(samples: Sequence[Sample], typical: float) -> float:
    """How far (one relative standard deviation) the means of as many rounds at two times lie from each other.

    The spread between moments is half the samples' own and half `typical`, that of all probes; all of it is `typical`
    where these samples are of one round, and 0 where all are.
    """
    rounds = min((len(sample.round_medians_s) for sample in samples), default=1)
    own = moment_spread(samples) or typical
    return math.hypot(own, typical) / math.sqrt(rounds)
