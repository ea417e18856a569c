"""The phrase book: its size, that it is a function both ways, its split, exact sentences."""

from __future__ import annotations

from collections import Counter

import pytest

from npdecoder import phrase_book
from npdecoder.text import detokenize, tokenize

EXAMPLES = [  # of each pattern: what the module's docstring promises, and another
    ("person", "I love you", "我 爱 你"),
    ("person", "They help her", "他 们 帮 助 她"),
    ("statement", "He drinks tea", "他 喝 茶"),
    ("statement", "We watch movies", "我 们 看 电 影"),
    ("negation", "I do not like tea", "我 不 喜 欢 茶"),
    ("negation", "She does not speak English", "她 不 说 英 语"),
    ("question", "Do you like tea?", "你 喜 欢 茶 吗 ？"),
    ("question", "Does he play tennis?", "他 打 网 球 吗 ？"),
    ("what", "What does he want?", "他 想 要 什 么 ？"),
    ("what", "What do you drink?", "你 喝 什 么 ？"),
    ("who", "Who does she know?", "她 认 识 谁 ？"),
    ("who", "Who do they love?", "他 们 爱 谁 ？"),
    ("place", "The cat is on the table", "猫 在 桌 子 上"),
    ("place", "The phone is in the bag", "手 机 在 包 里"),
    ("is it there", "Is the cat on the table?", "猫 在 桌 子 上 吗 ？"),
    ("is it there", "Is the book under the bed?", "书 在 床 下 面 吗 ？"),
    ("where", "Where is the cat?", "猫 在 哪 里 ？"),
    ("where", "Where is your car?", "你 的 车 在 哪 里 ？"),
    ("where", "Where does he live?", "他 住 在 哪 里 ？"),
    ("where", "Where do you work?", "你 在 哪 里 工 作 ？"),
    ("city", "She works in Beijing", "她 在 北 京 工 作"),
    ("city", "I live in London", "我 住 在 伦 敦"),
    ("time", "I drink tea every day", "我 每 天 喝 茶"),
    ("time", "He goes to the park every morning", "他 每 天 早 上 去 公 园"),
    ("have", "I have two books", "我 有 两 本 书"),
    ("have", "He has a car", "他 有 一 辆 车"),
    ("have", "We have three cats", "我 们 有 三 只 猫"),
    ("have not", "He does not have a car", "他 没 有 车"),
    ("have not", "I do not have a friend", "我 没 有 朋 友"),
    ("how many", "How many books do you have?", "你 有 几 本 书 ？"),
    ("how many", "How many shirts does she have?", "她 有 几 件 衬 衫 ？"),
    ("colour", "My book is red", "我 的 书 是 红 色 的"),
    ("colour", "His cup is blue", "他 的 杯 子 是 蓝 色 的"),
    ("quality", "Your car is new", "你 的 车 很 新"),
    ("quality", "My bag is expensive", "我 的 包 很 贵"),
    ("state", "We are not tired", "我 们 不 累"),
    ("state", "I am happy", "我 很 高 兴"),
    ("state", "Is he busy?", "他 忙 吗 ？"),
    ("this", "This is my friend", "这 是 我 的 朋 友"),
    ("this", "Is that your brother?", "那 是 你 的 哥 哥 吗 ？"),
    ("job", "Is she a doctor?", "她 是 医 生 吗 ？"),
    ("job", "I am not a teacher", "我 不 是 老 师"),
    ("can", "They can swim", "他 们 会 游 泳"),
    ("can", "She cannot speak Chinese", "她 不 会 说 中 文"),
    ("can", "Can you drive?", "你 会 开 车 吗 ？"),
    ("want to", "She wants to go to the park", "她 想 去 公 园"),
    ("want to", "I want to watch TV", "我 想 看 电 视"),
]


def english_words(sentence: str) -> list[str]:
    return [token for token in tokenize(sentence) if token != "?"]


def pattern_of() -> dict[tuple[str, str], str]:
    return {pair: name for name, made in phrase_book.by_pattern().items() for pair in made}


def test_size() -> None:
    pairs = phrase_book.pairs()
    assert 900 <= len(set(pairs)) <= 1250
    assert 110 <= len({word for english, _ in pairs for word in english_words(english)}) <= 140
    assert len(phrase_book.by_pattern()) == 21


def test_pairs_come_in_a_fixed_order() -> None:
    assert phrase_book.pairs() == phrase_book.pairs()
    assert phrase_book.pairs() == list(pattern_of())


