"""examples/pitfalls.py: every number and every verdict that it prints is asserted here."""

import importlib.util
import inspect
import re
import string
import sys
from pathlib import Path

import numpy as np
import pytest

PATH = Path(__file__).parents[2] / "examples" / "pitfalls.py"


def load():
    spec = importlib.util.spec_from_file_location("examples_pitfalls", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


pitfalls = load()
BY_NAME = {p.run.__name__: p for p in pitfalls.PITFALLS}
NUMBER = {name: number for number, name in enumerate(BY_NAME, 1)}


def about(value, relative=0.1):
    return pytest.approx(value, rel=relative)


def between(low, high):
    return lambda value: low < value < high


def exactly(*values):
    return lambda array: np.array_equal(array, np.array(values))


def near(*values):
    return lambda array: np.allclose(array, values, rtol=1e-3)


# What run() must return besides its checks; a function is a predicate.
FACTS = {
    "shared_instance": {"held": 329, "wanted": 963},
    "deepcopy_stack": {"distinct": 1, "apart": between(0.1, 10)},
    "polarity": {"first": 0.0, "answer": 1.0, "last": 0.0, "refusal": "TypeError"},
    "zero_and_minus_inf": {"future": about(1.0, 1e-12), "last": near(1 / 3, 1 / 3, 1 / 3)},
    "nothing_visible": {"bad_dk": 1.0, "bad_dv": 1.0, "B": 3, "bad_W": 1.0},
    "minus_1e9": {"half": -np.inf, "mean": about(7 / 3, 1e-12)},
    "triangle_corner": {"wrong_out": near(1.0, 1.5), "right_out": near(3.75, 6.2)},
    "across_the_batch": {"leak": between(0.1, 10), "within": 0.0},
    "scale": {"wrong_max": between(0.08, 0.13), "right_max": between(0.2, 0.3)},
    "merge": {
        "wrong": exactly([1, 2, 3, 4], [5, 6, 7, 8]),
        "right": exactly([1, 2, 5, 6], [3, 4, 7, 8]),
    },
    "crossed_sources": {"moved": 5, "T": 5},
    "gradients_swapped": {"error": between(0.3, 10)},
    "position_exponent": {
        "wrong": near(np.sin(0.1), np.sin(0.2)),
        "right": near(np.sin(0.01), np.sin(0.02)),
        "short": about(20 * np.pi, 1e-9),
        "long": about(200 * np.pi, 1e-9),
    },
    "eps_outside": {"nans": 1.0, "wrong": near(-1 / 1.1, 1 / 1.1), "right": near(-0.3015, 0.3015)},
    "gamma_outside": {"error": between(0.2, 1), "small": between(0.02, 0.1)},
    "same_for_beta": {"cosine": between(-0.5, 0.5)},
    "softmax_over_batch": {
        "B": 3,
        "ratio": about(1 / 3, 1e-12),
        "dq": about(1 / 3, 1e-12),
        "dv": about(1.0, 1e-12),
    },
    "skip_dropped": {"ratio": between(0, 0.02)},
    "skip_through_the_norm": {
        "error": between(0.3, 10),
        "sum": between(0, 1e-12),
        "right_sum": between(1, 100),
    },
    "one_dropout": {"other": between(0.4, 0.6), "error": between(0.5, 10)},
    "unpacked": {"B": 3, "error": between(0.3, 10)},
    "repeats_lost": {"wrong": exactly(11, 12), "right": exactly(22, 26)},
    "head_forgotten": {
        "wrong": exactly(0, 0),
        "right": near(-0.07518417520076401, -0.08846152817312455),
        "start": about(2.36),
        "end": about(1.57),
    },
    "off_by_t": {"T": 5, "ratio": about(5.0, 1e-12)},
    "mean_over_padding": {"padded": about(0.4 * 3.095, 1e-3), "alone": about(3.095, 1e-3)},
    "updated_twice": {"wrong": about(0.8, 1e-12), "right": about(0.9, 1e-12)},
    "names_that_differ": {
        "moved": 5,
        "total": 29,
        "in_layers": 0,
        "start": about(2.27),
        "end": between(0, 1.0),
    },
}

# What each test of a check says: a pattern of its output.
SEEN_BY = {
    "shared_instance": "3 layer.* 963 numbers .found 329.: FAIL",
    "deepcopy_stack": "no two layers .* same weights: FAIL",
    "polarity": "moves by [1-9].*: FAIL",
    "zero_and_minus_inf": "above the diagonal .largest 1.00.: FAIL",
    "nothing_visible": r"finite \[False, False, False, False\]: FAIL",
    "minus_1e9": r"float64: weights \[0.3333, 0.3333, 0.3333\] are zero: FAIL",
    "triangle_corner": "last 2 queries .*FAIL",
    "across_the_batch": "items one by one .*FAIL",
    "scale": "h = 2: equal to eq. 1 .*FAIL",
    "merge": "moves by [0-9.]*[1-9].*: FAIL",
    "crossed_sources": "ValueError at S = 7, T = 5: key .* and value",
    "gradients_swapped": "numeric error\nmemory .* FAIL .2 of 20.",
    "position_exponent": "the last pair is that of Vaswani .*FAIL",
    "eps_outside": r"finite gradient \[nan, nan, nan, nan\]: FAIL",
    "gamma_outside": "numeric error\nx .* FAIL .1 of 3.",
    "same_for_beta": "numeric error\nbeta .* FAIL .1 of 3.",
    "softmax_over_batch": "numeric error\nx .* FAIL .1 of 1.",
    "skip_dropped": "numeric error\n.* FAIL .7 of 13.",
    "skip_through_the_norm": "numeric error\n.* FAIL .9 of 13.",
    "one_dropout": "numeric error\n.* FAIL .5 of 7.",
    "unpacked": "numeric error\nx .* FAIL .1 of 3.",
    "repeats_lost": "numeric error\nW .* FAIL .1 of 1.",
    "head_forgotten": "numeric error\nembedding.W .* FAIL .1 of 1.",
    "off_by_t": "numeric error\nlogits .* FAIL .1 of 1.",
    "mean_over_padding": "padding leaves the loss .*FAIL",
    "updated_twice": "value - lr . grad .*0.1.: FAIL",
    "names_that_differ": "all 29 parameters .*5 do.: FAIL",
}

# Where the text promises that gradcheck passes the mistake.
NOT_SEEN_BY_GRADCHECK = {
    "shared_instance", "deepcopy_stack", "polarity", "scale", "merge", "eps_outside",
    "mean_over_padding",
}  # fmt: skip


@pytest.fixture(scope="module")
def facts():
    return {name: p.run() for name, p in BY_NAME.items()}


def checks(facts):
    return {name: fact for name, fact in facts.items() if isinstance(fact, pitfalls.Check)}


def test_every_pitfall_is_tested():
    assert set(FACTS) == set(SEEN_BY) == set(BY_NAME)
    assert len(BY_NAME) == len(pitfalls.PITFALLS) == 27


@pytest.mark.parametrize("name", BY_NAME)
def test_the_facts(facts, name):
    returned, expected = facts[name], FACTS[name]
    assert set(returned) - set(checks(returned)) == set(expected)
    for fact, wanted in expected.items():
        value = returned[fact]
        assert wanted(value) if callable(wanted) else value == wanted, f"{fact} is {value}"


@pytest.mark.parametrize("name", BY_NAME)
def test_the_checks(facts, name):
    returned = checks(facts[name])
    assert {"caught", "hidden", "mended"} <= set(returned)
    assert set(returned) <= {"caught", "also", "blind", "mended"} | {
        check for check in returned if check.startswith("hidden")
    }
    for check, (ok, output) in returned.items():
        wrong = check in ("caught", "also")
        assert ok != wrong, f"{check}: {output}"
        assert 1 <= len(output.splitlines()) <= 2
        assert ("FAIL" in output or "Error" in output) == wrong


@pytest.mark.parametrize("name", BY_NAME)
def test_what_sees_it(facts, name):
    assert re.search(SEEN_BY[name], facts[name]["caught"].output), facts[name]["caught"].output


@pytest.mark.parametrize("name", sorted(NOT_SEEN_BY_GRADCHECK))
def test_gradcheck_does_not_see_it(facts, name):
    assert facts[name]["blind"].output.startswith("gradcheck: all ok")
    assert not pitfalls.gradcheck_sees(facts[name])


@pytest.mark.parametrize("name", BY_NAME)
def test_the_text_says_nothing_but_facts(facts, name):
    p = BY_NAME[name]
    texts = (p.effect, p.hides, p.right)
    fields = [field for text in texts for _, field, _, _ in string.Formatter().parse(text) if field]
    assert set(fields) <= set(FACTS[name])


@pytest.mark.parametrize("name", BY_NAME)
def test_the_wrong_code_is_short_and_marked(name):
    code = pitfalls.code(BY_NAME[name].wrong)
    assert "# wrong" in code
    assert len(code.splitlines()) <= 15
    assert all(inspect.getsource(piece).strip() in code for piece in BY_NAME[name].wrong)


def test_everything_is_printed(facts, capsys):
    assert pitfalls.main([]) == 0
    printed = capsys.readouterr().out
    for number, (name, p) in enumerate(BY_NAME.items(), 1):
        assert printed.count(f"{number}. {p.title}\n") == 2  # in the contents, and above its text
        assert p.wrong[0].__name__ in printed
        caught = facts[name]["caught"].output.splitlines()[-1]
        assert " ".join(caught.split()) in " ".join(printed.split())
    assert max(map(len, printed.splitlines())) <= 100
    assert printed.isascii()  # for every console
    assert "{" not in re.sub(r"\| .*|\{id\(p\).*", "", printed)


def test_the_summary(facts, capsys):
    summary = pitfalls.summary(list(facts.values()))
    seen = [NUMBER[name] for name in BY_NAME if pitfalls.gradcheck_sees(facts[name])]
    by_table = [NUMBER[name] for name, pattern in SEEN_BY.items() if "numeric error" in pattern]
    assert seen == sorted([*by_table, NUMBER["nothing_visible"]])
    assert f"gradcheck sees {len(seen)} of 27: {', '.join(map(str, seen))}." in " ".join(
        summary.split()
    )
    assert re.search(r"B = 1 +8, 17, 21\n", summary)
    hidden = {int(n) for line in summary.split("\n\n")[0].splitlines()[2:]
              for n in re.findall(r"\d+", line[33:])}
    assert hidden == set(range(1, 28))


def test_one_and_several_by_number(capsys):
    assert pitfalls.main(["7"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("7. The causal triangle at the wrong corner\n")
    assert "[3.75, 6.2]" in printed
    assert "8." not in printed
    assert pitfalls.main(["22", "7"]) == 0
    assert re.findall(r"^\d+\.", capsys.readouterr().out, re.M) == ["22.", "7."]


def test_the_list(capsys):
    assert pitfalls.main(["--list"]) == 0
    assert capsys.readouterr().out == pitfalls.contents() + "\n"


@pytest.mark.parametrize("argument", ["0", "28", "-1", "seven"])
def test_no_such_number(argument, capsys):
    with pytest.raises(SystemExit) as error:
        pitfalls.main([argument])
    assert error.value.code == 2
    assert argument in capsys.readouterr().err


# The checks themselves can fail, and pass what is right.


def test_a_check_by_gradcheck_shows_the_worst_tensor():
    wrong = pitfalls.randomise(pitfalls.GammaOutside(7, **pitfalls.F64))
    ok, output = pitfalls.by_gradcheck(wrong, pitfalls.normal(3, 5, 7))
    head, row = output.splitlines()
    assert not ok
    assert head.split() == ["tensor", "shape", "worst", "at", "backward", "numeric", "error"]
    assert row.split()[0] == "x"
    assert row.endswith("FAIL (1 of 3)")


def test_a_check_of_causality_and_of_items():
    x = pitfalls.normal(3, 5, 6)
    assert pitfalls.by_causality(lambda x: np.cumsum(x, axis=1), x).ok
    assert not pitfalls.by_causality(lambda x: np.cumsum(x[:, ::-1], axis=1)[:, ::-1], x).ok
    assert pitfalls.by_items(lambda x: x * 2, x).ok
    assert not pitfalls.by_items(lambda x: x - x.mean(axis=0), x).ok


def test_a_check_of_equality():
    assert pitfalls.by_equality("a", [1.0, 2.0], [1.0, 2.0]).ok
    assert pitfalls.by_equality("a", [1.0, 2.0], [1.0, 2.5]) == (
        False, "test: a (largest difference 0.5): FAIL"
    )  # fmt: skip
    assert not pitfalls.by_equality("a", [np.nan], [1.0]).ok


def test_runs_are_equal(facts):
    for name in ("deepcopy_stack", "one_dropout", "names_that_differ"):
        again = BY_NAME[name].run()
        for fact in FACTS[name]:
            np.testing.assert_array_equal(again[fact], facts[name][fact])
