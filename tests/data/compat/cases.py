"""The models, recipes and loops behind the files of this folder, shared by the script that wrote them and the tests.

A file is only worth something together with what trains on from it, so nothing here may change as long as the files
stay. Imports of Gossamer are those that its documentation names. The data are scikit-learn's digits, which are whole
numbers: no random numbers of torch are drawn while models train.
"""

from __future__ import annotations

import functools
import hashlib
import json
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from gossamer import Manager
from gossamer.asp import ASP
from gossamer.msbench import BaseScheduler, build_sparse_scheduler
from gossamer.runner import Hook

FOLDER = Path(__file__).parent
NAME = "tests.data.compat.cases"
"""This module, as the configs of runs name it."""


def digest(tensor: Tensor) -> str:
    """Of the type, the shape and the bytes of a tensor."""
    plain = tensor.detach().cpu().contiguous()
    found = hashlib.sha256(f"{plain.dtype} {tuple(plain.shape)} ".encode())
    found.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def digests(state: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: digest(value) for name, value in sorted(state.items())}


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal: the same keys in the same order, the same values, the same bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return digest(one) == digest(other)
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return repr(one) == repr(other)


def copied(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in state.items()}


def read(path: str) -> Any:
    """What torch.save wrote to a file of this folder, by the safe loader."""
    return torch.load(FOLDER / path, weights_only=True)


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    """Images of 1 × 8 × 8 with values from 0 to 1, and their labels."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(labels).long()


def batch(step: int, size: int = 16) -> tuple[Tensor, Tensor]:
    images, labels = digits()
    return images[step * size : (step + 1) * size], labels[step * size : (step + 1) * size]


def loss_at(model: nn.Module, step: int) -> Tensor:
    images, labels = batch(step)
    return cross_entropy(model(images), labels)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)


def network(seed: int = 0) -> nn.Sequential:
    """conv 1→8, norm, conv 8→8, linear: 72 + 576 + 320 weights that can be pruned."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


# Recipes

STEPS_PER_EPOCH, SAVED_AT, STEPS = 4, 7, 12
"""Training is saved behind seven steps, in the middle of the second epoch, and goes on to the end of the third."""

