"""`gossamer recipe plot`: the numbers behind the drawing, and files that others can open."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from PIL import Image

from gossamer.analysis.timeline import Schedule, timeline
from gossamer.modifiers.pruning import PruningModifier
from gossamer.recipe import load

SVG = "{http://www.w3.org/2000/svg}"


def value_at(series: Schedule, epoch: float) -> float | None:
    return [value for start, value in zip(series.epochs, series.values, strict=True) if start <= epoch][-1]


def test_sparsity_is_held_between_updates():
    recipe = load("builtin:gmp-90")
    series, pruning = timeline(recipe, steps_per_epoch=10).sparsity[0], recipe.modifiers[-1]
    assert isinstance(pruning, PruningModifier)
    assert value_at(series, 2.9) is None
    assert value_at(series, 3.0) == value_at(series, 3.4) == pytest.approx(0.05)
    assert value_at(series, 3.5) == pruning.sparsity_at(3.5)
    assert value_at(series, 18) == value_at(series, 30) == pytest.approx(0.9)


def test_updates_fall_on_the_steps_that_the_run_would_use():
    series = timeline(load("builtin:gmp-90", variables="update_frequency=0.25"), steps_per_epoch=10).sparsity[0]
    assert series.epochs[1:6] == (3.0, 3.2, 3.5, 3.8, 4.0)


def test_equal_schedules_share_one_series(shared_recipe):
    drawn = timeline(load(shared_recipe("90sparse.yaml")))
    assert [series.label for series in drawn.sparsity] == ["192 × GMPruningModifier to 90 %"]


def test_schedules_with_one_target_but_other_epochs_are_told_apart():
    fields = "params: __ALL__, init_sparsity: 0, final_sparsity: 0.5, update_frequency: 1"
    text = "\n".join(
        ["modifiers:", *(f"- !GMPruningModifier {{{fields}, start_epoch: {s}, end_epoch: {s + 2}}}" for s in (0, 1))]
    )
    assert [series.label for series in timeline(load(text)).sparsity] == [
        "GMPruningModifier to 50 %, epochs 0 to 2",
        "GMPruningModifier to 50 %, epochs 1 to 3",
    ]


def test_dense_phases_of_acdc_show_as_zero():
    series = timeline(load("builtin:acdc-90")).sparsity[0]
    assert [value_at(series, epoch) for epoch in (1, 4, 7, 10, 30)] == [None, 0.0, 0.9, 0.0, 0.9]


def test_the_learning_rate_is_that_of_the_modifier_which_started_last():
    [series] = timeline(load("builtin:gmp-90")).learning_rate
    assert value_at(series, 5) == 0.01
    assert value_at(series, 24) == pytest.approx((0.01 + 0.0001) / 2)
    assert series.label == "learning rate"


RELATIVE = """
modifiers:
  - !EpochRangeModifier {start_epoch: 0, end_epoch: 4}
  - !LearningRateModifier {start_epoch: 0, lr_class: StepLR, lr_kwargs: {gamma: 0.5, step_size: 1}}
"""


def test_a_rate_that_depends_on_the_optimizer_says_so_unless_that_is_given():
    [series] = timeline(load(RELATIVE)).learning_rate
    assert "relative" in series.label
    assert value_at(series, 2.5) == 0.25
    [series] = timeline(load(RELATIVE), initial_lr=0.2).learning_rate
    assert (series.label, value_at(series, 2.5)) == ("learning rate", pytest.approx(0.05))


GROUPS = """
modifiers:
  - !LearningRateFunctionModifier {start_epoch: 3, end_epoch: 6, lr_func: linear, init_lr: 0.1, final_lr: 0.0}
  - !LearningRateFunctionModifier {start_epoch: 0, end_epoch: 3, lr_func: linear, init_lr: 0, final_lr: 0.1,
                                   param_groups: [0, 1]}
  - !SetLearningRateModifier {start_epoch: 0, learning_rate: 0.5, param_groups: [2]}
"""


def test_parameter_groups_that_go_their_own_way_have_their_own_curves():
    first, second = timeline(load(GROUPS), steps_per_epoch=4).learning_rate
    assert [first.label, second.label] == ["learning rate, groups 0, 1", "learning rate, group 2"]
    assert [value_at(first, 1.5), value_at(second, 1.5)] == [pytest.approx(0.05), 0.5]
    assert value_at(first, 4.5) == value_at(second, 4.5)


def test_phases_tell_pruning_from_holding_and_from_the_rest(shared_recipe):
    drawn = timeline(load(shared_recipe("yolov3-spp.pruned_quantized.md")))
    families = {(span.family, span.held) for span in drawn.spans}
    assert {("pruning", False), ("pruning", True), ("quantization", False), ("learning_rate", False)} <= families
    constant = timeline(load("builtin:sparse-transfer")).spans
    assert [span.family for span in constant] == ["constant", "learning_rate"]


PLOTTED = ["builtin:gmp-90", "noprune.yaml", "yolov3-spp.pruned_quantized.md"]


@pytest.fixture(params=PLOTTED)
def recipe(request, shared_recipe) -> str:
    return request.param if request.param.startswith("builtin:") else str(shared_recipe(request.param))


def test_pictures_are_well_formed(run, recipe):
    for name in ("schedule.png", "schedule.svg"):
        assert run("recipe", "plot", recipe, "-o", name).exit_code == 0
    with Image.open("schedule.png") as picture:
        assert picture.format == "PNG"
        assert picture.width > 1000
        assert len(set(picture.convert("L").tobytes())) > 10
    root = ET.parse("schedule.svg").getroot()
    assert root.tag == f"{SVG}svg"
    assert root.findall(f".//{SVG}path")


def test_a_page_needs_no_other_file_and_lists_the_modifiers(run, recipe):
    assert run("recipe", "plot", recipe, "-o", "schedule.html").exit_code == 0
    text = Path("schedule.html").read_text("utf-8")
    drawing = re.search(r"<svg.*</svg>", text, re.DOTALL)
    assert drawing
    ET.fromstring(drawing[0])
    assert not re.search(r"""(?:src|href)=["'](?!#)""", text)
    assert not re.search(r"@import|url\((?!#)", text)
    assert text.count("<tr>") == 1 + len(load(recipe).modifiers)
    assert "prefers-color-scheme: dark" in text
    assert "var(--grid)" in drawing[0]


def test_names_on_a_page_are_escaped(run):
    Path("<b>.yaml").write_text("modifiers:\n  - !TrainableParamsModifier {params: ['<script>']}\n")
    assert run("recipe", "plot", "<b>.yaml", "-o", "schedule.html").exit_code == 0
    text = Path("schedule.html").read_text("utf-8")
    assert "<script>" not in text
    assert "<b>" not in text


def test_json_holds_the_series(run):
    found = json.loads(run("recipe", "plot", "builtin:gmp-90", "-o", "s.svg", "--json").stdout)
    assert found["output"] == "s.svg"
    assert found["sparsity"][0]["values"][-1] == 0.9
