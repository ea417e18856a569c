"""The same question asked another way: of whole models and stacks with any options.

A batch in another order or in parts, padding elsewhere, a hidden position more, heads or ids under
other numbers, tied weights apart, another dtype: the answer must not change, or in a known way.
"""

from dataclasses import replace

import numpy as np
import pytest
from helpers import (
    EOS,
    KINDS,
    assert_close,
    assert_equal,
    batch_of,
    decoding_items,
    decoding_model,
    distinct_primes,
    ends,
    few,
    is_float,
    leaves,
    model_options,
    parameter_gradients,
    randomise,
    relative_error,
    room,
    run,
    seeds,
    tree_map,
    walk,
)
from hypothesis import given
from hypothesis import strategies as st

from npdecoder import (
    CrossEntropy,
    Decoder,
    DecodingState,
    Encoder,
    LanguageModel,
    LanguageModelConfig,
    Transformer,
    TransformerConfig,
    beam_search,
    generate,
    greedy_decode,
    sample,
)
from npdecoder.text import Batch
from npdecoder.training import evaluate

MODELS = ("transformer", "transformer, shared", "language model")
STACKS = ("encoder", "decoder", "decoder, shared", "decoder, alone")
OF_LAYERS = ("norm", "final_norm", "norm_bias", "attention_bias", "feed_forward_bias", "activation")


def cases(kinds, ties=("none", "target_output", "source_target", "all")):
    return st.fixed_dictionaries(
        {
            "kind": st.sampled_from(kinds),
            "sizes": distinct_primes(5),
            "lengths": distinct_primes(3, 7),
            "tie": st.sampled_from(ties),
            "options": model_options,
            "seed": seeds,
        }
    )


def make_model(case, rng, dtype=np.float64, **more):
    """Random weights in float32, so that every dtype holds the same."""
    h, d_k, d_v, d_ff, V = case["sizes"]
    sizes = {"d_model": 6, "num_heads": h, "d_k": d_k, "d_v": d_v, "d_ff": d_ff, "max_len": 11}
    options = {**sizes, "norm_eps": 0.01, **case["options"], **more}
    tie = case["tie"]
    if case["kind"] == "language model":
        tie = "target_output" if tie in ("target_output", "all") else "none"
        config = LanguageModelConfig(V, num_layers=2, tie_embeddings=tie, **options)
        model = LanguageModel(config)
    else:
        words = V if tie in ("source_target", "all") else V + 2
        cross = "shared" if case["kind"].endswith("shared") else "per_layer"
        layers = {"num_encoder_layers": 2, "num_decoder_layers": 3}
        options |= {"cross_attention": cross, "tie_embeddings": tie, **layers}
        model = Transformer(TransformerConfig(words, V, **options))
    return randomise(model, rng).astype(dtype)


def make_stack(case, rng):
    h, d_k, d_v, d_ff, _ = case["sizes"]
    options = {name: case["options"][name] for name in OF_LAYERS}
    options |= {"d_k": d_k, "d_v": d_v, "norm_eps": 0.01, "dtype": np.float64}
    if case["kind"] == "encoder":
        return randomise(Encoder(2, 6, h, d_ff, **options), rng)
    cross = {"decoder": "per_layer", "decoder, shared": "shared", "decoder, alone": "none"}
    return randomise(Decoder(2, 6, h, d_ff, cross_attention=cross[case["kind"]], **options), rng)


def draw_ids(model, rng, B, S, T):
    if isinstance(model, LanguageModel):
        return (rng.integers(0, model.config.vocab_size, (B, T)),)
    sizes = model.config.source_vocab_size, model.config.target_vocab_size
    return rng.integers(0, sizes[0], (B, S)), rng.integers(0, sizes[1], (B, T))


