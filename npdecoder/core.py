"""Parameter and Layer, and the checks of arguments that every layer shares.

The layer contract:

    y, ctx = layer.forward(x, ...)     # ctx holds what backward needs; the layer remembers nothing
    dx     = layer.backward(ctx, dy)   # dx = dLoss/dx; adds to the .grad of each parameter
    y      = layer(x, ...)             # inference: forward, with ctx dropped

backward returns the gradients of forward's differentiable arguments in their order: one array for
one, a tuple for several, the empty tuple for none. No call writes into its arguments; what it
returns may share memory with them (a Dropout without rng returns x itself): copy before you edit.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

Array = NDArray[Any]

LARGE = 1_000_000  # numbers that are worth a thread
FLOAT_DTYPES = (np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.longdouble))

# glibc gives freed arrays back to the system, which clears each page before it gives it again: up
# to two fifths of a step. Once it has freed an array of this size, it keeps twice as much for the
# next step (mallopt(3), M_MMAP_THRESHOLD). Nobody writes to this one: it takes no memory.
with suppress(MemoryError):  # but a limit counts it
    np.empty(31 << 20, np.uint8)


class Parameter:
    """A weight and its gradient.

    value: the array of the weight, a copy of what the constructor was given.
    grad:  dLoss/dvalue, of the same shape and dtype; zeros, allocated when it is first read.

    Neither array is ever rebound (but by astype, and while nobody holds it or a view of it):
    assigning copies into place, so views stay true.
    Both `p.value -= lr * p.grad` and `p.grad += dW` work in place.
    add_product(a, b) is `p.grad += a @ b`, without the product's own array where it is the first,
    and add_sum(rows) is `p.grad += rows.sum(axis=0)`.

    Errors: TypeError for a value that is not float32, float64 or longdouble; ValueError on
    assigning an array of another shape.
    """

    __slots__ = ("_grad", "_grad_is_old", "_value")

    def __init__(self, value: ArrayLike) -> None:
        array = np.array(rectangular("value", value), order="C", subok=False)
        self._value: Array = array.astype(float_dtype("value", array.dtype), copy=False)
        self._grad: Array | None = None
        self._grad_is_old = False  # to be read as zeros, which are not yet written

    @property
    def value(self) -> Array:
        return self._value

    @value.setter
    def value(self, new: Array) -> None:
        if new is not self._value:  # the end of `p.value -= step`, which worked in place
            _copy_into(self._value, "value", new)

    @property
    def grad(self) -> Array:
        if self._grad is None:
            self._grad = np.zeros_like(self._value)
        elif self._grad_is_old:
            self._grad.fill(0)
        self._grad_is_old = False
        return self._grad

    @grad.setter
    def grad(self, new: Array) -> None:
        if new is not self._grad:  # the end of `p.grad += dW`
            _copy_into(self.grad, "grad", new)

    def add_sum(self, rows: Array) -> None:
        """grad += rows.sum(axis=0), of rows (N, d), as a product with ones, which is quicker."""
        self.add_product(ones(len(rows), rows.dtype), rows)

    def add_product(self, a: Array, b: Array) -> None:
        """grad += a @ b."""
        # dot and not matmul: quicker if small
        if self._grad_is_old:  # 0 + a @ b, in one pass over the array
            a.dot(b, self._grad)
            self._grad_is_old = False
        elif self._grad is None:
            self._grad = a.dot(b, np.empty_like(self._value))
        else:
            self._grad += a.dot(b)

    def add_grads(self, arrays: Sequence[Array]) -> None:
        """grad += each of the arrays, in their order, in as few passes as may be.

        If grad is to be read as zeros, one of the first two may be its own array, where somebody
        wrote them.
        """
        others = list(arrays)
        if others and not self.is_written:
            total = others.pop(0)
            if self._grad is None:
                self._grad = np.empty_like(self._value)
            if others:
                total = np.add(total, others.pop(0), out=self._grad)
            if total is not self._grad:
                np.copyto(self._grad, total)
            self._grad_is_old = False
        for array in others:
            self.grad += array

    @property
    def is_written(self) -> bool:
        """Whether grad holds what somebody wrote, and not the zeros it begins with."""
        return self._grad is not None and not self._grad_is_old

    @property
    def has_grad(self) -> bool:
        """Whether grad holds anything but zeros; does not allocate it."""
        return self._grad is not None and self.is_written and bool(self._grad.any())

    @property
    def shape(self) -> tuple[int, ...]:
        return self._value.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._value.dtype

    @property
    def size(self) -> int:
        return self._value.size

    def zero_grad(self) -> None:
        if self._grad is not None:
            self._grad.fill(0)
            self._grad_is_old = False

    def forget_grad(self) -> None:
        """zero_grad, but the zeros are written only if nothing else is before grad is read.

        For loops that nobody watches: a view of grad shows the old numbers until then.
        """
        self._grad_is_old = self._grad is not None

    def move_value(self, array: Array) -> None:
        """Let this array take the place of value, if nothing else holds that: nobody can tell."""
        if self._value_references() == ALONE and _may_move(self._value):
            array[...] = self._value
            self._value = array

    def move_grad(self, array: Array) -> None:
        """The same with grad."""
        if self._grad is None:
            self._grad, self._grad_is_old = array, True
        elif sys.getrefcount(self._grad) == ALONE and _may_move(self._grad):
            array[...] = self._grad
            self._grad = array

    def _value_references(self) -> int:
        return sys.getrefcount(self._value)

    @classmethod
    def of_arrays(cls, value: Array, grad: Array) -> Parameter:
        """A Parameter with this very value array, and zeros in the place of grad."""
        parameter = cls.__new__(cls)
        parameter._value, parameter._grad, parameter._grad_is_old = value, grad, True
        return parameter

    def astype(self, dtype: DTypeLike) -> Parameter:
        """Convert value and grad to dtype in place (the one call that rebinds them)."""
        dtype = float_dtype("dtype", dtype)
        if dtype != self._value.dtype:
            self._value = self._value.astype(dtype)
            self._grad = None if self._grad is None else self.grad.astype(dtype)
        return self

    def __repr__(self) -> str:
        return f"Parameter(shape={self.shape}, dtype={self.dtype})"


# references to an array that nothing but its Parameter holds
ALONE = Parameter.of_arrays(np.zeros(1), np.zeros(1))._value_references()


def _may_move(array: Array) -> bool:
    """Not what is read-only; nor a part of an array: a view of that holds on to the whole."""
    return array.flags.writeable and not isinstance(array.base, np.ndarray)


def _copy_into(array: Array, name: str, new: ArrayLike) -> None:
    new = rectangular(f"Parameter.{name}", new)
    if new.shape != array.shape:
        raise ValueError(f"Parameter.{name} has shape {array.shape}, got {new.shape}")
    np.copyto(array, new, casting="same_kind")


class LoadResult(NamedTuple):
    """What load_state_dict did not load: names that were missing, unexpected or misshapen."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    misshapen: tuple[str, ...]