RECIPES = {
    "gradual": """
modifiers:
  - !EpochRangeModifier {start_epoch: 0, end_epoch: 3}
  - !LearningRateFunctionModifier {start_epoch: 0, end_epoch: 3, lr_func: cosine, init_lr: 0.1, final_lr: 0.001}
  - !SetWeightDecayModifier {start_epoch: 1, weight_decay: 0.0}
  - !TrainableParamsModifier {params: ['3.bias'], trainable: false, start_epoch: 1, end_epoch: 2}
  - !SetParamModifier {params: ['7.bias'], val: 0.0}
  - !GradualParamModifier {params: ['1.bias'], init_val: 0.0, final_val: 0.1, start_epoch: 0, end_epoch: 2,
                           update_frequency: 0.25}
  - !GMPruningModifier {params: ['0.weight'], init_sparsity: 0.1, final_sparsity: 0.6, start_epoch: 0, end_epoch: 2.5,
                        update_frequency: 0.5}
  - !MovementPruningModifier {params: ['3.weight'], init_sparsity: 0.1, final_sparsity: 0.8, start_epoch: 0.5,
                              end_epoch: 2.5, update_frequency: 0.25}
  - !MagnitudePruningModifier {params: ['7.weight'], init_sparsity: 0.05, final_sparsity: 0.5, start_epoch: 0,
                               end_epoch: 2.5, update_frequency: 0.5, mask_type: 2:4}
""",
    "global": """
modifiers:
  - !LearningRateModifier {start_epoch: 0, lr_class: StepLR, lr_kwargs: {step_size: 1, gamma: 0.5}, init_lr: 0.1}
  - !GlobalMagnitudePruningModifier {params: __ALL_PRUNABLE__, init_sparsity: 0.1, final_sparsity: 0.8, start_epoch: 0,
                                     end_epoch: 2.5, update_frequency: 0.25, inter_func: linear}
""",
    "constant": """
modifiers:
  - !SetLearningRateModifier {start_epoch: 1, learning_rate: 0.02}
  - !GMPruningModifier {params: __ALL_PRUNABLE__, init_sparsity: 0.5, final_sparsity: 0.5, start_epoch: 0,
                        end_epoch: 1, update_frequency: 1, mask_type: block4, exclude: ['0.weight']}
  - !ConstantPruningModifier {params: __ALL_PRUNABLE__, start_epoch: 1}
""",
    "dynamic": """
modifiers:
  - !RigLPruningModifier {params: ['0.weight'], final_sparsity: 0.5, start_epoch: 0, end_epoch: 3,
                          update_frequency: 0.5}
  - !ACDCPruningModifier {params: ['3.weight'], compression_sparsity: 0.7, start_epoch: 0, end_epoch: 2.5,
                          update_frequency: 0.5}
  - !TopKASTPruningModifier {params: ['7.weight'], forward_sparsity: 0.6, backward_sparsity: 0.3, start_epoch: 0,
                             end_epoch: 2.5, update_frequency: 0.5}
""",
    "admm": """
modifiers:
  - !ADMMPruningModifier {params: __ALL_PRUNABLE__, final_sparsity: 0.6, start_epoch: 0, end_epoch: 2.5,
                          update_frequency: 0.5, rho: 0.1}
""",
    "thresholds": """
modifiers:
  - !STRPruningModifier {params: __ALL_PRUNABLE__, start_epoch: 0, end_epoch: 2.5, final_sparsity: 0.7}
""",
    "probabilities": """
modifiers:
  - !ProbMaskPruningModifier {params: __ALL_PRUNABLE__, start_epoch: 0.5, end_epoch: 2.5, final_sparsity: 0.7}
""",
    "second-order": """
modifiers:
  - !MFACPruningModifier {params: ['0.weight'], init_sparsity: 0.2, final_sparsity: 0.6, start_epoch: 0, end_epoch: 2.5,
                          update_frequency: 0.5, num_grads: 4, fisher_block_size: 8}
  - !OBSPruningModifier {params: ['3.weight'], init_sparsity: 0.2, final_sparsity: 0.6, start_epoch: 0, end_epoch: 2.5,
                         update_frequency: 0.5, num_grads: 8, fisher_block_size: 8}
""",
    "levels": """
modifiers:
  - !LevelPruningModifier {levels: [0.3, 0.6, 0.8], end_epoch: 3, allocation: energy}
""",
    "quantization": """
modifiers:
  - !GMPruningModifier {params: ['0.weight'], init_sparsity: 0.1, final_sparsity: 0.6, start_epoch: 0, end_epoch: 1.25,
                        update_frequency: 0.25}
  - !GMPruningModifier {params: ['3.weight', '7.weight'], init_sparsity: 0.1, final_sparsity: 0.5, start_epoch: 0,
                        end_epoch: 1.25, update_frequency: 0.25, mask_type: 2:4}
  - !QuantizationModifier {start_epoch: 1.5, disable_quantization_observer_epoch: 2.5, freeze_bn_stats_epoch: 2}
""",
    "distillation": """
modifiers:
  - !DistillationModifier {start_epoch: 0, end_epoch: 3, hardness: 0.5, temperature: 2.0}
  - !PerLayerDistillationModifier {start_epoch: 0, end_epoch: 3, gain: 0.5}
  - !GMPruningModifier {params: __ALL_PRUNABLE__, init_sparsity: 0.1, final_sparsity: 0.6, start_epoch: 0,
                        end_epoch: 2.5, update_frequency: 0.5}
""",
    "filters": """
modifiers:
  - !StructuredPruningModifier {params: ['0.weight', '3.weight'], init_sparsity: 0.25, final_sparsity: 0.5,
                                start_epoch: 0, end_epoch: 2, update_frequency: 0.5}
""",
    "thinning": """
modifiers:
  - !StructuredPruningModifier {params: ['0.weight', '3.weight'], init_sparsity: 0.25, final_sparsity: 0.5,
                                start_epoch: 0, end_epoch: 1, update_frequency: 0.5}
  - !LayerThinningModifier {start_epoch: 1}
""",
    "layers": """
modifiers:
  - !LayerPruningModifier {layers: ['4'], start_epoch: 0.5, end_epoch: 2.5}
  - !GMPruningModifier {params: __ALL_PRUNABLE__, init_sparsity: 0.1, final_sparsity: 0.6, start_epoch: 0,
                        end_epoch: 2.5, update_frequency: 0.5}
""",
}


def _losses(model: nn.Module) -> Iterator[Tensor]:
    for step in range(8):
        yield loss_at(model, 50 + step)


