"""Text for a console: columns of characters that are two wide, and consoles that lack them."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Sequence
from typing import TextIO

from npdecoder.core import Array

SHADES = " .:-=+*#%@"  # of weights from 0 to 1, in ASCII: every console has them


def prepare(stream: TextIO | None) -> None:
    """Make the stream write what its encoding lacks as \\uXXXX, in place of failing."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")


def shown(text: str, encoding: str | None = None) -> str:
    """The text as a console of this encoding will show it; None: that of stdout."""
    encoding = encoding or getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def width(text: str) -> int:
    """How many columns the text takes: Chinese characters take two, combining marks none."""
    marks = [unicodedata.category(c) in ("Mn", "Me") for c in text]
    wide = [unicodedata.east_asian_width(c) in "WF" for c in text]
    return sum(0 if m else 2 if w else 1 for m, w in zip(marks, wide))


def left(text: str, columns: int) -> str:
    """The text, filled up on the right to this many columns."""
    return text + " " * (columns - width(text))


def right(text: str, columns: int) -> str:
    return " " * (columns - width(text)) + text


def table(rows: Sequence[Sequence[str]], encoding: str | None = None) -> str:
    """Rows of cells in columns as wide as they need."""
    cells = [[shown(cell, encoding) for cell in row] for row in rows]
    columns = [max(map(width, column)) for column in zip(*cells)]
    return "\n".join(
        "  ".join(left(cell, n) for cell, n in zip(row, columns)).rstrip() for row in cells
    )


def weight_map(
    row_names: Sequence[str], column_names: Sequence[str], A: Array, encoding: str | None = None
) -> str:
    """A (rows, columns) of weights in [0, 1] as percentages, each with a shade."""
    row_names = [shown(name, encoding) for name in row_names]
    column_names = [shown(name, encoding) for name in column_names]
    first = max(map(width, row_names))
    columns = [max(width(name), 5) for name in column_names]
    lines = [" ".join([" " * first, *map(right, column_names, columns)])]
    for name, weights in zip(row_names, A):
        cells = [
            right(f"{SHADES[min(int(10 * w), 9)]}{round(100 * float(w)):4d}", n)
            for w, n in zip(weights, columns)
        ]
        lines.append(" ".join([right(name, first), *cells]))
    return "\n".join(line.rstrip() for line in lines)
