from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npdecoder.core import Array, Layer, Parameter
from npdecoder.models import LanguageModel, LanguageModelConfig
from npdecoder.optim import (
    SGD,
    Adam,
    AdamW,
    Optimizer,
    Schedule,
    clip_grad_norm,
    constant_schedule,
    cosine_schedule,
    decay_groups,
    linear_schedule,
    noam_schedule,
)

DTYPES = [np.float32, np.float64, np.longdouble]
SHAPES = [(), (5,), (2, 3), (7, 1, 3)]


def make_parameters(seed: int, dtype: Any = np.float64) -> list[Parameter]:
    rng = np.random.default_rng(seed)
    return [Parameter(np.asarray(rng.normal(size=shape)).astype(dtype)) for shape in SHAPES]


def set_gradients(parameters: list[Parameter], n: int) -> None:
    """Gradients that depend on the values, so that an error in one update spreads to the next."""
    for i, p in enumerate(parameters):
        p.grad = np.sin(n * p.value + (n + i))


def train(optimizer: Optimizer, schedule: Schedule, updates: int) -> None:
    for _ in range(updates):
        optimizer.zero_grad()
        set_gradients(optimizer.parameters(), optimizer.steps + 1)
        clip_grad_norm(optimizer.parameters(), 1.0)
        optimizer.lr = schedule(optimizer.steps + 1)
        optimizer.step()


def one(value: float = 1.0, grad: float = 1.0, dtype: Any = np.float64) -> Parameter:
    p = Parameter(np.array([value], dtype))
    p.grad = np.array([grad], dtype)
    return p


# SGD

# What PyTorch 2.13.0 computes in float64, as (momentum, weight_decay, W, b) after four updates:
#
#     W = torch.nn.Parameter(torch.tensor([[0.1, -0.2, 0.3], [0.4, 0.5, -0.6]]))
#     b = torch.nn.Parameter(torch.tensor([0.7, -0.8, 0.9]))
#     opt = torch.optim.SGD([W, b], lr=0.1, momentum=momentum, weight_decay=weight_decay)
#     for n in range(1, 5):
#         W.grad = torch.sin(n * W.detach() + n)
#         b.grad = torch.cos(n * b.detach() - n)
#         opt.step()
TORCH = [
    (
        0.0, 0.0,
        [[-0.07773725766288385, -0.550610073424034, 0.2629694246835536],
         [0.39427893745474507, 0.4955873328750311, -0.8588759732565631]],
        [0.5522882983315063, -0.8023058386789861, 0.6295241358137003],
    ),
    (
        0.0, 0.1,
        [[-0.07754537108176059, -0.5353500005072714, 0.2528237837216801],
         [0.38160955349962555, 0.48132937591832403, -0.8389948499662071]],
        [0.5386600021887546, -0.7734038974327776, 0.6116361890890128],
    ),
    (
        0.9, 0.0,
        [[-0.6191526173102516, -1.0000328508512228, -0.16277083972129608],
         [0.07658571484606014, 0.2850479827465508, -1.0850483640478374]],
        [0.28888255683600816, -0.6263899647490777, 0.2992695378569268],
    ),
    (
        0.9, 0.1,
        [[-0.6179018975500961, -0.9722572677475783, -0.18969657307010582],
         [0.03935051831314186, 0.24286379789164697, -1.0447726334432368]],
        [0.2543762059641133, -0.5454090604433012, 0.2563976122041906],
    ),
]  # fmt: skip

# The same updates with
#
#     opt = torch.optim.SGD([{"params": [W], "lr": 0.1},
#                            {"params": [b], "lr": 0.2, "momentum": 0.5, "weight_decay": 0.0}],
#                           momentum=0.9, weight_decay=0.1)
#
# and, before update n, group["lr"] = (the group's lr above) / n.
TORCH_GROUPS = (
    [[-0.17375626201137806, -0.4971870720561965, 0.07590400265719185],
     [0.20125542718405445, 0.32289867234016134, -0.7858199160919763]],
    [0.41640842391932875, -0.6720160014678479, 0.5025493673927102],
)  # fmt: skip


def torch_start() -> tuple[Parameter, Parameter]:
    W = Parameter(np.array([[0.1, -0.2, 0.3], [0.4, 0.5, -0.6]]))
    return W, Parameter(np.array([0.7, -0.8, 0.9]))


def torch_gradients(W: Parameter, b: Parameter, n: int) -> None:
    W.grad = np.sin(n * W.value + n)
    b.grad = np.cos(n * b.value - n)


@pytest.mark.parametrize(("momentum", "weight_decay", "W_after", "b_after"), TORCH)
def test_sgd_equals_torch(
    momentum: float, weight_decay: float, W_after: list[Any], b_after: list[Any]
) -> None:
    W, b = torch_start()
    optimizer = SGD([W, b], lr=0.1, momentum=momentum, weight_decay=weight_decay)
    for n in range(1, 5):
        torch_gradients(W, b, n)
        optimizer.step()
    np.testing.assert_allclose(W.value, W_after, rtol=1e-12, atol=0)
    np.testing.assert_allclose(b.value, b_after, rtol=1e-12, atol=0)


def test_groups_equal_torch() -> None:
    W, b = torch_start()
    own = {"params": [b], "lr": 0.2, "momentum": 0.5, "weight_decay": 0.0}
    optimizer = SGD([{"params": [W]}, own], lr=0.1, momentum=0.9, weight_decay=0.1)
    for n in range(1, 5):
        torch_gradients(W, b, n)
        optimizer.lr = 0.1 / n
        optimizer.step()
    np.testing.assert_allclose(W.value, TORCH_GROUPS[0], rtol=1e-12, atol=0)
    np.testing.assert_allclose(b.value, TORCH_GROUPS[1], rtol=1e-12, atol=0)


@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from([1, 2, 3, 5, 7]),
    lr=st.sampled_from([0.0, 0.01, 0.3]),
    momentum=st.sampled_from([0.0, 0.5, 0.99]),
    weight_decay=st.sampled_from([0.0, 0.01, 0.2]),
)
def test_sgd_equals_its_equations(
    seed: int, size: int, lr: float, momentum: float, weight_decay: float
) -> None:
    rng = np.random.default_rng(seed)
    parameter = Parameter(rng.normal(size=(size, 3)))
    optimizer = SGD([parameter], lr, momentum=momentum, weight_decay=weight_decay)
    value, v = parameter.value.copy(), np.zeros((size, 3))
    for _ in range(4):
        grad = rng.normal(size=(size, 3))
        parameter.grad = grad
        optimizer.step()
        g = grad + weight_decay * value
        v = momentum * v + g
        value = value - lr * v
        np.testing.assert_allclose(parameter.value, value, rtol=1e-12, atol=1e-14)
        assert np.array_equal(parameter.grad, grad)


def test_a_new_lr_applies_to_the_past_gradients_too() -> None:
    """The paper's form would subtract 0.9 * 1.0 + 0.5 * 1.0 in the second update."""
    p = one(0.0)
    optimizer = SGD([p], lr=1.0, momentum=0.9)
    optimizer.step()
    assert p.value[0] == -1.0
    optimizer.lr = 0.5
    optimizer.step()
    assert p.value[0] == pytest.approx(-1.0 - 0.5 * 1.9, abs=1e-15)


