"""What the tests share: random layers, masks and sizes, walks through values, and comparisons."""

import copy
import tracemalloc
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
from hypothesis import Phase, settings
from hypothesis import strategies as st

from npdecoder import (
    CrossEntropy,
    LanguageModel,
    LanguageModelConfig,
    Layer,
    Parameter,
    Transformer,
    TransformerConfig,
    gradcheck,
)
from npdecoder.layers.dropout import DropoutContext

PRIMES = (2, 3, 5, 7, 11, 13)

seeds = st.integers(0, 2**32 - 1)


def distinct_primes(n, largest=13):
    """n sizes, no two equal: a wrong transpose, reshape or sum cannot keep its shape by chance."""
    primes = [p for p in PRIMES if p <= largest]
    return st.permutations(primes).map(lambda drawn: tuple(drawn[:n]))


def randomise(layer, rng):
    """Give every parameter random values and return the layer.

    Gammas lie around 1 and far from equal, and betas and biases are not zero: a backward that is
    right only at gamma = 1, beta = 0 does not get through. Matrices keep the size of what they
    multiply, so that no gradient sinks into the rounding of a difference.
    """
    for name, parameter in layer.named_parameters():
        noise = rng.standard_normal(parameter.shape)
        if noise.ndim == 2:
            parameter.value = noise / len(noise) ** 0.5
        else:
            parameter.value = 0.5 * noise + name.endswith("gamma")
    return layer


