"""Plots: what they show, their formats, and that names are drawn literally."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import matplotlib._pylab_helpers
import matplotlib.text
import pytest
import torch
from PIL import Image
from torch import nn

from gossamer import load
from gossamer.analysis.layers import LayerReport, layer_report
from gossamer.analysis.sensitivity import SensitivityMap, sensitivity_map
from gossamer.analysis.timeline import timeline
from gossamer.errors import GossamerError
from gossamer.model.permute import find_permutation
from gossamer.report import plots

FORMULA = "$\\frac{$"
"""A layer name that matplotlib would read as mathematics."""


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.add_module(FORMULA, nn.Linear(8, 8))
        self.add_module("last", nn.Linear(8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            x = layer(x)
        return x


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(16, 8, generator=generator), torch.randint(0, 2, (16,), generator=generator)


def layers(inputs: list[int] | None = [2, 4, 6, 6]) -> LayerReport:  # noqa: B006
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("stem", nn.Conv2d(4, 8, 3))
    model.add_module("depth", nn.Conv2d(8, 8, 3, groups=8))
    model.add_module("flat", nn.Flatten())
    model.add_module("head", nn.Linear(32, 10))
    sparsities = {"stem.weight": [0.1, 0.4, 0.8], "head.weight": [0.4, 0.6, 0.95]}
    return layer_report(model, sparsities, [0.3, 0.5, 0.9], inputs, {"depth.weight": "depth-wise"})


def many_layers(count: int) -> LayerReport:
    network = nn.ModuleDict({f"a_block_with_a_rather_long_name_{i}": nn.Linear(2, 2) for i in range(count)})
    names = [f"{name}.weight" for name in network]
    return layer_report(network, {name: [0.25, 0.5] for name in names[1:]}, [0.3, 0.6])


def sensitivities(labelled: bool = True) -> SensitivityMap:
    inputs, labels = batch()
    return sensitivity_map(Network(), [(inputs, labels) if labelled else inputs], [0.5, 0.9])


def plot_permutation(path: Path) -> None:
    names = [f"{FORMULA}.weight", "last.weight"]
    plots.plot_permutation(find_permutation(Network(), names, example_inputs=batch()[0]), path)


def plot_timeline(path: Path) -> None:
    recipe = path.with_name(f"{FORMULA}.yaml".replace("\\", ""))
    recipe.write_text(
        "modifiers:\n"
        f"  - !ConstantPruningModifier {{params: ['{FORMULA}.weight'], start_epoch: 0}}\n"
        "  - !LearningRateFunctionModifier {start_epoch: 0, end_epoch: 3, lr_func: cosine, init_lr: 0.1, final_lr: 0}\n"
    )
    plots.plot_timeline(timeline(load(recipe), 10), path)


PLOTS: dict[str, Callable[[Path], None]] = {
    "layers": lambda path: plots.plot_layers(layers(), path),
    "sensitivity": lambda path: plots.plot_sensitivity(sensitivities(), path, FORMULA),
    "permutation": plot_permutation,
    "timeline": plot_timeline,
}


@pytest.fixture(params=PLOTS)
def plot(request: pytest.FixtureRequest) -> Callable[[Path], None]:
    return PLOTS[request.param]


def texts(report: LayerReport) -> list[str]:
    with plots._style():
        figure = plots.layers_figure(report)
    figure.draw_without_rendering()
    return [text.get_text() for text in figure.findobj(matplotlib.text.Text) if text.get_visible() and text.get_text()]


def test_equal_values_give_an_equal_svg_of_vectors(plot: Callable[[Path], None], tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        plot(tmp_path / name)
    content = (tmp_path / "a.svg").read_bytes()
    assert content == (tmp_path / "b.svg").read_bytes()
    assert b"<image" not in content
    assert ET.fromstring(content).tag == "{http://www.w3.org/2000/svg}svg"


def test_a_png_is_large_and_matplotlib_keeps_its_state(plot: Callable[[Path], None], tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    plot(tmp_path / "plot.png")
    with Image.open(tmp_path / "plot.png") as image:
        assert image.width > 600
    assert dict(matplotlib.rcParams) == before
    assert matplotlib._pylab_helpers.Gcf.figs == {}


def test_an_unknown_format_or_a_missing_folder_is_an_error(plot: Callable[[Path], None], tmp_path: Path) -> None:
    with pytest.raises(GossamerError, match=r"plot\.xyz: unknown format '\.xyz'; use \.png, \.svg, "):
        plot(tmp_path / "plot.xyz")
    (tmp_path / "plot.png").mkdir()
    with pytest.raises(GossamerError, match=r"plot\.png: cannot be written"):
        plot(tmp_path / "plot.png")


def test_layers_can_be_a_pdf(tmp_path: Path) -> None:
    plots.plot_layers(layers(), tmp_path / "layers.pdf")
    assert (tmp_path / "layers.pdf").read_bytes().startswith(b"%PDF")


def test_every_layer_has_its_numbers_and_reason() -> None:
    shown = texts(layers())
    assert {"stem", "depth (not pruned: depth-wise)", "head", "10", "95", "30 %", "90 %"} <= set(shown)
    assert "parameters 21.5 %" in shown
    assert "MACs 23.6 %" in shown
    assert "MACs" not in " ".join(texts(layers(inputs=None)))


@pytest.mark.slow
def test_long_names_lose_their_start_and_not_every_row_is_labelled() -> None:
    names = [text for text in texts(many_layers(60)) if text.startswith(("a_block", "…"))]
    assert len(names) == 60
    assert all(len(name.partition(" (")[0]) <= plots.MAX_NAME for name in names)
    shown = texts(many_layers(130))
    rows = [text for text in shown if "name_" in text and "(" not in text]
    assert [int(text.rpartition("_")[2]) for text in rows] == list(range(3, 130, 3))
    assert "25" not in shown


@pytest.mark.parametrize(
    "report",
    [
        layer_report(nn.Linear(2, 2), {}, [], [1, 2]),
        layer_report(nn.Linear(2, 2), {}, [0.5]),
        layer_report(nn.Linear(2, 2), {"weight": [1.0, 0.0]}, [1.0, 0.0], [1, 2]),
    ],
    ids=["no level", "no layer pruned", "all and nothing"],
)
def test_degenerate_reports_can_be_plotted(report: LayerReport, tmp_path: Path) -> None:
    plots.plot_layers(report, tmp_path / "layers.svg")
    assert ET.parse(tmp_path / "layers.svg").getroot().tag == "{http://www.w3.org/2000/svg}svg"


@pytest.mark.parametrize("labelled", [True, False])
def test_the_sensitivity_has_a_cell_for_each_layer_and_sparsity(labelled: bool) -> None:
    axes = plots.sensitivity_figure(sensitivities(labelled), "net").axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [FORMULA, "last"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["50 %", "90 %"]
    assert len(axes.texts) == 4
