from dataclasses import fields

import numpy as np
import pytest
from helpers import (
    Loss,
    assert_close,
    assert_equal,
    assert_gradients,
    distinct_primes,
    dropout_places,
    few,
    is_real,
    model_options,
    padded,
    parameter_gradients,
    plain_attend,
    plain_attention,
    plain_embed,
    plain_heads,
    plain_layer,
    plain_norm,
    plain_output,
    randomise,
    seeds,
)
from hypothesis import given
from hypothesis import strategies as st

from npdecoder import CrossEntropy, Transformer, TransformerConfig, causal_mask

TIES = ["none", "target_output", "source_target", "all"]
TWO_LAYERS = {"num_encoder_layers": 2, "num_decoder_layers": 2}
ONE_LAYER = {"num_encoder_layers": 1, "num_decoder_layers": 1}
SMALL = {"d_model": 6, "num_heads": 3}


def draw_model(rng, sizes, cross, tie, options):
    """A model of random weights, whose vocabularies differ where they may."""
    h, d_k, d_v, d_ff, V, V2 = sizes
    V2 = V if tie in ("source_target", "all") else V2
    options = {"cross_attention": cross, "tie_embeddings": tie, **options}
    sizes = {"d_model": 6, "num_heads": h, "d_ff": d_ff, "d_k": d_k, "d_v": d_v, "max_len": 13}
    config = TransformerConfig(V, V2, **TWO_LAYERS, **sizes, norm_eps=0.01, **options)
    return randomise(Transformer(config, rng, dtype=np.float64), rng)


def draw_ids(rng, config, B, S, T):
    return (
        rng.integers(0, config.source_vocab_size, (B, S)),
        rng.integers(0, config.target_vocab_size, (B, T)),
        rng.integers(0, config.target_vocab_size, (B, T)),
    )


lengths = distinct_primes(3, 7)
ties = st.sampled_from(TIES)
crosses = st.sampled_from(["per_layer", "shared"])


@few(12)
@given(
    sizes=distinct_primes(6),
    lengths=lengths,
    cross=crosses,
    tie=ties,
    options=model_options,
    seed=seeds,
)
def test_gradients_of_the_loss(sizes, lengths, cross, tie, options, seed):
    rng = np.random.default_rng(seed)
    model = draw_model(rng, sizes, cross, tie, options)
    ids = draw_ids(rng, model.config, *lengths)
    assert_gradients(Loss(model), *ids, mode="directional", rng=rng)


@few(6)
@given(
    sizes=distinct_primes(6),
    lengths=lengths,
    cross=crosses,
    tie=ties,
    options=model_options,
    seed=seeds,
)
def test_gradients_with_masks(sizes, lengths, cross, tie, options, seed):
    rng = np.random.default_rng(seed)
    model = draw_model(rng, sizes, cross, tie, options)
    B, S, T = lengths
    source_ids, target_ids, _ = draw_ids(rng, model.config, B, S, T)
    masks = {
        "source_mask": rng.random((B, 1, 1, S)) < 0.7,
        "target_mask": np.where(rng.random((T, T)) < 0.7, rng.standard_normal((T, T)), -np.inf),
    }
    assert_gradients(model, source_ids, target_ids, mode="directional", rng=rng, **masks)


def test_gradients_entry_by_entry():
    rng = np.random.default_rng(0)
    sizes = {"d_model": 4, "num_heads": 2, "d_ff": 3, "max_len": 5, **ONE_LAYER}
    config = TransformerConfig(
        5, 5, pad_id=0, tie_embeddings="all", positions="learned", **sizes
    )
    model = randomise(Transformer(config, dtype=np.float64), rng)
    report = assert_gradients(Loss(model), *draw_ids(rng, config, 3, 5, 4))
    assert len(report.rows) == len(model.parameters())


@given(
    sizes=distinct_primes(6),
    lengths=lengths,
    cross=crosses,
    tie=ties,
    options=model_options,
    seed=seeds,
)
def test_equals_the_plain_functions(sizes, lengths, cross, tie, options, seed):
    rng = np.random.default_rng(seed)
    model = draw_model(rng, sizes, cross, tie, options)
    c, h = model.config, sizes[0]
    source_ids, target_ids, _ = draw_ids(rng, c, *lengths)
    assert_close(model(source_ids, target_ids), plain_transformer(model, source_ids, target_ids, h))


