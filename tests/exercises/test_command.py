"""npdecoder exercise: its actions, as a user types them."""

import argparse
import contextlib
import io
import json
import shutil
from pathlib import Path

import pytest

from npdecoder.exercises import bugs, command
from npdecoder.exercises.catalogue import EXERCISES, README

SOLUTIONS = Path(__file__).parent / "solutions"


def run(*arguments):
    """The exit code and what was printed."""
    parser = argparse.ArgumentParser(prog="npdecoder")
    command.add_parser(parser.add_subparsers(required=True))
    args = parser.parse_args(["exercise", *map(str, arguments)])
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = args.run(args)
    return code, out.getvalue()


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """The current folder, with a fresh set in ex."""
    monkeypatch.chdir(tmp_path)
    assert run("new", "ex")[0] == 0
    return tmp_path


def solve(folder, name, *change):
    text = (SOLUTIONS / f"{name}.py").read_text("utf-8")
    (folder / f"{name}.py").write_text(text.replace(*change) if change else text, "utf-8")


def test_new_copies_all_and_overwrites_nothing(fresh):
    names = sorted([*(exercise.file for exercise in EXERCISES), README])
    assert sorted(path.name for path in (fresh / "ex").iterdir()) == names
    solve(fresh / "ex", "01_linear")
    mine = (fresh / "ex" / "01_linear.py").read_bytes()
    with pytest.raises(ValueError, match=r"01_linear.py is there already \(and 9 more\).*--force"):
        run("new", "ex")
    (fresh / "one").mkdir()
    (fresh / "one" / "05_residual.py").write_text("mine")
    with pytest.raises(ValueError, match=r"05_residual.py is there already: "):
        run("new", "one")
    assert sorted(path.name for path in (fresh / "one").iterdir()) == ["05_residual.py"]
    assert (fresh / "ex" / "01_linear.py").read_bytes() == mine
    assert run("new", "ex", "--force")[0] == 0
    assert (fresh / "ex" / "01_linear.py").read_bytes() == EXERCISES[0].task.read_bytes()
    code, out = run("new", "some/where/else")
    assert code == 0
    assert "npdecoder exercise check" in out


def test_two_commands_to_a_graded_exercise(fresh):
    code, out = run("check", "ex/01_linear.py")
    assert code == 1
    assert out.startswith("01_linear: it is your turn")
    assert "help(npdecoder.Linear.backward)" in out
    assert "Traceback" not in out


def test_check_of_a_solved_one(fresh):
    solve(fresh / "ex", "02_softmax")
    code, out = run("check", "ex/02_softmax.py")
    assert code == 0
    assert out.startswith("02_softmax: solved")
    assert "npdecoder/layers/softmax.py" in out
    assert out.endswith("next: 03_layer_norm.py\n")
    solve(fresh / "ex", "09_tied_embeddings")
    assert "next" not in run("check", "ex/09_tied_embeddings.py")[1]


def test_check_of_a_wrong_one_prints_report_and_hints(fresh):
    solve(fresh / "ex", "03_layer_norm", "dx_hat = dy * self.gamma.value", "dx_hat = dy")
    code, out = run("check", "ex/03_layer_norm.py")
    assert code == 1
    assert "the gradient of x is wrong (at B=2 T=3 d=5)" in out
    assert "gradcheck of LayerNorm" in out
    assert "looks like: gamma left out" in out
    assert "npdecoder/layers/layer_norm.py" in out


def test_check_of_one_with_an_error_shows_where_and_what_it_prints(fresh):
    solve(fresh / "ex", "02_softmax", "y = ctx", "y = ctx\n        print('y is', y.shape)\n"
          "        y.foo")
    code, out = run("check", "ex/02_softmax.py")
    assert code == 1
    assert "y is (2, 3, 5)" in out
    assert "in backward\n    y.foo" in out
    assert "AttributeError" in out
    assert "runpy" not in out


def test_check_refuses_what_it_cannot_check(fresh):
    with pytest.raises(ValueError, match="is not the name of an exercise"):
        run("check", "ex/README.txt")
    with pytest.raises(FileNotFoundError):
        run("check", "nowhere/01_linear.py")


