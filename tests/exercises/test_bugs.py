"""Find the bug: every bug shows its symptoms, and the same seed is the same bug."""

import copy
import functools
import inspect

import numpy as np
import pytest
from helpers import assert_close, parameter_gradients

from npdecoder import Dropout, Embedding, LayerNorm, Unembedding
from npdecoder.exercises import bugs, planted
from npdecoder.exercises.bugs import BUGS

each_bug = pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.wrong.__name__)


@functools.cache
def losses(bug, layer):
    return bugs.training(bug, layer)


def test_there_are_enough_and_all_planted_classes_are_used():
    classes = {value for value in vars(planted).values()
               if inspect.isclass(value) and value.__module__ == planted.__name__}
    assert {bug.wrong for bug in BUGS} == classes
    assert len(BUGS) >= 8


@each_bug
def test_gradcheck_sees_the_bug_and_passes_the_right_layer(bug):
    wrong = bugs.report(bug, bug.wrong)
    assert not wrong.ok
    assert wrong.hints == []
    assert bug.wrong.__name__ not in str(wrong)
    assert bugs.report(bug, bug.right).ok


WIDE = {"dtype": np.float64}
OF_EQUALS = LayerNorm(5, bias=False, **WIDE)
OF_EQUALS.gamma.value = np.full(5, 1.7)
TABLE = Embedding(7, 5, rng=0, **WIDE)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        (planted.GammaOutside, OF_EQUALS),
        (planted.SameForBeta, LayerNorm(5, bias=False, **WIDE)),
        (planted.MaskOfTheLastCall, Dropout(0.3)),  # no rng
        (planted.HeadForgotten, Unembedding(TABLE, bias=False)),
    ],
)
def test_a_mistake_is_the_only_one(wrong, right):
    """Where it makes no difference, the gradients are the right ones."""
    x = np.random.default_rng(0).standard_normal((2, 3, 5))
    mistaken = copy.deepcopy(right)
    mistaken.__class__ = wrong
    gradients = []
    for layer in right, mistaken:
        y, ctx = layer.forward(x)
        gradients.append(layer.backward(ctx, np.cos(y)))
    assert_close(*gradients)
    if wrong is not planted.HeadForgotten:
        assert_close(parameter_gradients(mistaken), parameter_gradients(right))


@each_bug
def test_the_curve_falls_all_the_same(bug):
    wrong = losses(bug, bug.wrong)
    assert wrong[-1] < 0.5 * wrong[0]
    assert max(wrong) == wrong[0]


def test_the_right_curve_falls():
    usual = losses(BUGS[0], BUGS[0].right)
    assert usual[-1] < 0.5 * usual[0]


@each_bug
def test_the_code_does_not_tell(bug):
    text = bugs.source(bug)
    assert text.startswith("def ")
    assert bug.wrong.__name__ not in text
    assert '"""' not in text
    assert "wrong" not in text.lower()
    assert all(len(line) <= 96 for line in text.splitlines())


@each_bug
def test_the_key_is_among_the_candidates(bug):
    assert len({bug.key, *bug.others}) == 5
    seed = BUGS.index(bug)
    for again in (seed, seed + len(BUGS)):
        puzzle = bugs.puzzle(again)
        assert puzzle.bug is bug
        assert puzzle.candidates[puzzle.key] == bug.key
        assert sorted(puzzle.candidates.values()) == sorted([bug.key, *bug.others])
        assert list(puzzle.candidates) == list("ABCDE")
        answer = bugs.answer(puzzle)
        assert answer.startswith(f"{puzzle.key}. ")
        assert bug.derivation.strip().splitlines()[0] in answer


def test_the_key_has_no_letter_of_its_own():
    keys = {bugs.puzzle(seed).key for seed in range(3 * len(BUGS))}
    assert keys == set("ABCDE")


def test_same_seed_same_text(monkeypatch):
    monkeypatch.setattr(bugs, "UPDATES", 30)
    seed = next(i for i, bug in enumerate(BUGS) if bug.right.__name__ == "Dropout")
    first, second = (bugs.show(bugs.puzzle(seed)) for _ in range(2))
    assert first == second
    assert first.isascii()
    assert max(map(len, first.splitlines())) <= 100
    assert "looks like" not in first
    assert BUGS[seed].wrong.__name__ not in first
    puzzle = bugs.puzzle(seed)
    for letter, text in puzzle.candidates.items():
        assert f"    {letter}. {text[:40]}" in first


def test_chart():
    assert bugs.chart([4.0, 1.0], [4.0, 2.0]).splitlines()[1:] == [
        "         0   4.00 ########################   4.00 ########################",
        "        15   1.00 ######                     2.00 ############",
    ]