ADAM_OPTIONS = {"betas": (np.float64(0.9), np.float64(0.99)), "eps": np.float64(1e-8)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("make", "options", "names"),
    [
        (SGD, {"momentum": np.float64(0.9)}, ["momentum"]),
        (Adam, ADAM_OPTIONS, ["m", "v"]),
        (AdamW, ADAM_OPTIONS, ["m", "v"]),
    ],
)
def test_the_dtype_stays(make: Any, options: Any, names: list[str], dtype: Any) -> None:
    """NumPy 2 computes in float64 what a np.float64 touches; options of that type are usual."""
    parameters = make_parameters(0, dtype)
    before = [p.value.copy() for p in parameters]
    optimizer = make(parameters, np.float64(0.1), weight_decay=np.float64(0.01), **options)
    for n in range(1, 4):
        set_gradients(parameters, n)
        optimizer.lr = np.float64(0.1) / n
        clip_grad_norm(parameters, np.float64(0.5))
        optimizer.step()
    state = optimizer.state_dict()
    for i, p in enumerate(parameters):
        assert p.value.dtype == p.grad.dtype == dtype
        assert not np.array_equal(p.value, before[i])
        for name in names:
            assert state[f"{name}.{i}"].dtype == dtype
            assert state[f"{name}.{i}"].shape == p.shape
    assert type(optimizer.lr) is float


def test_float32_is_computed_in_float32() -> None:
    p = Parameter(np.array([0.1, 0.7, -1.3], np.float32))
    p.grad = np.array([0.3, -0.9, 0.11], np.float32)
    g = p.grad + np.float32(0.01) * p.value
    expected = p.value - np.float32(0.1) * g
    SGD([p], lr=np.float64(0.1), weight_decay=np.float64(0.01)).step()
    assert np.array_equal(p.value, expected)


@pytest.mark.parametrize("make", [SGD, partial(SGD, momentum=0.9), Adam, AdamW])
def test_views_stay_true(make: Any) -> None:
    parameters = make_parameters(1)
    values = [p.value for p in parameters]
    grads = [p.grad for p in parameters]
    row = parameters[2].value[1]
    optimizer = make(parameters, 0.1, weight_decay=0.1)
    before = row.copy()
    train(optimizer, constant_schedule(0.1), 3)
    assert all(p.value is value for p, value in zip(parameters, values))
    assert all(p.grad is grad for p, grad in zip(parameters, grads))
    assert np.array_equal(row, parameters[2].value[1])
    assert not np.array_equal(row, before)


@pytest.mark.parametrize("make", [partial(SGD, momentum=0.9), Adam, AdamW])
def test_a_step_leaves_the_gradients(make: Any) -> None:
    parameters = make_parameters(2)
    optimizer = make(parameters, 0.1, weight_decay=0.1)
    for n in (1, 2):
        set_gradients(parameters, n)
        before = [p.grad.copy() for p in parameters]
        optimizer.step()
        assert all(np.array_equal(p.grad, grad) for p, grad in zip(parameters, before))


def test_zero_grad() -> None:
    parameters = make_parameters(3)
    set_gradients(parameters, 1)
    SGD(parameters, 0.1).zero_grad()
    assert all(not p.grad.any() for p in parameters)


def test_a_zero_gradient_is_a_gradient() -> None:
    p = one(2.0, 0.0)
    SGD([p], lr=0.1, weight_decay=0.5).step()
    assert p.value[0] == pytest.approx(2.0 - 0.1 * 0.5 * 2.0, abs=1e-15)


def test_momentum_is_allocated_only_where_it_is_used() -> None:
    p, q = one(), one()
    assert not any(isinstance(v, np.ndarray) for v in SGD([p, q], 0.1).state_dict().values())
    state = SGD([{"params": p}, {"params": q, "momentum": 0.5}], 0.1).state_dict()
    assert [name for name, v in state.items() if isinstance(v, np.ndarray)] == ["momentum.1"]


def test_momentum_follows_astype() -> None:
    class Tiny(Layer):
        def __init__(self) -> None:
            self.W = Parameter(np.array([0.1, 0.2], np.float32))

    layer = Tiny()
    optimizer = SGD(layer.parameters(), 0.1, momentum=0.9)
    layer.W.grad = np.array([0.3, -0.7], np.float32)
    optimizer.step()
    buffer = optimizer.state_dict()["momentum.0"]
    layer.astype(np.float64)
    assert optimizer.state_dict()["momentum.0"].dtype == np.float64
    value = layer.W.value.copy()
    optimizer.step()
    expected = value - 0.1 * (0.9 * buffer.astype(np.float64) + layer.W.grad)
    np.testing.assert_allclose(layer.W.value, expected, rtol=1e-15)


# Adam and AdamW

both = pytest.mark.parametrize("make", [Adam, AdamW])


def adam_by_hand(
    value: float, grads: list[float], rates: list[float], decoupled: bool,
    beta1: float, beta2: float, eps: float, weight_decay: float,
) -> list[float]:  # fmt: skip
    """One number, as the papers have it: each line an equation, in Python's floats."""
    m = v = 0.0
    values = []
    for n, (g, lr) in enumerate(zip(grads, rates), start=1):
        if not decoupled:
            g = g + weight_decay * value
        m = beta1 * m + (1.0 - beta1) * g
        v = beta2 * v + (1.0 - beta2) * g * g
        m_hat = m / (1.0 - beta1**n)
        v_hat = v / (1.0 - beta2**n)
        step = m_hat / (math.sqrt(v_hat) + eps)
        if decoupled:
            step = step + weight_decay * value
        value = value - lr * step
        values.append(value)
    return values


@given(
    seed=st.integers(0, 2**32 - 1),
    make=st.sampled_from([Adam, AdamW]),
    lr=st.sampled_from([0.0, 1e-3, 0.3]),
    betas=st.sampled_from([(0.9, 0.999), (0.0, 0.5), (0.5, 0.0), (0.99, 0.9), (0.0, 0.0)]),
    eps=st.sampled_from([1e-8, 1e-3, 1.0]),
    weight_decay=st.sampled_from([0.0, 0.01, 0.5]),
)
def test_adam_equals_its_equations(
    seed: int, make: Any, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> None:
    rng = np.random.default_rng(seed)
    parameter = Parameter(rng.normal(size=(3, 2)))
    before = parameter.value.copy()
    grads = rng.normal(size=(6, 3, 2)) * [1.0, 1e-3]  # of the size of eps too
    rates = [lr / n for n in range(1, 7)]
    optimizer = make([parameter], lr, betas, eps, weight_decay)
    found = []
    for grad, rate in zip(grads, rates):
        parameter.grad = grad
        optimizer.lr = rate
        optimizer.step()
        assert np.array_equal(parameter.grad, grad)
        found.append(parameter.value.copy())
    for place in np.ndindex(3, 2):
        expected = adam_by_hand(
            before[place], grads[(slice(None), *place)].tolist(), rates, make is AdamW,
            *betas, eps, weight_decay,
        )  # fmt: skip
        np.testing.assert_allclose(
            np.array(found)[(slice(None), *place)], expected, rtol=1e-12, atol=1e-14
        )


@both
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.9), (0.99, 0.5)])
@pytest.mark.parametrize("grad", [1e-6, -1e-3, 1.0, -1e5])
def test_every_step_of_a_constant_gradient_is_lr(
    make: Any, betas: tuple[float, float], grad: float
) -> None:
    """The first one above all: without the two corrections it would be of another size."""
    p = one(0.5, grad)
    optimizer = make([p], lr=0.01, betas=betas, eps=0.0, weight_decay=0.0)
    for n in range(1, 6):
        optimizer.step()
        assert p.value[0] == pytest.approx(0.5 - math.copysign(0.01 * n, grad), rel=0, abs=1e-14)


