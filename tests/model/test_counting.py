"""Weights, zeros and multiply-accumulate operations of a model."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import prune
from torch.utils.flop_counter import FlopCounterMode

from gossamer.errors import GossamerError
from gossamer.model import get_parameter, left_dense, prunable
from gossamer.model.counting import count_by_kind, count_weights, macs, positions
from gossamer.model.tracing.tracer import Untraceable
from tests.runner.nets import parametrized


def counted_by_torch(model: nn.Module, *inputs: Tensor) -> int:
    """MACs of all products in the forward pass, those of attention included."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval()(*inputs)
    return counter.get_total_flops() // 2


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "shufflenet_v2_x0_5", "resnext50_32x4d"])
def test_vision_models_take_what_torch_counts(name: str) -> None:
    model = pytest.importorskip("torchvision.models").get_model(name, weights=None)
    x = torch.zeros(2, 3, 64, 64)
    found = macs(model, x)
    assert sum(found.values()) == counted_by_torch(model, x)
    applied = positions(model, [2, 3, 64, 64])
    assert found == {name: get_parameter(model, name).numel() * count for name, count in applied.items()}


LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "1d": (nn.Conv1d(4, 6, 3, stride=2, padding=1), (2, 4, 9)),
    "2d strided and dilated": (nn.Conv2d(4, 6, 3, stride=2, dilation=2), (2, 4, 11, 9)),
    "2d grouped": (nn.Conv2d(8, 4, 3, groups=4), (2, 8, 7, 7)),
    "2d depth-wise with a multiplier": (nn.Conv2d(4, 8, 3, groups=4, padding="same"), (2, 4, 7, 7)),
    "2d reflected": (nn.Conv2d(4, 8, 3, padding=1, padding_mode="reflect"), (2, 4, 7, 7)),
    "2d without batch": (nn.Conv2d(4, 8, 3), (4, 7, 7)),
    "3d": (nn.Conv3d(2, 4, (1, 2, 3)), (2, 2, 3, 4, 5)),
    "transposed 1d": (nn.ConvTranspose1d(4, 6, 3, stride=2), (2, 4, 9)),
    "transposed 2d grouped": (nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2, output_padding=1), (2, 4, 5, 5)),
    "transposed 3d": (nn.ConvTranspose3d(2, 4, 2), (1, 2, 3, 4, 5)),
    "linear on a vector": (nn.Linear(4, 6), (4,)),
    "linear on a batch": (nn.Linear(4, 6), (2, 4)),
    "linear on sequences": (nn.Linear(4, 6), (2, 3, 4)),
    "linear on images": (nn.Linear(4, 6, bias=False), (2, 3, 5, 4)),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_every_layer_takes_what_torch_counts(layer: str) -> None:
    model, shape = LAYERS[layer]
    x = torch.zeros(shape)
    assert macs(model, x) == {"weight": counted_by_torch(model, x)}


def test_every_output_of_a_bilinear_layer_takes_all_pairs_of_inputs() -> None:
    inputs = torch.zeros(2, 3, 4), torch.zeros(2, 3, 5)
    assert macs(nn.Bilinear(4, 5, 6), inputs) == {"weight": 2 * 3 * 4 * 5 * 6}


class Conv1D(nn.Module):
    """A linear layer as Transformers' GPT-2 has it, its weight `(in, out)`."""

    def __init__(self, n_out: int, n_in: int) -> None:
        super().__init__()
        self.nf = n_out
        self.weight, self.bias = nn.Parameter(torch.ones(n_in, n_out)), nn.Parameter(torch.zeros(n_out))

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return rows.view((*x.size()[:-1], self.nf))


def test_the_linear_layer_of_gpt2_counts_its_rows() -> None:
    assert positions(Conv1D(7, 4), torch.zeros(2, 3, 4)) == {"weight": 6}


# Attention

QUERIES, KEYS, BATCH, WIDTH = 3, 5, 2, 8


def sequence(length: int, width: int = WIDTH, *, batch_first: bool = False) -> Tensor:
    return torch.zeros(BATCH, length, width) if batch_first else torch.zeros(length, BATCH, width)


@pytest.mark.parametrize("batch_first", [False, True])
def test_self_attention_applies_its_projections_to_every_token(batch_first: bool) -> None:
    model = nn.MultiheadAttention(WIDTH, 2, batch_first=batch_first)
    x = sequence(QUERIES, batch_first=batch_first)
    tokens = QUERIES * BATCH
    assert positions(model, (x, x, x)) == {"in_proj_weight": tokens, "out_proj.weight": tokens}
    assert sum(macs(model, (x, x, x)).values()) == tokens * 4 * WIDTH * WIDTH