def prepare(case, **more):
    """(layer, inputs, masks, dy, rng): inputs, masks and dy are batch first and read-only."""
    rng, (B, S, T) = np.random.default_rng(case["seed"]), case["lengths"]
    h = case["sizes"][0]
    hidden = np.where(rng.random((B, 1, 1, S)) < 0.7, rng.standard_normal((B, 1, 1, S)), -np.inf)
    seen = rng.random((B, h, T, T)) < 0.7
    if case["kind"] in MODELS:
        layer = make_model(case, rng, **more)
        inputs = draw_ids(layer, rng, B, S, T)
        masks = {"mask": seen} if len(inputs) == 1 else {"source_mask": hidden, "target_mask": seen}
    else:
        layer = make_stack(case, rng)
        inputs = (rng.standard_normal((B, T, 6)),)
        masks = {"mask" if case["kind"] == "encoder" else "target_mask": seen}
        if case["kind"] in ("decoder", "decoder, shared"):
            inputs = (*inputs, rng.standard_normal((B, S, 6)))
            masks["memory_mask"] = np.broadcast_to(hidden, (B, 1, T, S))
    dy = rng.standard_normal(layer(*inputs, **masks).shape)
    for array in (*inputs, *masks.values(), dy):
        array.flags.writeable = False
    return layer, inputs, masks, dy, rng


def over(change, masks):
    return {name: change(mask) for name, mask in masks.items()}


# Batches

LARGE_OPTIONS = {"norm": "post", "final_norm": True, "norm_bias": True, "attention_bias": True,
                 "feed_forward_bias": True, "activation": "gelu", "pad_id": 0}  # fmt: skip


@given(case=cases(MODELS + STACKS))
def test_a_permuted_batch_gives_permuted_results_and_the_same_gradients(case):
    layer, inputs, masks, dy, rng = prepare(case)
    order = rng.permutation(len(dy))

    def permuted(a):
        return a[order]

    y, returned, grads = run(layer, inputs, masks, dy)
    found = run(layer, tree_map(permuted, inputs), over(permuted, masks), dy[order])
    assert_close(found[:2], tree_map(permuted, (y, returned)))
    assert_close(found[2], grads)


@given(case=cases(MODELS + STACKS))
def test_the_parts_of_a_batch_add_up_to_its_gradients(case):
    """backward adds to .grad: the parts after one another give what the whole does."""
    layer, inputs, masks, dy, rng = prepare(case)
    y, returned, grads = run(layer, inputs, masks, dy)
    layer.zero_grad()
    cut = rng.integers(1, len(dy))
    for part in np.s_[:cut], np.s_[cut:]:

        def of_part(a, part=part):
            return a[part]

        y_part, ctx = layer.forward(*tree_map(of_part, inputs), **over(of_part, masks))
        assert_close(y_part, y[part])
        assert_close(layer.backward(ctx, dy[part]), tree_map(of_part, returned))
    assert_close(parameter_gradients(layer), grads)


@pytest.mark.parametrize("kind", MODELS + STACKS)
def test_a_batch_of_many_items_is_that_of_few(kind):
    """Large arrays may be computed in other ways than small ones, and in others again where scores
    are large, as some are here (which multiplies the rounding)."""
    case = {"kind": kind, "sizes": (2, 3, 5, 7, 11), "lengths": (48, 9, 11), "tie": "none",
            "options": LARGE_OPTIONS, "seed": 3}  # fmt: skip
    layer, inputs, masks, dy, _ = prepare(case)
    masks = over(lambda mask: mask[:, :1] > -np.inf if is_float(mask) else mask[:, :1], masks)
    for name, parameter in layer.named_parameters():
        parameter.value *= 30.0 if "W_q.W" in name else 1.0
    y, returned, grads = run(layer, inputs, masks, dy)
    layer.zero_grad()
    for part in (slice(b, b + 3) for b in range(0, 48, 3)):

        def of_part(a, part=part):
            return a[part]

        y_part, ctx = layer.forward(*tree_map(of_part, inputs), **over(of_part, masks))
        assert_close(y_part, y[part], 1e-10)
        assert_close(layer.backward(ctx, dy[part]), tree_map(of_part, returned), 1e-10)
    assert_close(parameter_gradients(layer), grads, 1e-10)


