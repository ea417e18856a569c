"""What setup.cfg packs, and one version; the gate looks into the built files."""

import configparser
import re
from importlib import metadata
from pathlib import Path

import npdecoder

ROOT = Path(__file__).parents[1]
PACKAGE = Path(npdecoder.__file__).parent


def setup_cfg():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", "utf-8")
    return parser


def test_the_version_stands_in_the_package_alone():
    assert setup_cfg()["metadata"]["version"] == "attr: npdecoder.__version__"
    assert not re.search("^version", (ROOT / "pyproject.toml").read_text("utf-8"), re.M)


def test_what_is_installed_says_the_same_version():
    found = {distribution.version for distribution in metadata.distributions(name="npdecoder")}
    assert found <= {npdecoder.__version__}, "install it again"


def test_the_changelog_begins_with_this_version():
    entries = re.findall(r"^## (.*)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)
    version, date = entries[0].split(" - ")
    assert version == f"[{npdecoder.__version__}]"
    assert re.fullmatch(r"Unreleased|\d{4}-\d\d-\d\d", date)


def test_every_file_of_the_package_that_is_no_module_is_packed():
    packed = {
        path
        for package, patterns in setup_cfg()["options.package_data"].items()
        for pattern in patterns.split(", ")
        for path in PACKAGE.joinpath(*package.split(".")[1:]).glob(pattern)
    }
    folders = [init.parent for init in PACKAGE.rglob("__init__.py")]
    modules = {path for folder in folders for path in folder.glob("*.py")}
    files = {path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert files - modules == packed


def test_type_marker_licence_and_readme_are_there():
    assert (PACKAGE / "py.typed").exists()
    licence = setup_cfg()["metadata"]["license_files"]
    assert (ROOT / licence).read_text("utf-8").startswith("MIT License")
    assert (ROOT / setup_cfg()["metadata"]["long_description"].removeprefix("file: ")).exists()