def plain_transformer(model, source_ids, target_ids, h):
    c = model.config
    source_mask = is_real(source_ids, c)[:, None, None, :]
    x = plain_embed(source_ids, model.source_embedding, model.source_positions, c)
    for layer in model.encoder.layers:
        x = plain_layer(layer, x, c.norm, source_mask)
    memory = x if model.encoder.norm is None else plain_norm(model.encoder.norm, x)

    def cross_of(layer):
        if c.cross_attention == "per_layer":
            return lambda y: plain_attention(layer.cross_attention, y, memory, source_mask)
        projection = model.decoder.memory_projection
        K, V = plain_heads(projection.W_k, memory, h), plain_heads(projection.W_v, memory, h)
        return lambda y: plain_attend(layer.cross_attention, y, K, V, source_mask)

    T = target_ids.shape[1]
    target_mask = is_real(target_ids, c)[:, None, None, :] & np.tri(T, dtype=bool)
    y = plain_embed(target_ids, model.target_embedding, model.target_positions, c)
    for layer in model.decoder.layers:
        y = plain_layer(layer, y, c.norm, target_mask, cross_of(layer))
    if model.decoder.norm is not None:
        y = plain_norm(model.decoder.norm, y)
    return plain_output(model, model.target_embedding, y)


# Causality, padding, and what is seen


def small_model(dtype=np.float64, seed=0, **options):
    options = {**TWO_LAYERS, **SMALL, "d_ff": 7, "max_len": 11, "pad_id": 0, **options}
    config = TransformerConfig(13, 11, **options)
    rng = np.random.default_rng(seed)
    return randomise(Transformer(config, dtype=dtype), rng)


def real_ids(rng, *shape):
    return rng.integers(1, 11, shape)


KINDS = [
    {},
    {"norm": "post"},
    {"cross_attention": "shared", "positions": "learned"},
    {"norm": "post", "cross_attention": "shared"},
]


@pytest.mark.parametrize("pad_id", [None, 0])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_future_does_not_move_a_bit(kind, dtype, pad_id):
    model, rng = small_model(dtype, pad_id=pad_id, **kind), np.random.default_rng(1)
    source_ids, target_ids = real_ids(rng, 3, 5), real_ids(rng, 3, 7)
    before = model(source_ids, target_ids)
    for t in range(1, 7):
        moved = target_ids.copy()
        moved[:, t] = moved[:, t] % 10 + 1
        after = model(source_ids, moved)
        assert_equal(after[:, :t], before[:, :t])
        assert (after[:, t:] != before[:, t:]).any(axis=-1).all()
        if pad_id == 0:
            moved[:, t] = 0
            assert_equal(model(source_ids, moved)[:, :t], before[:, :t])


@pytest.mark.parametrize("kind", KINDS)
def test_every_source_token_reaches_every_logit(kind):
    model, rng = small_model(**kind), np.random.default_rng(1)
    source_ids, target_ids = real_ids(rng, 3, 5), real_ids(rng, 3, 7)
    before = model(source_ids, target_ids)
    memory, _ = model.encode(source_ids)
    for s in range(5):
        moved = source_ids.copy()
        moved[:, s] = moved[:, s] % 10 + 1
        assert (model.encode(moved)[0] != memory).any(axis=-1).all(), "both sides are seen"
        assert (model(moved, target_ids) != before).any(axis=-1).all()


