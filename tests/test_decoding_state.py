"""Reading piece by piece equals reading all at once: DecodingState, and the caches below it."""

from itertools import pairwise

import numpy as np
import pytest
from helpers import (
    assert_close,
    assert_equal,
    distinct_primes,
    draw_mask,
    leaves,
    model_options,
    parameter_gradients,
    randomise,
    run,
    seeds,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from npdecoder import (
    Decoder,
    DecoderLayer,
    DecodingState,
    LanguageModel,
    LanguageModelConfig,
    MultiHeadAttention,
    Transformer,
    TransformerConfig,
    causal_mask,
)
from npdecoder.blocks.cache import DecoderState, KeyValueCache

# A model without cross-attention is a LanguageModel, and reads no source: source is ()

CROSS = ("none", "per_layer", "shared")
crosses = st.sampled_from(CROSS)
ties = st.sampled_from(["none", "target_output", "source_target", "all"])
MAX_LEN = 13


def make_model(cross, rng, V=17, tie="none", dtype=np.float64, **options):
    """Random weights; the vocabulary of the source is another where it may be."""
    options = {"d_model": 6, "num_heads": 2, "d_ff": 7, "max_len": MAX_LEN, **options}
    if cross == "none":
        tie = "target_output" if tie in ("target_output", "all") else "none"
        config = LanguageModelConfig(V, num_layers=2, tie_embeddings=tie, **options)
        return randomise(LanguageModel(config, dtype=dtype), rng)
    sizes = {"num_encoder_layers": 1, "num_decoder_layers": 2, "tie_embeddings": tie}
    words = V if tie in ("source_target", "all") else V + 2
    config = TransformerConfig(words, V, cross_attention=cross, **sizes, **options)
    return randomise(Transformer(config, dtype=dtype), rng)


def draw(cross, sizes, tie, options, rng, dtype=np.float64, T=9):
    """A model, its source and ids (B, T), with padding wherever it falls."""
    h, d_k, d_v, V, B, S = sizes
    options = {"num_heads": h, "d_k": d_k, "d_v": d_v, **options}
    model = make_model(cross, rng, V, tie, dtype, **options)
    return model, draw_source(model, rng, B, S), rng.integers(0, V, (B, T))


def draw_source(model, rng, B, S):
    if isinstance(model, LanguageModel):
        return ()
    return (rng.integers(0, model.config.source_vocab_size, (B, S)),)


def draw_pieces(rng, T):
    """Slices that cut 0 .. T somewhere."""
    cuts = np.flatnonzero(rng.random(T - 1) < 0.5) + 1
    return slices([0, *cuts.tolist(), T])


def slices(bounds):
    return [slice(a, b) for a, b in pairwise(bounds)]


def cut_everywhere(T):
    """Every way to cut T into pieces."""
    for bits in range(2 ** (T - 1)):
        yield slices([0, *(t for t in range(1, T) if bits >> (t - 1) & 1), T])


def read(state, ids, pieces):
    """The logits after each piece of ids, the first of which is a prompt."""
    return [state.extend(ids[:, p]) if state.length else state.prompt(ids[:, p]) for p in pieces]


def after(state, *calls):
    """The logits of some more reading, to compare two states by."""
    return [state.extend(ids) for ids in calls]


# Equal to a full forward


@settings(max_examples=150)
@given(cross=crosses, sizes=distinct_primes(6), tie=ties, options=model_options, seed=seeds)
def test_every_step_equals_a_full_forward(cross, sizes, tie, options, seed):
    rng = np.random.default_rng(seed)
    model, source, ids = draw(cross, sizes, tie, options, rng)
    pieces = draw_pieces(rng, ids.shape[1])
    state = DecodingState(model, *source)
    for piece, logits in zip(pieces, read(state, ids, pieces)):
        full = model(*source, ids[:, : piece.stop])[:, -1]
        assert logits.shape == full.shape == (len(ids), full.shape[-1])
        assert_close(logits, full)
    assert state.length == ids.shape[1]
    assert state.batch_size == len(ids)


@given(cross=crosses, sizes=distinct_primes(6), tie=ties, options=model_options, seed=seeds)
def test_every_step_equals_a_full_forward_in_float32(cross, sizes, tie, options, seed):
    rng = np.random.default_rng(seed)
    model, source, ids = draw(cross, sizes, tie, options, rng, np.float32)
    pieces = draw_pieces(rng, ids.shape[1])
    for piece, logits in zip(pieces, read(DecodingState(model, *source), ids, pieces)):
        assert logits.dtype == np.float32
        assert_close(logits, model(*source, ids[:, : piece.stop])[:, -1], 1e-5)


# A prompt of 6 ids and 3 more, with 2 heads: a mix-up of heads and time shows, and so does a leak
# from padding, whose embedding is 1e3. The first row stands alone as 7 ids, and is padded.

PROMPTS = np.array([[0, 0, 5, 7, 9, 4, 2, 8, 3], [3, 8, 1, 6, 2, 5, 9, 9, 4]])
SOURCES = np.array([[0, 0, 0, 5, 7], [9, 4, 2, 0, 0]])
ALONE = [([5, 7], [5, 7, 9, 4, 2, 8, 3]), ([9, 4, 2], [3, 8, 1, 6, 2, 5, 9, 9, 4])]


def padded_model(cross, dtype=np.float64, **options):
    """(model, source): as the other models, and with a padding that would show."""
    options = {"pad_id": 0, "d_k": 3, "d_v": 5, **options}
    model = make_model(cross, np.random.default_rng(27), dtype=dtype, **options)
    if cross == "none":
        model.embedding.W.value[0] = 1e3
        return model, ()
    model.source_embedding.W.value[0] = model.target_embedding.W.value[0] = 1e3
    return model, (SOURCES,)


def alone(model):
    """(9, B, V): the logits of each row by itself, unpadded; NaN where its padding stands."""
    logits = np.full((*PROMPTS.shape, 17), np.nan)
    for row, (source, ids) in zip(logits, ALONE):
        inputs = [ids] if isinstance(model, LanguageModel) else [source, ids]
        row[-len(ids) :] = model(*(np.array([x]) for x in inputs))[0]
    return logits.swapaxes(0, 1)


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("cross", CROSS)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_a_prompt_in_any_pieces_and_three_tokens(cross, norm, positions, dtype):
    model, source = padded_model(cross, dtype, norm=norm, positions=positions)
    expected, tolerance = alone(model), 1e-12 if dtype == np.float64 else 1e-5
    everything = norm == "pre" and positions == "sinusoidal"
    ways = cut_everywhere(6) if everything else map(slices, [[0, 6], [0, 3, 6], [0, 1, 2, 6]])
    for pieces in ways:
        pieces = [*pieces, slice(6, 7), slice(7, 8), slice(8, 9)]
        logits = read(DecodingState(model, *source), PROMPTS, pieces)
        for piece, step in zip(pieces, logits):
            real = ~np.isnan(expected[piece.stop - 1, :, 0])
            assert real[1]
            assert_close(step[real], expected[piece.stop - 1][real], tolerance)


@pytest.mark.parametrize("T", [1, 2, 3])
@pytest.mark.parametrize("cross", CROSS)
def test_several_tokens_after_the_prompt(cross, T):
    model, source = padded_model(cross)
    pieces = slices([0, 3, *range(3 + T, 10, T)])
    for piece, step in zip(pieces, read(DecodingState(model, *source), PROMPTS, pieces)):
        assert_close(step, alone(model)[piece.stop - 1])


@pytest.mark.parametrize("cross", CROSS)
def test_what_stands_in_the_padding_changes_nothing(cross):
    model, source = padded_model(cross)
    logits = read(DecodingState(model, *source), PROMPTS, slices([0, 4, 6, 7, 8, 9]))
    for parameter in {id(p): p for n, p in model.named_parameters() if "embedding" in n}.values():
        parameter.value[0] = -1e6
    again = read(DecodingState(model, *source), PROMPTS, slices([0, 4, 6, 7, 8, 9]))
    assert_equal(logits, again)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("cross", CROSS[1:])
def test_more_padding_of_the_source_changes_nothing(cross, left):
    model, source = padded_model(cross)
    more = np.pad(SOURCES, ((0, 0), (4, 0) if left else (0, 4)))
    pieces = slices([0, 6, 7, 9])
    logits = read(DecodingState(model, *source), PROMPTS, pieces)
    assert_close(read(DecodingState(model, more), PROMPTS, pieces), logits)


@pytest.mark.parametrize("cross", CROSS[1:])
@pytest.mark.parametrize("kind", ["keys", "keys of items", "float"])
@pytest.mark.parametrize("pad_id", [0, None])
def test_a_source_mask_hides_at_every_step(cross, pad_id, kind):
    model, (source,) = padded_model(cross, pad_id=pad_id)
    keep = np.array([[True, True, True, True, False], [False, True, True, True, True]])
    mask = {
        "keys": keep[:1],
        "keys of items": keep[:, None, None, :],
        "float": np.random.default_rng(0).standard_normal((2, 1, 1, 5)),
    }[kind]
    expected = model(source, PROMPTS, mask)
    assert np.abs(expected - model(source, PROMPTS)).max() > 1e-3
    state = DecodingState(model, source, mask)
    pieces = slices([0, 6, 7])
    for piece, step in zip(pieces, read(state, PROMPTS, pieces)):
        assert_close(step, expected[:, piece.stop - 1])
    state.select([1, 0, 1])
    assert_close(state.extend(PROMPTS[[1, 0, 1], 7:8]), expected[[1, 0, 1], 7])


@pytest.mark.parametrize("cross", CROSS)
@pytest.mark.parametrize("dtype", ["uint8", "int16", ">i4", "uint64"])
def test_ids_of_any_integers(cross, dtype):
    model, source = padded_model(cross)
    pieces = slices([0, 6, 7, 9])
    expected = read(DecodingState(model, *source), PROMPTS, pieces)
    source = [ids.astype(dtype) for ids in source]
    assert_equal(read(DecodingState(model, *source), PROMPTS.astype(dtype), pieces), expected)


@pytest.mark.parametrize("cross", CROSS)
def test_no_items(cross):
    model, source = padded_model(cross)
    source = [ids[:0] for ids in source]
    logits = read(DecodingState(model, *source), PROMPTS[:0], slices([0, 6, 7, 9]))
    assert [step.shape for step in logits] == [(0, 17)] * 3


def test_length_and_counts():
    model, _ = padded_model("none")
    state = DecodingState(model)
    assert (state.length, state.batch_size) == (0, None)
    seen = []
    for piece in slices([0, 3, 6, 7]):
        read(state, PROMPTS, [piece])
        seen.append((state.length, state.batch_size, state.counts.tolist()))
    assert seen == [(3, 2, [1, 3]), (6, 2, [4, 6]), (7, 2, [5, 7])]


@pytest.mark.parametrize("cross", CROSS)
def test_max_len_counts_tokens_and_no_padding(cross):
    """A row may be longer than max_len by its padding."""
    model, source = padded_model(cross, max_len=9)
    long = np.pad(PROMPTS, ((0, 0), (4, 0)))
    for pieces in slices([0, 13]), slices([0, 2, 6, 13]), slices([0, 12, 13]):
        logits = read(DecodingState(model, *source), long, pieces)
        assert_close(logits[-1], alone(model)[-1])


# What is computed


def spy(monkeypatch, layer, seen):
    """Every call of layer.forward appends its arguments to seen."""
    forward = layer.forward

    def spying(*args):
        seen.append(args)
        return forward(*args)

    monkeypatch.setattr(layer, "forward", spying)


@pytest.mark.parametrize("cross", CROSS)
def test_positions_go_on_from_those_before(cross, monkeypatch):
    """6, 7, 8 after a prompt of 6; two fewer where two of the six are padding."""
    model, source = padded_model(cross)
    seen = []
    spy(monkeypatch, model.positions if cross == "none" else model.target_positions, seen)
    read(DecodingState(model, *source), PROMPTS, slices([0, 6, 7, 8, 9]))
    prompt, *steps = [np.broadcast_to(at, x.shape[:2]).tolist() for x, at in seen]
    assert prompt[0][2:] == [0, 1, 2, 3]
    assert prompt[1] == [0, 1, 2, 3, 4, 5]
    assert steps == [[[4], [6]], [[5], [7]], [[6], [8]]]


@pytest.mark.parametrize("tie", ["none", "target_output"])
@pytest.mark.parametrize("cross", CROSS)
def test_only_the_last_logits_are_computed(cross, tie, monkeypatch):
    model, source = padded_model(cross, tie=tie)
    seen = []
    spy(monkeypatch, model.output, seen)
    read(DecodingState(model, *source), PROMPTS, slices([0, 6, 7, 9]))
    assert [x.size for (x,) in seen] == [2 * 6] * 3


@pytest.mark.parametrize("cross", CROSS)
def test_every_id_is_read_once(cross, monkeypatch):
    model, source = padded_model(cross)
    seen = [[] for _ in model.decoder.layers]
    for layer, calls in zip(model.decoder.layers, seen):
        spy(monkeypatch, layer.self_attention.W_k, calls)
    read(DecodingState(model, *source), PROMPTS, slices([0, 6, 7, 9]))
    for calls in seen:
        assert [x.shape[:2] for (x,) in calls] == [(2, 6), (2, 1), (2, 2)]


@pytest.mark.parametrize("cross", CROSS[1:])
def test_the_source_is_encoded_and_projected_once(cross, monkeypatch):
    model, source = padded_model(cross)
    decoder = model.decoder
    if cross == "shared":
        owners = [decoder.memory_projection]
    else:
        owners = [layer.cross_attention for layer in decoder.layers]
    seen = [[] for _ in range(2 * len(owners) + 1)]
    linears = [linear for owner in owners for linear in (owner.W_k, owner.W_v)]
    for layer, calls in zip([model.encoder, *linears], seen):
        spy(monkeypatch, layer, calls)
    state = DecodingState(model, *source)
    read(state, PROMPTS, slices([0, 6, 7]))
    state.select([1, 0, 0])
    state.extend([[3], [4], [5]])
    assert [len(calls) for calls in seen] == [1] * len(seen)
    assert all(args[0].shape[:2] == SOURCES.shape for ((args),) in seen)


def test_the_weights_keep_no_trace():
    model, source = padded_model("per_layer")
    before = model.state_dict()
    ids = PROMPTS.copy()
    ids.flags.writeable = False
    read(DecodingState(model, *source), ids, slices([0, 6, 7]))
    assert_equal(list(model.state_dict().values()), list(before.values()))
    assert all(parameter._grad is None for parameter in model.parameters())


# Errors. The state goes on as if the bad call had not been made.

LONG = np.full((2, 10), 3)
BAD_IDS = {
    "another batch": ([[3]], ValueError, r"ids has shape \(1, 1\), expected \(2, T\)"),
    "too many": (LONG, ValueError, "14 positions with those before, more than max_len 13"),
    "no column": (np.zeros((2, 0), int), ValueError, "ids has no column"),
    "one axis": ([3, 4], ValueError, r"ids has shape \(2,\)"),
    "three axes": ([[[3], [4]]], ValueError, r"ids has shape \(1, 2, 1\)"),
    "ragged": ([[3], [4, 5]], ValueError, "ids is no rectangular array"),
    "too large": ([[3], [17]], IndexError, r"ids\[1, 0\] is 17"),
    "negative": ([[3], [-1]], IndexError, r"ids\[1, 0\] is -1"),
    "floats": ([[3.0], [4.0]], TypeError, "ids has dtype float64"),
    "bools": ([[True], [False]], TypeError, "ids has dtype bool"),
}


@pytest.mark.parametrize("name", BAD_IDS)
@pytest.mark.parametrize("cross", CROSS)
def test_bad_ids_leave_a_state_as_it_was(cross, name):
    bad, error, message = BAD_IDS[name]
    model, source = padded_model(cross)
    state, other = DecodingState(model, *source), DecodingState(model, *source)
    for one in state, other:
        one.prompt(PROMPTS[:, :4])
    with pytest.raises(error, match=message):
        state.extend(bad)
    assert (state.length, state.batch_size) == (4, 2)
    more = PROMPTS[:, 4:6], PROMPTS[:, 6:7]
    assert_equal(after(state, *more), after(other, *more))


# 10 ids are no bad prompt, and the prompt of a language model says how many items there are
BAD_PROMPTS = [(cross, name) for cross in CROSS for name in BAD_IDS if name != "too many"]
BAD_PROMPTS.remove(("none", "another batch"))


@pytest.mark.parametrize(("cross", "name"), BAD_PROMPTS)
def test_a_bad_prompt_leaves_a_state_as_it_was(cross, name):
    bad, error, message = BAD_IDS[name]
    model, source = padded_model(cross)
    state = DecodingState(model, *source)
    with pytest.raises(error, match=message):
        state.prompt(bad)
    pieces = slices([0, 6, 7])
    expected = read(DecodingState(model, *source), PROMPTS, pieces)
    assert_equal(read(state, PROMPTS, pieces), expected)


def test_a_bad_prompt_does_not_settle_the_batch():
    model, _ = padded_model("none")
    for bad in np.zeros((3, 0), int), [[3, 17]] * 3, np.full((3, 14), 3):
        state = DecodingState(model)
        with pytest.raises((ValueError, IndexError)):
            state.prompt(bad)
        assert_equal(state.prompt(PROMPTS), DecodingState(model).prompt(PROMPTS))


@pytest.mark.parametrize("cross", CROSS)
def test_too_long_a_prompt(cross):
    model, source = padded_model(cross)
    state = DecodingState(model, *source)
    with pytest.raises(ValueError, match=r"14 positions.*more than max_len 13"):
        state.prompt(np.full((2, 14), 3))
    state.prompt(np.full((2, 13), 3))
    with pytest.raises(ValueError, match=r"14 positions.*more than max_len 13"):
        state.extend([[3], [3]])
    state.extend([[0], [0]])  # padding takes no position


@pytest.mark.parametrize("cross", CROSS)
def test_a_state_takes_one_prompt(cross):
    model, source = padded_model(cross)
    state, other = DecodingState(model, *source), DecodingState(model, *source)
    for one in state, other:
        read(one, PROMPTS, slices([0, 4, 6]))
    with pytest.raises(ValueError, match="the state has read 6 ids: make a new one"):
        state.prompt(PROMPTS)
    assert_equal(after(state, [[3], [4]]), after(other, [[3], [4]]))


@pytest.mark.parametrize("cross", CROSS)
def test_a_prompt_comes_first(cross):
    model, source = padded_model(cross)
    state = DecodingState(model, *source)
    with pytest.raises(ValueError, match=r"read nothing: begin with prompt\(ids\)"):
        state.extend(PROMPTS)
    assert_equal(state.prompt(PROMPTS), DecodingState(model, *source).prompt(PROMPTS))


def test_a_source_for_a_transformer_and_for_nothing_else():
    transformer, (source,) = padded_model("per_layer")
    model, _ = padded_model("none")
    with pytest.raises(ValueError, match="source_ids is None"):
        DecodingState(transformer)
    for extra in ([[3]], None), (None, np.ones((1, 1), bool)):
        with pytest.raises(ValueError, match="reads no source"):
            DecodingState(model, *extra)
    with pytest.raises(TypeError, match="model is a Decoder, expected"):
        DecodingState(model.decoder)
    for bad, error, message in (
        ([3, 4], ValueError, "source_ids has shape"),
        ([[19]], IndexError, r"source_ids\[0, 0\] is 19"),
        ([[3.0]], TypeError, "source_ids has dtype float64"),
        (np.full((1, 14), 3), ValueError, "source_ids has 14 positions"),
    ):
        with pytest.raises(error, match=message):
            DecodingState(transformer, bad)
    with pytest.raises(ValueError, match="source_mask"):
        DecodingState(transformer, source, np.ones((2, 1, 1, 4), bool))
    with pytest.raises(TypeError, match="source_mask"):
        DecodingState(transformer, source, np.ones((2, 1, 1, 5), int))


INTERRUPTED = ("layers.1.self_attention", "layers.0.feed_forward", "layers.1.feed_forward")


@pytest.mark.parametrize("where", [*INTERRUPTED, "norm", "output"])
@pytest.mark.parametrize("cross", CROSS)
def test_an_interrupted_state_is_refused_or_whole(cross, where, monkeypatch):
    """What it has read by its own account is what it goes on from, or it does not go on."""
    model, source = padded_model(cross)
    ids = PROMPTS[1:]
    source = [s[1:] for s in source]
    state = DecodingState(model, *source)
    state.prompt(ids[:, :4])
    layer = model.output if where == "output" else model.decoder
    for name in where.split(".") if where != "output" else ():
        layer = layer[int(name)] if name.isdigit() else getattr(layer, name)

    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(layer, "forward", interrupt)
        with pytest.raises(KeyboardInterrupt):
            state.extend(ids[:, 4:5])

    def go_on():
        try:
            return [state.extend(ids[:, t : t + 1])[0] for t in range(state.length, 9)]
        except ValueError as error:
            return str(error)

    result = go_on()
    if isinstance(result, str) or where in INTERRUPTED[:2]:
        assert "half extended" in result
        with pytest.raises(ValueError, match="half extended"):
            state.prompt(ids)
    else:
        assert_close(result, list(model(*source, ids)[0, -len(result) :]))


# select


@pytest.mark.parametrize("rows", [[1, 0], [0, 0, 1, 0], [1], [1, 1], [0, 1], np.zeros(0, int)])
@pytest.mark.parametrize("cross", CROSS)
def test_selected_rows_equal_a_state_of_these_rows(cross, rows):
    model, source = padded_model(cross)
    chosen = DecodingState(model, *source)
    read(chosen, PROMPTS, slices([0, 3, 6]))
    chosen.select(rows)
    fresh = DecodingState(model, *(ids[rows] for ids in source))
    fresh.prompt(PROMPTS[rows, :6])
    assert chosen.batch_size == fresh.batch_size == len(rows)
    assert chosen.counts.tolist() == fresh.counts.tolist()
    more = PROMPTS[rows, 6:7], PROMPTS[rows, 7:9]
    assert_close(after(chosen, *more), after(fresh, *more))


@pytest.mark.parametrize("cross", CROSS)
def test_select_again_and_again(cross):
    """As a beam does it: what came before goes with each row."""
    rng = np.random.default_rng(3)
    model, source = padded_model(cross)
    state, text = DecodingState(model, *source), PROMPTS[:, :3]
    items = np.arange(2)
    state.prompt(text)
    for size in (4, 1, 3, 3, 2, 5):
        rows = rng.integers(0, len(text), size)
        state.select(rows)
        new = rng.integers(0, 17, (size, 1))
        text, items = np.concatenate([text[rows], new], axis=1), items[rows]
        full = model(*(ids[items] for ids in source), text)[:, -1]
        assert_close(state.extend(new), full)


@pytest.mark.parametrize("cross", CROSS[1:])
def test_sources_may_be_selected_before_the_prompt(cross):
    model, source = padded_model(cross)
    state = DecodingState(model, *source)
    state.select([1, 0, 1])
    ids = PROMPTS[[1, 0, 0], :6]
    assert_close(state.prompt(ids), DecodingState(model, SOURCES[[1, 0, 1]]).prompt(ids))


@pytest.mark.parametrize("cross", CROSS[1:])
def test_the_first_step_of_one_source_may_be_repeated(cross):
    """One item becomes three, its padding mask with it."""
    model, source = padded_model(cross)
    state = DecodingState(model, source[0][:1])
    state.prompt([[5]])
    state.select([0, 0, 0])
    text = np.array([[5, 7], [5, 9], [5, 3]])
    assert_close(state.extend(text[:, 1:]), model(SOURCES[[0, 0, 0]], text)[:, -1])


@pytest.mark.parametrize("cross", CROSS)
def test_a_repeated_row_is_an_independent_copy(cross):
    model, source = padded_model(cross)
    state, other = DecodingState(model, *source), DecodingState(model, *source)
    for one in state, other:
        one.prompt(PROMPTS[:, :6])
    state.select([1, 1])
    other.select([1])
    for token in 3, 4, 5:  # the second copy reads something else all the time
        both = state.extend([[token], [token + 6]])
        assert_close(both[:1], other.extend([[token]]))
        assert np.abs(both[0] - both[1]).max() > 1e-3


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        ([2], IndexError),
        ([-1], IndexError),
        ([0.0], TypeError),
        ([True, False], TypeError),
        ([[0, 1]], ValueError),
        (0, ValueError),
    ],
)
@pytest.mark.parametrize("cross", CROSS)
def test_bad_rows_leave_a_state_as_it_was(cross, rows, error):
    model, source = padded_model(cross)
    state, other = DecodingState(model, *source), DecodingState(model, *source)
    for one in state, other:
        one.prompt(PROMPTS[:, :6])
    with pytest.raises(error, match="rows"):
        state.select(rows)
    assert_equal(after(state, [[3], [4]]), after(other, [[3], [4]]))


