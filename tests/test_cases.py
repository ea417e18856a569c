"""Faults that people reported of other libraries, each as a test of its whole kind.

Here are those whose kind shows in whole models only, or in no other test; most are held where the
layer or the file they belong to is tested. B and a number name the report.
"""

import copy
import inspect

import numpy as np
import pytest
from helpers import (
    KINDS,
    PAD,
    Loss,
    assert_close,
    assert_equal,
    assert_gradients,
    batch_of,
    decoding_items,
    decoding_model,
    ends,
    leaves,
    measured,
    randomise,
    run,
    walk,
)

import npdecoder
from npdecoder import (
    SGD,
    Adam,
    AdamW,
    CrossEntropy,
    Decoder,
    DecoderLayer,
    DecodingState,
    Embedding,
    Encoder,
    EncoderLayer,
    LanguageModel,
    LanguageModelConfig,
    Layer,
    LayerNorm,
    MemoryAttention,
    MultiHeadAttention,
    Parameter,
    Transformer,
    TransformerConfig,
    beam_search,
    clip_grad_norm,
    generate,
    greedy_decode,
    noam_schedule,
    sample,
)
from npdecoder.core import find_layers
from npdecoder.layers.attention import AttentionContext
from npdecoder.text import Batch
from npdecoder.training import evaluate, train_step

RNG = np.random.default_rng(0)
X, MEMORY = RNG.standard_normal((2, 3, 5, 6))
WIDE = {"dtype": np.float64}
kinds = pytest.mark.parametrize("kind", KINDS)


def model_of(kind, seed=0, dtype=np.float64, **options):
    """A small model of random weights, 11 ids in and 11 out."""
    options = {"d_model": 6, "num_heads": 3, "d_ff": 7, "max_len": 9, "pad_id": PAD, **options}
    if kind == "language model":
        model = LanguageModel(LanguageModelConfig(11, num_layers=2, **options), dtype=dtype)
    else:
        layers = {"num_encoder_layers": 2, "num_decoder_layers": 2}
        model = Transformer(TransformerConfig(11, 11, **layers, **options), dtype=dtype)
    return randomise(model, np.random.default_rng(seed))


def inputs_of(kind, *shape, low=1):
    """ids (B, T), of a Transformer twice: source and target."""
    rng = np.random.default_rng(5)
    return tuple(rng.integers(low, 11, shape) for _ in range(1 if kind == "language model" else 2))


def attention_of(ctx):
    """{path: weights} of every attention in a context."""
    return {path: value.A for path, value in walk(ctx) if isinstance(value, AttentionContext)}


# B01: fully masked rows


@pytest.mark.parametrize("norm", ["pre", "post"])
@kinds
def test_padding_and_a_window_together_may_leave_a_query_nothing_to_see(kind, norm):
    """Each alone leaves it something. Its weights are zero, all gradients finite and right."""
    model = model_of(kind, norm=norm)
    ids = np.array([[0, 0, 5, 3, 4], [6, 0, 0, 2, 5]])
    inputs, name = ((ids,), "mask") if kind == "language model" else (
        (np.array([[3, 0, 7], [0, 0, 0]]), ids), "target_mask"
    )  # fmt: skip
    window = np.tri(5, k=-1, dtype=bool) & ~np.tri(5, k=-3, dtype=bool)  # the two before
    blind = ~(window & (ids != 0)[:, None, :]).any(axis=-1)
    assert (blind & (ids != 0)).any(axis=1).all()
    with np.errstate(all="raise"):
        logits, ctx = model.forward(*inputs, **{name: window})
        model.backward(ctx, np.ones_like(logits))
    assert np.isfinite(logits).all()
    assert all(np.isfinite(p.grad).all() for p in model.parameters())
    weights = [A for path, A in attention_of(ctx).items()
               if "decoder.layers" in path and "self_attention" in path]  # fmt: skip
    assert len(weights) == 2
    for A in weights:
        assert_equal((A == 0).all(axis=-1), np.broadcast_to(blind[:, None], A.shape[:3]))
    assert_gradients(model, *inputs, mode="directional", **{name: window})


# B02: the polarity of masks