class Layer:
    """Base class: finds parameters among the attributes; subclasses define forward and backward."""

    def forward(self, *inputs: Any, **options: Any) -> tuple[Any, Any]:
        raise NotImplementedError(f"{type(self).__name__} does not define forward")

    def backward(self, ctx: Any, dy: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} does not define backward")

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Inference: forward's output, with the context dropped."""
        return self.forward(*inputs, **options)[0]

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Pairs (dotted name, Parameter) in the order of construction.

        A Parameter that is used in several places comes once, under its first name.
        """
        return find_parameters(self)

    def parameters(self) -> list[Parameter]:
        return [parameter for _, parameter in self.named_parameters()]

    def num_parameters(self) -> int:
        """How many numbers can be trained; a shared Parameter counts once."""
        return sum(parameter.size for parameter in self.parameters())

    def zero_grad(self) -> None:
        for parameter in self.parameters():
            parameter.zero_grad()

    def astype(self, dtype: DTypeLike) -> Any:
        """Convert all parameters to dtype (float32, float64, longdouble) in place; returns self."""
        dtype = float_dtype("dtype", dtype)
        for parameter in self.parameters():
            parameter.astype(dtype)
        return self

    def state_dict(self) -> dict[str, Array]:
        """Copies of the values by name; a shared Parameter is there once, under its first name."""
        return {name: parameter.value.copy() for name, parameter in self.named_parameters()}

    def load_state_dict(self, mapping: Mapping[str, ArrayLike], strict: bool = True) -> LoadResult:
        """Copy arrays into the parameters of these names; float arrays of any width are converted.

        All or nothing: everything is checked before the first parameter is written.

        Errors: ValueError that lists every missing, unexpected and misshapen name, if strict; else
        these names are returned, and it is an error if nothing fits at all. TypeError for an array
        that does not hold floats; ValueError for numbers that overflow the parameter's dtype.
        """
        parameters = dict(self.named_parameters())
        mapping = mapping_of("mapping", mapping)
        arrays = {name: np.asarray(array) for name, array in mapping.items()}
        missing = [name for name in parameters if name not in arrays]
        unexpected = [name for name in arrays if name not in parameters]
        common = [name for name in parameters if name in arrays]
        misshapen = [name for name in common if arrays[name].shape != parameters[name].shape]
        fitting = [name for name in common if name not in set(misshapen)]

        problems = [f"missing {name}" for name in missing]
        problems += [f"unexpected {name}" for name in unexpected]
        problems += [
            f"misshapen {name}: expected {parameters[name].shape}, got {arrays[name].shape}"
            for name in misshapen
        ]
        if problems and (strict or not fitting):
            what = "does not fit" if strict else "has no array that fits"
            raise ValueError(f"state dict {what} {type(self).__name__}: " + "; ".join(problems))

        for name in fitting:
            dtype = parameters[name].dtype
            arrays[name] = as_stored_floats(f"state dict entry {name}", arrays[name], dtype)
        for name in fitting:
            parameters[name].value = arrays[name]
        return LoadResult(tuple(missing), tuple(unexpected), tuple(misshapen))


def find_parameters(layer: Any) -> Iterator[tuple[str, Parameter]]:
    """Pairs (dotted name, Parameter) of a layer, or of any object with forward and backward.

    Looks into its attributes, the layers among them, and lists, tuples and dicts of all these.
    """
    return ((name, x) for name, x in _walk(layer, "", set()) if isinstance(x, Parameter))


def find_layers(layer: Any) -> Iterator[tuple[str, Any]]:
    """Pairs (dotted name, layer or other object with forward and backward), itself as "".

    Each comes once, under its first name, and is looked for where find_parameters looks.
    """
    return ((name, x) for name, x in _walk(layer, "", set()) if not isinstance(x, Parameter))


def _walk(value: Any, name: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """The Parameters and layers in value, each once, a layer before what it holds."""
    children: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, (list, tuple)):
        children = enumerate(value)
    elif isinstance(value, dict):
        children = value.items()
    elif id(value) not in seen:
        if isinstance(value, Parameter):
            seen.add(id(value))
            yield name, value
        elif hasattr(value, "forward") and hasattr(value, "backward"):
            seen.add(id(value))
            yield name, value
            children = getattr(value, "__dict__", {}).items()
    for key, child in children:
        yield from _walk(child, f"{name}.{key}" if name else str(key), seen)


# Checks of arguments. Each names the argument, what came and what was expected.


def float_dtype(name: str, dtype: DTypeLike) -> np.dtype[Any]:
    """dtype in native byte order if it is float32, float64 or longdouble, else a TypeError."""
    try:
        native = np.dtype(dtype).newbyteorder("=")
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} is {dtype!r}, expected float32, float64 or longdouble") from error
    if native not in FLOAT_DTYPES:
        raise TypeError(
            f"{name} has dtype {native}, expected float32, float64 or longdouble "
            f"(convert with .astype(np.float32))"
        )
    return FLOAT_DTYPES[FLOAT_DTYPES.index(native)]  # NumPy compares an object with itself quickly


def rectangular(name: str, x: ArrayLike) -> Array:
    try:
        return np.asarray(x)
    except ValueError as error:  # lists of different lengths
        raise ValueError(f"{name} is no rectangular array: {error}") from None


def rectangular_ids(name: str, ids: ArrayLike) -> Array:
    """ids as they are; an empty list, of which NumPy would make floats, as integers."""
    array = rectangular(name, ids)
    empty_list = array.size == 0 and not isinstance(ids, np.ndarray)
    return array.astype(np.intp) if empty_list else array


def as_array(name: str, x: ArrayLike, dtype: DTypeLike | None = None) -> Array:
    """x as a native float array: of dtype if given, else of its own, which must be a float."""
    # nearly always: what one layer hands to the next
    if type(x) is np.ndarray and (x.dtype in FLOAT_DTYPES if dtype is None else x.dtype == dtype):
        return x
    array = rectangular(name, x)
    if dtype is None:
        dtype = float_dtype(name, array.dtype)
    elif array.dtype.kind not in "fiu":
        raise TypeError(f"{name} has dtype {array.dtype}, expected real numbers")
    if array.dtype.kind != "f" or array.dtype.itemsize <= np.dtype(dtype).itemsize:
        return array.astype(dtype, copy=False)
    return as_stored_floats(name, array, np.dtype(dtype))


def as_stored_floats(name: str, array: Array, dtype: np.dtype[Any]) -> Array:
    """A state dict's array in dtype. TypeError if it holds no floats, ValueError on overflow."""
    if array.dtype.kind != "f":
        raise TypeError(f"{name} holds {array.dtype}, expected floats")
    with np.errstate(over="ignore"):
        converted = array.astype(dtype)
    if not np.array_equal(np.isfinite(converted), np.isfinite(array)):
        raise ValueError(f"{name} overflows {dtype}")
    return converted


