"""Sums and products as NumPy computes them quickest, each function says what it equals; and `over`,
where what takes the place of another array may be put.

NumPy reduces short rows one by one, at some 50 ns each; a product with ones goes through BLAS.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Any

import numpy as np

from npdecoder.core import Array, filled

FEW = 500  # numbers, or multiplications, that take no longer than one call of NumPy
MANY = 5000  # numbers from which on a layout that saves a copy pays
ROWS = 16  # of a matrix, from which on it pays to copy what they are multiplied with
NARROW = 32  # unless that is wider
EINSUM = 20_000  # from which on einsum pays, which is slow to begin
MONITORING: Any = getattr(sys, "monitoring", None)  # from Python 3.12 on


def sum_last(x: Array) -> Array:
    """x.sum(axis=-1, keepdims=True)."""
    return matmul_rows(x, filled(x.shape[-1], 1, x.dtype))


def mean_last(x: Array) -> Array:
    """x.mean(axis=-1, keepdims=True)."""
    n = x.shape[-1]
    return matmul_rows(x, filled(n, n, x.dtype))


def centred(x: Array, out: Array | None = None) -> Array:
    """x - x.mean(axis=-1, keepdims=True), in out if given, which may be x."""
    return np.subtract(x, mean_last(x), out)


def sum_product(x: Array, y: Array) -> Array:
    """(x * y).sum(axis=-1, keepdims=True), without the array x * y if it is large."""
    return sum_last(x * y) if x.size < EINSUM else _einsum_last(x, y)


def mean_product(x: Array, y: Array) -> Array:
    """(x * y).mean(axis=-1, keepdims=True), without the array x * y if it is large."""
    return mean_last(x * y) if x.size < EINSUM else _einsum_last(x, y) / x.shape[-1]


def _einsum_last(x: Array, y: Array) -> Array:
    sums: Array = np.einsum("...i,...i->...", x, y)
    return sums[..., None]


def matmul_rows(x: Array, W: Array) -> Array:
    """x @ W, of x (..., n) and W (n, m), as one product of two matrices.

    For x (B, T, n) x @ W would be B of them. And dot is quicker than matmul where both are small.
    """
    n, m = W.shape
    if x.size * m < FEW:
        return x.dot(W)  # row by row, without the reshapes
    return x.reshape(-1, n).dot(W).reshape((*x.shape[:-1], m))


def over(x: Array) -> Array:
    """Where to put (out=) what takes the place of x, which is not read again: in x itself.

    It stays in the cache and takes no memory of its own. An array like x while somebody looks on:
    then every name keeps its numbers.
    """
    return np.empty_like(x) if watched() else x


def watched() -> bool:
    """Whether a Trace looks on (sys.setprofile), or a debugger (sys.settrace, sys.monitoring)."""
    return sys.getprofile() is not None or sys.gettrace() is not None or (
        MONITORING is not None and MONITORING.get_tool(MONITORING.DEBUGGER_ID) is not None
    )


def transposed(x: Array, rows: int = ROWS) -> Array:
    """x.swapaxes(-1, -2), copied if a product of that many rows with it is quicker then.

    BLAS is up to twice as fast with the copies of many small matrices. But few rows, such as the
    one query of a new token, take less time than a copy of all keys.
    """
    view = x.swapaxes(-1, -2)
    if x.size < FEW or rows < ROWS or x.shape[-1] > NARROW:
        return view
    return np.ascontiguousarray(view)


def matmul_heads(x: Array, y: Array) -> Array:
    """x @ y (..., h, T, d), which lies in memory as (..., T, h, d), if it is large.

    merge_heads of it is then a view.
    """
    if x.ndim == 2 or x.size < MANY:
        return np.asarray(x @ y)
    out = empty_heads((*x.shape[:-1], y.shape[-1]), x.dtype)
    return np.matmul(x, y, out=out)


def empty_heads(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """(..., h, T, d), which lies in memory as (..., T, h, d)."""
    *batch, h, T, d = shape
    return np.empty((*batch, T, h, d), dtype).swapaxes(-3, -2)


def parts(length: int, most: int) -> list[slice]:
    """Slices of `length` things, of at most `most` each, or of one; as equal as can be."""
    count = -(-length // max(1, most))
    bounds = [n * length // count for n in range(count + 1)]
    return [slice(start, stop) for start, stop in pairwise(bounds)]