SEQUENCES = [[5, 7, 9], [5, 7, 9, 4, 2], [1]]


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-12), (np.float32, 1e-5)])
@pytest.mark.parametrize("target_side", ["left", "right"])
@pytest.mark.parametrize("source_side", ["left", "right"])
@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_nothing(kind, source_side, target_side, dtype, tolerance):
    model = small_model(dtype, **kind)
    for embedding in model.source_embedding, model.target_embedding:
        embedding.W.value[0] = 1e3
    targets_of = [[3, 4, 1, 8], [2], [6, 6]]
    next_of = [[4, 1, 8, 2], [5], [6, 3]]
    source_ids, _ = padded(SEQUENCES, source_side)
    target_ids, real = padded(targets_of, target_side)
    targets, _ = padded(next_of, target_side)
    loss_layer = CrossEntropy(ignore_index=0)

    logits, ctx = model.forward(source_ids, target_ids)
    _, loss_ctx = loss_layer.forward(logits, targets)
    model.backward(ctx, loss_layer.backward(loss_ctx))
    found = parameter_gradients(model)

    model.zero_grad()
    for item, (source, target, following) in enumerate(zip(SEQUENCES, targets_of, next_of)):
        alone, ctx = model.forward([source], [target])
        assert_close(logits[item][real[item]], alone[0], tolerance)
        _, loss_ctx = loss_layer.forward(alone, [following])
        model.backward(ctx, loss_layer.backward(loss_ctx, loss_ctx.count / real.sum()))
    largest = max(np.abs(grad).max() for grad in found.values())
    for name, expected in parameter_gradients(model).items():
        assert np.abs(found[name] - expected).max() <= tolerance * max(1, largest), name
    for embedding in model.source_embedding, model.target_embedding:
        assert (embedding.W.grad[0] == 0).all(), "masked and ignored: padding has no gradient"


@pytest.mark.parametrize("side", ["left", "right"])
def test_contents_of_the_padding_change_nothing(side):
    model = small_model()
    source_ids, _ = padded(SEQUENCES, side)
    target_ids, real = padded(SEQUENCES, side)
    before = model(source_ids, target_ids)
    for embedding in model.source_embedding, model.target_embedding:
        embedding.W.value[0] = -77.0
    assert_equal(model(source_ids, target_ids)[real], before[real])


