"""Tokens, vocabularies, characters, files of text and pairs, splits, batches and windows."""

from __future__ import annotations

import copy
import sys
import time
import unicodedata
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npdecoder.text import (
    SPECIAL_TOKENS,
    Batch,
    Characters,
    IntArray,
    Vocabulary,
    batches,
    detokenize,
    make_batch,
    pad,
    read_pairs,
    read_text,
    split_pairs,
    tokenize,
    windows,
)

PAD, BOS, EOS, UNK = range(4)
SEEDS = st.integers(0, 2**32 - 1)


def random_pairs(count: int, longest: int, seed: int) -> list[tuple[list[int], list[int]]]:
    """Pairs of ids of length 0 to longest; the first source id is the pair's own number."""
    rng = np.random.default_rng(seed)
    pairs = []
    for i in range(count):
        source = [100 + i, *rng.integers(4, 100, rng.integers(0, longest + 1)).tolist()]
        pairs.append((source, rng.integers(4, 100, rng.integers(0, longest + 1)).tolist()))
    return pairs


def words_of(row: IntArray) -> list[int]:
    """The ids before the first EOS, after which only PAD may stand."""
    ids: list[int] = row.tolist()
    end = ids.index(EOS)
    assert set(ids[end + 1 :]) <= {PAD}
    return ids[:end]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("I love you", ["i", "love", "you"]),
        ("我爱你", ["我", "爱", "你"]),
        ("Tom 喜欢茶。", ["tom", "喜", "欢", "茶", "。"]),
        ("你，吗？是！《书》、", ["你", "，", "吗", "？", "是", "！", "《", "书", "》", "、"]),
        ("Don't, it's 'quoted'.", ["don't", ",", "it's", "'", "quoted", "'", "."]),
        ("Don’t ‘go’", ["don't", "‘", "go", "’"]),
        ("rock'n'roll", ["rock'n'roll"]),
        ("x2 = 3.5, a_b", ["x2", "=", "3", ".", "5", ",", "a", "_", "b"]),
        ("Ｔｏｍ１２", ["tom12"]),
        ("Tom喝茶2杯", ["tom", "喝", "茶", "2", "杯"]),
        ("cafe\u0301 CAFÉ", ["café", "café"]),
        ("हिन्दी Привет 한국", ["हिन्दी", "привет", "한국"]),
        ("𠮷々〇", ["𠮷", "々", "〇"]),
        ("お茶", ["お", "茶"]),
        ("<eos>", ["<", "eos", ">"]),
        ("a\u3000b\u00a0c\td\n", ["a", "b", "c", "d"]),
        (" \n", []),
        ("", []),
    ],
)
def test_tokenize(text: str, tokens: list[str]) -> None:
    assert tokenize(text) == tokens


def test_detokenize_joins_by_single_spaces() -> None:
    assert detokenize(["我", "爱", "你"]) == "我 爱 你"
    assert detokenize([]) == ""


@given(SEEDS, st.integers(0, 40))
def test_tokens_survive_detokenize(seed: int, length: int) -> None:
    rng = np.random.default_rng(seed)
    alphabet = "aZ9é'’ \t我爱々。？！<>_-ＡÉ\u0301か\u3099İΣ"
    text = "".join(rng.choice(list(alphabet), length))
    tokens = tokenize(text)
    assert tokenize(detokenize(tokens)) == tokens


def test_every_character_is_kept() -> None:
    for code in range(sys.maxunicode + 1):
        character = chr(code)
        if unicodedata.category(character) in ("Cs", "Cn", "Co"):
            continue
        tokens = tokenize(character)
        assert bool(tokens) == (not character.isspace())
        assert tokenize(detokenize(tokens)) == tokens, f"U+{code:04X}"


def test_special_tokens_have_the_first_ids() -> None:
    v = Vocabulary(["tea", "cat"])
    assert v.tokens == ["<pad>", "<bos>", "<eos>", "<unk>", "tea", "cat"]
    assert (v.pad_id, v.bos_id, v.eos_id, v.unk_id) == (0, 1, 2, 3)
    assert len(v) == 6
    assert "tea" in v
    assert "<pad>" in v
    assert "dog" not in v
    assert v.encode(["cat", "tea"]) == [5, 4]
    assert len(Vocabulary([])) == 4


