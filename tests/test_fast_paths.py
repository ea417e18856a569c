"""The ways that large arrays take: each equals plain NumPy at sizes beyond its threshold.

Most tests use small sizes, where none of these is taken.
"""

import copy
import pickle
import sys

import numpy as np
import pytest
from helpers import assert_close, assert_equal, leaves, parameters_with_gradients, randomise

from npdecoder import (
    SGD,
    Adam,
    AdamW,
    DecoderLayer,
    Parameter,
    ScaledDotProductAttention,
    Softmax,
    Trace,
    causal_mask,
    clip_grad_norm,
)
from npdecoder.blocks.multi_head_attention import merge_heads
from npdecoder.core import flat_blocks, for_each
from npdecoder.layers import attention
from npdecoder.layers.softmax import MANY
from npdecoder.optim import BLOCK
from npdecoder.sums import (
    centred,
    matmul_heads,
    mean_last,
    mean_product,
    over,
    sum_last,
    sum_product,
    transposed,
)

INF, NAN = np.inf, np.nan


# Softmax and masks


def rows_of_all_kinds(dtype, n=2003):
    """(rows, n): such whose exponentials are as they should be, overflow, vanish or lose digits."""
    x = np.random.default_rng(0).standard_normal((12, n))
    x[1] += 200.0
    x[2] -= 200.0
    x[3] -= 2000.0
    x[4] = x[4] / 10 - 95.0  # in float32 a few bits are left of each
    x[5] += 60.0
    x[6, ::2] = -INF
    x[7] = -INF
    x[8, 5] = 1e30
    x[9] *= 1e30
    x[10, :-1] = -1e30
    x[11] -= 88.0
    return x.astype(dtype)


def plain_softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True, initial=np.finfo(x.dtype).min))
    return e / np.maximum(e.sum(axis=-1, keepdims=True), 1e-300)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_softmax_of_many_rows_of_all_kinds(dtype):
    x = rows_of_all_kinds(dtype)
    x.flags.writeable = False
    assert x.size > MANY
    y, _ = Softmax().forward(x)
    assert y.dtype == dtype
    with np.errstate(under="ignore"):
        expected = plain_softmax(x.astype(np.float64))
    scale = expected.max(axis=-1, keepdims=True)
    tolerance = 40 * np.finfo(dtype).eps  # of the largest in its row
    assert (np.abs(y - expected) <= tolerance * scale).all()
    assert (y[7] == 0.0).all()


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_softmax_of_many_rows_of_which_one_is_nan(bad, dtype):
    x = rows_of_all_kinds(dtype)
    right, _ = Softmax().forward(x)
    x[3, 4] = bad
    y, _ = Softmax().forward(x)
    assert np.isnan(y[3]).all()
    others = np.arange(len(x)) != 3
    assert_equal(y[others], right[others])


@pytest.mark.parametrize("odd", [0.0, NAN, INF, -INF])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("place", ["seen", "hidden"])
def test_a_mask_of_many_scores_is_np_where(odd, dtype, place):
    rng = np.random.default_rng(1)
    S = rng.standard_normal((3, 5, 17, 23)).astype(dtype)
    mask = rng.random((3, 1, 17, 23)) < 0.6
    mask[:, :, 2] = False
    S[1, 2, 3, 4] = odd
    mask[1, 0, 3, 4] = place == "seen"
    assert S.size > attention.MANY
    masked = attention.apply_mask(S.copy(), mask)
    assert masked.dtype == dtype
    assert_equal(masked, np.where(mask, S, -INF))


