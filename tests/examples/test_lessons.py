"""examples/lessons: they run, their assertions can fail, and notebooks and table are those of the
scripts."""

import ast
import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import npdecoder

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "lessons"
INSTALLED = Path(npdecoder.__file__).parents[1]
SOURCES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.py"))}
README = (FOLDER / "README.md").read_text(encoding="utf-8")

each_lesson = pytest.mark.parametrize("name", SOURCES)


def cells(source):
    """The cells of a percent script, [("markdown" or "code", text), ...]."""
    header, *parts = re.split(r"^(# %%.*)\n", source, flags=re.M)
    assert re.fullmatch(r"# ---\n(#   ?.*\n|# jupyter:\n)*# ---\n\n", header)
    found = []
    for mark, text in zip(parts[::2], parts[1::2]):
        kind = {"# %%": "code", "# %% [markdown]": "markdown"}[mark]
        text = text.strip("\n")
        if kind == "markdown":
            lines = text.split("\n")
            assert all(line == "#" or line.startswith("# ") for line in lines)
            text = "\n".join(line[2:] for line in lines)
        found.append((kind, text))
    return found


def markdown(name):
    return "\n\n".join(text for kind, text in cells(SOURCES[name]) if kind == "markdown")


def minutes(name):
    return int(re.search(r"^\*\*Time:\*\* about (\d+) minutes", markdown(name), re.M).group(1))


def test_there_are_twelve_lessons():
    assert [name[:3] for name in SOURCES] == [f"{n:02}_" for n in range(1, 13)]


@each_lesson
def test_it_runs_without_a_warning(name, tmp_path):
    run = subprocess.run(
        [sys.executable, "-W", "error", str(FOLDER / f"{name}.py")],
        capture_output=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"},
        encoding="utf-8",
        timeout=60,
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.isascii()  # for every console
    assert list(tmp_path.iterdir()) == []
    assert {"1", "2", "3"} <= set(re.findall(r"^(\d)\. ", run.stdout, re.M))


# Notebooks


@each_lesson
def test_its_notebook_has_the_same_cells(name):
    notebook = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))
    found = [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]
    assert found == cells(SOURCES[name])


@each_lesson
def test_its_notebook_is_clean(name):
    """No outputs, no metadata of an editor, and ids that are each there once."""
    notebook = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert all(cell["metadata"] == {} for cell in notebook["cells"])
    assert set(notebook["metadata"]) == {"jupytext", "kernelspec"}
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])


def test_no_notebook_is_without_its_lesson():
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(SOURCES)


def test_the_parser_of_cells():
    script = "# ---\n# jupyter:\n#   a: b\n# ---\n\n# %% [markdown]\n# # T\n#\n# t\n\n# %%\nx = 1\n"
    assert cells(script) == [("markdown", "# T\n\nt"), ("code", "x = 1")]


# What every lesson says


@each_lesson
def test_its_first_cell(name):
    kind, text = cells(SOURCES[name])[0]
    assert kind == "markdown"
    assert text.startswith(f"# Lesson {int(name[:2])}. ")
    for what in ("You need to know", "You will be able to", "Time"):
        assert f"**{what}:**" in text
    assert "with the exercises on paper" in text
    assert 30 <= minutes(name) <= 120


@each_lesson
def test_it_ends_with_questions_and_their_answers(name):
    *_, (kind, questions), (last, answers) = cells(SOURCES[name])
    assert (kind, last) == ("markdown", "code")
    assert "## To do on paper" in questions
    numbers = re.findall(r"^(\d)\. ", questions.split("## To do on paper")[1], re.M)
    assert numbers == ["1", "2", "3"]
    assert "assert" in answers
    assert "print(" in answers


@each_lesson
def test_what_it_names_is_there(name):
    for path in re.findall(r"`([\w/]+\.py)`", SOURCES[name]):
        assert any((folder / path).exists() for folder in (ROOT, INSTALLED, FOLDER)), path
    for number, file in re.findall(r"[Ll]essons? (\d+) \(`(\w+)\.py`\)", SOURCES[name]):
        assert file in SOURCES
        assert int(file[:2]) == int(number)