@pytest.mark.parametrize("tokens", [["tea", "cat", "tea"], ["tea", "<eos>"]])
def test_vocabulary_refuses_repeated_and_special_tokens(tokens: list[str]) -> None:
    with pytest.raises(ValueError, match=tokens[-1]):
        Vocabulary(tokens)


def test_build_orders_by_count_then_alphabetically() -> None:
    lists = [["b", "c", "d"], ["c", "b"], ["c", "a", "<eos>"]]
    assert Vocabulary.build(lists).tokens[4:] == ["c", "b", "a", "d"]
    assert Vocabulary.build(reversed(lists), min_count=2).tokens[4:] == ["c", "b"]
    assert len(Vocabulary.build([])) == 4


def test_encode_warns_once_and_names_each_unknown_word_once() -> None:
    v = Vocabulary(["tea"])
    with pytest.warns(UserWarning, match="not in the vocabulary") as caught:
        assert v.encode(["zebra", "tea", "yak", "zebra"]) == [UNK, 4, UNK, UNK]
    assert len(caught) == 1
    message = str(caught[0].message)
    assert message.endswith(": 'zebra', 'yak'")
    assert caught[0].filename == __file__  # the warning points at the caller


def test_encode_without_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Vocabulary(["tea"]).encode(["zebra", "tea"], warn=False) == [UNK, 4]
        assert Vocabulary(["tea"]).encode([]) == []


def test_a_written_out_special_token_is_an_unknown_word() -> None:
    v = Vocabulary(["tea"])
    with pytest.warns(UserWarning, match="<eos>"):
        assert v.encode(["tea", "<eos>"]) == [4, UNK]
    assert v.encode(SPECIAL_TOKENS, warn=False) == [UNK] * 4


def test_a_text_in_place_of_tokens_is_refused() -> None:
    v = Vocabulary(["t", "e", "a"])
    with pytest.raises(TypeError, match="tokenize"):
        v.encode("tea")
    with pytest.raises(TypeError, match="tokenize"):
        Vocabulary("tea")
    with pytest.raises(TypeError, match="tokenize"):
        Vocabulary.build(["tea"])


def test_decode_drops_pad_and_bos_and_stops_at_eos() -> None:
    v = Vocabulary(["tea", "cat"])
    assert v.decode([BOS, PAD, 4, UNK, 5, EOS, 4, PAD]) == ["tea", "<unk>", "cat"]
    assert v.decode(np.array([5, PAD])) == ["cat"]
    assert v.decode([]) == v.decode([EOS, 4]) == []


@pytest.mark.parametrize("ids", [[4, 6], [-1], [EOS, 6]])
def test_decode_refuses_ids_outside_the_vocabulary(ids: list[int]) -> None:
    with pytest.raises(IndexError, match=rf"{ids[-1]}\b.*\b6$"):
        Vocabulary(["tea", "cat"]).decode(ids)


@given(SEEDS, st.integers(0, 30), st.integers(1, 50))
def test_decode_undoes_encode(seed: int, length: int, size: int) -> None:
    v = Vocabulary(f"w{i}" for i in range(size))
    tokens = [f"w{i}" for i in np.random.default_rng(seed).integers(0, size, length)]
    ids = v.encode(tokens)
    assert v.decode(ids) == tokens
    assert v.decode([BOS, *ids, EOS, PAD, PAD]) == tokens
    assert all(4 <= i < len(v) for i in ids)


def test_characters_have_ids_in_order() -> None:
    c = Characters("bé\na我")
    assert c.characters == "bé\na我"
    assert len(c) == 5
    ids = c.encode("a我\na")
    assert ids.tolist() == [3, 4, 2, 3]
    assert ids.dtype == np.intp
    assert c.decode(ids) == c.decode(ids.tolist()) == c.decode(iter(ids)) == "a我\na"
    assert c.encode("").shape == (0,)
    assert c.encode("").dtype == np.intp
    assert c.decode([]) == ""


def test_characters_of_a_text_are_ordered_by_code_point() -> None:
    text = "banana 我爱你\n\r\0\U0001f600éz"
    built = Characters.build(text)
    assert built.characters == "\0\n\r abnzé你我爱\U0001f600"
    assert Characters.build(text[::-1] * 2).characters == built.characters
    assert built.decode(built.encode(text)) == text


