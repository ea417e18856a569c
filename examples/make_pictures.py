"""Make the README's pictures: the page of the worked example, and an attention map in plain text.

    pip install '.[browser]'     (and chromium with its driver, from the system's packages)
    python examples/make_pictures.py

Writes examples/pictures/page.png and examples/pictures/attention.txt; the map is that of the demo's
model, which is trained first (10 seconds).
"""

from __future__ import annotations

import contextlib
import io
import shutil
import tempfile
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from npdecoder import cli
from npdecoder.page import write_page
from npdecoder.traced import worked_example

FOLDER = Path(__file__).with_name("pictures")
SENTENCE = "She does not read newspapers"
STEP = "decoder.layers.0.cross_attention.attention", "backward"
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
    "--disable-background-networking", "--disable-sync", "--window-size=1280,1120",
)  # fmt: skip


def screenshot(html: Path, png: Path, step: int) -> None:
    options = webdriver.ChromeOptions()
    for flag in FLAGS:
        options.add_argument(flag)
    options.binary_location = shutil.which("chromium") or ""
    browser = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        browser.get(f"{html.as_uri()}#{step + 1}")
        browser.save_screenshot(str(png))
    finally:
        browser.quit()


def attention_map(folder: Path) -> str:
    model = str(folder / "demo.npz")
    with contextlib.redirect_stdout(io.StringIO()):
        cli.main(["demo", "--out", model])
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        cli.main(["translate", model, SENTENCE, "--attention"])
    return output.getvalue()


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    traced = worked_example()
    step = next(i for i, c in enumerate(traced.trace) if (c.layer, c.direction) == STEP)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_page(folder / "page.html", traced.trace, traced.tokens, traced.title)
        screenshot(folder / "page.html", FOLDER / "page.png", step)
        (FOLDER / "attention.txt").write_text(attention_map(folder), "utf-8")
    print((FOLDER / "attention.txt").read_text("utf-8"))


if __name__ == "__main__":
    main()
