"""The rules of the house: which module may import which, and what every file must say."""

import ast
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import npdecoder

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(npdecoder.__file__).parent  # the installed one, where the tests lie elsewhere

# Every module of the package, from the bottom to the top, and what it may import of the package.
# A folder stands for all its modules. A new module must be given its place here.
CALCULUS = ("core", "masks", "sums", "layers")
WIRING = (*CALCULUS, "blocks")
MODELS = (*WIRING, "models")
TOOLS = ("files", "trace", "hints", "gradcheck", "optim", "text")
ON_MODELS = ("training", "decoding_state", "decoding", "checkpoint", "interop")
PRODUCTS = ("translator", "character_model")
TASKS = sorted((PACKAGE / "exercises" / "tasks").glob("*.py"))

MAY_IMPORT = {
    "core": (),
    "masks": ("core",),
    "sums": ("core",),
    "replicas": ("core",),
    # the checker: it needs no layer, and looks at any object with forward and backward
    "files": ("core",),
    "trace": ("core", "files"),
    "hints.facts": ("core", "trace"),
    "hints.tensors": ("core", "hints"),
    "hints.rules": ("core", "hints"),
    "hints.parts": ("core", "trace", "hints"),
    "hints": ("hints",),
    "gradcheck": ("core", "hints"),
    "optim": ("core",),
    "text": (),
    "phrase_book": ("text",),
    "console": ("core",),
    # one operation a file
    "layers.linear": ("core", "masks", "sums"),
    "layers.embedding": ("core", "masks", "sums"),
    "layers.positions": ("core", "masks", "sums"),
    "layers.softmax": ("core", "masks", "sums"),
    "layers.layer_norm": ("core", "masks", "sums"),
    "layers.activations": ("core", "masks", "sums"),
    "layers.dropout": ("core", "masks", "sums"),
    "layers.attention": ("core", "masks", "sums", "layers.softmax", "layers.dropout"),
    "layers.tiled_attention": ("core", "masks", "layers.attention", "layers.dropout"),
    "layers.cross_entropy": ("core", "masks", "sums", "layers.softmax"),
    "layers": ("layers",),
    # the wiring
    "blocks.residual": CALCULUS,
    "blocks.cache": CALCULUS,
    "blocks.multi_head_attention": (*CALCULUS, "blocks.cache"),
    "blocks.feed_forward": CALCULUS,
    "blocks.encoder": WIRING,
    "blocks.decoder": WIRING,
    "blocks": ("blocks",),
    # the models
    "models.config": WIRING,
    "models.token_model": MODELS,
    "models.transformer": MODELS,
    "models.language_model": MODELS,
    "models": ("models",),
    # what uses them
    "training": (*MODELS, "optim", "text", "replicas"),
    "decoding_state": MODELS,
    "decoding": (*MODELS, "decoding_state"),
    "checkpoint": (*MODELS, "optim", "files"),
    "interop": MODELS,
    "translator": (*MODELS, "files", "text", *ON_MODELS),
    "character_model": (*MODELS, "files", "text", *ON_MODELS),
    "page.formulas": (),
    "page.diagram": (),
    "page.build": ("core", "files", "trace", "page.formulas", "page.diagram"),
    "page": ("page",),
    "traced": (*MODELS, "text", "trace", "page", "translator"),
    "runs": (*MODELS, *TOOLS, *ON_MODELS, *PRODUCTS, "replicas"),
    "gradcheck_all": (*MODELS, "gradcheck"),
    "exercises": (),
    "exercises.catalogue": ("core",),
    "exercises.submission": ("core",),
    "exercises.child": ("core", "exercises.submission"),
    "exercises.grading": ("core", "gradcheck", "exercises"),
    "exercises.planted": WIRING,
    "exercises.bugs": (*MODELS, "gradcheck", "optim", "exercises"),
    "exercises.command": ("console", "exercises"),
    # the top
    "npdecoder": (*MODELS, *TOOLS, *ON_MODELS, *PRODUCTS),
    # what a reader edits: nothing but the public names
    **dict.fromkeys((f"exercises.tasks.{path.stem}" for path in TASKS), ("npdecoder",)),
    "cli": (*MODELS, *TOOLS, *ON_MODELS, *PRODUCTS, "npdecoder", "phrase_book", "console", "runs",
            "replicas", "gradcheck_all", "page", "traced", "exercises"),
    "__main__": ("cli",),
}

