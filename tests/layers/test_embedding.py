import numpy as np
import pytest
from helpers import assert_close, assert_gradients, distinct_primes, randomise, seeds
from hypothesis import given
from hypothesis import strategies as st

from npdecoder import CrossEntropy, Embedding, Layer, Unembedding


class TiedLoss(Layer):
    """Embedding, the tied output on top of it, and the cross-entropy: ids, targets -> loss."""

    def __init__(self, embedding, bias=False, ignore_index=None):
        self.embedding = embedding
        self.output = Unembedding(embedding, bias)
        self.loss = CrossEntropy(ignore_index)

    def forward(self, ids, targets):
        x, embedding = self.embedding.forward(ids)
        logits, output = self.output.forward(x)
        loss, loss_ctx = self.loss.forward(logits, targets)
        return loss, (embedding, output, loss_ctx)

    def backward(self, ctx, dloss=1.0):
        embedding, output, loss = ctx
        dx = self.output.backward(output, self.loss.backward(loss, dloss))
        return self.embedding.backward(embedding, dx)


def embedding_of(W, **options):
    W = np.asarray(W, np.float64)
    layer = Embedding(*W.shape, dtype=np.float64, **options)
    layer.W.value = W
    return layer


@given(
    sizes=distinct_primes(4, 7), rank=st.integers(0, 2), scale=st.booleans(), seed=seeds
)
def test_gradients(sizes, rank, scale, seed):
    rng = np.random.default_rng(seed)
    V, d_model, *leading = sizes
    layer = randomise(Embedding(V, d_model, scale, dtype=np.float64), rng)
    assert_gradients(layer, rng.integers(0, V, leading[:rank]))


@given(sizes=distinct_primes(4, 7), rank=st.integers(1, 3), bias=st.booleans(), seed=seeds)
def test_unembedding_gradients(sizes, rank, bias, seed):
    rng = np.random.default_rng(seed)
    V, d_model, *leading = sizes
    layer = Unembedding(Embedding(V, d_model, scale=True, dtype=np.float64), bias)
    randomise(layer, rng)
    x = rng.standard_normal((*leading[: rank - 1], d_model))
    assert_gradients(layer, x)
    expected = np.einsum("...i,vi->...v", x, layer.W.value) + (layer.b.value if bias else 0.0)
    assert_close(layer(x), expected)


@given(sizes=distinct_primes(4, 7), scale=st.booleans(), bias=st.booleans(), seed=seeds)
def test_gradients_of_tied_embedding_and_output(sizes, scale, bias, seed):
    rng = np.random.default_rng(seed)
    V, d_model, B, T = sizes
    layer = randomise(TiedLoss(Embedding(V, d_model, scale, dtype=np.float64), bias), rng)
    names = [name for name, _ in layer.named_parameters()]
    assert names == ["embedding.W"] + ["output.b"] * bias
    assert_gradients(layer, rng.integers(0, V, (B, T)), rng.integers(0, V, (B, T)))


def test_repeated_ids_add_up():
    layer = embedding_of(np.zeros((4, 2)))
    ids, dy = [[1, 1, 3], [1, 0, 1]], np.arange(1.0, 13.0).reshape(2, 3, 2)
    _, ctx = layer.forward(ids)
    layer.backward(ctx, dy)
    expected = np.array([[9, 10], [22, 26], [0, 0], [5, 6]])
    np.testing.assert_array_equal(layer.W.grad, expected)
    layer.backward(ctx, dy)
    np.testing.assert_array_equal(layer.W.grad, 2 * expected)


@given(seed=seeds)
def test_gradient_is_the_product_with_onehot(seed):
    rng = np.random.default_rng(seed)
    layer = embedding_of(rng.standard_normal((3, 5)))
    ids, dy = rng.integers(0, 3, 50), rng.standard_normal((50, 5))
    _, ctx = layer.forward(ids)
    layer.backward(ctx, dy)
    assert_close(layer.W.grad, np.eye(3)[ids].T @ dy)


def test_a_padding_id_is_an_id_like_the_others():
    layer = embedding_of([[9, 9], [1, 2], [3, 4], [5, 6]])
    y, ctx = layer.forward([[0, 2, 0]])
    np.testing.assert_array_equal(y, [[[9, 9], [3, 4], [9, 9]]])
    layer.backward(ctx, np.ones((1, 3, 2)))
    np.testing.assert_array_equal(layer.W.grad, [[2, 2], [0, 0], [1, 1], [0, 0]])


def test_padding_row_gets_no_gradient_where_its_targets_are_ignored():
    """Tied, it still gets one as a class of the softmax: the row is not frozen."""
    layer = TiedLoss(embedding_of([[9, 9], [1, 2], [3, 4]]), ignore_index=0)
    _, ctx = layer.forward([1, 0], [2, 0])
    layer.backward(ctx)
    expected = [
        [0.9999998871858912, 1.9999997743717823],
        [5.9999993228364, 4.999999435929455],
        [-0.9999998874648379, -1.9999997749296758],
    ]
    np.testing.assert_allclose(layer.embedding.W.grad, expected, rtol=1e-10)

    untied = embedding_of([[9, 9], [1, 2], [3, 4]])
    x, ctx = untied.forward([1, 0])
    loss = CrossEntropy(ignore_index=0)
    _, loss_ctx = loss.forward(x, [1, 0])
    untied.backward(ctx, loss.backward(loss_ctx))
    assert (untied.W.grad[0] == 0).all()
    assert (untied.W.grad[1] != 0).all()


