"""Where answers go: files that are whole or untouched, full disks, closed pipes and interruptions."""

import errno
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest

from calibrate import records, session
from calibrate.quality import measure as quality
from tests.cli import command as commands
from tests.cli.command import ANSWERED, CHILD, DOES_NOT_FIT, INTERRUPTED, WRONG_INPUT, assert_one_line, child, run
from twin import prediction
from twin.answers import comparison
from twin.cli import workloads

Capture = pytest.CaptureFixture[str]

NEEDS_STREAMS = pytest.mark.skipif(not Path("/dev/stdout").exists(), reason="no /dev/stdout here")
NEEDS_FULL_DISK = pytest.mark.skipif(not commands.FULL_DISK.exists(), reason="no /dev/full here")
OLD = "what was there before\n"


@pytest.mark.parametrize("command", ["predict", "predict --json", "compare", "compare --json"])
def test_a_file_holds_what_standard_output_would_and_has_the_mode_of_all_files(
    capsys: Capture, tmp_path: Path, command: str
) -> None:
    shown, path, before = run(capsys, *command.split()), tmp_path / "answer", os.umask(0o027)
    try:
        done = run(capsys, *command.split(), "-o", str(path))
    finally:
        os.umask(before)
    assert (done.code, done.out, done.err) == (0, "", "")
    assert path.read_text(encoding="utf-8") == shown.out
    assert path.stat().st_mode & 0o777 == 0o640


UNBUFFERED = pytest.mark.parametrize("unbuffered", ["", "1"])
"""Python then writes to streams without a buffer that would repeat what was taken in part."""

PRINTING = ("predict", "compare", "--help", "--version", "profiles", "completion fish", "validate --json")


@NEEDS_FULL_DISK
@UNBUFFERED
@pytest.mark.parametrize("command", [*PRINTING, "predict --ctx 0 --json"])
def test_a_full_standard_output_is_one_line(command: str, unbuffered: str) -> None:
    with commands.FULL_DISK.open("w", encoding="utf-8") as full:
        done = child(*command.split(), stdout=full, env=os.environ | {"PYTHONUNBUFFERED": unbuffered})
    assert_one_line(done, commands.CANNOT_WRITE, "cannot write standard output: No space left on device")


@UNBUFFERED
def test_a_standard_output_that_takes_a_part_is_one_line(tmp_path: Path, unbuffered: str) -> None:
    """A disk that is full after the first 4 KiB."""
    limited = ("bash", "-c", 'ulimit -f 4; exec "$@" > "$0"', str(tmp_path / "answer"))
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    command = [*limited, *CHILD, "profiles", "h200", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        commands.CANNOT_WRITE,
        "twin: cannot write standard output: File too large\n",
    )


SERVED = "simulate --model llama-3.1-8b --hw h200 --requests 20"
OF_CLOSED_PIPES = ("predict", "predict --json", "--help", "predict --ctx 0 --json", "", SERVED)


