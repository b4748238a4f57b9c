"""What each layer costs in loss and accuracy when it alone is pruned."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gossamer.analysis.accuracy import classifier_score
from gossamer.analysis.sensitivity import one_shot
from gossamer.errors import GossamerError, SparsityError
from gossamer.sparse import NM, Channel, Filter
from tests.analysis.labelled_digits import parts, trained

_, CALIBRATION, _ = parts()
LEVELS = [0.5, 0.9]


def pruned_by_hand(model: nn.Module, name: str, keep: Tensor) -> nn.Module:
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.get_parameter(name).mul_(keep)
    return changed


def test_a_curve_is_the_score_of_the_model_with_that_layer_pruned_by_magnitude() -> None:
    model = trained()
    curve = next(c for c in one_shot(model, CALIBRATION, LEVELS) if c.name == "first.weight")
    weight = model.first.weight.detach()
    for sparsity, loss, accuracy in zip(curve.sparsities, curve.loss, curve.accuracy, strict=True):
        cut = weight.abs().flatten().sort().values[round(weight.numel() * sparsity) - 1]
        expected = classifier_score(pruned_by_hand(model, "first.weight", weight.abs() > cut), CALIBRATION)
        assert (loss, accuracy) == (pytest.approx(expected.loss), expected.accuracy)


def test_filters_behind_a_residual_form_one_curve_and_go_together() -> None:
    model = trained()
    curves = one_shot(model, CALIBRATION, [0.5], pattern=Filter())
    assert [curve.members for curve in curves] == [("stem.weight", "second.weight"), ("first.weight",)]
    relative = [w.abs().flatten(1).mean(1) for w in (model.stem.weight.detach(), model.second.weight.detach())]
    scores = sum((score / score.mean() for score in relative), torch.zeros(16))
    keep = (scores > scores.sort().values[7]).float()[:, None, None, None]
    by_hand = pruned_by_hand(pruned_by_hand(model, "stem.weight", keep), "second.weight", keep)
    assert curves[0].loss[0] == pytest.approx(classifier_score(by_hand, CALIBRATION).loss)


def test_layers_that_read_the_same_channels_form_one_curve() -> None:
    class Forked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.stem, self.left, self.right = nn.Linear(64, 8), nn.Linear(8, 10), nn.Linear(8, 10)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x.flatten(1)).relu()
            return self.left(x) + self.right(x)

    curves = one_shot(Forked(), CALIBRATION, [0.5], pattern=Channel())
    assert [curve.members for curve in curves] == [("stem.weight",), ("left.weight", "right.weight")]


def test_curves_of_a_model_that_cannot_be_followed_say_that_layers_were_pruned_alone() -> None:
    class Deciding(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if float(x.sum()) > 0 else -x)

    layers = nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 10)
    for model, message in (
        (Deciding(*layers), "are pruned one by one"),
        (nn.Sequential(*layers), None),
    ):
        (curve,) = one_shot(model, CALIBRATION[:1], [0.5], pattern=Filter())
        assert message == curve.note or (message is not None and message in (curve.note or ""))


def test_a_weight_behind_a_flattening_keeps_a_curve_of_its_own() -> None:
    curves = one_shot(trained(), CALIBRATION, [0.5], pattern=Channel(), names=["first.weight", "head.weight"])
    assert [curve.members for curve in curves] == [("first.weight",), ("head.weight",)]


def test_tied_weights_form_one_curve_under_any_of_their_names() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 10))
    model[3].weight = model[1].weight
    assert [c.name for c in one_shot(model, CALIBRATION, [0.5])] == ["1.weight", "4.weight"]
    assert [c.name for c in one_shot(model, CALIBRATION, [0.5], names=["3.weight", "1.weight"])] == ["1.weight"]


@pytest.mark.parametrize("pattern", [None, Filter()], ids=str)
def test_the_model_and_all_random_states_are_left_as_they_were(pattern: Any) -> None:
    model = trained()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    states = torch.random.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    first = one_shot(model, CALIBRATION, [0.5], pattern=pattern)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(layer.training for layer in model.modules())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(torch.random.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]
    assert one_shot(model, CALIBRATION, [0.5], pattern=pattern) == first


def test_only_the_first_samples_are_read() -> None:
    def endless() -> Any:
        while True:
            yield from CALIBRATION

    assert one_shot(trained(), endless(), [0.9], samples=128) == one_shot(trained(), CALIBRATION[:2], [0.9])


def test_progress_rises_from_layer_to_layer_to_the_end() -> None:
    seen: list[tuple[str, float]] = []
    one_shot(trained(), CALIBRATION[:1], LEVELS, progress=lambda label, share: seen.append((label, share)))
    shares = [share for _, share in seen]
    assert shares == sorted(shares)
    assert (seen[0], seen[-1]) == (("stem.weight", 0.0), ("", 1.0))


def test_bad_questions_are_refused() -> None:
    model = trained()
    with pytest.raises(SparsityError, match=r"found \[1.5\]"):
        one_shot(model, CALIBRATION, [1.5])
    with pytest.raises(GossamerError, match=r"no weight 'frist.weight'; nearest: 'first.weight'"):
        one_shot(model, CALIBRATION, [0.5], names=["frist.weight"])
    with pytest.raises(GossamerError, match=r"does not fit 'stem.weight'"):
        one_shot(model, CALIBRATION, [0.5], names=["stem.weight"], pattern=NM(2, 4))
    with torch.no_grad():
        model.head.weight[0, 0] = math.nan
    with pytest.raises(GossamerError, match=r"'head.weight' contains NaN"):
        one_shot(model, CALIBRATION, [0.5])
