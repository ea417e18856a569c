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
# # Lesson 11. One step of SGD by hand, in fractions
#
# **You need to know:** lessons 1 (`01_chain_rule.py`), 3 (`03_cross_entropy.py`) and 5
# (`05_residual_path.py`).
#
# **You will be able to:** do a whole training step on a blackboard, forward, backward and update,
# with numbers that are all short fractions, and compare each with the machine's.
#
# **Time:** about 60 minutes with the exercises on paper.
#
# The machine is `npdecoder/blocks/feed_forward.py`, `npdecoder/layers/linear.py`,
# `npdecoder/layers/cross_entropy.py` and `npdecoder/optim.py`.

# %%
from fractions import Fraction
from functools import partial

import numpy as np

from npdecoder import SGD, CrossEntropy, FeedForward, Layer, Linear, gradcheck

assert_allclose = partial(np.testing.assert_allclose, rtol=1e-13, atol=1e-15)


def exact(numbers):
    """An array of fractions."""
    return np.vectorize(Fraction, otypes=[object])(numbers)


def show(**arrays):
    """Print matrices by name, a row a line."""
    for name, array in arrays.items():
        rows = ["  ".join(f"{x!s:>8}" for x in row) for row in np.atleast_2d(array)]
        print(f"{name:8}" + ("\n" + " " * 8).join(rows))
    print()


def agree(fractions, machine):
    """The machine's number is the fraction, to 13 digits."""
    assert_allclose(machine, np.vectorize(float)(fractions))


# %% [markdown]
# ## The model
#
# Two tokens, 我 and 爱, are rows of two numbers. They go through a feed-forward network on a
# residual path, and then through an output layer with one column for each of three words, 我 爱 你
# = 0 1 2. After 我 comes 爱, after 爱 comes 你: the targets are 1 and 2.
#
#     hidden = x W1 + b1        active = max(hidden, 0)        s = active W2 + b2
#     y      = x + s            logits = y W + b               L = mean of -log p[target]
#
# The weights are chosen so that softmax gives fractions: the two numbers in each row of y come out
# equal, which makes y W = 0, and the logits are b alone: 0, log 2, 0.

# %%
x, targets = exact([[1, 2], [1, 0]]), [1, 2]
W1, b1 = exact([[1, -1, 0], [0, 1, -1]]), exact([0, 0, 1])
W2, b2 = exact([[-1, 1], [2, -1], [1, 0]]), exact([1, 1])
W = exact([[1, -1, 0], [-1, 1, 0]])
exp_b = exact([1, 2, 1])  # b = log of these

# %% [markdown]
# ## Forward

# %%
hidden = x @ W1 + b1
active = np.where(hidden > 0, hidden, Fraction(0))
s = active @ W2 + b2
y = x + s
p = np.array([exp_b / exp_b.sum()] * 2)
show(hidden=hidden, active=active, s=s, y=y, yW=y @ W, p=p)
assert (y @ W == 0).all()

# %% [markdown]
# ## Backward
#
# From the loss to the input, one line a step. The two ways of the residual path meet in the last.
#
#     dlogits = (p - onehot) / 2                    lesson 3, two targets
#     dW      = y^T dlogits          db  = sum of rows of dlogits        dy = dlogits W^T
#     ds      = dy                                  lesson 5: y = x + s
#     dW2     = active^T ds          db2 = sum of rows of ds             dactive = ds W2^T
#     dhidden = dactive where hidden > 0, else 0
#     dW1     = x^T dhidden          db1 = sum of rows of dhidden
#     dx      = dy + dhidden W1^T

# %%
onehot = exact([[0, 1, 0], [0, 0, 1]])
dlogits = (p - onehot) / 2
dW, db, dy = y.T @ dlogits, dlogits.sum(axis=0), dlogits @ W.T
ds = dy
dW2, db2, dactive = active.T @ ds, ds.sum(axis=0), ds @ W2.T
dhidden = np.where(hidden > 0, dactive, Fraction(0))
dW1, db1 = x.T @ dhidden, dhidden.sum(axis=0)
dx = dy + dhidden @ W1.T
show(dlogits=dlogits, dW=dW, db=db, dy=dy)
show(dW2=dW2, db2=db2, dactive=dactive, dhidden=dhidden)
show(dW1=dW1, db1=db1, dx=dx)
assert (dlogits == exact([["1/8", "-1/4", "1/8"], ["1/8", "1/4", "-3/8"]])).all()
assert (dW1 == exact([["-1/2", "9/8", "-1/8"], ["-3/2", "9/4", "0"]])).all()
assert (dx == exact([["-3/2", "3/4"], ["1/8", "1/4"]])).all()

# %% [markdown]
# ## The step
#
# Every weight goes against its gradient, by lr times as much. With lr = 1/16 the new weights are
# still short:
#
#     weight_new = weight - lr dweight

