"""Networks that call torch's fake-quantize operators themselves, with ranges of an example; for the export's tests."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Rounded(nn.Module):
    """Activations in 8 bits; the range is that of the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.affine: tuple[float, int] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.affine is None:
            low, high = min(float(x.min()), 0.0), max(float(x.max()), 1e-3)
            scale = (high - low) / 255
            self.affine = scale, round(-low / scale)
        return torch.fake_quantize_per_tensor_affine(x, *self.affine, 0, 255)


def rounded_weight(weight: Tensor, axis: int = 0, largest: int = 63) -> Tensor:
    scale = weight.detach().abs().amax([at for at in range(weight.dim()) if at != axis]).clamp(min=1e-8) / largest
    zero = torch.zeros(len(scale), dtype=torch.int32)
    return torch.fake_quantize_per_channel_affine(weight, scale, zero, axis, -largest, largest)


class Convolution(nn.Module):
    """Convolution, batch norm, ReLU, rounded where onnxruntime wants it."""

    def __init__(self, channels: int, outputs: int, size: int = 3, relu: bool = True, **options: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, outputs, size, padding=size // 2, **options)  # type: ignore[arg-type]
        self.norm = nn.BatchNorm2d(outputs)
        self.relu = relu
        self.rounded = Rounded()

    def forward(self, x: Tensor) -> Tensor:
        conv = self.conv
        weight = rounded_weight(conv.weight)
        y = functional.conv2d(x, weight, conv.bias, conv.stride, conv.padding, conv.dilation, conv.groups)
        y = self.norm(y)
        return self.rounded(functional.relu(y) if self.relu else y)


class Transposed(nn.Module):
    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose2d(channels, outputs, 2, stride=2)
        self.norm = nn.BatchNorm2d(outputs)
        self.rounded = Rounded()

    def forward(self, x: Tensor) -> Tensor:
        y = functional.conv_transpose2d(x, rounded_weight(self.conv.weight, 1), self.conv.bias, stride=2)
        return self.rounded(functional.relu(self.norm(y)))


class Linear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return functional.linear(input, rounded_weight(self.weight), self.bias)


class Residual(nn.Module):
    def __init__(self, channels: int, **options: int) -> None:
        super().__init__()
        self.first = Convolution(channels, channels, **options)
        self.second = Convolution(channels, channels, relu=False, bias=False)
        self.rounded = Rounded()

    def forward(self, x: Tensor) -> Tensor:
        return self.rounded(functional.relu(self.second(self.first(x)) + x))


class Network(nn.Module):
    """What residual networks are made of; `wide` adds depthwise, grouped and transposed convolutions."""

    def __init__(self, wide: bool = False) -> None:
        super().__init__()
        self.rounded = Rounded()
        self.stem = Convolution(3, 16, bias=False)
        self.pool = nn.MaxPool2d(2)
        more: list[nn.Module] = [Convolution(16, 16, groups=16), Convolution(16, 16, groups=4), Transposed(16, 16)]
        self.blocks = nn.Sequential(Residual(16), Residual(16, bias=False), *(more if wide else []))
        self.before = Rounded()
        self.fc = Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.pool(self.stem(self.rounded(x))))
        x = functional.adaptive_avg_pool2d(x, 1).flatten(1)
        return self.fc(self.before(x))


def network(wide: bool = False, seed: int = 0) -> Network:
    """A network whose statistics and ranges are those of noise, in evaluation mode, with half of its weights zero."""
    torch.manual_seed(seed)
    model = Network(wide)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.uniform_(module.weight, -1.5, 1.5)
                nn.init.normal_(module.bias, 0, 0.3)
            if isinstance(module, nn.Conv2d | nn.ConvTranspose2d | nn.Linear):
                module.weight[module.weight.abs() < module.weight.abs().median()] = 0
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = None
        plain = [module for module in model.modules() if isinstance(module, Rounded)]
        for _ in range(2):
            for module in plain:
                module.affine = None
            model.train()(noise(128))
        for module in plain:
            module.affine = None
        model.eval()(noise(128))
    return model


def noise(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
