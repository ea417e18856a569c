"""Threads: one model read by many at once, and replicas of it trained side by side.

What threads compute is what one after the other would, bit by bit. They are made to take turns
often, in the midst of everything, so that what they share by mistake has a chance to show.
"""

import copy
import random
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from helpers import (
    KINDS,
    PAD,
    assert_equal,
    decoding_model,
    ends,
    leaves,
    parameter_gradients,
)

from npdecoder import (
    SGD,
    CrossEntropy,
    DecodingState,
    beam_search,
    clip_grad_norm,
    generate,
    greedy_decode,
    next_token_probabilities,
    sample,
)
from npdecoder.text import Batch
from npdecoder.training import train_step

THREADS, REPETITIONS = 8, 20


@pytest.fixture(autouse=True)
def _threads_take_turns_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(*calls):
    """The results of calls, each in a thread of its own, all begun together; or their exception."""
    start = threading.Barrier(len(calls), timeout=60)

    def begin(number, call):
        chance = random.Random(number).random

        def pause(frame, event, argument):
            """At one call or return in a hundred, of functions of NumPy too, others go on: by
            itself a thread may run for milliseconds on a busy machine."""
            if chance() < 0.01:
                time.sleep(1e-6)

        start.wait()
        sys.setprofile(pause)
        try:
            return call()
        finally:
            sys.setprofile(None)

    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(begin, number, call) for number, call in enumerate(calls)]
        return [future.result() for future in futures]


def test_an_exception_in_a_thread_is_raised():
    def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        at_once(int, fail, int)
    assert at_once(int, list) == [0, []]


# One model


def model_of(kind, seed=1, **options):
    other = {"num_layers": 1}
    if kind == "transformer":
        other = {"num_decoder_layers": 1, "cross_attention": "shared"}
    return decoding_model(kind, seed, dropout=0.3, positions="learned", **other, **options)


def inputs_of(kind, seed):
    """Of a batch with padding, another for each seed: sources and texts, or texts alone."""
    rng = np.random.default_rng(seed)
    sources, texts = rng.integers(1, 11, (3, 4)), rng.integers(1, 7, (3, 5))
    sources[seed % 3, 2:], texts[seed % 3, :3] = PAD, PAD
    return (texts,) if kind == "language model" else (sources, texts)


def arrays_of(ctx):
    return [value for value in leaves(ctx) if isinstance(value, np.ndarray)]


def use(model, kind, seed):
    """What a thread does with the model, each by inputs and generators of its own."""
    *source, texts = inputs = inputs_of(kind, seed)
    state = DecodingState(model, *source)
    read = [state.prompt(texts[:, :2]), state.extend(texts[:, 2:])]
    state.select([2, 0])
    read.append(state.extend([[3], [4]]))
    dropped, ctx = model.forward(*inputs, rng=np.random.default_rng(seed))
    options = {**ends(model), "max_new_tokens": 2, "temperature": 2.0, "top_p": 0.9, "seed": seed}
    said = sample(model, inputs[0], **options)
    return [model(*inputs), *read, dropped, *arrays_of(ctx)], said


