"""What one word names: a model, with what is known of its input, its data and its weights.

The word is `package.module:function`, the name of a torchvision model, a run folder, a config, or a file of weights
that we exported, which says what model it is of. Code that a folder or a file names runs only where the user vouches
for it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gossamer.errors import GossamerError, nearest
from gossamer.export.weights.reading import THINNED, emulate_as, is_thinned
from gossamer.model.inputs import guesses
from gossamer.model.thin.cuts import shrink_to, shrunk
from gossamer.runner.config import Config, config_of, task_of
from gossamer.runner.config.schema import Net, Source
from gossamer.runner.data import Batches, ImageData, build_dataset
from gossamer.runner.display import Display
from gossamer.runner.distributed import joined
from gossamer.runner.model_files import ModelDescription, describe_model, read_description
from gossamer.runner.models import build_net, code_of
from gossamer.runner.networks import Network, as_example, is_detector
from gossamer.runner.run_data import read_run_data
from gossamer.runner.runs import built, from_command_line, loaded_of, named, origin
from gossamer.runner.start import file_of
from gossamer.runner.tasks import Classification, Finding
from gossamer.runner.trust import USER, Trust, reason, trust_of
from gossamer.runner.weights import check_numbers, read_weights
from gossamer.runner.words import builder

Part = Literal["train", "test"]
PROGRAMS = (".onnx", ".pt2")
WEIGHTS = (".safetensors", ".pt", ".pth")
CONFIGS = (".yaml", ".yml")
FAMILIES = ("timm/", "transformers/")
CLASSES = 1000
"""As torchvision's own models have, where a function needs `num_classes` and nothing says it."""


@dataclass(frozen=True)
class Subject:
    """A model that a command works on."""

    word: str
    name: str
    """Short, for titles and names of files."""
    model: nn.Module
    """In evaluation mode, on the CPU."""
    kind: Literal["classification", "detection"]
    given: Any = None
    """What its forward takes, where that is known."""
    num_classes: int | None = None
    net: Net | None = None
    """How it is made; None for a function of the user's own that was called without arguments."""
    source: Path | None = None
    """Where its weights come from; None when they are those that it is initialised with."""
    folder: Path | None = None
    """Of the run, if it is one."""
    config: Config | None = None
    """What names its data, if it has some."""
    checkpoint: str | None = None
    """Which checkpoint of a run its weights are, by name."""
    assumed_classes: int | None = None
    """The `num_classes` that was assumed, because its function needs one and none was given."""
    thinned: bool = False
    """Whether its layers are smaller than those of the network that its code builds."""
    float_weights: str | None = None
    """A warning about float weights of a run that quantizes."""

    @cached_property
    def example(self) -> Any:
        """What its forward takes, a batch of one: what is known, else the most common input that it takes, or None."""
        return _guessed(self.model) if self.given is None else self.given

    @property
    def origin(self) -> str | None:
        """Where its weights come from, for messages."""
        return None if self.source is None else origin(self.checkpoint, self.source)

    @property
    def trained(self) -> bool:
        return self.source is not None

    @property
    def image(self) -> Tensor | None:
        """The example as images (1, C, H, W), where it is that."""
        found = self.example[0][0].unsqueeze(0) if is_detector(self.model) and self.example else self.example
        return found if isinstance(found, Tensor) else None

    def batches(self, part: Part) -> LabelledBatches | None:
        """Images and labels without augmentation; None where there are none, or for a detector."""
        source = None if self.config is None else getattr(self.config.dataset, part)
        if self.config is None or source is None or self.kind != "classification":
            return None
        test = self.config.dataset.test
        plain = source.model_copy(update={"transforms": (test or source).transforms, "num_workers": 0})
        data = build_dataset(plain, task=self.kind, num_classes=self.num_classes)
        return LabelledBatches(data, plain, shuffled=part == "train")

    def networks(self) -> dict[str, Network]:
        """What export writes: the parts that are tensors in and tensors out."""
        return self.networks_of(self.model)

    def networks_of(self, model: nn.Module) -> dict[str, Network]:
        """The same parts of a changed copy of the model."""
        image = self.image
        if image is None:
            raise GossamerError(f"{self.word}: nobody knows what its input is like; give --input, as 1,3,224,224")
        task = Finding(self.num_classes or 1) if self.kind == "detection" else Classification(self.num_classes or 1)
        try:
            with torch.no_grad():
                return task.networks(model, image)
        except GossamerError:
            raise
        except Exception as error:
            shape = tuple(image.shape)
            raise GossamerError(f"{self.word}: does not run on an input of shape {shape}: {reason(error)}") from error

    def half(self) -> Subject:
        """The same with a model in 16-bit floats."""
        example = pytree.tree_map_only(Tensor, lambda tensor: tensor.half(), self.example)
        return replace(self, model=self.model.half(), given=example)

    def about(self) -> dict[str, str]:
        """What a file of its weights says of it, so that it can be made again."""
        about = describe_model(self.name, self.kind, self.net, self.num_classes, self.image)
        return about | THINNED if self.thinned else about


