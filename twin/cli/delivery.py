"""How a command ends: its answer or its refusal reaches the reader, and the exit code says which."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from twin.cli import stopping
from twin.cli.outputs import LostOutput, standard_streams, write_atomic
from twin.errors import EXIT_BAD_INPUT, EXIT_CLOSED_PIPE, EXIT_INTERRUPTED, EXIT_TERMINATED, BadValue, TwinError

EXIT_CODES = """\b
Exit codes:
  0    answered
  2    wrong input: an unknown name, a number out of range, a broken file
  3    answered: it does not fit
  4    answered: a validation case is outside its tolerance
  5    an output could not be written; an existing file is intact
  130  interrupted     141  the reader closed the pipe     143  terminated
"""

COMPLETE = "_TWIN_COMPLETE"
LONGEST_LINE = 1200  # characters of a message, and of a hint


def end(command: click.Command, given: Sequence[str]) -> int:
    """Run `command` on the words `given`, deliver what comes of it and return a documented exit code.

    Only a bug leaves as an exception. The command is invoked directly: click's own `main` would answer a closed pipe
    and an interruption itself before they could be told apart.
    """
    with standard_streams():
        before: dict[int, Any] = {}
        try:
            before = stopping.handle_with(stopping.stop)
            code = _ended(command, given)
            stopping.handle_with(stopping.leave)
        except KeyboardInterrupt as late:  # while one refusal was being written, or just after
            _, word, _, code = _described(late)
            _complain(word)
        finally:
            stopping.discard(*stopping.unfinished)
            stopping.restore(before)
    return code


def _ended(command: click.Command, given: Sequence[str]) -> int:
    try:
        try:
            code = _invoke(command, given)
        except (BrokenPipeError, LostOutput):
            raise
        except (TwinError, click.ClickException, click.Abort, KeyboardInterrupt, OSError) as stopped:
            stopping.handle_with(stopping.leave)
            code = _refuse(given, stopped)
        sys.stdout.flush()
    except BrokenPipeError:
        return EXIT_CLOSED_PIPE
    except LostOutput as lost:
        _complain(lost.message)
        return lost.exit_code
    return code


def _invoke(command: click.Command, given: Sequence[str]) -> int:
    if os.environ.get(COMPLETE):
        return _complete(command, os.environ[COMPLETE])
    try:
        with command.make_context("twin", list(given)) as context:
            return command.invoke(context) or 0
    except click.exceptions.Exit as shown:  # help or the version
        return shown.exit_code


def _complete(command: click.Command, instruction: str) -> int:
    """What a shell asks for while words are typed, or the script that makes it ask."""
    from click.shell_completion import get_completion_class, shell_complete  # noqa: PLC0415

    shell, _, what = instruction.partition("_")
    if get_completion_class(shell) is None or what not in {"source", "complete"}:
        raise BadValue(f"{COMPLETE} is {instruction!r}", hint="twin completion bash|zsh|fish shows how it is used")
    try:
        return shell_complete(command, {}, "twin", COMPLETE, instruction)
    except TwinError:
        raise
    except (LookupError, ValueError) as wrong:
        raise BadValue(f"{COMPLETE} is {instruction!r} without COMP_WORDS and COMP_CWORD: {wrong!r}") from None


def dump(document: Any) -> str:
    """JSON text; NaN or infinity is a bug and raises ValueError, half characters become question marks."""
    text = json.dumps(document, indent=2, allow_nan=False)
    if "\\ud" in text:
        whole = json.dumps(document, ensure_ascii=False).encode("utf-8", "replace")
        text = json.dumps(json.loads(whole), indent=2)
    return text + "\n"


def deliver(text: str, output: Path | None) -> None:
    """To the file, or flushed to standard output: once a part is there, a signal ends the process at once."""
    if output is not None:
        write_atomic(output, text)
        return
    stopping.handle_with(stopping.leave)
    sys.stdout.write(text)
    sys.stdout.flush()


def _refuse(given: Sequence[str], stopped: BaseException) -> int:
    """One line on standard error, or the JSON error on standard output where JSON was asked for."""
    kind, message, hint, code = _described(stopped)
    message, hint = _in_one_line(message), _in_one_line(hint)
    if "--json" in given:
        deliver(dump({"error": {"type": kind, "message": message, "hint": hint}}), None)
    else:
        _complain(f"{message}{f' ({hint})' if hint else ''}")
    return code


def _in_one_line(text: str) -> str:
    """Without line breaks, and without the middle of what nobody would read to its end."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE // 2]} ... {line[-LONGEST_LINE // 4 :]}"


def _described(stopped: BaseException) -> tuple[str, str, str, int]:
    """Kind, message, hint and exit code of what ended a command early."""
    kind = type(stopped).__name__
    if isinstance(stopped, TwinError):
        return kind, stopped.message, stopped.hint, stopped.exit_code
    if isinstance(stopped, click.UsageError):
        return "UsageError", stopped.format_message(), "twin --help", EXIT_BAD_INPUT
    if isinstance(stopped, click.ClickException):
        return kind, stopped.format_message(), "", EXIT_BAD_INPUT
    if isinstance(stopped, OSError):  # from the system; whoever writes an output says CannotWrite
        where = f"{stopped.filename}: " if stopped.filename else ""
        return kind, f"{where}{stopped.strerror or stopped}", "", EXIT_BAD_INPUT
    if isinstance(stopped, stopping.Terminated):
        return kind, "terminated", "", EXIT_TERMINATED
    return "Interrupted", "interrupted", "", EXIT_INTERRUPTED


def _complain(message: str) -> None:
    """A line on standard error."""
    sys.stderr.write(f"twin: {message}\n")
    sys.stderr.flush()
