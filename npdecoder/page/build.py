"""From a trace to one HTML file that needs no network: style, script and numbers are in it."""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import numpy as np

from npdecoder.core import Array
from npdecoder.files import replacing
from npdecoder.page.diagram import diagram
from npdecoder.page.formulas import FORMULAS, formula_key, math
from npdecoder.trace import BACKWARD, FORWARD, Call, Trace

FOLDER = Path(__file__).parent
LIMITS = (64, 32, 24, 16, 12, 8)  # rows and columns of an array; the page says what is left out
SLICES = 8  # of sentences and heads
BUDGET = 900_000  # bytes of the data: the largest of LIMITS that fits is taken
QUERY_BY_KEY = ("S", "S_masked", "A", "A_dropped", "dA", "dA_dropped", "dS", "target_mask",
                "memory_mask", "mask", "keep", "target_keep")  # fmt: skip
OF_KEYS = ("k", "v", "K", "V", "key", "value", "keys", "values", "memory", "source_ids")


class Tokens(NamedTuple):
    """The words that the rows and columns stand for; of a language model, source is empty.

    target: what the decoder reads; wanted: what it is to say.
    """

    source: Sequence[str]
    target: Sequence[str]
    vocabulary: Sequence[str] = ()
    wanted: Sequence[str] = ()


def write_page(path: str | os.PathLike[str], trace: Trace, tokens: Tokens, title: str) -> None:
    """Write page(trace, tokens, title) to a file, whole or not at all."""
    text = page(trace, tokens, title)
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


def page(trace: Trace, tokens: Tokens, title: str) -> str:
    """One HTML document. Each number in it is the trace's own, to the last digit."""
    for limit in LIMITS:
        # "</" could end the script element in the middle of the numbers
        data = json.dumps(_data(trace, tokens, limit), ensure_ascii=False, separators=(",", ":"))
        if len(data) < BUDGET:
            break
    parts = {
        "TITLE": escape(title),
        "STYLE": (FOLDER / "page.css").read_text("utf-8"),
        "SCRIPT": (FOLDER / "page.js").read_text("utf-8"),
        "DIAGRAM": diagram(trace.names),
        "DATA": data.replace("</", "<\\/"),
    }
    document = (FOLDER / "page.html").read_text("utf-8")
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda match: parts[match.group(1)], document)


def _data(trace: Trace, tokens: Tokens, limit: int) -> dict[str, Any]:
    """What the script shows."""
    numbers: dict[tuple[Any, ...], int] = {}
    arrays: list[list[Any]] = []
    sources: dict[str, Any] = {}
    steps = []
    pairs = _pairs(trace)
    formulas: dict[str, list[str]] = {}  # as MathML, forward and backward
    for call in trace:
        key = f"{call.cls}.{call.method}"
        if key not in sources:
            sources[key] = []
        sources[key] += [s for s in map(_source, call.codes) if s not in sources[key]]
        known = formula_key(trace.names[call.layer], call.method, call.arrays())
        if known in FORMULAS:
            formulas[" ".join(known)] = ["".join(map(math, lines)) for lines in FORMULAS[known]]
        steps.append({
            "layer": call.layer,
            "cls": call.cls,
            "method": call.method,
            "backward": call.direction == BACKWARD,
            "pair": pairs.get(call.index, -1),
            "source": key,
            "formulas": " ".join(known),
            "arrays": [
                _entry(_shown(array, limit), name, array, _labels(call, trace, name, array, tokens),
                       call, numbers, arrays)
                for name, array in call.arrays().items()
                if array.dtype.kind in "biuf"
            ],
        })  # fmt: skip
    return {"steps": steps, "numbers": arrays, "sources": sources, "formulas": formulas}


def _pairs(trace: Trace) -> dict[int, int]:
    """Which backward undoes which forward: of the calls of one layer the last comes first."""
    pairs: dict[int, int] = {}
    open_calls: dict[tuple[str, str], list[int]] = {}
    for call in trace:
        method = call.method.removesuffix(BACKWARD).removesuffix("_") or FORWARD
        waiting = open_calls.setdefault((call.layer, method), [])
        if call.direction == FORWARD:
            waiting.append(call.index)
        elif waiting:
            pairs[call.index] = waiting.pop()
            pairs[pairs[call.index]] = call.index
    return pairs


