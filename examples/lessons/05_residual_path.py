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
# # Lesson 5. The residual path, and where the norm goes
#
# **You need to know:** lessons 1 (`01_chain_rule.py`) and 4 (`04_layer_norm.py`).
#
# **You will be able to:** write the backward of a Pre-LN and of a Post-LN block, and show which
# part of the gradient goes past all layers untouched, and in which of the two.
#
# **Time:** about 45 minutes with the exercises on paper.
#
# The block of this lesson is `npdecoder/blocks/residual.py`.

# %%
from functools import partial

import numpy as np

from npdecoder import Encoder, FeedForward, Layer, LayerNorm, gradcheck
from npdecoder.blocks import Residual

assert_allclose = partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-12)

# %% [markdown]
# ## Past the layer and through it
#
# A Transformer does not replace x by f(x), it adds f(x) to x:
#
#     y = x + f(x)                   f: attention, or a feed-forward network
#
# x is used twice, so dx is a sum (lesson 1): what comes past f, and what comes through f.
#
#     dx = dy + (f backward of dy)
#
# The first part is dy itself. Whatever f is, even if its weights are all 0, x hears of the loss.

# %%
rng = np.random.default_rng(0)
f = FeedForward(4, 6, rng=rng, dtype=np.float64)
x, dy = rng.standard_normal((2, 3, 4)), rng.standard_normal((2, 3, 4))


class AddedTo(Layer):
    """y = x + f(x)."""

    def __init__(self, f):
        self.f = f

    def forward(self, x):
        s, ctx = self.f.forward(x)
        return x + s, ctx

    def backward(self, ctx, dy):
        return dy + self.f.backward(ctx, dy)


report = gradcheck(AddedTo(f), x)
print(report)
assert report.ok

for parameter in f.parameters():
    parameter.value = np.zeros(parameter.shape)
_, ctx = AddedTo(f).forward(x)
assert_allclose(AddedTo(f).backward(ctx, dy), dy)


# %% [markdown]
# ## Two places for the norm
#
#     Pre-LN:    y = x + f(norm(x))          the norm stands before f, on the way through
#     Post-LN:   y = norm(x + f(x))          the norm stands after the sum, on both ways
#
# The ways back follow the picture. Call the inner values h = norm(x) or r = x + f(x):
#
#     Pre-LN:    dh = f backward of dy            Post-LN:   dr = norm backward of dy
#                dx = dy + norm backward of dh               dx = dr + f backward of dr
#
# In Pre-LN the norm never touches the first part, dy. In Post-LN nothing gets past the norm.

# %%
class PreLN(Layer):
    def __init__(self, f, norm):
        self.f, self.norm = f, norm

    def forward(self, x):
        h, of_norm = self.norm.forward(x)
        s, of_f = self.f.forward(h)
        return x + s, (of_norm, of_f)

    def backward(self, ctx, dy):
        of_norm, of_f = ctx
        dh = self.f.backward(of_f, dy)
        return dy + self.norm.backward(of_norm, dh)


class PostLN(PreLN):
    def forward(self, x):
        s, of_f = self.f.forward(x)
        y, of_norm = self.norm.forward(x + s)
        return y, (of_norm, of_f)

    def backward(self, ctx, dy):
        of_norm, of_f = ctx
        dr = self.norm.backward(of_norm, dy)
        return dr + self.f.backward(of_f, dr)


def parts(seed):
    """f and norm with random weights, gamma and beta too."""
    rng = np.random.default_rng(seed)
    f, norm = FeedForward(4, 6, dtype=np.float64), LayerNorm(4, dtype=np.float64)
    for parameter in [*f.parameters(), *norm.parameters()]:
        parameter.value = rng.standard_normal(parameter.shape)
    return f, norm


# npdecoder's Residual is two halves around any f, enter before it and leave after it; it can also
# drop out some of what f returns, which is left out here (dropout 0)
for place, block in ("pre", PreLN), ("post", PostLN):
    f, norm = parts(seed=1)
    mine, residual = block(f, norm), Residual(norm, place, dropout=0.0)
    assert gradcheck(mine, x).ok

    h, of_enter = residual.enter(x)
    s, of_f = f.forward(h)
    y, of_leave = residual.leave(x, s, rng=None)
    my_y, my_ctx = mine.forward(x)
    assert_allclose(my_y, y)

    dx_past, ds = residual.leave_backward(of_leave, dy)
    dx = dx_past + residual.enter_backward(of_enter, f.backward(of_f, ds))
    assert_allclose(mine.backward(my_ctx, dy), dx)
    if place == "pre":
        assert_allclose(dx_past, dy)

# %% [markdown]
# ## The gradient that goes past everything
#
# Stack Pre-LN blocks: x1 = x + s1, x2 = x1 + s2, and so on. The output is x with all that was added
# to it, and the gradient at the bottom is dy with all that came back through the blocks:
#
#     y  = x + s1 + s2 + ... + sL
#     dx = dy + t1 + t2 + ... + tL            t: norm backward of (f backward), block by block
#
# dy itself arrives at the bottom, at any depth. And one thing about the rest is exact: a norm's
# backward takes out the mean of every row (lesson 4), so every t sums to 0 along its row, and
#
#     Pre-LN:    the sum of a row of dx  =  the sum of that row of dy
#     Post-LN:   the sum of every row of every dr  =  0
#
# In Post-LN the row sum of dy is lost at the first norm. That is no fault: y does not depend on the
# mean of r either.