@few(12)
@given(case=cases(MODELS + STACKS), factor=st.sampled_from([-0.25, 8.0, 0.0]))
def test_gradients_are_linear_in_dy(case, factor):
    """A power of two multiplies every gradient exactly, to the last bit."""
    layer, inputs, masks, dy, rng = prepare(case)
    _, returned, grads = run(layer, inputs, masks, dy)
    _, found, found_grads = run(layer, inputs, masks, factor * dy)
    assert_equal(found, tree_map(lambda dx: factor * dx, returned))
    assert_equal(list(found_grads.values()), [factor * grad for grad in grads.values()])

    other = rng.standard_normal(dy.shape)
    _, more, more_grads = run(layer, inputs, masks, other)
    _, both, both_grads = run(layer, inputs, masks, dy + other)
    for a, b, total in zip(leaves(returned), leaves(more), leaves(both)):
        assert_close(a + b, total)
    assert_close({name: grad + more_grads[name] for name, grad in grads.items()}, both_grads)


# Padding, and positions that are hidden


def spread(rows, rng):
    """ids (B, T) and where they are real: each row's ids in their order, padding anywhere."""
    width = max(map(len, rows)) + rng.integers(0, 4)
    ids = np.zeros((len(rows), width), int)
    for row, into in zip(rows, ids):
        into[np.sort(rng.permutation(width)[: len(row)])] = row
    return ids, ids != 0


def rows_of(rng, B, V):
    return [rng.integers(1, V, rng.integers(1, 6)).tolist() for _ in range(B)]


@few(12)
@given(case=cases(MODELS))
def test_padding_on_any_side_and_of_any_amount_changes_nothing(case):
    """Logits at the real positions, and gradients, are those of each item alone; max_len counts
    what is real."""
    rng, B = np.random.default_rng(case["seed"]), case["lengths"][0]
    model = make_model(case, rng, pad_id=0, max_len=5)
    c, reads_a_source = model.config, isinstance(model, Transformer)
    V = c.target_vocab_size if reads_a_source else c.vocab_size
    texts = rows_of(rng, B, V)
    items = [(text,) for text in texts]
    ids, real = spread(texts, rng)
    inputs = (ids,)
    if reads_a_source:
        sources = rows_of(rng, B, c.source_vocab_size)
        items = list(zip(sources, texts))
        inputs = (spread(sources, rng)[0], ids)
    dy = rng.standard_normal((*real.shape, V)) * real[..., None]

    y, _, grads = run(model, inputs, {}, dy)
    model.zero_grad()
    for b, item in enumerate(items):
        alone, ctx = model.forward(*([row] for row in item))
        assert_close(y[b][real[b]], alone[0])
        model.backward(ctx, dy[b][real[b]][None])
    assert_close(parameter_gradients(model), grads)


@pytest.mark.parametrize("form", ["bool", "float"])
@given(case=cases(STACKS))
def test_hidden_positions_of_a_stack_change_nothing(form, case):
    """Rows that no query may attend to, anywhere in x and in the memory, and 1e3 large."""
    layer, inputs, masks, dy, rng = prepare(case)
    masks = over(lambda mask: np.broadcast_to(mask, (*mask.shape[:2], dy.shape[1], mask.shape[3])),
                 masks)  # fmt: skip
    if form == "bool":
        masks = over(lambda mask: mask if mask.dtype == bool else np.isfinite(mask), masks)
    else:
        masks = over(lambda mask: np.where(mask, 0.7, -np.inf) if mask.dtype == bool else mask,
                     masks)  # fmt: skip
    y, returned, grads = run(layer, inputs, masks, dy)

    def inserted(a, at, axis, what):
        return np.insert(a, at, what, axis)

    places = [rng.integers(0, a.shape[1] + 1, 3) for a in inputs]
    old = [np.insert(np.ones(a.shape[1], bool), at, False) for a, at in zip(inputs, places)]
    more = tuple(inserted(a, at, 1, 1e3 * rng.standard_normal(6)) for a, at in zip(inputs, places))
    hide = False if form == "bool" else -np.inf
    more_masks = {}
    for (name, mask), keys in zip(masks.items(), places):
        more_masks[name] = inserted(inserted(mask, places[0], 2, mask[:, :, :1]), keys, 3, hide)
    found = run(layer, more, more_masks, inserted(dy, places[0], 1, 0.0))
    assert_close(found[0][:, old[0]], y)
    for dx, found_dx, where in zip(leaves(returned), leaves(found[1]), old):
        assert_close(found_dx[:, where], dx)
        assert (found_dx[:, ~where] == 0).all()
    assert_close(found[2], grads)


