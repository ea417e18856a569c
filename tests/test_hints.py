"""gradcheck's hints name planted mistakes, keep silent on right layers, and do no harm."""

import contextlib
import functools
import re

import numpy as np
import pytest
from helpers import randomise
from planted import (
    MISTAKES,
    OwnAttention,
    OwnLayerNorm,
    OwnMultiHeadAttention,
    OwnSummary,
    OwnTied,
    ResidualMLP,
    SharingDecoder,
    TiedPair,
    draw_sizes,
    own_loss,
    own_masked_attention,
    sharing_decoder,
)

from npdecoder import EncoderLayer, Layer, Linear, Parameter, gradcheck
from npdecoder.core import find_parameters
from npdecoder.gradcheck_all import CASES, Draw
from npdecoder.hints import Facts, Tensor, find_hints
from npdecoder.hints.facts import Flow, explained

SEEDS = range(3)
WIDE = {"dtype": np.float64}
X = np.random.default_rng(2017).standard_normal((2, 3, 5))

# Of DESIGN section 7: what a gradient check can see
MISTAKES_OF_THE_FIELD = (
    "LayerNorm: gamma outside the sums",
    "Softmax: divided by the batch",
    "LayerNorm: dbeta = dgamma",
    "encoder layer, pre: no gradient along the skip of the attention",
    "encoder layer, post: no gradient along the skip of the feed-forward",
    "encoder layer, pre: the skip's gradient sent through the norm of the feed-forward",
    "decoder layer: (dmemory, dx) for (dx, dmemory)",
    "multi-head attention: dkey and dvalue in the other's place",
    "encoder layer: one dropout that remembers its mask in two places",
    "tied pair: the output's gradient dropped",
    "CrossEntropy: a factor T too large",
    "CrossEntropy: the gradient of the sum, for the mean over all targets",
    "CrossEntropy: the mean over ignored targets too",
    "attention: scaled by d_model for d_k in backward",
)


def draw(mistake, seed):
    rng = np.random.default_rng([seed, *mistake.name.encode()])
    return mistake.build(rng, draw_sizes(rng))


@functools.cache
def checked(mistake, seed):
    """The report, or the error; and whether the layer is afterwards what it was before."""
    layer, inputs, keywords = draw(mistake, seed)
    before = state(layer)
    try:
        report = gradcheck(layer, *inputs, seed=seed, **keywords)
    except Exception as error:  # a miss among the others
        report = error
    return report, same(before, state(layer))


def state(layer):
    """Values and gradients, the latter not zero."""
    arrays = []
    for _, parameter in find_parameters(layer):
        if not parameter.has_grad:
            parameter.grad = np.random.default_rng(1).standard_normal(parameter.shape)
        arrays += [parameter.value.copy(), parameter.grad.copy()]
    return arrays


def same(before, after):
    return all(np.array_equal(a, b, equal_nan=True) for a, b in zip(before, after, strict=True))


def named_first(mistake, report):
    if isinstance(report, Exception) or not report.hints:
        return False
    first = report.hints[0]
    letters = [rf"(?<![\w(]){re.escape(letter)}(?!\w)" for letter in mistake.letters]
    of_a_letter = not letters or any(re.search(letter, first) for letter in letters)
    return first.startswith(mistake.expected) and of_a_letter


def told(report):
    return repr(report) if isinstance(report, Exception) else list(report.hints)


def test_the_mistakes_have_names_of_their_own():
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES)


def test_nine_in_ten_are_named_first():
    misses = [
        f"{mistake.name}, draw {seed}: expected {mistake.expected} {mistake.letters}, "
        f"got {told(checked(mistake, seed)[0])}"
        for mistake in MISTAKES
        for seed in SEEDS
        if not named_first(mistake, checked(mistake, seed)[0])
    ]
    total = len(MISTAKES) * len(SEEDS)
    share = f"named first: {1 - len(misses) / total:.1%} of {len(MISTAKES)} mistakes"
    print(share)
    assert len(misses) <= 0.1 * total, f"{share}; {len(misses)} of {total} draws are not:\n" + (
        "\n".join(misses)
    )