def masked_layers():
    """name: (layer, inputs, name of the mask, part of the path of the attention it masks)."""
    K, V = RNG.standard_normal((2, 3, 2, 5, 3))
    pair = (K, V)
    for cross in "per_layer", "shared", "none":
        memory = () if cross == "none" else (pair if cross == "shared" else MEMORY,)
        layer = DecoderLayer(6, 2, cross_attention=cross, **WIDE)
        stack = Decoder(2, 6, 2, cross_attention=cross, **WIDE)
        yield f"DecoderLayer, {cross}", layer, (X, *memory), "target_mask", "self_attention"
        memory = () if cross == "none" else (MEMORY,)
        yield f"Decoder, {cross}", stack, (X, *memory), "target_mask", "self_attention"
        if cross != "none":
            yield f"memory of a Decoder, {cross}", stack, (X, MEMORY), "memory_mask", "cross"
    yield "MultiHeadAttention", MultiHeadAttention(6, 2, **WIDE), (X, MEMORY, MEMORY), "mask", ""
    yield "MemoryAttention", MemoryAttention(6, 2, **WIDE), (X, *pair), "mask", ""
    yield "EncoderLayer", EncoderLayer(6, 2, **WIDE), (X,), "mask", ""
    yield "Encoder", Encoder(2, 6, 2, **WIDE), (X,), "mask", ""
    ids = RNG.integers(1, 11, (3, 5))
    for kind, name in zip(KINDS, ("target_mask", "mask")):
        inputs = (ids,) if kind == "language model" else (ids, ids)
        yield f"{kind} {name}", model_of(kind), inputs, name, "decoder.layers"
    yield "source", model_of("transformer"), (ids, ids), "source_mask", "encoder.layers"


MASKED = {name: case for name, *case in masked_layers()}


@pytest.mark.parametrize("case", MASKED)
def test_true_means_may_attend_wherever_a_mask_is_taken(case):
    """And 0 and -inf, added, say the same to the last bit."""
    layer, inputs, name, part = MASKED[case]
    rng = np.random.default_rng(1)
    keys = name == "source_mask"
    mask = rng.random((3, 1, 1, 5) if keys else (3, 1, 5, 5)) < 0.6
    mask[..., 0] = True
    y, ctx = layer.forward(*inputs, **{name: mask})
    seen = np.broadcast_to(mask, (3, 1, 5, 5))
    if "decoder.layers" in part:
        seen = seen & np.tri(5, dtype=bool)
    weights = [A for path, A in attention_of(ctx).items() if part in path and (
        part != "decoder.layers" or "self_attention" in path)]  # fmt: skip
    assert len(weights) in (1, 2)
    for A in weights:
        assert_equal(A > 0, np.broadcast_to(seen, A.shape))

    bias = {name: np.where(mask, 0.0, -np.inf)}
    dy = rng.standard_normal(y.shape)
    one, other = run(layer, inputs, {name: mask}, dy), run(layer, inputs, bias, dy)
    assert_equal(one[:2], other[:2])
    assert_equal(list(one[2].values()), list(other[2].values()))
    assert (layer(*inputs, **{name: ~mask}) != y).any()


# B04: batch and sequence


EQUAL_SIZES = {
    "encoder": lambda rng: (
        Encoder(2, 3, 3, 3, d_k=3, d_v=3, **WIDE), rng.standard_normal((1, 3, 3, 3))
    ),
    "decoder": lambda rng: (
        Decoder(2, 3, 3, 3, d_k=3, d_v=3, **WIDE), rng.standard_normal((2, 3, 3, 3))
    ),
    **{
        kind: lambda rng, kind=kind: (
            model_of(kind, num_heads=3, d_k=3, d_v=3, max_len=3), inputs_of(kind, 3, 3)
        )
        for kind in KINDS
    },
}  # fmt: skip


@pytest.mark.parametrize("case", EQUAL_SIZES)
def test_items_of_a_batch_do_not_meet_where_all_sizes_are_equal(case):
    """B = T = S = h = 3: an axis taken for another keeps every shape. Not a bit of the others
    moves, whatever stands in one item; nor do their gradients."""
    rng = np.random.default_rng(2)
    layer, inputs = EQUAL_SIZES[case](rng)
    randomise(layer, rng)
    dy = rng.standard_normal(layer(*inputs).shape)
    before = run(layer, inputs, {}, dy)
    for b in range(3):
        others = [i for i in range(3) if i != b]
        moved = tuple(array.copy() for array in inputs)
        for array in moved:
            array[b] = array[b] % 10 + 1 if array.dtype.kind == "i" else 100 * array[b] + 1
        after = run(layer, moved, {}, dy)
        assert (after[0][b] != before[0][b]).any(axis=-1).all()
        for one, other in zip(leaves(after[:2]), leaves(before[:2])):
            assert_equal(one[others], other[others])


