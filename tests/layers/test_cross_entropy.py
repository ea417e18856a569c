import math
from itertools import pairwise

import numpy as np
import pytest
from helpers import assert_close, assert_equal, assert_gradients, distinct_primes, seeds
from hypothesis import given
from hypothesis import strategies as st

from npdecoder import CrossEntropy, Linear, softmax

smoothings = st.sampled_from([0.0, 0.1, 0.3, 1.0])


def loss_and_gradient(layer, logits, targets, dloss=1.0):
    loss, ctx = layer.forward(logits, targets)
    return loss, layer.backward(ctx, dloss), ctx


@given(
    sizes=distinct_primes(3, 7),
    rank=st.integers(0, 2),
    ignore=st.sampled_from([None, -100, 0, 1]),
    smoothing=smoothings,
    seed=seeds,
)
def test_gradients(sizes, rank, ignore, smoothing, seed):
    rng = np.random.default_rng(seed)
    V, *leading = sizes
    logits = 2 * rng.standard_normal((*leading[:rank], V))
    targets = rng.integers(0, V, leading[:rank])
    if ignore is not None:
        targets = np.where(rng.random(leading[:rank]) < 0.4, ignore, targets)
    assert_gradients(CrossEntropy(ignore, smoothing), logits, targets)


@given(sizes=distinct_primes(3), smoothing=smoothings, seed=seeds)
def test_definition(sizes, smoothing, seed):
    rng = np.random.default_rng(seed)
    B, T, V = sizes
    logits, targets = rng.standard_normal((B, T, V)), rng.integers(-1, V, (B, T))
    targets[0, 0] = 0
    loss, dlogits, ctx = loss_and_gradient(CrossEntropy(-1, smoothing), logits, targets)
    wanted = (1 - smoothing) * np.eye(V)[targets] + smoothing / V
    p, counted = softmax(logits), targets != -1
    assert ctx.count == counted.sum()
    expected = -(wanted * np.log(p)).sum(axis=-1)[counted].mean()
    assert abs(loss - expected) < 1e-12
    assert_close(dlogits, (p - wanted) * counted[..., None] / counted.sum())


def test_plain_mean_over_items_and_positions():
    """Neither T nor N is left out or doubled: the loss of uniform logits is log V at any size."""
    for B, T, V in (2, 3, 5), (7, 1, 3), (1, 11, 2):
        loss, dlogits, _ = loss_and_gradient(
            CrossEntropy(), np.zeros((B, T, V)), np.zeros((B, T), int)
        )
        assert abs(loss - math.log(V)) < 1e-14
        assert_close(dlogits[0, 0], (1 / V - np.eye(V)[0]) / (B * T))


def test_logits_out_of_range():
    with np.errstate(all="raise"):
        loss, dlogits, _ = loss_and_gradient(CrossEntropy(), [[1000.0, 0.0, -1000.0]], [1])
    assert loss == 1000.0
    np.testing.assert_array_equal(dlogits, [[1, -1, 0]])


def test_a_row_with_nan_or_inf_leaves_the_others_alone():
    logits = np.array([[1.0, 2.0], [np.nan, 0.0], [np.inf, 0.0]])
    with np.errstate(all="raise"):
        loss, dlogits, _ = loss_and_gradient(CrossEntropy(), logits, [0, 1, 1])
    assert np.isnan(loss)
    assert np.isnan(dlogits[1:]).all()
    _, alone, _ = loss_and_gradient(CrossEntropy(), logits[:1], [0])
    assert_close(dlogits[0], alone[0] / 3)
    loss, dlogits, _ = loss_and_gradient(CrossEntropy(9), logits, [0, 9, 9])
    assert np.isfinite(loss)
    assert_equal(dlogits, np.concatenate([alone, np.zeros((2, 2))]))


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_every_target_ignored(smoothing):
    layer = CrossEntropy(-100, smoothing)
    with np.errstate(all="raise"):
        loss, dlogits, ctx = loss_and_gradient(layer, [[1.0, 2, 3], [0, 0, 0]], [-100, -100])
    assert loss == 0.0
    assert math.copysign(1.0, loss) == 1.0
    assert ctx.count == 0
    np.testing.assert_array_equal(dlogits, np.zeros((2, 3)))


SMOOTHED = {
    "logits": np.array([[2.0, 0, 1], [0, 3, 0], [5, -5, 0]]),
    "targets": np.array([0, 1, -100]),
    "gradient": [
        [-0.06737952211258912, -0.004984713414809784, 0.07236423552739882],
        [-0.02736074962818546, 0.054721499256370994, -0.02736074962818546],
        [0, 0, 0],
    ],
}


