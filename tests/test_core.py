import copy
import os

import numpy as np
import pytest
from helpers import assert_equal, randomise, seeds
from hypothesis import given
from hypothesis import strategies as st

from npdecoder import Decoder, Embedding, FeedForward, Layer, Linear, Parameter, ReLU, Unembedding
from npdecoder.core import add_rows, flag, num_cores

# Parameter


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.longdouble])
def test_parameter_holds_a_copy_in_its_dtype(dtype):
    array = np.arange(6, dtype=dtype).reshape(2, 3)
    parameter = Parameter(array)
    array[0, 0] = 9
    assert parameter.value[0, 0] == 0
    assert parameter.value.dtype == parameter.dtype == parameter.grad.dtype == dtype
    assert parameter.shape == parameter.grad.shape == (2, 3)
    assert parameter.size == 6
    assert (parameter.grad == 0).all()
    assert repr(parameter) == f"Parameter(shape=(2, 3), dtype={np.dtype(dtype)})"


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3).T,
        np.arange(12.0).reshape(2, 6)[:, ::-2],
        np.broadcast_to(np.arange(3.0), (2, 3)),
        np.arange(6.0).reshape(2, 3).astype(">f8"),
        np.arange(6.0, dtype=np.float32).reshape(2, 3).view(np.ndarray),
    ],
)
def test_parameter_of_an_unusual_array(array):
    array.flags.writeable = False
    parameter = Parameter(array)
    np.testing.assert_array_equal(parameter.value, array)
    assert parameter.value.flags.c_contiguous
    assert parameter.value.flags.writeable
    assert parameter.value.dtype.isnative
    parameter.value += 1
    np.testing.assert_array_equal(parameter.value, array + 1)


@pytest.mark.parametrize("value", [[1, 2], np.ones(2, np.float16), [True], [1j], ["a"], [None]])
def test_parameter_of_another_dtype(value):
    with pytest.raises(TypeError, match=r"^value has dtype"):
        Parameter(value)


@pytest.mark.parametrize("name", ["value", "grad"])
def test_assigning_copies_into_place(name):
    parameter = Parameter(np.zeros((2, 3)))
    view = getattr(parameter, name)
    new = np.ones((2, 3))
    setattr(parameter, name, new)
    assert getattr(parameter, name) is view
    assert (view == 1).all()
    new[...] = 5
    assert (view == 1).all()
    setattr(parameter, name, np.full((2, 3), 2, np.float32))
    setattr(parameter, name, getattr(parameter, name) + np.ones((2, 3), np.longdouble))
    assert (view == 3).all()
    assert view.dtype == np.float64


def test_augmented_assignment_works_in_place():
    parameter = Parameter(np.ones(3))
    value, grad = parameter.value, parameter.grad
    parameter.grad += np.arange(3.0)
    parameter.grad += np.arange(3.0)
    parameter.value -= 0.5 * parameter.grad
    assert parameter.value is value
    assert parameter.grad is grad
    np.testing.assert_array_equal(grad, [0, 2, 4])
    np.testing.assert_array_equal(value, [1, 0, -1])
    parameter.zero_grad()
    np.testing.assert_array_equal(grad, [0, 0, 0])


@pytest.mark.parametrize("name", ["value", "grad"])
@pytest.mark.parametrize("shape", [(), (3,), (1, 3), (2, 1), (3, 2), (1, 2, 3)])
def test_assigning_does_not_broadcast(name, shape):
    parameter = Parameter(np.zeros((2, 3)))
    with pytest.raises(ValueError, match=rf"^Parameter.{name} has shape \(2, 3\)"):
        setattr(parameter, name, np.ones(shape))
    assert (getattr(parameter, name) == 0).all()


def test_grad_is_allocated_when_first_needed():
    layer = Linear(3, 2)
    layer(np.zeros((4, 3)))
    layer.zero_grad()
    layer.state_dict()
    layer.astype(np.float64)
    assert all(p._grad is None for p in layer.parameters())


def test_astype_converts_value_and_grad():
    parameter = Parameter(np.full(2, 0.1))
    parameter.grad = np.full(2, 0.2)
    assert parameter.astype(np.float32) is parameter
    assert parameter.value.dtype == parameter.grad.dtype == np.float32
    np.testing.assert_array_equal(parameter.grad, np.full(2, 0.2, np.float32))
    value = parameter.value
    assert parameter.astype("f4").value is value
    for dtype in np.float16, np.int64, bool:
        with pytest.raises(TypeError, match=r"^dtype has dtype"):
            parameter.astype(dtype)


# Layer


class Tree(Layer):
    """Parameters as attributes, in lists and tuples, and in layers in them; one of them twice."""

    def __init__(self):
        self.size = 7
        self.first = Parameter(np.zeros(2))
        self.items = [Parameter(np.zeros(3)), Linear(2, 2, bias=False, rng=0)]
        self.pair = (ReLU(), [Parameter(np.zeros(5))])
        self.nothing = None
        self.again = self.items[1]
        self.last = self.first


