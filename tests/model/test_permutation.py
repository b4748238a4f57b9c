"""Permuting a model together with its gradients, optimizer, wrappers and checkpoints; and leaving it as it was."""

from __future__ import annotations

import copy
import functools
import random
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (as everybody writes it)
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from gossamer.model import permute as permutation
from gossamer.model.parameters import get_tensor, prunable
from gossamer.model.permute import Permutation, find_permutation
from tests.model.keeping import keeps, random_search, randomised, reason
from tests.model.test_cases import Written, conv, image


@pytest.fixture(autouse=True)
def _every_channel_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permutation, "search_each", random_search)


def network() -> nn.Module:
    model = nn.Sequential(
        conv(8, bias=False), nn.BatchNorm2d(16), nn.ReLU(), conv(bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 8),
    )  # fmt: skip
    return randomised(model)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.randn(4, 8, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()


# Training goes on


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
        functools.partial(torch.optim.AdamW, lr=0.01, amsgrad=True),
        functools.partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
        functools.partial(torch.optim.Adam, lr=0.01, foreach=True),
        functools.partial(torch.optim.Adagrad, lr=0.01),
    ],
    ids=lambda make: make.func.__name__,
)
def test_permuting_before_training_on_is_the_same_as_permuting_after(make: Any):
    first, second = network(), network()
    one, two = make(first.parameters()), make(second.parameters())
    trained(first, one, 3)
    trained(second, two, 3)
    found = find_permutation(first, prunable(first), example_inputs=image(), optimizer=one)
    assert reason(found, "8.weight") is None
    found.apply(first, one)
    trained(first, one, 3)
    trained(second, two, 3)
    found.apply(second, two)
    for name, tensor in first.state_dict().items():
        assert torch.allclose(tensor, second.state_dict()[name], rtol=1e-9, atol=1e-12), name


def test_gradients_and_companions_move_with_their_weights():
    model = network()
    model(image()).square().mean().backward()
    weights = {name: get_tensor(model, name) for name in prunable(model)}
    before = {name: (weight.detach().clone(), weight.grad.clone()) for name, weight in weights.items()}
    masks = {name: [weight.detach() > 0] for name, weight in weights.items()}
    found = find_permutation(model, list(weights), example_inputs=image())
    found.apply(model, companions=masks)
    for name, weight in weights.items():
        assert torch.equal(weight, found.of(name, before[name][0]))
        assert torch.equal(weight.grad, found.of(name, before[name][1]))
        assert torch.equal(masks[name][0], weight > 0)


def test_state_that_cannot_be_reordered_holds_its_weights():
    model = network()
    optimizer = torch.optim.Adafactor(model.parameters())
    trained(model, optimizer, 1)
    found = find_permutation(model, prunable(model), example_inputs=image(), optimizer=optimizer)
    assert not found.moves
    assert "the optimizer's 'row_var' cannot be reordered" in (reason(found, "8.weight") or "")


def test_state_that_belongs_to_all_parameters_together_holds_them_all():
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = model(image()).square().mean()
        value.backward()
        return value

    optimizer.step(loss)
    found = find_permutation(model, prunable(model), example_inputs=image(), optimizer=optimizer)
    assert not found.moves