def test_without_pad_id_there_is_no_padding():
    model = small_model(pad_id=None)
    source_ids, target_ids = np.array([[5, 7, 0, 0]]), np.array([[0, 3, 0]])
    before = model(source_ids, target_ids)
    model.source_embedding.W.value[0] += np.arange(6)
    assert (model(source_ids, target_ids) != before).any(axis=-1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_an_item_of_nothing_but_padding(kind):
    """It sees nothing, leaves the others alone, and everything stays finite."""
    model = small_model(**kind)
    rng = np.random.default_rng(1)
    source_ids, target_ids = real_ids(rng, 3, 5), real_ids(rng, 3, 7)
    before = model(source_ids, target_ids)
    source_ids[1], target_ids[1] = 0, 0
    with np.errstate(all="raise"):
        logits, ctx = model.forward(source_ids, target_ids)
        model.backward(ctx, np.ones_like(logits))
    assert_close(logits[[0, 2]], before[[0, 2]])
    assert np.isfinite(logits).all()
    assert all(np.isfinite(p.grad).all() for p in model.parameters())
    for layer in ctx.decode.decoder.layers:
        assert (layer.self_attention.attend.attention.A[1] == 0).all()


# Masks of the user


@pytest.fixture
def case():
    rng = np.random.default_rng(2)
    model = small_model()
    source_ids, target_ids = real_ids(rng, 3, 5), real_ids(rng, 3, 7)
    source_ids[0, 4:] = 0
    target_ids[1, 5:] = 0
    return model, source_ids, target_ids


ALL = [
    {"source_mask": np.ones((1, 5), bool)},
    {"source_mask": np.ones((3, 1, 1, 5), bool)},
    {"target_mask": np.ones((7, 7), bool)},
    {"target_mask": np.ones((3, 3, 7, 7), bool)},
    {"target_mask": np.ones((1, 1), bool)},
    {"source_mask": np.zeros((1, 5)), "target_mask": np.zeros((7, 7))},
    {"source_mask": np.zeros((1, 5), np.float32), "target_mask": np.zeros((7, 7), np.float16)},
]


@pytest.mark.parametrize("masks", ALL)
def test_a_mask_that_hides_nothing_changes_nothing(case, masks):
    """It is and-ed with the model's own masks: padding and future stay hidden."""
    model, *ids = case
    assert_equal(model(*ids, **masks), model(*ids))


@pytest.mark.parametrize("form", ["bool", "float"])
def test_a_source_mask_hides_as_padding_does(case, form):
    model, source_ids, target_ids = case
    keep = np.ones((3, 1, 1, 5), bool)
    keep[:, ..., 3:] = False
    mask = keep if form == "bool" else np.where(keep, 0.0, -np.inf)
    hidden = np.where(np.arange(5) < 3, source_ids, 0)
    assert_equal(model(source_ids, target_ids, mask), model(hidden, target_ids))


@pytest.mark.parametrize("form", ["bool", "float"])
def test_a_target_mask_hides_besides_the_future(case, form):
    model, source_ids, target_ids = case
    window = np.tri(7, dtype=bool) & ~np.tri(7, k=-2, dtype=bool)  # itself and the one before
    mask = ~np.tri(7, k=-2, dtype=bool)  # which alone would show the future
    mask = mask if form == "bool" else np.where(mask, 0.0, -np.inf)
    logits, ctx = model.forward(source_ids, target_ids, target_mask=mask)
    for layer in ctx.decode.decoder.layers:
        A = layer.self_attention.attend.attention.A
        assert (A[..., ~window] == 0).all()
        assert (A[[0, 2]][..., window] > 0).all()
        assert (A[1, :, :, 5:] == 0).all(), "padding"
    assert (logits != model(source_ids, target_ids)).any()


def test_a_bias_is_added(case):
    model, source_ids, target_ids = case
    bias = np.random.default_rng(3).standard_normal((3, 3, 7, 7))
    _, ctx = model.forward(source_ids, target_ids, target_mask=bias)
    attention = ctx.decode.decoder.layers[0].self_attention.attend.attention
    scores = attention.q @ attention.k.swapaxes(-1, -2) / 2**0.5 + bias
    keep = causal_mask(7) & (target_ids != 0)[:, None, None, :]
    e = np.where(keep, np.exp(scores), 0)
    assert_close(attention.A, e / e.sum(axis=-1, keepdims=True))


BAD_MASKS = [
    ({"source_mask": np.ones((3, 5), bool)}, ValueError, "source_mask has shape"),
    ({"source_mask": np.ones((3, 1, 5), bool)}, ValueError, "source_mask has shape"),
    ({"source_mask": np.ones((5,), bool)}, ValueError, "source_mask has shape"),
    ({"source_mask": np.ones((3, 1, 7, 5), bool)}, ValueError, "source_mask has shape"),
    ({"source_mask": np.ones((1, 4), bool)}, ValueError, "source_mask has shape"),
    ({"source_mask": np.ones((1, 5), int)}, TypeError, "source_mask has dtype int"),
    ({"target_mask": np.ones((3, 7, 7), bool)}, ValueError, "target_mask has shape"),
    ({"target_mask": np.ones((7, 5), bool)}, ValueError, "target_mask has shape"),
    ({"target_mask": np.ones((3, 7), bool)}, ValueError, "target_mask has shape"),
    ({"target_mask": np.ones((2, 1, 7, 7), bool)}, ValueError, "target_mask has shape"),
    ({"target_mask": np.ones((7, 7), np.uint8)}, TypeError, "target_mask has dtype uint8"),
]


@pytest.mark.parametrize(("masks", "error", "message"), BAD_MASKS)
def test_a_mask_that_does_not_fit(case, masks, error, message):
    model, *ids = case
    with pytest.raises(error, match=f"^{message}"):
        model(*ids, **masks)


# Bad input

GOOD = np.ones((2, 3), int)
BAD_IDS = [
    (np.array([1, 2]), ValueError, r"has shape \(2,\), expected \(B, T\)"),
    (np.ones((2, 3, 1), int), ValueError, r"has shape \(2, 3, 1\)"),
    (np.array(1), ValueError, r"has shape \(\)"),
    (np.ones((2, 3)), TypeError, "has dtype float64"),
    (np.ones((2, 3), bool), TypeError, "has dtype bool"),
    (np.array([[1, 1, 1], [1, -1, 1]]), IndexError, r"\[1, 1\] is -1"),
    (np.array([[1, 1, 1], [1, 1, 13]]), IndexError, r"\[1, 2\] is 13"),
    (np.array([[], []]), TypeError, "has dtype float64"),
]


@pytest.mark.parametrize(("ids", "error", "message"), BAD_IDS)
def test_bad_ids(ids, error, message):
    model = small_model()
    with pytest.raises(error, match=f"^source_ids ?{message}"):
        model(ids, GOOD)
    with pytest.raises(error, match=f"^target_ids ?{message}"):
        model(GOOD, ids)


def test_ids_of_a_mask_alone_are_checked():
    """source_mask is called by itself when a text is decoded."""
    with pytest.raises(ValueError, match=r"^source_ids has shape \(3,\), expected \(B, S\)"):
        small_model().source_mask([1, 2, 3])


def test_batches_and_lengths_are_checked():
    model = small_model()
    for source, target in ((1, 2), (2, 1), (3, 2)):
        with pytest.raises(ValueError, match=r"^source_ids .* and target_ids"):
            model(np.ones((source, 3), int), np.ones((target, 4), int))
    long, edge = np.ones((2, 12), int), np.ones((2, 11), int)
    assert model(edge, edge).shape == (2, 11, 11)
    for ids in (long, GOOD), (GOOD, long):
        with pytest.raises(ValueError, match=r"12 .*max_len 11"):
            model(*ids)


BAD_CALLS = {
    "source ids": ([[1, 99]], GOOD[:1], {}),
    "target ids": (GOOD[:1], [[1, 99]], {}),
    "batches": (GOOD, GOOD[:1], {}),
    "source length": (np.ones((2, 12), int), GOOD, {}),
    "target length": (GOOD, np.ones((2, 12), int), {}),
    "source mask": (GOOD, GOOD, {"source_mask": np.ones((2, 3), bool)}),
    "target mask": (GOOD, GOOD, {"target_mask": np.ones((2, 3, 3), bool)}),
    "rng": (GOOD, GOOD, {"rng": 3}),
}


@pytest.mark.parametrize("what", BAD_CALLS)
def test_arguments_are_checked_before_any_work(what):
    model = small_model()

    def work(*arguments, **keywords):
        pytest.fail("the encoder was run")

    model.encoder.forward = work
    source_ids, target_ids, keywords = BAD_CALLS[what]
    with pytest.raises((ValueError, TypeError, IndexError)):
        model(source_ids, target_ids, **keywords)


def test_dy_is_checked():
    model = small_model()
    logits, ctx = model.forward(GOOD, GOOD)
    assert model.backward(ctx, np.ones_like(logits)) == ()
    for shape in (2, 3, 10), (1, 3, 11), (2, 1, 11), (3, 11), ():
        with pytest.raises(ValueError, match=r"^dy has shape"):
            model.backward(ctx, np.ones(shape))


def test_a_memory_that_does_not_fit():
    model = small_model()
    memory, _ = model.encode(GOOD)
    for shape in (1, 3, 6), (2, 3, 5), (3, 6), (2, 4, 6):
        with pytest.raises(ValueError, match="memory"):
            model.decode(GOOD, np.ones(shape), GOOD)
    assert_equal(model.decode(GOOD, memory, GOOD)[0], model(GOOD, GOOD))


def test_float16_models_are_refused():
    with pytest.raises(TypeError, match="float16"):
        Transformer(TransformerConfig(5, 5, **SMALL), dtype=np.float16)
    with pytest.raises(TypeError, match="float16"):
        small_model().astype(np.float16)


# Every option has its effect


def outcome(**options):
    """What can differ: names and shapes, the weights, and the logits with and without dropout."""
    options = {"source_vocab_size": 13, "target_vocab_size": 13, "d_model": 12, "num_heads": 3,
               "num_encoder_layers": 1, "num_decoder_layers": 2, "dropout": 0.1, "pad_id": 0,
               "scale_embeddings": False, "max_len": 11, **options}  # fmt: skip
    model = Transformer(TransformerConfig(**options), 0, dtype=np.float64)
    rng = np.random.default_rng(0)
    shapes = [(name, p.shape) for name, p in model.named_parameters()]
    for parameter in model.parameters():
        parameter.value += 0.3 * rng.standard_normal(parameter.shape)
    ids = np.array([[5, 7, 9, 0], [1, 2, 0, 3]]), np.array([[3, 1, 0], [2, 2, 4]])
    logits = model(*ids), model(*ids, rng=np.random.default_rng(0))
    return shapes, logits


OPTIONS = {
    "source_vocab_size": 14,
    "target_vocab_size": 14,
    "d_model": 24,
    "num_heads": 2,
    "num_encoder_layers": 2,
    "num_decoder_layers": 1,
    "d_ff": 5,
    "d_k": 5,
    "d_v": 5,
    "norm": "post",
    "final_norm": False,
    "norm_bias": False,
    "norm_eps": 0.5,
    "attention_bias": True,
    "feed_forward_bias": False,
    "output_bias": False,
    "activation": "gelu",
    "cross_attention": "shared",
    "dropout": 0.5,
    "attention_dropout": 0.5,
    "position_dropout": 0.5,
    "pad_id": None,
    "positions": "learned",
    "scale_embeddings": True,
    "tie_embeddings": "target_output",
}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_has_an_effect(name):
    shapes, logits = outcome(**{name: OPTIONS[name]})
    old_shapes, old_logits = outcome()
    assert shapes != old_shapes or any(
        a.shape != b.shape or np.abs(a - b).max() > 1e-6 for a, b in zip(logits, old_logits)
    )


def test_every_option_is_tried():
    """max_len is tried in the tests of lengths."""
    assert {*OPTIONS, "max_len"} == {field.name for field in fields(TransformerConfig)}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("activation", ["relu", "gelu", "gelu_tanh"]),
        ("tie_embeddings", TIES),
        ("pad_id", [None, 0, 1, 2]),
        ("norm_eps", [1e-5, 1e-3]),
    ],
)
def test_all_values_of_an_option_differ(name, values):
    outcomes = [outcome(**{name: value}) for value in values]
    for i, (shapes, (logits, _)) in enumerate(outcomes):
        for other_shapes, (other, _) in outcomes[:i]:
            assert shapes != other_shapes or np.abs(logits - other).max() > 1e-7


