"""LayerNorm: y = gamma * (x - mean) / sqrt(var + eps) + beta."""

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
    flag,
    float_dtype,
    non_negative,
    positive_int,
)
from npdecoder.sums import centred, mean_product, over


class LayerNormContext(NamedTuple):
    x_hat: Array  # (..., d_model)
    rstd: Array  # (..., 1)


class LayerNorm(Layer):
    """y = gamma * x_hat + beta, x_hat = (x - mean) / sqrt(var + eps), over the last axis of x.

    The variance divides by d_model (ddof 0), and eps stands inside the root. gamma (d_model,)
    starts as ones, beta (d_model,) as zeros; bias=False leaves beta out.

    Source: Ba, Kiros and Hinton 2016, eq. 4. Limits: a row whose squares overflow the dtype
    (float32 beyond about 1e19) has variance inf, and comes out as beta; with eps = 0 a row of equal
    numbers is NaN, with NumPy's RuntimeWarning.
    """

    def __init__(
        self, d_model: int, eps: float = 1e-5, bias: bool = True, *, dtype: DTypeLike = np.float32
    ) -> None:
        dtype = float_dtype("dtype", dtype)
        self.eps = non_negative("eps", eps)
        self.gamma = Parameter(np.ones(positive_int("d_model", d_model), dtype))
        self.beta = Parameter(np.zeros(d_model, dtype)) if flag("bias", bias) else None

    def forward(self, x: ArrayLike) -> tuple[Array, LayerNormContext]:
        """x (..., d_model) of any rank -> y (..., d_model)."""
        gamma = self.gamma.value
        x = as_input("x", x, len(gamma), gamma.dtype)

        # 1. centre. Twice: where x is large beside its spread, the first mean is itself rounded.
        nearly = centred(x)
        xc = centred(nearly, over(nearly))
        # 2. the reciprocal of the standard deviation
        var = mean_product(xc, xc)
        rstd = 1.0 / np.sqrt(var + self.eps)
        # 3. normalise
        x_hat = np.multiply(xc, rstd, out=over(xc))
        # 4. scale and shift
        y = gamma * x_hat
        if self.beta is not None:
            y += self.beta.value
        return y, LayerNormContext(x_hat, rstd)

    def backward(self, ctx: LayerNormContext, dy: ArrayLike) -> Array:
        """dy (..., d_model) -> dx (..., d_model); adds to gamma.grad and beta.grad.

        Derivation, for one row of n = d_model numbers, mean over the row:
            4. y = gamma x_hat + beta:   dbeta = dy,  dgamma = dy x_hat (both summed over all rows),
                                         dx_hat = dy gamma
            3. x_hat = xc rstd:          dxc = dx_hat rstd, and drstd = sum(dx_hat xc)
            2. rstd = (mean(xc^2) + eps)^(-1/2):  ∂rstd/∂xc_i = -rstd^3 xc_i / n, which adds
                                         -rstd^3 xc_i drstd / n = -rstd x_hat_i mean(dx_hat x_hat)
                                         to dxc_i
            1. xc = x - mean(x):         dx = dxc - mean(dxc)
        gamma is inside both means: they are over dx_hat, not dy.
        In NumPy:
            dx_hat = dy * gamma
            dxc = rstd * (dx_hat - x_hat * (dx_hat * x_hat).mean(axis=-1, keepdims=True))
            dx = dxc - dxc.mean(axis=-1, keepdims=True)
            dgamma = (dy * x_hat).reshape(-1, len(gamma)).sum(axis=0)
            dbeta = dy.reshape(-1, len(gamma)).sum(axis=0)
        """
        x_hat, rstd = ctx
        gamma = self.gamma.value
        dy = as_gradient("dy", dy, x_hat.shape, gamma.dtype)
        rows = (-1, len(gamma))

        # 4. y = gamma * x_hat + beta
        if self.beta is not None:
            self.beta.add_sum(dy.reshape(rows))
        self.gamma.add_sum((dy * x_hat).reshape(rows))
        dx_hat = dy * gamma
        # 3. x_hat = xc * rstd, and 2. rstd = 1 / sqrt(mean(xc * xc) + eps): in one array
        dxc = x_hat * mean_product(dx_hat, x_hat)
        np.subtract(dx_hat, dxc, out=dxc)
        dxc *= rstd
        # 1. xc = x - mean(x)
        dx = centred(dxc, over(dxc))
        return dx
