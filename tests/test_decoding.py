"""Greedy decoding against a step-by-step loop over the whole model."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from helpers import (
    BOS,
    EOS,
    KINDS,
    PAD,
    batch_of,
    decoding_items,
    decoding_model,
    ends,
    logits_after,
    measured,
    room,
)
from hypothesis import given
from hypothesis import strategies as st

from npdecoder import LanguageModel, LanguageModelConfig, Transformer
from npdecoder.decoding import greedy_decode

V = 7
MAX_LEN = 9

random_model = partial(decoding_model, "transformer")
sources = partial(decoding_items, "transformer")
padded = batch_of


def decode(model: Transformer, source_ids: Any, **options: Any) -> list[list[int]]:
    return greedy_decode(model, source_ids, bos_id=BOS, eos_id=EOS, **options)


def brute_force(model: Transformer, source: list[int], limit: int = MAX_LEN) -> list[int]:
    """One source, and the whole model anew for each token."""
    text: list[int] = []
    while len(text) < limit and (best := int(logits_after(model, source, text).argmax())) != EOS:
        text.append(best)
    return text


def always(token: int | list[int], **options: Any) -> Transformer:
    """A model that prefers this token, or these tokens equally, whatever it reads."""
    model = random_model(0, **options)
    model.output.W.value *= 0.0
    model.output.b.value = np.zeros(V)
    model.output.b.value[token] = 1.0
    return model


OPTIONS: list[dict[str, Any]] = [
    {},
    {"norm": "post"},
    {"cross_attention": "shared"},
    {"positions": "learned"},
    {"activation": "gelu", "attention_bias": True, "d_k": 2, "d_v": 5},
]


@given(seed=st.integers(0, 2**32 - 1), options=st.sampled_from(OPTIONS))
def test_equals_the_loop(seed: int, options: dict[str, Any]) -> None:
    model, rows = random_model(seed, **options), sources(seed)
    assert decode(model, padded(rows)) == [brute_force(model, row) for row in rows]


def test_the_models_of_these_tests_say_different_things() -> None:
    """Or the other tests would compare constants."""
    outputs = [decode(random_model(seed), padded(sources(seed))) for seed in range(20)]
    lengths = {len(output) for batch in outputs for output in batch}
    assert {0, MAX_LEN} < lengths
    assert any(len({tuple(output) for output in batch}) > 4 for batch in outputs)
    assert any(len({len(output) for output in batch}) > 2 for batch in outputs)
    tokens = {token for batch in outputs for output in batch for token in output}
    assert tokens == set(range(V)) - {EOS}


@pytest.mark.parametrize("seed", range(5))
def test_a_batch_is_its_items_in_any_order(seed: int) -> None:
    model, rows = random_model(seed), sources(seed)
    together = decode(model, padded(rows))
    assert together == [decode(model, np.array([row]))[0] for row in rows]
    order = np.random.default_rng(seed).permutation(len(rows))
    shuffled = decode(model, padded([rows[i] for i in order]))
    assert shuffled == [together[i] for i in order]
    assert decode(model, padded(rows[:3] * 2)) == together[:3] * 2


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
@pytest.mark.parametrize("seed", [3, 13, 15])
def test_padding_the_source_changes_nothing(seed: int, positions: str) -> None:
    model = random_model(seed, positions=positions, max_len=30)
    model.source_embedding.W.value[PAD] = 1e3  # a leak would show
    rows = sources(seed)
    expected = [brute_force(model, row, limit=12) for row in rows]
    for left in (False, True):
        for extra in (0, 4):
            source_ids = padded(rows, left, extra)
            assert decode(model, source_ids, max_new_tokens=12) == expected
            for other in (-1e6, 0.0):
                model.source_embedding.W.value[PAD] = other
                assert decode(model, source_ids, max_new_tokens=12) == expected
    both_sides = [[PAD] * i + row + [PAD] * (10 - i) for i, row in enumerate(rows)]
    assert decode(model, padded(both_sides), max_new_tokens=12) == expected


def test_stops_at_eos() -> None:
    assert decode(always(EOS), [[3, 4], [5, 6]]) == [[], []]


def test_items_end_at_their_own_eos() -> None:
    model, rows = random_model(15), sources(15)
    expected = [brute_force(model, row) for row in rows]
    assert len({len(output) for output in expected}) > 1
    outputs = decode(model, padded(rows))
    assert outputs == expected
    assert all(EOS not in output for output in outputs)


@pytest.mark.parametrize("limit", [1, 2, MAX_LEN - 1, MAX_LEN])
def test_max_new_tokens(limit: int) -> None:
    assert decode(always(5), [[3], [4]], max_new_tokens=limit) == [[5] * limit] * 2
    assert decode(always(5), [[3]], max_new_tokens=np.int64(limit)) == [[5] * limit]
    model, rows = random_model(2), sources(2)
    whole = decode(model, padded(rows))
    cut = decode(model, padded(rows), max_new_tokens=limit)
    assert cut == [output[:limit] for output in whole]


@pytest.mark.parametrize("limit", [None, MAX_LEN, MAX_LEN + 1, 10**9])
@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_never_more_than_the_model_has_positions_for(limit: int | None, positions: str) -> None:
    model = always(5, positions=positions)
    assert decode(model, [[3]], max_new_tokens=limit) == [[5] * MAX_LEN]


def test_max_len_one() -> None:
    assert decode(always(5, max_len=1), [[3]]) == [[5]]


@pytest.mark.parametrize(("limit", "error"), [(0, ValueError), (-1, ValueError), (2.5, TypeError),
                                              (True, TypeError), ("3", TypeError)])
def test_a_bad_limit(limit: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="max_new_tokens"):
        decode(always(5), [[3]], max_new_tokens=limit)


@pytest.mark.parametrize(("tied", "lowest"), [([4, 6], 4), ([6, 3, 5], 3), ([PAD, 5], PAD),
                                              ([1, 3], 1)])
def test_ties_go_to_the_lowest_id(tied: list[int], lowest: int) -> None:
    assert decode(always(tied), [[3]], max_new_tokens=3) == [[lowest] * 3]
    assert decode(always([EOS, 3]), [[3]]) == [[]]


def test_infinite_logits_are_no_error() -> None:
    model = always(5)
    model.output.b.value[[3, 6]] = -np.inf
    assert decode(model, [[3]], max_new_tokens=2) == [[5, 5]]


def test_nan_logits() -> None:
    model = always(5)
    model.output.b.value[3] = np.nan
    with pytest.raises(ValueError, match="NaN"):
        decode(model, [[3]])
    model = random_model(0)
    model.source_embedding.W.value[10] = np.nan
    assert decode(model, [[3, 4]]) == [brute_force(model, [3, 4])]
    with pytest.raises(ValueError, match="NaN"):
        decode(model, [[3, 4], [3, 10]])


@pytest.mark.parametrize("shape", [(0, 5), (0, 1), (0, 0)])
def test_no_items(shape: tuple[int, int]) -> None:
    assert decode(random_model(0), np.zeros(shape, np.int64)) == []


def test_an_empty_source_is_a_source_of_padding() -> None:
    model = random_model(3)
    empty = decode(model, np.zeros((2, 0), np.int64))
    assert empty == decode(model, [[PAD, PAD], [PAD, PAD]])
    assert empty == [brute_force(model, [])] * 2


@pytest.mark.parametrize("dtype", ["uint8", "int16", ">i4", "uint64", "int64"])
def test_any_integer_ids(dtype: str) -> None:
    model, rows = random_model(4), sources(4)
    assert decode(model, padded(rows).astype(dtype)) == decode(model, padded(rows))
    strided = np.repeat(padded(rows).astype(dtype), 2, axis=1)[:, ::2]
    assert decode(model, strided) == decode(model, padded(rows))


@pytest.mark.parametrize(
    ("source_ids", "error"),
    [
        ([3, 4], ValueError),
        ([[[3]]], ValueError),
        ([[3, 11]], IndexError),
        ([[3, -1]], IndexError),
        ([[3.0]], TypeError),
        ([[True]], TypeError),
        ([["3"]], TypeError),
        ([[3] * (MAX_LEN + 1)], ValueError),
    ],
)
def test_bad_sources(source_ids: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        decode(random_model(0), source_ids)


@pytest.mark.parametrize("bos_id", [-1, V])
def test_a_bos_that_is_no_id(bos_id: int) -> None:
    with pytest.raises(IndexError, match=str(bos_id)):
        greedy_decode(random_model(0), [[3]], bos_id=bos_id, eos_id=EOS)


def test_the_result_is_plain_and_nothing_is_written() -> None:
    model, source_ids = random_model(5), padded(sources(5))
    source_ids.flags.writeable = False
    before = model.state_dict()
    outputs = decode(model, source_ids)
    assert outputs == decode(model, source_ids)
    assert {type(token) for output in outputs for token in output} == {int}
    assert {type(output) for output in outputs} == {list}
    after = model.state_dict()
    assert all(after[name].tobytes() == before[name].tobytes() for name in before)
    assert all(parameter._grad is None for parameter in model.parameters())


def test_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source is encoded once, and decoding ends with the longest output."""
    model, rows = random_model(15), sources(15)
    encoded: list[tuple[int, ...]] = []
    steps: list[tuple[int, ...]] = []
    encode, extend = model.encode, model.decoder.extend

    def counted_encode(ids: Any, *args: Any) -> Any:
        encoded.append(np.shape(ids))
        return encode(ids, *args)

    def counted_extend(state: Any, x: Any, *args: Any) -> Any:
        steps.append(x.shape[:2])
        return extend(state, x, *args)

    monkeypatch.setattr(model, "encode", counted_encode)
    monkeypatch.setattr(model.decoder, "extend", counted_extend)
    outputs = decode(model, padded(rows))
    assert encoded == [padded(rows).shape]
    # one new token a step, and no more work for an item that has ended
    running = [sum(len(output) >= n for output in outputs) for n in range(MAX_LEN)]
    assert steps == [(n, 1) for n in running if n]


