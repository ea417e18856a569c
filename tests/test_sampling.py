"""next_token_probabilities, and the texts that sample and generate draw from them."""

import math
from collections import Counter
from functools import partial
from types import GeneratorType

import numpy as np
import pytest
from helpers import (
    BOS,
    EOS,
    KINDS,
    PAD,
    batch_of,
    decoding_items,
    decoding_model,
    ends,
    logits_after,
    room,
    seeds,
    table_model,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from npdecoder import LanguageModel, generate, greedy_decode, next_token_probabilities, sample
from npdecoder.decoding import Sampler

DTYPES = (np.float64, np.float32)
dtypes = pytest.mark.parametrize("dtype", DTYPES)


def sampler(temperature=1.0, top_k=None, top_p=None, min_p=None):
    return Sampler(temperature, top_k, top_p, min_p)


def kept(p):
    return np.flatnonzero(p).tolist()


class Numbers:
    """Instead of a Generator: these uniform numbers, one after the other."""

    def __init__(self, *numbers):
        self.numbers = iter(numbers)

    def random(self):
        return next(self.numbers)


# The distribution

P = np.array([0.5, 0.3, 0.15, 0.05])


@dtypes
@pytest.mark.parametrize(
    ("top_p", "count"),
    [(0, 1), (0.5, 1), (0.51, 2), (0.8, 2), (0.81, 3), (0.95, 3), (0.96, 4), (1, 4), (1.0, 4)],
)
def test_top_p_keeps_the_smallest_set_that_has_the_mass(top_p, count, dtype):
    logits = np.log(P).astype(dtype)
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0]):
        p = next_token_probabilities(logits[order], top_p=top_p)
        expected = np.where(np.array(order) < count, P[order], 0.0)
        np.testing.assert_allclose(p, expected / expected.sum(), rtol=1e-6)
        assert (p[expected == 0] == 0).all()
        assert p.dtype == np.float64


@dtypes
def test_a_tiny_top_p_keeps_the_greatest_alone(dtype):
    """Where all of a large vocabulary is nearly equal: in float32, sums do not reach 1 - 1e-8."""
    logits = np.random.default_rng(0).standard_normal(4096).astype(dtype)
    for scale in 1.0, 1e-3, 10.0:
        for top_p in 0.0, 1e-8, 1e-300:
            p = next_token_probabilities(dtype(scale) * logits, top_p=top_p)
            assert kept(p) == [logits.argmax()]
            assert p.max() == 1.0


@dtypes
def test_a_top_p_below_one_ends_somewhere(dtype):
    """The mass is summed from the greatest: a set of nearly all has nearly all tokens."""
    logits = np.zeros(4096, dtype)
    for count in 1, 1000, 4095:
        p = next_token_probabilities(logits, top_p=count / 4096)
        assert kept(p) == list(range(count))
    assert len(kept(next_token_probabilities(logits, top_p=1 - 1e-4))) == 4096


@dtypes
@pytest.mark.parametrize(
    ("top_k", "expected"),
    [(1, [4]), (2, [1, 4]), (3, [1, 2, 4]), (4, [1, 2, 3, 4]), (5, [0, 1, 2, 3, 4]),
     (6, [0, 1, 2, 3, 4]), (10**9, [0, 1, 2, 3, 4]), (np.int64(3), [1, 2, 4])],
)  # fmt: skip
def test_top_k_keeps_k_and_among_equals_the_lowest_ids(top_k, expected, dtype):
    """Of 1 2 2 2 3 three are kept, where a threshold would keep four."""
    p = next_token_probabilities(np.array([1, 2, 2, 2, 3], dtype), top_k=top_k)
    assert kept(p) == expected
    weights = np.exp([1.0, 2, 2, 2, 3])[expected]
    np.testing.assert_allclose(p[expected], weights / weights.sum(), rtol=1e-12)


@dtypes
def test_among_equals_the_lowest_ids_are_kept(dtype):
    equal = np.zeros(7, dtype)
    assert kept(next_token_probabilities(equal, top_k=3)) == [0, 1, 2]
    assert kept(next_token_probabilities(equal, top_p=3 / 7)) == [0, 1, 2]
    assert kept(next_token_probabilities(equal, temperature=0)) == [0]
    two = np.array([-1, 5, 5, 0], dtype)
    assert next_token_probabilities(two, temperature=0).tolist() == [0, 1, 0, 0]
    assert kept(next_token_probabilities(two, top_p=0)) == [1]
    # min_p is a threshold: equals stay together
    assert kept(next_token_probabilities(two, min_p=1.0)) == [1, 2]
    zeros = np.array([-0.0, 0.0, -0.0], dtype)
    assert kept(next_token_probabilities(zeros, top_k=1)) == [0]


