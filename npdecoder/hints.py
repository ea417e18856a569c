"""Hints: what a gradient that failed its check looks like, each hint with its evidence.

gradcheck asks here when it has failed. What can be told from the two arrays of one tensor, what
backward returned and what the differences say, is told first; then what several tensors say
together; and where neither explains it, the layer's parts are looked at one by one: is one of them
wrong by itself, or where does the gradient that flows between them first go wrong?

The hints are sentences that begin with what they see:

    zero everywhere, sign flipped, constant factor, transposed, swapped, overwritten,
    residual path missing, residual path doubled, left out of a sum, added twice, wrong tensor,
    gamma left out, sum where mean was taken, term missing, tied use missing,
    only masked positions wrong, only one head wrong, only one place wrong, not finite,
    in a part, wiring, kink
"""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from npdecoder.core import Array, Parameter, find_parameters
from npdecoder.trace import BACKWARD, FORWARD, Trace, named_layers

UNNAMED = ", entry by entry, which is none of the sizes"
CLOSE = 1e-4  # two arrays are the same if they differ by less than this part of the largest entry
BUDGET = 40_000  # forward passes that the search among the parts may cost


class Tensor(NamedTuple):
    """An input or a parameter: what backward gave, what the differences gave, and the verdict."""

    name: str
    analytic: Array
    numeric: Array
    ok: bool
    is_input: bool
    twice: bool  # a second backward returned or added the same again
    kinks: int  # entries that failed at a kink


class Facts(NamedTuple):
    """What gradcheck knows. gradients(dy): what backward gives for another dy, by tensor name."""

    layer: Any
    inputs: tuple[Any, ...]
    keywords: dict[str, Any]
    tensors: list[Tensor]
    y: list[Array]
    dy: list[Array]
    gradients: Callable[[list[Array]], dict[str, Array]]
    memo: dict[str, Any]  # what was found once


def find_hints(
    facts: Facts, recheck: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
) -> list[str]:
    """The hints, the one that explains most first. recheck: gradcheck itself, for the parts."""
    failed = [tensor for tensor in facts.tensors if not tensor.ok]
    if not failed:
        return []
    if all(tensor.kinks for tensor in failed):
        return [f"kink: {_names(failed)} stands where a ReLU (or a maximum) has no slope. This is "
                "not an error of backward: move the input off it"]
    found: list[tuple[tuple[str, ...], str]] = [
        *_overwritten(failed), *_swapped(failed), *_of_another(facts, failed)
    ]  # fmt: skip
    told = {name for names, _ in found for name in names}
    looks = (
        _alone(facts), _residual(facts), _rules(facts), _norm(facts), _rows(facts), _tied(facts)
    )  # fmt: skip
    for look in looks:
        for tensor in failed:
            if tensor.name not in told:
                hint = look(tensor)
                if hint is not None:
                    told.add(tensor.name)
                    found.append(((tensor.name,), hint))
    # a factor without a name explains little: it may be what a fault further on happens to do
    named = [item for item in found if not item[1].endswith(UNNAMED)]
    hints = _merged(named)
    if len(told) < len(failed) or len(named) < len(found):
        hints += _parts(facts, recheck)
    return hints + _merged([item for item in found if item not in named])


def _merged(found: list[tuple[tuple[str, ...], str]]) -> list[str]:
    """Equal hints become one that names all its tensors; more tensors come first."""
    tensors: dict[str, list[str]] = {}
    for names, hint in found:
        tensors.setdefault(hint, []).extend(names)
    ordered = sorted(tensors.items(), key=lambda item: -len(item[1]))
    return [f"{hint} ({', '.join(names)})" for hint, names in ordered]


def _names(tensors: list[Tensor]) -> str:
    return ", ".join(tensor.name for tensor in tensors)


def _same(a: Array, b: Array) -> bool:
    scale = max(np.abs(a).max(initial=0.0), np.abs(b).max(initial=0.0))
    return a.shape == b.shape and bool(np.abs(a - b).max(initial=0.0) <= CLOSE * scale)


def _wrong(tensor: Tensor) -> Array:
    """Where the two differ."""
    a, n = tensor.analytic, tensor.numeric
    scale = max(np.abs(a).max(initial=0.0), np.abs(n).max(initial=0.0))
    return np.asarray(~(np.abs(a - n) <= CLOSE * scale))


# What the tensors say


