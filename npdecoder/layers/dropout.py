"""Dropout: each entry is zero with probability p, and divided by 1 - p where it is kept."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from npdecoder.core import Array, Layer, as_array, as_gradient, dropout_rng, fraction


class DropoutContext(NamedTuple):
    keep: NDArray[np.bool_] | None  # (...), None where nothing was dropped
    x_shape: tuple[int, ...]
    x_dtype: np.dtype[Any]


class Dropout(Layer):
    """y = x / (1 - p) where kept, 0 where dropped, so that y is x on average.

    Dropout happens where forward is given rng, and only there; without it y = x. The mask is in
    ctx: one Dropout may be called many times before backward. p = 1 gives zeros.

    Source: Srivastava et al. 2014; scaled at training time ("inverted").
    """

    def __init__(self, p: float) -> None:
        self.p = fraction("p", p)

    def forward(
        self, x: ArrayLike, rng: np.random.Generator | None = None
    ) -> tuple[Array, DropoutContext]:
        """x (...) -> y (...). rng: the generator to draw from; None for inference.

        Errors: TypeError for an rng that is not a Generator.
        """
        x = as_array("x", x)
        rng = dropout_rng(rng)
        if rng is None or self.p == 0.0:
            return x, DropoutContext(None, x.shape, x.dtype)

        # 1. draw. float32 for every dtype of x: the same generator state gives the same mask
        keep = rng.random(x.shape, dtype=np.float32) >= self.p
        # 2. y = x / (1 - p) where kept
        y = _keep_scaled(keep, x, self.p)
        return y, DropoutContext(keep, x.shape, x.dtype)

    def backward(self, ctx: DropoutContext, dy: ArrayLike) -> Array:
        """dy (...) -> dx (...).

        Derivation: y_i = x_i keep_i / (1 - p), each entry by itself, keep a constant once drawn; so
        dx_i = dy_i keep_i / (1 - p).
        In NumPy:
            dx = dy * keep / (1 - p)
        """
        dy = as_gradient("dy", dy, ctx.x_shape, ctx.x_dtype)
        # 2. y = x / (1 - p) where kept
        return dy if ctx.keep is None else _keep_scaled(ctx.keep, dy, self.p)


def _keep_scaled(keep: NDArray[np.bool_], x: Array, p: float) -> Array:
    if p == 1.0:  # nothing is kept, and 0 * (x / 0) would be NaN
        return np.zeros_like(x)
    y: Array = x / x.dtype.type(1.0 - p)
    with np.errstate(invalid="ignore"):  # a dropped inf is NaN, as a dropped NaN is
        y *= keep
    return y