@dtypes
@pytest.mark.parametrize(
    ("min_p", "count"),
    [(0, 4), (0.1, 4), (0.11, 3), (0.3, 3), (0.31, 2), (0.6, 2), (0.61, 1), (1, 1)],
)
def test_min_p_compares_with_the_greatest(min_p, count, dtype):
    p = next_token_probabilities(np.log(P).astype(dtype), min_p=min_p)
    np.testing.assert_allclose(p[:count], P[:count] / P[:count].sum(), rtol=1e-6)
    assert kept(p) == list(range(count))


@dtypes
def test_each_filter_works_on_what_the_one_before_left(dtype):
    logits = np.log([0.4, 0.3, 0.2, 0.1]).astype(dtype)

    def check(expected, **options):
        p = next_token_probabilities(logits, **options)
        np.testing.assert_allclose(p, expected, rtol=1e-6)

    # temperature first: of the squares 16 9 4 1 the first is more than half
    check([1, 0, 0, 0], temperature=0.5, top_p=0.5)
    check([4 / 7, 3 / 7, 0, 0], temperature=1.0, top_p=0.5)
    check([16 / 25, 9 / 25, 0, 0], temperature=0.5, min_p=0.5)
    check([4 / 9, 3 / 9, 2 / 9, 0], temperature=1.0, min_p=0.5)
    # top_k before top_p: of 4/9 3/9 2/9 two have 0.75, of 0.4 0.3 0.2 three
    check([4 / 7, 3 / 7, 0, 0], top_k=3, top_p=0.75)
    check([4 / 9, 3 / 9, 2 / 9, 0], top_p=0.75)
    # top_p before min_p: of 4/7 3/7 the first alone would have 0.55
    check([4 / 7, 3 / 7, 0, 0], top_p=0.55, min_p=0.6)
    check([4 / 7, 3 / 7, 0, 0], top_k=3, top_p=1.0, min_p=0.6)


def plain_probabilities(logits, temperature, top_k, top_p, min_p):
    """The same in plain Python, filter by filter, with sets that sort and sum for themselves."""
    tokens = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if temperature == 0:
        tokens, temperature = tokens[:1], 1.0
    p = {i: math.exp((logits[i] - logits[tokens[0]]) / temperature) for i in tokens}
    if top_k is not None:
        p = {i: p[i] for i in tokens[:top_k]}
    if top_p is not None:
        total, mass, few = sum(p.values()), 0.0, {}
        for i, weight in p.items():
            if few and mass >= top_p - 1e-9:
                break
            few[i], mass = weight, mass + weight / total
        p = few
    if min_p is not None:
        p = {i: weight for i, weight in p.items() if weight >= min_p * max(p.values()) - 1e-12}
    total = sum(p.values())
    return np.array([p.get(i, 0.0) / total for i in range(len(logits))])