# B08: softmax out of range


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@kinds
def test_scores_and_logits_of_any_size_overflow_nowhere(kind, dtype):
    """In attention, loss, sampling and search: exp(1e6) would be inf, and the log of 0 too."""
    model = model_of(kind, dtype=dtype)
    for name, parameter in model.named_parameters():
        if name.endswith(("W_q.W", "W_k.W", "output.W")):
            parameter.value *= 1e3
    inputs = inputs_of(kind, 3, 5)
    loss_layer = Loss(model)
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        loss, ctx = loss_layer.forward(*inputs, inputs[-1])
        loss_layer.backward(ctx)
        for A in attention_of(ctx).values():
            assert_close(A.sum(axis=-1), np.ones(A.shape[:-1], dtype), 1e-6)
        options = {**ends(model), "max_new_tokens": 3}
        assert greedy_decode(model, inputs[0], **options) == sample(
            model, inputs[0], **options, temperature=1e-3
        )
        found = beam_search(model, inputs[0], **options, beam_size=3, n_best=3)
    assert 100 < loss < np.inf
    assert all(np.isfinite(p.grad).all() for p in model.parameters())
    assert all(-np.inf < h.score <= 0 for hypotheses in found for h in hypotheses)


# B09, B10: LayerNorm


@pytest.mark.parametrize("norm", ["pre", "post"])
@kinds
def test_every_norm_of_a_model_takes_its_eps_and_is_used(kind, norm):
    model = model_of(kind, norm=norm, final_norm=True, norm_eps=0.25)
    inputs = inputs_of(kind, 2, 3)
    before = model(*inputs)
    norms = [layer for _, layer in find_layers(model) if isinstance(layer, LayerNorm)]
    assert len(norms) == (2 * 2 + 1 if kind == "language model" else 2 * 2 + 1 + 2 * 3 + 1)
    for layer in norms:
        assert layer.eps == 0.25
        layer.eps = 1e-5
        assert (model(*inputs) != before).any(axis=-1).all()
        layer.eps = 0.25
    assert_equal(model(*inputs), before)


def tables_of(model):
    return [p for name, p in model.named_parameters() if "embedding" in name or "positions" in name]


@pytest.mark.parametrize("norm", ["pre", "post"])
@kinds
def test_rows_without_spread_have_finite_gradients_all_through_a_model(kind, norm):
    """Tables of zeros: every first norm sees constant rows, at std 0."""
    model = model_of(kind, norm=norm, positions="learned")
    for parameter in tables_of(model):
        parameter.value[...] = 0.0
    loss = Loss(model)
    inputs = inputs_of(kind, 3, 5)
    with np.errstate(all="raise"):
        value, ctx = loss.forward(*inputs, inputs[-1])
        loss.backward(ctx)
    assert np.isfinite(value)
    assert all(np.isfinite(p.grad).all() for p in model.parameters())
    assert all(p.grad.any() for p in tables_of(model))


@kinds
def test_a_huge_mean_of_every_row_takes_no_digits_from_the_spread(kind):
    """Embeddings around 4000, in float32: as in float64 but for what float32 rounds away there."""
    narrow = model_of(kind, dtype=np.float32)
    for parameter in tables_of(narrow):
        parameter.value += 4000.0
    wide = copy.deepcopy(narrow).astype(np.float64)
    inputs = inputs_of(kind, 3, 5)
    dy = np.random.default_rng(0).standard_normal(wide(*inputs).shape)
    for one, other in zip(run(narrow, inputs, {}, dy), run(wide, inputs, {}, dy)):
        assert_close(one, other, 5e-3)


# B15: tied weights in training


