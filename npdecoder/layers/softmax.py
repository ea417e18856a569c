"""Softmax, and the functions softmax and log_softmax, over any range of numbers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from npdecoder.core import Array, Layer, as_array, as_gradient, integer
from npdecoder.sums import over, sum_last, sum_product

MANY = 5000  # numbers of which the quick way pays
FAR = 1e25  # float32 reaches from 1e-38 to 3e38


def softmax(x: ArrayLike, axis: int = -1) -> Array:
    """y_i = exp(x_i) / sum_j exp(x_j) along axis; y has the shape and dtype of x.

    An entry -inf gets 0. A row of nothing but -inf, where nothing is visible, gets zeros all over;
    a row that holds NaN or +inf is NaN. Errors: TypeError for integers and float16.
    """
    x, axis = as_array("x", x), integer("axis", axis)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        e, Z = _e_and_Z(x, axis)
        y: Array = e / Z
    return y


def log_softmax(x: ArrayLike, axis: int = -1) -> Array:
    """log y_i = x_i - log sum_j exp(x_j) along axis, finite where softmax itself would round to 0.

    A row of nothing but -inf stays -inf; a row that holds NaN or +inf is NaN.
    """
    x, axis = as_array("x", x), integer("axis", axis)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        below = _below_max(x, axis)
        Z = np.maximum(np.exp(below).sum(axis=axis, keepdims=True), x.dtype.type(1))
        below -= np.log(Z)  # in place: of a large vocabulary one array less
    return below


def _e_and_Z(x: Array, axis: int) -> tuple[Array, Array]:
    """exp(x - max(x)), and its sum along axis, or 1 where nothing is visible: 0 / 1 for 0 / 0.

    Where anything is, the sum is at least 1, which is exp(0) of the largest.
    """
    # y is the same for x + c: with c = -max(x), exp cannot overflow
    e = np.exp(_below_max(x, axis))
    Z = np.maximum(e.sum(axis=axis, keepdims=True), x.dtype.type(1))
    return e, Z


def _quick_e_and_Z(x: Array) -> tuple[Array, Array]:
    """_e_and_Z along the last axis, with c = 0 in each row where that is safe.

    The maxima of many short rows take four times as long as exp, and most rows do without: where Z
    is far from all that the dtype cannot hold, exp(x) was as exact as exp(x - max(x)).
    """
    e = np.exp(x)
    Z = sum_last(e)
    safe = (Z > 1 / FAR) & (Z < FAR)  # NaN is not
    if not safe.all():
        unsafe = ~safe[..., 0]
        e[unsafe], Z[unsafe] = _e_and_Z(x[unsafe], -1)
    return e, Z


def _below_max(x: Array, axis: int) -> Array:
    """x - max(x) along axis; a row of nothing but -inf stays so (its max is taken as finite)."""
    lowest = np.finfo(x.dtype).min
    m = x.max(axis=axis, keepdims=True, initial=lowest)
    y: Array = x - m
    return y


class SoftmaxContext(NamedTuple):
    y: Array  # (..., n)


class Softmax(Layer):
    """y = softmax(x) along the last axis."""

    def forward(self, x: ArrayLike) -> tuple[Array, SoftmaxContext]:
        """x (..., n) -> y (..., n), each row of y a distribution."""
        x = as_array("x", x)
        if x.ndim == 0:
            raise ValueError("x has shape (), expected (..., n)")

        # 1. e_i = exp(x_i - max(x)), and 2. Z = sum_i e_i
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            e, Z = _e_and_Z(x, -1) if x.size < MANY else _quick_e_and_Z(x)
            # 3. y_i = e_i / Z
            y: Array = np.divide(e, Z, out=over(e))
        return y, SoftmaxContext(y)

    def backward(self, ctx: SoftmaxContext, dy: ArrayLike) -> Array:
        """dy (..., n) -> dx (..., n).

        Derivation, for one row. y_i = e_i / Z with ∂e_i/∂x_j = e_i 1[i = j] and ∂Z/∂x_j = e_j gives
            ∂y_i/∂x_j = e_i 1[i = j] / Z - e_i e_j / Z^2 = y_i (1[i = j] - y_j)
        (the max is a constant that cancels). Then
            dx_j = sum_i dy_i y_i (1[i = j] - y_j) = y_j (dy_j - sum_i dy_i y_i)
        Only entries of the same row meet, so nothing is divided by the number of rows. An entry
        y_j = 0 (masked) gets 0.
        In NumPy:
            dx = y * (dy - (dy * y).sum(axis=-1, keepdims=True))
        """
        y = ctx.y
        dy = as_gradient("dy", dy, y.shape, y.dtype)

        # 3. y = e / Z, 2. Z = sum(e) and 1. e = exp(x - max(x)), together
        dx: Array = dy - sum_product(dy, y)
        dx *= y
        return dx