@both
def test_eps_is_added_to_the_root(make: Any) -> None:
    """Of a gradient as large as eps the first step is half of lr; in the root, a hundredth."""
    p = one(0.0, 1e-4)
    make([p], lr=0.1, eps=1e-4, weight_decay=0.0).step()
    assert p.value[0] == pytest.approx(-0.05, rel=1e-12)


def test_the_defaults_are_those_of_the_papers() -> None:
    adam, adamw = Adam([one()]), AdamW([one()])
    assert adam.lr == adamw.lr == 1e-3
    options = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
    assert adam.groups[0].options == options
    assert adamw.groups[0].options == {**options, "weight_decay": 0.01}


@pytest.mark.parametrize("dtype", DTYPES)
def test_adamw_decays_apart_from_the_gradient(dtype: Any) -> None:
    """Where it is zero, every update multiplies by 1 - lr * weight_decay, exactly."""
    parameters = make_parameters(3, dtype)
    expected = [p.value.copy() for p in parameters]
    optimizer = AdamW(parameters, lr=0.25, weight_decay=0.5)
    for lr in (0.25, 0.1, 0.003):
        optimizer.lr = lr
        optimizer.step()
        for p, value in zip(parameters, expected):
            value *= 1.0 - lr * 0.5
            assert np.array_equal(p.value, value)


def test_the_decay_of_adam_goes_through_its_gradient() -> None:
    """So that where the gradient is zero it moves all numbers alike, by lr, however large."""
    p = Parameter(np.array([3.0, -0.2, 0.01]))
    Adam([p], lr=0.001, eps=0.0, weight_decay=0.5).step()
    np.testing.assert_allclose(p.value, [2.999, -0.199, 0.009], rtol=1e-14)


def test_without_decay_the_two_are_one() -> None:
    found = []
    for make in (Adam, AdamW):
        parameters = make_parameters(4, np.float32)
        train(make(parameters, weight_decay=0.0), noam_schedule(8, 4), 5)
        found.append([p.value.tobytes() for p in parameters])
    assert found[0] == found[1]


OWN = {"lr": 0.03, "betas": (0.5, 0.75), "eps": 1e-2, "weight_decay": 0.2}


@both
@pytest.mark.parametrize("names", [["lr"], ["betas"], ["eps"], ["weight_decay"], list(OWN)])
def test_a_group_has_options_of_its_own(make: Any, names: list[str]) -> None:
    """It is updated as by an optimizer of its own, and the other group as ever."""
    own = {name: OWN[name] for name in names}
    common: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
    apart, together = make_parameters(6), make_parameters(6)
    optimizers = [make(apart[:2], **common), make(apart[2:], **{**common, **own})]
    grouped = make([{"params": together[:2]}, {"params": together[2:], **own}], **common)
    for n in range(1, 5):
        set_gradients(together, n)
        set_gradients(apart, n)
        for optimizer in (*optimizers, grouped):
            optimizer.step()
    for p, q in zip(apart, together):
        np.testing.assert_allclose(q.value, p.value, rtol=1e-13)
    assert "betas" not in grouped.groups[1].options
    group = {"params": [one()], "betas": (0.1, 0.2)}
    make([group])
    assert group.keys() == {"params", "betas"}  # the caller's own dict


