"""The contract of npdecoder.core, over every layer, block and model at once."""

import copy
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest
from helpers import (
    assert_close,
    assert_equal,
    fresh,
    is_float,
    leaves,
    parameter_gradients,
    random_like,
    randomise,
    run,
    tree_map,
    walk,
)

import npdecoder
from npdecoder import (
    GELU,
    CrossEntropy,
    Decoder,
    DecoderLayer,
    Dropout,
    Embedding,
    Encoder,
    EncoderLayer,
    FeedForward,
    LanguageModel,
    LanguageModelConfig,
    Layer,
    LayerNorm,
    LearnedPositions,
    Linear,
    MemoryAttention,
    MemoryProjection,
    MultiHeadAttention,
    Parameter,
    ReLU,
    ScaledDotProductAttention,
    SinusoidalPositions,
    Softmax,
    TiledAttention,
    Transformer,
    TransformerConfig,
    Unembedding,
)


class Sizes(NamedTuple):
    B: int
    T: int
    S: int


class Case(NamedTuple):
    """make(dtype) -> the layer; inputs(sizes, rng) -> its arguments, all of them batch first."""

    make: Callable[[Any], Layer]
    inputs: Callable[[Sizes, np.random.Generator], tuple]
    keywords: Callable[[Sizes, np.random.Generator], dict] = lambda sizes, rng: {}


D, H, D_K, D_V, V, MAX_LEN = 6, 2, 4, 7, 11, 31


def x(n, rng):
    return (rng.standard_normal((n.B, n.T, D)),)


def x_and_memory(n, rng):
    return rng.standard_normal((n.B, n.T, D)), rng.standard_normal((n.B, n.S, D))


def query_and_projected(n, rng):
    K, V = rng.standard_normal((n.B, H, n.S, D_K)), rng.standard_normal((n.B, H, n.S, D_V))
    return rng.standard_normal((n.B, n.T, D)), K, V


def x_and_pair(n, rng):
    query, K, V = query_and_projected(n, rng)
    return query, (K, V)


def qkv(n, rng):
    _, K, V = query_and_projected(n, rng)
    return rng.standard_normal((n.B, H, n.T, D_K)), K, V


def ids(n, rng):
    return (rng.integers(0, V, (n.B, n.T)),)


def source_and_target_ids(n, rng):
    return rng.integers(0, V, (n.B, n.S)), rng.integers(0, V, (n.B, n.T))


def mask_of_memory(n, rng):
    return {"mask": rng.random((n.B, 1, n.T, n.S)) < 0.7}


def masks_of_decoder(n, rng):
    target = np.tri(n.T, dtype=bool) & (rng.random((n.B, 1, 1, n.T)) < 0.8)
    return {"target_mask": target, "memory_mask": rng.random((n.B, 1, n.T, n.S)) < 0.7}


def target_mask(n, rng):
    return {"target_mask": masks_of_decoder(n, rng)["target_mask"]}


def generator(n, rng):
    return {"rng": np.random.default_rng(5)}


WIDTHS = {"d_k": D_K, "d_v": D_V, "attention_bias": True}
MODEL = {"d_model": D, "num_heads": H, "d_ff": 5, "max_len": MAX_LEN, "pad_id": 0}
LAYERS = {"num_encoder_layers": 1, "num_decoder_layers": 2}
ALL_TIED = {"cross_attention": "shared", "tie_embeddings": "all", "positions": "learned"}

