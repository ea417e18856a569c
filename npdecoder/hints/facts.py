"""What gradcheck knows when it has failed, and what can be found out from it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from npdecoder.core import Array
from npdecoder.trace import BACKWARD, FORWARD, Trace

CLOSE = 1e-4  # two arrays are the same if they differ by less than this part of the largest entry


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


def same(a: Array, b: Array) -> bool:
    scale = max(np.abs(a).max(initial=0.0), np.abs(b).max(initial=0.0))
    return a.shape == b.shape and bool(np.abs(a - b).max(initial=0.0) <= CLOSE * scale)


def proportional(a: Array, b: Array) -> bool:
    size = float((b * b).sum())
    return size > 0.0 and bool(a.any()) and same(a, float((a * b).sum()) / size * b)


def wrong_entries(tensor: Tensor) -> Array:
    """Where the two differ."""
    a, n = tensor.analytic, tensor.numeric
    scale = max(np.abs(a).max(initial=0.0), np.abs(n).max(initial=0.0))
    return np.asarray(~(np.abs(a - n) <= CLOSE * scale))


def flat(value: Any) -> list[Array]:
    if isinstance(value, (tuple, list)):
        return [x for item in value for x in flat(item)]
    return [] if value is None else [np.asarray(value)]


def float_leaves(value: Any) -> list[Array]:
    if isinstance(value, tuple):
        return [x for item in value for x in float_leaves(item)]
    return [value] if isinstance(value, np.ndarray) and value.dtype.kind == "f" else []


def input_of_shape(facts: Facts, shape: tuple[int, ...]) -> Array:
    """The float input of this shape."""
    arrays = (x for value in facts.inputs for x in flat(value) if x.dtype.kind == "f")
    return next(x for x in arrays if x.shape == shape)


def loss_of(facts: Facts) -> float:
    keywords = {k: copy.deepcopy(v) for k, v in facts.keywords.items()}
    y, _ = facts.layer.forward(*facts.inputs, **keywords)
    return float(sum((a * dy).sum() for a, dy in zip(flat(y), facts.dy)))


def numeric_gradient(facts: Facts, array: Array, h: float = 1e-5) -> Array:
    """Central differences of the loss with respect to an array that forward reads."""
    gradient = np.zeros_like(array)
    for i in range(array.size):
        start = array.flat[i]
        array.flat[i] = start + h
        above = loss_of(facts)
        array.flat[i] = start - h
        below = loss_of(facts)
        array.flat[i] = start
        gradient.flat[i] = (above - below) / (2.0 * h)
    return gradient


class Part:
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
        return [name for name, value in zip(names, self._arguments) for _ in float_leaves(value)]

    def floats(self) -> tuple[Array, ...]:
        return tuple(x.copy() for value in self._arguments for x in float_leaves(value))


def _filled(value: Any, given: Iterator[Any]) -> Any:
    """The argument with its float arrays replaced by the next ones given."""
    if isinstance(value, tuple):
        return tuple(_filled(item, given) for item in value)
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        return next(given)
    return copy.deepcopy(value)


def root_of(layer: Any) -> Any:
    return layer.part if isinstance(layer, Part) else layer


def is_residual(facts: Facts) -> bool:
    return is_a(root_of(facts.layer), "Residual")


def is_a(layer: Any, *names: str) -> bool:
    """By name: the checker knows no layers."""
    return any(cls.__name__ in names for cls in type(layer).__mro__)


class Flow(NamedTuple):
    """A gradient in backward: dy, what went into or out of a part, or a local; past: by the skip
    path, or out of a norm that stands on it.
    """

    name: str
    gradient: Array
    past: bool


def flows_of(facts: Facts) -> list[Flow]:
    if "flows" not in facts.memo:
        facts.memo["flows"] = _find_flows(facts)
    return facts.memo["flows"]


def _find_flows(facts: Facts) -> list[Flow]:
    flows = [Flow("dy", dy, True) for dy in facts.dy]
    trace = backward_trace(facts)
    calls = [call for call in trace if call.layer]
    within = is_residual(facts)
    for call in calls:
        past = within or is_a(trace.names[call.layer], "Residual", "LayerNorm")
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


def backward_trace(facts: Facts) -> Trace:
    """The calls of one backward."""
    trace = Trace(root_of(facts.layer))
    with trace:
        facts.gradients(facts.dy)
    trace.calls = [call for call in trace if call.direction == BACKWARD]
    return trace


def explained(missing: Array, flows: list[Flow]) -> str | None:
    """Is what is missing, or too much, one of these gradients?"""
    if not missing.any() or not np.isfinite(missing).all():
        return None
    for name, gradient, past in flows:
        for sign, what in (1.0, "missing"), (-1.0, "doubled"):
            if same(sign * missing, gradient):
                if past:
                    return (f"residual path {what}: the gradient that goes past the sublayer, "
                            f"{name}, is {what}")
                if what == "missing":
                    return f"left out of a sum: {name} is missing"
                return f"added twice: {name} is too much"
    return None