@both
@pytest.mark.parametrize(
    ("betas", "error", "words"),
    [
        (0.9, TypeError, "betas is 0.9, expected a pair"),
        ((0.9,), TypeError, "betas is .*expected a pair"),
        ((0.9, 0.99, 0.999), TypeError, "betas is .*expected a pair"),
        ((), TypeError, "betas is .*expected a pair"),
        (None, TypeError, "betas is None, expected a pair"),
        ((1.0, 0.9), ValueError, r"beta1\b.* is 1.0"),
        ((0.9, 1.0), ValueError, r"beta2\b.* is 1.0"),
        ((1.5, 0.9), ValueError, r"beta1\b.* is 1.5"),
        ((-0.1, 0.9), ValueError, r"beta1\b.* is -0.1"),
        ((0.9, -0.1), ValueError, r"beta2\b.* is -0.1"),
        ((math.nan, 0.9), ValueError, r"beta1\b.* is nan"),
        ((0.9, math.nan), ValueError, r"beta2\b.* is nan"),
        ((0.9, math.inf), ValueError, r"beta2\b.* is inf"),
        (("0.9", 0.9), TypeError, r"beta1\b.* is '0.9'"),
        ((0.9, None), TypeError, r"beta2\b.* is None"),
        ((True, 0.9), TypeError, r"beta1\b.* is True"),
    ],
)
def test_betas_are_checked(make: Any, betas: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make([one()], betas=betas)
    with pytest.raises(error, match=words):
        make([{"params": one()}, {"params": one(), "betas": betas}])


@both
@pytest.mark.parametrize("name", ["beta1", "beta2"])
def test_the_betas_of_a_group_may_have_the_names_of_the_state_dict(make: Any, name: str) -> None:
    """And are checked under these too."""
    assert make([{"params": one(), name: 0.25}]).groups[0].options[name] == 0.25
    for bad, error in ((1.0, ValueError), (-0.1, ValueError), (None, TypeError)):
        with pytest.raises(error, match=f"{name} of .* is"):
            make([{"params": one(), name: bad}])


@both
@pytest.mark.parametrize("name", ["lr", "eps", "weight_decay"])
def test_other_options_of_adam_are_checked(make: Any, name: str) -> None:
    for bad, error in ((-0.1, ValueError), (math.nan, ValueError), (math.inf, ValueError),
                       ("1", TypeError), (None, TypeError), (True, TypeError)):  # fmt: skip
        with pytest.raises(error, match=f"{name} "):
            make([one()], **{name: bad})
        with pytest.raises(error, match=f"{name} of group 1"):
            make([{"params": one()}, {"params": one(), name: bad}])


@both
def test_unknown_options_of_adam_are_named(make: Any) -> None:
    for name in ("beta", "momentum", "amsgrad", "weight-decay"):
        with pytest.raises(ValueError, match=f"group 1 has the unknown option '{name}'"):
            make([{"params": one()}, {"params": one(), name: 0.5}])
        with pytest.raises(TypeError, match=name):
            make([one()], **{name: 0.5})


@both
def test_what_adam_remembers_is_made_at_the_start_and_is_zero(make: Any) -> None:
    state = make(make_parameters(5, np.float32)).state_dict()
    arrays = {name: v for name, v in state.items() if isinstance(v, np.ndarray)}
    assert list(arrays) == [f"{name}.{i}" for i in range(4) for name in ("m", "v")]
    assert not any(array.any() for array in arrays.values())


@pytest.mark.parametrize("make", [lambda p: SGD(p, 0.1, momentum=0.9), Adam, AdamW])
@pytest.mark.parametrize(("old", "new"), [(np.float32, np.float64), (np.float64, np.float32)])
def test_the_state_follows_astype(make: Any, old: Any, new: Any) -> None:
    """After it the run goes on as one whose state was converted by hand."""

    class Tiny(Layer):
        def __init__(self) -> None:
            self.W = Parameter(np.array([0.1, 0.2], old))

    layer = Tiny()
    optimizer = make(layer.parameters())
    train(optimizer, constant_schedule(0.1), 2)
    saved = optimizer.state_dict()
    layer.astype(new)
    other = Parameter(layer.W.value.copy())
    expected = make([other])
    expected.load_state_dict(
        {k: v.astype(new) if isinstance(v, np.ndarray) else v for k, v in saved.items()}
    )
    train(optimizer, constant_schedule(0.1), 2)
    train(expected, constant_schedule(0.1), 2)
    assert layer.W.value.dtype == new
    assert np.array_equal(layer.W.value, other.value)
    for name, value in optimizer.state_dict().items():
        assert np.asarray(value).dtype == np.asarray(expected.state_dict()[name]).dtype
        assert np.array_equal(value, expected.state_dict()[name])


# Groups that decay matrices alone


def test_matrices_decay_and_biases_and_norms_do_not() -> None:
    config = LanguageModelConfig(
        11, d_model=8, num_heads=2, num_layers=2, max_len=6, positions="learned",
        attention_bias=True, output_bias=True, tie_embeddings="target_output",
    )  # fmt: skip
    model = LanguageModel(config, 0)
    names = {id(p): name for name, p in model.named_parameters()}
    matrices, others = decay_groups(model.parameters(), 0.1)
    assert matrices["weight_decay"] == 0.1
    assert others["weight_decay"] == 0.0
    leaves = [{names[id(p)].rpartition(".")[2] for p in group["params"]}
              for group in (matrices, others)]
    assert leaves == [{"W", "P"}, {"b", "gamma", "beta"}]
    assert len(matrices["params"]) + len(others["params"]) == len(names)

    optimizer = AdamW([matrices, others], lr=0.5)
    before = {name: p.value.copy() for name, p in model.named_parameters()}
    optimizer.step()  # of no gradient at all
    for name, p in model.named_parameters():
        decayed = np.float32(0.95) * before[name] if p.value.ndim == 2 else before[name]
        np.testing.assert_allclose(p.value, decayed, rtol=1e-6, err_msg=name)


def test_decay_groups_of_any_parameters() -> None:
    scalar, vector, matrix, cube = make_parameters(0)
    groups = decay_groups([scalar, matrix, vector, matrix, cube, scalar], 0.25)
    assert [group["weight_decay"] for group in groups] == [0.25, 0.0]
    assert [list(map(id, group["params"])) for group in groups] == [
        [id(matrix), id(cube)], [id(scalar), id(vector)],
    ]
    assert decay_groups(iter([matrix]), 0.5) == [{"params": [matrix], "weight_decay": 0.5}]
    assert decay_groups([vector], 0.5) == [{"params": [vector], "weight_decay": 0.0}]
    assert decay_groups([], 0.5) == []
    with pytest.raises(TypeError, match=r"layer\.parameters\(\)"):
        decay_groups([matrix.value], 0.5)
    with pytest.raises(TypeError, match=r"layer\.parameters\(\)"):
        decay_groups({matrix}, 0.5)
    with pytest.raises(ValueError, match="weight_decay"):
        AdamW(decay_groups([matrix, vector], -0.5))


# A Parameter listed twice, tied weights


@both
def test_adam_steps_a_parameter_listed_twice_once(make: Any) -> None:
    """Twice would move it by 2 lr, with moments of its own for each."""
    p, q, alone = one(), one(), one()
    optimizer = make([{"params": [q]}, {"params": [p, p]}], lr=0.1, weight_decay=0.0)
    other = make([alone], lr=0.1, weight_decay=0.0)
    for _ in range(3):
        optimizer.step()
        other.step()
        assert p.value[0] == q.value[0] == alone.value[0]
    assert p.value[0] == pytest.approx(0.7, rel=1e-7)
    assert [name for name in optimizer.state_dict() if name[:2] == "m."] == ["m.0", "m.1"]
    with pytest.raises(ValueError, match="two groups"):
        make([{"params": [p]}, {"params": [q, p]}])


@both
def test_a_tied_table_is_stepped_once(make: Any) -> None:
    """Where one table is read and speaks, both its gradients make one step of it."""
    config = LanguageModelConfig(
        5, d_model=4, num_heads=1, num_layers=1, max_len=4, tie_embeddings="target_output"
    )
    model = LanguageModel(config, 0, dtype=np.float64)
    table = model.embedding.W
    assert model.output.W is table
    optimizer = make(model.parameters(), lr=0.01, eps=0.0, weight_decay=0.0)
    before = table.value.copy()
    logits, ctx = model.forward(np.array([[0, 1, 2, 3]]))
    model.backward(ctx, np.random.default_rng(0).normal(size=logits.shape))
    optimizer.step()
    np.testing.assert_allclose(np.abs(table.value - before), 0.01, rtol=1e-9)
    assert model.output.W is model.embedding.W
    count = len(model.parameters())
    assert sum(name.startswith("m.") for name in optimizer.state_dict()) == count


@pytest.mark.parametrize(("momentum", "right", "wrong"), [(0.0, 0.8, 0.6), (0.9, 0.71, 0.339)])
def test_a_parameter_listed_twice_is_stepped_once(
    momentum: float, right: float, wrong: float
) -> None:
    p = one()
    optimizer = SGD([p, p], lr=0.1, momentum=momentum)
    optimizer.step()
    assert p.value[0] == pytest.approx(0.9, abs=1e-15)
    optimizer.step()
    assert p.value[0] == pytest.approx(right, abs=1e-15)
    assert p.value[0] != pytest.approx(wrong, abs=1e-3)
    assert optimizer.parameters() == [p]


def test_a_parameter_twice_in_one_group_and_in_two() -> None:
    p, q = one(), one()
    optimizer = SGD([{"params": [q]}, {"params": [p, p]}], lr=0.1)
    optimizer.step()
    assert p.value[0] == q.value[0] == pytest.approx(0.9, abs=1e-15)
    with pytest.raises(ValueError, match="two groups"):
        SGD([{"params": [p]}, {"params": [q, p]}], lr=0.1)


def test_the_norm_counts_a_parameter_once_however_often_it_is_listed() -> None:
    p, q = one(grad=3.0), one(grad=4.0)
    assert clip_grad_norm([p, q, p, p], 1.0) == 5.0
    assert p.grad[0] == pytest.approx(0.6, rel=1e-15)
    assert q.grad[0] == pytest.approx(0.8, rel=1e-15)


# Groups and options


def test_a_group_keeps_its_ratio_to_the_base_rate() -> None:
    p, q = one(0.0), one(0.0)
    optimizer = SGD([{"params": [p]}, {"params": [q], "lr": 0.3}], lr=0.1)
    assert [group.lr_scale for group in optimizer.groups] == [1.0, pytest.approx(3.0)]
    for lr in (0.1, 0.02, 0.0, 0.5):
        optimizer.lr = lr
        optimizer.step()
    assert p.value[0] == pytest.approx(-0.62, rel=1e-14)
    assert q.value[0] == pytest.approx(-1.86, rel=1e-14)


def test_groups_do_not_change_the_callers_dicts() -> None:
    group: Mapping[str, Any] = {"params": iter([one()]), "lr": 0.2}
    optimizer = SGD([group], lr=0.1, momentum=0.5)
    optimizer.step()
    assert set(group) == {"params", "lr"}
    assert optimizer.groups[0].options == {"momentum": 0.5, "weight_decay": 0.0}


def test_iterables_of_parameters() -> None:
    p, q = one(), one()
    assert SGD((x for x in [p, q]), 0.1).parameters() == [p, q]
    assert SGD({"b": q, "a": p}.values(), 0.1).parameters() == [q, p]
    assert SGD(p, 0.1).parameters() == [p]


@pytest.mark.parametrize("bad", [-0.1, math.nan, math.inf, -math.inf, np.float32(-1)])
@pytest.mark.parametrize("name", ["lr", "momentum", "weight_decay"])
def test_options_out_of_range(name: str, bad: float) -> None:
    with pytest.raises(ValueError, match=name):
        SGD([one()], **{"lr": 0.1, name: bad})
    with pytest.raises(ValueError, match=f"{name} of group 1"):
        SGD([{"params": one()}, {"params": one(), name: bad}], lr=0.1)


@pytest.mark.parametrize("bad", [None, "0.1", True, [0.1], 1j])
@pytest.mark.parametrize("name", ["lr", "momentum", "weight_decay"])
def test_options_that_are_no_numbers(name: str, bad: Any) -> None:
    with pytest.raises(TypeError, match=f"{name} .*expected a number"):
        SGD([one()], **{"lr": 0.1, name: bad})


def test_lr_is_checked_when_it_is_set() -> None:
    optimizer = SGD([one()], lr=0.1)
    for bad in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="lr"):
            optimizer.lr = bad
    with pytest.raises(TypeError, match="lr"):
        optimizer.lr = noam_schedule(8, 2)  # type: ignore[assignment]
    assert optimizer.lr == 0.1
    optimizer.lr = 1
    assert type(optimizer.lr) is float


