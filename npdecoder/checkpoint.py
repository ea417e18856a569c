"""Files of arrays: .npz, written whole or not at all, read without pickle."""

from __future__ import annotations

import errno
import io
import os
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import ArrayLike

from npdecoder.core import Array


def save_weights(path: str | os.PathLike[str], mapping: Mapping[str, ArrayLike]) -> None:
    """Write arrays by name to a .npz file, which np.load can read too.

    The file is written beside the old one, flushed to the disk and put in its place at once: a
    crash leaves the old file whole, and a reader never sees half of one. Arrays are written
    contiguous and in native byte order; equal arrays make equal files.

    Errors: ValueError for another suffix, for an array that only pickle could store, and for a name
    that a zip file cannot hold; OSError if it cannot be written. The old file is then untouched.
    """
    _check_suffix(path)
    arrays = {name: np.asarray(array) for name, array in mapping.items()}
    for name, array in arrays.items():
        if array.dtype.hasobject:
            raise ValueError(f"{name} holds Python objects, which are not stored")
        if not _fits_zip(name):
            raise ValueError(f"the name {name!r} cannot be stored")
    with _replacing(path) as file, zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            native = np.asarray(array, array.dtype.newbyteorder("="), order="C")
            # a fixed date (ZipInfo's 1980) for equal files; zip64 for arrays beyond 2 GiB
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                np.lib.format.write_array(member, native, allow_pickle=False)


def load_weights(path: str | os.PathLike[str]) -> dict[str, Array]:
    """The arrays of a .npz file by name. Nothing in the file is ever run.

    Errors: OSError if it cannot be opened; ValueError for another suffix and for a file that is
    damaged or holds anything but arrays.
    """
    _check_suffix(path)
    with open(path, "rb") as file:
        try:
            with zipfile.ZipFile(file) as archive:
                return {_name(info): _read(archive, info) for info in archive.infolist()}
        except Exception as error:  # of zipfile, zlib, numpy, ...: whatever damage makes
            raise ValueError(f"{path} is not a whole .npz file of arrays: {error}") from error


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise the OSError or ValueError that save_weights(path) would, before the work is done."""
    _check_suffix(path)
    if Path(path).is_dir():
        raise IsADirectoryError(errno.EISDIR, "is a folder", str(path))
    folder = Path(path).resolve().parent
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such folder", str(folder))
    with tempfile.TemporaryFile(dir=folder):
        pass


def _check_suffix(path: str | os.PathLike[str]) -> None:
    if Path(path).suffix != ".npz":
        raise ValueError(f"{path}: expected a path that ends in .npz")


def _fits_zip(name: str) -> bool:
    """Whether a member of this name is found under it again: zip cuts a name at NUL."""
    try:
        encoded = f"{name}.npy".encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return len(encoded) < 2**16 and zipfile.ZipInfo(f"{name}.npy").filename == f"{name}.npy"


def _name(info: zipfile.ZipInfo) -> str:
    if not info.filename.endswith(".npy"):
        raise ValueError(f"{info.filename!r} is no array")
    if info.comment:  # by one wrong byte, the members that follow become one
        raise ValueError(f"{info.filename!r} has a comment")
    return info.filename[: -len(".npy")]


def _read(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Array:
    stream = io.BytesIO(archive.read(info))  # whole, so that zipfile compares the checksum
    array: Array = np.lib.format.read_array(stream, allow_pickle=False)
    if stream.read(1):
        raise ValueError(f"{info.filename!r} is longer than its array")
    return array


@contextmanager
def _replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A file to write that takes the place of path when it is complete."""
    # through a link, to the file it names: the link stays one
    path = Path(path).resolve()
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".npdecoder-", suffix=".part")
    try:
        with open(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, path.stat().st_mode if path.exists() else 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _umask() -> int:
    mask = os.umask(0)  # it can only be read by setting it
    os.umask(mask)
    return mask
