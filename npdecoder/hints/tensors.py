"""What the arrays of the tensors say: what backward gave beside what the differences gave."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from npdecoder.core import Array, Parameter
from npdecoder.hints.facts import (
    Facts,
    Tensor,
    explained,
    flat,
    flows_of,
    is_residual,
    same,
    wrong_entries,
)

UNNAMED = ", entry by entry, which is none of the sizes"


def overwritten(failed: list[Tensor]) -> list[tuple[tuple[str, ...], str]]:
    names = tuple(tensor.name for tensor in failed if not tensor.is_input and not tensor.twice)
    hint = "overwritten: a second backward does not add the same to .grad, where += belongs"
    return [(names, hint)] if names else []


def swapped(failed: list[Tensor]) -> list[tuple[tuple[str, ...], str]]:
    found: list[tuple[tuple[str, ...], str]] = []
    for i, first in enumerate(failed):
        for second in failed[i + 1 :]:
            crossed = same(first.analytic, second.numeric), same(second.analytic, first.numeric)
            if first.is_input == second.is_input and all(crossed):
                hint = "swapped: each of the two holds, entry by entry, the gradient of the other"
                found.append(((first.name, second.name), hint))
    return found


def of_another(facts: Facts, failed: list[Tensor]) -> list[tuple[tuple[str, ...], str]]:
    found: list[tuple[tuple[str, ...], str]] = []
    for tensor in failed:
        for other in facts.tensors:
            if other.ok and other.numeric.any() and same(tensor.analytic, other.numeric):
                hint = f"wrong tensor: it holds, entry by entry, the gradient of {other.name}"
                found.append(((tensor.name,), hint))
                break
    return found


def alone(facts: Facts) -> Callable[[Tensor], str | None]:
    """What one tensor says by itself."""
    sizes = _sizes(facts)
    heads = getattr(facts.layer, "num_heads", None)

    def look(tensor: Tensor) -> str | None:
        a, n = tensor.analytic, tensor.numeric
        if a.ndim >= 2 and same(a.swapaxes(-1, -2), n):
            return "transposed: with its last two axes exchanged it is right"
        if a.shape != n.shape:
            return None
        if not np.isfinite(a).all():
            return "not finite: backward gives infinity or NaN"
        if not tensor.twice and same(a, n):  # it is the second backward that is wrong
            return None
        largest = float(np.abs(n).max(initial=0.0))
        if not a.any():
            if tensor.is_input and any(past and same(n, g) for _, g, past in flows_of(facts)):
                return None  # more than that can be said
            return f"zero everywhere: backward gives only 0, the differences up to {largest:.3g}"
        if largest > 0.0:
            c = float((a * n).sum() / (n * n).sum())
            if c != 0.0 and same(a, c * n) and not (abs(c - 2.0) < 1e-3 and is_residual(facts)):
                return _factor(c, a.size, sizes)
        wrong = wrong_entries(tensor)
        if not np.abs(n[wrong]).max(initial=0.0) > 1e-8 * max(largest, np.abs(a).max()):
            return ("only masked positions wrong: every wrong entry is one that the output does "
                    f"not depend on, of gradient 0 ({int(wrong.sum())} of {wrong.size} entries)")
        head = _one_head(wrong, heads)
        if head is not None:
            return f"only one head wrong: all wrong entries are in head {head} (counted from 0)"
        return _one_index(wrong)

    return look


def _factor(c: float, size: int, sizes: dict[str, float]) -> str | None:
    if abs(c + 1.0) < 1e-3:
        return "sign flipped: backward is -1 times the differences, entry by entry"
    if size < 2:
        return None
    sign = "-" if c < 0.0 else ""
    which = [f"{sign}{name}" for name, value in sizes.items()
             if abs(abs(c) / value - 1.0) < 1e-3]
    which += [f"{sign}1/{name}" for name, value in sizes.items()
              if abs(abs(c) * value - 1.0) < 1e-3]
    hint = f"constant factor: backward is {c:.6g} times the differences"
    if not which:
        return hint + UNNAMED
    counted = " (a sum where mean was taken)" if "N" in which else ""
    return f"{hint}, entry by entry, which may be {' or '.join(which)}{counted}"


def _sizes(facts: Facts) -> dict[str, float]:
    """The letters of the shapes, and what backwards are scaled by."""
    sizes: dict[str, float] = {}

    def put(name: str, value: float) -> None:
        if value > 0 and abs(value - 1.0) > 1e-9:
            sizes.setdefault(name, float(value))

    arrays = [x for value in facts.inputs for x in flat(value)]
    main = next((x for x in arrays if x.ndim >= 2), None)
    heads = getattr(facts.layer, "num_heads", None)
    if main is not None:
        B, T = main.shape[0], main.shape[-2 if main.dtype.kind == "f" and main.ndim > 2 else 1]
        if main.dtype.kind == "f" and main.ndim == 2:  # (N, d): rows and their width
            put("N", main.shape[0])
            put("d", main.shape[1])
            put("sqrt(d)", math.sqrt(main.shape[1]))
        else:
            put("B", B)
            put("T", T)
            put("N", B * T)
        for other in arrays:
            if other.dtype.kind == "f" and other.ndim >= 3 and other.shape[-2] != T:
                put("S", other.shape[-2])
                put("B S", B * other.shape[-2])
            if other.dtype.kind in "iu" and other.ndim:
                put("N", other.size)
        if main.dtype.kind == "f" and main.ndim == 4:
            heads = main.shape[1]
            put("sqrt(d_k)", math.sqrt(main.shape[-1]))
            put("d_k", main.shape[-1])
        elif main.dtype.kind == "f" and main.ndim == 3:
            put("d_model" if heads else "d", main.shape[-1])
            put("sqrt(d_model)" if heads else "sqrt(d)", math.sqrt(main.shape[-1]))
    if heads:
        put("h", heads)
        put("sqrt(h)", math.sqrt(heads))
        W_q = getattr(getattr(facts.layer, "W_q", None), "W", None)
        if isinstance(W_q, Parameter):
            put("d_k", W_q.shape[1] / heads)
            put("sqrt(d_k)", math.sqrt(W_q.shape[1] / heads))
    for y in facts.y:
        if main is not None and y.ndim:
            if main.dtype.kind != "f" or y.shape[-1] != main.shape[-1]:
                put("V", y.shape[-1])
        elif main is not None and main.dtype.kind == "f":
            put("V", main.shape[-1])
    for tensor in facts.tensors:
        if not tensor.is_input and tensor.numeric.ndim == 2:
            reads = main is not None and main.shape[-1:] == tensor.numeric.shape[:1]
            name = "d_k" if reads and main is not None and main.dtype.kind == "f" else "d_model"
            put(f"sqrt({name})", math.sqrt(tensor.numeric.shape[1]))
    counted = _counted(facts)
    if counted is not None:
        put("N counted", counted[0])
        put("N counted / N", counted[0] / max(counted[1], 1))
    for name in ("p", "dropout"):
        p = getattr(facts.layer, name, None)
        if isinstance(p, float) and 0.0 < p < 1.0:
            put("1 - p", 1.0 - p)
    return sizes


def _counted(facts: Facts) -> tuple[int, int] | None:
    ignored = getattr(facts.layer, "ignore_index", None)
    ids = [x for value in facts.inputs for x in flat(value) if x.dtype.kind in "iu"]
    if ignored is None or not ids:
        return None
    return int((ids[-1] != ignored).sum()), ids[-1].size


def _one_head(wrong: Array, heads: int | None) -> int | None:
    """The head that all wrong entries are in: axis 1 of (B, h, T, d), or a block of a matrix."""
    views = []
    if wrong.ndim == 4 and wrong.shape[1] > 1 and heads in (None, wrong.shape[1]):
        views.append(wrong.swapaxes(0, 1).reshape(wrong.shape[1], -1))
    if heads and heads > 1 and wrong.ndim <= 2:
        if wrong.shape[-1] % heads == 0:
            views.append(wrong.reshape(-1, heads, wrong.shape[-1] // heads)
                         .swapaxes(0, 1).reshape(heads, -1))
        if wrong.ndim == 2 and wrong.shape[0] % heads == 0:
            views.append(wrong.reshape(heads, -1))
    for view in views:
        wrong_heads = np.flatnonzero(view.any(axis=1))
        if len(wrong_heads) == 1 and view[wrong_heads[0]].mean() > 0.3:
            return int(wrong_heads[0])
    return None


def _one_index(wrong: Array) -> str | None:
    for axis, size in enumerate(wrong.shape):
        others = tuple(k for k in range(wrong.ndim) if k != axis)
        indices = np.flatnonzero(wrong.any(axis=others))
        if size > 2 and len(indices) == 1 and wrong.size > size:
            return f"only one place wrong: all wrong entries have index {indices[0]} on axis {axis}"
    return None


def residual(facts: Facts) -> Callable[[Tensor], str | None]:
    """Does the difference equal the gradient that the output, or a part, was given?"""
    def look(tensor: Tensor) -> str | None:
        if not tensor.is_input or tensor.analytic.shape != tensor.numeric.shape:
            return None
        if not tensor.numeric.any():
            return None
        missing = tensor.numeric - tensor.analytic
        return explained(missing, flows_of(facts))

    return look
