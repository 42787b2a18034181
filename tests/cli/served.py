"""Asking `twin simulate`: a model and a machine that are quick to serve, lines of a trace."""

import json
from typing import Any

import pytest

from tests.cli.command import ANSWERED, run

Capture = pytest.CaptureFixture[str]

FAST = ("--model", "llama-3.1-8b", "--hw", "h200")
"""A model and a machine on which a request takes little time to simulate."""
SMALL = (*FAST, "--requests", "20", "--prompt", "300", "--output", "30")
OLD = "what was there before\n"


def asked(capsys: Capture, *arguments: str, code: int = ANSWERED) -> Any:
    done = run(capsys, "simulate", *arguments, "--json")
    assert (done.code, done.err) == (code, "")
    return json.loads(done.out, parse_constant=lambda word: pytest.fail(f"{word} in JSON"))


def line(**changed: Any) -> str:
    """A line of a trace; a field set to ... is left out."""
    fields = {"arrival_s": 1.0, "prompt_tokens": 100, "output_tokens": 20, "id": "b"} | changed
    return json.dumps({name: value for name, value in fields.items() if value is not ...}) + "\n"


GOOD = line(arrival_s=0.0, id="a")
