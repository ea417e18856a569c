"""The layers, blocks and models once more, in float64: the formulas, and a tape that goes back.

A Var is an array and the way it was made. `gradients` goes that way back with the rules of some
ten operations, so that no backward stands here: only the sums, products and powers of the forward.
The formulas read a layer's weights by name and nothing else of the package.
"""

import itertools
import math

import numpy as np

_erf = np.vectorize(math.erf, otypes=[float])


class Tape:
    """Where the Vars of one calculation begin.

    noise: the size of relative errors that are added to every result, forward and backward: what
    rounding to fewer digits might make of it, which says how far such a calculation can be trusted.
    """

    def __init__(self, noise=0.0, seed=0):
        self.noise, self.rng, self.count = noise, np.random.default_rng(seed), itertools.count()

    def var(self, value, parents=()):
        return Var(self, self.rounded(np.asarray(value, np.float64)), parents)

    def rounded(self, value):
        if not self.noise:
            return value
        return value * (1.0 + self.noise * self.rng.uniform(-1.0, 1.0, value.shape))


class Var:
    """value, and pairs (parent, what sends a gradient back to it)."""

    def __init__(self, tape, value, parents):
        self.tape, self.value, self.parents = tape, value, parents
        self.index = next(tape.count)

    @property
    def shape(self):
        return self.value.shape

    def __add__(self, other):
        other = self._lift(other)
        parents = [(x, lambda g, x=x: summed_to(g, x.shape)) for x in (self, other)]
        return self.tape.var(self.value + other.value, parents)

    def __mul__(self, other):
        other = self._lift(other)
        parents = [(self, lambda g: summed_to(g * other.value, self.shape)),
                   (other, lambda g: summed_to(g * self.value, other.shape))]
        return self.tape.var(self.value * other.value, parents)

    def __pow__(self, n):
        return self.map(self.value**n, n * self.value ** (n - 1))

    def __sub__(self, other):
        return self + self._lift(other) * -1.0

    def __truediv__(self, other):
        return self * self._lift(other) ** -1.0

    __radd__, __rmul__ = __add__, __mul__

    def map(self, value, slope):
        """A function of each entry by itself, which has this value and slope."""
        return self.tape.var(value, [(self, lambda g: g * slope)])

    def sum(self, axis=-1):
        parents = [(self, lambda g: np.broadcast_to(g, self.shape))]
        return self.tape.var(self.value.sum(axis=axis, keepdims=True), parents)

    def reshape(self, *shape):
        parents = [(self, lambda g: g.reshape(self.shape))]
        return self.tape.var(self.value.reshape(shape), parents)

    def __getitem__(self, ids):
        def back(g):
            total = np.zeros(self.shape)
            np.add.at(total, ids, g)
            return total

        return self.tape.var(self.value[ids], [(self, back)])

    def _lift(self, other):
        return other if isinstance(other, Var) else self.tape.var(other)


def summed_to(g, shape):
    """g summed over what an array of this shape was broadcast along."""
    g = g.sum(axis=tuple(range(g.ndim - len(shape))))
    axes = tuple(i for i, n in enumerate(shape) if n == 1 and g.shape[i] != 1)
    return g.sum(axis=axes, keepdims=True)


def einsum(spec, a, b):
    operands, out = spec.split("->")
    of_a, of_b = operands.split(",")
    parents = [(a, lambda g: np.einsum(f"{out},{of_b}->{of_a}", g, b.value)),
               (b, lambda g: np.einsum(f"{out},{of_a}->{of_b}", g, a.value))]
    return a.tape.var(np.einsum(spec, a.value, b.value), parents)


def swapped(x, axis1, axis2):
    return x.tape.var(x.value.swapaxes(axis1, axis2), [(x, lambda g: g.swapaxes(axis1, axis2))])


def exp(x):
    y = np.exp(x.value)
    return x.map(y, y)


def gradients(outputs, douts, wanted):
    """Of sum(output * dout) over the outputs: one array for each Var that is wanted."""
    grads, found = {}, {}

    def reach(var):
        todo = [var]
        while todo:
            var = todo.pop()
            if var.index not in found:
                found[var.index] = var
                todo.extend(parent for parent, _ in var.parents)

    def add(var, g):
        old = grads.get(var.index)
        grads[var.index] = g if old is None else old + g

    for output, dout in zip(outputs, douts):
        reach(output)
        add(output, np.broadcast_to(np.asarray(dout, np.float64), output.shape))
    for index in sorted(found, reverse=True):
        if index in grads:
            for parent, back in found[index].parents:
                add(parent, parent.tape.rounded(back(grads[index])))
    return [np.asarray(grads.get(var.index, np.zeros(var.shape))) for var in wanted]