def test_a_preconditioner_that_happens_to_have_the_shape_of_its_weight_holds_it():
    model = randomised(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            optimizer.state[parameter]["left"] = torch.eye(parameter.shape[0])
    found = find_permutation(model, prunable(model), example_inputs=torch.zeros(2, 8).double(), optimizer=optimizer)
    assert not found.moves


# Wrappers


class _Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


@pytest.mark.parametrize("wrap", ["DistributedDataParallel", "compile", "compiled_part"])
def test_wrapped_models_move_under_their_clean_names(wrap: str):
    plain = network()
    expected = plain.eval()(image())
    if wrap == "compile":
        model = torch.compile(plain)
    elif wrap == "compiled_part":
        model = plain
        model[3] = torch.compile(plain[3])
    else:
        model = type(wrap, (_Wrapper,), {})(plain)
    found = find_permutation(model, ["3.weight", "8.weight"], example_inputs=image())
    assert [layer.reason for layer in found.layers] == [None, None]
    found.apply(model)
    with torch.compiler.set_stance("force_eager"):
        assert (model(image()) - expected).abs().max() < 1e-9


def test_layers_that_read_the_same_channels_share_one_order():
    model = randomised(
        Written(
            lambda self, x: (self.b(F.relu(self.a(x))), self.c(F.relu(self.a(x)))), a=conv(8), b=conv(), c=conv(16, 8)
        )
    )
    found = keeps(model, image(), moving=["b.weight", "c.weight"])
    (group,) = found.groups
    assert group["searched_on"] == ["b.weight", "c.weight"]
    assert group["moved_along"] == ["a.bias", "a.weight"]
    assert group["channels"] == 16


def test_a_search_is_only_asked_for_channels_that_may_move_and_its_order_is_used(monkeypatch: pytest.MonkeyPatch):
    from gossamer.sparse.permutation import kept_magnitude, search_each

    monkeypatch.setattr(permutation, "search_each", search_each)
    model = network()
    found = find_permutation(model, prunable(model), example_inputs=image())
    for layer in found.layers:
        weight = get_tensor(model, layer.name).detach()
        total = float(weight.abs().sum())
        moved = found.of(layer.name, weight).movedim(1, -1).reshape(-1, weight.shape[1])
        assert layer.kept == pytest.approx(kept_magnitude(moved) / total, rel=1e-5)
        assert layer.kept_before <= layer.kept + 1e-9 <= layer.bound + 2e-9
    assert found.layers[1].kept > found.layers[1].kept_before
    assert found.layers[0].reason == "its input is the network's input"


def test_the_same_model_gives_the_same_permutation_whatever_the_seed():
    def once(seed: int) -> Permutation:
        torch.manual_seed(seed)
        return find_permutation(network(), ["3.weight", "8.weight"], example_inputs=image())

    one, two = once(0), once(1)
    assert one.moves.keys() == two.moves.keys()
    for name, moves in one.moves.items():
        assert all(torch.equal(a.source, b.source) for a, b in zip(moves, two.moves[name], strict=True))


def test_progress_runs_from_nothing_to_everything():
    told: list[float] = []
    find_permutation(
        network(), ["3.weight", "8.weight"], example_inputs=image(), progress=lambda label, share: told.append(share)
    )
    assert told == sorted(told)
    assert told[-1] == 1.0


# Shapes are guessed


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Conv1d(3, 16, 3), nn.Conv1d(16, 8, 3)),
        nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 8, 3)),
        nn.Sequential(nn.Conv3d(3, 16, 3), nn.Conv3d(16, 8, 3)),
        nn.Sequential(nn.Conv2d(3, 16, 3), nn.Flatten(), nn.Linear(16 * 30 * 30, 16), nn.Linear(16, 8)),
        nn.Sequential(nn.Linear(10, 16), nn.Linear(16, 8)),
        nn.Sequential(nn.Embedding(10, 16), nn.Linear(16, 8)),
        nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 16), nn.Linear(16, 8)),
        nn.Sequential(nn.ConvTranspose3d(3, 16, 3), nn.ConvTranspose3d(16, 8, 3)),
    ],
    ids=lambda model: "_".join(type(layer).__name__ for layer in model),
)
def test_inputs_of_usual_models_are_guessed(model: nn.Module):
    assert find_permutation(model, prunable(model)).layers[-1].reason is None


# Models that cannot be traced


def test_a_model_whose_forward_raises_is_left_alone_and_says_why():
    model = Written(lambda self, x: self.missing(x), a=conv(8))
    found = find_permutation(model, ["a.weight"], example_inputs=image())
    assert not found.moves
    assert "the model could not be traced: AttributeError" in (found.untraceable or "")
    assert found.layers[0].reason == found.untraceable


def test_a_model_without_example_and_known_layers_asks_for_one():
    model = Written(lambda self, x, y: x @ self.a, a=nn.Parameter(torch.randn(8, 8)))
    assert "give example_inputs" in (find_permutation(model, ["a"]).untraceable or "")


def test_weights_that_nothing_uses_say_so():
    model = Written(lambda self, x: self.a(x), a=conv(8), idle=conv())
    found = find_permutation(model, ["idle.weight"], example_inputs=image().float())
    assert found.layers[0].reason == "the network does not use it, as far as traced"