def test_named_parameters_come_in_order_and_once():
    tree = Tree()
    names = [name for name, _ in tree.named_parameters()]
    assert names == ["first", "items.0", "items.1.W", "pair.1.0"]
    assert [p.size for p in tree.parameters()] == [2, 3, 4, 5]
    assert tree.num_parameters() == 14
    assert list(tree.state_dict()) == names
    assert ReLU().num_parameters() == 0


def test_zero_grad_reaches_all():
    tree = Tree()
    for parameter in tree.parameters():
        parameter.grad += 1
    tree.zero_grad()
    assert not any(p.grad.any() for p in tree.parameters())


def test_astype_is_in_place_and_returns_self():
    tree = Tree()
    parameters = tree.parameters()
    assert tree.astype(np.longdouble) is tree
    assert all(p is q for p, q in zip(tree.parameters(), parameters))
    assert all(p.dtype == np.longdouble for p in parameters)
    for dtype in np.float16, np.int32:
        with pytest.raises(TypeError, match=r"^dtype has dtype"):
            tree.astype(dtype)
    assert all(p.dtype == np.longdouble for p in parameters)


def test_base_layer_has_no_forward_and_backward():
    for call in Layer().forward, lambda: Layer()(), lambda: Layer().backward(None, None):
        with pytest.raises(NotImplementedError, match="Layer does not define"):
            call()


def test_tied_parameters_stay_tied_in_a_deepcopy():
    embedding = Embedding(5, 3, rng=0)
    pair = Layer()
    pair.embedding, pair.output = embedding, Unembedding(embedding)
    clone = copy.deepcopy(pair)
    assert clone.embedding.W is clone.output.W
    assert clone.embedding.W is not embedding.W
    assert not np.shares_memory(clone.embedding.W.value, embedding.W.value)
    assert clone.num_parameters() == 15


# state_dict


def decoder(seed=0, **options):
    options = {"dtype": np.float64, "attention_bias": True, **options}
    return randomise(Decoder(2, 6, 2, 7, **options), np.random.default_rng(seed))


def test_state_dict_round_trip():
    one, other = decoder(0), decoder(1)
    state = one.state_dict()
    result = other.load_state_dict(state)
    assert result == ((), (), ())
    assert_equal(list(other.state_dict().values()), list(state.values()))
    state["norm.beta"][...] = 7
    assert not (one.norm.beta.value == 7).any(), "the state holds copies"
    assert not (other.norm.beta.value == 7).any(), "loading copies"


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.longdouble, ">f4"])
def test_floats_of_any_width_are_converted(dtype):
    layer = decoder(1)
    state = {name: array.astype(dtype) for name, array in decoder(0).state_dict().items()}
    layer.load_state_dict(state)
    for name, parameter in layer.named_parameters():
        assert parameter.value.dtype == np.float64
        np.testing.assert_array_equal(parameter.value, state[name].astype(np.float64))


def test_nan_and_inf_are_loaded_as_they_are():
    layer = Linear(2, 3)
    W = np.array([[np.nan, np.inf, -np.inf], [0, 1e-300, 3e38]])
    layer.load_state_dict({"W": W, "b": [0.0, 0, 0]})
    np.testing.assert_array_equal(layer.W.value, W.astype(np.float32))


def without(name):
    return lambda state: {key: array for key, array in state.items() if key != name}


def replaced(name, value):
    return lambda state: {**state, name: value}


def prefixed(state):
    return {f"model.{key}": array for key, array in state.items()}


W = "layers.1.feed_forward.linear1.W"  # (6, 7): others come before and after it
ONES = np.ones((6, 7))
UNFIT = {
    "a missing name": (without(W), ValueError, [rf"missing {W}"]),
    "an unexpected name": (replaced("extra", ONES), ValueError, ["unexpected extra"]),
    "a name that goes on": (replaced(W + ".foo", ONES), ValueError, [rf"unexpected {W}.foo"]),
    "a prefix": (prefixed, ValueError, [f"missing {W}", f"unexpected model.{W}"]),
    "nothing": (lambda state: {}, ValueError, [f"missing {W}", "missing norm.beta"]),
    **{
        f"shape {shape}": (
            replaced(W, np.ones(shape)),
            ValueError,
            [rf"misshapen {W}: expected \(6, 7\), got \({', '.join(map(str, shape))},?\)"],
        )
        for shape in [(7, 6), (42,), (1, 7), (6, 1), (), (1, 6, 7)]
    },
    "a scalar bias": (replaced("norm.beta", 1.0), ValueError, ["misshapen norm.beta"]),
    "integers": (replaced(W, np.ones((6, 7), np.int64)), TypeError, [f"{W} holds int64"]),
    "objects": (replaced(W, np.full((6, 7), None)), TypeError, [f"{W} holds object"]),
    "complex": (replaced(W, 1j * ONES), TypeError, [f"{W} holds complex128"]),
    "booleans": (replaced(W, ONES > 0), TypeError, [f"{W} holds bool"]),
    "strings": (replaced(W, np.full((6, 7), "1.0")), TypeError, [f"{W} holds <U3"]),
    "everything at once": (
        lambda state: replaced("x", ONES)(replaced("norm.beta", [1.0])(without(W)(state))),
        ValueError,
        [f"missing {W}", "unexpected x", "misshapen norm.beta"],
    ),
}