@few(12)
@given(case=cases(MODELS[:2]))
def test_source_words_that_a_mask_hides_change_nothing(case):
    """They stand behind the others: a mask, unlike padding, takes no position away."""
    model, (source, target), masks, dy, rng = prepare(case)
    y, _, grads = run(model, (source, target), masks, dy)
    words = rng.integers(0, model.config.source_vocab_size, (len(source), 3))
    hidden = np.full((len(source), 1, 1, 3), -np.inf)
    longer = {**masks, "source_mask": np.concatenate([masks["source_mask"], hidden], axis=3)}
    found = run(model, (np.hstack([source, words]), target), longer, dy)
    assert_close(found[0], y)
    assert_close(found[2], grads)


# Other numbers for the same things


def in_order_of_heads(name, array, h, order):
    if ".W_o.W" in name:
        return array.reshape(h, -1, array.shape[1])[order].reshape(array.shape)
    if any(part in name for part in (".W_q.", ".W_k.", ".W_v.")):
        return array.reshape(*array.shape[:-1], h, -1)[..., order, :].reshape(array.shape)
    return array


@few(12)
@given(case=cases(MODELS))
def test_the_order_of_the_heads_does_not_matter(case):
    model, inputs, _, dy, rng = prepare(case)
    h = model.num_heads
    order = rng.permutation(h)
    y, _, grads = run(model, inputs, {}, dy)
    state = model.state_dict()
    model.load_state_dict({n: in_order_of_heads(n, a, h, order) for n, a in state.items()})
    found = run(model, inputs, {}, dy)
    assert_close(found[0], y)
    assert_close(found[2], {n: in_order_of_heads(n, a, h, order) for n, a in grads.items()})


def renumbered(name, array, new):
    """Row new[i] is what row i was, in the tables and outputs that ids number."""
    numbers = new[: array.shape[-1 if name.startswith("output.") else 0]]
    moved = array.copy()
    if name.endswith("embedding.W"):
        moved[numbers] = array
    elif name.startswith("output."):
        moved[..., numbers] = array
    return moved


@few(12)
@given(case=cases(MODELS))
def test_ids_are_names_alone(case):
    """Under other ids, padding among them, the words say the same."""
    model, inputs, masks, dy, rng = prepare(case)
    V = dy.shape[-1]
    new = np.append(rng.permutation(V), [V, V + 1])  # of a source with words of its own, too
    pad_id = None if model.pad_id is None else int(new[model.pad_id])
    other = type(model)(replace(model.config, pad_id=pad_id), dtype=np.float64)
    other.load_state_dict({n: renumbered(n, a, new) for n, a in model.state_dict().items()})
    y, _, grads = run(model, inputs, masks, dy)
    found = run(other, tuple(new[ids] for ids in inputs), masks, renumbered("output.", dy, new))
    assert_close(found[0], renumbered("output.", y, new))
    assert_close(found[2], {n: renumbered(n, a, new) for n, a in grads.items()})


# Weights in several places


def tables(model):
    """The three or two places of a table of words, and whether it lies there transposed."""
    names = ("embedding",) if isinstance(model, LanguageModel) else (
        "source_embedding", "target_embedding"
    )  # fmt: skip
    for name in (*names, "output"):
        W = getattr(model, name).W
        yield f"{name}.W", W, name == "output" and W.shape[0] != 6