class Weights:
    """The Vars of a layer's parameters; at(name) are those of a part of it."""

    def __init__(self, found, start=""):
        self.found, self.start = found, start

    def at(self, name):
        return Weights(self.found, f"{self.start}{name}.")

    def __getitem__(self, name):
        return self.found[self.start + name]

    def __contains__(self, name):
        return self.start + name in self.found


# Layers


def linear(w, x, weight=None):
    weight = w["W"] if weight is None else weight
    y = einsum("ni,ij->nj", x.reshape(math.prod(x.shape[:-1]), weight.shape[0]), weight)
    if "b" in w:
        y = y + w["b"]
    return y.reshape(*x.shape[:-1], weight.shape[1])


def layer_norm(w, x, eps=1e-5):
    n = x.shape[-1]
    centred = x - x.sum() / n
    variance = (centred * centred).sum() / n
    y = w["gamma"] * (centred * (variance + eps) ** -0.5)
    return y + w["beta"] if "beta" in w else y


def softmax(x, axis=-1):
    """A row of nothing but -inf is all zeros."""
    largest = x.value.max(axis=axis, keepdims=True, initial=-np.inf)
    e = exp(x + -np.where(np.isfinite(largest), largest, 0.0))
    total = e.sum(axis)
    return e / (total + (total.value == 0.0))


def log_softmax(x):
    """Of rows that are not all -inf."""
    x = x + -x.value.max(axis=-1, keepdims=True, initial=np.finfo(float).min)
    total = exp(x).sum()
    total = total + (total.value == 0.0)  # of a row of length 0
    return x - total.map(np.log(total.value), 1.0 / total.value)


def relu(x):
    return x.map(np.where(x.value > 0.0, x.value, 0.0), x.value > 0.0)


def gelu(x):
    slope = np.exp(-0.5 * x.value**2) * math.sqrt(2.0 / math.pi)
    return x * (x.map(_erf(x.value * math.sqrt(0.5)), slope) + 1.0) * 0.5


def gelu_tanh(x):
    u = (x + x * x * x * 0.044715) * math.sqrt(2.0 / math.pi)
    tanh = np.tanh(u.value)
    return x * (u.map(tanh, 1.0 - tanh**2) + 1.0) * 0.5


ACTIVATIONS = {"relu": relu, "gelu": gelu, "gelu_tanh": gelu_tanh}


def dropped(x, p, rng):
    """A dropout that drops all or nothing, which needs no luck."""
    assert rng is None or p in (0.0, 1.0)
    return x * 0.0 if rng is not None and p == 1.0 else x


def attention(q, k, v, mask=None, p=0.0, rng=None):
    leading, (T, d_k), S = q.shape[:-2], q.shape[-2:], k.shape[-2]
    q, k, v = (x.reshape(math.prod(leading), *x.shape[-2:]) for x in (q, k, v))
    scores = einsum("nti,nsi->nts", q, k) * (1.0 / math.sqrt(d_k))
    scores = scores.reshape(*leading, T, S)
    if mask is not None and mask.dtype == bool:
        blocked = np.where(mask, 0.0, -np.inf)
        scores = scores + np.broadcast_to(blocked, scores.shape)
    elif mask is not None:
        scores = scores + mask
    weights = dropped(softmax(scores), p, rng).reshape(math.prod(leading), T, S)
    return einsum("nts,nsj->ntj", weights, v).reshape(*leading, T, v.shape[-1])


def cross_entropy(logits, targets, ignore_index=None, smoothing=0.0):
    """The loss: a Var (1,)."""
    V = logits.shape[-1]
    rows, targets = logits.reshape(math.prod(logits.shape[:-1]), V), targets.reshape(-1)
    counted = np.flatnonzero(np.ones(len(targets), bool) if ignore_index is None
                             else targets != ignore_index)
    log_p = log_softmax(rows[counted])
    wanted = np.full(log_p.shape, smoothing / V)
    wanted[np.arange(len(counted)), targets[counted].astype(int)] += 1.0 - smoothing
    return (log_p * wanted).reshape(-1).sum() * (-1.0 / max(len(counted), 1))


# Blocks


