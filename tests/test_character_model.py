"""CharacterModel: files, and the text that it goes on with."""

from __future__ import annotations

import copy
import re
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import randomise

from npdecoder import (
    SGD,
    LanguageModel,
    LanguageModelConfig,
    Transformer,
    TransformerConfig,
    generate,
    load_checkpoint,
    save_checkpoint,
    save_weights,
)
from npdecoder.character_model import CharacterModel
from npdecoder.files import SUFFIXES
from npdecoder.text import Characters, Vocabulary
from npdecoder.translator import Translator

CHARACTERS = "\n abe.我é"


def character_model(seed: int = 0, characters: str = CHARACTERS, **options: Any) -> CharacterModel:
    options = {"d_model": 8, "num_heads": 2, "num_layers": 2, "max_len": 9, **options}
    model = LanguageModel(LanguageModelConfig(len(characters), **options), seed, dtype=np.float64)
    return CharacterModel(randomise(model, np.random.default_rng(seed)), Characters(characters))


def text_of(made: CharacterModel, prompt: str, **options: Any) -> str:
    return "".join(made.generate(prompt, **{"max_new_tokens": 30, **options}))


@pytest.fixture(params=SUFFIXES)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / f"m{request.param}"


# Texts


def test_the_text_is_that_of_the_model() -> None:
    made = character_model()
    for prompt in ("a", "é我", "abe. " * 4):
        ids = made.characters.encode(prompt)
        expected = list(generate(made.model, ids, max_new_tokens=30, seed=3, top_k=4))
        assert text_of(made, prompt, seed=3, top_k=4) == made.characters.decode(expected)
    assert len(set(text_of(made, "a"))) > 3  # or the comparison would say little


def test_equal_seeds_give_equal_texts() -> None:
    made = character_model()
    text = text_of(made, "ab", seed=5)
    assert len(text) == 30
    assert text_of(made, "ab", seed=5) == text_of(character_model(), "ab", seed=5) == text
    assert text_of(made, "ab", seed=6) != text
    assert text_of(made, "a", seed=5) != text
    greedy = text_of(made, "ab", temperature=0.0)
    assert greedy == text_of(made, "ab", top_k=1, seed=9)


def test_characters_come_one_by_one_and_without_end() -> None:
    made = character_model()
    text = made.generate("a", seed=1)
    first = [next(text) for _ in range(3)]
    assert "".join([*first, *islice(text, 97)]) == text_of(made, "a", seed=1, max_new_tokens=100)
    assert {len(character) for character in first} == {1}


@pytest.mark.parametrize("max_new_tokens", [1, 2, 20])
def test_the_number_of_characters(max_new_tokens: int) -> None:
    assert len(text_of(character_model(), "ab", max_new_tokens=max_new_tokens)) == max_new_tokens


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt is empty"):
        character_model().generate("")


def test_unknown_characters_are_all_named() -> None:
    """By the call, not by the first next()."""
    with pytest.raises(ValueError, match=r"characters 'xz狗'$"):
        character_model().generate("a狗bzax狗")
    with pytest.raises(ValueError, match=re.escape(repr("\r"))):
        character_model().generate("a\r\n")


