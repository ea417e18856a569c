"""gradcheck: compare a layer's backward with central differences of its forward, in float64."""

from __future__ import annotations

import copy
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from npdecoder.core import Array, find_parameters, integer, one_of, real
from npdecoder.hints import Facts, Tensor, find_hints

ZERO = 1e-9  # below this everywhere, a gradient is taken as zero


@dataclass(frozen=True)
class GradcheckRow:
    """One tensor: an input, or a parameter of the layer.

    index: where |analytic - numeric| is largest; None in directional mode
    analytic, numeric: both numbers there; in directional mode the slopes along the direction
    relative_error: max|a - n| / max(max|a|, max|n|) over the tensor; 0 if both are zero (1e-9)
    note: what else was seen, or ""
    """

    name: str
    shape: tuple[int, ...]
    index: tuple[int, ...] | None
    analytic: float
    numeric: float
    relative_error: float
    ok: bool
    note: str


class GradcheckReport:
    """What gradcheck found. str(report) is a table of 80 columns.

    .ok: whether every tensor agrees; .max_relative_error: the largest; .rows: one a tensor
    .hints: sentences that say what the failure looks like, the best first (npdecoder/hints/);
        none if all is well, and none in directional mode, which has no arrays to look at
    """

    def __init__(
        self, title: str, rows: list[GradcheckRow], hints: Sequence[str] = ()
    ) -> None:
        self.title = title
        self.rows = rows
        self.hints = list(hints)

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)

    @property
    def max_relative_error(self) -> float:
        return max(row.relative_error for row in self.rows)

    def __str__(self) -> str:
        full = any(row.index is not None for row in self.rows)
        widths = (28, 8, 9, 10, 10, 5, 4) if full else (38, 8, 0, 10, 10, 5, 4)
        header = ("tensor", "shape", "worst at", "backward", "numeric", "error", "")
        lines = [_short(self.title, 80), *_line(widths, header)]
        for row in self.rows:
            cells = (
                row.name,
                ",".join(map(str, row.shape)) or "()",
                ",".join(map(str, row.index or ())),
                f"{row.analytic:.3e}",
                f"{row.numeric:.3e}",
                f"{row.relative_error:.0e}",
                "ok" if row.ok else "FAIL",
            )
            lines += _line(widths, cells)
            for note in filter(None, row.note.split("; ")):
                lines += textwrap.wrap(note, 80, initial_indent="    ", subsequent_indent="    ")
        for hint in self.hints:
            lines += textwrap.wrap(
                f"looks like: {hint}", 80, subsequent_indent="    ", break_long_words=False
            )
        failed = sum(not row.ok for row in self.rows)
        lines.append(f"{failed} of {len(self.rows)} tensors failed" if failed else "all ok")
        return "\n".join(lines)

    __repr__ = __str__


def _line(widths: tuple[int, ...], cells: tuple[str, ...]) -> list[str]:
    """The cells in columns, the first to the left; a name too long has a line to itself."""
    name, *others = cells
    shown = [_short(cell, n).rjust(n) for cell, n in zip(others, widths[1:]) if n]
    if len(name) <= widths[0]:
        return [" ".join([name.ljust(widths[0]), *shown]).rstrip()]
    return [_short(name, 80), " ".join([" " * widths[0], *shown]).rstrip()]


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else ".." + text[len(text) - width + 2 :]


