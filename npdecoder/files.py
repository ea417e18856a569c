"""Files of arrays by name: written whole or not at all, and read without running anything in them.

A path that ends in .npz is a file that NumPy can read too; .safetensors needs the optional package
safetensors.
"""

from __future__ import annotations

import errno
import io
import json
import os
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import ArrayLike

from npdecoder.core import Array, mapping_of, rectangular

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

PathLike = str | os.PathLike[str]

SUFFIXES = (".npz", ".safetensors")
SAFETENSORS_DTYPES = {np.dtype(code).name for code in "?bBhHiIlLqQefd"}
NAMES = "npdecoder.names"  # an entry: the names that a format cannot hold, as JSON
ESCAPED = "npdecoder.name."  # and what they are called instead, by number
UMASK = threading.Lock()  # the umask is the whole process's
CHECKSUM = "npdecoder.crc32"  # in the header of a .safetensors file; zip has its own


def save_weights(path: PathLike, mapping: Mapping[str, ArrayLike]) -> None:
    """Write arrays by name to a .npz or .safetensors file.

    The file is written beside the old one, flushed to the disk and put in its place at once: a
    crash leaves the old file whole, and a reader never sees half of one. Arrays are written
    contiguous and in native byte order; equal arrays make equal files. Any string is a name.

    Errors: ValueError for another suffix, and for what cannot be stored exactly: an array of Python
    objects or with a mask, and in .safetensors anything but bool, integers up to 64 bits, float16,
    float32 and float64. TypeError for a name that is no string; ImportError without safetensors;
    OSError if it cannot be written. The old file is then untouched.
    """
    suffix = _suffix(path)
    mapping = mapping_of("mapping", mapping)
    arrays = {name: _storable(name, array, suffix) for name, array in mapping.items()}
    escaped = [name for name in arrays if not _fits(name)]
    table = {name: f"{ESCAPED}{i}" for i, name in enumerate(escaped)}
    members = {table.get(name, name): array for name, array in arrays.items()}
    if table:
        members[NAMES] = json_array(list(table))
    if suffix == ".npz":
        with replacing(path) as file:
            _write_npz(file, members)
    else:
        data = _safetensors().save(members, {CHECKSUM: str(_checksum(members))})
        with replacing(path) as file:
            file.write(data)


def load_weights(path: PathLike) -> dict[str, Array]:
    """The arrays of a .npz or .safetensors file by name.

    Errors: OSError if it cannot be opened; ValueError for another suffix and for a file that is
    damaged or holds anything but arrays; ImportError without safetensors.
    """
    suffix = _suffix(path)
    if suffix == ".safetensors":
        _safetensors()
    with open(path, "rb") as file:
        try:
            members = _read_npz(file) if suffix == ".npz" else _read_safetensors(file.read())
            return _unescaped(members)
        except Exception as error:  # of zipfile, zlib, numpy, ...: whatever damage makes
            raise ValueError(f"{path} is not a whole {suffix} file of arrays: {error}") from error


def _unescaped(members: dict[str, Array]) -> dict[str, Array]:
    """The arrays under the names that they were given."""
    names = json_value(members.pop(NAMES)) if NAMES in members else []
    if type(names) is not list or not all(type(name) is str for name in names):
        raise ValueError("its table of names holds something else")
    table = {f"{ESCAPED}{i}": name for i, name in enumerate(names)}
    if table.keys() != {name for name in members if name.startswith(ESCAPED)}:
        raise ValueError("its table of names does not fit")
    arrays = {table.get(name, name): array for name, array in members.items()}
    if len(arrays) < len(members):
        raise ValueError("a name stands for two arrays")
    return arrays


def check_writable(path: PathLike) -> None:
    """Raise the error that save_weights(path) would, before the work is done."""
    if _suffix(path) == ".safetensors":
        _safetensors()
    _refuse_what_is_no_file(path)
    with tempfile.TemporaryFile(dir=_resolved(path).parent):
        pass


def json_array(value: Any) -> Array:
    """The value as JSON, in an array of bytes that can stand beside the others."""
    # not as ASCII: JSON's escapes make one character of two halves of a surrogate pair
    text = json.dumps(value, ensure_ascii=False)
    return np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)


def json_value(array: Array) -> Any:
    return json.loads(array.tobytes().decode("utf-8", "surrogatepass"))


# Formats


def _storable(name: str, array: ArrayLike, suffix: str = ".npz") -> Array:
    """The array contiguous and in native byte order, or an error that names it."""
    if isinstance(array, np.ma.MaskedArray):
        raise ValueError(f"{name} has a mask, which is not stored")
    array = rectangular(name, array)
    if array.dtype.hasobject:
        raise ValueError(f"{name} holds Python objects, which are not stored")
    if suffix == ".safetensors" and array.dtype.name not in SAFETENSORS_DTYPES:
        raise ValueError(f"{name} holds {array.dtype}, which .safetensors does not store: use .npz")
    return np.asarray(array, array.dtype.newbyteorder("="), order="C")


def _fits(name: str) -> bool:
    """Whether both formats, on every system, find a member of this name under it again."""
    if not isinstance(name, str):
        raise TypeError(f"the name {name!r} is a {type(name).__name__}, expected a string")
    try:
        size = len(f"{name}.npy".encode())
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    if name == "__metadata__" or name.startswith(ESCAPED) or name == NAMES:
        return False
    return size < 2**16 and "\0" not in name and "\\" not in name


