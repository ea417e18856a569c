"""Files of arrays: round trips, crashes while writing, damaged and hostile files, paths."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import re
import stat
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from helpers import measured
from hypothesis import given
from hypothesis import strategies as st

from npdecoder import files
from npdecoder.files import SUFFIXES, check_writable, json_array, load_weights, save_weights

OLD: dict[str, Any] = {
    "W": np.arange(6.0).reshape(2, 3),
    "b": np.float32([-0.0, np.nan, np.inf]),
}
NEW = {"W": np.ones((50, 60)), "b": np.zeros(3, np.float32)}


def of_dtype(dtype: Any) -> np.ndarray:
    return np.linspace(-2, 3, 12).reshape(3, 4).astype(dtype)


ARRAYS = {
    **{np.dtype(code).name: of_dtype(code) for code in "efdbBhHiIlLqQ?"},
    "big-endian": np.arange(6, dtype=">f4").reshape(2, 3),
    "big-endian int": np.arange(6, dtype=">i8"),
    "Fortran order": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "strided": np.arange(24.0).reshape(4, 6)[::2, ::-3],
    "broadcast": np.broadcast_to(np.float32(2.5), (3, 2)),
    "transposed": np.arange(24.0).reshape(2, 3, 4).transpose(2, 0, 1),
    "unaligned": np.frombuffer(bytes(range(33)), "<f4", 8, offset=1),
    "0-d": np.array(3.25),
    "0-d big-endian": np.array(3.25, ">f8"),
    "empty": np.zeros((0, 5)),
    "no columns": np.zeros((5, 0), np.float32),
    "empty transposed": np.zeros((3, 0, 2)).T,
    "special": np.array([np.nan, -np.nan, np.inf, -np.inf, -0.0, 5e-324]),
    "special float16": np.float16([np.nan, np.inf, -0.0, 6e-8, 65504]),
    "integers": np.array([-(2**63), 2**63 - 1]),
    "unsigned": np.array([0, 2**64 - 1], np.uint64),
}
NPZ_ALONE = {
    "complex64": of_dtype("F"),
    "complex128": of_dtype("D"),
    "text": np.array(["我", "love", "\ud800"]),
    "big-endian text": np.array(["我", "love"]).astype(">U4"),
    "bytes": np.array([b"a", b"bc"]),
    "datetime": np.array(["2017-06-12", "NaT"], "datetime64[D]"),
    "timedelta": np.array([1, 2], ">m8[ms]"),
    "structured": np.array([(1, 2.5), (3, -0.0)], [("x", ">i4"), ("y", "f8", 2)]),
    "void": np.array([b"\x01\x00"], "V2"),
}
if np.dtype(np.longdouble).itemsize > 8:
    NPZ_ALONE["longdouble"] = np.array([1, np.longdouble(1) / 3])

NAMES = ["file", "a/b", "a\\b", "x.npy", "x.npz", "我爱你", " ", "", ".", "../up", "/root", "self",
         "layers.0.W", "a" * 300, "é", "e\u0301", "allow_pickle", "%s {0}", "C:x", "\U0001f600",
         "a\0", "a\0x", "a\0y", "\0", "\ud800", "a\udfff", "__metadata__", "__metadata__.npy",
         "npdecoder.names", "npdecoder.name.0", "npdecoder.name.1", "npdecoder.name.",
         "npdecoder.name.x", "npdecoder.json", "npdecoder.crc32", "n" * 65_530, "n" * 65_531,
         "n" * 65_532, "n" * 70_000, "n" * 69_999 + "m", "我" * 30_000, "\n", '"', "dtype"]

posix = pytest.mark.skipif(os.name != "posix", reason="an open file cannot be replaced there")


def load_and_compare(path: Path, expected: Mapping[str, Any]) -> None:
    """The file holds just these arrays: same names, shapes and numbers, in native dtypes.

    In the same order too, but .safetensors has an order of its own.
    """
    loaded = load_weights(path)
    names: Callable[[Any], list[str]] = list if path.suffix == ".npz" else sorted
    assert names(loaded) == names(expected)
    for name, array in expected.items():
        array, got = np.asarray(array), loaded[name]
        array = array.astype(array.dtype.newbyteorder("="))
        assert type(got) is np.ndarray
        assert (got.dtype, got.shape) == (array.dtype, array.shape)
        assert got.dtype.isnative
        assert got.flags.c_contiguous
        assert got.tobytes() == array.tobytes(), name


@pytest.fixture(params=SUFFIXES)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / f"w{request.param}"


@pytest.fixture
def old(path: Path) -> Path:
    """A path that already holds OLD, in a folder without anything else."""
    save_weights(path, OLD)
    return path


def assert_untouched(old: Path) -> None:
    assert os.listdir(old.parent) == [old.name]
    load_and_compare(old, OLD)


# Round trips


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_come_back_bit_for_bit(path: Path, name: str) -> None:
    save_weights(path, {"W": ARRAYS[name]})
    load_and_compare(path, {"W": ARRAYS[name]})


@pytest.mark.parametrize("name", NPZ_ALONE)
def test_what_npz_alone_can_store(tmp_path: Path, name: str) -> None:
    save_weights(tmp_path / "w.npz", {"W": NPZ_ALONE[name]})
    load_and_compare(tmp_path / "w.npz", {"W": NPZ_ALONE[name]})
    save_weights(tmp_path / "w.safetensors", OLD)
    with pytest.raises(ValueError, match=r"layers\.3\.odd .*safetensors.*\.npz"):
        save_weights(tmp_path / "w.safetensors", {**NEW, "layers.3.odd": NPZ_ALONE[name]})
    load_and_compare(tmp_path / "w.safetensors", OLD)
    assert sorted(os.listdir(tmp_path)) == ["w.npz", "w.safetensors"]


def test_names_come_back_in_order(path: Path) -> None:
    arrays = {name: np.array([i]) for i, name in enumerate(NAMES)}
    save_weights(path, arrays)
    load_and_compare(path, arrays)


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name[-10:]))
def test_a_name_alone(path: Path, name: str) -> None:
    save_weights(path, {name: np.arange(3)})
    load_and_compare(path, {name: np.arange(3)})
    assert os.listdir(path.parent) == [path.name]


def test_two_halves_of_a_surrogate_pair_are_not_the_character(path: Path) -> None:
    arrays = {"\ud83d\ude00": np.array([1]), "\U0001f600": np.array([2])}
    save_weights(path, arrays)
    load_and_compare(path, arrays)


@pytest.mark.parametrize("names", [("a", "a.npy"), ("a.npy", "a"), ("a", "a.npy", "a.npy.npy")])
def test_a_name_with_and_without_the_inner_suffix(path: Path, names: tuple[str, ...]) -> None:
    arrays = {name: np.array([i]) for i, name in enumerate(names)}
    save_weights(path, arrays)
    load_and_compare(path, arrays)


def test_names_as_on_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """zipfile turns the system's separator into /."""
    arrays = {"a\\b": np.array([1]), "a/b": np.array([2])}
    monkeypatch.setattr(os, "sep", "\\")
    assert zipfile.ZipInfo("a\\b").filename == "a/b"
    save_weights(tmp_path / "w.npz", arrays)
    load_and_compare(tmp_path / "w.npz", arrays)