# Decoder.extend


def make_decoder(cross, rng, num_layers=2, **options):
    options = {"d_k": 5, "d_v": 7, **options}
    decoder = Decoder(num_layers, 6, 2, 11, cross_attention=cross, dtype=np.float64, **options)
    return randomise(decoder, rng)


@given(
    cross=crosses,
    sizes=distinct_primes(3, 7),
    norm=st.sampled_from(["pre", "post"]),
    final_norm=st.booleans(),
    masks=st.tuples(*[st.sampled_from(["none", "random", "random per head", "float"])] * 2),
    seed=seeds,
)
def test_extend_gives_the_rows_of_forward(cross, sizes, norm, final_norm, masks, seed):
    rng = np.random.default_rng(seed)
    (B, S, T), h = sizes, 2
    decoder = make_decoder(cross, rng, norm=norm, final_norm=final_norm)
    x, memory = rng.standard_normal((B, T, 6)), rng.standard_normal((B, S, 6))
    target_mask, memory_mask = draw_mask(masks[0], rng, B, h, T, T), None
    causal = np.tri(T, dtype=bool)
    if target_mask is None:
        target_mask = causal[None, None]
    elif target_mask.dtype == bool:
        target_mask = target_mask & causal
    else:
        target_mask = np.where(causal, target_mask, -np.inf)
    if cross == "none":
        memory = None
    elif masks[1] != "none":  # of the keys: the same for every query
        memory_mask = draw_mask(masks[1], rng, B, h, 1, S)
    expected = decoder(x, memory, target_mask, memory_mask)
    state = decoder.new_state(memory)
    for piece in draw_pieces(rng, T):
        mask = target_mask[:, :, piece, : piece.stop]
        y = decoder.extend(state, x[:, piece], mask, memory_mask)
        assert_close(y, expected[:, piece])
        assert state.length == piece.stop