@pytest.mark.parametrize("name", MISTAKES_OF_THE_FIELD)
def test_a_mistake_of_the_field_is_named_first(name):
    (mistake,) = (mistake for mistake in MISTAKES if mistake.name == name)
    for seed in SEEDS:
        report, _ = checked(mistake, seed)
        assert named_first(mistake, report), f"draw {seed}: {mistake.expected}, got {told(report)}"


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_planted_mistake_fails_and_the_layer_stays_as_it_was(mistake):
    for seed in SEEDS:
        report, unchanged = checked(mistake, seed)
        assert not isinstance(report, Exception), report
        assert not report.ok
        assert unchanged


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_hint_names_the_tensors(mistake):
    """Those of the layer, or those of a part of it that it names."""
    for seed in SEEDS:
        report, _ = checked(mistake, seed)
        if isinstance(report, Exception) or not report.hints:
            continue  # told by the tests above
        names = [row.name for row in report.rows]
        parts = [name for name in vars(draw(mistake, seed)[0]) if not name.startswith("_")]
        _, _, evidence = report.hints[0].partition(": ")  # "in a part" is a beginning
        of_a_name = [rf"(?<!\w){re.escape(name)}(?!\w)" for name in names + parts]  # memory[0] too
        assert any(re.search(name, evidence) for name in of_a_name), report.hints[0]
        assert not re.search(r"\b(input\d|part)\b", evidence), report.hints[0]


# Right layers


@pytest.mark.parametrize("name", [n for n in CASES if n not in ("Transformer", "LanguageModel")])
def test_no_hint_on_a_right_layer(name):
    r = Draw(np.random.default_rng([7, *name.encode()]))
    layer, inputs, keywords = CASES[name](r)
    r.weights(layer)
    report = gradcheck(layer, *inputs, **keywords)
    assert report.ok, f"\n{report}"
    assert not report.hints


@pytest.mark.parametrize("seed", SEEDS)
def test_no_hint_on_a_right_layer_written_from_scratch(seed):
    rng = np.random.default_rng(seed)
    s = draw_sizes(rng)
    ids = rng.integers(0, s.V, (s.B, s.T))
    x = rng.standard_normal((s.B, s.T, s.d))
    for layer, inputs, keywords in [
        (ResidualMLP(rng, s.d, s.d_ff), (x,), {}),
        (randomise(TiedPair(s.V, s.d), rng), (ids,), {}),
        (OwnAttention(rng, s.d, s.d_k), (x,), {}),
        own_masked_attention(rng, s),
        (OwnMultiHeadAttention(rng, s.d, s.h, 7), (x,), {}),
        (OwnTied(rng, s.V, s.d), (ids,), {}),
        (OwnLayerNorm(rng, s.d), (x,), {}),
        own_loss(rng, s, ignore=True),
        (OwnSummary(), (x, rng.standard_normal((s.B, s.S, s.d))), {}),
        sharing_decoder(SharingDecoder, rng, s),
    ]:
        report = gradcheck(layer, *inputs, **keywords)
        assert report.ok, f"\n{report}"
        assert not report.hints


# Odd layers: gradcheck fails, and its hints neither raise nor change anything


class Own:
    def __init__(self):
        self.W = Parameter(np.random.default_rng(3).standard_normal((5, 4)))

    def forward(self, x):
        return x @ self.W.value, x

    def backward(self, x, dy):
        self.W.grad += 2 * np.einsum("bti,btj->ij", x, dy)
        return -dy @ self.W.value.T


def make_slots():
    """A class without __dict__, and without a base that has one."""
    methods = {"__slots__": ("W",)}
    methods |= {n: vars(Own)[n] for n in ("__init__", "forward", "backward")}
    return type("Slots", (), methods)()


