"""gradcheck passes what is right, fails what is wrong, and refuses what it cannot judge.

A checker that passes everything would let every other test here pass too: so most of this file are
layers that are wrong on purpose.
"""

import types

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from npdecoder import (
    GELU,
    CrossEntropy,
    DecoderLayer,
    Dropout,
    Embedding,
    FeedForward,
    Layer,
    LayerNorm,
    LearnedPositions,
    Linear,
    MemoryProjection,
    MultiHeadAttention,
    Parameter,
    ReLU,
    ScaledDotProductAttention,
    Softmax,
    Transformer,
    TransformerConfig,
    Unembedding,
    gradcheck,
)
from npdecoder.gradcheck import GradcheckReport, GradcheckRow

MODES = ("full", "directional")
both_modes = pytest.mark.parametrize("mode", MODES)

modes = st.sampled_from(MODES)
seeds = st.integers(0, 2**32 - 1)
sizes = st.permutations([2, 3, 5, 7])  # distinct primes: no wrong transpose fits by chance


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def randomise(layer, seed=0):
    rng = np.random.default_rng(seed)
    for parameter in layer.parameters():
        parameter.value = rng.standard_normal(parameter.shape)
    return layer


def failed(report):
    return [row.name for row in report.rows if not row.ok]


def assert_passes(layer, *inputs, **options):
    report = gradcheck(layer, *inputs, **options)
    assert report.ok, f"\n{report}"
    assert failed(report) == []
    assert report.max_relative_error <= 1e-6
    return report


def assert_fails(layer, *inputs, **options):
    report = gradcheck(layer, *inputs, **options)
    assert not report.ok, f"\n{report}"
    return report


# Layers to check


class Function:
    """A plain class, as a student writes it: y = f(*xs), and df(*xs, dy) the gradients."""

    def __init__(self, f, df):
        self.f, self.df = f, df

    def forward(self, *xs):
        return self.f(*xs), xs

    def backward(self, ctx, dy):
        return self.df(*ctx, dy)


def cube(factor=1.0):
    return Function(lambda x: x**3, lambda x, dy: factor * 3 * x**2 * dy)


def times(factor, backward_factor=None):
    backward_factor = factor if backward_factor is None else backward_factor
    return Function(lambda x: factor * x, lambda x, dy: backward_factor * dy)


class Counted:
    """Calls another layer, counts the calls, and can fail at one of them."""

    def __init__(self, layer, fail_forward_at=None, fail_backward_at=None):
        self.layer = layer
        self.fail_forward_at, self.fail_backward_at = fail_forward_at, fail_backward_at
        self.forwards = self.backwards = 0

    def named_parameters(self):
        return self.layer.named_parameters()

    def forward(self, *inputs, **keywords):
        self.forwards += 1
        if self.forwards == self.fail_forward_at:
            raise ZeroDivisionError("forward")
        return self.layer.forward(*inputs, **keywords)

    def backward(self, ctx, dy):
        self.backwards += 1
        grads = self.layer.backward(ctx, dy)
        if self.backwards == self.fail_backward_at:
            raise ZeroDivisionError("backward")
        return grads


class Tied(Layer):
    """One W as embedding and as output head."""

    def __init__(self, vocab_size, d_model):
        self.embedding = Embedding(vocab_size, d_model, dtype=np.float64)
        self.head = Unembedding(self.embedding)

    def forward(self, ids):
        rows, embedding = self.embedding.forward(ids)
        logits, head = self.head.forward(np.sin(rows))
        return logits, (rows, embedding, head)

    def backward(self, ctx, dy):
        rows, embedding, head = ctx
        drows = self.head.backward(head, dy) * np.cos(rows)
        return self.embedding.backward(embedding, drows)


class Residual(Layer):
    """y = x + norm(x)."""

    def __init__(self, d_model):
        self.norm = LayerNorm(d_model, dtype=np.float64)

    def forward(self, x):
        y, norm = self.norm.forward(x)
        return x + y, norm

    def backward(self, ctx, dy):
        return dy + self.norm.backward(ctx, dy)


def linear(sizes):
    B, T, d, e = sizes
    return Linear(d, e, dtype=np.float64), [normal(B, T, d)]


def layer_norm(sizes):
    B, T, *_ = sizes
    return LayerNorm(11, dtype=np.float64), [normal(B, T, 11)]


def attention(sizes):
    B, T, S, d = sizes
    return ScaledDotProductAttention(), [normal(B, T, d), normal(B, S, d), normal(B, S, d + 1)]


def feed_forward(sizes):
    B, T, d, _ = sizes
    return FeedForward(d, 11, "gelu", dtype=np.float64), [normal(B, T, d)]


def tied(sizes):
    B, T, d, V = sizes
    return Tied(V, d), [np.arange(B * T).reshape(B, T) % V]


def cross_entropy(sizes):
    B, T, *_ = sizes
    return CrossEntropy(), [normal(B, T, 11), np.arange(B * T).reshape(B, T) % 11]


def residual(sizes):
    return Residual(11), [normal(sizes[0], 11)]


def softmax(sizes):
    return Softmax(), [normal(*sizes[:3])]


def gelu(sizes):
    return GELU(), [normal(*sizes[:3])]


cases = st.sampled_from(
    [linear, layer_norm, attention, feed_forward, tied, cross_entropy, residual, softmax, gelu]
)


# Right layers pass


@given(cases, sizes, seeds, modes)
def test_right_layers_pass(case, sizes, seed, mode):
    layer, inputs = case(sizes)
    report = assert_passes(randomise(layer, seed), *inputs, mode=mode, seed=seed)
    floats = [x for x in inputs if x.dtype.kind == "f"]
    assert [row.shape for row in report.rows] == [
        x.shape for x in (*floats, *(p.value for p in layer.parameters()))
    ]


# Wrong layers fail: a right layer, of which one gradient is changed


class Mutant(Layer):
    """A right layer whose gradient number `target` (inputs first, then parameters) is changed."""

    def __init__(self, layer, change, target):
        self.layer, self.change, self.target = layer, change, target

    def forward(self, *inputs):
        return self.layer.forward(*inputs)

    def backward(self, ctx, dy):
        parameters = self.layer.parameters()
        before = [p.grad.copy() for p in parameters]
        for p in parameters:
            p.grad.fill(0.0)
        returned = self.layer.backward(ctx, dy)
        grads = list(returned) if isinstance(returned, tuple) else [returned]
        if self.target < len(grads):
            grads[self.target] = self.change(grads[self.target])
        else:
            p = parameters[self.target - len(grads)]
            p.grad = self.change(p.grad)
        for p, old in zip(parameters, before):
            p.grad += old
        return tuple(grads)


def scaled(grad):
    return 1.001 * grad


def negated(grad):
    return -grad


def zeroed(grad):
    return np.zeros_like(grad)


def without_largest(grad):
    grad = grad.copy()
    grad.flat[np.abs(grad).argmax()] = 0.0
    return grad


def without_smallest(grad):
    """The smallest of the entries that are at least a thousandth of the largest."""
    grad = grad.copy()
    size = np.abs(grad)
    grad.flat[np.where(size >= 1e-3 * size.max(), size, np.inf).argmin()] = 0.0
    return grad