@pytest.mark.parametrize("cross", CROSS)
def test_one_position_at_a_time_needs_no_mask(cross):
    rng = np.random.default_rng(1)
    decoder = make_decoder(cross, rng)
    x, memory = rng.standard_normal((3, 5, 6)), rng.standard_normal((3, 2, 6))
    inputs = () if cross == "none" else (memory,)
    expected = decoder(x, *(inputs or (None,)), causal_mask(5))
    state = decoder.new_state(*inputs)
    for t in range(5):
        assert_close(decoder.extend(state, x[:, t : t + 1]), expected[:, t : t + 1])


def test_a_state_holds_the_projected_memory():
    rng = np.random.default_rng(2)
    memory = rng.standard_normal((3, 4, 6))
    none, per_layer, shared = (make_decoder(cross, rng) for cross in CROSS)
    assert none.new_state().memory == [None, None]
    first, second = shared.new_state(memory).memory
    assert first is second
    assert_equal(first, shared.memory_projection(memory))
    pairs = per_layer.new_state(memory).memory
    for (K, V), layer in zip(pairs, per_layer.layers):
        assert_equal((K, V), layer.cross_attention.project(memory, memory)[0])
        assert (K.shape, V.shape) == ((3, 2, 4, 5), (3, 2, 4, 7))
    for decoder, inputs in (shared, ()), (per_layer, ()), (none, (memory,)):
        with pytest.raises(ValueError, match="memory is"):
            decoder.new_state(*inputs)