@pytest.mark.parametrize("name", [1, None, b"W", ("a", "b"), 2.5])
def test_names_that_are_no_strings_are_refused(old: Path, name: Any) -> None:
    with pytest.raises(TypeError, match=r"name .* expected a string"):
        save_weights(old, {"fine": np.ones(3), name: np.ones(3)})
    assert_untouched(old)


def test_lists_numbers_and_the_empty_mapping(path: Path) -> None:
    save_weights(path, {})
    load_and_compare(path, {})
    save_weights(path, {"a": [[1.5, 2.5]], "b": 7.0})
    load_and_compare(path, {"a": [[1.5, 2.5]], "b": 7.0})


@given(
    st.sampled_from(SUFFIXES),
    st.dictionaries(
        st.text(st.characters(exclude_categories=[]), max_size=8),
        st.tuples(st.sampled_from("efd?iQ"), st.lists(st.integers(0, 4), max_size=4)),
        max_size=5,
    ),
)
def test_any_names_and_shapes(tmp_path_factory: Any, suffix: str, entries: dict[str, Any]) -> None:
    path = tmp_path_factory.mktemp("any") / f"w{suffix}"
    rng = np.random.default_rng(0)
    arrays = {n: (9 * rng.random(shape)).astype(d) for n, (d, shape) in entries.items()}
    save_weights(path, arrays)
    load_and_compare(path, arrays)


def test_other_programs_read_the_files(tmp_path: Path) -> None:
    save_weights(tmp_path / "w.npz", OLD)
    with np.load(tmp_path / "w.npz") as file:
        assert file.files == list(OLD)
        assert np.array_equal(file["W"], OLD["W"])
    save_weights(tmp_path / "w.safetensors", OLD)
    loaded = safetensors.numpy.load_file(tmp_path / "w.safetensors")
    assert sorted(loaded) == sorted(OLD)
    assert np.array_equal(loaded["W"], OLD["W"])