@pytest.mark.parametrize("command", [*OF_CLOSED_PIPES, f"{SERVED} --requests-out /dev/stdout -o {os.devnull}"])
def test_a_closed_pipe_is_141_and_silent(command: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = child(*command.split(), stdout=writer)
    os.close(writer)
    assert (done.code, done.err) == (commands.CLOSED_PIPE, "")


NO_OUTPUT = "twin: cannot write standard output: Bad file descriptor\n"


@pytest.mark.parametrize(
    ("command", "redirection", "code", "err"),
    [
        *(
            (command, ">&-", commands.CANNOT_WRITE, NO_OUTPUT)
            for command in ("predict", "predict --ctx 0 --json", "--help")
        ),
        (f"predict -o {os.devnull}", ">&-", ANSWERED, ""),
        ("predict --ctx 0", "2>&-", WRONG_INPUT, ""),
        *((command, "2>&-", ANSWERED, "") for command in ("simulate --requests 2", "predict", "profiles")),
    ],
)
def test_a_closed_stream_is_one_line_or_not_needed(command: str, redirection: str, code: int, err: str) -> None:
    shell = ["sh", "-c", f'exec "$@" {redirection}', "sh", *CHILD, *command.split()]
    done = subprocess.run(shell, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, err)
    assert done.stdout == (child(*command.split()).out if redirection == "2>&-" else "")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_what_the_terminal_s_characters_cannot_show_is_spelled_out(tmp_path: Path, encoding: str) -> None:
    profile, broken = tmp_path / "mine.json", tmp_path / os.fsdecode(b"bro\xffken.json")
    profile.write_text(json.dumps({"extends": "3x-rtx3090", "name": "Größe 日本"}), encoding="utf-8")
    broken.write_text("{", encoding="utf-8")
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    done = child("predict", "--hw", str(profile), env=environment, encoding=encoding)
    assert (done.code, done.err) == (ANSWERED, "")
    assert "Größe 日本".encode(encoding, "backslashreplace").decode(encoding) in done.out
    assert_one_line(
        child("predict", "--hw", str(broken), env=environment, encoding=encoding), WRONG_INPUT, "bro\\udcffken"
    )
    done = child("predict", "--json", "--hw", str(broken), env=environment, encoding=encoding)
    assert "bro?ken.json: not valid JSON" in json.loads(done.out)["error"]["message"]


@NEEDS_STREAMS
@pytest.mark.parametrize("place", ["-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "/dev/stderr"])
@pytest.mark.parametrize("command", ["predict --trace", "simulate --trace", "simulate --requests-out"])
def test_two_documents_never_share_a_stream(command: str, place: str) -> None:
    """Refused before any work: what a program reads would be neither of them. Here both streams are one."""
    done = child(*command.split(), place, stderr=subprocess.STDOUT)
    assert (done.code, done.out.count("\n")) == (WRONG_INPUT, 1)
    assert f"{command.split()[1]} and the answer would share standard output" in done.out


@NEEDS_STREAMS
def test_one_document_may_have_the_stream_for_itself_and_follows_what_is_written_there_already(tmp_path: Path) -> None:
    path, answer = tmp_path / "log", tmp_path / "answer"
    done = child("predict", "--trace", "-", "-o", str(answer))
    assert (done.code, done.err) == (ANSWERED, "")
    assert json.loads(done.out)["traceEvents"]
    assert child("predict", "--trace", "-", "-o", "-").code == WRONG_INPUT
    assert child("predict", "--trace", "-", stdout=subprocess.DEVNULL).code == ANSWERED
    with path.open("w", encoding="utf-8") as log:
        log.write(OLD)
        log.flush()
        for place in ("/dev/stdout", "-"):
            assert child("predict", "-o", place, stdout=log).code == ANSWERED
    told = answer.read_text(encoding="utf-8")
    assert path.read_text(encoding="utf-8") == OLD + told * 2
    assert sorted(os.listdir(tmp_path)) == ["answer", "log"]
    assert not Path("-").exists()
    assert child("predict", "-o", "/dev/stdout").out == child("predict").out == told


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("predict", "-o"), ("predict", "--trace"), ("compare", "-o"), ("validate", "-o"), ("quality", "-o"),
        ("simulate", "-o"), ("simulate", "--trace"), ("simulate", "--requests-out"), ("calibrate --device cpu", "-o"),
    ],
)  # fmt: skip
def test_where_nothing_can_be_written_no_work_begins(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str, option: str
) -> None:
    def begun(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("work has begun")

    for module, work in (
        (prediction, "predict"), (comparison, "compare_all"), (workloads, "serve_asked"),
        (records, "validate_records"), (quality, "measure_quality"), (session, "describe"),
    ):  # fmt: skip
        monkeypatch.setattr(module, work, begun)
    place = tmp_path / "nowhere" / "file"
    done = run(capsys, *command.split(), option, str(place))
    assert_one_line(done, commands.CANNOT_WRITE, f"cannot write {place}: No such file or directory")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "says"),
    [(".", "a folder"), ("a" * 300, "File name too long"), ("circle", "Too many levels of symbolic links"),
     ("file/below", "Not a directory"), ("nothing", "No such file or directory")],
)  # fmt: skip
@pytest.mark.parametrize("command", ["simulate --trace-in", "predict --hw", "predict --model", "quality --tensors"])
def test_what_cannot_be_read_is_a_wrong_input(
    capsys: Capture, tmp_path: Path, command: str, name: str, says: str
) -> None:
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    (tmp_path / "file").write_text(OLD, encoding="utf-8")
    path = tmp_path / name
    told = "Is a directory" if (command, name) == ("quality --tensors", ".") else says
    assert_one_line(run(capsys, *command.split(), f"{path}"), WRONG_INPUT, f"{path}: ", told)


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (
            PermissionError(errno.EACCES, "Permission denied", "/some/file"),
            WRONG_INPUT,
            "/some/file: Permission denied",
        ),
        (KeyboardInterrupt(), INTERRUPTED, "interrupted"),
    ],
)
def test_what_the_system_refuses_to_read_is_no_failure_to_write_and_an_interruption_is_told(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, says: str
) -> None:
    def failing(*_: Any) -> NoReturn:
        raise error

    monkeypatch.setattr(prediction, "predict", failing)
    assert_one_line(run(capsys, "predict"), code, f"twin: {says}\n")
    done = run(capsys, "predict", "--json")
    assert (done.code, done.err, json.loads(done.out)["error"]["message"]) == (code, "", says)


