"""Import paths that earlier documentation showed still work, with a deprecation warning."""

from __future__ import annotations

from importlib import import_module

import pytest


@pytest.mark.parametrize(
    ("old", "name", "new"),
    [
        ("graph", "get_parameter", "model"),
        ("graph", "match", "model"),
        ("graph.filter_groups", "filter_groups", "model.tracing.filter_groups"),
        ("graph.thinning", "thin", "model.thin"),
        ("graph.substitution", "_Hooks", "model.additions"),
        ("export.speed", "explain", "benchmark"),
        ("export.speed", "measure", "benchmark"),
        ("export.speed.runtimes", "RUNTIMES", "benchmark.runtimes"),
        ("analysis.one_shot", "one_shot", "analysis.sensitivity"),
        ("analysis.sensitivity_map", "sensitivity_map", "analysis.sensitivity"),
        ("analysis.plot", "save_plot", "report.plots"),
    ],
)
def test_a_former_import_path_gives_the_same_object_and_warns(old: str, name: str, new: str) -> None:
    module = import_module(f"gossamer.{old}")
    with pytest.warns(DeprecationWarning, match=f"gossamer.{old} is deprecated; import from gossamer.{new}"):
        value = getattr(module, name)
    assert value is getattr(import_module(f"gossamer.{new}"), {"save_plot": "plot_timeline"}.get(name, name))


def test_a_name_that_a_former_module_does_not_have_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError):
        import_module("gossamer.graph").no_such_name  # noqa: B018
