"""Ask every question again, keep the new answers and print what moved. See `tests/golden/questions.py`.

Run as `python -m tests.golden.regenerate`. With `--check` nothing is written, and the exit code is 1 if anything moved.
The table is what a change quotes in the changelog under Predictions.
"""

import argparse
import sys

from tests.golden.answers import answer, nobodys_home
from tests.golden.moves import compared, report, settled
from tests.golden.questions import questions
from tests.golden.store import Answers, path_of, read, write

MOST = 60
"""Rows of the table unless more are asked for."""


def asked_again(name: str) -> Answers:
    """Today's answers to the questions of a file."""
    with nobodys_home():
        return {" ".join(words): answer(words) for words in questions()[name]}


def main() -> int:
    """The exit code: 1 where something moved and was only to be checked."""
    parser = argparse.ArgumentParser(description="Ask the golden questions again and keep the new answers.")
    parser.add_argument("--check", action="store_true", help="only print what moved; exit code 1 if anything did")
    parser.add_argument("--most", type=int, default=MOST, metavar="N", help="rows of the table [default: %(default)s]")
    given = parser.parse_args()
    old = {name: read(name) for name in questions()}
    new = {name: asked_again(name) for name in old}
    found = compared(_together(old), _together(new))
    if not given.check:
        _keep(old, new)
    print(report(found, most=given.most))
    return int(given.check and bool(found))


def _keep(old: dict[str, Answers], new: dict[str, Answers]) -> None:
    for name, answers in new.items():
        if compared(old[name], answers):
            write(name, settled(old[name], answers))
            print(f"written: {path_of(name).name}", file=sys.stderr)


def _together(files: dict[str, Answers]) -> Answers:
    return {question: told for answers in files.values() for question, told in answers.items()}


if __name__ == "__main__":
    sys.exit(main())
