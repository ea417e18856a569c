"""A small English-Chinese phrase book, made from sentence patterns and lists of words.

A small Transformer learns it within a minute, and cannot do so by copying word after word: the
order changes (where is the cat -> 猫 在 哪 里), words come and go (a teacher -> 老 师, two books ->
两 本 书) and one word depends on another (do not like -> 不 喜 欢, do not have -> 没 有). Each
English sentence has exactly one Chinese translation and the other way round. The Chinese is
written as single characters with spaces between, so that what is printed is what is learnt.

The patterns, with one example each:

    person      I love you                      我 爱 你
    statement   He drinks tea                   他 喝 茶
    negation    I do not like tea               我 不 喜 欢 茶
    question    Do you like tea?                你 喜 欢 茶 吗 ？
    what        What does he want?              他 想 要 什 么 ？
    who         Who does she know?              她 认 识 谁 ？
    place       The cat is on the table         猫 在 桌 子 上
    is it there Is the cat on the table?        猫 在 桌 子 上 吗 ？
    where       Where is the cat?               猫 在 哪 里 ？
    city        She works in Beijing            她 在 北 京 工 作
    time        I drink tea every day           我 每 天 喝 茶
    have        I have two books                我 有 两 本 书
    have not    He does not have a car          他 没 有 车
    how many    How many books do you have?     你 有 几 本 书 ？
    colour      My book is red                  我 的 书 是 红 色 的
    quality     Your car is new                 你 的 车 很 新
    state       We are not tired                我 们 不 累
    this        This is my friend               这 是 我 的 朋 友
    job         Is she a doctor?                她 是 医 生 吗 ？
    can         They can swim                   他 们 会 游 泳
    want to     She wants to go to the park     她 想 去 公 园
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

Pair = tuple[str, str]  # (English, Chinese)

MIN_OCCURRENCES = 4  # training sentences that split() keeps for each word and each pattern


class Subject(NamedTuple):
    english: str
    chinese: str
    be: str  # am, are or is
    do: str  # do or does; after "does" subjects a statement's verb takes its -s
    me: str  # the English object form


class Verb(NamedTuple):
    base: str
    with_s: str
    chinese: str
    objects: tuple[Pair, ...] = ()

    def after(self, subject: Subject) -> str:
        return self.with_s if subject.do == "does" else self.base


class Noun(NamedTuple):
    english: str
    chinese: str
    plural: str = ""
    measure: str = ""  # the word Chinese puts between a number and this noun


SUBJECTS = (
    Subject("I", "我", "am", "do", "me"),
    Subject("you", "你", "are", "do", "you"),
    Subject("he", "他", "is", "does", "him"),
    Subject("she", "她", "is", "does", "her"),
    Subject("we", "我们", "are", "do", "us"),
    Subject("they", "他们", "are", "do", "them"),
)
I, YOU, HE, SHE, WE, THEY = SUBJECTS
ASKED = (YOU, HE, SHE, THEY)  # whom the questions are about
OWNERS = (("my", "我的"), ("your", "你的"), ("his", "他的"))

TEA = ("tea", "茶")
COFFEE = ("coffee", "咖啡")
FISH = ("fish", "鱼")
APPLES = ("apples", "苹果")
ENGLISH = ("English", "英语")

DRINK = Verb("drink", "drinks", "喝", (TEA, COFFEE, ("milk", "牛奶"), ("water", "水")))
EAT = Verb("eat", "eats", "吃", (FISH, APPLES, ("rice", "米饭")))
READ = Verb("read", "reads", "看", (("books", "书"), ("newspapers", "报纸")))
WATCH = Verb("watch", "watches", "看", (("TV", "电视"), ("movies", "电影")))
LIKE = Verb("like", "likes", "喜欢", (TEA, FISH, APPLES, ("music", "音乐")))
WANT = Verb("want", "wants", "想要", (TEA, COFFEE))
SPEAK = Verb("speak", "speaks", "说", (ENGLISH, ("Chinese", "中文")))
PLAY = Verb("play", "plays", "打", (("tennis", "网球"), ("basketball", "篮球")))
VERBS = (DRINK, EAT, READ, WATCH, LIKE, WANT, SPEAK, PLAY)
VERBS_FOR_PERSONS = (
    Verb("love", "loves", "爱"),
    Verb("know", "knows", "认识"),
    Verb("help", "helps", "帮助"),
)
SKILLS = (
    ("swim", "游泳"),
    ("drive", "开车"),
    ("cook", "做饭"),
    ("speak Chinese", "说中文"),
    ("play tennis", "打网球"),
)

TIMES = (
    ("every day", "每天"),
    ("every morning", "每天早上"),
    ("every evening", "每天晚上"),
)
HABITS = (
    Verb("drink tea", "drinks tea", "喝茶"),
    Verb("read newspapers", "reads newspapers", "看报纸"),
    Verb("play basketball", "plays basketball", "打篮球"),
    Verb("go to the park", "goes to the park", "去公园"),
)
WISHES = (
    ("drink water", "喝水"),
    ("eat rice", "吃米饭"),
    ("read books", "看书"),
    ("watch TV", "看电视"),
    ("swim", "游泳"),
    ("go to the park", "去公园"),
    ("go to the school", "去学校"),
    ("go to the station", "去车站"),
)
CITIES = (("Beijing", "北京"), ("Shanghai", "上海"), ("London", "伦敦"))

PETS = (("cat", "猫"), ("dog", "狗"))
THINGS = (("book", "书"), ("cup", "杯子"), ("phone", "手机"))
PLACES = (
    ("on the table", "桌子上"),
    ("on the chair", "椅子上"),
    ("on the bed", "床上"),
    ("under the table", "桌子下面"),
    ("under the bed", "床下面"),
    ("in the room", "房间里"),
)
PLACES_FOR_PETS = (*PLACES, ("in the garden", "花园里"))
PLACES_FOR_THINGS = (*PLACES, ("in the box", "箱子里"), ("in the bag", "包里"))

NUMBERS = (("a", "一"), ("two", "两"), ("three", "三"), ("ten", "十"))
COUNTED = (
    Noun("book", "书", "books", "本"),
    Noun("cat", "猫", "cats", "只"),
    Noun("friend", "朋友", "friends", "个"),
    Noun("car", "车", "cars", "辆"),
    Noun("chair", "椅子", "chairs", "把"),
    Noun("shirt", "衬衫", "shirts", "件"),
    Noun("pen", "笔", "pens", "支"),
)

OWNED = (("book", "书"), ("car", "车"), ("bag", "包"), ("cup", "杯子"))
COLOURS = (("red", "红色"), ("white", "白色"), ("black", "黑色"), ("blue", "蓝色"))
QUALITIES = (("new", "新"), ("old", "旧"), ("big", "大"), ("expensive", "贵"))
STATES = (("tired", "累"), ("busy", "忙"), ("hungry", "饿"), ("happy", "高兴"))
SHOWN = (
    ("friend", "朋友"),
    ("teacher", "老师"),
    ("brother", "哥哥"),
    ("sister", "姐姐"),
    ("book", "书"),
    ("cup", "杯子"),
)
JOBS = (("teacher", "老师"), ("doctor", "医生"), ("student", "学生"), ("nurse", "护士"))


def by_pattern() -> dict[str, list[Pair]]:
    """The pairs of each pattern, by the names in the module's docstring, in a fixed order."""
    patterns = {
        "person": _person(),
        "statement": _statement(),
        "negation": _negation(),
        "question": _question(),
        "what": _what(),
        "who": _who(),
        "place": _place(),
        "is it there": _is_it_there(),
        "where": _where(),
        "city": _city(),
        "time": _time(),
        "have": _have(),
        "have not": _have_not(),
        "how many": _how_many(),
        "colour": _colour(),
        "quality": _quality(),
        "state": _state(),
        "this": _this(),
        "job": _job(),
        "can": _can(),
        "want to": _want_to(),
    }
    return {name: [_written(*pair) for pair in made] for name, made in patterns.items()}


