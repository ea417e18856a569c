"""To PyTorch and back, without PyTorch: its state dicts, and the files of torch.save.

    load_torch_state_dict(layer, mapping)   arrays by PyTorch's names into a layer
    torch_state_dict(layer)                 a layer's arrays by PyTorch's names
    read_torch_file(path)                   the arrays of a .pt or .pth file

A file of torch.save holds a pickle, which could run any code if it were unpickled. Here it is read
as data: opcode by opcode, of which the few that tensors and plain containers need are known.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pickletools import OpcodeInfo, genops
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from npdecoder.blocks import (
    Decoder,
    DecoderLayer,
    Encoder,
    EncoderLayer,
    FeedForward,
    MemoryAttention,
    MemoryProjection,
    MultiHeadAttention,
)
from npdecoder.core import Array, Layer, Parameter, mapping_of
from npdecoder.layers import (
    Embedding,
    LayerNorm,
    LearnedPositions,
    Linear,
    Unembedding,
)
from npdecoder.models import LanguageModel, Transformer

# State dicts

# The parts of a layer: the name of the module there, and the attribute here. A part that a layer
# has not, such as a decoder-only layer's cross-attention, is None or no attribute.
LAYER = {"self_attn": "self_attention", "": "feed_forward", "norm1": "norm1", "norm2": "norm2"}
STACK = {"layers": "layers", "norm": "norm"}
PARTS: dict[type[Layer], Mapping[str, str]] = {
    FeedForward: {"linear1": "linear1", "linear2": "linear2"},
    EncoderLayer: LAYER,
    DecoderLayer: {**LAYER, "multihead_attn": "cross_attention", "norm3": "norm3"},
    Encoder: STACK,
    Decoder: STACK,
    Transformer: {name: name for name in (
        "source_embedding", "target_embedding", "source_positions", "target_positions",
        "encoder", "decoder", "output",
    )},
    LanguageModel: {name: name for name in ("embedding", "positions", "decoder", "output")},
}

# Ends of names that do not fit, and what they tell
HINTS = {
    ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
        "kdim and vdim other than d_model have no counterpart here",
    ("bias_k", "bias_v"): "add_bias_kv has no counterpart here",
    ("norm.weight", "norm.bias"):
        "a norm after the last layer is final_norm=True here (torch.nn.Transformer has one always)",
}


class Entry(NamedTuple):
    """One array of a state dict of PyTorch, and the parameters here that it is made of."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Parameter | None, ...]  # below each other; None: a bias that is absent here
    transposed: bool = False  # a weight there is (d_out, d_in), W here is (d_in, d_out)