@pytest.mark.parametrize("shape", [(3, 1, 29, 37), (3, 1, 1, 37), (29, 37), (3, 2, 29, 37)])
def test_attention_with_many_scores_is_that_of_each_head(shape):
    rng = np.random.default_rng(2)
    q, k, v, dy = (rng.standard_normal((3, 2, *size)) for size in [(29, 5), (37, 5), (37, 7),
                                                                  (29, 7)])  # fmt: skip
    mask = rng.random(shape) < 0.5
    mask[..., -1, :] &= shape[-2] == 1  # a query that sees nothing
    layer = ScaledDotProductAttention()
    y, ctx = layer.forward(q, k, v, mask)
    assert ctx.A.size > attention.MANY > ctx.A[0, 0].size
    gradients = layer.backward(ctx, dy)
    everywhere = np.broadcast_to(mask, ctx.A.shape)
    for b, h in np.ndindex(3, 2):
        alone, ctx_alone = layer.forward(q[b, h], k[b, h], v[b, h], everywhere[b, h])
        assert_close(y[b, h], alone, 1e-13)
        gradients_alone = layer.backward(ctx_alone, dy[b, h])
        assert_close([g[b, h] for g in gradients], gradients_alone, 1e-13)
    if shape[-2] > 1:
        assert (y[:, :, -1] == 0.0).all()
        assert (gradients[0][:, :, -1] == 0.0).all()


@pytest.mark.parametrize("part", [1, 29 * 37 + 1, 5 * 29 * 37])
@pytest.mark.parametrize("batch", [(3, 2), (1, 3), (5, 1), (1, 1), (7,), (2, 1, 3), ()])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.usefixtures("unwatched")
def test_attention_in_parts_is_that_of_the_whole(part, batch, dropout, monkeypatch):
    rng = np.random.default_rng(2)
    q, k, v, dy = (rng.standard_normal((*batch, *size)) for size in [(29, 5), (37, 5), (37, 7),
                                                                    (29, 7)])  # fmt: skip
    mask = rng.random((29, 37)) < 0.5
    layer = ScaledDotProductAttention(dropout)
    whole, ctx = layer.forward(q, k, v, mask, np.random.default_rng(3))
    expected = layer.backward(ctx, dy)
    monkeypatch.setattr(attention, "PART", part)
    for array in (q, k, v, *ctx[:5], dy):
        array.flags.writeable = False
    context, ctx_in_parts = layer.forward(q, k, v, mask, np.random.default_rng(3))
    assert_close(context, whole, 1e-14)
    assert_close(ctx_in_parts[:5], ctx[:5], 1e-14)
    assert ctx_in_parts.softmax.y is ctx_in_parts.A
    gradients = layer.backward(ctx, dy)
    assert_close(gradients, expected, 1e-14)
    assert_equal(layer.backward(ctx, dy), gradients)
    if len(batch) == 2 and ctx.A.size > part:
        for gradient in gradients:
            assert np.shares_memory(merge_heads(gradient), gradient)


@pytest.mark.usefixtures("unwatched")
def test_parts_are_for_layers_of_our_own_and_while_nobody_looks_on(monkeypatch):
    """Somebody's softmax may cross sequences, and a Trace shows S, dA and dS of all."""

    class DividedByBatch(Softmax):
        def forward(self, x):
            y, ctx = super().forward(x)
            return y / len(x), ctx

        def backward(self, ctx, dy):
            return super().backward(ctx, dy) / len(dy)

    calls = []

    class Counting(ScaledDotProductAttention):
        def backward(self, ctx, dy):
            calls.append(len(dy))
            return super().backward(ctx, dy)

    rng = np.random.default_rng(2)
    q, k, v, dy = rng.standard_normal((4, 3, 2, 7, 5))
    own, counting = ScaledDotProductAttention(), Counting()
    own.softmax = DividedByBatch()
    context, ctx = own.forward(q, k, v)
    expected, right = own.backward(ctx, dy), counting.backward(ctx, dy)
    monkeypatch.setattr(attention, "PART", 1)
    assert_equal(own.forward(q, k, v)[0], context)
    assert_equal(own.backward(ctx, dy), expected)
    assert_close(counting.backward(ctx, dy), right, 1e-14)
    assert calls == [3, 3]
    with Trace(counting) as trace:
        _, ctx = counting.forward(q, k, v)
        counting.backward(ctx, dy)
    assert trace[""]["dS"].shape == (3, 2, 7, 7)
    assert_close(trace[""]["S"], q @ k.swapaxes(-1, -2) / 5**0.5, 1e-14)


