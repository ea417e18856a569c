"""The page without a browser: its numbers, labels, formulas, lines of source, size."""

from __future__ import annotations

import html.parser
import inspect
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import npdecoder.blocks
import npdecoder.layers
from npdecoder import Layer, LayerNorm, Trace
from npdecoder.page import Tokens, build, page, write_page
from npdecoder.page.diagram import diagram
from npdecoder.page.formulas import FORMULAS, math
from npdecoder.traced import LARGEST, sentence_pair, translated, worked_example
from npdecoder.translator import Translator


def data_of(document: str) -> dict[str, Any]:
    text = re.search(r'<script type="application/json" id="data">(.*?)</script>', document, re.S)
    assert text is not None
    found: dict[str, Any] = json.loads(text.group(1))
    return found


@pytest.fixture(scope="module")
def document() -> str:
    traced = worked_example()
    return page(traced.trace, traced.tokens, traced.title)


def entry(data: dict[str, Any], layer: str, method: str, name: str) -> dict[str, Any]:
    step = next(s for s in data["steps"] if (s["layer"], s["method"]) == (layer, method))
    found: dict[str, Any] = next(a for a in step["arrays"] if a["name"] == name)
    return found


def test_the_worked_example_is_one_file_of_less_than_a_megabyte(document: str) -> None:
    assert 50_000 < len(document.encode()) < 1_000_000
    assert "I love you → 我 爱 你" in document
    assert "{{" not in document.split('id="data"')[0]


def test_nothing_is_loaded_from_elsewhere(document: str) -> None:
    assert not re.search(r'(?:src|href)\s*=\s*"', document.replace('href: draw', ""))
    assert "@import" not in document
    assert "fetch(" not in document
    assert not re.search(r"url\(", document)