def test_a_float32_model_decodes_like_the_loop() -> None:
    model, rows = random_model(6).astype(np.float32), sources(6)
    assert decode(model, padded(rows)) == [brute_force(model, row) for row in rows]


# A LanguageModel continues its prompts

random_language_model = partial(decoding_model, "language model")
prompts = partial(decoding_items, "language model")


def loop(model: LanguageModel, prompt: list[int], eos_id: int | None = EOS) -> list[int]:
    """One prompt without padding, and the whole model anew for each token."""
    text: list[int] = []
    while len(text) < room(model, prompt):
        best = int(logits_after(model, prompt, text).argmax())
        if best == eos_id:
            break
        text.append(best)
    return text


@given(seed=st.integers(0, 2**32 - 1), options=st.sampled_from(OPTIONS), left=st.booleans())
def test_a_continued_prompt_equals_the_loop(
    seed: int, options: dict[str, Any], left: bool
) -> None:
    options = {name: x for name, x in options.items() if name != "cross_attention"}
    model, rows = random_language_model(seed, **options), prompts(seed)
    outputs = greedy_decode(model, padded(rows, left), eos_id=EOS)
    assert outputs == [loop(model, row) for row in rows]


def test_the_language_models_of_these_tests_say_different_things() -> None:
    different, tokens, ended = [], set(), []
    for seed in range(20):
        model, rows = random_language_model(seed), prompts(seed)
        outputs = greedy_decode(model, padded(rows), eos_id=EOS)
        different.append(len({tuple(output) for output in outputs}))
        tokens.update(*outputs)
        ended += [len(output) < room(model, row) for row, output in zip(rows, outputs)]
    assert max(different) > 5
    assert tokens == set(range(V)) - {EOS}
    assert 20 < sum(ended) < len(ended) - 20  # by EOS, or by the length of the model


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
@pytest.mark.parametrize("seed", range(3))
def test_padding_a_prompt_on_either_side_changes_nothing(seed: int, positions: str) -> None:
    """As in the prompts 5 7 9 and 5 7 9 4 2 in one batch, on either side: a padding of 1e3 in the
    embedding would show, a position that counted pads too."""
    model, rows = random_language_model(seed, positions=positions), prompts(seed)
    decode_ids = partial(greedy_decode, model, eos_id=EOS)
    for other in (1e3, -1e6, 0.0):
        model.embedding.W.value[PAD] = other
        expected = [loop(model, row) for row in rows]
        for left in (False, True):
            for extra in (0, 4):
                assert decode_ids(padded(rows, left, extra)) == expected
        sides = [[PAD] * i + row + [PAD] * (10 - i) for i, row in enumerate(rows)]
        assert decode_ids(padded(sides)) == expected


