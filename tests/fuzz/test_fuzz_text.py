"""From text to batches of ids and back, with hostile text."""

import math
import unicodedata

import numpy as np
from hostile import fuzz
from hypothesis import strategies as st

from npdecoder.text import (
    SPECIAL_TOKENS,
    Characters,
    Vocabulary,
    batches,
    detokenize,
    make_batch,
    pad,
    split_pairs,
    tokenize,
    windows,
)

# Letters of many scripts, marks, spaces, apostrophes, halves of surrogate pairs
ODD = st.sampled_from("aZéßİ’'我，。あ９Ａ 　\u0301\u200b\u2028\x00\ud800\U0001f600\t\n_-")
texts = st.text(st.one_of(ODD, st.characters()), max_size=12)


@fuzz
def test_tokenize(s):
    """Nothing but spaces is lost, and the tokens joined are split into the same tokens."""
    text = s.give("text", s.draw(texts))

    def function(text):
        tokens = tokenize(text)
        return {"letters": "".join(tokens).replace("’", "'"),
                "again": tokenize(detokenize(tokens)) == tokens}  # fmt: skip

    def expected(text):
        narrow = "".join(chr(ord(c) - 0xFEE0) if c in "０１２３４５６７８９" or "Ａ" <= c <= "Ｚ"
                         or "ａ" <= c <= "ｚ" else c for c in text)  # fmt: skip
        composed = unicodedata.normalize("NFC", narrow.lower())
        return {"letters": "".join(composed.split()).replace("’", "'"), "again": True}

    assert isinstance(text, str)
    return s.call(function, expected)


@fuzz
def test_vocabulary(s):
    words = st.lists(texts.filter(lambda word: word not in SPECIAL_TOKENS), unique=True, max_size=6)
    tokens = s.give("tokens", s.draw(words))
    s.spoil("tokens", [("words", TypeError), ([1, 2], TypeError), (["a", "a"], ValueError),
                       (["<eos>"], ValueError), ("", TypeError)])  # fmt: skip
    known = [*SPECIAL_TOKENS, *tokens]
    spoken = [*tokens[::-1], "quite unknown", "<eos>"]
    s.give("spoken", spoken, [("a string", TypeError)], words="tokens")
    ids = s.array(s.rng.integers(0, len(known), s.pick(3, 0, 5)), s.pick("int64", "uint8", "int32"))
    bad = [(np.array([len(known)]), IndexError), ([0, -1], IndexError), ([2, 10**30], IndexError)]
    s.give("ids", ids, bad, words="id")

    def function(tokens, spoken, ids):
        vocabulary = Vocabulary(tokens)
        assert len(vocabulary) == len(tokens) + 4
        return {"ids": vocabulary.encode(spoken, warn=False), "tokens": vocabulary.decode(ids)}

    def expected(tokens, spoken, ids):
        said = []
        for i in np.asarray(ids).astype(int):
            if i == 2:
                break
            said += [known[i]] if i > 1 else []
        return {"ids": [known.index(t) if t in tokens else 3 for t in spoken], "tokens": said}

    return s.call(function, expected)


@fuzz
def test_characters(s):
    characters = s.draw(st.lists(st.one_of(ODD, st.characters()), unique=True, min_size=1))
    s.give("characters", "".join(characters), [("", ValueError), ("abca", ValueError)])
    text = "".join(characters[::-1])
    s.give("text", text, [(text + "\U0010fffd", ValueError)], words="characters")
    n = len(characters)
    ids = s.array(s.rng.integers(0, n, s.pick(3, 0, 5)), s.pick("int64", "uint16", "int32"))
    s.give("ids", ids, [([n], IndexError), (np.array([-1]), IndexError)], words="id")

    def function(characters, text, ids):
        alphabet = Characters(characters)
        return {"ids": alphabet.encode(text), "text": alphabet.decode(ids)}

    def expected(characters, text, ids):
        return {"ids": np.arange(n, dtype=np.intp)[::-1].copy(),
                "text": "".join(characters[i] for i in np.asarray(ids).astype(int))}  # fmt: skip

    return s.call(function, expected)


def draw_sequences(s, count):
    return [s.array(s.rng.integers(3, 9, s.pick(2, 0, 3, 5)), s.pick("int64", "uint8"))
            for _ in range(count)]  # fmt: skip


