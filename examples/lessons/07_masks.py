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
# # Lesson 7. Masks
#
# **You need to know:** lesson 6 (`06_attention.py`), and what -inf does in softmax (lesson 2,
# `02_softmax.py`).
#
# **You will be able to:** write causal and padding masks and combine them, explain why the backward
# of masked attention has no new line, say what becomes of a query that sees nothing, and test what
# no gradient check can see.
#
# **Time:** about 45 minutes with the exercises on paper.
#
# The masks are in `npdecoder/masks.py`; they act in `npdecoder/layers/attention.py`.

# %%
import math
from functools import partial

import numpy as np

from npdecoder import (
    Layer,
    ScaledDotProductAttention,
    causal_mask,
    gradcheck,
    padding_mask,
    softmax,
    target_mask,
)

assert_allclose = partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-12)

# %% [markdown]
# ## True = may attend
#
# A mask says for each query (row) which keys (columns) it may attend to. In npdecoder **True means
# may attend**. Others mean the opposite by True, or 1, or 0: of two programs that disagree, each is
# right until their parts are joined.
#
# The decoder of the worked example reads `<s>` 我 爱 and is to say 我 爱 你. At `<s>` it must not
# look at 我, which is what it is to say. So query t may see the keys up to t: the **causal mask**.
#
#              <s>  我   爱
#       <s>     1    0    0
#       我      1    1    0
#       爱      1    1    1

# %%
mask = causal_mask(3)
print(mask.astype(int))
assert (mask == [[True, False, False], [True, True, False], [True, True, True]]).all()

# %% [markdown]
# ## Minus infinity, before softmax
#
#     S_masked = S where the mask is True, -inf elsewhere
#     A        = softmax(S_masked)                          exactly 0 where the mask is False
#
# Adding a matrix of 0 and -inf does the same. Setting weights to 0 **after** softmax does not: what
# is left of the row no longer sums to 1.

# %%
S = np.log([[4.0, 2.0, 2.0], [1.0, 3.0, 4.0], [1.0, 2.0, 1.0]])
A = softmax(np.where(mask, S, -np.inf))
print(A)
assert_allclose(A, [[1, 0, 0], [1 / 4, 3 / 4, 0], [1 / 4, 2 / 4, 1 / 4]])
assert_allclose(softmax(S + np.where(mask, 0.0, -np.inf)), A)

too_late = softmax(S) * mask
print("rows sum to", too_late.sum(axis=-1), "if masked after softmax")
assert_allclose(too_late.sum(axis=-1), [1 / 2, 1 / 2, 1])


# %% [markdown]
# ## Backward: nothing new
#
# Where A_ts = 0, the formula of lesson 6 gives
#
#     dS_ts = A_ts (dA_ts - sum over s of dA A) = 0
#
# and the sum leaves the hidden keys out by itself. The mask is a constant and has no gradient. So
# backward does not even need it: A has all it must know.
#
# One case needs care. A query that may attend to **nothing** has a row of -inf alone, and softmax
# would be 0/0 = NaN: one such row makes NaN of whole weight gradients. The layer below divides by
# Z + 1 where Z = 0, so that the query gets weights of 0, a context of 0, and gradients of 0.

# %%
class MaskedAttention(Layer):
    def forward(self, q, k, v, mask):
        S = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
        S_masked = np.where(mask, S, -np.inf)
        largest = np.maximum(S_masked.max(axis=-1, keepdims=True), np.finfo(S.dtype).min)
        e = np.exp(S_masked - largest)
        Z = e.sum(axis=-1, keepdims=True)
        A = e / (Z + (Z == 0))
        return A @ v, (q, k, v, A)

    def backward(self, ctx, dy):  # as in lesson 6
        q, k, v, A = ctx
        root = math.sqrt(q.shape[-1])
        dA = dy @ v.swapaxes(-1, -2)
        dS = A * (dA - (dA * A).sum(axis=-1, keepdims=True))
        return dS @ k / root, dS.swapaxes(-1, -2) @ q / root, A.swapaxes(-1, -2) @ dy


rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal(shape) for shape in [(3, 5), (4, 5), (4, 2)])
mask = np.array([[True, False, True, False], [False] * 4, [True, True, True, False]])

mine, layer = MaskedAttention(), ScaledDotProductAttention()
report = gradcheck(mine, q, k, v, mask=mask)
print(report)
assert report.ok

context, ctx = layer.forward(q, k, v, mask)
dy = rng.standard_normal(context.shape)
dq, dk, dv = layer.backward(ctx, dy)
my_context, my_ctx = mine.forward(q, k, v, mask)
assert_allclose(my_context, context)
assert_allclose(my_ctx[-1], ctx.A)
for my_gradient, gradient in zip(mine.backward(my_ctx, dy), (dq, dk, dv)):
    assert_allclose(my_gradient, gradient)

assert (context[1] == 0).all()  # query 1 sees nothing
assert (dq[1] == 0).all()
assert (dk[3] == 0).all()  # key 3 is seen by nobody
assert (dv[3] == 0).all()