@pytest.mark.parametrize("case", UNFIT)
def test_a_strict_load_is_all_or_nothing(case):
    change, error, messages = UNFIT[case]
    layer, before = decoder(1), decoder(1).state_dict()
    with pytest.raises(error, match=messages[0]) as caught:
        layer.load_state_dict(change(decoder(0).state_dict()))
    for message in messages[1:]:
        caught.match(message)
    assert_equal(list(layer.state_dict().values()), list(before.values()))


@pytest.mark.parametrize("strict", [True, False])
def test_a_number_too_large_for_the_dtype(strict):
    layer = decoder(1, dtype=np.float32)
    before = layer.state_dict()
    state = replaced(W, np.full((6, 7), 1e39))(decoder(0).state_dict())
    with pytest.raises(ValueError, match=f"{W} overflows float32"):
        layer.load_state_dict(state, strict=strict)
    assert_equal(list(layer.state_dict().values()), list(before.values()))


def test_a_lenient_load_tells_what_it_did_not_load():
    layer, before = decoder(1), decoder(1).state_dict()
    state = decoder(0).state_dict()
    changed = {**state, "extra": ONES, "norm.beta": np.ones(1)}
    del changed[W]
    result = layer.load_state_dict(changed, strict=False)
    assert result.missing == (W,)
    assert result.unexpected == ("extra",)
    assert result.misshapen == ("norm.beta",)
    for name, array in layer.state_dict().items():
        old = name in (W, "norm.beta")
        np.testing.assert_array_equal(array, before[name] if old else state[name])


@pytest.mark.parametrize("change", [prefixed, lambda state: {}, lambda state: {W: np.ones(3)}])
def test_a_lenient_load_of_nothing_is_an_error(change):
    layer, before = decoder(1), decoder(1).state_dict()
    with pytest.raises(ValueError, match="has no array that fits Decoder"):
        layer.load_state_dict(change(before), strict=False)
    assert_equal(list(layer.state_dict().values()), list(before.values()))


def test_a_lenient_load_of_a_wrong_dtype_writes_nothing():
    layer, before = decoder(1), decoder(1).state_dict()
    state = replaced("norm.beta", np.ones(6, int))(decoder(0).state_dict())
    with pytest.raises(TypeError, match=r"norm\.beta holds int"):
        layer.load_state_dict(state, strict=False)
    assert_equal(list(layer.state_dict().values()), list(before.values()))


def test_loading_keeps_ties_and_views():
    embedding = Embedding(5, 3, rng=0)
    pair = Layer()
    pair.embedding, pair.output = embedding, Unembedding(embedding)
    view = embedding.W.value
    pair.load_state_dict({"embedding.W": np.ones((5, 3))})
    assert pair.output.W.value is view
    assert (view == 1).all()
    with pytest.raises(ValueError, match=r"unexpected output\.W"):
        pair.load_state_dict({"embedding.W": np.ones((5, 3)), "output.W": np.ones((5, 3))})


# Helpers of the layers


@given(V=st.integers(1, 9), N=st.integers(0, 50), seed=seeds)
def test_add_rows_is_add_at(V, N, seed):
    rng = np.random.default_rng(seed)
    ids, rows = rng.integers(0, V, N), rng.integers(-9, 9, (N, 3)).astype(float)
    found = rng.integers(-9, 9, (V, 3)).astype(float)
    expected = found.copy()
    np.add.at(expected, ids, rows)
    add_rows(found, ids, rows)
    assert_equal(found, expected)


# Construction


@pytest.mark.parametrize("make", [
    lambda rng: Linear(5, 7, rng=rng),
    lambda rng: Embedding(5, 7, rng=rng),
    lambda rng: FeedForward(5, rng=rng),
    lambda rng: Decoder(2, 6, 2, rng=rng),
])  # fmt: skip
def test_construction_from_a_seed(make):
    def weights(rng):
        return list(make(rng).state_dict().values())

    assert_equal(weights(3), weights(3))
    assert_equal(weights(3), weights(np.random.default_rng(3)))
    assert any((a != b).any() for a, b in zip(weights(3), weights(4)))
    assert any((a != b).any() for a, b in zip(weights(None), weights(None)))
    rng = np.random.default_rng(3)
    first, second = weights(rng), weights(rng)
    assert any((a != b).any() for a, b in zip(first, second))


@pytest.mark.parametrize("value", [True, False, np.True_, np.False_])
def test_a_flag_is_true_or_false(value):
    assert flag("bias", value) is bool(value)


@pytest.mark.parametrize("value", [1, 0, "no", "", None, 1.0, [], np.array([True, False])])
def test_a_flag_is_nothing_else(value):
    with pytest.raises(TypeError, match=r"bias is .*, expected True or False"):
        flag("bias", value)


def test_cores_are_those_that_this_process_may_use(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 6}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert num_cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS and Windows
    assert num_cores() == 8
    monkeypatch.setattr(os, "cpu_count", lambda: None)  # where nobody knows
    assert num_cores() == 1
