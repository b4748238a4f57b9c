"""Perplexity and time of one-shot methods on a small language model, with llm-compressor beside them if it is there.

The folder has `model/` (Transformers), `calibration.txt` and `test.txt`; `benchmarks.oneshot_texts` makes it of public
packages. llm-compressor runs in an environment of its own: GOSSAMER_PEER is the path of its interpreter.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import gossamer
from benchmarks.measuring import Row, Watch
from gossamer.calibration.perplexity import negative_log_likelihood

SAMPLES, LENGTH = 64, 256
METHODS = {
    "Wanda 50 %": "WandaPruningModifier: {sparsity: 0.5}",
    "SparseGPT 50 %": "SparseGPTModifier: {sparsity: 0.5}",
    "SparseGPT 50 %, measured": "SparseGPTModifier: {sparsity: 0.5, sparsity_profile: measured}",
    "ALPS 50 %": "ALPSPruningModifier: {sparsity: 0.5}",
    "Wanda 2:4": "WandaPruningModifier: {mask_structure: '2:4'}",
    "SparseGPT 2:4": "SparseGPTModifier: {mask_structure: '2:4'}",
    "SparseGPT 2:4, permuted": "SparseGPTModifier: {mask_structure: '2:4', permute: true}",
}
BESIDE = {
    "Wanda 50 %": "Wanda 50 %",
    "SparseGPT 50 %": "SparseGPT 50 %",
    "SparseGPT 50 %, measured": "SparseGPT 50 % of Gossamer",
    "ALPS 50 %": "SparseGPT 50 % of Gossamer",
    "Wanda 2:4": "Wanda 2:4",
    "SparseGPT 2:4": "SparseGPT 2:4",
    "SparseGPT 2:4, permuted": "SparseGPT 2:4 of Gossamer",
}
"""What each is compared with: the same method of llm-compressor, or another of ours."""
_PEER = """
import json, sys, time, torch
from llmcompressor import oneshot
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, ids, kind, structure, out = sys.argv[1:]
torch.set_num_threads(1)
ids = torch.tensor(json.load(open(ids)))
rows = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in ids]
model = AutoModelForCausalLM.from_pretrained(folder)
fields = "{sparsity: 0.5, mask_structure: '%s', targets: ['Linear'], ignore: ['re:.*lm_head']}" % structure
began = time.process_time()
oneshot(
    model=model,
    recipe="s_stage:\\n  p_modifiers:\\n    %s: %s\\n" % (kind, fields),
    dataset=DataLoader(rows, batch_size=8),
    tokenizer=AutoTokenizer.from_pretrained(folder),
    num_calibration_samples=len(ids),
    max_seq_length=ids.shape[1],
)
spent = time.process_time() - began
torch.save({name: value for name, value in model.state_dict().items() if "proj" in name}, out)
print("spent", spent)
"""


def oneshot_language(watch: Watch, folder: Path | None) -> Iterator[Row]:
    if folder is None or not (folder / "model" / "config.json").exists():
        raise FileNotFoundError(
            "one-shot pruning of a language model is left out: give --language a folder with model/, calibration.txt "
            "and test.txt, which python -m benchmarks.oneshot_texts makes"
        )
    torch.set_num_threads(1)
    tokenizer: Any = AutoTokenizer.from_pretrained(str(folder / "model"))
    calibration = windows(tokenizer, folder / "calibration.txt", SAMPLES)
    test = windows(tokenizer, folder / "test.txt", None)
    steps = iter(watch("methods", len(METHODS)))
    dense = perplexity(load(folder), test)
    found: dict[str, tuple[float, float]] = {}
    peers: dict[str, tuple[float, float] | None] = {}
    for name, modifier in METHODS.items():
        model = load(folder)
        began = time.process_time()
        recipe = f"stage:\n  run_type: oneshot\n  m_modifiers:\n    {modifier}\n"
        gossamer.oneshot(model, recipe=recipe, data=list(calibration.split(1)))
        spent = time.process_time() - began
        found[name] = perplexity(model, test), spent
        other = BESIDE[name].removesuffix(" of Gossamer")
        if other == name:
            peers[name] = by_peer(folder, calibration, test, name)
        beside = peers.get(name) if other == name else found[other]
        note = f"dense {dense:.2f}; {SAMPLES} samples of {LENGTH} tokens; {spent:.0f} s of CPU time"
        ours, theirs = found[name][0], beside[0] if beside else dense
        which = BESIDE[name] if other != name else "llm-compressor" if beside else "the dense model"
        yield Row(f"perplexity of {name} / {which}", ours, theirs, "", 1.0 if beside else None, note=note)
        if beside and other == name:
            yield Row(f"CPU time of {name} / llm-compressor", spent, beside[1], "s", 0.5)
        next(steps, None)


def by_peer(folder: Path, calibration: Tensor, test: Tensor, name: str) -> tuple[float, float] | None:
    """Perplexity and CPU seconds of llm-compressor with the same method and data; None without it."""
    python = os.environ.get("GOSSAMER_PEER")
    if not python:
        return None
    ids, out = folder / "calibration.json", folder / "peer.pt"
    ids.write_text(json.dumps(calibration.tolist()))
    kind = "WandaPruningModifier" if name.startswith("Wanda") else "SparseGPTModifier"
    structure = "2:4" if "2:4" in name else "0:0"
    arguments = [python, "-c", _PEER, str(folder / "model"), str(ids), kind, structure, str(out)]
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    result = subprocess.run(arguments, capture_output=True, text=True, check=True, env=clean | {"OMP_NUM_THREADS": "1"})
    model = load(folder)
    model.load_state_dict(torch.load(out), strict=False)
    spent = float(next(line for line in result.stdout.splitlines() if line.startswith("spent")).split()[1])
    return perplexity(model, test), spent


def load(folder: Path) -> nn.Module:
    model: Any = AutoModelForCausalLM.from_pretrained(str(folder / "model"))
    return model.float().eval()


def windows(tokenizer: Any, text: Path, count: int | None) -> Tensor:
    """`(windows, LENGTH)`: token ids, all of them or `count` at equal distances."""
    ids = torch.tensor(tokenizer(text.read_text("utf-8"), verbose=False)["input_ids"])
    rows = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
    return rows if count is None else rows[:: max(len(rows) // count, 1)][:count]


def perplexity(model: nn.Module, test: Tensor) -> float:
    total, predicted = negative_log_likelihood(model, test, lambda _label, _share: None)
    return math.exp(total / predicted)
