"""Where answers go: files that are whole or untouched, full disks, closed pipes and interruptions."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.cli.command import (
    ANSWERED,
    CANNOT_WRITE,
    CHILD,
    CLOSED_PIPE,
    DOES_NOT_FIT,
    FULL_DISK,
    INTERRUPTED,
    WRONG_INPUT,
    assert_one_line,
    child,
    run,
)
from twin import prediction

Capture = pytest.CaptureFixture[str]

NEEDS_STREAMS = pytest.mark.skipif(not Path("/dev/stdout").exists(), reason="no /dev/stdout here")
NEEDS_FULL_DISK = pytest.mark.skipif(not FULL_DISK.exists(), reason="no /dev/full here")
OLD = "what was there before\n"


@pytest.mark.parametrize("command", ["predict", "predict --json", "compare", "compare --json"])
def test_a_file_holds_what_standard_output_would(capsys: Capture, tmp_path: Path, command: str) -> None:
    shown = run(capsys, *command.split())
    path = tmp_path / "answer"
    done = run(capsys, *command.split(), "-o", str(path))
    assert (done.code, done.out, done.err) == (0, "", "")
    assert path.read_text(encoding="utf-8") == shown.out


def test_a_written_file_keeps_its_mode_and_leaves_nothing_beside_it(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "answer"
    path.write_text(OLD, encoding="utf-8")
    path.chmod(0o640)
    assert run(capsys, "predict", "-o", str(path)).code == 0
    assert path.stat().st_mode & 0o777 == 0o640
    assert path.read_text(encoding="utf-8") != OLD
    assert os.listdir(tmp_path) == ["answer"]


def test_a_new_file_has_the_mode_that_the_user_asks_of_all_files(capsys: Capture, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        assert run(capsys, "predict", "-o", str(tmp_path / "answer")).code == 0
    finally:
        os.umask(before)
    assert (tmp_path / "answer").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("option", ["-o", "--trace"])
def test_a_missing_folder_is_one_line(capsys: Capture, tmp_path: Path, option: str) -> None:
    path = tmp_path / "nowhere" / "answer"
    done = run(capsys, "predict", option, str(path))
    assert_one_line(done, CANNOT_WRITE, f"cannot write {path}: No such file or directory")


@pytest.mark.parametrize("option", ["-o", "--trace"])
def test_a_directory_is_no_place_for_an_answer(capsys: Capture, tmp_path: Path, option: str) -> None:
    assert_one_line(run(capsys, "predict", option, str(tmp_path)), WRONG_INPUT, "is a directory")


@pytest.mark.parametrize("option", ["-o", "--trace"])
@pytest.mark.parametrize("fails", ["os.fsync", "Path.replace", "Path.chmod"])
def test_a_full_disk_leaves_the_old_file_and_nothing_beside_it(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fails: str, option: str
) -> None:
    def full(*_: Any, **__: Any) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "answer"
    path.write_text(OLD, encoding="utf-8")
    owner, name = fails.split(".")
    monkeypatch.setattr({"os": os, "Path": Path}[owner], name, full)
    done = run(capsys, "predict", option, str(path))
    monkeypatch.undo()
    assert_one_line(done, CANNOT_WRITE, f"cannot write {path}: No space left on device")
    assert path.read_text(encoding="utf-8") == OLD
    assert os.listdir(tmp_path) == ["answer"]


def test_an_output_that_fails_in_json_is_a_document(capsys: Capture, tmp_path: Path) -> None:
    done = run(capsys, "predict", "--json", "-o", str(tmp_path / "nowhere" / "answer"))
    assert (done.code, done.err) == (CANNOT_WRITE, "")
    assert json.loads(done.out)["error"]["type"] == "CannotWrite"


@NEEDS_FULL_DISK
@pytest.mark.parametrize("command", ["predict", "predict --json", "compare", "--help", "profiles"])
def test_a_full_standard_output_is_one_line(command: str) -> None:
    with FULL_DISK.open("w", encoding="utf-8") as full:
        done = child(*command.split(), stdout=full)
    assert_one_line(done, CANNOT_WRITE, "cannot write standard output: No space left on device")


@NEEDS_FULL_DISK
def test_a_refusal_in_json_that_cannot_be_written_is_one_line() -> None:
    with FULL_DISK.open("w", encoding="utf-8") as full:
        done = child("predict", "--ctx", "0", "--json", stdout=full)
    assert_one_line(done, CANNOT_WRITE, "cannot write standard output: No space left on device")


@NEEDS_FULL_DISK
@pytest.mark.parametrize("command", ["predict --ctx 0", "--nonsense"])
def test_a_full_standard_error_leaves_the_exit_code_alone(command: str) -> None:
    with FULL_DISK.open("w", encoding="utf-8") as full:
        assert child(*command.split(), stderr=full).code == WRONG_INPUT


@pytest.mark.parametrize("command", ["predict", "predict --json", "--help", "--version", "predict --ctx 0 --json", ""])
def test_a_closed_pipe_is_141_and_silent(command: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = child(*command.split(), stdout=writer)
    os.close(writer)
    assert (done.code, done.err) == (CLOSED_PIPE, "")


def closed(command: str, redirection: str) -> subprocess.CompletedProcess[str]:
    """`twin` begun by a shell that closes one of its streams."""
    shell = ["sh", "-c", f'exec "$@" {redirection}', "sh", *CHILD, *command.split()]
    return subprocess.run(shell, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("command", ["predict", "predict --json", "predict --ctx 0 --json", "--help"])
def test_a_standard_output_that_was_closed_is_one_line(command: str) -> None:
    done = closed(command, ">&-")
    assert done.returncode == CANNOT_WRITE
    assert done.stderr == "twin: cannot write standard output: Bad file descriptor\n"


def test_an_answer_in_a_file_needs_no_standard_output(tmp_path: Path) -> None:
    done = closed(f"predict -o {tmp_path / 'answer'}", ">&-")
    assert (done.returncode, done.stderr) == (ANSWERED, "")
    assert "tok/s" in (tmp_path / "answer").read_text(encoding="utf-8")


def test_a_standard_error_that_was_closed_leaves_the_exit_code_alone() -> None:
    assert closed("predict --ctx 0", "2>&-").returncode == WRONG_INPUT


def test_an_answer_may_go_to_a_device(capsys: Capture) -> None:
    done = run(capsys, "predict", "-o", os.devnull)
    assert (done.code, done.out, done.err) == (ANSWERED, "", "")
    assert not Path(os.devnull).is_file()


@NEEDS_STREAMS
@pytest.mark.parametrize("command", ["predict", "compare --json", "simulate --requests 2"])
def test_a_dash_is_standard_output(command: str) -> None:
    done = subprocess.run([*CHILD, *command.split(), "-o", "-"], capture_output=True, text=True, check=True)
    assert done.stdout == child(*command.split()).out
    assert not Path("-").exists()


@NEEDS_STREAMS
def test_an_answer_to_a_standard_output_that_nobody_reads_is_a_closed_pipe() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = child("predict", "-o", "/dev/stdout", stdout=writer)
    os.close(writer)
    assert (done.code, done.err) == (CLOSED_PIPE, "")


def test_two_answers_do_not_go_to_one_file(capsys: Capture, tmp_path: Path) -> None:
    path, link = tmp_path / "answer", tmp_path / "link"
    link.symlink_to(path)
    path.write_text(OLD, encoding="utf-8")
    done = run(capsys, "predict", "--trace", str(link), "-o", str(path))
    assert_one_line(done, WRONG_INPUT, f"--trace and -o name one file: {path}")
    assert path.read_text(encoding="utf-8") == OLD


@NEEDS_STREAMS
def test_an_answer_to_dev_stdout_follows_what_is_written_there_already(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("w", encoding="utf-8") as log:
        log.write(OLD)
        log.flush()
        assert child("predict", "-o", "/dev/stdout", stdout=log).code == ANSWERED
        log.write("more\n")
    text = path.read_text(encoding="utf-8")
    assert text.startswith(OLD)
    assert "tok/s" in text
    assert os.listdir(tmp_path) == ["log"]
    assert child("predict", "-o", "/dev/stdout").out == child("predict").out


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
import sys

class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == "click":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupted())
import cli
"""


