"""What a hostile user hands to `twin`: words, and files that they name. Drawn from a seed, so that it comes again."""

import copy
import gzip
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import click

import cli
from hwprofiles.store import RECORDS, shipped_document
from twin.cli.options import Name, Stream, _names
from twin.models import model_names
from twin.models.store import DATA as MODELS

ENVIRONMENTS: tuple[dict[str, str], ...] = (
    {"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}, {"PYTHONUNBUFFERED": "1"}, {"COLUMNS": "1"},
    {"COLUMNS": "x", "TERM": "dumb"}, {"_TWIN_COMPLETE": "zsh_source"}, {"_TWIN_COMPLETE": "bash_complete"},
    {"_TWIN_COMPLETE": "bash_complete", "COMP_WORDS": "twin predict --", "COMP_CWORD": "2"},
    {"_TWIN_COMPLETE": "\udcff_complete"}, {"HOME": "/nowhere", "TMPDIR": "/nowhere"},
)  # fmt: skip

JUNK = (
    "", " ", "0", "-1", "-0", "1", "2", "7", "1e999", "-1e999", "nan", "inf", "-inf", "1_000", "9" * 400, "9" * 5000,
    "0." + "0" * 400 + "1", "1." + "9" * 5000, "0x10", "1e-300", "1e300", "5e-324", "\u0663", "\udcff", "日本", "..",
    "/", "-", "--", "a" * 300, "1.5", "1M", "1.5M", "256k", "32KiB", "1GiB", "0.5GB", "2147483647", "2147483648",
    "True", "[]", "{}", "%s%n", "\n", "\x1b[31m", "x4", "mtp:3", "mtp:0", "mtp:" + "9" * 5000, "dflash2:15", "mtp", ":",
    "fp8,int8", ",", "0.93", "1.0", "99999999999999999999",
)  # fmt: skip

NUMBERS: tuple[Any, ...] = (
    0, 1, -1, 2, 3, 7, 2**31 - 1, 2**31, 2**53, 2**63, 2**64, 10**30, 10**400, -(10**400), 0.0, -0.0, 0.5, 1.5, 1e-300,
    5e-324, 1e-12, 1e12, 1e18, 1e300, 1.7976931348623157e308, True, False, None, "1", [], {}, [1], "",
)  # fmt: skip

LITERALS = (
    "1e999", "-1e999", "NaN", "Infinity", "9" * 5000, "-" + "9" * 5000, "0." + "9" * 5000, "[" * 100_000, "01", "+1",
)  # fmt: skip
"""Numbers that no JSON writer writes."""

PAIRS = (
    ("qwen3.8-flash-next", "3x-rtx3090"),
    ("qwen3.8-27b", "rtx3090"),
    ("qwen3.8-27b-fast", "rtx3090"),
    ("llama-3.1-8b", "h200"),
)
"""Models and machines that go together."""

FACTORS = (0.5, 2.0, 0.3, 3.0, 0.1, 10.0, 0.01, 100.0, 1e-3, 1e3, 1e-6, 1e6)
FAR = (1e-9, 1e9, 1e-12, 1e12, 1e-20, 1e20, 1e-100, 1e100, 1e-200, 1e-300, 1e-320)

MARK = "a place for a literal"

LISTS = ("profiles", "models", "formats", "layouts", "validate", "completion")
LIGHT = (*("predict", "compare", "simulate") * 6, *LISTS)
HEAVY = ("quality", "calibrate")
"""Never let through to their work, which takes minutes."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call: words, and the files that lie in its folder."""

    words: tuple[str, ...]
    files: dict[str, bytes] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    """Only where the call is a process of its own."""


def command_case(seed: str) -> Case:
    """A command with options of its own and a few of others; values plausible or not."""
    draw = random.Random(seed)  # noqa: S311
    name = draw.choice(LIGHT + HEAVY)
    junk = draw.choice((0.0, 0.1, 0.2, 0.6))
    command = cli.twin.commands[name]
    words = [] if draw.random() < 0.02 else [name]
    for parameter in draw.sample(command.params, draw.randint(0, min(6, len(command.params)))):
        words += _given(parameter, junk, draw)
    if draw.random() < 0.1:
        words.insert(draw.randint(0, len(words)), draw.choice(JUNK))
    if draw.random() < 0.05:
        for parameter in cli.twin.commands[draw.choice(sorted(cli.twin.commands))].params[:1]:
            words += _given(parameter, junk, draw)
    return Case(
        words=(*words, *_bounds(name, words)),
        files={"model.json": _text(_document("model", draw, draw.choice(model_names())))},
        environment=draw.choice(ENVIRONMENTS) if draw.random() < 0.1 else {},
    )


def file_case(seed: str) -> Case:
    """A question that is fine, about a file that is not."""
    draw = random.Random(seed)  # noqa: S311
    kind = draw.choice(("profile", "profile", "model", "model", "trace", "measurements"))
    if kind == "measurements":
        return _measured(draw)
    name = "trace.jsonl" if kind == "trace" else f"{kind}.json"
    model, machine = draw.choice(PAIRS)
    factors = draw.choice((FACTORS, FAR, None))
    if kind == "trace":
        content = _trace(draw)
    else:
        document = _document(kind, draw, model if kind == "model" else machine)
        content = _mutated(document, draw) if factors is None else _text(_shifted(document, factors, draw))
    if factors is None and draw.random() < 0.3:
        content = draw.choice(_SPOILT)(content, draw)
    words = _about(kind, f"./{name}", (model, machine), plain=factors is not None, draw=draw)
    return Case(words=tuple(words), files={name: content})


def _given(parameter: click.Parameter, junk: float, draw: random.Random) -> list[str]:
    """An option with a value, or an argument."""
    option = [draw.choice(parameter.opts)] if isinstance(parameter, click.Option) else []
    if isinstance(parameter, click.Option) and parameter.is_flag:
        return option
    value = _plausible(parameter, draw) if draw.random() >= junk else draw.choice(JUNK)
    if option and option[0].startswith("--") and draw.random() < 0.3:
        return [f"{option[0]}={value}"]
    return [*option, value]


def _plausible(parameter: click.Parameter, draw: random.Random) -> str:
    kind = parameter.type
    if isinstance(kind, click.Choice):
        return str(draw.choice(kind.choices))
    if isinstance(kind, Name):
        return draw.choice([*_names(kind.name), "./model.json"])
    if isinstance(kind, Stream | click.Path):
        places = ["out", "other", "nowhere/out", "-", "/dev/null", "/dev/full", ".", "model.json", "/dev/stderr"]
        return draw.choice(places)
    of_kind: dict[str, list[Any]] = {
        "float": [0.1, 0.5, 0.9, 1.0, 2.5, 10.0, draw.random()],
        "integer": [1, 2, 3, 8, 64, draw.randint(1, 5000)],
        "size": ["1KiB", "32MiB", "1GiB", "8GB", "100GiB"],
        "tokens": ["1", "77", "4k", "100k", "1M", draw.randint(1, 10**6)],
    }
    others = ["mtp:3", "dflash2:15", "summarize", "fp8", "int4_per_token_head,fp8", "cpu"]
    return str(draw.choice(of_kind.get(kind.name, others)))


def _bounds(name: str, words: list[str]) -> list[str]:
    """What keeps a call that is let through from working for minutes."""
    if name == "simulate":
        return ["--requests", "5"]
    if name in HEAVY or any(word.startswith("--device") for word in words):
        return ["--device", "nothing"]
    return []


def _measured(draw: random.Random) -> Case:
    """A machine of one's own and what was recorded of it."""
    measurements = json.loads((RECORDS / "h200" / "measurements.json").read_text(encoding="utf-8"))
    measurements["rows"] = draw.sample(measurements["rows"], 3)
    factors = draw.choice((FACTORS, FAR, None))
    content = _mutated(measurements, draw) if factors is None else _text(_shifted(measurements, factors, draw))
    files = {"me.json": _text(shipped_document("h200")), "me.measurements.json": content}
    return Case(words=("validate", "--hw", "./me.json", *_json(draw)), files=files)


def _about(kind: str, path: str, pair: tuple[str, str], *, plain: bool, draw: random.Random) -> list[str]:
    model, machine = pair
    if kind == "trace":
        drawn = ["--rate", "1", "--chars-per-token", draw.choice(["0", "3.5", "nan"])] if draw.random() < 0.2 else []
        return ["simulate", "--model", "llama-3.1-8b", "--hw", "h200", "--trace-in", path, *drawn, *_json(draw)]
    if draw.random() < 0.15:
        return [f"{kind}s", path, *_json(draw)]
    command = draw.choice(("predict", "predict", "compare", "simulate"))
    words = [command, "--hw", path if kind == "profile" else machine, "--model", path if kind == "model" else model]
    if command == "simulate":
        words += ["--requests", "3", *(["--rate", "1"] if draw.random() < 0.5 else [])]
    else:
        words += ["--ctx", draw.choice(["1", "77", "4k", "100k", "1M"])]
    if command == "predict":
        words += draw.choice([[], ["--explain"], ["--trace", "trace.out"], ["--batch", "64"]])
    if plain:
        return words + _json(draw)
    if draw.random() < 0.3:
        words += ["--engine", draw.choice(["exllamav3", "vllm", "twin"])]
    if draw.random() < 0.3:
        words += ["--kv-dtype", draw.choice(_names("format")), "--what-if"]
    if draw.random() < 0.15:
        words += ["--spec", draw.choice(["mtp:3", "dflash2:15"]), "--accept", "2"]
    return words + _json(draw)


def _json(draw: random.Random) -> list[str]:
    return ["--json"] if draw.random() < 0.4 else []


def _document(kind: str, draw: random.Random, name: str) -> Any:
    """A shipped one, with what it extends laid under it."""
    document = _shipped(kind, name)
    if "extends" in document and draw.random() < 0.5:
        document = _shipped(kind, document["extends"]) | {k: v for k, v in document.items() if k != "extends"}
    return document


def _shipped(kind: str, name: str) -> Any:
    if kind == "profile":
        return shipped_document(name)
    return json.loads((MODELS / f"{name}.json").read_text(encoding="utf-8"))


def _text(document: Any) -> bytes:
    return json.dumps(document).encode()


def _mutated(document: Any, draw: random.Random) -> bytes:
    """One to three changes; a number is more often made another than no number, so that many pass the first check."""
    document = copy.deepcopy(document)
    literal = None
    for _ in range(draw.choice((1, 1, 2, 3))):
        if not (places := _places(document)):
            break
        holder, key = draw.choice(places)
        value = holder[key]
        chance = draw.random()
        if isinstance(value, int | float) and not isinstance(value, bool) and chance < 0.5:
            holder[key] = _scaled(value, draw.choice(FACTORS))
        elif chance < 0.6:
            holder[key] = draw.choice(NUMBERS)
        elif chance < 0.7:
            del holder[key]
        elif chance < 0.75 and isinstance(holder, dict):
            holder[draw.choice(JUNK)] = value
        elif chance < 0.8 and isinstance(value, list):
            holder[key] = value * 3 if draw.random() < 0.5 else value[:1]
        elif chance < 0.9:
            holder[key] = draw.choice(JUNK).encode("utf-8", "ignore").decode()
        else:
            holder[key], literal = MARK, draw.choice(LITERALS)
    text = json.dumps(document, ensure_ascii=draw.random() < 0.5, allow_nan=True)
    if literal is not None:
        text = text.replace(f'"{MARK}"', literal)
    return text.encode("utf-8", "surrogateescape")


def _shifted(document: Any, factors: tuple[float, ...], draw: random.Random) -> Any:
    """Some numbers by some orders of magnitude, and as they must be: whole where they were whole."""
    document = copy.deepcopy(document)
    for _ in range(draw.choice((1, 1, 2, 3, 8))):
        numbers = [(holder, key) for holder, key in _places(document) if type(holder[key]) in (int, float)]
        if not numbers:
            break
        holder, key = draw.choice(numbers)
        holder[key] = _scaled(holder[key], draw.choice(factors))
    return document


def _scaled(value: float, factor: float) -> Any:
    changed = max(-(10**200), min(value, 10**200)) * factor
    return max(1, int(changed)) if isinstance(value, int) else changed


def _places(document: Any) -> list[tuple[Any, Any]]:
    """Holders with each of their keys or indices, at any depth."""
    found: list[tuple[Any, Any]] = []
    waiting = [document]
    while waiting:
        holder = waiting.pop()
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        found += [(holder, key) for key in keys]
        waiting += [holder[key] for key in keys if isinstance(holder[key], dict | list)]
    return found


_HEADERS = (
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    ("Timestamp", "Request tokens", "Response tokens"),
    ("arrival_timestamp", "prompt_size", "token_size"),
    ("arrived_at", "num_prefill_tokens", "num_decode_tokens"),
)
_CELLS = ("", "0", "-1", "1e999", "nan", "2024-05-10", "2024-05-10 00:00:01+00:00", '"', '"\n', "1,1", "9" * 5000)


def _table(draw: random.Random) -> bytes:
    """CSV of a few rows, in one of three a cell of another kind."""
    rows = [[str(at), str(draw.randint(1, 3000)), str(draw.randint(1, 50))] for at in range(draw.randint(0, 6))]
    for row in rows:
        if draw.random() < 0.3:
            row[draw.randrange(3)] = draw.choice(_CELLS)
    return "\n".join(map(",".join, (draw.choice(_HEADERS), *rows))).encode()


def _prompts(draw: random.Random) -> bytes:
    """Conversations, a batch or prompts, mutated in one of three."""
    talk = [{"from": "human", "value": "Who are you?"}, {"from": "gpt", "value": "A model."}]
    body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 5}
    one: dict[str, Any] = draw.choice(
        ({"conversations": talk}, {"custom_id": "a", "body": body}, {"prompt": "What?", "output_tokens": 3})
    )
    members = [_text(one) if draw.random() < 0.7 else _mutated(one, draw) for _ in range(draw.randint(1, 4))]
    return b"[" + b",\n".join(members) + b"]" if draw.random() < 0.5 else b"\n".join(members)


