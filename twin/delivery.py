"""How a command ends: its answer or its refusal reaches the reader, and the exit code says which."""

import errno
import io
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import click

from twin.errors import EXIT_BAD_INPUT, EXIT_CANNOT_WRITE, EXIT_CLOSED_PIPE, EXIT_INTERRUPTED, TwinError

EXIT_CODES = """\b
Exit codes:
  0    answered
  2    wrong input: an unknown name, a number out of range, a broken file
  3    answered: it does not fit
  4    answered: a validation case is outside its tolerance
  5    an output could not be written; an existing file is intact
  130  interrupted     141  the reader closed the pipe
"""


class _Closed(io.StringIO):
    """Stands for a standard output that was closed before the process began."""

    def write(self, _: str, /) -> int:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))


def end(command: click.Command, given: Sequence[str]) -> int:
    """Run `command` on the words `given`, deliver what comes of it and return a documented exit code.

    Only a bug leaves as an exception. The command is invoked directly: click's own `main` would answer a closed pipe
    and an interruption itself before they could be told apart.
    """
    if sys.stdout is None:
        sys.stdout = _Closed()
    try:
        try:
            code = _invoke(command, given)
        except (TwinError, click.ClickException, click.Abort, KeyboardInterrupt) as stopped:
            code = _refuse(given, stopped)
        sys.stdout.flush()
    except BrokenPipeError:
        code = EXIT_CLOSED_PIPE
    except OSError as wrong:
        code = EXIT_CANNOT_WRITE
        _complain(f"cannot write standard output: {wrong.strerror}")
    else:
        return code
    _abandon(sys.stdout)
    return code


def _invoke(command: click.Command, given: Sequence[str]) -> int:
    shell = os.environ.get("_TWIN_COMPLETE")
    if shell:
        from click.shell_completion import shell_complete  # noqa: PLC0415

        return shell_complete(command, {}, "twin", "_TWIN_COMPLETE", shell)
    try:
        with command.make_context("twin", list(given)) as context:
            return command.invoke(context) or 0
    except click.exceptions.Exit as shown:  # help or the version
        return shown.exit_code


def dump(document: dict[str, Any]) -> str:
    """JSON text; a NaN or infinity in an answer is a bug and raises ValueError."""
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def deliver(text: str, output: Path | None) -> None:
    """To the file if one is named, otherwise to standard output, flushed so that a full disk is noticed here."""
    if output is not None:
        from twin.render.output import write_atomic  # noqa: PLC0415

        write_atomic(output, text)
        return
    sys.stdout.write(text)
    sys.stdout.flush()


def _refuse(given: Sequence[str], stopped: BaseException) -> int:
    """One line on standard error, or the JSON error on standard output where JSON was asked for."""
    kind, message, hint, code = _described(stopped)
    message, hint = " ".join(message.split()), " ".join(hint.split())
    if "--json" in given:
        from twin.render.as_json import error_json  # noqa: PLC0415

        deliver(dump(error_json(kind, message, hint)), None)
    else:
        _complain(f"{message}{f' ({hint})' if hint else ''}")
    return code


def _described(stopped: BaseException) -> tuple[str, str, str, int]:
    """Kind, message, hint and exit code of what ended a command early."""
    kind = type(stopped).__name__
    if isinstance(stopped, TwinError):
        return kind, stopped.message, stopped.hint, stopped.exit_code
    if isinstance(stopped, click.UsageError):
        return "UsageError", stopped.format_message(), "twin --help", EXIT_BAD_INPUT
    if isinstance(stopped, click.ClickException):
        return kind, stopped.format_message(), "", EXIT_BAD_INPUT
    return "Interrupted", "interrupted", "", EXIT_INTERRUPTED


def _complain(message: str) -> None:
    """A line on standard error; where that cannot be written either, the exit code alone has to say it."""
    try:
        click.echo(f"twin: {message}", err=True)
    except OSError:
        _abandon(sys.stderr)


def _abandon(stream: TextIO) -> None:
    """Let what is still buffered go nowhere: the interpreter would try to write it once more as it leaves."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
