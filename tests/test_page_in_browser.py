"""The page in a real browser: every step, every number, keys, both themes, no error.

Run with: pytest -m browser (needs the extra browser, and chromium with its driver).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npdecoder.page import write_page
from npdecoder.traced import Traced, sentence_pair, worked_example

pytestmark = pytest.mark.browser

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
SIZES = {"wide": (1280, 900), "phone": (390, 844)}


@pytest.fixture(scope="module")
def traced() -> Traced:
    return worked_example()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.binary_location = _program("chromium", "google-chrome")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(_program("chromedriver")))
    yield browser
    browser.quit()


@pytest.fixture
def page(browser: Any, traced: Traced, tmp_path: Path) -> Any:
    path = tmp_path / "page.html"
    write_page(path, traced.trace, traced.tokens, traced.title)
    browser.set_window_size(*SIZES["wide"])
    browser.get(path.as_uri())
    yield browser
    errors = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert not errors, errors


def _program(*names: str) -> str:
    found = [path for path in map(shutil.which, names) if path]
    assert found, f"needs {' or '.join(names)}"
    return found[0]


def press(page: Any, key: str) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    ActionChains(page).send_keys(key).perform()


def shown_numbers(page: Any) -> dict[str, list[str]]:
    """The cells of each figure by the array's name, in reading order."""
    found: dict[str, list[str]] = page.execute_script("""
        const found = {};
        for (const figure of document.querySelectorAll("#step figure"))
            found[figure.dataset.name] =
                [...figure.querySelectorAll("td")].map((cell) => cell.dataset.value);
        return found;
    """)
    return found


def count(page: Any) -> str:
    return str(page.execute_script("return document.getElementById('count').textContent"))


def test_every_number_of_every_step_is_the_traces_own(page: Any, traced: Traced) -> None:
    from selenium.webdriver.common.keys import Keys

    compared = 0
    for i, call in enumerate(traced.trace):
        assert count(page) == f"{i + 1} / {len(traced.trace)}"
        title = page.execute_script("return document.querySelector('h2').textContent")
        assert call.direction in title
        assert (call.layer or "the model") in title
        cells = shown_numbers(page)
        arrays = {k: v for k, v in call.arrays().items() if v.dtype.kind in "biuf"}
        for name, array in arrays.items():
            if name not in cells:  # shown beside its gradient, from the forward
                assert call.direction == "backward"
                assert f"d{name}" in arrays
                continue
            wide = array.astype(np.float64) if array.dtype.kind == "f" else array.astype(int)
            values = [float(cell.replace("Infinity", "inf")) for cell in cells[name]]
            np.testing.assert_array_equal(values, wide.ravel())
            compared += len(values)
        press(page, Keys.ARROW_RIGHT)
    assert compared > 5000


def test_a_gradient_stands_beside_what_it_is_the_gradient_of(page: Any, traced: Traced) -> None:
    index = next(
        i for i, call in enumerate(traced.trace)
        if call.layer.endswith("cross_attention.attention") and call.direction == "backward"
    )  # fmt: skip
    page.execute_script(f"show({index})")
    pairs = page.execute_script("""
        return [...document.querySelectorAll(".pair")].map(
            (pair) => [...pair.querySelectorAll("figure")].map((f) => f.dataset.name));
    """)
    assert {("A", "dA"), ("S", "dS"), ("q", "dq"), ("k", "dk")} <= {tuple(pair) for pair in pairs}
    labels = page.execute_script("""
        const figure = document.querySelector('figure[data-name="dA"]');
        return [...figure.querySelectorAll("th, caption")].map((cell) => cell.textContent);
    """)
    head = ["", "I", "love", "you", "<s>", "我", "爱"]
    assert labels == ["head 0", *head, "head 1", *head]