# Sums and products


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.longdouble])
@pytest.mark.parametrize("shape", [(7,), (5, 1), (3, 0, 4), (2, 3, 700)])
@pytest.mark.parametrize("einsum", [1, 20_000])
def test_sums_and_means_of_the_last_axis(dtype, shape, einsum, monkeypatch):
    monkeypatch.setattr("npdecoder.sums.EINSUM", einsum)
    x, z = np.random.default_rng(3).standard_normal((2, *shape)).astype(dtype)
    for y, expected in [(sum_last(x), x.sum(axis=-1, keepdims=True)),
                        (mean_last(x), x.mean(axis=-1, keepdims=True)),
                        (sum_product(x, z), (x * z).sum(axis=-1, keepdims=True)),
                        (mean_product(x, z), (x * z).mean(axis=-1, keepdims=True))]:  # fmt: skip
        assert y.dtype == dtype
        np.testing.assert_allclose(y, expected, rtol=0, atol=1e3 * np.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.longdouble])
@pytest.mark.parametrize("shape", [(7,), (5, 1), (3, 0, 4), (5, 7), (2, 3, 7), (2, 3, 700)])
def test_rows_less_their_mean(dtype, shape):
    x = (5 + np.random.default_rng(3).standard_normal(shape)).astype(dtype)
    before = x.copy()
    expected = x - x.mean(axis=-1, keepdims=True)
    y = centred(x)
    assert_equal(x, before)
    assert (y.dtype, y.shape) == (dtype, shape)
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e3 * np.finfo(dtype).eps)
    assert centred(x, x) is x
    assert_equal(x, y)


@pytest.mark.parametrize("batch", [(), (2,), (3, 2), (2, 3, 5)])
def test_products_of_heads(batch, monkeypatch):
    monkeypatch.setattr("npdecoder.sums.MANY", 1)
    rng = np.random.default_rng(4)
    x, y = rng.standard_normal((*batch, 7, 11)), rng.standard_normal((*batch, 11, 13))
    assert_close(matmul_heads(x, y), x @ y, 1e-14)
    assert_equal(transposed(x), x.swapaxes(-1, -2))
    if len(batch) == 2:
        product = matmul_heads(x.astype(np.float32), y.astype(np.float32))
        assert product.dtype == np.float32
        assert np.shares_memory(merge_heads(product), product)


@pytest.mark.parametrize(
    ("shape", "rows", "copied"),
    [((3, 2, 64, 16), 64, True),
     ((3, 2, 64, 16), 1, False),  # the query of a new token
     ((3, 2, 64, 64), 64, False),
     ((3, 2, 5, 7), 64, False)],
)  # fmt: skip
def test_what_is_transposed_is_copied_where_that_pays(shape, rows, copied):
    x = np.random.default_rng(4).standard_normal(shape)
    y = transposed(x, rows)
    assert_equal(y, x.swapaxes(-1, -2))
    assert np.shares_memory(x, y) != copied


# Gradients of a Parameter, which may be old numbers that are to be read as zeros


@pytest.mark.parametrize("seed", range(100))
def test_a_gradient_after_any_calls_is_the_sum_since_it_was_zero(seed):
    rng = np.random.default_rng(seed)
    parameter, expected = Parameter(rng.standard_normal((3, 5))), np.zeros((3, 5))
    for call in rng.integers(7, size=8):
        if call == 0:
            a, b = rng.standard_normal((3, 2)), rng.standard_normal((2, 5))
            parameter.add_product(a, b)
            expected = expected + a @ b
        elif call == 1:
            arrays = list(rng.standard_normal((rng.integers(4), 3, 5)))
            parameter.add_grads(arrays)
            expected = expected + sum(arrays)
        elif call == 2:
            parameter.grad += 1.0
            expected = expected + 1.0
        elif call == 3:
            parameter.zero_grad()
            expected = np.zeros((3, 5))
        elif call == 4:
            parameter.grad = b = rng.standard_normal((3, 5))
            expected = b
        elif call == 5:
            parameter.forget_grad()
            expected = np.zeros((3, 5))
        elif call == 6:
            assert parameter.has_grad == expected.any()
            np.testing.assert_allclose(parameter.grad, expected, atol=1e-14)
    assert parameter.has_grad == expected.any()
    np.testing.assert_allclose(parameter.grad, expected, atol=1e-14)