CASES = {
    "Linear": Case(lambda dtype: Linear(D, 5, dtype=dtype), x),
    "Embedding": Case(lambda dtype: Embedding(V, D, scale=True, dtype=dtype), ids),
    "Unembedding": Case(
        lambda dtype: Unembedding(Embedding(V, D, scale=True, dtype=dtype), bias=True), x
    ),
    "SinusoidalPositions": Case(lambda dtype: SinusoidalPositions(D, MAX_LEN), x),
    "LearnedPositions": Case(lambda dtype: LearnedPositions(MAX_LEN, D, dtype=dtype), x),
    "LearnedPositions, positions given": Case(
        lambda dtype: LearnedPositions(MAX_LEN, D, dtype=dtype),
        lambda n, rng: (*x(n, rng), rng.integers(0, MAX_LEN, (n.B, n.T))),
    ),
    "Softmax": Case(lambda dtype: Softmax(), x),
    "LayerNorm": Case(lambda dtype: LayerNorm(D, dtype=dtype), x),
    "ReLU": Case(lambda dtype: ReLU(), x),
    "GELU": Case(lambda dtype: GELU(), x),
    "GELU, tanh": Case(lambda dtype: GELU("tanh"), x),
    "Dropout": Case(lambda dtype: Dropout(0.5), x, generator),
    "Dropout, inference": Case(lambda dtype: Dropout(0.5), x),
    "ScaledDotProductAttention": Case(
        lambda dtype: ScaledDotProductAttention(), qkv, mask_of_memory
    ),
    "TiledAttention": Case(lambda dtype: TiledAttention(tile=3), qkv, mask_of_memory),
    "TiledAttention, causal, dropout": Case(
        lambda dtype: TiledAttention(0.3, True, tile=2), qkv, generator
    ),
    "CrossEntropy": Case(
        lambda dtype: CrossEntropy(ignore_index=0, label_smoothing=0.1),
        lambda n, rng: (rng.standard_normal((n.B, n.T, V)), *ids(n, rng)),
    ),
    "MultiHeadAttention": Case(
        lambda dtype: MultiHeadAttention(D, H, D_K, D_V, bias=True, dtype=dtype),
        lambda n, rng: (*x_and_memory(n, rng), rng.standard_normal((n.B, n.S, D))),
        mask_of_memory,
    ),
    "MultiHeadAttention, dropout": Case(
        lambda dtype: MultiHeadAttention(D, H, dropout=0.5, dtype=dtype),
        lambda n, rng: (*x_and_memory(n, rng), rng.standard_normal((n.B, n.S, D))),
        generator,
    ),
    "MemoryProjection": Case(
        lambda dtype: MemoryProjection(D, H, D_K, D_V, bias=True, dtype=dtype), x
    ),
    "MemoryAttention": Case(
        lambda dtype: MemoryAttention(D, H, D_K, D_V, bias=True, dtype=dtype),
        query_and_projected,
        mask_of_memory,
    ),
    "FeedForward": Case(lambda dtype: FeedForward(D, 5, "gelu", dtype=dtype), x),
    "EncoderLayer": Case(
        lambda dtype: EncoderLayer(D, H, 5, norm="post", dtype=dtype, **WIDTHS),
        x,
        lambda n, rng: {"mask": rng.random((n.B, 1, 1, n.T)) < 0.7},
    ),
    "EncoderLayer, dropout": Case(
        lambda dtype: EncoderLayer(D, H, 5, dropout=0.5, dtype=dtype), x, generator
    ),
    "Encoder": Case(lambda dtype: Encoder(2, D, H, 5, dtype=dtype, **WIDTHS), x),
    "DecoderLayer": Case(
        lambda dtype: DecoderLayer(D, H, 5, dtype=dtype, **WIDTHS), x_and_memory, masks_of_decoder
    ),
    "DecoderLayer, shared": Case(
        lambda dtype: DecoderLayer(D, H, 5, cross_attention="shared", dtype=dtype, **WIDTHS),
        x_and_pair,
        masks_of_decoder,
    ),
    "Decoder": Case(
        lambda dtype: Decoder(2, D, H, 5, norm="post", dtype=dtype, **WIDTHS),
        x_and_memory,
        masks_of_decoder,
    ),
    "Decoder, shared": Case(
        lambda dtype: Decoder(2, D, H, 5, cross_attention="shared", dtype=dtype, **WIDTHS),
        x_and_memory,
        masks_of_decoder,
    ),
    "Decoder, alone": Case(
        lambda dtype: Decoder(2, D, H, 5, cross_attention="none", dtype=dtype, **WIDTHS),
        x,
        target_mask,
    ),
    "Transformer": Case(
        lambda dtype: Transformer(TransformerConfig(V, V, **MODEL, **LAYERS), dtype=dtype),
        source_and_target_ids,
    ),
    "Transformer, all shared": Case(
        lambda dtype: Transformer(
            TransformerConfig(V, V, **MODEL, **LAYERS, **ALL_TIED), dtype=dtype
        ),
        source_and_target_ids,
    ),
    "Transformer, dropout": Case(
        lambda dtype: Transformer(
            TransformerConfig(V, V, **MODEL, **LAYERS, dropout=0.5), dtype=dtype
        ),
        source_and_target_ids,
        generator,
    ),
    "LanguageModel": Case(
        lambda dtype: LanguageModel(
            LanguageModelConfig(V, num_layers=2, tie_embeddings="target_output", **MODEL),
            dtype=dtype,
        ),
        ids,
    ),
}

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
USUAL = Sizes(3, 4, 5)