def with_nan(grad):
    grad = grad.copy()
    grad.flat[-1] = np.nan
    return grad


def with_inf(grad):
    grad = grad.copy()
    grad.flat[0] = np.inf
    return grad


def mutate(data, case, sizes, seed, change):
    layer, inputs = case(sizes)
    randomise(layer, seed)
    tensors = sum(x.dtype.kind == "f" for x in inputs) + len(layer.parameters())
    target = data.draw(st.integers(0, tensors - 1), label="target")
    return Mutant(layer, change, target), inputs, target


CHANGES = (scaled, negated, zeroed, without_largest, with_nan)


@given(st.data(), cases, sizes, seeds, st.sampled_from((*CHANGES, without_smallest)))
def test_one_changed_gradient_fails_in_full_mode(data, case, sizes, seed, change):
    layer, inputs, target = mutate(data, case, sizes, seed, change)
    report = assert_fails(layer, *inputs, seed=seed)
    assert [i for i, row in enumerate(report.rows) if not row.ok] == [target], f"\n{report}"


@given(st.data(), cases, sizes, seeds, st.sampled_from(CHANGES))
def test_one_changed_gradient_fails_in_directional_mode(data, case, sizes, seed, change):
    layer, inputs, target = mutate(data, case, sizes, seed, change)
    report = assert_fails(layer, *inputs, mode="directional", seed=seed)
    assert [i for i, row in enumerate(report.rows) if not row.ok] == [target], f"\n{report}"


@pytest.mark.parametrize("change", [*CHANGES, without_smallest])
@pytest.mark.parametrize("target", [0, 1, 2])
def test_every_change_of_every_gradient_of_a_linear_fails(change, target):
    layer, inputs = linear((2, 3, 5, 7))
    report = assert_fails(Mutant(randomise(layer), change, target), *inputs)
    assert [row.ok for row in report.rows] == [i != target for i in range(3)]


@both_modes
@pytest.mark.parametrize("target", [0, 1, 2])
def test_infinite_gradient_fails(mode, target):
    layer, inputs = linear((2, 3, 5, 7))
    report = assert_fails(Mutant(randomise(layer), with_inf, target), *inputs, mode=mode)
    assert report.max_relative_error == np.inf


@both_modes
def test_nan_counts_as_infinite_error(mode):
    layer, inputs = linear((2, 3, 5, 7))
    report = assert_fails(Mutant(randomise(layer), with_nan, 1), *inputs, mode=mode)
    assert report.max_relative_error == np.inf
    assert report.rows[1].relative_error == np.inf
    assert report.rows[0].ok


@both_modes
def test_gradient_of_another_shape_fails(mode):
    # y = x.T: dy instead of dy.T
    report = assert_fails(Function(lambda x: x.T, lambda x, dy: dy.copy()), normal(3, 5), mode=mode)
    assert report.rows[0].relative_error == np.inf
    assert "(5, 3)" in str(report)
    for wrong in (lambda x, dy: dy[None], lambda x, dy: dy[:-1], lambda x, dy: dy.sum()):
        assert_fails(Function(lambda x: 1.0 * x, wrong), normal(3, 5), mode=mode)


@both_modes
def test_transposed_square_gradient_fails(mode):
    square = normal(5, 5)
    assert_fails(Function(lambda x: x.T, lambda x, dy: dy.copy()), square, mode=mode)
    assert_passes(Function(lambda x: x.T, lambda x, dy: dy.T), square, mode=mode)
    layer = Mutant(Linear(5, 5, dtype=np.float64), np.transpose, 1)
    assert failed(assert_fails(layer, square, mode=mode)) == ["layer.W"]


class Overwrites(Linear):
    def backward(self, ctx, dy):
        dx = super().backward(ctx, dy)
        self.W.grad = ctx.x.reshape(-1, len(self.W.value)).T @ dy.reshape(-1, dy.shape[-1])
        return dx


@both_modes
def test_overwritten_instead_of_added_gradient_fails(mode):
    report = assert_fails(Overwrites(3, 5, dtype=np.float64), normal(2, 7, 3), mode=mode)
    assert failed(report) == ["W"]
    assert "+=" in report.rows[1].note


class UsesUp(Layer):
    """Its ctx is good for one backward only."""

    def forward(self, x):
        return 2.0 * x, [2.0]

    def backward(self, ctx, dy):
        factor = ctx[0]
        ctx[0] = 0.0
        return factor * dy


@both_modes
def test_second_backward_that_returns_another_gradient_fails(mode):
    report = assert_fails(UsesUp(), normal(3), mode=mode)
    assert "second backward" in report.rows[0].note


# Mistakes found in the field


class GammaLeftOut(LayerNorm):
    def backward(self, ctx, dy):
        super().backward(ctx, dy)
        x_hat, rstd = ctx
        centred = dy - dy.mean(-1, keepdims=True) - x_hat * (dy * x_hat).mean(-1, keepdims=True)
        return rstd * self.gamma.value * centred


class BetaLikeGamma(LayerNorm):
    def backward(self, ctx, dy):
        before = self.beta.grad.copy()
        dx = super().backward(ctx, dy)
        self.beta.grad = before + (dy * ctx.x_hat).reshape(-1, self.beta.size).sum(0)
        return dx


class DividedByBatch(Softmax):
    def backward(self, ctx, dy):
        return super().backward(ctx, dy) / len(dy)


class DividedByRows(CrossEntropy):
    def backward(self, ctx, dloss=1.0):
        return super().backward(ctx, dloss) / ctx.log_p.shape[1]


class SwapsQueryAndKey(ScaledDotProductAttention):
    def backward(self, ctx, dy):
        dq, dk, dv = super().backward(ctx, dy)
        return dk, dq, dv


class SwapsKeyAndValue(MultiHeadAttention):
    def backward(self, ctx, dy):
        dquery, dkey, dvalue = super().backward(ctx, dy)
        return dquery, dvalue, dkey


class ScaledByModelWidth(ScaledDotProductAttention):
    def backward(self, ctx, dy):
        dq, dk, dv = super().backward(ctx, dy)
        return dq / np.sqrt(2), dk / np.sqrt(2), dv


class DropsHead(Tied):
    """The tied output head's part of W.grad is lost."""

    def backward(self, ctx, dy):
        rows, embedding, _ = ctx
        return self.embedding.backward(embedding, (dy @ self.head.W.value) * np.cos(rows))


class DropsEmbedding(Tied):
    def backward(self, ctx, dy):
        self.head.backward(ctx[2], dy)
        return ()


class DropsSkip(Residual):
    def backward(self, ctx, dy):
        return self.norm.backward(ctx, dy)


class SkipThroughNorm(Residual):
    def backward(self, ctx, dy):
        return 2 * self.norm.backward(ctx, dy)