def test_base_lr_zero() -> None:
    SGD([{"params": one()}], lr=0.0)
    for lr in (0.2, 0.0):
        with pytest.raises(ValueError, match=r"group 1.*base lr is 0"):
            SGD([{"params": one()}, {"params": one(), "lr": lr}], lr=0.0)


def test_an_unknown_option_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"group 0.*'momentun'.*lr, momentum, weight_decay"):
        SGD([{"params": one(), "momentun": 0.9}], lr=0.1)


@pytest.mark.parametrize(
    "empty",
    [[], (), iter(()), [{"params": []}], [{"lr": 0.1}], [{"params": one()}, {"params": []}]],
)
def test_no_parameters(empty: Any) -> None:
    with pytest.raises(ValueError, match="no parameters"):
        SGD(empty, lr=0.1)


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        1,
        Layer(),
        np.ones(3),
        [np.ones(3)],
        [one().value],
        ["W"],
        [("W", one())],
        [one(), {"params": one()}],
        {"params": [one()]},
        {one()},
        [{"params": Layer()}],
        [{"params": [1.0]}],
    ],
    ids=lambda wrong: type(wrong).__name__,
)
def test_what_is_no_parameter(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"layer\.parameters\(\)"):
        SGD(wrong, lr=0.1)
    if not isinstance(wrong, list) or not isinstance(wrong[-1], dict):
        with pytest.raises(TypeError, match=r"layer\.parameters\(\)"):
            clip_grad_norm(wrong, 1.0)


@pytest.mark.parametrize("make", [SGD, Adam, AdamW])
def test_one_parameter_needs_no_list(make: Any) -> None:
    alone, listed = one(1.0, 10.0), one(1.0, 10.0)
    for optimizer in make(alone, lr=0.1), make([listed], lr=0.1):
        optimizer.step()
    assert alone.value == listed.value < 1.0


def test_a_subclass_writes_one_rule() -> None:
    class Lagged(Optimizer):
        """value -= lr * (scale * the gradient of the update before, plus the number of this one)"""

        def __init__(self, parameters: list[Parameter], lr: float, scale: float = 1.0) -> None:
            super().__init__(parameters, lr, scale=scale)

        def new_state(self, parameter: Parameter, options: Mapping[str, float]) -> dict[str, Array]:
            return {"last": np.zeros_like(parameter.value)}

        def update(
            self,
            parameter: Parameter,
            state: dict[str, Array],
            options: Mapping[str, float],
            lr: float,
        ) -> None:
            assert type(lr) is float
            assert type(options["scale"]) is float
            parameter.value -= lr * (options["scale"] * state["last"] + self.steps)
            state["last"][...] = parameter.grad

    p = one(0.0, 10.0)
    optimizer = Lagged([p], lr=0.5, scale=2.0)
    optimizer.step()
    assert p.value[0] == -0.5
    state = optimizer.state_dict()
    assert list(state) == ["lr", "steps", "group.0.lr_scale", "group.0.scale", "last.0"]
    other = Lagged([p], lr=0.5)
    other.load_state_dict(state)
    other.step()
    assert p.value[0] == -0.5 - 0.5 * (2.0 * 10.0 + 2)


def test_the_base_class_has_no_rule() -> None:
    with pytest.raises(NotImplementedError, match="Optimizer does not define new_state"):
        Optimizer([one()], lr=0.1)

    class Half(Optimizer):
        def new_state(self, parameter: Parameter, options: Mapping[str, float]) -> dict[str, Array]:
            return {}

    with pytest.raises(NotImplementedError, match="Half does not define update"):
        Half([one()], lr=0.1).step()


# The state, and resuming