def load_torch_state_dict(
    layer: Layer, mapping: Mapping[str, ArrayLike], names: Mapping[str, str] | None = None
) -> None:
    """Copy the arrays of a PyTorch state dict into a layer's parameters.

    layer here           there
    Linear, LayerNorm    torch.nn.Linear, LayerNorm
    Embedding            torch.nn.Embedding; LearnedPositions too
    MultiHeadAttention   torch.nn.MultiheadAttention
    EncoderLayer         torch.nn.TransformerEncoderLayer
    DecoderLayer         torch.nn.TransformerDecoderLayer
    Encoder, Decoder     torch.nn.TransformerEncoder, TransformerDecoder; without cross-attention, a
                         Decoder is a TransformerEncoder that is given a causal mask
    Transformer          torch.nn.Transformer, and beside it embeddings and an output layer
    LanguageModel        a TransformerEncoder, and beside it an embedding and an output layer

    mapping: floats of any width by name, as read_torch_file gives them, or the tensors of a
        state_dict() themselves, if on the CPU and not of bfloat16, which NumPy has not; each is
        converted to the parameter's dtype
    names: the names there of the parts here, for a model whose parts have names of its user's
        choice. A name stands for all that follow it with a dot, and the longest counts; "" stands
        for everything. What is not listed has the names of this package at the top of a Transformer
        or LanguageModel (source_embedding, target_embedding, source_positions, target_positions,
        encoder, decoder, output; embedding, positions, decoder, output) and PyTorch's below:

            names = {
                "source_embedding": "src_emb",          # src_emb.weight
                "target_embedding": "tgt_emb",
                "encoder": "transformer.encoder",       # transformer.encoder.layers.0. ...
                "decoder": "transformer.decoder",
                "output": "generator",                  # generator.weight, generator.bias
            }
            names = {"source_positions.weight": "pos", "target_positions.weight": "pos"}
            names = {"": "module"}                      # everything is below module.

    A bias that is absent here may be absent there too, or zero. Of the names of a tied parameter
    one is enough; the arrays of several must be equal. A state dict does not tell all: norm="pre"
    is norm_first=True, and num_heads, norm_eps, activation and scale_embeddings have to be those of
    the model there. What has no parameter here, such as a buffer of sinusoids, is to be removed
    from the mapping before.

    All or nothing: after an error every parameter is as before.

    Errors: ValueError that lists every missing, unexpected and misshapen name, biases that are
    absent here and not zero there, and tied arrays that differ; for a layer that cannot be
    represented in PyTorch (see torch_state_dict); for numbers that overflow the parameter's dtype;
    for an entry of names that names no part. TypeError for arrays that do not hold floats, for
    names that are no strings, and for other layers.
    """
    if not isinstance(mapping, Mapping):
        raise TypeError(
            f"mapping is a {type(mapping).__name__}, expected a mapping of names to arrays "
            "(read_torch_file(path) reads one from a file)"
        )
    entries = _entries(layer, names)
    arrays = {entry.name: np.asarray(mapping[entry.name])
              for entry in entries if entry.name in mapping}
    problems = _misfits(entries, arrays, mapping)
    if not problems:
        for name, array in arrays.items():
            if array.dtype.kind != "f":
                raise TypeError(f"state dict entry {name} holds {array.dtype}, expected floats")

    path = {id(parameter): path for path, parameter in layer.named_parameters()}
    values: dict[str, Array] = {}  # by the names here
    for entry in () if problems else entries:
        if entry.name not in arrays:
            continue
        for part, piece in zip(entry.parts, np.split(arrays[entry.name], len(entry.parts))):
            piece = piece.T if entry.transposed else piece
            if part is None:
                if np.any(piece != 0):
                    problems.append(f"{entry.name} is not zero, but there is no such bias here")
            elif not _same(values.setdefault(path[id(part)], piece), piece):
                problems.append(f"{entry.name} differs from another name of the same parameter, "
                                f"{path[id(part)]}")
    if problems:
        raise ValueError(
            f"state dict of PyTorch does not fit {type(layer).__name__}: "
            + "; ".join(dict.fromkeys(problems))
        )
    layer.load_state_dict(values)


def torch_state_dict(layer: Layer, names: Mapping[str, str] | None = None) -> dict[str, Array]:
    """Copies of a layer's parameters, by the names and in the layout of PyTorch.

    layer, names: as in load_torch_state_dict, which reads them back bit by bit. In PyTorch:

        state = {name: torch.from_numpy(array) for name, array in torch_state_dict(layer).items()}
        module.load_state_dict(state)

    A bias that is absent here is there as zeros, since a module of PyTorch has all of its biases or
    none; if the module has none, keep the entries with `if name in module.state_dict()`. A tied
    parameter is there under each of its names. torch.nn.Transformer always has norms after the last
    layers: it wants a model with final_norm=True.

    Errors: ValueError for what PyTorch cannot represent: shared memory keys and values, d_k or d_v
    other than d_model / num_heads, parameters of one's own; for an entry of names that names no
    part; for two parameters of one name that differ. TypeError for other layers.
    """
    entries = _entries(layer, names)
    dtype = next((parameter.dtype for parameter in layer.parameters()), None)
    state: dict[str, Array] = {}
    for entry in entries:
        rows = entry.shape[0] // len(entry.parts)
        pieces: list[Array] = []
        for part in entry.parts:
            if part is None:
                pieces.append(np.zeros((rows, *entry.shape[1:]), dtype))
            else:
                pieces.append(part.value.T if entry.transposed else part.value)
        array = np.ascontiguousarray(np.concatenate(pieces))  # concatenate copies
        if not _same(state.setdefault(entry.name, array), array):
            raise ValueError(f"{entry.name} would be the name of two parameters that differ")
    return state


