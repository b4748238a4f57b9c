"""Loss and accuracy of a classifier, and batches that cannot have them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gossamer.analysis.accuracy import classifier_score
from gossamer.errors import GossamerError
from tests.analysis.labelled_digits import parts, trained

PIXELS = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 1, 0])


def test_batches_of_different_sizes_count_by_their_samples() -> None:
    model, (_, _, test) = trained().eval(), parts()
    pixels, labels = (torch.cat(tensors) for tensors in zip(*test, strict=True))
    with torch.no_grad():
        scores = model(pixels)
    found = classifier_score(model, [(pixels[:1], labels[:1]), (pixels[1:], labels[1:])])
    assert found.loss == pytest.approx(float(cross_entropy(scores, labels)), rel=1e-5)
    assert found.accuracy == float((scores.argmax(dim=1) == labels).double().mean())


def test_the_model_is_judged_in_evaluation_mode_and_left_in_its_own() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5), nn.BatchNorm1d(2)).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.random.get_rng_state()
    found = [classifier_score(model, [(PIXELS, LABELS)]) for _ in range(2)]
    assert found[0] == found[1]
    assert all(layer.training for layer in model.modules())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@dataclass
class Answer:
    loss: Tensor
    logits: Tensor


class Wrapped(nn.Module):
    """Returns its scores as transformers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(3, 2)

    def forward(self, pixels: Tensor) -> Answer:
        scores = self.inner(pixels)
        return Answer(scores.sum(), scores)


def test_scores_inside_a_dataclass_and_inputs_by_keyword_are_found() -> None:
    model = Wrapped()
    expected = classifier_score(model.inner, [(PIXELS, LABELS)])
    assert classifier_score(model, [({"pixels": PIXELS}, LABELS)]) == expected


def test_pixels_of_a_segmentation_count_one_by_one() -> None:
    scores = torch.zeros(2, 3, 4, 4)
    scores[:, 1] = 5.0
    labels = torch.ones(2, 4, 4, dtype=torch.long)
    labels[0, 0] = 2
    assert classifier_score(nn.Identity(), [(scores, labels)]).accuracy == 28 / 32


def test_a_loss_that_overflows_is_infinite() -> None:
    model = nn.Identity()
    assert classifier_score(model, [(torch.full((2, 2), float("nan")), LABELS[:2])]).loss == float("inf")


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "no labelled samples"),
        ([PIXELS], "found another in batch 1; without such labels, use sensitivity"),
        ([(PIXELS, LABELS), (PIXELS,)], "found another in batch 2"),
        ([(PIXELS, LABELS.float())], "found another in batch 1"),
        ([(PIXELS, [0, 1, 1, 0])], "found another in batch 1"),
        ([(PIXELS, LABELS + 1)], "labels are 1 to 2, but the model has classes 0 to 1"),
        ([(PIXELS, LABELS - 1)], "labels are -1 to 0"),
        ([(PIXELS, LABELS[:3])], "no class scores for labels of shape \\(3,\\)"),
        ([(PIXELS[:, :2], LABELS)], "fails on a batch \\(RuntimeError"),
    ],
)
def test_batches_without_usable_labels_are_refused(batches: Any, message: str) -> None:
    with pytest.raises(GossamerError, match=message):
        classifier_score(nn.Linear(3, 2), batches)