@few(12)
@given(case=cases(MODELS, ties=("target_output", "source_target", "all")))
def test_a_tied_table_gets_the_sum_of_the_gradients_of_its_copies(case):
    tied, inputs, masks, dy, _ = prepare(case)
    untied = type(tied)(replace(tied.config, tie_embeddings="none"), dtype=np.float64)
    copies = {name: W.value.T if turned else W.value for name, W, turned in tables(tied)}
    state = {name: array for name, array in tied.state_dict().items() if name not in copies}
    untied.load_state_dict({**state, **copies})
    y, _, grads = run(tied, inputs, masks, dy)
    found = run(untied, inputs, masks, dy)
    assert_close(found[0], y)
    totals = {}
    for name, W, turned in tables(tied):
        grad = found[2].pop(name)
        first = next(n for n, p in tied.named_parameters() if p is W)
        totals[first] = totals.get(first, 0.0) + (grad.T if turned else grad)
    expected = {**totals, **found[2]}
    assert_close({name: expected[name] for name in grads}, grads)


@few(12)
@given(case=cases(MODELS[1:2]))
def test_a_shared_memory_projection_is_one_in_every_layer(case):
    """With the same W_k and W_v in all layers; it gets the sum of their gradients, the encoder
    below and all other weights the same."""
    shared, inputs, masks, dy, _ = prepare(case)
    per_layer = Transformer(replace(shared.config, cross_attention="per_layer"), dtype=np.float64)
    one = "decoder.memory_projection."

    def copies(name):
        rest = name.removeprefix(one)
        return [f"decoder.layers.{i}.cross_attention.{rest}" for i in range(3)]

    state = shared.state_dict()
    projection = {name: state.pop(name) for name in list(state) if name.startswith(one)}
    for name, array in projection.items():
        state |= dict.fromkeys(copies(name), array)
    per_layer.load_state_dict(state)
    y, _, grads = run(shared, inputs, masks, dy)
    found_y, _, found = run(per_layer, inputs, masks, dy)
    assert_close(found_y, y)
    for name in projection:
        found[name] = sum(found.pop(copy) for copy in copies(name))
    assert_close({name: found[name] for name in grads}, grads)


# dtypes


def float_dtypes(ctx):
    """Of all arrays and numbers in a context, and the dtypes that stand there themselves."""
    values = [value for _, value in walk(ctx)]
    dtypes = [np.asarray(a).dtype for a in values if isinstance(a, (np.generic, np.ndarray))]
    dtypes += [dtype for dtype in values if isinstance(dtype, np.dtype)]
    return {dtype for dtype in dtypes if dtype.kind == "f"}


@few(12)
@given(case=cases(MODELS), dropped=st.booleans())
def test_every_dtype_computes_the_same_to_its_rounding_and_keeps_it(case, dropped):
    """float32, float64 and longdouble: logits, contexts, gradients, also with dropout."""
    results = []
    for dtype in np.float32, np.float64, np.longdouble:
        rng, (B, S, T) = np.random.default_rng(case["seed"]), case["lengths"]
        model = make_model(case, rng, dtype)
        inputs = draw_ids(model, rng, B, S, T)
        bias = rng.standard_normal((T, T))  # a float64 mask changes no dtype
        masks = {"mask" if len(inputs) == 1 else "target_mask": bias}
        if dropped:
            masks["rng"] = rng
        y, ctx = model.forward(*inputs, **masks)
        dy = rng.standard_normal(y.shape).astype(np.float32)
        model.zero_grad()
        model.backward(ctx, dy)
        grads = parameter_gradients(model)
        assert {a.dtype for a in (y, *grads.values())} | float_dtypes(ctx) == {np.dtype(dtype)}
        results.append((y, grads))
    for (y, grads), (finer_y, finer_grads), eps in zip(
        results, results[1:], (np.finfo(np.float32).eps, np.finfo(np.float64).eps)
    ):
        assert_close(y, finer_y, 300 * eps)
        assert_close(grads, finer_grads, 2000 * eps)