def assert_same(found, expected):
    assert_equal(found[0], expected[0])
    assert found[1] == expected[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_used_by_eight_threads_says_what_it_says_alone(kind):
    """Forward with and without dropout, cached decoding, and seeded sampling."""
    expected = [use(model_of(kind), kind, seed) for seed in range(THREADS)]
    for _ in range(REPETITIONS):
        model = model_of(kind)  # nothing in it was called before: what it keeps is made in threads
        calls = [lambda seed=seed, model=model: use(model, kind, seed) for seed in range(THREADS)]
        for found, wanted in zip(at_once(*calls), expected):
            assert_same(found, wanted)
        assert all(p._grad is None for p in model.parameters()), "inference allocates no gradient"


def test_models_of_other_sizes_in_other_threads_do_not_meet():
    """Nothing is kept by a class or a module: no table of positions, mask, cache or search."""
    sizes = [{}, {"d_model": 18, "max_len": 8}, {"num_heads": 2}, {"pad_id": None}]

    def everything(model, kind):
        arrays, said = use(model, kind, 0)
        *_, texts = inputs = inputs_of(kind, 0)
        options = {**ends(model), "max_new_tokens": 2}
        beams = beam_search(model, inputs[0], **options, beam_size=2, n_best=2)
        if kind == "language model":
            beams += generate(model, texts[1], max_new_tokens=6)
        return arrays, [said, greedy_decode(model, inputs[0], **options), beams]

    def calls():
        models = [(model_of(kind, **options), kind) for kind in KINDS for options in sizes]
        return [lambda model=model, kind=kind: everything(model, kind) for model, kind in models]

    expected = [call() for call in calls()]
    for _ in range(2):
        for found, wanted in zip(at_once(*calls()), expected):
            assert_same(found, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_large_batches_in_threads_that_run_at_the_same_time(kind):
    """Of large arrays NumPy lets go of the interpreter: here threads do not only take turns."""
    rng = np.random.default_rng(0)
    model = model_of(kind, max_len=16)
    several = [rng.integers(0, 7, (1 if kind == "language model" else 2, 16, 16)) for _ in range(4)]

    def compute(inputs):
        logits, ctx = model.forward(*inputs, rng=np.random.default_rng(1))
        return [model(*inputs), logits, *arrays_of(ctx)]

    expected = [compute(inputs) for inputs in several]
    for _ in range(3):
        calls = [lambda inputs=inputs: compute(inputs) for inputs in several]
        for found, wanted in zip(at_once(*calls), expected):
            assert_equal(found, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_inference_goes_on_while_one_thread_computes_gradients(kind):
    """Gradients lie beside the weights: who only reads them is not disturbed, and does not."""
    model = model_of(kind)
    inputs = inputs_of(kind, 0)

    def gradients():
        model.zero_grad()
        logits, ctx = model.forward(*inputs, rng=np.random.default_rng(0))
        model.backward(ctx, np.ones_like(logits))
        return list(parameter_gradients(model).values())

    expected, alone = gradients(), [use(model, kind, seed) for seed in range(3)]
    for _ in range(3):
        calls = [lambda seed=seed: use(model, kind, seed) for seed in range(3)]
        found, *others = at_once(gradients, *calls)
        assert_equal(found, expected)
        for one, wanted in zip(others, alone):
            assert_same(one, wanted)


def test_models_made_in_threads_from_seeds_are_those_made_alone():
    def weights(seed):
        return [p.value for p in model_of("transformer", seed).parameters()]

    expected = [weights(seed) for seed in range(THREADS)]
    found = at_once(*(lambda seed=seed: weights(seed) for seed in range(THREADS)))
    for one, wanted in zip(found, expected):
        assert_equal(one, wanted)


def test_each_thread_keeps_its_own_error_state():
    """Rows that see nothing, 0/0 and exp(-1e6) are treated inside, whatever a thread has asked
    NumPy to do; and that is afterwards what it was. (Nothing is drawn: before NumPy 2 default_rng
    itself mixes up the error states of threads.)"""
    model = model_of("language model")
    model.decoder.layers[0].self_attention.W_q.W.value *= 1e6  # most weights are exp(-1e6)
    ids = np.array([[PAD, PAD, 3], [PAD, PAD, PAD], [4, PAD, 5]])

    def run(treatment):
        with np.errstate(all=treatment):
            before = np.geterr()
            logits, ctx = model.forward(ids)
            p = next_token_probabilities(logits[0, -1], temperature=1e-3, top_p=0.9)
            found = beam_search(model, [[3], [4]], beam_size=3, max_new_tokens=3, n_best=3)
            assert np.geterr() == before == dict.fromkeys(before, treatment)
        return [logits, p, *arrays_of(ctx)], found

    before, expected = np.geterr(), run("ignore")
    for _ in range(5):
        for found in at_once(*(lambda t=t: run(t) for t in ("raise", "ignore", "warn") * 2)):
            assert_same(found, expected)
    assert np.geterr() == before


def test_no_thread_draws_from_or_seeds_the_generator_of_numpy():
    """Models and samples have their own, however others use that of the module."""
    model = model_of("language model")
    state = np.random.get_state()  # noqa: NPY002  (it must not matter)
    expected = use(model, "language model", 0)
    assert_equal(list(np.random.get_state()[1]), list(state[1]))  # noqa: NPY002

    def reseed():
        for seed in range(300):
            np.random.seed(seed)  # noqa: NPY002
        return np.random.random(3)  # noqa: NPY002

    alone = reseed()
    found, drawn = at_once(lambda: use(model, "language model", 0), reseed)
    assert_same(found, expected)
    assert_equal(drawn, alone)


# Replicas: the weights' own arrays, and gradients of their own


def twin_of(parameter):
    twin = copy.copy(parameter)  # with the very same arrays
    twin._grad = None
    return twin


def replica_of(model):
    return copy.deepcopy(model, {id(p): twin_of(p) for p in model.parameters()})


def batches_of(kind, count=2):
    """Inputs of unequal sizes and lengths, and targets."""
    rng = np.random.default_rng(3)
    batches = []
    for i in range(count):
        *source, texts = (ids[: 3 - i] for ids in inputs_of(kind, i))
        targets = rng.integers(0, 7, texts.shape)
        batches.append(((*source, texts), targets))
    return batches


def add_gradients(model, batch, total, rng):
    """The share of the loss that the batch has of all, and its gradients into model."""
    inputs, targets = batch
    criterion = CrossEntropy(ignore_index=PAD, label_smoothing=0.1)
    logits, ctx = model.forward(*inputs, rng=rng)
    loss, loss_ctx = criterion.forward(logits, targets)
    model.backward(ctx, criterion.backward(loss_ctx, loss_ctx.count / total))
    return loss * loss_ctx.count / total


def update(model, replicas, batches, together, step):
    """One update of the model from the batches, one a replica -> the loss."""
    total = sum(np.count_nonzero(targets != PAD) for _, targets in batches)

    def part(i):
        replicas[i].zero_grad()
        return add_gradients(replicas[i], batches[i], total, np.random.default_rng((step, i)))

    calls = [lambda i=i: part(i) for i in range(len(batches))]
    loss = sum(at_once(*calls) if together else [call() for call in calls])
    model.zero_grad()
    for parameter, *own in zip(model.parameters(), *(r.parameters() for r in replicas)):
        for one in own:  # in this order, whoever was first
            parameter.grad += one.grad
    return loss


@pytest.mark.parametrize("tie", ["none", "target_output"])
@pytest.mark.parametrize("kind", KINDS)
def test_replicas_in_two_threads_give_the_gradients_of_one(kind, tie):
    """Bit by bit what the two would give one after the other, and to rounding what the model alone
    gives for both batches. The replicas are new each time: their gradients are allocated in the
    threads."""
    model, batches = model_of(kind, tie_embeddings=tie), batches_of(kind)
    loss = update(model, [replica_of(model) for _ in batches], batches, together=False, step=5)
    expected = parameter_gradients(model)
    assert all(grad.any() for name, grad in expected.items() if not name.endswith("W_k.b"))

    for _ in range(REPETITIONS):
        replicas = [replica_of(model) for _ in batches]
        assert update(model, replicas, batches, together=True, step=5) == loss
        found = parameter_gradients(model)
        assert_equal(list(found.values()), list(expected.values()))
        for mine, *own in zip(model.parameters(), *(r.parameters() for r in replicas)):
            assert all(p.value is mine.value and p.grad is not mine.grad for p in own)

    total = sum(np.count_nonzero(targets != PAD) for _, targets in batches)
    model.zero_grad()
    alone = [add_gradients(model, batch, total, np.random.default_rng((5, i)))
             for i, batch in enumerate(batches)]  # fmt: skip
    assert sum(alone) == loss
    for name, grad in parameter_gradients(model).items():
        np.testing.assert_allclose(grad, expected[name], rtol=0, atol=1e-13 * np.abs(grad).max())


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_of_replicas_in_threads_is_the_training_one_after_the_other(kind):
    """Weights that an update has changed are those of every replica at once."""

    def train(together):
        model = model_of(kind, tie_embeddings="target_output")
        optimizer = SGD(model.parameters(), 0.05, momentum=0.9)
        replicas, batches = [replica_of(model) for _ in range(2)], batches_of(kind)
        losses = []
        for step in range(5):
            losses.append(update(model, replicas, batches, together, step))
            clip_grad_norm(model.parameters(), 1.0)
            optimizer.step()
        assert_equal(replicas[1](*batches[0][0]), model(*batches[0][0]))
        return losses, [p.value for p in model.parameters()]

    losses, values = train(together=False)
    assert len(set(losses)) == 5
    for _ in range(3):
        found = train(together=True)
        assert found[0] == losses
        assert_equal(found[1], values)


def test_a_replica_has_the_ties_of_its_model():
    for kind in KINDS:
        model = model_of(kind, tie_embeddings="target_output")
        replica = replica_of(model)
        assert [name for name, _ in replica.named_parameters()] == [
            name for name, _ in model.named_parameters()
        ]
        embedding = replica.embedding if kind == "language model" else replica.target_embedding
        assert replica.output.W is embedding.W
        assert replica.output.W is not model.output.W


def test_training_in_threads_leaves_the_filters_of_warnings_alone():
    ids = inputs_of("language model", 0)[0]

    def train():
        model = model_of("language model")
        optimizer = SGD(model.parameters(), 0.01)
        for _ in range(20):
            train_step(model, CrossEntropy(), optimizer, Batch((ids,), ids))

    before = list(warnings.filters)
    at_once(train, train, train)
    assert warnings.filters == before