def test_files_of_other_programs_are_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "w.npz", **OLD)
    load_and_compare(tmp_path / "w.npz", OLD)
    np.savez_compressed(tmp_path / "w.npz", **OLD)
    load_and_compare(tmp_path / "w.npz", OLD)
    for metadata in (None, {"format": "pt", "step": "3"}):
        safetensors.numpy.save_file(OLD, tmp_path / "w.safetensors", metadata)
        load_and_compare(tmp_path / "w.safetensors", OLD)


def test_saving_does_not_change_the_arrays(path: Path) -> None:
    W = np.arange(6.0).reshape(2, 3)
    W.flags.writeable = False
    save_weights(path, {"W": W})
    assert not W.flags.writeable
    loaded = load_weights(path)["W"]
    loaded += 1  # what is loaded can be written to
    load_and_compare(path, {"W": W})


# Equal arrays, equal files


@pytest.mark.parametrize(
    "change",
    [
        np.copy,
        np.asfortranarray,
        lambda a: np.repeat(a, 2, axis=-1)[..., ::2],
        lambda a: a[::-1][::-1],
        lambda a: a.astype(a.dtype.newbyteorder(">")),
    ],
    ids=["copy", "Fortran order", "strided", "reversed twice", "big-endian"],
)
def test_equal_arrays_make_equal_files(
    path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any]
) -> None:
    arrays = {"W": np.arange(12.0).reshape(3, 4), "V": np.arange(3, dtype=np.float32)}
    save_weights(path, arrays)
    first = path.read_bytes()
    monkeypatch.setattr("time.time", lambda: 2e9)
    save_weights(path, {name: change(array) for name, array in arrays.items()})
    assert path.read_bytes() == first


def test_unequal_arrays_make_unequal_files(path: Path) -> None:
    save_weights(path, {"x": np.float64([0.0])})
    first = path.read_bytes()
    for other in ([-0.0], np.float32([0.0]), [[0.0]]):
        save_weights(path, {"x": np.asarray(other)})
        assert path.read_bytes() != first


# What is refused


@pytest.mark.parametrize(
    "bad",
    [
        np.array([1, None]),
        np.array({"a": 1}, object),
        np.zeros(2, [("x", "f8"), ("y", object)]),
        [object()],
        np.ma.array([1.0, 2.0], mask=[False, True]),
        np.ma.array([1.0, 2.0]),
        np.ma.masked,
    ],
    ids=["None", "dict", "record", "list", "mask", "no mask set", "masked"],
)
def test_objects_and_masks_are_refused_by_name(old: Path, bad: Any) -> None:
    with pytest.raises(ValueError, match=r"layers\.3\.odd"):
        save_weights(old, {"fine": np.ones(3), "layers.3.odd": bad})
    assert_untouched(old)


@pytest.mark.parametrize("name", ["w", "w.npy", "w.npz.part", "w.txt", ".npz", "npz", "w.npz.gz",
                                  "w.NPZ", ".safetensors", "w.safetensors.index.json"])
def test_another_suffix_is_refused(tmp_path: Path, name: str) -> None:
    for call in (check_writable, load_weights, lambda path: save_weights(path, OLD)):
        with pytest.raises(ValueError, match=r"\.npz or \.safetensors"):
            call(tmp_path / name)
    assert os.listdir(tmp_path) == []


def test_without_the_package_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "w.safetensors"
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    for call in (check_writable, load_weights, lambda path: save_weights(path, OLD)):
        with pytest.raises(ImportError, match=r"pip install safetensors.*\.npz"):
            call(path)
        with pytest.raises(ImportError):  # before it looks at the folder or file
            call(tmp_path / "missing" / path.name)
    assert os.listdir(tmp_path) == []
    save_weights(tmp_path / "w.npz", OLD)
    load_and_compare(tmp_path / "w.npz", OLD)


# Crashes while writing


class Breaking:
    """A file to write that fails when `after` bytes have come."""

    def __init__(self, file: Any, after: int, error: BaseException) -> None:
        self.file, self.left, self.error = file, after, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def write(self, data: Any) -> int:
        data = memoryview(data).cast("B")
        self.file.write(data[: self.left])
        self.left -= data.nbytes
        if self.left < 0:
            raise self.error
        return data.nbytes


ERRORS = [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), MemoryError()]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.98, 1.0])
def test_a_crash_while_writing(
    old: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, share: float
) -> None:
    save_weights(old, NEW)
    size = old.stat().st_size
    save_weights(old, OLD)
    whole = files.replacing

    @contextlib.contextmanager
    def breaking(path: Any) -> Iterator[Any]:
        with whole(path) as file:
            yield Breaking(file, int(share * (size - 1)), error)

    monkeypatch.setattr(files, "replacing", breaking)
    with pytest.raises(type(error)):
        save_weights(old, NEW)
    assert_untouched(old)