IDS = np.array([[1, 4, 1], [0, 2, 4]])
SQUARE = [normal(2, 5, 6, seed=seed) for seed in range(3)]  # T = S and d_k = d_v
FIELD = {
    "gamma left out of the sums": (GammaLeftOut(5, dtype=np.float64), [SQUARE[0][..., :5]], ["x"]),
    "dbeta = dgamma": (BetaLikeGamma(6, dtype=np.float64), SQUARE[:1], ["beta"]),
    "softmax over the batch": (DividedByBatch(), SQUARE[:1], ["x"]),
    "cross-entropy off by T": (DividedByRows(), [normal(2, 3, 5), IDS], ["logits"]),
    "query and key swapped": (SwapsQueryAndKey(), SQUARE, ["q", "k"]),
    "key and value swapped": (
        SwapsKeyAndValue(6, 2, dtype=np.float64), SQUARE, ["key", "value"]
    ),
    "scaled by d_model": (ScaledByModelWidth(), SQUARE, ["q", "k"]),
    "tied head dropped": (DropsHead(5, 3), [IDS], ["embedding.W"]),
    "tied embedding dropped": (DropsEmbedding(5, 3), [IDS], ["embedding.W"]),
    "skip dropped": (DropsSkip(6), SQUARE[:1], ["x"]),
    "skip through the norm": (SkipThroughNorm(6), SQUARE[:1], ["x"]),
}


@both_modes
@pytest.mark.parametrize(("layer", "inputs", "wrong"), FIELD.values(), ids=FIELD)
def test_mistakes_found_in_the_field_fail(layer, inputs, wrong, mode):
    report = assert_fails(randomise(layer), *inputs, mode=mode)
    assert failed(report) == wrong, f"\n{report}"


def test_gamma_left_out_is_right_at_gamma_1():
    """Why layers are checked with random weights."""
    assert_passes(GammaLeftOut(5, dtype=np.float64), normal(2, 3, 5))


# Kinks


@both_modes
@pytest.mark.parametrize("at", [0.0, 1e-7, -1e-7, 3e-6, 9e-6, -2e-5, 1e-4])
def test_relu_near_its_kink_passes(at, mode):
    report = assert_passes(ReLU(), np.array([-1.0, at, 2.0]), mode=mode)
    if mode == "full" and at == 0.0:
        assert "1 at a kink" in report.rows[0].note
    if abs(at) > 1e-5:
        assert report.rows[0].note == ""


def relu_with_slope(slope, where=lambda x: x == 0):
    """A ReLU that has this slope where(x)."""
    return Function(
        lambda x: np.maximum(x, 0), lambda x, dy: np.where(where(x), slope, x > 0) * dy
    )


@pytest.mark.parametrize("slope", [0.0, 0.3, 0.5, 1.0])
def test_any_slope_between_both_sides_of_a_kink_passes(slope):
    assert_passes(relu_with_slope(slope), np.array([-1.0, 0.0, 2.0]))


@pytest.mark.parametrize("slope", [-1.0, -0.01, 1.01, 2.0, np.nan])
def test_slope_beyond_both_sides_of_a_kink_fails(slope):
    report = assert_fails(relu_with_slope(slope), np.array([-1.0, 0.0, 2.0]))
    assert report.rows[0].index == (1,)


@pytest.mark.parametrize("slope", [0.0, 0.5, 0.999, 1.001, -1.0])
def test_wrong_slope_beside_a_kink_is_found(slope):
    layer = relu_with_slope(slope, where=lambda x: x == 2)
    report = assert_fails(layer, np.array([-1.0, 0.0, 2.0, 1e-7]))
    assert report.rows[0].index == (2,)


@example(seed=4)  # a dy that is small beside the others
@given(seeds)
def test_relu_of_zeros_passes(seed):
    assert_passes(ReLU(), np.zeros((9, 9)), seed=seed)


@pytest.mark.parametrize("constant", [3e3, 7e3, 12e3])
def test_kink_beside_a_large_constant_passes(constant):
    """Rounding hides the slope of small steps and the kink that of large ones; one side has it."""
    layer = Function(lambda x: np.maximum(x, 0) + constant, lambda x, dy: (x > 0) * dy)
    at = np.array([1.7e-7])
    assert assert_passes(layer, at).rows[0].note == ""
    assert_fails(Function(layer.f, lambda x, dy: 1.01 * (x > 0) * dy), at)


def test_any_number_of_kinks_passes():
    assert_passes(ReLU(), np.zeros((40, 50)))


def feed_forward_at_kinks(units, rows):
    """Linear -> ReLU -> Linear: these hidden units stand at the kink for these rows of x."""
    layer = randomise(FeedForward(5, 11, "relu", dtype=np.float64))
    layer.linear1.b.value[units] = 0.0
    x = normal(7, 5)
    x[rows] = 0.0
    return layer, x


def test_kink_inside_a_block_passes():
    layer, x = feed_forward_at_kinks(units=3, rows=2)
    report = assert_passes(layer, x)
    notes = [row.note for row in report.rows]
    assert "5 at a kink" in notes[0]
    assert notes[1] == ""
    assert "1 at a kink" in notes[2]


@given(seeds)
def test_kinks_that_meet_inside_a_block_pass_or_are_named(seed):
    """As in a new FeedForward (b = 0) on padding (x = 0).

    Moving one x moves 11 hidden units off their kinks, some up and some down: the slope that ReLU's
    backward takes need not lie between those on the two sides.
    """
    layer, x = feed_forward_at_kinks(units=slice(None), rows=slice(3, None))
    for row in gradcheck(layer, x, seed=seed).rows:
        assert row.ok or "kink" in row.note


@pytest.mark.parametrize("target", range(5))
def test_wrong_gradient_in_a_block_with_a_kink_is_found(target):
    layer, x = feed_forward_at_kinks(units=3, rows=2)
    report = assert_fails(Mutant(layer, scaled, target), x)
    assert [i for i, row in enumerate(report.rows) if not row.ok] == [target]


SMOOTH = {
    "cube": cube(),
    "tanh": Function(np.tanh, lambda x, dy: (1 - np.tanh(x) ** 2) * dy),
    "steep": Function(lambda x: np.sin(100 * x), lambda x, dy: 100 * np.cos(100 * x) * dy),
    "cosh": Function(lambda x: np.cosh(9 * x), lambda x, dy: 9 * np.sinh(9 * x) * dy),
    "hidden by rounding": Function(lambda x: x + 1e5, lambda x, dy: 1.0 * dy),
    "gelu": GELU(),
    "gelu tanh": GELU("tanh"),
    "softmax": Softmax(),
    "layer norm": LayerNorm(13, dtype=np.float64),
}


@both_modes
@pytest.mark.parametrize("factor", [1.001, 0.999, 1.00001, 0.5])
@pytest.mark.parametrize("layer", SMOOTH.values(), ids=SMOOTH)
def test_smooth_function_has_no_kink_to_excuse_it(layer, factor, mode):
    x = np.linspace(-3, 3, 13) * [[1.0], [0.1]]
    wrong = Mutant(types.SimpleNamespace(
        forward=layer.forward, backward=layer.backward, parameters=list
    ), lambda grad: factor * grad, 0)
    report = gradcheck(layer, x, mode=mode)
    assert report.ok
    assert report.rows[0].note == ""
    report = gradcheck(wrong, x, mode=mode)
    assert not report.ok
    assert report.rows[0].note == ""
    expected = abs(1 - factor) / max(1, factor)
    assert 0.2 * expected < report.max_relative_error < 1.5 * expected


