"""From timed collectives (`calibrate/machine/collectives.py`) to the link between devices, and what is held out.

`python -m calibrate.links links.json --hw h200` prints predictions of what was never fitted, `-o` writes the link and
its kernels as a profile has them. Of a kernel one number is searched, its latency; the share of the link's rate at each
fitted size follows.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from calibrate.operations.lowering import dense_layer
from hwprofiles import HardwareProfile, load_profile
from hwprofiles.links import PEER_STEPS, peer_kind
from hwprofiles.profile import WHOLE_RUNS, Kernel, Link
from hwprofiles.rates import Curve, Rate
from twin.cost.breakdown import Breakdown
from twin.cost.roofline import Roofs
from twin.errors import BadFile
from twin.operations.ops import Engine, Op, OpGraph

SCHEMA = "twin.collectives/1"
ROUNDS = {"all_reduce": 2, "all_gather": 1}
"""Times that a message goes around the ring."""
BELOW = tuple(step / 100 for step in range(30, 100))
"""Shares of the shortest message's time that may be its latency."""


class Judged(NamedTuple):
    """One held-out case."""

    id: str
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Relative."""
        return self.predicted_s / self.measured_s - 1


def read(path: Path) -> dict[str, Any]:
    """What the probe wrote. BadFile for anything else, and for what an interruption left."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as wrong:
        raise BadFile(f"{path}: {wrong}") from None
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise BadFile(f"{path}: no samples of collectives, which have schema {SCHEMA!r}")
    if not found.get("whole"):
        raise BadFile(f"{path}: the probe was interrupted: measure again")
    return found


def samples(found: dict[str, Any], operation: str, implementation: str, role: str) -> list[dict[str, Any]]:
    """Those of one kind and role, smallest first where they have a size."""
    wanted = (operation, implementation, role)
    kept = [each for each in found["samples"] if (each["operation"], each["implementation"], each["role"]) == wanted]
    return sorted(kept, key=lambda each: each["at"].get("bytes", 0))


class Ring(NamedTuple):
    """A collective over so many ranks."""

    ranks: int
    rounds: int

    @property
    def share(self) -> float:
        """Of a message, that each rank sends over its link."""
        return self.rounds * (self.ranks - 1) / self.ranks

    @property
    def hops(self) -> int:
        """Steps beyond those of two ranks."""
        return self.rounds * (self.ranks - 2)

    def latencies(self, kind: str) -> float:
        """How many of a latency between two ranks it pays, over links of a kind."""
        return 1 + PEER_STEPS[kind] * self.hops


def fitted_link(found: dict[str, Any], kind: str) -> Link:
    """One direction between two devices: the best rate that copies or sums reach, the shortest sum's time."""
    copies = [each for way in ("forth", "back") for each in samples(found, "peer_copy", way, "fit")]
    sums = samples(found, "all_reduce", implementation_of(found), "fit")
    ring = Ring(found["ranks"], ROUNDS["all_reduce"])
    rates = [each["at"]["bytes"] / each["median_s"] for each in copies]
    large, largest = sums[-2:]
    more, longer = largest["at"]["bytes"] - large["at"]["bytes"], largest["median_s"] - large["median_s"]
    rates += [ring.share * largest["at"]["bytes"] / largest["median_s"], ring.share * more / max(longer, 1e-12)]
    shortest = sums[0]
    return Link(
        rate=_rate(found, max(rates), "B/s", n=len(rates), spread=0.03,
                   note="the best of copies, the largest sum, and what makes it larger than the next"),
        datasheet=_rate(found, max(rates), "B/s", n=1, spread=0.0, note="no peak is known"),
        latency=_rate(found, shortest["median_s"] / ring.latencies(kind), "s", n=len(shortest["seconds"]),
                      spread=_spread(shortest["seconds"]), note=f"a sum of {shortest['at']['bytes']} B"),
        run_length=WHOLE_RUNS,
    )  # fmt: skip


def implementation_of(found: dict[str, Any]) -> str:
    """Which samples are of what serving engines run: all calls of a step in one graph, where graphs were timed."""
    kinds = {each["implementation"] for each in found["samples"] if each["operation"] == "all_reduce"}
    return next(kind for kind in ("nccl_graph", "nccl", "gloo") if kind in kinds)


def _rate(found: dict[str, Any], value: float, unit: Any, *, n: int, spread: float, note: str) -> Rate:
    return Rate(value=value, unit=unit, spread=spread, n=n, source="measured", date=found["date"], note=note)


def _spread(seconds: Sequence[float]) -> float:
    return min(0.5, statistics.stdev(seconds) / statistics.median(seconds)) if len(seconds) > 1 else 0.0


def fitted_kernel(found: dict[str, Any], operation: str, link: Link, kind: str) -> Kernel:
    """Latency, and the share of the link at each fitted size.

    Of all latencies the one is taken that predicts those sizes best which are left out between two others.
    """
    points = samples(found, operation, implementation_of(found), "fit")
    ring = Ring(found["ranks"], ROUNDS[operation])
    sizes = [float(each["at"]["bytes"]) for each in points]
    seconds = [each["median_s"] for each in points]
    below = min(BELOW, key=lambda share: _worst_left_out(sizes, seconds, share * seconds[0], ring, link.rate.value))
    latency_s = below * seconds[0]
    spread = max(0.01, _worst_left_out(sizes, seconds, latency_s, ring, link.rate.value) / 2)
    note = f"{found['backend']} {found['nccl']}, {ring.ranks} ranks, {points[0]['calls']} in a graph"
    known: dict[str, Any] = {"spread": min(spread, 0.5), "source": "measured", "date": found["date"], "note": note}
    shares = _shares(sizes, seconds, latency_s, ring, link.rate.value)
    curve = Curve(over="message_bytes", at=tuple(sizes), efficiency=tuple(shares), n=len(sizes), **known)
    latency = Rate(value=latency_s / ring.latencies(kind), unit="s", n=len(points[0]["seconds"]), **known)
    return Kernel(efficiency=curve, latency=latency)