def pairs() -> list[Pair]:
    """All (English, Chinese) pairs, distinct, in a fixed order: ("I love you", "我 爱 你")."""
    return [pair for made in by_pattern().values() for pair in made]


def split(held_out_fraction: float = 0.2) -> tuple[list[Pair], list[Pair]]:
    """Split pairs() into (train, held_out), always in the same way.

    No held-out sentence, English or Chinese, is in train, but training has at least 4 sentences
    with each of its words, and 4 of its pattern: what is held out is new combinations alone.
    For a fraction near 1 that leaves fewer held out than asked for. "I love you" is in train.

    Errors: ValueError for a fraction outside [0, 1).
    """
    if not 0 <= held_out_fraction < 1:
        raise ValueError(f"held_out_fraction must be in [0, 1), got {held_out_fraction}")
    pattern_of = {pair: name for name, made in by_pattern().items() for pair in made}
    book = list(pattern_of)
    parts = {pair: _parts(pair, pattern_of[pair]) for pair in book}
    left = Counter(part for pair in book for part in parts[pair])
    wanted = round(held_out_fraction * len(book))
    held_out: set[Pair] = set()
    for i in np.random.default_rng(0).permutation(len(book)):
        pair = book[i]
        if len(held_out) == wanted:
            break
        if pair[0] != "I love you" and all(left[part] > MIN_OCCURRENCES for part in parts[pair]):
            held_out.add(pair)
            left.subtract(parts[pair])
    train = [pair for pair in book if pair not in held_out]
    return train, [pair for pair in book if pair in held_out]