def test_keys_buttons_and_boxes_move(page: Any, traced: Traced) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    last = len(traced.trace)
    press(page, Keys.END)
    assert count(page) == f"{last} / {last}"
    press(page, Keys.ARROW_RIGHT)
    assert count(page) == f"{last} / {last}"
    press(page, Keys.ARROW_LEFT)
    assert count(page) == f"{last - 1} / {last}"
    press(page, Keys.HOME)
    page.find_element(By.ID, "next").click()
    page.find_element(By.ID, "next").click()
    page.find_element(By.ID, "back").click()
    assert count(page) == f"2 / {last}"
    page.find_element(By.ID, "first").click()
    assert count(page) == f"1 / {last}"

    box = page.find_element(By.CSS_SELECTOR, '[data-layer="decoder.layers.0.cross_attention"]')
    box.click()
    assert "cross_attention" in page.find_element(By.TAG_NAME, "h2").text
    assert box.get_attribute("class") == "box on"
    press(page, "b")
    assert "backward" in page.find_element(By.TAG_NAME, "h2").text
    assert box.get_attribute("class") == "box on backward"
    box.send_keys(Keys.ENTER)
    assert "cross_attention" in page.find_element(By.TAG_NAME, "h2").text


def test_every_step_lights_a_part_of_the_drawing_but_those_of_the_whole(
    page: Any, traced: Traced
) -> None:
    lit = page.execute_script("""
        return steps.map((step, i) => { show(i);
            return document.querySelectorAll(".box.on").length; });
    """)
    wholes = {"", "encoder", "decoder", "encoder.layers.0", "decoder.layers.0",
              "position_dropout"}  # fmt: skip
    for call, boxes in zip(traced.trace, lit):
        assert boxes == (call.layer not in wholes), call.layer


def test_formulas_and_source_lines_are_shown(page: Any, traced: Traced) -> None:
    for i, call in enumerate(traced.trace):
        page.execute_script(f"show({i})")
        text = page.execute_script("return document.querySelector('pre').textContent")
        assert f"def {call.method}(" in text
        assert '"""' not in text
    formulas = page.execute_script("return document.querySelectorAll('.formula math').length")
    assert formulas >= 2


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_fits_the_screen_in_light_and_dark(page: Any, size: str, theme: str) -> None:
    page.set_window_size(*SIZES[size])
    feature = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    metrics = {"width": SIZES[size][0], "height": SIZES[size][1], "deviceScaleFactor": 1,
               "mobile": False}  # fmt: skip
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", feature)
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        for step in range(0, 134, 7):
            page.execute_script(f"show({step})")
            width = page.execute_script("return document.documentElement.scrollWidth")
            assert width <= SIZES[size][0], f"step {step + 1} is {width} pixels wide"
        ground = page.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(255, 255, 255)") == (theme == "light")
        if folder := os.environ.get("SCREENSHOTS"):
            page.execute_script("show(90)")
            page.save_screenshot(f"{folder}/page-{size}-{theme}.png")
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_a_heat_map_can_be_saved_as_a_picture(page: Any) -> None:
    sizes = page.execute_script("""
        return steps[90].arrays.map((array) => {
            const canvas = draw(array);
            const url = canvas.toDataURL("image/png");
            return [canvas.width, canvas.height, url.startsWith("data:image/png;base64,"),
                    url.length]; });
    """)
    assert sizes
    for width, height, is_png, length in sizes:
        assert width > 100
        assert height > 50
        assert is_png
        assert length > 500


def test_it_asks_for_nothing_outside_the_file(page: Any) -> None:
    loaded = page.execute_script("return performance.getEntriesByType('resource').length")
    assert loaded == 0


def test_print_shows_the_step_without_the_controls(page: Any) -> None:
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        hidden = page.execute_script("""
            return ["nav", ".bar"].map((s) => getComputedStyle(document.querySelector(s)).display);
        """)
        assert hidden == ["none", "none"]
        assert page.execute_script("return document.querySelector('figure').offsetHeight") > 0
    finally:
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_words_that_look_like_markup_are_words(browser: Any, tmp_path: Path) -> None:
    traced = sentence_pair("a </script> <b> & 'c'", "<i> \" </script><!-- x")
    path = tmp_path / "odd.html"
    write_page(path, traced.trace, traced.tokens, traced.title)
    browser.get(path.as_uri())
    assert browser.title == traced.title
    assert browser.execute_script("return steps.length") == len(traced.trace)
    data = json.loads(browser.execute_script(
        "return document.getElementById('data').textContent"))
    assert len(data["steps"]) == len(traced.trace)
    assert not [e for e in browser.get_log("browser") if e["level"] == "SEVERE"]
