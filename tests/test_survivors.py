"""What mutations of the code once got away with."""

import inspect

import numpy as np
import pytest
from helpers import assert_close, assert_equal

from npdecoder import (
    GELU,
    SGD,
    Adam,
    AdamW,
    CrossEntropy,
    Decoder,
    DecoderLayer,
    DecodingState,
    Dropout,
    Embedding,
    Encoder,
    EncoderLayer,
    FeedForward,
    LanguageModel,
    LanguageModelConfig,
    LayerNorm,
    LearnedPositions,
    Linear,
    MultiHeadAttention,
    Parameter,
    ScaledDotProductAttention,
    Softmax,
    Unembedding,
    beam_search,
    causal_mask,
    clip_grad_norm,
    constant_schedule,
    cosine_schedule,
    generate,
    greedy_decode,
    linear_schedule,
    log_softmax,
    next_token_probabilities,
    noam_schedule,
    sample,
    softmax,
)
from npdecoder.blocks.cache import DecoderState, KeyValueCache
from npdecoder.blocks.multi_head_attention import MemoryAttention, MemoryProjection
from npdecoder.layers.tiled_attention import TiledAttention

MAKE = {
    "Linear": lambda **options: Linear(3, 5, **options),
    "Embedding": lambda **options: Embedding(5, 4, **options),
    "LearnedPositions": lambda **options: LearnedPositions(5, 4, **options),
    "MemoryProjection": lambda **options: MemoryProjection(4, 2, bias=True, **options),
    "MemoryAttention": lambda **options: MemoryAttention(4, 2, bias=True, **options),
    "MultiHeadAttention": lambda **options: MultiHeadAttention(4, 2, bias=True, **options),
    "FeedForward": lambda **options: FeedForward(4, **options),
    "EncoderLayer": lambda **options: EncoderLayer(4, 2, **options),
    "Encoder": lambda **options: Encoder(2, 4, 2, **options),
    "DecoderLayer": lambda **options: DecoderLayer(4, 2, **options),
    "Decoder": lambda **options: Decoder(2, 4, 2, **options),
    "Decoder, shared": lambda **options: Decoder(2, 4, 2, cross_attention="shared", **options),
}
every_layer = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)

# as the README and the docstrings promise; rng and dtype are None and float32 everywhere
LAYER = {
    "d_ff": None, "norm": "pre", "norm_bias": True, "norm_eps": 1e-5, "attention_bias": False,
}  # fmt: skip
SUBLAYERS = {
    "d_k": None, "d_v": None, "feed_forward_bias": True, "activation": "relu", "dropout": 0.0,
    "attention_dropout": None,
}  # fmt: skip
HEADS = {"d_k": None, "d_v": None, "bias": False}
DECODE = {"bos_id": None, "eos_id": None, "max_new_tokens": None}
CHOICE = {"temperature": 1.0, "top_k": None, "top_p": None, "min_p": None}
ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
DEFAULTS = {
    Linear: {"bias": True},
    Embedding: {"scale": False},
    Unembedding: {"bias": False},
    LearnedPositions: {},
    LayerNorm: {"eps": 1e-5, "bias": True},
    GELU: {"approximate": "none"},
    softmax: {"axis": -1},
    log_softmax: {"axis": -1},
    ScaledDotProductAttention: {"dropout": 0.0},
    TiledAttention: {"dropout": 0.0, "causal": False, "tile": 128},
    CrossEntropy: {"ignore_index": None, "label_smoothing": 0.0},
    MemoryProjection: HEADS,
    MemoryAttention: {**HEADS, "dropout": 0.0},
    MultiHeadAttention: {**HEADS, "dropout": 0.0},
    FeedForward: {"d_ff": None, "activation": "relu", "bias": True, "dropout": 0.0},
    EncoderLayer: {**LAYER, **SUBLAYERS},
    Encoder: {k: v for k, v in LAYER.items() if k != "attention_bias"} | {"final_norm": None},
    DecoderLayer: {**LAYER, **SUBLAYERS, "cross_attention": "per_layer"},
    Decoder: {**LAYER, "d_k": None, "d_v": None, "cross_attention": "per_layer",
              "final_norm": None},
    SGD: {"momentum": 0.0, "weight_decay": 0.0},
    Adam: {**ADAM, "weight_decay": 0.0},
    AdamW: {**ADAM, "weight_decay": 0.01},
    constant_schedule: {"warmup": 0},
    linear_schedule: {"warmup": 0, "final": 0.0},
    cosine_schedule: {"warmup": 0, "final": 0.0},
    noam_schedule: {"factor": 1.0},
    greedy_decode: DECODE,
    sample: {**DECODE, **CHOICE, "seed": 0},
    generate: {**CHOICE, "eos_id": None, "max_new_tokens": None, "seed": 0},
    beam_search: {**DECODE, "length_penalty": 1.0, "n_best": 1},
    next_token_probabilities: CHOICE,
}  # fmt: skip


