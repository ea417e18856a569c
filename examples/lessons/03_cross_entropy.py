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
# # Lesson 3. Cross-entropy
#
# **You need to know:** lesson 2 (`02_softmax.py`), its last section above all.
#
# **You will be able to:** derive `p - onehot` in two ways, divide by the right number when targets
# are left out, and do the same with label smoothing.
#
# **Time:** about 45 minutes with the exercises on paper.
#
# The layer of this lesson is `npdecoder/layers/cross_entropy.py`.

# %%
from functools import partial

import numpy as np

from npdecoder import CrossEntropy, Layer, Softmax, gradcheck, log_softmax, softmax

assert_allclose = partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-12)

# %% [markdown]
# ## One target
#
# The model gives a row x of V numbers, the logits, one for each word of the vocabulary, and p =
# softmax(x) are its probabilities. The right word is t, the target. The loss is small where p_t is
# near 1, and large where it is near 0:
#
#     L = -log p_t = -(x_t - log sum_v exp(x_v))
#
# As in lesson 2 the logits are logarithms of integers, to have short fractions.

# %%
x, t = np.log([1.0, 2.0, 5.0]), 1
p = softmax(x)
L = -np.log(p[t])
print(f"p = {p * 8} / 8, L = log 4 = {L:.4f}")
assert_allclose(L, np.log(4.0))
assert_allclose(L, -(x[t] - np.log(np.exp(x).sum())))

# %% [markdown]
# ## The gradient, in two ways
#
# **Straight.** Lesson 2 found ∂ log p_i/∂x_j = 1[i = j] - p_j. The loss is -log p_t, so
#
#     dx_j = -(1[j = t] - p_j) = p_j - 1[j = t]            dx = p - onehot(t)
#
# **Around.** L depends on p_t alone: dp_j = -1[j = t] / p_t. Send that through softmax backward,
# dx_j = p_j (dp_j - sum_i dp_i p_i). The sum is -1, so dx_j = p_j (dp_j + 1):
#
#     j = t:   p_t (-1/p_t + 1) = p_t - 1
#     j ≠ t:   p_j (0 + 1)      = p_j
#
# which is the same. Read it: every wrong word is pushed down by the probability that it was given,
# and the right one is pushed up by what it lacks. The row sums to 0, as all gradients through
# softmax do.

# %%
onehot = (np.arange(3) == t).astype(float)
dx = p - onehot
print("dx =", dx * 8, "/ 8")
assert_allclose(dx, [1 / 8, -6 / 8, 5 / 8])

dp = -onehot / p[t]
assert_allclose(Softmax().backward(Softmax().forward(x)[1], dp), dx)
assert_allclose(dx.sum(), 0.0)

# %% [markdown]
# On paper both ways are equal. In a program p_t may have been rounded to 0, and then the loss is
# infinite and the second way divides by 0. Log-softmax keeps what softmax loses: with logits 0 and
# 800 the first word has the probability exp(-800), too small for a float, and log p = -800.

# %%
far = np.array([0.0, 800.0])
assert softmax(far)[0] == 0.0
assert_allclose(log_softmax(far)[0], -800.0)
loss, ctx = CrossEntropy().forward(far, 0)
assert_allclose(loss, 800.0)
assert_allclose(CrossEntropy().backward(ctx), [-1.0, 1.0])


# %% [markdown]
# ## Many targets: the mean over those that count
#
# A batch has a target at each position (b, t), and the loss is the mean of their losses, so each
# gradient is divided by the same number. In sentences of different lengths some positions are
# padding. They are **left out of the sum and of the number**: with N the targets that count,
#
#     L       = -1/N sum over counted n of log p[n, target_n]
#     dlogits = (p - onehot) / N    where counted,    0 elsewhere
#
# Two mistakes live here. The gradient must be divided by what the loss was divided by
# (`python examples/pitfalls.py 24`). And N must not count the padding, or a sentence would weigh
# less the longer its neighbours are (`python examples/pitfalls.py 25`); no gradcheck can see this
# one, because forward and backward divide by the same wrong N.

# %%
class MyCrossEntropy(Layer):
    def __init__(self, ignore_index=-1, e=0.0):
        self.ignore_index, self.e = ignore_index, e

    def forward(self, logits, targets):
        V = logits.shape[-1]
        counted = targets != self.ignore_index
        onehot = targets[..., None] == np.arange(V)
        q = (1 - self.e) * onehot + self.e / V  # for now e = 0, and q is onehot
        losses = -(q * log_softmax(logits)).sum(axis=-1)
        N = counted.sum()
        return losses[counted].sum() / N, (logits, q, counted, N)

    def backward(self, ctx, dloss):
        logits, q, counted, N = ctx
        return dloss * (softmax(logits) - q) / N * counted[..., None]


rng = np.random.default_rng(0)
logits = rng.standard_normal((2, 3, 5))
targets = np.array([[4, 2, 1], [3, 0, 0]])  # 0 is padding: N = 4

mine, layer = MyCrossEntropy(ignore_index=0), CrossEntropy(ignore_index=0)
report = gradcheck(mine, logits, targets)
print(report)
assert report.ok

