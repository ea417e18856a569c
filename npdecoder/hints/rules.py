"""Slips of known rules: softmax, a product, W and W.T, LayerNorm, tables that are read by ids."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np

from npdecoder.core import Array, Parameter, find_layers, find_parameters
from npdecoder.hints.facts import (
    Facts,
    Tensor,
    flat,
    flows_of,
    input_of_shape,
    numeric_gradient,
    proportional,
    same,
    wrong_entries,
)


def known_rules(facts: Facts) -> Callable[[Tensor], str | None]:
    """Known rules, and what they give with a slip: of softmax, a product x g(x), W and W.T."""

    def look(tensor: Tensor) -> str | None:
        a, n = tensor.analytic, tensor.numeric
        if not tensor.is_input or a.shape != n.shape or len(facts.dy) != 1:
            return None
        y, dy = facts.y[0], facts.dy[0]
        if not y.ndim and a.ndim and n.any():
            x = input_of_shape(facts, n.shape)
            p = np.exp(x - x.max(axis=-1, keepdims=True))
            p /= p.sum(axis=-1, keepdims=True)
            if proportional(a, p) and not proportional(n, p):
                return "term missing: it is softmax(logits), onehot is not taken away"
        for other in facts.tensors:
            W = other.numeric
            if not other.is_input and W.ndim == 2 and W.shape[0] == W.shape[1] and dy.ndim:
                value = dict(find_parameters(facts.layer))[other.name].value
                if dy.shape[-1] == len(W) and same(a, dy @ value) and same(n, dy @ value.T):
                    return f"transposed: dx is dy @ {other.name} where {other.name}.T belongs"
        if y.shape != n.shape or not y.ndim:
            return None
        if same(n, y * (dy - (dy * y).sum(axis=-1, keepdims=True))):
            for wrong, what in (y * dy, "the sum over the row"), (
                y * (1.0 - y) * dy, "all of the Jacobian but its diagonal"
            ):  # fmt: skip
                if same(a, wrong):
                    return f"term missing: of softmax's rule, {what}"
        if same(a, dy * y):
            return "wrong tensor: dy is multiplied by y, where the derivative belongs"
        x = input_of_shape(facts, n.shape)
        if x.all() and same(a, dy * y / x):
            return "term missing: of the product x g(x), only x was differentiated, g was not"
        return None

    return look


def layer_norm(facts: Facts) -> Callable[[Tensor], str | None]:
    """LayerNorm's dx is a sum of parts, rstd times g - mean(g) - x_hat mean(g x_hat), g = dy gamma:
    which were used in their place? dy for g, or gamma mean(dy), gamma x_hat mean(dy x_hat)?
    """
    def look(tensor: Tensor) -> str | None:
        if not tensor.is_input or len(facts.dy) != 1 or tensor.numeric.shape != facts.dy[0].shape:
            return None
        x = next(x for value in facts.inputs for x in flat(value)
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
            if not same(g_parts[0] - g_parts[1] - g_parts[2], tensor.numeric):
                continue
            parts = [np.broadcast_to(part, x.shape).ravel() for part in (*g_parts, *dy_parts)]
            if np.ptp(gamma) == 0.0:
                parts = parts[:3]
            basis = np.stack(parts, axis=1)
            weights = np.linalg.lstsq(basis, tensor.analytic.ravel(), rcond=None)[0]
            if not same(basis @ weights, tensor.analytic.ravel()):
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


def rows_of_a_table(facts: Facts) -> Callable[[Tensor], str | None]:
    """A table that is read by ids (or positions): which places' gradients reach its rows?"""
    given = (*facts.inputs, *facts.keywords.values())
    tables = [x for value in given for x in flat(value) if x.dtype.kind in "iu" and x.size]
    for x in (x for value in facts.inputs for x in flat(value)):
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
            for name, gradient, _ in flows_of(facts):
                if gradient.shape != (*ids.shape, a.shape[1]):
                    continue
                last, every = np.zeros_like(n), np.zeros_like(n)
                last[ids] = gradient
                np.add.at(every, ids, gradient)
                if proportional(missing, every - last):
                    return ("overwritten: of an id or position that comes more than once only one "
                            f"place is kept (of {name})")
                if a.any() and proportional(missing, every):
                    return ("tied use missing: the gradient lacks what comes from reading the rows "
                            f"({name})")
        return None

    return look


def tied(facts: Facts) -> Callable[[Tensor], str | None]:
    """A Parameter with two owners: is one owner's part all that was added?"""
    owners = _owners(facts.layer)
    ids = np.unique([i for value in facts.inputs for x in flat(value)
                     if x.dtype.kind in "iu" for i in x.ravel()])

    def look(tensor: Tensor) -> str | None:
        a, n = tensor.analytic, tensor.numeric
        if tensor.is_input or a.shape != n.shape:
            return None
        places = owners.get(tensor.name, [])
        if len(places) > 1:
            parts = [_part_of(facts, place) for place in places]
            for (name, _, _), part in zip(places, parts):
                if same(a, n - part):
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
        if not wrong_entries(tensor)[~used].any() and a[~used].any():
            return ("tied use missing: only the rows of the ids that were read are wrong: what "
                    "comes from reading them is not (rightly) added")
        return None

    return look


def _owners(layer: Any) -> dict[str, list[tuple[str, Any, str]]]:
    """By a Parameter's first name: all its places, as (path, owner, attribute)."""
    first = {id(p): name for name, p in find_parameters(layer)}
    found: dict[str, list[tuple[str, Any, str]]] = {}
    for path, owner in find_layers(layer):
        for attribute, value in getattr(owner, "__dict__", {}).items():
            if isinstance(value, Parameter):
                place = f"{path}.{attribute}" if path else attribute
                found.setdefault(first[id(value)], []).append((place, owner, attribute))
    return found


def _part_of(facts: Facts, place: tuple[str, Any, str]) -> Array:
    """The numeric gradient of one place of a Parameter, the other places held fixed."""
    _, owner, attribute = place
    shared = getattr(owner, attribute)
    own = Parameter(shared.value)
    setattr(owner, attribute, own)
    try:
        return numeric_gradient(facts, own.value)
    finally:
        setattr(owner, attribute, shared)