@settings(max_examples=300)
@given(
    size=st.sampled_from([1, 2, 3, 7, 13]),
    whole=st.booleans(),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([None, 1, 2, 3, 5, 20]),
    top_p=st.sampled_from([None, 0.0, 0.2, 0.55, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([None, 0.0, 0.1, 0.7, 1.0]),
    seed=seeds,
)
def test_equals_the_filters_one_by_one(size, whole, temperature, top_k, top_p, min_p, seed):
    logits = 2.0 * np.random.default_rng(seed).standard_normal(size)
    logits = np.round(logits) if whole else logits  # many equals
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    p = next_token_probabilities(logits, **options)
    np.testing.assert_allclose(p, plain_probabilities(logits.tolist(), **options), rtol=1e-9)


@dtypes
def test_without_options_it_is_softmax(dtype):
    logits = np.random.default_rng(1).standard_normal(13).astype(dtype)
    before = logits.copy()
    logits.flags.writeable = False
    p = next_token_probabilities(logits)
    exact = np.exp(logits.astype(np.float64))
    np.testing.assert_allclose(p, exact / exact.sum(), rtol=1e-12)
    np.testing.assert_array_equal(logits, before)
    for options in {"top_k": 13}, {"top_p": 1.0}, {"min_p": 0.0}, {"top_k": 99, "top_p": 1}:
        np.testing.assert_array_equal(next_token_probabilities(logits, **options), p)


@dtypes
def test_a_large_vocabulary_sums_to_one(dtype):
    """50257 logits, whose softmax in float32 does not sum to 1 as closely as a draw asks for."""
    rng = np.random.default_rng(2)
    for temperature in 0.2, 1.0, 5.0:
        for _ in range(5):
            logits = (3.0 * rng.standard_normal(50257)).astype(dtype)
            p = next_token_probabilities(logits, temperature=temperature)
            assert abs(p.sum() - 1.0) < 1e-12
            assert p.min() >= 0.0
            rng.choice(50257, p=p)  # an error if they do not sum to 1


@dtypes
@pytest.mark.parametrize("temperature", [0, 0.0, 1e-320, 5e-324, 1e-300])
def test_no_temperature_leaves_the_greatest(temperature, dtype):
    logits = np.array([1, -np.inf, 3, 2.9999], dtype)
    assert next_token_probabilities(logits, temperature=temperature).tolist() == [0, 0, 1, 0]
    big = np.array([-3e38, 3e38, 0], dtype)
    assert next_token_probabilities(big, temperature=temperature).tolist() == [0, 1, 0]


@dtypes
def test_a_high_temperature_makes_all_equal(dtype):
    p = next_token_probabilities(np.array([1, 2, 3], dtype), temperature=1e300)
    np.testing.assert_allclose(p, np.full(3, 1 / 3), rtol=1e-12)


@dtypes
def test_impossible_tokens_stay_impossible(dtype):
    logits = np.array([0, -np.inf, -np.inf], dtype)
    for options in {}, {"temperature": 0}, {"top_k": 2}, {"top_p": 1.0}, {"min_p": 0.0}:
        assert next_token_probabilities(logits, **options).tolist() == [1, 0, 0]
    assert next_token_probabilities(np.array([-np.inf, 2, 2], dtype)).tolist() == [0, 0.5, 0.5]


@dtypes
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "logits", [[1, np.nan, 5], [np.nan] * 3, [1, np.inf, 5], [-np.inf] * 3, [np.inf, np.nan, 0]]
)
def test_logits_that_are_no_distribution(logits, temperature, dtype):
    with pytest.raises(ValueError, match=r"largest logit is (nan|inf|-inf)"):
        next_token_probabilities(np.array(logits, dtype), temperature=temperature)


@pytest.mark.parametrize(
    "logits", [np.zeros(0), np.zeros((2, 3)), 1.0, np.zeros((1, 5)), np.array(["a", "b"])]
)
def test_logits_are_one_row_of_numbers(logits):
    with pytest.raises((ValueError, TypeError), match="logits"):
        next_token_probabilities(logits)


def test_whole_numbers_as_logits_are_taken_or_refused_by_name():
    try:
        result = kept(next_token_probabilities([1, 2, 2, 2, 3], top_k=3))
    except TypeError as error:
        result = str(error)
    assert result == [1, 2, 4] or "logits has dtype int64" in result


BAD_OPTIONS = [
    ("temperature", -1, ValueError), ("temperature", -1e-320, ValueError),
    ("temperature", np.nan, ValueError), ("temperature", np.inf, ValueError),
    ("temperature", "1", TypeError), ("temperature", None, TypeError),
    ("temperature", True, TypeError),
    ("top_k", 0, ValueError), ("top_k", -1, ValueError), ("top_k", 2.0, TypeError),
    ("top_k", True, TypeError), ("top_k", "2", TypeError),
    ("top_p", -0.1, ValueError), ("top_p", 1.1, ValueError), ("top_p", np.nan, ValueError),
    ("top_p", "1", TypeError), ("top_p", True, TypeError),
    ("min_p", -0.1, ValueError), ("min_p", 1.1, ValueError), ("min_p", np.nan, ValueError),
    ("min_p", "1", TypeError), ("min_p", False, TypeError),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "error"), BAD_OPTIONS)