@pytest.mark.parametrize("tie", ["target_output", "source_target", "all"])
@pytest.mark.parametrize(
    "make", [lambda p: SGD(p, 0.1, momentum=0.9, weight_decay=0.01), Adam, AdamW]
)
def test_a_tied_table_is_one_in_norm_momentum_and_update(make, tie):
    """Three clipped steps, beside which every parameter goes by itself, with its own optimizer; at
    the end a model of untied copies says the same."""
    model = model_of("transformer", tie_embeddings=tie)
    optimizer, loss = make(model.parameters()), Loss(model)
    alone = {name: Parameter(p.value) for name, p in model.named_parameters()}
    optimizers = [make([parameter]) for parameter in alone.values()]
    inputs = inputs_of("transformer", 3, 5)
    for step in range(3):
        optimizer.zero_grad()
        _, ctx = loss.forward(*inputs, np.roll(inputs[1], step))
        loss.backward(ctx)
        norm = np.sqrt(sum((p.grad**2).sum() for _, p in model.named_parameters()))
        assert_close(np.float64(clip_grad_norm(model.parameters(), 0.1)), norm)
        for name, parameter in model.named_parameters():
            alone[name].grad = parameter.grad
        for one in (optimizer, *optimizers):
            one.step()
        for name, parameter in model.named_parameters():
            assert_equal(parameter.value, alone[name].value)

    W = {name: getattr(model, name).W.value for name in ("target_embedding", "output")}
    state = model.state_dict() | {"target_embedding.W": W["target_embedding"]}
    state["output.W"] = W["output"] if tie == "source_target" else W["target_embedding"].T
    untied = model_of("transformer")
    untied.load_state_dict(state)
    assert len(alone) == len(untied.parameters()) - (2 if tie == "all" else 1)
    assert_close(untied(*inputs), model(*inputs))


# B17: copies


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_one_layer_in_several_places_is_one_set_of_weights_with_summed_gradients(stack):
    rng = np.random.default_rng(0)
    inputs = (X,) if stack == "encoder" else (X, MEMORY)
    shared = randomise((Encoder if stack == "encoder" else Decoder)(3, 6, 2, **WIDE), rng)
    apart = copy.deepcopy(shared)
    shared.layers = [shared.layers[0]] * 3
    apart.layers = [copy.deepcopy(shared.layers[0]) for _ in range(3)]
    dy = rng.standard_normal(X.shape)
    y, returned, grads = run(shared, inputs, {}, dy)
    found = run(apart, inputs, {}, dy)
    assert_equal((y, returned), found[:2])
    for name in grads:
        if name.startswith("layers.0."):
            rest = name.removeprefix("layers.0.")
            total = sum(found[2][f"layers.{i}.{rest}"] for i in range(3))
            assert_close(grads[name], total)
    assert 3 * (shared.num_parameters() - 12) == apart.num_parameters() - 12
    before = shared.layers[0].norm1.beta.value.copy()
    SGD(shared.parameters(), 0.5).step()
    assert_close(shared.layers[2].norm1.beta.value, before - 0.5 * grads["layers.0.norm1.beta"])


NEEDED = {
    "num_layers": 2, "d_model": 6, "num_heads": 2, "d_in": 6, "d_out": 6, "vocab_size": 6,
    "max_len": 6, "p": 0.5,
}  # fmt: skip


def made_with_defaults(layer_class):
    """A layer, given nothing that it can do without."""
    if layer_class is npdecoder.Unembedding:
        return layer_class(Embedding(6, 6))
    if issubclass(layer_class, (Transformer, LanguageModel)):
        sizes = (6, 6) if layer_class is Transformer else (6,)
        config = TransformerConfig if layer_class is Transformer else LanguageModelConfig
        return layer_class(config(*sizes, d_model=8), None)
    parameters = inspect.signature(layer_class).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind != p.VAR_KEYWORD]
    return layer_class(*(NEEDED[name] for name in needed))


PUBLIC = [getattr(npdecoder, name) for name in npdecoder.__all__]
LAYERS = [c for c in PUBLIC if inspect.isclass(c) and issubclass(c, Layer) and c is not Layer]


@pytest.mark.parametrize("layer_class", LAYERS)
def test_two_layers_made_with_defaults_share_nothing(layer_class):
    """No array and no layer of one is in the other, and what is drawn is drawn for each."""
    one, other = made_with_defaults(layer_class), made_with_defaults(layer_class)
    assert not {id(x) for _, x in find_layers(one)} & {id(x) for _, x in find_layers(other)}
    for p, q in zip(one.parameters(), other.parameters()):
        assert not np.shares_memory(p.value, q.value)
        assert p.value.ndim == 1 or (p.value != q.value).any()


# B18: dropout


RATES = {"dropout": 0.5, "attention_dropout": 0.4, "position_dropout": 0.3}


