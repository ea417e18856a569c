"""Greedy decoding against a step-by-step loop over the whole model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npdecoder import Transformer, TransformerConfig
from npdecoder.decoding import greedy_decode

PAD, BOS, EOS = 0, 1, 2
V = 7
MAX_LEN = 9


def random_model(seed: int, **options: Any) -> Transformer:
    """Float64, with weights so large that sequences depend on the source and some reach EOS."""
    sizes = {"d_model": 12, "num_heads": 3, "num_encoder_layers": 1, "num_decoder_layers": 2}
    config = TransformerConfig(11, V, **{**sizes, "pad_id": PAD, "max_len": MAX_LEN, **options})
    model = Transformer(config, rng=seed, dtype=np.float64)
    rng = np.random.default_rng(seed)
    for name, parameter in model.named_parameters():
        small = name.endswith(("beta", "output.b"))
        scale = 0.1 if small else 4.0 if "cross_attention" in name else 1.0
        parameter.value = scale * rng.standard_normal(parameter.shape)
    return model


def sources(seed: int, count: int = 8) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 11, rng.integers(1, MAX_LEN + 1)).tolist() for _ in range(count)]


def padded(rows: list[list[int]], left: bool = False, extra: int = 0) -> np.ndarray:
    width = max(map(len, rows)) + extra
    pads = [[PAD] * (width - len(row)) for row in rows]
    return np.array([pad + row if left else row + pad for row, pad in zip(rows, pads)])


def decode(model: Transformer, source_ids: Any, **options: Any) -> list[list[int]]:
    return greedy_decode(model, source_ids, bos_id=BOS, eos_id=EOS, **options)


def brute_force(model: Transformer, source: list[int], limit: int = MAX_LEN) -> list[int]:
    """One source, and the whole model anew for each token."""
    ids = [BOS]
    while len(ids) <= limit:
        best = int(np.argmax(model(np.array([source], np.intp), np.array([ids]))[0, len(ids) - 1]))
        if best == EOS:
            break
        ids.append(best)
    return ids[1:]


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
