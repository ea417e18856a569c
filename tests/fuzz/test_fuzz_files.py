"""Files, whole and damaged: an exact load, or a clear error, and never much memory."""

import atexit
import functools
import io
import tempfile
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
from hostile import ANY, fuzz
from hypothesis import strategies as st

from npdecoder import (
    SGD,
    Adam,
    AdamW,
    LanguageModel,
    LanguageModelConfig,
    Linear,
    Transformer,
    TransformerConfig,
    load_checkpoint,
    load_weights,
    read_torch_file,
    save_checkpoint,
    save_weights,
)
from npdecoder.text import read_pairs, read_text

TEMPORARY = tempfile.TemporaryDirectory()
atexit.register(TEMPORARY.cleanup)
FOLDER = Path(TEMPORARY.name)
TORCH_FILES = sorted(Path(__file__).parents[1].glob("torch_files/*.pt"))
SUFFIXES = (".npz", ".safetensors")
MEMORY = 32 * 2**20  # bytes: of files of some 10 KB

NAMES = st.text(st.one_of(st.sampled_from("W.b/\\\0 \ud800é"), st.characters()), max_size=8)
ODD_NAMES = st.sampled_from(
    ["W", "", "b/c", "a\0b", "..", "__metadata__", "npdecoder.names", "npdecoder.name.0", "W.npy"]
)
PLAIN = ("float64", "float32", "float16", "int64", "uint8", "int16", "bool", ">f4", ">i8")
NPZ_ALONE = ("longdouble", "complex128", "S3", "M8[s]")


def frugal(load, path):
    """What load(path) gives, within a little memory."""
    tracemalloc.start()
    try:
        return load(path)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < MEMORY, f"{peak} bytes were taken for a file of {path.stat().st_size}"


def damaged(s, data):
    """The bytes of a file: whole in half of the examples, or with one place of it damaged."""
    how = s.pick(*["whole"] * 5, "cut", "flip", "flip", "burst", "gone", "more", "zeros")
    if not data:
        return data
    at = s.draw(st.integers(0, len(data) - 1))
    size = s.draw(st.integers(1, 16))
    noise = s.rng.bytes(size)
    if how == "cut":
        return data[:at]
    if how == "flip":
        return data[:at] + bytes([data[at] ^ s.draw(st.integers(1, 255))]) + data[at + 1 :]
    if how == "burst":
        return data[:at] + noise + data[at + size :]
    if how == "gone":
        return data[:at] + data[at + size :]
    if how == "more":
        return data[:at] + noise + data[at:]
    if how == "zeros":
        return data[:at] + bytes(size) + data[at + size :]
    return data


def load_call(s, data, name, load, expected):
    """load(path) of a file with these bytes, which is right or an error that names the file."""
    path = FOLDER / name
    given = s.give("data", damaged(s, data))

    def function(data):
        path.write_bytes(data)
        return {"loaded": [frugal(load, path)]}

    call = s.call(function, lambda data: {"loaded": [expected]})
    if given != data:
        call.may_raise = ValueError, name.replace(".", r"\.")
    return call


def edited_call(s, function, right, edits, name):
    """Of a file with right checksums: what else it may hold after edits, nobody can tell."""
    call = s.call(function, lambda **_: {"loaded": [right]})
    if edits:
        call.expected, call.may_raise = None, (ValueError, name.replace(".", r"\."))
    return call


# Weights