def _write_npz(file: IO[bytes], members: Mapping[str, Array]) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in members.items():
            # a fixed date (ZipInfo's 1980) for equal files; zip64 for arrays beyond 2 GiB
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def _read_npz(file: IO[bytes]) -> dict[str, Array]:
    length = file.seek(0, io.SEEK_END)
    with zipfile.ZipFile(file) as archive:
        infos = archive.infolist()
        # zipfile takes as much memory for one as the directory says that it has
        if sum(info.compress_size for info in infos) > length:
            raise ValueError("its members are longer than the file")
        members = {_member_name(info): _read_member(archive, info) for info in infos}
    if len(members) < len(infos):
        raise ValueError("a name stands for two arrays")
    return members


def _member_name(info: zipfile.ZipInfo) -> str:
    if not info.filename.endswith(".npy"):
        raise ValueError(f"{info.filename!r} is no array")
    if info.comment:  # by one wrong byte, the members that follow become one
        raise ValueError(f"{info.filename!r} has a comment")
    return info.filename[: -len(".npy")]


def _read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Array:
    stream = io.BytesIO(archive.read(info))  # whole, so that zipfile compares the checksum
    array: Array = np.lib.format.read_array(stream, allow_pickle=False)
    if stream.read(1):
        raise ValueError(f"{info.filename!r} is longer than its array")
    return array


def _safetensors() -> Any:
    try:
        import safetensors.numpy
    except ImportError:
        raise ImportError("a .safetensors file needs the package safetensors: "
                          "pip install safetensors, or use .npz") from None
    return safetensors.numpy


def _read_safetensors(data: bytes) -> dict[str, Array]:
    members: dict[str, Array] = _safetensors().load(data)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    checksum = header.get("__metadata__", {}).get(CHECKSUM)
    if checksum not in (None, str(_checksum(members))):
        raise ValueError("its checksum does not fit")
    return members


def _checksum(members: Mapping[str, Array]) -> int:
    checksum = 0
    for name in sorted(members):  # safetensors has an order of its own
        array = members[name]
        checksum = zlib.crc32(f"{name} {array.dtype.str} {array.shape}".encode(), checksum)
        checksum = zlib.crc32(array.tobytes(), checksum)
    return checksum


def _suffix(path: PathLike) -> str:
    suffix = Path(path).suffix
    if suffix not in SUFFIXES:
        raise ValueError(f"{path}: expected a path that ends in {' or '.join(SUFFIXES)}")
    return suffix


# Replacing a file


@contextmanager
def replacing(path: PathLike) -> Iterator[IO[bytes]]:
    """A file to write that takes the place of path when it is complete."""
    _refuse_what_is_no_file(path)
    path = _resolved(path)  # through a link, to the file it names: the link stays one
    # its own, so that leftovers of this path are known, and short: a name may be as long as it can
    start = f".npdecoder-{zlib.crc32(os.fsencode(path.name)):08x}-"
    handle, temporary, lock = _locked_file(path.parent, start)
    try:
        with open(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, path.stat().st_mode if path.exists() else 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(FileNotFoundError):  # it is in place already
            os.unlink(temporary)
        if isinstance(error, OSError) and error.filename in (None, temporary):
            error.filename = str(path)  # the name that the user knows
        raise
    finally:
        if lock is not None:
            os.close(lock)
    with suppress(OSError):  # a folder that may not be listed
        for leftover in path.parent.iterdir():
            if leftover.name.startswith(start) and leftover.name.endswith(".part"):
                _remove_if_abandoned(leftover)


def _locked_file(folder: Path, start: str) -> tuple[int, str, int | None]:
    """A new temporary file: its handle, its path, and the lock that shows others that its writer
    lives, until it is closed.

    (A second handle of the same file: Windows, which has no lock, renames closed files only.)
    """
    while True:
        handle, path = tempfile.mkstemp(dir=folder, prefix=start, suffix=".part")
        if fcntl is None:
            return handle, path, None
        with suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return handle, path, os.dup(handle)
        os.close(handle)  # another save took it for abandoned before it was locked


def _remove_if_abandoned(path: Path) -> None:
    """Remove the temporary file of a process that was killed in the middle of a save."""
    if fcntl is None:
        return  # nobody can tell whether its writer lives
    with suppress(OSError), open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an error while its writer lives
        path.unlink()


def _refuse_what_is_no_file(path: PathLike) -> None:
    if Path(path).is_dir():
        raise IsADirectoryError(errno.EISDIR, "is a folder", str(path))
    if Path(path).exists() and not Path(path).is_file():  # a device would be gone
        raise OSError(errno.EINVAL, "is no ordinary file", str(path))
    folder = _resolved(path).parent
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such folder", str(folder))


def _resolved(path: PathLike) -> Path:
    try:
        resolved = Path(path).resolve()
        looped = resolved.is_symlink()  # as Python 3.13 leaves a link to itself
    except RuntimeError:  # before it
        looped = True
    if looped:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return resolved


def _umask() -> int:
    with UMASK:
        mask = os.umask(0)  # it can only be read by setting it
        os.umask(mask)
    return mask
