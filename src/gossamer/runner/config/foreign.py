"""Settings of United Perception that are spelled differently here, and what to write in their place.

Found before the schema is applied, which would only call them unknown.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from gossamer.runner.config.tree import Problems, Tree

INSTEAD = {
    "net": "name one model: 'net: {type: resnet18}'; a backbone, neck and heads come together under one name",
    "dataset.*.dataset": "name the data right here: 'type: coco' with 'path' and 'images', 'type: image_list', …",
    "dataset.dataloader": "give 'batch_size' and 'num_workers' under dataset.train and dataset.test",
    "dataset.*.batch_sampler": "give 'batch_size' right here; its kwargs are not needed",
    "dataset.*.sampler": "leave it out: training is shuffled and shared by processes, testing goes in order",
    "trainer.optimizer.register_type": "leave it out; 'type' names a class of torch.optim",
    "trainer.lr_scheduler.warmup_register_type": "leave it out; 'warmup_type' is linear, exp or constant",
    "trainer.max_epochs": "write 'max_epoch'",
    "trainer.max_iters": "write 'max_iter'",
    "saver.results_dir": "leave it out; results go into the run folder, saver.save_dir",
    "saver.save_cfg": "leave it out; the resolved config goes into the run folder",
    "ema.ema_type": "leave it out; there is one kind, with 'enable' and 'decay'",
    "ema.kwargs": "write 'decay' right below 'ema'",
    "runtime.task_names": "write 'task: classification' or 'task: detection' at the top, or leave it out",
    "runtime.random_seed": "write 'seed'",
    "runtime.special_bn_init": "leave it out",
    "runtime.aligned": "leave it out",
    "runtime.async_norm": "leave it out",
    "to_kestrel": "leave it out; saver.export writes safetensors and onnx",
    "quant": "leave it out; quantization is a recipe: 'sparsity: {recipe: file.yaml}'",
    "flip": "leave it out",
}
"""By path, with `*` for one step; `net` is so only when it is a list."""


def set_aside(tree: Tree, problems: Problems) -> tuple[Tree, set[tuple[str | int, ...]]]:
    """The tree without such settings, and the paths at which something else is therefore amiss."""
    faults: set[tuple[str | int, ...]] = set()
    for path in list(tree.paths()):
        name = ".".join(path)
        instead = next((text for pattern, text in INSTEAD.items() if _matches(name, pattern)), None)
        found = tree.at(*path)
        if instead is None or found is None or (name == "net" and not isinstance(found.content, list)):
            continue
        problems.add(found.key, f"{name} is of United Perception's form; {instead}")
        tree = tree.without(*path)
        faults |= {path, path[:-1]}
    return tree, faults


def _matches(name: str, pattern: str) -> bool:
    return name.count(".") == pattern.count(".") and fnmatchcase(name, pattern)