# The numbers of examples/pitfalls.py that lessons refer to, and what they stand for
PITFALLS = {
    6: "-1e9 for minus infinity",
    7: "The causal triangle at the wrong corner",
    9: "Scores divided by sqrt(d_model)",
    15: "LayerNorm backward with gamma left out of the sums",
    17: "Softmax backward divided by the batch size",
    22: "dW[ids] += dy",
    23: "The tied output's gradient dropped",
    24: "Cross-entropy off by a factor T",
    25: "The mean over ignored targets",
    26: "A tied parameter updated twice",
}


def test_pitfalls_have_the_numbers_that_lessons_use():
    source = (ROOT / "examples" / "pitfalls.py").read_text(encoding="utf-8")
    titles = re.findall(r'^@pitfall\(\n    "([^"]+)"', source, re.M)
    used = {int(n) for text in SOURCES.values() for n in re.findall(r"pitfalls\.py (\d+)", text)}
    assert {number: titles[number - 1] for number in used} == PITFALLS


# The table


def test_the_table_lists_the_lessons_with_their_times():
    rows = re.findall(r"^\| \[(\w+)\]\((\w+)\.py\) \| [^|]+ \| (\d+) \|", README, re.M)
    assert rows == [(name, name, str(minutes(name))) for name in SOURCES]


def test_the_readme_says_how_and_on_what_terms():
    assert "python examples/lessons/01_chain_rule.py" in README
    assert "jupytext --update --to ipynb examples/lessons/*.py" in README
    assert "CC BY 4.0" in README
    assert "MIT" in README


# The assertions


def called(tree, name):
    """The calls of a function of this name."""
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
    ]


