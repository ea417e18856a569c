"""The command line, in process and as a user starts it."""

from __future__ import annotations

import configparser
import contextlib
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
from npdecoder import Transformer, TransformerConfig, cli, gradcheck_all
from npdecoder.layers import Linear
from npdecoder.text import Vocabulary, read_pairs, split_pairs, tokenize
from npdecoder.translator import Translator

ROOT = Path(__file__).parents[1]
RUN = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
RUN += "from npdecoder.cli import main; sys.exit(main())"  # what the console script does
PATIENCE = 600  # seconds, for a machine that is busy with other things
COMMANDS = ["demo", "train", "translate", "gradcheck"]
SMALL = ["--d-model", "8", "--num-heads", "2", "--num-layers", "1", "--steps", "20"]
SMALL += ["--min-count", "1", "--batch-size", "4", "--warmup", "5"]
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
    assert re.fullmatch(r"npdecoder( \w+)?: error: [^\n]+\n", result.err), result.err
    assert "Traceback" not in result.err
    for part in parts:
        assert str(part) in result.err


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, the current one, with pairs.tsv in it."""
    monkeypatch.chdir(tmp_path)
    write_pairs(tmp_path / "pairs.tsv")
    return tmp_path


def write_pairs(path: Path) -> None:
    path.write_text("".join(f"{s}\t{t}\n" for s, t in PAIRS), "utf-8")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Translator with random weights. It knows: i you drink tea water."""
    sources = Vocabulary(["i", "you", "drink", "tea", "water"])
    targets = Vocabulary(["我", "你", "喝", "茶", "水"])
    config = TransformerConfig(9, 9, d_model=8, num_heads=2, num_encoder_layers=1,
                               num_decoder_layers=1, pad_id=0, max_len=6)
    network = Transformer(config, 1)
    for parameter in network.parameters():
        parameter.value *= 3.0
    network.output.b.value = [-50.0, -50.0, 1.0, -50.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    path = tmp_path_factory.mktemp("model") / "model.npz"
    Translator(network, sources, targets).save(path)
    return path


def translations(model: Path, *texts: str) -> list[str]:
    return Translator.load(model).translate(texts)


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
             "Example: npdecoder train"],
        ),
        (["translate"], ["MODEL.npz", "text", "standard input", "Example: npdecoder translate"]),
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


def test_every_option_of_train_is_explained() -> None:
    text = " ".join(call("train", "--help").out.split("options:")[1].split())
    entries = re.split(r" (?=--[a-z-]+ [A-Z_])", text)
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
        ("--seed", ["-1", "x"]),
    ],
)
def test_a_bad_option_of_train(folder: Path, option: str, values: list[str]) -> None:
    for value in values:
        result = call("train", "pairs.tsv", "--out", "m.npz", *SMALL, option, value)
        assert_one_line_error(result)
        assert os.listdir(folder) == ["pairs.tsv"]


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--num-heads", "1", "--d-model", "7"], "d_model"),
        (["--num-heads", "4", "--d-model", "10"], "num_heads"),
        (["--dropout", "2"], "dropout"),
        (["--lr", "nan"], "lr"),
        (["--held-out", "1"], "held_out"),
        (["--max-norm", "0"], "max_norm"),
        (["--label-smoothing", "3"], "label_smoothing"),
    ],
)
def test_the_error_names_the_option(folder: Path, options: list[str], part: str) -> None:
    result = call("train", "pairs.tsv", "--out", "m.npz", *SMALL, *options)
    assert_one_line_error(result, part)


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
    result = call("train", "pairs.tsv", "--out", "m.npz", *SMALL, *options)
    assert_one_line_error(result)
    assert os.listdir(folder) == ["pairs.tsv"]


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
    result = call("train", "pairs.tsv", "--out", "m.npz", *SMALL)
    assert_one_line_error(result, "pairs.tsv", *parts)
    assert result.out == ""


def test_a_file_of_pairs_that_is_not_there(folder: Path) -> None:
    assert_one_line_error(call("train", "none.tsv", "--out", "m.npz"), "none.tsv")
    (folder / "sub").mkdir()
    assert_one_line_error(call("train", "sub", "--out", "m.npz"), "sub")
    assert not (folder / "m.npz").exists()


