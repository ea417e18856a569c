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
    plain_embed,
    plain_layer,
    plain_norm,
    plain_output,
    randomise,
    seeds,
)
from hypothesis import given
from hypothesis import strategies as st

from npdecoder import CrossEntropy, LanguageModel, LanguageModelConfig, causal_mask
from npdecoder.models.token_model import token_positions

ties = st.sampled_from(["none", "target_output"])


def draw_model(rng, sizes, tie, options):
    V, h, d_k, d_v, B, T = sizes
    sizes = {"d_model": 6, "num_heads": h, "d_ff": 7, "d_k": d_k, "d_v": d_v, "max_len": 13}
    config = LanguageModelConfig(V, num_layers=2, **sizes, tie_embeddings=tie, **options)
    model = randomise(LanguageModel(config, rng, dtype=np.float64), rng)
    return model, *rng.integers(0, V, (2, B, T))


@few(12)
@given(sizes=distinct_primes(6), tie=ties, options=model_options, seed=seeds)
def test_gradients_of_the_loss(sizes, tie, options, seed):
    rng = np.random.default_rng(seed)
    model, ids, targets = draw_model(rng, sizes, tie, options)
    assert_gradients(Loss(model), ids, targets, mode="directional", rng=rng)


def test_gradients_entry_by_entry():
    rng = np.random.default_rng(0)
    config = LanguageModelConfig(
        5, d_model=4, num_heads=2, num_layers=1, d_ff=3, max_len=5, pad_id=0,
        tie_embeddings="target_output", positions="learned", activation="gelu",
    )  # fmt: skip
    model = randomise(LanguageModel(config, dtype=np.float64), rng)
    report = assert_gradients(Loss(model), *rng.integers(0, 5, (2, 3, 5)))
    assert len(report.rows) == len(model.parameters())


@given(sizes=distinct_primes(6), tie=ties, options=model_options, seed=seeds)
def test_equals_the_plain_functions(sizes, tie, options, seed):
    rng = np.random.default_rng(seed)
    model, ids, _ = draw_model(rng, sizes, tie, options)
    c, T = model.config, ids.shape[1]
    mask = is_real(ids, c)[:, None, None, :] & np.tri(T, dtype=bool)
    x = plain_embed(ids, model.embedding, model.positions, c)
    for layer in model.decoder.layers:
        x = plain_layer(layer, x, c.norm, mask)
    if model.decoder.norm is not None:
        x = plain_norm(model.decoder.norm, x)
    assert_close(model(ids), plain_output(model, model.embedding, x))


def small_model(dtype=np.float64, **options):
    options = {"d_model": 6, "num_heads": 3, "num_layers": 2, "d_ff": 7, "pad_id": 0,
               "max_len": 11, **options}  # fmt: skip
    model = LanguageModel(LanguageModelConfig(13, **options), dtype=dtype)
    return randomise(model, np.random.default_rng(0))


KINDS = [{}, {"norm": "post"}, {"positions": "learned", "tie_embeddings": "target_output"}]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_future_does_not_move_a_bit(kind, dtype):
    model = small_model(dtype, **kind)
    ids = np.random.default_rng(1).integers(1, 13, (3, 7))
    before = model(ids)
    for t in range(1, 7):
        moved = ids.copy()
        moved[:, t] = moved[:, t] % 12 + 1
        after = model(moved)
        assert_equal(after[:, :t], before[:, :t])
        assert (after[:, t:] != before[:, t:]).any(axis=-1).all()


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-12), (np.float32, 1e-5)])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_nothing(kind, side, dtype, tolerance):
    """Logits at the real positions, and gradients of the loss over the real tokens."""
    if kind.get("tie_embeddings"):
        kind = {**kind, "tie_embeddings": "none"}  # the pad row is a class of a tied output
    model = small_model(dtype, **kind)
    model.embedding.W.value[0] = 1e3
    sequences, following = [[5, 7, 9], [5, 7, 9, 4, 2], [1]], [[7, 9, 3], [7, 9, 4, 2, 6], [2]]
    ids, real = padded(sequences, side)
    targets, _ = padded(following, side)
    loss_layer = CrossEntropy(ignore_index=0)
    logits, ctx = model.forward(ids)
    _, loss_ctx = loss_layer.forward(logits, targets)
    model.backward(ctx, loss_layer.backward(loss_ctx))
    found = parameter_gradients(model)

    model.zero_grad()
    for item, (sequence, target) in enumerate(zip(sequences, following)):
        alone, ctx = model.forward([sequence])
        assert_close(logits[item][real[item]], alone[0], tolerance)
        _, loss_ctx = loss_layer.forward(alone, [target])
        model.backward(ctx, loss_layer.backward(loss_ctx, loss_ctx.count / real.sum()))
    largest = max(np.abs(grad).max() for grad in found.values())
    for name, expected in parameter_gradients(model).items():
        assert np.abs(found[name] - expected).max() <= tolerance * max(1, largest), name
    assert (found["embedding.W"][0] == 0).all()