def prepare(case, dtype=np.float64, sizes=USUAL, seed=0):
    """(layer, inputs, keywords, dy) of this dtype, with random parameters."""
    rng = np.random.default_rng(seed)
    layer = randomise(case.make(dtype), rng)
    inputs = cast(case.inputs(sizes, rng), dtype)
    keywords = case.keywords(sizes, rng)
    y = layer(*inputs, **fresh(keywords))
    return layer, inputs, keywords, random_like(y, rng)


def cast(value, dtype):
    return tree_map(lambda a: a.astype(dtype) if is_float(a) else a, value)


def with_arrays(change, keywords):
    """The keywords with their arrays (masks) changed."""
    return {k: change(v) if isinstance(v, np.ndarray) else v for k, v in keywords.items()}


def is_random(case):
    return "rng" in case.keywords(USUAL, np.random.default_rng(0))


def cases_by(condition):
    chosen = {name: case for name, case in CASES.items() if condition(name, case)}
    return pytest.mark.parametrize("case", chosen.values(), ids=chosen)


def is_loss(case):
    return isinstance(case.make(np.float64), CrossEntropy)


def has_parameters(case):
    return bool(case.make(np.float64).parameters())


def test_every_public_layer_is_here():
    public = {getattr(npdecoder, name) for name in npdecoder.__all__}
    public = {c for c in public if inspect.isclass(c) and issubclass(c, Layer)} - {Layer}
    tried = {type(case.make(np.float64)) for case in CASES.values()}
    assert tried == public
    for layer in public:
        assert layer.__doc__
        assert layer.forward.__doc__
        assert layer.backward.__doc__


# Arguments


def strided(a):
    """The same numbers, every second of a buffer, the last axis backwards."""
    a = np.asarray(a)
    buffer = np.zeros(tuple(2 * n for n in a.shape), a.dtype)
    view = buffer[tuple(slice(None, None, 2) for _ in a.shape)]
    if a.ndim:
        view = view[..., ::-1]
    view[...] = a
    return view


def read_only(a):
    a = np.array(a)
    a.flags.writeable = False
    return a


UNUSUAL = {
    "read-only": read_only,
    "Fortran": lambda a: np.asfortranarray(a),
    "strided": strided,
    "big-endian": lambda a: np.asarray(a).astype(np.asarray(a).dtype.newbyteorder(">")),
    "all of it": lambda a: strided_big_endian_read_only(a),
    "lists": lambda a: np.asarray(a).tolist(),
}


def strided_big_endian_read_only(a):
    view = strided(np.asarray(a).astype(np.asarray(a).dtype.newbyteorder(">")))
    view.flags.writeable = False
    return view


def changed(change, value):
    """tree_map over tuples alone (what change returns may be a list); a number stays itself."""
    if isinstance(value, tuple):
        return tuple(changed(change, part) for part in value)
    return change(value) if np.ndim(value) else value


@every_case
@pytest.mark.parametrize("kind", UNUSUAL)
def test_unusual_arrays_give_the_same(case, kind):
    layer, inputs, keywords, dy = prepare(case)
    expected = run(layer, inputs, keywords, dy)
    change = UNUSUAL[kind]
    found = run(
        layer, changed(change, inputs), with_arrays(change, keywords), changed(change, dy)
    )
    for one, other in zip(found, expected):
        assert_close(one, other)


