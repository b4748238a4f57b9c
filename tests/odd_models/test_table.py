"""Every odd model through every front end: it works, leaves a layer dense with a reason, or refuses in one sentence."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from gossamer.errors import GossamerError
from tests.odd_models.architectures import ARCHITECTURES, built
from tests.odd_models.front_ends import FRONT_ENDS, outcome

RECIPES = ("recipe_magnitude", "recipe_2_4", "recipe_filters")
ASP = ("asp", "asp_with_permutation")
LEARNED = ("msbench_str", "msbench_probmask")
MSBENCH = ("msbench_levels", "msbench_2_4", *LEARNED)
PRUNING = (*RECIPES, "create", *ASP, *MSBENCH)
FILES = ("safetensors", "bitmask", "sparse24")
PROGRAMS = ("onnx", "pt2")
GROUPS = {
    "pruning": PRUNING,
    "learned": LEARNED,
    "asp": (*ASP, "msbench_2_4"),
    "files": FILES,
    "programs": PROGRAMS,
    "all": tuple(FRONT_ENDS),
}

LEAVES, REFUSES = "leaves", "refuses"
Outcome = tuple[str, str]
"""Whether a layer is left dense or the model is refused, and a part of the reason."""


def leaves(part: str) -> Outcome:
    return LEAVES, part


def refuses(part: str) -> Outcome:
    return REFUSES, part


_UNKEPT = "which need not keep zeros where they are; call torch.nn.utils.parametrize.remove_parametrizations"
_NORM = "weight norm divides a row of zeros by zero"
_LAZY = "its shape is not known yet; run the model on one batch first"
_META = "it is on the meta device and has no"
_SCRIPT = "cannot be changed; give the module that torch.jit.script or torch.jit.trace was called with"
_PROGRAM = "expected a torch.nn.Module, found ExportedProgram; give the module that torch.export.export was called with"
_EMPTY = "no convolution or linear layer"
_TIED = "shared with an embedding, of which each row is a token"

_WITHOUT_PARAMETERS = {
    **dict.fromkeys((*RECIPES, "recipe_quantization"), refuses("the optimizer holds none of the model's parameters")),
    "asp": refuses("the optimizer holds no parameter of a model"),
    "pruning": refuses(_EMPTY),
    "analysis": refuses(_EMPTY),
}

EXPECTED: dict[str, dict[str, Outcome]] = {
    # Weights that a layer computes
    "weight_norm": {"recipe_filters": leaves(_NORM), "learned": leaves(_NORM)},
    "weight_norm_by_hook": {"recipe_filters": leaves(_NORM), "learned": leaves(_NORM)},
    "weight_norm_of_convolutions": {"recipe_filters": leaves(_NORM), "learned": leaves(_NORM)},
    "orthogonal": {
        "pruning": leaves(_UNKEPT),
        "analysis": leaves(_UNKEPT),
        "onnx": refuses("torch.onnx cannot export the model"),
    },
    "own_parametrization": {"pruning": leaves(_UNKEPT), "analysis": leaves(_UNKEPT)},
    "only_computed_weights": {
        "pruning": refuses(_UNKEPT),
        "analysis": refuses(_UNKEPT),
        "onnx": refuses("torch.onnx cannot export the model"),
    },
    # Language models
    "gpt2": {"pruning": leaves(_TIED)},
    "tied_embedding": {"pruning": leaves(_TIED)},
    # Parameters without ordinary values
    "lazy": {
        "pruning": leaves(_LAZY),
        "recipe_quantization": refuses(_LAZY),
        "analysis": refuses(_LAZY),
        "thinned": refuses(_LAZY),
        "files": refuses("cannot be written"),
        "programs": refuses(_LAZY),
    },
    "meta": {"all": refuses(_META)},
    "partly_meta": {
        "pruning": leaves(_META),
        "create": leaves("it does not run in evaluation mode"),
        "recipe_quantization": refuses(_META),
        "analysis": refuses(_META),
        "thinned": refuses(_META),
        "files": refuses(_META),
        "programs": refuses(_META),
    },
    "zero_size": {"pruning": leaves("it has no elements"), "analysis": leaves("it has no elements")},
    "zero_outputs": {"pruning": leaves("it has no elements"), "analysis": leaves("it has no elements")},
    "complex_weights": {
        "pruning": leaves("it is complex (torch.complex64)"),
        "analysis": leaves("it is complex"),
        "thinned": refuses("'turn.weight' is complex, which is not supported"),
        "onnx": refuses("torch.onnx cannot export the model"),
    },
    "bfloat16": {"onnx": refuses("onnxruntime cannot run it")},
    "float8": {"pruning": leaves("its values are torch.float8_e4m3fn"), "analysis": leaves("torch.float8_e4m3fn")},
    "integers": {"pruning": leaves("its values are torch.int8"), "analysis": leaves("torch.int8")},
    "sparse_layout": {
        "pruning": leaves("it is stored as torch.sparse_coo; call to_dense()"),
        "analysis": leaves("it is stored as torch.sparse_coo"),
        "thinned": refuses("the model cannot be copied"),
        "files": refuses("make it a plain dense tensor"),
        "programs": refuses("the model cannot be copied"),
    },
    "tensor_subclass": {
        "pruning": leaves("it is a _Subclass and no plain tensor"),
        "analysis": leaves("it is a _Subclass and no plain tensor"),
        "thinned": refuses("the model cannot be copied"),
        "files": refuses("make it a plain dense tensor"),
        "programs": refuses("the model cannot be copied"),
    },
    # Compiled and converted modules
    "scripted": {
        **dict.fromkeys(("pruning", "recipe_quantization", "analysis", "thinned", "programs"), refuses(_SCRIPT))
    },
    "traced_by_jit": {
        **dict.fromkeys(("pruning", "recipe_quantization", "analysis", "thinned", "programs"), refuses(_SCRIPT))
    },
    "scripted_layer": {
        "pruning": leaves("it is compiled by TorchScript"),
        "analysis": leaves("it is compiled by TorchScript"),
        "recipe_quantization": leaves("it is compiled by TorchScript"),
        "programs": refuses("cannot export the model"),
    },
    "exported_program": {"all": refuses(_PROGRAM)},
    "module_of_exported_program": {
        "pruning": refuses(f"{_EMPTY} to prune"),
        "asp": refuses("no layer can be pruned: the whitelist matches none"),
        "analysis": refuses("give the module that torch.export.export was called with"),
        "onnx": refuses("use dynamic_batch=False"),
        "pt2": leaves("it takes batches of 8 only"),
    },
    "quantized_by_torch": {
        "pruning": leaves("it is quantized to integers by torch.ao"),
        "recipe_filters": refuses("mask_type filter skips all matched parameters"),
        "analysis": leaves("it is quantized to integers by torch.ao"),
        "files": refuses("is a dtype and no tensor"),
        "programs": refuses("cannot export the model"),
    },
    "compiled": {"learned": refuses("prepare the model first and wrap it then")},
    # Parameters in several or no places
    "expanded": {
        "pruning": leaves("several of its elements share memory"),
        "analysis": leaves("several of its elements share memory"),
        "files": refuses("share memory; make it contiguous() first"),
    },
    "frozen_layer": {"asp": leaves("it is frozen")},
    "weight_as_buffer": {
        "pruning": leaves("make it an nn.Parameter to prune it"),
        "analysis": leaves("it is a buffer"),
    },
    "no_parameters": _WITHOUT_PARAMETERS,
    "empty": _WITHOUT_PARAMETERS,
    "no_prunable_layer": {
        "pruning": refuses(_EMPTY),
        "asp": refuses("no layer can be pruned: the whitelist matches none"),
        "analysis": refuses(_EMPTY),
    },
    "name_with_a_dot": {"all": refuses("the module name 'block.1' has a dot")},
    # Modules with a will of their own
    "raises_when_copied": {
        "thinned": refuses("the model cannot be copied ('this module holds a connection')"),
        "programs": refuses("the model cannot be copied for export: 'this module holds a connection'"),
    },
    "raises_in_state_dict": {
        "msbench_levels": refuses("the model's state_dict() fails (KeyError: 'ask the server')"),
        "files": refuses("the model's state_dict() fails: 'ask the server'"),
    },
    # Other layers
    "bilinear": {"onnx": leaves("both.weight is not in the file as it is in the model")},
}

USUAL = (
    "the last layer",
    "its filters are outputs of the model",
    "the head",
    "the first convolution",
    "depthwise",
    "does not divide",
    "is not supported; it stays in floating point",
    "1 input channel",
)
"""Why layers of any model are left alone."""


def expected(model: str, front_end: str) -> Outcome | None:
    """What the table says of a cell: for the front end itself, else for the smallest group that it is in."""
    found = EXPECTED.get(model, {})
    if front_end in found:
        return found[front_end]
    groups = sorted((len(members), name) for name, members in GROUPS.items() if name in found and front_end in members)
    return found[groups[0][1]] if groups else None


def _is_fast(model: str, front_end: str) -> bool:
    if front_end in PROGRAMS or model in ("gpt2", "conv1d_of_transformers"):
        return False  # importing Transformers takes seconds; test_language_models does it once
    return front_end in ("recipe_magnitude", "asp") or model in ("plain", "weight_norm", "pruned_by_torch")


CELLS = [
    pytest.param(model, front_end, marks=[] if _is_fast(model, front_end) else pytest.mark.slow)
    for model in ARCHITECTURES
    for front_end in FRONT_ENDS
]


@pytest.mark.parametrize(("model", "front_end"), CELLS)
def test_what_happens_to_an_odd_model_is_what_the_table_says(
    model: str, front_end: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    what, part = expected(model, front_end) or ("works", "")
    network, example = built(model)
    if what == REFUSES:
        with pytest.raises(GossamerError) as caught:
            outcome(FRONT_ENDS[front_end], network, example, tmp_path)
        assert part in str(caught.value)
        assert "\n" not in str(caught.value)
        return
    reasons = list(outcome(FRONT_ENDS[front_end], network, example, tmp_path).values())
    others = [reason for reason in reasons if not any(usual in reason for usual in USUAL)]
    if what == LEAVES:
        assert any(part in reason for reason in reasons), reasons
        others = [reason for reason in others if part not in reason]
    assert not others


def test_the_table_names_models_and_front_ends_that_exist() -> None:
    assert EXPECTED.keys() <= ARCHITECTURES.keys()
    assert {key for row in EXPECTED.values() for key in row} <= {*FRONT_ENDS, *GROUPS}