@each_lesson
def test_it_asserts_what_it_states(name):
    tree = ast.parse(SOURCES[name])
    asserts = [node for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    compared = called(tree, "assert_allclose") + called(tree, "agree")
    assert len(asserts) + len(compared) >= 10
    # every gradcheck is asserted, to pass or to fail
    verdicts = [node for node in asserts if "ok" in ast.unparse(node)[-6:]]
    assert len(verdicts) == len(called(tree, "gradcheck")) >= 1


# A right formula and a wrong one: with the wrong one the lesson must stop.
MUTATIONS = {
    "01_chain_rule": [
        ("dx = 2 * x\n", "dx = x\n"),
        ("dx = dy @ W.T\n", "dx = dy @ W.T / 2\n"),
        ("return dz @ self.A.value.T + dz @ self.B.value.T", "return dz @ self.A.value.T"),
    ],
    "02_softmax": [
        ("J = np.diag(y) - np.outer(y, y)\nprint", "J = np.diag(y) + np.outer(y, y)\nprint"),
        ("dx = y * (dy - mean)", "dx = dy - mean"),
        ("return y * (dy - (dy * y).sum(", "return y * (dy - dy.mean("),
        ("d - np.exp(log_y) * d.sum(", "d - np.exp(log_y) * d.mean("),
    ],
    "03_cross_entropy": [
        ("dx = p - onehot\n", "dx = onehot - p\n"),
        ("(softmax(logits) - q) / N", "(softmax(logits) - q) / targets.size"),
        ("N = counted.sum()", "N = counted.size"),
        ("onehot + self.e / V", "onehot + self.e / (V - 1)"),
    ],
    "04_layer_norm": [
        ("dvar = -1 / 2 * rstd**3 * drstd", "dvar = -1 / 2 * rstd**2 * drstd"),
        ("rstd * (dx_hat - m1 - x_hat * m2)", "rstd * (dx_hat - x_hat * m2)"),
        ("rstd * (dx_hat - m1 - x_hat * m2)", "rstd * (dx_hat - m1)"),
        ("three_terms(x_hat, rstd, dy * self.gamma.value)", "three_terms(x_hat, rstd, dy)"),
    ],
    "05_residual_path": [
        ("return dy + self.f.backward(ctx, dy)", "return self.f.backward(ctx, dy)"),
        ("dy + self.norm.backward(of_norm, dh)", "self.norm.backward(of_norm, dy + dh)"),
        ("return dr + self.f.backward(of_f, dr)", "return dy + self.f.backward(of_f, dr)"),
    ],
    "06_attention": [
        ("dv = A.T @ dy", "dv = A.T @ dy / 2"),
        ("dS = A * (dA - (dA * A).sum(axis=-1, keepdims=True))\ndq", "dS = A * dA\ndq"),
        ("dk = dS.swapaxes(-1, -2) @ q / root", "dk = dS.swapaxes(-1, -2) @ q"),
        ("return dq + dk + dv", "return dq + dk"),
    ],
    "07_masks": [
        ("A = e / (Z + (Z == 0))", "A = (e + (Z == 0)) / (Z + 4 * (Z == 0))"),
        ("both = keep[:, None, None, :] & causal", "both = keep[:, None, :, None] & causal"),
        ("mask, turned = causal_mask(4), ~", "turned, mask = causal_mask(4), ~"),
    ],
    "08_heads": [
        ("heads = x.reshape(B, T, h, d).swapaxes(1, 2)", "heads = x.reshape(B, h, T, d)"),
        ("dcontext = dy @ self.W_o.value[of_v].T", "dcontext = dy @ self.W_o.value[:8].T"),
        ("dquery += dq @", "dquery = dq @"),
    ],
    "09_cross_attention": [
        ("dmemory = dmemory + dkey + dvalue", "dmemory = dmemory + dkey"),
        ("dK = sum(dK for dK, _ in of_layers)", "dK = of_layers[0][0]"),
        ("self.W_v.grad += rows_product(memory, merge_heads(dV))",
         "self.W_v.grad += rows_product(memory, merge_heads(dK))"),
        ("dK, dV = dK + dK_layer, dV + dV_layer", "dK, dV = dK_layer, dV_layer"),
    ],
    "10_embeddings": [
        ("dW = onehot.T @ dy\n", "dW = np.minimum(onehot.T, 1) @ dy / 2\n"),
        ("np.add.at(all_added, ids, dy)", "all_added[ids] += dy"),
        ("self.W.grad += self.scale * onehot.T @", "self.W.grad += onehot.T @"),
        ("self.W.grad += dlogits.reshape(-1, V).T @ x.reshape(-1, d)", "x = x"),
    ],
    "11_one_step": [
        ("dlogits = (p - onehot) / 2\n", "dlogits = p - onehot\n"),
        ("dhidden = np.where(hidden > 0, dactive", "dhidden = np.where(hidden > -9, dactive"),
        ("dx = dy + dhidden @ W1.T", "dx = dhidden @ W1.T"),
        ("W1 - lr * dW1", "W1 + lr * dW1"),
    ],
    "12_decoder_layer": [
        ("dx2 = dy + self.norm_backward", "dx2 = self.norm_backward"),
        ("return dquery, dkey + dvalue", "return dquery, dkey"),
        ("dx1 = dx2 + self", "dx1 = dy + self"),
        ("beta.grad += dy.sum(axis=(0, 1))", "beta.grad += (dy * x_hat).sum(axis=(0, 1))"),
    ],
}


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [(name, *pair) for name, pairs in MUTATIONS.items() for pair in pairs],
)
def test_a_wrong_formula_stops_it(name, right, wrong):
    assert SOURCES[name].count(right) == 1
    program = compile(SOURCES[name].replace(right, wrong), name, "exec")
    with (
        np.printoptions(),
        contextlib.redirect_stdout(io.StringIO()),
        pytest.raises(AssertionError),
    ):
        exec(program, {"__name__": "__main__"})


def test_every_lesson_is_mutated():
    assert set(MUTATIONS) == set(SOURCES)