# %% [markdown]
# ## Padding
#
# Sentences of a batch are filled up to one length with a padding id, here 0. No query may attend to
# such a **key**: the padding mask has the shape (B, 1, 1, S) and spreads over all heads and all
# queries of (B, h, T, S). In a decoder both masks hold, so they are and-ed: (B, 1, T, T).
#
# Padded **queries** are not masked. They compute something that nobody reads: the loss leaves their
# targets out (lesson 3), so their dy is 0.

# %%
ids = np.array([[1, 7, 4], [1, 7, 0]])  # <s> 我 爱, and <s> 我 with padding
keep = ids != 0
both = keep[:, None, None, :] & causal_mask(3)
print("padding mask", padding_mask(ids, 0).shape, "both, of sentence 1:", both[1, 0].astype(int))
assert (padding_mask(ids, 0) == keep[:, None, None, :]).all()
assert (target_mask(ids, 0) == both).all()
assert (both[1, 0] == [[True, False, False], [True, True, False], [True, True, False]]).all()

x = rng.standard_normal((2, 1, 3, 4))  # B, h, T, d_k
context, ctx = layer.forward(x, x, x, both)
alone = x[1:, :, :2]
assert_allclose(context[1:, :, :2], layer(alone, alone, alone, causal_mask(2)))

dy = rng.standard_normal(x.shape)
dy[1, 0, 2] = 0.0  # the loss leaves the padded position out
for gradient in layer.backward(ctx, dy):
    assert (gradient[1, 0, 2] == 0).all()  # so padding gets nothing, as query, key or value


# %% [markdown]
# ## What a gradient check cannot see
#
# A mask turned round is a different function, with a right derivative: gradcheck passes. What finds
# it is a test of causality: **change the last token, and no earlier output may move**. It can be
# read off the gradients as well: if dy is 0 but at position t, no dx after t may be other than 0.

# %%
def is_causal(mask):
    x = np.random.default_rng(1).standard_normal((4, 3))
    changed = x.copy()
    changed[-1] += 1.0
    moved = layer(changed, changed, changed, mask) - layer(x, x, x, mask)
    return np.abs(moved[:-1]).max() < 1e-12


mask, turned = causal_mask(4), ~causal_mask(4)
x = rng.standard_normal((4, 3))
assert gradcheck(layer, x, x, x, mask=mask).ok
assert gradcheck(layer, x, x, x, mask=turned).ok  # passes: not seen
assert is_causal(mask)
assert not is_causal(turned)  # seen

dy = np.zeros((4, 3))
dy[1] = [1.0, -2.0, 0.5]
dx = sum(layer.backward(layer.forward(x, x, x, mask)[1], dy))
print("dx where dy is at position 1:", dx.round(3), sep="\n")
assert (dx[2:] == 0).all()
assert (dx[:2] != 0).all()

# %% [markdown]
# ## Three habits of npdecoder
#
# - A mask of integers is refused: nobody can tell what its 1 means.
# - `causal_mask(T, S)` with more keys than queries aligns the **last** query with the last key:
#   the queries are the newest of S tokens, as in decoding (`python examples/pitfalls.py 7`).
# - It hides by -inf and not by -1e9, which is a number like others: a query that sees nothing but
#   -1e9 sees everything evenly (`python examples/pitfalls.py 6`).

# %%
try:
    layer(x, x, x, np.tri(4, dtype=int))
except TypeError as error:
    print("refused:", error)
else:
    raise AssertionError("a mask of integers was taken")

print(causal_mask(2, 5).astype(int))
assert (causal_mask(2, 5) == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]).all()
assert_allclose(softmax(np.full(4, -1e9)), 1 / 4)
assert_allclose(softmax(np.full(4, -np.inf)), 0.0)

# %% [markdown]
# ## To do on paper
#
# 1. T = 3, causal, all scores 0, v = [[6], [12], [0]]. Find the three contexts, and dv for
#    dy = [[1], [1], [1]].
# 2. Write the mask of a decoder for a sentence of 4 tokens, the last of which is padding.
# 3. What is dq of the first token under a causal mask, whatever the numbers are? Why?

# %%
zeros, v, mask = np.zeros((3, 1)), np.array([[6.0], [12.0], [0.0]]), causal_mask(3)
context, ctx = layer.forward(zeros, zeros, v, mask)
_, _, dv = layer.backward(ctx, np.ones((3, 1)))
print("1. contexts", context.ravel(), " 6 dv", 6 * dv.ravel())
assert_allclose(context.ravel(), [6, 9, 6])
assert_allclose(dv.ravel(), [11 / 6, 5 / 6, 2 / 6])  # the columns of A, summed

answer = target_mask([[1, 7, 4, 0]], 0)[0, 0]
print("2.", answer.astype(int).tolist())
assert (answer == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 0]]).all()

_, ctx = layer.forward(x, x, x, causal_mask(4))
dq, _, _ = layer.backward(ctx, rng.standard_normal(x.shape))
print("3. dq[0] =", dq[0], ": it sees one key, its weight is 1 whatever the score, so dS is 0")
assert_allclose(dq[0], 0.0)