def gradcheck(
    layer: Any,
    *inputs: Any,
    mode: str = "full",
    tolerance: float = 1e-6,
    step: float = 1e-5,
    seed: int = 0,
    **keywords: Any,
) -> GradcheckReport:
    """Check layer.backward against central differences of layer.forward(*inputs, **keywords).

    layer: any object with forward and backward as npdecoder.core describes them, a subclass of
        Layer or not; the Parameters among its attributes are checked, those of layers in it too.
    inputs: the positional arguments of forward. Float arrays (also in tuples) are differentiated;
        integers, booleans and None are held fixed. backward must return one gradient for each float
        input, in their order.
    keywords: handed to forward as they are and not differentiated (mask=...). An rng= (a Generator,
        or an int, the seed of one) starts from the same state at every call.
    mode: "full" moves every element of every float input and parameter by itself; "directional"
        moves each tensor along one random unit direction: two forwards a tensor, however large.
    tolerance: on each tensor's relative error. step: of the differences, times max(1, |x|).
    seed: of the upstream gradient and the directions.

    The loss is sum(y * dy) with random dy, so that its slope along a tensor is numeric
    sum((y(x + h) - y(x - h)) * dy) / 2h and analytic what backward(ctx, dy) returns or adds to
    .grad. An entry that disagrees is tried again with larger and smaller steps. An entry at a kink
    (ReLU at 0) may have any slope between those on its two sides. backward runs twice, and must
    return the same and add the same again.

    Between forward and backward another forward runs, on other inputs: what a layer remembers
    outside ctx is then wrong.

    The layer's values and gradients are afterwards bit for bit what they were, also after an error;
    the inputs are copied.

    Errors: TypeError for a float32 (or float16) parameter or input, and for an integer input that
    backward returned a gradient for; ValueError if two equal calls differ, if the output is not
    finite, if the layer writes into its arguments or weights, or if there is nothing to check.
    """
    one_of("mode", mode, ("full", "directional"))
    step, tolerance = real("step", step), real("tolerance", tolerance)
    seed = integer("seed", seed, 0)
    for method in ("forward", "backward"):
        if not callable(getattr(layer, method, None)):
            raise TypeError(f"layer is a {type(layer).__name__}, which has no {method}")
    if not step > 0.0 or not tolerance > 0.0:
        raise ValueError(f"step is {step} and tolerance {tolerance}, expected numbers > 0")
    # a stream of our own: inputs made with default_rng(seed) shall not meet themselves as dy
    rng = np.random.default_rng([seed, 1986])
    check = _Check(layer, inputs, keywords, tolerance, step, rng)
    hints: list[str] = []
    try:
        rows = [check.row(tensor, mode) for tensor in check.tensors()]
        if mode == "full" and not all(row.ok for row in rows):
            hints = check.hints(rows)
    finally:
        check.restore()
    title = f"gradcheck of {type(layer).__name__}: {mode}, tolerance {tolerance:g}"
    return GradcheckReport(title, rows, hints)


class _Tensor(NamedTuple):
    name: str
    array: Array  # what forward reads; written to and restored
    analytic: Array
    note: str


class _Slopes(NamedTuple):
    """Of the loss along a move: (right + left) / 2, and on either side."""

    central: Any
    left: Any
    right: Any


