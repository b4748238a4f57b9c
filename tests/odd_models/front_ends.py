"""Every way into Gossamer, on any model: three steps of training, or a file, with what must hold checked on the way."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gossamer import Manager
from gossamer.analysis.hardware import hardware_support
from gossamer.analysis.model_table import model_table
from gossamer.asp import ASP
from gossamer.create import initialize
from gossamer.export import save, thin
from gossamer.export.load import load
from gossamer.model import get_parameter, is_transposed, prunable, unwrap
from gossamer.msbench import build_sparse_scheduler

FrontEnd = Callable[[Any, Any, Path], Mapping[str, str]]
"""From a model, an example and a folder to what was left dense, with the reasons; raises when it refuses."""
FRONT_ENDS: dict[str, FrontEnd] = {}
STEPS = 3
SPARSITY = 0.5
GRADUAL = "start_epoch: 0, end_epoch: 2, update_frequency: 1"


def front_end(run: FrontEnd) -> FrontEnd:
    FRONT_ENDS[run.__name__] = run
    return run


# Training


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    parameters = list(model.parameters()) if isinstance(model, nn.Module) else []
    usual = [p for p in parameters if p.requires_grad]
    return torch.optim.SGD(usual or [nn.Parameter(torch.zeros(1))], lr=0.01, momentum=0.9, weight_decay=1e-4)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, example: Any) -> None:
    optimizer.zero_grad()
    output = model(**example) if isinstance(example, dict) else model(example)
    outputs = [value for value in torch.utils._pytree.tree_leaves(_plain(output)) if value.is_floating_point()]
    loss = sum(value.float().square().mean() for value in outputs)
    assert isinstance(loss, Tensor)
    assert bool(loss.isfinite()), "the model computes NaN or infinity"
    loss.backward()
    optimizer.step()


def _plain(output: Any) -> Any:
    return list(output.values()) if isinstance(output, Mapping) else output


def computed_weight(model: nn.Module, name: str) -> Tensor:
    """What the layer computes with, however the parameter is stored."""
    path, _, leaf = name.partition(".parametrizations.")
    if leaf:
        return getattr(model.get_submodule(path), leaf.partition(".")[0])
    path, _, leaf = name.rpartition(".")
    layer = model.get_submodule(path) if path in dict(model.named_modules()) else None
    hooked = layer is not None and leaf in ("weight_orig", "weight_v")
    if not hooked:
        return get_parameter(model, name)
    assert layer is not None
    for hook in layer._forward_pre_hooks.values():
        hook(layer, ())
    return layer.weight


def check_zeros(model: nn.Module, masks: Mapping[str, Tensor], counts: Mapping[str, int]) -> None:
    """The masked weights are zero in what the layers compute with, and exactly as many as were asked for."""
    assert masks
    for name, keep in masks.items():
        weight = computed_weight(unwrap(model), name).detach()
        assert bool(weight.isfinite().all()), f"{name} holds NaN or infinity"
        assert not weight[~keep].count_nonzero(), f"{name} is not zero where it is masked"
        assert int((~keep).sum()) == counts[name], f"{name} has {int((~keep).sum())} zeros of {counts[name]}"


def half(model: nn.Module, names: Any) -> dict[str, int]:
    return {name: round(get_parameter(unwrap(model), name).numel() * SPARSITY) for name in names}


def _recipe(model: Any, example: Any, modifier: str) -> Manager:
    manager = Manager(f"modifiers: [{modifier}]")
    optimizer = optimizer_of(model)
    manager.modify(model, optimizer, steps_per_epoch=1, example_inputs=example)
    for _ in range(STEPS):
        step(model, optimizer, example)
    return manager


def _skipped(manager: Manager) -> dict[str, str]:
    return {name: reason for reasons in manager.skipped.values() for name, reason in reasons.items()}


@front_end
def recipe_magnitude(model: Any, example: Any, folder: Path) -> Mapping[str, str]:
    fields = "params: __ALL_PRUNABLE__, init_sparsity: 0.2, final_sparsity: 0.5"
    manager = _recipe(model, example, f"!GMPruningModifier {{{fields}, {GRADUAL}}}")
    masks, sparsity = manager.masks(), manager.sparsity()
    check_zeros(model, masks, half(model, masks))
    for name, share in sparsity.items():
        weight = computed_weight(unwrap(model), name)
        assert share == int((weight == 0).sum()) / weight.numel(), name
    skipped = _skipped(manager)
    manager.finalize()
    check_zeros(model, masks, half(model, masks))
    return skipped


@front_end
def recipe_2_4(model: Any, example: Any, folder: Path) -> Mapping[str, str]:
    fields = "params: __ALL_PRUNABLE__, mask_type: '2:4', init_sparsity: 0.5, final_sparsity: 0.5, permute: true"
    manager = _recipe(model, example, f"!GMPruningModifier {{{fields}, {GRADUAL}}}")
    masks = manager.masks()
    check_zeros(model, masks, half(model, masks))
    skipped = _skipped(manager)
    manager.finalize()
    return skipped


@front_end
def recipe_filters(model: Any, example: Any, folder: Path) -> Mapping[str, str]:
    fields = "params: __ALL_PRUNABLE__, mask_type: filter, init_sparsity: 0.25, final_sparsity: 0.5"
    manager = _recipe(model, example, f"!GMPruningModifier {{{fields}, {GRADUAL}}}")
    masks = manager.masks()
    check_zeros(model, masks, half(model, masks))
    skipped = _skipped(manager)
    manager.finalize()
    return skipped


@front_end
def recipe_quantization(model: Any, example: Any, folder: Path) -> Mapping[str, str]:
    manager = _recipe(model, example, "!QuantizationModifier {start_epoch: 0}")
    skipped = _skipped(manager)
    manager.finalize()
    return skipped


@front_end
def create(model: Any, example: Any, folder: Path) -> Mapping[str, str]:
    optimizer = optimizer_of(model)
    variables = {"num_epochs": 3, "sparsity": SPARSITY}
    manager, _ = initialize(
        model, optimizer, 1, quantization=False, lr=False, recipe_variables=variables, example_inputs=example
    )
    for _ in range(manager.max_epochs):
        step(model, optimizer, example)
    masks = manager.masks()
    total = sum(keep.numel() for keep in masks.values())
    assert sum(int((~keep).sum()) for keep in masks.values()) == round(total * SPARSITY)
    check_zeros(model, masks, {name: int((~keep).sum()) for name, keep in masks.items()})
    comments = " ".join(line.strip().removeprefix("#").strip() for line in manager.recipe.splitlines())
    told = [part.partition(").")[0] for part in comments.split("left dense (")[1:]]
    skipped = dict(zip(told, told, strict=True)) | _skipped(manager)
    manager.finalize()
    return skipped


def _asp(model: Any, example: Any, permute: bool) -> Mapping[str, str]:
    optimizer = optimizer_of(model)
    ASP.init_model_for_pruning(model, verbosity=0, allow_permutation=permute)
    ASP.init_optimizer_for_pruning(optimizer, model=model)
    ASP.compute_sparse_masks(model, example_inputs=example, effort=0.1)
    for _ in range(STEPS):
        step(model, optimizer, example)
    layers = ASP.layers(model)
    names = [name for name, reason in layers.items() if reason is None]
    masks = {name: ASP._pruners[unwrap(model)].mask(name) for name in names}
    check_zeros(model, masks, half(model, names))
    ASP.forget(model)
    return {name: reason for name, reason in layers.items() if reason is not None}


@front_end
def asp(model: Any, example: Any, folder: Path) -> Mapping[str, str]:
    return _asp(model, example, permute=False)


@front_end
def asp_with_permutation(model: Any, example: Any, folder: Path) -> Mapping[str, str]:
    before = evaluated(model, example)
    ASP.permute_model(model, example_inputs=example, effort=0.1, verbosity=0)
    for old, new in zip(before, evaluated(model, example), strict=True):
        torch.testing.assert_close(old, new, rtol=1e-2 if old.dtype == torch.bfloat16 else 1e-4, atol=1e-4)
    return _asp(model, example, permute=True)


def evaluated(model: Any, example: Any) -> list[Tensor]:
    """What the model computes; nothing where it cannot run yet."""
    if not isinstance(model, nn.Module) or any(is_lazy(p) or p.is_meta for p in model.parameters()):
        return []
    modes = {layer: layer.training for layer in model.modules()}
    for layer in modes:
        layer.training = False
    with torch.no_grad():
        output = model(**example) if isinstance(example, dict) else model(example)
    for layer, mode in modes.items():
        layer.training = mode
    return [value.clone() for value in torch.utils._pytree.tree_leaves(_plain(output))]


def _msbench(model: Any, example: Any, config: dict[str, Any], exact: bool = True) -> Mapping[str, str]:
    scheduler = build_sparse_scheduler(config)
    prepared = scheduler.prepare_sparse_model(model, example_inputs=example)
    optimizer = optimizer_of(prepared)
    scheduler.init_optimizer(optimizer)
    for iteration in range(STEPS):
        scheduler.prune_model(prepared, iteration)
        step(prepared, optimizer, example)
    skipped = {name: reason for name, reason in scheduler.layers.items() if reason is not None}
    scheduler.export_sparse_model(prepared)
    step(prepared, optimizer, example)
    assert scheduler.names
    for name in scheduler.names:
        weight = computed_weight(unwrap(prepared), name)
        zeros = int((get_parameter(unwrap(prepared), name) == 0).sum())
        assert bool(weight.isfinite().all())
        assert int((weight == 0).sum()) >= zeros
        assert not exact or zeros == round(weight.numel() * SPARSITY), f"{name} has {zeros} zeros"
    assert scheduler.compute_sparse_rate(prepared) > 0
    return skipped


MASKS = {"mask_generator": {"type": "NormalMaskGenerator"}, "fake_sparse": {"type": "FakeSparse"}}


@front_end
def msbench_levels(model: Any, example: Any, folder: Path) -> Mapping[str, str]:
    kwargs = {"total_iters": STEPS, "sparsity_table": [30, 50], "prun_algo": 0, "save_dir": str(folder)}
    return _msbench(model, example, {**MASKS, "scheduler": {"type": "AmbaLevelPruneScheduler", "kwargs": kwargs}})


@front_end
def msbench_2_4(model: Any, example: Any, folder: Path) -> Mapping[str, str]:
    return _msbench(model, example, {"scheduler": {"type": "AmpereScheduler", "kwargs": {"verbosity": 0}}})


@front_end
def msbench_str(model: Any, example: Any, folder: Path) -> Mapping[str, str]:
    config = {
        "mask_generator": {"type": "STRMaskGenerator"},
        "fake_sparse": {"type": "STRFakeSparse", "kwargs": {"sInit_value": -3.0}},
        "scheduler": {"type": "STRScheduler", "kwargs": {}},
    }
    return _msbench(model, example, config, exact=False)


@front_end
def msbench_probmask(model: Any, example: Any, folder: Path) -> Mapping[str, str]:
    stamps = {"total_iterations": STEPS, "warmup_iteration_stamps": 0, "finetune_iteration_stamps": 2}
    config = {
        "mask_generator": {"type": "ProbMaskGenerator"},
        "fake_sparse": {"type": "ProbMaskFakeSparse"},
        "scheduler": {"type": "ProbMaskPruneScheduler", "kwargs": {"prune_rate": 0.5, **stamps}},
    }
    return _msbench(model, example, config, exact=False)


# Looking


@front_end
def analysis(model: Any, example: Any, folder: Path) -> Mapping[str, str]:
    table = model_table(model, example)
    assert table.rows
    for row in table.rows:
        assert 0 <= row.layer.current_sparsity <= 1
        assert row.layer.current_zeros == int((computed_weight(unwrap(model), row.weight) == 0).sum())
    hardware_support(model, example)
    return table.left_dense


# Files


def _pruned(model: Any) -> None:
    """Make the weights 2:4 by hand, so that a file has zeros to keep."""
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        return
    with torch.no_grad():
        for name in prunable(unwrap(model)):
            weight = get_parameter(unwrap(model), name)
            rows = weight.transpose(0, 1) if is_transposed(unwrap(model), name) else weight
            if not weight.is_meta and rows.shape[1] % 4 == 0:
                rows[:, ::4] = rows[:, 1::4] = 0


def _weights_file(model: Any, folder: Path, format: str) -> Mapping[str, str]:
    _pruned(model)
    path = folder / "model.safetensors"
    written = save(model, path, format)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            if 0 not in parameter.stride():
                parameter.copy_(torch.ones_like(parameter))
    load(path, model)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    return {note: note for note in written.notes}


@front_end
def safetensors(model: Any, example: Any, folder: Path) -> Mapping[str, str]:
    return _weights_file(model, folder, "safetensors")


@front_end
def bitmask(model: Any, example: Any, folder: Path) -> Mapping[str, str]:
    return _weights_file(model, folder, "bitmask")


@front_end
def sparse24(model: Any, example: Any, folder: Path) -> Mapping[str, str]:
    return _weights_file(model, folder, "sparse24")


@front_end
def thinned(model: Any, example: Any, folder: Path) -> Mapping[str, str]:
    smaller, _ = thin(model, example)
    for old, new in zip(evaluated(model, example), evaluated(smaller, example), strict=True):
        torch.testing.assert_close(old, new)
    return {}


@front_end
def onnx(model: Any, example: Any, folder: Path) -> Mapping[str, str]:
    _pruned(model)
    written = save(model, folder / "model.onnx", "onnx", example_inputs=example)
    return {note: note for note in written.notes}


@front_end
def pt2(model: Any, example: Any, folder: Path) -> Mapping[str, str]:
    _pruned(model)
    written = save(model, folder / "model.pt2", "pt2", example_inputs=example)
    return {note: note for note in written.notes}


def outcome(run: FrontEnd, model: Any, example: Any, folder: Path) -> Mapping[str, str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about what it deprecates
        return run(model, example, folder)