def test_bad_options(name, value, error):
    model = decoding_model("language model", 0)
    with pytest.raises(error, match=name):
        next_token_probabilities(np.zeros(3), **{name: value})
    with pytest.raises(error, match=name):
        sample(model, [[3]], **{name: value})
    with pytest.raises(error, match=name):
        generate(model, [3], **{name: value})  # the call, before the first token is asked for


# Draws

FILTERS = [
    {},
    {"temperature": 0.5},
    {"top_k": 3},
    {"top_p": 0.6},
    {"min_p": 0.3},
    {"temperature": 2.0, "top_k": 5, "top_p": 0.8, "min_p": 0.05},
]


@dtypes
@pytest.mark.parametrize("options", FILTERS)
def test_even_numbers_draw_each_token_in_proportion(options, dtype):
    """1000 numbers spread evenly over [0, 1): each token falls to its share of them."""
    logits = np.random.default_rng(3).standard_normal(11).astype(dtype)
    logits[4] = -np.inf
    p = next_token_probabilities(logits, **options)
    rng = Numbers(*(np.arange(1000) + 0.5) / 1000)
    draws = Counter(sampler(**options).draw(logits, rng) for _ in range(1000))
    for token in range(11):
        assert abs(draws[token] - 1000 * p[token]) <= 1.0
        assert draws[token] == 0 or p[token] > 0


def test_a_hundred_thousand_draws(monkeypatch):
    """Each token as often as its probability says, within 4 standard deviations."""
    logits = np.random.default_rng(4).standard_normal(7).astype(np.float32)
    n, rng = 100_000, np.random.default_rng(5)
    drawer = sampler(temperature=0.8, top_k=5)
    p = drawer.probabilities(logits)
    assert (p == 0).sum() == 2
    assert drawer.draw(logits, Numbers(0.0)) == kept(p)[0]
    monkeypatch.setattr(drawer, "probabilities", lambda logits: p)  # the same each time
    draws = np.bincount([drawer.draw(logits, rng) for _ in range(n)], minlength=7)
    assert (draws[p == 0] == 0).all()
    assert (np.abs(draws - n * p) <= 4 * np.sqrt(n * p * (1 - p))).all()


@dtypes
@pytest.mark.parametrize("options", [*FILTERS, {"temperature": 0}, {"top_p": 0.0}])
def test_the_ends_of_the_unit_interval_draw_no_impossible_token(options, dtype):
    """Tokens of probability 0 stand first, last and in between."""
    rng = np.random.default_rng(6)
    for _ in range(50):
        logits = (3 * rng.standard_normal(13)).astype(dtype)
        logits[[0, 1, 6, 12]] = -np.inf
        possible = kept(next_token_probabilities(logits, **options))
        draw = partial(sampler(**options).draw, logits)
        assert draw(Numbers(0.0)) == possible[0]
        assert draw(Numbers(5e-324)) == possible[0]
        assert draw(Numbers(1.0 - 2.0**-53)) == possible[-1]


def test_a_large_vocabulary_at_the_ends():
    """The cumulated sum of 50257 float32 logits may end below or above 1."""
    rng = np.random.default_rng(7)
    for _ in range(5):
        logits = (0.1 * rng.standard_normal(50257)).astype(np.float32)
        logits[-3:] = -np.inf
        assert sampler().draw(logits, Numbers(1.0 - 2.0**-53)) == 50253
        assert sampler().draw(logits, Numbers(0.0)) == 0


def test_a_number_on_a_bound_draws_the_next_token():
    """[0, 1/4) is the first token's, [1/4, 1/2) the second's, and so on."""
    logits = np.zeros(4)
    below = np.nextafter([0.25, 0.5, 0.75, 1.0], 0).tolist()
    assert [sampler().draw(logits, Numbers(u)) for u in (0.0, 0.25, 0.5, 0.75)] == [0, 1, 2, 3]
    assert [sampler().draw(logits, Numbers(u)) for u in below] == [0, 1, 2, 3]


def test_a_draw_is_one_number_and_a_plain_int():
    logits = np.zeros(5, np.float32)
    rng, other = np.random.default_rng(8), np.random.default_rng(8)
    for options in FILTERS:
        token = sampler(**options).draw(logits, rng)
        assert type(token) is int
        other.random()
    assert rng.random() == other.random()


# sample

OPTIONS = {"temperature": 0.9, "top_k": 5, "top_p": 0.95, "min_p": 0.01}