# %%
lr = Fraction(1, 16)
W1_new, b1_new = W1 - lr * dW1, b1 - lr * db1
W2_new, b2_new = W2 - lr * dW2, b2 - lr * db2
W_new = W - lr * dW
show(W1_new=W1_new, b1_new=b1_new, W2_new=W2_new, b2_new=b2_new, W_new=W_new)
show(b_change=-lr * db)


# %% [markdown]
# ## The machine
#
# npdecoder's layers with the same numbers in float64. Everything must agree to 13 digits: the
# values of the forward pass, every gradient, and every weight after the step. gradcheck comes last,
# at the new weights, as a third opinion.

# %%
class TinyModel(Layer):
    def __init__(self):
        self.feed_forward = FeedForward(2, d_ff=3, dtype=np.float64)
        self.output = Linear(2, 3, dtype=np.float64)
        self.criterion = CrossEntropy()

    def forward(self, x, targets):
        s, ff_ctx = self.feed_forward.forward(x)
        logits, output_ctx = self.output.forward(x + s)
        loss, loss_ctx = self.criterion.forward(logits, targets)
        return loss, (ff_ctx, output_ctx, loss_ctx)

    def backward(self, ctx, dloss):
        ff_ctx, output_ctx, loss_ctx = ctx
        dy = self.output.backward(output_ctx, self.criterion.backward(loss_ctx, dloss))
        return dy + self.feed_forward.backward(ff_ctx, dy)


model = TinyModel()
values = {
    "feed_forward.linear1.W": (W1, dW1, W1_new),
    "feed_forward.linear1.b": (b1, db1, b1_new),
    "feed_forward.linear2.W": (W2, dW2, W2_new),
    "feed_forward.linear2.b": (b2, db2, b2_new),
    "output.W": (W, dW, W_new),
}
parameters = dict(model.named_parameters())
for name, (value, _, _) in values.items():
    parameters[name].value = value.astype(float)
model.output.b.value = np.log(exp_b.astype(float))
old_b = model.output.b.value.copy()

x_float = x.astype(float)
loss, ctx = model.forward(x_float, targets)
ff_ctx, output_ctx, loss_ctx = ctx
agree(active, ff_ctx.linear2.x)
agree(y, output_ctx.x)
agree(p, np.exp(loss_ctx.log_p))
agree(dlogits, model.criterion.backward(loss_ctx))
agree(dx, model.backward(ctx, 1.0))
for name, (_, gradient, _) in values.items():
    agree(gradient, parameters[name].grad)
agree(db, model.output.b.grad)
print(f"loss {loss:.4f} = (log 2 + log 4) / 2")
assert_allclose(loss, (np.log(2) + np.log(4)) / 2)

SGD(model.parameters(), lr=float(lr)).step()
for name, (_, _, new) in values.items():
    agree(new, parameters[name].value)
assert_allclose(model.output.b.value, old_b - (lr * db).astype(float))

report = gradcheck(model, x_float, np.array(targets))
print(report)
assert report.ok

# %% [markdown]
# ## Did it help?
#
# By (1) of lesson 1, a step of -lr times the gradient changes the loss by
#
#     δL = sum over all weights of dweight (-lr dweight) = -lr (sum of all squares)
#
# as long as the step is small. Here it is a fraction as well. The true change is less: along the
# way the gradient itself changes. With a step a thousand times smaller both agree.

# %%
gradients = [dW1, db1, dW2, db2, dW, db]
squares = sum((gradient * gradient).sum() for gradient in gradients)
predicted = -lr * squares
change = model(x_float, targets) - loss
print(f"predicted: {predicted} = {float(predicted):.4f}, true: {change:.4f}")
assert predicted < change < 0

for name, (value, gradient, _) in values.items():
    parameters[name].value = (value - lr / 1000 * gradient).astype(float)
model.output.b.value = old_b - (lr / 1000 * db).astype(float)
change, predicted_small = model(x_float, targets) - loss, float(predicted) / 1000
print(f"a thousandth of the step: predicted {predicted_small:.3e}, true {change:.3e}")
assert_allclose(change, predicted_small, rtol=1e-2)

# %% [markdown]
# ## To do on paper
#
# 1. dW1 has a 0 in its second row, third column. Why, without computing? (Two reasons, one for each
#    token.)
# 2. What would dlogits and db be if both targets were 爱?
# 3. How much of the predicted change of the loss is due to b alone?

# %%
print(f"1. hidden of token 0 is {hidden[0, 2]}: ReLU lets nothing back; x of token 1 is {x[1, 1]}")
assert dW1[1, 2] == 0
assert dhidden[0, 2] == 0
assert x[1, 1] == 0

print("2. both targets 1:")
both = (p - exact([[0, 1, 0], [0, 1, 0]])) / 2
show(dlogits=both, db=both.sum(axis=0))
logits = np.log([[1.0, 2.0, 1.0]] * 2)
criterion = CrossEntropy()
agree(both, criterion.backward(criterion.forward(logits, [1, 1])[1]))
assert (both.sum(axis=0) == exact(["1/4", "-1/2", "1/4"])).all()

part = -lr * (db * db).sum()
print("3.", part, "of", predicted)
assert part == Fraction(-1, 128)
