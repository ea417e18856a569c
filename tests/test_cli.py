"""The command line, in process and as a user starts it."""

from __future__ import annotations

import configparser
import contextlib
import importlib
import io
import itertools
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import npdecoder
from npdecoder import (
    LanguageModel,
    LanguageModelConfig,
    Transformer,
    TransformerConfig,
    cli,
    console,
    gradcheck_all,
    greedy_decode,
    runs,
    training,
)
from npdecoder.character_model import CharacterModel
from npdecoder.checkpoint import load_checkpoint, save_checkpoint
from npdecoder.files import save_weights
from npdecoder.layers import Linear
from npdecoder.optim import AdamW, cosine_schedule
from npdecoder.page import page
from npdecoder.text import Characters, Vocabulary, read_pairs, split_pairs, tokenize
from npdecoder.traced import sentence_pair, translated, worked_example
from npdecoder.translator import Translator

ROOT = Path(__file__).parents[1]
RUN = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
RUN += "from npdecoder.cli import main; sys.exit(main())"  # what the console script does
PATIENCE = 600  # seconds, for a machine that is busy with other things
COMMANDS = ["demo", "train", "train-lm", "translate", "generate", "gradcheck", "trace", "exercise"]
SMALL = ["--d-model", "8", "--num-heads", "2", "--num-layers", "1", "--steps", "20"]
SMALL += ["--batch-size", "4", "--warmup", "5"]
TRAININGS = {  # without --out
    "train": ["train", "pairs.tsv", "--force", *SMALL, "--min-count", "1"],
    "train-lm": ["train-lm", "text.txt", "--force", *SMALL, "--context", "8"],
}
both_trainings = pytest.mark.parametrize("kind", TRAININGS)
posix = pytest.mark.skipif(os.name != "posix", reason="needs signals between processes")
TEXT = "the cat sat on the mat.\nThe rat ate it, and the cat ate the rat.\n" * 8
PAIRS = [
    (f"{subject} {verb} {thing}", f"{subject2} {verb2} {thing2}")
    for subject, subject2 in (("I", "我"), ("you", "你"))
    for verb, verb2 in (("drink", "喝"), ("like", "喜 欢"))
    for thing, thing2 in (("tea", "茶"), ("water", "水"), ("milk", "牛 奶"), ("it", "它"), ("", ""))
]


class Result(NamedTuple):
    code: Any
    out: str
    err: str

    def lines(self) -> list[str]:
        return self.out.splitlines()


def call(*args: Any) -> Result:
    """main([...]) in this process, with stdout and stderr caught."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code: Any = cli.main([str(arg) for arg in args])
        except SystemExit as stop:  # argparse
            code = stop.code
    return Result(code, out.getvalue(), err.getvalue())


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONUNBUFFERED", "COLUMNS")}
    return {**inherited, "PYTHONPATH": path, "PYTHONIOENCODING": "utf-8", **more}


def start(folder: Path, *args: Any, **options: Any) -> subprocess.Popen[bytes]:
    """A process of its own, as a user starts it."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    args = (sys.executable, "-c", RUN, *map(str, args))
    return subprocess.Popen(args, cwd=folder, **{"env": environment(), **pipes, **options})


def command(
    folder: Path, *args: Any, stdin: bytes = b"", env: dict[str, str] | None = None, **options: Any
) -> Result:
    """Such a process from its start to its end."""
    with start(folder, *args, env=environment(**(env or {})), **options) as process:
        out, err = process.communicate(stdin, timeout=PATIENCE)
    return Result(process.returncode, *((b or b"").decode("utf-8", "replace") for b in (out, err)))


def assert_one_line_error(result: Result, *parts: Any) -> None:
    assert result.code == 2, result
    assert re.fullmatch(r"npdecoder( [\w-]+)?: error: [^\n]+\n", result.err), result.err
    assert "Traceback" not in result.err
    for part in parts:
        assert str(part) in result.err


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, the current one, with nothing but pairs.tsv and text.txt in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pairs.tsv").write_text("".join(f"{s}\t{t}\n" for s, t in PAIRS), "utf-8")
    (tmp_path / "text.txt").write_text(TEXT, "utf-8")
    return tmp_path


def made(folder: Path) -> list[str]:
    """The files that are new in the folder."""
    return sorted({*os.listdir(folder)} - {"pairs.tsv", "text.txt"})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Translator with random weights. It knows: i you drink tea water."""
    sources = Vocabulary(["i", "you", "drink", "tea", "water"])
    targets = Vocabulary(["我", "你", "喝", "茶", "水"])
    config = TransformerConfig(9, 9, d_model=8, num_heads=2, num_encoder_layers=1,
                               num_decoder_layers=1, pad_id=0, max_len=6)
    network = Transformer(config, 3)
    for parameter in network.parameters():
        parameter.value *= 2.0
    network.output.b.value = [-50.0, -50.0, 1.0, -50.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    path = tmp_path_factory.mktemp("model") / "model.npz"
    Translator(network, sources, targets).save(path)
    return path


def translations(model: Path, *texts: str) -> list[str]:
    return Translator.load(model).translate(texts)


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CharacterModel with random weights, which reads 8 characters."""
    characters = Characters.build("the cat\nsat.")
    config = LanguageModelConfig(len(characters), d_model=8, num_heads=2, num_layers=1, max_len=8)
    path = tmp_path_factory.mktemp("lm") / "lm.npz"
    CharacterModel(LanguageModel(config, 1), characters).save(path)
    return path


def generated(lm: Path, prompt: str, length: int, **options: Any) -> str:
    return "".join(CharacterModel.load(lm).generate(prompt, max_new_tokens=length, **options))


# Help


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], [*COMMANDS, "plain NumPy", "npdecoder demo", "--version"]),
        (["demo"], ["--out", "--steps", "--seed", "1000", "npdecoder-demo.npz", "phrase"]),
        (
            ["train"],
            ["PAIRS.tsv", "--out", "--d-model", "--num-heads", "--num-layers", "--d-ff",
             "--dropout", "--steps", "--batch-size", "--lr", "--warmup", "--momentum",
             "--weight-decay", "--max-norm", "--label-smoothing", "--min-count", "--max-len",
             "--held-out", "--validate-every", "--seed", "TAB", "UTF-8", "(default: 128)",
             "--accumulate", "--save-every", "--resume", "Ctrl-C", "Example: npdecoder train"],
        ),
        (
            ["train-lm"],
            ["TEXT.txt", "--out", "npdecoder-lm.npz", "--d-model", "--num-heads", "--num-layers",
             "--d-ff", "--context", "--dropout", "--steps", "--batch-size", "--accumulate", "--lr",
             "--final-lr", "--warmup", "--beta1", "--beta2", "--weight-decay", "--max-norm",
             "--held-out", "--validate-every", "--save-every", "--seed", "--resume", "Ctrl-C",
             "UTF-8", "AdamW", "(default: 2000)", "Example: npdecoder train-lm"],
        ),
        (
            ["translate"],
            ["MODEL.npz", "text", "standard input", "--beam", "--attention", "greedy",
             "Example: npdecoder translate"],
        ),
        (
            ["generate"],
            ["MODEL.npz", "--prompt", "--length", "--temperature", "--top-k", "--top-p", "--min-p",
             "--seed", "(default: 500)", "Example: npdecoder generate"],
        ),
        (["gradcheck"], ["--seed", "central differences", "Exit code 1"]),
    ],
)
@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_teaches(args: list[str], words: list[str], option: str) -> None:
    result = call(*args, option)
    assert (result.code, result.err) == (0, "")
    text = " ".join(result.out.split())
    assert [word for word in words if word not in text] == []
    assert f"usage: {' '.join(['npdecoder', *args])}" in text


@both_trainings
def test_every_option_of_a_training_is_explained(kind: str) -> None:
    text = " ".join(call(kind, "--help").out.split("options:")[1].split("Example")[0].split())
    entries = re.split(r" (?=--[a-z0-9-]+ [A-Z_])", text)
    assert len(entries) >= 21
    for entry in entries[1:]:
        name, _, *words = entry.split()
        assert len(words) >= 2, entry
        if name != "--out":
            assert "(default: " in entry, entry


def test_version() -> None:
    result = call("--version")
    assert result == (0, f"npdecoder {npdecoder.__version__}\n", "")


# Bad arguments