@kinds
def test_nothing_is_dropped_wherever_nothing_is_learnt(kind):
    """Calls, evaluation, cached decoding, search and sampling say to the last bit what a model
    without dropout of the same weights says, before and after training with dropout."""
    plain, dropping = decoding_model(kind, 3), decoding_model(kind, 3, **RATES)
    items = batch_of(decoding_items(kind, 3))
    targets = np.random.default_rng(0).integers(1, 7, (len(items), 4))
    inputs = (targets,) if kind == "language model" else (items, targets)

    def said(model):
        state = DecodingState(model, *inputs[:-1])
        search = {**ends(model), "max_new_tokens": 3}
        arrays = model(*inputs), model.forward(*inputs)[0], state.prompt(targets)
        texts = [evaluate(model, CrossEntropy(), [Batch(inputs, targets)]),
                 greedy_decode(model, items, **search), sample(model, items, **search),
                 beam_search(model, items, **search, beam_size=2)]  # fmt: skip
        if kind == "language model":
            texts.append(list(generate(model, [3, 4], max_new_tokens=12)))
        return arrays, texts

    expected = said(plain)
    rng = np.random.default_rng(1)
    for _ in range(2):
        found = said(dropping)
        assert_equal(found[0], expected[0])
        assert found[1] == expected[1]
        first = train_step(dropping, CrossEntropy(), SGD(dropping.parameters(), 0.0),
                           Batch(inputs, targets), rng=rng)  # fmt: skip
        assert first[0] != expected[1][0]


@pytest.mark.parametrize("norm", ["pre", "post"])
@kinds
def test_where_everything_is_dropped_all_is_finite(kind, norm):
    """A rate of 1 in every place, where 0 * 1 / (1 - 1) would be NaN."""
    model = model_of(kind, norm=norm, dropout=1.0)
    inputs = inputs_of(kind, 3, 5)
    with np.errstate(all="raise"):
        logits, ctx = model.forward(*inputs, rng=np.random.default_rng(0))
        model.backward(ctx, np.ones_like(logits))
    # nothing of the ids is left; rows of a product may still differ in the last digit
    np.testing.assert_allclose(logits, np.broadcast_to(logits[0, 0], logits.shape), 1e-12, 1e-12)
    assert not any(p.grad.any() for p in tables_of(model))
    assert np.isfinite(logits).all()
    assert all(np.isfinite(p.grad).all() for p in model.parameters())


# B41: integers


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", ">i2", "<i4", ">u4", ">i8", "u8"])
@kinds
def test_ids_of_any_integers_teach_a_model_the_same(kind, dtype):
    """Padding is found, hidden and ignored in all of them: no arithmetic is done in uint8."""
    model = model_of(kind)
    inputs = inputs_of(kind, 3, 5, low=0)
    targets = np.random.default_rng(6).integers(0, 11, (3, 5))
    expected = run(Loss(model), (*inputs, targets), {}, 1.0)
    found = run(Loss(model), [ids.astype(dtype) for ids in (*inputs, targets)], {}, 1.0)
    assert any((ids == PAD).any() for ids in inputs)
    assert found[0] == expected[0]
    assert_equal(list(found[2].values()), list(expected[2].values()))


# B42: float16


def test_float16_is_computed_in_the_dtype_of_the_weights():
    """40 * 40 * 64 is inf in float16, and an eps of 1e-12 is 0."""
    attention = MultiHeadAttention(64, 1, **WIDE)
    for linear in attention.W_q, attention.W_k, attention.W_v, attention.W_o:
        linear.W.value = np.eye(64)
    x = np.full((2, 3, 64), 40, np.float16)
    mask = np.array([[True, True, False], [False, False, False], [True, True, True]])
    with np.errstate(all="raise"):
        y, ctx = attention.forward(x, x, x, mask)
        attention.backward(ctx, np.ones(y.shape, np.float16))
    assert_equal(y, np.broadcast_to(40.0 * mask.any(axis=1)[:, None], y.shape))
    assert_equal(ctx.attend.attention.A.sum(axis=-1)[1, 0], mask.any(axis=1))

    norm = LayerNorm(4, eps=1e-12)
    with np.errstate(all="raise"):
        y, ctx = norm.forward(np.full((2, 4), 1234, np.float16))
        dx = norm.backward(ctx, np.ones((2, 4), np.float16))
    assert y.dtype == dx.dtype == np.float32
    assert_equal((y, dx), (np.zeros((2, 4)), np.zeros((2, 4))))


