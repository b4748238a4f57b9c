"""Loads the MODEL argument of commands: a model with its input, its data and its weights.

MODEL is `package.module:function`, a torchvision name, a run folder, a config, or an exported file of weights, which
describes its model. Code named by a folder or a file runs only if the user trusts it.

The model of a run is built by `gossamer.runner` from the run's config and checkpoint.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gossamer.errors import GossamerError
from gossamer.export.weights import THINNED, is_thinned
from gossamer.io import as_name
from gossamer.model.example_inputs import guess_inputs
from gossamer.progress import Progress
from gossamer.runner.builders import build_net, builder, call_builder, classes_parameter, code_of
from gossamer.runner.config import Config, config_of, task_of
from gossamer.runner.config.schema import Net, Source
from gossamer.runner.data import Batches, ImageData, build_dataset
from gossamer.runner.data.sources import read_run_data
from gossamer.runner.detectors import Network, as_example, is_detector
from gossamer.runner.display import Display
from gossamer.runner.model_files import NAME, Export, ModelDescription, describe_model, read_description, write_model
from gossamer.runner.runs import built, describe_source, from_command_line, load_config
from gossamer.runner.tasks import Classification, ObjectDetection
from gossamer.runner.trust import USER, Trust, reason, trust_of
from gossamer.runner.weights import file_of, load_state, load_weights, read_weights

if TYPE_CHECKING:
    from gossamer.export import Written
    from gossamer.runtime import Engine
    from gossamer.runtime.engine import Tuned

logger = logging.getLogger("gossamer")

PROGRAMS = (".onnx", ".pt2")
WEIGHTS = (".safetensors", ".pt", ".pth")
CONFIGS = (".yaml", ".yml")
FAMILIES = ("timm/", "transformers/")
DEFAULT_CLASSES = 1000
"""`num_classes` for a function that requires it when none is given, as in torchvision's models."""


