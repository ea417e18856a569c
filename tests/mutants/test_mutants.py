"""Every mutant can still be planted. That the tests catch them all: python tests/mutants/run.py"""

import ast
import shlex
from collections import Counter
from pathlib import Path

from mutants import KINDS, MUTANTS

import npdecoder

PACKAGE = Path(npdecoder.__file__).parent
TESTS = Path(__file__).resolve().parents[1]


def test_what_a_mutant_replaces_is_there_once():
    counts = {m.name: (PACKAGE / m.file).read_text("utf-8").count(m.old) for m in MUTANTS}
    assert {name: count for name, count in counts.items() if count != 1} == {}


def test_a_mutant_can_be_compiled():
    for m in MUTANTS:
        mutated = (PACKAGE / m.file).read_text("utf-8").replace(m.old, m.new)
        assert m.old != m.new, m.name
        ast.parse(mutated)


def test_names_are_distinct_and_the_tests_exist():
    assert [name for name, n in Counter(m.name for m in MUTANTS).items() if n > 1] == []
    for m in MUTANTS:
        assert (TESTS / shlex.split(m.tests)[0]).is_file(), m.name


def test_there_are_enough_of_every_kind():
    assert len(MUTANTS) >= 60
    assert min(map(len, KINDS.values())) >= 3
    assert len([m for m in MUTANTS if m.quick]) >= 10
