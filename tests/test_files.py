"""Files of arrays: round trips, crashes while writing, damaged and hostile files, paths."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import stat
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npdecoder import files
from npdecoder.files import check_writable, load_weights, save_weights

OLD: dict[str, Any] = {
    "W": np.arange(6.0).reshape(2, 3),
    "b": np.float32([-0.0, np.nan, np.inf]),
}
NEW = {"W": np.ones((50, 60)), "b": np.zeros(3, np.float32)}

ARRAYS = {
    **{np.dtype(d).str: np.linspace(-2, 3, 12).reshape(3, 4).astype(d) for d in "efdgFDbBhHiIqQ?"},
    "big-endian": np.arange(6, dtype=">f4").reshape(2, 3),
    "big-endian int": np.arange(6, dtype=">i8"),
    "Fortran order": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "strided": np.arange(24.0).reshape(4, 6)[::2, ::-3],
    "broadcast": np.broadcast_to(np.float32(2.5), (3, 2)),
    "transposed": np.arange(24.0).reshape(2, 3, 4).transpose(2, 0, 1),
    "0-d": np.array(3.25),
    "empty": np.zeros((0, 5)),
    "no columns": np.zeros((5, 0), np.float32),
    "special": np.array([np.nan, -np.nan, np.inf, -np.inf, -0.0, 5e-324]),
    "text": np.array(["我", "love"]),
}
NAMES = ["file", "a/b", "a\\b", "x.npy", "x.npz", "我爱你", " ", "", ".", "../up", "/root", "self",
         "layers.0.W", "a" * 300, "é", "e\u0301", "allow_pickle", "%s {0}"]


def native(array: np.ndarray) -> np.ndarray:
    return array.astype(array.dtype.newbyteorder("="))


def load_and_compare(path: Path, expected: Mapping[str, Any]) -> None:
    """The file holds just these arrays: same names, shapes and numbers, in native dtypes."""
    loaded = load_weights(path)
    assert list(loaded) == list(expected)
    for name, array in expected.items():
        array, got = np.asarray(array), loaded[name]
        array = array.astype(array.dtype.newbyteorder("="))
        assert type(got) is np.ndarray
        assert (got.dtype, got.shape) == (array.dtype, array.shape)
        assert got.tobytes() == array.tobytes(), name


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "w.npz"


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


def test_names_come_back_in_order(path: Path) -> None:
    arrays = {name: np.array([i]) for i, name in enumerate(NAMES)}
    save_weights(path, arrays)
    load_and_compare(path, arrays)


@pytest.mark.parametrize("names", [("a", "a.npy"), ("a.npy", "a"), ("a", "a.npy", "a.npy.npy")])
def test_a_name_with_and_without_the_inner_suffix(path: Path, names: tuple[str, ...]) -> None:
    arrays = {name: np.array([i]) for i, name in enumerate(names)}
    save_weights(path, arrays)
    load_and_compare(path, arrays)


def test_names_that_zip_cuts_are_refused_or_kept(old: Path) -> None:
    arrays = {"a\0x": np.array([1]), "a\0y": np.array([2])}
    try:
        save_weights(old, arrays)
    except ValueError:
        assert_untouched(old)
    else:
        load_and_compare(old, arrays)


def test_lists_numbers_and_the_empty_mapping(path: Path) -> None:
    save_weights(path, {})
    load_and_compare(path, {})
    save_weights(path, {"a": [[1.5, 2.5]], "b": 7.0})
    load_and_compare(path, {"a": [[1.5, 2.5]], "b": 7.0})


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8),
        st.tuples(st.sampled_from("efdg?iQ"), st.lists(st.integers(0, 4), max_size=4)),
        max_size=5,
    )
)
def test_any_names_and_shapes(tmp_path_factory: Any, entries: dict[str, Any]) -> None:
    path = tmp_path_factory.mktemp("any") / "w.npz"
    rng = np.random.default_rng(0)
    arrays = {n: (9 * rng.random(shape)).astype(d) for n, (d, shape) in entries.items()}
    save_weights(path, arrays)
    load_and_compare(path, arrays)


def test_np_load_reads_the_file(old: Path) -> None:
    with np.load(old) as file:
        assert file.files == list(OLD)
        assert np.array_equal(file["W"], OLD["W"])


def test_a_file_of_np_savez_is_read(path: Path) -> None:
    np.savez(path, **OLD)
    load_and_compare(path, OLD)
    np.savez_compressed(path, **OLD)
    load_and_compare(path, OLD)


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any]
) -> None:
    a, b = tmp_path / "a.npz", tmp_path / "b.npz"
    arrays = {"W": np.arange(12.0).reshape(3, 4), "V": np.arange(3, dtype=np.float32)}
    save_weights(a, arrays)
    monkeypatch.setattr("time.time", lambda: 2e9)
    save_weights(b, {name: change(array) for name, array in arrays.items()})
    assert a.read_bytes() == b.read_bytes()


def test_unequal_arrays_make_unequal_files(tmp_path: Path) -> None:
    a, b = tmp_path / "a.npz", tmp_path / "b.npz"
    save_weights(a, {"x": np.float64([0.0])})
    for other in ([-0.0], np.float32([0.0]), [[0.0]]):
        save_weights(b, {"x": np.asarray(other)})
        assert a.read_bytes() != b.read_bytes()


# What is refused


@pytest.mark.parametrize(
    "bad",
    [
        np.array([1, None]),
        np.array({"a": 1}, object),
        np.zeros(2, [("x", "f8"), ("y", object)]),
        [object()],
    ],
    ids=["None", "dict", "record", "list"],
)
def test_objects_are_refused_by_name(old: Path, bad: Any) -> None:
    with pytest.raises(ValueError, match=r"layers\.3\.odd"):
        save_weights(old, {"fine": np.ones(3), "layers.3.odd": bad})
    assert_untouched(old)


@pytest.mark.parametrize("name", ["w", "w.npy", "w.npz.part", "w.txt", ".npz", "npz", "w.npz.gz"])
def test_another_suffix_is_refused(tmp_path: Path, name: str) -> None:
    for call in (check_writable, load_weights, lambda path: save_weights(path, OLD)):
        with pytest.raises(ValueError, match=r"\.npz"):
            call(tmp_path / name)
    assert os.listdir(tmp_path) == []


# Crashes while writing


class Breaking:
    """A file to write that fails when `after` bytes have come."""

    def __init__(self, file: Any, after: int, error: BaseException) -> None:
        self.file, self.left, self.error = file, after, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def write(self, data: Any) -> int:
        self.left -= memoryview(data).nbytes
        if self.left < 0:
            raise self.error
        written: int = self.file.write(data)
        return written


ERRORS = [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), MemoryError()]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.98, 0.9999])
def test_a_crash_while_writing(
    old: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, share: float
) -> None:
    size = sum(array.nbytes for array in NEW.values()) + 400  # headers and the index besides
    whole = files._replacing

    @contextlib.contextmanager
    def breaking(path: Any) -> Iterator[Any]:
        with whole(path) as file:
            yield Breaking(file, int(share * size), error)

    monkeypatch.setattr(files, "_replacing", breaking)
    with pytest.raises(type(error)):
        save_weights(old, NEW)
    assert_untouched(old)


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("function", ["fsync", "chmod", "replace"])
@pytest.mark.parametrize("exists", [True, False])
def test_a_crash_before_the_file_takes_its_place(
    old: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, function: str, exists: bool
) -> None:
    target = old if exists else old.with_name("other.npz")

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


def test_the_file_is_never_seen_half(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the very end the path holds the old arrays, and the new file is on the disk before."""
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def seen_fsync(fd: int) -> None:
        events.append("fsync")
        load_and_compare(old, OLD)
        fsync(fd)

    def seen_replace(a: Any, b: Any) -> None:
        events.append("replace")
        assert Path(a).parent == old.parent  # one file system: the rename is atomic
        with zipfile.ZipFile(a) as archive:
            assert archive.testzip() is None
        load_and_compare(old, OLD)
        replace(a, b)

    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(os, "replace", seen_replace)
    save_weights(old, NEW)
    assert events == ["fsync", "replace"]
    monkeypatch.undo()
    load_and_compare(old, NEW)
    assert os.listdir(old.parent) == [old.name]


