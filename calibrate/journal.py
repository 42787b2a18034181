"""What a calibration has finished so far, kept beside its output: a kill loses no more than the probe that ran."""

import json
import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from calibrate.machine.description import Machine
from calibrate.probes import ProbeRecord
from hwprofiles.files import read_whole
from twin.cli.outputs import write_atomic

SCHEMA = "twin.calibration.journal/1"


class _Stored(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema: str
    key: dict[str, Any]
    machine: Machine
    date: str
    probes: dict[str, ProbeRecord]


@dataclass(kw_only=True)
class Journal:
    """Finished probes of one calibration, tied to what they were measured with by `key`."""

    path: Path
    key: dict[str, Any]
    """What must be equal for it to be continued."""
    machine: Machine
    """As it was before the first probe."""
    date: str
    probes: dict[str, ProbeRecord] = field(default_factory=dict)
    ignored: str = ""
    """Why a journal that was found is not continued."""

    def save(self) -> None:
        """Write beside, sync, rename. Raises CannotWrite, and the last good journal stays."""
        stored = _Stored(schema=SCHEMA, key=self.key, machine=self.machine, date=self.date, probes=self.probes)
        write_atomic(self.path, json.dumps(msgspec.to_builtins(stored), indent=1) + "\n")
        _sync_folder(self.path.parent)

    def add(self, name: str, record: ProbeRecord) -> None:
        """Keep a finished probe."""
        self.probes[name] = record
        self.save()

    def set_aside(self) -> Path:
        """Keep it under another name, where no calibration looks for it; the name."""
        aside = self.path.with_name(f"{self.path.name}.old")
        self.path.replace(aside)
        return aside


def journal_path(output: Path) -> Path:
    """Where the journal of `output` lies."""
    return output.with_name(f"{output.name}.partial.json")


def open_journal(output: Path, machine: Machine, *, quick: bool, date: str) -> Journal:
    """The journal beside `output`, continued if it is of the same machine, software and mode; otherwise a new one.

    One that cannot be continued is moved aside and the reason is kept in `ignored`.
    """
    path = journal_path(output)
    key = {"mode": "quick" if quick else "full", **machine.identity()}
    fresh = Journal(path=path, key=key, machine=machine, date=date)
    if not path.exists():
        return fresh
    stored, why = _read(path, fresh.key)
    if stored is not None:
        return Journal(path=path, key=fresh.key, machine=stored.machine, date=stored.date, probes=dict(stored.probes))
    aside = fresh.set_aside()
    fresh.ignored = f"the unfinished calibration {path} is not continued: {why}; it now lies at {aside.name}"
    return fresh


def _read(path: Path, key: dict[str, Any]) -> tuple[_Stored | None, str]:
    try:
        stored = msgspec.json.decode(read_whole(path), type=_Stored)
    except (OSError, msgspec.MsgspecError, ValueError) as wrong:
        return None, f"it cannot be read ({str(wrong).splitlines()[0]})"
    if stored.schema != SCHEMA:
        return None, f"its schema is {stored.schema}, not {SCHEMA}"
    for name, value in key.items():
        if stored.key.get(name) != value:
            return None, f"its {name} is {_words(stored.key.get(name))}, here it is {_words(value)}"
    return stored, ""


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items())
    return str(value or "unknown")


def _sync_folder(folder: Path) -> None:
    """A rename survives a power cut only once its folder is on disk; file systems without that refuse the open."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