class LabelledBatches:
    """Images (N, C, H, W) and labels (N,) of a dataset, as often as one asks."""

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


def open_subject(
    word: str,
    *,
    weights: Path | None = None,
    data: str | None = None,
    input_shape: str | None = None,
    sets: Sequence[str] = (),
    num_classes: int | None = None,
    imports: Sequence[str] = (),
) -> Subject:
    """The model that a word names.

    `weights` are a file or a run; `data` is `tiny` or a folder; `input_shape` is text as `1,3,224,224`; `sets` are
    settings of a config, as `runtime.seed=1`; `num_classes` is passed to the function that makes the model. `imports`
    are packages whose code may run where a run folder or a file names it.
    """
    path = Path(word)
    by_name = not path.is_dir() and path.suffix not in (*CONFIGS, *PROGRAMS, *WEIGHTS) and data is None and not sets
    if num_classes is not None and not by_name:
        raise GossamerError(f"--num-classes: {word if data is None else data} says how many classes there are; drop it")
    if num_classes is not None and num_classes < 1:
        raise GossamerError(f"--num-classes: expected a positive number, found {num_classes}")
    if path.is_dir() or path.suffix in CONFIGS:
        found = _of_run(word, weights, data, sets, imports)
    elif path.suffix in PROGRAMS:
        raise GossamerError(f"{word}: is a program and no model of torch; name the run or the model that it is of")
    elif path.suffix in WEIGHTS:
        found = _of_file(path, weights, data, sets, imports)
    elif "/" in word and ":" not in word and not word.startswith(FAMILIES):
        raise GossamerError(f"{word}: there is no such run folder or file; runs are in runs/ unless a config says else")
    elif data is not None or sets:
        found = _on_data(word, config_of({"net": {"type": word}}, word, sets, data).config, _file(weights), USER)
    else:
        found = _of_word(word, _file(weights), num_classes)
    return found if input_shape is None else _with_shape(found, input_shape)


# By what the word is


def _of_run(word: str, weights: Path | None, data: str | None, sets: Sequence[str], imports: Sequence[str]) -> Subject:
    """The model of a run, finished: its zeros are in its weights."""
    loaded = loaded_of(word, [*sets, "runtime.device=cpu"], data, weights, imports)
    with joined("cpu") as place, built(loaded, place, "export", Display(shown=False)) as runner:
        if runner.sparsifier is not None:
            runner.sparsifier.finish(runner.model)
        model, image, start = runner.outcome.eval(), runner.example(), runner.start
        return Subject(
            word=word,
            name=runner.folder.resolve().name if Path(word).is_dir() else loaded.name,
            model=model,
            kind=runner.kind,
            given=as_example(model, image),
            num_classes=runner.num_classes,
            net=runner.config.net,
            source=start.source or start.weights,
            checkpoint=named(runner),
            folder=runner.folder if Path(word).is_dir() else None,
            config=runner.config,
            thinned=runner.thinned,
            float_weights=runner.float_weights,
        )


def _of_file(
    path: Path, weights: Path | None, data: str | None, sets: Sequence[str], imports: Sequence[str]
) -> Subject:
    """The model that a file of weights says it is of."""
    if not path.is_file():
        raise GossamerError(f"{path}: there is no such file")
    about = read_description(path) if path.suffix == ".safetensors" else ModelDescription()
    if weights is not None:
        raise GossamerError(f"{path}: has weights itself; give one file of weights")
    net, classes = about.net, about.num_classes
    if net is None:
        way_out = f"name the model, and the file by --weights {path}"
        raise GossamerError(f"{path}: does not say what model its weights are of; {way_out}")
    if data is not None or sets:
        loaded = config_of({"net": {"type": net.type, "kwargs": net.kwargs}}, path.stem, sets, data)
        code = code_of(loaded.config.net)
        trust = trust_of(path, path.parent, imports, from_command_line(code, loaded.given))
        trust.check(code)
        return _on_data(str(path), loaded.config, path, trust)
    trust = trust_of(path, path.parent, imports)
    trust.check(code_of(net))
    if classes is None:
        model = _made(net.type, builder(net.type, trust), net.kwargs)
    else:
        model = build_net(net, classes, trust=trust)
    load_weights(model.eval(), path)
    example = None if about.input is None else as_example(model, _noise(torch.empty(about.input)))
    kind = "detection" if is_detector(model) else "classification"
    name = about.name or path.stem
    return Subject(str(path), name, model, kind, example, classes, net, path, thinned=about.thinned)


def _on_data(word: str, config: Config, weights: Path | None, trust: Trust) -> Subject:
    """A model for data: its classes are theirs."""
    kind = task_of(config)
    run_data = read_run_data(config, kind, 0, "export")
    model = build_net(config.net, run_data.num_classes, kind, trust=trust).eval()
    if weights is not None:
        load_weights(model, weights)
    images = run_data.test or run_data.train
    assert images is not None
    example = as_example(model, images[0][0].unsqueeze(0))
    thinned = weights is not None and is_thinned(weights)
    return Subject(
        word,
        _name(word),
        model,
        kind,
        example,
        run_data.num_classes,
        config.net,
        weights,
        None,
        config,
        thinned=thinned,
    )


