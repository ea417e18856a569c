"""examples/pre_vs_post_norm.py: it measures what it says, and its verdicts follow from that."""

import dataclasses
import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from npdecoder import CrossEntropy, gradcheck

PATH = Path(__file__).parents[2] / "examples" / "pre_vs_post_norm.py"


def load():
    spec = importlib.util.spec_from_file_location("examples_pre_vs_post_norm", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


norms = load()
TINY = norms.Setting(
    depths=(1, 2, 4, 8), seeds=3, d_model=16, sentences=4, num_heads=2,
    train_depth=2, train_d_model=16, train_seeds=2, updates=10, warmup=4, batch=4,
    rates=(0.05, 1000.0),
)  # fmt: skip


@pytest.fixture(scope="module")
def book():
    return norms.Book()


@pytest.fixture(scope="module")
def result():
    return norms.measure(TINY)


# The data


def test_a_line_is_english_then_chinese_and_only_the_chinese_is_a_target(book):
    vocabulary = book.vocabulary
    lines = {" ".join(vocabulary.decode(ids)): (ids, targets) for ids, targets in book.lines}
    (ids, targets) = lines["i love you"]  # decode stops at <eos>
    bos, eos, pad = vocabulary.bos_id, vocabulary.eos_id, vocabulary.pad_id
    chinese = vocabulary.encode(["我", "爱", "你"])
    assert ids == [bos, *vocabulary.encode(["i", "love", "you"]), eos, *chinese]
    assert targets == [pad] * 4 + [*chinese, eos]


def test_a_batch_has_distinct_lines_and_depends_on_its_generator_alone(book):
    ids, targets = book.batch(8, np.random.default_rng(0))
    again, _ = book.batch(8, np.random.default_rng(0))
    np.testing.assert_array_equal(ids, again)
    assert ids.shape == targets.shape
    assert len(np.unique(ids, axis=0)) == 8
    assert not np.array_equal(ids, book.batch(8, np.random.default_rng(1))[0])


def test_the_loss_of_frequencies(book):
    _, targets = book.batch(len(book.lines), np.random.default_rng(0))
    counts = np.bincount(targets[targets != norms.PAD], minlength=len(book.vocabulary))
    with np.errstate(divide="ignore"):
        logits = np.log(counts / counts.sum())
    logits = np.broadcast_to(logits, (*targets.shape, len(logits)))
    loss, _ = CrossEntropy(ignore_index=norms.PAD).forward(logits, targets)
    assert book.frequency_loss() == pytest.approx(loss, rel=1e-12)


# The start


@pytest.mark.parametrize("stack", norms.STACKS)
def test_the_outputs_of_the_layers_are_those_of_the_model(book, stack):
    model = norms.make_model(book, TINY, 3, 16, 0, **norms.STACKS[stack])
    ids, _ = book.batch(4, np.random.default_rng(0))
    xs = norms.outputs(model, ids)
    assert len(xs) == 4
    last = xs[-1] if model.decoder.norm is None else model.decoder.norm(xs[-1])
    real = ids != norms.PAD
    np.testing.assert_allclose(model.output(last)[real], model(ids)[real], rtol=1e-4, atol=1e-5)


def test_a_start_is_of_each_layer(book):
    model = norms.make_model(book, TINY, 3, 16, 0, norm="pre").astype(np.float64)
    ids, targets = book.batch(4, np.random.default_rng(0))
    start = norms.measure_start(model, ids, targets)
    again = norms.measure_start(model, ids, targets)  # gradients do not pile up
    for a, b in zip(start, again):
        assert a.shape == (3,)
        np.testing.assert_array_equal(a, b)
    W = model.decoder.layers[1].feed_forward.linear2.W.grad
    assert start.feed_forward[1] == pytest.approx(np.sqrt((W**2).sum()))
    assert (start.layer > start.feed_forward).all()
    everything = np.concatenate([p.grad.ravel() for p in model.decoder.layers[2].parameters()])
    assert start.layer[2] == pytest.approx(np.linalg.norm(everything))
    out = norms.outputs(model, ids)[3][ids != norms.PAD]
    assert start.scale[2] == pytest.approx(np.sqrt((out**2).mean()))
    assert gradcheck(model, ids, mode="directional").ok


def test_the_loss_does_not_depend_on_padding(book):
    """Otherwise the gradients of a batch would depend on its longest line."""
    model = norms.make_model(book, TINY, 2, 16, 0, norm="post").astype(np.float64)
    ids, targets = book.batch(4, np.random.default_rng(0))
    start = norms.measure_start(model, ids, targets)
    wider = [np.pad(a, ((0, 0), (0, 3)), constant_values=norms.PAD) for a in (ids, targets)]
    for a, b in zip(start, norms.measure_start(model, *wider)):
        np.testing.assert_allclose(a, b, rtol=1e-10)


def test_the_stacks_differ_in_the_norms_alone(book):
    made = {name: norms.make_model(book, TINY, 2, 16, 0, **options)
            for name, options in norms.STACKS.items()}  # fmt: skip
    post, pre, bare = made.values()
    assert [m.decoder.norm is None for m in (post, pre, bare)] == [True, False, True]
    for name, value in bare.state_dict().items():
        np.testing.assert_array_equal(value, post.state_dict()[name])
        np.testing.assert_array_equal(value, pre.state_dict()[name])


@pytest.mark.parametrize("power", [-0.5, 0.0, 2.0])
def test_an_exponent_is_found_again(power):
    depths = np.array([2, 4, 8, 24])
    values = np.array([[1.0], [3.0]]) * depths**power
    assert norms.exponent(depths, values) == pytest.approx((power, 0.0, 2), abs=1e-12)
    tilted = np.array([depths ** (power - 0.1), depths ** (power + 0.1)])
    assert norms.exponent(depths, tilted) == pytest.approx((power, 0.1 * np.sqrt(2), 2), abs=1e-12)


def test_what_was_measured_at_the_start(book):
    """Deep stacks, a few seeds: Post-LN's scale and last gradient stay, Pre-LN's grow and fall."""
    setting = dataclasses.replace(TINY, depths=(2, 24), seeds=4, d_model=32, sentences=8)
    start = {}
    for name, depth, of_depth in norms.starts(book, setting):
        start.setdefault(name, {})[depth] = of_depth
    result = made_up()._replace(setting=setting, start=start)
    np.testing.assert_allclose(start["Post-LN"][24].scale, 1.0, rtol=1e-3)
    scale = start["Pre-LN"][24].scale.mean(axis=0)
    assert 2 < scale[-1] / scale[0] < 5
    post, pre, bare = (
        norms.exponent((2, 24), norms.last_gradients(result, name)).mean for name in norms.STACKS
    )
    assert abs(post) < 0.15
    assert -0.6 < pre < -0.25
    assert 0.05 < bare < 0.5


def test_the_growth_of_the_scale():
    a, b, r2 = norms.growth(made_up(pre_scale=2.0))  # made up as 2 * sqrt(depth)
    assert (a, b, r2) == pytest.approx((0.0, 4.0, 1.0), abs=1e-9)


def test_every_stack_and_depth_is_measured(result):
    deep = max(TINY.depths)
    for name in norms.STACKS:
        assert list(result.start[name]) == list(TINY.depths)
        assert result.start[name][deep].feed_forward.shape == (3, deep)
    assert list(result.start[norms.NARROW]) == [deep]


# Training


def test_training_learns_and_diverges(result, book):
    assert set(result.training) == {(n, w) for n in ("post", "pre") for w in (0, TINY.warmup)}
    for key, by_rate in result.training.items():
        assert all(len(by_rate[rate]) == TINY.train_seeds for rate in TINY.rates)
        assert norms.outcome(result, key, 0.05).diverged == 0
        assert norms.outcome(result, key, 1000.0).diverged == TINY.train_seeds
    assert result.even_loss == pytest.approx(np.log(len(book.vocabulary)))


def test_training_is_deterministic_in_the_seed_and_uses_all_it_is_given(book):
    base = norms.train_one(book, TINY, "pre", 0.05, 0, 0)
    assert norms.train_one(book, TINY, "pre", 0.05, 0, 0).loss == base.loss
    others = [("post", 0.05, 0, 0), ("pre", 0.06, 0, 0), ("pre", 0.05, 4, 0), ("pre", 0.05, 0, 1)]
    assert all(norms.train_one(book, TINY, *other).loss != base.loss for other in others)
    assert base.scale.shape == (TINY.train_depth,)


def test_more_updates_bring_a_lower_loss(book):
    losses = [
        norms.train_one(book, dataclasses.replace(TINY, updates=n), "pre", 0.05, 0, 0).loss
        for n in (10, 60)
    ]
    assert losses[1] < losses[0] - 0.5


# The verdicts, from numbers made up for them


def made_up(post_power=0.0, pre_power=-0.5, bare_power=0.2, bottom=1.0, narrow=0.3, pre_scale=2.0,
            pre_trained=1.5, seeds_apart=1.0, losses=None):  # fmt: skip
    """A Result with these exponents, this first/last ratio of Post-LN, and these losses by
    (norm, warm-up?) -> one a rate."""
    depths = TINY.depths

    def start(power, ratio, top_scale, depth):
        gradient = depth**power * np.linspace(ratio, 1.0, depth)
        gradient[-1] = depth**power
        scale = np.linspace(1.0, top_scale, depth) if depth > 1 else np.array([top_scale])
        return norms.Start(*(np.tile(a, (2, 1)) for a in (gradient, gradient, scale)))

    starts = {
        "Post-LN": {n: start(post_power, bottom, 1.0, n) for n in depths},
        "Pre-LN": {n: start(pre_power, 1.0, pre_scale * n**0.5, n) for n in depths},
        "Pre-LN, no final norm": {n: start(bare_power, 1.0, n**0.5, n) for n in depths},
        norms.NARROW: {max(depths): start(0.0, narrow, 1.0, max(depths))},
    }
    starts["Post-LN"][max(depths)].feed_forward[1, 0] *= seeds_apart
    losses = losses or {("post", False): (2.0, 4.0), ("post", True): (1.0, 4.0),
                        ("pre", False): (1.0, 0.5), ("pre", True): (1.0, 0.5)}  # fmt: skip
    training = {}
    for (norm, warm), of_rates in losses.items():
        scale = np.array([1.0, 1.2 if norm == "post" else pre_trained])
        training[norm, TINY.warmup * warm] = {
            rate: [norms.Trained(loss, scale)] * 2 for rate, loss in zip(TINY.rates, of_rates)
        }
    return norms.Result(TINY, starts, training, frequency_loss=4.0, even_loss=5.6)


def verdict_of(result, words):
    (claim,) = [c for c in norms.start_claims(result) + norms.training_claims(result)
                if words in c.claim]  # fmt: skip
    return claim.verdict


@pytest.mark.parametrize(
    ("words", "numbers", "expected"),
    [
        ("does not depend on the depth", {"post_power": 0.05}, "agrees"),
        ("does not depend on the depth", {"post_power": -0.2}, "DIFFERS"),
        ("depth ** -0.5", {"pre_power": -0.45}, "agrees"),
        ("depth ** -0.5", {"pre_power": -0.3}, "DIFFERS"),
        ("the cause is the final norm", {}, "agrees"),
        ("the cause is the final norm", {"pre_power": -0.2}, "DIFFERS"),
        ("the cause is the final norm", {"bare_power": -0.5}, "DIFFERS"),
        ("decays on its way down", {"bottom": 0.9, "narrow": 0.8}, "DIFFERS"),
        ("decays on its way down", {"bottom": 0.4, "narrow": 0.3}, "agrees"),
        ("decays on its way down", {"bottom": 0.9, "narrow": 0.3}, "depends on d_ff"),
        ("propagate more stably", {"bottom": 0.5}, "agrees"),
        ("propagate more stably", {"bottom": 1.0}, "DIFFERS"),
        ("from seed to seed", {"seeds_apart": 1.5}, "agrees"),
        ("from seed to seed", {}, "DIFFERS"),
        ("outputs are of more even scale", {}, "DIFFERS"),
        ("outputs are of more even scale", {"pre_trained": 1.1}, "depends on training"),
    ],
)
def test_verdicts_on_the_start(words, numbers, expected):
    assert verdict_of(made_up(**numbers), words) == expected


POST, POST_WARM, PRE, PRE_WARM = ("post", False), ("post", True), ("pre", False), ("pre", True)
GOOD, BAD = (1.0, 0.5), (4.0, 9.0)


@pytest.mark.parametrize(
    ("words", "losses", "expected"),
    [
        ("larger learning rates", {POST: (1.0, 4.0)}, "agrees"),
        ("larger learning rates", {POST: GOOD}, "DIFFERS"),
        ("must have a warm-up", {POST: BAD}, "agrees"),
        ("must have a warm-up", {}, "DIFFERS"),
        ("must have a warm-up", {POST: BAD, POST_WARM: BAD}, "open"),
        ("learn where it does not", {POST: BAD}, "agrees"),
        ("learn where it does not", {}, "DIFFERS"),
        ("learn where it does not", {POST: (1.0, 4.0), POST_WARM: (1.0, 3.0)}, "agrees"),
        ("brings Post-LN further", {POST: (2.0, 4.0), POST_WARM: (1.0, 4.0)}, "agrees"),
        ("brings Post-LN further", {POST: GOOD, POST_WARM: GOOD}, "DIFFERS"),
        ("brings Post-LN further", {POST: BAD, POST_WARM: BAD}, "open"),
        ("needs no warm-up", {}, "agrees"),
        ("needs no warm-up", {PRE: (1.0, 4.0)}, "DIFFERS"),
        ("needs no warm-up", {PRE: BAD, PRE_WARM: BAD}, "DIFFERS"),
        ("as well as Post-LN with it", {}, "agrees"),
        ("as well as Post-LN with it", {PRE: (2.0, 4.0)}, "DIFFERS"),
    ],
)
def test_verdicts_on_training(words, losses, expected):
    base = {POST: GOOD, POST_WARM: GOOD, PRE: GOOD, PRE_WARM: GOOD}
    assert verdict_of(made_up(losses={**base, **losses}), words) == expected


@pytest.mark.parametrize(
    ("mean", "spread", "expected"),
    [(0.05, 0.01, True), (0.3, 0.01, False), (0.12, 0.1, None), (0.08, 0.1, None)],
)
def test_the_seeds_may_leave_it_open(mean, spread, expected):
    assert norms.near(norms.Fit(mean, spread, 4), 0.0) is expected


def test_outcomes():
    losses = {POST: (3.59, 3.61), POST_WARM: (5.59, 5.61), PRE: (float("inf"), 1.0), PRE_WARM: GOOD}
    result = made_up(losses=losses)
    low, high = TINY.rates
    assert norms.outcome(result, ("post", 0), low) == (pytest.approx(3.59), 0, 2)
    assert norms.outcome(result, ("post", 0), high) == (pytest.approx(3.61), 0, 0)
    assert norms.outcome(result, ("post", 4), low)[1:] == (0, 0)
    assert norms.outcome(result, ("post", 4), high)[1:] == (2, 0)
    assert norms.outcome(result, ("pre", 0), low)[1:] == (2, 0)
    assert norms.learnt_rates(result, ("pre", 0)) == [high]
    cells = norms.training_table(result).splitlines()[1].split("  ")
    assert [cell.strip() for cell in cells if cell][-2:] == ["2/2 diverged", "1.00 2/2"]


# What is printed


def test_the_report(result):
    text = norms.report(result)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100
    layers = [line for line in lines if line.split()[:1] and line.split()[0].isdigit()
              and len(line.split()) == 7]  # fmt: skip
    assert len(layers) == max(TINY.depths)  # each layer of the deepest stacks
    assert sum("2/2 diverged" in line for line in lines) == 1  # the row of the absurd rate
    assert "(the paper: above all Adam)" in " ".join(text.split())
    for claim in norms.start_claims(result) + norms.training_claims(result):
        assert text.count(claim.claim.split()[1]) >= 1
    verdicts = [line.split()[-1] for line in lines[lines.index(lines[-1]) - 60 :] if line.split()]
    assert {"agrees", "DIFFERS"} <= set(verdicts)


def test_main_runs_the_setting_it_is_asked_for(monkeypatch, capsys):
    seen = []

    def measure(setting):
        seen.append(setting)
        return made_up()

    monkeypatch.setattr(norms, "measure", measure)
    assert norms.main([]) == 0
    assert norms.main(["--quick", "--seed", "3", "--train-depth", "2"]) == 0
    assert seen[0] == norms.FULL
    assert seen[1] == dataclasses.replace(norms.QUICK, seed=3, train_depth=2)
    assert "THE CLAIMS" in capsys.readouterr().out
    assert {2, 24} <= set(norms.FULL.depths)
    assert norms.FULL.seeds >= 5


def test_measure_is_deterministic(result):
    small = dataclasses.replace(TINY, depths=(1, 2), seeds=2, updates=2, train_seeds=1)
    first, second = norms.report(norms.measure(small)), norms.report(norms.measure(small))
    assert first == second
    assert norms.report(norms.measure(dataclasses.replace(small, seed=1))) != first


def test_nothing_on_stderr_without_a_terminal(capsys):
    norms.measure(dataclasses.replace(TINY, depths=(1, 2), seeds=1, updates=1, train_seeds=1))
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("arguments", [["--train-depth", "0"], ["--seed", "-1"], ["--seed", "x"]])
def test_bad_arguments(arguments, capsys):
    with pytest.raises(SystemExit) as error:
        norms.main(arguments)
    assert error.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_a_picture_without_matplotlib_is_refused_before_the_work(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(norms, "measure", lambda setting: pytest.fail("measured"))
    with pytest.raises(SystemExit) as error:
        norms.main(["--picture", "x.png"])
    assert error.value.code == 2
    assert "pip install matplotlib" in capsys.readouterr().err


@pytest.mark.matplotlib
def test_the_picture(result, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(norms, "measure", lambda setting: result)
    path = tmp_path / "norms.png"
    assert norms.main(["--picture", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert str(path) in capsys.readouterr().out
