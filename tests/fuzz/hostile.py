"""Calls with hostile arguments: valid ones in odd forms, or one of them spoilt.

A case is a function of a Source, from which it draws the arguments of one public call; `fuzz` makes
a test of it. Every argument is registered with what may be wrong about it. In most examples all are
valid, and what comes back is compared with a straightforward calculation in float64; in the others
one is spoilt, and an error of the documented kind that names it must come. In both no argument may
change, and a warning is an error, as it is in all tests.
"""

import contextlib
import datetime
import math
import os
import re
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import reference
from helpers import leaves, randomise, seeds
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("NPDECODER_FUZZ_EXAMPLES", "12"))  # of each case

FLOATS = ("float64", "float32", "longdouble")
REALS = (*FLOATS, "float16", "int64", "int8", "uint8", "int16", "uint16", "int32", "uint32")
INTEGERS = ("int64", "int8", "uint8", "int16", "uint16", "int32", "uint32", "uint64")
SAME = ("plain", "read-only", "reversed", "strided", "fortran", "big-endian", "unaligned", "list")
FORMS = (*SAME, "broadcast")  # whose numbers are those of its first item
KINDS = ("normal",) * 5 + ("large", "shifted", "constant", "tiny", "sick")

ANY = (ValueError, TypeError, IndexError)
WRONG_TYPES = [("3", TypeError), ([0.5], TypeError), (0.5j, TypeError), (np.array(0.5), TypeError)]
SIZES = [(0, ValueError), (-1, ValueError), (2.0, TypeError), (None, TypeError), (True, TypeError),
         (np.float64(2), TypeError), (math.nan, TypeError), *WRONG_TYPES]  # fmt: skip
NUMBERS = [(-0.1, ValueError), (math.nan, ValueError), (math.inf, ValueError), (True, TypeError),
           (10**400, ValueError), (None, TypeError), (np.bool_(False), TypeError), *WRONG_TYPES]
FRACTIONS = [(1.5, ValueError), *NUMBERS]
NOT_FLAGS = [(1, TypeError), ("yes", TypeError), (None, TypeError), (0.0, TypeError)]
WORDS = [("bogus", ANY), (None, ANY), (1, ANY), (b"pre", ANY), (["pre"], ANY), ("", ANY),
         (np.array(["pre", "post"]), ANY)]  # fmt: skip
GENERATORS = [(0, TypeError), (True, TypeError), ("rng", TypeError),
              (np.random.RandomState(0), TypeError)]
SEEDS = [(-1, ValueError), (1.5, TypeError), ("rng", TypeError), (True, TypeError)]
DTYPES = [(np.float16, TypeError), (np.int32, TypeError), (complex, TypeError), (bool, TypeError),
          (object, TypeError), ("bogus", TypeError)]  # fmt: skip
EITHER = (TypeError, ValueError)  # of a wrong type, which has a wrong shape too
NO_ARRAYS = [("three", EITHER), (None, EITHER), ({}, EITHER), (object(), EITHER),
             (datetime.date(2020, 1, 1), EITHER), ([[1], [2, 3]], ValueError)]


def without(bad, *valid):
    """The bad values but these, which this option takes."""
    return [(value, errors) for value, errors in bad if not any(value is v for v in valid)]


# Valid arrays in odd forms


def in_form(array, form):
    """The array in another layout of memory, byte order or type."""
    whole = (..., *(slice(None, None, -1),) * array.ndim)
    if form == "reversed":
        return array[whole].copy()[whole]
    if form == "strided":  # beside what nobody may read
        around = np.full([2 * n + 1 for n in array.shape], 77).astype(array.dtype)
        view = around[(..., *(slice(1, None, 2),) * array.ndim)]
        view[...] = array
        return view
    if form == "fortran":
        return np.array(array, order="F")
    if form == "big-endian":
        return array.astype(array.dtype.newbyteorder(">"))
    if form == "unaligned":
        raw = np.frombuffer(b"\0" + array.tobytes(), np.uint8).copy()[1:]
        return raw.view(array.dtype).reshape(array.shape)
    if form == "broadcast" and array.ndim and len(array):
        return np.broadcast_to(array[:1], array.shape)
    if form == "list":
        as_list = array.tolist()
        again = np.asarray(as_list)
        no_ids = array.size == 0 and array.dtype.kind in "iu"
        if again.shape == array.shape and (again.dtype == array.dtype or no_ids):
            return as_list
    if form == "read-only":
        array.setflags(write=False)
    return array