class _Check:
    def __init__(
        self,
        layer: Any,
        inputs: tuple[Any, ...],
        keywords: dict[str, Any],
        tolerance: float,
        step: float,
        rng: np.random.Generator,
    ) -> None:
        self.layer = layer
        self.tolerance, self.step, self.rng = tolerance, step, rng
        self.inputs = tuple(_copy(value) for value in inputs)
        names = _argument_names(layer, len(inputs))
        self.leaves = [leaf for n, x in zip(names, self.inputs) for leaf in _leaves(n, x)]
        self.floats = [(name, x) for name, x in self.leaves if x.dtype.kind == "f"]
        self.keywords = {
            name: value.copy() if isinstance(value, np.ndarray) else value
            for name, value in keywords.items()
        }
        named = getattr(layer, "named_parameters", None)
        self.parameters = dict(named() if named else find_parameters(layer))
        for name, x in self.floats:
            _refuse_narrow(name, x, f"{name}.astype(np.float64)")
        for name, p in self.parameters.items():
            _refuse_narrow(name, p.value, "layer.astype(np.float64)")
        self.compared: dict[str, tuple[Array, Array, int]] = {}  # analytic, numeric, kinks
        self.saved = {name: (p.value.copy(), p.grad.copy()) for name, p in self.parameters.items()}

    def restore(self) -> None:
        for name, p in self.parameters.items():
            value, grad = self.saved[name]
            p.value[...], p.grad[...] = value, grad

    def forward(self) -> tuple[Any, Any]:
        keywords = dict(self.keywords)
        rng = keywords.get("rng")
        if rng is not None:
            generator = isinstance(rng, np.random.Generator)
            keywords["rng"] = copy.deepcopy(rng) if generator else np.random.default_rng(rng)
        y, ctx = self.layer.forward(*self.inputs, **keywords)
        return y, ctx

    def outputs(self) -> list[Array]:
        """forward's output as a list of copies (y may be a view of the input)."""
        return [y.copy() for _, y in _leaves("output", self.forward()[0])]

    def tensors(self) -> Iterator[_Tensor]:
        """Run forward and backward, refuse what is wrong at once, and list what to compare."""
        arrays = [(name, x) for name, x in self.keywords.items() if isinstance(x, np.ndarray)]
        self.before = [(name, x, x.copy()) for name, x in (*self.leaves, *arrays)]
        y, ctx = self.forward()
        self.refuse_writes()
        self.y = [leaf.copy() for _, leaf in _leaves("output", y)]
        for leaf in self.y:
            _refuse_narrow("the output", leaf, "the layer's constants .astype(np.float64) too")
            if not np.isfinite(leaf).all():
                raise ValueError("the output is not finite: there is no slope to compare with")
        if not all(np.array_equal(a, b) for a, b in zip(self.y, self.outputs())):
            raise ValueError(
                "two equal calls of forward differ: pass rng= (it is re-seeded before every call), "
                "or remove what changes between calls"
            )
        self.forward_elsewhere()
        dy = _map(lambda leaf: self.rng.standard_normal(leaf.shape), y)
        self.dy = [leaf.copy() for _, leaf in _leaves("dy", dy)]

        for p in self.parameters.values():
            p.grad[...] = 0.0
        grads = self.gradients(ctx, dy)
        parameter_grads = {name: p.grad.copy() for name, p in self.parameters.items()}
        again = self.gradients(ctx, dy)
        self.refuse_writes()
        if not all(np.array_equal(a, b) for (_, a), b in zip(_leaves("dy", dy), self.dy)):
            raise ValueError("backward wrote into dy")
        self.refuse_miscounts(grads)

        for (name, x), grad, second in zip(self.floats, grads, again):
            same = np.array_equal(grad, second, equal_nan=True)
            note = "" if same else "a second backward returned another gradient"
            yield _Tensor(name, x, grad, note)
        for name, p in self.parameters.items():
            grad = parameter_grads[name]
            added = np.allclose(p.grad, 2.0 * grad, rtol=1e-9, atol=1e-12, equal_nan=True)
            note = "" if added else "a second backward did not add the same to .grad (is it +=?)"
            yield _Tensor(name, p.value, grad, note)

    def forward_elsewhere(self) -> None:
        """A forward whose context is dropped, on inputs a little nearer to zero."""
        starts = [x.copy() for _, x in self.floats]
        try:
            for _, x in self.floats:
                x *= 0.999
            with np.errstate(all="ignore"):
                self.forward()
        finally:
            for (_, x), start in zip(self.floats, starts):
                x[...] = start

    def gradients(self, ctx: Any, dy: Any) -> list[Array]:
        returned = self.layer.backward(ctx, dy)
        if returned is None and self.floats:
            raise ValueError("backward returned None: is its return missing?")
        return [grad.copy() for _, grad in _leaves("gradient", returned)]

    def refuse_writes(self) -> None:
        for name, x, old in self.before:
            if not np.array_equal(x, old, equal_nan=x.dtype.kind == "f"):
                raise ValueError(f"the layer wrote into its argument {name}")
        for name, p in self.parameters.items():
            if not np.array_equal(p.value, self.saved[name][0], equal_nan=True):
                raise ValueError(f"forward or backward changed the weight {name}")

    def refuse_miscounts(self, grads: list[Array]) -> None:
        names = [name for name, _ in self.floats]
        integers = [name for name, x in self.leaves if x.dtype.kind in "iu"]
        if len(grads) > len(names) and integers:
            raise TypeError(
                f"backward returned {len(grads)} gradients, but {', '.join(integers)} holds "
                f"integers, which no small step can move: convert with .astype(np.float64)"
            )
        if len(grads) != len(names):
            raise ValueError(
                f"backward returned {len(grads)} gradients for {len(names)} float inputs "
                f"({', '.join(names)}): pass what has no gradient by keyword"
            )
        if not names and not self.parameters:
            raise ValueError("there is nothing to check: no float input and no parameter")

    def row(self, tensor: _Tensor, mode: str) -> GradcheckRow:
        name, array, analytic, note = tensor
        if analytic.shape != array.shape:
            if mode == "full":
                self.compared[name] = analytic, self.numeric(array), 0
            note = f"the gradient has shape {analytic.shape}"
            nan, inf = float("nan"), float("inf")
            return GradcheckRow(name, array.shape, None, nan, nan, inf, False, note)

        analytic = analytic.astype(array.dtype)
        start = array.copy()
        moves: list[tuple[Callable[[float], Array], float]]
        with np.errstate(invalid="ignore"):  # a gradient may hold inf: that is a FAIL, no warning
            if mode == "directional":
                direction = self.rng.standard_normal(array.shape)
                direction /= np.linalg.norm(direction) or 1.0
                h = self.step * max(1.0, float(np.abs(start).max(initial=0.0)))
                moves = [(lambda t: start + t * direction, h)]
                a = np.array([(analytic * direction).sum()], dtype=array.dtype)
            else:
                moves = [
                    (_mover(start, i), self.step * max(1.0, abs(float(start.flat[i]))))
                    for i in range(array.size)
                ]
                a = analytic.reshape(-1)
            slopes = [self.slopes(array, start, *move) for move in moves]
            n = np.array([slope.central for slope in slopes], dtype=array.dtype)

            scale = _scale(a, n)
            kinks, misses = 0, 0
            zero = bool(np.abs(a).max(initial=0.0) <= ZERO)
            if not scale <= ZERO:
                wrong = 0  # beyond a few it is no accident: the others are as they are
                for i in np.flatnonzero(~(np.abs(a - n) <= self.tolerance * scale)):
                    if wrong == 4:
                        break
                    n[i], kink = self.second_look(
                        array, start, moves[i], slopes[i], a[i], scale, zero
                    )
                    between = n[i] == a[i]
                    kinks += kink and between
                    misses += kink and not between
                    wrong += not (np.abs(a[i] - n[i]) <= self.tolerance * scale or kink)
            if mode == "full":
                self.compared[name] = analytic, n.reshape(array.shape), misses
            error = _relative_error(a, n)
            worst = int(np.nan_to_num(np.abs(a - n), nan=np.inf).argmax()) if len(a) else 0

        notes = [note] * bool(note)
        if kinks:
            notes.append(f"{kinks} at a kink, between the slopes of its two sides")
        if ZERO >= scale > 0.0 and np.abs(a).max(initial=0.0) > 1e-13:
            notes.append("below 1e-9 everywhere: taken as zero")
        if misses:
            notes.append(f"{misses} at a kink, where there is no slope: move the input off it")
        index = None
        if mode == "full":
            index = tuple(int(i) for i in np.unravel_index(worst, array.shape)) if len(a) else ()
        at = (float(a[worst]), float(n[worst])) if len(a) else (0.0, 0.0)
        ok = error <= self.tolerance and not note
        return GradcheckRow(name, array.shape, index, *at, error, ok, "; ".join(notes))

    def numeric(self, array: Array) -> Array:
        """The central slopes at every element, without a second look."""
        start = array.copy()
        slopes = [
            self.slopes(array, start, _mover(start, i), self.step).central
            for i in range(array.size)
        ]
        return np.array(slopes, array.dtype).reshape(array.shape)

    def hints(self, rows: list[GradcheckRow]) -> list[str]:
        """What the failure looks like."""

        def gradients(dy: list[Array]) -> dict[str, Array]:
            for p in self.parameters.values():
                p.grad[...] = 0.0
            y, ctx = self.forward()
            given = iter(dy)
            grads = self.gradients(ctx, _map(lambda _: next(given).copy(), y))
            found = {name: grad for (name, _), grad in zip(self.floats, grads)}
            return {**found, **{name: p.grad.copy() for name, p in self.parameters.items()}}

        inputs = {name for name, _ in self.floats}
        tensors = [
            Tensor(row.name, *self.compared[row.name][:2], row.ok, row.name in inputs,
                   "a second backward" not in row.note, self.compared[row.name][2])
            for row in rows
        ]  # fmt: skip
        keywords = dict(self.keywords)
        if isinstance(keywords.get("rng"), int):
            keywords["rng"] = np.random.default_rng(keywords["rng"])
        facts = Facts(self.layer, self.inputs, keywords, tensors, self.y, self.dy, gradients, {})
        try:
            with np.errstate(all="ignore"):
                return find_hints(facts, lambda part, inputs, kw: gradcheck(part, *inputs, **kw))
        except Exception:  # of a layer that cannot be called so often: the report stands without
            return []

    def slopes(
        self, array: Array, start: Array, move: Callable[[float], Array], h: float
    ) -> _Slopes:
        """From the loss at +h and -h along a move; array is restored."""
        try:
            array[...] = move(h)
            above = self.outputs()
            array[...] = move(-h)
            below = self.outputs()
        finally:
            array[...] = start
        right = sum(((p - y) * dy).sum() for p, y, dy in zip(above, self.y, self.dy)) / h
        left = sum(((y - m) * dy).sum() for m, y, dy in zip(below, self.y, self.dy)) / h
        central = sum(((p - m) * dy).sum() for p, m, dy in zip(above, below, self.dy)) / (2 * h)
        return _Slopes(central, left, right)

    def second_look(
        self,
        array: Array,
        start: Array,
        step: tuple[Callable[[float], Array], float],
        first: _Slopes,
        a: Any,
        scale: Any,
        zero: bool,
    ) -> tuple[Any, bool]:
        """A better numeric slope for an entry that disagrees, and whether it stands at a kink.

        Other estimates of the slope, each good against one evil:
            rounding            larger steps; of three, the errors of order h^2 and h^4 cancel
            curvature           smaller steps
            kinks all around    smaller steps; one side alone, of two the error of order h cancels
        The entry is right if two of a kind say so: one alone might by chance. At a kink the slopes
        of both sides differ however small the step is; the entry may be any between them.
        """
        move, h = step
        # a gradient of zero is right to within ZERO, whatever rounding made of the first slope
        slack = max(self.tolerance * scale, ZERO if zero else 0.0)

        small = [self.slopes(array, start, move, h / k) for k in (10, 30, 100, 300)]
        large = [self.slopes(array, start, move, 10 * h * 2**k).central for k in range(7)]
        without_h2 = [(4 * fine - coarse) / 3 for fine, coarse in pairwise(large)]
        without_h4 = [(16 * fine - coarse) / 15 for fine, coarse in pairwise(without_h2)]
        both_sides = [first.central, *(slope.central for slope in small)]
        both_sides += [large[0], without_h2[0], *without_h4]
        nearest, second, *_ = sorted(both_sides, key=lambda n: abs(n - a))
        if abs(second - a) <= slack:
            return nearest, False

        wide, narrow = small[0], small[2]
        gap, narrow_gap = abs(wide.right - wide.left), abs(narrow.right - narrow.left)
        rounding = sum(np.abs(y * dy).sum() for y, dy in zip(self.y, self.dy)) * 1e-14 / (h / 100)
        if narrow_gap > max(0.2 * gap, rounding):  # without a kink it is 0.1 of the gap
            low, high = sorted((narrow.left, narrow.right))
            return (a if low - slack <= a <= high + slack else first.central), True

        for outer, inner, innermost in zip(first[1:], small[0][1:], small[1][1:]):  # left, right
            one_side = [(10 * inner - outer) / 9, (3 * innermost - inner) / 2]
            if max(abs(n - a) for n in one_side) <= slack:
                return one_side[1], False
        return first.central, False