@posix
def test_a_file_that_grows_too_large(old: Path) -> None:
    """The system's own error, in the middle of a write."""
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            save_weights(old, NEW)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert_untouched(old)


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("function", ["fsync", "chmod", "replace"])
@pytest.mark.parametrize("exists", [True, False])
def test_a_crash_before_the_file_takes_its_place(
    old: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, function: str, exists: bool
) -> None:
    target = old if exists else old.with_name(f"other{old.suffix}")

    def crash(*args: Any, **keywords: Any) -> None:
        raise error

    monkeypatch.setattr(os, function, crash)
    with pytest.raises(type(error)):
        save_weights(target, NEW)
    assert_untouched(old)


def test_a_generator_of_arrays_that_fails(old: Path) -> None:
    class Failing(dict[str, Any]):
        def items(self) -> Any:
            yield "W", np.ones(3)
            raise KeyError("lost")

    with pytest.raises(KeyError):
        save_weights(old, Failing())
    assert_untouched(old)


@pytest.mark.parametrize("new", [NEW, {"b": np.zeros(3)}], ids=["large", "small"])
def test_the_file_is_never_seen_half(
    old: Path, monkeypatch: pytest.MonkeyPatch, new: dict[str, Any]
) -> None:
    """Until the very end the path holds the old arrays, and the new file is on the disk before."""
    events: list[str] = []
    fsync, replace = os.fsync, os.replace
    save_weights(old, new)
    size = old.stat().st_size
    save_weights(old, OLD)

    def seen_fsync(fd: int) -> None:
        events.append("fsync")
        assert os.fstat(fd).st_size == size  # of the whole file: nothing is left in a buffer
        load_and_compare(old, OLD)
        fsync(fd)

    def seen_replace(a: Any, b: Any) -> None:
        events.append("replace")
        assert Path(a).parent == old.parent  # one file system: the rename is atomic
        assert Path(a).stat().st_size == size
        load_and_compare(old, OLD)
        replace(a, b)

    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(os, "replace", seen_replace)
    save_weights(old, new)
    assert events == ["fsync", "replace"]
    monkeypatch.undo()
    load_and_compare(old, new)
    assert os.listdir(old.parent) == [old.name]


# Writers that are killed, and writers beside each other

THEIRS = {"W": np.full((50, 60), 7.0)}
STALLING = """
import os, sys
import numpy as np
from npdecoder import save_weights

path, function = sys.argv[1:]
whole = getattr(os, function)

def stalling(*args):
    print("here", flush=True)
    sys.stdin.readline()
    return whole(*args)

setattr(os, function, stalling)
save_weights(path, {"W": np.full((50, 60), 7.0)})
"""


@contextlib.contextmanager
def stalled_writer(path: Path, function: str = "fsync") -> Iterator[Any]:
    """Another process that saves THEIRS, and waits for a line where it calls this function."""
    environment = {**os.environ, "PYTHONPATH": str(Path(files.__file__).parents[1])}
    command = [sys.executable, "-c", STALLING, str(path), function]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        try:
            assert process.stdout.readline().strip() == b"here"
            yield process
        finally:
            process.kill()


def others(path: Path) -> list[str]:
    """The files beside the path."""
    return sorted(set(os.listdir(path.parent)) - {path.name})


@posix
@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_what_a_killed_writer_leaves_goes_with_the_next_save(old: Path, function: str) -> None:
    with stalled_writer(old, function) as process:
        process.kill()
    assert process.returncode < 0
    (left,) = others(old)
    load_and_compare(old, OLD)
    check_writable(old)
    for suffix in SUFFIXES:  # saves to other paths are not concerned
        save_weights(old.with_name(f"other{suffix}"), NEW)
    other = old.with_suffix(*{*SUFFIXES} - {old.suffix})
    save_weights(other, NEW)
    assert left in os.listdir(old.parent)
    save_weights(old, NEW)
    assert left not in os.listdir(old.parent)
    load_and_compare(old, NEW)
    load_and_compare(other, NEW)


@posix
@pytest.mark.parametrize("function", ["fsync", "chmod", "replace"])
def test_a_living_writer_is_left_alone(old: Path, function: str) -> None:
    with stalled_writer(old, function) as process:
        before = others(old)
        assert len(before) == 1
        save_weights(old, NEW)
        save_weights(old, NEW)
        assert others(old) == before
        load_and_compare(old, NEW)
        process.communicate(b"\n", timeout=60)
    assert process.returncode == 0
    load_and_compare(old, THEIRS)
    assert others(old) == []


