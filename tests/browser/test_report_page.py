"""The report in a real browser, offline: what a reader sees, points at, prints."""

from __future__ import annotations

import base64
import re
from collections.abc import Generator
from typing import Any

import pytest

from gossamer.report import render
from tests.browser.chromium import chromium, requests, sized, themed
from tests.report.contents import run, speed
from tests.runner.running_on_digits import config, trained

PARTS = ("summary", "progress", "schedule", "training", "layers", "sensitivity", "weights", "masks", "settings")
EVIL = "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Generator[Any]:
    with chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pages")
    texts = {
        "one": render([run("levels", layers=40)]),
        "three": render([run("dense"), run("levels"), run("a-run-with-a-very-long-name-" * 4)], [speed()]),
        "evil": render([run(EVIL), run("levels")]),
    }
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: (folder / f"{name}.html").as_uri() for name in texts}


def opened(browser: Any, address: str, *, width: int = 1100, theme: str = "light") -> Any:
    """The page in a window; what was logged before is forgotten."""
    browser.get("about:blank")
    themed(browser, theme)
    sized(browser, width)
    browser.get_log("browser")
    requests(browser)
    browser.get(address)
    return browser


def tip(browser: Any) -> str:
    return browser.execute_script(
        "const t = document.getElementById('tip'); return getComputedStyle(t).display === 'none' ? '' : t.textContent"
    )


@pytest.mark.parametrize("name", ["one", "three", "evil"])
def test_a_page_opens_without_errors_and_asks_for_nothing(browser: Any, pages: dict[str, str], name: str) -> None:
    page = opened(browser, pages[name])
    assert page.title.endswith("Gossamer report")
    assert page.get_log("browser") == []
    assert [url for url in requests(page) if not url.startswith("data:")] == [pages[name]]
    for part in ("summary", "progress", "schedule", "training", "layers"):
        box = page.find_element("id", part).rect
        assert box["height"] > 50
    assert page.execute_script("return [...document.images].every(i => i.complete && i.naturalWidth > 0)")


def test_the_page_of_a_run_that_was_trained_opens_with_all_its_parts(
    browser: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    made = trained(config(tmp_path_factory.mktemp("trained"), "amba"), "runtime.report.sensitivity=true")
    address = (made.folder.resolve() / "report.html").as_uri()
    page = opened(browser, address)
    assert page.get_log("browser") == []
    assert [url for url in requests(page) if not url.startswith("data:")] == [address]
    for part in PARTS:
        assert page.find_element("id", part).rect["height"] > 50, part
    text = page.find_element("id", "summary").text
    assert f"{made.metrics['top1']:.2f}" in text
    assert len(page.find_elements("css selector", "#layers tr[data-tip]")) == 3
    assert page.execute_script("return [...document.images].every(i => i.complete && i.naturalWidth > 0)")
    sized(page, 360)
    assert page.execute_script("return document.documentElement.scrollWidth") <= 360


@pytest.mark.parametrize("name", ["one", "three", "evil"])
def test_a_phone_shows_the_page_without_scrolling_sideways(browser: Any, pages: dict[str, str], name: str) -> None:
    page = opened(browser, pages[name], width=360)
    wide, seen = page.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert seen == 360
    assert wide <= 360
    heads = "[...document.querySelectorAll('th[scope=row]')].filter(h => h.offsetWidth)"
    assert page.execute_script(f"return Math.min(...{heads}.map(h => h.offsetWidth))") >= 60  # no letter for itself


def test_pointing_at_a_layer_shows_its_numbers(browser: Any, pages: dict[str, str]) -> None:
    from selenium.webdriver import ActionChains

    page = opened(browser, pages["one"])
    row = page.find_element("css selector", "#layers tr[data-tip]")
    page.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", row)
    assert tip(page) == ""
    ActionChains(page).move_to_element(row).perform()
    assert re.search(r"layer0\.conv\n16 × 8 × 3 × 3, 1.152 weights\n.* zero, \d+ weights left; target 70.0", tip(page))


def test_pointing_at_a_chart_shows_the_values_there(browser: Any, pages: dict[str, str]) -> None:
    from selenium.webdriver import ActionChains

    page = opened(browser, pages["three"])
    area = page.find_element("css selector", "#progress .area")
    page.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", area)
    ActionChains(page).move_to_element(area).perform()
    assert tip(page).startswith("epoch 2\ndense: 90\nlevels: 90")


def test_the_theme_follows_the_system(browser: Any, pages: dict[str, str]) -> None:
    def brightness(theme: str) -> tuple[float, float]:
        page = opened(browser, pages["one"], theme=theme)
        style = "getComputedStyle(document.body)"
        return tuple(
            sum(map(int, re.findall(r"\d+", colour)[:3])) / 765
            for colour in page.execute_script(f"return [{style}.backgroundColor, {style}.color]")
        )

    ground, ink = brightness("light")
    assert ground > 0.9
    assert ink < 0.2
    ground, ink = brightness("dark")
    assert ground < 0.15
    assert ink > 0.8


def test_on_paper_the_page_is_light_and_has_several_sheets(browser: Any, pages: dict[str, str]) -> None:
    page = opened(browser, pages["three"], theme="dark")
    printed = page.execute_cdp_cmd("Page.printToPDF", {"printBackground": True, "paperWidth": 8.27})
    pdf = base64.b64decode(printed["data"])
    assert pdf.startswith(b"%PDF")
    assert len(re.findall(rb"/Type\s*/Page\b", pdf)) >= 4  # each run starts on a sheet of its own
    themed(page, "dark", "print")
    assert page.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


def test_without_scripts_everything_can_be_read(browser: Any, pages: dict[str, str]) -> None:
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        page = opened(browser, pages["one"])
        text = page.find_element("css selector", "main").text
        assert "96.34" in text
        assert "layer0.conv" in text
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