def as_input(name: str, x: ArrayLike, width: int, dtype: DTypeLike | None = None) -> Array:
    """x as an array whose last axis has this width."""
    array = as_array(name, x, dtype)
    if array.ndim < 1 or array.shape[-1] != width:
        raise ValueError(f"{name} has shape {array.shape}, expected (..., {width})")
    return array


def as_sequences(name: str, x: ArrayLike, width: int, dtype: DTypeLike | None = None) -> Array:
    """x as an array (B, T, width): batch first."""
    array = as_input(name, x, width, dtype)
    if array.ndim != 3:
        raise ValueError(f"{name} has shape {array.shape}, expected (B, T, {width}), batch first")
    return array


def as_gradient(name: str, dy: ArrayLike, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """dy as an array of the shape and dtype of the output it is the gradient of."""
    array = as_array(name, dy, dtype)
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}, expected {shape}")
    return array


def as_ids(name: str, ids: ArrayLike, size: int) -> NDArray[np.intp]:
    """ids as intp, each in [0, size); integers of any width and byte order are taken.

    Errors: TypeError for anything but integers; IndexError for an id out of range, which NumPy
    would otherwise wrap (-1 is the last row).
    """
    array = rectangular_ids(name, ids)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {array.dtype}, expected integers")
    if array.size and (array.min() < 0 or array.max() >= size):
        where = np.argwhere((array < 0) | (array >= size))[0]
        index = tuple(int(i) for i in where)
        raise IndexError(f"{name}{list(index)} is {array[index]}, expected an id in [0, {size})")
    return array.astype(np.intp, copy=False)


