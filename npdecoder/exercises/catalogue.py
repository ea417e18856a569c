"""The exercises in their order, and the sizes and inputs that each is checked with.

A reader edits the files of tasks/, and never this table.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from npdecoder.core import Array, Layer

TASKS = Path(__file__).parent / "tasks"
README = "README.txt"

Sizes = dict[str, int]


class Draw(NamedTuple):
    """One layer and one input of it: the constructor's arguments, and those of forward."""

    arguments: tuple[int, ...]
    inputs: tuple[Array, ...]


class Exercise(NamedTuple):
    """name: of the file, without .py. sizes: the letters and, for each draw, their values.

    read: where npdecoder has the same, and whose help() has the derivation.
    """

    name: str
    cls: str
    letters: str
    sizes: tuple[tuple[int, ...], ...]
    draw: Callable[[np.random.Generator, Sizes], Draw]
    read: tuple[str, str]

    @property
    def file(self) -> str:
        return f"{self.name}.py"

    @property
    def task(self) -> Path:
        """The file as it is shipped."""
        return TASKS / self.file

    def draws(self) -> list[tuple[str, Draw, np.random.Generator]]:
        """For each row of sizes: what it says, the draw, and a generator for the weights."""
        found = []
        for number, values in enumerate(self.sizes):
            rng = np.random.default_rng([number, *self.name.encode()])
            sizes = dict(zip(self.letters.split(), values))
            shown = " ".join(f"{letter}={value}" for letter, value in sizes.items())
            found.append((shown, self.draw(rng, sizes), rng))
        return found


def find_exercise(path: str | Path) -> Exercise:
    """The exercise that a file of this name belongs to.

    Errors: ValueError that lists the names, for a file that is called otherwise.
    """
    for exercise in EXERCISES:
        if Path(path).name == exercise.file:
            return exercise
    names = ", ".join(exercise.file for exercise in EXERCISES)
    raise ValueError(f"{path} is not the name of an exercise: they are {names}")


def randomise(layer: Layer, rng: np.random.Generator) -> None:
    """Random values for all parameters: gamma = 1 and beta = 0 would hide mistakes."""
    for name, parameter in layer.named_parameters():
        noise = rng.standard_normal(parameter.shape)
        if parameter.value.ndim == 2:
            parameter.value = noise / len(noise) ** 0.5
        else:
            parameter.value = 0.5 * noise + name.endswith("gamma")


def _linear(rng: np.random.Generator, n: Sizes) -> Draw:
    return Draw((n["d_in"], n["d_out"]), (rng.standard_normal((n["B"], n["T"], n["d_in"])),))


def _softmax(rng: np.random.Generator, n: Sizes) -> Draw:
    return Draw((), (2.0 * rng.standard_normal((n["B"], n["T"], n["n"])),))


def _rows(rng: np.random.Generator, n: Sizes) -> Draw:
    return Draw((n["d"],), (1.0 + 2.0 * rng.standard_normal((n["B"], n["T"], n["d"])),))


def _cross_entropy(rng: np.random.Generator, n: Sizes) -> Draw:
    ignored = n["ignore_index"]
    targets = rng.integers(0, n["V"], (n["B"], n["T"]))
    targets[rng.random(targets.shape) < 0.3] = ignored
    targets[0, 0], targets[-1, -1] = ignored, 1  # at least one that is ignored, and one that counts
    return Draw((ignored,), (2.0 * rng.standard_normal((n["B"], n["T"], n["V"])), targets))


def _residual(rng: np.random.Generator, n: Sizes) -> Draw:
    return Draw((n["d"],), (rng.standard_normal((n["B"], n["T"], n["d"])),))


def _attention(rng: np.random.Generator, n: Sizes) -> Draw:
    q = rng.standard_normal((n["B"], n["T"], n["d_k"]))
    k = rng.standard_normal((n["B"], n["S"], n["d_k"]))
    v = rng.standard_normal((n["B"], n["S"], n["d_v"]))
    return Draw((), (q, k, v, _mask(rng, n["B"], n["T"], n["S"])))