# The public names, and the modules they come from
PUBLIC = {
    "core": ("Parameter", "Layer"),
    "masks": ("causal_mask", "padding_mask", "target_mask"),
    "layers.linear": ("Linear",),
    "layers.embedding": ("Embedding", "Unembedding"),
    "layers.positions": ("SinusoidalPositions", "LearnedPositions"),
    "layers.softmax": ("Softmax", "softmax", "log_softmax"),
    "layers.layer_norm": ("LayerNorm",),
    "layers.activations": ("ReLU", "GELU"),
    "layers.dropout": ("Dropout",),
    "layers.attention": ("ScaledDotProductAttention",),
    "layers.cross_entropy": ("CrossEntropy",),
    "blocks.multi_head_attention": ("MultiHeadAttention",),
    "blocks.feed_forward": ("FeedForward",),
    "blocks.encoder": ("EncoderLayer", "Encoder"),
    "blocks.decoder": ("DecoderLayer", "Decoder"),
    "models.config": ("TransformerConfig", "LanguageModelConfig"),
    "models.transformer": ("Transformer",),
    "models.language_model": ("LanguageModel",),
    "gradcheck": ("gradcheck",),
    "optim": ("SGD", "Adam", "AdamW", "clip_grad_norm"),
    "decoding": ("greedy_decode", "sample", "generate", "beam_search"),
    "files": ("save_weights", "load_weights"),
    "checkpoint": ("save_checkpoint", "load_checkpoint"),
}

TOP_LEVEL = {
    "npdecoder", "tests", "examples", "setup.cfg", "README.md",
    "pyproject.toml", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "MANIFEST.in",
}  # fmt: skip
MADE_BY_TOOLS = ("build", "dist", "__pycache__", "PKG-INFO")


# Reading the source


def module_name(path):
    """npdecoder/layers/linear.py -> layers.linear; a package has the name of its folder."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join(parts) or "npdecoder"


SOURCES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text("utf-8")) for name, path in SOURCES.items()}
LAYER_FILES = [name for name in SOURCES if name.startswith("layers.")]
BLOCK_FILES = [name for name in SOURCES if name.startswith("blocks.")]

each_module = pytest.mark.parametrize("module", SOURCES)


def imported(module):
    """Every module that a file imports, in full: wherever the import stands, in whatever `if`."""
    found = set()
    package = ["npdecoder", *module.split(".")] if module != "npdecoder" else ["npdecoder"]
    if SOURCES[module].name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) + 1 - node.level] if node.level else []
            source = ".".join([*start, *([node.module] if node.module else [])])
            for alias in node.names:
                name = f"{source}.{alias.name}"
                found.add(name if name.removeprefix("npdecoder.") in SOURCES else source)
    return found


def imported_of_package(module):
    names = {name for name in imported(module) if name.split(".")[0] == "npdecoder"}
    return {name.removeprefix("npdecoder.") for name in names}


GRAPH = {module: imported_of_package(module) for module in SOURCES}


def functions(tree):
    """(class or None, function) for every function at the top and in every class."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield None, node
        elif isinstance(node, ast.ClassDef):
            yield from ((node, item) for item in node.body if isinstance(item, ast.FunctionDef))


# Imports point one way


@each_module
def test_every_module_has_its_place(module):
    assert module in MAY_IMPORT, f"give {module} a place in MAY_IMPORT"


@each_module
def test_module_imports_only_what_lies_below_it(module):
    allowed = MAY_IMPORT.get(module, ())
    wrong = {
        name
        for name in GRAPH[module]
        if not any(name == one or name.startswith(f"{one}.") for one in allowed)
    }
    assert not wrong, f"{module} may not import {wrong}"


def test_places_go_from_the_bottom_to_the_top():
    """The table itself permits no import of what stands further down in it, but within a folder."""
    order = list(MAY_IMPORT)
    for module, allowed in MAY_IMPORT.items():
        folder = module.split(".")[0]
        for name in allowed:
            if name.split(".")[0] != folder:
                assert order.index(name) < order.index(module), f"{module} may import {name}"