def test_label_smoothing_with_ignored_targets():
    layer = CrossEntropy(-100, 0.3)
    logits, targets = SMOOTHED["logits"], SMOOTHED["targets"]
    loss, dlogits, ctx = loss_and_gradient(layer, logits, targets)
    assert abs(loss - 0.7012644604326704) < 1e-12
    assert abs(loss * ctx.count - 1.4025289208653409) < 1e-12
    np.testing.assert_allclose(dlogits, SMOOTHED["gradient"], rtol=1e-10)

    deleted, _, _ = loss_and_gradient(layer, logits[:2], targets[:2])
    assert deleted == loss
    moved = logits.copy()
    moved[2] += [7, 8, 9]
    assert_equal(loss_and_gradient(layer, moved, targets)[:2], (loss, dlogits))


def test_smoothing_0_is_plain_and_a_vocabulary_of_1_costs_nothing():
    rng = np.random.default_rng(0)
    logits, targets = rng.standard_normal((5, 3)), rng.integers(0, 3, 5)
    plain = loss_and_gradient(CrossEntropy(), logits, targets)
    assert_equal(plain[:2], loss_and_gradient(CrossEntropy(None, 0.0), logits, targets)[:2])
    loss, dlogits, _ = loss_and_gradient(CrossEntropy(None, 0.3), np.ones((5, 1)), np.zeros(5, int))
    assert loss == 0.0
    assert np.abs(dlogits).max() < 1e-15


@given(seed=seeds, cuts=st.lists(st.integers(0, 11), max_size=4), smoothing=smoothings)
def test_micro_batches_add_up_to_the_batch(seed, cuts, smoothing):
    rng = np.random.default_rng(seed)
    layer = CrossEntropy(-1, smoothing)
    head = Linear(3, 5, rng=rng, dtype=np.float64)
    x, targets = rng.standard_normal((11, 3)), rng.integers(-1, 5, 11)

    def gradient(pieces):
        """Summed over pieces of the batch, dloss = count / total for each."""
        total = np.count_nonzero(targets != -1)
        head.zero_grad()
        losses = 0.0
        for piece in pieces:
            logits, ctx = head.forward(x[piece])
            loss, loss_ctx = layer.forward(logits, targets[piece])
            head.backward(ctx, layer.backward(loss_ctx, loss_ctx.count / total))
            losses += loss * loss_ctx.count / total
        return losses, head.W.grad.copy(), head.b.grad.copy()

    edges = [0, *sorted(cuts), 11]
    pieces = [slice(a, b) for a, b in pairwise(edges)]
    assert_close(gradient(pieces), gradient([slice(None)]), 1e-13)


def test_micro_batch_values():
    head = Linear(2, 2, bias=False, dtype=np.float64)
    head.W.value = np.array([[0.1, -0.2], [0.3, 0.4]]).T
    layer, total = CrossEntropy(), 0.0
    for x, targets in ([[1.0, 0]], [0]), ([[0.0, 1], [1, 1], [2, 0]], [1, 1, 0]):
        logits, ctx = head.forward(x)
        loss, loss_ctx = layer.forward(logits, targets)
        head.backward(ctx, layer.backward(loss_ctx, loss_ctx.count / 4))
        total += loss * loss_ctx.count / 4
    assert abs(total - 0.629935684553802) < 1e-12
    row = np.array([-0.35929594966624856, 0.16609230316164802])
    np.testing.assert_allclose(head.W.grad.T, [row, -row], rtol=1e-10)


@given(dloss=st.sampled_from([0.0, -2.5, 3]), seed=seeds)
def test_dloss_scales_the_gradient(dloss, seed):
    rng = np.random.default_rng(seed)
    logits, targets = rng.standard_normal((5, 3)), rng.integers(0, 3, 5)
    _, once, _ = loss_and_gradient(CrossEntropy(), logits, targets)
    _, scaled, _ = loss_and_gradient(CrossEntropy(), logits, targets, dloss)
    assert_close(scaled, dloss * once)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.longdouble])
def test_loss_is_summed_in_float64_and_the_gradient_keeps_the_dtype(dtype):
    logits = np.full((1000, 3), [0, 1, 2], dtype)
    targets = np.arange(1000) % 3
    loss, dlogits, _ = loss_and_gradient(CrossEntropy(None, 0.1), logits, targets)
    assert np.asarray(loss).dtype == np.promote_types(dtype, np.float64)
    assert dlogits.dtype == dtype
    exact, _, _ = loss_and_gradient(CrossEntropy(None, 0.1), logits.astype(np.float64), targets)
    assert abs(loss - exact) < 1e-6


@pytest.mark.parametrize("dtype", ["i1", "u1", ">i2", "u4", ">u8"])
def test_targets_of_any_integer_dtype(dtype):
    rng = np.random.default_rng(0)
    logits, targets = rng.standard_normal((7, 5)), np.array([0, 4, 1, 1, 2, 3, 4])
    for ignore in None, 1, -100:
        expected = loss_and_gradient(CrossEntropy(ignore), logits, targets)
        found = loss_and_gradient(CrossEntropy(ignore), logits, targets.astype(dtype))
        assert_equal(found[:2], expected[:2])
        assert found[2].count == expected[2].count


