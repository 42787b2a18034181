"""Where bytes go: streams that take every byte or say why not, and files that are whole or as they were.

A full disk, a pipe that is full for now and a closed stream are all noticed. A file is written beside the old one, then
renamed over it; what is no file is written to. What a process is writing beside is locked while it lives. The next that
writes the same file removes what is there and locked by nobody: a process that was killed cannot do it, and its number
may long be another's.
"""

import contextlib
import io
import os
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from twin.cli import stopping
from twin.errors import BadValue, CannotWrite, TwinError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

UNFINISHED = ".twin-unfinished"  # how the names of files end that wait to take another's place
LONGEST_NAME = 200  # bytes of a target's name that the name beside it repeats; file systems end names at 255


class LostOutput(CannotWrite):
    """Standard output took less than what was written to it."""


class Whole(io.FileIO):
    """A raw stream that takes all that it is given; the buffer above repeats what was taken in part.

    Where a pipe that does not block is full, it waits. What the system refuses becomes `refusal`, which names `what`
    was being written; BrokenPipeError stays. Then it takes no more: the buffer would try again as it is closed.
    """

    lost = False

    def __init__(
        self, handle: int, what: object, *, refusal: type[CannotWrite] = CannotWrite, shut: bool = True
    ) -> None:
        super().__init__(handle, "wb", closefd=shut)
        self.what = what
        self.refusal = refusal

    def write(self, data: "ReadableBuffer", /) -> int:
        """Bytes taken, at least one."""
        if self.lost:
            return memoryview(data).nbytes
        try:
            while (taken := super().write(data)) is None:
                import select  # noqa: PLC0415

                select.select([], [self], [])
        except OSError as wrong:
            self.lost = True
            if isinstance(wrong, BrokenPipeError):
                raise
            raise self.refusal(f"cannot write {self.what}: {wrong.strerror}") from None
        return taken


class _Remarks(Whole):
    """Standard error. Where a remark cannot be written the exit code alone has to say it."""

    def write(self, data: "ReadableBuffer", /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def text_into(raw: io.RawIOBase, *, encoding: str = "utf-8", line_buffering: bool = False) -> TextIO:
    """Text into a raw stream; what its encoding does not know is spelled out (\\udcff), for names are any bytes."""
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding=encoding, errors="backslashreplace", line_buffering=line_buffering
    )


@contextlib.contextmanager
def standard_streams() -> Iterator[None]:
    """Put such streams in the place of Python's own standard output and error, for as long as a command runs."""
    _plug()
    before = sys.stdout, sys.stderr
    if sys.stdout is sys.__stdout__:
        sys.stdout = _standing_for(sys.stdout, Whole(1, "standard output", refusal=LostOutput, shut=False))
    if sys.stderr is sys.__stderr__:
        sys.stderr = _standing_for(sys.stderr, _Remarks(2, "standard error", shut=False))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _standing_for(stream: TextIO | None, raw: io.RawIOBase) -> TextIO:
    if stream is None:  # closed before the process began
        return text_into(raw)
    at_once = raw.fileno() == 2 or stream.isatty()
    return text_into(raw, encoding=stream.encoding, line_buffering=at_once)


def _plug() -> None:
    """Take the numbers of closed streams, so that no file gets them: using them fails as on a closed stream."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            if number == 0:
                os.open(os.devnull, os.O_WRONLY)
            else:
                os.close(os.pipe()[1])


@contextlib.contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar with the time left on standard error: update(done, total, what). Nothing where nobody looks."""
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn  # noqa: PLC0415

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    if not console.is_terminal:  # an empty line would be all that is left
        yield lambda *_: None
        return
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title)
        yield lambda done, total, what: progress.update(
            task, completed=done, total=total, description=f"{title} {what}"
        )


def write_atomic(path: Path, text: str) -> None:
    """Put `text` into `path`, or raise CannotWrite and leave the old file as it was; a link stays a link."""
    with open_atomic(path) as out:
        out.write(text)


@contextlib.contextmanager
def open_atomic(path: Path) -> Iterator[TextIO]:
    """A file that takes the place of `path` once the block has ended well; else CannotWrite or BrokenPipeError."""
    with _named(path):
        there = _status(path)
    with _replacing(path, there) if there is None or _is_file(there) else _writing_into(path, there) as out:
        yield out


Paths = Mapping[str, Path | None]  # by option


def check_outputs(answer: Path | None, *, beside: Paths | None = None, read: Paths | None = None) -> None:
    """Raise before any work where what it yields could not be written, or two documents would go to one place.

    The answer goes to standard output where it names no file; the other documents, by their options, are `beside` it,
    and what is `read` is not to be written over. CannotWrite or BadValue; nothing is created or changed.
    """
    for named in (*(beside or {}).values(), answer):
        if named is not None:
            check_writable(named)
    places = [(flag, path, _place(path)) for flag, path in (beside or {}).items() if path is not None]
    places += [(flag, path, _place(path, read=True)) for flag, path in (read or {}).items() if path is not None]
    flags: dict[object, str] = {}
    for flag, path, place in (*places, ("-o" if answer else "the answer", answer, _place(answer))):
        if place is not None and place in flags:
            together = f"name one file: {path}" if path else "would share standard output"
            raise BadValue(f"{flags[place]} and {flag} {together}", hint="each needs a place of its own")
        flags[place] = flag