# %%
depth = 6
blocks = [PreLN(*parts(seed)) for seed in range(depth)]
y, contexts, added = x, [], 0.0
for block in blocks:
    before = y
    y, ctx = block.forward(before)
    contexts.append(ctx)
    added = added + block.f(block.norm(before))
assert_allclose(y, x + added)

dx, through = dy, 0.0
for block, ctx in zip(reversed(blocks), reversed(contexts)):
    of_norm, of_f = ctx
    t = block.norm.backward(of_norm, block.f.backward(of_f, dx))
    assert_allclose(t.sum(axis=-1), 0.0, atol=1e-8)
    through = through + t
    dx = block.backward(ctx, dx)
assert_allclose(dx, dy + through)
assert_allclose(dx.sum(axis=-1), dy.sum(axis=-1), rtol=1e-7)

f, norm = parts(seed=0)
_, (of_norm, _) = PostLN(f, norm).forward(x)
assert_allclose(norm.backward(of_norm, dy).sum(axis=-1), 0.0)

# %% [markdown]
# ## Measured on whole stacks
#
# npdecoder's Encoder puts two such blocks in each layer, attention and feed-forward. Below is the
# size of the gradient at the bottom, as a multiple of its size at the top, and the spread of the
# output. In Pre-LN the sum grows with every block, and the output spreads with it; a Pre-LN stack
# therefore ends in a final norm (left out here). In Post-LN every layer ends in a norm, and the
# spread stays 1; the gradient is reshaped at each norm. How that bears on training is measured, not
# told, by `python examples/pre_vs_post_norm.py`.

# %%
print("layers   |dx| / |dy|        spread of y\n          pre    post       pre    post")
x, dy = rng.standard_normal((2, 5, 16)), rng.standard_normal((2, 5, 16))
for num_layers in (1, 4, 16):
    ratio, spread, options = {}, {}, {"final_norm": False, "rng": 1, "dtype": np.float64}
    for place in ("pre", "post"):
        stack = Encoder(num_layers, 16, 4, 32, norm=place, **options)
        y, ctx = stack.forward(x)
        dx = stack.backward(ctx, dy)
        ratio[place] = np.linalg.norm(dx) / np.linalg.norm(dy)
        spread[place] = y.std()
        if place == "pre":  # the exact part holds here too
            assert_allclose(dx.sum(axis=-1), dy.sum(axis=-1), rtol=1e-7)
    print(f"{num_layers:6} {ratio['pre']:6.2f}  {ratio['post']:6.2f}    "
          f"{spread['pre']:6.2f}  {spread['post']:6.2f}")
    assert_allclose(spread["post"], 1.0, rtol=1e-4)
    assert spread["pre"] > 1.0

# %% [markdown]
# ## To do on paper
#
# 1. f(x) = x W with W = [[0, 1], [1, 0]] (it swaps two numbers), y = x + f(x), x = [1, 2],
#    dy = [3, 5]. Find y and dx.
# 2. Three blocks y = x + c x with one number c = 1/2. What is dy/dx of the stack? Write it as a sum
#    over paths: how many paths go past all blocks, through one, through two, through all three, and
#    how much does each kind bring?
# 3. Somebody writes the Pre-LN backward as dx = norm backward of (dy + dh): the skip goes through
#    the norm. A row of dy is [4, 0, 0, 0]. What does that row of dx sum to, and what should it?

# %%
W = np.array([[0.0, 1.0], [1.0, 0.0]])
x, dy = np.array([1.0, 2.0]), np.array([3.0, 5.0])
y, dx = x + x @ W, dy + dy @ W.T
print("1. y =", y, " dx =", dx)
assert_allclose(y, [3, 3])
assert_allclose(dx, [8, 8])

c = 1 / 2
whole, by_paths = (1 + c) ** 3, [1, 3 * c, 3 * c**2, c**3]
print("2. (1 + c)^3 =", whole, "= the sum of", by_paths, "from 1, 3, 3 and 1 paths")
assert_allclose(whole, 27 / 8)
assert_allclose(by_paths, [1, 3 / 2, 3 / 4, 1 / 8])
assert_allclose(sum(by_paths), whole)

block, dy = PreLN(*parts(seed=2)), np.array([[4.0, 0.0, 0.0, 0.0]])
_, (of_norm, of_f) = block.forward(np.array([[1.0, -2.0, 0.5, 3.0]]))
dh = block.f.backward(of_f, dy)
wrong = block.norm.backward(of_norm, dy + dh)
right = dy + block.norm.backward(of_norm, dh)
print(f"3. {abs(wrong.sum()):.2f}, and it should be {right.sum():.2f}")
assert_allclose([wrong.sum(), right.sum()], [0, 4])