def _overwritten(failed: list[Tensor]) -> list[tuple[tuple[str, ...], str]]:
    names = tuple(tensor.name for tensor in failed if not tensor.is_input and not tensor.twice)
    hint = "overwritten: a second backward does not add the same to .grad, where += belongs"
    return [(names, hint)] if names else []


def _swapped(failed: list[Tensor]) -> list[tuple[tuple[str, ...], str]]:
    found: list[tuple[tuple[str, ...], str]] = []
    for i, first in enumerate(failed):
        for second in failed[i + 1 :]:
            crossed = _same(first.analytic, second.numeric), _same(second.analytic, first.numeric)
            if first.is_input == second.is_input and all(crossed):
                hint = "swapped: each of the two holds, entry by entry, the gradient of the other"
                found.append(((first.name, second.name), hint))
    return found


def _of_another(facts: Facts, failed: list[Tensor]) -> list[tuple[tuple[str, ...], str]]:
    found: list[tuple[tuple[str, ...], str]] = []
    for tensor in failed:
        for other in facts.tensors:
            if other.ok and other.numeric.any() and _same(tensor.analytic, other.numeric):
                hint = f"wrong tensor: it holds, entry by entry, the gradient of {other.name}"
                found.append(((tensor.name,), hint))
                break
    return found


def _alone(facts: Facts) -> Callable[[Tensor], str | None]:
    """What one tensor says by itself."""
    sizes = _sizes(facts)
    heads = getattr(facts.layer, "num_heads", None)

    def look(tensor: Tensor) -> str | None:
        a, n = tensor.analytic, tensor.numeric
        if a.ndim >= 2 and _same(a.swapaxes(-1, -2), n):
            return "transposed: with its last two axes exchanged it is right"
        if a.shape != n.shape:
            return None
        if not np.isfinite(a).all():
            return "not finite: backward gives infinity or NaN"
        largest = float(np.abs(n).max(initial=0.0))
        if not a.any():
            if tensor.is_input and any(past and _same(n, g) for _, g, past in _flows(facts)):
                return None  # more than that can be said
            return f"zero everywhere: backward gives only 0, the differences up to {largest:.3g}"
        if largest > 0.0:
            c = float((a * n).sum() / (n * n).sum())
            if c != 0.0 and _same(a, c * n) and not (abs(c - 2.0) < 1e-3 and _is_residual(facts)):
                return _factor(c, a.size, sizes)
        wrong = _wrong(tensor)
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

    arrays = [x for value in facts.inputs for x in _flat(value)]
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
    ids = [x for value in facts.inputs for x in _flat(value) if x.dtype.kind in "iu"]
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


def _residual(facts: Facts) -> Callable[[Tensor], str | None]:
    """Does the difference equal the gradient that the output, or a part, was given?"""
    def look(tensor: Tensor) -> str | None:
        if not tensor.is_input or tensor.analytic.shape != tensor.numeric.shape:
            return None
        if not tensor.numeric.any():
            return None
        missing = tensor.numeric - tensor.analytic
        return _explained(missing, _flows(facts))

    return look


class Flow(NamedTuple):
    """A gradient in backward: dy, what went into or out of a part, or a local; past: by the skip
    path, or out of a norm that stands on it.
    """

    name: str
    gradient: Array
    past: bool


def _flows(facts: Facts) -> list[Flow]:
    if "flows" not in facts.memo:
        facts.memo["flows"] = _find_flows(facts)
    return facts.memo["flows"]


def _find_flows(facts: Facts) -> list[Flow]:
    flows = [Flow("dy", dy, True) for dy in facts.dy]
    trace = _backward_trace(facts)
    calls = [call for call in trace if call.layer]
    within = _is_residual(facts)
    for call in calls:
        past = within or _is_a(trace.names[call.layer], "Residual", "LayerNorm")
        flows += [Flow(f"{name} of {call.layer}", x, past) for name, x in call.inputs.items()]
        flows += [Flow(f"what {call.layer} returned", x, past) for x in call.outputs]
    for call in calls:
        for i, x in enumerate(call.outputs):
            flows += [Flow(f"two gradients that {call.layer} returned, their sum,", x + y, False)
                      for y in call.outputs[i + 1 :] if y.shape == x.shape]
    for call in trace:
        if not call.layer:
            flows += [Flow(f"{name}, a local of backward,", x, False)
                      for name, x in call.values.items() if x.dtype.kind == "f"]
    return flows


def _backward_trace(facts: Facts) -> Trace:
    """The calls of one backward."""
    trace = Trace(_root(facts.layer))
    with trace:
        facts.gradients(facts.dy)
    trace.calls = [call for call in trace if call.direction == BACKWARD]
    return trace


