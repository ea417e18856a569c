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
# # Lesson 10. Embeddings, and a table used twice
#
# **You need to know:** lessons 1 (`01_chain_rule.py`) and 3 (`03_cross_entropy.py`).
#
# **You will be able to:** find the gradient of a table of word vectors when words repeat, add
# positions, and tie the output to the same table without losing half of its gradient.
#
# **Time:** about 45 minutes with the exercises on paper.
#
# The layers of this lesson are `npdecoder/layers/embedding.py` and `npdecoder/layers/positions.py`.

# %%
from functools import partial

import numpy as np

from npdecoder import (
    SGD,
    CrossEntropy,
    Embedding,
    Layer,
    LearnedPositions,
    Parameter,
    Unembedding,
    gradcheck,
)

assert_allclose = partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-12)

# %% [markdown]
# ## A look-up is a product
#
# An embedding is a table W with one row for each word of the vocabulary, and y_n = W[ids_n] is a
# look-up. Written with a matrix that has a single 1 in each row, it is a product:
#
#     onehot[n, v] = 1 if ids_n = v, else 0
#     y  = onehot W
#     dW = onehot^T dy                           lesson 1, with onehot in the place of x
#
# Read the last line row by row: row v of dW is the sum of all dy_n with ids_n = v. A word that
# comes three times gets three gradients **added up**; a word that does not come gets 0. The ids are
# integers and have no gradient: there is nothing a little beside a word.

# %%
ids = np.array([1, 1, 3, 0, 1])
W = np.array([[0.0, 1.0], [2.0, -1.0], [5.0, 5.0], [1.0, 3.0]])
dy = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0], [9.0, 10.0]])
onehot = (ids[:, None] == np.arange(4)).astype(float)
dW = onehot.T @ dy
print("onehot", onehot.astype(int), "dW", dW, sep="\n")
assert_allclose(onehot @ W, W[ids])
assert_allclose(dW, [[7, 8], [1 + 3 + 9, 2 + 4 + 10], [0, 0], [5, 6]])

layer = Embedding(4, 2, dtype=np.float64)
layer.W.value = W
y, ctx = layer.forward(ids)
assert_allclose(y, W[ids])
assert layer.backward(ctx, dy) == ()  # no gradient of the ids
assert_allclose(layer.W.grad, dW)

# %% [markdown]
# Nobody builds onehot in a program: it is nearly all zeros. But the short way that comes to mind is
# wrong. `dW[ids] += dy` reads the rows, adds, and writes them back, one over the other, and of a
# repeated word the last one wins (`python examples/pitfalls.py 22`). `np.add.at` adds them all.

# %%
last_wins, all_added = np.zeros((4, 2)), np.zeros((4, 2))
last_wins[ids] += dy
np.add.at(all_added, ids, dy)
print("row 1:", last_wins[1], "in place of", all_added[1])
assert_allclose(last_wins[1], [9, 10])
assert_allclose(all_added, dW)

# %% [markdown]
# ## Positions
#
# To the word's vector a vector of its position is added: y_bt = x_bt + P_t for sentence b. If P is
# a constant (sines and cosines), then dx = dy and that is all. If P is learned, each P_t is used
# once in every sentence:
#
#     dx = dy            dP_t = sum over b of dy_bt

# %%
rng = np.random.default_rng(0)
x, dy = rng.standard_normal((2, 3, 4)), rng.standard_normal((2, 3, 4))
positions = LearnedPositions(max_len=5, d_model=4, rng=0, dtype=np.float64)
y, ctx = positions.forward(x)
assert_allclose(y, x + positions.P.value[:3])
assert_allclose(positions.backward(ctx, dy), dy)
assert_allclose(positions.P.grad[:3], dy.sum(axis=0))
assert_allclose(positions.P.grad[3:], 0.0)
assert gradcheck(positions, x).ok


# %% [markdown]
# ## One table, two uses
#
# The output of a language model gives each word v a logit: x . (row v of an output table). Tie it
# to the input and that table is W itself. W then stands in two places, and has **one** gradient,
# the sum of what both places give it:
#
#     in:    x = scale W[ids]         dW gets scale onehot^T dx        scale: sqrt(d_model), or 1
#     out:   logits = x W^T           dx = dlogits W
#                                     dW gets dlogits^T x as well
#
# The order on the way back is: out first, which gives dx; then in, which needs it.

# %%
class Tied(Layer):
    def __init__(self, W):
        self.W, self.scale = Parameter(W), W.shape[1] ** 0.5

    def forward(self, ids):
        x = self.scale * self.W.value[ids]
        return x @ self.W.value.T, (ids, x)

    def backward(self, ctx, dlogits):
        ids, x = ctx
        V, d = self.W.shape
        onehot = (ids.reshape(-1, 1) == np.arange(V)).astype(float)
        dx = dlogits @ self.W.value
        self.W.grad += dlogits.reshape(-1, V).T @ x.reshape(-1, d)
        self.W.grad += self.scale * onehot.T @ dx.reshape(-1, d)
        return ()