@both_modes
def test_wrong_gradient_that_a_larger_step_would_confirm_fails(mode):
    """sin(775 x), with its slope as a step ten times the default measures it: 0.1 % too small."""
    k, factor = 775.0, float(np.sinc(775.0 * 1e-4 / np.pi))
    layer = Function(lambda x: np.sin(k * x), lambda x, dy: factor * k * np.cos(k * x) * dy)
    assert_fails(layer, np.linspace(-1, 1, 5), mode=mode)


# What is refused


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_narrow_input_is_refused(dtype):
    with pytest.raises(TypeError, match=r"x has dtype float\d\d.*x\.astype\(np\.float64\)"):
        gradcheck(ReLU(), np.ones(3, dtype))


def test_narrow_part_of_a_tuple_is_refused():
    layer = Function(lambda pair: pair[0] + pair[1], lambda pair, dy: (dy, dy))
    with pytest.raises(TypeError, match="float32"):
        gradcheck(layer, (np.ones(3), np.ones(3, np.float32)))


def test_float32_parameters_are_refused():
    with pytest.raises(TypeError, match=r"W has dtype float32.*astype\(np\.float64\)"):
        gradcheck(Linear(3, 5), np.ones((2, 3)))


def test_float16_parameters_are_refused():
    weight = types.SimpleNamespace(value=np.ones(3, np.float16), grad=np.zeros(3, np.float16))
    layer = times(2.0)
    layer.named_parameters = lambda: [("weight", weight)]
    with pytest.raises(TypeError, match="weight has dtype float16"):
        gradcheck(layer, np.ones(3))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64])
def test_narrow_output_is_refused(dtype):
    layer = Function(lambda x: x.astype(dtype), lambda x, dy: dy)
    with pytest.raises(TypeError, match="output has dtype"):
        gradcheck(layer, np.ones(3))


def test_integer_input_with_a_gradient_is_refused():
    with pytest.raises(TypeError, match=r"integers.*astype"):
        gradcheck(times(2.0), np.arange(3))


def test_wrong_number_of_gradients_is_refused():
    add = Function(lambda a, b: a + b, lambda a, b, dy: dy)
    with pytest.raises(ValueError, match="1 gradients for 2 float inputs"):
        gradcheck(add, normal(3), normal(3))
    add = Function(lambda a: a + 1, lambda a, dy: (dy, dy))
    with pytest.raises(ValueError, match="2 gradients for 1 float inputs"):
        gradcheck(add, normal(3))


def test_generator_by_position_is_refused():
    """It could not start from the same state at each call."""
    with pytest.raises(TypeError, match=r"Generator was given by position: pass rng= by keyword"):
        gradcheck(Dropout(0.5), normal(3), np.random.default_rng(0))


class OwnDropout(Layer):
    """Draws from a generator of its own."""

    def __init__(self):
        self.rng = np.random.default_rng(0)

    def forward(self, x):
        keep = self.rng.random(x.shape) < 0.5
        return x * keep, keep

    def backward(self, ctx, dy):
        return dy * ctx


@both_modes
def test_layer_that_differs_between_two_calls_is_refused(mode):
    with pytest.raises(ValueError, match="two equal calls of forward differ"):
        gradcheck(OwnDropout(), normal(3, 5), mode=mode)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_output_that_is_not_finite_is_refused(bad):
    with pytest.raises(ValueError, match="not finite"):
        gradcheck(times(2.0), np.array([1.0, bad]))


def test_nothing_to_check_is_refused():
    layer = Function(lambda ids, flag: 2.0 * ids, lambda ids, flag, dy: ())
    with pytest.raises(ValueError, match="nothing to check"):
        gradcheck(layer, np.arange(3), True)


@pytest.mark.parametrize("mode", ["Full", "fast", "", None])
def test_unknown_mode_is_refused(mode):
    with pytest.raises(ValueError, match="'full', 'directional'"):
        gradcheck(ReLU(), normal(3), mode=mode)


def in_place_relu(x):
    x[x < 0] = 0.0
    return 2.0 * x


def backward_into_dy(x, dy):
    dy *= 3.0
    return dy


def backward_into_x(x, dy):
    grad = 2.0 * x * dy
    x[...] = 0.0
    return grad


def clear_ids(ids, x):
    ids[...] = 0
    return x[ids]


WRITERS = {
    "forward into x": Function(in_place_relu, lambda x, dy: 2.0 * (x > 0) * dy),
    "backward into x": Function(lambda x: x**2, backward_into_x),
    "forward doubles x": Function(lambda x: np.multiply(x, 2, out=x).copy(), lambda x, dy: 2 * dy),
    "backward into dy": Function(lambda x: 3.0 * x, backward_into_dy),
}


@both_modes
@pytest.mark.parametrize("layer", WRITERS.values(), ids=WRITERS)
def test_layer_that_writes_into_its_arguments_is_refused(layer, mode):
    x = normal(3, 5)
    before = x.copy()
    with pytest.raises(ValueError, match=r"wrote into|calls of forward differ"):
        gradcheck(layer, x, mode=mode)
    np.testing.assert_array_equal(x, before)


def test_refusal_names_what_was_written_into():
    with pytest.raises(ValueError, match="wrote into dy"):
        gradcheck(WRITERS["backward into dy"], normal(3))
    with pytest.raises(ValueError, match="wrote into its argument input0"):
        gradcheck(WRITERS["forward into x"], normal(3))
    layer = Function(clear_ids, lambda ids, x, dy: np.bincount(ids, dy, len(x)))
    with pytest.raises(ValueError, match="wrote into its argument input0"):
        gradcheck(layer, np.array([0, 1, 2]), normal(3))
    pair = Function(
        lambda pair: in_place_relu(pair[1]) + pair[0],
        lambda pair, dy: (dy, 2.0 * (pair[1] > 0) * dy),
    )
    with pytest.raises(ValueError, match=r"wrote into its argument input0\[1\]"):
        gradcheck(pair, (normal(3), normal(3)))


class WritesMask(Layer):
    def forward(self, x, mask):
        mask[0] = False
        return x * mask, mask.copy()

    def backward(self, ctx, dy):
        return dy * ctx


def test_layer_that_writes_into_a_keyword_is_refused():
    mask = np.ones(3, bool)
    with pytest.raises(ValueError, match="mask"):
        gradcheck(WritesMask(), normal(3), mask=mask)
    assert mask.all()


class WritesWeight(Linear):
    def __init__(self, where):
        super().__init__(3, 5, dtype=np.float64)
        self.where = where

    def forward(self, x):
        if self.where == "forward":
            self.W.value /= np.linalg.norm(self.W.value)
            self.W.value = np.round(self.W.value, 3)
        return super().forward(x)

    def backward(self, ctx, dy):
        dx = super().backward(ctx, dy)
        if self.where == "backward":
            self.W.value -= 0.1 * self.W.grad
        return dx


@both_modes
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_layer_that_writes_into_its_weights_is_refused_and_restored(where, mode):
    layer = WritesWeight(where)
    before = snapshot(layer)
    with pytest.raises(ValueError, match=r"changed the weight W|calls of forward differ"):
        gradcheck(layer, normal(2, 3), mode=mode)
    assert snapshot(layer) == before