@pytest.mark.parametrize("args", [["demo"], ["train", "pairs.tsv"]])
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

    monkeypatch.setattr(cli, "train", work)
    (folder / "folder.npz").mkdir()
    (folder / "dangling.npz").symlink_to(folder / "missing" / "m.npz")
    before = sorted(os.listdir(folder))
    result = call(*args, "--out", out)
    assert_one_line_error(result, part)
    assert result.out == ""
    assert sorted(os.listdir(folder)) == before


def test_a_model_that_is_none(folder: Path) -> None:
    np.savez("other.npz", W=np.ones(3))
    np.savez("objects.npz", W=np.array([{}], object))
    Path("text.npz").write_text("no model\n")
    Path("empty.npz").touch()
    Path("folder.npz").mkdir()
    for name in ("other", "objects", "text", "empty", "folder", "missing"):
        result = call("translate", f"{name}.npz", "tea")
        assert_one_line_error(result, f"{name}.npz")
        assert result.out == ""
    assert_one_line_error(call("translate", "pairs.tsv", "tea"), "pairs.tsv", ".npz")


def test_a_file_name_with_a_line_break_still_makes_one_line(folder: Path) -> None:
    assert_one_line_error(call("translate", "a\nb.npz", "tea"))
    assert_one_line_error(call("train", "a\nb.tsv", "--out", "m.npz"))


def test_errors_of_processes_are_the_same(folder: Path) -> None:
    for args in (["translate", "none.npz"], ["demo", "--steps", "0"], ["train"]):
        assert command(folder, *args) == call(*args)


def test_a_training_that_diverges_is_one_line(folder: Path) -> None:
    result = command(folder, "train", "pairs.tsv", "--out", "m.npz", *SMALL, "--lr", "1e30",
                     "--warmup", "0")
    assert_one_line_error(result, "learning rate")
    assert os.listdir(folder) == ["pairs.tsv"]


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
    result = command(tmp_path, "translate", "茶.npz", "茶", env=env)
    assert_one_line_error(result, "\\u8336.npz")


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


def wait_for_line(process: subprocess.Popen[bytes]) -> str:
    """The next line that it writes, while it goes on."""
    watchdog = threading.Timer(60, process.kill)  # reading has no timeout of its own
    watchdog.start()
    line: bytes = process.stdout.readline()
    watchdog.cancel()
    time.sleep(0.3)
    assert process.poll() is None
    return line.decode()


def arguments(kind: str, model: Path) -> list[Any]:
    return {
        "help": ["train", "--help"],
        "version": ["--version"],
        "train": ["train", "pairs.tsv", "--out", "m.npz", *SMALL],
        "translate": ["translate", model, "tea"],
        "lines": ["translate", model],
        "gradcheck": ["gradcheck"],
    }[kind]


@pytest.mark.parametrize("kind", ["help", "version", "train", "translate", "lines"])
def test_nobody_reads_the_output(folder: Path, model: Path, kind: str) -> None:
    with start(folder, *arguments(kind, model)) as process:
        process.stdout.close()  # as "| head -0"
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(b"tea\n" * 100)
            process.stdin.close()
        err = process.stderr.read()
        process.wait(timeout=PATIENCE)
    assert err == b""
    assert process.returncode == 0


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


@pytest.mark.parametrize("exists", [False, True])
def test_ctrl_c_while_training(folder: Path, exists: bool) -> None:
    out = folder / "m.npz"
    if exists:
        out.write_bytes(b"the model of yesterday")
    args = ["train", "pairs.tsv", "--out", out, *SMALL, "--steps", 10**9]
    with start(folder, *args) as process:
        assert "parameters" in wait_for_line(process)
        assert interrupt(process) == (130, "", "npdecoder: stopped\n")
    assert sorted(os.listdir(folder)) == ["m.npz"] * exists + ["pairs.tsv"]
    assert not exists or out.read_bytes() == b"the model of yesterday"


