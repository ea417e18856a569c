"""What a layer's parts say: is one of them wrong by itself? Where does the gradient that flows
between them first go wrong?
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from npdecoder.core import Array, find_layers, find_parameters
from npdecoder.hints.facts import (
    Facts,
    Part,
    Tensor,
    backward_trace,
    explained,
    flows_of,
    loss_of,
    numeric_gradient,
    root_of,
    same,
)
from npdecoder.hints.tensors import alone
from npdecoder.trace import BACKWARD, FORWARD

BUDGET = 40_000  # forward passes that the search among the parts may cost


def hints_of_parts(
    facts: Facts, recheck: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
) -> list[str]:
    """Hints about the layer's parts: those that are wrong by themselves, else the wiring."""
    children = _children(root_of(facts.layer))
    calls: list[tuple[str, Part]] = []

    def seen(name: str, part: Part, y: Any) -> Any:
        calls.append((name, part))
        return y

    with _watched(children, seen):
        loss_of(facts)
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


def _renamed(hint: str, part: Part) -> str:
    """The hint about a part with the names of its own arguments and parameters."""
    names = part.argument_names()
    hint = re.sub(r"\binput(\d+)\b", lambda m: names[int(m.group(1))], hint)
    return re.sub(r"\bpart\.", "", hint)


def _children(layer: Any) -> dict[str, Any]:
    """The layers that this one holds itself: not those within them."""
    return {name: child for name, child in find_layers(layer) if name and not any(
        name.startswith(f"{other}.") for other, _ in find_layers(layer) if other)}


@contextmanager
def _watched(
    children: dict[str, Any], seen: Callable[[str, Part, Any], Any]
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
                y = seen(name, Part(child, method, *kept), y)
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

    def seen(name: str, part: Part, y: Any) -> Any:
        outputs.append((name, part.method))
        return y

    with _watched(children, seen):
        loss_of(facts)
    for call in backward_trace(facts):  # from the output towards the input
        method = call.method.removesuffix(BACKWARD).rstrip("_") or FORWARD
        if call.layer not in children or not call.inputs or (
            outputs.count((call.layer, method)) != 1
        ):
            continue
        analytic = next(iter(call.inputs.values()))
        numeric = _numeric_output(facts, children, (call.layer, method))
        if numeric is None or numeric.shape != analytic.shape or same(analytic, numeric):
            continue
        where = f"in the gradient that reaches {call.layer}"
        hint = explained(numeric - analytic, flows_of(facts)) or alone(facts)(
            Tensor(call.layer, analytic, numeric, False, True, True, 0)
        )
        return [f"{hint}, {where}" if hint else f"wiring: the first wrong gradient is {where}"]
    return []


def _numeric_output(
    facts: Facts, children: dict[str, Any], wanted: tuple[str, str]
) -> Array | None:
    """Central differences of the loss with respect to what one part returns."""
    shift: list[Array] = []

    def seen(name: str, part: Part, y: Any) -> Any:
        if (name, part.method) != wanted:
            return y
        first = y[0] if isinstance(y, tuple) else y
        if not isinstance(first, np.ndarray):
            return y
        if not shift:
            shift.append(np.zeros_like(first))
        return (first + shift[0], *y[1:]) if isinstance(y, tuple) else first + shift[0]

    with _watched(children, seen):
        loss_of(facts)
        return numeric_gradient(facts, shift[0]) if shift else None