@fuzz
def test_save_and_load_weights(s):
    """Arrays of any layout under any names; what cannot be stored exactly leaves the old file."""
    path = FOLDER / f"new{s.pick(*SUFFIXES)}"
    dtypes = (*PLAIN, *NPZ_ALONE) if path.suffix == ".npz" else PLAIN
    names = s.draw(st.lists(st.one_of(ODD_NAMES, NAMES), unique=True, max_size=3))
    mapping = {}
    for name in names:
        array = np.array(s.rng.integers(-3, 99, s.shape())).astype(s.pick(*dtypes))
        mapping[name] = s.array(array, array.dtype)
    s.give("path", path, [(FOLDER / "x.bin", ValueError), (FOLDER / "x", ValueError),
                          (FOLDER / "none" / path.name, OSError)], words=r"x|x\.bin|none")
    x = np.ones(2)
    s.give("mapping", mapping)
    s.spoil("mapping", [({"bad": np.array([None])}, ValueError), ({"bad": [[1], [1, 2]]}, ANY),
                        ({"bad": np.ma.masked_array(x, x > 0)}, ValueError)], words="bad")
    s.spoil("mapping", [({3: x}, TypeError), ({None: x}, TypeError)], words="3|None")
    s.spoil("mapping", [(None, TypeError), ([("W", x)], TypeError)])
    if path.suffix == ".safetensors":
        bad = [(x.astype(dtype), ValueError) for dtype in NPZ_ALONE]
        s.spoil("mapping", [({"bad": array}, errors) for array, errors in bad], words="bad")

    def function(path, mapping):
        before = path.read_bytes() if path.exists() else None
        try:
            save_weights(path, mapping)
        except Exception:
            assert before == (path.read_bytes() if path.exists() else None)
            raise
        return {"loaded": sorted(load_weights(path).items(), key=lambda item: item[0])}

    def expected(path, mapping):
        arrays = {name: np.asarray(array) for name, array in mapping.items()}
        native = [(k, a.astype(a.dtype.newbyteorder("="))) for k, a in arrays.items()]
        return {"loaded": sorted(native, key=lambda item: item[0])}

    return s.call(function, expected)


@functools.lru_cache
def weights_file(suffix, kind):
    rng = np.random.default_rng(kind)
    arrays = {f"layer.{i}": rng.standard_normal((2, i)).astype(("f8", "f4", "f2")[i % 3])
              for i in range(4)}  # fmt: skip
    if kind:
        arrays |= {"a\0b": np.arange(3), "": np.array(True), "__metadata__": np.zeros((0, 2))}
    path = FOLDER / f"original{suffix}"
    save_weights(path, arrays)
    return path.read_bytes(), dict(sorted(arrays.items()))


@fuzz
def test_damaged_weights(s):
    suffix = s.pick(*SUFFIXES)
    data, arrays = weights_file(suffix, s.pick(0, 1))
    return load_call(s, data, f"weights{suffix}",
                     lambda path: dict(sorted(load_weights(path).items())), arrays)  # fmt: skip


# Checkpoints


def small_model(kind, rng):
    options = {"d_model": 4, "num_heads": 2, "max_len": 8, "pad_id": 0}
    if kind == "transformer":
        sizes = {"num_encoder_layers": 1, "num_decoder_layers": 1, "tie_embeddings": "all"}
        model = Transformer(TransformerConfig(7, 7, **options, **sizes), rng=rng)
    else:
        sizes = {"num_layers": 1, "positions": "learned"}
        model = LanguageModel(LanguageModelConfig(7, **options, **sizes), rng, dtype=np.float64)
    return model


def contents(checkpoint):
    """All that is in a checkpoint, as plain values and arrays."""
    model, optimizer, rng, step, extra = checkpoint
    return {
        "model": [type(model).__name__, repr(model.config), model.state_dict()],
        "grads": {name: p.grad.copy() for name, p in model.named_parameters()},
        "optimizer": optimizer and [type(optimizer).__name__, optimizer.state_dict()],
        "groups": optimizer and [[p.shape for p in group.parameters] for group in optimizer.groups],
        "rng": rng and repr(rng.bit_generator.state),
        "step": step,
        "extra": [*extra[:-1], repr(extra[-1].bit_generator.state)] if extra else extra,
    }


@functools.lru_cache
def checkpoint_file(kind, name, suffix):
    rng = np.random.default_rng(7)
    model = small_model(kind, rng)
    optimizer = None
    if name:
        optimizer = {"SGD": SGD, "Adam": Adam, "AdamW": AdamW}[name](model.parameters(), 0.1)
        for parameter in model.parameters():
            parameter.grad = rng.standard_normal(parameter.shape)
        optimizer.step()
    extra = [{"words": ["é", None, True], "ids": np.arange(3)}, 0.5, np.random.Generator(
        np.random.MT19937(3))] if name else None  # fmt: skip
    path = FOLDER / f"checkpoint{suffix}"
    save_checkpoint(path, model, optimizer, rng if name else None, 3, extra)
    return path.read_bytes(), contents((model, optimizer, rng if name else None, 3, extra))


