"""Grading: gradcheck of a submission at every draw of its exercise.

check_file runs the submission in this process, for its author: what it prints is seen, and a
debugger works.

grade_file runs it in a process of its own (child.py), for a lecturer. That process is only ever
asked for arrays: for these weights, this input and this dy, what do forward and backward give?
gradcheck itself, with the forward that was shipped, runs here, and so do the comparison and the
verdict. A submission can print what it likes, end its process, or replace gradcheck in its own
copy of npdecoder: to be graded as solved, it has to answer with the right gradients. Where it has
them from cannot be seen: differences of its own, or a ready layer of npdecoder, are right too. What
it imports beside NumPy, Layer, Parameter and softmax is listed, for a look at it.

This is no sandbox. A submission runs with the rights of who grades it, and may read, write and
delete files or start processes. Grade what you trust, or in a container.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from npdecoder.core import Array
from npdecoder.exercises.catalogue import EXERCISES, Draw, Exercise, randomise
from npdecoder.exercises.child import decode, encode
from npdecoder.exercises.submission import (
    ERROR,
    MISSING,
    SOLVED,
    TIMEOUT,
    UNTOUCHED,
    WRONG,
    Refused,
    build,
    load,
    refusal,
    run_forward,
)
from npdecoder.gradcheck import GradcheckReport, gradcheck

TIME_LIMIT = 20.0  # seconds that a submission may take, its start included
LARGEST_FILE = 1_000_000  # bytes
LONGEST_ANSWER = 10_000_000  # bytes
LONGEST_MESSAGE = 4000  # characters
UNREADABLE = "its process gave an answer that cannot be read"
AS_SHIPPED = "the file is as it was shipped"
START = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from npdecoder.exercises.child import main; main(*sys.argv[2:])"
)


class Verdict(NamedTuple):
    """status: one of submission.STATUSES; message: why, "" if solved.

    draws: at how many draws it agreed. error: the largest relative error there.
    report: gradcheck's, of the draw that failed. imports: see child.foreign_imports.
    """

    status: str
    message: str
    draws: int = 0
    error: float = 0.0
    report: GradcheckReport | None = None
    imports: tuple[str, ...] = ()

    @property
    def failed(self) -> list[str]:
        """The tensors that failed, by name."""
        return [row.name for row in self.report.rows if not row.ok] if self.report else []

    @property
    def hints(self) -> list[str]:
        return self.report.hints if self.report else []


# makes the layer that is checked, from the shipped layer with its weights
Make = Callable[[Any, Draw], Any]


def check_file(path: str | os.PathLike[str], exercise: Exercise) -> Verdict:
    """The verdict on a submission, which runs in this process."""

    def make(shipped: Any, draw: Draw) -> Any:
        return build(submitted, draw.arguments, shipped.state_dict())

    try:
        submitted = load(path, exercise.cls)
        return _examine(exercise, make)
    except (Exception, SystemExit) as error:  # of any kind: the code is somebody else's
        refused = refusal(error, path)
        if refused is None:
            raise
        return Verdict(refused.status, refused.message)


def grade_file(
    path: str | os.PathLike[str], exercise: Exercise, time_limit: float = TIME_LIMIT
) -> Verdict:
    """The verdict on a submission, which runs in a process of its own."""
    if not os.path.lexists(path):
        return Verdict(MISSING, "there is no such file")
    if not os.path.isfile(path) or os.path.getsize(path) > LARGEST_FILE:
        return Verdict(ERROR, f"it is no file of at most {LARGEST_FILE:,} bytes")
    if is_as_shipped(path, exercise):
        return Verdict(UNTOUCHED, AS_SHIPPED)
    with _running(path, exercise.cls, time_limit) as child:
        try:
            verdict = _examine(exercise, lambda shipped, draw: _by_proxy(shipped, draw, child))
        except Refused as refused:
            verdict = Verdict(refused.status, refused.message)
        except Exception as error:  # the next submission is graded whatever this one did
            verdict = Verdict(ERROR, f"it could not be graded: {type(error).__name__}: {error}")
        return verdict._replace(
            message=verdict.message[:LONGEST_MESSAGE], imports=tuple(child.imports)
        )


def is_as_shipped(path: str | os.PathLike[str], exercise: Exercise) -> bool:
    """Whether the file holds the same lines as the shipped one, whatever they end in."""
    try:
        return Path(path).read_bytes().splitlines() == exercise.task.read_bytes().splitlines()
    except OSError:
        return False


def _examine(exercise: Exercise, make: Make) -> Verdict:
    """Compare forward with the shipped one and run gradcheck, draw by draw, up to a failure."""
    shipped_class = _shipped_class(exercise)
    largest = 0.0
    for number, (sizes, draw, rng) in enumerate(exercise.draws()):
        shipped = shipped_class(*draw.arguments)
        randomise(shipped, rng)
        y, _ = shipped.forward(*draw.inputs)
        layer = make(shipped, draw)
        compare_forward(run_forward(layer, [x.copy() for x in draw.inputs])[0], y)
        try:
            report = gradcheck(layer, *draw.inputs)
        except (ValueError, TypeError) as error:
            if _raised_in_gradcheck(error):  # how gradcheck says that the contract is broken
                return Verdict(WRONG, f"{error} (at {sizes})", number)
            raise
        if not report.ok:
            failed = [row.name for row in report.rows if not row.ok]
            are = f"s of {', '.join(failed)} are" if len(failed) > 1 else f" of {failed[0]} is"
            message = f"the gradient{are} wrong (at {sizes})"
            return Verdict(WRONG, message, number, report=report)
        largest = max(largest, report.max_relative_error)
    return Verdict(SOLVED, "", len(exercise.sizes), largest)


@functools.cache
def _shipped_class(exercise: Exercise) -> Any:
    return load(exercise.task, exercise.cls)


def compare_forward(y: Any, expected: Any) -> None:
    """Errors: Refused if y is not what the shipped forward gives."""
    try:
        same = np.shape(y) == np.shape(expected) and np.allclose(y, expected, 1e-9, 1e-12)
    except (TypeError, ValueError):
        same = False
    if not same:
        raise Refused(WRONG, "its forward was changed: it gives other numbers than the exercise's")


def _raised_in_gradcheck(error: BaseException) -> bool:
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last is not None and last.tb_frame.f_code.co_filename == gradcheck.__code__.co_filename


# A submission in a process of its own


def _by_proxy(shipped: Any, draw: Draw, child: _Child) -> Any:
    """The shipped layer, with the backward of the submission.

    It stays the layer that it is, so that gradcheck and its hints see its parameters and options.
    """
    forward = shipped.forward

    @functools.wraps(forward)  # gradcheck reads the names of its arguments
    def remembering(*inputs: Any) -> Any:
        return forward(*inputs)[0], [np.array(x) for x in inputs]

    def backward(ctx: list[Array], dy: Any) -> Any:
        parameters = dict(shipped.named_parameters())
        answer = child.ask({
            "arguments": draw.arguments,
            "inputs": [encode(x) for x in ctx],
            "values": {name: encode(p.value) for name, p in parameters.items()},
            "grads": {name: encode(p.grad) for name, p in parameters.items()},
            "dy": encode(dy),
        })  # fmt: skip
        try:
            wrote = [str(name) for name in answer["wrote"]]
            y = decode(answer["y"])
            gradients = tuple(decode(grad) for grad in answer["gradients"])
            grads = {name: decode(answer["grads"][name]) for name in parameters}
        except (TypeError, ValueError, LookupError, OverflowError):
            raise Refused(ERROR, UNREADABLE) from None
        if wrote:
            raise Refused(WRONG, f"forward or backward wrote into {', '.join(wrote)}")
        compare_forward(y, forward(*ctx)[0])
        for name, parameter in parameters.items():
            if grads[name].shape != parameter.shape:
                raise Refused(ERROR, UNREADABLE)
            parameter.grad = grads[name]
        return gradients

    shipped.forward, shipped.backward = remembering, backward
    return shipped


@contextlib.contextmanager
def _running(path: str | os.PathLike[str], cls: str, time_limit: float) -> Iterator[_Child]:
    """The process of a submission, ended whatever happens, in an empty folder of its own."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        child = _Child(path, cls, time_limit, folder)
        try:
            yield child
        finally:
            child.end()