def _root(layer: Any) -> Any:
    return layer.part if isinstance(layer, _Part) else layer


def _is_residual(facts: Facts) -> bool:
    return _is_a(_root(facts.layer), "Residual")


def _is_a(layer: Any, *names: str) -> bool:
    """By name: the checker knows no layers."""
    return any(cls.__name__ in names for cls in type(layer).__mro__)


def _explained(missing: Array, flows: list[Flow]) -> str | None:
    """Is what is missing, or too much, one of these gradients?"""
    if not missing.any() or not np.isfinite(missing).all():
        return None
    for name, gradient, past in flows:
        for sign, what in (1.0, "missing"), (-1.0, "doubled"):
            if _same(sign * missing, gradient):
                if past:
                    return (f"residual path {what}: the gradient that goes past the sublayer, "
                            f"{name}, is {what}")
                if what == "missing":
                    return f"left out of a sum: {name} is missing"
                return f"added twice: {name} is too much"
    return None


def _rules(facts: Facts) -> Callable[[Tensor], str | None]:
    """Known rules, and what they give with a slip: of softmax, a product x g(x), W and W.T."""

    def look(tensor: Tensor) -> str | None:
        a, n = tensor.analytic, tensor.numeric
        if not tensor.is_input or a.shape != n.shape or len(facts.dy) != 1:
            return None
        y, dy = facts.y[0], facts.dy[0]
        if not y.ndim and a.ndim and n.any():
            x = _input(facts, n.shape)
            p = np.exp(x - x.max(axis=-1, keepdims=True))
            p /= p.sum(axis=-1, keepdims=True)
            if _proportional(a, p) and not _proportional(n, p):
                return "term missing: it is softmax(logits), onehot is not taken away"
        for other in facts.tensors:
            W = other.numeric
            if not other.is_input and W.ndim == 2 and W.shape[0] == W.shape[1] and dy.ndim:
                value = dict(find_parameters(facts.layer))[other.name].value
                if dy.shape[-1] == len(W) and _same(a, dy @ value) and _same(n, dy @ value.T):
                    return f"transposed: dx is dy @ {other.name} where {other.name}.T belongs"
        if y.shape != n.shape or not y.ndim:
            return None
        if _same(n, y * (dy - (dy * y).sum(axis=-1, keepdims=True))):
            for wrong, what in (y * dy, "the sum over the row"), (
                y * (1.0 - y) * dy, "all of the Jacobian but its diagonal"
            ):  # fmt: skip
                if _same(a, wrong):
                    return f"term missing: of softmax's rule, {what}"
        if _same(a, dy * y):
            return "wrong tensor: dy is multiplied by y, where the derivative belongs"
        x = _input(facts, n.shape)
        if x.all() and _same(a, dy * y / x):
            return "term missing: of the product x g(x), only x was differentiated, g was not"
        return None

    return look


def _input(facts: Facts, shape: tuple[int, ...]) -> Array:
    """The float input of this shape."""
    arrays = (x for value in facts.inputs for x in _flat(value) if x.dtype.kind == "f")
    return next(x for x in arrays if x.shape == shape)


def _proportional(a: Array, b: Array) -> bool:
    size = float((b * b).sum())
    return size > 0.0 and bool(a.any()) and _same(a, float((a * b).sum()) / size * b)


def _norm(facts: Facts) -> Callable[[Tensor], str | None]:
    """LayerNorm's dx is a sum of parts, rstd times g - mean(g) - x_hat mean(g x_hat), g = dy gamma:
    which were used in their place? dy for g, or gamma mean(dy), gamma x_hat mean(dy x_hat)?
    """
    def look(tensor: Tensor) -> str | None:
        if not tensor.is_input or len(facts.dy) != 1 or tensor.numeric.shape != facts.dy[0].shape:
            return None
        x = next(x for value in facts.inputs for x in _flat(value)
                 if x.dtype.kind == "f" and x.shape == tensor.numeric.shape)
        dy, d = facts.dy[0], x.shape[-1] if x.ndim else 1
        if d < 3:
            return None
        known = getattr(facts.layer, "eps", 1e-5)
        gammas = [p.value for _, p in find_parameters(facts.layer) if p.value.shape == (d,)]
        for gamma, eps in product([*gammas, np.ones(d)], [known, 1e-5, 1e-8, 1e-3, 0.1]):
            centred = x - x.mean(axis=-1, keepdims=True)
            rstd = 1.0 / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + eps)
            x_hat, g = centred * rstd, dy * gamma
            mean = _mean
            g_parts = [rstd * g, rstd * mean(g), rstd * x_hat * mean(g * x_hat)]
            dy_parts = [rstd * dy, rstd * mean(dy), rstd * x_hat * mean(dy * x_hat)]
            dy_parts += [gamma * dy_parts[1], gamma * dy_parts[2]]
            if not _same(g_parts[0] - g_parts[1] - g_parts[2], tensor.numeric):
                continue
            parts = [np.broadcast_to(part, x.shape).ravel() for part in (*g_parts, *dy_parts)]
            if np.ptp(gamma) == 0.0:
                parts = parts[:3]
            basis = np.stack(parts, axis=1)
            weights = np.linalg.lstsq(basis, tensor.analytic.ravel(), rcond=None)[0]
            if not _same(basis @ weights, tensor.analytic.ravel()):
                return None
            return _norm_verdict(np.append(weights, np.zeros(8 - len(weights))), d)
        return None

    return look