def parameters_with_gradients(shapes, seed):
    rng = np.random.default_rng(seed)
    parameters = [Parameter(rng.standard_normal(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = rng.standard_normal(parameter.shape)
    return parameters


def few(examples):
    """For the dearer tests: fewer examples, and a failing one is shown as it was drawn."""
    return settings(max_examples=examples, phases=(Phase.explicit, Phase.generate))


# Masks for scores (B, h, T, S)

MASKS = ("none", "causal", "padding", "random", "random per head", "blind rows", "float")


def draw_mask(kind, rng, B, h, T, S):
    if kind == "none":
        return None
    if kind == "causal":
        return np.tri(T, S, k=S - T, dtype=bool)
    if kind == "padding":
        lengths = rng.integers(1, S + 1, B)
        return (np.arange(S) < lengths[:, None])[:, None, None, :]
    if kind == "random":
        return rng.random((B, 1, T, S)) < 0.6
    if kind == "random per head":
        return rng.random((B, h, T, S)) < 0.6
    if kind == "blind rows":  # a query that sees nothing, and an item of which no query does
        mask = rng.random((B, 1, T, S)) < 0.7
        mask[:, :, 0] = False
        mask[-1] = False
        return mask
    if kind == "float":
        mask = rng.standard_normal((B, 1, T, S))
        mask[rng.random(mask.shape) < 0.3] = -np.inf
        return mask
    raise ValueError(kind)


# Walks through values that are arrays, numbers, None, or tuples and lists of such


def leaves(value):
    """The arrays and numbers of a value, in their order."""
    if isinstance(value, (tuple, list)):
        return [leaf for part in value for leaf in leaves(part)]
    return [] if value is None else [value]


def tree_map(f, value):
    if isinstance(value, (tuple, list)):
        return tuple(tree_map(f, part) for part in value)
    return None if value is None else f(value)


def walk(value, path=""):
    """Every (dotted path, value) within a context, contexts themselves included."""
    yield path, value
    if hasattr(value, "_fields"):
        children = value._asdict().items()
    elif isinstance(value, (tuple, list)):
        children = enumerate(value)
    else:
        return
    for name, child in children:
        yield from walk(child, f"{path}.{name}" if path else str(name))


def is_float(x):
    return np.asarray(x).dtype.kind == "f"


def random_like(y, rng):
    """A gradient for the output y: random numbers of its shapes and dtypes."""

    def draw(leaf):
        dy = np.asarray(rng.standard_normal(np.shape(leaf)))
        return dy.astype(np.asarray(leaf).dtype) if np.ndim(leaf) else dy[()]

    return tree_map(draw, y)


# Runs and comparisons


def run(layer, inputs, keywords, dy):
    """Forward and backward from zeroed gradients: output, returned and parameter gradients."""
    layer.zero_grad()
    y, ctx = layer.forward(*inputs, **fresh(keywords))
    returned = layer.backward(ctx, dy)
    return y, returned, parameter_gradients(layer)


def fresh(keywords):
    """The keywords of one call: a generator starts from the same state in each."""
    if "rng" not in keywords:
        return keywords
    return {**keywords, "rng": copy.deepcopy(keywords["rng"])}


def parameter_gradients(layer):
    return {name: parameter.grad.copy() for name, parameter in layer.named_parameters()}


def relative_error(a, b, floor=0.0):
    """max|a - b| / max(max|a|, max|b|, floor); 0 where both are zero or empty."""
    a, b = np.asarray(a), np.asarray(b)
    assert a.shape == b.shape, f"shapes {a.shape} and {b.shape}"
    scale = max(np.abs(a).max(initial=0.0), np.abs(b).max(initial=0.0), floor)
    return float(np.abs(a - b).max(initial=0.0) / (scale or 1.0))


def assert_close(a, b, tolerance=1e-12):
    """Every leaf of a and b agrees within tolerance, relative to the largest entry of the leaf.

    Of dicts (parameter gradients): relative to the largest of all, since some are zero but for
    rounding (a bias of keys moves all scores of a row alike).
    """
    floor = 0.0
    if isinstance(a, dict):
        assert list(a) == list(b)
        a, b = list(a.values()), list(b.values())
        floor = max((np.abs(leaf).max(initial=0.0) for leaf in b), default=0.0)
    a, b = leaves(a), leaves(b)
    assert len(a) == len(b)
    for one, other in zip(a, b):
        error = relative_error(one, other, floor)
        assert error <= tolerance, f"relative error {error} in shape {np.shape(one)}"


def assert_equal(a, b):
    """Every leaf of a and b is the same, bit for bit."""
    a, b = leaves(a), leaves(b)
    assert len(a) == len(b)
    for one, other in zip(a, b):
        np.testing.assert_array_equal(one, other)


def assert_gradients(layer, *inputs, mode="full", **keywords):
    """The layer's backward agrees with central differences, on every tensor within 1e-6.

    Through a deep stack a slope along a random direction may be small beside the loss, and a step
    of 1e-5 loses it in rounding: 1e-4 does not.
    """
    keywords = {"step": 1e-5 if mode == "full" else 1e-4, **keywords}
    report = gradcheck(layer, *inputs, mode=mode, **keywords)
    assert report.ok, f"\n{report}"
    assert report.max_relative_error < 1e-6, f"\n{report}"
    return report


# The options that the blocks share, and the blocks again in plain functions: forward alone, no
# contexts, einsum for the heads. They read the weights of a block and nothing else from it.

layer_options = st.fixed_dictionaries(
    {
        "norm": st.sampled_from(["pre", "post"]),
        "norm_bias": st.booleans(),
        "norm_eps": st.sampled_from([1e-5, 0.1]),
        "attention_bias": st.booleans(),
        "feed_forward_bias": st.booleans(),
        "activation": st.sampled_from(["relu", "gelu", "gelu_tanh"]),
        "dropout": st.sampled_from([0.0, 0.2]),
        "attention_dropout": st.sampled_from([None, 0.0, 0.3]),
    }
)


def plain_linear(linear, x):
    return x @ linear.W.value + (0.0 if linear.b is None else linear.b.value)


def plain_norm(norm, x):
    centred = x - x.mean(axis=-1, keepdims=True)
    x_hat = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + norm.eps)
    return norm.gamma.value * x_hat + (0.0 if norm.beta is None else norm.beta.value)


def plain_heads(linear, x, h):
    """(B, h, T, d): head i takes the columns i d .. (i + 1) d of what the Linear gives."""
    y = plain_linear(linear, x)
    d = y.shape[-1] // h
    return np.stack([y[..., i * d : (i + 1) * d] for i in range(h)], axis=1)


def plain_attend(attention, query, K, V, mask=None):
    Q = plain_heads(attention.W_q, query, attention.num_heads)
    scores = np.einsum("bhti,bhsi->bhts", Q, K) / np.sqrt(Q.shape[-1])
    if mask is not None:
        scores = scores + mask if is_float(mask) else np.where(mask, scores, -np.inf)
    weights = np.exp(scores - np.where(np.isfinite(scores), scores, 0.0).max(-1, keepdims=True))
    weights /= np.maximum(weights.sum(axis=-1, keepdims=True), 1e-300)
    heads = np.einsum("bhts,bhsj->bhtj", weights, V)
    return plain_linear(attention.W_o, np.concatenate(np.moveaxis(heads, 1, 0), axis=-1))


def plain_attention(attention, query, memory, mask=None):
    K = plain_heads(attention.W_k, memory, attention.num_heads)
    V = plain_heads(attention.W_v, memory, attention.num_heads)
    return plain_attend(attention, query, K, V, mask)


def plain_feed_forward(feed_forward, x):
    return plain_linear(
        feed_forward.linear2, feed_forward.activation(plain_linear(feed_forward.linear1, x))
    )


def plain_layer(layer, x, place, mask=None, cross=None):
    """An encoder or decoder layer; cross: what the cross-attention adds, as a function of x."""
    sublayers = [
        lambda h: plain_attention(layer.self_attention, h, h, mask),
        lambda h: plain_feed_forward(layer.feed_forward, h),
    ]
    if cross is not None:
        sublayers.insert(1, cross)
    norms = [layer.norm1, layer.norm2] + ([layer.norm3] if cross is not None else [])
    for norm, sublayer in zip(norms, sublayers):
        if place == "pre":
            x = x + sublayer(plain_norm(norm, x))
        else:
            x = plain_norm(norm, x + sublayer(x))
    return x


def plain_embed(ids, embedding, positions, config):
    """Rows of the embedding, and the position of each among the tokens that are not padding."""
    factor = config.d_model**0.5 if config.scale_embeddings else 1.0
    where = np.maximum(is_real(ids, config).cumsum(axis=1) - 1, 0)
    P = positions.P if config.positions == "sinusoidal" else positions.P.value
    return factor * embedding.W.value[ids] + P[where]


def is_real(ids, config):
    return np.ones(ids.shape, bool) if config.pad_id is None else ids != config.pad_id


def plain_output(model, embedding, y):
    if model.config.tie_embeddings in ("none", "source_target"):
        return plain_linear(model.output, y)
    return y @ embedding.W.value.T + (0.0 if model.output.b is None else model.output.b.value)


# Models

model_options = st.fixed_dictionaries(
    {
        "norm": st.sampled_from(["pre", "post"]),
        "final_norm": st.sampled_from([True, False, None]),
        "norm_bias": st.booleans(),
        "attention_bias": st.booleans(),
        "feed_forward_bias": st.booleans(),
        "output_bias": st.booleans(),
        "activation": st.sampled_from(["relu", "gelu", "gelu_tanh"]),
        "dropout": st.sampled_from([0.0, 0.2]),
        "attention_dropout": st.sampled_from([None, 0.0, 0.3]),
        "position_dropout": st.sampled_from([None, 0.0, 0.3]),
        "pad_id": st.sampled_from([None, 0]),
        "positions": st.sampled_from(["sinusoidal", "learned"]),
        "scale_embeddings": st.booleans(),
    }
)


class Loss(Layer):
    """The cross-entropy of a model's logits, padding left out: ids ..., targets -> loss."""

    def __init__(self, model):
        self.model = model
        self.loss = CrossEntropy(ignore_index=model.config.pad_id, label_smoothing=0.1)

    def forward(self, *ids, rng=None):
        *ids, targets = ids
        logits, model = self.model.forward(*ids, rng=rng)
        loss, loss_ctx = self.loss.forward(logits, targets)
        return loss, (model, loss_ctx)

    def backward(self, ctx, dloss=1.0):
        return self.model.backward(ctx[0], self.loss.backward(ctx[1], dloss))


def padded(sequences, side, length=6):
    """(ids, real): sequences filled up with 0 on one side, and where they are."""
    ids = np.zeros((len(sequences), length), int)
    for row, sequence in zip(ids, sequences):
        where = slice(0, len(sequence)) if side == "right" else slice(-len(sequence), None)
        row[where] = sequence
    return ids, ids != 0


def dropout_places(ctx):
    """The paths, within a context, of the dropouts that dropped."""
    return {
        path: value.keep
        for path, value in walk(ctx)
        if isinstance(value, DropoutContext) and value.keep is not None
    }


# Decoding. Both models have 7 ids to say, and read at most 9.

PAD, BOS, EOS = 0, 1, 2
KINDS = ("transformer", "language model")


def decoding_model(kind, seed, **options):
    """Float64, with weights so large that texts depend on what is read and some reach EOS."""
    options = {"d_model": 12, "num_heads": 3, "pad_id": PAD, "max_len": 9, **options}
    if kind == "transformer":
        sizes = {"num_encoder_layers": 1, "num_decoder_layers": 2}
        config = TransformerConfig(11, 7, **{**sizes, **options})
        model = Transformer(config, rng=seed, dtype=np.float64)
    else:
        config = LanguageModelConfig(7, **{"num_layers": 2, **options})
        model = LanguageModel(config, rng=seed, dtype=np.float64)
    rng = np.random.default_rng(seed)
    for name, parameter in model.named_parameters():
        small = name.endswith(("beta", "output.b"))
        scale = 0.1 if small else 4.0 if "cross_attention" in name else 1.0
        parameter.value = scale * rng.standard_normal(parameter.shape)
    return model


def decoding_items(kind, seed, count=8, longest=9):
    """Sources or prompts of unequal lengths, without padding."""
    rng = np.random.default_rng(seed)
    size = 11 if kind == "transformer" else 7
    return [rng.integers(1, size, rng.integers(1, longest + 1)).tolist() for _ in range(count)]


def ends(model):
    """The special ids that a decoding function takes for this model."""
    return {"eos_id": EOS} | ({"bos_id": BOS} if isinstance(model, Transformer) else {})


def batch_of(rows, left=False, extra=0):
    """ids (B, S): the rows filled up with padding on one side, and with extra columns of it."""
    width = max(map(len, rows)) + extra
    pads = [[PAD] * (width - len(row)) for row in rows]
    return np.array([pad + row if left else row + pad for row, pad in zip(rows, pads)])


def logits_after(model, item, text):
    """(V,): what a full forward over one item alone, unpadded, says comes after text."""
    if isinstance(model, Transformer):
        return model(np.array([item], np.intp), np.array([[BOS, *text]]))[0, -1]
    return model(np.array([[*item, *text]]))[0, -1]


def room(model, item):
    """The most tokens the model can generate for this item: it never reads the last one."""
    read = 1 if isinstance(model, Transformer) else len(item)
    return model.config.max_len + 1 - read


class Lookup(Layer):
    """Logits from tables: after[last token] + at[its position], of a stack that passes both on."""

    def __init__(self, after, at):
        self.after, self.at = after, at

    def forward(self, x):
        token, position = np.split(x, [len(self.after)], axis=-1)
        return self.after[token.argmax(axis=-1)] + self.at[position.argmax(axis=-1)], None


def table_model(kind, after, at):
    """A model whose logits are after[last token] + at[position]: (V, V) and (max_len, V).

    Embedding and positions are one-hot side by side, and every sublayer adds exactly zero.
    """
    V, max_len = len(after), len(at)
    options = {"d_model": V + max_len, "num_heads": 1, "max_len": max_len, "final_norm": False,
               "positions": "learned", "scale_embeddings": False}  # fmt: skip
    if kind == "transformer":
        sizes = {"num_encoder_layers": 1, "num_decoder_layers": 1}
        model = Transformer(TransformerConfig(V, V, **sizes, **options), dtype=np.float64)
        embedding, positions = model.target_embedding, model.target_positions
    else:
        model = LanguageModel(LanguageModelConfig(V, num_layers=1, **options), dtype=np.float64)
        embedding, positions = model.embedding, model.positions
    for parameter in model.parameters():
        parameter.value = np.zeros(parameter.shape)
    embedding.W.value = np.eye(V, V + max_len)
    positions.P.value = np.eye(max_len, V + max_len, k=V)
    model.output = Lookup(np.asarray(after, float), np.asarray(at, float))
    return model


@contextmanager
def measured():
    """Afterwards .peak: the most bytes that were allocated at one time beyond those before."""
    found = SimpleNamespace(peak=0)
    tracemalloc.start()
    try:
        yield found
        found.peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