def positive_int(name: str, value: Any) -> int:
    return integer(name, value, 1)


def integer(name: str, value: Any, at_least: int | None = None) -> int:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} is {value!r}, expected an integer")
    if at_least is not None and value < at_least:
        raise ValueError(f"{name} is {value}, expected at least {at_least}")
    return int(value)


def real(name: str, value: Any, expected: str = "a number") -> float:
    """value as a float; an integer beyond all floats is infinite."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is {value!r}, expected {expected}")
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else -float("inf")  # type: ignore[operator]


def non_negative(name: str, value: Any) -> float:
    """value as a float >= 0; NaN and inf are refused."""
    number = real(name, value)
    if not 0.0 <= number < float("inf"):
        raise ValueError(f"{name} is {number}, expected a finite number >= 0")
    return number


def fraction(name: str, value: Any) -> float:
    """value as a float in [0, 1]; NaN is refused."""
    number = real(name, value, "a number in [0, 1]")
    if not 0.0 <= number <= 1.0:
        raise ValueError(f"{name} is {number}, expected a number in [0, 1]")
    return number


def flag(name: str, value: Any) -> bool:
    """value, if it is True or False: "no" and numbers would be taken for one of them."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} is {value!r}, expected True or False")
    return bool(value)


def mapping_of(name: str, value: Any) -> Any:
    """value, if it is a mapping."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} is a {type(value).__name__}, expected a mapping of names")
    return value


def one_of(name: str, value: Any, choices: Iterable[str]) -> str:
    choices = tuple(choices)
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} is {value!r}, expected one of {', '.join(map(repr, choices))}")
    return str(value)


def construction_rng(rng: np.random.Generator | int | None) -> np.random.Generator:
    """The generator that initial weights are drawn from: rng itself, or one seeded with an int.

    None takes a fresh seed from the system: two layers made without rng start differently, and two
    made with the same int start alike (for a stack of layers hand one Generator to all).
    """
    if rng is None or isinstance(rng, np.random.Generator):
        return np.random.default_rng(rng)
    return np.random.default_rng(integer("rng", rng, 0))


def dropout_rng(rng: np.random.Generator | None) -> np.random.Generator | None:
    """rng as forward takes it: a Generator, or None for inference.

    Errors: TypeError for an int, of which every dropout would draw the same mask.
    """
    if rng is not None and not isinstance(rng, np.random.Generator):
        raise TypeError(f"rng is {rng!r}, expected None or a numpy.random.Generator: "
                        "make one with np.random.default_rng(seed) and pass it to every call")
    return rng


def uniform_xavier(
    rng: np.random.Generator, d_in: int, d_out: int, dtype: DTypeLike
) -> Array:
    """(d_in, d_out) from U(-a, a), a = sqrt(6 / (d_in + d_out)); Glorot and Bengio 2010, eq. 16."""
    a = (6.0 / (d_in + d_out)) ** 0.5
    return rng.uniform(-a, a, (d_in, d_out)).astype(float_dtype("dtype", dtype))


def for_each(parameters: Sequence[Parameter], do: Callable[[int], None]) -> None:
    """do(n) for the number n of each parameter, which changes it alone; large ones in threads."""
    threads = sum(parameter.size for parameter in parameters) // LARGE
    if threads < 2 or (threads := min(num_cores(), threads)) < 2:
        for n in range(len(parameters)):
            do(n)
        return
    errors, call = np.geterr(), np.geterrcall()  # of this thread
    raised: list[BaseException] = []

    def do_all(numbers: Sequence[int]) -> None:
        try:
            with np.errstate(**errors, call=call):  # type: ignore[arg-type]  # None is none
                for n in numbers:
                    do(n)
        except BaseException as error:
            raised.append(error)

    largest_first = sorted(range(len(parameters)), key=lambda n: -parameters[n].size)
    # no ThreadPoolExecutor: that refuses work as soon as the main thread is at its end
    others = [threading.Thread(target=do_all, args=(largest_first[first::threads],))
              for first in range(1, threads)]
    for thread in others:
        thread.start()
    try:
        do_all(largest_first[::threads])
    finally:
        for thread in others:
            thread.join()
    for error in raised:
        raise error


def num_cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on every system
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def flat_blocks(size: int, *arrays: Array) -> Iterable[tuple[Array, ...]]:
    """Pieces of at most `size` numbers of contiguous arrays of one shape, as views."""
    # flat, for before NumPy 2 a single float32 number times a Python float is a float64
    flat = tuple(array.reshape(-1) for array in arrays)
    if arrays[0].size <= size:
        return (flat,)
    return zip(*([x[start : start + size] for start in range(0, x.size, size)] for x in flat))


@lru_cache(64)
def filled(n: int, divisor: int, dtype: np.dtype[Any]) -> Array:
    """(n, 1), read-only, each 1 / divisor: a product with it is a sum, or a mean."""
    array = np.ones((n, 1), dtype) / dtype.type(divisor)
    array.flags.writeable = False
    return array


@lru_cache(64)
def ones(n: int, dtype: np.dtype[Any]) -> Array:
    """(n,), read-only."""
    return filled(n, 1, dtype)[:, 0]


def add_rows(grad: Array, ids: NDArray[np.intp], rows: Array) -> None:
    """grad[ids[n]] += rows[n] for every n; the rows of a repeated id add up.

    ids (N,), rows (N, d). `grad[ids] += rows` would keep one of the repeats and lose the others.
    """
    # Sorting brings equal ids together, and one reduceat sums each run: np.add.at(grad, ids, rows)
    # does the same, many times slower.
    order = np.argsort(ids, kind="stable")
    sorted_ids = ids[order]
    starts = np.flatnonzero(np.diff(sorted_ids, prepend=-1))
    if len(starts):
        grad[sorted_ids[starts]] += np.add.reduceat(rows[order], starts, axis=0)