def _mean(x: Array) -> Array:
    return np.asarray(x.mean(axis=-1, keepdims=True))


def _norm_verdict(weights: Array, d: int) -> str | None:
    with_gamma, without, outside = weights[:3], weights[3:6], weights[6:]
    if np.abs(outside).max() > 1e-3:
        return "gamma left out: of the means, which are of dy; gamma stands outside them"
    if np.abs(without).max() > 1e-3:
        places = [name for name, w in zip(("dy", "mean(dy)", "mean(dy x_hat)"), without)
                  if abs(w) > 1e-3]
        return ("gamma left out: dx is that of a LayerNorm with dy in place of dy * gamma in "
                + ", ".join(places))
    for name, w in zip(("mean(dy gamma)", "mean(dy gamma x_hat)"), with_gamma[1:]):
        if abs(w + d) < 1e-2 * d:
            return f"sum where mean was taken: dx has {d} = d times the term of {name}"
        if abs(w) < 1e-3:
            return f"term missing: dx lacks the term of {name}"
    return None


def _rows(facts: Facts) -> Callable[[Tensor], str | None]:
    """A table that is read by ids (or positions): which places' gradients reach its rows?"""
    tables = [x for value in facts.inputs for x in _flat(value) if x.dtype.kind in "iu" and x.size]
    for x in (x for value in facts.inputs for x in _flat(value)):
        if x.dtype.kind == "f" and x.ndim == 3:
            tables.append(np.broadcast_to(np.arange(x.shape[1]), x.shape[:2]))

    def look(tensor: Tensor) -> str | None:
        a, n = tensor.analytic, tensor.numeric
        if tensor.is_input or a.shape != n.shape or a.ndim != 2:
            return None
        missing = n - a
        for ids in tables:
            if ids.min() < 0 or ids.max() >= len(a):
                continue
            for name, gradient, _ in _flows(facts):
                if gradient.shape != (*ids.shape, a.shape[1]):
                    continue
                last, every = np.zeros_like(n), np.zeros_like(n)
                last[ids] = gradient
                np.add.at(every, ids, gradient)
                if _proportional(missing, every - last):
                    return ("overwritten: of an id or position that comes more than once only one "
                            f"place is kept (of {name})")
                if a.any() and _proportional(missing, every):
                    return ("tied use missing: the gradient lacks what comes from reading the rows "
                            f"({name})")
        return None

    return look


def _tied(facts: Facts) -> Callable[[Tensor], str | None]:
    """A Parameter with two owners: is one owner's part all that was added?"""
    owners = _owners(facts.layer)
    ids = np.unique([i for value in facts.inputs for x in _flat(value)
                     if x.dtype.kind in "iu" for i in x.ravel()])

    def look(tensor: Tensor) -> str | None:
        a, n = tensor.analytic, tensor.numeric
        if tensor.is_input or a.shape != n.shape:
            return None
        places = owners.get(tensor.name, [])
        if len(places) > 1:
            parts = [_part_of(facts, place, n.shape) for place in places]
            for (name, _, _), part in zip(places, parts):
                if _same(a, n - part):
                    return f"tied use missing: the gradient lacks what comes from {name}"
        if not len(ids) or a.ndim != 2 or ids.max() >= len(a):
            return None
        if len(ids) == len(a):
            return None
        used = np.zeros(len(a), np.bool_)
        used[ids.astype(np.intp)] = True
        if not a[~used].any() and n[~used].any():
            return ("tied use missing: only the rows of the ids that were read have a gradient, "
                    "but the output depends on all")
        if not _wrong(tensor)[~used].any() and a[~used].any():
            return ("tied use missing: only the rows of the ids that were read are wrong: what "
                    "comes from reading them is not (rightly) added")
        return None

    return look