@pytest.mark.parametrize("seed", range(3))
def test_prompts_in_any_batch_and_order(seed: int) -> None:
    model, rows = random_language_model(seed), prompts(seed)
    decode_ids = partial(greedy_decode, model, eos_id=EOS)
    together = decode_ids(padded(rows))
    assert together == [decode_ids([row])[0] for row in rows]
    order = np.random.default_rng(seed).permutation(len(rows))
    assert decode_ids(padded([rows[i] for i in order])) == [together[i] for i in order]
    assert decode_ids(padded(rows[:3] * 2)) == together[:3] * 2


@pytest.mark.parametrize("limit", [None, 1, 3, MAX_LEN, 10**9])
@pytest.mark.parametrize("left", [False, True])
def test_each_prompt_has_its_own_limit(limit: int | None, left: bool) -> None:
    """The model reads MAX_LEN tokens; the last token that it generates it need not read."""
    model = random_language_model(0)
    rows = [[3] * n for n in (1, MAX_LEN - 2, MAX_LEN - 1, MAX_LEN)]
    outputs = greedy_decode(model, padded(rows, left), max_new_tokens=limit)
    most = MAX_LEN if limit is None else min(limit, MAX_LEN)
    assert [len(output) for output in outputs] == [min(n, most) for n in (MAX_LEN, 3, 2, 1)]
    assert outputs == [loop(model, row, eos_id=None)[:most] for row in rows]