def _multi_head_attention(rng: np.random.Generator, n: Sizes) -> Draw:
    x = rng.standard_normal((n["B"], n["T"], n["d_model"]))
    mask: Array = np.tri(n["T"], dtype=np.bool_)
    return Draw((n["d_model"], n["h"], n["d_k"], n["d_v"]), (x, mask))


def _shared_memory(rng: np.random.Generator, n: Sizes) -> Draw:
    x = rng.standard_normal((n["B"], n["T"], n["d_model"]))
    memory = rng.standard_normal((n["B"], n["S"], n["d_model"]))
    mask = _mask(rng, n["B"], 1, n["S"])
    return Draw((n["layers"], n["d_model"], n["d_k"], n["d_v"]), (x, memory, mask))


def _tied_embeddings(rng: np.random.Generator, n: Sizes) -> Draw:
    ids = rng.integers(0, n["V"] - 2, (n["B"], n["T"]))  # two words never come
    ids[-1, -1] = ids[0, 0]  # and one comes again
    return Draw((n["V"], n["d"]), (ids,))


def _mask(rng: np.random.Generator, *shape: int) -> Array:
    """Booleans, and a last row of the first item that sees nothing."""
    mask: Array = rng.random(shape) < 0.7
    mask[..., 0] |= ~mask.any(axis=-1)
    mask[0, -1] = False
    return mask


# Within a row of sizes no two are equal (but for the number of layers), so that no wrong transpose,
# sum or factor gets through; and each has several values, so that none can be written into a
# backward. A LayerNorm has no d = 2: rows of two are nearly always (-1, 1), with no slope.
EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        "01_linear", "Linear", "B T d_in d_out", ((2, 3, 5, 7), (3, 7, 2, 5), (5, 2, 7, 3)),
        _linear, ("npdecoder/layers/linear.py", "Linear.backward"),
    ),
    Exercise(
        "02_softmax", "Softmax", "B T n", ((2, 3, 5), (5, 7, 3), (3, 5, 2)),
        _softmax, ("npdecoder/layers/softmax.py", "Softmax.backward"),
    ),
    Exercise(
        "03_layer_norm", "LayerNorm", "B T d", ((2, 3, 5), (5, 2, 3), (3, 5, 7)),
        _rows, ("npdecoder/layers/layer_norm.py", "LayerNorm.backward"),
    ),
    Exercise(
        "04_cross_entropy", "CrossEntropy", "B T V ignore_index",
        ((2, 5, 7, -1), (3, 5, 7, 0), (5, 7, 3, -1)),
        _cross_entropy, ("npdecoder/layers/cross_entropy.py", "CrossEntropy.backward"),
    ),
    Exercise(
        "05_residual", "Residual", "B T d", ((2, 3, 5), (3, 5, 2), (5, 2, 7)),
        _residual, ("npdecoder/blocks/encoder.py", "EncoderLayer.backward"),
    ),
    Exercise(
        "06_attention", "Attention", "B T S d_k d_v",
        ((2, 3, 5, 7, 11), (3, 7, 2, 5, 11), (5, 2, 3, 11, 7)),
        _attention, ("npdecoder/layers/attention.py", "ScaledDotProductAttention.backward"),
    ),
    Exercise(
        "07_multi_head_attention", "MultiHeadAttention", "B T d_model h d_k d_v",
        ((7, 5, 3, 2, 11, 13), (2, 11, 5, 3, 13, 7), (11, 7, 5, 2, 3, 13)),
        _multi_head_attention,
        ("npdecoder/blocks/multi_head_attention.py", "MultiHeadAttention.backward"),
    ),
    Exercise(
        "08_shared_memory", "SharedMemory", "B T S d_model d_k d_v layers",
        ((2, 7, 11, 5, 3, 13, 2), (7, 2, 3, 5, 11, 13, 1), (3, 5, 2, 7, 13, 11, 3)),
        _shared_memory, ("npdecoder/blocks/decoder.py", "Decoder.backward"),
    ),
    Exercise(
        "09_tied_embeddings", "TiedEmbeddings", "B T V d",
        ((2, 3, 7, 5), (3, 5, 7, 2), (5, 7, 11, 3)),
        _tied_embeddings, ("npdecoder/layers/embedding.py", "Unembedding.backward"),
    ),
)  # fmt: skip