def test_list(fresh):
    code, out = run()
    assert code == 0
    assert "None of them is in" in out
    assert all(exercise.name in out for exercise in EXERCISES)

    ex = fresh / "ex"
    solve(ex, "01_linear")
    solve(ex, "02_softmax", "return y *", "return 2 * y *")
    solve(ex, "03_layer_norm", "x_hat, rstd = ctx", "x_hat, rstd = ctx\n        raise KeyError(1)")
    solve(ex, "04_cross_entropy", "onehot =", "raise NotImplementedError\n        onehot =")
    (ex / "05_residual.py").unlink()
    code, out = run("list", "ex")
    assert code == 0
    states = dict(line.split(maxsplit=1) for line in out.splitlines()[:9])
    assert states["01_linear"] == "solved"
    assert states["02_softmax"].startswith("begun: the gradient of x is wrong")
    assert states["03_layer_norm"] == "begun: KeyError: 1"
    assert states["04_cross_entropy"] == "begun: backward is still to be written"
    assert states["05_residual"] == "missing"
    assert states["06_attention"] == "untouched"
    assert out.endswith("1 of 9 solved\n")
    with pytest.raises(ValueError, match="is no folder"):
        run("list", "nowhere")


def test_grade(fresh, monkeypatch):
    shutil.copytree(fresh / "ex", fresh / "class" / "ada")
    shutil.copytree(fresh / "ex", fresh / "class" / "bob, with a very long name indeed")
    solve(fresh / "class" / "ada", "01_linear")
    solve(fresh / "class" / "ada", "02_softmax", "import numpy", "import os\nimport numpy")
    (fresh / "class" / "ada" / "mine.py").write_text("")
    code, out = run("grade", "class", "--time-limit", "60")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].split() == [*(exercise.name[:2] for exercise in EXERCISES), "solved"]
    assert lines[1].split() == ["ada", "ok", "ok", *"-------", "2"]
    assert lines[2].split() == ["bob,", "with", "a..", *"---------", "0"]
    assert "ada, 02_softmax: imports os" in out
    assert "ada: no exercise is called mine.py" in out

    (fresh / "class" / "ada" / "02_softmax.py").unlink()
    code, out = run("grade", "class/ada", "--json", "--time-limit", "60")
    assert code == 0
    found = json.loads(out)
    (one,) = found["submissions"]
    assert (one["name"], one["solved"]) == ("ada", 1)
    assert one["results"]["02_softmax"]["status"] == "missing"
    assert found["time_limit"] == 60.0


def test_the_keys_of_the_json_are_documented(fresh):
    for key in ("format", "folder", "time_limit", "exercises", "submissions", "name", "solved",
                "results", "status", "message", "failed", "hints", "imports", "other_files"):
        assert f"\n{'':2}{key}" in command.JSON_KEYS or f"  {key} " in command.JSON_KEYS


@pytest.mark.parametrize("limit", ["0", "-1", "inf", "nan", "soon"])
def test_bad_time_limit(limit, capsys):
    with pytest.raises(SystemExit):
        run("grade", ".", f"--time-limit={limit}")
    assert "is not a number of seconds above 0" in capsys.readouterr().err


def test_bug(fresh):
    puzzle = bugs.puzzle(4)
    code, out = run("bug", "--seed", "4")
    assert code == 0
    assert "Somebody's Unembedding" in out
    assert "--seed 4 --guess" in out
    assert run("bug", "--seed", "4", "--guess", puzzle.key.lower())[0] == 0
    other = next(letter for letter in puzzle.candidates if letter != puzzle.key)
    code, out = run("bug", "--seed", "4", "--guess", other)
    assert code == 1
    assert out.startswith(f"{other}: no. ")
    code, out = run("bug", "--seed", "4", "--answer")
    assert code == 0
    assert out.startswith(f"{puzzle.key}. ")
    assert "npdecoder/layers/embedding.py" in out
    with pytest.raises(ValueError, match="'Z' is not one of A, B, C, D, E"):
        run("bug", "--guess", "Z")


@pytest.mark.parametrize("arguments", [["--seed", "-1"], ["--seed", "x"],
                                       ["--guess", "A", "--answer"]])
def test_bug_refuses(arguments, capsys):
    with pytest.raises(SystemExit):
        run("bug", *arguments)
    assert capsys.readouterr().err