def test_max_len_is_the_number_of_learned_rows():
    for max_len in 3, 5:
        model = small_model(positions="learned", max_len=max_len)
        assert model.source_positions.P.shape == model.target_positions.P.shape == (max_len, 6)
        assert model.source_positions.P is not model.target_positions.P


def test_the_norm_options_reach_every_norm():
    model = small_model(norm_eps=0.5, norm_bias=False, norm="post", final_norm=True)
    norms = [model.encoder.norm, model.decoder.norm]
    for layer in model.encoder.layers:
        norms += [layer.norm1, layer.norm2]
    for layer in model.decoder.layers:
        norms += [layer.norm1, layer.norm2, layer.norm3]
    assert len(norms) == 12
    assert all(norm.eps == 0.5 and norm.beta is None for norm in norms)


# Weights


@pytest.mark.parametrize("tie", TIES)
@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_weights_are_independent(positions, tie):
    options = {"attention_bias": True, "positions": positions, "tie_embeddings": tie}
    config = TransformerConfig(11, 11, **TWO_LAYERS, **SMALL, **options)
    model = Transformer(config, 0)
    tables = {"none": 3, "target_output": 2, "source_target": 2, "all": 1}[tie]
    matrices = [p.value for p in model.parameters() if p.value.ndim == 2]
    assert len(matrices) == 2 * 6 + 2 * 10 + tables + 2 * (positions == "learned")
    for i, a in enumerate(matrices):
        assert not any(a.shape == b.shape and (a == b).all() for b in matrices[:i])
    arrays = [p.value for p in model.parameters()]
    for i, a in enumerate(arrays):
        assert not any(np.shares_memory(a, b) for b in arrays[:i])


