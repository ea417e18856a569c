"""beam_search against all sequences there are, and against a search that never stops early."""

import itertools
from functools import partial

import numpy as np
import pytest
from helpers import (
    BOS,
    EOS,
    KINDS,
    PAD,
    assert_close,
    batch_of,
    decoding_items,
    decoding_model,
    ends,
    room,
    seeds,
    table_model,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from npdecoder import Hypothesis, Transformer, beam_search, greedy_decode

V = 7
ALPHAS = (-1, 0, 0.6, 1, 2)
kinds = pytest.mark.parametrize("kind", KINDS)


def log_softmax(logits):
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def log_probabilities(model, item, texts):
    """texts (n, L) after one item -> (n, L, V), of every next token, by one full forward."""
    texts = np.asarray(texts, np.intp)
    if isinstance(model, Transformer):
        begun = np.pad(texts[:, :-1], ((0, 0), (1, 0)), constant_values=BOS)
        return log_softmax(model(np.tile(item, (len(texts), 1)), begun))
    prompts = np.tile(item, (len(texts), 1))
    return log_softmax(model(np.hstack([prompts, texts[:, :-1]]))[:, len(item) - 1 :])


def score(model, item, hypothesis, alpha):
    """By a full forward over the item and the hypothesis."""
    text = [*hypothesis.ids, EOS] if hypothesis.finished else hypothesis.ids
    (log_p,) = log_probabilities(model, item, [text])
    return log_p[np.arange(len(text)), text].sum() / len(text) ** alpha


def everything(model, item, length, alpha):
    """All sequences that end with EOS or at this length, the best first."""
    texts = np.array(list(itertools.product([t for t in range(V) if t != EOS], repeat=length)))
    log_p = log_probabilities(model, item, texts)
    totals = np.take_along_axis(log_p, texts[:, :, None], axis=2)[:, :, 0].cumsum(axis=1)
    found = {}
    for text, total, ending in zip(texts.tolist(), totals.tolist(), log_p[:, :, EOS].tolist()):
        found[(*text,), False] = total[-1] / length**alpha
        for n in range(length):
            before = total[n - 1] if n else 0.0
            found[(*text[:n],), True] = (before + ending[n]) / (n + 1) ** alpha
    pairs = sorted(found.items(), key=lambda pair: -pair[1])
    return [Hypothesis(list(ids), value, finished) for (ids, finished), value in pairs]


def assert_same(results, expected, tolerance=1e-10):
    assert [(h.ids, h.finished) for h in results] == [(h.ids, h.finished) for h in expected]
    for one, other in zip(results, expected):
        assert abs(one.score - other.score) <= tolerance


# Tokens a = 0, b = 1, E = 2, and B = 3, which comes first and never again

E, B = 2, 3


def two_step_model(kind):
    """First a .4, b .1, E .5; after a or b each again .05, and E .9."""
    with np.errstate(divide="ignore"):
        first, then = np.log([0.4, 0.1, 0.5, 0.0]), np.log([0.05, 0.05, 0.9, 0.0])
    return table_model(kind, [then, then, then, first], np.zeros((2, 4)))


def search(model, *, ids=((B,),), **options):
    """beam_search of a table model, whose text begins with B."""
    begin = {"bos_id": B} if isinstance(model, Transformer) else {}
    return beam_search(model, ids, eos_id=E, **begin, **options)


@kinds
def test_a_length_penalty_decides_between_a_short_text_and_a_longer_one(kind):
    model = two_step_model(kind)
    options = {"beam_size": 2, "max_new_tokens": 2}
    ((best,),) = search(model, **options, length_penalty=0)
    assert (best.ids, best.finished) == ([], True)
    assert best.score == pytest.approx(-0.693147, abs=1e-6)
    ((best,),) = search(model, **options, length_penalty=1)
    assert (best.ids, best.finished) == ([0], True)
    assert best.score == pytest.approx(-0.510826, abs=1e-6)
    ((best, other),) = search(model, **options, length_penalty=0, n_best=2)
    assert (other.ids, other.score) == ([0], pytest.approx(-1.021651, abs=1e-6))
    ((best, other),) = search(model, **options, n_best=2)  # by default the mean
    assert (other.ids, other.score) == ([], pytest.approx(-0.693147, abs=1e-6))


# All sequences


@kinds
@pytest.mark.parametrize("alpha", ALPHAS)
def test_a_beam_that_holds_all_finds_the_best_of_all(kind, alpha):
    for seed, length in (0, 3), (1, 2), (2, 1), (3, 3):
        model, items = decoding_model(kind, seed), decoding_items(kind, seed, 3, longest=6)
        expected = [everything(model, item, length, alpha) for item in items]
        options = {"beam_size": V**length, "max_new_tokens": length, "length_penalty": alpha}
        for n_best in 1, 2, 5, len(expected[0]):
            results = beam_search(
                model, batch_of(items), **ends(model), **options, n_best=n_best
            )
            for one, best in zip(results, expected):
                assert_same(one, best[:n_best])


@kinds
def test_all_sequences_together_are_certain(kind):
    """Each comes once, and their probabilities sum to one."""
    model, items = decoding_model(kind, 5), decoding_items(kind, 5, 3, longest=6)
    options = {"beam_size": V**3, "n_best": V**3, "max_new_tokens": 3, "length_penalty": 0}
    for results in beam_search(model, batch_of(items), **ends(model), **options):
        assert len(results) == 1 + 6 + 36 + 216
        assert len({(*h.ids, h.finished) for h in results}) == len(results)
        assert sum(np.exp(h.score) for h in results) == pytest.approx(1.0, abs=1e-12)


@kinds
@pytest.mark.parametrize("alpha", ALPHAS)
def test_what_every_result_is(kind, alpha):
    for seed in range(4):
        model, items = decoding_model(kind, seed), decoding_items(kind, seed)
        options = {"beam_size": 4, "n_best": 3, "length_penalty": alpha}
        results = beam_search(model, batch_of(items), **ends(model), **options)
        assert len(results) == len(items)
        for item, hypotheses in zip(items, results):
            assert 0 < len(hypotheses) <= 3
            assert sorted((h.score for h in hypotheses), reverse=True) == [
                h.score for h in hypotheses
            ]
            assert len({(*h.ids, h.finished) for h in hypotheses}) == len(hypotheses)
            for h in hypotheses:
                assert EOS not in h.ids
                assert len(h.ids) + h.finished <= room(model, item)
                assert h.finished or len(h.ids) == room(model, item)
                assert abs(h.score - score(model, item, h, alpha)) < 1e-10
                assert {type(token) for token in h.ids} <= {int}
                assert (type(h.score), type(h.finished)) == (float, bool)


def test_the_results_of_these_tests_are_of_every_kind():
    for kind in KINDS:
        found, differ = [], 0
        for seed in range(4):
            model, items = decoding_model(kind, seed), batch_of(decoding_items(kind, seed))
            results = beam_search(model, items, **ends(model), beam_size=4, n_best=3)
            found += [h for one in results for h in one]
            greedy = greedy_decode(model, items, **ends(model))
            differ += sum(one[0].ids != text for one, text in zip(results, greedy))
        assert {h.finished for h in found} == {True, False}
        assert len({len(h.ids) for h in found}) > 4
        assert differ > 3


# A search that goes on to the greatest length


def reference(next_log_p, limit, beam_size, alpha, n_best):
    """next_log_p: the ids so far -> log-probabilities. Plain, and without any early stop."""
    beams, found = [([], 0.0)], []
    for length in range(1, limit + 1):
        candidates = []
        for row, (ids, total) in enumerate(beams):
            for token, log_p in enumerate(next_log_p(ids)):
                if log_p > -np.inf:
                    candidates.append((-(total + log_p), row, token))
        alive = []
        for negative, row, token in sorted(candidates)[: 1 if beam_size == 1 else 2 * beam_size]:
            ids = beams[row][0]
            if token == E:
                found.append(Hypothesis(ids, -negative / length**alpha, True))
            elif len(alive) < beam_size:
                alive.append(([*ids, token], -negative))
        beams = alive
    found += [Hypothesis(ids, total / limit**alpha, False) for ids, total in beams]
    return sorted(found, key=lambda h: -h.score)[:n_best]


def draw_tables(rng, size, limit):
    """Logits of the next token by the last and by the position, some tokens impossible."""
    after = rng.choice([0.3, 1.0, 3.0]) * rng.standard_normal((size, size))
    at = rng.choice([0.3, 1.0, 3.0]) * rng.standard_normal((limit, size))
    at[:, E] -= rng.choice([-1.0, 0.0, 2.0])
    if rng.random() < 0.5:
        after[rng.random(after.shape) < 0.25] = -np.inf
        after[np.arange(size), rng.integers(0, size, size)] = 0.0  # one is possible
    return after, at


@settings(max_examples=400)
@given(
    kind=st.sampled_from(KINDS),
    size=st.sampled_from([4, 5, 7]),
    limit=st.integers(1, 7),
    beam_size=st.integers(1, 5),
    alpha=st.sampled_from([-2.0, -1, -0.3, 0, 0.3, 0.6, 1, 1.5, 2, 4]),
    n_best=st.integers(1, 5),
    seed=seeds,
)
def test_no_early_stop_loses_a_better_text(kind, size, limit, beam_size, alpha, n_best, seed):
    rng = np.random.default_rng(seed)
    after, at = draw_tables(rng, size, limit)
    n_best = min(n_best, beam_size)

    def next_log_p(ids):
        last = ids[-1] if ids else B
        return log_softmax(after[last] + at[len(ids)])

    expected = reference(next_log_p, limit, beam_size, alpha, n_best)
    model = table_model(kind, after, at)
    options = {"beam_size": beam_size, "length_penalty": alpha, "n_best": n_best}
    (results,) = search(model, **options)
    assert_same(results, expected)


def eos_model(kind, chances):
    """At position t EOS has the probability chances[t], and all the rest falls to token 0."""
    at = np.full((len(chances), 4), -np.inf)
    at[:, E], at[:, 0] = np.log(chances), np.log1p(-np.array(chances))
    return table_model(kind, np.zeros((4, 4)), at)


@kinds
@pytest.mark.parametrize(
    ("alpha", "chances", "best"),
    [
        # totals: -0.223 and then less for all that follows
        (0, [0.8, 0.5, 0.99], 0),
        # means: -0.916, or at the greatest length -(0.511 + 0.001 + 0.001 + 0.01) / 4 = -0.13
        (1, [0.4, 0.001, 0.001, 0.99], 3),
        # -0.528, or -(0.892 + 0.105) / 2 = -0.498
        (1, [0.59, 0.9, 0.5, 0.5], 1),
        # times the length: a further token can only lose, even a certain one
        (-1, [0.5, 0.999, 0.5, 0.5], 0),
        # -1.204, and -0.357 that goes on: 7 times that is less, but -(0.357 + 0.105) * 2 is more
        (-1, [0.3, 0.9, 0.5, 0.5, 0.5, 0.5, 0.5], 1),
    ],
)
def test_a_later_end_wins_where_it_should(kind, alpha, chances, best):
    ((result,),) = search(eos_model(kind, chances), beam_size=2, length_penalty=alpha)
    totals = np.cumsum(np.log1p(-np.array(chances))) - np.log1p(-np.array(chances))
    lengths = np.arange(1, len(chances) + 1)
    scores = (totals + np.log(chances)) / lengths ** float(alpha)
    assert scores.argmax() == best
    assert result.finished
    assert len(result.ids) == best
    assert result.score == pytest.approx(scores[best], abs=1e-10)


@kinds
@pytest.mark.parametrize(
    ("alpha", "chance", "steps"),
    [(0, 0.9, 0), (1, 0.9, 0), (1, 0.2, 5), (-1, 0.6, 0), (-1, 0.4, 0), (-1, 0.2, 5), (4, 0.9, 5)],
)
def test_a_search_ends_when_nothing_better_can_come(kind, alpha, chance, steps, monkeypatch):
    """0 further steps after a likely EOS, and all 5 where the greatest length may still win."""
    model = eos_model(kind, [chance, *[0.001] * 5])
    calls = []
    extend = model.decoder.extend
    monkeypatch.setattr(
        model.decoder, "extend", lambda *args: (calls.append(1), extend(*args))[1]
    )
    search(model, beam_size=2, length_penalty=alpha)
    assert len(calls) == 1 + steps


# Beams of any size


@kinds
@pytest.mark.parametrize("alpha", [*ALPHAS, -3, 10])
def test_a_beam_of_one_is_greedy(kind, alpha):
    for seed in range(4):
        model, items = decoding_model(kind, seed), batch_of(decoding_items(kind, seed))
        greedy = greedy_decode(model, items, **ends(model))
        results = beam_search(
            model, items, **ends(model), beam_size=1, length_penalty=alpha
        )
        assert [[h.ids for h in one] for one in results] == [[text] for text in greedy]


@kinds
def test_a_beam_wider_than_the_vocabulary(kind):
    model, (item, *_) = decoding_model(kind, 6), decoding_items(kind, 6, longest=5)

    def next_log_p(ids):
        return log_probabilities(model, item, [[*ids, 0]])[0, -1]

    for beam_size in V - 1, V, V + 1, 20:
        options = {"beam_size": beam_size, "n_best": 4, "max_new_tokens": 4}
        (results,) = beam_search(model, [item], **ends(model), **options)
        assert_same(results, reference(next_log_p, 4, beam_size, 1.0, 4))


@kinds
def test_a_wide_beam_of_a_model_with_few_tokens(kind):
    """Two tokens are possible, and EOS: fewer sequences than the beam has room for."""
    model = decoding_model(kind, 7)
    model.output.b.value[[0, 1, 3, 4]] = -np.inf
    options = {"beam_size": 50, "n_best": 50, "max_new_tokens": 2, "length_penalty": 0}
    (results,) = beam_search(model, [[3]], **ends(model), **options)
    assert len(results) == 1 + 2 + 4
    assert {token for h in results for token in h.ids} == {5, 6}
    assert np.isfinite([h.score for h in results]).all()
    assert sum(np.exp(h.score) for h in results) == pytest.approx(1.0, abs=1e-12)


@kinds
def test_an_impossible_eos_leaves_all_unfinished(kind):
    model = decoding_model(kind, 8)
    model.output.b.value[EOS] = -np.inf
    for one in beam_search(model, [[3], [4]], **ends(model), beam_size=3, n_best=3):
        assert [h.finished for h in one] == [False] * 3
        assert all(len(h.ids) == room(model, [3]) for h in one)


@kinds
def test_the_greatest_length_cuts(kind):
    model = eos_model(kind, [0.01, 0.01, 0.01])
    for limit in 1, 2, 3, 4, 10**9:
        ((result,),) = search(model, beam_size=2, length_penalty=0, max_new_tokens=limit)
        n = min(limit, 3)
        assert (result.ids, result.finished) == ([0] * n, False)
        assert result.score == pytest.approx(n * np.log(0.99), abs=1e-12)


@kinds
def test_without_eos_all_are_cut(kind):
    model, items = decoding_model(kind, 9), decoding_items(kind, 9)
    options = {**ends(model), "eos_id": None, "beam_size": 4, "n_best": 4}
    results = beam_search(model, batch_of(items), **options)
    for item, hypotheses in zip(items, results):
        assert [h.finished for h in hypotheses] == [False] * 4
        assert {len(h.ids) for h in hypotheses} == {room(model, item)}
        for h in hypotheses:
            assert abs(h.score - score(model, item, h, 1.0)) < 1e-10
    assert any(EOS in h.ids for one in results for h in one)


@kinds
def test_among_equals_lower_ids_come_first(kind):
    model = table_model(kind, np.zeros((4, 4)), np.zeros((2, 4)))
    for alpha in 0, 1, 2:
        begin = {"bos_id": B} if kind == "transformer" else {}
        (results,) = beam_search(
            model, [[B]], **begin, beam_size=3, n_best=3, length_penalty=alpha
        )
        assert [h.ids for h in results] == [[0, 0], [0, 1], [0, 2]]
    ((first, second),) = search(model, beam_size=2, n_best=2)  # all means are log 1/4
    assert first == Hypothesis([], np.log(0.25), True)
    assert (second.ids[0], second.score) == (0, np.log(0.25))
    ((first,),) = search(model, beam_size=1)
    assert first.ids == [0, 0]


@kinds
def test_among_equals_the_text_found_first_comes_first(kind):
    """0 and 1 are equally likely; after 0 comes 1, and after 1 the end, both for certain."""
    after = np.full((4, 4), -np.inf)
    after[B, [0, 1]] = after[0, 1] = after[1, E] = 0.0
    model = table_model(kind, after, np.zeros((3, 4)))
    (results,) = search(model, beam_size=2, n_best=2, length_penalty=0)
    assert results == [Hypothesis([1], np.log(0.5), True), Hypothesis([0, 1], np.log(0.5), True)]
    (results,) = search(model, beam_size=2, length_penalty=0)
    assert [h.ids for h in results] == [[1]]


# Batches


@kinds
@pytest.mark.parametrize("alpha", [-1, 1])
def test_an_item_does_not_depend_on_its_batch_mates(kind, alpha):
    for seed in range(3):
        model, items = decoding_model(kind, seed), decoding_items(kind, seed)
        options = {**ends(model), "beam_size": 3, "n_best": 2, "length_penalty": alpha}
        decode = partial(beam_search, model, **options)
        together = decode(batch_of(items))
        for left, extra in (False, 3), (True, 0), (True, 4):
            for one, other in zip(decode(batch_of(items, left, extra)), together):
                assert_same(one, other)
        for item, expected in zip(items, together):
            assert_same(*decode([item]), expected)
        order = np.random.default_rng(seed).permutation(len(items))
        for one, i in zip(decode(batch_of([items[i] for i in order])), order):
            assert_same(one, together[i])


@kinds
def test_what_stands_in_the_padding_changes_no_result(kind):
    model, items = decoding_model(kind, 4), batch_of(decoding_items(kind, 4))
    results = []
    for value in 1e3, -1e6:
        embedding = model.embedding if kind == "language model" else model.source_embedding
        embedding.W.value[PAD] = value
        results.append(beam_search(model, items, **{**ends(model), "eos_id": 3}, beam_size=3))
    for one, other in zip(*results):
        assert_same(one, other)


@pytest.mark.parametrize("limit", [None, 2, 10**9])
@pytest.mark.parametrize("left", [False, True])
def test_each_prompt_has_its_own_greatest_length(limit, left):
    model = decoding_model("language model", 2)
    prompts = [[3] * n for n in (1, 7, 8, 9)]
    results = beam_search(
        model, batch_of(prompts, left), beam_size=3, n_best=3, max_new_tokens=limit
    )
    most = 9 if limit is None else min(limit, 9)
    for prompt, hypotheses in zip(prompts, results):
        assert {len(h.ids) for h in hypotheses} == {min(room(model, prompt), most)}
        for h in hypotheses:
            assert abs(h.score - score(model, prompt, h, 1.0)) < 1e-10


@kinds
@pytest.mark.parametrize("dtype", ["uint8", "int16", ">i4", "uint64"])
def test_search_from_any_integers(kind, dtype):
    model, items = decoding_model(kind, 5), batch_of(decoding_items(kind, 5))
    expected = beam_search(model, items, **ends(model), beam_size=3)
    items = items.astype(dtype)
    items.flags.writeable = False
    assert beam_search(model, items, **ends(model), beam_size=3) == expected


@kinds
def test_search_for_no_items(kind):
    model = decoding_model(kind, 0)
    assert beam_search(model, np.zeros((0, 3), int), **ends(model), beam_size=3) == []


@kinds
def test_a_float32_model_is_scored_in_float64(kind):
    model, exact = decoding_model(kind, 3).astype(np.float32), decoding_model(kind, 3)
    items = decoding_items(kind, 3)
    results = beam_search(model, batch_of(items), **ends(model), beam_size=3)
    for item, (best,) in zip(items, results):
        assert type(best.score) is float
        assert_close(best.score, score(exact, item, best, 1.0), 1e-4)


@kinds
def test_the_work_of_a_search(kind, monkeypatch):
    """A row for each item, then at most beam_size an item, of one new token each."""
    model, items = decoding_model(kind, 1), decoding_items(kind, 1, 5)
    shapes = []
    extend = model.decoder.extend

    def counted(state, x, *args):
        shapes.append(x.shape[:2])
        return extend(state, x, *args)

    monkeypatch.setattr(model.decoder, "extend", counted)
    beam_search(model, batch_of(items), **ends(model), beam_size=3)
    first, *steps = shapes
    assert first == (5, 1 if kind == "transformer" else max(map(len, items)))
    assert len(steps) <= 8
    assert all(rows <= 15 and T == 1 for rows, T in steps)


# Errors


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"beam_size": 0}, ValueError, "beam_size"),
        ({"beam_size": 2.0}, TypeError, "beam_size"),
        ({"beam_size": True}, TypeError, "beam_size"),
        ({"n_best": 0}, ValueError, "n_best"),
        ({"n_best": 1.0}, TypeError, "n_best"),
        ({"n_best": 4}, ValueError, "n_best is 4, expected at most beam_size, which is 3"),
        ({"length_penalty": np.nan}, ValueError, "length_penalty"),
        ({"length_penalty": np.inf}, ValueError, "length_penalty"),
        ({"length_penalty": -np.inf}, ValueError, "length_penalty"),
        ({"length_penalty": "1"}, TypeError, "length_penalty"),
        ({"length_penalty": None}, TypeError, "length_penalty"),
        ({"length_penalty": True}, TypeError, "length_penalty"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens"),
        ({"max_new_tokens": 1.5}, TypeError, "max_new_tokens"),
        ({"eos_id": 7}, IndexError, "eos_id"),
        ({"eos_id": -1}, IndexError, "eos_id"),
        ({"eos_id": 2.0}, TypeError, "eos_id"),
    ],
)
@kinds
def test_bad_options(kind, options, error, message):
    model = decoding_model(kind, 0)
    with pytest.raises(error, match=message):
        beam_search(model, [[3]], **{**ends(model), "beam_size": 3, **options})


