"""How much memory the computations take at their peak, as tracemalloc sees it (NumPy tells it)."""

import os
import platform
import subprocess
import sys

import numpy as np
import pytest
from helpers import measured, walk

from npdecoder import (
    CrossEntropy,
    Decoder,
    Embedding,
    LanguageModel,
    LanguageModelConfig,
    ScaledDotProductAttention,
    causal_mask,
)
from npdecoder.layers.attention import PART

V = 50_257


def owner(array):
    """The array whose memory a view shows."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def ctx_bytes(ctx, *known):
    """Of the arrays that a context keeps alive, each once, but for those in known."""
    arrays = [owner(value) for _, value in walk(ctx) if isinstance(value, np.ndarray)]
    kept = {id(array): array.nbytes for array in arrays}
    return sum(kept.values()) - sum(kept.get(id(owner(array)), 0) for array in known)


@pytest.mark.parametrize("N", [13, 31])
@pytest.mark.parametrize(
    "options",
    [{}, {"label_smoothing": 0.1}, {"ignore_index": 7},
     {"label_smoothing": 0.1, "ignore_index": 7}],
)  # fmt: skip
def test_cross_entropy_takes_three_times_the_logits_these_included(N, options):
    """Beside the logits: log_p in ctx, and one array more, at last dlogits."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((N, V), dtype=np.float32)
    targets = rng.integers(0, V, N)
    targets[0] = 7
    criterion = CrossEntropy(**options)
    with measured() as found:
        _, ctx = criterion.forward(logits, targets)
        assert ctx.log_p.nbytes == logits.nbytes
        criterion.backward(ctx, 0.5)
    assert logits.nbytes + found.peak < 3.02 * logits.nbytes


@pytest.mark.parametrize("scale", [False, True])
def test_embedding_backward_makes_nothing_as_large_as_the_vocabulary(scale):
    """Neither (N, V), nor, once there is a gradient, a second (V, d_model)."""
    d_model, shape = 17, (3, 41)
    embedding = Embedding(V, d_model, scale, rng=0)
    rng = np.random.default_rng(0)
    y, ctx = embedding.forward(rng.integers(0, V, shape))
    dy = rng.standard_normal(y.shape, dtype=np.float32)
    with measured() as first:
        embedding.backward(ctx, dy)
    with measured() as second:
        embedding.backward(ctx, dy)
    assert embedding.W.value.nbytes < first.peak < embedding.W.value.nbytes + 8 * dy.nbytes
    assert second.peak < 8 * dy.nbytes


def language_model(dropout):
    """Of the size and the batch of nanoGPT's recipe for the CPU."""
    config = LanguageModelConfig(65, d_model=128, num_heads=4, num_layers=4, activation="gelu",
                                 max_len=64, dropout=dropout)  # fmt: skip
    ids = np.random.default_rng(0).integers(0, 65, (12, 64))
    return LanguageModel(config, 0), (ids,), {}


def decoder(dropout):
    model = Decoder(4, 128, 4, dropout=dropout, rng=0)
    x, memory = np.random.default_rng(0).standard_normal((2, 12, 64, 128), dtype=np.float32)
    return model, (x, memory), {"target_mask": causal_mask(64)}


def of_long_sequences(dropout):
    """Where the scores are most of ctx."""
    model = Decoder(2, 64, 4, dropout=dropout, rng=0)
    x, memory = np.random.default_rng(0).standard_normal((2, 4, 256, 64), dtype=np.float32)
    return model, (x, memory), {"target_mask": causal_mask(256)}


def of_one_long_sequence(dropout):
    config = LanguageModelConfig(65, d_model=64, num_heads=4, num_layers=4, max_len=500,
                                 dropout=dropout)  # fmt: skip
    ids = np.random.default_rng(0).integers(0, 65, (1, 500))
    return LanguageModel(config, 0), (ids,), {}


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("make", [language_model, decoder, of_long_sequences, of_one_long_sequence])
@pytest.mark.usefixtures("unwatched")
def test_a_step_takes_little_more_than_ctx_parameters_and_gradients(make, dropout):
    """Logits apart. A layer forgets what it computed in between before the next begins."""
    model, inputs, options = make(dropout)
    rng = np.random.default_rng(1) if dropout else None
    values = [parameter.value for parameter in model.parameters()]
    with measured() as found:
        y, ctx = model.forward(*inputs, **options, rng=rng)
        dy = np.ones_like(y)
        model.backward(ctx, dy)
    parameters = sum(value.nbytes for value in values)
    step = parameters + found.peak - y.nbytes - dy.nbytes
    kept = ctx_bytes(ctx, *values, *inputs, y)
    assert kept > 3 * parameters  # so that this says something of ctx
    assert step < 1.3 * (kept + 2 * parameters)


@pytest.mark.usefixtures("unwatched")
def test_attention_takes_the_memory_of_its_weights_once():
    """The weights lie where the scores were, and what is on the way is small."""
    q, k, v, dy = np.random.default_rng(0).standard_normal((4, 2, 3, 700, 16), dtype=np.float32)
    attention = ScaledDotProductAttention()
    with measured() as found:
        _, ctx = attention.forward(q, k, v, causal_mask(700))
    weights = ctx.A.nbytes
    assert weights < found.peak < 1.3 * weights
    with measured() as found:
        attention.backward(ctx, dy)
    assert found.peak < 0.5 * weights


@pytest.mark.usefixtures("unwatched")
@pytest.mark.parametrize(("batch", "T", "S"), [(200, 16, 16), (2, 32, 2048)])
def test_attention_with_few_scores_takes_the_memory_of_what_it_returns(batch, T, S):
    """Few beside q, k and v, of short sequences or few queries: the gradients are there once."""
    rng = np.random.default_rng(0)
    q, k, v, dy = (rng.standard_normal((batch, 8, n, 64), dtype=np.float32) for n in (T, S, S, T))
    attention = ScaledDotProductAttention()
    _, ctx = attention.forward(q, k, v)
    assert ctx.A.size > PART
    with measured() as found:
        attention.backward(ctx, dy)
    assert found.peak < q.nbytes + k.nbytes + v.nbytes + 2.5 * ctx.A.nbytes


STEPS = """
import resource
import numpy as np
from npdecoder import Decoder, causal_mask

model = Decoder(2, 64, 4, rng=0)
x, memory = np.ones((2, 8, 32, 64), np.float32)
for _ in range(9):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    y, ctx = model.forward(x, memory, target_mask=causal_mask(32))
    model.backward(ctx, y)
    y = ctx = None
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc, in core")
def test_what_a_step_frees_is_there_for_the_next():
    """Not with the system, which clears each page of 4 KB when it is first written to: a fault."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", STEPS], env=environment, capture_output=True, text=True, check=True
    )
    faults = [int(line) for line in done.stdout.split()]
    assert faults[0] > 100  # of 4 MB that the step takes: it is counted
    assert max(faults[-3:]) < 20


TIGHT = """
import resource
import numpy
with open("/proc/self/statm") as file:
    size = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (20 << 20),) * 2)
import npdecoder
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="as Linux tells and limits it")
def test_import_with_20_mb_to_spare():
    done = subprocess.run(
        [sys.executable, "-c", TIGHT], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