def _parts(pair: Pair, pattern: str) -> set[tuple[str, str]]:
    # The kind keeps a pattern's name apart from a word spelled the same.
    english, chinese = pair
    words = english.lower().removesuffix("?").split()
    return {
        ("pattern", pattern),
        *(("english", word) for word in words),
        *(("chinese", character) for character in chinese.split()),
    }


def _written(english: str, chinese: str) -> Pair:
    return english[0].upper() + english[1:], " ".join(chinese)


def _person() -> Iterator[Pair]:
    for s in SUBJECTS:
        for verb in VERBS_FOR_PERSONS:
            for o in SUBJECTS:
                # "I love me", "he loves him" and "I know us" would be odd.
                if o is not s and {o, s} != {I, WE}:
                    english = f"{s.english} {verb.after(s)} {o.me}"
                    yield english, s.chinese + verb.chinese + o.chinese


def _statement() -> Iterator[Pair]:
    for s in SUBJECTS:
        for verb in VERBS:
            for noun, chinese in verb.objects:
                yield f"{s.english} {verb.after(s)} {noun}", s.chinese + verb.chinese + chinese


def _negation() -> Iterator[Pair]:
    for s in SUBJECTS:
        for verb in VERBS:
            for noun, chinese in verb.objects:
                english = f"{s.english} {s.do} not {verb.base} {noun}"
                yield english, f"{s.chinese}不{verb.chinese}{chinese}"


def _question() -> Iterator[Pair]:
    for s in ASKED:
        for verb in VERBS:
            for noun, chinese in verb.objects:
                english = f"{s.do} {s.english} {verb.base} {noun}?"
                yield english, f"{s.chinese}{verb.chinese}{chinese}吗？"


def _what() -> Iterator[Pair]:
    for s in ASKED:
        for verb in (DRINK, EAT, READ, LIKE, WANT):  # not WATCH: its Chinese is that of READ
            yield f"what {s.do} {s.english} {verb.base}?", f"{s.chinese}{verb.chinese}什么？"


def _who() -> Iterator[Pair]:
    for s in ASKED:
        for verb in VERBS_FOR_PERSONS:
            yield f"who {s.do} {s.english} {verb.base}?", f"{s.chinese}{verb.chinese}谁？"


def _things_in_places() -> Iterator[tuple[Pair, Pair]]:
    for things, places in ((PETS, PLACES_FOR_PETS), (THINGS, PLACES_FOR_THINGS)):
        for thing in things:
            for place in places:
                yield thing, place


def _place() -> Iterator[Pair]:
    for (thing, thing_chinese), (place, place_chinese) in _things_in_places():
        yield f"the {thing} is {place}", f"{thing_chinese}在{place_chinese}"


def _is_it_there() -> Iterator[Pair]:
    for (thing, thing_chinese), (place, place_chinese) in _things_in_places():
        yield f"is the {thing} {place}?", f"{thing_chinese}在{place_chinese}吗？"


def _where() -> Iterator[Pair]:
    for thing, chinese in PETS + THINGS:
        yield f"where is the {thing}?", f"{chinese}在哪里？"
    for owner, owner_chinese in OWNERS:
        for thing, chinese in OWNED:
            yield f"where is {owner} {thing}?", f"{owner_chinese}{chinese}在哪里？"
    for s in ASKED:
        yield f"where {s.do} {s.english} live?", f"{s.chinese}住在哪里？"
        yield f"where {s.do} {s.english} work?", f"{s.chinese}在哪里工作？"


