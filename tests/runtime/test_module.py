"""An engine as a module, in code that is written for models."""

from __future__ import annotations

import multiprocessing
import pickle
from copy import deepcopy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from gossamer import runtime
from gossamer.errors import GossamerError
from tests.runtime.models import Residual, pruned


def test_the_encoder_of_a_transformers_classifier_can_be_an_engine() -> None:
    config = transformers.BertConfig(
        vocab_size=100, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96
    )
    torch.manual_seed(0)
    model: Any = pruned(transformers.BertForTokenClassification(config))
    ids, mask = torch.randint(100, (3, 9)), torch.ones(3, 9, dtype=torch.long)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
    engine = runtime.compile(model.bert, {"input_ids": ids, "attention_mask": mask, "return_dict": True}, tuned=False)
    model.bert = engine.as_module().eval().to("cpu")
    model.train()
    model.eval()
    found = model(ids, attention_mask=mask).logits  # with gradients for the head
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    found.sum().backward()
    assert model.classifier.weight.grad is not None


def test_an_evaluation_loop_of_torchmetrics_gives_the_models_accuracy() -> None:
    model = pruned(Residual())
    images = torch.randn(20, 3, 21, 18)
    with torch.no_grad():
        labels = model(images).argmax(1)
    labels[:5] = (labels[:5] + 1) % 10
    module = runtime.compile(model, images[:2], tuned=False).as_module()
    accuracy = MulticlassAccuracy(10, average="micro")
    for x, y in DataLoader(TensorDataset(images, labels), batch_size=8):
        accuracy.update(module(x), y)
    assert float(accuracy.compute()) == 0.75


def _run(content: bytes, x: Tensor, results: Any) -> None:
    """In a new process."""
    results.put(pickle.loads(content)(x).tolist())


def test_a_pickled_module_runs_in_a_spawned_process() -> None:
    x = torch.randn(2, 3, 21, 18)
    module = nn.Sequential(runtime.compile(pruned(Residual()), x, threads=1, tuned=False).as_module(), nn.Softmax(1))
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    process = context.Process(target=_run, args=(pickle.dumps(module), x, results))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    assert torch.equal(torch.tensor(results.get()), module(x))
    assert torch.equal(deepcopy(module)(x), module(x))


def test_a_module_has_no_parameters_and_no_gradients() -> None:
    x = torch.randn(2, 3, 21, 18, requires_grad=True)
    module = runtime.compile(pruned(Residual()), x.detach(), tuned=False).as_module()
    assert not module.state_dict()
    assert not module.train().training
    with pytest.raises(GossamerError, match="an engine computes no gradients"):
        module(x)
    assert not module.eval()(x).requires_grad
