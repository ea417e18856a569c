"""The page of the worked example: its numbers are the package's, its weights round-trip."""

import importlib.util
import io
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from npdecoder import CrossEntropy
from npdecoder.console import width

PATH = Path(__file__).parents[2] / "examples" / "worked_example.py"


def load():
    spec = importlib.util.spec_from_file_location("worked_example", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


worked_example = load()


def page(capsys, *arguments):
    assert worked_example.main(list(arguments)) == 0
    return capsys.readouterr().out


def make_model(path=worked_example.DEFAULT_WEIGHTS):
    model = worked_example.make_model()
    worked_example.read_weights(path, model)
    return model


def run(model):
    """Forward and backward by the model alone: loss, logits and gradients."""
    logits, ctx = model.forward(worked_example.SOURCE, worked_example.DECODER_INPUT)
    loss, loss_ctx = CrossEntropy().forward(logits, worked_example.TARGETS)
    model.zero_grad()
    model.backward(ctx, CrossEntropy().backward(loss_ctx))
    return loss, logits, {name: p.grad.copy() for name, p in model.named_parameters()}


# Reading the page back, as a person does: by heading, title and column

TITLE = re.compile(r"(wrong )?(\w[\w.]*)(?: = (.+?))?  (\(\d+(?:, \d+)*,?\))")
NUMBER = re.compile(r"-?\d+\.\d+|-inf|True|False")
VALUES = {"True": 1.0, "False": 0.0}


def grid(line):
    """The line with one character a column: a filler follows each wide one."""
    return "".join(c + "\0" * (width(c) - 1) for c in line)


def parse(text):
    """[(path of the layer, name, array)] of every matrix of the page."""
    found, path, lines = [], "", [grid(line) for line in text.splitlines()]
    for n, line in enumerate(lines):
        if re.match(r" ?\d+  \S", line):
            path = re.search(r"\[([\w.]+)\]$", line).group(1)
        titles = list(TITLE.finditer(line)) if line.startswith("    ") else []
        if titles and titles[0].start() != 4:
            continue
        for title, following in zip(titles, [*titles[1:], None]):
            start, end = title.start(), following.start() if following else None
            shape = tuple(int(i) for i in re.findall(r"\d+", title.group(4)))
            numbers, below = [], n + 1
            while lines[below].strip():
                row = NUMBER.findall(lines[below][start:end])
                if row:
                    numbers.append([VALUES[x] if x in VALUES else float(x) for x in row])
                below += 1
            name = (title.group(1) or "") + title.group(2)
            found.append((path, name, assemble(numbers, shape)))
    return found


def assemble(numbers, shape):
    if shape[-1] > 10:  # two halves, one above the other
        half = len(numbers) // 2
        numbers = [a + b for a, b in zip(numbers[:half], numbers[half:])]
    array = np.array(numbers)
    if len(shape) == 4:  # heads side by side
        _, h, T, n = shape
        array = array.reshape(T, h, n).swapaxes(0, 1)
    return array.reshape(shape)


def gradients_on(text):
    """Parameter name -> the gradient on the page."""
    found = {}
    names = {name for name, _ in worked_example.make_model().named_parameters()}
    for path, name, array in parse(text):
        if name.startswith("d") and f"{path}.{name[1:]}" in names:
            assert f"{path}.{name[1:]}" not in found
            found[f"{path}.{name[1:]}"] = array
    return found


def assert_shown(array, expected):
    np.testing.assert_allclose(array, expected, rtol=0, atol=0.5001e-4)


def test_every_gradient_on_the_page_is_that_of_the_model(capsys):
    found = gradients_on(page(capsys, "--part", "backward"))
    _, _, expected = run(make_model())
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_shown(found[name], gradient)


def test_every_weight_on_the_page_is_that_of_the_file(capsys):
    found = {f"{path}.{name}": array for path, name, array in parse(page(capsys))}
    for name, value in make_model().state_dict().items():
        if "embedding" in name:  # of which the page shows the rows that are used
            ids = {"source": [2, 5, 3], "target": [1, 7, 4]}[name.split("_")[0]]
            np.testing.assert_array_equal(found[name[:-1] + "E"][0], value[ids])
        elif name != "output.b":  # which the first step of training shows again
            np.testing.assert_array_equal(found[name], value)


def test_the_forward_page_ends_in_the_models_logits_and_loss(capsys):
    text = page(capsys, "--part", "forward")
    found = {f"{path}.{name}": array for path, name, array in parse(text)}
    loss, logits, _ = run(make_model())
    assert_shown(found["output.logits"], logits)
    assert f"loss = -mean(log p) = {loss:.4f} " in text
    p = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    assert_shown(found["loss.p"], p)


# What the layers themselves bind to these names, in the order that the model calls them

FORWARD_ATTENTION = [
    "encoder.layers.0.self_attention",
    "decoder.layers.0.self_attention",
    "decoder.layers.0.cross_attention",
]
FORWARD_NORM = [f"encoder.layers.0.norm{i}" for i in (1, 2)]
FORWARD_NORM += [f"decoder.layers.0.norm{i}" for i in (1, 2, 3)]
BACKWARD_ATTENTION = [FORWARD_ATTENTION[i] for i in (2, 1, 0)]
BACKWARD_NORM = [FORWARD_NORM[i] for i in (4, 3, 2, 1, 0)]


def locals_of_the_layers():
    """{layer path: {name: array}}, read from the running package when its functions return."""
    order = {
        ("attention.py", "forward"): iter(FORWARD_ATTENTION),
        ("attention.py", "backward"): iter(BACKWARD_ATTENTION),
        ("layer_norm.py", "forward"): iter(FORWARD_NORM),
        ("layer_norm.py", "backward"): iter(BACKWARD_NORM),
    }
    found = {}

    def watch(frame, event, _):
        key = Path(frame.f_code.co_filename).name, frame.f_code.co_name
        if event == "return" and key in order:
            path = next(order[key])
            found.setdefault(path, {}).update(frame.f_locals)

    model, previous = make_model(), sys.getprofile()
    sys.setprofile(watch)
    try:
        run(model)
    finally:
        sys.setprofile(previous)
    return found


def test_intermediates_on_the_page_are_the_locals_of_the_layers(capsys):
    names = {  # on the page: in the package
        "Q": "q", "K": "k", "V": "v", "S": "S", "S_masked": "S_masked", "A": "A",
        "context": "context", "dA": "dA", "dS": "dS", "dQ": "dq", "dK": "dk", "dV": "dv",
        "var": "var", "rstd": "rstd", "x_hat": "x_hat", "dx_hat": "dx_hat",
    }
    inside = locals_of_the_layers()
    compared = set()
    for path, name, array in parse(page(capsys)):
        if path in inside and name in names:
            assert_shown(array, inside[path][names[name]])
            compared.add((path, name))
    attentions, norms = len(FORWARD_ATTENTION), len(FORWARD_NORM)
    assert len(compared) == 11 * attentions + 1 + 4 * norms  # one attention has a mask


def test_the_matrices_fit_together(capsys):
    """On the page's own numbers, to their last decimal: the sums where a gradient meets another."""
    found = {f"{path}.{name}": array for path, name, array in parse(page(capsys))}
    dec, enc = "decoder.layers.0", "encoder.layers.0"
    for total, *parts in (
        (f"{dec}.feed_forward.dy2", f"{dec}.norm3.dr3", f"{dec}.feed_forward.dinput"),
        (f"{dec}.cross_attention.dy1", f"{dec}.norm2.dr2", f"{dec}.cross_attention.dquery"),
        (f"{dec}.cross_attention.dmemory", f"{dec}.cross_attention.dkey",
         f"{dec}.cross_attention.dvalue"),
        (f"{dec}.self_attention.dy", f"{dec}.norm1.dr1",
         *(f"{dec}.self_attention.d{part}" for part in ("query", "key", "value"))),
        (f"{enc}.feed_forward.dx1", f"{enc}.norm2.dr2", f"{enc}.feed_forward.dinput"),
        (f"{enc}.self_attention.dx", f"{enc}.norm1.dr1",
         *(f"{enc}.self_attention.d{part}" for part in ("query", "key", "value"))),
    ):
        np.testing.assert_allclose(
            found[total], sum(found[part] for part in parts), rtol=0, atol=3e-4
        )


def test_a_page_that_differs_from_the_model_is_refused():
    _, _, gradients = run(make_model())
    wrong = {name: gradient.copy() for name, gradient in gradients.items()}
    wrong["output.b"][3] += 1e-9
    with pytest.raises(RuntimeError, match=r"differ from model\.backward"):
        worked_example.compare(worked_example.Page(visible=False), wrong, gradients)


# The example is the article's, and says where the article is wrong


def test_words_ids_and_sizes_are_the_articles(capsys):
    text = page(capsys, "--part", "forward")
    assert "ids [[2, 5, 3]] = I love you" in text
    assert "ids [[1, 7, 4]] = <s> 我 爱" in text
    assert worked_example.TARGETS == [[7, 4, 6]]
    state = make_model().state_dict()
    np.testing.assert_array_equal(
        state["source_embedding.W"][[2, 5, 3]],
        [[0.1, 0.3, -0.2, 0.5], [0.8, -0.1, 0.4, -0.3], [-0.2, 0.6, 0.1, 0.7]],
    )
    assert sum(value.size for value in state.values()) == 706


def test_the_articles_mistakes_are_named_where_they_are(capsys):
    text = page(capsys, "--part", "forward")
    steps = re.split(r"^ ?(\d+)  (?=\S)", text, flags=re.M)
    by_step = {
        int(number): " ".join(part.replace("    ! ", "").split())
        for number, part in zip(steps[1::2], steps[2::2])
    }
    for step, words in (
        (1, "sin(0.01) = 0.0100, sin(0.02) = 0.0200"),
        (1, "0.5 for love and 0.3 for you, where the embeddings that it prints give 0.4100 "
            "and 0.1200"),
        (2, "turns its input to (3, 1, 4), length first"),
        (2, "with 6 of 6 weights exactly 1: no word sees another. Right is (1, 3, 4)"),
        (6, "爱 has the id 7 in one place of the article, and 4 in"),
        (7, "hides what is == 0: that hides the past and shows the future"),
        (14, "The article gives 你 no id"),
    ):
        assert words in by_step[step]


def test_positions_and_sums_are_right_and_the_articles_stand_below(capsys):
    found = {f"{path}.{name}": a for path, name, a in parse(page(capsys, "--part", "forward"))}
    right, wrong = found["source_embedding.P"], found["source_embedding.wrong P"]
    assert_shown(right[:, 2], [0.0, 0.01, 0.02])
    assert wrong[:, 2].tolist() == [0.0, 0.1, 0.2]
    differ = np.abs(right - wrong) > 0.0501
    assert np.argwhere(differ).tolist() == [[1, 2], [2, 2]]
    right, wrong = found["source_embedding.x"][0], found["source_embedding.wrong x"]
    assert_shown(right[1:, 2], [0.41, 0.12])
    assert (np.abs(right - wrong) > 0.0501).tolist() == differ.tolist()


def test_the_inverted_mask_shows_the_future(capsys):
    found = {f"{path}.{name}": a for path, name, a in parse(page(capsys, "--part", "forward"))}
    path = "decoder.layers.0.self_attention"
    right, wrong = found[f"{path}.A"][0], found[f"{path}.wrong A"][0]
    assert not np.triu(right, k=1).any()
    assert not np.tril(wrong[:, :2]).any()  # the last row sees nothing, and so sees all alike
    assert_shown(wrong[:, 2], 1 / 3)


# Training


def test_training_ends_when_the_three_words_are_right(capsys):
    text = page(capsys, "--part", "train")
    lines = [line for line in text.splitlines() if re.match(r" +\d+   \d\.\d{4} ", line)]
    rows = [re.split(r" {3,}", line.strip()) for line in lines]
    assert [int(row[0]) for row in rows] == list(range(len(rows)))
    losses = [float(row[1]) for row in rows]
    assert losses == sorted(losses, reverse=True)
    assert rows[-1][-2:] == ["我 爱 你", "我 爱 你"]
    assert all(row[-2:] != rows[-1][-2:] for row in rows[:-1])
    assert f"After {len(rows) - 1} steps both say 我 爱 你." in text
    loss, _, gradients = run(make_model())
    assert abs(losses[0] - loss) <= 0.5001e-4
    found = {name: array for _, name, array in parse(text)}
    assert_shown(found["db"], gradients["output.b"])
    np.testing.assert_allclose(found["b_new"], found["b"] - 0.1 * found["db"], rtol=0, atol=1e-4)


def test_training_that_does_not_get_there_says_so(capsys):
    text = page(capsys, "--part", "train", "--max-steps", "3")
    assert "Not right after 3 steps" in text


# The file of weights


def test_the_default_weights_are_short_and_hide_no_mistake():
    for name, value in make_model().state_dict().items():
        np.testing.assert_array_equal(value, np.round(value, 1))
        if name.endswith("gamma"):
            assert (value != 1.0).all()
        if name.endswith("beta"):
            assert (value != 0.0).all()


def test_weights_round_trip(capsys, tmp_path):
    path = tmp_path / "my.json"
    page(capsys, "--write-weights", str(path))
    written = json.loads(path.read_text(encoding="utf-8"))
    state = make_model().state_dict()
    assert list(written) == list(state)
    for name, value in state.items():
        np.testing.assert_array_equal(written[name], value)
    again = page(capsys, "--weights", str(path))
    assert "46 of 46 parameters from" in again
    assert again.split("\n\n", 1)[1] == page(capsys).split("\n\n", 1)[1]


def test_weights_are_not_written_over(capsys, tmp_path):
    path = tmp_path / "my.json"
    path.write_text("edited", encoding="utf-8")
    assert worked_example.main(["--write-weights", str(path)]) == 2
    assert path.read_text(encoding="utf-8") == "edited"
    assert "my.json" in capsys.readouterr().err


def test_written_weights_have_two_decimals(capsys, tmp_path):
    model = make_model()
    model.output.W.value += 0.12345
    worked_example.write_weights(tmp_path / "my.json", model)
    read = make_model(tmp_path / "my.json").output.W.value
    np.testing.assert_array_equal(read, np.round(model.output.W.value, 2))


def test_some_weights_of_ones_own(capsys, tmp_path):
    """Also integers, and more decimals than two; the rest keeps its values."""
    path = tmp_path / "my.json"
    own = {"encoder.layers.0.norm1.gamma": [1, 2, 0.125, -1], "output.b": [0.3333] * 10}
    path.write_text(json.dumps(own), encoding="utf-8")
    text = page(capsys, "--weights", str(path))
    assert "2 of 46 parameters from" in text
    found = gradients_on(text.split("\nTRAIN")[0])
    model = make_model()
    model.load_state_dict({name: np.array(v, float) for name, v in own.items()}, strict=False)
    for name, gradient in run(model)[2].items():
        assert_shown(found[name], gradient)
    shown = {f"{path}.{name}": array for path, name, array in parse(text.split("\nBACKWARD")[0])}
    np.testing.assert_array_equal(shown["encoder.layers.0.norm1.gamma"], [1, 2, 0.125, -1])
    np.testing.assert_array_equal(shown["output.b"], own["output.b"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"encoder.W": [1]}', "encoder.W is no parameter"),
        ('{"output.b": [1, 2]}', r"output.b has shape \(2,\), expected \(10,\)"),
        ('{"output.b": "many"}', "output.b is not a matrix of numbers"),
        ('{"output.W": [[1, 2], [3]]}', "output.W is not a matrix of numbers"),
        (json.dumps({"output.b": [float("nan")] * 10}), "no number up to a million"),
        (json.dumps({"output.b": [None] * 10}), "no number up to a million"),
        (json.dumps({"output.b": [1e7] * 10}), "no number up to a million"),
        ('{"output.b": [1], "output.b": [2]}', "output.b stands there twice"),
        ('{"output.b": [1 2]}', "line 1 column 17"),
        ("[1, 2]", "expected an object"),
        ("\xff", "my.json"),
    ],
)
def test_a_bad_file_of_weights_is_refused_before_anything_is_printed(
    capsys, tmp_path, text, message
):
    path = tmp_path / "my.json"
    path.write_bytes(text.encode("latin-1"))
    assert worked_example.main(["--weights", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.search(message, err)


def test_a_file_that_is_not_there(capsys, tmp_path):
    assert worked_example.main(["--weights", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err


# The page as such


def test_parts_print_their_part_and_all_prints_all(capsys):
    heads = {"forward": "FORWARD", "backward": "BACKWARD", "train": "TRAIN"}
    for part, head in heads.items():
        text = page(capsys, "--part", part)
        assert [other for other in heads.values() if f"\n{other}" in text] == [head]
    text = page(capsys)
    assert all(f"\n{head}" in text for head in heads.values())
    assert re.findall(r"^ ?(\d+)  \S", text, re.M) == [
        str(i) for i in [*range(1, 15), *range(14, 0, -1)]
    ]


def test_decimals(capsys):
    loss, _, _ = run(make_model())
    text = page(capsys, "--part", "forward", "--decimals", "7")
    assert f"loss = -mean(log p) = {loss:.7f} " in text


def test_lines_fit_on_the_page(capsys):
    assert max(map(width, page(capsys).splitlines())) <= worked_example.PAGE


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "gbk"])
def test_any_console_shows_the_page_in_columns(monkeypatch, encoding):
    buffer = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(buffer, encoding=encoding))
    assert worked_example.main([]) == 0
    sys.stdout.flush()
    text = buffer.getvalue().decode(encoding)
    assert ("\\u7231" in text) == (encoding != "gbk")
    found = gradients_on(text)
    for name, gradient in run(make_model())[2].items():
        assert_shown(found[name], gradient)


@pytest.mark.parametrize("arguments", [["--part", "sideways"], ["--lr", "0"], ["--decimals", "0"]])
def test_bad_options_are_refused(capsys, arguments):
    with pytest.raises(SystemExit) as info:
        worked_example.main(arguments)
    assert info.value.code == 2