def _city() -> Iterator[Pair]:
    live, work = Verb("live", "lives", "住"), Verb("work", "works", "工作")
    for s in SUBJECTS:
        for city, chinese in CITIES:
            yield f"{s.english} {live.after(s)} in {city}", f"{s.chinese}{live.chinese}在{chinese}"
            yield f"{s.english} {work.after(s)} in {city}", f"{s.chinese}在{chinese}{work.chinese}"


def _time() -> Iterator[Pair]:
    for s in SUBJECTS:
        for habit in HABITS:
            for time, chinese in TIMES:
                yield f"{s.english} {habit.after(s)} {time}", s.chinese + chinese + habit.chinese


def _have() -> Iterator[Pair]:
    for s in (I, HE, WE):
        have = "has" if s is HE else "have"
        for number, chinese in NUMBERS:
            for noun in COUNTED:
                counted = noun.english if number == "a" else noun.plural
                english = f"{s.english} {have} {number} {counted}"
                yield english, f"{s.chinese}有{chinese}{noun.measure}{noun.chinese}"


def _have_not() -> Iterator[Pair]:
    for s in SUBJECTS:
        for noun in COUNTED:
            english = f"{s.english} {s.do} not have a {noun.english}"
            yield english, f"{s.chinese}没有{noun.chinese}"


def _how_many() -> Iterator[Pair]:
    for s in ASKED:
        for noun in COUNTED:
            english = f"how many {noun.plural} {s.do} {s.english} have?"
            yield english, f"{s.chinese}有几{noun.measure}{noun.chinese}？"


def _colour() -> Iterator[Pair]:
    for owner, owner_chinese in OWNERS:
        for thing, chinese in OWNED:
            for colour, colour_chinese in COLOURS:
                english = f"{owner} {thing} is {colour}"
                yield english, f"{owner_chinese}{chinese}是{colour_chinese}的"


def _quality() -> Iterator[Pair]:
    for owner, owner_chinese in OWNERS:
        for thing, chinese in OWNED:
            for quality, quality_chinese in QUALITIES:
                english = f"{owner} {thing} is {quality}"
                yield english, f"{owner_chinese}{chinese}很{quality_chinese}"


def _state() -> Iterator[Pair]:
    for s in SUBJECTS:
        for state, chinese in STATES:
            yield f"{s.english} {s.be} {state}", f"{s.chinese}很{chinese}"
            yield f"{s.english} {s.be} not {state}", f"{s.chinese}不{chinese}"
            if s in ASKED:
                yield f"{s.be} {s.english} {state}?", f"{s.chinese}{chinese}吗？"


def _this() -> Iterator[Pair]:
    for this, this_chinese in (("this", "这"), ("that", "那")):
        for owner, owner_chinese in OWNERS:
            for shown, chinese in SHOWN:
                yield f"{this} is {owner} {shown}", f"{this_chinese}是{owner_chinese}{chinese}"
                if owner != "my":
                    english = f"is {this} {owner} {shown}?"
                    yield english, f"{this_chinese}是{owner_chinese}{chinese}吗？"


def _job() -> Iterator[Pair]:
    for s in (I, YOU, HE, SHE):
        for job, chinese in JOBS:
            yield f"{s.english} {s.be} a {job}", f"{s.chinese}是{chinese}"
            yield f"{s.english} {s.be} not a {job}", f"{s.chinese}不是{chinese}"
            if s in ASKED:
                yield f"{s.be} {s.english} a {job}?", f"{s.chinese}是{chinese}吗？"


def _can() -> Iterator[Pair]:
    for s in SUBJECTS:
        for skill, chinese in SKILLS:
            yield f"{s.english} can {skill}", f"{s.chinese}会{chinese}"
            yield f"{s.english} cannot {skill}", f"{s.chinese}不会{chinese}"
            if s in ASKED:
                yield f"can {s.english} {skill}?", f"{s.chinese}会{chinese}吗？"


def _want_to() -> Iterator[Pair]:
    for s in SUBJECTS:
        for wish, chinese in WISHES:
            yield f"{s.english} {WANT.after(s)} to {wish}", f"{s.chinese}想{chinese}"
