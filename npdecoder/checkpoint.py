"""Checkpoints: one file with all that a training needs to go on bit by bit."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from npdecoder.core import Array, Layer, dropout_rng, integer
from npdecoder.files import PathLike, json_array, json_value, load_weights, save_weights
from npdecoder.models import LanguageModel, LanguageModelConfig, Transformer, TransformerConfig
from npdecoder.optim import SGD, Adam, AdamW, Optimizer

META = "npdecoder.json"  # the entry that is no array: JSON, as bytes
FORMAT, VERSION = "npdecoder checkpoint", 1

MODELS: dict[str, tuple[Any, Any]] = {
    "Transformer": (Transformer, TransformerConfig),
    "LanguageModel": (LanguageModel, LanguageModelConfig),
}
OPTIMIZERS: dict[str, type[Optimizer]] = {"SGD": SGD, "Adam": Adam, "AdamW": AdamW}
BIT_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")

# What damage makes of JSON and of what it describes: sizes that no file has, JSON in JSON in JSON
DAMAGE = (
    KeyError,
    IndexError,
    TypeError,
    ValueError,
    AttributeError,
    RecursionError,
    MemoryError,
    OverflowError,
)


class Checkpoint(NamedTuple):
    """What load_checkpoint returns: what save_checkpoint was given."""

    model: Any  # Transformer or LanguageModel
    optimizer: Any  # SGD, Adam or AdamW, of the model's parameters; None if there was none
    rng: np.random.Generator | None
    step: int
    extra: Any


def save_checkpoint(
    path: PathLike,
    model: Layer,
    optimizer: Optimizer | None = None,
    rng: np.random.Generator | None = None,
    step: int = 0,
    extra: Any = None,
) -> None:
    """Write all that a training needs to go on bit by bit, to one .npz or .safetensors file.

    model: a Transformer or LanguageModel: config, weights, and gradients that are not zero (so that
        a save in the middle of an accumulation is exact).
    optimizer: SGD, Adam or AdamW over parameters of the model; options and state.
    rng: its state. step: of the training.
    extra: anything else, such as vocabularies, the data position, further generators: None, bool,
        int, float, str, NumPy arrays and numbers, Generators, and lists and dicts (with str keys)
        of these.

    Errors: those of save_weights; TypeError for a model, optimizer or value in extra that could not
    be read back as it is; ValueError for an optimizer of other parameters.
    """
    model_class = _known("model", model, [cls for cls, _ in MODELS.values()])
    if optimizer is not None:
        optimizer_class = _known("optimizer", optimizer, OPTIMIZERS.values())
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    arrays: dict[str, Array] = {}
    meta = {
        "format": FORMAT,
        "version": VERSION,
        "model": {
            "class": model_class,
            "config": dataclasses.asdict(model.config),  # type: ignore[attr-defined]
            "gradients": [name for name, p in model.named_parameters() if p.has_grad],
        },
        "optimizer": None,
        "rng": _pack("rng", dropout_rng(rng), arrays),
        "step": integer("step", step, 0),
        "extra": None,
    }
    try:
        meta["extra"] = _pack("extra", extra, arrays)
    except RecursionError:
        raise ValueError("extra contains itself, or is nested too deeply") from None
    for name, parameter in model.named_parameters():
        arrays[f"model.{name}"] = parameter.value
        if parameter.has_grad:
            arrays[f"grad.{name}"] = parameter.grad
    if optimizer is not None:
        state = optimizer.state_dict()
        if any(id(p) not in names for p in optimizer.parameters()):
            raise ValueError("the optimizer has parameters that the model does not have")
        meta["optimizer"] = {
            "class": optimizer_class,
            "groups": [[names[id(p)] for p in group.parameters] for group in optimizer.groups],
            "numbers": {k: v for k, v in state.items() if not isinstance(v, np.ndarray)},
        }
        arrays |= {f"optimizer.{k}": v for k, v in state.items() if isinstance(v, np.ndarray)}
    save_weights(path, {META: json_array(meta), **arrays})


def load_checkpoint(path: PathLike) -> Checkpoint:
    """What save_checkpoint wrote, as new objects, bit by bit.

    Errors: OSError if it cannot be opened; ValueError for a file that is damaged, of another kind
    or version, or lacks anything.
    """
    arrays = load_weights(path)
    try:
        if META not in arrays:
            raise ValueError("it has weights alone, if anything")
        meta = json_value(arrays.pop(META))
        if (meta["format"], meta["version"]) != (FORMAT, VERSION):
            raise ValueError(f"it is {meta['format']!r}, version {meta['version']}; "
                             f"this npdecoder reads {FORMAT!r}, version {VERSION}")
        model = _load_model(meta["model"], arrays)
        optimizer = None
        if meta["optimizer"] is not None:
            optimizer = _load_optimizer(meta["optimizer"], model, arrays)
        rng, step, extra = (_unpack(meta[key], arrays) for key in ("rng", "step", "extra"))
        if arrays:
            raise ValueError(f"unexpected {', '.join(arrays)}")
        return Checkpoint(model, optimizer, dropout_rng(rng), integer("step", step, 0), extra)
    except DAMAGE as error:
        raise ValueError(f"{path} is not a checkpoint of npdecoder: {_text(error)}") from error


def _load_model(meta: Any, arrays: dict[str, Array]) -> Any:
    cls, config_class = MODELS[meta["class"]]
    fields = {field.name for field in dataclasses.fields(config_class)}
    if meta["config"].keys() != fields:
        raise ValueError(f"its config has the fields {', '.join(sorted(meta['config']))}, expected "
                         f"{', '.join(sorted(fields))}")
    model: Any = cls(config_class(**meta["config"]))
    weights = _taken(arrays, "model.")
    gradients = _taken(arrays, "grad.")
    if sorted(gradients) != sorted(meta["gradients"]):
        raise ValueError(f"its gradients are {', '.join(gradients)}, expected "
                         f"{', '.join(meta['gradients'])}")
    for name, parameter in model.named_parameters():
        if name in weights:
            parameter.astype(weights[name].dtype)
        if name in gradients:
            parameter.grad = gradients.pop(name)
    model.load_state_dict(weights)
    if gradients:
        raise ValueError(f"unexpected gradients {', '.join(gradients)}")
    return model


def _load_optimizer(meta: Any, model: Layer, arrays: dict[str, Array]) -> Optimizer:
    parameters, numbers = dict(model.named_parameters()), meta["numbers"]
    groups = []
    for i, names in enumerate(meta["groups"]):
        start = f"group.{i}."  # the options, lr_scale not among them, say what state there is
        options = {k[len(start) :]: v for k, v in numbers.items() if k.startswith(start)}
        options.pop("lr_scale", None)
        groups.append({"params": [parameters[name] for name in names], **options})
    optimizer = OPTIMIZERS[meta["class"]](groups, lr=0.0)
    moments = _taken(arrays, "optimizer.")
    if numbers.keys() & moments.keys():
        raise ValueError("a name of the optimizer's state stands for a number and for an array")
    optimizer.load_state_dict({**numbers, **moments})
    return optimizer


def _taken(arrays: dict[str, Array], start: str) -> dict[str, Array]:
    """The arrays whose names begin so, out of arrays, without the beginning."""
    names = [name for name in arrays if name.startswith(start)]
    return {name[len(start) :]: arrays.pop(name) for name in names}


def _known(what: str, value: Any, classes: Any) -> str:
    known = list(classes)
    if type(value) not in known:
        raise TypeError(f"{what} is a {type(value).__name__}, expected "
                        f"{' or '.join(cls.__name__ for cls in known)}: "
                        "save its state_dict() with save_weights")
    return type(value).__name__


def _pack(where: str, value: Any, arrays: dict[str, Array]) -> Any:
    """The value as JSON can hold it; arrays go to `arrays` and are named in their place."""
    if type(value) is int:
        _refuse_huge(where, value)
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [_pack(f"{where}[{i}]", item, arrays) for i, item in enumerate(value)]
    if type(value) is dict:
        for key in value:
            if type(key) is not str or key.startswith("npdecoder."):
                raise TypeError(f"{where} has the key {key!r}, expected strings "
                                "that do not begin with 'npdecoder.'")
        return {key: _pack(f"{where}[{key!r}]", item, arrays) for key, item in value.items()}
    # other kinds of arrays come back as plain ones, and an array drops the NULs at a string's end
    if type(value) is np.ndarray or (
        isinstance(value, np.generic) and np.asarray(value)[()].dtype == value.dtype
    ):
        arrays[where] = value  # type: ignore[assignment]
        return {"npdecoder.array" if isinstance(value, np.ndarray) else "npdecoder.number": where}
    if type(value) is np.random.Generator:
        state = value.bit_generator.state
        if state["bit_generator"] not in BIT_GENERATORS:
            raise TypeError(f"{where} is a {state['bit_generator']}, expected one of "
                            + ", ".join(BIT_GENERATORS))
        return {"npdecoder.rng": _pack(where, dict(state), arrays)}
    hint = ": give a list" if isinstance(value, tuple) else ""
    raise TypeError(f"{where} is a {type(value).__name__}, which is not stored exactly{hint}")


def _refuse_huge(where: str, value: int) -> None:
    try:
        str(value)
    except ValueError as error:  # Python's limit for numbers as text
        raise ValueError(f"{where} is too large an integer to store: {error}") from None


def _unpack(value: Any, arrays: dict[str, Array]) -> Any:
    if isinstance(value, list):
        return [_unpack(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    if "npdecoder.array" in value:
        return arrays.pop(value["npdecoder.array"])
    if "npdecoder.number" in value:
        return arrays.pop(value["npdecoder.number"])[()]
    if "npdecoder.rng" in value:
        return _generator(_unpack(value["npdecoder.rng"], arrays))
    return {key: _unpack(item, arrays) for key, item in value.items()}


def _generator(state: Any) -> np.random.Generator:
    """The generator in this state, which is checked first: NumPy takes any and may crash later."""
    if state["bit_generator"] not in BIT_GENERATORS:
        raise ValueError(f"{state['bit_generator']!r} is no generator")
    bit_generator = getattr(np.random, state["bit_generator"])(0)
    if _shapes(state) != _shapes(bit_generator.state):
        raise ValueError("the state of a generator has other parts than it should")
    if not (
        0 <= state["state"].get("pos", 0) <= 624 and 0 <= state.get("buffer_pos", 0) <= 4
    ):
        raise ValueError("the place of a generator lies outside its numbers")
    bit_generator.state = state
    return np.random.Generator(bit_generator)


def _shapes(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _shapes(item) for name, item in value.items()}
    return np.shape(value)


def _text(error: BaseException) -> str:
    return f"no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__