@every_case
def test_broadcast_arrays_give_the_same(case):
    """One item for the whole batch, without copies of it."""
    layer, inputs, keywords, dy = prepare(case)

    def broadcast(a):
        return np.broadcast_to(a[:1], a.shape)

    views = changed(broadcast, inputs), with_arrays(broadcast, keywords), changed(broadcast, dy)
    arrays = (
        changed(np.array, views[0]),
        with_arrays(np.array, views[1]),
        changed(np.array, views[2]),
    )
    for one, other in zip(run(layer, *views), run(layer, *arrays)):
        assert_close(one, other)


@every_case
def test_no_argument_is_changed(case):
    layer, inputs, keywords, dy = prepare(case)
    before = copy.deepcopy((inputs, keywords, dy))
    run(layer, inputs, keywords, dy)
    assert_equal(inputs, before[0])
    assert_equal([v for v in keywords.values() if isinstance(v, np.ndarray)],
                 [v for v in before[1].values() if isinstance(v, np.ndarray)])
    assert_equal(dy, before[2])


@cases_by(lambda name, case: not is_loss(case))
def test_a_gradient_of_another_shape_is_refused(case):
    layer, inputs, keywords, dy = prepare(case)
    _, ctx = layer.forward(*inputs, **fresh(keywords))
    for change in (lambda a: a[:1], lambda a: a[..., :1], lambda a: a[0], lambda a: a[None]):
        with pytest.raises(ValueError, match=r"\bd\w+ (has shape|\()"):
            layer.backward(ctx, tree_map(change, dy))


# Contexts


@every_case
def test_calls_in_any_order(case):
    """Two forwards before a backward, backwards in any order and twice: ctx is all there is."""
    layer, inputs, keywords, dy = prepare(case)
    _, other_inputs, other_keywords, other_dy = prepare(case, seed=1)
    expected = run(layer, inputs, keywords, dy)
    other_expected = run(layer, other_inputs, other_keywords, other_dy)

    layer.zero_grad()
    y, ctx = layer.forward(*inputs, **fresh(keywords))
    other_y, other_ctx = layer.forward(*other_inputs, **fresh(other_keywords))
    layer(*other_inputs)
    returned = layer.backward(ctx, dy)
    assert_equal((y, returned), expected[:2])
    for parameter, grad in zip(layer.parameters(), expected[2].values()):
        assert_equal(parameter.grad, grad)

    other_returned = layer.backward(other_ctx, other_dy)
    assert_equal((other_y, other_returned), other_expected[:2])
    layer.zero_grad()
    assert_equal(layer.backward(ctx, dy), expected[1])
    assert_equal(layer.backward(ctx, dy), expected[1])
    twice = {name: 2 * grad for name, grad in expected[2].items()}
    assert_close(parameter_gradients(layer), twice, 1e-14)


@every_case
def test_call_is_forward(case):
    layer, inputs, keywords, _ = prepare(case)
    y, _ = layer.forward(*inputs, **fresh(keywords))
    assert_equal(layer(*inputs, **fresh(keywords)), y)
    assert type(layer(*inputs, **fresh(keywords))) is type(y)


@every_case
def test_a_context_holds_no_weights(case):
    layer, inputs, keywords, _ = prepare(case)
    _, ctx = layer.forward(*inputs, **fresh(keywords))
    values = [value for _, value in walk(ctx)]
    assert hasattr(ctx, "_fields")
    assert not any(isinstance(value, (Parameter, Layer)) for value in values)
    for value in values:
        if isinstance(value, np.ndarray):
            assert not any(np.shares_memory(value, p.value) for p in layer.parameters())


@every_case
def test_forward_and_backward_leave_the_layer_as_it_was(case):
    """But for the gradients: nothing is remembered, no weight is changed."""
    layer, inputs, keywords, dy = prepare(case)
    layer.zero_grad()
    before, state = sorted(attributes(layer)), layer.state_dict()
    run(layer, inputs, keywords, dy)
    assert sorted(attributes(layer)) == before
    for name, array in layer.state_dict().items():
        assert_equal(array, state[name])