# Inputs that are held fixed, and keywords


def test_integers_booleans_and_none_are_held_fixed():
    class Gather(Layer):
        def __init__(self):
            self.seen = []

        def forward(self, table, ids, negate, nothing, axis):
            assert nothing is None
            self.seen.append((ids.copy(), negate.copy(), int(axis)))
            rows = np.take(table, ids, axis=int(axis))
            return (-rows if negate else rows), (table.shape, ids, negate)

        def backward(self, ctx, dy):
            shape, ids, negate = ctx
            dtable = np.zeros(shape)
            np.add.at(dtable, ids, -dy if negate else dy)
            return dtable

    layer = Gather()
    report = assert_passes(layer, normal(5, 3), np.array([1, 1, 4]), True, None, 0)
    assert [row.name for row in report.rows] == ["table"]
    for ids, negate, axis in layer.seen:
        np.testing.assert_array_equal(ids, [1, 1, 4])
        assert (negate, axis) == (True, 0)


def test_none_in_place_of_a_gradient_of_integers_is_taken():
    layer = Function(lambda ids, x: x[ids], lambda ids, x, dy: (None, np.bincount(ids, dy, len(x))))
    report = assert_passes(layer, np.array([1, 1, 0]), normal(3))
    assert len(report.rows) == 1


@both_modes
def test_masks_are_handed_on(mode):
    q, k, v = normal(2, 3, 5), normal(2, 7, 5, seed=1), normal(2, 7, 4, seed=2)
    mask = normal(3, 7) > 0
    mask[0] = False
    bias = np.where(mask, normal(3, 7), -np.inf)
    plain = assert_passes(ScaledDotProductAttention(), q, k, v, mode=mode)
    for keyword in (mask, bias):
        keyword.flags.writeable = False
        report = assert_passes(ScaledDotProductAttention(), q, k, v, mode=mode, mask=keyword)
        assert [row.name for row in report.rows] == ["q", "k", "v"]
        assert report.rows[0].analytic != plain.rows[0].analytic


@both_modes
def test_positions_are_handed_on(mode):
    layer = LearnedPositions(11, 5, dtype=np.float64)
    x = normal(2, 3, 5)
    report = assert_passes(layer, x, mode=mode, positions=np.array([[4, 4, 0], [10, 0, 4]]))
    assert [row.name for row in report.rows] == ["x", "P"]
    with pytest.raises(ValueError, match="positions"):
        gradcheck(layer, x, mode=mode, positions=[0, 1, 11])


# Randomness


def states(layer):
    """The layer, and a list that gets the generator's state at each call of forward."""
    seen = []

    class Watched(Layer):
        def forward(self, x, rng=None):
            seen.append(rng.bit_generator.state)
            return layer.forward(x, rng=rng)

        def backward(self, ctx, dy):
            return layer.backward(ctx, dy)

    return Watched(), seen


@both_modes
@pytest.mark.parametrize("advanced", [0, 5])
def test_a_generator_starts_from_its_state_at_every_call_and_keeps_it(mode, advanced):
    rng = np.random.default_rng(3)
    rng.random(advanced)
    before = rng.bit_generator.state
    layer, seen = states(Dropout(0.5))
    assert_passes(layer, normal(5, 7), mode=mode, rng=rng)
    assert len(seen) > 2
    assert all(state == before for state in seen)
    assert rng.bit_generator.state == before


@both_modes
def test_an_int_is_the_seed_of_a_generator_for_every_call(mode):
    layer, seen = states(Dropout(0.5))
    assert_passes(layer, normal(5, 7), mode=mode, rng=3)
    assert all(state == np.random.default_rng(3).bit_generator.state for state in seen)


@both_modes
@pytest.mark.parametrize("rng", [3, np.random.default_rng(3)])
def test_dropout_passes_and_drops(rng, mode):
    report = assert_passes(Dropout(0.5), normal(5, 7), mode=mode, rng=rng)
    if mode == "directional":
        plain = gradcheck(Dropout(0.5), normal(5, 7), mode=mode)
        assert report.rows[0].analytic != plain.rows[0].analytic


def test_wrong_dropout_fails():
    class Unscaled(Dropout):
        def backward(self, ctx, dy):
            return dy * ctx.keep

    assert_fails(Unscaled(0.5), normal(5, 7), rng=0)


# The layer and its inputs are left as they were


def snapshot(layer):
    return [(p.value.tobytes(), p.grad.tobytes()) for p in layer.parameters()]


def with_gradients(layer):
    """Values and gradients that only a bitwise copy brings back."""
    randomise(layer)
    for parameter in layer.parameters():
        parameter.value.flat[0] = -0.0
        parameter.grad = normal(*parameter.shape, seed=1)
        parameter.grad.flat[:2] = -0.0, np.nan
    return layer


@both_modes
def test_layer_is_restored(mode):
    layer = with_gradients(MultiHeadAttention(6, 2, bias=True, dtype=np.float64))
    before = snapshot(layer)
    arrays = [(p.value, p.grad) for p in layer.parameters()]
    assert_passes(layer, *SQUARE, mode=mode)
    assert snapshot(layer) == before
    for p, (value, grad) in zip(layer.parameters(), arrays):
        assert p.value is value
        assert p.grad is grad


@both_modes
@pytest.mark.parametrize("call", [1, 2, 3, 4, 5])
def test_layer_is_restored_after_an_error_in_forward(call, mode):
    layer = with_gradients(Linear(3, 5, dtype=np.float64))
    before = snapshot(layer)
    with pytest.raises(ZeroDivisionError, match="forward"):
        gradcheck(Counted(layer, fail_forward_at=call), normal(1, 3), mode=mode)
    assert snapshot(layer) == before


@pytest.mark.parametrize("call", range(10, 45, 5))
def test_layer_is_restored_after_an_error_while_its_weights_are_moved(call):
    layer = with_gradients(Linear(3, 5, dtype=np.float64))
    before = snapshot(layer)
    with pytest.raises(ZeroDivisionError, match="forward"):
        gradcheck(Counted(layer, fail_forward_at=call), normal(1, 3))
    assert snapshot(layer) == before


@both_modes
@pytest.mark.parametrize("call", [1, 2])
def test_layer_is_restored_after_an_error_in_backward(call, mode):
    layer = with_gradients(Linear(3, 5, dtype=np.float64))
    before = snapshot(layer)
    with pytest.raises(ZeroDivisionError, match="backward"):
        gradcheck(Counted(layer, fail_backward_at=call), normal(1, 3), mode=mode)
    assert snapshot(layer) == before


@pytest.mark.parametrize("error", [TypeError, ValueError])
def test_layer_is_restored_after_a_refusal(error):
    layer = with_gradients(Linear(3, 5, dtype=np.float64))
    before = snapshot(layer)
    x = np.arange(3) if error is TypeError else np.array([1.0, np.nan, 2.0])
    with pytest.raises(error):
        gradcheck(layer, x)
    assert snapshot(layer) == before