@dataclass
class RecipeTraining:
    """A loop of one's own with a manager in it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    lr_scheduler: CosineAnnealingLR | None
    """Only beside levels, which start it over."""
    manager: Manager

    @classmethod
    def new(cls, family: str, saved: Mapping[str, Any] | None = None) -> RecipeTraining:
        """A training from its first step, or, as the documentation has it, from what `save` gave."""
        model = network(seed=0 if saved is None else 1)
        manager = Manager(RECIPES[family])
        if saved is not None:
            manager.load_state_dict(saved["manager"])
            manager.apply_structure(model)
            model.load_state_dict(saved["model"])
        optimizer = sgd(model)
        lr_scheduler = CosineAnnealingLR(optimizer, STEPS // 3) if family == "levels" else None
        if saved is not None:
            optimizer.load_state_dict(saved["optimizer"])
            if lr_scheduler is not None:
                lr_scheduler.load_state_dict(saved["lr_scheduler"])
        manager.modify(
            model,
            optimizer,
            STEPS_PER_EPOCH,
            grad_sampler=_losses,
            example_inputs=torch.zeros(2, 1, 8, 8),
            lr_scheduler=lr_scheduler,
        )
        return cls(model, optimizer, lr_scheduler, manager)

    def train(self, until: int) -> None:
        while self.manager.step < until:
            self.optimizer.zero_grad()
            loss_at(self.model, self.manager.step).backward()
            self.optimizer.step()
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()

    def save(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "lr_scheduler": None if self.lr_scheduler is None else self.lr_scheduler.state_dict(),
            "manager": self.manager.state_dict(),
        }


# MSBench

MSBENCH_TOTAL, MSBENCH_SAVED_AT = 12, 6
LEVEL = "global_sparse_rate_0.3.pth.tar"
"""The file of the first level."""
_LENGTHS = {"total_iterations": MSBENCH_TOTAL, "warmup_iteration_stamps": 2, "finetune_iteration_stamps": 8}
MSBENCH: dict[str, dict[str, Any]] = {
    "levels": {
        "mask_generator": {"type": "NormalMaskGenerator"},
        "fake_sparse": {"type": "FakeSparse"},
        "scheduler": {
            "type": "AmbaLevelPruneScheduler",
            "kwargs": {"total_iters": MSBENCH_TOTAL, "sparsity_table": [30, 60, 90], "prun_algo": 1},
        },
    },
    "filters": {
        "mask_generator": {"type": "FPGMMaskGenerator"},
        "fake_sparse": {"type": "FakeSparse"},
        "scheduler": {
            "type": "AmbaLevelPruneScheduler",
            "kwargs": {"total_iters": MSBENCH_TOTAL, "sparsity_table": [25, 50], "prun_algo": 0},
        },
    },
    "ampere": {"scheduler": {"type": "AmpereScheduler", "kwargs": {"verbosity": 0, "allow_permutation": False}}},
    "str": {
        "mask_generator": {"type": "STRMaskGenerator"},
        "fake_sparse": {"type": "STRFakeSparse", "kwargs": {"sInit_value": -3}},
        "scheduler": {"type": "STRScheduler", "kwargs": {"prune_rate": 0.7, "total_iterations": MSBENCH_TOTAL}},
    },
    "probmask": {
        "mask_generator": {"type": "ProbMaskGenerator"},
        "fake_sparse": {"type": "ProbMaskFakeSparse"},
        "scheduler": {"type": "ProbMaskPruneScheduler", "kwargs": {"prune_rate": 0.7, **_LENGTHS}},
    },
    "admm": {
        "sparsity": {"target_sparsity": 0.6, "uniform": True},
        "scheduler": {"type": "ADMMScheduler", "kwargs": {"total_iters": MSBENCH_TOTAL, "iters_per_epoch": 3}},
    },
}


def wide_network(seed: int = 0) -> nn.Sequential:
    """Linear layers with as many channels as hardware takes in 2:4."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 10))