loss, ctx = layer.forward(logits, targets)
dlogits = layer.backward(ctx)
assert ctx.count == 4
assert_allclose(mine(logits, targets), loss)
assert_allclose(mine.backward(mine.forward(logits, targets)[1], 1.0), dlogits)
assert_allclose(dlogits[1, 1:], 0.0)

# the second sentence without its padding, and the first: 1 and 3 targets of the 4
first, _ = layer.forward(logits[0], targets[0])
second, _ = layer.forward(logits[1, :1], targets[1, :1])
assert_allclose(loss, (3 * first + 1 * second) / 4)

# %% [markdown]
# A batch too large for the memory is cut in pieces. Each piece gets the gradient that it has in the
# whole if it is told its share, dloss = N of the piece / N of all; the gradients of the weights, to
# which every piece adds, are then those of the whole.

# %%
pieces = []
for one in range(2):
    _, piece_ctx = layer.forward(logits[one], targets[one])
    pieces.append(layer.backward(piece_ctx, piece_ctx.count / 4))
assert_allclose(pieces, dlogits)

# %% [markdown]
# ## What the first loss should be
#
# A model that knows nothing gives each of V words the probability 1/V, and L = log V. In the worked
# example (`examples/worked_example.py`) the targets 我 爱 你 are the ids 7, 4, 6 of V = 10 words:
# before training expect about log 10 = 2.3. A first loss far above it says that something is off.

# %%
loss, ctx = CrossEntropy().forward(np.zeros((1, 3, 10)), [[7, 4, 6]])
print(f"log 10 = {loss:.4f}")
assert_allclose(loss, np.log(10.0))
even = np.full((1, 3, 10), 1 / 10)
even[0, [0, 1, 2], [7, 4, 6]] -= 1.0
assert_allclose(CrossEntropy().backward(ctx), even / 3)

# %% [markdown]
# ## Label smoothing
#
# p can come near onehot but never reach it: the logit of the target would have to be infinite. With
# smoothing the aim is a distribution that can be reached, a little for every word:
#
#     q = (1 - e) onehot + e / V         L = -sum_v q_v log p_v         dx = p - q
#
# The derivation is the straight one again, with q_v as weights that sum to 1:
#
#     dx_j = -sum_v q_v (1[v = j] - p_j) = -q_j + p_j sum_v q_v = p_j - q_j
#
# The gradient is 0 exactly where p = q. (Some write e / (V - 1) for the wrong words and 1 - e for
# the right one; here every word gets e / V, the target too.)

# %%
smooth, layer = MyCrossEntropy(0, e=0.3), CrossEntropy(ignore_index=0, label_smoothing=0.3)
assert gradcheck(smooth, logits, targets).ok
loss, ctx = layer.forward(logits, targets)
assert_allclose(smooth(logits, targets), loss)
assert_allclose(smooth.backward(smooth.forward(logits, targets)[1], 1.0), layer.backward(ctx))

q = 0.7 * (np.arange(5) == 2) + 0.3 / 5
_, ctx = layer.forward(np.log(q), 2)
assert_allclose(layer.backward(ctx), 0.0)

# %% [markdown]
# ## To do on paper
#
# 1. V = 4, all logits 0, target 2. Find L and dx.
# 2. Two positions with the same logits [ln 1, ln 3]. The first has target 0, the second is padding.
#    Find dlogits. What would it be if both had target 0?
# 3. V = 4, e = 0.4, target 2. Find q, and dx where all logits are 0. By how much must the logit of
#    the target be above the others for dx to be 0?

# %%
loss, ctx = CrossEntropy().forward(np.zeros(4), 2)
dx = CrossEntropy().backward(ctx)
print(f"1. L = log 4 = {loss:.4f}, dx =", dx)
assert_allclose(loss, np.log(4.0))
assert_allclose(dx, [1 / 4, 1 / 4, -3 / 4, 1 / 4])

criterion, rows = CrossEntropy(ignore_index=-1), np.log([[1.0, 3.0], [1.0, 3.0]])
one = criterion.backward(criterion.forward(rows, [0, -1])[1])
both = criterion.backward(criterion.forward(rows, [0, 0])[1])
print("2. one counts:", one.tolist(), " both count:", both.tolist())
assert_allclose(one, [[-3 / 4, 3 / 4], [0, 0]])
assert_allclose(both, [[-3 / 8, 3 / 8], [-3 / 8, 3 / 8]])

q = 0.6 * (np.arange(4) == 2) + 0.4 / 4
criterion = CrossEntropy(label_smoothing=0.4)
dx = criterion.backward(criterion.forward(np.zeros(4), 2)[1])
print("3. q =", q, " dx =", dx, " log 7 above the others")
assert_allclose(q, [0.1, 0.1, 0.7, 0.1])
assert_allclose(dx, [0.15, 0.15, -0.45, 0.15])
assert_allclose(criterion.backward(criterion.forward([0.0, 0.0, np.log(7.0), 0.0], 2)[1]), 0.0)