@pytest.mark.parametrize("kind", KINDS)
def test_without_eos_no_id_ends_a_text(kind: str) -> None:
    model, rows = decoding_model(kind, 9), decoding_items(kind, 9)
    whole = greedy_decode(model, padded(rows), **{**ends(model), "eos_id": None})
    assert [len(output) for output in whole] == [room(model, row) for row in rows]
    assert any(EOS in output for output in whole)
    assert greedy_decode(model, padded(rows), **ends(model)) == [
        output[: output.index(EOS)] if EOS in output else output for output in whole
    ]


@pytest.mark.parametrize("dtype", ["uint8", "int16", ">i4", "uint64", "int64"])
def test_prompts_of_any_integers(dtype: str) -> None:
    model, ids = random_language_model(4), padded(prompts(4))
    expected = greedy_decode(model, ids, eos_id=EOS)
    ids = np.repeat(ids.astype(dtype), 2, axis=1)[:, ::2]
    ids.flags.writeable = False
    assert greedy_decode(model, ids, eos_id=EOS) == expected


@pytest.mark.parametrize("shape", [(0, 5), (0, 1), (0, 0)])
def test_no_prompts(shape: tuple[int, int]) -> None:
    assert greedy_decode(random_language_model(0), np.zeros(shape, np.int64)) == []