def through_npz(state: dict[str, Any], folder: Path) -> Mapping[str, Any]:
    np.savez(folder / "state.npz", **state)
    with np.load(folder / "state.npz", allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def through_npz_and_json(state: dict[str, Any], folder: Path) -> Mapping[str, Any]:
    arrays = {name: v for name, v in state.items() if isinstance(v, np.ndarray)}
    numbers = {name: v for name, v in state.items() if name not in arrays}
    assert {type(v) for v in numbers.values()} <= {int, float}
    return {**json.loads(json.dumps(numbers)), **through_npz(arrays, folder)}


def through_json(state: dict[str, Any], folder: Path) -> Mapping[str, Any]:
    lists = {n: v.tolist() if isinstance(v, np.ndarray) else v for n, v in state.items()}
    loaded: dict[str, Any] = json.loads(json.dumps(lists))
    return loaded


def three_groups(parameters: list[Parameter]) -> SGD:
    return SGD(
        [
            {"params": parameters[0]},
            {"params": parameters[1:3], "lr": 0.03, "weight_decay": 0.0},
            {"params": parameters[3:], "momentum": 0.0},
        ],
        lr=0.1,
        momentum=0.9,
        weight_decay=0.01,
    )


def three_groups_of_adam(make: Any, parameters: list[Parameter]) -> Adam:
    groups = [
        {"params": parameters[0]},
        {"params": parameters[1:3], "lr": 0.03, "weight_decay": 0.0},
        {"params": parameters[3:], "betas": (0.5, 0.75), "eps": 1e-3},
    ]
    optimizer: Adam = make(groups, lr=0.1, betas=(0.7, 0.95), weight_decay=0.01)
    return optimizer


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "SGD": three_groups,
    "Adam": partial(three_groups_of_adam, Adam),
    "AdamW": partial(three_groups_of_adam, AdamW),
}
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("store", [through_npz, through_npz_and_json, through_json])
@every_optimizer
def test_a_resumed_run_is_bit_identical(
    make: Callable[..., Optimizer], store: Callable[..., Any], dtype: Any, tmp_path: Path
) -> None:
    schedule = noam_schedule(8, 4)
    whole = make_parameters(5, dtype)
    uninterrupted = make(whole)
    train(uninterrupted, schedule, 10)

    first_half = make_parameters(5, dtype)
    optimizer = make(first_half)
    train(optimizer, schedule, 5)
    stored = store(optimizer.state_dict(), tmp_path)

    second_half = make_parameters(6, dtype)
    for p, q in zip(second_half, first_half):
        p.value = q.value
    resumed = make(second_half)
    resumed.load_state_dict(stored)
    assert resumed.steps == 5
    assert resumed.lr == optimizer.lr
    train(resumed, schedule, 5)

    for p, q in zip(whole, second_half):
        assert np.array_equal(p.value, q.value)
        assert p.value.dtype == q.value.dtype == dtype
    a, b = uninterrupted.state_dict(), resumed.state_dict()
    assert list(a) == list(b)
    for name, value in a.items():
        assert np.array_equal(value, b[name]), name
        assert np.asarray(value).dtype == np.asarray(b[name]).dtype, name


def test_the_names_of_the_state() -> None:
    state = three_groups(make_parameters(7)).state_dict()
    assert list(state) == [
        "lr", "steps",
        "group.0.lr_scale", "group.0.momentum", "group.0.weight_decay",
        "group.1.lr_scale", "group.1.momentum", "group.1.weight_decay",
        "group.2.lr_scale", "group.2.momentum", "group.2.weight_decay",
        "momentum.0", "momentum.1", "momentum.2",
    ]  # fmt: skip


@both
def test_the_names_of_the_state_of_adam(make: Any) -> None:
    names = ("lr_scale", "beta1", "beta2", "eps", "weight_decay")
    assert list(three_groups_of_adam(make, make_parameters(7)).state_dict()) == [
        "lr", "steps",
        *[f"group.{i}.{name}" for i in range(3) for name in names],
        *[f"{name}.{i}" for i in range(4) for name in ("m", "v")],
    ]  # fmt: skip


@every_optimizer
def test_the_state_is_a_copy_both_ways(make: Callable[..., Optimizer]) -> None:
    optimizer = make(make_parameters(8))
    train(optimizer, constant_schedule(0.1), 1)
    state = optimizer.state_dict()
    before = {name: np.array(value) for name, value in state.items()}
    train(optimizer, constant_schedule(0.2), 1)
    optimizer.load_state_dict(state)
    train(optimizer, constant_schedule(0.2), 1)
    for name, value in state.items():
        assert np.array_equal(value, before[name]), name


def test_loading_restores_the_options() -> None:
    saved = SGD([one(), one()], 0.25, momentum=0.5, weight_decay=0.125).state_dict()
    optimizer = SGD([one(), one()], 0.1, momentum=0.9)
    optimizer.load_state_dict(saved)
    assert optimizer.lr == 0.25
    assert optimizer.groups[0].options == {"momentum": 0.5, "weight_decay": 0.125}


def test_loading_restores_the_ratio_of_a_group() -> None:
    p, q = one(0.0), one(0.0)
    saved = SGD([{"params": p}, {"params": q, "lr": 0.5}], lr=0.125).state_dict()
    optimizer = SGD([{"params": p}, {"params": q}], lr=1.0)
    optimizer.load_state_dict(saved)
    optimizer.step()
    assert (p.value[0], q.value[0]) == (-0.125, -0.5)


def assert_refused(optimizer: Optimizer, state: Mapping[str, Any], *words: str) -> None:
    """Loading raises one ValueError with all the words, and changes nothing."""
    before = optimizer.state_dict()
    with pytest.raises(ValueError, match="state dict does not fit") as error:
        optimizer.load_state_dict(state)
    for word in words:
        assert word in str(error.value)
    for name, value in optimizer.state_dict().items():
        assert np.array_equal(value, before[name]), name


def changed_states(
    make: Callable[..., Optimizer] = three_groups,
) -> Iterator[tuple[Optimizer, dict[str, Any]]]:
    trained = make(make_parameters(9))
    train(trained, constant_schedule(0.2), 3)
    for _ in trained.state_dict():
        yield make(make_parameters(9)), trained.state_dict()


@every_optimizer
def test_every_entry_is_needed(make: Callable[..., Optimizer]) -> None:
    for i, (optimizer, state) in enumerate(changed_states(make)):
        name = list(state)[i]
        del state[name]
        assert_refused(optimizer, state, f"missing {name}")


@pytest.mark.parametrize("bad", ["x", None, True, -1.0, math.nan, math.inf, 1j, {}])
@every_optimizer
def test_every_number_is_checked(make: Callable[..., Optimizer], bad: Any) -> None:
    for i, (optimizer, state) in enumerate(changed_states(make)):
        name = list(state)[i]
        if not isinstance(state[name], np.ndarray):
            state[name] = bad
            assert_refused(optimizer, state, name)


@both
def test_loaded_betas_are_checked(make: Any) -> None:
    """They could not be given to the constructor either: the next step would divide by zero."""
    optimizer, state = next(changed_states(partial(three_groups_of_adam, make)))
    for name in ("group.0.beta1", "group.2.beta2"):
        for bad in (1.0, 1.5):
            assert_refused(optimizer, {**state, name: bad}, name.rpartition(".")[2])


@pytest.mark.parametrize("bad", ["x", None, [[1.0, 2.0]], [1, 2, 3], {}])
@every_optimizer
def test_every_array_is_checked(make: Callable[..., Optimizer], bad: Any) -> None:
    for i, (optimizer, state) in enumerate(changed_states(make)):
        name = list(state)[i]
        if isinstance(state[name], np.ndarray):
            state[name] = bad
            assert_refused(optimizer, state, name)


def test_all_problems_are_in_one_error() -> None:
    optimizer, state = next(changed_states())
    del state["lr"]
    state["extra"] = 1.0
    state["steps"] = 2.5
    state["momentum.0"] = np.zeros(1)
    state["momentum.1"] = np.zeros(5, np.int64)
    state["momentum.2"] = np.zeros((3, 2))
    assert_refused(
        optimizer, state, "SGD", "missing lr", "unexpected extra", "steps is 2.5",
        "misshapen momentum.0: expected (), got (1,)",
        "momentum.1 holds int64, expected floats",
        "misshapen momentum.2: expected (2, 3), got (3, 2)",
    )  # fmt: skip