def test_selecting_copies_a_shared_pair_once():
    pair = (np.arange(6.0).reshape(3, 1, 2, 1), np.arange(6.0).reshape(3, 1, 1, 2))
    state = DecoderState([pair, None, pair])
    state.select(np.array([2, 0]))
    assert state.memory[0] is state.memory[2]
    assert state.memory[1] is None
    assert_equal(state.memory[0], (pair[0][[2, 0]], pair[1][[2, 0]]))


BAD_EXTENSIONS = {
    "another batch": (np.zeros((2, 2, 6)), {}, "2"),
    "a mask of the new positions alone": (
        np.zeros((3, 2, 6)), {"target_mask": np.ones((2, 2), bool)}, r"\(2, 2\).*\(2, 7\)"
    ),
    "a mask of one position too many": (
        np.zeros((3, 2, 6)), {"target_mask": np.ones((3, 1, 2, 8), bool)}, r"8.*\(3, 2, 2, 7\)"
    ),
    "a mask of other queries": (
        np.zeros((3, 2, 6)), {"target_mask": np.ones((3, 7), bool)}, r"\(3, 7\).*\(2, 7\)"
    ),
    "another width": (np.zeros((3, 2, 5)), {}, "x has shape"),
    "no time": (np.zeros((3, 6)), {}, "x has shape"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_EXTENSIONS)
@pytest.mark.parametrize("cross", CROSS)
def test_a_bad_extension_changes_nothing(cross, name):
    x, masks, message = BAD_EXTENSIONS[name]
    rng = np.random.default_rng(4)
    decoder = make_decoder(cross, rng)
    memory = () if cross == "none" else (rng.standard_normal((3, 4, 6)),)
    first, more = rng.standard_normal((3, 5, 6)), rng.standard_normal((3, 2, 6))
    state, other = decoder.new_state(*memory), decoder.new_state(*memory)
    for one in state, other:
        decoder.extend(one, first, causal_mask(5))
    with pytest.raises(ValueError, match=message):
        decoder.extend(state, x, **masks)
    assert state.length == 5
    mask = causal_mask(2, 7)
    assert_equal(decoder.extend(state, more, mask), decoder.extend(other, more, mask))


def test_a_bad_memory_mask_changes_nothing():
    rng = np.random.default_rng(5)
    decoder = make_decoder("per_layer", rng)
    state = decoder.new_state(rng.standard_normal((3, 4, 6)))
    with pytest.raises(ValueError, match=r"memory_mask has shape \(2, 5\).*\(2, 4\)"):
        decoder.extend(state, np.zeros((3, 2, 6)), causal_mask(2), np.ones((2, 5), bool))
    assert state.length == 0


def test_a_state_whose_layers_disagree_is_refused():
    decoder = make_decoder("none", np.random.default_rng(6), num_layers=3)
    state = decoder.new_state()
    x = np.ones((2, 3, 6))
    decoder.extend(state, x, causal_mask(3))
    state.caches[0].append(np.zeros((2, 2, 1, 5)), np.zeros((2, 2, 1, 7)))
    with pytest.raises(ValueError, match=r"half extended.*make a new one"):
        decoder.extend(state, x[:, :1])
    assert [cache.length for cache in state.caches] == [4, 3, 3]


# Attention with a cache


def test_the_causal_mask_is_aligned_at_the_last_key():
    """Two queries after three keys, zeros in queries and keys, values 1 2 4 8 16 and, in a second
    item, backwards: each query averages what it sees."""
    attention = MultiHeadAttention(1, 1, dtype=np.float64)
    for linear, weight in zip("qkvo", (0.0, 0.0, 1.0, 1.0)):
        getattr(attention, f"W_{linear}").W.value = np.full((1, 1), weight)
    v = np.array([[1.0, 2, 4, 8, 16], [16, 8, 4, 2, 1]])[..., None]

    def attend(cached, query, key):
        """Some keys in the cache, then some queries and keys, at the places of v."""
        cache = KeyValueCache()
        if cached:
            attention.forward(v[:, :cached], v[:, :cached], v[:, :cached], cache=cache)
        new = v[:, cached : cached + key]
        mask = causal_mask(query, cached + key)
        y, _ = attention.forward(np.zeros((2, query, 1)), new, new, mask, cache=cache)
        assert cache.length == cached + key
        return y[..., 0]

    for cached in 0, 1, 2, 3, 4:
        assert_close(attend(cached, 2, 5 - cached), np.array([[3.75, 6.2], [7.5, 6.2]]))
        assert_close(attend(cached, 1, 5 - cached), np.array([[6.2], [6.2]]))
    for cached in 0, 1:  # three queries and two keys: the first query sees nothing
        assert_close(attend(cached, 3, 2 - cached), np.array([[0, 1, 1.5], [0, 16, 12]]))


def make_attention(rng, **options):
    options = {"d_k": 3, "d_v": 7, "bias": True, **options}
    return randomise(MultiHeadAttention(6, 2, dtype=np.float64, **options), rng)


@given(
    sizes=distinct_primes(3, 7),
    kind=st.sampled_from(["none", "causal", "random per head", "blind rows", "float"]),
    seed=seeds,
)
def test_attention_to_cached_keys_equals_attention_to_all(sizes, kind, seed):
    rng = np.random.default_rng(seed)
    B, T, S = sizes
    attention = make_attention(rng)
    query, (key, value) = rng.standard_normal((B, T, 6)), rng.standard_normal((2, B, S, 6))
    mask = draw_mask(kind, rng, B, 2, T, S)
    expected = attention(query, key, value, mask)
    cache = KeyValueCache()
    *first, last = draw_pieces(rng, S)
    for piece in first:
        attention.forward(query, key[:, piece], value[:, piece], cache=cache)
    y, _ = attention.forward(query, key[:, last], value[:, last], mask, cache=cache)
    assert_close(y, expected)


def test_a_layer_goes_on_from_its_cache():
    rng = np.random.default_rng(8)
    x, memory = rng.standard_normal((3, 5, 6)), rng.standard_normal((3, 4, 6))
    for cross in CROSS:
        layer = DecoderLayer(6, 2, cross_attention=cross, d_k=5, d_v=7, dtype=np.float64)
        randomise(layer, rng)
        pair = full = None
        if cross == "per_layer":
            pair, full = layer.cross_attention.project(memory, memory)[0], memory
        elif cross == "shared":
            pair = full = rng.standard_normal((3, 2, 4, 5)), rng.standard_normal((3, 2, 4, 7))
        cache = KeyValueCache()
        expected = layer(x, full, causal_mask(5))
        for piece in slices([0, 2, 3, 5]):
            mask = causal_mask(piece.stop - piece.start, piece.stop)
            assert_close(layer(x[:, piece], pair, mask, cache=cache), expected[:, piece])


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 2), r"mask has shape \(2, 2\), expected 2 dimensions \(2, 5\)"),
        ((2, 3), r"mask has shape \(2, 3\), expected 2 dimensions \(2, 5\)"),
        ((2, 6), r"mask has shape \(2, 6\), expected 2 dimensions \(2, 5\)"),
        ((3, 2, 2, 2), r"\(3, 2, 2, 2\).*\(3, 2, 2, 5\)"),
        ((3, 2, 5), r"\(3, 2, 5\)"),
    ],
)
def test_a_mask_covers_the_cached_and_the_new_keys(shape, message):
    rng = np.random.default_rng(9)
    attention = make_attention(rng)
    layer = randomise(DecoderLayer(6, 2, cross_attention="none", dtype=np.float64), rng)
    x = rng.standard_normal((3, 2, 6))
    for block, inputs, name in (attention, 3, "mask"), (layer, 1, "target_mask"):
        cache = KeyValueCache()
        block.forward(*[np.ones((3, 3, 6))] * inputs, cache=cache)
        with pytest.raises(ValueError, match=message):
            block.forward(*[x] * inputs, cache=cache, **{name: np.ones(shape, bool)})
        assert cache.length == 3