def loop(model, item, index, seed, eos_id=EOS, limit=10**9, **options):
    """One item alone, and the whole model anew for each token."""
    rng, text = np.random.default_rng((seed, index)), []
    while len(text) < min(limit, room(model, item)):
        token = sampler(**options).draw(logits_after(model, item, text), rng)
        if token == eos_id:
            break
        text.append(token)
    return text


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_sample_equals_the_loop(kind, seed, left):
    model, items = decoding_model(kind, seed), decoding_items(kind, seed)
    texts = sample(model, batch_of(items, left, extra=2), **ends(model), **OPTIONS, seed=seed)
    assert texts == [loop(model, item, i, seed, **OPTIONS) for i, item in enumerate(items)]
    assert {type(token) for text in texts for token in text} == {int}


@pytest.mark.parametrize("kind", KINDS)
def test_the_models_of_these_tests_draw_different_things(kind):
    model = decoding_model(kind, 1)
    items = [decoding_items(kind, 1)[0][:3]] * 20
    texts = sample(model, batch_of(items), **ends(model), temperature=3.0)
    assert len(set(map(tuple, texts))) > 15
    assert {token for text in texts for token in text} == {0, 1, 3, 4, 5, 6}
    assert len(set(map(len, texts))) > 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_a_text_does_not_depend_on_its_batch_mates(kind, seed):
    """An item keeps its place in the batch, and its text, whatever stands in the other places."""
    model = decoding_model(kind, seed)
    first, others = decoding_items(kind, seed), decoding_items(kind, seed + 100)
    draw = partial(sample, model, **ends(model), temperature=2.0, seed=seed)
    together = draw(batch_of(first))
    for i in range(len(first)):
        mixed = [item if i == j else other for j, (item, other) in enumerate(zip(first, others))]
        assert draw(batch_of(mixed))[i] == together[i]
        assert draw(batch_of(first[: i + 1], left=True)) == together[: i + 1]
    assert draw(batch_of(first + others))[: len(first)] == together
    assert draw(batch_of(first[:1])) == together[:1]


@pytest.mark.parametrize("kind", KINDS)
def test_seeds(kind):
    model, items = decoding_model(kind, 2), batch_of(decoding_items(kind, 2))
    draw = partial(sample, model, items, **ends(model), temperature=2.0)
    texts = [draw(seed=seed) for seed in (0, 1, 2**31, 2**70)]
    assert texts == [draw(seed=seed) for seed in (0, 1, 2**31, 2**70)]
    assert len(set(map(str, texts))) == 4
    assert draw() == draw(seed=0) == draw(seed=np.int64(0))


@pytest.mark.parametrize(("seed", "error"), [(-1, ValueError), (1.0, TypeError), (None, TypeError),
                                             (True, TypeError)])  # fmt: skip
def test_a_bad_seed(seed, error):
    model = decoding_model("language model", 0)
    with pytest.raises(error, match="seed"):
        sample(model, [[3]], seed=seed)
    with pytest.raises(error, match="seed"):
        generate(model, [3], seed=seed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{"temperature": 0}, {"top_k": 1}, {"top_p": 0},
                                     {"temperature": 1e-320}, {"top_p": 1e-8}])  # fmt: skip
def test_what_leaves_one_token_is_greedy(kind, options):
    for seed in range(3):
        model, items = decoding_model(kind, seed), batch_of(decoding_items(kind, seed))
        greedy = greedy_decode(model, items, **ends(model))
        assert sample(model, items, **ends(model), **options, seed=seed) == greedy


@pytest.mark.parametrize("limit", [None, 1, 3, 9, 10**9])
@pytest.mark.parametrize("kind", KINDS)
def test_limits_of_sampled_texts(kind, limit):
    """Each item has as many tokens as the model has positions for, after its own prompt."""
    model, items = decoding_model(kind, 3), [[3] * n for n in (1, 7, 8, 9)]
    options = {**ends(model), "eos_id": None, "max_new_tokens": limit}
    texts = sample(model, batch_of(items, left=True), **options)
    most = 9 if limit is None else min(limit, 9)
    assert [len(text) for text in texts] == [min(most, room(model, item)) for item in items]
    assert texts == sample(model, batch_of(items), **options)