def test_the_document_is_well_formed(document: str) -> None:
    class Checker(html.parser.HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.open: list[str] = []

        def handle_starttag(self, tag: str, attrs: Any) -> None:
            if tag not in ("meta", "input"):
                self.open.append(tag)

        def handle_startendtag(self, tag: str, attrs: Any) -> None:
            pass

        def handle_endtag(self, tag: str) -> None:
            assert self.open.pop() == tag

    checker = Checker()
    checker.feed(document)
    assert not checker.open


def test_every_number_is_the_traces_own(document: str) -> None:
    data, traced = data_of(document), worked_example()
    assert len(data["steps"]) == len(traced.trace)
    count = 0
    for step, call in zip(data["steps"], traced.trace):
        assert (step["layer"], step["method"]) == (call.layer, call.method)
        arrays = call.arrays()
        assert [a["name"] for a in step["arrays"]] == list(arrays)
        for a in step["arrays"]:
            numbers = np.array([float(v) for v in data["numbers"][a["numbers"]]])
            np.testing.assert_array_equal(numbers.reshape(a["shape"]), arrays[a["name"]])
            assert not a["cut"]
            count += numbers.size
    assert count > 5000


@pytest.mark.parametrize(("layer", "method", "name", "rows", "columns"), [
    ("decoder.layers.0.cross_attention.attention", "forward", "A", "t", "s"),
    ("decoder.layers.0.cross_attention.attention", "backward", "dS", "t", "s"),
    ("decoder.layers.0.self_attention.attention", "backward", "dA", "t", "t"),
    ("encoder.layers.0.self_attention.attention", "forward", "S", "s", "s"),
    ("decoder.layers.0.cross_attention.attention", "forward", "k", "s", None),
    ("decoder.layers.0.cross_attention.attention", "backward", "dv", "s", None),
    ("decoder.layers.0.cross_attention.attention", "backward", "dq", "t", None),
    ("decoder.layers.0.cross_attention", "backward", "dkey", "s", None),
    ("decoder.layers.0.cross_attention.W_k", "backward", "dx", "s", None),
    ("decoder.layers.0.self_attention.W_k", "backward", "dx", "t", None),
    ("encoder.layers.0.feed_forward.linear1", "forward", "x", "s", None),
    ("output", "forward", "y", "t", "v"),
    ("criterion", "backward", "dlogits", "t", "v"),
])  # fmt: skip
def test_rows_and_columns_are_named_by_their_words(
    document: str, layer: str, method: str, name: str, rows: str, columns: str | None
) -> None:
    words = {
        "s": ["I", "love", "you"],
        "t": ["<s>", "我", "爱"],
        "v": ["0", "<s>", "2", "3", "爱", "5", "你", "我", "8", "9"],
    }
    found = entry(data_of(document), layer, method, name)
    assert found["rows"] == words[rows]
    if columns is not None:
        assert found["columns"] == words[columns]


def test_the_lines_are_those_of_the_source_without_the_docstring(document: str) -> None:
    data = data_of(document)
    (source,) = data["sources"]["LayerNorm.backward"]
    assert source["file"] == "npdecoder/layers/layer_norm.py"
    lines = Path(inspect.getfile(LayerNorm)).read_text("utf-8").split("\n")
    assert len(source["lines"]) > 5
    for number, text in source["lines"]:
        assert lines[number - 1].strip() == text.strip()
        assert '"""' not in text
    assert source["lines"][0][1].startswith("def backward(")
    assert source["lines"][-1][1].strip().startswith("return")


def test_every_layer_and_block_has_its_formulas_forward_and_backward() -> None:
    modules = (npdecoder.layers, npdecoder.blocks)
    names = {n for m in modules for n, c in vars(m).items()
             if inspect.isclass(c) and issubclass(c, Layer)}
    assert names <= {cls for cls, _, _ in FORMULAS}
    for forward, backward in FORMULAS.values():
        for line in (*forward, *backward):
            assert ElementTree.fromstring(math(line)).tag == "math"
            outside = re.sub(r"\{[^{}]*\}|\[[^]]*\]", "", line)
            assert outside.count(" = ") + outside.count("->") == 1, f"not one formula: {line}"


@pytest.mark.parametrize(("text", "expected"), [
    ("y", "<mi>y</mi>"),
    ("x_hat", "<mover><mi>x</mi><mo>^</mo></mover>"),
    ("W^T", "<msup><mi>W</mi><mi>T</mi></msup>"),
    ("frac{a}{b}", "<mfrac><mrow><mi>a</mi></mrow><mrow><mi>b</mi></mrow></mfrac>"),
    ("sqrt{2}", "<msqrt><mrow><mn>2</mn></mrow></msqrt>"),
    ("sum_{i}", "<munder><mo>∑</mo><mrow><mi>i</mi></mrow></munder>"),
    ("a_1^2", "<msubsup><mi>a</mi><mn>1</mn><mn>2</mn></msubsup>"),
    ("a < b", "<mi>a</mi><mo>&lt;</mo><mi>b</mi>"),
    ("a b", '<mi>a</mi><mspace width="0.17em"/><mi>b</mi>'),
    ("a * b", "<mi>a</mi><mo>∘</mo><mi>b</mi>"),
    ("f(a) b", '<mi>f</mi><mo>(</mo><mi>a</mi><mo>)</mo><mspace width="0.17em"/><mi>b</mi>'),
    ("A_dropped", "<msub><mi>A</mi><mi>dropped</mi></msub>"),
    ("dx_hat", "<mrow><mi>d</mi><mover><mi>x</mi><mo>^</mo></mover></mrow>"),
    ("h1_n", "<msub><mi>h1</mi><mi>n</mi></msub>"),
])  # fmt: skip
def test_the_notation_of_formulas(text: str, expected: str) -> None:
    assert math(text) == f'<math display="block"><mrow>{expected}</mrow></math>'


@pytest.mark.parametrize("text", ["a }", "{ a", "frac{a}"])
def test_a_formula_that_does_not_close_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="formula"):
        math(text)


def test_the_drawing_has_a_box_for_every_part_and_is_well_formed() -> None:
    for norm in ("post", "pre"):
        traced = worked_example() if norm == "post" else sentence_pair("a b", "c d")
        svg = ElementTree.fromstring(diagram(traced.trace.names))
        boxes = {name for g in svg.iter("g") for name in g.attrib["data-layer"].split()}
        for part in ("self_attention", "cross_attention", "feed_forward", "residual3", "norm1"):
            assert f"decoder.layers.0.{part}" in boxes
        assert {"source_embedding", "target_embedding", "output", "criterion"} <= boxes
        assert ("decoder.norm" in boxes) == (norm == "pre")


