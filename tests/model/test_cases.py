"""Networks in which moving channels is easily got wrong: they compute the same, and what can move does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (as everybody writes it)
from torch import Tensor, nn

from tests.model.keeping import keeps, randomised, reason


class Written(nn.Module):
    """A network from a function of its layers: `Written(lambda self, x: …, conv=nn.Conv2d(…))`."""

    def __init__(self, run: Callable[..., Any], **layers: Any) -> None:
        super().__init__()
        self.run = run
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *inputs: Any) -> Any:
        return self.run(self, *inputs)


SAMPLES = torch.rand(2, 16, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def image(channels: int = 8, size: int = 6) -> Tensor:
    return torch.randn(2, channels, size, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def conv(into: int = 16, out: int = 16, kernel: int = 3, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(into, out, kernel, padding=kernel // 2, **options)


def written(run: Callable[..., Any], **layers: Any) -> nn.Module:
    """Between a first and a last layer: `run` gets 16 channels and gives 16."""
    layers = {"first": conv(8), "last": conv(16, 8)} | layers
    return randomised(Written(lambda self, x: self.last(run(self, self.first(x))), **layers))


def checked(run: Callable[..., Any], moving: bool | list[str], **layers: Any) -> None:
    keeps(written(run, **layers), image(), moving=moving)


# Cases in which the original silently changes what the network computes


def test_a_residual_with_the_networks_own_input_stays_in_place():
    model = randomised(
        Written(lambda self, x: self.last(self.b(F.relu(self.a(x))) + x), a=conv(), b=conv(), last=conv(16, 8))
    )
    found = keeps(model, image(16), moving=["b.weight"])
    reasons = {layer.name: layer.reason for layer in found.layers}
    assert reasons["a.weight"] == "its input is the network's input"
    assert reasons["last.weight"] == "its input is something that 'add' combines with the network's input"


def test_a_concatenation_with_the_networks_own_input_moves_only_the_networks_channels():
    model = randomised(Written(lambda self, x: self.last(torch.cat([self.a(x), x], 1)), a=conv(8), last=conv(24, 8)))
    found = keeps(model, image(), moving=["last.weight"])
    (move,) = found.moves["last.weight"]
    assert move.source[16:].tolist() == list(range(16, 24))


def _heads(x: Tensor, count: int) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def _handwritten_attention(self: Any, x: Tensor) -> Tensor:
    tokens = x.flatten(2).transpose(1, 2)
    q, k, v = (_heads(layer(tokens), 2) for layer in (self.q, self.k, self.v))
    mixed = ((q @ k.transpose(-2, -1)) / 3).softmax(-1) @ v
    return self.o(mixed.transpose(1, 2).flatten(2)).transpose(1, 2).reshape(x.shape)


def _fused_attention(self: Any, x: Tensor) -> Tensor:
    tokens = x.flatten(2).transpose(1, 2)
    q, k, v = (_heads(layer(tokens), 2) for layer in (self.q, self.k, self.v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return self.o(mixed.transpose(1, 2).flatten(2)).transpose(1, 2).reshape(x.shape)


@pytest.mark.parametrize("attention", [_handwritten_attention, _fused_attention])
def test_attention_moves_channels_within_heads(attention: Callable[..., Tensor]):
    layers = {name: nn.Linear(16, 16) for name in "qkvo"}
    checked(attention, ["q.weight", "k.weight", "v.weight", "o.weight", "last.weight"], **layers)


def test_torchs_attention_moves_channels_within_heads():
    def run(self: Any, x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        return self.mix(tokens, tokens, tokens)[0].transpose(1, 2).reshape(x.shape)

    moving = ["mix.in_proj_weight", "mix.out_proj.weight", "last.weight"]
    checked(run, moving, mix=nn.MultiheadAttention(16, 2, batch_first=True))


def test_a_transformer_layer_moves_its_channels():
    model = randomised(nn.Sequential(nn.Linear(8, 16), nn.TransformerEncoderLayer(16, 2, 32, 0.0), nn.Linear(16, 8)))
    x = torch.randn(5, 2, 8, dtype=torch.float64)
    keeps(model, x, moving=["1.self_attn.in_proj_weight", "1.linear1.weight", "1.linear2.weight", "2.weight"])


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d(16),
        nn.BatchNorm2d(16, affine=False),
        nn.BatchNorm2d(16, track_running_stats=False),
        nn.BatchNorm2d(16, momentum=None),
        nn.SyncBatchNorm(16),
        nn.InstanceNorm2d(16),
        nn.InstanceNorm2d(16, affine=True, track_running_stats=True),
        nn.GroupNorm(2, 16),
        nn.GroupNorm(1, 16),
        nn.LayerNorm([16, 6, 6]),
    ],
    ids=repr,
)
def test_normalisation_moves_with_its_channels(norm: nn.Module):
    checked(lambda self, x: F.relu(self.norm(x)), ["last.weight"], norm=norm)


@pytest.mark.parametrize(
    "run",
    [
        lambda self, x: F.local_response_norm(x, 5),
        lambda self, x: x + x.flip(1),
        lambda self, x: x + F.channel_shuffle(x, 2),
        lambda self, x: x.cumsum(1),
        lambda self, x: x.sort(1).values,
        lambda self, x: x * torch.arange(16, dtype=x.dtype).view(-1, 1, 1),
        lambda self, x: x[:, torch.arange(15, -1, -1)],
        lambda self, x: x.unfold(1, 16, 1).squeeze(1).movedim(-1, 1),
        lambda self, x: x.gather(1, torch.zeros_like(x, dtype=torch.long)),
        lambda self, x: x + x.max(1, keepdim=True).indices,
        lambda self, x: (
            x + torch.zeros_like(x).bernoulli_(torch.linspace(0, 1, 16).round().view(-1, 1, 1).expand_as(x))
        ),
        lambda self, x: F.fractional_max_pool2d(x, 2, 3, _random_samples=SAMPLES).repeat(1, 1, 2, 2),
        lambda self, x: x + torch.linspace(0, 1, 16).view(-1, 1, 1),
    ],
    ids=[
        "response_norm",
        "add_flipped",
        "add_shuffled",
        "cumulative",
        "sorted",
        "by_position",
        "indexed",
        "unfolded",
        "gathered",
        "largest",
        "chosen",
        "sampled",
        "shifted",
    ],
)
def test_operations_that_depend_on_the_order_of_channels_hold_them(run: Callable[..., Tensor]):
    checked(run, False)


@pytest.mark.parametrize(
    "run",
    [
        lambda self, x: x.flip(1),
        lambda self, x: x.flip(2),
        lambda self, x: x.roll(3, 1),
        lambda self, x: F.channel_shuffle(x, 4),
        lambda self, x: F.group_norm(x, 2),
        lambda self, x: F.normalize(x, dim=1),
        lambda self, x: x.softmax(1),
        lambda self, x: x * torch.sigmoid(x.mean(1, keepdim=True) + x.max(1, keepdim=True).values),
        lambda self, x: x.cumsum(2),
        lambda self, x: F.interpolate(F.max_pool2d(x, 2), scale_factor=2, mode="bicubic"),
        lambda self, x: F.pad(x, (1, 1, 1, 1), mode="reflect")[..., 1:-1, 1:-1],
        lambda self, x: torch.cat([x[:, 8:], x[:, :8]], 1),
        lambda self, x: F.pad(x, (0, 0, 0, 0, 0, 8))[:, :16],
        lambda self, x: x.masked_fill(x > 1, 0.0),
        lambda self, x: x + torch.zeros_like(x).normal_() * 0,
    ],
    ids=[
        "flipped",
        "flipped_image",
        "rolled",
        "shuffled",
        "group_norm",
        "normalised",
        "softmax",
        "spatial_attention",
        "cumulative_rows",
        "pooled",
        "padded",
        "swapped_halves",
        "zero_channels",
        "masked",
        "noise",
    ],
)
def test_operations_that_treat_channels_alike_let_them_move(run: Callable[..., Tensor]):
    checked(run, True)


def test_shuffled_channels_of_two_kinds_are_told_apart():
    checked(
        lambda self, x: F.channel_shuffle(torch.cat([x[:, :8], F.relu(self.a(x[:, 8:]))], 1), 2), True, a=conv(8, 8)
    )


def test_an_attribute_whose_length_matches_on_the_wrong_dimension_is_left_alone():
    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(16))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale  # along the width, which has as many positions as there are channels

    model = written(lambda self, x: self.scale(x), scale=Square())
    found = keeps(model, image(8, 16), moving=["last.weight"])
    assert "scale.scale" not in found.moves


def test_a_module_called_twice_has_one_order_for_both():
    checked(lambda self, x: self.again(F.relu(self.again(x))), ["again.weight", "last.weight"], again=conv())


def test_a_normalisation_shared_by_two_branches_ties_them():
    checked(lambda self, x: self.norm(x) + self.norm(self.a(x)), ["last.weight"], norm=nn.BatchNorm2d(16), a=conv())


def test_an_embedding_tied_to_the_output_moves_along_its_width_only():
    def run(self: Any, tokens: Tensor) -> Tensor:
        return F.linear(self.b(F.gelu(self.a(self.embed(tokens)))), self.embed.weight)

    model = randomised(Written(run, embed=nn.Embedding(16, 16), a=nn.Linear(16, 16), b=nn.Linear(16, 16)))
    found = keeps(model, torch.arange(16).view(2, 8), moving=["a.weight", "b.weight"])
    (move,) = found.moves["embed.weight"]
    assert move.dims == (1,)


def test_a_weight_tied_to_its_own_transpose_is_right():
    checked(
        lambda self, x: F.conv2d(F.relu(self.a(x)), self.a.weight.transpose(0, 1)), ["last.weight"], a=conv(16, 24, 1)
    )


def test_weights_that_share_memory_stay_in_place():
    a, b = conv(kernel=1), conv(kernel=1)
    model = written(lambda self, x: self.b(F.relu(self.a(x))), a=a, b=b)
    b.weight.data = a.weight.data
    found = keeps(model, image())
    assert not {"a.weight", "b.weight"} & found.moves.keys()
    assert "shares memory" in next(layer.reason for layer in found.layers if layer.name == "b.weight")


# Cases in which the original crashes


def test_several_outputs_stay_in_place_and_what_lies_before_moves():
    def run(self: Any, x: Tensor) -> Any:
        middle = self.b(F.relu(self.a(x)))
        return {"middle": middle, "both": [self.c(middle), (self.d(middle),)]}

    model = randomised(Written(run, a=conv(8), b=conv(), c=conv(), d=conv()))
    found = keeps(model, image(), moving=["b.weight"])
    reasons = {layer.name: layer.reason for layer in found.layers}
    assert reasons["c.weight"] == reasons["d.weight"] == "it reaches the network's output, or the model keeps it"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_of_any_precision_move_to_the_bit(dtype: torch.dtype):
    model = written(lambda self, x: self.b(F.relu(self.a(x))), a=conv(), b=conv()).to(dtype)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = keeps(model.double(), image(), moving=True)
    model.to(dtype)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, found.of(name, before[name]))


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_convolutions_of_all_dimensions_move(dims: int, transposed: bool):
    kind = getattr(nn, f"Conv{'Transpose' if transposed else ''}{dims}d")
    norm = getattr(nn, f"BatchNorm{dims}d")
    layers = [kind(8, 16, 3, padding=1), norm(16), nn.ReLU(), kind(16, 32, 3, padding=1), nn.ReLU(), kind(32, 8, 1)]
    x = torch.randn(2, 8, *[4] * dims, dtype=torch.float64)
    keeps(randomised(nn.Sequential(*layers)), x, moving=["3.weight", "5.weight"])


# Layers that the original gives up on


def test_flattened_pixels_repeat_each_channel():
    model = nn.Sequential(conv(8), nn.ReLU(), nn.MaxPool2d(6, 6), conv(), nn.Flatten(), nn.Linear(16, 8))
    keeps(randomised(model), image(), moving=["5.weight"])
    model = nn.Sequential(conv(8), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 8))
    found = keeps(randomised(model), image(), moving=False)
    assert reason(found, "3.weight") == "each channel fills its own stripes, because it is repeated at every pixel"


def test_embeddings_move_along_their_width():
    model = nn.Sequential(nn.Embedding(10, 16), nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 8))
    found = keeps(randomised(model), torch.arange(10).view(2, 5), moving=["2.weight", "4.weight"])
    assert "0.weight" in found.moves


def test_squeeze_and_excitation_moves_with_what_it_scales():
    def run(self: Any, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.up(F.relu(self.down(x.mean((2, 3), keepdim=True)))))

    moving = ["down.weight", "up.weight", "last.weight"]
    checked(run, moving, down=conv(16, 8, 1), up=conv(8, 16, 1))


def test_residual_additions_tie_their_producers():
    layers = {"a": conv(), "b": conv(), "norm": nn.BatchNorm2d(16)}
    checked(
        lambda self, x: F.relu(self.norm(self.b(F.relu(self.a(x)))) + x),
        ["a.weight", "b.weight", "last.weight"],
        **layers,
    )


def test_concatenation_keeps_segments_apart():
    model = randomised(
        Written(
            lambda self, x: self.last(torch.cat([self.a(x), self.b(x)], 1)), a=conv(8), b=conv(8, 8), last=conv(24, 8)
        )
    )
    found = keeps(model, image(), moving=["last.weight"])
    (move,) = found.moves["last.weight"]
    assert set(move.source[:16].tolist()) == set(range(16))


def test_a_tensor_joined_to_itself_moves_in_both_places():
    checked(lambda self, x: self.wide(torch.cat([x, F.relu(x)], 1)), ["wide.weight"], wide=conv(32, 16))


@pytest.mark.parametrize("groups", [2, 4, 16])
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_grouped_and_depthwise_convolutions_move_within_groups(groups: int, kind: Any):
    width = 16 if groups == 16 else 32
    layers = {"a": kind(16, width, 3, padding=1, groups=groups), "b": kind(width, 16, 1, groups=2)}
    found = keeps(written(lambda self, x: self.b(F.relu(self.a(x))), **layers), image(), moving=True)
    if groups == 2:
        assert {"a.weight", "b.weight"} <= {layer.name for layer in found.layers if layer.reason is None}


def test_pixel_shuffle_holds_what_it_mixes_with_pixels():
    model = written(lambda self, x: F.avg_pool2d(self.b(F.pixel_shuffle(self.a(x), 2)), 2), a=conv(16, 64), b=conv())
    keeps(model, image(), moving=["a.weight", "last.weight"])


def test_gated_units_move_both_halves():
    checked(lambda self, x: F.glu(self.a(x), 1), ["a.weight", "last.weight"], a=conv(16, 32))
    checked(lambda self, x: torch.mul(*self.a(x).chunk(2, 1)), ["a.weight", "last.weight"], a=conv(16, 32))


def test_einsum_moves_what_it_sums_over():
    def run(self: Any, x: Tensor) -> Tensor:
        return torch.einsum("nchw,oc->nohw", x, self.mix)

    found = keeps(written(run, mix=nn.Parameter(torch.randn(16, 16))), image(), names=["mix", "last.weight"])
    assert [layer.reason for layer in found.layers] == [None, None]


def test_writing_into_slices_keeps_them_apart():
    def run(self: Any, x: Tensor) -> Tensor:
        x = x.clone()
        x[:, :8] += 1
        x[:, 8:].mul_(self.a(x)[:, :8])
        return x

    checked(run, ["a.weight", "last.weight"], a=conv())


@pytest.mark.parametrize("fill", [torch.zeros_like, torch.empty_like, torch.ones_like])
def test_a_tensor_filled_by_slices_is_no_constant(fill: Callable[[Tensor], Tensor]):
    def run(self: Any, x: Tensor) -> Tensor:
        made = fill(x)
        made[:, :3], made[:, 3:] = 1.0, 2.0
        return x * made

    checked(run, False)


def test_different_constants_beside_channels_do_not_change_places():
    def run(self: Any, x: Tensor) -> Tensor:
        zeros, ones = torch.zeros_like(x[:, :4]), torch.ones_like(x[:, :4])
        return self.wide(torch.cat([zeros, x, ones], 1))

    checked(run, ["wide.weight"], wide=conv(24, 16))


def test_a_plain_tensor_attribute_holds_the_channels_that_meet_it():
    model = written(lambda self, x: x * self.scale, scale=torch.linspace(1, 2, 16, dtype=torch.float64).view(-1, 1, 1))
    found = keeps(model, image(), moving=False)
    assert reason(found, "last.weight") == (
        "its input is something that 'mul' combines with a tensor that is neither parameter nor buffer"
    )


def test_a_buffer_moves_with_its_channels_and_one_that_is_not_saved_holds_them():
    for persistent in (True, False):
        model = written(lambda self, x: x * self.scale)
        model.register_buffer("scale", torch.randn(16, 1, 1, dtype=torch.float64), persistent=persistent)
        keeps(model, image(), moving=persistent)


def test_a_parameter_reached_by_another_way_is_recognised():
    model = written(lambda self, x: F.conv2d(F.relu(self.a(x)), self.kept[0]), a=conv(kernel=1))
    model.kept = [model.a.weight]
    keeps_itself(model, moving=True)
    model = written(lambda self, x: F.conv2d(F.relu(self.a(x)), self.kept[0]), a=conv(kernel=1))
    model.kept = [model.a.weight.data]
    keeps_itself(model, moving=False)


def keeps_itself(model: nn.Module, moving: bool) -> None:
    """As `keeps`, without copies, in which views come apart from what they view."""
    from gossamer.model import permute as permutation
    from tests.model.keeping import random_search

    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(permutation, "search_each", random_search)
        before = model(image())
        found = permutation.find_permutation(model, ["a.weight"], example_inputs=image())
        found.apply(model)
        assert (model(image()) - before).abs().max() < 1e-9
    assert (found.layers[0].reason is None) == moving


def test_a_returned_parameter_stays_in_place():
    model = randomised(Written(lambda self, x: (self.b(F.relu(self.a(x))), self.a.weight), a=conv(8), b=conv()))
    keeps(model, image(), moving=False)


def test_layers_that_run_only_in_training_are_traced():
    def run(self: Any, x: Tensor) -> Any:
        middle = F.relu(self.a(x))
        return (self.b(middle), self.aux(middle)) if self.training else self.b(middle)

    found = keeps(randomised(Written(run, a=conv(8), b=conv(), aux=conv())), image(), moving=["b.weight", "aux.weight"])
    assert "aux.weight" in found.moves


def test_activations_that_a_module_keeps_stay_in_place():
    def run(self: Any, x: Tensor) -> Tensor:
        self.seen = self.a(x)
        return F.relu(self.seen)

    found = keeps(written(run, a=conv()), image(), moving=["a.weight"])
    assert reason(found, "last.weight") == "it reaches the network's output, or the model keeps it"


def test_activations_that_a_hook_keeps_stay_in_place():
    seen: dict[str, Tensor] = {}
    model = written(lambda self, x: F.relu(self.a(x)), a=conv())
    model.a.register_forward_hook(lambda module, args, output: seen.update(a=output))
    found = keeps(model, image(), moving=["a.weight"])
    assert reason(found, "last.weight") == "it reaches the network's output, or the model keeps it"
    assert type(seen["a"]) is Tensor


def test_recurrent_layers_are_right():
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        model = randomised(
            Written(
                lambda self, x: self.c(self.b(F.relu(self.a(x)))[0]),
                a=nn.Linear(8, 16),
                b=kind(16, 16),
                c=nn.Linear(16, 8),
            )
        )
        keeps(model, torch.randn(3, 2, 8, dtype=torch.float64))


def test_reparametrised_weights_are_right():
    from torch.nn.utils import parametrizations, prune

    weight_normed, spectral, pruned = conv(), conv(), conv()
    parametrizations.weight_norm(weight_normed)
    parametrizations.spectral_norm(spectral)
    with torch.no_grad():
        prune.random_unstructured(pruned, "weight", 0.5)
    model = written(lambda self, x: self.c(F.relu(self.b(F.relu(self.a(x))))), a=weight_normed, b=spectral, c=pruned)
    keeps(model, image(), names=["last.weight", "c.weight_orig"])


def test_weight_norm_moves_lengths_and_directions():
    from torch.nn.utils import parametrizations

    model = written(lambda self, x: F.relu(self.a(x)), a=parametrizations.weight_norm(conv()))
    found = keeps(model, image(), names=["last.weight"], moving=True)
    assert {"a.parametrizations.weight.original0", "a.parametrizations.weight.original1"} <= found.moves.keys()


def test_an_unknown_operation_holds_its_channels_and_says_so():
    model = written(lambda self, x: torch.special.i0(x.clamp(-1, 1)) + torch.cdist(x, x)[..., :6])
    found = keeps(model, image(), moving=False)
    assert reason(found, "last.weight") == (
        "its input is something that 'add' combines with the result of 'cdist_forward', "
        "whose effect on channels is not known"
    )


def test_a_custom_operation_with_a_familiar_name_is_not_taken_for_it():
    @torch.library.custom_op("gossamer_tests::flip", mutates_args=())
    def flip(x: Tensor, dims: list[int]) -> Tensor:
        return x * torch.arange(x.shape[1], dtype=x.dtype).view(-1, 1, 1)

    @flip.register_fake
    def _(x: Tensor, dims: list[int]) -> Tensor:
        return torch.empty_like(x)

    checked(lambda self, x: flip(x, [1]), False)


@pytest.mark.parametrize("layout", ["channels_last", "not_contiguous"])
def test_weights_in_any_memory_layout_move(layout: str):
    model = written(lambda self, x: self.b(F.relu(self.a(x))), a=conv(), b=conv())
    if layout == "channels_last":
        model = model.to(memory_format=torch.channels_last)
    else:
        for parameter in model.parameters():
            wide = torch.empty(*parameter.shape, 2, dtype=parameter.dtype)
            wide[..., 0] = parameter.detach()
            parameter.data = wide[..., 0]
    strides = [parameter.stride() for parameter in model.parameters()]
    keeps(model, image(), moving=["a.weight", "b.weight"])
    assert strides == [parameter.stride() for parameter in model.parameters()]


def test_models_without_values_are_answered_with_reasons():
    from gossamer.model.permute import find_permutation

    with torch.device("meta"):
        meta = nn.Sequential(conv(8), conv())
    lazy = nn.Sequential(nn.LazyConv2d(16, 3), nn.LazyConv2d(16, 3))
    for model in (meta, lazy):
        found = find_permutation(model, ["0.weight", "1.weight"], example_inputs=image().float())
        assert all(layer.reason for layer in found.layers)
        assert not found.moves


def test_a_weight_with_nan_is_left_alone():
    model = written(lambda self, x: self.b(self.a(x)), a=conv(), b=conv())
    with torch.no_grad():
        model.b.weight[0, 0, 0, 0] = torch.nan
    from gossamer.model.permute import find_permutation

    reasons = {
        layer.name: layer.reason
        for layer in find_permutation(model, ["a.weight", "b.weight"], example_inputs=image()).layers
    }
    assert reasons == {"a.weight": None, "b.weight": "its weights hold NaN or infinity, or nothing yet"}