def test_same_seed_same_model():
    config = TransformerConfig(11, 13, positions="learned", **TWO_LAYERS, **SMALL)
    one, same, other = (Transformer(config, seed) for seed in (1, 1, 2))
    default, zero = Transformer(config), Transformer(config, np.random.default_rng(0))
    for name, array in one.state_dict().items():
        assert_equal(same.state_dict()[name], array)
        assert_equal(default.state_dict()[name], zero.state_dict()[name])
        assert array.ndim == 1 or (other.state_dict()[name] != array).any()


@pytest.mark.parametrize("tie", TIES)
@pytest.mark.parametrize("output_bias", [True, False])
def test_tied_tables_are_one_parameter_counted_once(tie, output_bias):
    options = {"tie_embeddings": tie, "output_bias": output_bias}
    config = TransformerConfig(11, 11, **ONE_LAYER, **SMALL, **options)
    model = Transformer(config)
    names = {name for name, _ in model.named_parameters()}
    expected = {
        "none": {"source_embedding.W", "target_embedding.W", "output.W"},
        "target_output": {"source_embedding.W", "target_embedding.W"},
        "source_target": {"source_embedding.W", "output.W"},
        "all": {"source_embedding.W"},
    }[tie]
    outside = {name for name in names if not name.startswith(("encoder.", "decoder."))}
    assert outside == expected | ({"output.b"} if output_bias else set())
    inside = model.encoder.num_parameters() + model.decoder.num_parameters()
    assert model.num_parameters() == inside + 66 * len(expected) + 11 * output_bias
    assert set(model.state_dict()) == names


