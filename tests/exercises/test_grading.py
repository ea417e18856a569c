"""Grading: right and wrong submissions, and those that misbehave."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from mistakes import MISTAKES

from npdecoder.exercises import child, grading
from npdecoder.exercises.catalogue import EXERCISES
from npdecoder.exercises.child import decode, encode, foreign_imports
from npdecoder.exercises.grading import as_json, check_file, grade_file, grade_folder, submissions
from npdecoder.exercises.submission import (
    ERROR,
    MISSING,
    SOLVED,
    STATUSES,
    TIMEOUT,
    UNTOUCHED,
    WRONG,
    Refused,
    load,
)

SOLUTIONS = Path(__file__).parent / "solutions"
BY_NAME = {exercise.name: exercise for exercise in EXERCISES}
LINEAR, SOFTMAX = BY_NAME["01_linear"], BY_NAME["02_softmax"]


def solution(name):
    return (SOLUTIONS / f"{name}.py").read_text("utf-8")


def mistaken(folder, name, old, new):
    """A submission: the solution with old replaced by new, wherever it stands in backward."""
    start, backward = solution(name).split("    def backward(")
    assert old in backward, (name, old)
    path = folder / f"{name}.py"
    path.write_text(f"{start}    def backward({backward.replace(old, new)}", "utf-8")
    return path


def written(folder, name, *changes, before="", after=""):
    """A submission: the solution with (old, new) changes, and code before and after it."""
    text = solution(name)
    for old, new in changes:
        assert text.count(old) == 1, (name, old)
        text = text.replace(old, new)
    path = folder / f"{name}.py"
    path.write_text(textwrap.dedent(before) + text + textwrap.dedent(after), "utf-8")
    return path


# Mistakes


@pytest.mark.parametrize(("name", "old", "new"), MISTAKES)
def test_mistake_is_wrong(tmp_path, name, old, new):
    verdict = check_file(mistaken(tmp_path, name, old, new), BY_NAME[name])
    # a wrong shape may stop the mistaken code itself
    assert verdict.status in (WRONG, ERROR), verdict
    if verdict.status == ERROR:
        assert "ValueError" in verdict.message
        assert f"{name}.py" in verdict.message
    else:
        assert "forward was changed" not in verdict.message
        assert "(at B=" in verdict.message


def test_each_exercise_has_mistakes():
    names = [name for name, _, _ in MISTAKES]
    assert all(names.count(exercise.name) >= 4 for exercise in EXERCISES)


def test_what_works_at_one_size_only_is_wrong(tmp_path):
    fixed = "return (dy.reshape(6, 7) @ self.W.value.T).reshape(2, 3, 5)"
    path = written(tmp_path, "01_linear", ("return dy @ self.W.value.T", fixed))
    verdict = check_file(path, LINEAR)
    assert verdict.status == ERROR
    assert "cannot reshape" in verdict.message
    scaled = written(tmp_path, "02_softmax", ("return y *", "return 2 / len(y) * y *"))
    verdict = check_file(scaled, SOFTMAX)
    assert verdict.status == WRONG
    assert verdict.draws == 1  # B is 2 in the first draw


def test_wrong_names_tensors_sizes_and_hints(tmp_path):
    path = written(tmp_path, "01_linear", ("self.W.grad +=", "self.W.grad ="))
    verdict = check_file(path, LINEAR)
    assert verdict.message == "the gradient of W is wrong (at B=2 T=3 d_in=5 d_out=7)"
    assert verdict.failed == ["W"]
    assert any("+=" in hint for hint in verdict.hints)


@pytest.mark.parametrize("grade", [check_file, grade_file])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([("y = xW + self.b.value", "y = 2 * (xW + self.b.value)")], "forward was changed"),
        ([("return y, x  #", "return y  #")], "no longer returns y and ctx"),
        ([("class Linear(Layer)", "class Mine(Layer)")], "no longer defines the class Linear"),
        ([("def backward", "def mine")], "has no backward"),
        ([("self.b = Parameter", "self.c = Parameter"), ("self.b.value", "self.c.value")],
         "its parameters are W (5, 7), c (7,), not W (5, 7), b (7,) as in the exercise"),
        ([("np.zeros(d_out)", "np.zeros((1, d_out))")], "its parameters are"),
    ],
)
def test_changed_exercise(tmp_path, grade, changes, message):
    verdict = grade(written(tmp_path, "01_linear", *changes), LINEAR)
    assert message in verdict.message
    assert verdict.status == WRONG


def test_check_of_what_does_not_run_or_gives_no_array(tmp_path):
    verdict = check_file(written(tmp_path, "01_linear", after="1 / 0"), LINEAR)
    assert verdict.status == ERROR
    assert verdict.message.startswith(f'  File "{tmp_path / LINEAR.file}", line ')
    assert verdict.message.endswith("\nZeroDivisionError: division by zero")
    path = written(tmp_path, "01_linear", ("return y, x  #", "return [[1.0], [1.0, 2.0]], x  #"))
    verdict = check_file(path, LINEAR)
    assert verdict.status == WRONG
    assert "forward was changed" in verdict.message


@pytest.mark.parametrize("grade", [check_file, grade_file])
def test_writing_into_dy_and_remembering_are_wrong(tmp_path, grade):
    path = written(tmp_path, "02_softmax", ("y = ctx", "y = ctx\n        dy *= 0.5"))
    verdict = grade(path, SOFTMAX)
    assert verdict.status == WRONG
    assert "wrote into dy" in verdict.message
    path = written(tmp_path, "02_softmax", ("return y, y", "self.y = y\n        return y, y"),
                   ("y = ctx", "y = self.y"))
    assert grade(path, SOFTMAX).failed == ["x"]


# Those that misbehave, each in a process of its own

NUMERIC = """
import npdecoder.gradcheck, npdecoder.exercises.child, npdecoder.exercises.grading
class Fine:
    ok, rows, hints, max_relative_error = True, [], [], 0.0