def test_weights_that_were_stored_as_float16_are_those_numbers(tmp_path):
    for suffix in ".npz", ".safetensors":
        model, other = model_of("transformer"), model_of("transformer", seed=1)
        halves = {name: array.astype(np.float16) for name, array in model.state_dict().items()}
        npdecoder.save_weights(tmp_path / f"w{suffix}", halves)
        other.load_state_dict(npdecoder.load_weights(tmp_path / f"w{suffix}"))
        for name, parameter in other.named_parameters():
            assert parameter.dtype == np.float64
            assert_equal(parameter.value, halves[name].astype(np.float64))


# B43: promotion


@pytest.mark.parametrize("make", [SGD, Adam, AdamW])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@kinds
def test_no_option_that_is_a_numpy_number_changes_a_dtype(kind, dtype, make):
    """Of model, loss, optimizer, schedule and clipping, through three steps of training."""
    half = np.float64(0.5)
    model = model_of(kind, dtype=dtype, dropout=half / 2, norm_eps=np.float64(1e-3),
                     activation="gelu_tanh")  # fmt: skip
    options = {"momentum": half} if make is SGD else {"eps": np.float64(1e-8)}
    optimizer = make(model.parameters(), np.float64(0.01), weight_decay=half, **options)
    criterion = CrossEntropy(ignore_index=np.int64(PAD), label_smoothing=half / 4)
    schedule = noam_schedule(np.int64(6), np.int64(2))
    inputs, rng = inputs_of(kind, 3, 5, low=0), np.random.default_rng(0)
    for n in range(1, 4):
        optimizer.lr = np.float64(schedule(n))
        loss, _ = train_step(model, criterion, optimizer, Batch(inputs, inputs[-1]),
                             max_norm=half, rng=rng)  # fmt: skip
        assert type(loss) is float
    held = [a for a in optimizer.state_dict().values() if isinstance(a, np.ndarray)]
    held += [a for p in model.parameters() for a in (p.value, p.grad)]
    assert len(held) > 2 * len(model.parameters())
    assert {a.dtype for a in held} == {np.dtype(dtype)}
    assert model(*inputs).dtype == dtype


# B44: large vocabularies


def peak_of(call):
    """Bytes that call takes at once beyond those there were."""
    with measured() as memory:
        call()
    return memory.peak


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_of_a_large_vocabulary_takes_few_copies_of_its_logits(smoothing):
    """64 targets of 50257 words: a one-hot row for each word would be 20 GB."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((64, 50257), np.float32)
    targets = rng.integers(0, 50257, 64)
    layer = CrossEntropy(ignore_index=3, label_smoothing=smoothing)

    def forward_and_backward():
        _, ctx = layer.forward(logits, targets)
        layer.backward(ctx)

    assert peak_of(forward_and_backward) < 3 * logits.nbytes


def test_a_large_table_costs_what_is_looked_up_and_one_gradient():
    embedding = Embedding(200_000, 8, rng=0)
    ids = np.random.default_rng(0).integers(0, 200_000, (4, 16))
    y, ctx = embedding.forward(ids)
    dy = np.ones_like(y)
    assert peak_of(lambda: embedding.forward(ids)) < 100 * ids.size
    assert peak_of(lambda: embedding.backward(ctx, dy)) < 1.1 * embedding.W.value.nbytes
    assert peak_of(lambda: embedding.backward(ctx, dy)) < 1000 * ids.size, "nothing as large again"


@pytest.mark.parametrize("tie", ["none", "target_output"])
def test_a_training_step_with_a_large_vocabulary_holds_few_arrays_of_its_size(tie):
    """Beside logits and their gradients: the table's gradient, and one product to add to it."""
    V = 20_011
    config = LanguageModelConfig(V, d_model=8, num_heads=2, num_layers=1, max_len=16,
                                 tie_embeddings=tie)  # fmt: skip
    model = LanguageModel(config, 0)
    ids = np.random.default_rng(0).integers(0, V, (4, 16))
    optimizer = SGD(model.parameters(), 0.1)
    batch = Batch((ids,), ids)
    train_step(model, CrossEntropy(), optimizer, batch)
    logits = 4 * ids.size * V
    assert peak_of(lambda: train_step(model, CrossEntropy(), optimizer, batch)) < 4.5 * logits