@pytest.mark.parametrize(
    ("args", "part"),
    [
        ([], "COMMAND"),
        (["fly"], "fly"),
        (["--unknown"], "COMMAND"),
        (["demo", "--unknown"], "--unknown"),
        (["demo", "extra"], "extra"),
        (["demo", "--steps", "0"], "--steps"),
        (["demo", "--steps", "-1"], "--steps"),
        (["demo", "--steps", "1.5"], "--steps"),
        (["demo", "--steps", "many"], "--steps"),
        (["demo", "--steps"], "--steps"),
        (["demo", "--seed", "-1"], "--seed"),
        (["gradcheck", "--seed", "x"], "--seed"),
        (["gradcheck", "--seed", "-1"], "--seed"),
        (["translate"], "MODEL"),
        (["train"], "PAIRS"),
        (["train", "pairs.tsv"], "--out"),
        (["train-lm"], "TEXT"),
        (["generate"], "MODEL"),
        (["translate", "m.npz", "tea", "--beam", "0"], "--beam"),
        (["translate", "m.npz", "tea", "--beam", "wide"], "--beam"),
        (["generate", "m.npz", "extra"], "extra"),
        (["generate", "m.npz", "--length", "0"], "--length"),
        (["generate", "m.npz", "--top-k", "0"], "--top-k"),
        (["generate", "m.npz", "--top-k", "-1"], "--top-k"),
        (["generate", "m.npz", "--top-k", "2.5"], "--top-k"),
        (["generate", "m.npz", "--top-p", "most"], "--top-p"),
        (["generate", "m.npz", "--temperature", "hot"], "--temperature"),
        (["generate", "m.npz", "--seed", "-1"], "--seed"),
    ],
)
def test_a_bad_command(args: list[str], part: str) -> None:
    result = call(*args)
    assert_one_line_error(result, part, "--help")
    assert result.out == ""


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("--steps", ["0", "-3", "1e3", "nan"]),
        ("--batch-size", ["0", "x"]),
        ("--lr", ["nan", "inf", "-0.1", "fast"]),
        ("--dropout", ["2", "-0.1", "nan"]),
        ("--d-model", ["0", "9", "-2", "8.0"]),
        ("--num-heads", ["0", "3"]),
        ("--num-layers", ["0"]),
        ("--d-ff", ["0"]),
        ("--warmup", ["-1"]),
        ("--momentum", ["nan", "-1", "inf"]),
        ("--weight-decay", ["nan", "-1"]),
        ("--max-norm", ["nan", "0", "-1"]),
        ("--label-smoothing", ["2", "-0.1", "nan"]),
        ("--min-count", ["0"]),
        ("--max-len", ["0", "1"]),
        ("--held-out", ["1", "-0.1", "nan", "inf"]),
        ("--validate-every", ["0"]),
        ("--save-every", ["0", "often"]),
        ("--accumulate", ["0", "1.5"]),
        ("--seed", ["-1", "x"]),
    ],
)
def test_a_bad_option_of_train(folder: Path, option: str, values: list[str]) -> None:
    for value in values:
        result = call(*TRAININGS["train"], "--out", "m.npz", option, value)
        assert_one_line_error(result)
        assert made(folder) == []


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("--steps", ["0", "1e3"]),
        ("--batch-size", ["0"]),
        ("--lr", ["nan", "inf", "-0.1"]),
        ("--final-lr", ["nan", "inf", "-0.1"]),
        ("--dropout", ["2", "nan"]),
        ("--d-model", ["0", "9"]),
        ("--num-heads", ["0", "3"]),
        ("--num-layers", ["0"]),
        ("--d-ff", ["0"]),
        ("--context", ["0", "x", "1000"]),
        ("--warmup", ["-1"]),
        ("--beta1", ["1", "nan", "-0.5"]),
        ("--beta2", ["1", "nan", "-0.5"]),
        ("--weight-decay", ["nan", "-1"]),
        ("--max-norm", ["nan", "0"]),
        ("--held-out", ["1", "nan", "inf"]),
        ("--validate-every", ["0"]),
        ("--save-every", ["0"]),
        ("--accumulate", ["0"]),
        ("--seed", ["-1", "x"]),
        ("--momentum", ["0.9"]),
        ("--label-smoothing", ["0.1"]),
    ],
)
def test_a_bad_option_of_train_lm(folder: Path, option: str, values: list[str]) -> None:
    for value in values:
        result = call(*TRAININGS["train-lm"], "--out", "m.npz", option, value)
        assert_one_line_error(result)
        assert made(folder) == []


@pytest.mark.parametrize("value", ["-0.1", "-3", "1.5", "1", "nan"])
def test_a_share_to_hold_out_that_is_none(folder: Path, value: str) -> None:
    """Of both trainings: below 0, or 1 and above, nothing is as it was asked for."""
    for training_of in TRAININGS.values():
        result = call(*training_of, "--out", "m.npz", "--held-out", value)
        assert_one_line_error(result, "held_out")
        assert made(folder) == []


@pytest.mark.parametrize(
    ("kind", "options", "part"),
    [
        ("train", ["--num-heads", "1", "--d-model", "7"], "d_model"),
        ("train", ["--num-heads", "4", "--d-model", "10"], "num_heads"),
        ("train", ["--dropout", "2"], "dropout"),
        ("train", ["--lr", "nan"], "lr"),
        ("train", ["--max-norm", "0"], "max_norm"),
        ("train", ["--label-smoothing", "3"], "label_smoothing"),
        ("train-lm", ["--num-heads", "4", "--d-model", "10"], "num_heads"),
        ("train-lm", ["--dropout", "2"], "dropout"),
        ("train-lm", ["--lr", "nan"], "lr"),
        ("train-lm", ["--beta1", "1"], "beta1"),
        ("train-lm", ["--beta2", "-1"], "beta2"),
        ("train-lm", ["--weight-decay", "-1"], "weight_decay"),
        ("train-lm", ["--max-norm", "0"], "max_norm"),
        ("train-lm", ["--context", "10000"], "context"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_the_error_names_the_option(kind: str, options: list[str], part: str) -> None:
    assert_one_line_error(call(*TRAININGS[kind], "--out", "m.npz", *options), part)


@pytest.mark.parametrize(
    "options",
    [
        ["--num-heads", "1", "--d-model", str(10**14)],
        ["--num-heads", "1", "--d-model", str(10**30)],
        ["--max-len", str(10**16)],
        ["--max-len", str(10**30)],
        ["--d-ff", str(10**15)],
    ],
)
def test_a_model_larger_than_the_memory(folder: Path, options: list[str]) -> None:
    result = call(*TRAININGS["train"], "--out", "m.npz", *options)
    assert_one_line_error(result)
    assert made(folder) == []


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("a\tb\nc\td\n\nno tab here\n", ["line 4"]),
        ("a\tb\n\tb\n", ["line 2"]),
        ("a\tb\nc\t \n", ["line 2"]),
        (b"a\tb\nc\t\xff\n", ["line 2", "UTF-8"]),
        ("", ["no pairs"]),
        ("\n\n", ["no pairs"]),
        ("a\tb".encode("utf-16"), ["line 1"]),
    ],
)
def test_a_malformed_file_of_pairs(folder: Path, content: Any, parts: list[str]) -> None:
    data = content if isinstance(content, bytes) else content.encode()
    (folder / "pairs.tsv").write_bytes(data)
    result = call(*TRAININGS["train"], "--out", "m.npz")
    assert_one_line_error(result, "pairs.tsv", *parts)
    assert result.out == ""


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b"", []),
        (b"short", ["context"]),
        (b"one\ntwo \xff\n", ["text.txt", "line 2", "UTF-8"]),
        (TEXT.encode("utf-16"), ["text.txt", "line 1", "UTF-8"]),
    ],
)
def test_a_malformed_text(folder: Path, content: bytes, parts: list[str]) -> None:
    (folder / "text.txt").write_bytes(content)
    assert_one_line_error(call(*TRAININGS["train-lm"], "--out", "m.npz"), *parts)
    assert made(folder) == []


@both_trainings
def test_a_file_to_learn_from_that_is_not_there(folder: Path, kind: str) -> None:
    assert_one_line_error(call(kind, "none.tsv", "--out", "m.npz"), "none.tsv")
    (folder / "sub").mkdir()
    assert_one_line_error(call(kind, "sub", "--out", "m.npz"), "sub")
    assert not (folder / "m.npz").exists()


