"""ReLU and GELU, entry by entry."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from npdecoder.core import Array, Layer, as_array, as_gradient, one_of
from npdecoder.sums import over


class ReLUContext(NamedTuple):
    y: Array  # (...), positive where x is


class ReLU(Layer):
    """y = max(x, 0)."""

    def forward(self, x: ArrayLike) -> tuple[Array, ReLUContext]:
        """x (...) -> y (...)."""
        x = as_array("x", x)
        # 1. y = max(x, 0), and a row of zeros takes half the time that the number 0 takes
        y = np.maximum(x, np.zeros(x.shape[-1:], x.dtype))
        return y, ReLUContext(y)

    def backward(self, ctx: ReLUContext, dy: ArrayLike) -> Array:
        """dy (...) -> dx (...).

        Derivation: y_i is x_i where x_i > 0, else the constant 0: ∂y_i/∂x_i is 1 or 0. At x_i = 0,
        where y has a kink and no derivative, 0 is taken, as is usual.
        In NumPy:
            dx = dy * (y > 0)
        """
        y = ctx.y
        dy = as_gradient("dy", dy, y.shape, y.dtype)
        # 1. y = max(x, 0)
        dx: Array = dy * (y > 0)
        return dx


class GELUContext(NamedTuple):
    Phi: Array  # (...), what x is multiplied by
    slope: Array  # (...), the derivative of y


class GELU(Layer):
    """y = x * Phi(x), Phi the distribution function of the standard normal.

    approximate="none": Phi(x) = (1 + erf(x / sqrt(2))) / 2, to the precision of float64.
    approximate="tanh": Phi(x) = (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2, which differs from
    the other by up to 4.7e-4 in y: weights trained with one form want that form.

    Source: Hendrycks and Gimpel 2016, section 2. Errors: ValueError for another word.
    """

    def __init__(self, approximate: str = "none") -> None:
        self.approximate = one_of("approximate", approximate, ("none", "tanh"))

    def forward(self, x: ArrayLike) -> tuple[Array, GELUContext]:
        """x (...) -> y (...)."""
        x = as_array("x", x)
        # 1. Phi(x)
        Phi, dPhi = _normal_cdf(x) if self.approximate == "none" else _tanh_cdf(x)
        # 2. y = x * Phi
        y = np.asarray(x * Phi, x.dtype)  # before NumPy 2 a single float32 number becomes float64
        # 3. for backward, while all of it is in the cache: the derivative of y
        slope = np.multiply(x, dPhi, out=over(np.asarray(dPhi, x.dtype)))
        slope += Phi
        return y, GELUContext(Phi, slope)

    def backward(self, ctx: GELUContext, dy: ArrayLike) -> Array:
        """dy (...) -> dx (...).

        Derivation: y_i = x_i Phi(x_i), a product, so ∂y_i/∂x_i = Phi(x_i) + x_i Phi'(x_i), which
        is the slope that forward kept (dPhi is Phi'), with
            erf form:   Phi'(x) = exp(-x^2 / 2) / sqrt(2 pi), the density of the normal
            tanh form:  with u = sqrt(2/pi) (x + 0.044715 x^3),
                        Phi'(x) = (1 - tanh(u)^2) / 2 * sqrt(2/pi) (1 + 3 * 0.044715 x^2)
        In NumPy:
            dx = dy * slope
        """
        slope = ctx.slope
        dy = as_gradient("dy", dy, slope.shape, slope.dtype)
        # 2. y = x * Phi, and 1. Phi(x): the slope of 3.
        dx = np.asarray(dy * slope, slope.dtype)
        return dx


def erf(x: ArrayLike) -> Array:
    """The error function, 2/sqrt(pi) times the integral of exp(-t^2) from 0 to x; within 1e-14."""
    x = as_array("x", x)
    erfc, _ = _erfc(np.abs(x))
    y: Array = np.copysign(1.0 - erfc, x)
    return y


def _normal_cdf(x: Array) -> tuple[Array, Array]:
    """Phi(x) = erfc(-x / sqrt(2)) / 2 and Phi'(x) = exp(-x^2 / 2) / sqrt(2 pi)."""
    if x.dtype == np.float32:
        return _normal_cdf_float32(x)
    erfc, exp = _erfc(np.abs(x) * math.sqrt(0.5))
    erfc *= 0.5
    exp *= 1.0 / math.sqrt(2.0 * math.pi)
    return np.where(x > 0, 1.0 - erfc, erfc), exp


def _normal_cdf_float32(x: Array) -> tuple[Array, Array]:
    """The same within 2e-7, in a third of the time: Phi(x) = (1 + tanh(x p(x^2))) / 2.

    p is a polynomial through atanh(2 Phi(x) - 1) / x, fitted so that the largest error of
    max(|x|, 0.3) Phi(x) is least: 7e-8 before rounding.
    """
    with np.errstate(over="ignore", under="ignore"):
        z = np.asarray(np.square(x))
        u = np.asarray(z * np.float32(TANH_FLOAT32[0]))
        for c in TANH_FLOAT32[1:-1]:
            u += c
            u *= z
        u += TANH_FLOAT32[-1]
        u *= x  # far out p grows, to infinity at last, and tanh is 1 or -1
        Phi = np.tanh(u, out=u)
        Phi *= 0.5
        Phi += 0.5
        z *= -0.5
        dPhi = np.exp(z, out=z)
        dPhi *= 1.0 / math.sqrt(2.0 * math.pi)
    return Phi, dPhi


def _erfc(z: Array) -> tuple[Array, Array]:
    """erfc(z) = 1 - erf(z) and exp(-z^2), for z >= 0.

    erfc(z) exp(z^2) (1 + 2z) runs smoothly from 1 at 0 to 2/sqrt(pi) at infinity. As a function of
    t = (z - 3) / (z + 3), in [-1, 1], a polynomial of degree 27 holds it to 5e-16, and one of
    degree 11 to 1e-7. The form is that of Shepherd and Laframboise 1981.
    """
    z = np.minimum(z, 30.0)  # where both are 0: keeps z * z and t finite
    with np.errstate(under="ignore"):
        exp = np.exp(-z * z)
        t = (z - 3.0) / (z + 3.0)
        polynomial = np.zeros_like(z)
        for c in ERFC_FLOAT32 if z.dtype == np.float32 else ERFC_FLOAT64:
            polynomial *= t
            polynomial += c
        erfc: Array = polynomial * exp / (1.0 + 2.0 * z)
    return erfc, exp


def _tanh_cdf(x: Array) -> tuple[Array, Array]:
    """(1 + tanh(u)) / 2 with u = sqrt(2/pi) (x + 0.044715 x^3), and its derivative."""
    a, c = math.sqrt(2.0 / math.pi), 0.044715
    x = np.clip(x, -30.0, 30.0)  # where tanh is 1 to the last bit: keeps x^3 finite
    tanh = np.tanh(a * (x + c * x * x * x))
    dtanh = (1.0 - tanh * tanh) * a * (1.0 + 3.0 * c * x * x)
    return 0.5 * (1.0 + tanh), 0.5 * dtanh


# Highest power of t first: interpolated in 160 Chebyshev points with 60 digits, and cut off.
ERFC_FLOAT64 = (
    -3.7224513270043751e-11, -1.8819366309448579e-10, 2.1675048969615204e-10,
    2.0626322959832455e-09, 4.4817555029519333e-10, -1.1734464137789657e-08,
    -1.2581767405545219e-08, 4.6950946691614734e-08, 1.0126845607238986e-07,
    -1.4683175494120584e-07, -6.1638690555121026e-07, 3.6039109257127709e-07,
    3.472390115145775e-06, -7.3314325974359702e-07, -2.0100605325083817e-05,
    4.9499886622643469e-06, 0.00012509937456456623, -0.00010515990108729849,
    -0.00077983227812623032, 0.0018886903716907627, 0.0025293918169509407,
    -0.023770514919506852, 0.068308027343910574, -0.11927366341528023, 0.12964515870276291,
    -0.047562294353451093, -0.1356211061245812, 1.2530080582697296,
)
ERFC_FLOAT32 = (
    7.73102422e-05, -9.25451669e-05, -0.000726453679, 0.00187507912, 0.00249911687,
    -0.0237635764, 0.0683165678, -0.119275275, 0.129644114, -0.0475621569, -0.135621069,
    1.25300806,
)
TANH_FLOAT32 = (
    1.80561697e-09, -1.33446434e-07, 3.96910986e-06, -5.52401614e-05, -3.31299842e-05,
    0.0363342835, 0.797884216,
)