class WrongShape:
    def forward(self, x):
        return x.sum(-1), None

    def backward(self, ctx, dy):
        return dy


class WrongRank(Own):
    def backward(self, x, dy):
        return super().backward(x, dy)[None, None]


class NotFinite:
    def __init__(self, value):
        self.value = value

    def forward(self, x):
        return x**2, x

    def backward(self, x, dy):
        dx = 2 * x * dy
        dx[0] = self.value
        return dx


class NotFiniteParameter(Own):
    def backward(self, x, dy):
        self.W.grad += np.nan
        return dy @ self.W.value.T


class Pair:
    def forward(self, x):
        return (2 * x, x.sum()), None

    def backward(self, ctx, dy):
        return 2 * dy[0]


class KeywordOnly:
    def forward(self, x, *, scale):
        return x * scale, None

    def backward(self, ctx, dy):
        return dy


class Drops:
    def forward(self, x, rng=None):
        keep = rng.random(x.shape) < 0.5
        return x * keep, keep

    def backward(self, keep, dy):
        return 2 * dy * keep


class WithoutParameters:
    def forward(self, x):
        return np.tanh(x), None

    def backward(self, ctx, dy):
        return dy


class OneNumber:
    def forward(self, x):
        return float((x**2).sum()), x

    def backward(self, x, dy):
        return x * dy


class ContainsItself(Layer):
    def __init__(self):
        self.linear = Linear(5, 4, rng=0, **WIDE)
        self.me, self.all = self, {"me": self}

    def forward(self, x):
        return self.linear.forward(x)

    def backward(self, ctx, dy):
        return 2 * self.linear.backward(ctx, dy)


class Frozen:
    def __init__(self):
        object.__setattr__(self, "linear", Linear(5, 4, rng=0, **WIDE))

    def __setattr__(self, name, value):
        raise AttributeError(name)

    def forward(self, x):
        return self.linear.forward(x)

    def backward(self, ctx, dy):
        return 3 * self.linear.backward(ctx, dy)


class RaisesLater(Own):
    """After the two backward passes of the check itself."""

    calls = 0

    def backward(self, x, dy):
        self.calls += 1
        if self.calls > 2:
            raise ValueError("a third time")
        return super().backward(x, dy) + x  # which no tensor explains by itself


ODD = [
    (make_slots, {}),
    (WrongShape, {}),
    (WrongRank, {}),
    (lambda: NotFinite(np.nan), {}),
    (lambda: NotFinite(np.inf), {}),
    (NotFiniteParameter, {}),
    (Pair, {}),
    (KeywordOnly, {"scale": 3.0}),
    (Drops, {"rng": 0}),
    (WithoutParameters, {}),
    (OneNumber, {}),
    (ContainsItself, {}),
    (Frozen, {}),
    (RaisesLater, {}),
]


@pytest.mark.parametrize(("make", "keywords"), ODD, ids=[f"{i}" for i in range(len(ODD))])
def test_odd_layers_do_no_harm(make, keywords):
    layer = make()
    before = state(layer)
    report = gradcheck(layer, X, **keywords)
    assert not report.ok
    assert all(isinstance(hint, str) and hint for hint in report.hints)
    assert same(before, state(layer))


# Layers that not every rule can be asked about


class Real(Layer):
    """Where ids are none of padding: nothing that differences could move."""

    def forward(self, ids):
        return (np.asarray(ids) != 0)[..., None] * 1.0, None

    def backward(self, ctx, dy):
        return None


class WrongLinear(Linear):
    def backward(self, ctx, dy):
        return super().backward(ctx, dy) + 0.1 * dy.sum()


