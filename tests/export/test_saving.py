"""`save` in every format: files are verified, read back and load to the same bits."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torchvision.models import googlenet, resnet18, resnet50

from gossamer.errors import GossamerError
from gossamer.export import FORMATS, load_into, programs, save, saving
from gossamer.model import get_parameter, prunable
from gossamer.sparse import NM
from tests.loops import batch, network
from tests.quantization.watching import emulated


def pruned(model: nn.Module, sparsity: float) -> nn.Module:
    with torch.no_grad():
        for name in prunable(model):
            weight = get_parameter(model, name)
            flat = weight.abs().flatten()
            weight[weight.abs() <= flat.kthvalue(round(sparsity * flat.numel())).values] = 0
    return model


def two_of_four(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for name in prunable(model):
            weight = get_parameter(model, name)
            if NM(2, 4).fits(weight.shape) is None:
                weight.copy_(torch.where(NM(2, 4).keep_largest(weight), weight, 0.0))
    return model


def plain_size(model: nn.Module, folder: Path) -> int:
    path = folder / "plain.safetensors"
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, path)
    return path.stat().st_size


def zeros_in(model: nn.Module) -> int:
    return sum(int((get_parameter(model, name) == 0).sum()) for name in prunable(model))


# Sizes


@pytest.mark.parametrize("build", [resnet18, pytest.param(resnet50, marks=pytest.mark.slow)])
def test_a_half_precision_model_in_2_of_4_takes_less_than_0_57_of_its_size(build: Any, tmp_path: Path) -> None:
    model = two_of_four(build()).half()
    found = save(model, tmp_path / "model.safetensors", "sparse24")
    assert found.bytes == found.path.stat().st_size <= 0.57 * plain_size(model, tmp_path)
    assert found.zeros == zeros_in(model)
    assert found.notes == ("not 2:4, written as dense (3 input channels do not divide by 4): conv1.weight",)


def test_a_model_with_nine_of_ten_weights_zero_takes_less_than_0_14_of_its_size(tmp_path: Path) -> None:
    model = pruned(resnet18(), 0.9)
    found = save(model, tmp_path / "model.safetensors", "bitmask")
    assert found.bytes == found.path.stat().st_size <= 0.14 * plain_size(model, tmp_path)
    assert found.zeros == zeros_in(model) > 0.89 * found.weights
    assert found.dense_bytes == sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    assert found.notes == ()
    assert_loaded_one_by_one(model, found.path)


def assert_loaded_one_by_one(model: nn.Module, path: Path) -> None:
    """The weights are not held a second time as a whole."""
    loaded = resnet18()
    whole = sum(tensor.numel() * tensor.element_size() for tensor in loaded.state_dict().values())
    tracemalloc.start()
    load_into(loaded, path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 0.3 * whole
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in model.state_dict().items())


# Weights that are not as expected


def test_weights_that_are_not_2_of_4_are_reported_and_still_are_restored(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.ConvTranspose2d(6, 8, 1))
    with torch.no_grad():
        model[0].weight[:, ::2] *= 0.0  # which leaves −0.0
        model[1].weight[:, ::2] = 0
    found = save(model, tmp_path / "model.safetensors", "sparse24")
    assert found.notes == (
        "not 2:4, written as dense (they hold groups with more than two of four weights): 0.weight",
        "not 2:4, written as dense (6 input channels do not divide by 4): 2.weight",
        "−0.0 takes space in the file (add 0.0 to the weights to make it 0): 0.weight",
    )
    assert found.zeros == 256


def test_a_model_that_emulates_quantization_leaves_its_weights_and_says_what_is_not_there(tmp_path: Path) -> None:
    model, _ = emulated(network().train())
    model(batch(0)[0])
    found = save(model.eval(), tmp_path / "model.safetensors", "safetensors")
    assert found.notes == ("the model emulates quantization: the file holds its float weights, but not its ranges",)
    with pytest.raises(GossamerError, match="pt2 does not support a model that emulates quantization; use the format"):
        save(model, tmp_path / "model.pt2", "pt2", example_inputs=batch(0)[0])


# Programs


def test_an_onnx_file_is_checked_in_onnxruntime_with_its_zeros(tmp_path: Path) -> None:
    model = pruned(network(), 0.8)
    reported: list[tuple[str, float]] = []
    found = save(
        model,
        tmp_path / "model.onnx",
        "onnx",
        example_inputs=batch(0)[0][:1],
        about={"model": "mine"},
        progress=lambda label, share: reported.append((label, share)),
    )
    assert found.zeros == zeros_in(model) > 0.75 * found.weights
    assert found.weights == 288 + 576 + 320
    assert found.largest_difference is not None
    assert found.largest_difference < 1e-5
    assert [(entry.key, entry.value) for entry in onnx.load(found.path).metadata_props] == [("model", "mine")]
    assert [share for _, share in reported] == sorted(share for _, share in reported)
    assert reported[-1] == ("Written", 1.0)
    assert model.training


def test_a_pt2_file_is_checked_with_another_batch_and_its_zeros(tmp_path: Path) -> None:
    model = pruned(network(), 0.8)
    found = save(model, tmp_path / "model.pt2", "pt2", example_inputs=batch(0)[0][:1], about={"model": "mine"})
    assert (found.zeros, found.weights) == (zeros_in(model), 288 + 576 + 320)
    assert found.notes == ()
    about = {"about.json": ""}
    program = torch.export.load(found.path, extra_files=about)
    assert json.loads(about["about.json"]) == {"model": "mine"}
    inputs = batch(3, size=5)[0]
    torch.testing.assert_close(program.module()(inputs), model.eval()(inputs))


def test_a_model_for_one_batch_gives_a_pt2_file_for_that_batch_and_a_note(tmp_path: Path) -> None:
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x.reshape(3, 8))

    found = save(One(), tmp_path / "model.pt2", "pt2", example_inputs=torch.randn(3, 8))
    assert found.notes[0].startswith("it accepts only batches of 3: ")


@pytest.mark.slow
@pytest.mark.parametrize("format", ["onnx", "pt2"])
def test_real_models_keep_their_zeros_and_outputs(tmp_path: Path, format: str) -> None:
    torch.manual_seed(0)
    for model in (pruned(resnet18(), 0.9), two_of_four(googlenet(init_weights=False))):
        path = tmp_path / f"model.{format}"
        found = save(model, path, format, example_inputs=torch.randn(1, 3, 64, 64))
        unused = [name for name in prunable(model) if name.startswith("aux")]
        assert len(found.notes) == (len(unused) if format == "onnx" else 0)
        skipped = sum(int((get_parameter(model, name) == 0).sum()) for name in unused)
        assert found.zeros == zeros_in(model) - (skipped if format == "onnx" else 0)


class Several(nn.Module):
    """Arguments by name, outputs in a dict, a linear layer on sequences, attention and a choice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.attention = nn.Linear(8, 16), nn.MultiheadAttention(16, 2, batch_first=True)
        self.last = nn.ConvTranspose1d(16, 8, 3)

    def forward(self, words: Tensor, *, weight: Tensor) -> dict[str, Tensor]:
        hidden = self.inner(words) * weight[:, None, None]
        hidden = self.attention(hidden, hidden, hidden)[0]
        return {"states": self.last(hidden.transpose(1, 2)), "choice": hidden.argmax(-1)}