def test_a_model_without_padding() -> None:
    """Then 0 is an id like the others."""
    model = random_language_model(1, pad_id=None)
    rows = [[0, 3, 0, 5], [0, 0, 4, 0], [6, 1, 3, 4]]
    assert greedy_decode(model, rows, eos_id=EOS) == [loop(model, row) for row in rows]


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([[3, 4], [PAD, PAD]], ValueError, "prompt 1 is empty.*BOS"),
        (np.zeros((2, 0), int), ValueError, "prompt 0 is empty.*BOS"),
        ([3, 4], ValueError, r"ids has shape \(2,\)"),
        ([[[3]]], ValueError, "ids has shape"),
        ([[3], [4, 5]], ValueError, "ids is no rectangular array"),
        ([[3, V]], IndexError, r"ids\[0, 1\] is 7"),
        ([[3, -1]], IndexError, r"ids\[0, 1\] is -1"),
        ([[3.0]], TypeError, "ids has dtype float64"),
        ([[True]], TypeError, "ids has dtype bool"),
        ([["3"]], TypeError, "ids has dtype"),
        (np.zeros((0, 0)), TypeError, "ids has dtype float64"),
        ([[3] * (MAX_LEN + 1)], ValueError, "ids has 10 positions, more than max_len 9"),
    ],
)
def test_bad_prompts(ids: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        greedy_decode(random_language_model(0), ids, eos_id=EOS)


BAD_SPECIAL_IDS = [(-1, IndexError), (V, IndexError), (2.0, TypeError), (True, TypeError),
                   ("2", TypeError), ([2], (TypeError, ValueError)),
                   ([1, 2], (TypeError, ValueError))]  # fmt: skip


@pytest.mark.parametrize("name", ["bos_id", "eos_id"])
@pytest.mark.parametrize(("value", "error"), BAD_SPECIAL_IDS)
def test_a_special_id_is_one_id_of_the_vocabulary(name: str, value: Any, error: Any) -> None:
    """A list would never be equal to a token, and its text would never end."""
    with pytest.raises(error, match=name):
        greedy_decode(random_model(0), [[3]], **{"bos_id": BOS, "eos_id": EOS, name: value})
    if name == "eos_id":
        with pytest.raises(error, match=name):
            greedy_decode(random_language_model(0), [[3]], eos_id=value)


def test_bos_belongs_to_the_call_of_a_transformer_and_to_the_prompt_of_a_language_model() -> None:
    with pytest.raises(ValueError, match="bos_id is None"):
        greedy_decode(random_model(0), [[3]], eos_id=EOS)
    with pytest.raises(ValueError, match=r"bos_id was given.*put BOS before"):
        greedy_decode(random_language_model(0), [[3]], bos_id=BOS, eos_id=EOS)


@pytest.mark.parametrize("eos_id", [None, EOS])
def test_something_that_is_no_model(eos_id: int | None) -> None:
    with pytest.raises(TypeError, match="model is a Decoder"):
        greedy_decode(random_model(0).decoder, [[3]], bos_id=BOS, eos_id=eos_id)  # type: ignore


def test_nan_names_the_prompt() -> None:
    model = random_language_model(0)
    model.embedding.W.value[6] = np.nan
    rows = [[3], [4, 5], [6, 3]]
    with pytest.raises(ValueError, match="item 2 are NaN"):
        greedy_decode(model, padded(rows))


def test_one_token_after_a_long_prompt_needs_one_row_of_logits() -> None:
    """512 tokens and 50257 words: 103 MB of logits if all were computed."""
    T, words = 512, 50257
    config = LanguageModelConfig(words, d_model=4, num_heads=2, num_layers=1, max_len=T)
    model = LanguageModel(config, 0)
    ids = np.random.default_rng(0).integers(0, words, (1, T))
    with measured() as memory:
        (output,) = greedy_decode(model, ids, max_new_tokens=1)
    assert output == [int(model(ids)[0, -1].argmax())]
    assert memory.peak < T * words * 4 / 8