@pytest.mark.parametrize("characters", ["", "aba", "我我"])
def test_characters_must_be_distinct_and_some(characters: str) -> None:
    with pytest.raises(ValueError, match="distinct, and at least one"):
        Characters(characters)
    if not characters:
        with pytest.raises(ValueError, match="at least one"):
            Characters.build("")


def test_unknown_characters_are_all_named() -> None:
    c = Characters("abc")
    for text, named in (("axbzx", "'xz'"), ("\n", r"'\n'"), ("我a爱", "'我爱'"), ("A", "'A'")):
        with pytest.raises(ValueError, match="does not know the characters") as caught:
            c.encode(text)
        assert str(caught.value).endswith(f" {named}")


@pytest.mark.parametrize("ids", [[0, 3], [-1], [1, 2, 99]])
def test_ids_outside_the_characters_are_refused(ids: list[int]) -> None:
    for form in (ids, np.array(ids)):
        with pytest.raises(IndexError, match=rf"id {ids[-1]} .*size 3"):
            Characters("abc").decode(form)


@given(st.text(min_size=1), st.integers(1, 5))
def test_characters_undo_themselves(text: str, times: int) -> None:
    c = Characters.build(text)
    assert sorted(c.characters) == list(c.characters) == sorted(set(text))
    ids = c.encode(text * times)
    assert len(ids) == len(text) * times
    assert set(ids.tolist()) == set(range(len(c)))
    assert c.decode(ids) == text * times


def written(folder: Path, data: bytes) -> Path:
    path = folder / "pairs.tsv"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", ""),
        (b"\xef\xbb\xbf", ""),
        (b"\xef\xbb\xbfa\n", "a\n"),
        (b"a\xef\xbb\xbf", "a\ufeff"),  # elsewhere it is no mark
        (b"\xef\xbb\xbf\xef\xbb\xbfa", "\ufeffa"),
        (b"a\r\nb\r\n\r\nc", "a\nb\n\nc"),
        (b"a\rb\n\rc\r\r\n\r", "a\rb\n\rc\r\n\r"),  # CR alone stays
        (" 我\t爱\u2028 \x85\0 ".encode(), " 我\t爱\u2028 \x85\0 "),
    ],
    ids=ascii,
)
def test_read_text(tmp_path: Path, data: bytes, text: str) -> None:
    path = written(tmp_path, data)
    assert read_text(path) == read_text(str(path)) == text


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"\xff", 1),
        (b"fine\n\xffa\n\xff", 2),
        (b"\r\n\n\xe6\x88", 3),  # the end of the file cuts a character
        (b"a\rb\n" + "我".encode("gb18030"), 2),
        (b"\n\xed\xa0\x80", 2),  # half of a surrogate pair
        ("a\n".encode("utf-16"), 1),
        (b"\xe2\x80\xa8\n\n\xc0\x80", 3),
    ],
    ids=ascii,
)
def test_text_that_is_not_utf8_is_named(tmp_path: Path, bom: bytes, data: bytes, line: int) -> None:
    path = written(tmp_path, bom + data)
    with pytest.raises(ValueError, match=rf"pairs\.tsv, line {line}: not UTF-8 \(") as caught:
        read_text(path)
    assert type(caught.value) is ValueError


def test_a_text_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_text(tmp_path / "none.txt")


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_read_pairs(tmp_path: Path, bom: bytes, end: bytes) -> None:
    lines = ["Hi.\t嗨。", "", "   ", " I love you \t 我爱你\textra\tcolumns", "Stop!\t住手！"]
    data = bom + end.join(line.encode() for line in lines)
    expected = [("Hi.", "嗨。"), ("I love you", "我爱你"), ("Stop!", "住手！")]
    path = written(tmp_path, data)
    assert read_pairs(path) == read_pairs(str(path)) == expected
    assert read_pairs(written(tmp_path, data + end)) == expected


