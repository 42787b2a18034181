"""Questions and machines drawn at random, and machines made slower one rate at a time."""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from hypothesis import strategies as st

from hwprofiles import HardwareProfile, load_profile, profile_names
from twin.ask.question import LANES, MAX_BATCH, Question
from twin.engines import load_engine
from twin.layouts import load_layout
from twin.units import GIB, KIB, MAX_TOKENS, MIB, TIB

ENGINE = "exllamav3"
PAGE = load_engine(ENGINE).page_tokens
THRESHOLD = 2051
"""Longest context that the shipped model reads whole."""

EDGES = (1, 2, PAGE, PAGE + 1, 2048, 2049, THRESHOLD - 1, THRESHOLD, THRESHOLD + 1, 4096, 1 << 20, MAX_TOKENS)
CHUNKS = (None, PAGE, 512, 2048, 4096, 8192, 65536)
STAGING = (None, 512 * KIB, 3 * MIB + 17, 32 * MIB, GIB)
LONG_TOKENS = 1 << 24
"""Beyond it chunks and buffers are drawn large: the number of chunks is what a prediction's own time grows with."""

LINEAR = "linear/exllamav3/exl3"
SHIPPED = [machine for machine in map(load_profile, profile_names()) if LINEAR in machine.kernels]
"""Machines that a whole model can be predicted on."""

ROOMY_BYTES = TIB
"""Memory of a machine on which nearly everything fits."""

Document = dict[str, Any]


def log_uniform(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(0, 1).map(lambda share: min(high, max(low, low * (high / low) ** share)))


def contexts(*, longest: int = MAX_TOKENS, shortest: int = 1) -> st.SearchStrategy[int]:
    edges = st.sampled_from([edge for edge in EDGES if shortest <= edge <= longest])
    return edges | log_uniform(shortest, longest).map(int)


@st.composite
def questions(
    draw: st.DrawFn,
    /,
    *,
    longest: int = MAX_TOKENS,
    shortest: int = 1,
    layouts: tuple[str, ...] = load_engine(ENGINE).layouts,
    **fixed: Any,
) -> Question:
    """Any question that resolves; `fixed` fields are not drawn."""
    asked: Document = {
        "ctx_tokens": draw(contexts(longest=longest, shortest=shortest)),
        "layout": draw(st.sampled_from(layouts)),
    }
    long = asked["ctx_tokens"] > LONG_TOKENS
    asked |= {
        "batch": draw(st.sampled_from((1, 1, 2, 3, 17, MAX_BATCH))),
        "chunk_tokens": draw(st.sampled_from(CHUNKS[-2:] if long else CHUNKS)),
        "ngram": draw(st.sampled_from((None, "ram", "disk"))),
        "lanes": draw(st.sampled_from(LANES)),
    }
    special = {
        "staging_bytes": STAGING[-1:] if long else STAGING, "prefill": (None, "auto", "naive", "staged"),
        "copies": (None, "serial", "overlapped"), "pooled": (None, "vram", "host"), "host_pages": (None, "huge"),
    }  # fmt: skip
    options = load_layout(asked["layout"]).options
    asked |= {name: draw(st.sampled_from(values)) for name, values in special.items() if name in options}
    asked |= {name: value for name, value in fixed.items() if name not in special or name in options}
    if asked.get("prefill") == "staged":
        asked["batch"] = 1  # the engine stages for one sequence at a time
    return Question(**asked)


@st.composite
def machines(draw: st.DrawFn, *, flat: bool = False, roomy: bool = False) -> HardwareProfile:
    """A shipped machine, or one whose every rate is random; `flat` kernels are as efficient at every size."""
    if draw(st.booleans()):
        shipped = draw(st.sampled_from(SHIPPED))
        shipped = flattened(shipped) if flat else shipped
        return with_memory(shipped, ROOMY_BYTES) if roomy else shipped
    document = msgspec.to_builtins(draw(st.sampled_from(SHIPPED)))
    document["gpu_count"] = draw(st.sampled_from((1, 2, 3, 4, 7, 48, 100)))
    document["kernels"] = {key: value for key, value in document["kernels"].items() if key.split("/")[1] == ENGINE}
    for path, leaf in list(_leaves(document)):
        leaf["spread"] = draw(st.floats(0, 1))
        if "efficiency" in leaf:
            own = [draw(log_uniform(1e-2, 1))] if flat else [draw(log_uniform(1e-2, 1)) for _ in leaf["at"]]
            leaf["efficiency"] = own * len(leaf["at"]) if flat else own
        elif leaf["unit"] == "s":
            leaf["value"] = draw(log_uniform(1e-8, 1e-2))
        elif leaf["unit"] == "B":
            leaf["value"] = {"reserved": GIB}.get(path[-1]) or draw(log_uniform(16 * GIB, 8 * TIB))
        elif path[-1] != "datasheet":
            leaf["value"] = draw(log_uniform(*_range_of(path)))
    _raise_peaks(document, lambda: draw(st.sampled_from((1.0, 1.2, 4.0))))
    machine = msgspec.convert(document, HardwareProfile)
    return with_memory(machine, ROOMY_BYTES) if roomy else machine


def _range_of(path: tuple[str, ...]) -> tuple[float, float]:
    """Rates that stay in the profile's allowed range with a quarter of the lanes."""
    if "tensor" in path:
        return 1e12, 1e15
    return (1e11, 1e13) if "vram_read" in path else (1e9, 1e11)


def _raise_peaks(node: Any, factor: Callable[[], float]) -> None:
    if isinstance(node, dict):
        if "datasheet" in node and "rate" in node:
            node["datasheet"]["value"] = node["rate"]["value"] * factor()
        for child in node.values():
            _raise_peaks(child, factor)


def _leaves(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Document]]:
    """Every rate and curve of a profile's document, with its path."""
    if isinstance(node, dict):
        if "spread" in node:
            yield path, node
            return
        for key, child in node.items():
            yield from _leaves(child, (*path, key))


