# ---
# jupyter:
#   jupytext:
#     notebook_metadata_filter: -jupytext.text_representation
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Lesson 4. LayerNorm
#
# **You need to know:** lesson 1 (`01_chain_rule.py`), its third exercise above all.
#
# **You will be able to:** go back through LayerNorm step by step, collect the steps into three
# terms, and say what each term takes away.
#
# **Time:** about 60 minutes with the exercises on paper.
#
# The layer of this lesson is `npdecoder/layers/layer_norm.py`.

# %%
from functools import partial

import numpy as np

from npdecoder import Layer, LayerNorm, Parameter, gradcheck

assert_allclose = partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-12)


# %% [markdown]
# ## Forward, in five steps
#
# Every row x of n numbers is treated by itself; "mean" is the mean over the row.
#
#     1.  xc    = x - mean(x)                  centred
#     2.  var   = mean(xc²)                    divided by n, not by n - 1
#     3.  rstd  = 1 / sqrt(var + eps)          the reciprocal of the standard deviation
#     4.  x_hat = xc rstd                      mean 0, variance 1 (but for eps)
#     5.  y     = gamma x_hat + beta           gamma and beta: one number a column, learned
#
# eps is small, and keeps step 3 from dividing by 0 on a row of equal numbers. It stands inside the
# root. (In the file, steps 2 and 3 are one.) A row for paper, with eps = 0: mean 8, variance
# (49 + 1 + 1 + 49) / 4 = 25.

# %%
def forward(x, gamma, beta, eps):
    xc = x - x.mean(axis=-1, keepdims=True)
    var = (xc * xc).mean(axis=-1, keepdims=True)
    rstd = 1 / np.sqrt(var + eps)
    x_hat = xc * rstd
    y = gamma * x_hat + beta
    return y, (xc, rstd, x_hat)


x = np.array([[1.0, 7.0, 9.0, 15.0]])
gamma, beta = np.array([1.0, 2.0, 1.0, 2.0]), np.array([0.0, 0.0, 10.0, 0.0])
y, (xc, rstd, x_hat) = forward(x, gamma, beta, eps=0.0)
print("xc", xc, "rstd", rstd, "x_hat", x_hat, "y", y)
assert_allclose(xc, [[-7, -1, 1, 7]])
assert_allclose(rstd, [[1 / 5]])
assert_allclose(x_hat, [[-7 / 5, -1 / 5, 1 / 5, 7 / 5]])
assert_allclose(y, [[-7 / 5, -2 / 5, 10 + 1 / 5, 14 / 5]])


# %% [markdown]
# ## Backward, the same steps from 5 to 1
#
# Where a value was used several times, its gradient is a sum (lesson 1).
#
#     5.  y = gamma x_hat + beta        dgamma = sum over rows of dy x_hat
#                                       dbeta  = sum over rows of dy
#                                       dx_hat = dy gamma
#     4.  x_hat = xc rstd               dxc   = dx_hat rstd                 xc is used here ...
#                                       drstd = sum over the row of dx_hat xc
#     3.  rstd = (var + eps)^(-1/2)     dvar  = -1/2 rstd³ drstd
#     2.  var = sum(xc²) / n            dxc   gets dvar 2 xc / n added       ... and here
#     1.  xc = x - mean(x)              dx    = dxc - mean(dxc)
#
# In step 4 the one number rstd multiplies the whole row, so drstd is a sum over the row. Step 1 was
# the exercise of lesson 1.

# %%
def backward(ctx, gamma, dy):
    xc, rstd, x_hat = ctx
    n = xc.shape[-1]
    dgamma = (dy * x_hat).sum(axis=0)
    dbeta = dy.sum(axis=0)
    dx_hat = dy * gamma
    dxc = dx_hat * rstd
    drstd = (dx_hat * xc).sum(axis=-1, keepdims=True)
    dvar = -1 / 2 * rstd**3 * drstd
    dxc = dxc + dvar * 2 * xc / n
    dx = dxc - dxc.mean(axis=-1, keepdims=True)
    return dx, dgamma, dbeta


dy = np.array([[0.0, 0.0, 0.0, 5.0]])
dx, dgamma, dbeta = backward((xc, rstd, x_hat), gamma, dy)
print("dx", dx, "dgamma", dgamma, "dbeta", dbeta)
assert_allclose(dx, [[0.48, -0.36, -0.64, 0.52]])
assert_allclose(dgamma, [0, 0, 0, 7])
assert_allclose(dbeta, [0, 0, 0, 5])


# %% [markdown]
# ## Three terms
#
# Put steps 4, 3 and 2 together. With drstd = sum(dx_hat xc) and xc rstd = x_hat:
#
#     dvar 2 xc / n = -rstd³ xc sum(dx_hat xc) / n = -rstd x_hat mean(dx_hat x_hat)
#     dxc           = rstd (dx_hat - x_hat mean(dx_hat x_hat))
#
# and step 1 takes the mean of that away. x_hat has mean 0, so mean(dxc) = rstd mean(dx_hat), and
#
#     dx = rstd (dx_hat - mean(dx_hat) - x_hat mean(dx_hat x_hat))
#
# - **dx_hat**, the gradient as it comes,
# - less its **mean**: adding one number to all of x changes nothing in y, so dx must not ask for
#   it, and every row of dx sums to 0,
# - less its share **along x_hat**: stretching the row about its mean changes nothing either, so
#   with eps = 0 dx has no part along x_hat (eps weakens that: a very small row does come out
#   larger when it is stretched),
#
# and all of it times rstd: where the row is spread wide, a step of the same size moves y less.

