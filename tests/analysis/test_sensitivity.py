"""How far pruning one layer moves the outputs, and shares that follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gossamer.analysis.sensitivity import SensitivityCurve, allocate, sensitivity
from gossamer.errors import GossamerError, SparsityError
from gossamer.sparse import NM, Block, Filter

IMAGES = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(128, 5)
    )


def test_the_distance_is_that_of_the_outputs_relative_to_their_length() -> None:
    model = network()
    curve = sensitivity(model, [IMAGES], [0.5, 0.9])["5.weight"]
    model.eval()
    whole, weight = model(IMAGES).detach(), model[5].weight
    for sparsity, moved in zip(curve.sparsities, curve.moved, strict=True):
        pruned = weight.detach().clone()
        pruned.view(-1)[weight.abs().flatten().argsort()[: round(640 * sparsity)]] = 0
        with torch.no_grad():
            found = nn.functional.linear(model[:5](IMAGES), pruned, model[5].bias)
        assert moved == pytest.approx(float((found - whole).norm() / whole.norm()), rel=1e-5)


def test_the_mean_is_over_the_batches_that_are_looked_at() -> None:
    model = network()
    one, two, three = IMAGES[:2], IMAGES[2:], IMAGES[:1] * 100
    both = sensitivity(model, [one, two, three], [0.5], batches=2)["0.weight"].moved[0]
    alone = [sensitivity(model, [batch], [0.5])["0.weight"].moved[0] for batch in (one, two)]
    assert both == pytest.approx(sum(alone) / 2)


@pytest.mark.parametrize(
    "batch",
    [IMAGES, (IMAGES, torch.zeros(4)), [IMAGES, torch.zeros(4)], ((IMAGES,), torch.zeros(4)), {"input": IMAGES}],
    ids=["inputs", "pair", "list", "arguments", "keywords"],
)
def test_batches_come_in_several_forms(batch: Any) -> None:
    expected = sensitivity(network(), [IMAGES], [0.5])
    assert sensitivity(network(), iter([batch]), [0.5]) == expected


@dataclass
class Answer:
    logits: Tensor
    loss: Tensor
    step: int = 3


class Wrapped(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = network(), kind

    def forward(self, x: Tensor) -> Any:
        found = self.inner(x)
        forms: dict[str, Any] = {
            "tuple": (found, found.argmax(dim=1)),
            "dict": {"logits": found, "loss": found.sum(), "names": "abc"},
            "list": [found.sum(), [found]],
            "dataclass": Answer(found, found.sum()),
        }
        return forms[self.kind]


@pytest.mark.parametrize("kind", ["tuple", "dict", "list", "dataclass"])
def test_outputs_come_in_several_forms(kind: str) -> None:
    expected = sensitivity(network(), [IMAGES], [0.5])["0.weight"].moved
    assert sensitivity(Wrapped(kind), [IMAGES], [0.5])["inner.0.weight"].moved == expected


def test_the_weights_are_restored_when_the_model_fails_half_way() -> None:
    class Fails(nn.Sequential):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Fails.calls += 1
            if Fails.calls == 3:
                raise KeyboardInterrupt
            return super().forward(x)

    model = Fails(*network())
    before = model[0].weight.detach().clone()
    with pytest.raises(KeyboardInterrupt):
        sensitivity(model, [IMAGES], [0.5, 0.9])
    assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize(("pattern", "units"), [(Block(1, 4), 64), (Filter(), 8), (NM(2, 4), 256)])
def test_layers_are_pruned_in_the_pattern(pattern: Any, units: int) -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 1), nn.ReLU(), nn.ConvTranspose2d(8, 8, 2))
    seen: list[Tensor] = []
    # What a hook of the model keeps would be taken back; this one is not the model's.
    handle = nn.modules.module.register_module_forward_hook(
        lambda layer, inputs, output: seen.append(layer.weight.detach().clone()) if layer is model[2] else None
    )
    curve = sensitivity(model, [torch.randn(1, 4, 3, 3)], [0.5], ["2.weight"], pattern)["2.weight"]
    handle.remove()
    assert curve.units == units
    assert pattern.violations(seen[1].transpose(0, 1)) == 0
    assert int((seen[1] == 0).sum()) == 128


def test_numbers_that_overflow_count_as_infinitely_far() -> None:
    class Inverse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return 1 / self.layer(x)

    curve = sensitivity(Inverse(), [torch.ones(1, 2)], [0.5, 1.0])["layer.weight"]
    assert curve.moved[1] == float("inf")
    assert curve.within(1e9) < 1.0


@pytest.mark.parametrize("sparsities", [[], [0.0], [1.5]])
def test_sparsities_that_are_none_are_refused(sparsities: list[float]) -> None:
    with pytest.raises(SparsityError, match="sparsities must be above 0 and at most 1"):
        sensitivity(network(), [IMAGES], sparsities)


def test_between_measurements_the_curve_is_straight() -> None:
    curve = SensitivityCurve("a", 100, (0.5, 0.9), (0.1, 0.5))
    assert [curve.at(s) for s in (0.0, 0.25, 0.5, 0.7, 0.9, 1.0)] == pytest.approx([0, 0.05, 0.1, 0.3, 0.5, 0.5])
    assert [curve.within(d) for d in (0.0, 0.05, 0.1, 0.3, 0.5, 9.0)] == pytest.approx([0, 0.25, 0.5, 0.7, 0.9, 0.9])


curves = st.lists(
    st.tuples(
        st.integers(1, 2000),
        st.lists(st.floats(0, 3), min_size=3, max_size=3).map(sorted),
        st.floats(0.0, 1.0),
    ),
    min_size=1,
    max_size=6,
)


@given(curves, st.floats(0, 1))
def test_shares_add_up_exactly_and_respect_the_bounds(layers: list[Any], sparsity: float) -> None:
    found = {
        str(i): SensitivityCurve(str(i), units, (0.5, 0.8, 0.95), tuple(moved))
        for i, (units, moved, _) in enumerate(layers)
    }
    caps = {str(i): cap for i, (_, _, cap) in enumerate(layers) if i % 2}
    most = {name: int(min(0.95, caps.get(name, 1.0)) * curve.units + 1e-9) for name, curve in found.items()}
    total = sum(curve.units for curve in found.values())
    if round(total * sparsity) > sum(most.values()):
        with pytest.raises(SparsityError, match="cannot be reached"):
            allocate(found, sparsity, caps)
        return
    shares, _ = allocate(found, sparsity, caps)
    counts = {name: round(share * found[name].units) for name, share in shares.items()}
    assert sum(counts.values()) == round(total * sparsity)
    assert all(0 <= counts[name] <= most[name] for name in counts)


def test_a_layer_that_moves_the_outputs_more_gives_less() -> None:
    found = {
        "robust": SensitivityCurve("robust", 1000, (0.5, 0.9), (0.01, 0.1)),
        "fragile": SensitivityCurve("fragile", 1000, (0.5, 0.9), (0.1, 1.0)),
    }
    shares, distance = allocate(found, 0.6)
    assert shares["robust"] > 0.6 > shares["fragile"]
    assert found["robust"].at(shares["robust"]) == pytest.approx(distance, rel=0.02)
    assert found["fragile"].at(shares["fragile"]) == pytest.approx(distance, rel=0.02)


def test_outputs_that_do_not_move_are_refused_in_one_sentence() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    nn.init.zeros_(model[1].weight)
    with pytest.raises(GossamerError, match=r"^data: pruning does not change the outputs"):
        sensitivity(model, [torch.ones(2, 4)], [0.5], names=["0.weight"])


def test_a_model_that_is_sparser_than_asked_for_may_stay_as_it_is() -> None:
    model = nn.Linear(4, 4)
    with torch.no_grad():
        model.weight[:, 1:] = 0
    assert sensitivity(model, [torch.ones(2, 4)], [0.5])["weight"].moved == (0.0,)


class Masked(nn.Module):
    """Scores of which some are masked."""

    def __init__(self, masked: int, value: float) -> None:
        super().__init__()
        self.layer, self.masked, self.value = nn.Linear(4, 4, bias=False), masked, value
        nn.init.ones_(self.layer.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).index_fill(1, torch.arange(self.masked), self.value)


@pytest.mark.parametrize("value", [float("-inf"), float("nan")])
def test_entries_that_are_not_finite_are_left_out(value: float) -> None:
    found = sensitivity(Masked(2, value), [torch.ones(2, 4)], [0.25, 1.0])["layer.weight"]
    assert 0 <= found.moved[0] < found.moved[1] == 1.0
    with pytest.raises(GossamerError, match=r"^data: the model returns no finite floating-point numbers"):
        sensitivity(Masked(4, value), [torch.ones(2, 4)], [0.5])


class Counts(nn.Linear):
    """Notes how many samples come in."""

    seen: ClassVar[set[int]] = set()

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        Counts.seen.add(len(x))
        return super().forward(x)


def test_of_a_large_batch_the_first_samples_are_looked_at(caplog: pytest.LogCaptureFixture) -> None:
    model = Counts()
    with caplog.at_level("INFO", "gossamer"):
        sensitivity(model, [(torch.randn(256, 4), torch.zeros(256))], [0.5])
    assert Counts.seen == {32}
    assert [record.getMessage() for record in caplog.records] == ["Measuring 1 layers at 1 sparsities on 1 batches"]


def test_a_batch_that_cannot_be_cut_is_used_whole() -> None:
    class Nodes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
            return self.layer(nodes)[edges]

    data = [((torch.randn(64, 4), torch.tensor([63, 1, 2])), None)]
    assert sensitivity(Nodes(), data, [0.5])["layer.weight"].moved[0] > 0