def test_bad_options_are_refused_by_the_call() -> None:
    made = character_model()
    for options in ({"temperature": -1.0}, {"top_k": 0}, {"top_p": 2.0}, {"max_new_tokens": 0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            made.generate("a", **options)
    with pytest.raises(TypeError, match="unknown"):
        made.generate("a", unknown=1)


def test_characters_that_do_not_fit_the_model() -> None:
    made = character_model()
    for characters in (CHARACTERS[1:], CHARACTERS + "x"):
        with pytest.raises(ValueError, match=f"{len(characters)} .*{len(CHARACTERS)}"):
            CharacterModel(made.model, Characters(characters))


# Files


@pytest.mark.parametrize("characters", [CHARACTERS, '"\\\0\u2028\U0001f600', "\ud800a", "zyx"])
@pytest.mark.parametrize("options", [{}, {"positions": "learned", "tie_embeddings": "target_output",
                                          "dropout": 0.3, "norm": "post"}])  # fmt: skip
def test_what_is_saved_comes_back(path: Path, characters: str, options: dict[str, Any]) -> None:
    made = character_model(3, characters, **options)
    made.save(path)
    loaded = CharacterModel.load(path)
    assert loaded.characters.characters == characters
    assert loaded.model.config == made.model.config
    state, expected = loaded.model.state_dict(), made.model.state_dict()
    assert list(state) == list(expected)
    assert all(state[n].tobytes() == expected[n].tobytes() for n in state)
    assert text_of(loaded, characters[0]) == text_of(made, characters[0])


def test_a_training_is_saved_beside_it(path: Path) -> None:
    made = character_model()
    optimizer = SGD(made.model.parameters(), 0.1, momentum=0.5)
    rng = np.random.default_rng(5)
    made.save(path, optimizer=optimizer, rng=rng, step=7,
              extra={"place": [np.arange(3), copy.deepcopy(rng)], "loss": 0.5})  # fmt: skip
    checkpoint = load_checkpoint(path)
    assert checkpoint.step == 7
    assert checkpoint.optimizer.state_dict().keys() == optimizer.state_dict().keys()
    assert checkpoint.rng.random() == rng.random()
    assert checkpoint.extra["training"]["loss"] == 0.5
    assert checkpoint.extra["training"]["place"][0].tolist() == [0, 1, 2]
    for again in (CharacterModel.load(path), CharacterModel.from_checkpoint(path, checkpoint)):
        assert text_of(again, "ab") == text_of(made, "ab")
    assert CharacterModel.from_checkpoint(path, checkpoint).model is checkpoint.model
    made.save(path)
    assert load_checkpoint(path).extra["training"] is None


def refused(cls: Any, path: Path, match: str = "") -> None:
    """One ValueError that names the path, and what is wrong."""
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}.*{match}") as caught:
        cls.load(path)
    assert type(caught.value) is ValueError


def test_each_kind_of_file_is_read_as_what_it_is(path: Path) -> None:
    character_model().save(path)
    refused(Translator, path, "not a translator")
    config = TransformerConfig(5, 6, d_model=4, num_heads=2, num_encoder_layers=1,
                               num_decoder_layers=1)  # fmt: skip
    made = Translator(Transformer(config), Vocabulary(["a"]), Vocabulary(["b", "c"]))
    made.save(path)
    refused(CharacterModel, path, "not a language model of characters")
    assert len(Translator.load(path).target_vocabulary) == 6


def test_files_of_another_kind(path: Path) -> None:
    model = character_model().model
    save_weights(path, model.state_dict())
    refused(CharacterModel, path, "weights alone")
    for extra in (None, {}, [], "language model of characters", {"characters": CHARACTERS}):
        save_checkpoint(path, model, extra=extra)
        refused(CharacterModel, path, "not a language model of characters")
    path.write_text("a text\n")
    refused(CharacterModel, path)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        CharacterModel.load(path)
    with pytest.raises(ValueError, match=r"\.npz"):
        CharacterModel.load(path.with_suffix(".txt"))


@pytest.mark.parametrize(
    "changes",
    [
        {"characters": CHARACTERS[1:]},
        {"characters": CHARACTERS[1:] + CHARACTERS[-1]},
        {"characters": ""},
        {"characters": None},
        {"characters": 8},
        {"characters": list(range(8))},
        {"characters": {}},
        {"kind": "translator"},
        {"kind": None},
    ],
)
def test_a_file_that_was_changed(path: Path, changes: dict[str, Any]) -> None:
    made = character_model()
    made.save(path)
    extra = load_checkpoint(path).extra
    save_checkpoint(path, made.model, extra={**extra, **changes})
    refused(CharacterModel, path)


def test_a_file_that_lacks_its_characters(path: Path) -> None:
    made = character_model()
    made.save(path)
    extra = load_checkpoint(path).extra
    for name in ("characters", "kind"):
        save_checkpoint(path, made.model, extra={n: v for n, v in extra.items() if n != name})
        refused(CharacterModel, path)


def test_a_file_whose_model_translates(path: Path) -> None:
    made = character_model()
    made.save(path)
    extra = load_checkpoint(path).extra
    config = TransformerConfig(len(CHARACTERS), len(CHARACTERS), d_model=4, num_heads=2)
    save_checkpoint(path, Transformer(config), extra=extra)
    refused(CharacterModel, path)
