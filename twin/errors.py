"""Everything that a question can be refused for.

TwinError                    one line for the user, an optional hint, an exit code
├── BadValue (ValueError)    a number or word outside its range                            exit 2
├── UnknownName (KeyError)   a model, machine, layout, engine or format that is not there  exit 2
│   └── NotShipped           a card that exists, but whose profile is not here              exit 2
├── BadFile (ValueError)     a data file that does not say what it must                    exit 2
├── Impossible (ValueError)  each part is fine, the combination is not                     exit 2
├── MissingRate (KeyError)   the machine's profile lacks a rate that the question needs    exit 2
└── CannotWrite (OSError)    an output that could not be written; the old file is intact   exit 5
    └── LostOutput           the same of standard output (twin/cli/outputs.py)

That a cache does not fit is an answer, not an error: the prediction says so and the command exits with 3.
"""

from hwprofiles.errors import EXIT_BAD_INPUT, BadFile, NotShipped, TwinError, UnknownName, find

__all__ = ["EXIT_BAD_INPUT", "BadFile", "NotShipped", "TwinError", "UnknownName", "find"]  # what is passed on

EXIT_DOES_NOT_FIT = 3
EXIT_OUTSIDE_TOLERANCE = 4
EXIT_CANNOT_WRITE = 5
EXIT_INTERRUPTED = 130
EXIT_CLOSED_PIPE = 141
EXIT_TERMINATED = 143


class BadValue(TwinError, ValueError):
    """A number or word outside its range."""


class Impossible(TwinError, ValueError):
    """Parts that exist but do not go together."""


class MissingRate(TwinError, KeyError):
    """A rate that the question needs and the profile lacks; nothing is made up in its place."""


class CannotWrite(TwinError, OSError):
    """An output file that could not be written; what was there before is intact."""

    exit_code = EXIT_CANNOT_WRITE