def _owners(layer: Any) -> dict[str, list[tuple[str, Any, str]]]:
    """By a Parameter's first name: all its places, as (path, owner, attribute)."""
    first = {id(p): name for name, p in find_parameters(layer)}
    found: dict[str, list[tuple[str, Any, str]]] = {}
    for path, owner in named_layers(layer):
        for attribute, value in getattr(owner, "__dict__", {}).items():
            if isinstance(value, Parameter):
                place = f"{path}.{attribute}" if path else attribute
                found.setdefault(first[id(value)], []).append((place, owner, attribute))
    return found


def _part_of(facts: Facts, place: tuple[str, Any, str], shape: tuple[int, ...]) -> Array:
    """The numeric gradient of one place of a Parameter, the other places held fixed."""
    _, owner, attribute = place
    shared = getattr(owner, attribute)
    own = Parameter(shared.value)
    setattr(owner, attribute, own)
    try:
        return _numeric(facts, own.value)
    finally:
        setattr(owner, attribute, shared)


def _loss(facts: Facts) -> float:
    keywords = {k: copy.deepcopy(v) for k, v in facts.keywords.items()}
    y, _ = facts.layer.forward(*facts.inputs, **keywords)
    return float(sum((a * dy).sum() for a, dy in zip(_flat(y), facts.dy)))


def _numeric(facts: Facts, array: Array, h: float = 1e-5) -> Array:
    """Central differences of the loss with respect to an array that forward reads."""
    gradient = np.zeros_like(array)
    for i in range(array.size):
        start = array.flat[i]
        array.flat[i] = start + h
        above = _loss(facts)
        array.flat[i] = start - h
        below = _loss(facts)
        array.flat[i] = start
        gradient.flat[i] = (above - below) / (2.0 * h)
    return gradient


# What the parts say


class _Part:
    """One call of a part as a layer of its own: its float arguments are differentiated."""

    def __init__(self, layer: Any, method: str, arguments: tuple[Any, ...], keywords: Any) -> None:
        self.part, self.method = layer, method
        self._arguments, self._keywords = arguments, keywords

    def forward(self, *floats: Any) -> Any:
        given = iter(floats)
        arguments = [_filled(value, given) for value in self._arguments]
        keywords = {name: copy.deepcopy(value) for name, value in self._keywords.items()}
        return getattr(self.part, self.method)(*arguments, **keywords)

    def backward(self, ctx: Any, dy: Any) -> Any:
        name = BACKWARD if self.method == FORWARD else f"{self.method}_{BACKWARD}"
        both = dy if isinstance(dy, tuple) and self.method == "project" else (dy,)
        return getattr(self.part, name)(ctx, *both)

    def argument_names(self) -> list[str]:
        """Of the float arguments: forward sees these alone."""
        names = list(inspect.signature(getattr(self.part, self.method)).parameters)
        return [name for name, value in zip(names, self._arguments) for _ in _float_leaves(value)]

    def floats(self) -> tuple[Array, ...]:
        return tuple(x.copy() for value in self._arguments for x in _float_leaves(value))


def _filled(value: Any, given: Iterator[Any]) -> Any:
    """The argument with its float arrays replaced by the next ones given."""
    if isinstance(value, tuple):
        return tuple(_filled(item, given) for item in value)
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        return next(given)
    return copy.deepcopy(value)


def _parts(
    facts: Facts, recheck: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
) -> list[str]:
    """Hints about the layer's parts: those that are wrong by themselves, else the wiring."""
    children = _children(_root(facts.layer))
    calls: list[tuple[str, _Part]] = []

    def seen(name: str, part: _Part, y: Any) -> Any:
        calls.append((name, part))
        return y

    with _watched(children, seen):
        _loss(facts)
    sizes = [sum(x.size for x in part.floats()) for _, part in calls]
    sizes = [n + sum(p.size for _, p in find_parameters(part.part))
             for n, (_, part) in zip(sizes, calls)]
    if not calls or 2 * sum(sizes) > BUDGET:
        return []
    hints = []
    for name, part in reversed(calls):  # as backward goes
        if not all(np.isfinite(x).all() for x in part.floats()):
            continue  # scores of -inf: no step moves them
        try:
            report = recheck(part, part.floats(), {})
        except (TypeError, ValueError):
            continue
        if not report.ok:
            hints += [f"{_renamed(hint, part)} [in {name}]" for hint in report.hints] or [
                f"in a part: {name} is wrong by itself"
            ]
    return hints or _wiring(facts, children)