def test_a_large_array_is_cut_and_the_page_says_so() -> None:
    layer = LayerNorm(200)
    with Trace(layer) as trace:
        layer(np.ones((2, 90, 200), np.float32))
    data = data_of(page(trace, Tokens([], []), "large"))
    found = entry(data, "", "forward", "x")
    assert found["cut"]
    assert found["shape"] == [2, 90, 200]
    assert found["shown"] == [2, 64, 64]
    assert len(data["numbers"][found["numbers"]]) == 2 * 64 * 64


def test_nan_and_infinity_are_shown_as_such() -> None:
    layer = LayerNorm(2)
    with Trace(layer) as trace, np.errstate(all="ignore"):
        layer(np.array([[np.nan, 1.0], [np.inf, 2.0]], np.float32))
    data = data_of(page(trace, Tokens([], []), "odd"))
    found = entry(data, "", "forward", "x")
    assert data["numbers"][found["numbers"]] == ["nan", 1.0, "inf", 2.0]


def test_words_cannot_break_the_page() -> None:
    traced = sentence_pair("</script> a", "<b> c")
    document = page(traced.trace, traced.tokens, "<title> & </title>")
    assert document.count("</script>") == 2
    assert "<title>&lt;title&gt; &amp; &lt;/title&gt;</title>" in document
    assert data_of(document)


def test_a_file_is_written_whole(tmp_path: Path) -> None:
    traced = worked_example()
    write_page(tmp_path / "page.html", traced.trace, traced.tokens, traced.title)
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]
    assert (tmp_path / "page.html").read_text("utf-8").endswith("</html>\n")


# What is traced


def test_the_worked_example_is_the_articles() -> None:
    traced = worked_example()
    np.testing.assert_array_equal(traced.trace[""]["source_ids"], [[2, 5, 3]])
    np.testing.assert_array_equal(traced.trace[""]["target_ids"], [[1, 7, 4]])
    np.testing.assert_array_equal(traced.trace["criterion"]["targets"], [[7, 4, 6]])
    assert traced.tokens.target == ["<s>", "我", "爱"]


def test_own_ids_of_the_worked_examples_model() -> None:
    traced = worked_example(([9, 8], [3, 3, 2, 1]))
    np.testing.assert_array_equal(traced.trace[""]["target_ids"], [[1, 3, 3, 2]])
    np.testing.assert_array_equal(traced.trace["criterion"]["targets"], [[3, 3, 2, 1]])
    for bad in (([10], [1]), ([1], [-1])):
        with pytest.raises(IndexError):
            worked_example(bad)
    with pytest.raises(ValueError, match="source"):
        worked_example(([], [1]))


def test_ones_own_sentence_pair_needs_no_model() -> None:
    traced = sentence_pair("How are you?", "你 好 吗")
    assert traced.tokens.source == ["how", "are", "you", "?", "<eos>"]
    assert traced.tokens.target == ["<bos>", "你", "好", "吗"]
    assert sentence_pair("a", "b", seed=1).loss != sentence_pair("a", "b", seed=2).loss
    with pytest.raises(ValueError, match="no words"):
        sentence_pair(" ", "b")


def test_a_trained_model_is_read_in_float64_and_left_as_it_was() -> None:
    from npdecoder import Transformer, TransformerConfig
    from npdecoder.text import Vocabulary

    vocabulary = Vocabulary(["a", "b"])
    sizes = {"d_model": 4, "num_heads": 2, "num_encoder_layers": 1, "num_decoder_layers": 1}
    model = Transformer(TransformerConfig(6, 6, pad_id=0, **sizes), 0)
    traced = translated(Translator(model, vocabulary, vocabulary), "a b", "b")
    assert model.output.W.dtype == np.float32
    assert traced.trace["output"]["y"].dtype == np.float64
    assert traced.tokens.target == ["<bos>", "b"]
    wide = {**sizes, "d_model": LARGEST}
    large = Transformer(TransformerConfig(6, 6, pad_id=0, **wide), 0)
    with pytest.raises(ValueError, match="more than a page can show"):
        translated(Translator(large, vocabulary, vocabulary), "a b", "b")


def test_of_a_layer_by_itself_no_parts_are_drawn_that_it_does_not_have() -> None:
    assert diagram({"": LayerNorm(3)}) == ""
    traced = worked_example()
    parts = {name: part for name, part in traced.trace.names.items() if "encoder" not in name}
    assert "encoder" not in diagram(parts)


