"""A computer as it is now, without torch: its cards and their links, its memory, and the profile that fits it."""

import os
import platform
import resource
from collections.abc import Sequence
from typing import Any

from msgspec import Struct, to_builtins

from calibrate.machine.description import cpu_name, host_memory, huge_pages, output_of
from hwprofiles import HardwareProfile, load_profile, profile_names
from hwprofiles.links import LANES, share_of
from twin.render.text import row
from twin.units import MIB, format_bytes

SCHEMA = "twin.machine/1"

_FIELDS = (
    "name", "memory.total", "memory.free", "driver_version", "power.limit",
    "pcie.link.gen.current", "pcie.link.gen.max", "pcie.link.width.current", "pcie.link.width.max",
)  # fmt: skip
SAME_MEMORY = 0.1
"""A card has the profile's memory within this share: drivers show more than programs get, and cards of one name differ
by a third or more."""
FREE_SHARE = 0.98  # of a card's memory: what is less is taken by others
SAME_RAM = 0.02


class Card(Struct, frozen=True, kw_only=True):
    """One GPU as nvidia-smi tells it; numbers are None where it does not know them."""

    name: str
    memory_bytes: int | None
    free_bytes: int | None
    driver: str
    power_limit_w: float | None
    generation: int | None  # of the link now: an idle card may have lowered it
    best_generation: int | None  # that card and slot can have together
    lanes: int | None
    best_lanes: int | None


class Here(Struct, frozen=True, kw_only=True):
    """What was found, and the shipped profile that a question would take."""

    cards: tuple[Card, ...]
    cpu: str
    cpu_count: int
    host_bytes: int
    host_free_bytes: int
    huge_pages: str
    memlock_bytes: int | None  # None: no limit
    profile: str | None
    options: tuple[str, ...]  # what the profile does not know of this computer, as a question's options


def here() -> Here:
    """Look. Nothing is changed, and what cannot be read is left out."""
    cards, (total, free) = read_cards(), host_memory()
    cpu, limit = chip_name(), resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    profile = profile_of(cards, cpu)
    return Here(
        cards=cards,
        cpu=cpu,
        cpu_count=os.cpu_count() or 1,
        host_bytes=total,
        host_free_bytes=free,
        huge_pages=huge_pages(),
        memlock_bytes=None if limit == resource.RLIM_INFINITY else limit,
        profile=profile.name if profile else None,
        options=tuple(_options(profile, cards, total)) if profile else (),
    )


def chip_name() -> str:
    """The processor; on a Mac the chip, whose GPU is in it."""
    chip = output_of("sysctl", "-n", "machdep.cpu.brand_string") if platform.system() == "Darwin" else ""
    return chip or cpu_name()


def read_cards() -> tuple[Card, ...]:
    """All GPUs that nvidia-smi knows; none where it is missing, fails, or says something else."""
    told = output_of("nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits")
    lines = [[value.strip() for value in line.split(",")] for line in told.splitlines()]
    return tuple(_card(dict(zip(_FIELDS, line, strict=True))) for line in lines if len(line) == len(_FIELDS))


def _card(told: dict[str, str]) -> Card:
    def number(field: str, unit: int = 1) -> int | None:
        return int(told[field]) * unit if told[field].isdigit() else None

    power = told["power.limit"]
    return Card(
        name=told["name"],
        memory_bytes=number("memory.total", MIB),
        free_bytes=number("memory.free", MIB),
        driver=told["driver_version"],
        power_limit_w=float(power) if power.replace(".", "", 1).isdigit() else None,
        generation=number("pcie.link.gen.current"),
        best_generation=number("pcie.link.gen.max"),
        lanes=number("pcie.link.width.current"),
        best_lanes=number("pcie.link.width.max"),
    )


def profile_of(cards: Sequence[Card], cpu: str) -> HardwareProfile | None:
    """The shipped machine with this device, as often as it is here; without a card that of the processor."""
    shipped = [profile for profile in map(load_profile, profile_names()) if profile.gpu_count == 1]
    if not cards:
        return next((profile for profile in shipped if profile.gpu.name == cpu), None)
    card = cards[0]
    one = next((each for each in shipped if each.gpu.name == card.name and _same_memory(each, card)), None)
    count = sum(each.name == card.name for each in cards)
    return one if one is None or count == 1 or one.gpu.shares_memory else load_profile(f"{count}x-{one.name}")