def test_another_batch_in_a_cache():
    """Even one item, which would broadcast."""
    rng = np.random.default_rng(10)
    attention = make_attention(rng)
    cache, other = KeyValueCache(), KeyValueCache()
    x, more = rng.standard_normal((3, 4, 6)), rng.standard_normal((3, 2, 6))
    for one in cache, other:
        attention.forward(x, x, x, cache=one)
    for B in 1, 2, 4, 0:
        bad = np.ones((B, 2, 6))
        with pytest.raises(ValueError, match=f"a batch of {B} items, but the cache holds 3"):
            attention.forward(bad, bad, bad, cache=cache)
        assert cache.length == 4
    one, two = (attention.forward(more, more, more, cache=c)[0] for c in (cache, other))
    assert_equal(one, two)


def test_an_empty_cache_is_no_cache_for_backward():
    rng = np.random.default_rng(11)
    attention = make_attention(rng)
    query, key, value = rng.standard_normal((3, 3, 4, 6))
    dy = rng.standard_normal((3, 4, 6))
    mask = causal_mask(4)
    expected = run(attention, (query, key, value), {"mask": mask}, dy)
    cached = run(attention, (query, key, value), {"mask": mask, "cache": KeyValueCache()}, dy)
    for one, other in zip(cached, expected):
        assert_close(one, other)