def test_each_sentence_has_exactly_one_translation_both_ways() -> None:
    pairs = phrase_book.pairs()
    # As tokens, since that is what a model sees.
    english = Counter(tuple(tokenize(sentence)) for sentence, _ in pairs)
    chinese = Counter(tuple(tokenize(sentence)) for _, sentence in pairs)
    assert [sentence for sentence, count in english.items() if count > 1] == []
    assert [sentence for sentence, count in chinese.items() if count > 1] == []


@pytest.mark.parametrize(("name", "english", "chinese"), EXAMPLES)
def test_exact_sentences(name: str, english: str, chinese: str) -> None:
    assert (english, chinese) in phrase_book.by_pattern()[name]


def test_every_pattern_has_an_example_here_and_in_the_docstring() -> None:
    assert {name for name, _, _ in EXAMPLES} == set(phrase_book.by_pattern())
    assert phrase_book.__doc__ is not None
    described = phrase_book.__doc__.split("The patterns, with one example each:")[1]
    rows = [line.strip() for line in described.splitlines() if line.strip()]
    assert len(rows) == len(phrase_book.by_pattern())
    for row, (name, made) in zip(rows, phrase_book.by_pattern().items()):
        assert row.startswith(name)
        example = row.removeprefix(name).split()
        assert any(example == (english + " " + chinese).split() for english, chinese in made), row


def test_sentences_are_written_as_sentences() -> None:
    for english, chinese in phrase_book.pairs():
        assert english[0].isupper()
        assert english == " ".join(english.split())
        assert english.endswith("?") == chinese.endswith("？")
        assert "i" not in english.split(), "the pronoun is a capital"
        # Chinese is one token a character, and printing the tokens gives the sentence back.
        assert all(len(token) == 1 for token in chinese.split(" "))
        assert detokenize(tokenize(chinese)) == chinese
        assert all("\u4e00" <= token <= "\u9fff" or token == "？" for token in chinese.split())


def test_third_person() -> None:
    finite = {"do", "am", "are", "have", "want", "drink", "like", "live", "go", "know"}
    for english, _ in phrase_book.pairs():
        first, second, *_ = english.split()
        if first in ("He", "She"):
            assert second not in finite, english
        if first in ("I", "You", "We", "They"):
            assert not second.endswith("s"), english


def test_nobody_is_subject_and_object_at_once() -> None:
    same = {("I", "me"), ("I", "us"), ("We", "me"), ("We", "us"), ("You", "you")}
    same |= {("He", "him"), ("She", "her"), ("They", "them")}
    for english, _ in phrase_book.by_pattern()["person"]:
        subject, _, person = english.split()
        assert (subject, person) not in same


@pytest.mark.parametrize("fraction", [0.15, 0.2, 0.5, 0.99])
def test_split_holds_out_new_combinations_of_known_words(fraction: float) -> None:
    train, held_out = phrase_book.split(fraction)
    assert sorted(train + held_out) == sorted(phrase_book.pairs())
    assert ("I love you", "我 爱 你") in train
    assert {english for english, _ in held_out}.isdisjoint(english for english, _ in train)
    assert {chinese for _, chinese in held_out}.isdisjoint(chinese for _, chinese in train)

    words = Counter(word for english, _ in train for word in set(english_words(english)))
    characters = Counter(character for _, chinese in train for character in set(chinese.split()))
    patterns = pattern_of()
    train_patterns = Counter(patterns[pair] for pair in train)
    assert min(words.values()) >= 4
    assert min(characters.values()) >= 4
    assert min(train_patterns.values()) >= 4
    for pair in held_out:
        assert set(english_words(pair[0])) <= set(words)
        assert set(pair[1].split()) <= set(characters)
        assert patterns[pair] in train_patterns


def test_split_sizes() -> None:
    train, held_out = phrase_book.split()
    total = len(phrase_book.pairs())
    assert len(held_out) == round(0.2 * total) >= 0.15 * total
    patterns = pattern_of()
    assert len({patterns[pair] for pair in held_out}) >= 18  # nearly all patterns are tested
    assert phrase_book.split() == (train, held_out)
    assert phrase_book.split(0.0) == (phrase_book.pairs(), [])


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_split_refuses_a_fraction_outside_0_to_1(fraction: float) -> None:
    with pytest.raises(ValueError, match="held_out_fraction"):
        phrase_book.split(fraction)