@pytest.mark.parametrize(
    "args",
    [["demo"], ["train", "pairs.tsv"], ["train-lm", "text.txt"],
     ["train-lm", "text.txt", "--resume"]],
)  # fmt: skip
@pytest.mark.parametrize(
    ("out", "part"),
    [
        ("missing/m.npz", "missing"),
        ("pairs.tsv/m.npz", "pairs.tsv"),
        ("folder.npz", "folder.npz"),
        ("dangling.npz", "missing"),
        ("model", ".npz"),
        ("model.txt", ".npz"),
        ("", ".npz"),
        ("x" * 300 + ".npz", ""),
    ],
)
def test_an_out_that_cannot_be_written_is_found_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], out: str, part: str
) -> None:
    def work(*args: Any, **keywords: Any) -> Any:
        raise AssertionError("the training began")

    monkeypatch.setattr(runs, "train", work)
    (folder / "folder.npz").mkdir()
    (folder / "dangling.npz").symlink_to(folder / "missing" / "m.npz")
    before = sorted(os.listdir(folder))
    result = call(*args, "--out", out)
    assert_one_line_error(result, part)
    assert result.out == ""
    assert sorted(os.listdir(folder)) == before


READERS = {  # what a command needs of a file is checked before it does anything
    "translate": lambda name: ["translate", name, "tea"],
    "generate": lambda name: ["generate", name],
    "train": lambda name: [*TRAININGS["train"], "--out", name, "--resume"],
    "train-lm": lambda name: [*TRAININGS["train-lm"], "--out", name, "--resume"],
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.usefixtures("folder")
def test_a_model_that_is_none(reader: str) -> None:
    np.savez("other.npz", W=np.ones(3))
    np.savez("objects.npz", W=np.array([{}], object))
    Path("text.npz").write_text("no model\n")
    Path("empty.npz").touch()
    Path("folder.npz").mkdir()
    for name in ("other", "objects", "text", "empty", "folder", "missing"):
        result = call(*READERS[reader](f"{name}.npz"))
        assert_one_line_error(result, f"{name}.npz")
        assert result.out == ""
    assert_one_line_error(call(*READERS[reader]("pairs.tsv")), "pairs.tsv", ".npz")


@pytest.mark.usefixtures("folder")
def test_a_model_of_the_other_kind(model: Path, lm: Path) -> None:
    for reader, path in ("translate", lm), ("generate", model), ("train", lm), ("train-lm", model):
        result = call(*READERS[reader](path))
        assert_one_line_error(result, path)
        assert result.out == ""


@both_trainings
@pytest.mark.usefixtures("folder")
def test_the_other_training_does_not_go_on_with_it(kind: str) -> None:
    """The error names the file, which is no model of that kind."""
    _, data = trained(kind)
    (other,) = TRAININGS.keys() - {kind}
    result = call(other, TRAININGS[other][1], "--out", "m.npz", "--resume")
    assert_one_line_error(result, "m.npz")
    assert result.out == ""
    assert Path("m.npz").read_bytes() == data
    reader = {"train": "generate", "train-lm": "translate"}[kind]
    assert_one_line_error(call(*READERS[reader]("m.npz")), "m.npz")


def test_a_file_name_with_a_line_break_still_makes_one_line(folder: Path) -> None:
    assert_one_line_error(call("translate", "a\nb.npz", "tea"))
    assert_one_line_error(call("generate", "a\nb.npz"))
    assert_one_line_error(call("train", "a\nb.tsv", "--out", "m.npz"))


def test_errors_of_processes_are_the_same(folder: Path) -> None:
    for args in (["translate", "none.npz"], ["demo", "--steps", "0"], ["train"]):
        assert command(folder, *args) == call(*args)


@both_trainings
def test_a_training_that_diverges_is_one_line(folder: Path, kind: str) -> None:
    result = command(folder, *TRAININGS[kind], "--out", "m.npz", "--lr", "1e30", "--warmup", "0")
    assert_one_line_error(result, "learning rate")
    assert made(folder) == []


# Translate


def test_translate_arguments(model: Path) -> None:
    (expected,) = translations(model, "I drink tea")
    assert call("translate", model, "I drink tea") == (0, f"{expected}\n", "")
    assert call("translate", model, "I", "drink", "tea") == (0, f"{expected}\n", "")


def test_translate_standard_input(model: Path, tmp_path: Path) -> None:
    texts = ["I drink tea", "you", "", "water water", "   ", "tea"]
    expected = [translations(model, text)[0] if text.strip() else "" for text in texts]
    assert len(set(expected)) > 2
    for end in ("\n", "\r\n"):
        for last in (end, ""):
            stdin = (end.join(texts) + last).encode()
            result = command(tmp_path, "translate", model, stdin=stdin)
            assert result == (0, "".join(f"{line}\n" for line in expected), "")
    assert command(tmp_path, "translate", model, stdin=b"") == (0, "", "")


def test_unknown_words_are_named_on_stderr(model: Path, tmp_path: Path) -> None:
    (expected,) = translations(model, "I drink tea")
    result = call("translate", model, "I drink milk with honey")
    assert result.code == 0
    assert result.out.count("\n") == 1
    assert result.err.count("\n") == 1
    assert all(word in result.err for word in ("'milk'", "'with'", "'honey'"))
    assert "drink" not in result.err
    result = command(tmp_path, "translate", model, stdin=b"I drink tea\nmilk\nmilk\n")
    assert result.code == 0
    assert result.lines()[0] == expected
    assert len(result.lines()) == 3
    assert result.err.count("'milk'") == 2  # for each line: a reader knows which it was
    assert "Warning" not in result.err


@pytest.mark.parametrize("text", ["", " ", "tea tea tea tea tea tea"])
def test_a_text_that_cannot_be_translated(model: Path, text: str) -> None:
    result = call("translate", model, text)
    assert_one_line_error(result)
    assert result.out == ""


def test_a_line_that_is_too_long(model: Path, tmp_path: Path) -> None:
    result = command(tmp_path, "translate", model, stdin=b"tea\n" + b"tea " * 9 + b"\ntea\n")
    assert_one_line_error(result, "9 tokens")
    (tea,) = translations(model, "tea")
    assert result.lines() == [tea, "", tea]  # a line for a line, and the next is translated


def with_map(model: Path, text: str, beam: int = 1) -> str:
    """What translate --attention writes."""
    alignment = Translator.load(model).align(text, beam)
    names = alignment.target_tokens, alignment.source_tokens
    (translation,) = Translator.load(model).translate([text], beam)
    return f"{translation}\n{console.weight_map(*names, alignment.A)}\n"


def test_translate_with_a_beam(model: Path, tmp_path: Path) -> None:
    texts = ["I drink tea", "you", "water water", "tea I"]
    wide = Translator.load(model).translate(texts, 4)
    assert wide != translations(model, *texts)
    for text, expected in zip(texts, wide):
        assert call("translate", model, text, "--beam", "4") == (0, f"{expected}\n", "")
    assert call("translate", model, texts[0], "--beam", "1") == call("translate", model, texts[0])
    stdin = "\n".join(texts).encode()
    result = command(tmp_path, "translate", model, "--beam", "4", stdin=stdin)
    assert result == (0, "".join(f"{text}\n" for text in wide), "")


@pytest.mark.parametrize("beam", [1, 4])
def test_translate_shows_what_it_looked_at(model: Path, tmp_path: Path, beam: int) -> None:
    texts = ["I drink tea", "you", "", "tea I"]
    maps = [with_map(model, text, beam) if text else "\n" for text in texts]
    assert len(set(maps)) == 4
    result = call("translate", model, texts[0], "--attention", "--beam", beam)
    assert result == (0, maps[0], "")
    lines = result.lines()
    assert lines[1].split() == ["i", "drink", "tea", "<eos>"]
    assert len(lines) == 2 + len(f"{lines[0]} <eos>".split()[:6])  # 6 have positions
    result = command(tmp_path, "translate", model, "--attention", "--beam", beam,
                     stdin="\n".join(texts).encode())
    assert result == (0, "".join(maps), "")
    stdin = b"tea " * 9 + b"\nyou\n"
    result = command(tmp_path, "translate", model, "--attention", "--beam", beam, stdin=stdin)
    assert_one_line_error(result, "9 tokens")
    assert result.out == "\n" + maps[1]


def test_unknown_words_are_named_once_with_a_map(model: Path) -> None:
    result = call("translate", model, "milk", "--attention")
    assert result.code == 0
    assert result.err.count("\n") == result.err.count("'milk'") == 1


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "gbk", "utf-8"])
def test_a_console_that_lacks_the_characters(model: Path, tmp_path: Path, encoding: str) -> None:
    (expected,) = translations(model, "I drink tea")
    assert expected
    env = {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
    process = start(tmp_path, "translate", model, "I drink tea", env=environment(**env))
    with process:
        out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (0, b"")
    assert out.rstrip() == expected.encode(encoding, "backslashreplace")

    result = command(tmp_path, "translate", model, stdin=b"tea caf\xc3\xa9\n\xff\n", env=env)
    assert result.code in (0, 2)  # a byte that the encoding lacks is an error of one line
    assert "Traceback" not in result.err


def test_a_console_that_lacks_the_characters_of_an_error(tmp_path: Path) -> None:
    env = {"PYTHONIOENCODING": "ascii:strict"}
    result = command(tmp_path, "translate", "é.npz", "é", env=env)
    assert_one_line_error(result, "\\xe9.npz")


def test_the_module_is_the_command(model: Path, tmp_path: Path) -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", "utf-8")
    assert setup["options.entry_points"]["console_scripts"].split() == [
        "npdecoder", "=", "npdecoder.cli:main",
    ]
    for args in (["translate", model, "I drink tea"], ["translate", "none.npz"], ["--help"]):
        process = [sys.executable, "-m", "npdecoder", *map(str, args)]
        done = subprocess.run(process, cwd=tmp_path, env=environment(), capture_output=True,
                              timeout=PATIENCE, check=False)
        as_module = Result(done.returncode, done.stdout.decode(), done.stderr.decode())
        assert as_module == command(tmp_path, *args)


def test_importing_the_module_runs_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """As pydoc, or a process of multiprocessing on Windows, does."""
    monkeypatch.setattr(cli, "main", lambda: pytest.fail("a command was run"))
    monkeypatch.delitem(sys.modules, "npdecoder.__main__", raising=False)
    importlib.import_module("npdecoder.__main__")


# Generate


def test_generate(lm: Path) -> None:
    """The prompt, and what follows it: here further than the model reads."""
    text = generated(lm, "the", 30)
    assert len(text) == 30
    assert call("generate", lm, "--prompt", "the", "--length", 30) == (0, f"the{text}\n", "")
    prompt = "the cat sat the cat sat"
    text = generated(lm, prompt, 5)
    assert call("generate", lm, "--prompt", prompt, "--length", 5).out == f"{prompt}{text}\n"
    assert call("generate", lm) == (0, f"\n{generated(lm, chr(10), 500)}\n", "")


def test_equal_seeds_write_equal_texts(lm: Path, tmp_path: Path) -> None:
    args = ["generate", lm, "--prompt", "the cat", "--length", 40]
    texts = [call(*args, "--seed", seed) for seed in (5, 5, 6, 0)]
    assert texts[0] == texts[1] == (0, f"the cat{generated(lm, 'the cat', 40, seed=5)}\n", "")
    assert len({text.out for text in texts}) == 3
    assert texts[3] == call(*args)
    assert command(tmp_path, *args, "--seed", 5) == texts[0]


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", 0.25), ("temperature", 3.0), ("top_k", 2), ("top_p", 0.3), ("min_p", 0.7)],
)
def test_options_of_the_draw(lm: Path, name: str, value: float) -> None:
    option = f"--{name.replace('_', '-')}"
    found = call("generate", lm, "--prompt", "t", "--length", 40, option, value)
    assert found == (0, f"t{generated(lm, 't', 40, **{name: value})}\n", "")
    assert found != call("generate", lm, "--prompt", "t", "--length", 40)