@pytest.mark.parametrize("cross", CROSS)
def test_an_empty_cache_is_no_cache_for_the_backward_of_a_layer(cross):
    rng = np.random.default_rng(12)
    layer = DecoderLayer(6, 2, cross_attention=cross, d_k=5, d_v=7, dtype=np.float64)
    randomise(layer, rng)
    x, dy, whole = rng.standard_normal((3, 2, 4, 6))
    if cross == "none":
        whole = memory = None
    elif cross == "shared":
        whole = memory = rng.standard_normal((2, 2, 4, 5)), rng.standard_normal((2, 2, 4, 7))
    else:
        memory, _ = layer.cross_attention.project(whole, whole)
    mask = {"target_mask": causal_mask(4)}
    y, returned, gradients = run(layer, (x, whole), mask, dy)
    y2, returned2, gradients2 = run(layer, (x, memory), {**mask, "cache": KeyValueCache()}, dy)
    assert_close(y2, y)
    if cross == "per_layer":  # from the pair no gradient goes back through its projection
        returned, returned2 = leaves(returned)[0], leaves(returned2)[0]
        for name in ("W_k", "W_v"):
            del gradients[f"cross_attention.{name}.W"], gradients2[f"cross_attention.{name}.W"]
    assert_close(returned2, returned)
    assert_close(gradients2, gradients)


