"""From text to arrays of token ids and back: tokens, vocabularies, files of text, batches.

    pairs = read_pairs("pairs.tsv")
    train, held_out = split_pairs(pairs, held_out_fraction=0.1, seed=0)
    english = Vocabulary.build(tokenize(source) for source, _ in train)
    chinese = Vocabulary.build(tokenize(target) for _, target in train)

    text = read_text("book.txt")                 # for a language model of characters
    ids = Characters.build(text).encode(text)

Nothing here needs the rest of the package. Ids have dtype np.intp, NumPy's own index type.
"""

from __future__ import annotations

import codecs
import itertools
import os
import re
import unicodedata
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.intp]
PairOfIds = tuple[Sequence[int], Sequence[int]]  # (source, target), without special tokens

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")

POOL_BATCHES = 50  # batches() sorts by length within pools of this many batches

# Scripts written without spaces: CJK ideographs, punctuation, radicals, kana and bopomofo.
_CJK = "\u2e80-\u9fff\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff"
# Vowel signs and accents belong to the letter before them, but `\w` does not match them.
_MARKS = "".join(
    chr(code) for code in range(0x300, 0x2E80) if unicodedata.category(chr(code)).startswith("M")
)
_WORD = rf"[^\W_{_CJK}](?:[^\W_{_CJK}]|[{_MARKS}])*"
_TOKEN = re.compile(rf"{_WORD}(?:['’]{_WORD})*|\S")

# Full-width letters and digits to plain ones. Unicode's NFKC would do this too, but it would also
# turn the Chinese marks ，？！ into ASCII.
_PLAIN = {
    code: code - 0xFEE0
    for first, last in ("０９", "ＡＺ", "ａｚ")
    for code in range(ord(first), ord(last) + 1)
}


def tokenize(text: str) -> list[str]:
    """Split a text into lower-case tokens.

    One token is: a CJK character or punctuation mark (kana too); a run of letters and digits of
    any other script, with the apostrophes inside it (don't; a typographic one becomes '); or any
    other character that is not a space. Full-width letters and digits become plain ones; Chinese
    punctuation stays as it is. Letters are composed (NFC), so that both ways to write é agree.

        tokenize("Tom 喜欢茶。") == ["tom", "喜", "欢", "茶", "。"]
    """
    text = unicodedata.normalize("NFC", text.translate(_PLAIN).lower())
    return [
        token.replace("’", "'") if len(token) > 1 else token  # alone, ’ is a closing quote
        for token in _TOKEN.findall(text)
    ]


def detokenize(tokens: Iterable[str]) -> str:
    """The tokens joined by single spaces: "我 爱 你". tokenize splits it into the same tokens."""
    return " ".join(tokens)


class Vocabulary:
    """Tokens and their ids: <pad> <bos> <eos> <unk> are 0 1 2 3, ordinary tokens follow.

    tokens: the ordinary tokens in the order of their ids, 4 and up.

    Errors: ValueError for a token that comes twice or is one of the special tokens; TypeError for
    one string in place of a list of tokens, and for tokens that are no strings.
    """

    pad_id = 0
    bos_id = 1
    eos_id = 2
    unk_id = 3

    def __init__(self, tokens: Iterable[str]) -> None:
        _refuse_text(tokens)
        ordinary = list(tokens)
        if not all(isinstance(token, str) for token in ordinary):
            raise TypeError("tokens holds something else than strings")
        self.tokens = [*SPECIAL_TOKENS, *ordinary]  # all of them; the index is the id
        repeated = [token for token, count in Counter(self.tokens).items() if count > 1]
        if repeated:
            raise ValueError(f"tokens must be distinct and not special, but repeats: {repeated}")
        # Ordinary tokens only: a user's "<eos>" is an unknown word, not the end of the sentence.
        self._ids = {token: i for i, token in enumerate(ordinary, start=len(SPECIAL_TOKENS))}

    @classmethod
    def build(cls, token_lists: Iterable[Iterable[str]], min_count: int = 1) -> Vocabulary:
        """The vocabulary of the tokens that occur at least min_count times.

        The most frequent comes first, equally frequent ones in alphabetical order, so the ids
        depend on the counts alone. A special token in the lists is left out: it is unknown.
        """
        counts: Counter[str] = Counter()
        for tokens in token_lists:
            _refuse_text(tokens)
            counts.update(tokens)
        for token in SPECIAL_TOKENS:
            del counts[token]
        ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        return cls(token for token, count in ordered if count >= min_count)

    def __len__(self) -> int:
        return len(self.tokens)

    def __contains__(self, token: object) -> bool:
        """Whether token is one of `tokens`, the special ones included."""
        return token in self._ids or token in SPECIAL_TOKENS

    def encode(self, tokens: Iterable[str], warn: bool = True) -> list[int]:
        """The ids of the tokens; no special token is added.

        Unknown tokens, and a special token written out, become unk_id. One UserWarning names
        them all, unless warn is False.

        Errors: TypeError for one string in place of a list of tokens.
        """
        _refuse_text(tokens)
        tokens = list(tokens)
        unknown = [token for token in dict.fromkeys(tokens) if token not in self._ids]
        if unknown and warn:
            words = ", ".join(map(repr, unknown))
            warnings.warn(f"not in the vocabulary, read as <unk>: {words}", stacklevel=2)
        return [self._ids.get(token, self.unk_id) for token in tokens]

    def decode(self, ids: Iterable[int]) -> list[str]:
        """The tokens of a list or 1-D array of ids up to the first eos, without pad and bos.

        Errors: IndexError for an id below 0 or >= len(self), wherever it stands.
        """
        ids = list(ids)
        for i in ids:
            if not 0 <= i < len(self):
                raise IndexError(f"id {i} is outside the vocabulary of size {len(self)}")
        if self.eos_id in ids:
            ids = ids[: ids.index(self.eos_id)]
        return [self.tokens[i] for i in ids if i not in (self.pad_id, self.bos_id)]


