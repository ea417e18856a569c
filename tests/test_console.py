"""Columns of characters that are two wide, on consoles that lack some of them."""

from __future__ import annotations

import io
import sys
import unicodedata
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npdecoder import console

ENCODINGS = ["ascii", "cp1252", "gbk", "utf-8", "latin-1", "utf-16", "big5", "cp437"]
ROWS = [
    ["English", "npdecoder", "phrase book"],
    ["I love you", "我 爱 你", "我 爱 你"],
    ["Is it?", "是 吗 ？", "吗？ ok"],
    ["", "é naïve", "e\u0301 ø"],
]


def columns_of(text: str) -> int:
    """How far a console's cursor moves, written apart from console.width."""
    moved = 0
    for c in text:
        if unicodedata.category(c) in ("Mn", "Me"):
            continue
        moved += 1 + (unicodedata.east_asian_width(c) in ("W", "F"))
    return moved


def starts(line: str, cells: list[str]) -> list[int]:
    """The console column at which each cell starts."""
    at, found = 0, []
    for cell in cells:
        at = line.index(cell, at)
        found.append(columns_of(line[:at]))
        at += len(cell)
    return found


def ends(line: str, cells: list[str]) -> list[int]:
    return [s + columns_of(c) for s, c in zip(starts(line, cells), cells)]


@pytest.mark.parametrize(
    ("text", "width"),
    [
        ("", 0),
        ("tea", 3),
        ("我爱你", 6),
        ("我 爱", 5),
        ("？，。", 6),
        ("Ａ", 2),
        ("ｱ", 1),
        ("한국", 4),
        ("é", 1),
        ("e\u0301", 1),
        ("e\u0301\u0302", 1),
        ("\U00020000", 2),
        ("ø§", 2),
    ],
)
def test_width(text: str, width: int) -> None:
    assert console.width(text) == width


@pytest.mark.parametrize(
    ("text", "width"),
    [
        ("\u0e17\u0e35\u0e48", 1),  # Thai: a letter, a vowel and a tone above it
        ("\u0915\u0947", 1),  # Devanagari ke: the vowel sign stands above
        ("\u0628\u0651\u064e", 1),  # Arabic: shadda and fatha
        ("\u05d1\u05bc", 1),  # Hebrew: dagesh
        ("1\u20dd", 1),  # in a circle
    ],
)
def test_combining_marks_of_every_script_take_no_column(text: str, width: int) -> None:
    assert console.width(text) == width == columns_of(text)


@given(st.text(st.sampled_from("a我？e\u0301 é"), max_size=12), st.integers(0, 20))
def test_left_and_right_fill_up(text: str, columns: int) -> None:
    expected = max(columns, columns_of(text))
    assert columns_of(console.left(text, columns)) == expected
    assert columns_of(console.right(text, columns)) == expected
    assert console.left(text, columns).startswith(text)
    assert console.right(text, columns).endswith(text)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_table_is_aligned_and_can_be_written(encoding: str) -> None:
    lines = console.table(ROWS, encoding).split("\n")
    assert len(lines) == len(ROWS)
    cells = [[console.shown(cell, encoding) for cell in row] for row in ROWS]
    expected = starts(lines[0], cells[0])
    for line, row in zip(lines, cells):
        line.encode(encoding)
        assert line == line.rstrip()
        assert starts(line, row)[1:] == expected[1:]
    for j in range(len(ROWS[0]) - 1):  # two spaces after the widest cell
        assert expected[j + 1] - expected[j] == max(columns_of(row[j]) for row in cells) + 2


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_weight_map_is_aligned_and_can_be_written(encoding: str) -> None:
    names = ["我", "爱", "<eos>", "e\u0301"]
    columns = ["i", "internationalization", "你", "<eos>", "？"]
    A = np.linspace(0, 1, 20).reshape(4, 5)
    text = console.weight_map(names, columns, A, encoding)
    head, *lines = text.split("\n")
    text.encode(encoding)
    shown_names = [console.shown(name, encoding) for name in names]
    shown_columns = [console.shown(name, encoding) for name in columns]
    expected = ends(head, shown_columns)
    assert len(lines) == len(names)
    first = max(map(columns_of, shown_names))
    for name, line, weights in zip(shown_names, lines, A):
        numbers = [str(round(100 * w)) for w in weights]
        assert ends(line, [name, *numbers]) == [first, *expected]


