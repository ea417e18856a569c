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
# # Lesson 1. The chain rule on row vectors
#
# **You need to know:** products of matrices, the derivative of a function of one number, and a
# little NumPy.
#
# **You will be able to:** say what `dx` means, find the gradients of `y = x W + b` without looking
# them up, add gradients up where a value is used twice, and check all of it with differences.
#
# **Time:** about 60 minutes with the exercises on paper.
#
# The layer of this lesson is `npdecoder/layers/linear.py`. In all lessons a token is a **row** of
# numbers, and a layer's weights multiply it from the right: `y = x W + b`.

# %%
from functools import partial

import numpy as np

from npdecoder import Layer, Linear, Parameter, gradcheck

# Two results agree if only rounding lies between them.
assert_allclose = partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-12)


# %% [markdown]
# ## What dx means
#
# A network ends in one number, the loss L. `dx` is short for dL/dx: an array of the shape of x that
# says of each entry how fast the loss grows when that entry grows.
#
#     dx[n, i] = ∂L/∂x[n, i]
#
# If all entries change at once, each by a little δx[n, i], the changes of the loss add up:
#
#     δL = sum over n, i of dx[n, i] δx[n, i]                                        (1)
#
# Line (1) is also how gradients are found in these lessons: write down what δx does to L, and dx is
# **what δx is multiplied by**. That is the chain rule, and it needs no table of derivatives.
#
# Here is (1) for L = sum of x². From (x + δx)² = x² + 2 x δx + δx², with δx² too small to count, dx
# must be 2 x. The function `slopes` measures the same by moving one entry at a time, a little up
# and a little down; `npdecoder.gradcheck` does just that, with more care.

# %%
def slopes(loss, x, h=1e-5):
    """dx by central differences."""
    dx = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        step = np.zeros_like(x)
        step[index] = h
        dx[index] = (loss(x + step) - loss(x - step)) / (2 * h)
    return dx


def sum_of_squares(x):
    return (x * x).sum()


x = np.array([[1.0, 2.0], [3.0, -1.0]])
dx = 2 * x
assert_allclose(slopes(sum_of_squares, x), dx, rtol=1e-8)

change = 1e-6 * np.array([[3.0, -1.0], [2.0, 5.0]])
assert_allclose(sum_of_squares(x + change) - sum_of_squares(x), (dx * change).sum(), rtol=1e-5)

# %% [markdown]
# ## The loss of a check
#
# A layer in the middle of a network does not know the loss. All it is told on the way back is dy,
# the gradient of its own output y; all it must find is dx. So to study one layer, take the simplest
# loss there is, with any fixed numbers as dy:
#
#     L = sum over all entries of y dy
#
# Its gradient with respect to y is dy, which is why it is the loss of every check here.

# %%
y = np.array([[0.0, 6.0, 3.0], [5.0, -3.0, 4.0]])
dy = np.array([[1.0, -1.0, 0.0], [2.0, 0.0, 1.0]])


def check_loss(y):
    return (y * dy).sum()


assert_allclose(slopes(check_loss, y), dy, atol=1e-8)

# %% [markdown]
# ## y = x W + b
#
# In single numbers, for row n: y_nj = sum_i x_ni W_ij + b_j. Change x, W and b a little, leave out
# products of two little things, and put what y does into (1):
#
#     δy_nj = sum_i (δx_ni W_ij + x_ni δW_ij) + δb_j
#     δL    = sum_nj dy_nj δy_nj
#           = sum_ni (sum_j dy_nj W_ij) δx_ni          so dx_ni = sum_j dy_nj W_ij
#           + sum_ij (sum_n x_ni dy_nj) δW_ij          so dW_ij = sum_n x_ni dy_nj
#           + sum_j  (sum_n dy_nj) δb_j                so db_j  = sum_n dy_nj
#
# As matrices:
#
#     dx = dy W^T        dW = x^T dy        db = the sum of the rows of dy
#
# Why x^T and not x? The sum of dW_ij runs over n, and n counts the **rows** of x; a product of
# matrices sums over the columns of its left factor, so x has to lie on its side. Shapes remind you:
# dW has the shape of W, (d_in, d_out), and of x (N, d_in) and dy (N, d_out) only x^T dy has it.

# %%
W = np.array([[1.0, 0.0, 2.0], [-1.0, 3.0, 1.0]])
b = np.array([1.0, 0.0, -1.0])
assert_allclose(x @ W + b, y)  # the y above

dx = dy @ W.T
dW = x.T @ dy
db = dy.sum(axis=0)
print("dx", dx, "dW", dW, "db", db, sep="\n")

# by hand: dx_11 = 1*1 + -1*0 + 0*2, dW_11 = 1*1 + 3*2, and so on
assert_allclose(dx, [[1, -4], [4, -1]])
assert_allclose(dW, [[7, -1, 3], [0, -2, -1]])
assert_allclose(db, [3, -1, 1])

# the sum over n once more: every row n adds (column x_n) times (row dy_n) to dW
assert_allclose(dW, sum(np.outer(x[n], dy[n]) for n in range(2)))