@few(10)
@given(case=cases(MODELS), dtype=st.sampled_from([np.float32, np.float64, np.longdouble]))
def test_decoding_keeps_the_dtype(case, dtype):
    rng, (B, S, T) = np.random.default_rng(case["seed"]), case["lengths"]
    model = make_model(case, rng, dtype)
    *source, ids = draw_ids(model, rng, B, S, T)
    state = DecodingState(model, *source)
    logits = [state.prompt(ids[:, :1]), state.extend(ids[:, 1:])]
    caches = [vars(cache).values() for cache in state._decoder.caches]
    held = [a for values in caches for a in values if isinstance(a, np.ndarray)]
    assert len(held) == 2 * len(model.decoder.layers)
    held += leaves(state._decoder.memory)
    assert {a.dtype for a in (*logits, *held)} == {np.dtype(dtype)}
    assert_close(logits[1], model(*source, ids)[:, -1], 300 * np.finfo(dtype).eps)


SMALL = {"d_model": 4, "num_heads": 2, "d_k": 3, "d_ff": 3, "max_len": 5, "pad_id": 0}
SMALL_MODELS = {
    "transformer": lambda dtype: Transformer(
        TransformerConfig(5, 5, num_encoder_layers=1, num_decoder_layers=2, norm="post",
                          cross_attention="shared", tie_embeddings="all", positions="learned",
                          activation="gelu_tanh", attention_bias=True, **SMALL), dtype=dtype),
    "language model": lambda dtype: LanguageModel(
        LanguageModelConfig(5, num_layers=2, activation="gelu", attention_bias=True,
                            norm_bias=False, **SMALL), dtype=dtype),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((kind, np.longdouble) for kind in SMALL_MODELS), ("language model", np.float64)],
)
def test_central_differences_agree_as_closely_as_the_dtype_allows(kind, dtype):
    """To 1e-10 where there are more bits than float64 has: along two random directions of each
    tensor, so closely that one wrong entry shows."""
    more_bits = np.finfo(dtype).nmant > 52
    step, tolerance = (1e-4, 1e-10) if more_bits else (3e-4, 1e-7)
    rng = np.random.default_rng(7)
    model = randomise(SMALL_MODELS[kind](dtype), rng)
    inputs = draw_ids(model, rng, 3, 2, 4)
    dy = rng.standard_normal(model(*inputs).shape).astype(dtype)
    _, _, grads = run(model, inputs, {}, dy)
    for name, parameter in model.named_parameters():
        start = parameter.value.copy()
        directions = rng.standard_normal((2, *start.shape)).astype(dtype) / start.size**0.5

        def slope(direction, h, parameter=parameter, start=start):
            parameter.value = start + h * direction
            above = model(*inputs)
            parameter.value = start - h * direction
            change = ((above - model(*inputs)) * dy).sum()
            parameter.value = start
            return change / (2 * h)

        # the step's own error is that of step ** 2, and goes with the one of twice the step
        numeric = np.array([(4 * slope(d, step) - slope(d, 2 * step)) / 3 for d in directions])
        analytic = np.array([(grads[name] * d).sum() for d in directions])
        if max(np.abs(analytic).max(), np.abs(numeric).max()) > 1e-9:
            assert relative_error(analytic, numeric) <= tolerance, name
    assert all((p.value != 0).any() and p.dtype == dtype for p in model.parameters())


# Reading and speaking in parts