def test_weight_map_shows_the_weights() -> None:
    A = np.array([[0.0, 1.0], [0.254, 0.746], [0.999, 0.001]], np.float32)
    text = console.weight_map(["a", "b", "c"], ["x", "y"], A, "utf-8")
    assert [line.split() for line in text.split("\n")] == [
        ["x", "y"],
        ["a", "0", "@", "100"],
        ["b", ":", "25", "#", "75"],
        ["c", "@", "100", "0"],
    ]


@pytest.mark.parametrize("w", [-1e-9, 0.0, 1.0, 1.0 + 1e-6, 1e-30])
def test_weight_map_at_the_ends(w: float) -> None:
    line = console.weight_map(["a"], ["x"], np.array([[w]]), "ascii").split("\n")[1]
    assert line.split()[-1] == str(round(100 * w))


@given(w=st.floats(0, 1))
def test_a_greater_weight_has_no_lighter_shade(w: float) -> None:
    lighter = console.weight_map(["a"], ["x", "y"], np.array([[w / 2, w]]), "ascii")
    cells = lighter.split("\n")[1][2:]
    assert console.SHADES.index(cells[0]) <= console.SHADES.index(cells[6])


@pytest.mark.parametrize("encoding", ENCODINGS)
@given(text=st.text(max_size=10))
def test_shown_never_fails(encoding: str, text: str) -> None:
    text += "\ud800\uffff\U0001f600"
    shown = console.shown(text, encoding)
    shown.encode(encoding)  # all of it can be written
    assert console.shown(shown, encoding) == shown
    console.table([[text, text], ["", text]], encoding).encode(encoding)
    console.weight_map([text], [text], np.ones((1, 1)), encoding).encode(encoding)


@pytest.mark.parametrize(
    ("encoding", "expected"),
    [("utf-8", "我 é"), ("gbk", "我 é"), ("cp1252", "\\u6211 é"), ("ascii", "\\u6211 \\xe9")],
)
def test_what_is_shown(encoding: str, expected: str) -> None:
    assert console.shown("我 é", encoding) == expected


class Console(io.TextIOWrapper):
    def __init__(self, encoding: str) -> None:
        super().__init__(io.BytesIO(), encoding=encoding, newline="")

    def bytes(self) -> bytes:
        self.flush()
        return self.buffer.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_prepare_makes_writing_safe(encoding: str) -> None:
    stream = Console(encoding)
    console.prepare(stream)
    print("我 爱 你 \U0001f600 \ud800", file=stream)
    expected = "我 爱 你 \U0001f600 \ud800\n".encode(encoding, "backslashreplace")
    assert stream.bytes() == expected


def test_prepare_takes_any_stream() -> None:
    console.prepare(None)
    console.prepare(io.StringIO())


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_encoding_is_that_of_stdout(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    monkeypatch.setattr(sys, "stdout", Console(encoding))
    assert console.table(ROWS) == console.table(ROWS, encoding)
    A = np.full((1, 1), 0.5)
    assert console.weight_map(["我"], ["爱"], A) == console.weight_map(["我"], ["爱"], A, encoding)


@pytest.mark.parametrize("stdout", [None, io.StringIO(), object()])
def test_a_stdout_without_encoding(monkeypatch: pytest.MonkeyPatch, stdout: Any) -> None:
    monkeypatch.setattr(sys, "stdout", stdout)
    assert console.shown("我") == "我"


def test_small_tables() -> None:
    assert console.table([]) == ""
    assert console.table([["a"]]) == "a"
    assert console.table([["", ""]]) == ""
    assert console.table([["a", "b"], ["我", "c"]], "utf-8") == "a   b\n我  c"
