"""Peak memory of one-shot pruning from a folder, for a Llama-shaped checkpoint of 2 GB with random weights."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import LlamaConfig

from benchmarks.measuring import Row, Watch
from gossamer.calibration.checkpoint import INDEX
from gossamer.io import bytes_of, header_of, write_sealed

HIDDEN, INNER, BLOCKS, VOCABULARY = 2048, 5632, 9, 16_000
SAMPLES, LENGTH = 4, 128
_RECIPE = (
    "stage:\n  run_type: oneshot\n  m_modifiers:\n    SparseGPTModifier: {sparsity: 0.5, ignore: ['re:.*embed']}\n"
)
_CHILD = """
import sys, torch, transformers, accelerate, gossamer, gossamer.calibration
from pathlib import Path
from transformers import LlamaForCausalLM

def peak():
    return int(next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmHWM")).split()[1])

def resident():
    return int(next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmRSS")).split()[1])

folder, out, recipe, samples, length, blocks = sys.argv[1:]
data = list(torch.randint(100, (int(samples), int(length))).split(1))
# A small model first: imports of libraries on first use are not the method's.
small = LlamaForCausalLM(transformers.LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=4, vocab_size=100, tie_word_embeddings=True))
gossamer.oneshot(small, recipe=recipe, data=data)
before = resident()
gossamer.oneshot(folder, recipe=recipe, data=data, output=out)
print(peak() - before)
"""


def oneshot_memory(watch: Watch) -> Iterator[Row]:
    steps = iter(watch("checkpoint and pruning", 2))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        size = _write_checkpoint(folder)
        next(steps, None)
        arguments = [str(folder), str(Path(place) / "out"), _RECIPE, str(SAMPLES), str(LENGTH), str(BLOCKS)]
        result = subprocess.run([sys.executable, "-c", _CHILD, *arguments], capture_output=True, text=True, check=True)
        next(steps, None)
    grown = int(result.stdout.split()[-1]) / 2**20
    # Residual stream, normalized inputs, and gate, up and their product of every sample, in float32.
    activations = SAMPLES * LENGTH * (3 * HIDDEN + 3 * INNER) * 4 / 2**20
    note = f"checkpoint of {size / 2**30:.1f} GB in float32, with {activations:.0f} MB of activations, which count here"
    yield Row("memory above imports while streaming / 1 GB", grown, 1024.0, "MB", 1.0, note=note)


def _write_checkpoint(folder: Path) -> int:
    """A checkpoint in the form of `save_pretrained`, one file for each block; returns its bytes."""
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=BLOCKS,
        num_attention_heads=32,
        num_key_value_heads=32,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
    )
    folder.mkdir(parents=True)
    config.save_pretrained(str(folder))
    square, wide, tall = (HIDDEN, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)
    layers: dict[str, tuple[int, ...]] = {f"self_attn.{name}_proj": square for name in "qkvo"}
    layers |= {"mlp.gate_proj": wide, "mlp.up_proj": wide, "mlp.down_proj": tall}
    files: dict[str, dict[str, tuple[int, ...]]] = {}
    files |= {
        "model-embed.safetensors": {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    }
    for block in range(BLOCKS):
        shapes = {f"model.layers.{block}.{name}.weight": shape for name, shape in layers.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{block}.{norm}.weight"] = (HIDDEN,)
        files[f"model-{block}.safetensors"] = shapes
    generator = torch.Generator().manual_seed(0)
    for file, shapes in files.items():
        header = header_of({"format": "pt"}, [(name, torch.float32, shape) for name, shape in shapes.items()])
        with (folder / file).open("wb") as opened:
            write_sealed(
                opened,
                header,
                (
                    bytes_of(torch.randn(shape, generator=generator) * 0.02 if len(shape) > 1 else torch.ones(shape))
                    for shape in shapes.values()
                ),
            )
    weight_map = {name: file for file, shapes in files.items() for name in shapes}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return sum((folder / file).stat().st_size for file in files)