UNUSUAL = {
    "read-only": normal(6, 4),
    "transposed": normal(4, 6).T,
    "strided": normal(12, 8)[::2, ::-2],
    "broadcast": np.broadcast_to(normal(4), (6, 4)),
    "big-endian": normal(6, 4).astype(">f8"),
    "Fortran": np.asfortranarray(normal(6, 4)),
}


@both_modes
@pytest.mark.parametrize("x", UNUSUAL.values(), ids=UNUSUAL)
def test_inputs_of_the_caller_are_left_alone(x, mode):
    x = x.view()
    x.flags.writeable = False
    before = x.tobytes()
    seen = []

    def forward(y):
        seen.append(y)
        return y**2

    report = assert_passes(Function(forward, lambda y, dy: 2 * y * dy), x, mode=mode)
    assert report.rows[0].shape == (6, 4)
    assert x.tobytes() == before
    assert not any(np.shares_memory(y, x) for y in seen)
    assert_passes(randomise(Linear(4, 3, dtype=np.float64)), x, mode=mode)


def test_one_array_given_twice_is_two_inputs():
    x = normal(2, 3, 5)
    assert_passes(ScaledDotProductAttention(), x, x, x)


# Shapes of layers


VIEWS = {
    "x.T": (lambda x: x.T, lambda x, dy: dy.T),
    "x[::-1]": (lambda x: x[::-1], lambda x, dy: dy[::-1]),
    "x": (lambda x: x, lambda x, dy: dy),
    "x[0]": (lambda x: x[0], lambda x, dy: np.concatenate([dy[None], np.zeros_like(x[1:])])),
}


@both_modes
@pytest.mark.parametrize("view", VIEWS)
def test_output_that_is_a_view_of_the_input(view, mode):
    f, df = VIEWS[view]
    assert_passes(Function(f, df), normal(5, 5), mode=mode)
    assert_fails(Function(f, lambda x, dy: 1.001 * df(x, dy)), normal(5, 5), mode=mode)
    if view != "x":
        assert_fails(Function(f, lambda x, dy: dy * np.ones_like(x)), normal(5, 5), mode=mode)


@both_modes
def test_layer_that_reuses_its_output_array(mode):
    buffer = np.empty(3)
    layer = Function(
        lambda x: np.maximum(x, 0.0, out=buffer), lambda x, dy: np.where(x > 0, dy, 0.3 * dy)
    )
    assert_passes(layer, np.array([1.0, 0.0, 2.0]), mode=mode)
    assert_fails(layer, np.array([1.0, -1.0, 2.0]), mode=mode)


@both_modes
def test_scalar_output_and_scalar_input(mode):
    assert_passes(CrossEntropy(), normal(2, 3, 5), IDS, mode=mode)
    mean = Function(lambda x: float(np.mean(x**2)), lambda x, dy: dy * 2 * x / x.size)
    assert_passes(mean, normal(3, 5), mode=mode)
    for x in (3.0, np.float64(3.0), np.array(3.0)):
        assert assert_passes(cube(), x, mode=mode).rows[0].shape == ()
        assert_fails(cube(1.001), x, mode=mode)


@both_modes
def test_empty_input(mode):
    layer = Linear(3, 5, dtype=np.float64)
    report = assert_passes(layer, np.zeros((0, 7, 3)), mode=mode)
    assert [row.shape for row in report.rows] == [(0, 7, 3), (3, 5), (5,)]
    assert "0,7,3" in str(report)


@both_modes
def test_tuple_output(mode):
    layer = MemoryProjection(5, 2, 3, 4, dtype=np.float64)
    report = assert_passes(layer, normal(2, 7, 5), mode=mode)
    assert [row.name for row in report.rows] == ["memory", "W_k.W", "W_v.W"]
    assert failed(assert_fails(Mutant(layer, scaled, 2), normal(2, 7, 5), mode=mode)) == [
        "layer.W_v.W"
    ]


@both_modes
def test_tuple_output_with_none_in_it(mode):
    layer = Function(
        lambda x: (x**2, None, 3.0 * x.sum()),
        lambda x, dy: 2 * x * dy[0] + 3.0 * dy[2],
    )
    assert_passes(layer, normal(3, 5), mode=mode)


@both_modes
def test_tuple_input(mode):
    layer = DecoderLayer(6, 2, 5, d_k=3, d_v=4, cross_attention="shared", dtype=np.float64)
    memory = normal(2, 2, 7, 3), normal(2, 2, 7, 4)
    for array in memory:
        array.flags.writeable = False
    report = assert_passes(randomise(layer), normal(2, 5, 6), memory, mode=mode)
    assert [row.name for row in report.rows][:3] == ["x", "memory[0]", "memory[1]"]


def test_decoder_layer_without_memory():
    layer = randomise(DecoderLayer(6, 2, 5, cross_attention="none", dtype=np.float64))
    report = assert_passes(layer, normal(2, 3, 6), None)
    assert [row.name for row in report.rows][:2] == ["x", "self_attention.W_q.W"]


class Polynomial(Layer):
    """No input: y = w ** 2."""

    def __init__(self):
        self.w = Parameter(normal(3))

    def forward(self):
        return self.w.value**2, None

    def backward(self, ctx, dy):
        self.w.grad += 2 * self.w.value * dy
        return ()


@both_modes
def test_parameters_only(mode):
    assert [row.name for row in assert_passes(Polynomial(), mode=mode).rows] == ["w"]
    report = assert_passes(Embedding(5, 3, dtype=np.float64), IDS, mode=mode)
    assert [row.name for row in report.rows] == ["W"]


class Memo:
    """A student's layer: remembers x itself, and knows nothing of Layer or Parameter."""

    def forward(self, x, power=2):
        self.x, self.power = x, power
        return x**power, None

    def backward(self, ctx, dy):
        return self.power * self.x ** (self.power - 1) * dy


@both_modes
def test_plain_class(mode):
    assert not isinstance(Memo(), Layer)
    report = assert_passes(Memo(), normal(3, 5), mode=mode)
    assert [row.name for row in report.rows] == ["x"]
    assert_passes(Memo(), normal(3, 5), mode=mode, power=4)


class NamedWeight:
    """A plain class with parameters of its own kind."""

    def __init__(self):
        self.w = types.SimpleNamespace(value=normal(5), grad=np.zeros(5))

    def named_parameters(self):
        yield "w", self.w

    def forward(self, x):
        return x * self.w.value, x

    def backward(self, x, dy):
        self.w.grad += (x * dy).sum(axis=0)
        return dy * self.w.value


@both_modes
def test_plain_class_with_parameters(mode):
    report = assert_passes(NamedWeight(), normal(3, 5), mode=mode)
    assert [row.name for row in report.rows] == ["x", "w"]


def test_star_arguments():
    class Sum:
        def forward(self, *terms):
            return sum(terms), None

        def backward(self, ctx, dy):
            return dy.copy(), dy.copy(), dy.copy()

    report = assert_passes(Sum(), normal(3), normal(3), normal(3))
    assert [row.name for row in report.rows] == ["input0", "input1", "input2"]


