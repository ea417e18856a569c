"""npdecoder exercise: new, list, check, grade, bug."""

from __future__ import annotations

import argparse
import os
import textwrap
from pathlib import Path
from typing import Any

from npdecoder import console
from npdecoder.exercises import bugs
from npdecoder.exercises.catalogue import EXERCISES, README, TASKS, Exercise, find_exercise
from npdecoder.exercises.grading import (
    AS_SHIPPED,
    TIME_LIMIT,
    Submission,
    Verdict,
    as_json,
    check_file,
    grade_file,
    grade_folder,
)
from npdecoder.exercises.submission import (
    ERROR,
    MISSING,
    SOLVED,
    TIMEOUT,
    UNTOUCHED,
    WRONG,
)

MARKS = {SOLVED: "ok", WRONG: "wrong", UNTOUCHED: "-", ERROR: "error", TIMEOUT: "time",
         MISSING: "."}  # fmt: skip

JSON_KEYS = """
The JSON object that --json prints:
  format         1; a change of these keys makes it 2
  folder         FOLDER, as it was given
  time_limit     seconds
  exercises      the names of all exercises, in their order
  submissions    a list of:
    name         of the submission's folder
    solved       how many are
    results      for each exercise by its name:
      status     solved, wrong (a gradient is wrong, or the forward was changed), untouched
                 (backward is still to be written), error (it raised, or its process ended),
                 timeout, missing
      message    why: one or more lines, "" if solved
      failed     the tensors whose gradient is wrong, by name
      hints      what that looks like, a list of sentences
      imports    what it imports beside NumPy, Layer, Parameter and softmax: a ready layer of
                 npdecoder among them may have done the work
    other_files  Python files there whose names are no exercise's

Each submission is run in a process of its own, which is asked for gradients only: they are compared
here, and what it prints or says of itself counts for nothing. That is no sandbox: it may do to your
files what you may. Run what you trust, or run this in a container.
"""


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of an argparse parser."""
    exercise = commands.add_parser(
        "exercise",
        help="write a backward by yourself and have it graded; find the bug",
        description="Nine layers whose forward is given and whose backward is left to you. Without "
        "a further word: what is solved of the exercises in the current folder.",
        epilog="Begin with: npdecoder exercise new ex",
    )
    exercise.set_defaults(run=_list, folder=".")
    actions = exercise.add_subparsers(title="actions", metavar="ACTION")

    new = actions.add_parser(
        "new",
        help="copy a fresh set of exercises to a folder",
        description="Copy a fresh set of exercises to a folder, which is made if need be. No file "
        "is overwritten without --force.",
    )
    new.add_argument("folder", metavar="DIR", help="where to")
    new.add_argument(
        "--force", action="store_true", help="overwrite what is there: your solutions too"
    )
    new.set_defaults(run=_new)

    listing = actions.add_parser(
        "list",
        help="what is solved, begun or untouched",
        description="Say which exercises of a folder are solved, begun or untouched. Each file "
        "that was changed is run.",
    )
    listing.add_argument(
        "folder", nargs="?", default=".", metavar="DIR", help="default: the current folder"
    )
    listing.set_defaults(run=_list)

    check = actions.add_parser(
        "check",
        help="check your gradients, and see what is wrong with them",
        description="Compare the gradients of an exercise with differences of its forward, at "
        "several sizes. Exit code 0 if it is solved, 1 if not.",
        epilog="Example: npdecoder exercise check ex/01_linear.py",
    )
    check.add_argument("file", metavar="FILE", help="an exercise, under the name it came with")
    check.set_defaults(run=_check)

    grade = actions.add_parser(
        "grade",
        help="grade a folder of submissions, for a lecturer",
        description="Grade a folder of submissions: FOLDER/name/01_linear.py and so on for each "
        "name, or\nFOLDER/01_linear.py for one alone.",
        epilog=JSON_KEYS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    grade.add_argument("folder", metavar="FOLDER", help="of the submissions")
    grade.add_argument("--json", action="store_true", help="print one JSON object (see below)")
    grade.add_argument(
        "--time-limit", type=_seconds, default=TIME_LIMIT, metavar="SECONDS",
        help="that each file may take (default: %(default)g)",
    )  # fmt: skip
    grade.set_defaults(run=_grade)

    bug = actions.add_parser(
        "bug",
        help="find the mistake that is planted in a layer",
        description="Show a copy of a layer with one mistake, a training that succeeds all the "
        "same, and what gradcheck says; you name the mistake. The same seed has the same bug.",
        epilog="Example: npdecoder exercise bug --seed 1, and then "
        "npdecoder exercise bug --seed 1 --guess A (exit code 0 if it is right, 1 if not)",
    )
    bug.add_argument("--seed", type=_natural, default=0, help="which bug (default: %(default)s)")
    naming = bug.add_mutually_exclusive_group()
    naming.add_argument("--guess", metavar="LETTER", help="name the mistake")
    naming.add_argument("--answer", action="store_true", help="print the key")
    bug.set_defaults(run=_bug)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def _natural(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 0")
    return value


def _new(args: argparse.Namespace) -> int:
    folder = Path(args.folder)
    names = [exercise.file for exercise in EXERCISES] + [README]
    there = [name for name in names if os.path.lexists(folder / name)]
    if there and not args.force:
        more = f" (and {len(there) - 1} more)" if len(there) > 1 else ""
        raise ValueError(
            f"{folder / there[0]} is there already{more}: take another folder, or --force to "
            "overwrite"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes((TASKS / name).read_bytes())
    first = folder / EXERCISES[0].file
    print(f"saved: {len(EXERCISES)} exercises in {folder}")
    print(f"Open {first}, write its backward, then: npdecoder exercise check {first}")
    return 0


def _list(args: argparse.Namespace) -> int:
    folder = Path(args.folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder")
    if not any((folder / exercise.file).exists() for exercise in EXERCISES):
        for exercise in EXERCISES:
            print(f"{exercise.name:26}{_title(exercise)}")
        print(f"\nNone of them is in {folder.resolve()}. A fresh set: npdecoder exercise new ex")
        return 0
    solved = 0
    for exercise in EXERCISES:
        verdict = grade_file(folder / exercise.file, exercise)
        solved += verdict.status == SOLVED
        print(f"{exercise.name:26}{_state(verdict)}", flush=True)
    print(f"{solved} of {len(EXERCISES)} solved")
    return 0


def _title(exercise: Exercise) -> str:
    """What the first line of its file says after the number."""
    line = exercise.task.read_text("utf-8").splitlines()[0]
    return line.split(". ", 1)[1]


def _state(verdict: Verdict) -> str:
    if verdict.status == WRONG:
        return f"begun: {verdict.message}"
    if verdict.status in (ERROR, TIMEOUT):
        return f"begun: {verdict.message.splitlines()[-1]}"
    if verdict.status == UNTOUCHED and verdict.message != AS_SHIPPED:
        return "begun: backward is still to be written"
    return verdict.status


def _check(args: argparse.Namespace) -> int:
    exercise = find_exercise(args.file)
    if not os.path.isfile(args.file):
        raise FileNotFoundError(2, "no such file", args.file)
    verdict = check_file(args.file, exercise)
    print(f"{exercise.name}: {HEADLINES[verdict.status]}")
    if verdict.status == SOLVED:
        print(f"at {verdict.draws} different sizes; largest relative error {verdict.error:.0e}")
    elif verdict.status != UNTOUCHED:
        print(verdict.message)
    if verdict.report is not None:
        print(f"\n{verdict.report}")
    file, name = exercise.read
    print(f"\nread on: {file}, and its derivation:")
    print(f'    python -c "import npdecoder; help(npdecoder.{name})"')
    following = EXERCISES[EXERCISES.index(exercise) + 1 :]
    if verdict.status == SOLVED and following:
        print(f"next: {following[0].file}")
    return 0 if verdict.status == SOLVED else 1


HEADLINES = {
    SOLVED: "solved. Every gradient agrees with differences of the forward",
    WRONG: "not yet right",
    UNTOUCHED: "it is your turn. Write the backward, in the place of raise NotImplementedError",
    ERROR: "it stopped with an error",
}


def _grade(args: argparse.Namespace) -> int:
    graded: list[Submission] = []
    for one in grade_folder(args.folder, args.time_limit):
        if not args.json:
            if not graded:
                numbers = "".join(f"{exercise.name[:2]:>6}" for exercise in EXERCISES)
                print(f"{'':24}{numbers}  solved")
            marks = "".join(f"{MARKS[verdict.status]:>6}" for verdict in one.verdicts.values())
            print(f"{console.left(_short(one.name), 24)}{marks}{one.solved:8}", flush=True)
        graded.append(one)
    if args.json:
        print(as_json(args.folder, args.time_limit, graded))
        return 0
    print("\n- untouched, . missing, time: over the time limit. Why one is wrong: --json")
    for one in graded:
        for name, verdict in one.verdicts.items():
            if verdict.imports:
                print(f"{one.name}, {name}: imports {', '.join(verdict.imports)}")
        if one.other_files:
            print(f"{one.name}: no exercise is called {', '.join(one.other_files)}")
    return 0


def _short(name: str) -> str:
    name = console.shown(name)
    return name if console.width(name) < 24 else name[:11] + ".."


def _bug(args: argparse.Namespace) -> int:
    puzzle = bugs.puzzle(args.seed)
    if args.guess is not None:
        letter = args.guess.upper()
        if letter not in puzzle.candidates:
            raise ValueError(f"{args.guess!r} is not one of {', '.join(puzzle.candidates)}")
        right = letter == puzzle.key
        print(f"{letter}: {'right' if right else 'no'}. {puzzle.candidates[letter]}")
        return 0 if right else 1
    if args.answer:
        print(bugs.answer(puzzle))
        return 0
    print(bugs.show(puzzle))
    print(textwrap.dedent(f"""
        Which is it? A guess: npdecoder exercise bug --seed {args.seed} --guess A
        The key:              npdecoder exercise bug --seed {args.seed} --answer
        Another bug:          npdecoder exercise bug --seed {args.seed + 1}""").rstrip())
    return 0