def test_a_tied_gradient_is_the_sum_of_the_uses():
    """Of all three, as an untied model with the same weights has them apart."""
    rng = np.random.default_rng(0)
    options = {**ONE_LAYER, **SMALL, "scale_embeddings": True, "pad_id": 0}
    tied = Transformer(
        TransformerConfig(11, 11, tie_embeddings="all", **options), dtype=np.float64
    )
    untied = Transformer(TransformerConfig(11, 11, **options), dtype=np.float64)
    state = randomise(tied, rng).state_dict()
    W = state["source_embedding.W"]
    untied.load_state_dict({**state, "target_embedding.W": W, "output.W": W.T})
    source_ids, target_ids, _ = draw_ids(rng, tied.config, 3, 5, 7)
    logits, ctx = tied.forward(source_ids, target_ids)
    other, other_ctx = untied.forward(source_ids, target_ids)
    assert_close(logits, other)
    dy = rng.standard_normal(logits.shape)
    tied.backward(ctx, dy)
    untied.backward(other_ctx, dy)
    parts = untied.source_embedding.W.grad, untied.target_embedding.W.grad, untied.output.W.grad.T
    assert all(part.any() for part in parts)
    assert_close(tied.source_embedding.W.grad, sum(parts))


# Dropout


def dropouts(model):
    return dropout_places(model.forward(GOOD, GOOD, rng=np.random.default_rng(0))[1])


def test_places_of_dropout():
    def places(**rates):
        return set(dropouts(small_model(**rates)))

    off = {"attention_dropout": 0.0, "position_dropout": 0.0}
    positions = {"encode.embed.dropout", "decode.embed.dropout"}
    everywhere = places(dropout=0.5)
    attention = {path for path in everywhere if path.endswith("attention.dropout")}
    assert places() == set()
    assert places(position_dropout=0.5) == positions
    assert places(attention_dropout=0.5) == attention
    assert places(dropout=0.5, **off) == everywhere - attention - positions
    assert len(attention) == 2 * 1 + 2 * 2
    assert len(everywhere) == 2 + 2 * (1 + 3) + 2 * (2 + 4)


def test_rates_of_dropout():
    rates = small_model(dropout=0.1, attention_dropout=0.4, position_dropout=0.7)
    assert rates.position_dropout.p == 0.7
    for layer in (*rates.encoder.layers, *rates.decoder.layers):
        assert layer.self_attention.attention.dropout.p == 0.4
        assert layer.feed_forward.dropout.p == layer.residual1.dropout.p == 0.1
    same = small_model(dropout=0.1)
    assert same.position_dropout.p == 0.1
    assert same.decoder.layers[1].cross_attention.attention.dropout.p == 0.1


def test_inference_between_training_steps():
    model, plain = small_model(dropout=0.5), small_model()
    first = model(GOOD, GOOD)
    dropped = model(GOOD, GOOD, rng=np.random.default_rng(0))
    second = model(GOOD, GOOD)
    dropped_again = model(GOOD, GOOD, rng=np.random.default_rng(0))
    assert_equal(first, second)
    assert_equal(first, plain(GOOD, GOOD))
    assert_equal(dropped, dropped_again)
    assert (dropped != first).any()
    assert (dropped != model(GOOD, GOOD, rng=np.random.default_rng(1))).any()


def test_no_two_dropouts_draw_the_same():
    keeps = list(dropouts(small_model(dropout=0.5)).values())
    for i, a in enumerate(keeps):
        for b in keeps[:i]:
            assert a.size < 24 or a.shape != b.shape or (a != b).any()