def attributes(layer, path=""):
    """The names of all attributes of a layer and its children, with the ids of their values."""
    for name, value in vars(layer).items():
        yield f"{path}.{name}", id(value)
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, Layer):
                yield from attributes(child, f"{path}.{name}")


@every_case
def test_gradients_are_one_for_each_float_input(case):
    layer, inputs, keywords, dy = prepare(case)
    _, returned, _ = run(layer, inputs, keywords, dy)
    floats = [a for a in leaves(inputs) if is_float(a)]
    assert [np.shape(g) for g in leaves(returned)] == [np.shape(a) for a in floats]
    if len(floats) == 1:
        assert isinstance(returned, np.ndarray)
    else:
        assert isinstance(returned, tuple)


@every_case
def test_a_deepcopy_is_independent(case):
    layer, inputs, keywords, dy = prepare(case)
    expected = run(layer, inputs, keywords, dy)
    clone = copy.deepcopy(layer)
    assert [name for name, _ in clone.named_parameters()] == list(expected[2])
    for mine, theirs in zip(layer.parameters(), clone.parameters()):
        assert not np.shares_memory(mine.value, theirs.value)
        assert not np.shares_memory(mine.grad, theirs.grad)
    for one, other in zip(run(clone, inputs, keywords, dy)[:2], expected[:2]):
        assert_equal(one, other)
    for parameter in clone.parameters():
        parameter.value += 1
        parameter.grad += 1
    again = run(layer, inputs, keywords, dy)
    assert_equal(again[:2], expected[:2])
    assert_equal(list(again[2].values()), list(expected[2].values()))


@every_case
def test_forward_in_threads(case):
    layer, _, keywords, _ = prepare(case)
    several = [prepare(case, seed=seed)[1] for seed in range(4)]
    if not is_random(case):
        keywords = {}
    expected = [layer(*inputs, **fresh(keywords)) for inputs in several]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda inputs: layer(*inputs, **fresh(keywords)), several * 6))
    for index, y in enumerate(found):
        assert_equal(y, expected[index % 4])


# Batches


@cases_by(lambda name, case: not is_random(case) and not is_loss(case))
def test_a_batch_is_its_items(case):
    layer, inputs, keywords, dy = prepare(case)
    y, returned, grads = run(layer, inputs, keywords, dy)
    total = {name: np.zeros_like(grad) for name, grad in grads.items()}
    for b in range(USUAL.B):

        def item(a, b=b):
            return a[b : b + 1]

        alone = run(layer, tree_map(item, inputs), with_arrays(item, keywords), tree_map(item, dy))
        assert_close(tree_map(item, y), alone[0])
        assert_close(tree_map(item, returned), alone[1])
        for name, grad in alone[2].items():
            total[name] += grad
    assert_close(grads, total)


@cases_by(lambda name, case: not is_random(case))
def test_a_permuted_batch(case):
    layer, inputs, keywords, dy = prepare(case)
    y, returned, grads = run(layer, inputs, keywords, dy)

    def permute(a):
        return a[[2, 0, 1]] if np.ndim(a) else a

    found = run(
        layer, tree_map(permute, inputs), with_arrays(permute, keywords), tree_map(permute, dy)
    )
    assert_close(found[:2], (tree_map(permute, y), tree_map(permute, returned)))
    assert_close(found[2], grads)