@fuzz
def test_pad(s):
    bad = [([[0.5]], TypeError), ([[1], [True, False]], TypeError), ([["3"]], TypeError)]
    s.give("sequences", draw_sequences(s, s.pick(2, 0, 1, 3)), bad, words="ids")
    pad_id = s.give("pad_id", s.pick(0, 2, -1))

    def expected(sequences, pad_id):
        longest = max((len(sequence) for sequence in sequences), default=0)
        rows = [[*map(int, row), *[pad_id] * (longest - len(row))] for row in sequences]
        return np.array(rows, np.intp).reshape(len(rows), longest)

    assert pad_id < 3
    return s.call(pad, expected)


@fuzz
def test_batches(s):
    """Every pair once, padded as make_batch does it alone; and the shapes of the article."""
    count = s.pick(3, 0, 1, 7)
    pairs = list(zip(draw_sequences(s, count), draw_sequences(s, count)))
    s.give("pairs", pairs)
    size = s.give("batch_size", s.pick(2, 1, 5), [(0, ValueError), (-1, ValueError)])
    seed = s.pick(None, 1)

    def function(pairs, batch_size):
        rng = None if seed is None else np.random.default_rng(seed)
        found = list(batches(pairs, batch_size, rng, 0, 1, 2))
        assert all(0 < len(batch.targets) <= batch_size for batch in found)
        rows = []
        for batch in found:
            sources, inputs = batch.inputs
            rows += zip(sources.tolist(), inputs.tolist(), batch.targets.tolist())
        stripped = [[[i for i in row if i] for row in triple] for triple in rows]
        return {"count": len(found), "rows": sorted(stripped),
                "alone": make_batch(pairs[:1], 0, 1, 2).targets.tolist()}  # fmt: skip

    def expected(pairs, batch_size):
        pairs = [([int(i) for i in x], [int(i) for i in y]) for x, y in pairs]
        return {"count": -(-len(pairs) // size),
                "rows": sorted([[*x, 2], [1, *y], [*y, 2]] for x, y in pairs),
                "alone": [[*y, 2] for _, y in pairs[:1]]}  # fmt: skip

    return s.call(function, expected)


@fuzz
def test_windows(s):
    n, context = s.pick(9, 5, 3), s.pick(2, 1)
    ids = s.array(s.rng.integers(0, 9, n), "int64", ("plain", "read-only", "reversed", "strided"))
    s.give("ids", ids)
    counts = [(0, ValueError), (-1, ValueError)]
    s.give("context", context, counts)
    s.give("batch_size", s.pick(2, 1, 4), counts)
    seed = s.pick(None, 3)
    if seed is not None:
        s.spoil("context", [(n, ValueError), (n + 5, ValueError)])

    def function(ids, context, batch_size):
        rng = None if seed is None else np.random.default_rng(seed)
        pieces = [(x, y) for batch in windows(ids, context, batch_size, rng)
                  for x, y in zip(batch.inputs[0].tolist(), batch.targets.tolist())]
        if seed is None:
            return {"inputs": [i for x, _ in pieces for i in x],
                    "targets": [i for _, y in pieces for i in y]}  # fmt: skip
        text = " ".join(map(str, ids.tolist()))
        return {"all there": all(len(x) == context and " ".join(map(str, [*x, y[-1]])) in text
                                 for x, y in pieces)}  # fmt: skip

    def expected(ids, **_):
        if seed is None:
            return {"inputs": ids[:-1].tolist(), "targets": ids[1:].tolist()}
        return {"all there": True}

    return s.call(function, expected)


@fuzz
def test_split_pairs(s):
    pairs = s.draw(st.lists(st.tuples(st.sampled_from(["Hi.", "hi .", "No", "我"]), texts)))
    s.give("pairs", pairs)
    bad = [(1.0, ValueError), (-0.1, ValueError), (math.nan, ValueError), (2, ValueError)]
    part = s.give("held_out_fraction", s.pick(0.0, 0.5, 0.01, 0.99), bad)
    s.give("seed", s.pick(0, 5))

    def function(pairs, held_out_fraction, seed):
        train, held_out = split_pairs(pairs, held_out_fraction, seed)
        sources = [{tuple(tokenize(x)) for x, _ in side} for side in (train, held_out)]
        distinct = list(dict.fromkeys(pairs))
        count = len(sources[0] | sources[1])
        assert [pair for pair in distinct if pair in train] == train
        assert [pair for pair in distinct if pair in held_out] == held_out
        return {"all": sorted(train + held_out) == sorted(distinct),
                "both": len(sources[0] & sources[1]),
                "some": bool(held_out) == (part > 0 and count > 1)}  # fmt: skip

    return s.call(function, lambda **_: {"all": True, "both": 0, "some": True})