def test_states_of_other_optimizers() -> None:
    p, q = one(), one()
    plain, heavy = SGD([p, q], 0.1), SGD([p, q], 0.1, momentum=0.9)
    grouped = SGD([{"params": p}, {"params": q}], 0.1)
    assert_refused(plain, heavy.state_dict(), "unexpected momentum.0", "unexpected momentum.1")
    assert_refused(heavy, plain.state_dict(), "missing momentum.0", "missing momentum.1")
    assert_refused(grouped, plain.state_dict(), "missing group.1.lr_scale")
    assert_refused(plain, {}, "missing lr", "missing steps")


@both
def test_states_of_sgd_and_adam_are_not_exchanged(make: Any) -> None:
    p, q = one(), one()
    adam, fewer = make([p, q]), make([p])
    for sgd in (SGD([p, q], 0.1), SGD([p, q], 0.1, momentum=0.9)):
        assert_refused(adam, sgd.state_dict(), "missing m.0", "missing v.1", "beta1", "momentum")
        assert_refused(sgd, adam.state_dict(), "unexpected m.0", "unexpected v.1", "beta2", "eps")
    assert_refused(adam, fewer.state_dict(), "missing m.1", "missing v.1")
    assert_refused(fewer, adam.state_dict(), "unexpected m.1", "unexpected v.1")
    grouped = make([{"params": p}, {"params": q}])
    assert_refused(adam, grouped.state_dict(), "unexpected group.1.beta1")


def test_a_state_of_another_width() -> None:
    wide, narrow = one(dtype=np.float64), one(dtype=np.float32)
    optimizer = SGD([wide], 0.1, momentum=0.9)
    optimizer.step()
    state = optimizer.state_dict()
    other = SGD([narrow], 0.1, momentum=0.9)
    other.load_state_dict(state)
    assert other.state_dict()["momentum.0"].dtype == np.float32
    state["momentum.0"] = np.array([1e300])
    assert_refused(other, state, "momentum.0 overflows float32")


def test_a_diverged_run_can_be_resumed() -> None:
    p = one(grad=math.nan)
    optimizer = SGD([p], 0.1, momentum=0.9)
    optimizer.step()
    other = SGD([one()], 0.1, momentum=0.9)
    other.load_state_dict(optimizer.state_dict())
    assert np.isnan(other.state_dict()["momentum.0"]).all()


# Schedules

SCHEDULES: dict[str, Callable[[int], Schedule]] = {
    "constant": lambda warmup: constant_schedule(0.3, warmup=warmup),
    "linear": lambda warmup: linear_schedule(0.3, 20, warmup=warmup),
    "cosine": lambda warmup: cosine_schedule(0.3, 20, warmup=warmup),
    "noam": lambda warmup: noam_schedule(512, warmup=warmup),
}
every_schedule = pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES)


def test_noam_values() -> None:
    schedule = noam_schedule(512, 4000)
    assert schedule(1) == 1.746928107421711e-07
    assert schedule(2) == 3.493856214843422e-07
    assert schedule(4000) == 0.0006987712429686843
    assert schedule(4001) == 0.000698683912937353
    assert noam_schedule(512, 4000, factor=2.0)(7) == pytest.approx(2 * schedule(7), rel=1e-15)
    assert noam_schedule(16, 0)(1) == 0.25
    assert noam_schedule(16, 0)(4) == 0.125


@every_schedule
def test_the_first_updates_of_a_warmup_strictly_grow(make: Callable[[int], Schedule]) -> None:
    schedule = make(5)
    rates = [schedule(n) for n in range(1, 6)]
    assert rates[0] > 0.0
    assert (np.diff(rates) > 0.0).all()
    assert rates == pytest.approx([rates[0] * n for n in range(1, 6)], rel=1e-15)


@every_schedule
@pytest.mark.parametrize("warmup", [0, 1, 20, np.int64(3)])
def test_schedules_are_finite_at_their_ends(make: Callable[[int], Schedule], warmup: int) -> None:
    schedule = make(warmup)
    for n in (1, 2, 19, 20, 21, 22, 10**6):
        rate = schedule(n)
        assert type(rate) is float
        assert 0.0 <= rate < math.inf
    integer: Any = np.int32(3)
    assert schedule(integer) == schedule(3)
    assert schedule(1) > 0.0


@every_schedule
def test_updates_count_from_1(make: Callable[[int], Schedule]) -> None:
    too_small: list[Any] = [0, -1, np.int64(0)]
    no_integers: list[Any] = [1.0, True, "1", None, np.float64(2.0)]
    for warmup in (0, 4):
        schedule = make(warmup)
        for n in too_small:
            with pytest.raises(ValueError, match="n is"):
                schedule(n)
        for n in no_integers:
            with pytest.raises(TypeError, match="n is"):
                schedule(n)


@every_schedule
def test_warmup_is_checked(make: Callable[[int], Schedule]) -> None:
    negative: list[Any] = [-1, np.int64(-3)]
    no_integers: list[Any] = [1.0, True, None]
    for warmup in negative:
        with pytest.raises(ValueError, match="warmup"):
            make(warmup)
    for warmup in no_integers:
        with pytest.raises(TypeError, match="warmup"):
            make(warmup)


@pytest.mark.parametrize("make", [linear_schedule, cosine_schedule])
def test_warmup_and_total(make: Callable[..., Schedule]) -> None:
    with pytest.raises(ValueError, match=r"warmup is 8.*7"):
        make(0.1, 7, warmup=8)
    at_the_end = make(0.3, 7, warmup=7, final=0.1)
    assert at_the_end(6) == pytest.approx(0.3 * 6 / 7, rel=1e-15)
    assert at_the_end(7) == 0.3
    assert at_the_end(8) == 0.1
    with pytest.raises(ValueError, match="total"):
        make(0.1, 0)
    with pytest.raises(TypeError, match="total"):
        make(0.1, 7.0)


@pytest.mark.parametrize("bad", [-0.1, math.nan, math.inf])
def test_rates_are_checked(bad: float) -> None:
    with pytest.raises(ValueError, match="lr"):
        constant_schedule(bad)
    with pytest.raises(ValueError, match="factor"):
        noam_schedule(8, 2, factor=bad)
    with pytest.raises(ValueError, match="d_model"):
        noam_schedule(0, 2)
    for make in (linear_schedule, cosine_schedule):
        with pytest.raises(ValueError, match="lr"):
            make(bad, 7)
        with pytest.raises(ValueError, match="final"):
            make(0.1, 7, final=bad)


def test_schedules_give_python_floats() -> None:
    lr = np.float64(0.1)
    for schedule in (
        constant_schedule(lr, 2),
        linear_schedule(lr, 4, 2, lr / 2),
        cosine_schedule(lr, 4, 2, lr / 2),
        noam_schedule(8, 2, lr),
    ):
        assert {type(schedule(n)) for n in range(1, 6)} == {float}