# %%
def three_terms(x_hat, rstd, dx_hat):
    m1 = dx_hat.mean(axis=-1, keepdims=True)
    m2 = (dx_hat * x_hat).mean(axis=-1, keepdims=True)
    return rstd * (dx_hat - m1 - x_hat * m2)


assert_allclose(three_terms(x_hat, rstd, dy * gamma), dx)
assert_allclose(x_hat.mean(axis=-1), 0.0)
assert_allclose(dx.sum(axis=-1), 0.0)
assert_allclose((dx * x_hat).sum(axis=-1), 0.0)  # since eps is 0 here

assert_allclose(forward(x + 3.0, gamma, beta, eps=0.0)[0], y)
assert_allclose(forward(8 + 10 * (x - 8), gamma, beta, eps=0.0)[0], y)


# %% [markdown]
# ## As a layer, and checked
#
# The check has several rows and, above all, gammas that are not 1. A layer fresh from its
# constructor has gamma = 1 and beta = 0, and there a common mistake cannot be seen.

# %%
class MyLayerNorm(Layer):
    def __init__(self, gamma, beta, eps=1e-5):
        self.gamma, self.beta, self.eps = Parameter(gamma), Parameter(beta), eps

    def forward(self, x):
        y, (_, rstd, x_hat) = forward(x, self.gamma.value, self.beta.value, self.eps)
        return y, (x_hat, rstd)

    def backward(self, ctx, dy):
        x_hat, rstd = ctx
        self.gamma.grad += (dy * x_hat).sum(axis=0)
        self.beta.grad += dy.sum(axis=0)
        return three_terms(x_hat, rstd, dy * self.gamma.value)


rng = np.random.default_rng(0)
x, dy, gamma, beta = (rng.standard_normal(shape) for shape in [(3, 5), (3, 5), 5, 5])
mine, layer = MyLayerNorm(gamma, beta), LayerNorm(5, dtype=np.float64)
layer.gamma.value, layer.beta.value = gamma, beta
report = gradcheck(mine, x)
print(report)
assert report.ok

y, ctx = layer.forward(x)
dx = layer.backward(ctx, dy)
my_y, my_ctx = mine.forward(x)
assert_allclose(my_y, y)
assert_allclose(my_ctx[0], ctx.x_hat)
assert_allclose(my_ctx[1], ctx.rstd)
assert_allclose(mine.backward(my_ctx, dy), dx)
assert_allclose(mine.gamma.grad, layer.gamma.grad)
assert_allclose(mine.beta.grad, layer.beta.grad)

# the long way, step by step, gives the same
for long, short in zip(
    backward(forward(x, gamma, beta, 1e-5)[1], gamma, dy), (dx, layer.gamma.grad, layer.beta.grad)
):
    assert_allclose(long, short)


# %% [markdown]
# ## The mistake that gamma = 1 hides
#
# Both means are of dx_hat = dy gamma. A formula that takes them of dy and multiplies by gamma
# afterwards looks alike, and is exact while gamma is 1, or any other number that is the same in all
# columns (`python examples/pitfalls.py 15`).

# %%
class GammaOutside(MyLayerNorm):
    def backward(self, ctx, dy):
        super().backward(ctx, dy)
        return self.gamma.value * three_terms(*ctx, dy)


assert gradcheck(GammaOutside(np.ones(5), beta), x).ok  # hidden
wrong = gradcheck(GammaOutside(gamma, beta), x)  # seen
print(wrong)
assert not wrong.ok

# a row of equal numbers: x_hat is 0, and thanks to eps inside the root dx is finite
y, ctx = layer.forward(np.full((1, 5), 1234.0))
assert_allclose(y, beta[None])
dx_hat = dy[:1] * gamma
assert_allclose(layer.backward(ctx, dy[:1]), (dx_hat - dx_hat.mean()) / np.sqrt(1e-5))

# %% [markdown]
# ## To do on paper
#
# 1. The row [1, 7, 9, 15] again, eps = 0, gamma = 1, beta = 0, dy = [0, 0, 5, 5]. Find
#    mean(dx_hat), mean(dx_hat x_hat) and dx.
# 2. A row of two numbers a < b, eps = 0. What is x_hat? What is dx, for any dy? Why?
# 3. Two rows with x_hat = [1, -1] and [-1, 1], and dy = [2, 3] and [5, 7]. Find dgamma and dbeta.

# %%
x, dy = np.array([[1.0, 7.0, 9.0, 15.0]]), np.array([[0.0, 0.0, 5.0, 5.0]])
layer = LayerNorm(4, eps=0.0, dtype=np.float64)
_, ctx = layer.forward(x)
dx = layer.backward(ctx, dy)
m1, m2 = dy.mean(), (dy * ctx.x_hat).mean()
print(f"1. mean(dx_hat) = {m1:.2f}, mean(dx_hat x_hat) = {m2:.2f}, dx =", dx)
assert_allclose([m1, m2], [2.5, 2.0])
assert_allclose(dx, [[0.06, -0.42, 0.42, -0.06]])

layer = LayerNorm(2, eps=0.0, dtype=np.float64)
_, ctx = layer.forward([[3.0, 11.0]])
print("2. x_hat =", ctx.x_hat, "whatever a and b are, so dx =", layer.backward(ctx, [[2.0, -7.0]]))
assert_allclose(ctx.x_hat, [[-1, 1]])
assert_allclose(layer.backward(ctx, [[2.0, -7.0]]), 0.0)

layer.zero_grad()
layer.backward(layer.forward([[9.0, 1.0], [0.0, 4.0]])[1], [[2.0, 3.0], [5.0, 7.0]])
print("3. dgamma =", layer.gamma.grad, " dbeta =", layer.beta.grad)
assert_allclose(layer.gamma.grad, [-3, 4])
assert_allclose(layer.beta.grad, [7, 10])