def test_a_sum_of_rows_is_added():
    rng = np.random.default_rng(5)
    parameter, rows = Parameter(np.zeros(7)), rng.standard_normal((11, 7))
    parameter.add_sum(rows)
    parameter.add_sum(rows[:0])
    parameter.add_sum(rows[:3])
    assert_close(parameter.grad, rows.sum(axis=0) + rows[:3].sum(axis=0), 1e-14)


# Results that take the place of what they are made of


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("T", [3, 97])
@pytest.mark.parametrize("mask", ["none", "bool", "float"])
def test_a_layer_computes_the_same_bits_while_somebody_looks_on(mask, T, dtype):
    rng = np.random.default_rng(7)
    layer = DecoderLayer(6, 2, activation="gelu", dropout=0.1, rng=0, dtype=dtype)
    randomise(layer, rng)
    x, memory, dy = (rng.standard_normal((2, n, 6)).astype(dtype) for n in (T, 5, T))
    x.flags.writeable = memory.flags.writeable = dy.flags.writeable = False
    masks = {"none": None, "bool": causal_mask(T), "float": np.where(causal_mask(T), 0.5, -INF)}

    def run():
        layer.zero_grad()
        y, ctx = layer.forward(x, memory, masks[mask], rng=np.random.default_rng(8))
        return y, layer.backward(ctx, dy), [p.grad.copy() for p in layer.parameters()]

    alone = run()
    for watch in (sys.setprofile, sys.settrace):
        before = sys.getprofile() if watch is sys.setprofile else sys.gettrace()
        watch(lambda *event: None)
        try:
            watched = run()
        finally:
            watch(before)
        assert_equal(leaves(watched), leaves(alone))


def test_what_looks_on_changes_no_layout():
    rng = np.random.default_rng(8)
    x, dy = (np.asfortranarray(rng.standard_normal((40, 30, 6))) for _ in range(2))
    assert x.size > MANY
    y, ctx = Softmax().forward(x)
    alone = y.strides, Softmax().backward(ctx, dy)
    before = sys.getprofile()
    sys.setprofile(lambda *event: None)
    try:
        y, ctx = Softmax().forward(x)
        watched = y.strides, Softmax().backward(ctx, dy)
    finally:
        sys.setprofile(before)
    assert watched[0] == alone[0]
    assert_equal(watched[1], alone[1])


@pytest.mark.usefixtures("unwatched")
def test_an_intermediate_keeps_its_numbers_only_while_somebody_looks_on():
    x = np.ones(3)
    assert over(x) is x
    for watch in (sys.setprofile, sys.settrace):
        before = sys.getprofile() if watch is sys.setprofile else sys.gettrace()
        watch(lambda *event: None)
        try:
            assert not np.shares_memory(over(x), x)
        finally:
            watch(before)


class Monitoring:
    """As sys.monitoring is from Python 3.12 on, with one tool."""

    DEBUGGER_ID = 0

    def __init__(self, tool):
        self.tool = tool

    def get_tool(self, tool_id):
        return "somebody" if tool_id == self.tool else None


@pytest.mark.usefixtures("unwatched")
def test_a_debugger_that_monitors_looks_on_and_other_tools_do_not(monkeypatch):
    x = np.ones(3)
    for tool, looks_on in [(Monitoring.DEBUGGER_ID, True), (2, False)]:
        monkeypatch.setattr("npdecoder.sums.MONITORING", Monitoring(tool))
        assert np.shares_memory(over(x), x) != looks_on
    monkeypatch.setattr("npdecoder.sums.MONITORING", None)  # before Python 3.12
    assert over(x) is x
    monkeypatch.undo()
    assert over(x) is x
    if (monitoring := getattr(sys, "monitoring", None)) is not None:
        monitoring.use_tool_id(monitoring.DEBUGGER_ID, "test")
        try:
            assert not np.shares_memory(over(x), x)
        finally:
            monitoring.free_tool_id(monitoring.DEBUGGER_ID)


# Updates


def plain_sgd(value, g, n):
    v = 0.0
    for _ in range(n):
        v = 0.9 * v + g + 0.2 * value
        value = value - 0.1 * v
    return value