def test_temperature_0_writes_the_likeliest(lm: Path) -> None:
    product = CharacterModel.load(lm)
    (ids,) = greedy_decode(product.model, product.characters.encode("the")[None])
    expected = "the" + product.characters.decode(ids)
    assert len(expected) == 9  # as far as it reads, and one more
    for seed in (0, 1):
        result = call("generate", lm, "--prompt", "the", "--length", 6, "--temperature", 0,
                      "--seed", seed)
        assert result == (0, f"{expected}\n", "")


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--temperature", "-1"], "temperature"),
        (["--temperature", "nan"], "temperature"),
        (["--temperature", "inf"], "temperature"),
        (["--top-p", "1.5"], "top_p"),
        (["--top-p", "-0.1"], "top_p"),
        (["--top-p", "nan"], "top_p"),
        (["--min-p", "1.5"], "min_p"),
        (["--min-p", "-0.1"], "min_p"),
        (["--min-p", "nan"], "min_p"),
        (["--prompt", ""], "prompt"),
        (["--prompt", "the dog"], "'dgo'"),
        (["--prompt", "猫"], "猫"),
        (["--prompt", "the\tcat"], "\\t"),
    ],
)
def test_what_generate_refuses(lm: Path, options: list[str], part: str) -> None:
    result = call("generate", lm, *options)
    assert_one_line_error(result, part)
    assert result.out == ""


