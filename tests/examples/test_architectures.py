"""The eight systems: counts against formulas and the article's numbers, gradients, the page."""

import contextlib
import importlib.util
import io
import re
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "examples" / "architectures.py"


def load():
    spec = importlib.util.spec_from_file_location("architectures", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


architectures = load()


@pytest.fixture(scope="module")
def run():
    """All systems, once: the text of the page, and the reports by name."""
    reports, show = {}, architectures.show

    def recording_show(report):
        reports[report.name] = report
        show(report)

    text = io.StringIO()
    architectures.show = recording_show
    try:
        with contextlib.redirect_stdout(text):
            assert architectures.main([]) == 0
    finally:
        architectures.show = show
    return text.getvalue(), reports


# What the parts of a model must count, by hand


def attention(d, biases=False):
    return 4 * d * d + 4 * d * biases


def feed_forward(d, d_ff, biases=True):
    return 2 * d * d_ff + (d_ff + d) * biases


def norms(d, n):
    return n * 2 * d


def encoder_layer(d, d_ff, biases=False):
    return attention(d, biases) + feed_forward(d, d_ff) + norms(d, 2)


def decoder_layer(d, d_ff, biases=False):
    return 2 * attention(d, biases) + feed_forward(d, d_ff) + norms(d, 3)


def post_ln(d, d_ff):
    """S4: biases everywhere, vocabularies of 10, one layer each."""
    embeddings, output = 2 * 10 * d, 10 * d + 10
    return embeddings + encoder_layer(d, d_ff, True) + decoder_layer(d, d_ff, True) + output


BY_HAND = {
    "S1": 12 * (6 * 768**2 + feed_forward(768, 3072) + norms(768, 3)) + 2 * 768**2,
    "S2": 500 * 512
    + 6 * (encoder_layer(512, 2048) + decoder_layer(512, 2048)) + 2 * norms(512, 1),
    "S3": 500 * 768 + 12 * encoder_layer(768, 3072) + norms(768, 1),
    "S4": post_ln(4, 16),
    "S4 wide": post_ln(512, 2048),
    "S5": post_ln(4, 16),
    "S6": 6 * decoder_layer(512, 2048) + norms(512, 1),
    "S7": 2 * 500 * 512
    + 6 * (encoder_layer(512, 2048) + decoder_layer(512, 2048)) + 2 * norms(512, 1)
    + 500 * 512 + 500,
    "S8": 99_145_728 + 2 * 768**2,
}


def test_every_system_is_there(run):
    text, reports = run
    assert list(reports) == list(BY_HAND)
    for name, report in reports.items():
        assert f"{name}  {report.title}\n" in text
        assert re.search(rf"^{name} +{re.escape(report.title)} +{report.count:,} ", text, re.M)


def test_counts_are_those_by_hand(run):
    _, reports = run
    assert {name: report.count for name, report in reports.items()} == BY_HAND


def test_the_page_shows_the_counts_of_the_parts(run):
    text, reports = run
    for report in reports.values():
        section = text.split(f"{report.name}  {report.title}\n")[1].split("\n  total")[0]
        for part in report.parts:
            line = re.search(rf"^  {part.name}  .*", section, re.M).group()
            assert f" {part.count:,} " in line
            if part.layers:
                assert f" {part.count // part.layers:,}  " in line
                assert f"x {part.layers} " in line
                assert part.count % part.layers == 0


def test_gradients_are_finite_and_only_those_of_the_key_biases_are_zero(run):
    _, reports = run
    for report in reports.values():
        assert report.finite
        assert all(0.0 < part.gradient_norm < float("inf") for part in report.parts)
        assert all(name.endswith("W_k.b") for name in report.without_gradient)
        with_attention_biases = report.name in ("S4", "S4 wide", "S5")
        assert len(report.without_gradient) == (3 if with_attention_biases else 0)


def test_the_articles_counts_come_out_exactly(run):
    text, reports = run
    parts = {part.name: part for part in reports["S8"].parts}
    per_layer = sum(part.count // 12 for part in parts.values() if part.layers == 12)
    assert per_layer == 8_262_144
    assert sum(part.count for part in parts.values() if part.layers == 12) == 99_145_728
    section = text.split("\nS8  ")[1]
    for words, article, here in (
        ("self-attention", "2.36M", 2_359_296),
        ("cross-attention, W_q and W_o", "1.18M", 1_179_648),
        ("feed-forward", "4.72M", 4_718_592),
        ("norms", "4.6K", 4_608),
        ("a layer", "8.26M", 8_262_144),
        ("twelve layers", "99M", 99_145_728),
    ):
        line = re.search(rf"^  {words}  .*{re.escape(article)}.*", section, re.M).group()
        assert line.endswith(f" {here:,}")
        scale, digits = (1e3, 1) if article.endswith("K") else (1e6, 2 * (here < 1e7))
        assert f"{here / scale:.{digits}f}" == article[:-1]


def test_both_ways_of_counting_are_shown(run):
    text, _ = run
    section = text.split("what it leaves out")[1]
    for words, layer, stack in (
        ("nothing: as above", "8,262,144", "99,145,728"),
        ("b_1 and b_2 of its feed-forward", "8,265,984", "99,191,808"),
        ("W_K and W_V of the memory", "8,262,144", "100,325,376"),
        ("both: all of S1", "8,265,984", "100,371,456"),
        ("b_1, b_2, W_K and W_V in each layer", "9,445,632", "113,347,584"),
    ):
        line = re.search(rf"^  {words}.*", section, re.M).group()
        assert line.split()[-2:] == [layer, stack]


def test_shapes_are_the_articles(run):
    _, reports = run
    shapes = {name: {s[0]: s[1] for s in report.shapes} for name, report in reports.items()}
    assert shapes["S1"]["K, V"] == "(2, 12, 12, 64)"
    assert shapes["S2"]["x, y ids"] == "(2, 4), (2, 4)"
    assert shapes["S2"]["output"] == "(2, 4, 512)"
    assert shapes["S3"]["logits"] == "(2, 10, 500)"
    assert "memory" not in shapes["S3"]
    assert shapes["S5"]["logits"] == "(1, 3, 10)"
    assert shapes["S6"]["y"] == shapes["S6"]["dx"] == "(4, 10, 512)"
    assert shapes["S6"]["dmemory"] == "(4, 12, 512)"
    assert shapes["S6"]["target mask"] == "(4, 1, 10, 10)"
    assert shapes["S6"]["memory mask"] == "(4, 1, 1, 12)"
    assert shapes["S7"]["p"] == "(4, 10, 500)"


def test_one_system_can_be_chosen(capsys):
    assert architectures.main(["--system", "S5"]) == 0
    text = capsys.readouterr().out
    assert "S5  The worked example" in text
    assert "S4  " not in text


def test_another_seed_draws_other_numbers_and_counts_the_same():
    first, second = architectures.build("S4", 0)[0], architectures.build("S4", 1)[0]
    assert first.count == second.count
    assert first.parts[0].gradient_norm != second.parts[0].gradient_norm


def test_an_unknown_system_is_refused_with_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        architectures.main(["--system", "S9"])
    assert "S8" in capsys.readouterr().err


def test_a_console_without_chinese(monkeypatch):
    buffer = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(buffer, encoding="ascii"))
    architectures.main(["--system", "S5"])
    architectures.sys.stdout.flush()
    assert b'"\\u6211 \\u7231 \\u4f60"' in buffer.getvalue()


def test_lines_are_at_most_as_wide_as_the_page(run):
    text, _ = run
    body = text.split("\n         system  ")[0]  # but for the table of the systems at the end
    assert max(map(architectures.width, body.splitlines())) <= 104
