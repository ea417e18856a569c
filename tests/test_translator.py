"""Translator: files, texts, exact match, alignment."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npdecoder import (
    Adam,
    LanguageModel,
    LanguageModelConfig,
    Transformer,
    TransformerConfig,
    beam_search,
    greedy_decode,
    load_checkpoint,
    load_weights,
    log_softmax,
    save_checkpoint,
    save_weights,
)
from npdecoder.checkpoint import META
from npdecoder.files import SUFFIXES, json_array, json_value
from npdecoder.text import Vocabulary, tokenize
from npdecoder.translator import Translator

ENGLISH = ["i", "you", "love", "tea", "don't", "the", "cat", "?"]
CHINESE = ["我", "你", "爱", "茶", "猫", "不", "吗", "？"]
TEXTS = ["I love you", "tea?", "the cat", "don't love the cat", "you", "I", "love tea", "i i i i i"]
MAX_LEN = 8


def translator(seed: int = 0, dtype: Any = np.float32, **options: Any) -> Translator:
    """With random weights, so large that the translations differ."""
    sizes = {"d_model": 12, "num_heads": 3, "num_encoder_layers": 1, "num_decoder_layers": 2}
    config = TransformerConfig(12, 12, **{**sizes, "pad_id": 0, "max_len": MAX_LEN, **options})
    model = Transformer(config, seed, dtype=dtype)
    rng = np.random.default_rng(seed)
    for name, parameter in model.named_parameters():
        scale = 0.1 if name.endswith(("beta", ".b")) else 4.0 if "cross" in name else 1.0
        parameter.value = scale * rng.standard_normal(parameter.shape)
    if model.output.b is not None:
        model.output.b.value[[0, 1, 3]] = -1e3  # no <pad>, <bos>, <unk> in a translation
    return Translator(model, Vocabulary(ENGLISH), Vocabulary(CHINESE))


def always(token: str, **options: Any) -> Translator:
    """It says this token for ever, or at once ends with "<eos>"."""
    made = translator(**options)
    made.model.output.W.value *= 0.0
    made.model.output.b.value = np.zeros(12)
    made.model.output.b.value[made.target_vocabulary.tokens.index(token)] = 1.0
    return made


def ending(seed: int = 0, **options: Any) -> Translator:
    """It often ends a translation early."""
    made = translator(seed, **options)
    made.model.output.b.value[Vocabulary.eos_id] += 3.0
    return made


def wavering(seed: int, **options: Any) -> Translator:
    """It is never sure: a search finds better translations than the greedy ones."""
    made = translator(seed, np.float64, **options)
    made.model.output.W.value *= 0.3
    return made


# Texts


def test_the_translations_of_these_tests_differ() -> None:
    """Or the other tests would compare constants."""
    outputs = [output for seed in range(4) for output in ending(seed).translate(TEXTS)]
    assert len(set(outputs)) > 8
    assert len(set(map(len, outputs))) > 3


@pytest.mark.parametrize("seed", range(4))
def test_a_batch_of_texts_is_its_texts_one_by_one(seed: int) -> None:
    made = ending(seed, dtype=np.float64)
    together = made.translate(TEXTS)
    assert together == [made.translate([text])[0] for text in TEXTS]
    assert made.translate(TEXTS[::-1]) == together[::-1]
    assert made.translate(TEXTS * 2) == together * 2
    assert made.translate(tuple(TEXTS)) == together


def test_no_texts() -> None:
    assert translator().translate([]) == []
    assert translator().translate_ids([]) == []


def test_the_ids_that_the_model_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    made = always("<eos>")
    seen: list[Any] = []
    encode = made.model.encode

    def seeing(ids: Any, *masks: Any) -> Any:
        seen.append(ids.tolist())
        return encode(ids, *masks)

    monkeypatch.setattr(made.model, "encode", seeing)
    assert made.translate(["I LOVE  you?", "Tea"]) == ["", ""]
    assert seen == [[[4, 6, 5, 11, 2], [7, 2, 0, 0, 0]]]


def test_what_the_model_says() -> None:
    assert always("爱").translate(["tea"]) == [" ".join(["爱"] * MAX_LEN)]
    assert always("<unk>", max_len=2).translate(["tea"]) == ["<unk> <unk>"]
    assert always("<pad>", max_len=2).translate(["tea"]) == [""]


def score(made: Translator, text: str, output: str) -> float:
    """The mean log-probability a token of output, and of <eos> unless it fills all positions."""
    source, target = made.encode_pairs([(text, output)])[0]
    batch = made.batch([(source, target)])
    source_ids, target_ids = batch.inputs
    length = min(len(target) + 1, made.model.config.max_len)
    logits = made.model(source_ids, target_ids[:, :length])
    log_p = log_softmax(logits[0].astype(np.float64))
    return float(log_p[np.arange(length), batch.targets[0, :length]].mean())


def test_a_beam_of_one_is_greedy() -> None:
    for seed in range(4):
        made = ending(seed)
        greedy = made.translate(TEXTS)
        assert made.translate(TEXTS, beam_size=1) == made.translate(TEXTS, 1) == greedy
        ids = [made.source_vocabulary.encode(tokenize(text)) for text in TEXTS]
        assert made.translate_ids(ids) == [output.split() for output in greedy]
        for item, output in zip(ids, greedy):
            (expected,) = greedy_decode(made.model, [[*item, 2]], bos_id=1, eos_id=2)
            assert made.target_vocabulary.encode(output.split()) == expected


def test_a_wide_beam_never_scores_lower() -> None:
    """It has room for all prefixes of up to two tokens, so at most three are searched in full."""
    better = 0
    for seed in range(4):
        made = wavering(seed, max_len=3)
        texts = [text for text in TEXTS if len(tokenize(text)) < 3]
        wide = made.translate(texts, beam_size=144)
        for text, greedy, best in zip(texts, made.translate(texts), wide):
            assert score(made, text, best) >= score(made, text, greedy) - 1e-12
            better += best != greedy
    assert better > 2


@pytest.mark.parametrize("beam_size", [2, 5])
def test_a_beam_search_is_that_of_the_model(beam_size: int) -> None:
    made = wavering(1)
    assert made.translate(TEXTS, beam_size=beam_size) != made.translate(TEXTS)
    for text, output in zip(TEXTS, made.translate(TEXTS, beam_size=beam_size)):
        assert made.translate([text], beam_size) == [output]
        ids = [[*made.source_vocabulary.encode(tokenize(text)), 2]]
        ((best,),) = beam_search(made.model, ids, beam_size=beam_size, bos_id=1, eos_id=2)
        assert made.target_vocabulary.encode(output.split()) == best.ids
        np.testing.assert_allclose(score(made, text, output), best.score, rtol=1e-12)


@pytest.mark.parametrize("beam_size", [0, -1, 1.5, None])
def test_a_beam_size_that_is_no_size(beam_size: Any) -> None:
    for call in (translator().translate, lambda texts, size: translator().align(texts[0], size)):
        with pytest.raises((TypeError, ValueError), match="beam_size"):
            call(["tea"], beam_size)


def test_unknown_words_are_named() -> None:
    made = translator()
    with pytest.warns(UserWarning, match=r"'milk', 'dog'") as caught:
        outputs = made.translate(["milk dog milk tea"])
    assert len(caught) == 1
    assert "tea" not in str(caught[0].message)
    unk = Vocabulary.unk_id
    assert outputs == [" ".join(*made.translate_ids([[unk, unk, unk, 7]]))]
    with pytest.warns(UserWarning, match="<eos>|'eos'"):  # written out it is no special token
        made.translate(["<eos> tea"])


def test_known_words_give_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        translator().translate(TEXTS)
        translator().encode_pairs([("nobody knows", "不 知 道")])
        translator().exact_match([("nobody knows", "不 知 道")])


@pytest.mark.parametrize("text", ["", " ", "\t\n", "\u3000"])
def test_an_empty_text(text: str) -> None:
    for texts in ([text], ["tea", text]):
        with pytest.raises(ValueError, match="no words") as caught:
            translator().translate(texts)
        assert repr(text) in str(caught.value)
    with pytest.raises(ValueError, match="no words"):
        translator().align(text)


def test_a_text_that_is_too_long() -> None:
    made = translator()
    made.translate(["tea " * (MAX_LEN - 1)])
    for texts in (["tea " * MAX_LEN], ["tea", "tea " * MAX_LEN]):
        with pytest.raises(ValueError, match=rf"{MAX_LEN} tokens.* {MAX_LEN - 1}"):
            made.translate(texts)
    with pytest.raises(ValueError, match="tokens"):
        made.align("tea " * MAX_LEN)


def test_one_string_is_refused() -> None:
    with pytest.raises(TypeError, match="list of strings"):
        translator().translate("I love you")


def test_vocabularies_that_do_not_fit() -> None:
    made = translator()
    with pytest.raises(ValueError, match=r"12.*11|11.*12"):
        Translator(made.model, Vocabulary(ENGLISH[1:]), Vocabulary(CHINESE))
    with pytest.raises(ValueError, match="13"):
        Translator(made.model, Vocabulary(ENGLISH), Vocabulary([*CHINESE, "狗"]))


def test_encode_pairs_and_batch() -> None:
    made = translator()
    ids = made.encode_pairs([("I love you", "我爱你"), ("tea dog", "茶 狗")])
    assert ids == [([4, 6, 5], [4, 6, 5]), ([7, 3], [7, 3])]
    batch = made.batch(ids)
    assert batch.inputs[0].tolist() == [[4, 6, 5, 2], [7, 3, 2, 0]]
    assert batch.inputs[1].tolist() == [[1, 4, 6, 5], [1, 7, 3, 0]]
    assert batch.targets.tolist() == [[4, 6, 5, 2], [7, 3, 2, 0]]


# Exact match


def test_exact_match() -> None:
    made = ending(dtype=np.float64)
    outputs = made.translate(TEXTS)
    pairs = list(zip(TEXTS, outputs))
    assert made.exact_match(pairs) == 1.0
    assert made.exact_match([(s, t + " 猫") for s, t in pairs]) == 0.0
    assert made.exact_match([(s, " ".join(t.split()[:-1])) for s, t in pairs if t]) == 0.0
    half = [(s, t if i % 2 else t + " 茶") for i, (s, t) in enumerate(pairs)]
    assert made.exact_match(half) == 0.5
    for size in (1, 3, 100):
        assert made.exact_match(half, batch_size=size) == 0.5
    assert made.exact_match(half[::-1]) == 0.5


def test_exact_match_compares_tokens() -> None:
    made = always("爱", max_len=3)
    assert made.exact_match([("TEA ?", "爱爱 爱")]) == 1.0
    assert made.exact_match([("tea", "爱爱")]) == made.exact_match([("tea", "爱爱爱爱")]) == 0.0
    assert made.exact_match([]) == 0.0


def test_an_unknown_word_is_never_right() -> None:
    made = always("<unk>", max_len=2)
    assert made.exact_match([("tea", "狗 狗"), ("cat", "<unk> <unk>")]) == 0.0


def test_several_references() -> None:
    """Any of them is right, in any order and however the source is written."""
    made = always("爱", max_len=2)
    pairs = [("tea", "茶"), ("Tea", "爱爱"), ("TEA", "猫")]
    assert made.exact_match(pairs) == made.exact_match(pairs[::-1]) == 1.0
    assert made.exact_match([("tea", "茶"), ("tea", "猫")]) == 0.0
    assert made.exact_match([("tea", "爱爱"), ("tea", "茶"), ("cat", "猫"), ("cat", "茶")]) == 0.5


# Alignment


@pytest.mark.parametrize("cross_attention", ["per_layer", "shared"])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_alignment(cross_attention: str, norm: str) -> None:
    compared, moving = 0, 0
    for seed in range(8):
        made = ending(seed, cross_attention=cross_attention, norm=norm)
        for text, output in zip(TEXTS, made.translate(TEXTS)):
            target = output.split()
            if len(target) == MAX_LEN:  # see test_alignment_of_a_translation_that_does_not_end
                continue
            alignment = made.align(text)
            assert alignment.source_tokens == [*tokenize(text), "<eos>"]
            assert alignment.target_tokens == [*target, "<eos>"]
            assert alignment.A.shape == (len(target) + 1, len(tokenize(text)) + 1)
            assert alignment.A.min() >= 0
            np.testing.assert_allclose(alignment.A.sum(axis=1), 1.0, rtol=1e-6)
            compared += 1
            moving += not np.allclose(alignment.A, alignment.A[0])
    assert compared > 5
    assert moving > 0


def test_alignment_is_that_of_the_last_layer_and_the_mean_of_its_heads() -> None:
    made = always("<eos>", dtype=np.float64)
    first, last = (layer.cross_attention for layer in made.model.decoder.layers)
    first.W_q.W.value *= 0.0
    assert not np.allclose(made.align("I love tea").A, 0.25)
    last.W_q.W.value[:, :8] = 0.0  # heads 0 and 1 of 3 look everywhere
    A = made.align("I love tea").A
    last.W_q.W.value *= 0.0
    np.testing.assert_allclose(made.align("I love tea").A, 0.25, rtol=1e-12)
    assert not np.allclose(A, 0.25)
    assert (A >= 2 / 3 * 0.25).all()


def test_alignment_with_a_beam() -> None:
    """Of the translation that the search finds; as far as it is the greedy one, as for that."""
    different = 0
    for seed in range(4):
        made = wavering(seed)
        greedy, found = made.translate(TEXTS), made.translate(TEXTS, beam_size=4)
        for text, one, other in zip(TEXTS, greedy, found):
            target = other.split()
            A = made.align(text, beam_size=4).A
            assert made.align(text, beam_size=4).target_tokens == [*target, "<eos>"][:MAX_LEN]
            assert A.shape == (min(len(target) + 1, MAX_LEN), len(tokenize(text)) + 1)
            np.testing.assert_allclose(A.sum(axis=1), 1.0, rtol=1e-12)
            equal = [a == b for a, b in zip([*one.split(), "<eos>"], [*target, "<eos>"])]
            rows = [*equal, False].index(False) + 1
            np.testing.assert_allclose(A[:rows], made.align(text).A[:rows], rtol=1e-9)
            different += one != other
    assert different > 3


def test_alignment_with_an_unknown_word() -> None:
    with pytest.warns(UserWarning, match="milk"):
        alignment = always("<eos>").align("milk tea")
    assert alignment.source_tokens == ["<unk>", "tea", "<eos>"]
    assert alignment.target_tokens == ["<eos>"]


@pytest.mark.parametrize("token", ["爱", "<unk>", "<pad>", "<bos>"])
@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_alignment_of_a_translation_that_does_not_end(token: str, positions: str) -> None:
    """A model that has learnt nothing yet goes on to the last position."""
    made = always(token, positions=positions)
    alignment = made.align("tea")
    assert alignment.A.shape == (len(alignment.target_tokens), 2)
    np.testing.assert_allclose(alignment.A.sum(axis=1), 1.0, rtol=1e-6)
    (output,) = made.translate(["tea"])
    assert alignment.target_tokens[: len(output.split())] == output.split()


# Files

CONFIGS: dict[str, dict[str, Any]] = {
    "default": {},
    "post, shared memory, learned positions": {
        "norm": "post", "cross_attention": "shared", "positions": "learned", "dropout": 0.3,
    },
    "all tied": {"tie_embeddings": "all", "output_bias": False},
    "source and target tied": {"tie_embeddings": "source_target", "attention_bias": True},
    "widths": {"d_k": 2, "d_v": 5, "d_ff": 7, "activation": "gelu", "norm_eps": 1e-3},
    "many layers": {"num_encoder_layers": 5, "num_decoder_layers": 5, "attention_dropout": 0.1},
    "no padding": {"pad_id": None},
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.npz"


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    ("suffix", "dtype"),
    [
        (".npz", np.float32),
        (".npz", np.float64),
        (".npz", np.longdouble),
        (".safetensors", np.float32),
        (".safetensors", np.float64),
    ],
)
def test_what_is_saved_comes_back(path: Path, name: str, suffix: str, dtype: Any) -> None:
    path = path.with_suffix(suffix)
    made = translator(3, dtype, **CONFIGS[name])
    made.save(path)
    loaded = Translator.load(path)
    assert loaded.model.config == made.model.config
    assert loaded.source_vocabulary.tokens == made.source_vocabulary.tokens
    assert loaded.target_vocabulary.tokens == made.target_vocabulary.tokens
    state, expected = loaded.model.state_dict(), made.model.state_dict()
    assert list(state) == list(expected)
    assert all(state[n].dtype == dtype for n in state)
    assert all(np.array_equal(state[n], expected[n]) for n in state)
    inputs = np.array([[4, 6, 5, 2], [7, 2, 0, 0]]), np.array([[1, 4, 6], [1, 7, 0]])
    assert np.array_equal(loaded.model(*inputs), made.model(*inputs))
    assert loaded.translate(TEXTS) == made.translate(TEXTS)


def test_saving_twice_gives_equal_files(path: Path) -> None:
    translator().save(path)
    first = path.read_bytes()
    Translator.load(path).save(path)
    assert path.read_bytes() == first
    translator(1).save(path)
    assert path.read_bytes() != first


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_training_is_saved_beside_it(path: Path, suffix: str) -> None:
    path = path.with_suffix(suffix)
    made = translator()
    optimizer = Adam(made.model.parameters(), 0.1)
    rng = np.random.default_rng(5)
    training = {"place": [np.arange(3), copy.deepcopy(rng)], "loss": 0.5}
    made.save(path, optimizer=optimizer, rng=rng, step=7, extra=training)
    checkpoint = load_checkpoint(path)
    assert checkpoint.step == 7
    assert checkpoint.optimizer.lr == 0.1
    assert checkpoint.rng.random() == rng.random()
    loaded = checkpoint.extra["training"]
    assert loaded["loss"] == 0.5
    assert loaded["place"][0].tolist() == [0, 1, 2]
    for again in (Translator.load(path), Translator.from_checkpoint(path, checkpoint)):
        assert again.translate(TEXTS) == made.translate(TEXTS)
        assert again.source_vocabulary.tokens == made.source_vocabulary.tokens
    assert Translator.from_checkpoint(path, checkpoint).model is checkpoint.model
    made.save(path)
    assert load_checkpoint(path).extra["training"] is None


def test_odd_tokens_come_back(path: Path) -> None:
    odd = ['"', "\\", "\n", "\x00", "é", "e\u0301", "\U0001f600", "\u2028", "</s>", "null", "1"]
    odd += ["{", "\ud800", "npdecoder.array"]
    size = 4 + len(odd)
    model = Transformer(TransformerConfig(size, size, d_model=4, num_heads=2, pad_id=0))
    Translator(model, Vocabulary(odd), Vocabulary(odd[::-1])).save(path)
    loaded = Translator.load(path)
    assert loaded.source_vocabulary.tokens[4:] == odd
    assert loaded.target_vocabulary.tokens[4:] == odd[::-1]


def test_a_failed_save_keeps_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    translator().save(path)
    before = path.read_bytes()

    def crash(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", crash)
    with pytest.raises(KeyboardInterrupt):
        translator(1).save(path)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def refused(path: Path, match: str = "") -> None:
    """One ValueError that names the path, and what is wrong."""
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}.*{match}") as caught:
        Translator.load(path)
    assert type(caught.value) is ValueError


Change = Callable[[dict[str, Any], dict[str, Any]], Any]


def save_changed(path: Path, change: Change) -> None:
    """Save a translator whose arrays and meta were changed."""
    translator().save(path)
    arrays = load_weights(path)
    meta = json_value(arrays.pop(META))
    change(arrays, meta)
    save_weights(path, {**arrays, META: json_array(meta)} if meta else arrays)


def test_files_of_another_kind(path: Path) -> None:
    made = translator()
    save_weights(path, made.model.state_dict())
    refused(path, "weights alone")
    save_checkpoint(path, made.model)
    refused(path, "is not a translator")
    save_checkpoint(path, made.model, extra={"kind": "something else"})
    refused(path, "is not a translator")
    save_checkpoint(path, made.model, extra=["translator"])
    refused(path, "is not a translator")
    made.save(path)
    extra = load_checkpoint(path).extra
    language_model = LanguageModel(LanguageModelConfig(12, d_model=4, num_heads=2, num_layers=1))
    save_checkpoint(path, language_model, extra=extra)
    refused(path)
    path.write_text("a text\n")
    refused(path)
    path.write_bytes(b"")
    refused(path)
    np.savez(path, made.model.state_dict())  # one pickled dict
    refused(path)


def test_a_damaged_file(path: Path) -> None:
    translator().save(path)
    whole = path.read_bytes()
    for length in np.linspace(0, len(whole) - 1, 20).astype(int):
        path.write_bytes(whole[:length])
        refused(path)
    for i in np.random.default_rng(0).integers(0, len(whole), 20):
        path.write_bytes(whole[:i] + bytes([whole[i] ^ 0x55]) + whole[i + 1 :])
        try:
            loaded = Translator.load(path)
        except ValueError as error:
            assert str(path) in str(error)  # noqa: PT017
        else:
            assert loaded.model.state_dict().keys() == translator().model.state_dict().keys()


def test_a_missing_file(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Translator.load(path)
    with pytest.raises(ValueError, match=r"\.npz"):
        Translator.load(path.with_suffix(".txt"))


def with_array(name: str, change: Callable[[Any], Any] | None) -> Change:
    """change: the new array from the old one; None: it is left out."""

    def apply(arrays: dict[str, Any], meta: dict[str, Any]) -> None:
        old = arrays.pop(f"model.{name}", None)
        if change is not None:
            arrays[f"model.{name}"] = change(old)

    return apply


def with_meta(**changes: Any) -> Change:
    return lambda arrays, meta: meta.update(changes)


def with_extra(**changes: Any) -> Change:
    return lambda arrays, meta: meta["extra"].update(changes)


def with_config(**changes: Any) -> Change:
    return lambda arrays, meta: meta["model"]["config"].update(changes)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (with_array("output.b", None), r"output\.b"),
        (with_array("output.c", lambda old: np.ones(3, np.float32)), r"output\.c"),
        (with_array("output.W", lambda old: old.T[:, :, None]), r"output\.W"),
        (with_array("output.W", lambda old: old.astype(int)), ""),
        (with_array("output.W", lambda old: np.array("text")), ""),
        (lambda arrays, meta: arrays.clear(), ""),
        (lambda arrays, meta: meta.clear(), "weights alone"),
        (lambda arrays, meta: meta.pop("model"), "model"),
        (lambda arrays, meta: meta.pop("version"), "version"),
        (lambda arrays, meta: meta["extra"].pop("kind"), "not a translator"),
        (lambda arrays, meta: meta["extra"].pop("source_tokens"), "source_tokens"),
        (lambda arrays, meta: meta["extra"].pop("target_tokens"), "target_tokens"),
        (with_meta(version=2), "version 2"),
        (with_meta(format="something else"), "something else"),
        (with_meta(model=None), ""),
        (with_meta(extra=None), "not a translator"),
        (with_meta(extra={}), "not a translator"),
        (with_extra(kind="Translator"), "not a translator"),
        (with_extra(kind=["translator"]), "not a translator"),
        (with_extra(source_tokens=ENGLISH[1:]), "11"),
        (with_extra(source_tokens=["i"] * 8), "i"),
        (with_extra(source_tokens="ilovetea"), ""),
        (with_extra(source_tokens=None), ""),
        (with_extra(source_tokens=[[]] * 8), ""),
        (with_extra(target_tokens=list(range(8))), ""),
        (with_extra(target_tokens=[*CHINESE[1:], "<pad>"]), "<pad>"),
        (with_config(d_model=14), ""),
        (with_config(d_model="12"), "d_model"),
        (with_config(num_heads=0), ""),
        (with_config(norm="middle"), "middle"),
        (with_config(unknown=1), "unknown"),
        (with_config(dropout=2), "dropout"),
    ],
)
def test_a_file_that_was_changed(path: Path, change: Any, match: str) -> None:
    save_changed(path, change)
    refused(path, match)


@pytest.mark.parametrize(
    "change",
    [with_config(d_model=10**14, num_heads=1), with_config(max_len=10**16)],
    ids=["huge d_model", "huge max_len"],
)
def test_a_small_file_that_asks_for_much(path: Path, change: Any) -> None:
    save_changed(path, change)
    refused(path)


def test_big_endian_weights_are_read(path: Path) -> None:
    translator().save(path)
    arrays = load_weights(path)
    np.savez(path, **{n: a.astype(">f4") if a.dtype.kind == "f" else a for n, a in arrays.items()})
    loaded = Translator.load(path)
    assert loaded.model.output.W.dtype == np.float32
    assert loaded.model.output.W.dtype.isnative
    assert loaded.translate(TEXTS) == translator().translate(TEXTS)


def test_the_file_is_plain(path: Path) -> None:
    """Weights under their names, and one JSON text: readable without npdecoder."""
    made = translator()
    made.save(path)
    with np.load(path) as file:
        meta = json.loads(file[META].tobytes())
        names = [f"model.{name}" for name in made.model.state_dict()]
        assert sorted(file.files) == sorted([META, *names])
    assert meta["extra"]["source_tokens"] == ENGLISH
    assert meta["extra"]["target_tokens"] == CHINESE
    assert meta["model"]["config"] == dataclasses.asdict(made.model.config)