def _of_word(word: str, weights: Path | None, given: int | None = None) -> Subject:
    make = builder(word, USER)
    classes, assumed = given, None
    if given is None and _needs_classes(make):
        classes = assumed = CLASSES
    model = _made(word, make, {} if classes is None else {"num_classes": classes})
    if weights is not None:
        state = read_weights(weights)
        found = _other_classes(model, state) if given is None else None
        if found is not None:
            classes, assumed = found, None
            model = _made(word, make, {"num_classes": classes})
        _fill(model, weights, state)
        emulate_as(model, weights)
    model = model.eval()
    kind = "detection" if is_detector(model) else "classification"
    net = Net(type=word, kwargs={} if classes is None or ":" not in word else {"num_classes": classes})
    thinned = weights is not None and is_thinned(weights)
    return Subject(
        word, _name(word), model, kind, None, classes, net, weights, assumed_classes=assumed, thinned=thinned
    )


def _needs_classes(make: Callable[..., Any]) -> bool:
    """Whether a function cannot be called without `num_classes`."""
    try:
        parameter = inspect.signature(make).parameters.get("num_classes")
    except (TypeError, ValueError):  # written in C, it does not say
        return False
    return parameter is not None and parameter.default is inspect.Parameter.empty


# Weights


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a state dict into the model, in the numbers of the file; every name must be there on both sides.

    The file of a thinned network gives the model its smaller layers; the integers of a file are emulated.
    """
    _fill(model, path, read_weights(path))
    emulate_as(model, path)


def _fill(model: nn.Module, path: Path, state: Mapping[str, Tensor]) -> None:
    shapes = {name: tensor.shape for name, tensor in state.items()} if is_thinned(path) else {}
    own = shrunk(model.state_dict(), shapes)
    for name, tensor in state.items():
        if name not in own:
            raise GossamerError(f"{path}: '{name}' is not in the model{nearest(name, own)}")
        if tensor.shape != own[name].shape:
            shapes = f"{tuple(tensor.shape)} in the file and {tuple(own[name].shape)} in the model"
            raise GossamerError(f"{path}: '{name}' has shape {shapes}")
    check_numbers(path, state, own)
    missing = [name for name in own if name not in state]
    if missing:
        raise GossamerError(f"{path}: '{missing[0]}' is missing ({len(missing)} of {len(own)} names are)")
    kinds = {tensor.dtype for tensor in state.values() if tensor.is_floating_point()}
    shrink_to(model, shapes)
    if len(kinds) == 1:
        model.to(kinds.pop())
    model.load_state_dict(state)


def _other_classes(model: nn.Module, state: Mapping[str, Tensor]) -> int | None:
    """How many classes weights were trained for, when nothing but that number differs from the model's own."""
    own = model.state_dict()
    wrong = [name for name in own if name in state and own[name].shape != state[name].shape]
    if not wrong or any(own[name].shape[1:] != state[name].shape[1:] for name in wrong):
        return None
    counts = {state[name].shape[0] for name in wrong}
    return counts.pop() if len(counts) == 1 else None


def _file(weights: Path | None) -> Path | None:
    return file_of(weights, "--weights") if weights is not None and weights.is_dir() else weights


# Inputs


def _with_shape(subject: Subject, text: str) -> Subject:
    try:
        sizes = [int(size) for size in text.replace("x", ",").split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise GossamerError(f"--input: expected a shape such as 1,3,224,224, found '{text}'")
    like = next((guess for guess in guesses(subject.model)), None)
    dtype = like.dtype if isinstance(like, Tensor) else torch.float32
    return replace(subject, given=as_example(subject.model, _noise(torch.empty(sizes, dtype=dtype))))


def _guessed(model: nn.Module) -> Any:
    """The most common input that the model runs on."""
    if is_detector(model):
        return as_example(model, _noise(torch.empty(1, 3, 320, 320)).sigmoid())
    for guess in guesses(model):
        example = _noise(guess[:1])
        try:
            with torch.no_grad():
                model(example)
        except Exception:  # noqa: BLE001  (any model, any reason: the next one is tried)
            continue
        return example
    return None


def _noise(like: Tensor) -> Tensor:
    """The same noise each time, for zeros would hide what a network computes; indices are 0, which is always there."""
    if not like.is_floating_point():
        return torch.zeros_like(like)
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(0)).to(like.dtype)


# Words


def _made(word: str, make: Callable[..., Any], kwargs: Mapping[str, Any]) -> nn.Module:
    try:
        made = make(**kwargs)
    except Exception as error:
        how = "without arguments" if not kwargs else f"with {dict(kwargs)}"
        raise GossamerError(f"{word}: calling it {how} failed: {reason(error)}") from error
    if not isinstance(made, nn.Module):
        raise GossamerError(f"{word}: expected a torch.nn.Module, found {type(made).__name__}")
    return made


def _name(word: str) -> str:
    return Path(word).stem if Path(word).suffix in WEIGHTS else word.rpartition(":")[2].rpartition("/")[2]