def _shares(sizes: Sequence[float], seconds: Sequence[float], latency_s: float, ring: Ring, rate: float) -> list[float]:
    """Of the link's rate, so that each size takes what it took."""
    pairs = zip(sizes, seconds, strict=True)
    return [min(1.0, ring.share * size / rate / max(took - latency_s, 1e-12)) for size, took in pairs]


def _worst_left_out(
    sizes: Sequence[float], seconds: Sequence[float], latency_s: float, ring: Ring, rate: float
) -> float:
    """Largest relative error of an inner size that the others predict."""
    worst = 0.0
    for left in range(1, len(sizes) - 1):
        kept = [index for index in range(len(sizes)) if index != left]
        at, took = [sizes[index] for index in kept], [seconds[index] for index in kept]
        shares = _shares(at, took, latency_s, ring, rate)
        curve = Curve(
            over="message_bytes", at=tuple(at), efficiency=tuple(shares), n=1, spread=0.0, source="measured",
            date="2026-01-01",
        )  # fmt: skip
        predicted = latency_s + ring.share * sizes[left] / rate / curve(sizes[left])
        worst = max(worst, abs(predicted / seconds[left] - 1))
    return worst


def linked(profile: HardwareProfile, found: dict[str, Any], *, name: str) -> HardwareProfile:
    """So many of the machine's device with the link and the kernels that were found; a link's known peak stays."""
    kind = peer_kind(name)
    link, peak = fitted_link(found, kind), profile.gpu.peer
    if peak is not None and peak.datasheet.value >= link.rate.value:
        link = replace(link, datasheet=peak.datasheet)
    gpu = replace(profile.gpu, peer=link, peer_link=name)
    kernels = {
        f"{operation}/nccl/{kind}": replace(fitted_kernel(found, operation, link, kind), machine=profile.name)
        for operation in ROUNDS
        if samples(found, operation, implementation_of(found), "fit")
    }
    machine = replace(profile, gpu=gpu, kernels=profile.kernels | kernels)
    return machine.repeated(found["ranks"])


def held_out(found: dict[str, Any], machine: HardwareProfile) -> Iterator[Judged]:
    """Every case that no rate was fitted on: collectives, and layers alone and shared."""
    roofs, ranks = Roofs(machine), found["ranks"]
    for operation, rounds in ROUNDS.items():
        ring = Ring(ranks, rounds)
        for each in samples(found, operation, implementation_of(found), "held_out"):
            size = each["at"]["bytes"]
            op = Op(
                operation, 0, engine=Engine.PEER, kernel=f"{operation}/nccl/peer", link_bytes=ring.share * size,
                hops=ring.hops, grain=size, or_plain=True,
            )  # fmt: skip
            yield Judged(f"{operation} {size} B", roofs.cost(op).seconds, each["median_s"])
    for tp in (1, ranks):
        for each in samples(found, "layer", f"tp{tp}", "held_out"):
            at = {name: each["at"][name] for name in ("batch", "q_tokens", "past_tokens")}
            blocks = dense_layer({"dtype": "bf16", "tp": tp, **at}, "bf16")
            alone = tuple(OpGraph(ops=block.ops) for block in blocks)
            name = " ".join(f"{key} {value}" for key, value in at.items())
            yield Judged(f"layer tp {tp}: {name}", Breakdown().run(alone, roofs).seconds, each["median_s"])


def report(judged: Sequence[Judged]) -> str:
    """A line a case, then how far they are off."""
    lines = [
        f"{each.id:55s} {each.predicted_s * 1e6:12.2f} us {each.measured_s * 1e6:12.2f} us {100 * each.error:+7.1f} %"
        for each in judged
    ]
    groups: dict[str, list[float]] = {}
    for each in judged:
        groups.setdefault(each.id.partition(":")[0].partition(" ")[0], []).append(abs(each.error))
    for name, errors in groups.items():
        lines.append(f"{name}: median {100 * statistics.median(errors):.1f} %, worst {100 * max(errors):.1f} %")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m calibrate.links", description=__doc__)
    parser.add_argument("links", type=Path)
    parser.add_argument("--hw", default="h200", help="the machine whose devices these are, as it is shipped")
    parser.add_argument("--peer", default="NVLink 4", help="what the link is called")
    parser.add_argument("-o", "--output", type=Path, help="where the link and its kernels go, as a profile has them")
    asked = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    found = read(asked.links)
    machine = linked(load_profile(asked.hw), found, name=asked.peer)
    sys.stdout.write(report(list(held_out(found, machine))))
    if asked.output is not None:
        kernels = {key: each for key, each in machine.kernels.items() if key.partition("/")[0] in ROUNDS}
        shown = {"peer_link": machine.gpu.peer_link, "peer": machine.gpu.peer, "kernels": kernels}
        asked.output.write_bytes(msgspec.json.format(msgspec.json.encode(shown), indent=1) + b"\n")


if __name__ == "__main__":
    main()
