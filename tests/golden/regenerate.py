"""Ask every question again, keep the new answers and print what moved. See `tests/golden/questions.py`.

Run as `python -m tests.golden.regenerate`. With `--check` nothing is written, and the exit code is 1 if anything moved.
The table is what a change quotes in the changelog under Predictions.
"""

import argparse
import sys

from tests.golden.answers import Answers, answer, nobodys_home, read, write
from tests.golden.moves import compared, report, settled
from tests.golden.questions import questions

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
    before: Answers = {}
    after: Answers = {}
    for name in questions():
        old, new = read(name), asked_again(name)
        before, after = before | old, after | new
        if not given.check and compared(old, new):
            write(name, settled(old, new))
            print(f"written: {name}.json", file=sys.stderr)
    found = compared(before, after)
    print(report(found, most=given.most))
    return int(given.check and bool(found))


if __name__ == "__main__":
    sys.exit(main())