def _renamed(hint: str, part: _Part) -> str:
    """The hint about a part with the names of its own arguments and parameters."""
    names = part.argument_names()
    hint = re.sub(r"\binput(\d+)\b", lambda m: names[int(m.group(1))], hint)
    return re.sub(r"\bpart\.", "", hint)


def _children(layer: Any) -> dict[str, Any]:
    """The layers that this one holds itself: not those within them."""
    return {name: child for name, child in named_layers(layer) if name and not any(
        name.startswith(f"{other}.") for other, _ in named_layers(layer) if other)}


@contextmanager
def _watched(
    children: dict[str, Any], seen: Callable[[str, _Part, Any], Any]
) -> Iterator[None]:
    """While the body runs, seen(name, part, output) hears of each call of a child, and may change
    its output."""
    depth = [0]

    def watch(name: str, child: Any, method: str) -> Callable[..., Any]:
        whole = getattr(child, method)

        def watched(*arguments: Any, **keywords: Any) -> Any:
            depth[0] += 1
            kept = copy.deepcopy((arguments, keywords)) if depth[0] == 1 else None
            try:
                y, ctx = whole(*arguments, **keywords)
            finally:
                depth[0] -= 1
            if kept is not None:
                y = seen(name, _Part(child, method, *kept), y)
            return y, ctx

        return watched

    patched: list[tuple[Any, str, Any]] = []
    try:
        for name, child in children.items():
            for method in (FORWARD, "attend", "project", "enter", "leave"):
                pair = BACKWARD if method == FORWARD else f"{method}_{BACKWARD}"
                if hasattr(child, method) and hasattr(child, pair):
                    patched.append((child, method, child.__dict__.get(method)))
                    child.__dict__[method] = watch(name, child, method)
        yield
    finally:
        for child, method, own in patched:  # own: what the object itself had of this name
            if own is None:
                child.__dict__.pop(method, None)
            else:
                child.__dict__[method] = own


def _wiring(facts: Facts, children: dict[str, Any]) -> list[str]:
    """All parts are right by themselves: the first gradient between them that is wrong."""
    outputs: list[tuple[str, str]] = []

    def seen(name: str, part: _Part, y: Any) -> Any:
        outputs.append((name, part.method))
        return y

    with _watched(children, seen):
        _loss(facts)
    for call in _backward_trace(facts):  # from the output towards the input
        method = call.method.removesuffix(BACKWARD).rstrip("_") or FORWARD
        if call.layer not in children or not call.inputs or (
            outputs.count((call.layer, method)) != 1
        ):
            continue
        analytic = next(iter(call.inputs.values()))
        numeric = _numeric_output(facts, children, (call.layer, method))
        if numeric is None or numeric.shape != analytic.shape or _same(analytic, numeric):
            continue
        where = f"in the gradient that reaches {call.layer}"
        hint = _explained(numeric - analytic, _flows(facts)) or _alone(facts)(
            Tensor(call.layer, analytic, numeric, False, True, True, 0)
        )
        return [f"{hint}, {where}" if hint else f"wiring: the first wrong gradient is {where}"]
    return []


def _numeric_output(
    facts: Facts, children: dict[str, Any], wanted: tuple[str, str]
) -> Array | None:
    """Central differences of the loss with respect to what one part returns."""
    shift: list[Array] = []

    def seen(name: str, part: _Part, y: Any) -> Any:
        if (name, part.method) != wanted:
            return y
        first = y[0] if isinstance(y, tuple) else y
        if not isinstance(first, np.ndarray):
            return y
        if not shift:
            shift.append(np.zeros_like(first))
        return (first + shift[0], *y[1:]) if isinstance(y, tuple) else first + shift[0]

    with _watched(children, seen):
        _loss(facts)
        return _numeric(facts, shift[0]) if shift else None


def _flat(value: Any) -> list[Array]:
    if isinstance(value, (tuple, list)):
        return [x for item in value for x in _flat(item)]
    return [] if value is None else [np.asarray(value)]


def _float_leaves(value: Any) -> list[Array]:
    if isinstance(value, tuple):
        return [x for item in value for x in _float_leaves(item)]
    return [value] if isinstance(value, np.ndarray) and value.dtype.kind == "f" else []
