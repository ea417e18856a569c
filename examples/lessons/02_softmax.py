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
# # Lesson 2. Softmax and its Jacobian
#
# **You need to know:** lesson 1 (`01_chain_rule.py`), the quotient rule, and that exp is its own
# derivative.
#
# **You will be able to:** write the Jacobian of softmax down, turn it into one line that never
# builds it, and say what that line does to a row of numbers.
#
# **Time:** about 45 minutes with the exercises on paper.
#
# The layer of this lesson is `npdecoder/layers/softmax.py`.

# %%
from functools import partial

import numpy as np

from npdecoder import Layer, Softmax, gradcheck, log_softmax, softmax

assert_allclose = partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-12)

# %% [markdown]
# ## Forward
#
# Softmax turns a row x of any numbers into a row y of positive numbers that sum to 1:
#
#     1.  e_i = exp(x_i)
#     2.  Z   = sum_i e_i
#     3.  y_i = e_i / Z
#
# For numbers that fit on paper let every x be the logarithm of an integer: then e_i is the integer.

# %%
x = np.log([1.0, 2.0, 5.0])
e = np.exp(x)
Z = e.sum()
y = e / Z
print("y =", y * 8, "/ 8")
assert_allclose(y, [1 / 8, 2 / 8, 5 / 8])
assert_allclose(softmax(x), y)

# %% [markdown]
# Adding one number c to the whole row multiplies every e_i and Z by exp(c), and y stays as it was:
#
#     softmax(x + c) = softmax(x)
#
# Programs use it with c = -max(x): exp(1000) is too large for a float, exp(1000 - 1001) is not.

# %%
assert_allclose(softmax(x + 7.0), y)
assert_allclose(softmax(np.array([1000.0, 1001.0])), softmax(np.array([0.0, 1.0])))

# %% [markdown]
# ## The Jacobian
#
# Each y_i depends on every x_j, because Z does. How y_i moves with x_j, by the quotient rule, with
# ∂e_i/∂x_j = e_i if i = j, else 0, and ∂Z/∂x_j = e_j:
#
#     i = j:   ∂y_i/∂x_i = (e_i Z - e_i e_i) / Z^2  = y_i (1 - y_i)
#     i ≠ j:   ∂y_i/∂x_j = (0 - e_i e_j) / Z^2      = -y_i y_j
#
# Both are one formula, with 1[i = j] for "1 if i = j, else 0":
#
#     J_ij = ∂y_i/∂x_j = y_i (1[i = j] - y_j)           J = diag(y) - y^T y for a row y
#
# Compare with differences: column j of J is what y does when x_j moves.

# %%
J = np.diag(y) - np.outer(y, y)
print("64 J =", np.round(64 * J).astype(int), sep="\n")
assert_allclose(64 * J, [[7, -2, -5], [-2, 12, -10], [-5, -10, 15]])

h = 1e-5
for j in range(3):
    step = h * (np.arange(3) == j)
    assert_allclose((softmax(x + step) - softmax(x - step)) / (2 * h), J[:, j], rtol=1e-8)

# %% [markdown]
# Two facts about y are visible in J. The outputs always sum to 1, so every column of J sums to 0.
# And x + c gives the same y, so moving all x_j together does nothing: every row sums to 0 as well.
# J is symmetric, and it has no inverse: from y nobody can tell x from x + c.

# %%
assert_allclose(J.sum(axis=0), 0.0)
assert_allclose(J.sum(axis=1), 0.0)
assert_allclose(J, J.T)

# %% [markdown]
# ## Backward, without the Jacobian
#
# Put J into line (1) of lesson 1: δL = sum_i dy_i δy_i = sum_ij dy_i J_ij δx_j. What δx_j is
# multiplied by is
#
#     dx_j = sum_i dy_i J_ij
#          = sum_i dy_i y_i 1[i = j] - sum_i dy_i y_i y_j
#          = y_j (dy_j - sum_i dy_i y_i)
#
# The sum is the **mean of dy with weights y**. So softmax backward says: an entry whose dy is above
# the mean gets a positive dx, one below it a negative, and each in proportion to its own y. With n
# entries that takes some 4 n operations. J has n² entries: for a vocabulary of 50 000 words, 2 500
# million of them for each row.

# %%
dy = np.array([8.0, 0.0, 0.0])
mean = (dy * y).sum()
dx = y * (dy - mean)
print(f"mean of dy = {mean:.4f}, dx =", dx)
assert_allclose(mean, 1.0)
assert_allclose(dx, [7 / 8, -2 / 8, -5 / 8])
assert_allclose(dx, dy @ J)
assert_allclose(dx.sum(), 0.0)  # always: moving all of x together does nothing