V, d = 7, 4
embedding = Embedding(V, d, scale=True, rng=0, dtype=np.float64)
output = Unembedding(embedding)
assert output.W is embedding.W  # one Parameter, not two equal ones

ids = np.array([[1, 5, 1], [4, 1, 2]])
tied = Tied(embedding.W.value)
report = gradcheck(tied, ids)
print(report)
assert report.ok

x, in_ctx = embedding.forward(ids)
logits, out_ctx = output.forward(x)
dlogits = rng.standard_normal(logits.shape)
embedding.backward(in_ctx, output.backward(out_ctx, dlogits))
my_logits, my_ctx = tied.forward(ids)
tied.backward(my_ctx, dlogits)
assert_allclose(my_logits, logits)
assert_allclose(tied.W.grad, embedding.W.grad)

# %% [markdown]
# ## Who gets a gradient?
#
# Through the input only the words that were read. Through the output **every** word of the
# vocabulary: softmax gave each a probability, and p - onehot (lesson 3) is 0 for none. So a program
# that forgets one of the two parts still learns something, and its loss still falls
# (`python examples/pitfalls.py 23`): only a check of numbers tells.

# %%
targets = np.array([[5, 1, 6], [1, 2, 3]])


def rows(dW):
    """Which rows are not all 0."""
    return np.flatnonzero(dW.any(axis=1)).tolist()


_, loss_ctx = CrossEntropy().forward(logits, targets)
dlogits = CrossEntropy().backward(loss_ctx)

embedding.zero_grad()
dx = output.backward(out_ctx, dlogits)
dW_out = embedding.W.grad.copy()
embedding.backward(in_ctx, dx)  # adds to the same gradient
dW = embedding.W.grad.copy()
dW_in = dW - dW_out
print("in:", rows(dW_in), " out:", rows(dW_out))
assert rows(dW_in) == [1, 2, 4, 5]  # the words of ids
assert rows(dW_out) == [0, 1, 2, 3, 4, 5, 6]  # all words
assert_allclose(dW_out, dlogits.reshape(-1, V).T @ x.reshape(-1, d))


class OutputForgotten(Tied):
    def backward(self, ctx, dlogits):
        ids, _ = ctx
        dx = dlogits @ self.W.value
        np.add.at(self.W.grad, ids, self.scale * dx)
        return ()


assert not gradcheck(OutputForgotten(tied.W.value), ids).ok

# %% [markdown]
# An optimizer must update the table once, though two layers hold it: one value, one gradient, one
# step (`python examples/pitfalls.py 26`).

# %%
before = embedding.W.value.copy()
SGD([*embedding.parameters(), *output.parameters()], lr=0.5).step()
assert_allclose(embedding.W.value, before - 0.5 * dW)

# %% [markdown]
# ## To do on paper
#
# 1. ids = [[1, 1, 3], [1, 0, 1]], d_model = 2, no scale, and dy = 1, 2, ..., 12 in reading order.
#    Find dW of a table of 4 words.
# 2. The same with scale = sqrt(d_model) at d_model = 4: what is dW multiplied by?
# 3. W = [[1, 0], [0, 1], [1, 1]], tied, no scale, ids = [0], dlogits = [1, -1, 2]. Find logits, dx
#    and dW.

# %%
layer, dy = Embedding(4, 2, dtype=np.float64), np.arange(1.0, 13.0).reshape(2, 3, 2)
layer.backward(layer.forward([[1, 1, 3], [1, 0, 1]])[1], dy)
print("1.", layer.W.grad.tolist())
assert_allclose(layer.W.grad, [[9, 10], [22, 26], [0, 0], [5, 6]])

scaled = Embedding(4, 4, scale=True, dtype=np.float64)
scaled.backward(scaled.forward([2])[1], np.ones((1, 4)))
print("2. by sqrt(4) = 2:", scaled.W.grad[2])
assert_allclose(scaled.W.grad[2], 2.0)

layer = Embedding(3, 2, dtype=np.float64)
layer.W.value = [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]
x, in_ctx = layer.forward([0])
logits, out_ctx = Unembedding(layer).forward(x)
dx = Unembedding(layer).backward(out_ctx, [[1.0, -1.0, 2.0]])
layer.backward(in_ctx, dx)
print("3. logits", logits, "dx", dx, "dW", layer.W.grad.tolist())
assert_allclose(logits, [[1, 0, 1]])
assert_allclose(dx, [[3, 1]])
assert_allclose(layer.W.grad, [[1 + 3, 0 + 1], [-1, 0], [2, 0]])
