"""From a trace to one HTML file that needs no network: style, script and numbers are in it."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from npdecoder.core import Array
from npdecoder.files import replacing
from npdecoder.page.diagram import diagram
from npdecoder.page.formulas import FORMULAS, math
from npdecoder.trace import BACKWARD, Call, Trace

FOLDER = Path(__file__).parent
ROWS, COLUMNS, SLICES = 64, 64, 8  # of an array, more are left out: the page says so
QUERY_BY_KEY = ("S", "S_masked", "A", "A_dropped", "dA", "dA_dropped", "dS", "target_mask",
                "memory_mask", "mask", "keep", "target_keep")  # fmt: skip
OF_KEYS = ("k", "v", "K", "V", "key", "value", "keys", "values", "memory", "source_ids")


class Tokens(NamedTuple):
    """The words that the rows and columns stand for; of a language model, source is empty."""

    source: Sequence[str]
    target: Sequence[str]
    vocabulary: Sequence[str] = ()


def write_page(path: str | os.PathLike[str], trace: Trace, tokens: Tokens, title: str) -> None:
    """Write page(trace, tokens, title) to a file, whole or not at all."""
    text = page(trace, tokens, title)
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


def page(trace: Trace, tokens: Tokens, title: str) -> str:
    """One HTML document. Each number in it is the trace's own, to the last digit."""
    numbers: dict[tuple[Any, ...], int] = {}
    arrays: list[list[Any]] = []
    sources: dict[str, Any] = {}
    steps = []
    for call in trace:
        key = f"{call.cls}.{call.method}"
        if key not in sources:
            sources[key] = _source(call)
        steps.append({
            "layer": call.layer,
            "cls": call.cls,
            "method": call.method,
            "backward": call.direction == BACKWARD,
            "depth": call.depth,
            "source": key,
            "arrays": [
                _entry(call, name, array, tokens, numbers, arrays)
                for name, array in call.arrays().items()
                if array.dtype.kind in "biuf"
            ],
        })  # fmt: skip
    classes = {call.cls for call in trace} & FORMULAS.keys()
    data = {
        "steps": steps,
        "numbers": arrays,
        "sources": sources,
        "formulas": {
            cls: ["".join(map(math, lines)) for lines in FORMULAS[cls]] for cls in sorted(classes)
        },
    }
    # "</" could end the script element in the middle of the numbers
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")
    parts = {
        "TITLE": escape(title),
        "STYLE": (FOLDER / "page.css").read_text("utf-8"),
        "SCRIPT": (FOLDER / "page.js").read_text("utf-8"),
        "DIAGRAM": diagram(trace.names),
        "DATA": text,
    }
    document = (FOLDER / "page.html").read_text("utf-8")
    for name, part in parts.items():
        document = document.replace(f"{{{{{name}}}}}", part)
    return document


def _entry(
    call: Call,
    name: str,
    array: Array,
    tokens: Tokens,
    numbers: dict[tuple[Any, ...], int],
    arrays: list[list[Any]],
) -> dict[str, Any]:
    """An array of a step: name, role, shape, labels, and which numbers."""
    shown, left_out = _shown(array)
    content = shown.shape, shown.dtype.str, shown.tobytes()
    if content not in numbers:
        numbers[content] = len(arrays)
        arrays.append(_plain(shown))
    role = "in" if name in call.inputs else "grad" if name[1:] in call.grads else "value"
    rows, columns = _labels(call, name, array, tokens)
    return {
        "name": name,
        "role": role,
        "shape": list(array.shape),
        "shown": list(shown.shape),
        "rows": rows[: shown.shape[-2]] if shown.ndim > 1 else [],
        "columns": columns[: shown.shape[-1]] if shown.ndim else [],
        "heads": shown.ndim == 4,
        "cut": left_out,
        "numbers": numbers[content],
    }


def _shown(array: Array) -> tuple[Array, bool]:
    """The array with at most SLICES, ROWS and COLUMNS along its axes; whether some is left out."""
    limits = [SLICES] * max(array.ndim - 2, 0) + [ROWS, COLUMNS][max(0, 2 - array.ndim) :]
    shown = array[tuple(slice(0, limit) for limit in limits)] if array.ndim else array
    return np.ascontiguousarray(shown).reshape(shown.shape), shown.shape != array.shape


def _plain(array: Array) -> list[Any]:
    """Its numbers in one list; JSON has no NaN and no infinity: these are strings."""
    values = array.ravel().astype(np.float64 if array.dtype.kind == "f" else np.int64).tolist()
    return [v if np.isfinite(v) else str(v) for v in values]


def _labels(
    call: Call, name: str, array: Array, tokens: Tokens
) -> tuple[list[str], list[str]]:
    """Words for the last two axes, where they stand for words; else numbers."""
    rows, columns = ([str(i) for i in range(n)] for n in ((1, 1, *array.shape)[-2:]))
    encoder = call.layer.startswith(("encoder", "source", "decoder.memory_projection")) or (
        "cross_attention.W_" in call.layer and call.layer.endswith(("W_k", "W_v"))
    )
    own = tokens.source if encoder else tokens.target
    keys = tokens.source if encoder or "cross_attention" in call.layer else tokens.target
    plain = name[1:] if name.startswith("d") and name[1:] else name
    if plain.startswith(("memory", "source_ids")):
        keys = tokens.source
    words = keys if plain in OF_KEYS else own
    if plain in QUERY_BY_KEY and array.ndim >= 2:
        keys = tokens.source if "memory" in name else keys
        return _fitting(own, rows), _fitting(keys, columns)
    if plain in ("ids", "source_ids", "target_ids", "positions", "targets") and array.ndim == 2:
        return rows, _fitting(words, columns)
    if array.ndim >= 3:
        rows = _fitting(words, rows)
    if array.shape[-1:] == (len(tokens.vocabulary),) and "logits" in f"{name} {call.layer}":
        columns = list(tokens.vocabulary)
    if call.layer in ("output", "criterion") and array.shape[-1:] == (len(tokens.vocabulary),):
        columns = list(tokens.vocabulary)
    return rows, columns


def _fitting(words: Sequence[str], numbers: list[str]) -> list[str]:
    return list(words) if len(words) == len(numbers) else numbers


def _source(call: Call) -> dict[str, Any]:
    """The lines of a function, without its docstring, and where they stand."""
    try:
        lines, first = inspect.getsourcelines(call.code)
    except OSError:  # typed at a prompt
        return {"file": "", "lines": []}
    numbered = list(enumerate((line.rstrip() for line in lines), start=first))
    quotes = [i for i, (_, line) in enumerate(numbered) for _ in range(line.count('"""'))]
    if quotes:
        del numbered[quotes[0] : quotes[1] + 1]
    indent = min((len(t) - len(t.lstrip()) for _, t in numbered if t.strip()), default=0)
    path = Path(call.code.co_filename).parts
    where = "/".join(path[path.index("npdecoder", -4):]) if "npdecoder" in path[-4:] else path[-1]
    return {"file": where, "lines": [[number, text[indent:]] for number, text in numbered]}