def _entry(
    shown: Array,
    name: str,
    array: Array,
    labels: tuple[list[str], list[str]],
    call: Call,
    numbers: dict[tuple[Any, ...], int],
    arrays: list[list[Any]],
) -> dict[str, Any]:
    """An array of a step: name, role, shape, labels, and which numbers."""
    content = shown.shape, shown.dtype.str, shown.tobytes()
    if content not in numbers:
        numbers[content] = len(arrays)
        arrays.append(_plain(shown))
    role = "in" if name in call.inputs else "grad" if name[1:] in call.grads else "value"
    rows, columns = labels
    return {
        "name": name,
        "role": role,
        "shape": list(array.shape),
        "shown": list(shown.shape),
        "rows": rows[: shown.shape[-2]] if shown.ndim > 1 else [],
        "columns": columns[: shown.shape[-1]] if shown.ndim else [],
        "cut": shown.shape != array.shape,
        "numbers": numbers[content],
    }


def _shown(array: Array, limit: int) -> Array:
    """The array with at most SLICES, and limit rows and columns, along its axes."""
    limits = [SLICES] * max(array.ndim - 2, 0) + [limit] * min(array.ndim, 2)
    shown = array[tuple(slice(0, n) for n in limits)] if array.ndim else array
    return np.ascontiguousarray(shown).reshape(shown.shape)


def _plain(array: Array) -> list[Any]:
    """Its numbers in one list; JSON has no NaN and no infinity: these are strings."""
    values = array.ravel().astype(np.float64 if array.dtype.kind == "f" else np.int64).tolist()
    return [v if np.isfinite(v) else str(v) for v in values]


def _reads_source(call: Call, trace: Trace) -> bool:
    """Whether the rows of what the call computes are source words: by where it stands."""
    if call.layer.startswith("decoder.memory_projection") or (
        "cross_attention.W_" in call.layer and call.layer.endswith(("W_k", "W_v"))
    ):
        return True
    outer: Call | None = call
    while outer is not None:
        if outer.method.startswith(("encode", "decode")):
            return outer.method.startswith("encode")
        outer = None if outer.parent is None else trace.calls[outer.parent]
    return call.layer.startswith(("encoder", "source"))


def _labels(
    call: Call, trace: Trace, name: str, array: Array, tokens: Tokens
) -> tuple[list[str], list[str]]:
    """Words for the last two axes, where they stand for words; else numbers."""
    rows, columns = ([str(i) for i in range(n)] for n in ((1, 1, *array.shape)[-2:]))
    encoder = _reads_source(call, trace)
    own = tokens.source if encoder else tokens.target
    keys = tokens.source if encoder or "cross_attention" in call.layer else tokens.target
    plain = re.sub(r"\[\d+\]$", "", name[1:] if name.startswith("d") and name[1:] else name)
    if plain.startswith(("memory", "source_ids")) or (
        plain in ("K", "V") and "attention" not in call.layer
    ):
        keys = tokens.source  # (K, V) of a layer or a stack are the memory's
    words = keys if plain in OF_KEYS else own
    weights = call.layer.endswith((".attention.softmax", ".attention.dropout"))
    if (plain in QUERY_BY_KEY and array.ndim >= 2) or (weights and array.ndim >= 3):
        keys = tokens.source if "memory" in name else keys
        return _fitting(own, rows), _fitting(keys, columns)
    if call.layer == "criterion" and array.ndim == 2:
        return rows, _fitting(tokens.wanted, columns)
    if plain in ("ids", "source_ids", "target_ids", "positions") and array.ndim == 2:
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


def _source(code: CodeType) -> dict[str, Any]:
    """The lines of a function, without its docstring, and where they stand."""
    try:
        lines, first = inspect.getsourcelines(code)
    except OSError:  # typed at a prompt
        return {"file": "", "lines": []}
    numbered = list(enumerate((line.rstrip() for line in lines), start=first))
    quotes = [i for i, (_, line) in enumerate(numbered) for _ in range(line.count('"""'))]
    if quotes:
        del numbered[quotes[0] : quotes[1] + 1]
    indent = min((len(t) - len(t.lstrip()) for _, t in numbered if t.strip()), default=0)
    *folders, where = Path(code.co_filename).parts
    if "npdecoder" in folders:  # the last of this name: a clone's folder may have it too
        start = len(folders) - 1 - folders[::-1].index("npdecoder")
        where = "/".join([*folders[start:], where])
    return {"file": where, "lines": [[number, text[indent:]] for number, text in numbered]}
