"""A batch shared out among processes: as if it were one, whatever happens to them; and threads."""

import copy
import gc
import mmap
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from helpers import (
    assert_close,
    assert_equal,
    parameter_gradients,
    parameters_with_gradients,
    randomise,
)

import npdecoder
from npdecoder import (
    SGD,
    AdamW,
    CrossEntropy,
    Decoder,
    LanguageModel,
    LanguageModelConfig,
    Linear,
    Parameter,
    Transformer,
    TransformerConfig,
    causal_mask,
    cli,
    runs,
)
from npdecoder import replicas as replicas_module
from npdecoder import training as training_module
from npdecoder.checkpoint import load_checkpoint
from npdecoder.core import for_each
from npdecoder.optim import Optimizer
from npdecoder.replicas import Replicas, choose_threads, forward_backward
from npdecoder.runs import Run
from npdecoder.text import Batch, make_batch, windows
from npdecoder.training import BatchStream, evaluate, train, train_step

PAD, BOS, EOS, V = 0, 1, 2, 11
WORK = '''
import os, time, warnings
import numpy as np

class Odd(Exception):
    def __init__(self, one, two):
        super().__init__(f"odd: {one} and {two}")

def overflow(model, x):
    return float(np.exp(np.float32(x)))

def warn(model, text):
    warnings.warn(text, UserWarning)
    return text

def sleep(model, seconds):
    time.sleep(seconds)
    return seconds

def call(model, x):
    return model(x)

def fail(model, kind):
    if kind == "odd":
        raise Odd(1, 2)
    if kind == "function":
        return lambda: None
    raise {"key": KeyError, "memory": MemoryError}[kind](kind)
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a module that the processes can import: quicker than this one, which imports pytest."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "work.py").write_text(WORK, "utf-8")
    return folder


@pytest.fixture(scope="module")
def work(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        import work

        yield work


@pytest.fixture(scope="module")
def pair(work):
    """Two replicas of a Linear(3, 5), which every test leaves as they were."""
    with Replicas(Linear(3, 5, rng=0, dtype=np.float64), 2) as replicas:
        yield replicas


def rows(replicas, *factors):
    """Run the Linear forward and backward, on one share for each factor -> dx of each."""
    x, dy = np.ones((2, 3)), np.ones((2, 5))
    return replicas.run(forward_backward, [((f * x,), {}, f * dy) for f in factors])


def processes(replicas):
    return [worker.process for worker in replicas._workers]


def assert_ended(processes):
    """They were waited for: no zombies."""
    assert processes
    for process in processes:
        assert process.returncode is not None
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)


def open_files():
    if os.path.exists("/proc/self/fd"):
        return len(os.listdir("/proc/self/fd"))
    return sum(is_open(fd) for fd in range(1024))


def is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


# The gradients


def transformer(**options):
    sizes = {"d_model": 8, "num_heads": 2, "num_encoder_layers": 1, "num_decoder_layers": 1}
    config = TransformerConfig(V, V, **{**sizes, "pad_id": PAD, "max_len": 12, **options})
    return Transformer(config, 3, dtype=np.float64)


def reversal(count, seed=0):
    """Pairs whose target is the source read backwards, the longest first."""
    rng = np.random.default_rng(seed)
    sources = [rng.integers(3, V, 1 + n * 7 // count).tolist() for n in reversed(range(count))]
    return make_batch([(source, source[::-1]) for source in sources], PAD, BOS, EOS)


def test_shares_have_the_gradients_of_one_process():
    """With padding, unequally many targets in the shares, ties, and two batches that add up."""
    batches = [reversal(7, seed=1), reversal(4, seed=2)]
    criterion = CrossEntropy(PAD, label_smoothing=0.1)
    halves = [np.count_nonzero(part) for part in np.array_split(batches[0].targets != PAD, 2)]
    assert halves[0] > 1.5 * halves[1]

    def step(threads):
        model = randomise(transformer(tie_embeddings="all"), np.random.default_rng(4))
        model.unused = Linear(2, 3, dtype=np.float64)
        model.source_embedding.W.grad += 7.0  # left over
        with Replicas(model, threads) as replicas:
            optimizer = SGD(model.parameters(), 0.0)
            result = train_step(replicas, criterion, optimizer, batches)
        return *result, parameter_gradients(model)

    loss, count, gradients = step(2)
    expected_loss, expected_count, expected = step(1)
    assert count == expected_count
    assert_close(loss, expected_loss)
    assert_close(gradients, expected)
    assert not gradients["unused.W"].any()
    assert np.mean([g.any() for g in gradients.values()]) > 0.8


def test_results_are_in_the_order_of_the_shares_and_gradients_are_replaced_or_added():
    """Of a stack; x is so large that it goes through the shared memory, memory is not."""
    rng = np.random.default_rng(5)
    model = Decoder(2, 8, 2, attention_bias=True, rng=0, dtype=np.float64)
    randomise(model, rng)
    T = 101
    x, memory, dy = (rng.standard_normal((5, n, 8)) for n in (T, 3, T))
    for array in (x, memory, dy):
        array.flags.writeable = False
    options = {"target_mask": causal_mask(T)}
    assert x[:2].nbytes < replicas_module.SMALL < x[:3].nbytes

    def shares(*cuts):
        return [((x[cut], memory[cut]), options, dy[cut]) for cut in cuts]

    expected = forward_backward(model, (x, memory), options, dy)
    gradients = parameter_gradients(model)
    with Replicas(model, 3) as replicas:
        found = replicas.run(forward_backward, shares(slice(3), slice(3, 5)))
        assert [part[0].shape for part in found] == [(3, T, 8), (2, T, 8)]
        assert_close(tuple(np.concatenate(parts) for parts in zip(*found)), expected)
        assert_close(parameter_gradients(model), gradients)

        again = replicas.run(forward_backward, shares(slice(3), slice(3, 5)), add=True)
        assert_equal(again, found)
        added = {name: 2.0 * grad for name, grad in gradients.items()}
        assert_close(parameter_gradients(model), added)

        replicas.run(forward_backward, shares(slice(2, 5)))
        assert_close(tuple(np.concatenate(parts) for parts in zip(*found)), expected)  # still
        replaced = parameter_gradients(model)
        model.zero_grad()
        forward_backward(model, (x[2:], memory[2:]), options, dy[2:])
        assert_close(replaced, parameter_gradients(model))


def test_what_no_share_has_added_to_is_zero_or_as_it_was(pair, work):
    rows(pair, 1.0, 2.0)
    gradients = parameter_gradients(pair.model)
    pair.run(work.sleep, [(0.0,), (0.0,)], add=True)
    assert_equal(*(list(g.values()) for g in (parameter_gradients(pair.model), gradients)))
    pair.run(work.sleep, [(0.0,), (0.0,)])
    assert not any(grad.any() for grad in parameter_gradients(pair.model).values())


@pytest.mark.parametrize("threads", [1, 2])
def test_map_leaves_gradients_as_they_are(threads, work):
    """Also those that are to be read as zeros, and with weights that have changed."""
    model = Linear(3, 5, rng=0, dtype=np.float64)
    with Replicas(model, threads) as replicas:
        rows(replicas, *range(1, 1 + threads))
        gradients = parameter_gradients(model)
        model.W.value[...] = 0.5
        x = np.ones((4, 3))
        found = replicas.map(work.call, [(n * x,) for n in range(threads)])
        assert_equal(found, [n * x @ model.W.value for n in range(threads)])
        assert_equal(list(parameter_gradients(model).values()), list(gradients.values()))
        model.W.forget_grad()
        replicas.map(work.call, [(x,)])
        assert not model.W.grad.any()


def test_there_are_at_most_as_many_shares_as_threads(pair, work):
    for count in (0, 3):
        with pytest.raises(ValueError, match=f"{count} shares, expected 1 to 2"):
            rows(pair, *range(count))
        with pytest.raises(ValueError, match=f"{count} shares, expected 1 to 2"):
            pair.map(work.sleep, [(0.0,)] * count)
    assert_equal(rows(pair, 1.0, 2.0)[1], 2.0 * rows(pair, 1.0)[0])


@pytest.mark.parametrize(("threads", "error"), [(0, ValueError), (True, TypeError)])
def test_a_number_of_threads_that_is_none(threads, error):
    with pytest.raises(error, match="threads"):
        Replicas(Linear(2, 3), threads)


# The weights


def test_a_value_moves_if_nobody_holds_it_and_views_stay_true():
    for hold in (lambda p: None, lambda p: p.value, lambda p: p.value[1:], lambda p: p.value.T):
        p = Parameter(np.arange(6.0).reshape(2, 3))
        held, array = hold(p), np.full((2, 3), 7.0)
        p.move_value(array)
        assert (p.value is array) == (held is None)
        assert_equal(p.value, np.arange(6.0).reshape(2, 3))
        p.value -= 1.0
        assert held is None or np.shares_memory(held, p.value)


def test_the_processes_see_every_change_of_the_weights():
    """Also where a caller holds the arrays, and of a dtype that came back."""
    model = Linear(3, 5, rng=0, dtype=np.float64)
    value, grad = model.W.value, model.W.grad
    with Replicas(model, 2) as replicas:
        seen = [rows(replicas, 1.0, 2.0)[0]]
        SGD(model.parameters(), 0.1).step()
        assert model.W.value is value
        assert model.W.grad is grad
        seen.append(rows(replicas, 1.0, 2.0)[0])
        model.load_state_dict({"W": np.full((3, 5), 0.5), "b": np.ones(5)})
        seen.append(rows(replicas, 1.0, 2.0)[0])
        assert_equal(seen[2], np.full((2, 3), 2.5))
        assert not (seen[0] == seen[1]).any()

        model.astype(np.float32)
        with pytest.raises(ValueError, match="model has now float32, its replicas float64"):
            rows(replicas, 1.0, 2.0)
        model.astype(np.float64)
        model.b.value = model.b.value + 1.0
        assert_equal(rows(replicas, 1.0, 2.0)[0], seen[2])


def test_a_process_that_is_forked_later_has_weights_and_gradients_of_its_own():
    model = Linear(3, 5, rng=0, dtype=np.float64)
    with Replicas(model, 2) as replicas:
        rows(replicas, 1.0, 2.0)
        before = model.W.value.copy(), model.W.grad.copy()
        assert before[1].any()
    child = os.fork()
    if not child:
        model.W.value[...] = model.W.grad[...] = 7.0
        os._exit(0)
    os.waitpid(child, 0)
    assert_equal((model.W.value, model.W.grad), before)


def test_the_gradients_of_one_process_are_where_those_of_all_are_added_up():
    """Without a copy, while nobody holds an array of the model's."""
    model = Linear(3, 5, rng=0, dtype=np.float64)
    with Replicas(model, 2) as replicas:
        rows(replicas, 1.0, 2.0)
        grad = model.W.grad
        assert grad is replicas._workers[0].gradients[0]
        assert_equal(grad, np.full((3, 5), 2.0 * (1.0 + 4.0)))


# Training


def fit(threads, steps=(6,), dropout=0.2):
    """Losses and weights of a small language model after a training in parts."""
    config = LanguageModelConfig(V, d_model=8, num_heads=2, num_layers=1, max_len=6,
                                 dropout=dropout)  # fmt: skip
    model = LanguageModel(config, 3)
    ids = np.random.default_rng(0).integers(0, V, 80)
    optimizer = AdamW(model.parameters(), 0.01)
    stream = BatchStream(lambda rng: windows(ids, 6, 3, rng), np.random.default_rng(1))
    dropout_rng = np.random.default_rng(2)
    losses = []
    for end in steps:
        losses += train(model, CrossEntropy(), optimizer, stream, end, max_norm=1.0,
                        rng=dropout_rng, accumulate=2, threads=threads)  # fmt: skip
    return losses, list(model.state_dict().values())


def test_a_training_in_two_processes_repeats_itself_also_in_parts():
    losses, values = fit(2)
    assert len(set(losses)) == 6
    found = fit(2, steps=(4, 6))
    assert found[0] == losses
    assert_equal(found[1], values)


def test_without_dropout_two_processes_train_like_one():
    losses, values = fit(1, dropout=0.0)
    found = fit(2, dropout=0.0)
    np.testing.assert_allclose(found[0], losses, rtol=1e-5)
    for one, other in zip(found[1], values):
        np.testing.assert_allclose(one, other, atol=1e-4)


@pytest.fixture
def _text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("the cat sat on\tthe mat\nthe rat ate\tit all\n" * 12, "utf-8")


SIZES = ["--d-model", "8", "--num-heads", "2", "--num-layers", "1"]


@pytest.mark.parametrize("count", [0, 1, 5])
def test_evaluation_is_shared_out(count, monkeypatch):
    """With padding, and unequally many targets in the shares; the gradients stay."""
    model, criterion = transformer(), CrossEntropy(PAD)
    batches = [reversal(count, seed=1), reversal(4, seed=2)]
    expected = evaluate(model, criterion, batches)
    numbers = []
    with Replicas(model, 2) as replicas:
        run = replicas.map
        monkeypatch.setattr(replicas, "map", lambda work, shares: (
            numbers.append(len(shares)) or run(work, shares)
        ))
        train_step(replicas, criterion, SGD(model.parameters(), 0.0), reversal(3))
        gradients = parameter_gradients(model)
        assert_close(np.float64(evaluate(replicas, criterion, batches)), np.float64(expected))
        assert_equal(list(parameter_gradients(model).values()), list(gradients.values()))
        with pytest.raises(TypeError, match="ids"):
            evaluate(replicas, criterion, [Batch((np.ones((3, 2)), np.ones((3, 2))), np.ones(3))])
    assert numbers == [min(max(count, 1), 2), 2, 2]


def test_a_training_opens_the_replicas_that_it_is_to_use_and_closes_them():
    model = transformer()
    optimizer = SGD(model.parameters(), 0.1)
    batches = iter([reversal(5, seed=n) for n in range(9)])
    opened = []

    def replicas():
        opened.append(Replicas(model, 2))
        return opened[-1]

    train(model, CrossEntropy(PAD), optimizer, batches, 3, replicas=replicas,
          validate=lambda: float(opened[0].threads), validate_every=1)  # fmt: skip
    train(model, CrossEntropy(PAD), optimizer, batches, 3, replicas=replicas)  # at its end
    assert [one.threads for one in opened] == [1]
    with pytest.raises(ValueError, match="criterion has parameters of its own"):
        train(model, Scaled(), optimizer, batches, 4, replicas=replicas)
    assert opened[1].threads == 1
    assert optimizer.steps == 3


@pytest.mark.usefixtures("_text")
def test_a_signal_while_the_processes_begin_is_looked_after(monkeypatch):
    """An update is made and saved, as with a signal at any other time."""

    def stopped(model, threads, batch_size, length):
        signal.raise_signal(signal.SIGTERM)
        return Replicas(model)

    monkeypatch.setattr(runs, "open_replicas", stopped)
    with pytest.raises(SystemExit) as stop:
        cli.main(["train-lm", "text.txt", "--out", "m.npz", *SIZES, "--steps", "9"])
    assert stop.value.code == 128 + signal.SIGTERM
    assert load_checkpoint("m.npz").optimizer.steps == 1


@pytest.mark.usefixtures("_text")
@pytest.mark.parametrize("command", ["train", "train-lm"])
def test_both_commands_share_out_their_validation(command, monkeypatch, capsys):
    """Of a run that trains; one that is at its end starts no process for it."""
    opened, shared = [], []
    begin, run = Replicas.__init__, Replicas.map
    monkeypatch.setattr(Replicas, "__init__", lambda self, model, threads=1: (
        opened.append(threads) or begin(self, model, threads)
    ))
    monkeypatch.setattr(Replicas, "map", lambda self, work, shares: (
        shared.append(self.threads) or run(self, work, shares)
    ))
    start = [command, "text.txt", "--out", "m.npz", *SIZES, "--steps", "3", "--held-out", "0.4"]
    assert cli.main([*start, "--threads", "2", "--validate-every", "2"]) == 0
    assert set(shared) == {2}
    validations = len(shared)
    text = capsys.readouterr().out
    opened.clear(), shared.clear()
    assert cli.main([*start, "--resume", "--threads", "2"]) == 0
    assert (opened, shared) == ([], [])
    assert validations >= 2
    losses = [next(line for line in out.splitlines() if line.startswith("validation loss"))
              for out in (text, capsys.readouterr().out)]
    assert losses[0] == losses[1]


@pytest.mark.usefixtures("_text")
@pytest.mark.parametrize("command", ["train", "train-lm"])
def test_both_commands_hand_on_how_many_threads(command, monkeypatch, capsys):
    found = []

    def opened(model, threads, batch_size, length):
        found.append((threads, batch_size, length))
        return Replicas(model)

    monkeypatch.setattr(runs, "open_replicas", opened)
    monkeypatch.setattr(runs, "train", lambda *args, replicas, **keywords: replicas())
    start = [command, "text.txt", "--out", "m.npz", *SIZES, "--batch-size", "6"]
    for options in [], ["--threads", "3"]:
        cli.main([*start, *options])
    length = 64 if command == "train-lm" else 3  # of the context, or of 2 words and EOS
    assert found == [(None, 6, length), (3, 6, length)]
    with pytest.raises(SystemExit):
        cli.main([*start, "--threads", "0"])
    assert "--threads" in capsys.readouterr().err


@pytest.mark.usefixtures("_text")
def test_a_command_with_threads_that_is_resumed_is_the_undisturbed(monkeypatch):
    save = Run.save

    def save_and_keep(run):
        save(run)
        shutil.copy(run.out, f"after {run.optimizer.steps}.npz")

    monkeypatch.setattr(Run, "save", save_and_keep)
    options = [*SIZES, "--dropout", "0.2", "--batch-size", "5", "--steps", "4", "--save-every", "3"]
    assert cli.main(["train-lm", "text.txt", "--out", "all.npz", *options, "--threads", "2"]) == 0
    resumed = ["train-lm", "text.txt", "--out", "after 3.npz", "--resume", "--threads", "2"]
    assert cli.main(resumed) == 0
    whole, parts = load_checkpoint("all.npz"), load_checkpoint("after 3.npz")
    assert_equal(*(list(c.model.state_dict().values()) for c in (whole, parts)))
    assert whole.optimizer.steps == parts.optimizer.steps == 4


class Scaled(CrossEntropy):
    """Logits times a factor that is learned too."""

    def __init__(self):
        super().__init__()
        self.factor = Parameter(np.ones(1))

    def forward(self, logits, targets):
        loss, ctx = super().forward(self.factor.value * logits, targets)
        return loss, Context(logits, ctx)

    def backward(self, ctx, dloss=1.0):
        dlogits = super().backward(ctx.ctx, dloss)
        self.factor.grad += (dlogits * ctx.logits).sum()
        return self.factor.value * dlogits


class Context:
    def __init__(self, logits, ctx):
        self.logits, self.ctx, self.count = logits, ctx, ctx.count


def test_what_a_criterion_learns_begins_each_step_with_no_gradient():
    model, criterion = transformer(), Scaled()
    optimizer = SGD([*model.parameters(), criterion.factor], 0.0)
    seen = []
    for _ in range(2):
        train_step(model, criterion, optimizer, reversal(3))
        seen.append(criterion.factor.grad.copy())
    assert seen[0].any()
    assert_equal(*seen)


def test_a_criterion_that_learns_keeps_a_training_in_one_process(monkeypatch):
    """In the others it would be a copy."""
    monkeypatch.setattr(training_module, "choose_threads", lambda *args: 2)
    model, criterion = transformer(), Scaled()
    optimizer = SGD([*model.parameters(), criterion.factor], 0.1)
    with pytest.raises(ValueError, match="criterion has parameters of its own: use threads=1"):
        train(model, criterion, optimizer, iter([reversal(3)]), 1, threads=2)
    assert criterion.factor.value == 1.0
    train(model, criterion, optimizer, iter([reversal(3)]), 1)
    assert criterion.factor.value != 1.0


# Models and circumstances in which there are no other processes


def local_model():
    class Local(Linear):
        def forward(self, x, rng=None):
            return super().forward(np.eye(3, dtype=np.float32)[x])

        def backward(self, ctx, dy):
            super().backward(ctx, dy)
            return ()

    return Local(3, 3, rng=0)


def with_a_lock():
    model = Linear(3, 3, rng=0)
    model.lock = threading.Lock()
    return model


class InMain(Linear):
    """As if it were of a script."""


InMain.__module__, InMain.__qualname__ = "__main__", "InMain"


def in_main():
    return InMain(3, 3, rng=0)


@pytest.mark.parametrize("make", [local_model, with_a_lock, in_main])
def test_a_model_that_cannot_be_made_anew_is_a_clear_error(make, monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "InMain", InMain, raising=False)
    gc.collect()
    before = open_files()
    model = make()
    with pytest.raises(ValueError, match=f"{type(model).__name__} cannot be made anew in another"):
        Replicas(model, 2)
    gc.collect()
    assert open_files() == before


@pytest.mark.parametrize("executable", ["", None])
def test_where_python_does_not_know_itself_threads_are_refused(executable, monkeypatch):
    """As where it is embedded in another program."""
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(OSError, match="no Python to start another process with: use threads=1"):
        Replicas(Linear(3, 5), 2)


def test_memory_is_a_file_without_a_name_where_there_is_no_other(monkeypatch):
    """As on macOS."""
    monkeypatch.delattr(os, "memfd_create", raising=False)
    with Replicas(Linear(3, 5, rng=0, dtype=np.float64), 2) as replicas:
        one, two = rows(replicas, 1.0, 2.0)
    assert_equal(two, 2.0 * one)


Popen = subprocess.Popen


def ending_at_once(*args, **keywords):
    return Popen([sys.executable, "-c", ""], stdin=subprocess.DEVNULL)


def no_process(*args, **keywords):
    raise OSError("no more processes")


@pytest.mark.parametrize("start", [None, ending_at_once, no_process])
def test_where_nobody_asked_for_threads_a_training_does_without(start, monkeypatch):
    """The model is of a class that cannot be imported, or a process does not even begin."""
    monkeypatch.setattr(training_module, "choose_threads", lambda *args: 2)
    model = local_model() if start is None else LanguageModel(
        LanguageModelConfig(3, d_model=4, num_heads=1, num_layers=1), 0
    )
    if start is not None:
        monkeypatch.setattr(replicas_module.subprocess, "Popen", start)
    batch = Batch((np.array([[1, 2], [0, 1]]),), np.array([[2, 0], [1, 2]]))
    options = {"criterion": CrossEntropy(), "steps": 2, "batches": iter([batch] * 9)}
    optimizer = SGD(model.parameters(), 0.1)
    losses = train(model, optimizer=optimizer, **options)
    assert losses[1] < losses[0]
    with pytest.raises((ValueError, OSError)):
        train(model, optimizer=SGD(model.parameters(), 0.1), threads=2, **options)


@pytest.mark.usefixtures("_text")
@pytest.mark.parametrize("command", ["train", "train-lm"])
def test_where_there_are_no_other_processes_both_commands_train_in_one(
    command, monkeypatch, capsys
):
    """Unless they were asked for."""
    monkeypatch.setattr(training_module, "choose_threads", lambda *args: 2)
    monkeypatch.setattr(replicas_module.subprocess, "Popen", no_process)
    start = [command, "text.txt", "--out", "m.npz", *SIZES, "--steps", "2", "--force"]
    assert cli.main(start) == 0
    assert cli.main([*start, "--threads", "2"]) == 2
    assert capsys.readouterr().err.endswith("npdecoder: error: no more processes\n")


SCRIPT = """
import numpy as np
from npdecoder import Linear
from npdecoder.replicas import Replicas, forward_backward
with Replicas(Linear(3, 5, rng=0), 2) as replicas:
    x, dy = np.ones((2, 3), np.float32), np.ones((2, 5), np.float32)
    a, b = replicas.run(forward_backward, [((x,), {}, dy), ((x,), {}, 2 * dy)])
assert (2 * a == b).all()
if sys.stdin is not None:
    print(sys.stdin.read(), end="")
"""


@pytest.mark.parametrize(
    ("before", "shell"),
    [
        ("", 'echo "raise SystemExit(1)" > random.py; exec "$0" "$1" <&-'),
        ("sys.path += [__import__('pathlib').Path('x'), 3, '', 'a:b']",
         'export PYTHONDEVMODE=1 PYTHONWARNINGS=error; exec "$0" "$1"'),
    ],
    ids=["stdin closed, and a folder with a random.py", "odd sys.path and flags"],
)  # fmt: skip
def test_the_surroundings_of_a_process_are_those_of_this_one(before, shell, tmp_path):
    """Standard input is for this process alone; the current folder is not where modules are."""
    here = tmp_path / "here"
    here.mkdir()
    script = tmp_path / "script.py"
    script.write_text(f"import sys\n{before}\n{SCRIPT}", "utf-8")
    root = str(Path(npdecoder.__file__).parents[1])
    result = subprocess.run(
        ["sh", "-c", shell, sys.executable, script], cwd=here, capture_output=True, timeout=60,
        env={**os.environ, "PYTHONPATH": root}, input=b"what it reads\n", check=False,
    )  # fmt: skip
    assert result.stdout == (b"" if "<&-" in shell else b"what it reads\n"), result.stderr.decode()
    assert (result.returncode, result.stderr) == (0, b"")


# What goes wrong in a share


@pytest.mark.parametrize(("kind", "error"), [("key", KeyError), ("memory", MemoryError)])
def test_an_error_is_raised_here_and_the_next_run_works(pair, work, kind, error):
    with pytest.raises(error, match=kind):
        pair.run(work.fail, [(kind,), (kind,)])
    assert len(rows(pair, 1.0, 2.0)) == 2


@pytest.mark.parametrize("kind", ["odd", "function"])
def test_what_cannot_be_sent_back_is_an_error_that_says_so(pair, work, kind, capfd):
    with pytest.raises(RuntimeError, match=r"odd: 1 and 2|pickle"):
        pair.run(work.fail, [(kind,), (kind,)])
    assert len(rows(pair, 1.0, 2.0)) == 2
    assert capfd.readouterr() == ("", "")


def test_work_that_cannot_be_sent_leaves_the_processes_alone(pair):
    started = processes(pair)
    with pytest.raises((AttributeError, pickle.PicklingError)):
        pair.run(lambda model: None, [(), ()])
    assert processes(pair) == started
    assert len(rows(pair, 1.0, 2.0)) == 2


def test_work_that_cannot_be_sent_leaves_the_gradients_alone(pair):
    rows(pair, 1.0, 2.0)
    before = parameter_gradients(pair.model)
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
        pair.run(lambda model: None, [(), ()], add=True)
    assert_equal(*(list(g.values()) for g in (parameter_gradients(pair.model), before)))
    assert before["W"].any()


def test_a_warning_there_is_a_warning_here(pair, work):
    """Shown as often as the filters say, and with the error state of this thread."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert pair.run(work.warn, [("one",), ("two",)]) == ["one", "two"]
    assert [(w.category, str(w.message)) for w in caught] == [
        (UserWarning, "one"), (UserWarning, "two")
    ]  # fmt: skip
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            pair.run(work.warn, [("often",), ("often",)])
    assert len(caught) == 1
    assert Path(caught[0].filename).name == "work.py"

    with np.errstate(over="ignore"):
        assert pair.run(work.overflow, [(0.0,), (1e9,)]) == [1.0, np.inf]
    with np.errstate(over="raise"), pytest.raises(FloatingPointError):
        pair.run(work.overflow, [(0.0,), (1e9,)])


def test_a_warning_that_is_an_error_leaves_the_processes_alone(pair, work):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="one"):
            pair.run(work.warn, [("one",), ("two",)])
    assert len(rows(pair, 1.0, 2.0)) == 2


class UnknownThere:
    """Pickled here; there its module lacks it."""

    def __reduce__(self):
        return getattr, (npdecoder.Linear, "no_such_attribute")


class InThread:
    """In the place of a process: a thread of this one, with copies of the files."""

    def __init__(self, command, pass_fds, **options):
        *connections, self.memory = map(os.dup, pass_fds)
        sys.argv = ["-c", *map(str, (*connections, self.memory)), *command[-2:]]
        self.thread = threading.Thread(target=replicas_module.serve, daemon=True)
        self.thread.start()

    def kill(self):
        """It ends when the connection is closed."""

    def wait(self):
        self.thread.join()
        os.close(self.memory)


def test_the_other_side(work, monkeypatch):
    """Each message has one answer, whatever it is, and the end of messages is the end."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(replicas_module.subprocess, "Popen", InThread)
    monkeypatch.delattr(os, "SCHED_BATCH", raising=False)  # which would be for this process
    layer = Linear(3, 5, rng=0, dtype=np.float64)
    places = replicas_module._places(layer.parameters())
    size, box = replicas_module._size(places), replicas_module.BOX
    with replicas_module._memory_file() as file:
        file.truncate(2 * size + 2 * box)
        memory = mmap.mmap(file.fileno(), 0)
        gradients = [place.view(memory, size) for place in places]
        worker = replicas_module._Worker(file.fileno(), memory, size, 2 * size, gradients)

    def answer(*message):
        worker.send(worker.pickled(message))
        assert worker.from_there.poll(60)
        return worker.receive()

    with closing(worker):
        ids = {id(p): place for p, place in zip(layer.parameters(), places)}
        assert answer(copy.deepcopy(layer, ids), places) == (None, [])
        for place, parameter in zip(places, layer.parameters()):
            place.view(memory, 0)[...] = parameter.value
        x, dy = np.ones((2, 3)), np.full((2, 5), 3.0)
        for _ in range(2):  # each run begins without gradients
            (dx, written), notes = answer(forward_backward, ((x,), {}, dy), np.geterr())
            assert_close(dx, dy @ layer.W.value.T)
            assert_equal(gradients, [x.T @ dy, dy.sum(axis=0)])
            assert (written, notes) == ([True, True], [])

        (result, written), [note] = answer(work.warn, ("look",), np.geterr())
        assert (result, written, note[:2]) == ("look", [False, False], ("look", UserWarning))
        error, notes = answer(work.fail, ("key",), np.geterr())
        assert (type(error), error.args, notes) == (KeyError, ("key",), [])
        for kind, text in ("odd", "Odd: odd: 1 and 2"), ("function", "a result"):
            error, notes = answer(work.fail, (kind,), np.geterr())
            assert type(error) is RuntimeError
            assert str(error).startswith(f"{text} (not to be pickled: ")
        error, _ = answer(UnknownThere(), (), np.geterr())
        assert type(error) is AttributeError
        assert "no_such_attribute" in str(error)
        assert worker.process.thread.is_alive()
    assert not worker.process.thread.is_alive()


# The end of the processes


def test_a_process_that_was_killed_is_a_clear_error():
    replicas = Replicas(Linear(3, 5, rng=0, dtype=np.float64), 2)
    started = processes(replicas)
    os.kill(started[1].pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="a process that trains along has ended"):
        rows(replicas, 1.0, 2.0)
    assert_ended(started)


def test_nothing_is_left_of_them(work):
    """After close, a with statement, garbage collection, and Ctrl-C in the midst of a run."""
    model = Linear(3, 5, rng=0, dtype=np.float64)
    gc.collect()
    before = open_files()

    closed = Replicas(model, 2)
    started = processes(closed)
    closed.close()
    closed.close()
    assert_ended(started)
    assert len(rows(closed, 1.0)) == 1  # in this process
    assert open_files() == before

    forgotten = Replicas(model, 2)
    started = processes(forgotten)
    del forgotten
    gc.collect()
    assert_ended(started)

    with Replicas(model, 2) as interrupted:
        started = processes(interrupted)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(replicas_module._Worker, "receive", raise_interrupt)
            with pytest.raises(KeyboardInterrupt):
                rows(interrupted, 1.0, 2.0)
        assert_ended(started)
    assert open_files() == before


def raise_interrupt(worker):
    raise KeyboardInterrupt


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT], ids=["killed", "Ctrl-C"])
def test_they_end_with_this_process_and_say_nothing(ending, folder):
    """In the midst of their work. They hold its stderr: to the end of it is to the last of them."""
    code = """
import signal, sys
from npdecoder import Linear
from npdecoder.replicas import Replicas
import work
signal.signal(signal.SIGINT, signal.default_int_handler)
replicas = Replicas(Linear(3, 5, rng=0), 2)
print("begun", flush=True)
try:
    replicas.run(work.sleep, [(0.3,), (0.4,)])
except KeyboardInterrupt:
    sys.exit(130)
"""
    path = os.pathsep.join([str(Path(npdecoder.__file__).parents[1]), str(folder)])
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, **pipes
    ) as process:
        assert process.stdout.readline() == b"begun\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.15)
        process.send_signal(ending)
        _, err = process.communicate(timeout=60)
    assert process.returncode == (130 if ending == signal.SIGINT else -signal.SIGKILL)
    assert err == b""


# How many, and threads


def test_threads_are_as_many_as_the_work_is_worth(monkeypatch):
    monkeypatch.setattr(replicas_module, "num_cores", lambda: 4)
    model = Linear(100, 500, bias=False)  # of 50,000 parameters
    assert choose_threads(model, 9, 66) == 1
    assert choose_threads(model, 9, 67) == 2  # from 3e7 / 50,000 = 600 tokens on
    assert choose_threads(model, 9, 999) == 4
    assert choose_threads(model, 3, 999) == 3  # never more than sequences
    assert choose_threads(model, 1, 9999) == 1
    assert choose_threads(Linear(1000, 1000), 50, 2) == 1  # too few tokens for two
    assert choose_threads(model, 0, 0) == 1
    monkeypatch.setattr(replicas_module, "num_cores", lambda: 2)
    assert choose_threads(model, 99, 999) == 2
    monkeypatch.setattr(replicas_module.os, "name", "nt")
    assert choose_threads(model, 99, 999) == 1
    with pytest.raises(OSError, match="threads=1"):
        Replicas(model, 2)


LARGE_SHAPES = ((700, 300), (3, 5), (500, 500), (1,), (7, 11))


def large():
    return parameters_with_gradients(LARGE_SHAPES, 6)


@pytest.fixture
def _two_cores(monkeypatch):
    monkeypatch.setattr(npdecoder.core, "num_cores", lambda: 2)
    monkeypatch.setattr(npdecoder.core, "LARGE", 200_000)


@pytest.mark.usefixtures("_two_cores")
def test_each_parameter_is_done_once_and_in_several_threads():
    parameters, done = large(), []
    together = threading.Barrier(2, timeout=30)

    def do(n):
        done.append(n)
        if n in (0, 2):  # the large ones: each waits for the other
            together.wait()

    for_each(parameters, do)
    assert sorted(done) == [0, 1, 2, 3, 4]
    for_each(parameters[1:2], done.append)
    assert done[5:] == [0]


@pytest.mark.usefixtures("_two_cores")
def test_errors_and_error_states_are_those_of_one_thread():
    """Those with a function too."""
    parameters, calls = large(), []
    with np.errstate(over="ignore", divide="call", call=lambda *args: calls.append(args)):
        for_each(parameters, lambda n: np.exp(parameters[n].value + 1e9) / 0.0)
    with np.errstate(over="raise"), pytest.raises(FloatingPointError, match="overflow"):
        for_each(parameters, lambda n: np.exp(parameters[n].value + 1e9))
    for bad in range(len(parameters)):
        with pytest.raises(KeyError, match=str(bad)):
            for_each(parameters, lambda n, bad=bad: {}[n] if n == bad else None)


class Signs(Optimizer):
    """An optimizer of a user's own."""

    def __init__(self, parameters, lr, bad=None):
        super().__init__(parameters, lr)
        self.bad = bad

    def new_state(self, parameter, options):
        return {"count": np.zeros_like(parameter.value)}

    def update(self, parameter, state, options, lr):
        if parameter is self.bad:
            raise ArithmeticError("a bad parameter")
        state["count"] += 1.0
        parameter.value -= lr * np.sign(parameter.grad)


@pytest.mark.usefixtures("_two_cores")
@pytest.mark.parametrize(
    "make",
    [
        lambda p: Signs(p, 0.1),
        lambda p: SGD(p, 0.1, momentum=0.9, weight_decay=0.1),
        lambda p: AdamW(p, 0.1, weight_decay=0.1),
    ],
    ids=["own", "SGD", "AdamW"],
)
def test_a_step_in_threads_is_that_of_each_parameter_alone(make):
    together, alone = large(), large()
    assert sum(parameter.size for parameter in together) > 400_000
    one, each = make(together), [make([parameter]) for parameter in alone]
    for _ in range(2):
        one.step()
        for optimizer in each:
            optimizer.step()
    assert_equal([p.value for p in together], [p.value for p in alone])
    assert_equal([state for s in one._states for state in s.values()],
                 [state for o in each for s in o._states for state in s.values()])  # fmt: skip


@pytest.mark.usefixtures("_two_cores")
def test_an_error_of_an_optimizer_of_ones_own_comes_out():
    parameters = large()
    with pytest.raises(ArithmeticError, match="a bad parameter"):
        Signs(parameters, 0.1, bad=parameters[3]).step()


def test_a_thread_that_outlives_the_main_one_can_make_steps():
    code = """
import threading
from npdecoder import SGD, Linear
import npdecoder.core
npdecoder.core.num_cores = lambda: 2
optimizer = SGD(Linear(800, 800, rng=0).parameters(), 0.1)
def late():
    threading.main_thread().join()
    optimizer.step()
    print(optimizer.steps)
threading.Thread(target=late).start()
"""
    env = {**os.environ, "PYTHONPATH": str(Path(npdecoder.__file__).parents[1])}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, timeout=60,
                            check=False)  # fmt: skip
    assert (result.stdout, result.stderr) == (b"1\n", b"")
