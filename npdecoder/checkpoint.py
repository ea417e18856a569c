"""Files of arrays: .npz, written whole or not at all, read without pickle."""

from __future__ import annotations

import errno
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
    crash leaves the old file whole, and a reader never sees half of one. Equal arrays make equal
    files.

    Errors: ValueError for another suffix, and for an array that only pickle could store; OSError if
    it cannot be written. The old file is then untouched.
    """
    _check_suffix(path)
    arrays = {name: np.asarray(array) for name, array in mapping.items()}
    for name, array in arrays.items():
        if array.dtype.hasobject:
            raise ValueError(f"{name} holds Python objects, which are not stored")
    with _replacing(path) as file, zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            # a fixed date (ZipInfo's 1980) for equal files; zip64 for arrays beyond 2 GiB
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def load_weights(path: str | os.PathLike[str]) -> dict[str, Array]:
    """The arrays of a .npz file by name. Nothing in the file is ever run.

    Errors: FileNotFoundError; ValueError for another suffix and for a file that is damaged or holds
    anything but arrays.
    """
    _check_suffix(path)
    try:
        # np.load would leave a path it opened itself open when the file is damaged
        with open(path, "rb") as stream, np.load(stream, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (FileNotFoundError, IsADirectoryError, PermissionError):
        raise
    except Exception as error:  # zipfile, zlib, format and text errors: whatever damage makes
        raise ValueError(f"{path} is not a whole .npz file of arrays: {error}") from error


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise the OSError or ValueError that save_weights(path) would, before the work is done."""
    _check_suffix(path)
    folder = Path(path).absolute().parent
    if Path(path).is_dir():
        raise IsADirectoryError(errno.EISDIR, "is a folder", str(path))
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such folder", str(folder))
    with tempfile.TemporaryFile(dir=folder):
        pass


def _check_suffix(path: str | os.PathLike[str]) -> None:
    if Path(path).suffix != ".npz":
        raise ValueError(f"{path}: expected a path that ends in .npz")


@contextmanager
def _replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A file to write that takes the place of path when it is complete."""
    # through a link, to the file it names: the link stays one
    path = Path(path).resolve()
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
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