@dataclass
class MSBenchTraining:
    """A training script of MSBench's users."""

    scheduler: BaseScheduler
    model: nn.Module
    optimizer: torch.optim.Optimizer
    lr_scheduler: CosineAnnealingLR

    @classmethod
    def new(cls, method: str, saved: Mapping[str, Any] | None = None, save_dir: Path | None = None) -> MSBenchTraining:
        config = MSBENCH[method]
        if config["scheduler"]["type"] == "AmbaLevelPruneScheduler":
            kwargs = {**config["scheduler"]["kwargs"], "save_dir": None if save_dir is None else str(save_dir)}
            config = {**config, "scheduler": {**config["scheduler"], "kwargs": kwargs}}
        scheduler = build_sparse_scheduler(config)
        plain = (wide_network if method == "ampere" else network)(seed=0 if saved is None else 1)
        model = scheduler.prepare_sparse_model(plain)
        optimizer = sgd(model)
        lr_scheduler = CosineAnnealingLR(optimizer, MSBENCH_TOTAL // 3)
        if saved is not None:
            model.load_state_dict(saved["model"])
        if method == "ampere":
            scheduler.init_optimizer(optimizer)
        else:
            scheduler.set_lr_scheduler(lr_scheduler)
        if saved is not None:
            optimizer.load_state_dict(saved["optimizer"])
            lr_scheduler.load_state_dict(saved["lr_scheduler"])
            scheduler.load_state_dict(saved["scheduler"])
        return cls(scheduler, model, optimizer, lr_scheduler)

    def train(self, iterations: range) -> None:
        for iteration in iterations:
            self.scheduler.prune_model(self.model, iteration)
            self.optimizer.zero_grad()
            loss_at(self.model, iteration).backward()
            self.optimizer.step()
            self.lr_scheduler.step()

    def save(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "lr_scheduler": self.lr_scheduler.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }


# ASP

ASP_SAVED_AT, ASP_STEPS = 3, 6
ASPS = {"once": False, "recomputed": True}
"""Whether masks may be computed again, for which the pruned values are kept."""


def new_asp(kind: str, saved: Mapping[str, Any] | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = wide_network(seed=0 if saved is None else 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    ASP.init_model_for_pruning(model, verbosity=0, allow_recompute_mask=ASPS[kind], allow_permutation=False)
    if saved is not None:
        model.load_state_dict(saved["model"])
    ASP.init_optimizer_for_pruning(optimizer)
    if saved is None:
        ASP.compute_sparse_masks(model)
    else:
        optimizer.load_state_dict(saved["optimizer"])
    return model, optimizer


def train_asp(kind: str, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_at(model, step).backward()
        optimizer.step()
        if ASPS[kind] and step == 4:
            ASP.compute_sparse_masks(model)


# Exported files


def sparse_network() -> nn.Sequential:
    """Zeros of each kind: half of the first filters, two of four neighbours behind them, single weights at the end."""
    model = network(seed=3).eval()
    with torch.no_grad():
        for part in (model[0].weight, model[0].bias, model[1].weight, model[1].bias):
            part[::2] = 0
        kept = model[3].weight.abs().reshape(8, 2, 4, 9).argsort(2).argsort(2).reshape(8, 8, 3, 3) >= 2
        model[3].weight[~kept] = 0
        model[7].weight[model[7].weight.abs() < 0.1] = 0
        model[7].bias[0] = -0.0
    return model


# Runs


class Interrupt(Hook):
    """Ctrl-C behind an iteration."""

    def __init__(self, at: int) -> None:
        self.at = at

    def iteration_done(self, runner: Any) -> None:
        if runner.iteration == self.at:
            signal.raise_signal(signal.SIGINT)


def narrow(num_classes: int = 10) -> nn.Sequential:
    """For images of 3 × 8 × 8: 108 + 288 + 320 weights that can be pruned."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 8, 3, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, num_classes),
    )


RUN_SAVED_AT, RUN_LENGTH = 9, 12
"""Three epochs of four iterations, interrupted in the third."""
RUN_RECIPE = """
modifiers:
  - !EpochRangeModifier {start_epoch: 0, end_epoch: 3}
  - !GMPruningModifier {params: __ALL_PRUNABLE__, init_sparsity: 0.1, final_sparsity: 0.75, start_epoch: 0.5,
                        end_epoch: 1.5, update_frequency: 0.5}
  - !QuantizationModifier {start_epoch: 2}
  - !LearningRateFunctionModifier {start_epoch: 0, end_epoch: 3, lr_func: cosine, init_lr: 0.1, final_lr: 0.001}
"""
RUNS: dict[str, dict[str, Any] | None] = {
    "run-dense": None,
    "run-levels": {
        "mask_generator": {"type": "NormalMaskGenerator"},
        "fake_sparse": {"type": "FakeSparse"},
        "scheduler": {"type": "AmbaLevelPruneScheduler", "kwargs": {"sparsity_table": [30, 60, 80]}},
    },
    "run-recipe": {"recipe": "recipe.yaml"},
}


def run_config(name: str) -> str:
    """A config, in JSON, which is YAML too."""
    source = {"type": "digits", "batch_size": 32}
    trainer: dict[str, Any] = {
        "test_freq": 1,
        "log_freq": 2,
        "optimizer": {"type": "SGD", "kwargs": {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}},
    }
    if name != "run-recipe":
        trainer |= {"max_epoch": 3, "lr_scheduler": {"type": "CosineAnnealingLR", "warmup_iter": 2}}
    parts: dict[str, Any] = {
        "num_classes": 10,
        "dataset": {
            "train": {**source, "split": "train", "limit": 128, "transforms": ["RandomHorizontalFlip"]},
            "test": {**source, "split": "test", "limit": 64},
        },
        "net": {"type": f"{NAME}:narrow"},
        "trainer": trainer,
        "saver": {"save_dir": name, "keep": 1},
        "hooks": [{"type": f"{NAME}:Interrupt", "kwargs": {"at": RUN_SAVED_AT}}],
        "runtime": {"runner": {"type": "base"}, "device": "cpu", "tensorboard": False},
    }
    if RUNS[name] is None:
        parts["ema"] = {"enable": True, "decay": 0.5}
    else:
        parts["runtime"]["runner"]["type"] = "sparse"
        parts["sparsity"] = RUNS[name]
    return json.dumps(parts, indent=1)


# Lightning, Transformers and Accelerate

PICTURES = 320
EPOCHS, SAVED_EPOCHS = 4, 2
ADAPTED = """
modifiers:
  - !GMPruningModifier {params: ['re:.*weight'], init_sparsity: 0.1, final_sparsity: 0.8, start_epoch: 0, end_epoch: 3,
                        update_frequency: 0.5}
  - !LearningRateFunctionModifier {start_epoch: 0, end_epoch: 4, lr_func: linear, init_lr: 0.01, final_lr: 0.001}
"""


def small_network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10))


def loader() -> DataLoader[Any]:
    images, labels = digits()
    return DataLoader(TensorDataset(images[:PICTURES], labels[:PICTURES]), batch_size=32)


def lightning_fit(seed: int, callbacks: list[Any], **kwargs: Any) -> Any:
    """Fit with the recipe; gives the module."""
    import lightning.pytorch as pl

    from gossamer.integrations.lightning import SparsityCallback

    class Digits(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = small_network(seed)

        def forward(self, images: Tensor) -> Tensor:
            return self.net(images)

        def training_step(self, batch: Any, index: int) -> Tensor:
            return cross_entropy(self(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    module = Digits()
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        callbacks=[SparsityCallback(ADAPTED), *callbacks],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader(), **kwargs)
    return module


WORDS, LENGTH = 12, 6
TRANSFORMERS_SAVED_AT = 10
TRANSFORMERS_RECIPE = """
modifiers:
  - !MovementPruningModifier {params: ['re:.*encoder.layer.*dense.weight'], init_sparsity: 0.1, final_sparsity: 0.8,
                              start_epoch: 0, end_epoch: 2, update_frequency: 0.25}
"""


def sentences(count: int = 128) -> list[dict[str, Any]]:
    """Of words that are numbers; the label says whether word 0 is among them."""
    found = []
    for number in range(count):
        words = [1 + (number * (7 + place) + place * place) % (WORDS - 1) for place in range(LENGTH)]
        if number % 2:
            words[number % LENGTH] = 0
        found.append({"input_ids": words, "labels": number % 2})
    return found


def bert_trainer(output: Path, seed: int, **kwargs: Any) -> Any:
    """A Trainer with the recipe over a BERT without dropout; `kwargs` are those of the callback."""
    import transformers

    from gossamer.integrations.transformers import SparsityCallback

    torch.manual_seed(seed)
    model = transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=WORDS,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=LENGTH,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )
    arguments = transformers.TrainingArguments(
        str(output),
        num_train_epochs=3,
        per_device_train_batch_size=16,
        learning_rate=5e-3,
        save_strategy="steps",
        save_steps=TRANSFORMERS_SAVED_AT,
        save_total_limit=None,
        logging_steps=8,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    return transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=sentences(),
        callbacks=[SparsityCallback(TRANSFORMERS_RECIPE, **kwargs)],
    )


class AccelerateTraining:
    """What a user of Accelerate writes."""

    def __init__(self, seed: int) -> None:
        from accelerate import Accelerator

        from gossamer.integrations.accelerate import Sparsity

        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        self.plain = small_network(seed)
        optimizer = torch.optim.Adam(self.plain.parameters(), lr=0.01)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(self.plain, optimizer, loader())
        self.sparsity = Sparsity(ADAPTED)
        self.sparsity.attach(self.accelerator, self.model, self.optimizer, self.loader)

    def train(self, epochs: int) -> None:
        for _ in range(epochs):
            for images, labels in self.loader:
                with self.accelerator.accumulate(self.model):
                    self.accelerator.backward(cross_entropy(self.model(images), labels))
                    self.optimizer.step()
                    self.optimizer.zero_grad()