def test_no_cycles():
    done = []

    def visit(module, path):
        assert module not in path, f"a cycle: {' -> '.join([*path, module])}"
        if module not in done:
            for name in sorted(GRAPH[module]):
                visit(name, [*path, module])
            done.append(module)

    for module in GRAPH:
        visit(module, [])


def test_imports_are_seen_wherever_they_stand(monkeypatch):
    source = (
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from npdecoder.models.transformer import Transformer\n"
        "def f():\n    import npdecoder.cli\n    from npdecoder import text, __version__\n"
        "from . import linear\nfrom .softmax import softmax\n"
        "from ..blocks import encoder, Encoder\nfrom .. import optim\nimport numpy.linalg\n"
    )
    monkeypatch.setitem(TREES, "layers.attention", ast.parse(source))
    assert imported_of_package("layers.attention") == {
        "models.transformer", "cli", "text", "npdecoder", "layers.linear", "layers.softmax",
        "blocks.encoder", "blocks", "optim",
    }  # fmt: skip
    assert {"typing", "numpy.linalg"} <= imported("layers.attention")
    monkeypatch.setitem(TREES, "layers", ast.parse("from . import linear\nfrom ..core import x\n"))
    assert imported_of_package("layers") == {"layers.linear", "core"}


@each_module
def test_numpy_is_the_only_dependency(module):
    outside = {name.split(".")[0] for name in imported(module)} - {"npdecoder", "numpy"}
    # imported where they are asked for
    optional = {"files": {"safetensors"}, "replicas": {"threadpoolctl"}}.get(module, set())
    assert outside - optional <= sys.stdlib_module_names


# The package by itself


def python(*arguments, cwd, path=None):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    environment["PYTHONIOENCODING"] = "utf-8"
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr.decode("utf-8", "replace")
    return done.stdout.decode("utf-8")


def test_import_loads_no_third_party_module_but_numpy(tmp_path):
    code = """
import sys
before = set(sys.modules)
import npdecoder
loaded = {name.split(".")[0] for name in set(sys.modules) - before
          if getattr(sys.modules[name], "__file__", None)}
print(*sorted(loaded - set(sys.stdlib_module_names)))
"""
    assert python("-c", code, cwd=tmp_path, path=PACKAGE.parent).split() == ["npdecoder", "numpy"]


def test_folder_works_wherever_it_is_copied_to(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "npdecoder", ignore=shutil.ignore_patterns("__pycache__"))
    where = python("-c", "import npdecoder; print(npdecoder.__file__)", cwd=tmp_path)
    assert Path(where.strip()).resolve().parent == (tmp_path / "npdecoder").resolve()
    assert "usage: " in python("-m", "npdecoder", "--help", cwd=tmp_path)


def test_package_is_marked_as_typed():
    assert (PACKAGE / "py.typed").exists()


# Nothing that is loaded is run


RUNS_DATA = {"pickle", "_pickle", "cPickle", "dill", "joblib", "cloudpickle", "shelve", "marshal"}


@each_module
def test_no_pickle_eval_or_exec(module):
    assert not {name.split(".")[0] for name in imported(module)} & RUNS_DATA
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Name):
            assert node.id not in {"eval", "exec", "__import__"}, node.lineno
        if isinstance(node, ast.Attribute):
            assert node.attr not in RUNS_DATA, node.lineno
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            assert isinstance(node.value, ast.Constant), node.value.lineno
            assert node.value.value is False, node.value.lineno


def test_loading_arrays_refuses_pickles_by_name():
    """np.load's default has changed before: where arrays are loaded, the refusal is spelled out."""
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("np.load", "numpy.load"):
                assert "allow_pickle" in {k.arg for k in node.keywords}, (module, node.lineno)


# What every file says


@pytest.mark.parametrize("name", npdecoder.__all__)
def test_public_class_or_function_has_a_docstring(name):
    doc = getattr(npdecoder, name).__doc__
    assert doc, name
    assert not doc.startswith(f"{name}("), f"{name} has only what dataclass wrote"


