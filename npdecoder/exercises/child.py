"""The process that a submission runs in when a folder is graded.

It reads requests from its standard input and writes answers to its standard output, a line of JSON
each, and judges nothing: an answer holds what forward and backward gave for the arrays of the
request. Who asks compares.

    {"imports": [...]}                            first, before the submission is run
    {}                                            it has been run
    request: {"arguments", "inputs", "values", "grads", "dy"}
    answer:  {"y", "gradients", "grads", "wrote"}

or at any time {"status": ..., "message": ...}, and the process ends.
"""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Iterator
from typing import IO, Any

import numpy as np

from npdecoder.core import Array, find_parameters
from npdecoder.exercises.submission import (
    ERROR,
    Refused,
    build,
    describe,
    load,
    refusal,
    run_forward,
)

GIVEN = {"numpy", "npdecoder.Layer", "npdecoder.Parameter", "npdecoder.softmax"}
KINDS = ("float64", "int64", "bool")


def main(path: str, cls: str) -> None:
    # streams of our own, so that what the submission prints is in no answer
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "r+b") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(nothing.fileno(), 1)
    try:
        _say(answers, {"imports": foreign_imports(path)})
        submitted = load(path, cls)
        _say(answers, {})
        for line in requests:
            _say(answers, run(submitted, json.loads(line)))
    except (Exception, SystemExit) as error:  # of any kind: the code is somebody else's
        found = refusal(error, path) or Refused(ERROR, describe(error, path))
        _say(answers, {"status": found.status, "message": found.message})


def _say(answers: IO[bytes], answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer).encode("ascii") + b"\n")
    answers.flush()


def run(cls: Any, request: dict[str, Any]) -> dict[str, Any]:
    """One forward and one backward of a new layer, and a forward between the two."""
    values = {name: decode(value) for name, value in request["values"].items()}
    layer = build(cls, request["arguments"], values)
    parameters = dict(find_parameters(layer))
    for name, grad in request["grads"].items():
        parameters[name].grad = decode(grad)
    inputs = [decode(x) for x in request["inputs"]]
    elsewhere = [0.999 * x if x.dtype.kind == "f" else x.copy() for x in inputs]
    dy = decode(request["dy"])
    before = [*(x.copy() for x in inputs), dy.copy(), *(value.copy() for value in values.values())]

    y, ctx = run_forward(layer, inputs)
    y = np.array(y, np.float64)
    # what a layer remembers beside ctx is then of another input
    run_forward(layer, elsewhere)
    gradients = [np.array(grad, np.float64) for grad in _leaves(layer.backward(ctx, dy))]

    after = [*inputs, dy, *(parameters[name].value for name in values)]
    names = [*(f"argument {i + 1} of forward" for i in range(len(inputs))), "dy", *values]
    wrote = [name for name, a, b in zip(names, before, after) if not np.array_equal(a, b)]
    return {
        "y": encode(y),
        "gradients": [encode(grad) for grad in gradients],
        "grads": {name: encode(parameter.grad) for name, parameter in parameters.items()},
        "wrote": wrote,
    }


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _leaves(item)
    elif value is not None:
        yield value


def encode(array: Array) -> dict[str, Any]:
    """An array as JSON has it; every digit is kept."""
    array = np.asarray(array)
    return {"dtype": array.dtype.name, "shape": array.shape, "values": array.ravel().tolist()}


def decode(value: Any) -> Array:
    """What encode wrote. Errors: ValueError, TypeError, LookupError for anything else."""
    dtype, shape = value["dtype"], value["shape"]
    if dtype not in KINDS:
        raise ValueError(f"an array of {dtype!r}")
    array: Array = np.array(value["values"], np.dtype(dtype)).reshape([int(n) for n in shape])
    return array


def foreign_imports(path: str) -> list[str]:
    """What the file imports beside NumPy and what the exercises give; [] if it is no Python."""
    try:
        with open(path, "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            source = "." * node.level + (f"{node.module}." if node.module else "")
            found |= {f"{source}{alias.name}" for alias in node.names}
    return sorted(found - GIVEN)