@pytest.mark.slow
@pytest.mark.parametrize("format", ["onnx", "pt2"])
def test_arguments_by_name_and_several_outputs_are_compared(tmp_path: Path, format: str) -> None:
    torch.manual_seed(0)
    model = pruned(Several(), 0.5)
    inputs = {"words": torch.randn(2, 5, 8), "weight": torch.rand(2)}
    found = save(model, tmp_path / f"model.{format}", format, example_inputs=inputs)
    assert found.zeros == zeros_in(model)
    assert found.notes == ()


@pytest.mark.slow
def test_a_half_precision_model_is_compared_with_half_precision(tmp_path: Path) -> None:
    model = pruned(network(), 0.5).half()
    found = save(model, tmp_path / "model.onnx", "onnx", example_inputs=batch(0)[0].half())
    assert found.zeros == zeros_in(model)


@pytest.mark.slow
def test_a_quantized_model_is_written_in_integers_and_compared_with_its_emulation(tmp_path: Path) -> None:
    model, _ = emulated(pruned(network(), 0.8).train())
    model(batch(0)[0])
    model.eval()
    found = save(model, tmp_path / "model.onnx", "onnx", example_inputs=batch(0)[0])
    assert found.zeros >= zeros_in(model)
    assert found.weights == 288 + 576 + 320
    assert "its weights are integers, compared with the model that emulates them" in found.notes
    assert 0 < found.largest_difference < 0.05


# What fails leaves nothing