@each_module
def test_module_has_a_docstring(module):
    assert ast.get_docstring(TREES[module]) or module == "__main__"


def layer_classes():
    for module in LAYER_FILES:
        methods = {}
        for owner, function in functions(TREES[module]):
            if owner is not None and function.name in ("forward", "backward"):
                methods.setdefault(owner.name, {})[function.name] = function
        yield from ((module, name, found) for name, found in methods.items())


LAYER_CLASSES = list(layer_classes())
each_layer = pytest.mark.parametrize(
    ("module", "methods"),
    [(module, methods) for module, _, methods in LAYER_CLASSES],
    ids=[name for _, name, _ in LAYER_CLASSES],
)


def test_layer_classes_are_found():
    names = {name for _, name, _ in LAYER_CLASSES}
    public = {name for module in PUBLIC if module in LAYER_FILES for name in PUBLIC[module]}
    assert names >= {name for name in public if name[0].isupper()}


@each_layer
def test_layer_has_forward_and_backward_with_derivation(module, methods):
    assert set(methods) == {"forward", "backward"}
    assert ast.get_docstring(methods["forward"])
    doc = ast.get_docstring(methods["backward"]) or ""
    assert "Derivation" in doc
    assert "In NumPy" in doc
    assert doc.index("Derivation") < doc.index("In NumPy")


@each_layer
def test_forward_and_backward_fit_on_a_screen(module, methods):
    assert sum(code_lines(module, function) for function in methods.values()) < 60


def code_lines(module, function):
    """The lines of a function that are neither blank nor its docstring."""
    lines = SOURCES[module].read_text("utf-8").split("\n")
    numbers = set(range(function.lineno, function.end_lineno + 1))
    if ast.get_docstring(function):
        doc = function.body[0]
        numbers -= set(range(doc.lineno, doc.end_lineno + 1))
    return sum(bool(lines[number - 1].strip()) for number in numbers)


@pytest.mark.parametrize("module", BLOCK_FILES)
def test_blocks_hold_no_derivatives(module):
    """Backward is calls and sums: no other arithmetic, and no parameter is touched directly."""
    for _, function in functions(TREES[module]):
        for node in (node for statement in function.body for node in ast.walk(statement)):
            assert not (isinstance(node, ast.Attribute) and node.attr == "grad"), node.lineno
            if "backward" in function.name and isinstance(node, (ast.BinOp, ast.AugAssign)):
                assert isinstance(node.op, ast.Add), f"{module}:{node.lineno}"


# Public names


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module, names in PUBLIC.items() for name in names]
)
def test_public_name(module, name):
    assert name in npdecoder.__all__
    public = getattr(npdecoder, name)
    home = importlib.import_module(f"npdecoder.{module}")
    assert public is getattr(home, name)
    assert public.__module__ == home.__name__


def test_all_lists_each_name_once_and_has_it():
    assert len(npdecoder.__all__) == len(set(npdecoder.__all__))
    for name in npdecoder.__all__:
        assert hasattr(npdecoder, name)
        assert not name.startswith("_")


def test_folders_export_what_they_list():
    for folder in ("layers", "blocks", "models"):
        package = importlib.import_module(f"npdecoder.{folder}")
        for name in package.__all__:
            assert getattr(package, name).__module__.startswith(f"npdecoder.{folder}.")


def test_version_is_a_version():
    parts = npdecoder.__version__.split(".")
    assert len(parts) == 3
    assert all(part.isdigit() for part in parts)


# The top level


def top_level():
    """Names at the top of the repository: those that git knows, or those in the directory."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, timeout=60
        ).stdout.decode("utf-8")
    except (OSError, subprocess.CalledProcessError):
        listed = ""
    if (ROOT / ".git").exists() and listed:
        return {name.split("/")[0] for name in listed.split("\0") if name}
    names = {path.name for path in ROOT.iterdir()}
    return {n for n in names if n not in MADE_BY_TOOLS and not n.endswith((".egg-info", ".npz"))}


def test_top_level_holds_nothing_else():
    assert {name for name in top_level() if not name.startswith(".")} <= TOP_LEVEL