def test_constant_values() -> None:
    schedule = constant_schedule(0.3, warmup=3)
    assert [schedule(n) for n in (1, 2, 3, 4, 99)] == pytest.approx([0.1, 0.2, 0.3, 0.3, 0.3])
    assert constant_schedule(0.3)(1) == 0.3


def test_linear_values() -> None:
    schedule = linear_schedule(1.0, 6, warmup=2, final=0.2)
    rates = [schedule(n) for n in range(1, 9)]
    assert rates == pytest.approx([0.5, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2], rel=1e-14)
    assert [linear_schedule(1.0, 4)(n) for n in range(1, 6)] == [0.75, 0.5, 0.25, 0.0, 0.0]


def test_cosine_values() -> None:
    schedule = cosine_schedule(1.0, 6, warmup=2, final=0.2)
    half = math.sqrt(0.5)
    rates = [schedule(n) for n in range(1, 9)]
    expected = [0.5, 1.0, 0.6 + 0.4 * half, 0.6, 0.6 - 0.4 * half, 0.2, 0.2, 0.2]
    assert rates == pytest.approx(expected, rel=1e-14)
    assert cosine_schedule(1.0, 4)(4) == 0.0


@given(
    total=st.integers(1, 40), warmup=st.integers(0, 40), final=st.sampled_from([0.0, 0.1, 1.0, 2.0])
)
def test_decays_start_at_lr_and_end_at_final(total: int, warmup: int, final: float) -> None:
    warmup = min(warmup, total)
    for make in (linear_schedule, cosine_schedule):
        schedule = make(1.0, total, warmup=warmup, final=final)
        if warmup:
            assert schedule(warmup) == 1.0
        if warmup < total:
            assert schedule(total) == final
        assert schedule(total + 1) == schedule(10 * total) == final
        rates = [1.0, *(schedule(n) for n in range(warmup + 1, total + 2))]
        steps = np.diff(rates) * (1 if final >= 1.0 else -1)
        assert (steps >= -1e-15).all()


# Clipping


@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=st.lists(st.sampled_from([0, 1, 2, 3, 5, 7]), min_size=1, max_size=4),
    max_norm=st.sampled_from([1e-3, 0.5, 1.0, 3.0, 100.0]),
    dtype=st.sampled_from(DTYPES),
)
def test_clipping_keeps_the_direction(
    seed: int, sizes: list[int], max_norm: float, dtype: Any
) -> None:
    rng = np.random.default_rng(seed)
    parameters = [Parameter(np.zeros((size, 2), dtype)) for size in sizes]
    for p in parameters:
        p.grad = rng.normal(size=p.shape).astype(dtype)
    before = [p.grad.copy() for p in parameters]
    arrays = [p.grad for p in parameters]
    norm = clip_grad_norm(parameters, max_norm)
    flat = np.concatenate([g.ravel() for g in before]).astype(np.float64)
    assert type(norm) is float
    assert norm == pytest.approx(np.linalg.norm(flat), rel=1e-14)
    scale = max_norm / norm if norm > max_norm else 1.0
    for p, g, array in zip(parameters, before, arrays):
        assert p.grad is array
        assert p.grad.dtype == dtype
        if scale == 1.0:
            assert np.array_equal(p.grad, g)
        np.testing.assert_allclose(p.grad, g * dtype(scale), rtol=1e-6)
    after = np.concatenate([p.grad.ravel() for p in parameters]).astype(np.float64)
    assert np.linalg.norm(after) <= max_norm * (1 + 1e-6)


def test_the_norm_is_over_all_parameters_together() -> None:
    p, q = one(grad=3.0), one(grad=4.0)
    assert clip_grad_norm([p, q], 5.0) == 5.0
    assert (p.grad[0], q.grad[0]) == (3.0, 4.0)
    assert clip_grad_norm(iter([p, q]), 2.5) == 5.0
    assert (p.grad[0], q.grad[0]) == (1.5, 2.0)
    assert clip_grad_norm(p, 0.75) == 1.5
    assert p.grad[0] == 0.75
    assert clip_grad_norm([p, q], math.inf) == math.sqrt(0.75**2 + 4.0)
    assert clip_grad_norm([], 1.0) == 0.0


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(np.float32, 1e30), (np.float32, 3e38), (np.float64, 1e200), (np.float64, 1e-200),
     (np.float32, 1e-30), (np.float64, 1e-310), (np.float64, -1e200)],
)  # fmt: skip
def test_large_and_small_gradients(dtype: Any, size: float) -> None:
    p = Parameter(np.zeros(4, dtype))
    p.grad = np.full(4, size, dtype)
    norm = clip_grad_norm(p, 1.0)
    assert norm == pytest.approx(2.0 * abs(float(dtype(size))), rel=1e-14, abs=0.0)
    if abs(size) > 1.0:
        np.testing.assert_allclose(p.grad, math.copysign(0.5, size), rtol=1e-5)
    else:
        assert (p.grad == dtype(size)).all()


def test_the_norm_of_float32_is_summed_in_float64() -> None:
    p = Parameter(np.zeros(1 + 2**12, np.float32))
    p.grad.fill(2.0**-13)
    p.grad[0] = 1.0  # 1 + 2**12 * 2**-26: float32 has no number between 1 and 1 + 2**-23
    assert clip_grad_norm(p, 10.0) == pytest.approx(math.sqrt(1.0 + 2.0**-14), rel=1e-15)
    q = Parameter(np.zeros(2, np.float32))
    q.grad = np.array([1.0, 2.0**-13], np.float32)
    assert clip_grad_norm(q, 10.0) == pytest.approx(math.sqrt(1.0 + 2.0**-26), rel=1e-16)
    assert clip_grad_norm(q, 10.0) > 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_norm_that_is_not_finite_changes_nothing(bad: float, place: int, dtype: Any) -> None:
    parameters = [one(grad=3.0, dtype=dtype), one(grad=4.0, dtype=dtype)]
    parameters[place].grad[0] = bad
    before = [p.grad.copy() for p in parameters]
    with pytest.warns(RuntimeWarning, match="unclipped") as record:
        norm = clip_grad_norm(parameters, 1.0)
    assert record[0].filename == __file__
    assert math.isnan(norm) if math.isnan(bad) else norm == math.inf
    for p, grad in zip(parameters, before):
        assert np.array_equal(p.grad, grad, equal_nan=True)


def test_nan_wins_over_infinity_in_any_order() -> None:
    for grads in ([math.nan, math.inf], [math.inf, math.nan]):
        with pytest.warns(RuntimeWarning, match="nan"):
            assert math.isnan(clip_grad_norm([one(grad=g) for g in grads], 1.0))


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, -math.inf])
def test_max_norm_must_be_positive(bad: float) -> None:
    p = one()
    with pytest.raises(ValueError, match="max_norm"):
        clip_grad_norm(p, bad)
    with pytest.raises(TypeError, match="max_norm"):
        clip_grad_norm(p, None)  # type: ignore[arg-type]
    assert p.grad[0] == 1.0


def test_nothing_warns_on_the_usual_path() -> None:
    parameters = make_parameters(10, np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for optimizer in (SGD(parameters, 0.1, momentum=0.9), Adam(parameters), AdamW(parameters)):
            train(optimizer, noam_schedule(8, 2), 3)
