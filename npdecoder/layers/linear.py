"""Linear: y = x @ W + b."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from npdecoder.core import (
    Array,
    Layer,
    Parameter,
    as_gradient,
    as_input,
    construction_rng,
    flag,
    positive_int,
    uniform_xavier,
)
from npdecoder.sums import matmul_rows


class LinearContext(NamedTuple):
    x: Array  # (..., d_in)


class Linear(Layer):
    """y = x @ W + b, over the last axis of x.

    W (d_in, d_out) starts as U(-a, a) with a = sqrt(6 / (d_in + d_out)), b (d_out,) as zeros.

    rng: a Generator or an int that W is drawn from; dtype: of W and b, and of all that is computed.
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        bias: bool = True,
        *,
        rng: np.random.Generator | int | None = None,
        dtype: DTypeLike = np.float32,
    ) -> None:
        d_in, d_out = positive_int("d_in", d_in), positive_int("d_out", d_out)
        self.W = Parameter(uniform_xavier(construction_rng(rng), d_in, d_out, dtype))
        self.b = Parameter(np.zeros(d_out, dtype)) if flag("bias", bias) else None

    def forward(self, x: ArrayLike) -> tuple[Array, LinearContext]:
        """x (..., d_in) -> y (..., d_out).

        Errors: ValueError if the last axis of x is not d_in.
        """
        W = self.W.value
        x = as_input("x", x, len(W), W.dtype)

        # 1. xW = x @ W
        y = matmul_rows(x, W)
        # 2. y = xW + b, in the same array
        if self.b is not None:
            y += self.b.value
        return y, LinearContext(x)

    def backward(self, ctx: LinearContext, dy: ArrayLike) -> Array:
        """dy (..., d_out) -> dx (..., d_in); adds to W.grad and b.grad.

        Derivation, with n over all rows of x:  y_nj = sum_i x_ni W_ij + b_j.
        Small changes δx, δW, δb change y by δy and the loss by
            δL = sum_nj dy_nj δy_nj = sum_nj dy_nj (sum_i (δx_ni W_ij + x_ni δW_ij) + δb_j)
        and the gradient of each number is what its change is multiplied by:
            of x_ni:  sum_j dy_nj W_ij,  which is  dy @ W.T
            of W_ij:  sum_n x_ni dy_nj,  which is  x.T @ dy
            of b_j:   sum_n dy_nj
        In NumPy:
            dx = dy @ W.T
            dW = x.reshape(-1, x.shape[-1]).T @ dy.reshape(-1, dy.shape[-1])
            db = dy.reshape(-1, dy.shape[-1]).sum(axis=0)
        """
        W = self.W.value
        d_in, d_out = W.shape
        x = ctx.x
        dy = as_gradient("dy", dy, (*x.shape[:-1], d_out), W.dtype)
        x_rows, dy_rows = x.reshape(-1, d_in), dy.reshape(-1, d_out)

        # 2. y = xW + b
        if self.b is not None:
            self.b.add_sum(dy_rows)
        # 1. xW = x @ W
        self.W.add_product(x_rows.T, dy_rows)
        dx = matmul_rows(dy, W.T)
        return dx
