"""How a signal ends a run, from its first line to its last: one line, a documented exit code, nothing left behind.

Ctrl-C (SIGINT) and SIGTERM are one kind. While a command works they raise, so that whatever is open is closed in
order; while it only loads or leaves, and when they come a second time, they end the process on the spot. This file is
the first that is loaded and imports next to nothing: what comes before it cannot be caught.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys

TYPE_CHECKING = False  # typing's own would be an import
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any, NoReturn

ENDS = {signal.SIGINT: (130, "interrupted"), signal.SIGTERM: (143, "terminated")}  # exit code and word of each

unfinished: set[str] = set()  # files that wait to replace others: of no use once this process has gone

_code: int | None = None


class Terminated(KeyboardInterrupt):
    """SIGTERM came: what cleans up after Ctrl-C cleans up after it."""


def stop(number: int, _frame: FrameType | None = None) -> NoReturn:
    """As a handler: raise what ends the work in order. Whoever is impatient, or sends a second signal, gets `leave`."""
    handle_with(leave)
    raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


def leave(number: int, _frame: FrameType | None = None) -> NoReturn:
    """As a handler: end the process here and now, without Python's own way out."""
    discard(*unfinished)
    code, word = ENDS[signal.Signals(number)]
    try:  # noqa: SIM105 - contextlib would be an import
        os.write(2, f"twin: {word}\n".encode())
    except OSError:
        pass  # the exit code says it
    os._exit(code)


def handle_with(handler: Callable[..., Any]) -> dict[int, Any]:
    """Let `handler` answer both signals and return what answered before. One that the caller ignores stays ignored."""
    before: dict[int, Any] = {}
    for number in ENDS:
        if signal.getsignal(number) not in (signal.SIG_IGN, None):
            try:
                before[number] = signal.signal(number, handler)
            except ValueError:  # not the main thread: its signals are its own affair
                break
    return before


def restore(before: dict[int, Any]) -> None:
    """Undo `handle_with`."""
    for number, handler in before.items():
        signal.signal(number, handler)


def discard(*paths: str) -> None:
    """Remove unfinished files, as far as they are there."""
    for path in paths:
        try:  # noqa: SIM105
            os.unlink(path)
        except OSError:
            pass
        unfinished.discard(path)


def own_process() -> None:
    """Answer signals to the process's very end, for a command that has the process for itself.

    Even where what they raise would be printed and forgotten, as in a destructor; and Python does not take its modules
    apart in the end, which is deaf to signals and a tenth of a short run.
    """
    handle_with(leave)
    sys.unraisablehook = _unraisable
    atexit.register(_skip_teardown)  # what is registered first is called last


def leaving_with(code: int) -> int:
    """The exit code of what ended in order."""
    global _code  # noqa: PLW0603
    _code = code
    return code


def _skip_teardown() -> None:
    if _code is not None:
        os._exit(_code)


def _unraisable(lost: sys.UnraisableHookArgs) -> None:
    if isinstance(lost.exc_value, KeyboardInterrupt):
        leave(signal.SIGTERM if isinstance(lost.exc_value, Terminated) else signal.SIGINT)
    sys.__unraisablehook__(lost)