@posix
def test_many_writers_and_a_reader(old: Path) -> None:
    """Every save succeeds, and every load finds one of the files that were saved, whole."""

    def write(number: int) -> None:
        for _ in range(20):
            save_weights(old, {"W": np.full((40, 50), number), "b": np.full(3, number)})

    write(0)
    seen = set()
    with ThreadPoolExecutor(4) as pool:
        writers = [pool.submit(write, number) for number in range(4)]
        while not all(writer.done() for writer in writers):
            loaded = load_weights(old)
            assert (loaded["W"].shape, loaded["b"].shape) == ((40, 50), (3,))
            (number,) = {int(n) for array in loaded.values() for n in array.flat}
            seen.add(number)
    for writer in writers:
        writer.result()
    assert len(seen) > 1
    assert others(old) == []


@posix
def test_a_save_that_ends_before_another_has_locked_its_file(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes a file without a lock for that of a killed writer."""
    flock = files.fcntl.flock

    def late(*args: Any) -> None:
        monkeypatch.setattr(files.fcntl, "flock", flock)
        save_weights(old, NEW)
        flock(*args)

    monkeypatch.setattr(files.fcntl, "flock", late)
    save_weights(old, THEIRS)
    assert files.fcntl.flock is flock
    load_and_compare(old, THEIRS)
    assert others(old) == []


@posix
def test_what_is_removed_is_locked_until_it_is_gone(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a writer could lock it in between, and find that its file is gone."""
    with stalled_writer(old) as process:
        process.kill()
    unlink, locked = os.unlink, []

    def seen(path: Any, *args: Any, **keywords: Any) -> None:
        with open(path, "rb") as file:
            try:
                files.fcntl.flock(file, files.fcntl.LOCK_EX | files.fcntl.LOCK_NB)
            except OSError:
                locked.append(True)
            else:
                locked.append(False)
        unlink(path)

    monkeypatch.setattr(os, "unlink", seen)
    monkeypatch.setattr(Path, "unlink", seen)
    save_weights(old, NEW)
    assert locked == [True]
    assert others(old) == []


@posix
def test_a_file_system_without_locks(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*args: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", no_locks)
    save_weights(old, NEW)
    load_and_compare(old, NEW)
    assert others(old) == []


def test_a_system_without_fcntl(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "fcntl", None)
    save_weights(old, NEW)
    load_and_compare(old, NEW)
    assert others(old) == []


def test_without_fcntl_another_writer_is_left_alone(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can tell there whether it lives."""
    monkeypatch.setattr(files, "fcntl", None)
    before = old.read_bytes()
    with files.replacing(old) as file:
        names = others(old)
        save_weights(old, NEW)
        load_and_compare(old, NEW)
        assert len(names) == 1
        assert others(old) == names
        file.write(before)
    load_and_compare(old, OLD)
    assert others(old) == []


WITHOUT_FCNTL = """
import sys
sys.modules["fcntl"] = None
import numpy as np
from npdecoder import Linear, load_weights, save_weights
from npdecoder.replicas import Replicas, forward_backward
layer = Linear(2, 3, rng=0, dtype=np.float64)
with Replicas(layer) as replicas:
    (dx,) = replicas.run(forward_backward, [((np.ones((1, 2)),), {}, np.ones((1, 3)))])
save_weights("w.npz", {**layer.state_dict(), "dx": dx})
assert (load_weights("w.npz")["dx"] == layer.W.value.sum(axis=1)).all()
"""


def test_the_package_is_imported_where_there_is_no_fcntl(tmp_path: Path) -> None:
    """As on Windows: a training in one process, and its file."""
    path = os.pathsep.join([str(Path(files.__file__).parents[1]), *sys.path])
    subprocess.run([sys.executable, "-c", WITHOUT_FCNTL], cwd=tmp_path, check=True, timeout=60,
                   env={**os.environ, "PYTHONPATH": path})  # fmt: skip
    assert os.listdir(tmp_path) == ["w.npz"]


def test_a_folder_that_may_not_be_listed(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What killed writers left cannot be found there, but the save is done."""

    def forbidden(*args: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(os, "listdir", forbidden)
        patched.setattr(os, "scandir", forbidden)
        save_weights(old, NEW)
    load_and_compare(old, NEW)


# Damaged and hostile files


class MakesAFolder:
    """Unpickling one makes the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def refused(path: Path) -> None:
    with pytest.raises(ValueError, match=path.name.replace(".", r"\.")) as caught:
        load_weights(path)
    assert type(caught.value) is ValueError


def write_safetensors(path: Path, header: str, data: bytes) -> None:
    encoded = header.encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)


def tensor(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def test_truncated_at_twenty_lengths(old: Path) -> None:
    whole = old.read_bytes()
    for length in np.linspace(0, len(whole) - 1, 20).astype(int):
        old.write_bytes(whole[:length])
        refused(old)


@pytest.mark.parametrize("mask", [0x01, 0x55])
def test_every_flipped_byte_is_noticed_or_harmless(path: Path, mask: int) -> None:
    arrays = {**OLD, "a\0b": np.array(7), "": np.zeros((0, 2))}
    save_weights(path, arrays)
    whole = path.read_bytes()
    with open(path, "r+b", buffering=0) as file:
        for i, byte in enumerate(whole):
            file.seek(i)
            file.write(bytes([byte ^ mask]))
            try:
                load_weights(path)
            except ValueError:
                pass
            else:
                load_and_compare(path, arrays)  # a date or so: nothing that is read
            file.seek(i)
            file.write(bytes([byte]))
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("stored", "other"),
    [(b'"F64"', b'"I64"'), (b'"F64"', b'"U64"'), (b'"F32"', b'"I32"'), (b"[2,3]", b"[3,2]"),
     (b'"W"', b'"V"'), (b'"b"', b'"c"'), (b"crc32\":\"", b"crc32\":\"1")],
)  # fmt: skip
def test_a_header_that_was_changed(tmp_path: Path, stored: bytes, other: bytes) -> None:
    """To another that describes as many bytes."""
    path = tmp_path / "w.safetensors"
    save_weights(path, OLD)
    whole = path.read_bytes()
    assert whole.count(stored) == 1
    changed = whole[8:].replace(stored, other)
    growth = len(other) - len(stored)
    path.write_bytes((int.from_bytes(whole[:8], "little") + growth).to_bytes(8, "little") + changed)
    refused(path)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "start",
    [b"", b"PK\x03\x04", b"\x93NUMPY\x01\x00", b"PK\x05\x06", b"\x60" + bytes(7) + b'{"W":'],
)
def test_random_bytes(path: Path, seed: int, start: bytes) -> None:
    path.write_bytes(start + np.random.default_rng(seed).bytes(500))
    refused(path)


def test_other_kinds_of_files(path: Path, tmp_path: Path) -> None:
    path.write_bytes(pickle.dumps({"W": np.ones(3)}))
    refused(path)
    with open(path, "wb") as file:
        np.save(file, np.ones(3))
    refused(path)
    path.write_text("W = 1\n")
    refused(path)
    for suffix in set(SUFFIXES) - {path.suffix}:  # a file of one kind under the other's name
        other = tmp_path / f"other{suffix}"
        save_weights(other, OLD)
        path.write_bytes(other.read_bytes())
        refused(path)


def test_nothing_in_a_file_is_run(tmp_path: Path) -> None:
    path, marker = tmp_path / "w.npz", tmp_path / "marker"
    trap = MakesAFolder(marker)
    for suffix in SUFFIXES:
        path.with_suffix(suffix).write_bytes(pickle.dumps(trap))
        refused(path.with_suffix(suffix))
    np.savez(path, W=np.ones(3), trap=np.array([trap], object))
    refused(path)
    with open(path, "wb") as file:
        np.save(file, np.array([trap], object))
    refused(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("W.npy", pickle.dumps(trap))
    with contextlib.suppress(ValueError):  # see test_members_that_are_no_arrays
        load_weights(path)
    assert not marker.exists()

    pickle.loads(pickle.dumps(trap))  # the trap works
    assert marker.exists()


@pytest.mark.parametrize("member", ["README.txt", "W.npy", "W"])
def test_members_that_are_no_arrays(tmp_path: Path, member: str) -> None:
    with zipfile.ZipFile(tmp_path / "w.npz", "w") as archive:
        archive.writestr(member, b"these are not the bytes of an array")
    refused(tmp_path / "w.npz")


def test_a_member_that_is_longer_than_its_array(tmp_path: Path) -> None:
    path = tmp_path / "w.npz"
    save_weights(path, {"W": np.ones(1)})
    with zipfile.ZipFile(path) as archive:
        member = archive.read("W.npy")
    for rest in (b"\0", member):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("W.npy", member + rest)
        refused(path)


def test_headers_that_lie_about_the_size(tmp_path: Path) -> None:
    header = "{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,), }"
    header = header.ljust(117) + "\n"
    with zipfile.ZipFile(tmp_path / "w.npz", "w") as archive:
        archive.writestr(
            "W.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()
        )
    refused(tmp_path / "w.npz")

    path = tmp_path / "w.safetensors"
    for lie in (tensor("F64", [10**12], 0, 8 * 10**12), tensor("F64", [2], 0, 8),
                tensor("F64", [1], 8, 0), tensor("F64", [-1], 0, 8), tensor("F64", [0], 0, 8)):
        write_safetensors(path, json.dumps({"W": lie}), bytes(8))
        refused(path)
    write_safetensors(path, json.dumps({"W": tensor("F64", [1], 0, 8)}), bytes(8))
    load_and_compare(path, {"W": np.zeros(1)})  # so these files are wrong in nothing else
    path.write_bytes((2**63).to_bytes(8, "little") + path.read_bytes()[8:])
    refused(path)


@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "F3", ""])
def test_a_dtype_that_numpy_does_not_have(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "w.safetensors"
    write_safetensors(path, json.dumps({"W": tensor(dtype, [1], 0, 2)}), bytes(2))
    refused(path)


def test_two_arrays_of_one_name(tmp_path: Path) -> None:
    path = tmp_path / "w.npz"
    save_weights(path, {"W": np.ones(1)})
    with zipfile.ZipFile(path) as archive:
        member = archive.read("W.npy")
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("W.npy", member)
    refused(path)

    path = tmp_path / "w.safetensors"
    one, two = (f'"W": {json.dumps(tensor("F64", [1], i, i + 8))}' for i in (0, 8))
    write_safetensors(path, f"{{{one}, {two}}}", bytes(16))
    refused(path)


@pytest.mark.parametrize(
    "names",
    [["W"], ["a", "a"], [1], [None], [["a"]], {"0": "a"}, "a", [], ["a", "b", "c"], None, 1],
    ids=repr,
)
def test_a_table_of_names_that_does_not_fit(path: Path, names: Any) -> None:
    """It says what npdecoder.name.0, ... are called: each something else, and text."""
    count = 2 if names == ["a", "a"] else 1
    members = {"W": np.ones(1), **{f"npdecoder.name.{i}": np.full(1, i) for i in range(count)}}
    members["npdecoder.names"] = json_array(names)
    if path.suffix == ".npz":
        np.savez(path, **members)
    else:
        safetensors.numpy.save_file(members, path)
    refused(path)


def test_loading_reports_a_missing_file_as_such(path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=path.name):
        load_weights(path)
    with pytest.raises(FileNotFoundError):
        load_weights(path.parent / "no folder" / path.name)


def test_loading_a_folder_or_through_a_file_is_an_os_error(path: Path) -> None:
    path.mkdir()
    (path.parent / "file").touch()
    with pytest.raises(IsADirectoryError):
        load_weights(path)
    with pytest.raises(NotADirectoryError):
        load_weights(path.parent / "file" / path.name)


def test_an_open_file_is_not_left_behind(old: Path) -> None:
    """filterwarnings = error: a file that the garbage collector has to close is an error."""
    for data in (old.read_bytes()[:-30], b"", b"PK\x03\x04" + bytes(100)):
        old.write_bytes(data)
        refused(old)
    save_weights(old, NEW)
    load_weights(old)
    if os.path.isdir("/proc/self/fd"):
        links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        opened = [os.readlink(link) for link in links if os.path.islink(link)]
        assert not [name for name in opened if name.startswith(str(old.parent))]


# Paths: check_writable says beforehand what save_weights would


def unwritable(tmp_path: Path, kind: str) -> Path:
    (tmp_path / "file").touch()
    (tmp_path / "folder.npz").mkdir()
    link = tmp_path / "link.npz"
    if kind == "link into a missing folder":
        link.symlink_to(tmp_path / "missing" / "w.npz")
    elif kind == "link to a folder":
        link.symlink_to(tmp_path / "folder.npz")
    elif kind == "link to itself":
        link.symlink_to(link)
    return {
        "missing folder": tmp_path / "missing" / "w.npz",
        "file in place of a folder": tmp_path / "file" / "w.npz",
        "folder": tmp_path / "folder.npz",
        "name too long": tmp_path / ("n" * 300 + ".npz"),
        "name nearly too long": tmp_path / ("n" * 248 + ".npz"),
    }.get(kind, link)


@pytest.mark.parametrize(
    "kind",
    [
        "missing folder",
        "file in place of a folder",
        "folder",
        "name too long",
        "name nearly too long",
        "link into a missing folder",
        "link to a folder",
        "link to itself",
    ],
)
def test_what_cannot_be_written_is_known_beforehand(tmp_path: Path, kind: str) -> None:
    path = unwritable(tmp_path, kind)
    before = sorted(os.listdir(tmp_path))
    try:
        save_weights(path, OLD)
    except OSError:
        assert sorted(os.listdir(tmp_path)) == before
        with pytest.raises(OSError):  # noqa: PT011  (which one depends on the system)
            check_writable(path)
        assert sorted(os.listdir(tmp_path)) == before
    else:
        assert kind == "name nearly too long"
        check_writable(path)
        load_and_compare(path, OLD)


@pytest.mark.parametrize("bit", [12, 25, 30])
def test_no_memory_is_taken_for_what_a_damaged_directory_claims(tmp_path: Path, bit: int) -> None:
    path = tmp_path / "w.npz"
    save_weights(path, OLD)
    data = bytearray(path.read_bytes())
    at = data.rindex(b"PK\1\2") + 20  # the last entry: its size as stored, then unpacked
    for place in at, at + 4:
        size = int.from_bytes(data[place : place + 4], "little") ^ 1 << bit
        data[place : place + 4] = size.to_bytes(4, "little")
    path.write_bytes(data)
    message = re.escape(f"{path} is not a whole .npz file")
    with measured() as memory, pytest.raises(ValueError, match=message):
        load_weights(path)
    assert memory.peak < 10**6


@posix
@pytest.mark.parametrize("refuse", [check_writable, lambda path: save_weights(path, NEW)])
def test_a_file_that_is_no_ordinary_one_is_not_replaced(
    tmp_path: Path, refuse: Callable[[Path], None]
) -> None:
    """What it is for, a pipe or a device, would be gone."""
    path = tmp_path / "w.npz"
    os.mkfifo(path)
    with pytest.raises(OSError, match=r"is no ordinary file.*w\.npz"):
        refuse(path)
    assert stat.S_ISFIFO(path.stat().st_mode)
    assert os.listdir(tmp_path) == ["w.npz"]


def test_check_writable_leaves_nothing_and_changes_nothing(old: Path) -> None:
    check_writable(old)
    check_writable(str(old))
    for suffix in SUFFIXES:
        check_writable(old.with_name(f"new{suffix}"))
    assert_untouched(old)


def test_relative_paths_and_strings(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    check_writable(path.name)
    save_weights(path.name, OLD)
    load_and_compare(Path(path.name), OLD)
    load_and_compare(path, OLD)
    load_weights(path.name)


NAMES = [os.fsdecode("我 爱 你".encode()), "a b", "-x", "%d", "w.tar", "w.npz", "n" * 200]


@pytest.mark.parametrize("name", NAMES)
def test_odd_file_names(path: Path, name: str) -> None:
    path = path.with_name(name + path.suffix)
    check_writable(path)
    save_weights(path, OLD)
    load_and_compare(path, OLD)
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_stays_a_link(tmp_path: Path, exists: bool) -> None:
    (tmp_path / "real").mkdir()
    real, link = tmp_path / "real" / "w.npz", tmp_path / "link.npz"
    if exists:
        save_weights(real, OLD)
    link.symlink_to(real)
    check_writable(link)
    save_weights(link, NEW)
    assert link.is_symlink()
    assert not real.is_symlink()
    load_and_compare(real, NEW)
    load_and_compare(link, NEW)
    assert os.listdir(tmp_path / "real") == ["w.npz"]


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    """With this umask, which the body must not change."""
    before = os.umask(mask)
    try:
        yield
    finally:
        after = os.umask(before)
    assert after == mask


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o000, 0o666)])
def test_the_mode_is_that_of_the_umask(path: Path, mask: int, mode: int) -> None:
    with umask(mask):
        save_weights(path, OLD)
    assert stat.S_IMODE(path.stat().st_mode) == mode


@posix
def test_threads_that_save_leave_the_umask_alone(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It belongs to the whole process: whoever sets it meets the others that read it."""
    set_umask = os.umask

    def slow(mask: int) -> int:
        before = set_umask(mask)
        time.sleep(0.02)
        return before

    paths = [path.with_name(f"{i}{path.suffix}") for i in range(4)]
    with umask(0o027):
        with monkeypatch.context() as patched, ThreadPoolExecutor(len(paths)) as pool:
            patched.setattr(os, "umask", slow)
            list(pool.map(lambda path: save_weights(path, OLD), paths))
        assert [stat.S_IMODE(path.stat().st_mode) for path in paths] == [0o640] * len(paths)


def test_an_existing_file_keeps_its_mode(old: Path) -> None:
    old.chmod(0o640)
    save_weights(old, NEW)
    assert stat.S_IMODE(old.stat().st_mode) == 0o640


def test_the_package_unpickles_and_evaluates_nothing() -> None:
    folder = Path(files.__file__).parent
    for file in folder.rglob("*.py"):
        text = file.read_text("utf-8")
        for word in ("import pickle", "allow_pickle=True", "eval(", "exec(", "__import__"):
            assert word not in text, f"{word} in {file.name}"


@pytest.mark.parametrize("name", ["none/x.html", "."])
def test_a_file_that_cannot_be_made_is_named_as_the_user_did(tmp_path: Path, name: str) -> None:
    with pytest.raises(OSError, match="folder") as caught, files.replacing(tmp_path / name):
        pass
    assert ".part" not in str(caught.value)
    assert os.listdir(tmp_path) == []
