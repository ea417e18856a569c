"""A submission: a file that somebody wrote. Running it, and what its errors are called.

Nothing in it is trusted to be there or to work: whatever it raises, a Refused comes out.
"""

from __future__ import annotations

import os
import runpy
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from npdecoder.core import Array, Layer, Parameter, find_parameters

SOLVED = "solved"  # every gradient agrees, at every draw
WRONG = "wrong"  # one does not, or the file no longer defines what it should
UNTOUCHED = "untouched"  # backward still raises NotImplementedError
ERROR = "error"  # it raised, or ended its process
TIMEOUT = "timeout"  # it was not done within the time limit
MISSING = "missing"  # there is no such file
STATUSES = (SOLVED, WRONG, UNTOUCHED, ERROR, TIMEOUT, MISSING)


class Refused(Exception):
    """The grading of a submission ends here: its status, and a message of one or more lines."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


def load(path: str | os.PathLike[str], cls: str) -> Any:
    """Run the file and return its class of this name.

    Errors: Refused.
    """
    path = os.path.abspath(path)
    try:
        found = runpy.run_path(path, run_name="submission").get(cls)
    except (Exception, SystemExit) as error:  # of any kind: the file is somebody else's
        raise Refused(ERROR, describe(error, path)) from None
    if not isinstance(found, type) or not issubclass(found, Layer):
        raise Refused(WRONG, f"it no longer defines the class {cls}(Layer)")
    for method in ("forward", "backward"):
        if getattr(found, method) is getattr(Layer, method):
            raise Refused(WRONG, f"its class {cls} has no {method}")
    return found


def build(cls: Any, arguments: Sequence[int], values: Mapping[str, Array]) -> Any:
    """A layer of the class with these values of its parameters.

    Errors: Refused if it has other parameters; what the constructor raises.
    """
    layer = cls(*arguments)
    parameters: dict[str, Parameter] = dict(find_parameters(layer))
    found = {name: parameter.shape for name, parameter in parameters.items()}
    wanted = {name: value.shape for name, value in values.items()}
    if found != wanted:
        raise Refused(WRONG, f"its parameters are {_shapes(found)}, not {_shapes(wanted)} as in "
                             "the exercise")
    for name, value in values.items():
        parameters[name].astype(value.dtype).value = value
    return layer


def run_forward(layer: Any, inputs: Sequence[Array]) -> tuple[Any, Any]:
    """y and ctx. Errors: Refused if they are not what forward returns; what it raises."""
    returned = layer.forward(*inputs)
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise Refused(WRONG, "its forward no longer returns y and ctx")
    return returned


def _shapes(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {shape}" for name, shape in shapes.items()) or "none"


def refusal(error: BaseException, path: str | os.PathLike[str]) -> Refused | None:
    """What an exception says of the submission; None if it did not come out of its code."""
    path = os.path.abspath(path)
    if isinstance(error, Refused):
        return error
    if not _frames(error, path):
        return None
    if isinstance(error, NotImplementedError):
        return Refused(UNTOUCHED, "backward is still to be written")
    return Refused(ERROR, describe(error, path))


def describe(error: BaseException, path: str) -> str:
    """The traceback from where it enters the submission, and the error."""
    lines = traceback.format_list(_frames(error, path))
    lines += traceback.format_exception_only(type(error), error)
    return "".join(lines).rstrip()


def _frames(error: BaseException, path: str) -> list[traceback.FrameSummary]:
    frames = traceback.extract_tb(error.__traceback__)
    inside = [i for i, frame in enumerate(frames) if frame.filename == path]
    return list(frames[inside[0] :]) if inside else []