def test_each_character_is_written_as_it_comes(lm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the next one is asked for, all before it are flushed."""

    class Pipe(io.StringIO):
        flushed = ""

        def flush(self) -> None:
            self.flushed = self.getvalue()

    pipe, seen = Pipe(), []
    text = generated(lm, "the", 12)
    generate = CharacterModel.generate

    def looking(*args: Any, **options: Any) -> Iterator[str]:
        for character in generate(*args, **options):
            seen.append(pipe.flushed)
            yield character
        seen.append(pipe.flushed)

    monkeypatch.setattr(CharacterModel, "generate", looking)
    with contextlib.redirect_stdout(pipe):
        assert cli.main(["generate", str(lm), "--prompt", "the", "--length", "12"]) == 0
    assert seen == [f"the{text[:i]}" for i in range(13)]


@posix
@pytest.mark.parametrize("end", ["closed", "Ctrl-C"])
def test_a_text_that_nobody_reads_to_its_end(tmp_path: Path, lm: Path, end: str) -> None:
    """The first characters come while it writes on: "| head" ends it quietly, as does Ctrl-C."""
    expected = "the" + generated(lm, "the", 30)
    args = ["generate", lm, "--prompt", "the", "--length", 10**9]
    with start(tmp_path, *args) as process:
        found = watched(process, lambda: process.stdout.read(33))
        going_on = process.poll() is None
        if end == "closed":
            process.stdout.close()
            ended = process.wait(timeout=PATIENCE), process.stderr.read()
        else:
            result = interrupt(process)
            ended = result.code, result.err.encode()
    assert (found, going_on) == (expected, True)
    assert ended == {"closed": (0, b""), "Ctrl-C": (130, b"npdecoder: stopped\n")}[end]


# Trace


def test_trace_of_the_worked_example() -> None:
    traced = worked_example()
    assert call("trace") == (0, f"{traced.trace}\n", "")
    assert call("trace", "--ids", "2,5,3", "7 4 6").out == f"{traced.trace}\n"
    other = worked_example(([2, 5], [7, 4]))
    assert call("trace", "--ids", "2, 5", "7,4") == (0, f"{other.trace}\n", "")


def test_trace_of_ones_own_sentences(model: Path) -> None:
    """By a new model of their words, or by a trained one."""
    texts = "I drink tea", "我 喝"
    tables = [sentence_pair(*texts).trace, sentence_pair(*texts, seed=3).trace,
              translated(Translator.load(model), *texts).trace]  # fmt: skip
    assert len({*map(str, tables)}) == 3
    for table, options in zip(tables, ([], ["--seed", "3"], ["--model", model])):
        assert call("trace", *texts, *options) == (0, f"{table}\n", "")


def test_trace_writes_a_page_and_the_arrays(folder: Path) -> None:
    traced = worked_example()
    result = call("trace", "--html", "page.html", "--npz", "t.npz")
    assert (result.code, result.err) == (0, "")
    assert result.lines() == [
        "saved: t.npz", f"{len(traced.trace)} steps, loss {traced.loss:.4f}",
        "saved: page.html  (open it in a browser)",
    ]  # fmt: skip
    assert made(folder) == ["page.html", "t.npz"]
    traced.trace.save("expected.npz")
    assert Path("t.npz").read_bytes() == Path("expected.npz").read_bytes()
    title = f"{traced.title} · npdecoder"
    expected = page(traced.trace, traced.tokens, title)
    assert Path("page.html").read_text("utf-8") == expected
    assert f"<title>{title}</title>" in expected


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["one sentence"], "give two sentences, or none"),
        (["--model", "m.npz"], "the two sentences"),
        (["--ids"], "the two sentences"),
        (["--ids", "2,5", "7,4", "--model", "m.npz"], "worked example's model"),
        (["--ids", "2;5", "7,4"], "'2;5' is no list of ids"),
        (["--ids", "2,5", ""], "target is empty"),
        (["--ids", "2,10", "7,4"], "source[1] is 10"),
        (["a", " "], "no words"),
        (["a", "b", "--model", "none.npz"], "none.npz"),
        (["--npz", "t.txt"], "t.txt"),
        (["--html", "none/page.html"], "none: no such folder"),
    ],
)
def test_what_trace_refuses(folder: Path, args: list[str], part: str) -> None:
    result = call("trace", *args)
    assert_one_line_error(result, part)
    assert result.out == ""
    assert made(folder) == []


# Streams that are closed, full or interrupted


def test_without_stdout_or_stdin(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under pythonw, or with >&- in a shell: the streams are None."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)
        assert cli.main(["translate", str(model), "tea"]) == 0
    monkeypatch.setattr(sys, "stdin", None)
    result = call("translate", model)
    assert_one_line_error(result)
    assert "NoneType" not in result.err


def watched(process: subprocess.Popen[bytes], read: Callable[[], bytes]) -> str:
    """What is read of the process, which is killed if it does not come."""
    watchdog = threading.Timer(60, process.kill)  # reading has no timeout of its own
    watchdog.start()
    found = read()
    watchdog.cancel()
    return found.decode()


def wait_for_line(process: subprocess.Popen[bytes]) -> str:
    """The next line that it writes, while it goes on."""
    line = watched(process, process.stdout.readline)
    time.sleep(0.3)
    assert process.poll() is None
    return line


def wait_for_save(process: subprocess.Popen[bytes], path: Path) -> None:
    """Until the process has written path, or is at its end."""

    def content() -> bytes:
        return path.read_bytes() if path.exists() else b""

    before = content()
    while content() == before and process.poll() is None:
        time.sleep(0.005)


def arguments(kind: str, model: Path) -> list[Any]:
    return {
        "help": ["train", "--help"],
        "version": ["--version"],
        "train": [*TRAININGS["train"], "--out", "m.npz"],
        "train-lm": [*TRAININGS["train-lm"], "--out", "m.npz"],
        "translate": ["translate", model, "tea"],
        "lines": ["translate", model],
        "gradcheck": ["gradcheck"],
    }[kind]


@pytest.mark.parametrize("kind", ["help", "version", "train", "train-lm", "translate", "lines"])
def test_nobody_reads_the_output(folder: Path, model: Path, kind: str) -> None:
    with start(folder, *arguments(kind, model)) as process:
        process.stdout.close()  # as "| head -0"
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(b"tea\n" * 100)
            process.stdin.close()
        err = process.stderr.read()
        process.wait(timeout=PATIENCE)
    assert err == b""
    # a training that could not say what it did has not done it
    assert process.returncode == (141 if kind.startswith("train") else 0)


def test_the_output_is_closed_early(folder: Path, model: Path) -> None:
    with start(folder, "translate", model) as process:
        process.stdin.write(b"tea\n")
        process.stdin.flush()
        first = wait_for_line(process)
        process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(b"tea\n" * 10_000)
            process.stdin.close()
        err = process.stderr.read()
        process.wait(timeout=PATIENCE)
    assert first.rstrip() == translations(model, "tea")[0]
    assert err == b""
    assert process.returncode == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("kind", ["train", "translate"])
def test_a_full_disk(folder: Path, model: Path, kind: str) -> None:
    with open("/dev/full", "wb") as full:
        result = command(folder, *arguments(kind, model), stdout=full)
    assert_one_line_error(result, "space")


def interrupt(process: subprocess.Popen[bytes]) -> Result:
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    return Result(process.returncode, out.decode(), err.decode())


@posix
@both_trainings
def test_ctrl_c_while_training(folder: Path, kind: str) -> None:
    """It saves, over the model of yesterday too."""
    (folder / "m.npz").write_bytes(b"the model of yesterday")
    options = ["--steps", 10**9, "--save-every", 10]
    with start(folder, *TRAININGS[kind], "--out", "m.npz", *options) as process:
        wait_for_save(process, folder / "m.npz")
        result = interrupt(process)
    assert (result.code, result.err) == (130, "npdecoder: stopped\n")
    assert len(result.lines()) == 1
    assert made(folder) == ["m.npz"]
    assert load_checkpoint("m.npz").step >= 10
    readers = {"train": "translate", "train-lm": "generate"}
    assert call(*READERS[readers[kind]]("m.npz")).code == 0


def test_the_model_of_yesterday_is_there_until_the_first_save(folder: Path) -> None:
    for training_of in TRAININGS.values():
        (folder / "m.npz").write_bytes(b"the model of yesterday")
        result = call(*training_of, "--out", "m.npz", "--lr", "1e30", "--warmup", "0")
        assert_one_line_error(result, "learning rate")
        assert (folder / "m.npz").read_bytes() == b"the model of yesterday"
        assert made(folder) == ["m.npz"]


def test_ctrl_c_while_waiting_for_a_line(tmp_path: Path, model: Path) -> None:
    with start(tmp_path, "translate", model) as process:
        process.stdin.write(b"tea\n")
        process.stdin.flush()
        assert wait_for_line(process)
        assert interrupt(process) == (130, "", "npdecoder: stopped\n")


# Train


def trained(kind: str, *options: Any, out: str = "m.npz") -> tuple[Result, bytes]:
    result = call(*TRAININGS[kind], "--out", out, *options)
    assert result.code == 0, result
    return result, Path(out).read_bytes()


def weights(path: str | Path = "m.npz") -> dict[str, tuple[Any, bytes]]:
    """Of the model in the file, without the options that are stored there too."""
    state = load_checkpoint(path).model.state_dict()
    return {name: (array.shape, array.tobytes()) for name, array in state.items()}


def number(pattern: str, text: str) -> float:
    (found,) = re.findall(pattern + r"\s+([\d.]+)", text)
    return float(found)


def log_softmax(logits: Any) -> Any:
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def test_train_end_to_end(folder: Path) -> None:
    result, _ = trained("train", "--held-out", "0.1", "--steps", "60", "--lr", "0.2")
    train_pairs, held_out = split_pairs(read_pairs("pairs.tsv"), 0.1, 0)
    lines = result.lines()
    translator = Translator.load("m.npz")
    assert lines[0].startswith(f"{len(train_pairs)} pairs to train on, {len(held_out)} held out")
    assert f"{translator.model.num_parameters():,} parameters" in lines[0]
    assert lines[-1].startswith("saved: m.npz ")
    assert "gradients: all right" in lines[-2]
    assert "held-out exact match: " in lines[-3]
    for part in ("gradcheck of Transformer", "Translations:", "looked at, in percent"):
        assert part in result.out
    assert re.fullmatch(r"[\d,]+ target tokens/s\n", result.err)
    assert made(folder) == ["m.npz"]

    # the numbers: of word frequencies, plus one, by hand; and of the model that was saved
    words = Counter(word for _, t in train_pairs for word in (*tokenize(t), "<eos>"))
    vocabulary = translator.target_vocabulary.tokens
    total = sum(words.values()) + len(vocabulary)
    wanted = [word for _, t in held_out for word in (*tokenize(t), "<eos>")]
    loss = -sum(math.log((words[word] + 1) / total) for word in wanted) / len(wanted)
    assert number("word frequencies alone", result.out) == pytest.approx(loss, abs=1e-4)
    loss = 0.0
    for source, target in translator.encode_pairs(held_out):
        logits = translator.model(np.array([[*source, 2]]), np.array([[1, *target]]))[0]
        loss -= float(log_softmax(logits)[np.arange(len(target) + 1), [*target, 2]].sum())
    loss /= len(wanted)
    assert number("validation loss", result.out) == pytest.approx(loss, abs=1e-4)
    assert number("with the source hidden", result.out) != pytest.approx(loss, abs=1e-4)
    match = 100 * translator.exact_match(held_out)
    assert number("exact match:", result.out) == pytest.approx(match, abs=0.05)
    assert number("training loss", result.out) < math.log(len(vocabulary))


def test_train_lm_end_to_end(folder: Path) -> None:
    result, _ = trained("train-lm", "--steps", "150", "--lr", "0.03")
    product = CharacterModel.load("m.npz")
    cut = round(0.9 * len(TEXT))
    lines = result.lines()
    assert lines[0] == (
        f"{cut} characters to train on, {len(TEXT) - cut} held out, {len(set(TEXT))} different; "
        f"{product.model.num_parameters():,} parameters"
    )
    assert product.characters.characters == "".join(sorted(set(TEXT)))
    assert lines[-1] == "saved: m.npz  (try: npdecoder generate m.npz)"
    assert "gradients: all right" in lines[-2]
    assert "gradcheck of LanguageModel" in result.out
    assert re.fullmatch(r"[\d,]+ tokens/s\n", result.err)
    assert made(folder) == ["m.npz"]
    sample = generated(folder / "m.npz", "\n", 300)
    assert f"\nA sample:\n\n{sample}\n\ntraining loss " in result.out

    # the numbers: of the model that was saved, every target once; and of frequencies, plus one
    ids = product.characters.encode(TEXT)
    train_ids, held_out = ids[:cut], ids[cut:]
    losses = []
    for begin in range(0, len(held_out) - 1, 8):
        piece = held_out[begin : begin + 9]
        log_p = log_softmax(product.model(piece[None, :-1])[0])
        losses += (-log_p[np.arange(len(piece) - 1), piece[1:]]).tolist()
    assert len(losses) == len(held_out) - 1
    assert number("validation loss", result.out) == pytest.approx(np.mean(losses), abs=1e-4)
    counts = np.bincount(train_ids, minlength=len(set(TEXT))) + 1
    unigram = -np.log(counts / counts.sum())[held_out[1:]]  # the first is no target
    found = number("character frequencies alone", result.out)
    assert found == pytest.approx(unigram.mean(), abs=1e-4)
    stored = load_checkpoint("m.npz").extra["training"]["loss"]
    assert number("training loss", result.out) == pytest.approx(stored, abs=1e-4)
    assert number("validation loss", result.out) < found - 0.5


def test_the_defaults_of_train_lm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of nanoGPT's recipe for a CPU: 804,096 parameters for the 65 characters of its text."""
    seen: list[Any] = []

    class Begun(Exception):
        pass

    def begin(*args: Any) -> None:
        seen.extend(args)
        raise Begun

    monkeypatch.setattr(cli, "Run", begin)
    Path("text.txt").write_text("".join(map(chr, range(48, 48 + 65))) * 10, "utf-8")
    with pytest.raises(Begun):
        call("train-lm", "text.txt")
    product, out, options, optimizer, *_ = seen
    assert product.model.num_parameters() == 804_096
    assert out == "npdecoder-lm.npz"
    assert options == {
        "d_model": 128, "num_heads": 4, "num_layers": 4, "d_ff": None, "context": 64,
        "dropout": 0.0, "steps": 2000, "batch_size": 12, "accumulate": 1, "lr": 1e-3,
        "final_lr": 1e-4, "warmup": 100, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1,
        "max_norm": 1.0, "held_out": 0.1, "validate_every": 250, "save_every": 250, "seed": 0,
    }  # fmt: skip

    # decay on matrices alone, and no biases: not in norms, feed-forward, attention or output
    names = {id(p): name for name, p in product.model.named_parameters()}
    assert {name.rpartition(".")[2] for name in names.values()} == {"W", "P", "gamma"}
    assert type(optimizer) is AdamW
    assert optimizer.lr == 1e-3
    groups = [
        ({names[id(p)].rpartition(".")[2] for p in group.parameters}, group.options)
        for group in optimizer.groups
    ]
    rest = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8}
    assert groups == [
        ({"W", "P"}, {**rest, "weight_decay": 0.1}), ({"gamma"}, {**rest, "weight_decay": 0.0}),
    ]
    assert len(optimizer.parameters()) == len(names)
    config = product.model.config
    assert (config.activation, config.norm, config.max_len) == ("gelu", "pre", 64)
    assert (config.positions, config.tie_embeddings) == ("learned", "target_output")