@given(rank=st.integers(0, 3), ignore=st.sampled_from([None, -100, 0, 1, 9]), seed=seeds)
def test_count_is_what_forward_divides_by(rank, ignore, seed):
    rng = np.random.default_rng(seed)
    targets = rng.integers(0, 5, (2, 3, 4)[:rank])
    if ignore is not None:
        targets = np.where(rng.random(targets.shape) < 0.4, ignore, targets)
    layer = CrossEntropy(ignore)
    _, ctx = layer.forward(rng.standard_normal((*targets.shape, 5)), targets)
    assert layer.count(targets) == ctx.count == layer.count(targets.tolist())
    assert type(layer.count(targets)) is int


def test_count_values():
    targets = [[0, 4, -100], [-100, 1, 4]]
    counts = {ignore: CrossEntropy(ignore).count(targets) for ignore in (None, -100, 4, 0, 9)}
    assert counts == {None: 6, -100: 4, 4: 4, 0: 5, 9: 6}
    layer = CrossEntropy(-100, label_smoothing=0.3)
    assert layer.count(targets) == 4
    assert (layer.count(-100), layer.count(3)) == (0, 1)
    assert layer.count(np.full((2, 3), -100)) == 0
    assert layer.count(np.zeros((2, 0), int)) == 0


@pytest.mark.parametrize("dtype", ["i1", "u1", ">i2", "u4", ">u8"])
def test_count_of_targets_of_any_integer_dtype(dtype):
    targets = np.array([[0, 4, 1], [1, 2, 3]]).astype(dtype)
    assert CrossEntropy(1).count(targets) == 4
    assert CrossEntropy(-100).count(targets) == CrossEntropy(300).count(targets) == 6
    assert CrossEntropy(1).count(targets.T[::2]) == 2


BAD = [
    (np.zeros((2, 5)), [0, 5], IndexError, r"targets\[1\] is 5, expected an id in \[0, 5\)"),
    (np.zeros((2, 5)), [-4, 0], IndexError, r"targets\[0\] is -4"),
    (np.zeros((2, 5)), [0.0, 1.0], TypeError, "targets has dtype float64"),
    (np.zeros((2, 5)), [True, False], TypeError, "targets has dtype bool"),
    (np.zeros((2, 5)), [0, 1, 2], ValueError, r"logits \(2, 5\) and targets \(3,\)"),
    (np.zeros((2, 5)), [[0, 1]], ValueError, r"logits \(2, 5\) and targets \(1, 2\)"),
    (np.zeros((2, 1, 5)), [0, 1], ValueError, r"logits \(2, 1, 5\) and targets \(2,\)"),
    (np.zeros((2, 5)), 0, ValueError, r"logits \(2, 5\) and targets \(\)"),
    (np.zeros((2, 0)), [0, 0], ValueError, r"logits \(2, 0\)"),
    (np.float64(1), 0, ValueError, r"logits \(\)"),
    (np.zeros((2, 5), np.float16), [0, 1], TypeError, "logits has dtype float16"),
    (np.zeros((2, 5), np.int64), [0, 1], TypeError, "logits has dtype int64"),
]


@pytest.mark.parametrize(("logits", "targets", "error", "message"), BAD)
def test_bad_input(logits, targets, error, message):
    with pytest.raises(error, match=f"^{message}"):
        CrossEntropy(ignore_index=-1)(logits, targets)


@pytest.mark.parametrize("smoothing", [-0.1, 1.1, np.nan])
def test_label_smoothing_is_checked(smoothing):
    with pytest.raises(ValueError, match=r"^label_smoothing is"):
        CrossEntropy(label_smoothing=smoothing)


@pytest.mark.parametrize("ignore", [0.5, "pad"])
def test_ignore_index_is_checked(ignore):
    with pytest.raises(TypeError, match=r"^ignore_index is"):
        CrossEntropy(ignore_index=ignore)


def test_logits_of_any_memory_layout():
    """backward works in place on an array of its own, however the logits were laid out."""
    rng = np.random.default_rng(0)
    logits, targets = rng.standard_normal((3, 4, 5)), rng.integers(0, 5, (3, 4))
    _, expected, _ = loss_and_gradient(CrossEntropy(), logits, targets)
    layouts = [
        np.asfortranarray(logits),
        np.ascontiguousarray(logits.transpose(2, 0, 1)).transpose(1, 2, 0),
        np.ascontiguousarray(logits.swapaxes(0, 1)).swapaxes(0, 1),
    ]
    for other in layouts:
        _, found, _ = loss_and_gradient(CrossEntropy(), other, targets)
        assert_equal(found, expected)
