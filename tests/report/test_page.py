"""The page as text: what it holds for whole, empty and hostile runs."""

from __future__ import annotations

import html
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from gossamer.report import render
from gossamer.report.content import LayerSparsity, RunContent, Series, WeightHistogram
from tests.report.contents import empty_bins, run, speed

VOID = {"meta", "link", "img", "wbr", "br"}


class Outline(HTMLParser):
    """Tags that are open, ids, links, and texts by tag; complains about tags that do not match."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID and not (self.open and self.open[-1] == "svg" and tag == "path"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, tag

    def values(self, name: str) -> list[str]:
        return [value or "" for _, key, value in self.attributes if key == name]


def outline(text: str) -> Outline:
    found = Outline()
    found.feed(text)
    assert found.open == []
    return found


@pytest.mark.parametrize("count", [1, 3])
def test_tags_match_and_links_lead_somewhere(count: int) -> None:
    page = outline(render([run(f"run {i}") for i in range(count)]))
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    links = [link for tag, name, link in page.attributes if tag == "a" and name == "href"]
    assert len(links) >= 9 if count == 1 else 3 * count
    assert {link.removeprefix("#") for link in links if link is not None} <= set(ids)


def test_every_part_of_a_run_is_there() -> None:
    ids = outline(render([run()])).values("id")
    parts = ["summary", "progress", "schedule", "training", "layers", "sensitivity", "weights", "masks", "settings"]
    assert [name for name in ids if name != "tip"] == parts


@pytest.mark.parametrize("count", [1, 3])
def test_a_benchmark_has_its_own_part_with_figures_intervals_and_what_they_mean(count: int) -> None:
    text = render([run(f"run {i}") for i in range(count)], [speed()])
    ids = outline(text).values("id")
    assert ids[:2] == ["summary", "speed"]
    part = text.split('id="speed"')[1].split("</section>")[0]
    assert "onnxruntime 1.31.1: batch 1, 1 thread, 38 rounds" in part
    assert "3.78×<small>3.41–4.04</small>" in part
    assert "22.6<small>17.2–33.6</small>" in part
    assert "time, ms" in part
    assert part.count("<u style=") == 1  # one round has no interval, and the first file is what others compare to
    assert "thin &lt;b&gt; is faster" in part
    ends = [float(value) for value in re.findall(r'<u style="left:([\d.]+)%;width:([\d.]+)%', part)[0]]
    bar = float(re.findall(r'<i style="width:([\d.]+)%', part)[1])
    assert ends[0] < bar < sum(ends) < 100
    assert 'id="speed"' not in render([run()])


def test_names_that_look_like_markup_do_nothing() -> None:
    evil = "<script>alert(1)</script>\" onload='x' \x00"
    layer = LayerSparsity(evil, (2, 2), 4, 1, 0.5, dense=evil)
    changed = {"method": evil, "notes": (evil,), "layers": (layer,), "settings": ((evil, evil),)}
    content = RunContent(**{**vars(run(evil, layers=1)), **changed})
    for text in (render([content]), render([content, run()])):
        page = outline(text)
        assert page.tags.count("script") == 1
        assert "\x00" not in text
        assert not [name for _, name, _ in page.attributes if name.startswith("on")]


def test_nothing_is_loaded_from_elsewhere() -> None:
    page = outline(render([run(), run("other")]))
    loaded = [v or "" for tag, name, v in page.attributes if name in ("src", "href") and tag != "a"]
    assert loaded
    assert all(value.startswith("data:") for value in loaded)
    policy = next(value for value in page.values("content") if "default-src" in value)
    assert policy.startswith("default-src 'none'")


def test_the_same_values_give_the_same_page() -> None:
    assert render([run(), run("b")]) == render([run(), run("b")])


def test_a_run_without_anything_says_why() -> None:
    reasons = {part: f"No {part} here." for part in ("layers", "histograms", "masks", "sensitivity", "plan")}
    text = render([RunContent("bare", "dense", "0 iterations", missing=reasons)])
    outline(text)
    assert all(html.escape(reason) in text for reason in reasons.values())
    assert "No tests in this run" in text
    assert "No training iterations recorded" in text


def test_losses_that_are_no_numbers_break_the_line() -> None:
    broken = Series("loss", (1.0, 2.0, 3.0, 4.0), (2.0, None, math.nan, 1.0))
    text = render([run(loss=(broken,))])
    assert "Gaps are losses that were not finite" in text
    for value in outline(text).values("data-chart"):
        json.loads(value, parse_constant=pytest.fail)


def test_two_hundred_layers_are_folded_and_the_page_stays_small() -> None:
    text = render([run(layers=200)])
    assert "168 more layers" in text
    assert "48 more layers; 146 omitted" in text
    assert len(text.encode()) < 500_000


def test_layers_of_several_runs_stand_in_one_table() -> None:
    other = run("dense", layers=5)
    text = render([run(), other])
    section = text[text.index('id="layers"') : text.index('id="run-1"')]
    assert section.count("<table") == 1
    assert section.count("<tr tabindex") == 5
    assert section.count('<td class="n">–</td>') == 1


def test_runs_without_zeros_take_no_room_among_the_layers_of_others() -> None:
    dense = run("dense")
    dense = replace(dense, layers=tuple(replace(layer, zeros=0, target=None) for layer in dense.layers))
    section = render([dense, run("sparse")]).split('id="layers"')[1].split("</section>")[0]
    assert "Without zeros: dense." in section
    assert section.count('colspan="2"') == 1
    assert section.count("<tr tabindex") == 4
    alone = render([dense]).split('id="layers"')[1].split("</section>")[0]
    assert alone.count("<tr tabindex") == 4


def test_a_layer_of_zeros_alone_has_a_histogram() -> None:
    text = render([run(histograms=(WeightHistogram("gone", None, empty_bins()),))])
    assert "zeros 100.0" in text
    assert "The start was not recorded" in text