# Damaged and hostile files


class MakesAFolder:
    """Unpickling one makes the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def refused(path: Path) -> None:
    with pytest.raises(ValueError, match=r"w\.npz") as caught:
        load_weights(path)
    assert type(caught.value) is ValueError


def test_truncated_at_twenty_lengths(old: Path) -> None:
    whole = old.read_bytes()
    for length in np.linspace(0, len(whole) - 1, 20).astype(int):
        old.write_bytes(whole[:length])
        refused(old)


def test_every_flipped_byte_is_noticed_or_harmless(old: Path) -> None:
    whole = old.read_bytes()
    for i in range(len(whole)):
        old.write_bytes(whole[:i] + bytes([whole[i] ^ 0x55]) + whole[i + 1 :])
        try:
            loaded = load_weights(old)
        except ValueError:
            continue
        assert list(loaded) == list(OLD), f"byte {i}"  # a date or so: nothing that is read
        for name, array in loaded.items():
            assert array.tobytes() == OLD[name].tobytes(), f"byte {i}"


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("start", [b"", b"PK\x03\x04", b"\x93NUMPY\x01\x00", b"PK\x05\x06"])
def test_random_bytes(path: Path, seed: int, start: bytes) -> None:
    path.write_bytes(start + np.random.default_rng(seed).bytes(500))
    refused(path)


def test_other_kinds_of_files(path: Path) -> None:
    path.write_bytes(pickle.dumps({"W": np.ones(3)}))
    refused(path)
    with open(path, "wb") as file:
        np.save(file, np.ones(3))
    refused(path)
    path.write_text("W = 1\n")
    refused(path)


def test_nothing_in_a_file_is_run(path: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    trap = MakesAFolder(marker)
    path.write_bytes(pickle.dumps(trap))
    refused(path)
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
def test_members_that_are_no_arrays(old: Path, member: str) -> None:
    with zipfile.ZipFile(old, "w") as archive:
        archive.writestr(member, b"these are not the bytes of an array")
    refused(old)


def test_a_header_that_lies_about_the_size(path: Path) -> None:
    header = "{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,), }"
    header = header.ljust(117) + "\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(
            "W.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()
        )
    refused(path)


def test_loading_reports_a_missing_file_as_such(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.npz"):
        load_weights(tmp_path / "none.npz")
    with pytest.raises(FileNotFoundError):
        load_weights(tmp_path / "no folder" / "none.npz")


def test_loading_a_folder_or_through_a_file_is_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "folder.npz").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(IsADirectoryError):
        load_weights(tmp_path / "folder.npz")
    with pytest.raises(NotADirectoryError):
        load_weights(tmp_path / "file" / "w.npz")


def test_an_open_file_is_not_left_behind(old: Path) -> None:
    """filterwarnings = error: a file that the garbage collector has to close is an error."""
    for data in (old.read_bytes()[:-30], b"", b"PK\x03\x04" + bytes(100)):
        old.write_bytes(data)
        refused(old)
    if os.path.isdir("/proc/self/fd"):
        links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        assert str(old) not in [os.readlink(link) for link in links if os.path.islink(link)]


# Paths: check_writable says beforehand what save_weights would


def unwritable(tmp_path: Path, kind: str) -> Path:
    (tmp_path / "file").touch()
    (tmp_path / "folder.npz").mkdir()
    link = tmp_path / "link.npz"
    if kind == "link into a missing folder":
        link.symlink_to(tmp_path / "missing" / "w.npz")
    elif kind == "link to a folder":
        link.symlink_to(tmp_path / "folder.npz")
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


def test_check_writable_leaves_nothing_and_changes_nothing(old: Path) -> None:
    check_writable(old)
    check_writable(str(old))
    check_writable(old.with_name("new.npz"))
    assert_untouched(old)


def test_relative_paths_and_strings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_writable("w.npz")
    save_weights("w.npz", OLD)
    load_and_compare(Path("w.npz"), OLD)
    load_and_compare(tmp_path / "w.npz", OLD)


@pytest.mark.parametrize("name", ["我 爱 你.npz", "a b.npz", "-x.npz", "%d.npz", "w.tar.npz"])
def test_odd_file_names(tmp_path: Path, name: str) -> None:
    check_writable(tmp_path / name)
    save_weights(tmp_path / name, OLD)
    load_and_compare(tmp_path / name, OLD)
    assert os.listdir(tmp_path) == [name]


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


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o000, 0o666)])
def test_the_mode_is_that_of_the_umask(path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        save_weights(path, OLD)
        assert os.umask(umask) == umask
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == mode


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