def cached_blocks():
    """Blocks, the context of a second forward into their cache, and a gradient."""
    rng = np.random.default_rng(13)
    layer = DecoderLayer(6, 2, cross_attention="none", dtype=np.float64)
    x, dy = rng.standard_normal((2, 3, 4, 6))
    for block, inputs in (make_attention(rng), 3), (randomise(layer, rng), 1):
        cache = KeyValueCache()
        block.forward(*[x] * inputs, cache=cache)
        yield block, block.forward(*[x] * inputs, cache=cache)[1], dy


def test_backward_refuses_earlier_positions():
    """Their gradients would be lost."""
    for block, ctx, dy in cached_blocks():
        with pytest.raises(ValueError, match="from a cache"):
            block.backward(ctx, dy)


def test_a_refused_backward_adds_nothing():
    for block, ctx, dy in cached_blocks():
        with pytest.raises(ValueError, match="from a cache"):
            block.backward(ctx, dy)
        assert all(not parameter.grad.any() for parameter in block.parameters())


# KeyValueCache


@given(seed=seeds)
def test_a_cache_returns_all_that_was_appended(seed):
    rng = np.random.default_rng(seed)
    B, h, d_k, d_v = 3, 2, 5, 7
    K, V = rng.standard_normal((B, h, 0, d_k)), rng.standard_normal((B, h, 0, d_v))
    cache = KeyValueCache()
    for T in rng.integers(0, 6, 8):
        new_K, new_V = (rng.standard_normal((len(K), h, T, d)) for d in (d_k, d_v))
        K, V = np.concatenate([K, new_K], axis=2), np.concatenate([V, new_V], axis=2)
        assert_equal(cache.append(new_K, new_V), (K, V))
        assert cache.length == K.shape[2]
        if rng.random() < 0.4:
            rows = rng.integers(0, len(K), rng.integers(1, 5))
            K, V = K[rows], V[rows]
            cache.select(rows)