@pytest.mark.parametrize(
    "mask",
    [
        np.ones((7, 7), bool),
        np.ones((3, 1, 1, 7), bool),
        np.zeros((7, 7)),
        np.zeros((3, 3, 7, 7), np.float32),
    ],
)
def test_a_mask_that_hides_nothing_changes_nothing(mask):
    model = small_model()
    ids = np.random.default_rng(1).integers(0, 13, (3, 7))
    assert_equal(model(ids, mask), model(ids))


def test_a_mask_hides_besides_the_future():
    model = small_model()
    ids = np.random.default_rng(1).integers(1, 13, (3, 7))
    mask = np.random.default_rng(2).random((3, 3, 7, 7)) < 0.6
    _, ctx = model.forward(ids, mask)
    for layer in ctx.decoder.layers:
        A = layer.self_attention.attend.attention.A
        np.testing.assert_array_equal(A > 0, mask & causal_mask(7))


@pytest.mark.parametrize(
    ("ids", "mask", "error", "message"),
    [
        (np.ones(3, int), None, ValueError, r"ids has shape \(3,\), expected \(B, T\)"),
        (np.ones((2, 3, 1), int), None, ValueError, r"ids has shape \(2, 3, 1\)"),
        (np.ones((2, 3)), None, TypeError, "ids has dtype float64"),
        (np.ones((2, 3), bool), None, TypeError, "ids has dtype bool"),
        (np.array([[1, -1]]), None, IndexError, r"ids\[0, 1\] is -1"),
        (np.array([[13, 1]]), None, IndexError, r"ids\[0, 0\] is 13"),
        (np.ones((2, 12), int), None, ValueError, "(x|ids) has 12 positions, more than max_len 11"),
        (np.ones((2, 3), int), np.ones((2, 3), bool), ValueError, "mask has shape"),
        (np.ones((2, 3), int), np.ones((2, 3, 3), bool), ValueError, "mask has shape"),
        (np.ones((2, 3), int), np.ones((3, 3), int), TypeError, "mask has dtype int"),
    ],
)
def test_bad_input(ids, mask, error, message):
    with pytest.raises(error, match=f"^{message}"):
        small_model()(ids, mask)


@pytest.mark.parametrize(
    ("options", "error", "name"),
    [
        ({"vocab_size": 0}, ValueError, "vocab_size"),
        ({"num_layers": 0}, ValueError, "num_layers"),
        ({"num_heads": 4, "d_model": 6}, ValueError, "num_heads"),
        ({"tie_embeddings": "all"}, ValueError, "tie_embeddings"),
        ({"positions": "none"}, ValueError, "positions"),
        ({"pad_id": 13}, ValueError, "pad_id"),
        ({"pad_id": -1}, ValueError, "pad_id"),
        ({"norm": "both"}, ValueError, "norm"),
        ({"dropout": np.nan}, ValueError, "dropout"),
        ({"norm_eps": -1.0}, ValueError, "norm_eps"),
    ],
)
def test_config_is_checked(options, error, name):
    with pytest.raises(error, match=rf"\b{name}\b"):
        LanguageModelConfig(**{"vocab_size": 13, **options})


def test_tied_output():
    tied, untied = small_model(tie_embeddings="target_output"), small_model()
    names = [name for name, _ in tied.named_parameters()]
    assert names[0] == "embedding.W"
    assert "output.W" not in names
    assert "output.W" in dict(untied.named_parameters())
    assert tied.output.W is tied.embedding.W
    assert untied.num_parameters() - tied.num_parameters() == 13 * 6


def test_weights_are_independent():
    config = LanguageModelConfig(13, d_model=6, num_heads=3, num_layers=3, positions="learned")
    model, same = LanguageModel(config, 1), LanguageModel(config, 1)
    matrices = [p.value for p in model.parameters() if p.value.ndim == 2]
    assert len(matrices) == 3 * 6 + 3
    for i, a in enumerate(matrices):
        assert not any(a.shape == b.shape and (a == b).all() for b in matrices[:i])
    assert_equal([p.value for p in model.parameters()], [p.value for p in same.parameters()])


def test_places_of_dropout():
    def places(**rates):
        _, ctx = small_model(**rates).forward([[1, 2, 3]], rng=np.random.default_rng(0))
        return set(dropout_places(ctx))

    everywhere = places(dropout=0.5)
    attention = {path for path in everywhere if path.endswith("attention.dropout")}
    assert len(attention) == 2
    assert len(everywhere) == 1 + 2 * 4
    assert places() == set()
    assert places(attention_dropout=0.5) == attention
    assert places(position_dropout=0.5) == {"embed.dropout"}
    others = everywhere - attention - {"embed.dropout"}
    assert places(dropout=0.5, attention_dropout=0.0, position_dropout=0.0) == others


def test_positions_count_what_is_not_padding():
    ids = np.array([[0, 0, 5, 7], [5, 0, 7, 0], [0, 0, 0, 0], [1, 2, 3, 4]])
    real = ids != 0
    positions = token_positions(real)
    expected = [0, 1, 0, 1, 0, 1, 2, 3]
    np.testing.assert_array_equal(positions[real], expected)
    assert positions.min() >= 0
    assert positions.max() < 4
    np.testing.assert_array_equal(token_positions(real[3:]), [[0, 1, 2, 3]])