def plain_adam(value, g, n, decoupled):
    m = v = 0.0
    for i in range(1, n + 1):
        if decoupled:
            value = value - 0.1 * 0.2 * value
        g_i = g if decoupled else g + 0.2 * value
        m, v = 0.8 * m + 0.2 * g_i, 0.9 * v + 0.1 * g_i**2
        value = value - 0.1 * (m / (1 - 0.8**i)) / (np.sqrt(v / (1 - 0.9**i)) + 1e-3)
    return value


ADAM = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.2}
OPTIMIZERS = {
    "SGD": (lambda p: SGD(p, 0.1, momentum=0.9, weight_decay=0.2), plain_sgd),
    "Adam": (lambda p: Adam(p, **ADAM), lambda *args: plain_adam(*args, decoupled=False)),
    "AdamW": (lambda p: AdamW(p, **ADAM), lambda *args: plain_adam(*args, decoupled=True)),
}


# Updates of small models: of all parameters as one


SMALL_SHAPES = [(3, 5), (), (7,), (2, 3, 1), (1,)]


def small_parameters(dtype=np.float64):
    rng = np.random.default_rng(9)
    parameters = [Parameter(rng.standard_normal(shape).astype(dtype)) for shape in SMALL_SHAPES]
    for parameter in parameters[::2]:  # the others have no gradient yet
        parameter.grad = rng.standard_normal(parameter.shape)
    return parameters


def steps(parameters, optimizer, n=3):
    rng = np.random.default_rng(10)
    for _ in range(n):
        for parameter in parameters[1:]:
            parameter.forget_grad()
            parameter.grad += rng.standard_normal(parameter.shape)
        optimizer.step()
        parameters[-1].forget_grad()
    return [p.value.copy() for p in parameters]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_small_parameters_are_updated_as_each_by_itself(name, dtype, monkeypatch):
    make, _ = OPTIMIZERS[name]
    alone, together = small_parameters(dtype), small_parameters(dtype)
    optimizer = make(together)
    monkeypatch.setattr("npdecoder.optim.FLAT", -1)
    with_alone = [make([parameter]) for parameter in alone]
    for _ in range(2):
        found = steps(together, optimizer)
        rng = np.random.default_rng(10)
        for _ in range(3):
            for parameter in alone[1:]:
                parameter.grad = rng.standard_normal(parameter.shape)
            for one in with_alone:
                one.step()
            alone[-1].zero_grad()
        assert_equal(found, [p.value for p in alone])
    assert optimizer._flat[0].holds(tuple(together))