def test_star_arguments_do_not_get_the_names_of_keywords():
    class Sum:
        def forward(self, x, *terms, scale=1.0, **others):
            return scale * (x + sum(terms)), scale

        def backward(self, scale, dy):
            return scale * dy, scale * dy, scale * dy

    report = assert_passes(Sum(), normal(3), normal(3), normal(3), scale=2.0)
    names = [row.name for row in report.rows]
    assert names[0] == "x"
    assert not {"scale", "others", "terms"} & set(names)
    assert len(set(names)) == 3


def test_one_weight_used_three_times_where_its_gradients_cancel():
    """W.grad is zero but for rounding, and a second backward rounds otherwise."""

    class Cancels(Layer):
        def __init__(self):
            self.W = Parameter(normal(3, 5))

        def forward(self, a, b):
            terms = (a, b, -(a + b))
            return sum(x @ self.W.value for x in terms), terms

        def backward(self, terms, dy):
            for x in terms:
                self.W.grad += x.T @ dy
            return np.zeros_like(terms[0]), np.zeros_like(terms[1])

    assert_passes(Cancels(), normal(4, 3), normal(4, 3, seed=1))


# Zero gradients


@both_modes
def test_zero_gradient_passes_where_the_slope_is_zero(mode):
    for slope in (0.0, 1e-11):
        report = assert_passes(times(slope, 0.0), normal(3, 5), mode=mode)
        assert report.max_relative_error == 0.0
    assert_fails(times(1e-7, 0.0), normal(3, 5), mode=mode)
    assert_fails(times(0.0, 1e-7), normal(3, 5), mode=mode)


def test_zero_gradient_of_the_key_bias_passes():
    """The bias of W_k moves all scores of a query alike: its gradient is zero but for rounding."""
    layer = randomise(MultiHeadAttention(6, 2, bias=True, dtype=np.float64))
    report = assert_passes(layer, *SQUARE)
    row = next(row for row in report.rows if row.name == "W_k.b")
    assert abs(row.analytic) < 1e-12
    assert row.relative_error == 0.0


@both_modes
def test_zero_gradient_fails_where_the_slope_is_not(mode):
    report = assert_fails(times(0.5, 0.0), normal(3, 5), mode=mode)
    assert report.max_relative_error == 1.0
    assert_fails(Mutant(Linear(3, 5, dtype=np.float64), zeroed, 1), normal(2, 3), mode=mode)


@both_modes
def test_zero_gradient_fails_where_the_slope_cannot_be_measured(mode):
    """x sqrt(x) is NaN left of 0; beside it stand slopes that are not zero."""

    def f(x):
        with np.errstate(invalid="ignore"):
            return x * np.sqrt(x)

    report = assert_fails(Function(f, lambda x, dy: 0.0 * dy), np.array([0.0, 1.0, 2.0]), mode=mode)
    assert report.max_relative_error == np.inf


# Gradients of another dtype: the numeric slope must not be rounded to it


@both_modes
@pytest.mark.parametrize("dtype", [np.int64, np.int8, np.bool_])
def test_integer_gradient_does_not_pass(dtype, mode):
    layer = Function(lambda x: 0.3 * x, lambda x, dy: np.zeros(x.shape, dtype))
    assert_fails(layer, normal(3, 5), mode=mode)


@both_modes
def test_float16_gradient_does_not_pass(mode):
    layer = Function(lambda x: x**3, lambda x, dy: (3 * x**2 * dy).astype(np.float16))
    report = assert_fails(layer, normal(3, 5), mode=mode)
    assert 1e-5 < report.max_relative_error < 1e-2


def test_error_of_a_float32_gradient_is_seen():
    layer = Function(lambda x: x**3, lambda x, dy: (3 * x**2 * dy).astype(np.float32))
    assert 5e-9 < gradcheck(layer, normal(3, 5)).max_relative_error < 1e-6


# Cost


def calls(layer, *inputs, mode):
    counted = Counted(layer)
    assert_passes(counted, *inputs, mode=mode)
    assert counted.backwards == 2
    return counted.forwards


@pytest.mark.parametrize("sizes", [(2, 3, 5, 7), (11, 7, 20, 30)])
def test_directional_mode_costs_two_forwards_a_tensor(sizes):
    fixed = calls(Polynomial(), mode="directional") - 2
    assert fixed <= 3
    layer, inputs = linear(sizes)
    assert calls(randomise(layer), *inputs, mode="directional") == fixed + 2 * 3


def test_full_mode_costs_two_forwards_an_element():
    fixed = calls(Polynomial(), mode="directional") - 2
    layer, inputs = linear((2, 3, 5, 7))
    elements = 2 * 3 * 5 + 5 * 7 + 7
    assert calls(randomise(layer), *inputs, mode="full") == fixed + 2 * elements


# Accuracy and options


def test_slope_of_the_cube_at_3():
    seen = {}

    def df(x, dy):
        seen["dy"] = dy
        return 27.0 * dy

    row = assert_passes(Function(lambda x: x**3, df), np.array([3.0])).rows[0]
    assert row.numeric / seen["dy"][0] == pytest.approx(27.0, rel=1e-8)
    assert row.relative_error < 1e-8


def test_step_is_relative_to_large_inputs():
    """The central difference of x^3 is 3 x^2 + h^2, h = step * max(1, |x|)."""
    for x, step in ((3.0, 1e-3), (0.5, 3e-4), (-300.0, 1e-3)):
        report = gradcheck(cube(), np.array([x]), step=step)
        h = step * max(1.0, abs(x))
        assert report.rows[0].relative_error == pytest.approx(h**2 / (3 * x**2), rel=1e-3)


def test_tolerance():
    assert gradcheck(cube(1.0001), normal(3), tolerance=1e-3).ok
    assert not gradcheck(cube(1.0001), normal(3), tolerance=1e-5).ok


@both_modes
def test_seed_draws_the_upstream_gradient_and_the_direction(mode):
    first, again, other = (
        gradcheck(cube(), normal(3), mode=mode, seed=seed).rows[0] for seed in (1, 1, 2)
    )
    assert first == again
    assert first.analytic != other.analytic


def test_upstream_gradient_is_not_the_input():
    """Inputs drawn with the same seed: a dy equal to x would hide a swap of both."""
    assert_fails(Function(lambda x: x**2, lambda x, dy: 2 * dy * dy), normal(3, 5, seed=0), seed=0)


@both_modes
def test_longdouble(mode):
    x = normal(3, 5).astype(np.longdouble)
    assert_passes(cube(), x, mode=mode)
    assert_fails(cube(1.001), x, mode=mode)
    layer = randomise(FeedForward(5, 7, "gelu", dtype=np.longdouble))
    before = snapshot(layer)
    assert_passes(layer, x, mode=mode)
    assert snapshot(layer) == before
    assert_fails(Mutant(layer, scaled, 1), x, mode=mode)


# The report