def test_an_interruption_while_the_command_still_loads_is_one_line() -> None:
    arguments = [sys.executable, "-c", INTERRUPTED_IMPORT]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert (done.returncode, done.stdout, done.stderr) == (INTERRUPTED, "", "twin: interrupted\n")


def test_an_interruption_in_json_is_a_document(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(prediction, "predict", interrupted)
    done = run(capsys, "predict", "--json")
    assert json.loads(done.out)["error"]["type"] == "Interrupted"
    assert (done.code, done.err) == (INTERRUPTED, "")


def test_an_interruption_is_one_word(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(prediction, "predict", interrupted)
    done = run(capsys, "predict")
    assert (done.code, done.out, done.err) == (INTERRUPTED, "", "twin: interrupted\n")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with a name here")
def test_an_interrupted_process_leaves_with_130_and_no_file(tmp_path: Path) -> None:
    """The process reads its profile from a pipe that nobody writes to: it surely waits when the signal comes."""
    profile, answer = tmp_path / "profile.json", tmp_path / "answer"
    os.mkfifo(profile)
    arguments = [*CHILD, "predict", "--hw", str(profile), "-o", str(answer)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as waiting:
        writer = opened_once_read(profile, waiting)
        waiting.send_signal(signal.SIGINT)
        out, err = waiting.communicate(timeout=20)
        os.close(writer)
    assert (waiting.returncode, out, err) == (INTERRUPTED, "", "twin: interrupted\n")
    assert os.listdir(tmp_path) == ["profile.json"]


def opened_once_read(path: Path, reader: subprocess.Popen[str]) -> int:
    """The writing end of a named pipe, as soon as `reader` has opened the other."""
    for _ in range(2000):
        try:
            return os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            assert reader.poll() is None
            time.sleep(0.01)
    raise TimeoutError(path)