def _trace(draw: random.Random) -> bytes:
    if draw.random() < 0.5:
        return draw.choice((_table, _prompts))(draw)
    lines, arrival_s = [], 0.0
    for number in range(draw.randint(1, 6)):
        prompt = draw.randint(1, 3000)
        line: dict[str, Any] = {
            draw.choice(("arrival_s", "timestamp")) if draw.random() < 0.1 else "arrival_s": arrival_s,
            "prompt_tokens": prompt,
            "output_tokens": draw.randint(1, 50),
            "id": f"r{number}",
        }
        if draw.random() < 0.3:
            line |= {"prefix_id": "p", "prefix_tokens": draw.randint(1, prompt)}
        lines.append(_text(line) if draw.random() < 0.6 else _mutated(line, draw))
        arrival_s += draw.random()
    return b"\n".join(lines) + draw.choice((b"", b"\n", b"\r\n", b"\n\n"))


def _struck(content: bytes, draw: random.Random) -> bytes:
    """With one byte changed."""
    if not content:
        return content
    at = draw.randrange(len(content))
    return content[:at] + bytes([draw.randrange(256)]) + content[at + 1 :]


_SPOILT: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    lambda content, draw: content[: draw.randint(0, len(content))],
    _struck,
    lambda content, _: b"\xef\xbb\xbf" + content,
    lambda content, _: content.decode("utf-8", "replace").encode("utf-16"),
    lambda content, _: gzip.compress(content),
    lambda content, draw: gzip.compress(content)[: draw.randint(0, 60)],
    lambda content, draw: b'{"a":' * draw.choice((10, 100_000)) + content,
    lambda content, _: content.replace(b"{", b'{"name": "x", "name": "y", ', 1),
    lambda _, draw: bytes(draw.randrange(256) for _ in range(draw.randint(0, 300))),
    lambda content, _: content + content,
)