class Branching(nn.Module):
    """Goes one way or another, by what the numbers are."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(8), nn.BatchNorm2d(16), nn.ReLU(), conv(), nn.ReLU(), conv())
        self.left = nn.Sequential(conv(), nn.ReLU(), conv(16, 8))
        self.right = nn.Sequential(conv(), nn.ReLU(), conv(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        return self.left(x) if x.sum() > 0 else self.right(x)


def outputs_of_both_ways(model: nn.Module) -> list[Tensor]:
    twin = copy.deepcopy(model).eval()
    with torch.no_grad():
        return [twin(image()), twin(-image()), twin(image() * 100), twin(image() - 100)]


def test_a_model_with_data_dependent_control_flow_is_traced_in_parts_if_asked_to():
    model = randomised(Branching())
    before = outputs_of_both_ways(model)
    found = find_permutation(model, prunable(model), example_inputs=image(), parts=True)
    assert found.untraceable is None
    assert "could not be traced as a whole" in (found.note or "")
    assert "held in place: body" in (found.note or "")
    found.apply(model)
    for a, b in zip(before, outputs_of_both_ways(model), strict=True):
        assert (a - b).abs().max() / a.abs().max() < 1e-9
    assert reason(found, "body.3.weight") is None
    assert reason(found, "body.5.weight") is None
    assert reason(found, "body.0.weight") == "its input is the input of 'body', which was traced on its own"


def test_a_weight_that_code_around_a_part_uses_stays_in_place():
    class Reaching(Branching):
        def forward(self, x: Tensor) -> Tensor:
            x = self.body(x) + self.body[5](self.body[0](x))
            return self.left(x) if x.sum() > 0 else self.right(x) * self.right[0].weight.mean()

    model = randomised(Reaching())
    before = outputs_of_both_ways(model)
    found = find_permutation(model, prunable(model), example_inputs=image(), parts=True)
    found.apply(model)
    for a, b in zip(before, outputs_of_both_ways(model), strict=True):
        assert (a - b).abs().max() / a.abs().max() < 1e-9
    assert "used outside the parts" in (reason(found, "body.5.weight") or "")


def test_a_model_with_data_dependent_control_flow_is_left_alone_unless_asked():
    """Its code may reach for layers inside a part on a path that the example does not take."""
    found = find_permutation(randomised(Branching()), ["body.3.weight"], example_inputs=image())
    assert not found.moves
    assert "its control flow depends on values" in (reason(found, "body.3.weight") or "")


def test_a_part_that_is_called_in_too_many_ways_is_not_traced():
    class Many(Branching):
        def forward(self, x: Tensor) -> Tensor:
            for size in range(8, 24):
                x = self.body(x[..., :8, :8].repeat(1, 1, 1, 3)[..., :size])[..., :8]
            return self.left(x) if x.sum() > 0 else self.right(x)

    found = find_permutation(randomised(Many()), prunable(Many()), example_inputs=image(), parts=True)
    assert reason(found, "body.3.weight") is not None


def test_wrong_guesses_leave_no_report_of_torch(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]):
    model = nn.Sequential(nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(16 * 9 * 7, 16))
    assert "could not be traced" in (find_permutation(model, ["2.weight"]).untraceable or "")
    assert not caplog.text
    assert "".join(capfd.readouterr()) == ""


def test_a_model_with_layers_that_are_not_made_yet_is_told_of():
    assert find_permutation(nn.Sequential(nn.LazyLinear(16), nn.Linear(16, 16)), ["1.weight"]).untraceable


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Linear(16, 16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.b(x + y)


def test_the_number_of_inputs_is_given_as_the_reason():
    assert "forward takes 2 inputs (x, y)" in (find_permutation(TwoInputs(), ["b.weight"]).untraceable or "")


class Caching(nn.Module):
    """Keeps what it computes where only its class, its module or a function holds it."""

    shared: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = conv(8), conv()

    def forward(self, x: Tensor) -> Tensor:
        key = str(tuple(x.shape))
        if key not in self.shared:
            self.shared[key] = (torch.linspace(0, 1, 16, dtype=x.dtype).view(1, 16, 1, 1), 1)
        if key not in KEPT:
            KEPT[key] = torch.ones(1, 16, 1, 1, dtype=x.dtype)
        return self.b(self.a(x) * self.shared[key][0] * KEPT[key] + made(16)["one"])


KEPT: dict[str, Tensor] = {}


@functools.cache
def made(size: int) -> dict[str, Tensor]:
    return {"one": torch.ones(1, size, 1, 1, dtype=torch.float64)}


def clear_caches() -> None:
    Caching.shared.clear()
    KEPT.clear()
    made.cache_clear()


def test_a_model_that_keeps_fake_tensors_outside_itself_is_reported_with_the_modules_name():
    clear_caches()
    model = randomised(nn.Sequential(Caching(), conv()))
    found = find_permutation(model, ["0.b.weight", "1.weight"], example_inputs=image())
    clear_caches()
    assert (found.untraceable or "").startswith("'0' stores tensors outside the model, such as in the cache of a")
    assert not found.moves


def test_a_model_that_seeds_its_random_numbers_is_left_alone():
    class Seeding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = conv(8), conv()

        def forward(self, x: Tensor) -> Tensor:
            torch.manual_seed(3)
            return self.b(self.a(x) * torch.rand(16, 1, 1, dtype=x.dtype))

    assert "seeds the random numbers" in (
        find_permutation(Seeding().double(), ["b.weight"], example_inputs=image()).untraceable or ""
    )


def test_a_model_that_puts_other_memory_under_a_tensor_is_left_alone():
    class Assigning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = conv(8), conv()

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.a(x)
            hidden.data = hidden * torch.linspace(0, 1, 16, dtype=x.dtype).view(1, 16, 1, 1)
            return self.b(hidden)

    assert "other memory" in (
        find_permutation(Assigning().double(), ["b.weight"], example_inputs=image()).untraceable or ""
    )


# The model is left as it was


class Leaving(nn.Module):
    """Leaves traces wherever it can."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.drop, self.b = conv(8), nn.BatchNorm2d(16), nn.Dropout(0.5), conv()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("average", torch.zeros(16, dtype=torch.float64))
        self.plain = torch.zeros(3)
        self.cache: dict[str, Any] = {}
        self.history: list[Tensor] = []
        self.nested = {"deep": [set(), {"x": 0}]}
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.calls += 1
        self.plain += 1
        self.new_attribute = x
        x = self.drop(self.norm(self.a(x)))
        self.average.lerp_(x.mean((0, 2, 3)), 0.1)
        self.cache["x"] = x
        self.history.append(x)
        self.nested["deep"][1]["x"] = x
        random.random(), np.random.rand(), torch.rand(1)
        return self.b(x * positions(16).view(-1, 1, 1))