def test_ctrl_c_while_waiting_for_a_line(tmp_path: Path, model: Path) -> None:
    with start(tmp_path, "translate", model) as process:
        process.stdin.write(b"tea\n")
        process.stdin.flush()
        assert wait_for_line(process)
        assert interrupt(process) == (130, "", "npdecoder: stopped\n")


# Train


def trained(*options: Any, out: str = "m.npz") -> tuple[Result, bytes]:
    result = call("train", "pairs.tsv", "--out", out, *SMALL, *options)
    assert result.code == 0, result
    return result, Path(out).read_bytes()


def number(pattern: str, text: str) -> float:
    (found,) = re.findall(pattern + r"\s+([\d.]+)", text)
    return float(found)


def test_train_end_to_end(folder: Path) -> None:
    result, _ = trained("--held-out", "0.1", "--steps", "60", "--lr", "0.2")
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
    assert sorted(os.listdir(folder)) == ["m.npz", "pairs.tsv"]

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
        log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        loss -= float(log_p[np.arange(len(target) + 1), [*target, 2]].sum())
    loss /= len(wanted)
    assert number("validation loss", result.out) == pytest.approx(loss, abs=1e-4)
    assert number("with the source hidden", result.out) != pytest.approx(loss, abs=1e-4)
    match = 100 * translator.exact_match(held_out)
    assert number("exact match:", result.out) == pytest.approx(match, abs=0.05)
    assert number("training loss", result.out) < math.log(len(vocabulary))


def test_equal_runs_are_equal(folder: Path) -> None:
    first, data = trained("--seed", "3")
    Path("m.npz").unlink()
    again, data_again = trained("--seed", "3")
    assert first.out == again.out
    assert data == data_again
    over, data_over = trained("--seed", "3")  # over a file that is there
    assert (over.out, data_over) == (first.out, data)
    other, data_other = trained("--seed", "4")
    assert other.out != first.out
    assert data_other != data
    process = command(folder, "train", "pairs.tsv", "--out", "m.npz", *SMALL, "--seed", "3")
    assert process.out == first.out
    assert Path("m.npz").read_bytes() == data


@pytest.mark.parametrize(
    ("option", "value"),
    [("--lr", "0.05"), ("--dropout", "0.3"), ("--momentum", "0"), ("--weight-decay", "0.1"),
     ("--max-norm", "0.01"), ("--label-smoothing", "0.2"), ("--batch-size", "5"),
     ("--warmup", "0"), ("--steps", "21"), ("--d-ff", "16"), ("--num-layers", "2"),
     ("--num-heads", "1"), ("--held-out", "0.3"), ("--min-count", "5"), ("--max-len", "4")],
)
def test_every_option_has_an_effect(folder: Path, option: str, value: str) -> None:
    assert trained()[1] != trained(option, value)[1]


def test_long_pairs_are_left_out(folder: Path) -> None:
    with open("pairs.tsv", "a", encoding="utf-8") as file:
        file.write("a a a a a a\tb\nc\td d d d d d\n")
    result, _ = trained("--max-len", "5")
    assert result.lines()[0] == "2 pairs are longer than 5 tokens: left out"
    assert Translator.load("m.npz").model.config.max_len == 6
    vocabulary = Translator.load("m.npz").source_vocabulary
    assert "a" not in vocabulary


def test_without_held_out_pairs(folder: Path) -> None:
    result, _ = trained("--held-out", "0")
    assert f"{len(PAIRS)} pairs to train on, 0 held out" in result.out
    assert "validation" not in result.out
    assert "exact match" not in result.out


def test_one_pair_is_enough(folder: Path) -> None:
    (folder / "pairs.tsv").write_text("tea\t茶\n", "utf-8")
    result, _ = trained("--steps", "100", "--dropout", "0")
    assert "1 pairs to train on, 0 held out" in result.out
    assert translations(folder / "m.npz", "tea") == ["茶"]


def test_windows_files_and_further_columns(folder: Path) -> None:
    _, data = trained()
    text = "\ufeff" + "".join(f"{s}\t{t}\tby somebody\r\n" for s, t in PAIRS)
    (folder / "pairs.tsv").write_bytes(text.encode())
    assert trained()[1] == data


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