class Masked(Layer):
    def __init__(self):
        self.linear, self.real = WrongLinear(5, 4, rng=0, **WIDE), Real()

    def forward(self, ids, x):
        y, ctx = self.linear.forward(x)
        keep, _ = self.real.forward(ids)
        return y * keep, (keep, ctx)

    def backward(self, ctx, dy):
        return self.linear.backward(ctx[1], dy * ctx[0])


def test_a_part_that_cannot_be_checked_by_itself_is_passed_over():
    report = gradcheck(Masked(), np.array([[1, 2, 0], [3, 0, 0]]), X)
    assert report.hints == ["in a part: linear is wrong by itself"]


class Mean(Layer):
    """Its output is a number, no array."""

    def forward(self, x):
        return float(x.mean()), x.shape

    def backward(self, shape, dy):
        return np.full(shape, dy / np.prod(shape))


class TimesItsMean(Layer):
    def __init__(self):
        self.mean, self.linear = Mean(), Linear(5, 4, rng=0, **WIDE)

    def forward(self, x):
        m, mean = self.mean.forward(x)
        y, linear = self.linear.forward(x)
        return y * m, (m, mean, y, linear)

    def backward(self, ctx, dy):
        m, mean, y, linear = ctx
        dx = self.mean.backward(mean, float((dy * y).sum()))
        return dx + self.linear.backward(linear, dy * m - 0.5)  # a mistake


def test_a_part_that_returns_a_number_is_passed_over():
    report = gradcheck(TimesItsMean(), X)
    assert report.hints == ["wiring: the first wrong gradient is in the gradient that reaches "
                            "linear"]


class Standardised:
    """LayerNorm without gamma and beta; wrong(rstd, x_hat, dy, mean) is what backward returns."""

    def __init__(self, wrong):
        self.wrong = wrong

    def forward(self, x):
        centred = x - self.mean(x)
        rstd = 1.0 / np.sqrt(self.mean(centred**2) + 1e-5)
        return centred * rstd, (rstd, centred * rstd)

    def backward(self, ctx, dy):
        return self.wrong(*ctx, dy, self.mean)

    @staticmethod
    def mean(x):
        return x.mean(axis=-1, keepdims=True)


def beside_the_terms(rstd, x_hat, dy, mean):
    """The term of mean(dy x_hat) is missing, but something that is no such term is there."""
    terms = [rstd * dy, rstd * mean(dy), rstd * x_hat * mean(dy * x_hat)]
    basis = np.stack([np.broadcast_to(term, dy.shape).ravel() for term in terms], axis=1)
    other = np.cos(x_hat).ravel()
    other -= basis @ np.linalg.lstsq(basis, other, rcond=None)[0]
    return terms[0] - terms[1] + other.reshape(dy.shape)


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        (lambda rstd, x_hat, dy, mean: rstd * (dy - mean(dy)),
         "term missing: dx lacks the term of mean(dy gamma x_hat) (x)"),
        (lambda rstd, x_hat, dy, mean: rstd * (dy - 5 * mean(dy) - x_hat * mean(dy * x_hat)),
         "sum where mean was taken: dx has 5 = d times the term of mean(dy gamma) (x)"),
        (beside_the_terms, None),
    ],
)  # fmt: skip
def test_terms_of_a_layer_norm_without_gamma(wrong, hint):
    report = gradcheck(Standardised(wrong), X)
    assert not report.ok
    assert report.hints == ([hint] if hint else [])


class WrongBetween(TiedPair):
    def backward(self, ctx, dy):
        dx = self.output.backward(ctx[1], dy) * (1 - ctx[1].x)  # for 1 - x ** 2
        return self.embedding.backward(ctx[0], dx)


class WrongOutput(TiedPair):
    def backward(self, ctx, dy):
        self.embedding.W.grad += np.cos(self.embedding.W.value)
        return super().backward(ctx, dy)