def plain(x, dtype=np.float64):
    """The numbers in x as a layer of this dtype sees them, in native float64."""
    return np.asarray(x).astype(dtype).astype(np.float64)


def snapshot(value):
    """All that a call could change of an argument, with the memory around an array."""
    if isinstance(value, np.ndarray):
        whole = value
        while isinstance(whole.base, np.ndarray):
            whole = whole.base
        return value.dtype.str, value.shape, value.strides, value.flags.writeable, whole.tobytes()
    if isinstance(value, dict):
        return {name: snapshot(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [snapshot(item) for item in value]
    return repr(value) if isinstance(value, float) else value  # NaN is not NaN


# Calls


@dataclass
class Call:
    """One call: its arguments by place and name, how it is made, and what is right."""

    title: str
    arguments: dict[str, dict[str, Any]]
    run: Any  # arguments -> (results by name, the arrays of the layer's parameters by name)
    expected: Any = None  # (those arrays, noise, seed) -> results by name; None: any results
    dtype: Any = np.float64  # that is computed in, for the tolerance
    rows: int | None = None  # leading axes along which nothing meets; None: unknown
    healthy: Any = None  # of these rows, those without NaN and inf
    spoilt: tuple[str, str, Any, Any] | None = None  # place, argument, errors, words
    may_raise: tuple[Any, Any] | None = None  # errors and words of what is right too
    scale: float = 0.0  # of numbers on the way to the results, if they may cancel

    def __repr__(self):
        given = {f"{place}.{name}": described(value) for place, named in self.arguments.items()
                 for name, value in named.items()}
        lines = [f"{name} = {text}" for name, text in given.items()]
        if self.spoilt:
            lines.append(f"spoilt: {self.spoilt[0]}.{self.spoilt[1]}")
        return "\n    ".join([self.title, *lines])

    def _repr_pretty_(self, printer, cycle):  # how hypothesis shows a failing example
        printer.text(repr(self))


def described(value):
    if not isinstance(value, np.ndarray):
        text = hex(value) if type(value) is int and abs(value) > 2**64 else repr(value)
        return text if len(text) < 500 else f"{text[:400]} ... ({len(text)} letters)"
    text = np.array2string(value, threshold=40).replace("\n", "")
    strides = "" if value.flags.c_contiguous else f", strides {value.strides}"
    return f"array {value.dtype.str} {value.shape}{strides} {text}"


class Source:
    """Where a case draws from: sizes and options from hypothesis, which makes them small in a
    failing example, and numbers from a seed that it draws.
    """

    def __init__(self, draw, title):
        self.draw, self.title = draw, title
        self.rng = np.random.default_rng(draw(seeds))
        self.kind = "normal"  # of the floats
        self.dtype = np.dtype(np.float64)
        self.arguments = {"make": {}, "forward": {}, "backward": {}}
        self.bad = []  # (place, name, function that lists the bad values, words)
        self.floating = []  # names of the inputs that have a gradient

    def pick(self, *values):
        return self.draw(st.sampled_from(values))

    def size(self, *sizes):
        return self.pick(*(sizes or (2, 3, 1, 5)))

    def length(self):
        return self.pick(2, 3, 1, 0, 5)

    def shape(self, least=0, most=3):
        """Leading axes: any number of them, of any length."""
        return tuple(self.length() for _ in range(self.pick(*range(least, most + 1))))

    def number(self, low, high):
        return float(self.rng.uniform(low, high))

    def any_dtype(self):
        """That of the inputs of a layer without parameters."""
        self.dtype = np.dtype(self.pick(*FLOATS))
        return self.dtype

    def of_any_kind(self, *others, sick=True):
        """Floats are large in some examples, subnormal in others, or NaN here and there."""
        self.kind = self.pick(*(KINDS if sick else KINDS[:-1]), *others)

    # Arguments

    def give(self, name, value, bad=(), place="forward", words=None):
        """Register an argument; bad: pairs (value, errors), or a function that lists them.

        words: what the message has to say, instead of the argument's name.
        """
        self.arguments[place][name] = value
        if callable(bad) or bad:
            self.spoil(name, bad, place, words)
        return value

    def spoil(self, name, bad, place="forward", words=None):
        self.bad.append((place, name, bad if callable(bad) else lambda: bad, words or name))

    def option(self, name, value, bad=()):
        return self.give(name, value, bad, "make")

    def sizes(self, **sizes):
        for name, value in sizes.items():
            value = self.pick(int, np.int8, np.uint16, np.int64)(value)
            self.option(name, value, SIZES)

    def flag(self, name):
        return self.option(name, self.pick(True, False), NOT_FLAGS)

    def make(self, rng=True):
        """The constructor's dtype and rng, which all layers with parameters take."""
        if rng:
            self.option("rng", self.pick(0, np.random.default_rng(0), None), SEEDS)
        self.dtype = np.dtype(self.option("dtype", self.pick(*FLOATS), DTYPES))
        return self.dtype

    def generator(self, name="rng"):
        return self.give(name, self.pick(None, np.random.default_rng(0)), GENERATORS)

    def values(self, shape, dtype):
        """Random numbers of the kind of this example."""
        x = self.rng.standard_normal(shape)
        if self.kind == "large":
            x *= 10.0 ** self.rng.integers(1, 5)
        if self.kind == "shifted":
            x += self.rng.choice([3000.0, 100.0, 85.0, -95.0, -100.0, -3000.0])
        if self.kind == "huge":
            x *= float(min(np.finfo(dtype).max, np.finfo(np.float64).max)) / 64.0
        if self.kind == "constant":
            x[...] = self.rng.integers(-2, 3)
        if self.kind == "tiny" and dtype != np.longdouble:
            x *= np.finfo(dtype).tiny
        return x

    def array(self, values, dtype, forms=SAME):
        dtype = np.dtype(dtype)
        if dtype.kind in "iu":
            info = np.iinfo(dtype)
            values = np.clip(np.nan_to_num(np.round(values)), max(info.min, -(2**31)),
                             min(info.max, 2**31))  # fmt: skip
        return in_form(np.array(values).astype(dtype), self.pick(*forms))

    def floats(self, name, shape, width=True, rank=None, batch=None, words=None):
        """An input of real numbers of a layer that converts them to its dtype.

        width, rank: whether the last axis, and the number of axes, are fixed. batch: how many items
        must be there, if another argument says so.
        """
        values = self.values(shape, self.dtype)
        dtype = self.pick(*REALS)
        if self.kind == "sick" and values.size and np.dtype(dtype).kind == "f":
            where = tuple(int(self.rng.integers(n)) for n in shape)
            values[where] = self.rng.choice([np.nan, np.inf, -np.inf])
        self.floating.append(name)
        x = self.array(values, dtype, FORMS)

        def bad():
            large = np.full(shape, 1e300)  # beyond float32
            overflow = [(large, ValueError)] if self.dtype == np.float32 and large.size else []
            return [*bad_reals(x, width, rank, batch), *overflow]

        return self.give(name, x, bad, words=words)

    def own_floats(self, name, shape, bad=(), forms=FORMS, words=None):
        """An input of a layer without parameters, which computes in its dtype."""
        values = self.values(shape, self.dtype)
        if self.kind == "sick" and values.size:
            where = tuple(int(self.rng.integers(n)) for n in shape)
            values[where] = self.rng.choice([np.nan, np.inf, -np.inf])
        self.floating.append(name)
        x = self.array(values, self.dtype, forms)
        return self.give(name, x, lambda: [*bad_floats(x), *(bad() if callable(bad) else bad)],
                         words=words)  # fmt: skip

    def gradient(self, name, shape):
        """What backward takes: of the output's shape, of any real numbers."""
        kind, self.kind = self.kind, self.kind if self.kind in ("constant", "tiny") else "normal"
        x = self.array(self.values(shape, self.dtype), self.pick(*REALS), FORMS)
        self.kind = kind
        return self.give(name, x, lambda: bad_gradients(x), "backward")

    def ids(self, name, shape, size, bad=(), place="forward"):
        dtype = self.pick(*INTEGERS)
        x = self.array(self.rng.integers(0, size, shape), dtype, FORMS)
        return self.give(name, x, lambda: [*bad_ids(x, size), *bad], place)

    def mask(self, name, B, h, T, S, keys_only=False):
        """A mask of scores (B, h, T, S): none, or of 2 or 4 dimensions, boolean or added."""
        kind = self.pick("none", "boolean", "float", "blind")
        full = (1 if keys_only else T, S)
        shape = [self.pick(n, n, 1) for n in full]
        if self.pick(2, 4) == 4:
            shape = [self.pick(B, 1), 1 if keys_only else self.pick(h, 1), *shape]
        if kind == "none":
            mask = None
        elif kind == "float":
            mask = self.rng.standard_normal(shape)
            mask[self.rng.random(shape) < 0.3] = -np.inf
            mask = self.array(mask, self.pick(*FLOATS, "float16"), FORMS)
        else:
            mask = self.rng.random(shape) < (0.7 if kind == "boolean" else 0.1)
            mask = self.array(mask, bool, FORMS)
        rows = 1 if keys_only else T
        return self.give(name, mask, lambda: bad_masks(B, h, rows, T, S, keys_only))

    # What becomes of them

    def layer(self, cls, formula, *, forward=None, backward=None, rows=None, prepare=randomise):
        """The call of a layer's constructor, forward and backward.

        formula: (Weights, the arguments with Vars for the floats) -> the output, or a tuple of them
        """
        seed = int(self.rng.integers(2**32))
        forward = forward or (lambda layer, **inputs: layer.forward(**inputs))
        backward = backward or (lambda layer, ctx, **dys: layer.backward(ctx, *dys.values()))
        valid = {place: dict(named) for place, named in self.arguments.items()}
        names = list(self.floating)

        def run(arguments):
            layer = prepare(cls(**arguments["make"]), np.random.default_rng(seed))
            before = layer.state_dict()
            y, ctx = forward(layer, **arguments["forward"])
            first = [np.array(leaf) for leaf in leaves(y)]
            returned = leaves(backward(layer, ctx, **arguments["backward"]))
            assert len(returned) == len(names), "backward returned another number of gradients"
            for leaf, old in zip(leaves(y), first):
                assert np.array_equal(leaf, old, equal_nan=True), "backward changed the output"
            for name, value in layer.state_dict().items():
                assert np.array_equal(value, before[name]), f"the weight {name} was changed"
            results = dict(zip(output_names(len(first)), first))
            results |= {f"d{name}": dx for name, dx in zip(names, returned)}
            results |= {f"d{name}": p.grad for name, p in layer.named_parameters()}
            return results, before

        def expected(weights, noise, noise_seed):
            tape = reference.Tape(noise, noise_seed)
            w = {name: tape.var(value) for name, value in weights.items()}
            inputs = {name: as_formula(value) for name, value in valid["forward"].items()}
            for name in names:
                x = plain(valid["forward"][name], self.dtype)
                inputs[name] = tape.var(np.where(np.isfinite(x), x, 0.0))
            y = formula(reference.Weights(w), inputs)
            y = y if isinstance(y, tuple) else (y,)
            dys = [tape.rounded(plain(dy, self.dtype)) for dy in valid["backward"].values()]
            wanted = [inputs[name] for name in names] + list(w.values())
            grads = reference.gradients(y, dys, wanted)
            results = {name: one.value for name, one in zip(output_names(len(y)), y)}
            return results | dict(zip([f"d{name}" for name in (*names, *w)], grads))

        call = Call(self.title, self.arguments, run, expected, self.dtype, rows)
        if self.kind == "sick":
            inputs = [plain(valid["forward"][name], self.dtype) for name in names]
            call.healthy = np.all([np.isfinite(x).all(axis=tuple(range(rows, x.ndim)))
                                   for x in inputs], axis=0)  # fmt: skip
        return call

    def call(self, function, expected, scale=0.0):
        """The call of a function. expected: the valid arguments -> what it returns, in float64."""
        valid = dict(self.arguments["forward"])

        def run(arguments):
            return named(function(**arguments["forward"])), {}

        def right(weights, noise, seed):
            return named(expected(**valid))

        return Call(self.title, self.arguments, run, right, self.dtype, scale=scale)

    def finished(self, call):
        """The call, in a part of the examples with one argument spoilt."""
        if self.bad and call.healthy is None and self.pick(*range(10)) >= 6:
            place, name, bad, words = self.pick(*self.bad)
            value, errors = self.pick(*bad())
            call.arguments[place][name] = value
            call.spoilt = place, name, errors, words
        return call


def output_names(n):
    return ["y"] if n == 1 else [f"y{i}" for i in range(n)]


def named(result):
    if isinstance(result, dict):
        return result
    if isinstance(result, tuple) and not hasattr(result, "_fields"):
        return {f"result {i}": value for i, value in enumerate(result)}
    return {"result": result}


def as_formula(value):
    """Masks and ids as plain arrays, everything else as it is."""
    if not isinstance(value, (np.ndarray, list, int)):
        return value
    array = np.asarray(value)
    if isinstance(value, list) and not array.size:
        return array.astype(np.int64)
    return array.astype({"f": np.float64, "b": bool}.get(array.dtype.kind, np.int64))


# What may be wrong with an argument: pairs of a value and the errors that may come. What NumPy
# might take in silence comes often.


def bad_types(x):
    """Arrays of the right shape that hold no real numbers."""
    array = np.asarray(x)
    return [(array.astype(complex), TypeError), (array.astype(object), TypeError),
            (array.astype(str), TypeError), (np.zeros(array.shape, "M8[s]"), TypeError),
            (np.zeros(array.shape, [("x", "f4")]), TypeError), *NO_ARRAYS]  # fmt: skip


def bad_reals(x, width, rank, batch):
    array = np.asarray(x)
    found = [(np.ones(array.shape, bool), TypeError)]
    if width:
        found += [(np.zeros((*array.shape[:-1], array.shape[-1] + 1)), ValueError),
                  (np.zeros((*array.shape[:-1], array.shape[-1] - 1)), ValueError),
                  (np.float64(1.0), ValueError)]  # fmt: skip
    if rank is not None:
        found += [(array[None], ValueError), (np.zeros(array.shape[1:]), ValueError)]
    if batch is not None:
        found += [(np.zeros((n, *array.shape[1:])), ValueError) for n in (0, 1, 4) if n != batch]
    return [*bad_types(x), *found, *found]


def bad_floats(x):
    shape = np.shape(x)
    others = [np.ones(shape, dtype) for dtype in (bool, int, np.float16)]
    return [*bad_types(x), *((array, TypeError) for array in others)]


def bad_gradients(x):
    array = np.asarray(x)
    found = [(np.ones(array.shape, bool), TypeError), (array[None], ValueError)]
    if array.ndim:
        found += [(np.zeros((*array.shape[:-1], array.shape[-1] + 1)), ValueError),
                  (np.zeros(array.shape[:-1]), ValueError), (1.0, ValueError)]  # fmt: skip
    if array.size > 1:  # what would broadcast
        found += [(array[:1], ValueError)] if len(array) > 1 else []
        found += [(array[..., :1], ValueError)] if array.shape[-1] > 1 else []
    return [*bad_types(x), *found, *found]


def bad_ids(x, size):
    array = np.asarray(x).astype(np.int64)
    found = [*bad_types(array), (array.astype(float), TypeError), (array.astype(bool), TypeError)]
    if array.size:
        for value, dtype in ((-1, np.int64), (-1, ">i2"), (-size, np.int8), (size, ">i4"),
                             (size, np.uint16), (2**63 - 1, np.int64), (2**64 - 1, np.uint64)):
            wrong = array.astype(dtype)
            wrong.flat[-1] = value
            found += [(wrong, IndexError)] * 3
        wrong = array.astype(object)
        wrong.flat[0] = 2**70
        found.append((wrong.tolist(), TypeError))
    return found


def bad_masks(B, h, rows, T, S, keys_only):
    boolean = np.ones((B, h, rows, S), bool)
    shapes = [(rows, S + 2), (rows + 2, S), (1, rows, S), (h, rows, S), (S,), (),
              (1, B, h, rows, S), (B + 2, 1, rows, S), (B, h + 2, rows, S)]  # fmt: skip
    found = [(np.ones(shape, bool), ValueError) for shape in shapes]
    found += [(np.zeros((rows, S + 2)), ValueError), ([[True], [True, False]], ValueError)]
    if keys_only and h > 1:
        found.append((boolean, ValueError))
    dtypes = (int, np.uint8, "c8", str, object, "M8[s]", "V3")
    found += [(np.zeros((rows, S), dtype), TypeError) for dtype in dtypes]
    return [*found, ("mask", TypeError)]


# The check


def check(call, counts):
    counts["examples"] += 1
    before = snapshot(call.arguments)
    loud = call.healthy is None  # NaN and inf may warn
    with contextlib.nullcontext() if loud else warnings.catch_warnings():
        if not loud:
            warnings.simplefilter("ignore", RuntimeWarning)
        outcome = refused(call) if call.spoilt else returned(call)
        counts[outcome] += 1
    event(outcome)
    assert snapshot(call.arguments) == before, "an argument was changed"


def refused(call):
    place, name, errors, words = call.spoilt
    try:
        call.run(call.arguments)
    except Exception as error:
        names(error, errors, words)
        return "refused"
    raise AssertionError(f"{place}.{name} was taken, expected {errors}")


def names(error, errors, words):
    """The error is one of these, and says one of these words."""
    kind = f"{type(error).__name__}: {error}"
    assert isinstance(error, errors), f"expected {errors}, got {kind}"
    assert re.search(rf"\b({words})\b", str(error)), f"does not name {words}: {kind}"


def returned(call):
    errors, words = call.may_raise or ((), "")
    try:
        results, weights = call.run(call.arguments)
    except errors as error:
        names(error, errors, words)
        return "refused"
    if call.expected is None:
        return "returned"
    compare(call, results, weights)
    return "compared"


def compare(call, results, weights):
    expected = call.expected(weights, 0.0, 0)
    assert results.keys() == expected.keys(), f"{list(results)}, expected {list(expected)}"
    noisy = None
    for name, right in expected.items():
        got = results[name]
        right = np.asarray(right) if isinstance(right, np.generic) else right
        if not isinstance(right, np.ndarray) or right.dtype.kind != "f":
            assert same(got, right), f"{name} is {got!r}, expected {right!r}"
            continue
        got = np.asarray(got)
        assert got.shape == right.shape, f"{name} has shape {got.shape}, expected {right.shape}"
        assert got.dtype == call.dtype, f"{name} has dtype {got.dtype}, expected {call.dtype}"
        got = got.astype(np.float64)
        if call.healthy is not None:
            if name.removeprefix("d") in weights:
                continue  # where all rows meet
            got, right = got[call.healthy], right[call.healthy]
        info = np.finfo(call.dtype)
        eps = max(float(info.eps), np.finfo(np.float64).eps)
        allowed = 1e3 * eps * np.abs(right).max(initial=call.scale) + 64.0 * float(np.nextafter(
            call.dtype.type(0), call.dtype.type(1)))  # fmt: skip
        error = np.abs(got - right).max(initial=0.0)
        if not error <= allowed:
            with np.errstate(all="ignore"):  # beyond all numbers: anything is as near
                noisy = noisy or [call.expected(weights, 16.0 * eps, seed) for seed in range(1, 5)]
                others = [one[name] if call.healthy is None else one[name][call.healthy]
                          for one in noisy]  # fmt: skip
                changes = [np.abs(other - right).max(initial=0.0) for other in others]
            allowed += 8.0 * max(np.nan_to_num(changes, nan=np.inf))
        assert error <= allowed, f"{name} is off by {error}, allowed {allowed}: {got}, not {right}"


def same(got, right):
    if isinstance(right, np.ndarray):
        return (isinstance(got, np.ndarray) and got.dtype == right.dtype
                and got.shape == right.shape
                and np.array_equal(got, right, equal_nan=right.dtype.kind in "fc"))  # fmt: skip
    if isinstance(right, dict):
        return type(got) is dict and same(list(got.items()), list(right.items()))
    if isinstance(right, float):
        return type(got) is float and math.isclose(got, right, rel_tol=1e-9, abs_tol=1e-300)
    if isinstance(right, (list, tuple)):
        return (type(got) is type(right) and len(got) == len(right)
                and all(same(a, b) for a, b in zip(got, right)))
    return type(got) is type(right) and got == right


def fuzz(case):
    """A test of this case: a function of a Source that returns a Call."""

    @st.composite
    def calls(draw):
        source = Source(draw, case.__name__.removeprefix("test_"))
        return source.finished(case(source))

    def test(call):
        check(call, Counter())

    strategy = calls()
    quick = settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
    wrapped = quick(given(call=strategy)(test))
    wrapped.__name__ = wrapped.__qualname__ = case.__name__
    wrapped.__doc__ = case.__doc__
    wrapped.strategy, wrapped.check = strategy, check  # for the long run
    return wrapped