def check_writable(path: Path) -> None:
    """Raise CannotWrite where `path` could not be written now; it is neither created nor changed."""
    with _named(path):
        there = _status(path)
        if there is None or _is_file(there):
            handle, made = _beside(Path(os.path.realpath(path)))
            os.close(handle)
            stopping.discard(made)
        elif stat.S_ISDIR(there.st_mode):
            raise CannotWrite(f"cannot write {path}: it is a folder")
        elif _stream_on(there) is None and not os.access(path, os.W_OK):
            raise CannotWrite(f"cannot write {path}: Permission denied")


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """What the system refuses becomes CannotWrite, with the name."""
    try:
        yield
    except OSError as wrong:
        if isinstance(wrong, TwinError | BrokenPipeError):
            raise
        raise CannotWrite(f"cannot write {path}: {wrong.strerror}") from None


def _place(path: Path | None, *, read: bool = False) -> object:
    """What tells one place from another; None where documents can share it, or where reading and writing do not meet.

    A stream is the same place under all its names. What goes to the null device goes nowhere.
    """
    try:
        there = os.fstat(1) if path is None else path.stat()
    except OSError:
        return None if path is None else os.path.realpath(path)
    if os.path.samestat(there, os.stat(os.devnull)):
        return None
    if read and not (stat.S_ISREG(there.st_mode) or stat.S_ISFIFO(there.st_mode)):
        return None
    return there.st_dev, there.st_ino


def _is_file(there: os.stat_result) -> bool:
    return stat.S_ISREG(there.st_mode) and _stream_on(there) is None


@contextlib.contextmanager
def _replacing(path: Path, there: os.stat_result | None) -> Iterator[TextIO]:
    umask = os.umask(0)
    os.umask(umask)
    mode = 0o666 & ~umask if there is None else there.st_mode & 0o777
    with _named(path):
        target = Path(os.path.realpath(path))
        _sweep(target)
        handle, beside = _beside(target)
    try:
        with text_into(Whole(handle, path)) as out:
            yield out
            with _named(path):
                out.flush()
                os.fsync(handle)
                Path(beside).chmod(mode)
                Path(beside).replace(target)  # before it is closed: until then it is locked
    finally:
        stopping.discard(beside)


def _beside(path: Path) -> tuple[int, str]:
    """A new file beside `path`, locked: its handle and its name."""
    while True:
        beside = str(path.parent / f"{_start(path)}{os.urandom(6).hex()}{UNFINISHED}")
        stopping.unfinished.add(beside)  # first: a signal may come between any two lines
        try:
            handle = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError:
            stopping.unfinished.discard(beside)
            raise
        _lock(handle, wait=True)
        if os.fstat(handle).st_nlink:
            return handle, beside
        os.close(handle)  # swept away before it was locked
        stopping.unfinished.discard(beside)


def _start(path: Path) -> str:
    name = os.fsencode(path.name)
    return f".{path.name if len(name) <= LONGEST_NAME else os.fsdecode(name[: LONGEST_NAME // 2])}."


def _sweep(path: Path) -> None:
    """Remove what processes that live no more have left beside `path`."""
    with contextlib.suppress(OSError), os.scandir(path.parent) as entries:
        for entry in entries:
            left = entry.name.startswith(_start(path)) and entry.name.endswith(UNFINISHED)
            if left and entry.is_file(follow_symlinks=False):
                _remove_unlocked(entry.path)


def _remove_unlocked(beside: str) -> None:
    with contextlib.suppress(OSError):
        handle = os.open(beside, os.O_RDWR)
        try:
            if _lock(handle, wait=False):
                os.unlink(beside)
        finally:
            os.close(handle)


def _lock(handle: int, *, wait: bool) -> bool:
    """Whether the file is locked by this handle now; not where another has it, or where no locks are known."""
    try:
        import fcntl  # noqa: PLC0415

        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError):
        return False
    return True


@contextlib.contextmanager
def _writing_into(path: Path, there: os.stat_result) -> Iterator[TextIO]:
    """Into a pipe or device; a pipe that nobody reads is refused rather than waited for."""
    stream = _stream_on(there)
    with _named(path):
        if stream is None:
            handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            os.set_blocking(handle, True)
        else:
            handle = os.dup(stream)
    with text_into(Whole(handle, path)) as out:
        yield out


def _stream_on(there: os.stat_result) -> int | None:
    """The standard stream that goes there already: `/dev/stdout` may be a file that others write to as well."""
    for stream in (1, 2):
        with contextlib.suppress(OSError):
            if os.path.samestat(there, os.fstat(stream)):
                return stream
    return None


def _status(path: Path) -> os.stat_result | None:
    """What `path` or the target of its link is; None where nothing is yet."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None