class Characters:
    """Characters and their ids 0, 1, 2, ...; there are no special tokens.

    characters: a string, in the order of the ids.

    Errors: ValueError for none, or one that comes twice.
    """

    def __init__(self, characters: str) -> None:
        self.characters = "".join(characters)
        self._ids = {character: i for i, character in enumerate(self.characters)}
        if not self._ids or len(self._ids) < len(self.characters):
            raise ValueError("characters must be distinct, and at least one")

    @classmethod
    def build(cls, text: str) -> Characters:
        """Those that occur in the text, in the order of their code points."""
        return cls("".join(sorted(set(text))))

    def __len__(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> IntArray:
        """The ids (T,) of a text of T characters.

        Errors: ValueError that names every character that is not among these.
        """
        unknown = sorted(set(text) - self._ids.keys())
        if unknown:
            raise ValueError(f"the model does not know the characters {''.join(unknown)!r}")
        return np.array([self._ids[character] for character in text], np.intp)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of a list or 1-D array of ids.

        Errors: IndexError for an id below 0 or >= len(self).
        """
        ids = list(ids)
        for i in ids:
            if not 0 <= i < len(self):
                raise IndexError(f"id {i} is outside the vocabulary of size {len(self)}")
        return "".join(self.characters[i] for i in ids)


def _refuse_text(tokens: Iterable[str]) -> None:
    # A string is an iterable of its letters, so this mistake would otherwise pass in silence.
    if isinstance(tokens, str):
        raise TypeError(f"expected a list of tokens, got the string {tokens!r}: tokenize it first")


def read_text(path: str | os.PathLike[str]) -> str:
    """Read a UTF-8 file; a byte order mark is dropped, and CRLF line ends become LF.

    Errors: ValueError, naming the file and the line, for bytes that are not UTF-8.
    """
    data = Path(path).read_bytes().removeprefix(codecs.BOM_UTF8)
    try:
        return data.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line_number = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}, line {line_number}: not UTF-8 ({error.reason})") from None


def read_pairs(path: str | os.PathLike[str]) -> list[tuple[str, str]]:
    """Read (source, target) pairs from the first two columns of a tab-separated UTF-8 file.

    A byte order mark, CRLF line ends, blank lines and further columns are fine; the fields are
    stripped of outer spaces.

    Errors: ValueError, naming the file and the line, for a line without a tab, an empty first or
    second column, or bytes that are not UTF-8; ValueError for a file without any pair.
    """
    pairs = []
    # Not splitlines(): it would also cut at U+2028 and others, which may stand inside a sentence.
    for line_number, line in enumerate(read_text(path).split("\n"), start=1):
        fields = [field.strip() for field in line.split("\t")]
        if fields == [""]:
            continue
        if len(fields) < 2:
            raise ValueError(f"{path}, line {line_number}: no tab between source and target")
        if not (fields[0] and fields[1]):
            raise ValueError(f"{path}, line {line_number}: the source or the target is empty")
        pairs.append((fields[0], fields[1]))
    if not pairs:
        raise ValueError(f"{path}: no pairs in this file")
    return pairs


def split_pairs(
    pairs: Iterable[tuple[str, str]], held_out_fraction: float, seed: int
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Split (source, target) pairs into (train, held_out), the same way for the same seed.

    Duplicate pairs are removed first; both sides keep the order of the rest. held_out_fraction
    counts distinct sources, compared as tokens ("Hi." is "hi."): all translations of a source go
    to the same side. A fraction above 0 holds out at least one source of two or more; training
    always keeps at least one.

    Errors: ValueError for a fraction outside [0, 1).
    """
    if not 0 <= held_out_fraction < 1:
        raise ValueError(f"held_out_fraction must be in [0, 1), got {held_out_fraction}")
    distinct = list(dict.fromkeys(pairs))
    keys = [tuple(tokenize(source)) for source, _ in distinct]
    sources = list(dict.fromkeys(keys))
    count = round(held_out_fraction * len(sources))
    if held_out_fraction > 0:
        count = max(count, 1)
    count = max(0, min(count, len(sources) - 1))
    order = np.random.default_rng(seed).permutation(len(sources))
    held_out_sources = {sources[i] for i in order[:count]}
    train = [pair for pair, key in zip(distinct, keys) if key not in held_out_sources]
    held_out = [pair for pair, key in zip(distinct, keys) if key in held_out_sources]
    return train, held_out


class Batch(NamedTuple):
    """What a model reads, and what it is to say.

    inputs:  the arguments of model.forward; for translation (source_ids (B, S),
             target_input_ids (B, T)), for a language model (ids (B, T),). dtype np.intp.
    targets: (B, T) np.intp; targets[:, t] is the token to predict after target_input_ids[:, t].
    """

    inputs: tuple[IntArray, ...]
    targets: IntArray


def pad(sequences: Sequence[Sequence[int]], pad_id: int) -> IntArray:
    """Stack id sequences into (B, longest) np.intp, filled up on the right with pad_id.

    Errors: TypeError for ids that are not integers.
    """
    longest = max(map(len, sequences), default=0)
    padded: IntArray = np.full((len(sequences), longest), pad_id, dtype=np.intp)
    for row, sequence in zip(padded, sequences):
        ids = np.asarray(sequence)
        if ids.size and ids.dtype.kind not in "iu":  # assigning floats would cut them in silence
            raise TypeError(f"ids must be integers, got {ids.dtype}")
        row[: len(sequence)] = ids
    return padded


def make_batch(pairs_of_ids: Sequence[PairOfIds], pad_id: int, bos_id: int, eos_id: int) -> Batch:
    """Pad pairs into one batch for teacher forcing: the target input is the target shifted right.

        source   5 3       source_ids        5 3 eos
        target   7 4 6     target_input_ids  bos 7 4 6
                           targets           7 4 6 eos

    Shapes: (B, S), (B, T) and (B, T), each as long as its longest row; (0, 0) for no pairs.
    """
    sources = pad([[*source, eos_id] for source, _ in pairs_of_ids], pad_id)
    target_inputs = pad([[bos_id, *target] for _, target in pairs_of_ids], pad_id)
    targets = pad([[*target, eos_id] for _, target in pairs_of_ids], pad_id)
    return Batch((sources, target_inputs), targets)


def batches(
    pairs_of_ids: Sequence[PairOfIds],
    batch_size: int,
    rng: np.random.Generator | None,
    pad_id: int,
    bos_id: int,
    eos_id: int,
) -> Iterator[Batch]:
    """One epoch: every pair once, in batches of similar length (less padding, less work).

    rng: shuffles; pairs are sorted by length only within pools of 50 batches, so that the
         batches differ from epoch to epoch, and come in random order. All its numbers are drawn
         by the call, none during iteration. None: everything in order of length, always the same.

    Errors: ValueError for batch_size below 1.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")

    def lengths(i: int) -> tuple[int, int]:
        source, target = pairs_of_ids[i]
        return len(source), len(target)

    count = len(pairs_of_ids)
    if rng is None:
        order = sorted(range(count), key=lengths)
    else:
        shuffled = rng.permutation(count).tolist()
        pool_size = POOL_BATCHES * batch_size
        order = []
        for start in range(0, count, pool_size):
            order += sorted(shuffled[start : start + pool_size], key=lengths)
    chunks = [order[start : start + batch_size] for start in range(0, count, batch_size)]
    if rng is not None:
        chunks = [chunks[i] for i in rng.permutation(len(chunks))]
    return (
        make_batch([pairs_of_ids[i] for i in chunk], pad_id, bos_id, eos_id) for chunk in chunks
    )


def windows(
    ids: IntArray, context: int, batch_size: int, rng: np.random.Generator | None
) -> Iterator[Batch]:
    """One epoch of a language model: pieces of the text ids (N,), inputs and targets (B, context).

        text 5 3 7 4 6     inputs 5 3 7 4     targets 3 7 4 6

    rng: as many random pieces as cover the text about once, each drawn anew from all places. All
         numbers are drawn by the call, none during iteration. None: every target of the text once,
         in its order, in pieces that follow one another; the last one may be shorter.

    Errors: ValueError for a text that has no piece of this length and the target after it, and for
    context or batch_size below 1.
    """
    for name, value in ("context", context), ("batch_size", batch_size):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    places = len(ids) - context
    if rng is not None:
        if places < 1:
            raise ValueError(f"the text has {len(ids)} tokens, expected more than the context of "
                             f"{context}")
        shape = max(1, len(ids) // (context * batch_size)), batch_size
        drawn = rng.integers(0, places, shape)
        return (_pieces(ids, starts, context) for starts in drawn)
    whole = np.arange(0, places, context)
    cut = [whole[start : start + batch_size] for start in range(0, len(whole), batch_size)]
    end = len(whole) * context
    rest = [_pieces(ids, np.array([end]), len(ids) - 1 - end)] if end < len(ids) - 1 else []
    return itertools.chain((_pieces(ids, starts, context) for starts in cut), rest)


def _pieces(ids: IntArray, starts: IntArray, length: int) -> Batch:
    rows = ids[starts[:, None] + np.arange(length + 1)]
    return Batch((rows[:, :-1],), rows[:, 1:])