npdecoder.gradcheck.gradcheck = npdecoder.exercises.grading.gradcheck = lambda *a, **k: Fine()
npdecoder.exercises.grading._examine = lambda *a, **k: None
print('{"status": "solved"}', flush=True)
"""


@pytest.mark.parametrize(
    ("before", "status", "message"),
    [
        ("import sys; sys.exit(0)\n", ERROR, "SystemExit: 0"),
        ("import os; os._exit(0)\n", ERROR, "its process ended before it was done (exit code 0)"),
        ("import no_such_module\n", ERROR, "No module named 'no_such_module'"),
        ("def f(:\n", ERROR, "SyntaxError"),
        ("1 / 0\n", ERROR, "ZeroDivisionError"),
        (NUMERIC, WRONG, "the gradient of W is wrong"),
        ("import os\nfor fd in range(3, 9):\n  try: os.write(fd, b'{\"status\": \"solved\"}\\n')\n"
         "  except OSError: pass\n", ERROR, "cannot be read"),
        ("import os\nfor fd in range(3, 9):\n  try: os.write(fd, b'nonsense\\n')\n"
         "  except OSError: pass\n", ERROR, "cannot be read"),
    ],
    ids=["sys.exit", "os._exit", "import", "syntax", "exception", "gradcheck replaced",
         "says solved", "says nonsense"],
)  # fmt: skip
def test_misbehaving_submission(tmp_path, before, status, message):
    path = written(tmp_path, "01_linear", ("self.W.grad +=", "self.W.grad ="), before=before)
    verdict = grade_file(path, LINEAR)
    assert verdict.status == status, verdict
    assert message in verdict.message
    assert os.listdir(tmp_path) == [path.name]


def test_exception_in_backward_is_told_from_where_it_enters_the_file(tmp_path):
    path = written(tmp_path, "02_softmax", ("y = ctx", "y = ctx + {}"))
    here, there = check_file(path, SOFTMAX), grade_file(path, SOFTMAX)
    assert here.status == there.status == ERROR
    assert here.message.splitlines()[0] == there.message.splitlines()[0]
    assert here.message.splitlines()[0].startswith(f'  File "{path}", line ')
    assert here.message.splitlines()[-1] == there.message.splitlines()[-1]
    assert "TypeError" in here.message


def test_time_limit(tmp_path):
    path = written(tmp_path, "01_linear", ("x = ctx", "x = ctx\n        while True: pass"))
    started = time.monotonic()
    verdict = grade_file(path, LINEAR, time_limit=1.5)
    assert verdict.status == TIMEOUT
    assert verdict.message == "it was not done within 1.5 seconds"
    assert time.monotonic() - started < 20


def test_a_process_that_closes_its_answers_and_runs_on(tmp_path):
    before = "import os, time\nos.closerange(3, 9)\ntime.sleep(60)\n"
    path = written(tmp_path, "01_linear", before=before)
    verdict = grade_file(path, LINEAR)
    assert verdict.status == ERROR
    assert verdict.message == "its process ended before it was done (it runs on)"


@pytest.mark.skipif(os.name != "posix", reason="the process group of POSIX")
def test_what_a_submission_started_is_ended_with_it(tmp_path):
    started = tmp_path / "pid"
    before = f"""
    import os, time
    pid = os.fork()
    if pid == 0:
        while True: time.sleep(0.1)
    open({str(started)!r}, "w").write(str(pid))
    while True: pass
    """
    path = written(tmp_path, "01_linear", before=before)
    assert grade_file(path, LINEAR, time_limit=3.0).status == TIMEOUT
    pid = int(started.read_text())
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
            os.kill(pid, 0)
        except OSError:
            break
        if state == "Z":
            break
        time.sleep(0.05)
    else:
        pytest.fail("the process lives on")


def test_no_file_as_shipped_and_no_real_file(tmp_path):
    assert grade_file(tmp_path / LINEAR.file, LINEAR).status == MISSING
    copy = tmp_path / SOFTMAX.file
    copy.write_bytes(SOFTMAX.task.read_bytes().replace(b"\n", b"\r\n"))
    assert grade_file(copy, SOFTMAX).status == UNTOUCHED
    (tmp_path / LINEAR.file).mkdir()
    assert grade_file(tmp_path / LINEAR.file, LINEAR).status == ERROR
    begun = written(tmp_path, "02_softmax", ("return y * (", "raise NotImplementedError\n#"))
    assert grade_file(begun, SOFTMAX).status == UNTOUCHED


def test_an_error_of_the_grader_is_that_of_one_file(tmp_path, monkeypatch):
    def broken(*arguments):
        raise IndexError("what is this")

    monkeypatch.setattr(grading, "gradcheck", broken)
    path = written(tmp_path, "01_linear")
    verdict = grade_file(path, LINEAR)
    assert verdict.status == ERROR
    assert "IndexError: what is this" in verdict.message
    with pytest.raises(IndexError, match="what is this"):  # which an author is to see
        check_file(path, LINEAR)


def test_a_folder_of_submissions(tmp_path):
    """A class of three: one solved all, one handed in noise, one nothing."""
    good, noisy, empty = (tmp_path / name for name in ("good", "noisy", "zoë"))
    for folder in (good, noisy, empty, tmp_path / ".git"):
        folder.mkdir()
    for exercise in EXERCISES:
        written(good, exercise.name)
    noise = 'print(\'{"format": 1}\')\nimport sys; sys.stderr.write("noise")\n'
    written(noisy, "01_linear", before=noise)
    written(noisy, "02_softmax", before="from npdecoder import LayerNorm as N\nimport os.path\n",
            after="raise ValueError('\\udcff \\x1b[2J' * 9999)\n")
    (noisy / "help.py").write_text("1 / 0")

    assert [path.name for path in submissions(tmp_path)] == ["good", "noisy", "zoë"]
    graded = list(grade_folder(tmp_path))
    assert [one.solved for one in graded] == [9, 1, 0]
    text = as_json("class", 20.0, graded)
    assert text.isascii()
    found = json.loads(text)
    assert list(found) == ["format", "folder", "time_limit", "exercises", "submissions"]
    assert found["exercises"] == [exercise.name for exercise in EXERCISES]
    for one in found["submissions"]:
        assert list(one) == ["name", "solved", "results", "other_files"]
        assert list(one["results"]) == found["exercises"]
        for result in one["results"].values():
            assert list(result) == ["status", "message", "failed", "hints", "imports"]
            assert result["status"] in STATUSES
            assert (result["message"] == "") == (result["status"] == SOLVED)
    _, noise, nothing = found["submissions"]
    assert noise["results"]["01_linear"]["status"] == SOLVED
    assert noise["results"]["01_linear"]["imports"] == ["sys"]
    assert noise["results"]["02_softmax"]["status"] == ERROR
    assert noise["results"]["02_softmax"]["imports"] == ["npdecoder.LayerNorm", "os.path"]
    assert len(noise["results"]["02_softmax"]["message"]) <= grading.LONGEST_MESSAGE
    assert noise["other_files"] == ["help.py"]
    assert nothing["name"] == "zoë"
    assert {result["status"] for result in nothing["results"].values()} == {MISSING}


def test_a_folder_that_is_one_submission(tmp_path):
    (tmp_path / "__pycache__").mkdir()
    written(tmp_path, "01_linear")
    assert submissions(tmp_path) == [tmp_path]
    with pytest.raises(ValueError, match="no exercise is here"):
        submissions(tmp_path / "__pycache__")
    with pytest.raises(FileNotFoundError):
        submissions(tmp_path / "nowhere")


def test_a_folder_that_goes_while_it_is_graded(tmp_path, monkeypatch):
    written(tmp_path, "01_linear")

    def remove(path, *arguments):
        shutil.rmtree(path.parent, ignore_errors=True)
        return grade_file(path, *arguments)

    monkeypatch.setattr(grading, "grade_file", remove)
    (one,) = grade_folder(tmp_path)
    assert {verdict.status for verdict in one.verdicts.values()} == {MISSING}
    assert one.other_files == []
    assert not grading.is_as_shipped(tmp_path / LINEAR.file, LINEAR)


# Its parts


class InProcess:
    """What child.py does, in this process; lie changes the answer."""

    def __init__(self, path, exercise, lie=lambda answer: answer):
        self.submitted, self.lie = load(path, exercise.cls), lie

    def ask(self, request):
        answer = child.run(self.submitted, json.loads(json.dumps(request)))
        return self.lie(json.loads(json.dumps(answer)))


@pytest.mark.parametrize(
    ("name", "changes"),
    [("01_linear", ()), ("06_attention", ()), ("09_tied_embeddings", ()),
     ("09_tied_embeddings", [("        return ()", "        return None")])],
    ids=["one", "three", "none", "None"],
)  # fmt: skip
def test_what_the_process_answers_is_what_gradcheck_needs(tmp_path, name, changes):
    """As many gradients as there are; ids have none."""
    there = InProcess(written(tmp_path, name, *changes), BY_NAME[name])
    verdict = grading._examine(BY_NAME[name], lambda *made: grading._by_proxy(*made, there))
    assert verdict.status == SOLVED, verdict


UNREADABLE = ERROR, grading.UNREADABLE
SMALL = {"dtype": "float64", "shape": [1], "values": [1.0]}


@pytest.mark.parametrize(
    ("lie", "refused"),
    [
        ({"wrote": None}, UNREADABLE),
        ({"wrote": ["dy", "W"]}, (WRONG, "forward or backward wrote into dy, W")),
        ({"y": 1.0}, UNREADABLE),
        ({"y": SMALL}, (WRONG, "its forward was changed: it gives other numbers than the "
                               "exercise's")),
        ({"gradients": [{**SMALL, "values": [10**400]}]}, UNREADABLE),
        ({"grads": {}}, UNREADABLE),
        ({"grads": {"W": SMALL, "b": SMALL}}, UNREADABLE),
    ],
    ids=str,
)  # fmt: skip
def test_an_answer_that_cannot_be_is_refused(lie, refused):
    _, draw, _ = LINEAR.draws()[0]
    there = InProcess(SOLUTIONS / LINEAR.file, LINEAR, lambda answer: {**answer, **lie})
    layer = grading._by_proxy(load(LINEAR.task, "Linear")(*draw.arguments), draw, there)
    y, ctx = layer.forward(*draw.inputs)
    with pytest.raises(Refused) as caught:
        layer.backward(ctx, np.ones_like(y))
    assert (caught.value.status, caught.value.message) == refused


def conversation(path, *requests):
    """What the process of a softmax answers to these and the end of them; its exit code."""
    package = Path(grading.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", grading.START, package, path, "Softmax"], timeout=60, check=False,
        input=b"".join(json.dumps(request).encode() + b"\n" for request in requests),
        stdout=subprocess.PIPE,
    )  # fmt: skip
    return [json.loads(line) for line in done.stdout.splitlines()], done.returncode


def test_a_conversation_with_the_process_of_a_submission(tmp_path):
    """What it prints itself is in no answer."""
    path = written(tmp_path, "02_softmax", ("y = ctx", "y = ctx\n        print('{}')"),
                   before="import os\nos.write(1, b'noise')\n")  # fmt: skip
    x = np.log([[1.0, 3.0]])
    request = {"arguments": [], "inputs": [encode(x)], "values": {}, "grads": {},
               "dy": encode(np.array([[1.0, 0.0]]))}  # fmt: skip
    (imports, ready, answer), code = conversation(path, request)
    assert (imports, ready, code) == ({"imports": ["os"]}, {}, 0)
    assert list(answer) == ["y", "gradients", "grads", "wrote"]
    np.testing.assert_allclose(decode(answer["y"]), [[0.25, 0.75]])
    np.testing.assert_allclose(decode(answer["gradients"][0]), [[0.1875, -0.1875]])
    assert answer["grads"] == {}
    assert answer["wrote"] == []

    (*before, refused), code = conversation(SOFTMAX.task, request, request)
    assert (before, code) == ([{"imports": []}, {}], 0)
    assert refused == {"status": UNTOUCHED, "message": "backward is still to be written"}


def test_a_process_that_is_killed_between_two_answers():
    request = {"arguments": [2, 3], "inputs": [encode(np.ones((1, 1, 2)))], "grads": {},
               "values": {"W": encode(np.ones((2, 3))), "b": encode(np.ones(3))},
               "dy": encode(np.ones((1, 1, 3)))}  # fmt: skip
    with grading._running(SOLUTIONS / LINEAR.file, "Linear", 60.0) as there:
        assert decode(there.ask(request)["y"]).tolist() == [[[3.0, 3.0, 3.0]]]
        there._kill()
        there._process.wait()
        with pytest.raises(Refused, match=r"^its process ended before it was done \(exit code"):
            there.ask(request)


@pytest.mark.parametrize(
    "array",
    [
        np.array(1.5),
        np.array([[np.nan, np.inf, -0.0, 1 / 3]]),
        np.zeros((2, 0, 3)),
        np.array([[True, False]]),
        np.arange(6).reshape(2, 3),
    ],
)
def test_arrays_pass_through_json_exactly(array):
    back = decode(json.loads(json.dumps(encode(array))))
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)
    assert np.array_equal(np.signbit(back), np.signbit(array)) if array.dtype.kind == "f" else True


@pytest.mark.parametrize(
    "value",
    [None, 1, [], {}, {"dtype": "object", "shape": [1], "values": ["x"]},
     {"dtype": "float64", "shape": [2], "values": [1.0]},
     {"dtype": "float64", "shape": 2, "values": [1.0]},
     {"dtype": "float64", "shape": [1], "values": ["x"]}],
)  # fmt: skip
def test_what_is_no_array_is_refused(value):
    with pytest.raises((TypeError, ValueError, LookupError)):
        decode(value)


def test_foreign_imports(tmp_path):
    path = tmp_path / "a.py"
    path.write_text("import numpy as np\nfrom npdecoder import Layer, softmax, Linear\n"
                    "def f():\n    import os.path, torch\nfrom . import x\nimport npdecoder\n")
    assert foreign_imports(str(path)) == [".x", "npdecoder", "npdecoder.Linear", "os.path", "torch"]
    path.write_text("def (")
    assert foreign_imports(str(path)) == []
