"""A compiled model computes what the model computes, for any batch size, on any number of threads."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gossamer import runtime
from gossamer.errors import GossamerError
from tests.runtime.models import Residual, pruned

SMALL = ["resnet18", "mobilenet_v3_small", "googlenet", "shufflenet_v2_x0_5", "squeezenet1_1", "regnet_y_400mf"]


def distance(found: Any, expected: Any) -> float:
    """The largest difference over the largest value."""
    assert found.shape == expected.shape
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-20))


def check(model: nn.Module, engine: runtime.Engine, *args: Tensor) -> None:
    with torch.inference_mode():
        assert distance(engine(*args), model(*args)) < 1e-4


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_any_convolution_equals_torch(data: st.DataObject) -> None:
    draw = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    groups, kernel, stride = draw(1, 3), (draw(1, 4), draw(1, 4)), draw(1, 3)
    dilation, padding = (draw(1, 2), draw(1, 2)), (draw(0, 3), draw(0, 3))
    size = [(kernel[i] - 1) * dilation[i] + draw(1, 20) for i in range(2)]
    channels, filters = groups * draw(1, 5), groups * draw(1, 6)
    activation = data.draw(
        st.sampled_from([nn.Identity(), nn.ReLU(), nn.ReLU6(), nn.SiLU(), nn.GELU(), nn.Hardswish()])
    )
    conv = nn.Conv2d(channels, filters, kernel, stride, padding, dilation, groups, bias=data.draw(st.booleans()))
    model = pruned(
        nn.Sequential(conv, nn.BatchNorm2d(filters), activation), data.draw(st.sampled_from([0.0, 0.5, 0.95]))
    )
    engine = runtime.compile(model, torch.randn(2, channels, *size), threads=1, tuned=False)
    check(model, engine, torch.randn(draw(1, 5), channels, *size))


@pytest.mark.parametrize("size", [(32, 32), (33, 47)])
def test_residuals_strides_and_concatenations_run_on_kernels(size: tuple[int, int]) -> None:
    model = pruned(Residual())
    engine = runtime.compile(model, torch.randn(2, 3, *size), threads=1)
    for batch in (1, 2, 7, 17):
        check(model, engine, torch.randn(batch, 3, *size))


def test_windows_on_images_of_one_pixel_keep_their_center_only() -> None:
    model = pruned(nn.Sequential(nn.Conv2d(6, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 4, 5, padding=2)), 0.0)
    engine = runtime.compile(model, torch.randn(2, 6, 2, 2), threads=1, tuned=False)
    assert [layer.weight.shape for layer in engine._layers] == [(8, 6, 4), (4, 8, 1)]
    check(model, engine, torch.randn(3, 6, 2, 2))
    assert [(layer.name, layer.shape) for layer in engine.layers()[:2]] == [("0", (8, 6, 3, 3)), ("2", (4, 8, 5, 5))]


@pytest.mark.parametrize("name", SMALL)
def test_torchvision_models_at_90_percent_zeros_equal_torch(name: str) -> None:
    model = pruned(
        torchvision.models.get_model(name, weights=None, init_weights=False)
        if name == "googlenet"
        else torchvision.models.get_model(name, weights=None)
    )
    engine = runtime.compile(model, torch.randn(2, 3, 65, 65), threads=1, tuned=False)
    for batch in (1, 3):
        check(model, engine, torch.randn(batch, 3, 65, 65))


def test_an_encoder_takes_any_number_of_tokens_and_masks() -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=100, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96
    )

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = BertModel(config)

        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            return self.bert(input_ids=ids, attention_mask=mask)[0] * mask[..., None]

    model = pruned(Encoder(), 0.8)
    example = (torch.randint(100, (2, 24)), torch.ones(2, 24, dtype=torch.long))
    engine = runtime.compile(model, example, threads=1, tuned=False)
    for batch, length in ((1, 24), (2, 16), (3, 37), (1, 5)):
        mask = torch.ones(batch, length, dtype=torch.long)
        mask[-1, length // 2 + 1 :] = 0
        check(model, engine, torch.randint(100, (batch, length)), mask)


def test_results_have_the_same_bits_on_any_number_of_threads() -> None:
    model = pruned(Residual())
    x = torch.randn(5, 3, 33, 47)
    single = runtime.compile(model, x, threads=1)
    several = runtime.Engine(single._plan, threads=3)
    for _ in range(20):
        assert torch.equal(several(x), single(x))


def test_calls_from_several_python_threads_are_independent() -> None:
    model = pruned(Residual())
    engine = runtime.compile(model, torch.randn(2, 3, 32, 32), threads=2)
    inputs = [torch.randn(1 + k % 3, 3, 32, 32) for k in range(24)]
    expected = [engine(x) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(engine, inputs))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_perceptron_runs_single_rows_and_batches() -> None:
    model = pruned(nn.Sequential(nn.Linear(50, 70), nn.GELU(), nn.Linear(70, 33), nn.Sigmoid(), nn.Linear(33, 4)))
    engine = runtime.compile(model, torch.randn(2, 50), threads=1)
    for batch in (1, 2, 16, 41):
        check(model, engine, torch.randn(batch, 50))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((torch.randn(1, 3, 31, 32),), r"input 'x': expected torch.float32 \(any, 3, 32, 32\) .* found .*31, 32"),
        ((torch.randn(1, 3, 32, 32).double(),), "found torch.float64"),
        ((torch.randn(3, 32, 32),), "expected torch.float32"),
        (([1.0],), "found list"),
        ((torch.randn(1, 3, 32, 32), 1), "2 arguments were given; the engine takes x, as in"),
        ((torch.randn(0, 3, 32, 32),), "expected torch.float32"),
    ],
)
def test_an_input_that_does_not_fit_the_example_is_refused(inputs: tuple[Any, ...], message: str) -> None:
    engine = runtime.compile(pruned(Residual()), torch.randn(2, 3, 32, 32), threads=1, tuned=False)
    with pytest.raises(GossamerError, match=message):
        engine(*inputs)


def test_weights_take_less_than_a_third_of_dense_memory_at_90_percent_zeros() -> None:
    model = pruned(nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 128, 1)))
    engine = runtime.compile(model, torch.randn(1, 64, 14, 14), threads=1)
    x = torch.randn(1, 64, 14, 14)
    engine(x)
    assert engine.weight_bytes <= 0.3 * sum(4 * parameter.numel() for parameter in model.parameters())
    check(model, engine, x)


def test_an_engine_can_be_pickled() -> None:
    engine = runtime.compile(pruned(Residual()), torch.randn(2, 3, 32, 32), threads=1, tuned=False)
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(pickle.loads(pickle.dumps(engine))(x), engine(x))


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.ReLU6(), nn.SiLU(), nn.GELU(), nn.Hardswish(), nn.Sigmoid()])
def test_nan_stays_where_torch_keeps_it(activation: nn.Module) -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 1, groups=2, bias=False), activation, nn.MaxPool2d(2)).eval()
    model[0].weight.data.fill_(1.0)
    x = torch.randn(1, 2, 4, 32)
    x[0, 0, 1, 3] = float("nan")
    with torch.inference_mode():
        expected = model(x)
    found = runtime.compile(model, x, threads=1, tuned=False)(x)
    assert torch.equal(found.isnan(), expected.isnan())
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-5, atol=1e-6)


def test_compiling_leaves_the_mode_of_every_module() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout()).train()
    model[1].eval()
    runtime.compile(model, torch.randn(2, 3, 8, 8), threads=1, tuned=False)
    assert [module.training for module in model] == [True, False, True]


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Sequential(nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), nn.ReLU()), (3, 8)),
        (nn.Sequential(nn.Conv3d(3, 4, 2), nn.BatchNorm3d(4)), (3, 5, 5, 5)),
        (nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU()), (6,)),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).double(), (3, 8, 8)),
    ],
    ids=["1-d", "3-d", "rows", "float64"],
)
def test_batch_norm_of_any_rank_and_dtype_equals_torch(model: nn.Module, shape: tuple[int, ...]) -> None:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    dtype = next(model.parameters()).dtype
    engine = runtime.compile(model.eval(), torch.randn(2, *shape, dtype=dtype), threads=1, tuned=False)
    check(model, engine, torch.randn(4, *shape, dtype=dtype))


def test_a_model_that_cannot_be_traced_is_one_error() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    for example in (torch.randn(1, 4, 8, 8), (1, 3, 8, 8)):
        with pytest.raises(GossamerError, match="example"):
            runtime.compile(model, example)
    with pytest.raises(GossamerError, match=r"expected a torch\.nn\.Module, found str"):
        runtime.compile("model.pt", torch.randn(1))
    with pytest.raises(GossamerError, match="threads: expected a number of at least 1, found 0"):
        runtime.compile(model, torch.randn(1, 3, 8, 8), threads=0, tuned=False)


def test_more_inputs_than_16_bits_count_equal_torch() -> None:
    model = pruned(nn.Sequential(nn.Linear(70_000, 3)), 0.99)
    engine = runtime.compile(model, torch.randn(2, 70_000), threads=1, tuned=False)
    for batch in (1, 3):
        check(model, engine, torch.randn(batch, 70_000))