def draw_checkpoint(s):
    kind, name = s.pick("transformer", "language model"), s.pick("Adam", None, "SGD", "AdamW")
    suffix = s.pick(*SUFFIXES)
    return checkpoint_file(kind, name, suffix), suffix


@fuzz
def test_damaged_checkpoints(s):
    (data, right), suffix = draw_checkpoint(s)
    return load_call(s, data, f"damaged{suffix}", lambda path: contents(load_checkpoint(path)),
                     right)  # fmt: skip


@fuzz
def test_checkpoints_whose_description_was_edited(s):
    """One letter of the JSON, with right checksums: an error, or another checkpoint."""
    (data, right), suffix = draw_checkpoint(s)
    path = FOLDER / f"edited{suffix}"
    path.write_bytes(data)
    arrays = load_weights(path)
    meta = arrays["npdecoder.json"].tobytes()
    letters = b'0123456789-.eE"[]{}:,ntf ' + s.rng.bytes(4)
    edits = s.pick(0, 0, 1)
    for _ in range(edits):
        at = s.draw(st.integers(0, len(meta) - 1))
        meta = meta[:at] + bytes([s.pick(*letters)]) + meta[at + 1 :]
    s.give("meta", meta)

    def function(meta):
        save_weights(path, {**arrays, "npdecoder.json": np.frombuffer(meta, np.uint8)})
        loaded = frugal(load_checkpoint, path)
        return {"loaded": [loaded if edits else contents(loaded)]}

    return edited_call(s, function, right, edits, path.name)


@fuzz
def test_save_checkpoint(s):
    kind, suffix = s.pick("transformer", "language model"), s.pick(*SUFFIXES)
    model = small_model(kind, 1)
    stranger = Adam(Linear(2, 3).parameters())
    s.give("path", FOLDER / f"saved{suffix}", [(FOLDER / "saved.pt", ValueError)],
           words=r"saved\.pt")  # fmt: skip
    s.give("model", model, [(Linear(2, 3), TypeError), (None, TypeError), (stranger, TypeError)])
    optimizer = s.pick(None, SGD, Adam)
    s.give("optimizer", optimizer and optimizer(model.parameters(), 0.1), [
        (stranger, ValueError), (3, TypeError), (model, TypeError), (Adam, TypeError)])
    rng = s.pick(None, np.random.default_rng(5))
    s.give("rng", rng, [(5, TypeError), (np.random.RandomState(0), TypeError)])
    s.give("step", s.pick(0, 3, np.int8(4)), [(-1, ValueError), (1.5, TypeError), ("3", TypeError),
                                              (None, TypeError), (True, TypeError)])  # fmt: skip
    s.give("extra", s.pick(None, [{"a": 1}, np.random.default_rng(1)]), [
        ((1, 2), TypeError), ({1: 2}, TypeError), ({1, 2}, TypeError), (object(), TypeError),
        ({"npdecoder.x": 1}, TypeError), (b"bytes", TypeError),
        (10**5000, ValueError), (1j, TypeError), (np.array([None]), ValueError)])  # fmt: skip

    def function(path, **arguments):
        save_checkpoint(path, **arguments)
        return {"loaded": [contents(load_checkpoint(path))]}

    def expected(path, model, optimizer, rng, step, extra):
        return {"loaded": [contents((model, optimizer, rng, int(step), extra))]}

    return s.call(function, expected)


# Files of torch.save


@functools.lru_cache
def torch_files():
    """Those that are read: (bytes, what they hold), and the bytes of those that are not."""
    files, refused = [], []
    for path in TORCH_FILES:
        try:
            files.append((path.read_bytes(), read_torch_file(path)))
        except ValueError:
            refused.append(path.read_bytes())
    return files, refused


@fuzz
def test_damaged_torch_files(s):
    data, right = s.pick(*torch_files()[0])
    return load_call(s, data, "damaged.pt", read_torch_file, right)