def flattened(machine: HardwareProfile) -> HardwareProfile:
    """The same machine with kernels that are at every size as efficient as at the smallest."""
    document = msgspec.to_builtins(machine)
    for path, leaf in _leaves(document):
        if "kernels" in path and "efficiency" in leaf:
            leaf["efficiency"] = leaf["efficiency"][:1] * len(leaf["at"])
    return msgspec.convert(document, HardwareProfile)


def with_memory(machine: HardwareProfile, size_bytes: float) -> HardwareProfile:
    """The same machine with `size_bytes` of VRAM on each device and as much host memory."""
    document = msgspec.to_builtins(machine)
    document["gpu"]["vram"]["value"] = document["host"]["memory"]["value"] = size_bytes
    return msgspec.convert(document, HardwareProfile)


def with_spreads(machine: HardwareProfile, factor: float) -> HardwareProfile:
    """The same machine with every spread `factor` times as wide, at most 1."""
    document = msgspec.to_builtins(machine)
    for _, leaf in _leaves(document):
        leaf["spread"] = min(1.0, leaf["spread"] * factor)
    return msgspec.convert(document, HardwareProfile)


def rate_paths(machine: HardwareProfile) -> list[tuple[str, ...]]:
    """Paths of everything that makes a machine fast: bandwidths, operations, latencies, efficiencies."""
    leaves = _leaves(msgspec.to_builtins(machine))
    return [path for path, leaf in leaves if leaf.get("unit") != "B" and path[-1] != "datasheet"]


def slower(machine: HardwareProfile, path: tuple[str, ...], share: float) -> HardwareProfile:
    """The same machine with the rate at `path` at `share` of its speed."""
    document = msgspec.to_builtins(machine)
    leaf = dict(_leaves(document))[path]
    if "efficiency" in leaf:
        leaf["efficiency"] = [each * share for each in leaf["efficiency"]]
    elif "counts" in leaf:
        leaf["counts"] = [each / share for each in leaf["counts"]]
    else:
        leaf["value"] *= 1 / share if leaf["unit"] == "s" else share
    return msgspec.convert(document, HardwareProfile)


def numbers_in(node: Any, path: str = "$") -> Iterator[tuple[str, float]]:
    """Every number of a JSON document, with its path."""
    if isinstance(node, dict):
        for key, child in node.items():
            yield from numbers_in(child, f"{path}.{key}")
    elif isinstance(node, list):
        for index, child in enumerate(node):
            yield from numbers_in(child, f"{path}[{index}]")
    elif isinstance(node, int | float) and not isinstance(node, bool):
        yield path, node