def _same_memory(profile: HardwareProfile, card: Card) -> bool:
    """Also where the driver does not tell it, as on a superchip of one memory."""
    vram = profile.gpu.vram.value
    return card.memory_bytes is None or abs(card.memory_bytes - vram) <= SAME_MEMORY * vram


def _options(profile: HardwareProfile, cards: Sequence[Card], host_bytes: int) -> list[str]:
    """What of the profile is otherwise here, by the card that is worst off."""
    gpu, options = profile.gpu, []
    if abs(host_bytes - profile.host.memory.value) > SAME_RAM * profile.host.memory.value:
        options.append(f"--ram {host_bytes // MIB}MiB")
    alike = [] if gpu.shares_memory else [card for card in cards if card.name == gpu.name]
    links = [link for card in alike if (link := _narrower(profile, card)) is not None]
    if links:
        options.append(f"--pcie {min(links)[1]}")
    free = [card.free_bytes for card in alike if card.free_bytes is not None]
    if free and min(free) < FREE_SHARE * gpu.vram.value:
        options.append(f"--vram-free {min(free) // MIB}MiB")
    return options


def _narrower(profile: HardwareProfile, card: Card) -> tuple[float, str] | None:
    """(share of the profile's link, the card's link as an option) where it is less; None where it is not, or not known.

    By the best generation of card and slot, since an idle card lowers it, and the lanes that it has.
    """
    generation, lanes, gpu = card.best_generation, card.lanes, profile.gpu
    if generation is None or lanes not in LANES:
        return None
    try:
        share = share_of(gpu.link, gpu.h2d.datasheet.value, lanes=lanes, generation=generation)
    except (ValueError, KeyError):  # a faster link than the profile's, or one of a generation to come
        return None
    return (share, f"gen{generation}x{lanes}") if share < 1 else None


def here_json(found: Here) -> dict[str, Any]:
    """The document of `twin machine --json`."""
    return {"schema": SCHEMA, **to_builtins(found)}


def here_text(found: Here) -> str:
    """A line for each thing found, and the question to ask next."""
    lines = [row("gpu" if at == 0 else "", text) for at, text in enumerate(_card_text(card) for card in found.cards)]
    if not found.cards:
        lines = [row("gpu", "none that nvidia-smi tells of")]
    limit = "no limit" if found.memlock_bytes is None else format_bytes(found.memlock_bytes)
    lines += [
        row("cpu", f"{found.cpu}, {found.cpu_count} logical cores"),
        row("host RAM", f"{format_bytes(found.host_bytes)}, {format_bytes(found.host_free_bytes)} of it free"),
        row("huge pages", found.huge_pages or "none"),
        row("may lock", f"{limit} of memory: what an offloaded cache registers counts"),
    ]
    if found.profile is None:
        lines.append(row("profile", "none is shipped of it: twin calibrate -o my-machine.json measures one"))
    else:
        command = " ".join(("twin predict --hw", found.profile, *found.options))
        lines += [row("profile", found.profile), row("ask", command)]
    return "\n".join(lines) + "\n"


def _card_text(card: Card) -> str:
    memory = "memory not told" if card.memory_bytes is None else format_bytes(card.memory_bytes)
    free = "" if card.free_bytes is None else f", {format_bytes(card.free_bytes)} of it free"
    now = _link_text(card.generation, card.lanes)
    best = _link_text(card.best_generation, card.best_lanes)
    link = f"{now} now" + (f", {best} at best" if best != now else "")
    power = "" if card.power_limit_w is None else f", {card.power_limit_w:g} W"
    return f"{card.name}, {memory}{free}, {link}{power}, driver {card.driver}"


def _link_text(generation: int | None, lanes: int | None) -> str:
    return "link not told" if generation is None or lanes is None else f"PCIe {generation}.0 x{lanes}"