@few(10)
@given(case=cases(MODELS))
def test_the_loss_is_the_same_in_any_parts(case):
    """Of a batch cut into batches, and of its texts read token by token."""
    rng, (B, S, T) = np.random.default_rng(case["seed"]), case["lengths"]
    model = make_model(case, rng)
    inputs = draw_ids(model, rng, B, S, T)
    targets = draw_ids(model, rng, B, S, T)[-1]
    loss = CrossEntropy(ignore_index=0, label_smoothing=0.1)
    expected = np.float64(evaluate(model, loss, [Batch(inputs, targets)]))
    order, cut = rng.permutation(B), rng.integers(1, B)
    parts = [Batch(tuple(ids[rows] for ids in inputs), targets[rows])
             for rows in (order[:cut], order[cut:])]  # fmt: skip
    assert_close(np.float64(evaluate(model, loss, parts)), expected)

    *source, ids = inputs
    state = DecodingState(model, *source)
    rows = [(state.extend if t else state.prompt)(ids[:, t : t + 1]) for t in range(T)]
    read = Batch((np.stack(rows, axis=1),), targets)
    assert_close(np.float64(evaluate(lambda logits: logits, loss, [read])), expected)


OPTIONS = [
    {},
    {"norm": "post", "positions": "learned", "attention_bias": True, "d_k": 2, "d_v": 5},
    {"cross_attention": "shared", "activation": "gelu", "tie_embeddings": "target_output"},
]


def model_that_decodes(kind, seed, options):
    options = {n: x for n, x in options.items() if kind != "language model" or n[:5] != "cross"}
    return decoding_model(kind, seed, **options)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_said_of_an_item_depends_on_it_alone(kind, options):
    """Whatever its batch mates, their order and the padding between its ids."""
    different = []
    for seed in range(2):
        rng = np.random.default_rng(seed)
        model, items = model_that_decodes(kind, seed, options), decoding_items(kind, seed, 6)
        order = rng.permutation(len(items))
        together, _ = spread([items[i] for i in order], rng)
        greedy = greedy_decode(model, together, **ends(model))
        drawn = sample(model, together, **ends(model), temperature=2.0, seed=seed)
        beams = beam_search(model, together, **ends(model), beam_size=3, n_best=2)
        different.append(len({*map(tuple, greedy)}))
        for place, i in enumerate(order):
            alone = [items[i]]
            assert greedy_decode(model, alone, **ends(model)) == [greedy[place]]
            (found,) = beam_search(model, alone, **ends(model), beam_size=3, n_best=2)
            assert [h.ids for h in found] == [h.ids for h in beams[place]]
            assert_close([h.score for h in found], [h.score for h in beams[place]])
            alone *= place + 1  # sample draws for each place by itself
            texts = sample(model, alone, **ends(model), temperature=2.0, seed=seed)
            assert texts[place] == drawn[place]
    assert max(different) > 2


@pytest.mark.parametrize("options", OPTIONS[:2])
def test_a_text_goes_on_from_any_part_of_itself(options):
    """What was said so far as the prompt: the same text goes on, beyond max_len too."""
    texts = []
    for seed in range(3):
        model = model_that_decodes("language model", seed, {**options, "pad_id": None})
        for prompt in decoding_items("language model", seed, 2, longest=5):
            (text,) = greedy_decode(model, [prompt], eos_id=EOS)
            texts.append(tuple(text))
            for n in range(min(len(text), room(model, prompt) - 1) + 1):
                assert greedy_decode(model, [prompt + text[:n]], eos_id=EOS) == [text[n:]]
            endless = list(generate(model, prompt, temperature=0, max_new_tokens=12))
            for n in range(1, 12):
                rest = generate(model, prompt + endless[:n], temperature=0, max_new_tokens=12 - n)
                assert list(rest) == endless[n:]
    assert len(set(texts)) > 5


@pytest.mark.parametrize("kind", KINDS)
def test_more_results_of_a_search_leave_the_first_ones(kind):
    for seed in range(4):
        model, items = decoding_model(kind, seed), batch_of(decoding_items(kind, seed))
        options = {**ends(model), "beam_size": 4, "length_penalty": 0.6}
        most = beam_search(model, items, **options, n_best=4)
        for n_best in 1, 2, 3:
            assert beam_search(model, items, **options, n_best=n_best) == [
                hypotheses[:n_best] for hypotheses in most
            ]