@pytest.mark.parametrize("made", DEFAULTS, ids=lambda made: made.__name__)
def test_defaults_are_those_that_are_documented(made):
    given = {
        name: parameter.default
        for name, parameter in inspect.signature(made).parameters.items()
        if parameter.default is not parameter.empty
    }
    assert given.pop("rng", None) is None
    assert given.pop("dtype", np.float32) is np.float32
    assert given == DEFAULTS[made]


@every_layer
def test_all_initial_weights_come_from_rng(make):
    """A generator is used up as it is: what is drawn after it differs, and an int starts anew."""
    rng = np.random.default_rng(5)
    state = make(rng=5).state_dict()
    for layer in make(rng=5), make(rng=rng):
        for name, value in layer.state_dict().items():
            np.testing.assert_array_equal(value, state[name])
    again = make(rng=rng).state_dict()
    for name, value in state.items():
        assert value.ndim < 2 or not np.array_equal(value, again[name])


@every_layer
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_all_parameters_have_the_dtype_of_the_layer(make, dtype):
    assert {p.dtype for p in make(dtype=dtype).parameters()} == {np.dtype(dtype)}


@pytest.mark.parametrize(
    ("block", "matrices"), [(MemoryProjection, "kv"), (MemoryAttention, "qo")]
)
def test_each_half_of_attention_has_all_its_biases_or_none(block, matrices):
    weights = [f"W_{x}.W" for x in matrices]
    biases = [f"W_{x}.b" for x in matrices]
    assert sorted(block(4, 2, bias=True).state_dict()) == sorted(weights + biases)
    assert sorted(block(4, 2).state_dict()) == sorted(weights)


def test_attention_bias_reaches_the_shared_projection():
    decoder = Decoder(2, 4, 2, cross_attention="shared", attention_bias=True)
    names = set(decoder.state_dict())
    assert {f"memory_projection.W_{x}.b" for x in "kv"} < names


@pytest.mark.parametrize("sizes", [(-1,), (-1, 2), (2, -1)])
def test_a_causal_mask_has_no_negative_length(sizes):
    with pytest.raises(ValueError, match="is -1, expected at least 0"):
        causal_mask(*sizes)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_out_of_reach_of_exp_are_right_among_many(dtype):
    x = np.random.default_rng(0).standard_normal((700, 11)).astype(dtype)
    x[3] += 1e4
    x[5] *= 1e4
    x[7] -= 1e4
    x[11] = -np.inf
    y, _ = Softmax().forward(x)
    assert_close(y, softmax(x), 1e-6)
    np.testing.assert_allclose(y.sum(axis=-1), np.arange(700) != 11, rtol=1e-5)


def test_the_weights_of_a_blind_row_are_no_minus_zero():
    assert not np.signbit(softmax(np.full((2, 3), -np.inf))).any()


def test_an_ignored_target_needs_no_second_class():
    loss, ctx = CrossEntropy(ignore_index=7).forward(np.zeros((3, 1)), [0, 7, 7])
    assert loss == 0.0
    assert_equal(ctx.targets, np.zeros(3))


def test_scores_near_the_largest_number_are_no_overflow_in_tiles():
    rng = np.random.default_rng(0)
    q, k = (1e16 * rng.standard_normal((2, 5, 3)).astype(np.float32) for _ in range(2))
    v = rng.standard_normal((2, 5, 7)).astype(np.float32)
    context, _ = TiledAttention(tile=2).forward(q, k, v)
    expected, _ = ScaledDotProductAttention().forward(q, k, v)
    assert_close(context, expected, 1e-6)