def _scale(a: Array, n: Array) -> Any:
    return np.maximum(np.abs(a).max(initial=0.0), np.abs(n).max(initial=0.0))  # NaN stays NaN


def _relative_error(a: Array, n: Array) -> float:
    scale = _scale(a, n)
    error = 0.0 if scale <= ZERO else float(np.abs(a - n).max(initial=0.0) / scale)
    return float("inf") if np.isnan(error) else error


def _mover(start: Array, i: int) -> Callable[[float], Array]:
    def move(t: float) -> Array:
        moved = start.copy()
        moved.flat[i] += t
        return moved

    return move


def _copy(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_copy(v) for v in value)
    if isinstance(value, np.random.Generator):
        raise TypeError("a Generator was given by position: pass rng= by keyword")
    return None if value is None else np.array(value)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Array]]:
    """The arrays of a value that is an array, a number, None or a tuple of such."""
    if isinstance(value, (tuple, list)):
        for i, v in enumerate(value):
            yield from _leaves(f"{name}[{i}]", v)
    elif value is not None:
        yield name, np.asarray(value)


def _map(f: Callable[[Array], Any], value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_map(f, v) for v in value)
    return None if value is None else f(np.asarray(value))


def _argument_names(layer: Any, count: int) -> list[str]:
    parameters = inspect.signature(layer.forward).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in parameters if p.kind in positional]
    return (names + [f"input{i}" for i in range(len(names), count)])[:count]


def _refuse_narrow(name: str, x: Array, cure: str) -> None:
    if x.dtype.kind != "f" or x.dtype.itemsize < 8:
        raise TypeError(
            f"{name} has dtype {x.dtype}: central differences need float64; convert with {cure}"
        )
