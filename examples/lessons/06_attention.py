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
# # Lesson 6. Attention, one head
#
# **You need to know:** lessons 1 (`01_chain_rule.py`) and 2 (`02_softmax.py`).
#
# **You will be able to:** compute the scores, weights and context of a small attention by hand, go
# back to q, k and v, and use three sums that must come out as 0 or equal to find your slips.
#
# **Time:** about 75 minutes with the exercises on paper.
#
# The layer of this lesson is `npdecoder/layers/attention.py`.

# %%
import math
from functools import partial

import numpy as np

from npdecoder import Layer, ScaledDotProductAttention, gradcheck, softmax

assert_allclose = partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-12)

# %% [markdown]
# ## Forward
#
# There are T queries, rows of q (T, d_k); S keys, rows of k (S, d_k); and a value for each key, a
# row of v (S, d_v). Each query takes a mean of the values, with weights that say how well it fits
# each key:
#
#     1.  S       = q k^T / sqrt(d_k)        (T, S) scores: query t with key s
#     2.  A       = softmax(S)               (T, S) weights: each row sums to 1
#     3.  context = A v                      (T, d_v)
#
# (S is the matrix of scores here, and also the number of keys, as in the papers; which one is meant
# is always clear.) In the example d_k = 4, whose root is 2, and the scores are logarithms of
# integers again: two queries, three keys, values of width 2.

# %%
ln2, ln5 = np.log(2.0), np.log(5.0)
q = np.array([[2.0, 0.0, 0.0, 0.0], [0.0, 2.0, 0.0, 0.0]])
k = np.array([[0.0, ln2, 1.0, 0.0], [ln2, 0.0, 0.0, 3.0], [ln5, 0.0, -1.0, 0.0]])
v = np.array([[8.0, 0.0], [0.0, 4.0], [8.0, 8.0]])
d_k = q.shape[-1]

S = q @ k.T / math.sqrt(d_k)
A = softmax(S)
context = A @ v
print("exp(S)", np.exp(S).round(12), "A", A, "context", context, sep="\n")
assert_allclose(np.exp(S), [[1, 2, 5], [2, 1, 1]])
assert_allclose(A, [[1 / 8, 2 / 8, 5 / 8], [2 / 4, 1 / 4, 1 / 4]])
assert_allclose(context, [[6, 6], [6, 3]])

# %% [markdown]
# ## Backward
#
# dy is the gradient of the context. The steps in reverse, each a rule you have:
#
#     3.  context = A v          a product:      dA = dy v^T,    dv = A^T dy
#     2.  A = softmax(S)         row by row:     dS = A (dA - sum over s of dA A)
#     1.  S = q k^T / sqrt(d_k)  a product:      dq = dS k / sqrt(d_k),  dk = dS^T q / sqrt(d_k)
#
# Steps 3 and 1 are lesson 1's y = x W in other letters, and step 2 is lesson 2. Two sums are worth
# seeing: every key and value is used by **all queries**, so dv_s and dk_s are sums over t; every
# query uses **all keys**, so dq_t is a sum over s.

# %%
dy = np.array([[1.0, 0.0], [0.0, 1.0]])
dA = dy @ v.T
dv = A.T @ dy
dS = A * (dA - (dA * A).sum(axis=-1, keepdims=True))
dq = dS @ k / math.sqrt(d_k)
dk = dS.T @ q / math.sqrt(d_k)
print("dA", dA, "dv", dv, "dS", dS, "dq", dq, "dk", dk, sep="\n")

assert_allclose(dA, [[8, 0, 8], [0, 4, 8]])
assert_allclose(dv, [[1 / 8, 1 / 2], [1 / 4, 1 / 4], [5 / 8, 1 / 4]])
assert_allclose(dS, [[1 / 4, -3 / 2, 5 / 4], [-3 / 2, 1 / 4, 5 / 4]])  # the means are 6 and 3
assert_allclose(dq[:, 2:], [[-1 / 2, -9 / 4], [-11 / 8, 3 / 8]])  # the columns without logarithms
assert_allclose(dk[:, :2], dS.T)  # since q / 2 picks one column for each query

# %% [markdown]
# ## Three sums that find slips
#
# - Each row of dS sums to 0, as every gradient through softmax does.
# - So the sum of all dk is 0: sum_s dk_s = sum_t (sum_s dS_ts) q_t / sqrt(d_k). A vector added to
#   **all** keys adds one number to all scores of a query, and softmax does not see it. A bias of
#   the keys therefore has no gradient; in `examples/worked_example.py` all dW_k.b are 0.
# - The sum in dS needs neither dA nor A, once the context is there:
#   sum_s dA_ts A_ts = sum_s sum_c dy_tc v_sc A_ts = sum_c dy_tc context_tc.

# %%
assert_allclose(dS.sum(axis=-1), 0.0)
assert_allclose(dk.sum(axis=0), 0.0)
assert_allclose((dA * A).sum(axis=-1), (dy * context).sum(axis=-1))
assert_allclose(softmax(q @ (k + np.array([1.0, -2.0, 3.0, 0.5])).T / 2), A)


# %% [markdown]
# ## As a layer, and checked
#
# Three inputs, so backward returns three gradients, in the order of the inputs. The check has T, S,
# d_k and d_v all different: where two of them are equal, a transpose too many may go unseen.