@pytest.mark.parametrize("inside", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1e"])
def test_only_newlines_end_lines(tmp_path: Path, inside: str) -> None:
    data = f"one{inside}two\t一{inside}二\nthree\t三\n".encode()
    expected = [(f"one{inside}two", f"一{inside}二"), ("three", "三")]
    assert read_pairs(written(tmp_path, data)) == expected


@pytest.mark.parametrize("bad", ["no tab here", "\t空", "empty\t", "\t", "blank\t \textra"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_malformed_line_is_named(tmp_path: Path, bad: str, end: str) -> None:
    path = written(tmp_path, end.join(["Hi.\t嗨\u2028。", "", bad, "Bye.\t再见。"]).encode())
    with pytest.raises(ValueError, match=r"pairs\.tsv, line 3:"):
        read_pairs(path)


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
def test_bytes_that_are_not_utf8_are_named(tmp_path: Path, bom: bytes) -> None:
    path = written(tmp_path, bom + "Hi.\t嗨。\n\n".encode() + "我\t你\n".encode("gb18030"))
    with pytest.raises(ValueError, match=r"pairs\.tsv, line 3: not UTF-8"):
        read_pairs(path)


@pytest.mark.parametrize("data", [b"", b"\n\r\n  \n", b"\xef\xbb\xbf"])
def test_a_file_without_pairs_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(ValueError, match=r"pairs\.tsv: no pairs"):
        read_pairs(written(tmp_path, data))


def test_a_long_file_is_read_fast(tmp_path: Path) -> None:
    path = written(tmp_path, "I drink tea every day.\t我每天喝茶。\n".encode() * 100_000)
    start = time.perf_counter()
    assert len(read_pairs(path)) == 100_000
    assert time.perf_counter() - start < 5  # takes about 0.2 s


@given(
    SEEDS,
    st.integers(0, 40),
    st.integers(1, 15),
    st.floats(0, 1, exclude_max=True),
)
def test_split_keeps_each_source_on_one_side(
    seed: int, count: int, sources: int, fraction: float
) -> None:
    rng = np.random.default_rng(seed)
    spellings = ("Word {}.", "word {} .", "WORD {}.")  # the same tokens
    pairs = [
        (spellings[rng.integers(3)].format(rng.integers(sources)), f"字{rng.integers(3)}")
        for _ in range(count)
    ]
    train, held_out = split_pairs(pairs, fraction, seed)
    assert (train, held_out) == split_pairs(pairs, fraction, seed)
    distinct = list(dict.fromkeys(pairs))
    assert sorted(train + held_out) == sorted(distinct)
    for side in (train, held_out):
        assert side == [pair for pair in distinct if pair in side]  # the order is kept
    train_sources = {tuple(tokenize(source)) for source, _ in train}
    held_out_sources = {tuple(tokenize(source)) for source, _ in held_out}
    assert not train_sources & held_out_sources
    total = len(train_sources) + len(held_out_sources)
    if fraction == 0:
        assert not held_out
    elif total >= 2:
        assert train
        assert held_out
    assert abs(len(held_out_sources) - fraction * total) <= 1


def test_split_depends_on_the_seed() -> None:
    pairs = [(f"word {i}", f"字{i}") for i in range(50)]
    train, held_out = split_pairs(pairs, 0.2, seed=0)
    assert (len(train), len(held_out)) == (40, 10)
    assert split_pairs(pairs, 0.2, seed=1) != (train, held_out)


@pytest.mark.parametrize("fraction", [-0.1, 1.0, 2.0, float("nan")])
def test_split_refuses_a_fraction_outside_0_to_1(fraction: float) -> None:
    with pytest.raises(ValueError, match="held_out_fraction"):
        split_pairs([("a", "b")], fraction, seed=0)


def test_pad() -> None:
    padded = pad([[5, 6, 7], [], [8]], pad_id=9)
    assert padded.tolist() == [[5, 6, 7], [9, 9, 9], [8, 9, 9]]
    assert padded.dtype == np.intp
    assert pad([], 0).shape == (0, 0)
    assert pad([], 0).dtype == np.intp
    assert pad([[], []], 0).shape == (2, 0)


def test_pad_refuses_ids_that_are_not_integers() -> None:
    with pytest.raises(TypeError, match="float64"):
        pad([[1, 2], [1.5]], 0)  # type: ignore[list-item]


def test_make_batch_shifts_the_target_right() -> None:
    batch = make_batch([([5, 3], [7, 4, 6]), ([8, 8, 8], []), ([], [9])], PAD, BOS, EOS)
    source_ids, target_input_ids = batch.inputs
    assert source_ids.tolist() == [[5, 3, 2, 0], [8, 8, 8, 2], [2, 0, 0, 0]]
    assert target_input_ids.tolist() == [[1, 7, 4, 6], [1, 0, 0, 0], [1, 9, 0, 0]]
    assert batch.targets.tolist() == [[7, 4, 6, 2], [2, 0, 0, 0], [9, 2, 0, 0]]
    assert {array.dtype for array in (*batch.inputs, batch.targets)} == {np.dtype(np.intp)}


def test_make_batch_of_nothing() -> None:
    batch = make_batch([], PAD, BOS, EOS)
    assert [array.shape for array in (*batch.inputs, batch.targets)] == [(0, 0)] * 3


@given(SEEDS, st.integers(0, 120), st.integers(0, 9), st.integers(1, 13), st.booleans())
def test_batches_have_every_pair_once(
    seed: int, count: int, longest: int, batch_size: int, shuffle: bool
) -> None:
    pairs = random_pairs(count, longest, seed)
    rng = np.random.default_rng(seed) if shuffle else None
    seen = []
    sizes = []
    for batch in batches(pairs, batch_size, rng, PAD, BOS, EOS):
        source_ids, target_input_ids = batch.inputs
        assert target_input_ids.shape == batch.targets.shape
        sizes.append(len(source_ids))
        for source, target_input, target in zip(source_ids, target_input_ids, batch.targets):
            assert target_input[0] == BOS
            words = words_of(target)
            assert target_input[1 : len(words) + 1].tolist() == words
            assert set(target_input[len(words) + 1 :].tolist()) <= {PAD}
            seen.append((words_of(source), words))
    assert sorted(seen) == sorted(pairs)
    assert len(sizes) == -(-count // batch_size)
    assert sum(size < batch_size for size in sizes) <= 1


def lists_of(epoch: list[Batch]) -> list[list[list[int]]]:
    return [batch.inputs[0].tolist() for batch in epoch]


def test_batches_are_shuffled_and_reproducible() -> None:
    pairs = random_pairs(200, 9, seed=3)
    rng = np.random.default_rng(5)
    first = lists_of(list(batches(pairs, 8, rng, PAD, BOS, EOS)))
    second = lists_of(list(batches(pairs, 8, rng, PAD, BOS, EOS)))
    again = lists_of(list(batches(pairs, 8, np.random.default_rng(5), PAD, BOS, EOS)))
    assert first == again
    assert first != second
    assert sorted(map(sorted, first)) != sorted(map(sorted, second))  # not only their order
    widths = [len(rows[0]) for rows in first]
    assert widths != sorted(widths)  # the batches themselves come in random order


def test_batches_without_rng_go_by_length() -> None:
    pairs = random_pairs(50, 9, seed=3)
    epoch = lists_of(list(batches(pairs, 7, None, PAD, BOS, EOS)))
    assert epoch == lists_of(list(batches(pairs, 7, None, PAD, BOS, EOS)))
    widths = [len(rows[0]) for rows in epoch]
    assert widths == sorted(widths)


def test_batches_have_similar_lengths() -> None:
    pairs = random_pairs(1000, 40, seed=3)
    real = sum(len(source) + 1 for source, _ in pairs)
    arrays = batches(pairs, 10, np.random.default_rng(0), PAD, BOS, EOS)
    padded = sum(batch.inputs[0].size for batch in arrays)
    assert padded < 1.1 * real  # unsorted batches of 10 need about 1.8 times


def test_batches_of_nothing_and_of_bad_size() -> None:
    assert list(batches([], 4, None, PAD, BOS, EOS)) == []
    assert list(batches([], 4, np.random.default_rng(0), PAD, BOS, EOS)) == []
    with pytest.raises(ValueError, match="batch_size"):
        batches([], 0, None, PAD, BOS, EOS)  # by the call, not by the first next()


# Windows of a text, whose ids here are their own places


def window_starts(batch: Batch, context: int) -> list[int]:
    """Where the pieces of a batch begin; they are pieces, and the targets come one later."""
    (inputs,) = batch.inputs
    assert inputs.shape == batch.targets.shape
    assert inputs.dtype == batch.targets.dtype == np.intp
    assert inputs.shape[1] == context
    starts = inputs[:, 0]
    assert np.array_equal(inputs, starts[:, None] + np.arange(context))
    assert np.array_equal(batch.targets, inputs + 1)
    found: list[int] = starts.tolist()
    return found


@given(SEEDS, st.integers(1, 200), st.integers(1, 12), st.integers(1, 6))
def test_random_windows(seed: int, extra: int, context: int, batch_size: int) -> None:
    ids = np.arange(context + extra)
    epoch = list(windows(ids, context, batch_size, np.random.default_rng(seed)))
    count = len(epoch) * context * batch_size  # about as many as the text has
    assert count <= len(ids) < count + context * batch_size or len(epoch) == 1
    for batch in epoch:
        starts = window_starts(batch, context)
        assert len(starts) == batch_size
        assert 0 <= min(starts)
        assert max(starts) < extra


def test_random_windows_begin_at_every_place_alike() -> None:
    rng = np.random.default_rng(0)
    counts = np.zeros(7, int)
    for _ in range(1000):
        for batch in windows(np.arange(10), 3, 2, rng):
            np.add.at(counts, window_starts(batch, 3), 1)
    assert counts.sum() == 2000
    assert np.all(abs(counts - counts.mean()) < 5 * counts.mean() ** 0.5)


def test_random_windows_are_drawn_by_the_call() -> None:
    ids = np.arange(100)
    rng = np.random.default_rng(5)
    epoch = windows(ids, 4, 3, rng)
    after = copy.deepcopy(rng)
    first = [window_starts(batch, 4) for batch in epoch]
    assert rng.bit_generator.state == after.bit_generator.state
    second = [window_starts(batch, 4) for batch in windows(ids, 4, 3, rng)]
    again = [window_starts(batch, 4) for batch in windows(ids, 4, 3, np.random.default_rng(5))]
    assert first == again
    assert first != second
    assert len(first) == 8


@pytest.mark.parametrize("rng", [0, None])
def test_a_text_of_one_window(rng: int | None) -> None:
    generator = None if rng is None else np.random.default_rng(rng)
    (batch,) = windows(np.array([5, 3, 7, 4, 6]), 4, 1 if rng is None else 3, generator)
    assert len(batch.targets) == (1 if rng is None else 3)
    assert {tuple(row) for row in batch.inputs[0].tolist()} == {(5, 3, 7, 4)}
    assert {tuple(row) for row in batch.targets.tolist()} == {(3, 7, 4, 6)}


@pytest.mark.parametrize("length", [0, 1, 3, 4])
def test_a_text_too_short_for_a_random_window(length: int) -> None:
    with pytest.raises(ValueError, match=rf"{length} tokens.* 4"):  # by the call
        windows(np.arange(length), 4, 2, np.random.default_rng(0))


@given(st.integers(0, 100), st.integers(1, 12), st.integers(1, 6))
def test_windows_in_order_have_every_target_once(N: int, context: int, batch_size: int) -> None:
    epoch = list(windows(np.arange(N), context, batch_size, None))
    targets = [i for batch in epoch for i in batch.targets.ravel().tolist()]
    assert targets == list(range(1, N))
    last = (N - 1) % context if N else 0
    for i, batch in enumerate(epoch):
        shorter = last > 0 and i == len(epoch) - 1
        starts = window_starts(batch, last if shorter else context)
        assert len(starts) == 1 if shorter else 1 <= len(starts) <= batch_size
    whole = max(N - 1, 0) // context
    assert len(epoch) == -(-whole // batch_size) + (last > 0)


@pytest.mark.parametrize("rng", [0, None])
def test_windows_of_bad_sizes(rng: int | None) -> None:
    generator = None if rng is None else np.random.default_rng(rng)
    for context, batch_size, name in ((0, 2, "context"), (-1, 2, "context"), (2, 0, "batch_size")):
        with pytest.raises(ValueError, match=name):  # by the call
            windows(np.arange(9), context, batch_size, generator)


def test_windows_do_not_share_memory_with_the_text() -> None:
    ids = np.arange(9)
    for rng in (None, np.random.default_rng(0)):
        for batch in windows(ids, 3, 2, rng):
            batch.inputs[0][...] = -1
    assert ids.tolist() == list(range(9))