@pytest.mark.parametrize(
    ("cls", "ids"),
    [(WrongBetween, [[4, 1, 3], [0, 2, 4]]), (WrongOutput, [[4, 1, 3], [0, 2, 4]]),
     (WrongOutput, [[4, 1], [1, 4]])],
    ids=["all rows read", "all rows read, and a wrong output", "some rows read"],
)  # fmt: skip
def test_a_tied_table_that_lacks_no_use_is_not_said_to(cls, ids):
    report = gradcheck(randomise(cls(5, 3), np.random.default_rng(0)), np.array(ids))
    assert [row.name for row in report.rows if not row.ok] == ["embedding.W"]
    assert not any("tied" in hint for hint in report.hints), report.hints


def test_nothing_is_explained_where_nothing_is_missing_or_no_number():
    """A gradient of zeros would explain it, but what is there to explain?"""
    flows = [Flow("dy", np.zeros(3), True), Flow("dx", np.array([1.0, np.inf, 1.0]), False)]
    assert explained(np.zeros(3), flows) is None
    assert explained(np.array([1.0, np.inf, 1.0]), flows) is None
    assert explained(np.ones(3), [*flows, Flow("dz", np.ones(3), False)]).startswith("left out")


def test_there_is_no_hint_where_nothing_failed():
    report = gradcheck(Linear(5, 4, rng=0, **WIDE), X)
    right = [Tensor(row.name, X, X, True, True, True, 0) for row in report.rows]
    facts = Facts(Linear(5, 4, **WIDE), (X,), {}, right, [X], [X], lambda dy: {}, {})
    assert find_hints(facts, gradcheck) == []


class WrongTheSecondTime(Layer):
    def forward(self, x):
        return x**3, (x, [])

    def backward(self, ctx, dy):
        x, calls = ctx
        calls.append(dy)
        return len(calls) * 3 * x**2 * dy


def test_a_second_backward_that_is_wrong_is_no_factor_of_the_first():
    report = gradcheck(WrongTheSecondTime(), X)
    assert not report.ok
    assert report.hints == []


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("part", ["self_attention", "feed_forward", "norm2"])
@pytest.mark.parametrize("after", [0, 1, 2, 5, 100, 1000, 2000, 3000, 4000, 5000])
def test_the_layer_is_restored_when_a_part_raises_in_the_middle(part, after):
    layer = randomise(EncoderLayer(3, 1, 2, d_k=2, d_v=2, **WIDE), np.random.default_rng(0))
    layer.backward = lambda ctx, dy: 2 * EncoderLayer.backward(layer, ctx, dy)
    target, calls = getattr(layer, part), 0
    forward = target.forward

    def interrupted(*inputs, **keywords):
        nonlocal calls
        calls += 1
        if calls > after:
            raise Interrupted
        return forward(*inputs, **keywords)

    target.forward = interrupted
    before = state(layer)
    with contextlib.suppress(Interrupted):
        gradcheck(layer, X[..., :3])
    assert same(before, state(layer))
    assert target.forward is interrupted


def test_a_larger_block_is_searched_within_bounds():
    """Calls of forward, the block's and those of all its parts, for a mistake deep inside."""
    calls = {"right": 0, "wrong": 0}
    for kind in calls:
        layer = randomise(EncoderLayer(7, 1, 11, **WIDE), np.random.default_rng(0))
        linear = layer.feed_forward.linear1
        if kind == "wrong":
            linear.backward = lambda ctx, dy, linear=linear: (
                Linear.backward(linear, ctx, dy) + 0.1 * ctx.x.mean()
            )
        for part in (layer, layer.self_attention, layer.feed_forward, layer.norm1, linear):

            def counted(*inputs, _forward=part.forward, kind=kind, **keywords):
                calls[kind] += 1
                return _forward(*inputs, **keywords)

            part.forward = counted
        report = gradcheck(layer, np.random.default_rng(1).standard_normal((2, 5, 7)))
        assert report.ok == (kind == "right")
    assert calls["wrong"] <= 20 * calls["right"], calls