def _same(a: Array, b: Array) -> bool:
    return np.array_equal(a, b, equal_nan=True)


def _misfits(
    entries: list[Entry], arrays: Mapping[str, Array], mapping: Mapping[str, Any]
) -> list[str]:
    """Every missing, unexpected and misshapen name, and what may explain them."""
    loaded = {id(part) for entry in entries if entry.name in arrays for part in entry.parts}
    missing = [
        entry.name
        for entry in entries
        if entry.name not in arrays
        and any(part is not None and id(part) not in loaded for part in entry.parts)
    ]
    unexpected = [str(name) for name in mapping if name not in arrays]
    problems = [f"missing {name}" for name in missing]
    problems += [f"unexpected {name}" for name in unexpected]
    problems += [
        f"misshapen {entry.name}: expected {entry.shape}, got {arrays[entry.name].shape}"
        for entry in entries
        if entry.name in arrays and arrays[entry.name].shape != entry.shape
    ]
    for ends, hint in HINTS.items():
        if any(f".{name}".endswith(f".{end}") for name in missing + unexpected for end in ends):
            problems.append(f"({hint})")
    for name, value in mapping.items():
        if isinstance(value, Mapping):
            problems.append(f"({name} is a mapping itself: give mapping[{name!r}], if it is meant)")
    return problems


def _entries(layer: Layer, names: Mapping[str, str] | None) -> list[Entry]:
    """The state dict that PyTorch has for this layer."""
    entries = list(_walk(layer, ""))
    covered = {id(part) for entry in entries for part in entry.parts}
    own = [path for path, parameter in layer.named_parameters() if id(parameter) not in covered]
    if own:
        raise ValueError(f"{type(layer).__name__} has parameters that PyTorch has no place for: "
                         + ", ".join(own))
    names = {} if names is None else mapping_of("names", names)
    for name, there in names.items():
        if not isinstance(there, str):
            raise TypeError(f"names[{name!r}] is {there!r}, expected a string")
        if not any(_starts(entry.name, name) for entry in entries):
            heads = dict.fromkeys(entry.name.split(".")[0] for entry in entries)
            raise ValueError(f"names has {name!r}, which is no part of {type(layer).__name__}: "
                             f"expected one of {', '.join(heads)}, or a longer name")
    return [entry._replace(name=_renamed(entry.name, names)) for entry in entries]


def _renamed(name: str, names: Mapping[str, str]) -> str:
    start = max((start for start in names if _starts(name, start)), key=len, default=None)
    if start is None:
        return name
    rest = name[len(start):].removeprefix(".")
    return ".".join(filter(None, (names[start], rest)))


def _starts(name: str, start: str) -> bool:
    return start == "" or f"{name}.".startswith(f"{start}.")