@dataclass(frozen=True)
class LoadedModel:
    """A model that a command works on."""

    argument: str
    """As given on the command line."""
    name: str
    """Short, for titles and file names."""
    model: nn.Module
    """In evaluation mode, on the CPU."""
    kind: Literal["classification", "detection"]
    given: Any = None
    """The input of its forward, if known."""
    num_classes: int | None = None
    net: Net | None = None
    """How to build it again."""
    source: Path | None = None
    """The file of its weights; None for the initial weights."""
    folder: Path | None = None
    """The run folder, if it is the model of a run."""
    config: Config | None = None
    """Names its data, if it has any."""
    checkpoint: str | None = None
    """The name of the run's checkpoint that holds its weights."""
    assumed_classes: int | None = None
    """The `num_classes` that was assumed, if its function requires one and none was given."""
    thinned: bool = False
    """Whether its layers are smaller than those that its code builds."""
    float_weights: str | None = None
    """A warning about float weights of a run that quantizes."""

    @cached_property
    def example(self) -> Any:
        """An input of batch size 1: the known one, else the most common shape that the model accepts, or None."""
        return _guess_input(self.model) if self.given is None else self.given

    @property
    def origin(self) -> str | None:
        """Where its weights come from, for messages."""
        return None if self.source is None else describe_source(self.checkpoint, self.source)

    @property
    def image(self) -> Tensor | None:
        """The example as images (1, C, H, W), if it is a tensor."""
        example = self.example[0][0].unsqueeze(0) if is_detector(self.model) and self.example else self.example
        return example if isinstance(example, Tensor) else None

    @property
    def warnings(self) -> list[str]:
        """About an assumed number of classes, float weights of a quantized run, and untrained weights."""
        warnings: list[str] = []
        if self.assumed_classes is not None:
            warnings.append(f"num_classes not given; assuming {self.assumed_classes}. Override with --num-classes")
        if self.float_weights is not None:
            warnings.append(self.float_weights)
        if self.source is None and ":" not in self.argument:  # a function of the user may have loaded weights itself
            warnings.append(f"{self.argument} has its initial weights; load trained ones with --weights")
        return warnings

    def batches(self, part: Literal["train", "test"]) -> LabelledBatches | None:
        """Images and labels without augmentation; None without data, and for a detector."""
        source = None if self.config is None else getattr(self.config.dataset, part)
        if self.config is None or source is None or self.kind != "classification":
            return None
        test = self.config.dataset.test
        plain = source.model_copy(update={"transforms": (test or source).transforms, "num_workers": 0})
        data = build_dataset(plain, task=self.kind, num_classes=self.num_classes)
        return LabelledBatches(data, plain, shuffled=part == "train")

    def networks(self, model: nn.Module | None = None) -> dict[str, Network]:
        """The parts with tensors as inputs and outputs, which export writes; `model` may be a changed copy."""
        image = self.image
        if image is None:
            raise GossamerError(f"{self.argument}: the shape of its input is unknown; give it with --input 1,3,224,224")
        kind = ObjectDetection if self.kind == "detection" else Classification
        try:
            with torch.no_grad():
                return kind(self.num_classes or 1).networks(self.model if model is None else model, image)
        except GossamerError:
            raise
        except Exception as error:
            shape = tuple(image.shape)
            raise GossamerError(
                f"{self.argument}: does not run on an input of shape {shape}: {reason(error)}"
            ) from error

    def compile(
        self,
        weight_dtype: torch.dtype = torch.float32,
        tuned: Tuned = True,
        progress: Progress = lambda _label, _share: None,
    ) -> dict[str, Engine]:
        """Engines by the end of their file names: of the model, or of each network of a detector.

        As in export, the networks of a detector are without anchors, non-maximum suppression and other post-processing.
        """
        from gossamer import runtime

        compiled = partial(runtime.compile, weight_dtype=weight_dtype, tuned=tuned, progress=progress)
        if self.kind != "detection":
            return {"": compiled(self.model, self.example)}
        engines = {name: compiled(network.module, network.inputs) for name, network in self.networks().items()}
        return {f"-{as_name(name)}" if len(engines) > 1 else "": engine for name, engine in engines.items()}

    def half(self) -> LoadedModel:
        """The same with a model in 16-bit floats."""
        example = pytree.tree_map_only(Tensor, lambda tensor: tensor.half(), self.example)
        return replace(self, model=self.model.half(), given=example)

    def describe(self) -> dict[str, str]:
        """The description in an exported file, from which the model is built again."""
        about = describe_model(self.name, self.kind, self.net, self.num_classes, self.image)
        return about | THINNED if self.thinned else about

    def export(
        self, export: Export, folder: Path | None = None, left_out: Callable[[str], None] = logger.warning
    ) -> list[Written]:
        """Write its files to `folder`: by default the run folder, or the working directory.

        `left_out` is called with the reason why a format has no file.
        """
        export = replace(export, about=self.describe())
        name = NAME if self.folder is not None else as_name(self.name)
        target = folder or self.folder or Path()
        return write_model(self.model, self.example, self.networks, target, export, name, left_out)


class LabelledBatches:
    """Images (N, C, H, W) and labels (N,) of a dataset, the same in every iteration over them."""

    def __init__(self, data: ImageData, source: Source, *, shuffled: bool) -> None:
        self._batches = Batches(data, source, train=shuffled and len(data) >= source.batch_size, seed=0)
        self.images = len(data)

    def __len__(self) -> int:
        return self._batches.batches_per_epoch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in self._batches.epoch(0):
            images: Any = batch.images
            labels: Any = batch.targets
            yield images, labels


