"""Top-1 and top-5 by counting, and the numbers of COCO on scenes whose numbers are known."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, multiprocessing, nn

from gossamer.errors import GossamerError
from gossamer.runner import tasks as metrics
from gossamer.runner.tasks import COCO, Classification, ObjectDetection
from tests.ranks import in_ranks


@dataclass
class Batch:
    images: Tensor | list[Tensor]
    targets: Tensor | list[dict[str, Tensor]]


class Answers(nn.Module):
    """A detector that finds what it was expected, in the order of images."""

    def __init__(self, *answers):
        super().__init__()
        self.answers = list(answers)

    def forward(self, images, targets=None):
        return [self.answers.pop(0) for _ in images]


def found(*rows):
    """Rows of x1, y1, x2, y2, label, score."""
    table = torch.tensor(rows, dtype=torch.float32).reshape(-1, 6)
    return {"boxes": table[:, :4], "labels": table[:, 4].long(), "scores": table[:, 5]}


def truth(*rows, **more):
    """Rows of x1, y1, x2, y2, label."""
    table = torch.tensor(rows, dtype=torch.float32).reshape(-1, 5)
    return {"boxes": table[:, :4], "labels": table[:, 4].long(), **more}


def coco(answers, truths):
    evaluator = ObjectDetection(3).evaluator()
    evaluator.update(Answers(*answers), Batch([torch.zeros(3, 8, 8)] * len(truths), list(truths)))
    return evaluator.compute()


def accuracy(logits, targets, classes=None):
    evaluator = Classification(classes or logits.shape[1]).evaluator()
    evaluator.update(nn.Identity(), Batch(logits, torch.tensor(targets)))
    return evaluator.compute()


def test_top_1_and_top_5_are_percents_of_all_images():
    logits = torch.eye(8)[[0, 1, 2, 3]] + torch.arange(8) * 0.01
    assert accuracy(logits, [0, 1, 5, 0]) == {"top1": 50.0, "top5": 75.0}


def test_of_equal_scores_the_lower_class_comes_first():
    assert accuracy(torch.zeros(4, 8), [0, 1, 4, 5]) == {"top1": 25.0, "top5": 75.0}


def test_scores_that_are_no_numbers_are_wrong():
    logits = torch.eye(6)[[0, 1]]
    logits[1, 3] = float("nan")
    assert accuracy(logits, [0, 1]) == {"top1": 50.0, "top5": 50.0}


def test_batches_of_different_sizes_count_by_image():
    evaluator = Classification(2).evaluator()
    evaluator.update(nn.Identity(), Batch(torch.eye(2)[[0, 0, 0]], torch.tensor([0, 0, 0])))
    evaluator.update(nn.Identity(), Batch(torch.eye(2)[[1]], torch.tensor([0])))
    assert evaluator.compute() == {"top1": 75.0}


def test_no_image_at_all_is_an_error_and_not_a_zero():
    for task in (Classification(3), ObjectDetection(3)):
        with pytest.raises(GossamerError, match="none of the images can be read"):
            task.evaluator().compute()


def test_what_is_found_exactly_is_one():
    rows = [(0, 0, 20, 20, 1), (30, 30, 90, 90, 2)]
    numbers = coco([found(*((*row, 0.9) for row in rows))], [truth(*rows)])
    assert set(numbers) == set(COCO.values())
    assert numbers["mAP"] == numbers["mAP50"] == numbers["mAP75"] == pytest.approx(1.0)
    assert numbers["mAP_small"] == numbers["mAP_medium"] == pytest.approx(1.0)
    assert numbers["mAP_large"] == numbers["mAR_large"] == -1.0  # no such object
    assert numbers["mAR1"] == numbers["mAR100"] == pytest.approx(1.0)


@pytest.mark.parametrize("flag", ["iscrowd", "ignored"])
def test_what_is_found_in_a_crowd_counts_for_nothing(flag):
    rows = [(0, 0, 20, 20, 1), (40, 40, 90, 90, 1)]
    marked = {flag: torch.tensor([0, 1])}
    answer = found((0, 0, 20, 20, 1, 0.5), (45, 45, 60, 60, 1, 0.9))
    assert coco([answer], [truth(*rows, **marked)])["mAP"] == pytest.approx(1.0)
    assert coco([answer], [truth(*rows)])["mAP"] < 0.5


def test_more_than_a_hundred_detections_give_no_warning():
    rows = [(0, 0, 20, 20, 1, 1 - index / 200) for index in range(150)]
    assert coco([found(*rows)], [truth((0, 0, 20, 20, 1))])["mAP50"] == pytest.approx(1.0)


def test_detections_that_are_no_numbers_are_left_out():
    nan = float("nan")
    answer = found((0, 0, 20, 20, 1, 0.9), (nan, 0, 20, 20, 1, 0.95), (0, 0, 20, 20, 1, nan))
    assert coco([answer], [truth((0, 0, 20, 20, 1))])["mAP"] == pytest.approx(1.0)


def test_the_order_of_images_in_processes_does_not_matter(monkeypatch):
    boxes = (0, 0, 20, 20, 1)
    images = [torch.zeros(3, 8, 8)] * 2
    answers = [found((*boxes, 0.7)), found((5, 5, 9, 9, 1, 0.7))]
    truths = [truth(boxes, image_id=torch.tensor(index)) for index in range(2)]
    numbers = coco(answers, truths)
    parts = []
    for index in (1, 0):
        evaluator = ObjectDetection(3).evaluator()
        evaluator.update(Answers(answers[index]), Batch(images[:1], [truths[index]]))
        parts.append(evaluator._results)
    monkeypatch.setattr(metrics, "all_gather", lambda value: parts)
    assert evaluator.compute() == numbers


def _evaluate_half(rank, folder, results):
    classes = Classification(8).evaluator()
    if rank == 0:  # the other one has no batch at all
        classes.update(nn.Identity(), Batch(torch.eye(8), torch.tensor([0, 1, 2, 3, 4, 5, 0, 0])))
    boxes = ObjectDetection(3).evaluator()
    answer = found((0, 0, 20, 20, 1, 0.9)) if rank else found()
    truths = [truth((0, 0, 20, 20, 1), image_id=torch.tensor(rank))]
    boxes.update(Answers(answer), Batch([torch.zeros(3, 8, 8)], truths))
    results[rank] = {**classes.compute(), **boxes.compute()}


@pytest.mark.slow
def test_two_processes_get_the_numbers_of_all_images(tmp_path):
    with multiprocessing.Manager() as manager:
        results = manager.dict()
        in_ranks(_evaluate_half, tmp_path, results)
        first, second = results[0], results[1]
    assert first == second
    assert first["top1"] == 75.0
    assert first["mAP50"] == pytest.approx(51 / 101)