def test_bad_models_and_ids():
    transformer, model = decoding_model("transformer", 0), decoding_model("language model", 0)
    with pytest.raises(ValueError, match="bos_id is None"):
        beam_search(transformer, [[3]], beam_size=2)
    with pytest.raises(ValueError, match="bos_id was given"):
        beam_search(model, [[3]], bos_id=BOS, beam_size=2)
    with pytest.raises(ValueError, match=r"prompt 1 is empty.*BOS"):
        beam_search(model, [[3], [PAD]], beam_size=2)
    with pytest.raises(IndexError, match=r"ids\[0, 0\] is 7"):
        beam_search(model, [[7]], beam_size=2)
    with pytest.raises(TypeError, match="model is a Decoder"):
        beam_search(model.decoder, [[3]], beam_size=2)


@kinds
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_without_a_distribution(kind, value):
    """NaN, and infinity, of which there is no logarithm of a probability."""
    model = decoding_model(kind, 0)
    model.output.b.value[4] = value
    with pytest.raises(ValueError, match=r"NaN|nan|inf"):
        beam_search(model, [[3], [4]], **ends(model), beam_size=3)


def test_nan_names_the_item():
    model = decoding_model("language model", 0)
    model.embedding.W.value[5] = np.nan
    with pytest.raises(ValueError, match="item 1 are NaN"):
        beam_search(model, [[3, 4], [5, 3]], beam_size=2)
    # in a later step: a text that has read 5 has no next token
    model.embedding.W.value[5] = 0.0
    table = table_model("language model", np.eye(4), np.zeros((3, 4)))
    table.output.after[0] = np.nan
    with pytest.raises(ValueError, match="item 0 are NaN"):
        search(table, beam_size=3)


def test_nothing_is_written():
    model = decoding_model("language model", 1)
    items = batch_of(decoding_items("language model", 1))
    before = model.state_dict()
    first = beam_search(model, items, eos_id=EOS, beam_size=3, n_best=3)
    assert beam_search(model, items, eos_id=EOS, beam_size=3, n_best=3) == first
    after = model.state_dict()
    assert all(after[name].tobytes() == before[name].tobytes() for name in before)
    ids = [h.ids for one in first for h in one]
    assert len(set(map(id, ids))) == len(ids)