def load_model(
    argument: str,
    *,
    weights: Path | None = None,
    data: str | None = None,
    input_shape: str | None = None,
    sets: Sequence[str] = (),
    num_classes: int | None = None,
    imports: Sequence[str] = (),
) -> LoadedModel:
    """The model that MODEL names.

    `weights` is a file or a run folder, `data` is `tiny` or a folder, `input_shape` is text such as `1,3,224,224`,
    `sets` are settings of a config such as `runtime.seed=1`, `num_classes` is passed to the function that makes the
    model. `imports` are packages whose code may run if a run folder or a file names it.
    """
    path = Path(argument)
    by_name = not path.is_dir() and path.suffix not in (*CONFIGS, *PROGRAMS, *WEIGHTS) and data is None and not sets
    if num_classes is not None and not by_name:
        origin = argument if data is None else data
        raise GossamerError(f"{origin} defines the number of classes; remove the option", "--num-classes")
    if num_classes is not None and num_classes < 1:
        raise GossamerError(f"expected a positive number, found {num_classes}", "--num-classes")
    if path.is_dir() or path.suffix in CONFIGS:
        loaded = _of_run(argument, weights, data, sets, imports)
    elif path.suffix in PROGRAMS:
        raise GossamerError(
            f"{argument}: an exported program is not a PyTorch model; name the run or the model it is from"
        )
    elif path.suffix in WEIGHTS:
        loaded = _of_file(path, weights, data, sets, imports)
    elif "/" in argument and ":" not in argument and not argument.startswith(FAMILIES):
        raise GossamerError(
            f"{argument}: no such run folder or file; runs are in runs/ unless saver.save_dir says otherwise"
        )
    elif data is not None or sets:
        loaded = _on_data(
            argument, config_of({"net": {"type": argument}}, argument, sets, data).config, _file(weights), USER
        )
    else:
        loaded = _of_function(argument, _file(weights), num_classes)
    return loaded if input_shape is None else _with_shape(loaded, input_shape)


def _of_run(
    argument: str, weights: Path | None, data: str | None, sets: Sequence[str], imports: Sequence[str]
) -> LoadedModel:
    """The finished model of a run: its masks are applied to its weights."""
    loaded = load_config(argument, [*sets, "runtime.device=cpu"], data, weights, imports)
    with built(loaded, "export", Display(shown=False)) as runner:
        runner.finalize()
        model, image, start = runner.outcome.eval(), runner.example(), runner.start
        is_folder = Path(argument).is_dir()
        return LoadedModel(
            argument=argument,
            name=runner.folder.resolve().name if is_folder else loaded.name,
            model=model,
            kind=runner.kind,
            given=as_example(model, image),
            num_classes=runner.num_classes,
            net=runner.config.net,
            source=start.source,
            checkpoint=None if start.checkpoint is None else start.checkpoint.title,
            folder=runner.folder if is_folder else None,
            config=runner.config,
            thinned=runner.thinned,
            float_weights=runner.float_weights,
        )


def _of_file(
    path: Path, weights: Path | None, data: str | None, sets: Sequence[str], imports: Sequence[str]
) -> LoadedModel:
    """The model that an exported file describes."""
    if not path.is_file():
        raise GossamerError(f"{path}: no such file")
    about = read_description(path) if path.suffix == ".safetensors" else ModelDescription()
    if weights is not None:
        raise GossamerError(f"{path}: already holds weights; remove --weights")
    net, classes = about.net, about.num_classes
    if net is None:
        raise GossamerError(f"{path}: does not describe its model; name the model, and add --weights {path}")
    if data is not None or sets:
        loaded = config_of({"net": {"type": net.type, "kwargs": net.kwargs}}, path.stem, sets, data)
        code = code_of(loaded.config.net)
        trust = trust_of(path, path.parent, imports, from_command_line(code, loaded.given))
        trust.check(code)
        return _on_data(str(path), loaded.config, path, trust)
    trust = trust_of(path, path.parent, imports)
    trust.check(code_of(net))
    if classes is None:
        model = call_builder(net.type, builder(net.type, trust), net.kwargs)
    else:
        model = build_net(net, classes, trust=trust)
    load_weights(model.eval(), path)
    return LoadedModel(
        argument=str(path),
        name=about.name or path.stem,
        model=model,
        kind=_kind(model),
        given=None if about.input is None else as_example(model, _noise(torch.empty(about.input))),
        num_classes=classes,
        net=net,
        source=path,
        thinned=about.thinned,
    )