def _walk(layer: Layer, prefix: str) -> Iterator[Entry]:
    where = prefix.rstrip(".") or type(layer).__name__
    if isinstance(layer, Linear):
        yield Entry(f"{prefix}weight", layer.W.shape[::-1], (layer.W,), transposed=True)
        yield Entry(f"{prefix}bias", layer.W.shape[1:], (layer.b,))
    elif isinstance(layer, Unembedding):  # a Linear there, whose weight is the embedding's
        yield Entry(f"{prefix}weight", layer.W.shape, (layer.W,))
        yield Entry(f"{prefix}bias", layer.W.shape[:1], (layer.b,))
    elif isinstance(layer, LayerNorm):
        yield Entry(f"{prefix}weight", layer.gamma.shape, (layer.gamma,))
        yield Entry(f"{prefix}bias", layer.gamma.shape, (layer.beta,))
    elif isinstance(layer, (Embedding, LearnedPositions)):
        table = layer.W if isinstance(layer, Embedding) else layer.P
        yield Entry(f"{prefix}weight", table.shape, (table,))
    elif isinstance(layer, MultiHeadAttention):
        q, k, v, o = layer.W_q, layer.W_k, layer.W_v, layer.W_o
        d_model = len(q.W.value)
        if {W.W.shape for W in (q, k, v, o)} != {(d_model, d_model)}:
            d_k, d_v = (W.W.shape[1] // layer.num_heads for W in (q, v))
            raise ValueError(f"{where} has d_k {d_k} and d_v {d_v}; in PyTorch both are "
                             f"d_model / num_heads, {d_model} / {layer.num_heads}")
        yield Entry(f"{prefix}in_proj_weight", (3 * d_model, d_model), (q.W, k.W, v.W), True)
        yield Entry(f"{prefix}in_proj_bias", (3 * d_model,), (q.b, k.b, v.b))
        yield from _walk(o, f"{prefix}out_proj.")
    elif isinstance(layer, (MemoryAttention, MemoryProjection)):
        raise ValueError(f"{where} has shared memory keys and values (cross_attention='shared'), "
                         "which PyTorch has not")
    elif layer.parameters():
        parts = next((PARTS[kind] for kind in PARTS if isinstance(layer, kind)), None)
        if parts is None:
            raise TypeError(f"{type(layer).__name__} has no state dict of PyTorch that is known")
        for name, attribute in parts.items():
            part = getattr(layer, attribute, None)
            for index, item in enumerate(part) if isinstance(part, list) else ():
                yield from _walk(item, f"{prefix}{name}.{index}.")
            if isinstance(part, Layer):
                yield from _walk(part, f"{prefix}{name}." if name else prefix)


# Files

# What a storage holds, by the name of its class, or by that of its dtype where it has no class
STORAGES = {
    "torch.DoubleStorage": "f8",
    "torch.FloatStorage": "f4",
    "torch.HalfStorage": "f2",
    "torch.BFloat16Storage": "bfloat16",
    "torch.LongStorage": "i8",
    "torch.IntStorage": "i4",
    "torch.ShortStorage": "i2",
    "torch.CharStorage": "i1",
    "torch.ByteStorage": "u1",
    "torch.BoolStorage": "b1",
    "torch.ComplexDoubleStorage": "c16",
    "torch.ComplexFloatStorage": "c8",
}
DTYPES = {"torch.uint16": "u2", "torch.uint32": "u4", "torch.uint64": "u8"}
KNOWN = {
    *STORAGES, *DTYPES, "torch.storage.UntypedStorage", "collections.OrderedDict", "torch.Size",
    "torch._utils._rebuild_parameter", "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_tensor_v3",
}

CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
LEGACY_START = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # a pickled number, torch.save's first


def read_torch_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The arrays of a file that torch.save wrote (.pt or .pth), by name, without PyTorch.

        read_torch_file("model.pt")                # torch.save(model.state_dict(), "model.pt")
        read_torch_file("checkpoint.pt")["model"]  # torch.save({"model": ..., "epoch": 3}, ...)

    The nesting of the file is kept: dicts, lists, tuples, strings, numbers, bools and None come as
    they are, tensors and parameters as arrays (bfloat16 as float32, which holds it exactly; in
    native byte order, whichever the file has). The arrays are read-only, and those of tensors that
    shared their memory share it: copy what you want to change.

    Nothing in the file is ever run. It may hold tensors and plain containers alone: anything else,
    such as a whole module, is refused by its name. No more memory is taken than some multiple of
    the file's length, whatever sizes it claims.

    Errors: OSError if the file cannot be opened; ValueError for one that holds something else than
    a mapping of plain values and tensors, for quantized, sparse or 8-bit floating-point tensors,
    for the format of torch.save before 1.6, for a TorchScript archive, and for what is cut off,
    damaged (by its checksums, which torch.save writes unless told not to) or not of torch.save.
    """
    with open(path, "rb") as file:
        try:
            return _read(file)
        except MemoryError:
            raise
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from error
        except Exception as error:  # of zipfile, of indices and keys: whatever damage makes
            what = f"{type(error).__name__}: {error}"
            if "CRC" in what:
                what += "; or torch.save was told to write no checksums"
            raise ValueError(f"{os.fspath(path)}: the file is damaged ({what})") from error


def _read(file: IO[bytes]) -> dict[str, Any]:
    start = file.read(len(LEGACY_START))
    if start == LEGACY_START:
        raise ValueError("this is the format of torch.save before 1.6, which is not read; "
                         "in PyTorch, torch.save(torch.load(path), path) writes the new one")
    length = file.seek(0, os.SEEK_END)
    try:
        archive = zipfile.ZipFile(file)
    except Exception as error:
        if start.startswith(b"PK\x03\x04"):
            raise ValueError(f"the file is cut off or damaged: {error}") from error
        raise ValueError("this is no file of torch.save") from error
    with archive:
        value = _Reader(archive, length).value()
    if not isinstance(value, dict):
        what = "tensor" if isinstance(value, np.ndarray) else type(value).__name__
        raise ValueError(f"the file holds one {what}, expected a mapping of tensors")
    return value


@dataclass(frozen=True)
class _Name:
    """A name of Python's or PyTorch's that the pickle refers to: known, but never looked up."""

    text: str


@dataclass(frozen=True)
class _Storage:
    key: str
    kind: str | None  # one of the values of STORAGES; None: bytes without a type


class _Reader:
    """The value that the pickle of a torch.save archive describes.

    The records of the archive: NAME/data.pkl, NAME/byteorder, and NAME/data/KEY for each storage.
    """

    def __init__(self, archive: zipfile.ZipFile, length: int) -> None:
        self.archive = archive
        self.records = {info.filename: info for info in archive.infolist()}
        self.folder = next(iter(self.records), "").partition("/")[0]
        self.arrays: dict[_Storage, Array] = {}
        if f"{self.folder}/constants.pkl" in self.records:
            raise ValueError("this is a TorchScript archive, which holds code; in PyTorch, "
                             "torch.save(torch.jit.load(path).state_dict(), path) takes its arrays")
        if f"{self.folder}/data.pkl" not in self.records:
            raise ValueError("this is a zip file, but not of torch.save: it has no data.pkl")
        for info in self.records.values():
            if info.compress_size != info.file_size:
                raise ValueError(f"record {info.filename!r} is compressed, unlike torch.save's")
        if sum(info.file_size for info in self.records.values()) > length:
            raise ValueError("the file is damaged: its records are longer than the file")
        order = self._record("byteorder") if f"{self.folder}/byteorder" in self.records else b""
        if order not in (b"", b"little", b"big"):
            raise ValueError(f"its byte order is {order!r}, expected little or big")
        self.order = ">" if order == b"big" else "<"

    def value(self) -> Any:
        value = self._unpickle(self._record("data.pkl"))
        _check_plain(value)
        return value

    def _record(self, name: str) -> bytes:
        return self.archive.read(self.records[f"{self.folder}/{name}"])

    def _unpickle(self, data: bytes) -> Any:
        """Run the stack machine that a pickle is a program for, with the opcodes that are known.

        Lists and dicts are filled, and everything else is made, by the lines below alone.
        """
        stack: list[Any] = []
        marks: list[int] = []
        memo: dict[Any, Any] = {}

        def pop(n: int) -> tuple[Any, ...]:
            if n > len(stack):
                raise ValueError("its pickle is damaged: the stack is empty")
            values = tuple(stack[len(stack) - n:])
            del stack[len(stack) - n:]
            return values

        def pop_to_mark() -> tuple[Any, ...]:
            return pop(len(stack) - marks.pop())

        for opcode, arg, _ in _opcodes(data):
            match opcode.name:
                case "PROTO" | "FRAME":
                    pass
                case "MARK":
                    marks.append(len(stack))
                case "NONE" | "NEWTRUE" | "NEWFALSE" | "EMPTY_TUPLE":
                    stack.append(CONSTANTS[opcode.name])
                case ("BININT" | "BININT1" | "BININT2" | "LONG1" | "LONG4" | "BINFLOAT"
                      | "BINUNICODE" | "SHORT_BINUNICODE" | "BINUNICODE8"):
                    stack.append(arg)
                case "TUPLE1" | "TUPLE2" | "TUPLE3":
                    stack.append(pop(int(opcode.name[-1])))
                case "TUPLE":
                    stack.append(pop_to_mark())
                case "EMPTY_LIST":
                    stack.append([])
                case "APPEND" | "APPENDS":
                    values = pop(1) if opcode.name == "APPEND" else pop_to_mark()
                    _of_type(stack[-1], list, opcode.name).extend(values)
                case "EMPTY_DICT":
                    stack.append({})
                case "SETITEM" | "SETITEMS":
                    items = pop(2) if opcode.name == "SETITEM" else pop_to_mark()
                    target = _of_type(stack[-1], dict, opcode.name)
                    if len(items) % 2:
                        raise ValueError("its pickle is damaged: a key has no value")
                    for key, value in zip(items[::2], items[1::2]):
                        target[_of_type(key, (str, int, float, type(None)), "a key")] = value
                case "BINPUT" | "LONG_BINPUT":
                    memo[arg] = stack[-1]
                case "MEMOIZE":
                    memo[len(memo)] = stack[-1]
                case "BINGET" | "LONG_BINGET":
                    stack.append(memo[arg])
                case "GLOBAL":
                    stack.append(_known(str(arg).replace(" ", ".", 1)))
                case "STACK_GLOBAL":
                    stack.append(_known(".".join(_of_type(x, str, "a name") for x in pop(2))))
                case "BINPERSID":
                    stack.append(self._storage(*pop(1)))
                case "REDUCE":
                    stack.append(self._call(*pop(2)))
                case "BUILD":  # the attributes of an OrderedDict, _metadata: dropped
                    pop(1)
                    _of_type(stack[-1], dict, opcode.name)
                case "STOP":
                    return pop(1)[0]
                case _:
                    raise ValueError(f"its pickle has the opcode {opcode.name}, which is refused")

    def _storage(self, persistent_id: Any) -> _Storage:
        """What the persistent id ("storage", class, key, device, length) stands for."""
        match persistent_id:
            case ("storage", _Name(name), str(key), str(), int(length)) if (
                name in STORAGES or name == "torch.storage.UntypedStorage"
            ):
                storage = _Storage(key, STORAGES.get(name))
            case _:
                raise ValueError("its pickle has a persistent id that is no storage")
        itemsize = {None: 1, "bfloat16": 2}.get(storage.kind) or np.dtype(storage.kind).itemsize
        record = self.records.get(f"{self.folder}/data/{key}")
        if record is None or record.file_size != length * itemsize:
            held = "missing" if record is None else f"of {record.file_size} bytes"
            raise ValueError(f"storage {key!r} is {held}, expected {length * itemsize} bytes")
        return storage

    def _call(self, function: Any, args: Any) -> Any:
        """What PyTorch's functions, and two classes, would give for these arguments."""
        name = _of_type(function, _Name, "a function").text
        match name, _of_type(args, tuple, "arguments"):
            case "collections.OrderedDict", ():
                return {}
            case "torch.Size", (tuple(size),) if _is_shape(size):
                return size
            case "torch._utils._rebuild_parameter", (np.ndarray() as array, bool(), dict()):
                return array
            case "torch._utils._rebuild_tensor_v2", (
                _Storage(kind=str()) as storage, offset, size, stride, bool(), dict()
            ):
                return self._tensor(storage, offset, size, stride)
            case "torch._utils._rebuild_tensor_v3", (
                _Storage(key=key, kind=None), offset, size, stride, bool(), dict(), _Name(dtype)
            ) if dtype in DTYPES:
                return self._tensor(_Storage(key, DTYPES[dtype]), offset, size, stride)
        raise ValueError(f"its pickle calls {name} with arguments that are refused")

    def _tensor(self, storage: _Storage, offset: Any, size: Any, stride: Any) -> Array:
        """The array of this size, its steps in elements, that starts at offset in a storage."""
        if not (_is_shape((offset,)) and _is_shape(size) and _is_shape(stride)
                and len(size) == len(stride)):
            raise ValueError("a tensor has an offset, a size or a stride that is none")
        array = self._array(storage)
        if 0 in size:
            array, offset, stride = array[:0], 0, [0] * len(size)
        elif offset + sum((n - 1) * step for n, step in zip(size, stride)) >= len(array):
            raise ValueError(f"a tensor reaches past the end of its storage {storage.key!r}")
        # The step along an axis of length 1 is never taken, and may be any number. Views, and no
        # copies: a tensor with steps of 0 may be far larger than its storage.
        steps = tuple(array.itemsize * step if n > 1 else 0 for n, step in zip(size, stride))
        try:
            return np.ndarray(size, array.dtype, array, array.itemsize * offset, steps)
        except (ValueError, OverflowError) as error:
            raise ValueError(f"a tensor has a size that no array can have: {error}") from error

    def _array(self, storage: _Storage) -> Array:
        """A storage (N,), read once, in native byte order."""
        if storage not in self.arrays:
            raw = self._record(f"data/{storage.key}")
            if storage.kind == "bfloat16":  # the upper half of a float32
                upper = np.frombuffer(raw, f"{self.order}u2").astype(np.uint32)
                array = (upper << np.uint32(16)).view(np.float32)
            elif storage.kind == "b1":
                array = np.frombuffer(raw, np.uint8) != 0
            else:
                array = np.frombuffer(raw, f"{self.order}{storage.kind}")
                array = array.astype(array.dtype.newbyteorder("="), copy=False)
            array.setflags(write=False)
            self.arrays[storage] = array
        return self.arrays[storage]


def _opcodes(data: bytes) -> Iterator[tuple[OpcodeInfo, Any, int | None]]:
    try:
        yield from genops(data)
    except Exception as error:
        raise ValueError(f"its pickle is damaged: {error}") from error


def _is_shape(value: Any) -> bool:
    """At most 64 integers from 0 up, as many axes as an array can have."""
    return type(value) is tuple and len(value) <= 64 and all(
        type(n) is int and n >= 0 for n in value
    )


def _known(name: str) -> _Name:
    if name not in KNOWN:
        raise ValueError(
            f"its pickle refers to {name!r}, which is refused: only tensors and plain containers "
            "are read, such as torch.save(model.state_dict(), path) writes"
        )
    return _Name(name)


def _of_type(value: Any, types: type | tuple[type, ...], what: str) -> Any:
    if not isinstance(value, types):
        kind = type(value).__name__.strip("_")
        raise ValueError(f"its pickle has a {kind} for {what}, which is refused")
    return value


def _check_plain(value: Any) -> None:
    """No storage and no name is left among the values. Each list is looked at once."""
    seen: set[int] = set()
    todo = [value]
    while todo:
        value = todo.pop()
        if isinstance(value, (_Name, _Storage)):
            what = value.text if isinstance(value, _Name) else f"storage {value.key!r}"
            raise ValueError(f"the file holds {what}, which is refused: it is no tensor")
        if isinstance(value, (dict, list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            todo.extend(value.values() if isinstance(value, dict) else value)