@pytest.mark.parametrize("kind", KINDS)
def test_without_eos_it_is_a_token_like_others(kind):
    model, items = decoding_model(kind, 4), [[3], [4], [5], [6]]
    options = {**ends(model), "temperature": 3.0}
    whole = sample(model, items, **{**options, "eos_id": None})
    assert any(EOS in text for text in whole)
    assert sample(model, items, **options) == [
        text[: text.index(EOS)] if EOS in text else text for text in whole
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["uint8", "int16", ">i4", "uint64"])
def test_sample_from_any_integers(kind, dtype):
    model, items = decoding_model(kind, 5), batch_of(decoding_items(kind, 5))
    expected = sample(model, items, **ends(model))
    assert sample(model, items.astype(dtype), **ends(model)) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_sample_of_no_items(kind):
    model = decoding_model(kind, 0)
    assert sample(model, np.zeros((0, 3), int), **ends(model)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_what_stands_in_the_padding_changes_no_text(kind):
    model, items = decoding_model(kind, 6), batch_of(decoding_items(kind, 6))
    texts = []
    for value in 1e3, -1e6:
        embedding = model.embedding if kind == "language model" else model.source_embedding
        embedding.W.value[PAD] = value
        texts.append(sample(model, items, **ends(model)))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("kind", KINDS)
def test_sample_refuses_nan_infinity_and_empty_prompts(kind):
    model = decoding_model(kind, 7)
    model.output.b.value[4] = np.nan
    with pytest.raises(ValueError, match="item 0 are NaN"):
        sample(model, [[3], [4]], **ends(model))
    model.output.b.value[4] = np.inf
    with pytest.raises(ValueError, match="largest logit is inf"):
        sample(model, [[3], [4]], **ends(model))
    model.output.b.value[4] = -np.inf
    texts = sample(model, [[3], [4]], **{**ends(model), "eos_id": None}, temperature=10.0)
    assert all(4 not in text for text in texts)
    if kind == "language model":
        with pytest.raises(ValueError, match=r"prompt 1 is empty.*BOS"):
            sample(model, [[3], [PAD]])


def test_the_frequencies_of_first_tokens():
    """1000 items that read the same: their first tokens are drawn independently."""
    after = np.random.default_rng(8).standard_normal((5, 5))
    model = table_model("language model", after, np.zeros((3, 5)))
    draws = sample(model, np.full((1000, 1), 3), max_new_tokens=1, seed=9)
    p = next_token_probabilities(after[3])
    counts = np.bincount([token for (token,) in draws], minlength=5)
    assert (np.abs(counts - 1000 * p) <= 4 * np.sqrt(1000 * p * (1 - p))).all()


# generate


@pytest.mark.parametrize("seed", range(6))
def test_generate_equals_sample_within_max_len(seed):
    model, prompts = decoding_model("language model", seed), decoding_items("language model", seed)
    for prompt in prompts:
        most = room(model, prompt)
        (text,) = sample(model, [prompt], eos_id=EOS, **OPTIONS, seed=seed)
        options = {"eos_id": EOS, "max_new_tokens": most, **OPTIONS, "seed": seed}
        assert list(generate(model, prompt, **options)) == text
        assert list(generate(model, np.array(prompt, np.uint8), **options)) == text


@pytest.mark.parametrize("prompt", [[PAD, PAD, 5, 3], [5, 3, PAD], [5, PAD, 3]])
def test_padding_in_the_prompt_of_generate(prompt):
    """It is left out wherever it stands, as sample does."""
    model = decoding_model("language model", 1)
    for seed in range(5):
        options = {"max_new_tokens": 4, "seed": seed, "temperature": 2.0}
        (text,) = sample(model, [prompt], **options)
        assert text == sample(model, [[5, 3]], **options)[0]
        assert list(generate(model, prompt, **options)) == text


def endless(model, prompt, count, seed, **options):
    """A full forward over the last max_len ids for each token."""
    rng, text = np.random.default_rng((seed, 0)), list(prompt)
    for _ in range(count):
        logits = model(np.array([text[-model.config.max_len :]]))[0, -1]
        text.append(sampler(**options).draw(logits, rng))
    return text[len(prompt) :]


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
@pytest.mark.parametrize("length", [1, 8, 9, 10, 20])
@pytest.mark.parametrize("pad_id", [None, PAD])
def test_generate_goes_on_beyond_max_len(length, positions, pad_id):
    """By the last max_len ids, also of a prompt that is longer itself."""
    model = decoding_model("language model", 10, positions=positions, pad_id=pad_id)
    prompt = np.random.default_rng(length).integers(1, 7, length).tolist()
    text = list(generate(model, prompt, max_new_tokens=25, **OPTIONS, seed=11))
    assert len(text) == 25
    assert text == endless(model, prompt, 25, 11, **OPTIONS)


def test_generate_within_max_len_reads_each_token_once(monkeypatch):
    model = decoding_model("language model", 0)
    read = []
    W_k = model.decoder.layers[0].self_attention.W_k
    forward = W_k.forward
    monkeypatch.setattr(W_k, "forward", lambda x: (read.append(x.shape[1]), forward(x))[1])
    list(generate(model, [3, 4, 5], max_new_tokens=7))
    assert read == [3, 1, 1, 1, 1, 1, 1]  # the last token is not read
    read.clear()
    list(generate(model, [3, 4, 5], max_new_tokens=10))
    assert read == [3, 1, 1, 1, 1, 1, 1, 9, 9, 9]


def test_generate_is_lazy(monkeypatch):
    model = decoding_model("language model", 0)
    calls = []
    embed = model.embed
    monkeypatch.setattr(model, "embed", lambda *args: (calls.append(1), embed(*args))[1])
    tokens = generate(model, [3, 4])  # without a limit
    assert isinstance(tokens, GeneratorType)
    assert len(calls) == 0
    first = [next(tokens), next(tokens)]
    assert len(calls) == 2
    assert first == list(generate(model, [3, 4], max_new_tokens=2))
    assert len([next(tokens) for _ in range(100)]) == 100


def test_generate_ends_with_eos():
    at = np.zeros((4, 5))
    at[3, EOS] = 1e3
    model = table_model("language model", np.full((5, 5), 0.0), at)
    text = list(generate(model, [4], eos_id=EOS, temperature=0))
    assert text == [0, 0, 0]
    assert list(generate(model, [4], eos_id=EOS, temperature=0, max_new_tokens=2)) == [0, 0]
    assert list(generate(model, [4, 4, 4, 4], eos_id=EOS)) == []


def test_generate_does_not_write_into_the_prompt():
    model = decoding_model("language model", 0)
    prompt = [3, 4]
    array = np.array(prompt)
    list(generate(model, prompt, max_new_tokens=3))
    list(generate(model, array, max_new_tokens=3))
    assert prompt == array.tolist() == [3, 4]


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        (np.zeros(0, int), ValueError, r"prompt is empty.*BOS"),
        ([[3, 4]], ValueError, r"prompt has shape \(1, 2\)"),
        (3, ValueError, r"prompt has shape \(\)"),
        ([3, 7], IndexError, r"prompt\[1\] is 7"),
        ([-1], IndexError, r"prompt\[0\] is -1"),
        ([3.0], TypeError, "prompt has dtype float64"),
        ([True], TypeError, "prompt has dtype bool"),
        ("abc", TypeError, "prompt has dtype"),
        ([PAD, PAD], ValueError, r"empty.*BOS"),
    ],
)
def test_a_bad_prompt_is_an_error_at_the_call(prompt, error, message):
    with pytest.raises(error, match=message):
        generate(decoding_model("language model", 0), prompt)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"eos_id": 7}, IndexError, "eos_id"),
        ({"eos_id": -1}, IndexError, "eos_id"),
        ({"eos_id": 2.0}, TypeError, "eos_id"),
        ({"eos_id": [2]}, (TypeError, ValueError), "eos_id"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens"),
        ({"max_new_tokens": 2.0}, TypeError, "max_new_tokens"),
    ],
)
def test_a_bad_end_is_an_error_at_the_call(options, error, message):
    with pytest.raises(error, match=message):
        generate(decoding_model("language model", 0), [3], **options)


def test_generate_continues_a_language_model():
    for other in decoding_model("transformer", 0), None:
        with pytest.raises(TypeError, match="expected a LanguageModel"):
            generate(other, [BOS])
    assert isinstance(decoding_model("language model", 0), LanguageModel)


def test_generate_refuses_nan():
    model = decoding_model("language model", 0)
    model.embedding.W.value[3] = np.nan
    tokens = generate(model, [3])
    with pytest.raises(ValueError, match="largest logit is nan"):
        next(tokens)