@fuzz
def test_torch_files_that_are_refused(s):
    """Damage does not make them readable."""
    call = load_call(s, s.pick(*torch_files()[1]), "refused.pt", read_torch_file, None)
    call.may_raise = ValueError, r"refused\.pt"
    return call


@fuzz
def test_torch_files_whose_pickle_was_edited(s):
    """One byte of it, with right checksums: an error, or other values."""
    data, right = s.pick(*torch_files()[0])
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    (pickle,) = [name for name in records if name.endswith("/data.pkl")]
    raw = records[pickle]
    edits = s.pick(0, 0, 1)
    for _ in range(edits):
        at = s.draw(st.integers(0, len(raw) - 1))
        raw = raw[:at] + bytes([s.draw(st.integers(0, 255))]) + raw[at + 1 :]
    s.give("raw", raw)
    path = FOLDER / "edited.pt"

    def function(raw):
        with zipfile.ZipFile(path, "w") as archive:
            for name, record in {**records, pickle: raw}.items():
                archive.writestr(name, record)
        loaded = frugal(read_torch_file, path)
        assert type(loaded) is dict
        return {"loaded": [loaded]}

    return edited_call(s, function, right, edits, path.name)


# Text


def lines_of(data):
    """The text of the bytes, line by line; None: they are no text."""
    if data[:3] == b"\xef\xbb\xbf":
        data = data[3:]
    try:
        lines = [line.decode() for line in data.split(b"\n")]
    except UnicodeDecodeError:
        return None
    return [line[:-1] if line.endswith("\r") and i < len(lines) - 1 else line
            for i, line in enumerate(lines)]  # fmt: skip


def draw_table(s):
    """The bytes of a TSV file."""
    letters = st.text(st.sampled_from("a é我\u2028’\r\x1c\x00"), min_size=1, max_size=4)
    lines = []
    for fields in s.draw(st.lists(st.lists(letters, min_size=2, max_size=3), max_size=4)):
        lines.append("\t".join(f"{field}x" for field in fields))
        if s.pick(False, False, True):
            lines.append(" ")
    text = s.pick("\n", "\r\n").join(lines) + s.pick("\n", "")
    return s.pick(b"", b"\xef\xbb\xbf") + text.encode()


@fuzz
def test_read_text(s):
    data = s.give("data", damaged(s, draw_table(s)) if s.pick(True, False) else b"")
    path = FOLDER / "table.txt"
    lines = lines_of(data)

    def function(data):
        path.write_bytes(data)
        return {"text": read_text(path)}

    call = s.call(function, lambda data: {"text": "\n".join(lines or ["no error"])})
    if lines is None:
        call.may_raise = ValueError, r"table\.txt, line \d+: not UTF-8"
    return call


@fuzz
def test_read_pairs(s):
    data = s.give("data", damaged(s, draw_table(s)))
    path = FOLDER / "table.tsv"
    lines = lines_of(data)
    rows = [[field.strip() for field in line.split("\t")] for line in lines or () if line.strip()]
    wrong = not rows or any(len(row) < 2 or not (row[0] and row[1]) for row in rows)

    def function(data):
        path.write_bytes(data)
        return {"pairs": read_pairs(path)}

    call = s.call(function, lambda data: {"pairs": [] if wrong else [tuple(r[:2]) for r in rows]})
    if wrong:
        call.may_raise = ValueError, r"table\.tsv(, line \d+)?: .*"
    return call


@fuzz
def test_files_that_are_not_there(s):
    load, suffix = s.pick((load_weights, ".npz"), (load_checkpoint, ".npz"),
                          (read_torch_file, ".pt"), (read_text, ".txt"), (read_pairs, ".tsv"))
    there = FOLDER / f"nothing{suffix}"
    s.give("path", there)
    (FOLDER / f"folder{suffix}").mkdir(exist_ok=True)
    s.spoil("path", [(FOLDER / f"none{suffix}", OSError), (FOLDER / f"folder{suffix}", OSError),
                     (FOLDER / "none" / f"none{suffix}", OSError)], words="none|folder")
    there.write_bytes(b"")

    def function(path):
        return load(path)

    call = s.call(function, lambda path: "")
    call.may_raise = ValueError, "nothing"
    return call