@pytest.mark.parametrize(
    ("shell", "words", "word", "says"),
    [
        ("bogus", None, None, "_TWIN_COMPLETE is 'bogus'"),
        ("bash", None, None, "_TWIN_COMPLETE is 'bash'"),
        ("fish_complete", None, None, "without COMP_WORDS and COMP_CWORD"),
        ("zsh_complete", "twin ", None, "without COMP_WORDS and COMP_CWORD"),
        ("bash_complete", "twin ", "x", "without COMP_WORDS"),
    ],
)
def test_a_shell_that_asks_wrongly_is_told_in_one_line(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, shell: str, *, words: str | None, word: str | None, says: str
) -> None:
    for name, value in (("_TWIN_COMPLETE", shell), ("COMP_WORDS", words), ("COMP_CWORD", word)):
        if value is not None:
            monkeypatch.setenv(name, value)
    assert_one_line(run(capsys, "predict"), WRONG_INPUT, says)


def test_a_signal_while_nobody_reads_the_answer_is_heeded_at_once() -> None:
    """And nothing follows the part that was taken: a refusal in JSON behind half an answer would be neither."""
    reader, writer = os.pipe()
    asked = ("profiles", "h200", "--json")
    with subprocess.Popen([*CHILD, *asked], stdout=writer, stderr=subprocess.PIPE, text=True) as stuck:
        os.close(writer)
        select.select([reader], [], [], 20)
        time.sleep(0.2)  # its answer is longer than a pipe holds
        stuck.send_signal(signal.SIGINT)
        _, err = stuck.communicate(timeout=20)
    with os.fdopen(reader, encoding="utf-8") as taken:
        part = taken.read()
    assert (stuck.returncode, err) == (INTERRUPTED, "twin: interrupted\n")
    assert part
    assert child(*asked).out.startswith(part)


def test_a_trace_of_what_does_not_fit_leaves_with_its_answer_and_says_so(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(OLD, encoding="utf-8")
    plain = run(capsys, "predict", "--layout", "vram")
    done = run(capsys, "predict", "--layout", "vram", "--trace", str(path))
    assert (done.code, done.out) == (DOES_NOT_FIT, plain.out)
    assert done.err.startswith("nothing was traced: ")
    assert done.err.count("\n") == 1
    assert path.read_text(encoding="utf-8") == OLD


INTERRUPTED_IMPORT = """
class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[2]:
            os.kill(os.getpid(), int(sys.argv[1]))

sys.meta_path.insert(0, Interrupted())
import cli
cli.main(["predict"])
"""
INTERRUPTED_EXIT = """
import atexit
import cli
number, sys.argv[1:] = int(sys.argv[1]), ["profiles"]

def ended(*given, end=cli.end):
    code = end(*given)
    atexit.register(lambda: os.kill(os.getpid(), number))
    return code

cli.end = ended
cli.main()
"""

SIGNALS = [(signal.SIGINT, INTERRUPTED, "interrupted"), (signal.SIGTERM, commands.TERMINATED, "terminated")]


@pytest.mark.parametrize(("number", "code", "word"), SIGNALS)
@pytest.mark.parametrize("module", ["click", "twin.cli.delivery", "twin.prediction", "simpy", ""])
def test_a_signal_while_the_command_still_loads_or_python_leaves_is_one_line(
    module: str, number: int, code: int, word: str
) -> None:
    program = f"import os, sys\n{INTERRUPTED_IMPORT if module else INTERRUPTED_EXIT}"
    arguments = [sys.executable, "-c", program, str(int(number)), module]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert (done.returncode, done.stderr) == (code, f"twin: {word}\n")
    assert done.stdout == ("" if module else child("profiles").out)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with a name here")
@pytest.mark.parametrize(("number", "code", "word"), SIGNALS)
def test_a_process_that_is_stopped_leaves_old_files_and_no_new_one(
    tmp_path: Path, number: int, code: int, word: str
) -> None:
    """The process reads its requests from a pipe that nobody writes to: it surely waits when the signal comes."""
    requests, old = tmp_path / "requests", tmp_path / "old"
    os.mkfifo(requests)
    old.write_text(OLD, encoding="utf-8")
    files = ("--requests-out", str(old), "--trace", str(tmp_path / "trace"), "-o", str(tmp_path / "answer"))
    arguments = [*CHILD, "simulate", "--trace-in", str(requests), *files]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as waiting:
        writer = opened_once_read(requests, waiting)
        assert len(os.listdir(tmp_path)) == 4  # both are begun beside their places
        waiting.send_signal(number)
        out, err = waiting.communicate(timeout=20)
        os.close(writer)
    assert (waiting.returncode, out, err) == (code, "", f"twin: {word}\n")
    assert sorted(os.listdir(tmp_path)) == ["old", "requests"]
    assert old.read_text(encoding="utf-8") == OLD


def opened_once_read(path: Path, reader: subprocess.Popen[str]) -> int:
    """The writing end of a named pipe, as soon as `reader` has opened the other."""
    for _ in range(2000):
        try:
            return os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            assert reader.poll() is None
            time.sleep(0.01)
    raise TimeoutError(path)