def heads(x, h):
    B, T, width = x.shape
    return swapped(x.reshape(B, T, h, width // h), 1, 2)


def project(w, key, value, h):
    return heads(linear(w.at("W_k"), key), h), heads(linear(w.at("W_v"), value), h)


def attend(w, query, K, V, h, mask=None, p=0.0, rng=None):
    context = attention(heads(linear(w.at("W_q"), query), h), K, V, mask, p, rng)
    B, _, T, d_v = context.shape
    return linear(w.at("W_o"), swapped(context, 1, 2).reshape(B, T, h * d_v))


def feed_forward(w, x, activation="relu", p=0.0, rng=None):
    hidden = ACTIVATIONS[activation](linear(w.at("linear1"), x))
    return linear(w.at("linear2"), dropped(hidden, p, rng))


def block(w, x, options, mask=None, cross=None, rng=None):
    """An encoder or decoder layer; cross: what the cross-attention makes of its input."""
    p = options.get("dropout", 0.0)
    on_weights = options.get("attention_dropout")
    on_weights = p if on_weights is None else on_weights

    def attend_to_itself(y):
        own, h = w.at("self_attention"), options["num_heads"]
        return attend(own, y, *project(own, y, y, h), h, mask, on_weights, rng)

    sublayers = [attend_to_itself]
    if cross is not None:
        sublayers.append(lambda y: cross(w.at("cross_attention"), y, on_weights))
    activation = options.get("activation", "relu")
    sublayers.append(lambda y: feed_forward(w.at("feed_forward"), y, activation, p, rng))
    eps = options.get("norm_eps", 1e-5)
    for i, sublayer in enumerate(sublayers, start=1):
        norm = w.at(f"norm{i}")
        if options.get("norm", "pre") == "pre":
            x = x + dropped(sublayer(layer_norm(norm, x, eps)), p, rng)
        else:
            x = layer_norm(norm, x + dropped(sublayer(x), p, rng), eps)
    return x


def cross_to(memory, h, memory_mask=None, rng=None):
    """memory: a Var, or the pair (K, V) that was projected before."""

    def cross(w, y, p):
        K, V = memory if isinstance(memory, tuple) else project(w, memory, memory, h)
        return attend(w, y, K, V, h, memory_mask, p, rng)

    return cross


def stack(w, x, num_layers, options, mask=None, memory=None, memory_mask=None, rng=None):
    """An Encoder, or with memory a Decoder."""
    h = options["num_heads"]
    if memory is not None and "memory_projection.W_k.W" in w:
        memory = project(w.at("memory_projection"), memory, memory, h)
    cross = None if memory is None else cross_to(memory, h, memory_mask, rng)
    for i in range(num_layers):
        x = block(w.at(f"layers.{i}"), x, options, mask, cross, rng)
    return layer_norm(w.at("norm"), x, options.get("norm_eps", 1e-5)) if "norm.gamma" in w else x


# Models


def sinusoids(length, d_model):
    P = np.zeros((length, d_model))
    for position in range(length):
        for i in range(d_model // 2):
            angle = position / 10000.0 ** (2 * i / d_model)
            P[position, 2 * i : 2 * i + 2] = math.sin(angle), math.cos(angle)
    return P


def embed(table, positions, ids, c):
    """positions: the Weights of learned ones."""
    at = np.maximum(np.cumsum(real(ids, c), axis=1) - 1, 0)
    x = table[ids] * (math.sqrt(c["d_model"]) if c["scale_embeddings"] else 1.0)
    return x + (positions["P"][at] if "P" in positions else sinusoids(at.max(initial=0) + 1,
                                                                       c["d_model"])[at])


def real(ids, c):
    return np.ones(ids.shape, bool) if c["pad_id"] is None else ids != c["pad_id"]


def both(mask, other):
    """What both masks allow."""
    if other is None:
        return mask
    if other.dtype == bool:
        return mask & other
    return np.where(mask, 0.0, -np.inf) + other


def causal(ids, c, mask=None):
    T = ids.shape[1]
    past = np.arange(T)[None, :] <= np.arange(T)[:, None]
    return both(real(ids, c)[:, None, None, :] & past, mask)


def output(w, table, x):
    return linear(w.at("output"), x, None if "output.W" in w else swapped(table, 0, 1))


def language_model(w, ids, c, mask=None, rng=None):
    table = w["embedding.W"]
    x = dropped(embed(table, w.at("positions"), ids, c), position_dropout(c), rng)
    y = stack(w.at("decoder"), x, c["num_layers"], c, causal(ids, c, mask), rng=rng)
    return output(w, table, y)


def transformer(w, source_ids, target_ids, c, source_mask=None, target_mask=None, rng=None):
    keys = both(real(source_ids, c)[:, None, None, :], source_mask)
    x = embed(w["source_embedding.W"], w.at("source_positions"), source_ids, c)
    x = dropped(x, position_dropout(c), rng)
    memory = stack(w.at("encoder"), x, c["num_encoder_layers"], c, keys, rng=rng)
    return decode(w, target_ids, memory, source_ids, c, source_mask, target_mask, rng)


def decode(w, target_ids, memory, source_ids, c, source_mask=None, target_mask=None, rng=None):
    table = w["target_embedding.W" if "target_embedding.W" in w else "source_embedding.W"]
    keys = both(real(source_ids, c)[:, None, None, :], source_mask)
    x = embed(table, w.at("target_positions"), target_ids, c)
    x = dropped(x, position_dropout(c), rng)
    past = causal(target_ids, c, target_mask)
    y = stack(w.at("decoder"), x, c["num_decoder_layers"], c, past, memory, keys, rng)
    return output(w, table, y)


def position_dropout(c):
    return c["dropout"] if c["position_dropout"] is None else c["position_dropout"]
