"""Trace: everything that forward and backward compute, by name, without a change to any layer.

    with Trace(model) as trace:
        logits, ctx = model.forward(source_ids, target_ids)
        model.backward(ctx, dlogits)
    print(trace)                                        # a table
    trace["decoder.layers.0.cross_attention.attention"]["dA"]     # an array
    trace.save("trace.npz")

Each named intermediate of the maths is a local of its layer's forward or backward (the layer
contract). So the trace reads the locals as each call returns (sys.setprofile), and all that the
layers know of it is that somebody looks on: then no result is written over another (sums.over). It
is for sizes that one looks at: every array is copied.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import numpy as np

from npdecoder.core import Array, Parameter, find_layers
from npdecoder.files import save_weights

FORWARD, BACKWARD = "forward", "backward"
PLUMBING = ("_", "grads", "parts", "dmemory_parts", "layer_memory")  # locals that carry others on


@dataclass(frozen=True)
class Call:
    """One call of a layer's forward or backward (or of another pair, such as project, attend).

    layer: its name in the model, "" for the model itself. cls: the class. method: the function.
    direction: "forward" or "backward". depth: how many calls of other layers it stood in.
    inputs: its arguments by name. outputs: what it returned, as a list of arrays (forward: without
        ctx). values: every array among its locals, those of its private helpers, the named fields
        of ctx, and the layer's own parameters.
    grads: of a backward, what this call added to .grad, by the parameter's name in the layer.
    parent: the index of the call it stood in, or None. codes: where the source is, of the method
        and then of its helpers.
    """

    index: int
    layer: str
    cls: str
    method: str
    direction: str
    depth: int
    parent: int | None
    inputs: dict[str, Array]
    outputs: list[Array]
    values: dict[str, Array]
    grads: dict[str, Array]
    codes: list[CodeType]

    def arrays(self) -> dict[str, Array]:
        """All of them by name; the gradient of a parameter W as dW, if no local has that name."""
        grads = {f"d{name}": grad for name, grad in self.grads.items()}
        return {**self.inputs, **self.values, **{k: v for k, v in grads.items()
                                                 if k not in self.values}}


class _Open:
    """A call that has not returned yet."""

    def __init__(self, index: int, layer: Any, frame: FrameType, depth: int, parent: int | None):
        self.index, self.layer, self.frame = index, layer, frame
        self.depth, self.parent = depth, parent
        arguments = frame.f_code.co_varnames[1 : frame.f_code.co_argcount]
        self.inputs = _arrays({k: frame.f_locals[k] for k in arguments if k != "ctx"})
        self.values: dict[str, Array] = {}
        self.codes = [frame.f_code]
        self.grads = {k: p.grad.copy() for k, p in _own_parameters(layer).items() if p.has_grad}


class Trace:
    """Records the calls of a model's layers between `with Trace(model) as trace:` and its end.

    model: a Layer, or any object with forward and backward; its parts are found among its
    attributes, and a part that is used in several places has its first name. others: more of them,
    by the names that they shall have (criterion=CrossEntropy()).

    calls: in the order in which they began. trace[name]: the arrays of the layer of this name, of
    its last forward and its last backward (inputs, values and grads as dW, db ... by name; among
    equal names the backward's). len(trace), iteration over calls. str(trace) is a table.

    Errors: KeyError for a name that has no call, which lists those that have.
    """

    def __init__(self, model: Any, **others: Any) -> None:
        self.model = model
        self.names = dict(find_layers(model))
        for name, other in others.items():
            self.names |= {f"{name}.{k}" if k else name: v for k, v in find_layers(other)}
        self.calls: list[Call] = []
        self._layers = {id(layer): name for name, layer in self.names.items()}
        self._open: list[_Open] = []
        self._count = 0
        self._previous: Any = None

    def __enter__(self) -> Trace:
        self._previous = sys.getprofile()
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(self._previous)
        self.calls.sort(key=lambda call: call.index)

    def __len__(self) -> int:
        return len(self.calls)

    def __iter__(self) -> Iterator[Call]:
        return iter(self.calls)

    def __getitem__(self, name: str) -> dict[str, Array]:
        calls = [call for call in self.calls if call.layer == name]
        if not calls:
            known = ", ".join(sorted({repr(call.layer) for call in self.calls}))
            raise KeyError(f"no call of a layer {name!r}; there are: {known or 'none at all'}")
        found: dict[str, Array] = {}
        last = {(call.direction, call.method): call for call in calls}
        for direction in (FORWARD, BACKWARD):
            for call in last.values():
                if call.direction == direction:
                    found |= call.arrays()
        return found

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write every array to a .npz file, as "0012.decoder.norm.backward.dx": the call's index,
        its layer, its direction, the name.
        """
        arrays: dict[str, Array] = {}
        for call in self.calls:
            start = ".".join(filter(None, [f"{call.index:04d}", call.layer, call.method]))
            for name, array in call.arrays().items():
                arrays[f"{start}.{name}"] = array
        save_weights(path, arrays)

    def __str__(self) -> str:
        """A line for each array: its name, shape, smallest, largest and root mean square."""
        header = ("array", "shape", "min", "max", "rms")
        lines = [f"{header[0]:24} {header[1]:>14} " + " ".join(f"{x:>11}" for x in header[2:])]
        for call in self.calls:
            arrow = "->" if call.direction == FORWARD else "<-"
            other = "" if call.method in (FORWARD, BACKWARD) else f".{call.method}"
            lines.append(f"{call.index} {arrow} {call.layer or '(the model)'}{other}  {call.cls}")
            for name, array in call.arrays().items():
                lines.append(f"    {name:20} {_summary(array)}".rstrip())
        return "\n".join(lines)

    __repr__ = __str__

    # Reading the frames

    def _profile(self, frame: FrameType, event: str, arg: Any) -> None:
        if event not in ("call", "return") or frame.f_code.co_argcount == 0:
            return
        layer = frame.f_locals.get(frame.f_code.co_varnames[0])  # self, whatever it is called
        if id(layer) not in self._layers or self.names[self._layers[id(layer)]] is not layer:
            return
        if event == "call":
            self._begin(layer, frame)
        else:
            self._end(layer, frame, arg)

    def _begin(self, layer: Any, frame: FrameType) -> None:
        if not _is_step(frame.f_code.co_name):
            return  # a helper: a part of the call that is open
        parent = self._open[-1].index if self._open else None
        self._open.append(_Open(self._count, layer, frame, len(self._open), parent))
        self._count += 1

    def _end(self, layer: Any, frame: FrameType, returned: Any) -> None:
        if not self._open or self._open[-1].layer is not layer:
            return
        call = self._open[-1]
        if frame is not call.frame:  # a helper of the same layer: its locals belong to the call
            if frame.f_code.co_name.startswith("_") and "check" not in frame.f_code.co_name:
                call.values = {**_arrays(frame.f_locals), **call.values}
                call.codes += [frame.f_code] * (frame.f_code not in call.codes)
            return
        self._open.pop()
        code, variables = frame.f_code, dict(frame.f_locals)
        arguments = code.co_varnames[1 : code.co_argcount]
        backward = code.co_name.endswith(BACKWARD)
        # as they were at the call (a local may be bound anew), or as the layer made arrays of them
        inputs = {**_arrays({k: variables[k] for k in arguments if k != "ctx"}), **call.inputs}
        values = _arrays({k: v for k, v in variables.items() if k not in arguments})
        ctx = variables.get("ctx")
        output = returned
        if not backward and isinstance(returned, tuple) and len(returned) == 2:
            output, ctx = returned
        named = [v for k, v in variables.items() if k not in arguments]
        if isinstance(output, np.ndarray) and not any(output is v for v in named):
            values["output"] = output.copy()
        if not isinstance(ctx, np.ndarray):
            fields: dict[str, Any] = getattr(ctx, "_asdict", dict)()
            counts = {k: np.array(v) for k, v in fields.items() if type(v) is int}
            values = {**_arrays(fields), **counts, **values}
        values = {**{k: v for k, v in call.values.items() if k not in inputs}, **values}
        own = _own_parameters(call.layer)
        values = {**{k: p.value.copy() for k, p in own.items()}, **values}
        grads = {k: p.grad - call.grads.get(k, 0.0) for k, p in own.items()} if backward else {}
        self.calls.append(
            Call(
                call.index,
                self._layers[id(call.layer)],
                type(call.layer).__name__,
                code.co_name,
                BACKWARD if backward else FORWARD,
                call.depth,
                call.parent,
                inputs,
                list(_arrays({"": output}).values()),
                values,
                grads,
                call.codes,
            )
        )

def _own_parameters(layer: Any) -> dict[str, Parameter]:
    """Those among the attributes of the layer itself."""
    return {k: p for k, p in getattr(layer, "__dict__", {}).items() if isinstance(p, Parameter)}


def _is_step(name: str) -> bool:
    steps = ("forward", "project", "attend", "enter", "leave", "encode", "decode", "embed")
    return name == BACKWARD or name.removesuffix("_backward") in steps


def _arrays(variables: Any) -> dict[str, Array]:
    """The arrays among the values, copied; those of a tuple or list of arrays by number."""
    found: dict[str, Array] = {}
    for name, value in variables.items():
        if name in PLUMBING:
            continue
        if isinstance(value, (np.ndarray, np.floating, float)):
            found[name] = np.array(value)
        elif type(value) in (tuple, list):
            for i, item in enumerate(value):
                if isinstance(item, np.ndarray):
                    found[f"{name}[{i}]" if name else str(i)] = np.array(item)
    return found


def _summary(array: Array) -> str:
    shape = ",".join(map(str, array.shape)) or "()"
    if array.size == 0 or array.dtype.kind not in "fiu":
        return f"{shape:>14}"
    x = array.astype(np.float64)
    rms = float(np.sqrt(np.mean(np.square(x))))
    return f"{shape:>14} {x.min():11.3g} {x.max():11.3g} {rms:11.3g}"