@pytest.mark.parametrize("batch_first", [False, True])
def test_cross_attention_projects_queries_and_keys_by_their_own_lengths(batch_first: bool) -> None:
    model = nn.MultiheadAttention(WIDTH, 2, batch_first=batch_first)
    x, y = sequence(QUERIES, batch_first=batch_first), sequence(KEYS, batch_first=batch_first)
    found = macs(model, {"query": x, "key": y, "value": y, "need_weights": False})
    assert found == {
        "in_proj_weight": BATCH * (QUERIES + 2 * KEYS) * WIDTH * WIDTH,
        "out_proj.weight": BATCH * QUERIES * WIDTH * WIDTH,
    }
    assert positions(model, (x, y, y))["in_proj_weight"] == round(BATCH * (QUERIES + 2 * KEYS) / 3)


def test_a_transformer_counts_its_layers_though_torch_has_a_short_cut_for_them() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, dim_feedforward=16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    found = positions(model.eval(), sequence(KEYS, batch_first=True))
    assert len(found) == 8
    assert set(found.values()) == {KEYS * BATCH}
    assert torch.backends.mha.get_fastpath_enabled()


def test_attention_that_takes_the_weights_of_layers_without_calling_them_counts() -> None:
    swin = pytest.importorskip("torchvision.models.swin_transformer")
    block = swin.ShiftedWindowAttention(8, [4, 4], [0, 0], 2)
    assert positions(block, [1, 8, 8, 8]) == {"qkv.weight": 64, "proj.weight": 64}


# Weights that are used more or less often than once


def test_a_shared_layer_and_a_tied_weight_add_up() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.unused = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(2, 2)
            self.fc, self.tied = nn.Linear(4, 4), nn.Linear(4, 4)
            self.tied.weight = self.fc.weight

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(functional.max_pool2d(self.conv(x), 2))
            return self.tied(self.fc(self.fc(x.mean((2, 3)))))

    assert positions(Shared(), [2, 4, 8, 8]) == {"conv.weight": 2 * 64 + 2 * 16, "unused.weight": 0, "fc.weight": 6}


def test_a_weight_that_is_also_an_embedding_counts_for_its_products_only() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            return self.head(torch.softmax(x @ x.mT, -1) @ x)

    assert positions(Tied(), [2, 5]) == {"embed.weight": 10}
    assert positions(Tied(), torch.zeros(2, 3, dtype=torch.long)) == {"embed.weight": 6}


def test_weights_that_lie_in_one_piece_of_memory_are_told_apart() -> None:
    memory = torch.zeros(32)
    model = nn.Sequential(nn.Linear(4, 4), nn.Flatten(0), nn.Unflatten(0, (1, 3, 4)), nn.Flatten(1), nn.Linear(12, 1))
    model[0].weight = nn.Parameter(memory[:16].view(4, 4))
    model[4].weight = nn.Parameter(memory[16:28].view(1, 12))
    assert positions(model, [3, 4]) == {"0.weight": 3, "4.weight": 1}


def test_a_weight_that_is_cast_or_standardised_on_the_way_counts() -> None:
    class Standardised(nn.Conv2d):
        def forward(self, input: Tensor) -> Tensor:
            flat = self.weight.reshape(1, self.out_channels, -1)
            weight = functional.batch_norm(flat, None, None, training=True).reshape_as(self.weight)
            return self._conv_forward(input.bfloat16(), weight.bfloat16(), None)

    assert positions(Standardised(4, 6, 3), [1, 4, 7, 7]) == {"weight": 25}


def test_a_model_with_an_inference_mode_of_its_own_counts() -> None:
    class Served(nn.Sequential):
        @torch.inference_mode()
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input)

    model = Served(nn.Conv2d(3, 4, 3), nn.Flatten(2), nn.Linear(16, 5))
    assert positions(model, [2, 3, 6, 6]) == {"0.weight": 32, "2.weight": 8}


# What the model is left with


class Leaves(nn.Module):
    """Draws, counts, caches, writes into its parameters and, on request, looks at a value on its way."""

    def __init__(self, looks: bool, fails: bool = False) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout()
        self.looks, self.fails, self.calls, self.last = looks, fails, 0, None

    @staticmethod
    @functools.cache
    def scale(size: int) -> Tensor:
        return torch.full((size,), 2.0)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.conv.bias.data.add_(1)
        x.mul_(2)
        self.norm.train()
        self.last = self.drop(self.norm(self.conv(x))) * self.scale(x.shape[-1] - 2) + torch.rand(())
        if self.looks and self.last.sum() > 1e9:
            return -self.last
        if self.fails:
            raise ValueError("it was told to")
        return self.last