def test_tied_values():
    layer = TiedLoss(embedding_of([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]]))
    loss, ctx = layer.forward([0, 1], [1, 2])
    layer.backward(ctx)
    assert abs(loss - 1.0324734549284695) < 1e-12
    expected = [
        [0.0628601657073157, 0.092932525123993],
        [-0.07437541528462736, -0.0911704217289441],
        [-0.07518417520076401, -0.08846152817312455],
    ]
    np.testing.assert_allclose(layer.embedding.W.grad, expected, rtol=1e-10)


def test_tied_gradient_is_the_sum_of_both_uses():
    embedding = embedding_of([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])
    layer = TiedLoss(embedding)
    _, (embedding_ctx, output, loss) = layer.forward([0, 1], [1, 2])
    dx = layer.output.backward(output, layer.loss.backward(loss))
    of_output = embedding.W.grad.copy()
    embedding.zero_grad()
    embedding.backward(embedding_ctx, dx)
    of_embedding = embedding.W.grad.copy()
    np.testing.assert_allclose(
        of_embedding,
        [[0.003997601870483078] * 2, [-0.09069702664855876] * 2, [0, 0]],
        rtol=1e-10,
    )
    embedding.zero_grad()
    layer.backward((embedding_ctx, output, loss))
    assert_close(embedding.W.grad, of_output + of_embedding)


def test_tied_layers_hold_one_parameter():
    embedding = Embedding(5, 3, scale=True)
    output = Unembedding(embedding)
    assert output.W is embedding.W
    assert output.num_parameters() == 15
    embedding.W.value[2] = 7.0
    assert output(np.ones(3))[2] == 21.0, "the scale of the embedding does not apply to the output"


@pytest.mark.parametrize("scale", [False, True])
def test_lookup(scale):
    layer = randomise(Embedding(5, 7, scale, dtype=np.float64), np.random.default_rng(0))
    W = layer.W.value.copy()
    factor = 7**0.5 if scale else 1.0
    for ids in (3, [3, 3, 0], [[4], [1]]):
        y = layer(ids)
        assert_close(y, factor * W[np.array(ids)], 1e-15)
        y[...] = 0.0
        np.testing.assert_array_equal(layer.W.value, W)


def test_initial_weights():
    W = Embedding(2000, 64, rng=0, dtype=np.float64).W.value
    assert abs(W.std() - 64**-0.5) < 0.01 * 64**-0.5
    assert abs(W.mean()) < 0.01 * 64**-0.5
    assert (Unembedding(Embedding(5, 3), bias=True).b.value == 0).all()


@pytest.mark.parametrize("dtype", ["i1", "u1", ">i2", "u2", "<i4", ">u4", ">i8", "u8"])
def test_integers_of_any_width_and_byte_order(dtype):
    layer = Embedding(200, 3, rng=0)
    ids = [[3, 0], [100, 127]]
    y, ctx = layer.forward(np.array(ids, dtype))
    np.testing.assert_array_equal(y, layer(ids))
    layer.backward(ctx, y)
    layer2 = Embedding(200, 3, rng=0)
    _, ctx2 = layer2.forward(ids)
    layer2.backward(ctx2, y)
    np.testing.assert_array_equal(layer.W.grad, layer2.W.grad)


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([-1, 0], IndexError, r"ids\[0\] is -1, expected an id in \[0, 4\)"),
        ([[0, 1], [2, 4]], IndexError, r"ids\[1, 1\] is 4, expected an id in \[0, 4\)"),
        (np.array([1, 2**63], np.uint64), IndexError, r"ids\[1\] is 9223372036854775808"),
        (np.array(40000).astype(np.int16), IndexError, r"ids\[\] is -25536"),
        (np.array([True, False, True, True]), TypeError, "ids has dtype bool"),
        ([0.0, 1.0], TypeError, "ids has dtype float64"),
        (np.array([]), TypeError, "ids has dtype float64"),
        (["a"], TypeError, "ids has dtype <U1"),
        (np.array([None]), TypeError, "ids has dtype object"),
        (np.array([1j]), TypeError, "ids has dtype complex128"),
    ],
)
def test_bad_ids(ids, error, message):
    with pytest.raises(error, match=f"^{message}"):
        Embedding(4, 2)(ids)


@pytest.mark.parametrize(
    ("arguments", "error", "name"),
    [
        ((0, 2), ValueError, "vocab_size"),
        ((3, 0), ValueError, "d_model"),
        ((3.5, 2), TypeError, "vocab_size"),
    ],
)
def test_sizes_are_checked(arguments, error, name):
    with pytest.raises(error, match=rf"^{name} is"):
        Embedding(*arguments)