def test_a_cache_is_not_copied_at_every_step():
    """1000 steps: each buffer has twice the room of the one before."""
    cache = KeyValueCache()
    K, V = np.zeros((2, 3, 1, 5), np.float32), np.zeros((2, 3, 1, 7), np.float32)
    buffers, rooms = [], []
    for t in range(1000):
        K[:], V[:] = t, -t
        all_K, all_V = cache.append(K, V)
        for x, sign in (all_K, 1), (all_V, -1):
            assert (x[1, 2, :, 3] == sign * np.arange(t + 1)).all()
        if not buffers or all_K.base is not buffers[-1][0]:
            buffers.append((all_K.base, all_V.base))
            rooms.append(all_K.base.shape[2])
        assert all_V.base is buffers[-1][1]
    assert rooms == [2**n for n in range(11)]
    assert all_K.dtype == all_V.dtype == np.float32


def test_a_decoder_does_not_copy_its_caches_at_every_step():
    decoder = make_decoder("none", np.random.default_rng(14))
    state = decoder.new_state()
    seen = [set() for _ in state.caches]
    keep = []
    for cache, bases in zip(state.caches, seen):
        def append(K, V, append=cache.append, bases=bases):
            all_K, all_V = append(K, V)
            keep.append(all_K.base)  # or another array might get the same id
            bases.add(id(all_K.base))
            return all_K, all_V

        cache.append = append
    for _ in range(200):
        decoder.extend(state, np.ones((2, 1, 6)))
    assert [len(bases) for bases in seen] == [9, 9]


def test_selecting_from_an_empty_cache():
    cache = KeyValueCache()
    cache.select(np.array([1, 0]))
    assert cache.length == 0


def test_gradients_of_a_whole_model_after_decoding():
    """Decoding and training of one model do not meet."""
    model, source = padded_model("per_layer")
    _, ctx = model.forward(*source, PROMPTS)
    dy = np.random.default_rng(15).standard_normal((*PROMPTS.shape, 17))
    model.backward(ctx, dy)
    expected = parameter_gradients(model)
    model.zero_grad()
    read(DecodingState(model, *source), PROMPTS, slices([0, 6, 7]))
    model.backward(ctx, dy)
    assert_equal(list(parameter_gradients(model).values()), list(expected.values()))