@every_case
@pytest.mark.parametrize(
    "sizes",
    [(0, 4, 5), (3, 0, 5), (3, 4, 0), (1, 1, 1), (3, 1, 5), (0, 0, 0)],
)
def test_small_and_empty_sizes(case, sizes):
    """Shapes are those of other sizes, nothing warns, and an empty output moves no weight."""
    sizes = Sizes(*sizes)
    names = {17: sizes.B, 19: sizes.T, 23: sizes.S}
    usual, *_ = leaves(prepare(case, sizes=Sizes(17, 19, 23))[3])
    expected = tuple(names.get(n, n) for n in np.shape(usual))
    with np.errstate(all="raise"):
        layer, inputs, keywords, dy = prepare(case, sizes=sizes)
        y, returned, grads = run(layer, inputs, keywords, dy)
    first, *_ = leaves(y)
    assert np.shape(first) == expected
    floats = [a for a in leaves(inputs) if is_float(a)]
    assert [np.shape(g) for g in leaves(returned)] == [np.shape(a) for a in floats]
    assert all(np.isfinite(leaf).all() for leaf in leaves(y) + leaves(returned))
    assert all(np.isfinite(grad).all() for grad in grads.values())
    if np.size(first) == 0:
        assert not any(grad.any() for grad in grads.values())


# dtypes


@every_case
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.longdouble])
def test_dtype_stays_through_training(case, dtype):
    layer, inputs, keywords, dy = prepare(case, dtype)
    for _ in range(3):
        layer.zero_grad()
        y, ctx = layer.forward(*inputs, **fresh(keywords))
        returned = layer.backward(ctx, dy)
        for parameter in layer.parameters():
            parameter.value -= 0.01 * parameter.grad
        floats = [leaf for leaf in leaves(returned) if is_float(leaf)]
        floats += [] if is_loss(case) else leaves(y)
        floats += [a for _, a in walk(ctx) if isinstance(a, np.ndarray) and is_float(a)]
        floats += [a for p in layer.parameters() for a in (p.value, p.grad)]
        assert {np.asarray(a).dtype for a in floats} <= {np.dtype(dtype)}
        assert all(np.isfinite(a).all() for a in floats)


@every_case
def test_float32_is_close_to_float64(case):
    wide, narrow = prepare(case), prepare(case, np.float32)
    narrow[0].load_state_dict(wide[0].state_dict())
    layer, inputs, keywords, _ = narrow
    for one, other in zip(run(layer, inputs, keywords, cast(wide[3], np.float32)), run(*wide)):
        assert_close(one, other, 1e-4)


@every_case
@pytest.mark.parametrize("other", [np.float16, np.float64, np.longdouble])
def test_a_gradient_of_another_float_dtype(case, other):
    """It is computed in the layer's dtype: nothing is promoted, in float32."""
    layer, inputs, keywords, dy = prepare(case, np.float32)
    expected = run(layer, inputs, keywords, cast(cast(dy, other), np.float32))
    if other is np.float16 and not layer.parameters():
        return
    found = run(layer, inputs, keywords, cast(dy, other))
    for one, another in zip(leaves(found[1]), leaves(expected[1])):
        assert one.dtype == np.float32
        assert_close(one, another, 1e-6)


@cases_by(lambda name, case: has_parameters(case))
@pytest.mark.parametrize("dtype", [np.float64, np.longdouble])
def test_astype_converts_all_that_is_computed(case, dtype):
    layer, _, keywords, _ = prepare(case, np.float32)
    inputs = cast(prepare(case, np.float32)[1], dtype)
    native = case.make(dtype)
    native.load_state_dict(layer.state_dict())
    y = layer.astype(dtype)(*inputs, **fresh(keywords))
    assert {leaf.dtype for leaf in leaves(y)} == {np.dtype(dtype)}
    assert_equal(y, native(*inputs, **fresh(keywords)))


floats_and_parameters = cases_by(
    lambda name, case: has_parameters(case)
    and any(is_float(a) for a in leaves(case.inputs(USUAL, np.random.default_rng(0))))
)


@floats_and_parameters
@pytest.mark.parametrize("other", [np.float16, np.float64, np.longdouble, np.int64, np.uint8])
def test_inputs_of_another_dtype_are_computed_in_that_of_the_parameters(case, other):
    layer, inputs, keywords, dy = prepare(case, np.float32)
    inputs = tree_map(lambda a: np.abs(4 * a).round() if is_float(a) else a, inputs)
    expected = run(layer, inputs, keywords, dy)
    converted = tree_map(lambda a: a.astype(other) if is_float(a) else a, inputs)
    found = run(layer, converted, keywords, dy)
    assert_equal(found[:2], expected[:2])
    assert_equal(list(found[2].values()), list(expected[2].values()))
    assert {leaf.dtype for leaf in leaves(found[:2])} == {np.dtype(np.float32)}