@both_trainings
def test_equal_runs_are_equal(folder: Path, kind: str) -> None:
    first, data = trained(kind, "--seed", "3", "--dropout", "0.1")
    Path("m.npz").unlink()
    again, data_again = trained(kind, "--seed", "3", "--dropout", "0.1")
    assert first.out == again.out
    assert data == data_again
    over, data_over = trained(kind, "--seed", "3", "--dropout", "0.1")  # over a file that is there
    assert (over.out, data_over) == (first.out, data)
    found = weights()
    other, _ = trained(kind, "--seed", "4", "--dropout", "0.1")
    assert other.out != first.out
    assert weights() != found
    process = command(folder, *TRAININGS[kind], "--out", "m.npz", "--seed", 3, "--dropout", 0.1)
    assert process.out == first.out
    assert Path("m.npz").read_bytes() == data


EFFECTS = {
    "train": {
        "--lr": "0.05", "--dropout": "0.3", "--momentum": "0", "--weight-decay": "0.1",
        "--max-norm": "0.01", "--label-smoothing": "0.2", "--batch-size": "5", "--accumulate": "2",
        "--warmup": "0", "--steps": "21", "--d-model": "16", "--d-ff": "16", "--num-layers": "2",
        "--num-heads": "1", "--held-out": "0.3", "--min-count": "5", "--max-len": "4",
        "--seed": "1",
    },
    "train-lm": {
        "--lr": "0.01", "--final-lr": "1e-3", "--dropout": "0.3", "--beta1": "0.5",
        "--beta2": "0.9", "--weight-decay": "0.5", "--max-norm": "0.01", "--batch-size": "5",
        "--accumulate": "2", "--warmup": "0", "--steps": "21", "--d-model": "16", "--d-ff": "16",
        "--num-layers": "2", "--num-heads": "1", "--held-out": "0.3", "--context": "6",
        "--seed": "1",
    },
}  # fmt: skip