@pytest.mark.parametrize("looks", [False, True], ids=["without values", "with values"])
@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was(looks: bool, fails: bool) -> None:
    Leaves.scale.cache_clear()
    Leaves.scale(4)
    model, x = Leaves(looks, fails).train(), torch.rand(2, 3, 6, 6)
    model.drop.eval()
    model.conv.weight.grad = torch.ones_like(model.conv.weight)
    before, given, random = copy.deepcopy(model.state_dict()), x.clone(), torch.get_rng_state()
    modes = [child.training for child in model.modules()]
    if fails:
        with pytest.raises(GossamerError, match="it was told to"):
            macs(model, x)
    else:
        assert positions(model, x) == {"conv.weight": 32}
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(x, given)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [child.training for child in model.modules()] == modes
    assert model.calls == 0
    assert model.last is None
    assert torch.equal(model.conv.weight.grad, torch.ones_like(model.conv.weight))
    assert isinstance(model.conv.weight, nn.Parameter)
    assert not any(child._forward_hooks or child._forward_pre_hooks for child in model.modules())
    assert type(Leaves.scale(4)) is Tensor


def test_a_model_that_keeps_fake_tensors_outside_itself_is_untraceable() -> None:
    Leaves.scale.cache_clear()
    with pytest.raises(Untraceable, match="stores tensors outside the model, such as in the cache of a function"):
        macs(Leaves(looks=True), torch.rand(2, 3, 6, 6))
    Leaves.scale.cache_clear()


# Inputs


def test_a_shape_becomes_a_tensor_of_the_models_type() -> None:
    assert positions(nn.Linear(4, 2).bfloat16(), [3, 4]) == {"weight": 3}
    assert positions(nn.Linear(4, 2).double(), torch.Size([3, 4])) == {"weight": 3}


def test_a_list_that_is_no_shape_is_one_argument() -> None:
    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 2)

        def forward(self, images: list[Tensor]) -> Tensor:
            return self.fc(torch.stack(images))

    assert positions(Detector(), [torch.zeros(4), torch.zeros(4)]) == {"fc.weight": 2}


@pytest.mark.parametrize(
    ("model", "inputs", "sentence"),
    [
        (nn.Linear(4, 2), [3, 5], "the model fails on an input of shape [3, 5] (RuntimeError: "),
        (nn.Linear(4, 2), [3, -1], "[3, -1] is not the shape of a tensor"),
    ],
)
def test_inputs_that_the_model_does_not_take_are_told_with_the_remedy(
    model: nn.Module, inputs: Any, sentence: str
) -> None:
    with pytest.raises(GossamerError) as caught:
        macs(model, inputs)
    assert str(caught.value).startswith("example_inputs: cannot count MACs: ")
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("which is the shape of one tensor, batch first")


def test_a_model_without_shapes_yet_is_to_run_on_a_batch_first() -> None:
    with pytest.raises(GossamerError, match="MACs: 'weight' cannot be used: its shape is not known yet; run"):
        macs(nn.LazyLinear(2), [3, 4])


def test_magnitudes_and_buffers_of_parametrizations_are_no_weights() -> None:
    model = parametrized()
    found = count_weights(model)
    assert set(found) == {*prunable(model), *left_dense(model)}
    assert sorted(count.weights for count in found.values()) == [640, 4096, 4096, 12288]
    assert count_by_kind(model) == {"linear": (21120, 21120)}  # zeros of orthogonal's tensor are none of the weight


def test_kinds_go_by_the_layer_and_embeddings_do_not_count() -> None:
    model = nn.ModuleList([nn.Embedding(7, 4), nn.Bilinear(2, 3, 4), nn.Conv1d(2, 3, 1), nn.LayerNorm([2, 2])])
    assert count_by_kind(model) == {"linear": (24, 24), "convolution": (6, 6)}


def test_a_shared_weight_counts_once_and_masks_of_torch_count() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    assert count_by_kind(nn.Sequential(first, second)) == {"linear": (16, 16)}
    prune.l1_unstructured(pruned := nn.Linear(4, 4), "weight", amount=4)
    assert count_by_kind(pruned) == {"linear": (16, 12)}


def test_a_weight_of_another_type_or_in_a_buffer_counts() -> None:
    eight = nn.Linear(4, 2)
    eight.weight = nn.Parameter(torch.tensor([[1.0, 0.0, 2.0, 0.0]] * 2).to(torch.float8_e4m3fn), requires_grad=False)
    held = nn.Linear(2, 2)
    del held.weight
    held.register_buffer("weight", torch.eye(2))
    assert count_by_kind(nn.Sequential(eight, held)) == {"linear": (12, 6)}


def test_counting_leaves_the_model_as_it_was() -> None:
    model = parametrized().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    count_weights(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