@pytest.mark.parametrize("attention", [ScaledDotProductAttention(), TiledAttention()])
def test_a_single_query_vector_is_refused(attention):
    with pytest.raises(ValueError, match="leading axes"):
        attention.forward(np.ones(3), np.ones((5, 3)), np.ones((5, 2)))


def test_a_gradient_of_integers_is_taken_by_layers_without_parameters():
    q = np.ones((2, 5, 3), np.float32)
    for layer in ScaledDotProductAttention(), TiledAttention():
        _, ctx = layer.forward(q, q, q)
        dq, _, _ = layer.backward(ctx, np.ones(q.shape, int))
        assert dq.dtype == np.float32
    _, ctx = Dropout(0.5).forward(q)
    assert Dropout(0.5).backward(ctx, np.ones(q.shape)).dtype == np.float32


def test_a_blind_query_in_tiles_has_a_sum_of_1_and_a_context_of_no_minus_zero():
    x = np.ones((2, 5, 3))
    context, ctx = TiledAttention(tile=2).forward(x, x, x, mask=np.zeros((5, 5), bool))
    assert_equal(ctx.Z, np.ones((2, 5, 1)))
    assert not np.signbit(context).any()
    assert TiledAttention().tile == 128


def test_an_optimizer_names_a_missing_option_once_and_invents_no_other_fault():
    optimizer = Adam(Linear(2, 3).parameters())
    state = optimizer.state_dict()
    del state["group.0.beta1"]
    with pytest.raises(ValueError, match=r"does not fit Adam: missing group\.0\.beta1$"):
        optimizer.load_state_dict(state)


def test_a_norm_beyond_all_numbers_is_the_one_thing_to_be_warned_of():
    parameter = Parameter(np.ones(3))
    parameter.grad = np.full(3, 1.5e308)
    with pytest.warns(RuntimeWarning, match="the gradient norm is inf") as record:
        assert clip_grad_norm(parameter, 1.0) == np.inf
    assert len(record) == 1


def test_small_gradients_have_a_norm_where_underflow_is_an_error():
    parameter = Parameter(np.ones(3))
    parameter.grad = np.full(3, 1e-200)
    with np.errstate(all="raise"):
        assert clip_grad_norm(parameter, 1.0) == pytest.approx(3**0.5 * 1e-200, abs=0.0)


@pytest.mark.parametrize("stack", [Encoder(1, 4, 2, norm="post"),
                                   Decoder(1, 4, 2, norm="post", cross_attention="none")])
def test_a_stack_without_a_final_norm_has_no_context_of_one(stack):
    _, ctx = stack.forward(np.ones((2, 3, 4)))
    assert ctx.norm is None


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_of_a_single_float32_number_is_float32(approximate):
    """NumPy before 2 promotes a number of no dimension beside a Python float."""
    gelu = GELU(approximate)
    y, ctx = gelu.forward(np.float32(1.5))
    assert y.dtype == gelu.backward(ctx, np.float32(1.0)).dtype == np.float32


def test_a_wrong_rng_is_refused_before_the_cache_has_grown():
    x, cache = np.ones((2, 3, 4), np.float32), KeyValueCache()
    with pytest.raises(TypeError, match="rng"):
        MultiHeadAttention(4, 2).forward(x, x, x, rng=5, cache=cache)
    assert cache.length == 0


def test_an_unlikely_token_is_no_error_where_underflow_is_one():
    with np.errstate(all="raise"):
        p = next_token_probabilities([0.0, -800.0])
    assert_equal(p, np.array([1.0, 0.0]))


def test_a_state_whose_selection_was_interrupted_selects_no_more(monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    state = DecodingState(LanguageModel(LanguageModelConfig(5, d_model=4, num_heads=2)))
    state.prompt([[1], [2]])
    with monkeypatch.context() as broken:
        broken.setattr(DecoderState, "select", interrupt)
        with pytest.raises(KeyboardInterrupt):
            state.select([1, 0])
    for rows in [0, 1], [1, 0]:
        with pytest.raises(ValueError, match="half extended"):
            state.select(rows)


def test_a_state_that_has_read_nothing_counts_in_integers():
    state = DecodingState(LanguageModel(LanguageModelConfig(5, d_model=4, num_heads=2)))
    assert state.counts.dtype.kind == "i"