@floats_and_parameters
@pytest.mark.parametrize("other", [bool, complex, object, "U3"])
def test_inputs_that_are_no_numbers(case, other):
    layer, inputs, keywords, _ = prepare(case)
    converted = tree_map(lambda a: a.astype(other) if is_float(a) else a, inputs)
    with pytest.raises(TypeError, match=r"^\w+ has dtype"):
        layer(*converted, **fresh(keywords))


@cases_by(lambda name, case: not has_parameters(case))
@pytest.mark.parametrize("other", [np.float16, np.int64, np.uint8, bool, complex])
def test_layers_without_parameters_take_floats_only(case, other):
    layer, inputs, keywords, _ = prepare(case)
    converted = tree_map(lambda a: a.astype(other) if is_float(a) else a, inputs)
    with pytest.raises(TypeError, match=rf"^\w+ has dtype {np.dtype(other)}"):
        layer(*converted, **fresh(keywords))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("layer", [ReLU(), GELU(), GELU("tanh"), Dropout(0.0), Dropout(0.5)])
def test_a_single_number_keeps_its_dtype(layer, dtype):
    """Shape (): before NumPy 2 a float32 scalar times a Python float is float64."""
    for number in dtype(1.5), np.array(1.5, dtype):
        keywords = {"rng": np.random.default_rng(0)} if isinstance(layer, Dropout) else {}
        y, ctx = layer.forward(number, **keywords)
        dx = layer.backward(ctx, dtype(2))
        for value in y, dx:
            assert np.shape(value) == ()
            assert np.asarray(value).dtype == dtype


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_loss_of_one_target(dtype):
    logits = np.array([1.0, 2.0, 4.0], dtype)
    loss, ctx = CrossEntropy(label_smoothing=0.1).forward(logits, 2)
    dlogits = CrossEntropy(label_smoothing=0.1).backward(ctx)
    batch_loss, batch_ctx = CrossEntropy(label_smoothing=0.1).forward(logits[None], [2])
    assert abs(loss - batch_loss) < 1e-6
    assert dlogits.dtype == dtype
    assert_close(dlogits, CrossEntropy(label_smoothing=0.1).backward(batch_ctx)[0], 1e-6)


# Randomness


takes_rng = cases_by(
    lambda name, case: "rng" in inspect.signature(case.make(np.float64).forward).parameters
)


@takes_rng
def test_an_int_for_rng_is_refused(case):
    layer, inputs, keywords, _ = prepare(case)
    for rng in 0, 1, np.int64(3), True, np.random.RandomState(0), np.random.PCG64(0):
        with pytest.raises(TypeError, match=r"^rng is .*Generator"):
            layer(*inputs, **{**keywords, "rng": rng})


@cases_by(lambda name, case: is_random(case))
def test_same_state_same_dropout(case):
    layer, inputs, _, _ = prepare(case)

    def call(seed):
        return layer(*inputs, rng=np.random.default_rng(seed))

    np.random.seed(0)  # noqa: NPY002  (it must not matter)
    first = call(3)
    np.random.seed(1)  # noqa: NPY002
    assert_equal(call(3), first)
    assert (call(4) != first).any()
    assert (layer(*inputs) != first).any()
    assert_equal(layer(*inputs), layer(*inputs, rng=None))


@takes_rng
def test_a_rate_of_zero_draws_nothing(case):
    """A generator changes nothing where no dropout is asked for."""
    if is_random(case) or isinstance(case.make(np.float64), Dropout):
        return
    layer, inputs, keywords, _ = prepare(case)
    rng = np.random.default_rng(0)
    assert_equal(layer(*inputs, **keywords, rng=rng), layer(*inputs, **keywords))
    assert rng.random() == np.random.default_rng(0).random()