@pytest.mark.parametrize("held", ["value", "grad"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_arrays_that_somebody_holds_stay_those_of_the_parameter(name, held):
    make, _ = OPTIMIZERS[name]
    expected = steps(parameters := small_parameters(), make(parameters))
    parameters = small_parameters()
    before = [getattr(parameter, held) for parameter in parameters]
    found = steps(parameters, make(parameters))
    assert_equal(found, expected)
    assert all(getattr(p, held) is array for p, array in zip(parameters, before))

    parameters = small_parameters()
    optimizer = make(parameters)
    after = [getattr(parameter, held) for parameter in parameters]
    assert_equal(steps(parameters, optimizer), expected)
    assert all(getattr(p, held) is array for p, array in zip(parameters, after))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_copy_of_model_and_optimizer_trains_by_itself(name):
    make, _ = OPTIMIZERS[name]
    parameters = small_parameters()
    optimizer = make(parameters)
    steps(parameters, optimizer, 1)
    copies, of_copies = copy.deepcopy((parameters, optimizer))
    before = [p.value.copy() for p in parameters]
    found = steps(copies, of_copies)
    assert_equal([p.value for p in parameters], before)
    assert_equal(steps(parameters, optimizer), found)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_small_parameters_may_move_on_between_updates(name):
    """Into another dtype, or to a second optimizer."""
    make, _ = OPTIMIZERS[name]
    parameters, alone = small_parameters(), small_parameters()
    optimizer, with_alone = make(parameters), [make([p]) for p in alone]
    second, second_alone = make(parameters[2:]), [make([p]) for p in alone[2:]]
    for dtype in (np.float64, np.float32, np.float64):
        for parameter in (*parameters, *alone):
            parameter.astype(dtype)
        for of_all, of_each in ((optimizer, with_alone), (second, second_alone)):
            of_all.step()
            for one in of_each:
                one.step()
        assert_equal([p.value for p in parameters], [p.value for p in alone])


@pytest.mark.parametrize("held", ["value", "grad"])
def test_a_view_taken_between_two_optimizers_stays_true(held):
    parameters = small_parameters()
    SGD(parameters, 0.1)
    views = [getattr(parameter, held)[...] for parameter in parameters]
    steps(parameters, Adam(parameters))
    assert_equal(views, [getattr(parameter, held) for parameter in parameters])


@pytest.mark.parametrize("held", ["value", "grad"])
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_view_of_what_was_pickled_stays_true(protocol, held):
    parameters = pickle.loads(pickle.dumps(small_parameters(), protocol=protocol))
    views = [getattr(parameter, held)[...] for parameter in parameters]
    steps(parameters, SGD(parameters, 0.1))
    assert_equal(views, [getattr(parameter, held) for parameter in parameters])


@pytest.mark.parametrize("when", ["before", "after"])
def test_arrays_that_are_read_only_are_not_updated(when):
    parameters = small_parameters()
    parameters[0].value.flags.writeable = when == "after"
    optimizer = SGD(parameters, 0.1)
    parameters[0].value.flags.writeable = False
    before = parameters[0].value.copy()
    with pytest.raises(ValueError, match="read-only"):
        optimizer.step()
    assert_equal(parameters[0].value, before)


def test_a_group_may_lose_parameters():
    parameters = small_parameters()
    before = parameters[-1].value.copy()
    optimizer = SGD(parameters, 0.1)
    optimizer.groups[0] = optimizer.groups[0]._replace(parameters=tuple(parameters[:-1]))
    steps(parameters, optimizer)
    assert_equal(parameters[-1].value, before)
    optimizer.groups.append(optimizer.groups[0])
    with pytest.raises(ValueError, match="zip"):
        optimizer.step()


@pytest.mark.parametrize("flat", [200, -1])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_groups_of_small_parameters_are_updated_by_their_own_lr(name, flat, monkeypatch):
    monkeypatch.setattr("npdecoder.optim.FLAT", flat)
    make, plain = OPTIMIZERS[name]
    parameters = small_parameters()
    expected = [plain(p.value, p.grad, 1) for p in parameters]
    for p, new in zip(parameters[2:], expected[2:]):
        new += 0.5 * (new - p.value)  # 1.5 times the step
    make([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.15}]).step()
    assert_close([p.value for p in parameters], expected, 1e-13)


def test_a_place_for_a_gradient_that_is_not_there_yet_is_read_as_zeros():
    parameter, place = Parameter(np.ones(3)), np.full(3, 7.0)
    parameter.move_grad(place)
    assert_equal(parameter.grad, np.zeros(3))
    assert parameter.grad is place


class Normalised(SGD):
    """A rule of a user's own, by the norm of each parameter's gradient."""

    def update(self, parameter, state, options, lr):
        parameter.value -= lr * parameter.grad / max(np.linalg.norm(parameter.grad), 1e-9)


def test_a_rule_of_ones_own_gets_each_parameter_by_itself():
    parameters, expected = small_parameters(), small_parameters()
    Normalised(parameters, 0.1).step()
    for p in expected:
        p.value -= 0.1 * p.grad / max(np.linalg.norm(p.grad), 1e-9)
    assert_equal([p.value for p in parameters], [p.value for p in expected])


def test_the_states_of_many_groups_are_looked_through_once_in_a_step(monkeypatch):
    optimizer = Normalised([{"params": p} for p in small_parameters()], 0.1, momentum=0.9)
    calls = []
    states = optimizer._current_states
    monkeypatch.setattr(optimizer, "_current_states", lambda: calls.append(1) or states())
    optimizer.step()
    assert len(calls) == 1


class Warm(Adam):
    """A state of a user's own, of each parameter's values."""

    def new_state(self, parameter, options):
        m = np.zeros_like(parameter.value)
        return {"m": m, "v": np.full_like(m, np.mean(parameter.value**2)), "count": np.zeros(1)}

    def update(self, parameter, state, options, lr):
        state["count"] += 1
        super().update(parameter, state, options, lr)


class WarmState(Adam):
    new_state = Warm.new_state


@pytest.mark.parametrize("make", [Warm, WarmState])
def test_a_state_of_ones_own_is_that_of_each_parameter(make):
    parameters = small_parameters()
    state = make(parameters, 0.1).state_dict()
    for n, p in enumerate(parameters):
        assert_equal(state[f"v.{n}"], np.full_like(p.value, np.mean(p.value**2)))
        assert state[f"count.{n}"].shape == (1,)


def test_parameters_of_two_dtypes_are_updated_in_their_own():
    parameters = small_parameters()
    parameters[0].astype(np.float32)
    expected = [p.value - p.value.dtype.type(0.1) * p.grad for p in parameters]
    SGD(parameters, 0.1).step()
    assert [p.dtype for p in parameters] == [np.float32] + [np.float64] * 4
    assert_close([p.value for p in parameters], expected, 1e-7)


# Updates of large models: in blocks, and in threads


def large_parameters():
    shapes = [(13,), (257, 521), (701, 613), (BLOCK,), (BLOCK + 1,), (2, 3)]
    return parameters_with_gradients(shapes, 6)


@pytest.fixture
def three_cores(monkeypatch):
    monkeypatch.setattr("npdecoder.core.num_cores", lambda: 3)
    monkeypatch.setattr("npdecoder.core.LARGE", 200_000)
    assert sum(parameter.size for parameter in large_parameters()) > 3 * 200_000


@pytest.mark.usefixtures("three_cores")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_of_large_parameters_equal_their_equations(name):
    make, plain = OPTIMIZERS[name]
    parameters = large_parameters()
    expected = [plain(p.value, p.grad, 3) for p in parameters]
    optimizer = make(parameters)
    for _ in range(3):
        optimizer.step()
    assert_close([p.value for p in parameters], expected, 1e-13)


def test_the_norm_of_large_gradients():
    parameters = large_parameters()
    flat = np.concatenate([p.grad.ravel() for p in parameters])
    assert clip_grad_norm(parameters, 2.0) == pytest.approx(np.linalg.norm(flat), rel=1e-12)
    clipped = np.concatenate([p.grad.ravel() for p in parameters])
    assert_close(clipped, flat * (2.0 / np.linalg.norm(flat)), 1e-12)


@pytest.mark.parametrize("shape", [(7,), (3, 5), (1,), (0,), (2, 3, 4), ()])
@pytest.mark.parametrize("size", [1, 2, 5, 7, 100])
def test_blocks_are_views_that_cover_all_once(shape, size):
    array, other = np.zeros(shape), np.zeros(shape)
    for piece, same in flat_blocks(size, array, other):
        assert piece.size <= size
        piece += 1.0
        same += 2.0
    assert (array == 1.0).all()
    assert (other == 2.0).all()


@pytest.mark.usefixtures("three_cores")
def test_each_of_the_large_parameters_is_done_once():
    done = []
    for_each(large_parameters(), done.append)
    assert sorted(done) == list(range(len(large_parameters())))


@pytest.mark.usefixtures("three_cores")
@pytest.mark.parametrize("wrong", range(6))
def test_an_error_in_any_thread_is_raised(wrong):
    def do(n):
        if n == wrong:
            raise KeyError(f"number {n}")

    with pytest.raises(KeyError, match=f"number {wrong}"):
        for_each(large_parameters(), do)


@pytest.mark.usefixtures("three_cores")
def test_threads_treat_errors_of_numbers_as_their_caller_does():
    with np.errstate(divide="raise"), pytest.raises(FloatingPointError):
        for_each(large_parameters(), lambda n: np.ones(1) / np.zeros(1))
    with np.errstate(divide="ignore"):
        for_each(large_parameters(), lambda n: np.ones(1) / np.zeros(1))
    called = []
    with np.errstate(divide="call", call=lambda *error: called.append(error)):
        for_each(large_parameters(), lambda n: np.ones(1) / np.zeros(1))
    assert len(called) == len(large_parameters())