# %% [markdown]
# ## As a layer, and checked
#
# In npdecoder a layer is two methods. forward returns y and whatever backward will need; backward
# gets that and dy, **adds** to the gradient of each parameter, and returns dx. `gradcheck` takes
# such a layer, invents a dy, and compares every gradient with differences.

# %%
class MyLinear(Layer):
    def __init__(self, W, b):
        self.W, self.b = Parameter(W), Parameter(b)

    def forward(self, x):
        return x @ self.W.value + self.b.value, x

    def backward(self, x, dy):
        self.W.grad += x.T @ dy
        self.b.grad += dy.sum(axis=0)
        return dy @ self.W.value.T


report = gradcheck(MyLinear(W, b), x)
print(report)
assert report.ok

layer = Linear(2, 3, dtype=np.float64)
layer.W.value, layer.b.value = W, b
assert_allclose(layer(x), y)
_, ctx = layer.forward(x)
assert_allclose(layer.backward(ctx, dy), dx)
assert_allclose(layer.W.grad, dW)
assert_allclose(layer.b.grad, db)

# %% [markdown]
# ## One layer after the other
#
# For y = f(x) and z = g(y) the way back is g's backward and then f's: dz becomes dy, and dy becomes
# dx. No derivative of the whole is ever needed. With two matrices the whole is known, z = x (W V),
# and both ways must give the same dx = dz V^T W^T.

# %%
V = np.array([[2.0, 0.0], [1.0, -1.0], [0.0, 4.0]])
dz = np.array([[1.0, 2.0], [0.0, -1.0]])
by_steps = (dz @ V.T) @ W.T
assert_allclose(by_steps, dz @ (W @ V).T)


# %% [markdown]
# ## Used twice: gradients add up
#
# Let x go two ways, z = x A + x B. A change δx acts on both, so it stands twice in δL, and dx is
# the sum of what comes back on both ways:
#
#     dx = dz A^T + dz B^T
#
# This is the rule behind most of the wiring of a Transformer: residual paths (lesson 5),
# self-attention (lesson 6), tied embeddings (lesson 10). You have met it twice already. b is used
# in every row, so db is a sum over rows, and W too: that is the sum over n in x^T dy. It is also
# why backward **adds** to `.grad`: a weight may be used again elsewhere.
#
# The layer below forgets one of the two ways. Every shape is right; the report is not.

# %%
class TwoWays(Layer):
    def __init__(self):
        self.A = Parameter(np.array([[2.0, 1.0], [0.0, 1.0]]))
        self.B = Parameter(np.array([[1.0, 0.0], [-3.0, 1.0]]))

    def forward(self, x):
        return x @ self.A.value + x @ self.B.value, x

    def backward(self, x, dz):
        self.A.grad += x.T @ dz
        self.B.grad += x.T @ dz
        return dz @ self.A.value.T + dz @ self.B.value.T


class OneWayForgotten(TwoWays):
    def backward(self, x, dz):
        super().backward(x, dz)
        return dz @ self.A.value.T


assert gradcheck(TwoWays(), x).ok
wrong = gradcheck(OneWayForgotten(), x)
print(wrong)
assert not wrong.ok

# one layer, called twice before backward: its W.grad is the sum of both calls
layer.zero_grad()
_, first = layer.forward(x)
_, second = layer.forward(10 * x)
layer.backward(first, dy)
layer.backward(second, dy)
assert_allclose(layer.W.grad, x.T @ dy + (10 * x).T @ dy)

# %% [markdown]
# ## To do on paper
#
# 1. x = [1, 2], W = [[3, 1], [0, 2]], no b, dy = [1, -1]. Find y, dx and dW.
# 2. The same x, W and dy, but the output is y = x + x W: x also goes past the layer. Find dx.
# 3. c = x - mean(x) for one row x of n numbers. Every entry of x goes two ways: straight into its
#    own c, and through the mean into all of them. Find dx for dc = [1, 0, 0, 3]. (You will need
#    this in lesson 4.)
#
# The last cell has the answers.

# %%
x, W, dy = np.array([[1.0, 2.0]]), np.array([[3.0, 1.0], [0.0, 2.0]]), np.array([[1.0, -1.0]])
y, dx, dW = x @ W, dy @ W.T, x.T @ dy
print("1. y", y, "dx", dx, "dW", dW.tolist())
assert_allclose(y, [[3, 5]])
assert_allclose(dx, [[2, -2]])
assert_allclose(dW, [[1, -1], [2, -2]])

dx = dy + dx
print("2. dx", dx)
assert_allclose(dx, [[3, -3]])

dc = np.array([1.0, 0.0, 0.0, 3.0])
dx = dc - dc.mean()
print("3. dx = dc - mean(dc) =", dx)
assert_allclose(dx, [0, -1, -1, 2])
row = np.array([1.0, 2.0, 3.0, 6.0])
assert_allclose(slopes(lambda x: ((x - x.mean()) * dc).sum(), row), dx, atol=1e-8)
