"""The exercises' files: what they promise, and that the solutions answer them."""

import ast
from pathlib import Path

import pytest

from npdecoder.exercises.catalogue import EXERCISES, README, TASKS, find_exercise
from npdecoder.exercises.child import foreign_imports
from npdecoder.exercises.grading import check_file
from npdecoder.exercises.submission import SOLVED, UNTOUCHED

SOLUTIONS = Path(__file__).parent / "solutions"

each_exercise = pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: e.name)


def without_backward(path):
    """The file's code as text, but for the body of backward."""
    tree = ast.parse(path.read_text("utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "backward":
            node.body = []
    return ast.dump(tree)


def test_tasks_and_solutions_are_those_of_the_catalogue():
    files = sorted(exercise.file for exercise in EXERCISES)
    assert sorted(path.name for path in TASKS.glob("*.py")) == files
    assert sorted(path.name for path in SOLUTIONS.glob("*.py")) == files
    for exercise in EXERCISES:
        assert exercise.name in (TASKS / README).read_text("utf-8")


@each_exercise
def test_task_is_a_page_that_stands_alone(exercise):
    text = exercise.task.read_text("utf-8")
    tree = ast.parse(text)
    doc = ast.get_docstring(tree)
    assert doc.startswith(f"Exercise {int(exercise.name[:2])}. ")
    assert "It shall" in doc
    assert "On paper first" in doc
    assert f"npdecoder exercise check {exercise.file}" in doc
    assert text.endswith('        raise NotImplementedError("your turn")\n')
    assert foreign_imports(str(exercise.task)) == []
    assert exercise.cls in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    file, _ = exercise.read
    assert (TASKS.parents[2] / file).exists()


@each_exercise
def test_solution_is_the_task_with_its_backward(exercise):
    solution = SOLUTIONS / exercise.file
    assert without_backward(solution) == without_backward(exercise.task)
    assert "NotImplementedError" not in solution.read_text("utf-8")


@each_exercise
def test_solution_is_solved_and_task_untouched(exercise):
    verdict = check_file(SOLUTIONS / exercise.file, exercise)
    assert verdict.status == SOLVED, verdict.report or verdict.message
    assert verdict.draws == len(exercise.sizes) == 3
    assert verdict.error < 1e-6
    assert check_file(exercise.task, exercise).status == UNTOUCHED


@each_exercise
def test_sizes_differ_within_a_draw_and_between_draws(exercise):
    free = [i for i, letter in enumerate(exercise.letters.split())
            if letter not in ("layers", "ignore_index")]
    for row in exercise.sizes:
        sizes = [row[i] for i in free]
        assert len(set(sizes)) == len(sizes)
        assert set(sizes) <= {2, 3, 5, 7, 11, 13}
    for i in free:
        assert len({row[i] for row in exercise.sizes}) > 1


def test_draws_hold_what_hides_mistakes():
    draws = {e.name: [draw for _, draw, _ in e.draws()] for e in EXERCISES}
    for draw in draws["04_cross_entropy"]:
        _, targets = draw.inputs
        counted = (targets != draw.arguments[0]).sum()
        assert counted not in (0, targets.size, *draw.inputs[0].shape)
    for draw in draws["06_attention"] + draws["08_shared_memory"]:
        mask = draw.inputs[-1]
        assert mask.any()
        assert not mask.all()
        assert not mask[0, -1].any()
    for draw in draws["09_tied_embeddings"]:
        (ids,) = draw.inputs
        assert len(set(ids.ravel())) < min(ids.size, draw.arguments[0])


def test_draws_are_the_same_every_time():
    for exercise in EXERCISES:
        first, second = exercise.draws(), exercise.draws()
        for (shown, a, _), (shown_again, b, _) in zip(first, second):
            assert shown == shown_again
            assert all((x == y).all() for x, y in zip(a.inputs, b.inputs))


def test_find_exercise_goes_by_the_name():
    assert find_exercise("some/where/03_layer_norm.py").name == "03_layer_norm"
    with pytest.raises(ValueError, match=r"norm.py is not the name .* 09_tied_embeddings.py"):
        find_exercise("norm.py")
