"""The README's programs do what it says; its set-up commands are those that the gate runs."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROGRAMS = [b for b in re.findall(r"```python\n(.*?)```", README, re.S) if b.startswith("import")]


def output(program):
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.run(
            [sys.executable, "-W", "error", "-"],
            input=program,
            capture_output=True,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            check=True,
            encoding="utf-8",
        )
    return run.stdout


def test_the_readme_has_the_programs_that_are_tested_here():
    assert len(PROGRAMS) == 5


def test_the_wrong_layer_fails_as_printed_and_the_mended_one_passes():
    printed = re.search(r"```\n(gradcheck of Sigmoid.*?)```", README, re.S).group(1)
    assert output(PROGRAMS[0]) == printed
    mended = PROGRAMS[0].replace("return dy * ctx ", "return dy * ctx * (1 - ctx) ")
    assert mended != PROGRAMS[0]
    assert output(mended).endswith("all ok\n")


def test_the_training_step_learns_the_three_words():
    expected = re.search(r"print\(logits.argmax.*# (.*)", README).group(1)
    assert output(PROGRAMS[2]).strip() == expected


def test_numbers_in_and_numbers_out():
    """By hand: mean 7/3, var 14/9."""
    rows = output(PROGRAMS[1]).splitlines()
    assert rows[:2] == ["[[-1.069  -0.2673  1.3363]]", "[[0.8018]]"]
    assert len(rows) == 5


def test_three_ways_to_decode_and_a_state_that_equals_a_full_forward_pass():
    program = PROGRAMS[3] + (
        "ids = np.concatenate([prompts, [[4], [6]]], axis=1)\n"
        "np.testing.assert_allclose(logits, model(ids)[:, -1], atol=1e-5)\n"
    )
    greedy, drawn, beams = output(program).splitlines()
    assert greedy.count("[") == drawn.count("[") == 3
    assert beams.count("Hypothesis") == 2


def test_a_checkpoint_gives_back_what_it_was_given():
    program = PROGRAMS[4] + "print(type(optimizer).__name__, step, extra)\n"
    assert output(program) == "AdamW 100 {'words': ['I', 'love', 'you']}\n"


def test_the_set_up_section_has_the_two_commands():
    section = README.split("## Set up")[1].split("\n## ")[0]
    commands = re.findall(r"^pip install .*", section, re.M)
    assert commands == ["pip install . && npdecoder demo", "pip install '.[test]' && pytest"]