# %%
class MyAttention(Layer):
    def forward(self, q, k, v):
        S = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
        A = softmax(S)
        return A @ v, (q, k, v, A)

    def backward(self, ctx, dy):
        q, k, v, A = ctx
        root = math.sqrt(q.shape[-1])
        dA = dy @ v.swapaxes(-1, -2)
        dv = A.swapaxes(-1, -2) @ dy
        dS = A * (dA - (dA * A).sum(axis=-1, keepdims=True))
        dq = dS @ k / root
        dk = dS.swapaxes(-1, -2) @ q / root
        return dq, dk, dv


rng = np.random.default_rng(0)
mine, layer = MyAttention(), ScaledDotProductAttention()
q, k, v = (rng.standard_normal(shape) for shape in [(3, 5), (4, 5), (4, 2)])
report = gradcheck(mine, q, k, v)
print(report)
assert report.ok

context, ctx = layer.forward(q, k, v)
dy = rng.standard_normal(context.shape)
my_context, my_ctx = mine.forward(q, k, v)
assert_allclose(my_context, context)
assert_allclose(my_ctx[-1], ctx.A)
for my_gradient, gradient in zip(mine.backward(my_ctx, dy), layer.backward(ctx, dy)):
    assert_allclose(my_gradient, gradient)

# %% [markdown]
# ## Why the root of d_k
#
# The dot product of two random rows with entries of variance 1 is a sum of d_k products, each of
# mean 0 and variance 1: its variance is d_k. Without the root, scores grow with the width, softmax
# gives all its weight to one key, and then J = diag(y) - y^T y (lesson 2) is nearly 0: the gradient
# of q and k vanishes. With the root the scores keep variance 1 at any width.
#
# It is d_k, the width of one head, and not d_model. A gradcheck cannot tell them apart, since
# forward and backward would agree on the wrong function (`python examples/pitfalls.py 9`).

# %%
print("d_k   variance of q.k   largest weight, without the root and with it")
for width in (4, 64, 1024):
    wide_q, wide_k = rng.standard_normal((2, 400, width))
    dots = wide_q @ wide_k.T
    plain, rooted = (softmax(s).max(axis=-1).mean() for s in (dots, dots / math.sqrt(width)))
    print(f"{width:4} {dots.var():12.1f} {plain:22.2f} {rooted:14.2f}")
    assert_allclose(dots.var(), width, rtol=0.2)
    assert_allclose((dots / math.sqrt(width)).var(), 1.0, rtol=0.2)
assert plain > 0.9 > 0.1 > rooted


# %% [markdown]
# ## Self-attention: one x, three uses
#
# In self-attention the tokens ask each other: q, k and v are all made of the same x. With
# projections (lesson 8 has them) q = x W_q, k = x W_k, v = x W_v; here without. x is used three
# times, so its gradient is a sum of three:
#
#     dx = dq + dk + dv                   with projections: dq W_q^T + dk W_k^T + dv W_v^T

# %%
class SelfAttention(MyAttention):
    def forward(self, x):
        return super().forward(x, x, x)

    def backward(self, ctx, dy):
        dq, dk, dv = super().backward(ctx, dy)
        return dq + dk + dv


x, dy = rng.standard_normal((4, 5)), rng.standard_normal((4, 5))
assert gradcheck(SelfAttention(), x).ok
_, ctx = layer.forward(x, x, x)
_, my_ctx = SelfAttention().forward(x)
assert_allclose(SelfAttention().backward(my_ctx, dy), sum(layer.backward(ctx, dy)))


class ValuesForgotten(SelfAttention):
    def backward(self, ctx, dy):
        dq, dk, _ = MyAttention.backward(self, ctx, dy)
        return dq + dk


assert not gradcheck(ValuesForgotten(), x).ok

# %% [markdown]
# ## To do on paper
#
# 1. One query, two keys, A = [1/4, 3/4], v = [[4], [8]], dy = [1]. Find context, dv, dA and dS.
#    Does the third of the three sums hold?
# 2. The same, made of q = [2], k = [[0], [(ln 3)/2]], d_k = 1. Is A right? Find dk.
# 3. All values are the same row. What is the context, and what is dS, whatever q and k are?

# %%
q, k, v = np.array([[2.0]]), np.array([[0.0], [np.log(3.0) / 2]]), np.array([[4.0], [8.0]])
context, ctx = layer.forward(q, k, v)
dy = np.array([[1.0]])
dq, dk, dv = layer.backward(ctx, dy)
dA = dy @ v.T
dS = ctx.A * (dA - (dy * context).sum(axis=-1, keepdims=True))
print("1. context", context, "dv", dv.tolist(), "dA", dA, "dS", dS)
assert_allclose(context, [[7]])
assert_allclose(dv, [[1 / 4], [3 / 4]])
assert_allclose(dS, [[-3 / 4, 3 / 4]])
assert_allclose((dA * ctx.A).sum(), 7.0)

print("2. A", ctx.A, "dk", dk.tolist())
assert_allclose(ctx.A, [[1 / 4, 3 / 4]])
assert_allclose(dk, [[-3 / 2], [3 / 2]])
assert_allclose(dq, [[3 / 4 * np.log(3.0) / 2]])

same = np.array([[5.0], [5.0]])
context, ctx = layer.forward(q, k, same)
print("3. context", context, ": the row itself; dS = 0, so dq =", layer.backward(ctx, dy)[0])
assert_allclose(context, [[5]])
assert_allclose(layer.backward(ctx, dy)[0], 0.0)
assert_allclose(layer.backward(ctx, dy)[1], 0.0)