def _on_data(argument: str, config: Config, weights: Path | None, trust: Trust) -> LoadedModel:
    """A model for a dataset, which defines the number of classes."""
    kind = task_of(config)
    run_data = read_run_data(config, kind, 0, "export")
    model = build_net(config.net, run_data.num_classes, kind, trust=trust).eval()
    if weights is not None:
        load_weights(model, weights)
    images = run_data.test or run_data.train
    assert images is not None
    return LoadedModel(
        argument=argument,
        name=_short_name(argument),
        model=model,
        kind=kind,
        given=as_example(model, images[0][0].unsqueeze(0)),
        num_classes=run_data.num_classes,
        net=config.net,
        source=weights,
        config=config,
        thinned=weights is not None and is_thinned(weights),
    )


def _of_function(argument: str, weights: Path | None, num_classes: int | None = None) -> LoadedModel:
    """The model that a function makes: one of torchvision, or `package.module:function`."""
    make = builder(argument, USER)
    classes, assumed = num_classes, None
    parameter = classes_parameter(make)
    if num_classes is None and parameter is not None and parameter.default is inspect.Parameter.empty:
        classes = assumed = DEFAULT_CLASSES
    model = call_builder(argument, make, {} if classes is None else {"num_classes": classes})
    if weights is not None:
        state = read_weights(weights)
        trained = _classes_of_weights(model, state) if num_classes is None else None
        if trained is not None:
            classes, assumed = trained, None
            model = call_builder(argument, make, {"num_classes": classes})
        load_state(model, state, weights)
    return LoadedModel(
        argument=argument,
        name=_short_name(argument),
        model=model.eval(),
        kind=_kind(model),
        num_classes=classes,
        net=Net(type=argument, kwargs={} if classes is None or ":" not in argument else {"num_classes": classes}),
        source=weights,
        assumed_classes=assumed,
        thinned=weights is not None and is_thinned(weights),
    )


def _kind(model: nn.Module) -> Literal["classification", "detection"]:
    return "detection" if is_detector(model) else "classification"


def _short_name(argument: str) -> str:
    return Path(argument).stem if Path(argument).suffix in WEIGHTS else argument.rpartition(":")[2].rpartition("/")[2]


# Weights


def _classes_of_weights(model: nn.Module, state: Mapping[str, Tensor]) -> int | None:
    """The number of classes of weights that differ from the model in nothing else; None if they do, or in nothing."""
    own = model.state_dict()
    different = [name for name in own if name in state and own[name].shape != state[name].shape]
    if not different or any(own[name].shape[1:] != state[name].shape[1:] for name in different):
        return None
    counts = {state[name].shape[0] for name in different}
    return counts.pop() if len(counts) == 1 else None


def _file(weights: Path | None) -> Path | None:
    return file_of(weights, "--weights") if weights is not None and weights.is_dir() else weights


# Inputs


def _with_shape(loaded: LoadedModel, text: str) -> LoadedModel:
    try:
        sizes = [int(size) for size in text.replace("x", ",").split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise GossamerError(f"expected a shape such as 1,3,224,224, found '{text}'", "--input")
    guess = next((guess for guess in guess_inputs(loaded.model)), None)
    dtype = guess.dtype if isinstance(guess, Tensor) else torch.float32
    return replace(loaded, given=as_example(loaded.model, _noise(torch.empty(sizes, dtype=dtype))))


def _guess_input(model: nn.Module) -> Any:
    """The most common input on which the model runs."""
    if is_detector(model):
        return as_example(model, _noise(torch.empty(1, 3, 320, 320)).sigmoid())
    for guess in guess_inputs(model):
        example = _noise(guess[:1])
        try:
            with torch.no_grad():
                model(example)
        except Exception:  # noqa: BLE001  (a model may raise anything for an input of the wrong shape)
            continue
        return example
    return None


def _noise(like: Tensor) -> Tensor:
    """Fixed noise, because zeros would hide what a network computes; integers are indices, and 0 is always valid."""
    if not like.is_floating_point():
        return torch.zeros_like(like)
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(0)).to(like.dtype)