@pytest.fixture
def short_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of the weights alone: the report takes longer than a short training."""
    report = npdecoder.gradcheck(Linear(2, 3, dtype=np.float64), np.ones((1, 2)))
    monkeypatch.setattr(cli, "gradcheck", lambda *args, **options: report)
    monkeypatch.setattr(CharacterModel, "generate", lambda *args, **options: iter(""))


@both_trainings
@pytest.mark.usefixtures("folder", "short_report")
def test_every_option_has_an_effect(kind: str) -> None:
    """On the weights; but when it validates and saves changes nothing of them."""
    table = {"train": cli.TRAIN_OPTIONS, "train-lm": cli.TRAIN_LM_OPTIONS}[kind]
    options = {f"--{name.replace('_', '-')}" for name, *_ in table}
    assert options == EFFECTS[kind].keys() | {"--validate-every", "--save-every"}
    trained(kind)
    found = weights()
    without = []
    for option, value in EFFECTS[kind].items():
        trained(kind, option, value)
        without += [option] * (weights() == found)
    assert without == []
    trained(kind, "--validate-every", "3", "--save-every", "2")
    assert weights() == found


@pytest.mark.usefixtures("folder")
def test_long_pairs_are_left_out() -> None:
    with open("pairs.tsv", "a", encoding="utf-8") as file:
        file.write("a a a a a a\tb\nc\td d d d d d\n")
    result, _ = trained("train", "--max-len", "5")
    assert result.lines()[0] == "2 pairs are longer than 5 tokens: left out"
    assert Translator.load("m.npz").model.config.max_len == 6
    vocabulary = Translator.load("m.npz").source_vocabulary
    assert "a" not in vocabulary


@pytest.mark.usefixtures("folder")
def test_with_nothing_held_out() -> None:
    result, _ = trained("train", "--held-out", "0")
    assert f"{len(PAIRS)} pairs to train on, 0 held out" in result.out
    assert "validation" not in result.out
    assert "exact match" not in result.out
    result, _ = trained("train-lm", "--held-out", "0")
    assert result.out.startswith(f"{len(TEXT)} characters to train on, 0 held out")
    assert "validation" not in result.out


def test_one_pair_is_enough(folder: Path) -> None:
    (folder / "pairs.tsv").write_text("tea\t茶\n", "utf-8")
    result, _ = trained("train", "--steps", "100", "--dropout", "0")
    assert "1 pairs to train on, 0 held out" in result.out
    assert translations(folder / "m.npz", "tea") == ["茶"]


@pytest.mark.usefixtures("folder")
def test_a_text_in_one_line_and_in_any_script() -> None:
    """The sample then begins with the lowest character, as generate does."""
    Path("text.txt").write_text("猫坐在垫子上，老鼠吃了它。" * 20, "utf-8")
    result, _ = trained("train-lm", "--steps", "5")
    lowest = min("猫坐在垫子上，老鼠吃了它。")
    assert f"\nA sample:\n\n{lowest}{generated(Path('m.npz'), lowest, 300)}\n" in result.out
    assert call("generate", "m.npz", "--prompt", "猫", "--length", "3").out[0] == "猫"
    assert call("generate", "m.npz", "--length", "3").out[0] == lowest
    asked = call("generate", "m.npz", "--prompt", "\n")
    assert_one_line_error(asked, "'\\n'")  # which it does not know


def test_windows_files_and_further_columns(folder: Path) -> None:
    _, data = trained("train")
    text = "\ufeff" + "".join(f"{s}\t{t}\tby somebody\r\n" for s, t in PAIRS)
    (folder / "pairs.tsv").write_bytes(text.encode())
    assert trained("train")[1] == data
    _, data = trained("train-lm")
    (folder / "text.txt").write_bytes(("\ufeff" + TEXT.replace("\n", "\r\n")).encode())
    assert trained("train-lm")[1] == data


@both_trainings
@pytest.mark.usefixtures("folder")
def test_a_safetensors_file_serves_as_well(kind: str) -> None:
    pytest.importorskip("safetensors")
    result, _ = trained(kind)
    other, data = trained(kind, out="m.safetensors")
    assert other.out == result.out.replace("m.npz", "m.safetensors")
    assert weights("m.safetensors") == weights()
    again = call(*TRAININGS[kind], "--out", "m.safetensors", "--resume")
    assert again.code == 0
    assert report(again) == report(other)
    assert Path("m.safetensors").read_bytes() == data
    reader = READERS[{"train": "translate", "train-lm": "generate"}[kind]]
    assert call(*reader("m.safetensors")) == call(*reader("m.npz"))
    assert call(*reader("m.npz")).code == 0


# Stop and resume


def report(result: Result) -> list[str]:
    """What a training printed, but that it went on."""
    return [line for line in result.lines() if not line.startswith("going on after update ")]


def stopped(monkeypatch: pytest.MonkeyPatch, at: int, signum: int, *args: Any) -> Result:
    """A command that gets the signal in update `at`."""
    train_step = training.train_step

    def step(model: Any, criterion: Any, optimizer: Any, *rest: Any, **options: Any) -> Any:
        if optimizer.steps + 1 == at:
            signal.raise_signal(signum)
        return train_step(model, criterion, optimizer, *rest, **options)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # as & leaves it ignored
    try:
        with monkeypatch.context() as patch:
            patch.setattr(training, "train_step", step)
            return call(*args)
    finally:
        signal.signal(signal.SIGINT, before)


FULL = ["--dropout", "0.2", "--accumulate", "3", "--save-every", "6", "--validate-every", "4"]


@both_trainings
@pytest.mark.parametrize(
    ("signum", "at", "code"),
    [(signal.SIGTERM, 1, 143), (signal.SIGINT, 7, 130), (signal.SIGTERM, 12, 143),
     (signal.SIGINT, 20, 130)],
)  # fmt: skip
@pytest.mark.usefixtures("folder")
def test_a_training_that_was_stopped_goes_on_as_if_it_had_not(
    monkeypatch: pytest.MonkeyPatch, kind: str, signum: int, at: int, code: int
) -> None:
    """Weights, moments, generators and report are those of a training without a break."""
    whole, data = trained(kind, *FULL)
    args = [*TRAININGS[kind], *FULL, "--out", "s.npz"]
    first = stopped(monkeypatch, at, signum, *args)
    assert first.code == code
    assert first.err == ("npdecoder: stopped\n" if code == 130 else "")
    assert load_checkpoint("s.npz").step == at
    assert "loss" not in first.out
    second = call(kind, args[1], "--out", "s.npz", "--resume")  # with the options of the file
    assert second.code == 0, second
    assert f"\ngoing on after update {at} of 20\n" in second.out
    assert report(second) == [line.replace("m.npz", "s.npz") for line in report(whole)]
    assert Path("s.npz").read_bytes() == data


@both_trainings
@pytest.mark.usefixtures("folder")
def test_a_training_may_be_stopped_often(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    whole, data = trained(kind, *FULL)
    args = [*TRAININGS[kind], *FULL, "--out", "s.npz"]
    for at in (2, 3, 11):
        assert stopped(monkeypatch, at, signal.SIGTERM, *args).code == 143
        args = [*args, "--resume"]
    assert report(call(*args)) == [line.replace("m.npz", "s.npz") for line in report(whole)]
    assert Path("s.npz").read_bytes() == data


@posix
@both_trainings
def test_a_process_that_was_terminated_goes_on(folder: Path, kind: str) -> None:
    options = ["--dropout", "0.2", "--steps", "400", "--save-every", "50"]
    whole, data = trained(kind, *options)
    with start(folder, *TRAININGS[kind], *options, "--out", "s.npz") as process:
        wait_for_save(process, folder / "s.npz")
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (143, b"")
    assert 50 <= load_checkpoint("s.npz").step < 400
    second = command(folder, *TRAININGS[kind], "--out", "s.npz", "--resume", "--steps", "400")
    assert report(second) == [line.replace("m.npz", "s.npz") for line in report(whole)]
    assert (folder / "s.npz").read_bytes() == data
    assert made(folder) == ["m.npz", "s.npz"]


@both_trainings
@pytest.mark.usefixtures("folder")
def test_a_finished_training_is_only_reported_again(kind: str) -> None:
    whole, data = trained(kind, *FULL)
    again = call(*TRAININGS[kind], *FULL, "--out", "m.npz", "--resume")
    assert again.code == 0
    assert report(again) == report(whole)
    assert Path("m.npz").read_bytes() == data


@both_trainings
@pytest.mark.usefixtures("folder")
def test_a_finished_training_can_be_made_longer(kind: str) -> None:
    """The schedule is then that of the longer one, which it follows from there on."""
    trained(kind, *FULL)
    before = load_checkpoint("m.npz")
    longer = call(kind, TRAININGS[kind][1], "--out", "m.npz", "--resume", "--steps", 25)
    assert longer.code == 0, longer
    assert "\ngoing on after update 20 of 25\n" in longer.out
    after = load_checkpoint("m.npz")
    assert after.step == after.optimizer.steps == 25
    o = after.extra["training"]["options"]
    assert o == {**before.extra["training"]["options"], "steps": 25}
    schedule = cosine_schedule(o["lr"], 25, o["warmup"], o.get("final_lr", 0.0))
    assert after.optimizer.lr == schedule(25)
    assert weights("m.npz") != {
        name: (array.shape, array.tobytes()) for name, array in before.model.state_dict().items()
    }
    again = call(kind, TRAININGS[kind][1], "--out", "m.npz", "--resume")
    assert report(again) == report(longer)


@both_trainings
@pytest.mark.usefixtures("folder")
def test_when_it_saves_and_validates_may_change(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    whole, _ = trained(kind, *FULL)
    found = weights()
    stopped(monkeypatch, 7, signal.SIGTERM, *TRAININGS[kind], *FULL, "--out", "s.npz")
    args = [*TRAININGS[kind], "--out", "s.npz", "--resume"]
    second = call(*args, "--save-every", 3, "--validate-every", 5)
    assert report(second) == [line.replace("m.npz", "s.npz") for line in report(whole)]
    assert weights("s.npz") == found
    options = load_checkpoint("s.npz").extra["training"]["options"]
    assert (options["save_every"], options["validate_every"]) == (3, 5)


@both_trainings
@pytest.mark.usefixtures("folder")
def test_other_options_are_refused_by_name(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    args = [*TRAININGS[kind], *FULL, "--out", "m.npz"]
    stopped(monkeypatch, 7, signal.SIGTERM, *args)
    data = Path("m.npz").read_bytes()
    for option, value in EFFECTS[kind].items():
        if option != "--steps":
            result = call(kind, args[1], "--out", "m.npz", "--resume", option, value)
            assert_one_line_error(result, f"{option} is ", "m.npz began with")
            assert result.out == ""
    assert Path("m.npz").read_bytes() == data
    options = load_checkpoint("m.npz").extra["training"]["options"]
    equal = [
        part for name, value in options.items() if value is not None
        for part in (f"--{name.replace('_', '-')}", value)
    ]
    assert len(equal) == 2 * 19
    assert call(kind, args[1], "--out", "m.npz", "--resume", *equal).code == 0


OTHERS = {
    "train": ["tea\t茶\n", "".join(f"{s}\t{t}\n" for s, t in PAIRS[1:]),
              "".join(f"{s}\t{t} !\n" for s, t in PAIRS)],
    "train-lm": [TEXT + "cat", TEXT[1:], TEXT.replace("mat", "cat"), TEXT[::-1]],
}  # fmt: skip


@both_trainings
@pytest.mark.usefixtures("folder")
def test_another_text_is_refused(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    args = [*TRAININGS[kind], "--out", "m.npz"]
    stopped(monkeypatch, 7, signal.SIGTERM, *args)
    data = Path("m.npz").read_bytes()
    for text in OTHERS[kind]:
        Path(args[1]).write_text(text, "utf-8")
        assert_one_line_error(call(*args, "--resume"), "m.npz cannot be resumed", "the text")
    if kind == "train-lm":  # characters that the model does not know
        Path(args[1]).write_text(TEXT + "!?", "utf-8")
        assert_one_line_error(call(*args, "--resume"))
    assert Path("m.npz").read_bytes() == data


@both_trainings
@pytest.mark.usefixtures("folder")
def test_a_file_that_holds_no_training(model: Path, lm: Path, kind: str) -> None:
    for path in (model, lm):
        result = call(*TRAININGS[kind], "--out", path, "--resume")
        assert_one_line_error(result, path, "no training")
    save_weights("w.npz", {"W": np.ones(3)})
    assert_one_line_error(call(*TRAININGS[kind], "--out", "w.npz", "--resume"), "w.npz")
    assert_one_line_error(call(*TRAININGS[kind], "--out", "none.npz", "--resume"), "none.npz")


@both_trainings
@pytest.mark.usefixtures("folder")
def test_every_option_must_be_in_the_file(kind: str) -> None:
    """As it may not be in one of an earlier version: the error names the file and the option."""
    trained(kind)
    model, optimizer, rng, step, extra = load_checkpoint("m.npz")
    options = extra["training"]["options"]
    wrong = []
    for name in options:
        rest = {other: value for other, value in options.items() if other != name}
        training_of = {**extra["training"], "options": rest}
        save_checkpoint("m.npz", model, optimizer, rng, step, {**extra, "training": training_of})
        result = call(kind, TRAININGS[kind][1], "--out", "m.npz", "--resume")
        if result.code != 2 or "m.npz" not in result.err or name not in result.err:
            wrong.append((name, result.code, result.err))
    assert wrong == []


# Gradcheck


def test_gradcheck() -> None:
    result = call("gradcheck")
    assert result.code == 0
    assert result.err == ""
    for name in gradcheck_all.CASES:
        assert re.search(rf"^{name} +\d+ +\d+e-\d+  ok$", result.out, re.MULTILINE), name
    assert result.lines()[-1] == "all right"
    assert "WRONG" not in result.out
    assert "seed 0" in result.lines()[0]


@pytest.mark.parametrize(("name", "seed"), [("DecoderLayer", 4), ("Transformer", 9)])
def test_gradcheck_raises_no_false_alarm(
    monkeypatch: pytest.MonkeyPatch, name: str, seed: int
) -> None:
    """The gradient of W_k.b is zero, since softmax ignores a shift: what is left is rounding."""
    monkeypatch.setattr(gradcheck_all, "CASES", {name: gradcheck_all.CASES[name]})
    result = call("gradcheck", "--seed", seed)
    assert result.code == 0, result.out


@pytest.fixture
def broken_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear.backward forgets to sum db over all rows but the first."""
    backward: Callable[..., Any] = Linear.backward

    def broken(self: Linear, ctx: Any, dy: Any) -> Any:
        before = None if self.b is None else self.b.grad.copy()
        dx = backward(self, ctx, dy)
        if before is not None:
            self.b.grad = before + dy.reshape(-1, dy.shape[-1])[0]
        return dx

    monkeypatch.setattr(Linear, "backward", broken)