@pytest.mark.parametrize("format", [pytest.param("onnx", marks=pytest.mark.slow), *FORMATS[1:]])
def test_a_file_that_is_not_the_model_does_not_take_its_place(
    tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer gets another model than the one that is compared."""
    model, wrong = network(), network(seed=1)
    if format in ("onnx", "pt2"):
        wrong[7].load_state_dict(model[7].state_dict())
    if format == "onnx":
        write = programs.as_onnx
        monkeypatch.setattr(programs, "as_onnx", lambda _, *rest: write(wrong, *rest))
    elif format == "pt2":
        export = programs._export
        monkeypatch.setattr(programs, "_export", lambda _, *rest: export(wrong.eval(), *rest))
    else:
        file = saving.write_model_file
        monkeypatch.setattr(
            saving, "write_model_file", lambda to, _, *rest, **more: file(to, wrong.state_dict(), *rest, **more)
        )
    path = tmp_path / f"model.{format if format in ('onnx', 'pt2') else 'safetensors'}"
    path.write_text("what was there before")
    with pytest.raises(GossamerError, match="not written: ") as error:
        save(model, path, format, example_inputs=batch(0)[0])
    assert str(error.value).startswith(f"{path}: ")
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    assert path.read_text() == "what was there before"


def test_a_lost_zero_is_found_in_an_onnx_file(tmp_path: Path) -> None:
    from gossamer.export.programs import count_zeros

    weight = onnx.numpy_helper.from_array(torch.tensor([[1.0, 1e-30], [0.0, 2.0]]).numpy(), "0.weight")
    file = onnx.helper.make_model(onnx.helper.make_graph([], "graph", [], [], [weight]))
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    model[0].weight.data = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    with pytest.raises(GossamerError, match=r"model.onnx: not written: 1 zeros of '0.weight' are not zero in the file"):
        count_zeros(model, file, Path("model.onnx"))
    model[0].weight.data = torch.tensor([[1.0, 3.0], [0.0, 2.0]])
    assert count_zeros(model, file, Path("model.onnx")) == (4, 1, ())


@pytest.mark.parametrize(
    ("path", "format", "more", "message"),
    [
        ("a.onnx", "onx", {}, "format: there is no 'onx'; nearest: 'onnx'; there are onnx, pt2, safetensors"),
        ("a.bin", "bitmask", {}, "a.bin: expected a name that ends in .safetensors for the format bitmask"),
        ("a.onnx", "onnx", {}, "a.onnx: the format onnx needs example_inputs, an example of the model's inputs"),
        ("a.safetensors", "bitmask", {"about": {"kind": "x"}}, "about: the name 'kind' is reserved"),
        ("a.safetensors", "bitmask", {"about": {"classes": 10}}, "about: 'classes': names and values must be strings"),
        ("a.pt2", "pt2", {"example_inputs": torch.randn(2, 3)}, "a.pt2: torch.export cannot export the model: "),
    ],
)
def test_what_cannot_be_is_reported(path: str, format: str, more: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(GossamerError) as error:
        save(network(), tmp_path / path, format, **more)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_names_and_values_that_a_file_cannot_hold_are_reported(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self, **buffers: Any) -> None:
            super().__init__()
            for name, value in buffers.items():
                self.register_buffer(name, value)

        def get_extra_state(self) -> Any:
            return {"a": 1}

    class Plain(Odd):
        get_extra_state = nn.Module.get_extra_state

    path = tmp_path / "model.safetensors"
    for model, message in (
        (Odd(), "'_extra_state' cannot be written: it is a dict"),
        (Plain(**{"a@mask": torch.ones(2)}), "the name 'a@mask' is reserved"),
        (Plain(a=torch.ones(2, dtype=torch.complex128)), "safetensors does not support complex128"),
        (Plain(a=torch.ones(2, 2).to_sparse()), "its layout is torch.sparse_coo"),
        (Plain(a=torch.ones(2, device="meta")), "it is on the meta device"),
    ):
        with pytest.raises(GossamerError, match=message):
            save(model, path, "bitmask")
        assert not path.exists()


def test_a_path_that_cannot_be_written_to_is_reported(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    for name in ("model.safetensors", "model.pt2"):
        with pytest.raises(GossamerError, match="cannot be written: "):
            save(network(), tmp_path / "taken" / name, FORMATS[1 + name.endswith("s")], example_inputs=batch(0)[0])


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(8, 16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.a(x) - self.b(y)


def test_arguments_by_name_may_stand_in_another_order_than_in_forward(tmp_path: Path) -> None:
    example = {"y": torch.randn(3, 8), "x": torch.randn(3, 8)}
    assert save(_Two(), tmp_path / "model.onnx", "onnx", example_inputs=example).weights == 256


class _TakesDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(8, 16)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.a(batch["p"]) - self.b(batch["q"])


def test_a_model_whose_argument_is_a_dict_of_tensors_is_written_as_onnx(tmp_path: Path) -> None:
    example = ({"p": torch.randn(3, 8), "q": torch.randn(3, 8)},)
    assert save(_TakesDict(), tmp_path / "model.onnx", "onnx", example_inputs=example).weights == 256


_FULL = """
import resource, signal, sys, torch
from torch import nn
from gossamer.errors import GossamerError
from gossamer.export import save
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
try:
    save(nn.Linear(256, 256), sys.argv[1], "pt2", example_inputs=torch.randn(2, 256))
except GossamerError:
    print("refused")
"""


def test_a_full_disk_does_not_end_the_process_that_writes_a_program(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FULL, tmp_path / "model.pt2"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr[:300]


def test_a_program_may_hold_wide_complex_numbers(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model.register_buffer("phase", torch.zeros(3, dtype=torch.complex128))
    assert save(model, tmp_path / "model.pt2", "pt2", example_inputs=torch.randn(2, 4)).weights == 16