@functools.lru_cache
def positions(count: int) -> Tensor:
    return torch.arange(count)


def fakes_in(value: Any, seen: set[int]) -> list[Any]:
    if id(value) in seen:
        return []
    seen.add(id(value))
    if isinstance(value, FakeTensor):
        return [value]
    if isinstance(value, nn.Module):
        return fakes_in(vars(value), seen)
    if isinstance(value, dict):
        return [fake for item in value.values() for fake in fakes_in(item, seen)]
    if isinstance(value, list | tuple | set):
        return [fake for item in value for fake in fakes_in(item, seen)]
    return []


def test_tracing_a_model_leaves_no_trace_in_it():
    model = randomised(Leaving())
    model.train()
    model.norm.eval()
    model.b.requires_grad_(False)
    seen: list[Tensor] = []
    handle = model.a.register_forward_hook(lambda module, args, output: seen.append(output))
    model(image())
    seen.clear()
    modes = [module.training for module in model.modules()]
    state = copy.deepcopy(model.state_dict())
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    last, count, plain = model.cache["x"], model.count, model.plain.clone()
    wants_gradient = [parameter.requires_grad for parameter in model.parameters()]
    identities = [id(tensor) for tensor in [*model.parameters(), *model.buffers()]]
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    find_permutation(model, ["b.weight"], example_inputs=image())
    assert states == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    assert modes == [module.training for module in model.modules()]
    assert attributes == {name: set(vars(module)) for name, module in model.named_modules()}
    assert (model.cache["x"] is last, len(model.history), model.count, seen) == (True, 1, count, [])
    assert torch.equal(model.plain, plain)
    assert wants_gradient == [parameter.requires_grad for parameter in model.parameters()]
    assert identities == [id(tensor) for tensor in [*model.parameters(), *model.buffers()]]
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert not fakes_in(model, set())
    assert not isinstance(positions(16), FakeTensor)
    assert all(parameter.grad is None for parameter in model.parameters())
    handle.remove()
    model(image())


def test_an_interruption_while_reordering_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch):
    model = network()
    found = find_permutation(model, ["3.weight"], example_inputs=image())
    assert len(found.moves) > 2
    state = copy.deepcopy(model.state_dict())
    plain, calls = Permutation.of, []

    def failing(self: Permutation, name: str, tensor: Tensor) -> Tensor:
        calls.append(name)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return plain(self, name, tensor)

    monkeypatch.setattr(Permutation, "of", failing)
    with pytest.raises(KeyboardInterrupt):
        found.apply(model)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_an_object_with_slots_is_put_back():
    class Counter:
        __slots__ = ("calls", "last")

        def __init__(self) -> None:
            self.calls, self.last = 0, None

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.counter, self.a, self.b = Counter(), conv(8), conv()

        def forward(self, x: Tensor) -> Tensor:
            self.counter.calls += 1
            self.counter.last = self.a(x)
            return self.b(self.counter.last)

    model = randomised(Counting())
    assert find_permutation(model, ["b.weight"], example_inputs=image()).untraceable is None
    assert (model.counter.calls, model.counter.last) == (0, None)