def few_cases(seed: int = 0) -> Iterator[Any]:
    """gradcheck_all of Linear (with a bias) and the two after it."""
    return itertools.islice(gradcheck_all.gradcheck_all(seed), 3)


def seed_with_bias() -> int:
    return next(
        seed for seed in range(20) if "bias=True" in next(few_cases(seed)).options
    )


@pytest.mark.usefixtures("broken_linear")
def test_gradcheck_of_a_broken_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "gradcheck_all", few_cases)
    seed = seed_with_bias()
    result = call("gradcheck", "--seed", seed)
    assert result.code == 1
    assert re.search(r"^Linear .*WRONG$", result.out, re.MULTILINE)
    assert re.search(r"^Embedding .*ok$", result.out, re.MULTILINE)
    assert re.search(r"^b .*FAIL", result.out, re.MULTILINE)  # the table says which tensor
    assert result.lines()[-1] == "WRONG: Linear"
    assert f"seed {seed}" in result.lines()[0]
    assert "all right" not in result.out


# Demo


def test_a_short_demo(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    for name in ("one", "two"):
        (folder / name).mkdir()
        monkeypatch.chdir(folder / name)
        result = call("demo", "--steps", "30", "--out", "tmp.npz")
        assert (result.code, result.err) == (0, "")
        assert os.listdir() == ["tmp.npz"]
        runs.append((result.out, Path("tmp.npz").read_bytes()))
    assert runs[0] == runs[1]

    out = runs[0][0]
    for part in ("966 pairs to train on", "gradcheck of Transformer", "all ok", "reference",
                 "我 爱 你", "<eos>", "looked at", "saved: tmp.npz", "gradients: all right",
                 'npdecoder translate tmp.npz "I love you"'):
        assert part in out
    assert re.search(r"^held-out exact match: \d+\.\d %$", out, re.MULTILINE)
    assert re.search(r"^loss \d\.\d{4}, on held-out phrases \d\.\d{4}$", out, re.MULTILINE)
    assert all(name in out for name in ("source_embedding.W", "output.b"))
    assert translations(Path("tmp.npz"), "I love you")[0] in out


@pytest.mark.usefixtures("folder")
def test_demos_that_have_learnt_nothing_yet() -> None:
    """Their translations do not end by themselves, or are empty."""
    runs = [(2, 0), (1, 1), (3, 1)]
    results = [call("demo", "--steps", n, "--seed", seed, "--out", "d.npz") for n, seed in runs]
    assert [(result.code, result.err) for result in results] == [(0, "")] * 3
    assert len({result.out for result in results}) == 3


@pytest.mark.usefixtures("folder")
def test_the_demo_raises_no_false_alarm() -> None:
    """With this seed some ReLU stands so near 0 that a step of the differences crosses it."""
    result = call("demo", "--steps", "40", "--seed", "8", "--out", "d.npz")
    assert result.code == 0, result.out


@pytest.mark.usefixtures("broken_linear", "folder")
def test_a_demo_with_a_broken_layer() -> None:
    result = call("demo", "--steps", "1", "--out", "d.npz")
    assert result.code == 1
    assert "gradients: WRONG" in result.out


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """`npdecoder demo` as it is, once for all tests below."""
    folder = tmp_path_factory.mktemp("demo")
    return folder, command(folder, "demo")


def test_the_demo_learns_the_phrase_book(demo: tuple[Path, Result]) -> None:
    folder, result = demo
    assert (result.code, result.err) == (0, "")
    assert os.listdir(folder) == ["npdecoder-demo.npz"]
    assert number("held-out exact match:", result.out) >= 95.0
    assert "gradients: all right" in result.out
    assert "WRONG" not in result.out
    assert number("on held-out phrases", result.out) < 0.1


def test_the_demo_translates(demo: tuple[Path, Result]) -> None:
    folder, _ = demo
    model = folder / cli.DEMO_MODEL
    assert translations(model, "I love you", "you love me") == ["我 爱 你", "你 爱 我"]
    assert call("translate", model, "I love you") == (0, "我 爱 你\n", "")
    stdin = b"Where is the cat?\r\n\r\nI have two books\r\n"
    result = command(folder, "translate", model, stdin=stdin)
    assert result == (0, "猫 在 哪 里 ？\n\n我 有 两 本 书\n", "")


def test_the_demo_draws_a_map_of_attention(demo: tuple[Path, Result]) -> None:
    _, result = demo
    lines = result.out.split("in percent:\n\n")[1].split("\n\n")[0].split("\n")
    columns = lines[0].split()
    assert columns[-1] == "<eos>"
    assert lines[-1].split()[0] == "<eos>"
    for line in lines[1:]:
        percent = [int(word) for word in line.split()[1:] if word.isdigit()]
        assert len(percent) == len(columns)
        assert 95 <= sum(percent) <= 105  # each row is a distribution, rounded


@both_trainings
def test_a_file_that_is_there_is_not_replaced_unless_it_is_said(kind: str, folder: Path) -> None:
    """A forgotten --resume must not cost what was learnt before."""
    training_of = [argument for argument in TRAININGS[kind] if argument != "--force"]
    Path("m.npz").write_bytes(b"something of value")
    result = call(*training_of, "--out", "m.npz")
    assert_one_line_error(result, "m.npz exists: --resume", "--force")
    assert Path("m.npz").read_bytes() == b"something of value"
    assert call(*training_of, "--out", "m.npz", "--force").code == 0
    assert load_checkpoint("m.npz").step > 0


@pytest.mark.usefixtures("folder")
def test_generate_begins_with_a_new_line_or_with_what_the_model_knows() -> None:
    Path("text.txt").write_text("abcabcabc" * 20, "utf-8")
    assert call(*TRAININGS["train-lm"], "--out", "m.npz").code == 0
    result = call("generate", "m.npz", "--length", "5")
    assert (result.code, result.out[0], len(result.out)) == (0, "a", 7)


@pytest.mark.usefixtures("folder")
def test_an_empty_text_is_named() -> None:
    Path("text.txt").write_text("", "utf-8")
    assert_one_line_error(call(*TRAININGS["train-lm"], "--out", "m.npz"), "text.txt is empty")