def test_relative_error_by_hand():
    """y = 2x; the gradient is 2 dy, but 2.5 dy at [0, 1]."""
    x = normal(2, 3)
    factor = np.array([[2.0, 2.5, 2.0], [2.0, 2.0, 2.0]])
    seen = {}

    def df(x, dy):
        seen["dy"] = dy
        return factor * dy

    report = gradcheck(Function(lambda x: 2.0 * x, df), x)
    a, n = factor * seen["dy"], 2.0 * seen["dy"]
    expected = np.abs(a - n).max() / max(np.abs(a).max(), np.abs(n).max())
    row = report.rows[0]
    assert row.relative_error == pytest.approx(expected, rel=1e-6)
    assert report.max_relative_error == row.relative_error
    assert row.index == (0, 1)
    assert row.analytic == a[0, 1]
    assert row.numeric == pytest.approx(n[0, 1], rel=1e-8)
    assert (row.shape, row.ok) == ((2, 3), False)


def test_row_of_directional_mode_has_the_slopes_along_the_direction():
    row = gradcheck(times(2.0, 2.5), normal(2, 3), mode="directional").rows[0]
    assert row.index is None
    assert row.shape == (2, 3)
    assert row.analytic / row.numeric == pytest.approx(1.25, rel=1e-6)
    assert row.relative_error == pytest.approx(0.2, rel=1e-6)


def test_max_relative_error_is_the_largest_of_the_rows():
    right, inputs = linear((2, 3, 5, 7))
    for layer in (right, Mutant(right, scaled, 1)):
        report = gradcheck(layer, *inputs)
        assert report.max_relative_error == max(row.relative_error for row in report.rows)


def lines_of(report):
    """The lines of the table, after checking that each fits into 80 columns."""
    lines = str(report).split("\n")
    assert max(map(len, lines)) <= 80, f"\n{report}"
    return lines


def line_of(row, lines):
    """The one line about a row: it has the name, or the end of a name too long."""
    found = [
        line for line in lines
        if line.split()[:1] == [row.name]
        or (line.startswith("..") and row.name.endswith(line.split()[0][2:]))
    ]
    assert len(found) == 1, (row.name, found)
    return found[0]


@both_modes
def test_table_names_every_tensor(mode):
    layer = randomise(DecoderLayer(6, 2, 5, attention_bias=True, dtype=np.float64))
    report = assert_passes(layer, normal(2, 3, 6), normal(2, 5, 6), mode=mode)
    lines = lines_of(report)
    for row in report.rows:
        assert line_of(row, lines).endswith(" ok")
    assert "FAIL" not in str(report)
    assert repr(report) == str(report)


@both_modes
def test_table_says_fail_for_the_wrong_tensor_alone(mode):
    layer, inputs = linear((2, 3, 5, 7))
    report = assert_fails(Mutant(layer, negated, 1), *inputs, mode=mode)
    lines = lines_of(report)
    verdicts = [line_of(row, lines).split()[-1] for row in report.rows]
    assert verdicts == ["ok", "FAIL", "ok"]
    assert f"{report.rows[1].analytic:.3e}" in line_of(report.rows[1], lines)
    assert f"{report.rows[1].numeric:.3e}" in line_of(report.rows[1], lines)
    assert "1 of 3" in lines[-1]


def test_table_shows_where_a_gradient_is_wrong():
    layer = Function(lambda x: 1.0 * x, lambda x, dy: without_largest(dy))
    report = assert_fails(layer, normal(3, 5))
    row = report.rows[0]
    assert row.analytic == 0.0
    assert ",".join(map(str, row.index)) in line_of(row, lines_of(report))


class ALayerWhoseNameIsAsLongAsTheNamesInLargeProgramsCanBe(Linear):
    pass


def test_table_with_a_long_class_name_has_80_columns():
    layer = ALayerWhoseNameIsAsLongAsTheNamesInLargeProgramsCanBe(3, 5, dtype=np.float64)
    for mode in MODES:
        lines_of(assert_passes(layer, normal(2, 3), mode=mode))


class OverwritesAtKinks(Overwrites):
    """ReLU(x W), with both notes on W."""

    def forward(self, x):
        y, linear = super().forward(x)
        return np.maximum(y, 0.0), (linear, y > 0)

    def backward(self, ctx, dy):
        linear, positive = ctx
        return super().backward(linear, dy * positive)


def test_table_with_several_notes_has_80_columns():
    layer = OverwritesAtKinks(3, 5, bias=False, rng=0, dtype=np.float64)
    layer.W.value[:, 0] = 0.0
    layer.W.value[:, 1] = 1.0
    report = assert_fails(layer, np.ones((1, 3)))
    assert "kink" in report.rows[1].note
    assert "second backward" in report.rows[1].note
    lines_of(report)


def test_table_with_many_axes_has_80_columns():
    wrong = Function(lambda x: 1.0 * x, lambda x, dy: np.zeros((1,) * 30))
    lines_of(assert_fails(wrong, normal(2, 3)))
    lines_of(assert_passes(times(2.0), normal(*(1,) * 30)))
    lines_of(assert_passes(times(-1e-100), -1e100 * normal(2), step=1e95))


def test_table_tells_the_tensors_of_a_model_apart():
    config = TransformerConfig(5, 5, d_model=4, num_heads=2, num_encoder_layers=1,
                               num_decoder_layers=1, max_len=7)
    names = dict(Transformer(config, 0).named_parameters())
    for index in ((1, 2), None):
        rows = [GradcheckRow(name, (3, 4), index, 0.5, 0.5, 0.0, True, "") for name in names]
        lines = lines_of(GradcheckReport("a model", rows))
        shown = {line.split()[0] for line in lines[2:]}
        assert set(names) <= shown




# What a layer may hide


class PlainWithWrongWeight:
    """No Layer, and a weight gradient of zero."""

    def __init__(self, W):
        self.weights = {"W": Parameter(W)}

    def forward(self, x):
        return x @ self.weights["W"].value, x

    def backward(self, ctx, dy):
        return dy @ self.weights["W"].value.T


@both_modes
def test_parameters_of_a_plain_object_are_found(mode):
    report = assert_fails(PlainWithWrongWeight(normal(4, 5)), normal(3, 4), mode=mode)
    assert [row.name for row in report.rows if not row.ok] == ["weights.W"]


class Remembers(Layer):
    """x ** 2, with x kept in the layer."""

    def forward(self, x):
        self.x = x.copy()
        return x**2, None

    def backward(self, ctx, dy):
        return 2 * self.x * dy


@both_modes
def test_a_layer_that_remembers_its_input_fails(mode):
    assert_fails(Remembers(), normal(3, 4), mode=mode)


def test_tiny_gradients_are_taken_as_zero_but_not_in_silence():
    report = gradcheck(Function(lambda x: 1e-12 * x, lambda x, dy: -1e-12 * dy), normal(3, 4))
    assert "below 1e-9" in report.rows[0].note


@pytest.mark.parametrize("option", ["step", "tolerance"])
@pytest.mark.parametrize("value", [0.0, -1e-5, float("nan")])
def test_step_and_tolerance_are_checked(option, value):
    with pytest.raises(ValueError, match=option):
        gradcheck(ReLU(), normal(3), **{option: value})


def test_a_backward_without_a_return_is_told_so():
    class Forgot(Layer):
        def forward(self, x):
            return 2.0 * x, None

        def backward(self, ctx, dy):
            dx = 2.0 * dy  # noqa: F841  (the mistake)

    with pytest.raises(ValueError, match=r"backward returned None: is its return missing\?"):
        gradcheck(Forgot(), np.ones((2, 3)))