# %% [markdown]
# ## As a layer
#
# A batch is many rows, and rows do not meet: the same line for each, with the sum along the last
# axis. backward needs y and nothing else, so y is the whole context.

# %%
class MySoftmax(Layer):
    def forward(self, x):
        e = np.exp(x - x.max(axis=-1, keepdims=True))
        y = e / e.sum(axis=-1, keepdims=True)
        return y, y

    def backward(self, y, dy):
        return y * (dy - (dy * y).sum(axis=-1, keepdims=True))


rng = np.random.default_rng(0)
x, dy = rng.standard_normal((3, 5)), rng.standard_normal((3, 5))
report = gradcheck(MySoftmax(), x)
print(report)
assert report.ok

mine, layer = MySoftmax(), Softmax()
y, ctx = layer.forward(x)
assert_allclose(mine(x), y)
assert_allclose(mine.backward(y, dy), layer.backward(ctx, dy))

# %% [markdown]
# A check with dy = ones would have passed for almost any formula: the mean of ones is 1, so dx = 0.
# That hides, for one, a division by the number of rows, a mistake that many have made
# (`python examples/pitfalls.py 17`). Hence random dy, and more than one row.

# %%
assert_allclose(layer.backward(ctx, np.ones((3, 5))), 0.0)


class DividedByRows(MySoftmax):
    def backward(self, y, dy):
        return super().backward(y, dy) / len(y)


assert_allclose(DividedByRows().backward(y, np.ones((3, 5))), 0.0)  # not seen
assert not gradcheck(DividedByRows(), x).ok  # seen

# %% [markdown]
# ## Minus infinity, and log-softmax
#
# An entry x_j = -inf has e_j = 0, so y_j = 0, and the formula gives dx_j = 0: it takes no part.
# That is how masks work (lesson 7). A row of nothing but -inf would be 0/0; npdecoder makes it
# zeros.
#
# The loss of lesson 3 needs log y. From log y_i = x_i - log Z and ∂ log Z/∂x_j = e_j / Z = y_j:
#
#     ∂ log y_i/∂x_j = 1[i = j] - y_j        dx_j = d_j - y_j sum_i d_i      (d: gradient of log y)

# %%
hidden = np.array([[0.0, -np.inf, 0.0], [-np.inf, -np.inf, -np.inf]])
y, ctx = layer.forward(hidden)
assert_allclose(y, [[0.5, 0, 0.5], [0, 0, 0]])
assert_allclose(layer.backward(ctx, np.array([[1.0, 9.0, 3.0]] * 2)), [[-0.5, 0, 0.5], [0, 0, 0]])


class MyLogSoftmax(Layer):
    def forward(self, x):
        log_y = x - np.log(np.exp(x).sum(axis=-1, keepdims=True))
        return log_y, log_y

    def backward(self, log_y, d):
        return d - np.exp(log_y) * d.sum(axis=-1, keepdims=True)


assert_allclose(MyLogSoftmax()(x), log_softmax(x))
assert gradcheck(MyLogSoftmax(), x).ok

# %% [markdown]
# ## To do on paper
#
# 1. x = [ln 1, ln 3], dy = [1, 0]. Find y, J and dx, as fractions.
# 2. The logistic function σ(u) = 1 / (1 + exp(-u)) is the first output of softmax([u, 0]). Read its
#    derivative off the Jacobian. How large is it where σ(u) = 1/4?
# 3. Somebody adds 5 to every entry of dy. What happens to dx, and why?

# %%
y, dy = softmax(np.log([1.0, 3.0])), np.array([1.0, 0.0])
J = np.diag(y) - np.outer(y, y)
dx = y * (dy - (dy * y).sum())
print("1. y", y * 4, "/ 4;  J", (J * 16).round().tolist(), "/ 16;  dx", dx * 16, "/ 16")
assert_allclose(y, [1 / 4, 3 / 4])
assert_allclose(J, [[3 / 16, -3 / 16], [-3 / 16, 3 / 16]])
assert_allclose(dx, [3 / 16, -3 / 16])

u = np.log(1 / 3)
sigma = softmax(np.array([u, 0.0]))[0]
slope = sigma * (1 - sigma)
print(f"2. J_11 = y_1 (1 - y_1), so the derivative is sigma (1 - sigma) = {slope}")
assert_allclose(sigma, 1 / (1 + np.exp(-u)))
assert_allclose(slope, 3 / 16)
difference = (1 / (1 + np.exp(-u - h)) - 1 / (1 + np.exp(-u + h))) / (2 * h)
assert_allclose(difference, slope, rtol=1e-8)

print("3. nothing: the mean grows by 5 too, since y sums to 1")
assert_allclose(y * (dy + 5 - ((dy + 5) * y).sum()), dx)