def test_the_drawing_has_the_memory_that_all_layers_share() -> None:
    from npdecoder import Transformer, TransformerConfig

    sizes = {"d_model": 4, "num_heads": 2, "num_encoder_layers": 1, "num_decoder_layers": 2}
    drawings = [
        diagram(Trace(Transformer(TransformerConfig(6, 6, cross_attention=kind, **sizes))).names)
        for kind in ("per_layer", "shared")
    ]
    boxes = [re.findall(r'data-layer="([^"]*)"', drawing) for drawing in drawings]
    assert [layer for layer in boxes[1] if layer not in boxes[0]] == ["decoder.memory_projection"]
    assert "memory K, V" in drawings[1]


class Doubled:
    def forward(self, x: Any) -> Any:
        y = 2 * x
        return y, None

    def backward(self, ctx: Any, dy: Any) -> Any:
        dx = 2 * dy
        return dx


def page_of(layer: Any) -> dict[str, Any]:
    with Trace(layer) as trace:
        layer.backward(layer.forward(np.ones((2, 3)))[1], np.ones((2, 3)))
    return data_of(page(trace, Tokens([], []), "mine"))


def test_a_layer_of_ones_own_has_its_lines_but_no_formulas() -> None:
    data = page_of(Doubled())
    assert [step["method"] for step in data["steps"]] == ["forward", "backward"]
    assert data["formulas"] == {}
    (forward,) = data["sources"]["Doubled.forward"]
    assert Path(forward["file"]).name == Path(__file__).name
    first = inspect.getsourcelines(Doubled.forward)[1]
    assert forward["lines"] == [
        [first, "def forward(self, x: Any) -> Any:"], [first + 1, "    y = 2 * x"],
        [first + 2, "    return y, None"],
    ]  # fmt: skip


def test_a_layer_that_was_typed_at_a_prompt_has_no_lines() -> None:
    names: dict[str, Any] = {}
    exec(inspect.getsource(Doubled), {"Any": Any}, names)
    data = page_of(names["Doubled"]())
    assert data["sources"]["Doubled.backward"] == [{"file": "", "lines": []}]
    assert data["numbers"] == page_of(Doubled())["numbers"]


def test_a_page_that_is_too_large_at_any_cut_is_one_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build, "BUDGET", 1)
    layer = LayerNorm(9, dtype=np.float64)
    with Trace(layer) as trace:
        layer(np.arange(90.0).reshape(10, 9))
    x = entry(data_of(page(trace, Tokens([], []), "mine")), "", "forward", "x")
    assert (x["shape"], x["shown"], x["cut"]) == ([10, 9], [8, 8], True)
    assert min(build.LIMITS) == 8


def test_rows_and_columns_of_a_source_as_long_as_the_target_have_the_right_words() -> None:
    """By where a call stands, not by its length: here both sides have three words."""
    traced = worked_example()
    data = data_of(page(traced.trace, traced.tokens, traced.title))
    source, target = traced.tokens.source, traced.tokens.target
    for step, call in zip(data["steps"], traced.trace):
        outer = [call]
        while outer[-1].parent is not None:
            outer.append(traced.trace.calls[outer[-1].parent])
        for array in step["arrays"]:
            if any(c.method.startswith("encode") for c in outer):
                assert array["rows"] != target, (call.layer, array["name"])
            if call.layer.startswith("decoder.layers.0.feed_forward"):
                assert array["rows"] != source, (call.layer, array["name"])


def test_a_page_of_a_wide_model_stays_small() -> None:
    from npdecoder import Transformer, TransformerConfig
    from npdecoder.text import Vocabulary

    words = [f"w{i}" for i in range(200)]
    vocabulary = Vocabulary(words)
    sizes = {"d_model": 64, "num_heads": 4, "num_encoder_layers": 1, "num_decoder_layers": 1}
    model = Transformer(TransformerConfig(204, 204, pad_id=0, **sizes), 0)
    traced = translated(Translator(model, vocabulary, vocabulary), " ".join(words[:9]),
                        " ".join(words[:8]))  # fmt: skip
    assert len(page(traced.trace, traced.tokens, traced.title).encode()) < 1_000_000