class _Child:
    """A conversation with child.py, every answer of which is somebody else's word."""

    def __init__(
        self, path: str | os.PathLike[str], cls: str, time_limit: float, folder: str
    ) -> None:
        self.left, self.time_limit = time_limit, time_limit
        self.imports: list[str] = []
        self._ready = False
        package = str(Path(__file__).resolve().parents[2])
        self._process = subprocess.Popen(
            [sys.executable, "-c", START, package, os.path.abspath(path), cls],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=os.name == "posix",  # so that what it starts can be ended with it
        )
        self._requests: queue.Queue[bytes | None] = queue.Queue()
        self._answers: queue.Queue[bytes] = queue.Queue()
        # reading and writing may take for ever, so another thread does both
        self._thread = threading.Thread(target=self._talk, daemon=True)
        self._thread.start()

    def _talk(self) -> None:
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None
        assert answers is not None
        while (request := self._requests.get()) is not None:
            try:
                requests.write(request)
                requests.flush()
                self._answers.put(answers.readline(LONGEST_ANSWER))
            except (OSError, ValueError):  # it has ended, or was ended
                self._answers.put(b"")
        with contextlib.suppress(OSError, ValueError):
            requests.close()
        with contextlib.suppress(OSError, ValueError):
            answers.close()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request. Errors: Refused, with what the child says or what it did."""
        if not self._ready:
            imports = self._answer(b"").get("imports")
            if isinstance(imports, list):
                self.imports = [str(name) for name in imports]
            self._answer(b"")
            self._ready = True
        return self._answer(json.dumps(request).encode("ascii") + b"\n")

    def _answer(self, request: bytes) -> dict[str, Any]:
        started = time.monotonic()
        self._requests.put(request)
        try:
            line = self._answers.get(timeout=max(self.left, 0.0))
        except queue.Empty:
            limit = f"{self.time_limit:g}"
            raise Refused(TIMEOUT, f"it was not done within {limit} seconds") from None
        self.left -= time.monotonic() - started
        if not line:
            raise Refused(ERROR, f"its process ended before it was done ({self._exit()})")
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise Refused(ERROR, UNREADABLE)
        if "status" in answer:
            # that it is solved is not for the process to say
            status = answer["status"] if answer["status"] in (WRONG, UNTOUCHED) else ERROR
            raise Refused(status, str(answer.get("message", UNREADABLE)))
        return answer

    def _exit(self) -> str:
        try:
            return f"exit code {self._process.wait(timeout=1.0)}"
        except subprocess.TimeoutExpired:
            return "it runs on"

    def end(self) -> None:
        self._kill()
        self._process.wait()
        self._requests.put(None)
        self._thread.join(timeout=1.0)  # no longer: a process that got away may hold the pipe open

    def _kill(self) -> None:
        if sys.platform == "win32":
            self._process.kill()
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


# A folder of submissions


class Submission(NamedTuple):
    """Whose folder, and the verdict on each exercise; other_files: Python files of other names."""

    name: str
    verdicts: dict[str, Verdict]
    other_files: list[str]

    @property
    def solved(self) -> int:
        return sum(verdict.status == SOLVED for verdict in self.verdicts.values())


def grade_folder(
    folder: str | os.PathLike[str], time_limit: float = TIME_LIMIT
) -> Iterator[Submission]:
    """Grade every submission in a folder, one after the other.

    A submission is a folder in it, or, where no folder in it holds an exercise, the folder itself.

    Errors: OSError if it cannot be listed; ValueError if there is nothing to grade.
    """
    for one in submissions(folder):
        verdicts = {
            exercise.name: grade_file(one / exercise.file, exercise, time_limit)
            for exercise in EXERCISES
        }
        yield Submission(Path(os.path.abspath(one)).name, verdicts, _other_files(one))


def submissions(folder: str | os.PathLike[str]) -> list[Path]:
    """The folders of the submissions, by name. Errors: see grade_folder."""
    root = Path(folder)
    folders = sorted(path for path in root.iterdir() if path.is_dir() and path.name[:1] != ".")
    if any(_holds_exercises(path) for path in folders):
        return [path for path in folders if path.name != "__pycache__"]
    if _holds_exercises(root):
        return [root]
    raise ValueError(f"{folder}: no exercise is here, nor in a folder in it ({EXERCISES[0].file})")


def _holds_exercises(folder: Path) -> bool:
    return any(os.path.lexists(folder / exercise.file) for exercise in EXERCISES)


def _other_files(folder: Path) -> list[str]:
    known = {exercise.file for exercise in EXERCISES}
    try:
        return sorted({path.name for path in folder.iterdir() if path.suffix == ".py"} - known)
    except OSError:
        return []


def as_json(folder: str, time_limit: float, graded: list[Submission]) -> str:
    """One JSON object; the keys are documented in the help of `npdecoder exercise grade`."""
    return json.dumps({
        "format": 1,
        "folder": folder,
        "time_limit": time_limit,
        "exercises": [exercise.name for exercise in EXERCISES],
        "submissions": [
            {
                "name": one.name,
                "solved": one.solved,
                "results": {
                    name: {
                        "status": verdict.status,
                        "message": verdict.message,
                        "failed": verdict.failed,
                        "hints": verdict.hints,
                        "imports": list(verdict.imports),
                    }
                    for name, verdict in one.verdicts.items()
                },
                "other_files": one.other_files,
            }
            for one in graded
        ],
    }, indent=2, allow_nan=False)  # fmt: skip
