"""Recipes in Transformers' Trainer: a small BERT, from scratch, tells whether a word is in a sentence."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer.errors import GossamerError
from gossamer.sparse import NM
from tests.integrations.digits import in_a_new_process, same, weights

SENTENCES, WORDS, LENGTH = 512, 12, 6
BATCH = 32
BATCHES = SENTENCES // BATCH

TWO_OF_FOUR = """
modifiers:
  - !GMPruningModifier {params: ['re:.*encoder.layer.*dense.weight'], init_sparsity: 0.05, final_sparsity: 0.5,
                        start_epoch: 0, end_epoch: 3, update_frequency: 0.5, mask_type: "2:4"}
"""
FOUR_FIFTHS = """
modifiers:
  - !GMPruningModifier {params: ['re:.*encoder.layer.*dense.weight'], init_sparsity: 0.1, final_sparsity: 0.8,
                        start_epoch: 0, end_epoch: 2, update_frequency: 0.25}
"""
RATES = """
  - !LearningRateFunctionModifier {start_epoch: 0, end_epoch: 4, lr_func: linear, init_lr: 0.002, final_lr: 0.0002}
"""
FIRST = "bert.encoder.layer.0.intermediate.dense.weight"


@pytest.fixture(scope="module")
def library() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
            patch.setenv(variable, "1")
        transformers = pytest.importorskip("transformers", reason="Transformers is not installed")
        # Accelerate collects garbage before each training, which takes long with so many modules in memory.
        assert transformers.Trainer
        gc.freeze()
        yield transformers
        gc.unfreeze()


def callback(*args: Any, **kwargs: Any) -> Any:
    from gossamer.integrations.transformers import SparsityCallback

    return SparsityCallback(*args, **kwargs)


def sentences(seed: int, count: int = SENTENCES) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number in range(count):
        words = torch.randint(1, WORDS, (LENGTH,), generator=generator)
        if number % 2:
            words[int(torch.randint(0, LENGTH, (), generator=generator))] = 0
        found.append({"input_ids": words.tolist(), "labels": number % 2})
    return found


def bert(library: Any, seed: int = 0, **kwargs: Any) -> Any:
    torch.manual_seed(seed)
    return library.BertForSequenceClassification(
        library.BertConfig(
            vocab_size=WORDS,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=LENGTH,
            **kwargs,
        )
    )


def trainer(library: Any, folder: Path, model: nn.Module, *callbacks: Any, **kwargs: Any) -> Any:
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "num_train_epochs": 4,
        "per_device_train_batch_size": BATCH,
        "learning_rate": 5e-3,
        "logging_steps": BATCHES,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    extra = {key: kwargs.pop(key) for key in ("compute_metrics", "eval_dataset") if key in kwargs}
    return library.Trainer(
        model=model,
        args=library.TrainingArguments(**(settings | kwargs)),
        train_dataset=sentences(0),
        callbacks=list(callbacks),
        **extra,
    )


def accuracy(model: Any) -> float:
    test = sentences(1)
    with torch.no_grad():
        answers = model.eval()(torch.tensor([one["input_ids"] for one in test])).logits.argmax(1)
    return float((answers == torch.tensor([one["labels"] for one in test])).double().mean())


def share(weight: Tensor) -> float:
    return float((weight == 0).double().mean())


def test_a_bert_learns_with_two_of_four_weights(library: Any, tmp_path: Path) -> None:
    model = bert(library)
    train = trainer(library, tmp_path, model, callback(TWO_OF_FOUR), num_train_epochs=5)
    train.train()
    assert accuracy(model) > 0.9
    for name, weight in model.named_parameters():
        if "encoder.layer" in name and name.endswith("dense.weight"):
            assert share(weight) == 0.5
            assert NM(2, 4).violations(weight.detach()) == 0
    logged = [entry["sparsity"] for entry in train.state.log_history if "sparsity" in entry]
    assert len(logged) == 5
    assert logged[2:] == [0.5] * 3
    train.save_model(str(tmp_path / "saved"))
    again = library.BertForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert share(dict(again.named_parameters())[FIRST]) == 0.5


@pytest.mark.parametrize("recipe", [FOUR_FIFTHS, FOUR_FIFTHS + RATES], ids=["without rates", "with rates"])
def test_a_training_from_a_checkpoint_ends_at_the_weights_of_one_that_never_stopped(
    library: Any, tmp_path: Path, recipe: str
) -> None:
    settings = {"save_strategy": "steps", "save_steps": 10, "gradient_accumulation_steps": 2, "num_train_epochs": 3}
    whole = bert(library)
    trainer(library, tmp_path, whole, callback(recipe), **settings).train()
    assert (
        0.5
        < share(library.BertForSequenceClassification.from_pretrained(tmp_path / "checkpoint-10").state_dict()[FIRST])
        < 0.8
    )
    again = bert(library, seed=1)
    trainer(library, tmp_path, again, callback(recipe), **settings).train(
        resume_from_checkpoint=str(tmp_path / "checkpoint-10")
    )
    assert same(weights(whole), weights(again))
    assert share(again.state_dict()[FIRST]) == pytest.approx(0.8, abs=1e-3)


def test_a_checkpoint_that_was_moved_has_to_be_named(library: Any, tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 5, "max_steps": 10}
    whole = bert(library)
    trainer(library, tmp_path / "a", whole, callback(FOUR_FIFTHS), **settings).train()
    moved = tmp_path / "kept"
    (tmp_path / "a" / "checkpoint-5").rename(moved)
    lost = trainer(library, tmp_path / "b", bert(library), callback(FOUR_FIFTHS), **settings)
    with pytest.raises(GossamerError, match=r"at step 5, .* resume_from=FOLDER"):
        lost.train(resume_from_checkpoint=str(moved))
    again = bert(library, seed=1)
    trainer(library, tmp_path / "b", again, callback(FOUR_FIFTHS, resume_from=moved), **settings).train(
        resume_from_checkpoint=str(moved)
    )
    assert same(weights(whole), weights(again))


def test_the_state_of_another_training_is_not_taken(library: Any, tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 5, "max_steps": 5}
    for folder in ("a", "b"):
        trainer(library, tmp_path / folder, bert(library), callback(FOUR_FIFTHS), **settings).train()
    other = tmp_path / "b" / "checkpoint-5" / "gossamer.pt"
    other.replace(tmp_path / "a" / "checkpoint-5" / "gossamer.pt")
    train = trainer(library, tmp_path / "a", bert(library), callback(FOUR_FIFTHS), **(settings | {"max_steps": 6}))
    with pytest.raises(GossamerError, match="the recipe's state of that checkpoint is not in"):
        train.train(resume_from_checkpoint=True)


@pytest.mark.slow
def test_a_dense_checkpoint_is_entered_in_the_middle(
    library: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"save_strategy": "steps", "save_steps": BATCHES}
    trainer(library, tmp_path, bert(library), num_train_epochs=1, **settings).train()
    model = bert(library)
    with caplog.at_level(logging.WARNING, "gossamer"):
        trainer(library, tmp_path, model, callback(FOUR_FIFTHS), num_train_epochs=2, **settings).train(
            resume_from_checkpoint=True
        )
    assert "without the recipe's state: the recipe starts at epoch 1" in caplog.text
    assert share(model.state_dict()[FIRST]) == pytest.approx(0.8, abs=1e-3)


def test_the_best_model_is_one_that_was_pruned_to_the_end(
    library: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scores = iter([0.9, 0.8, 0.3, 0.5, 0.4])  # the first two before pruning is over
    model = bert(library)
    train = trainer(
        library,
        tmp_path,
        model,
        callback(FOUR_FIFTHS.replace("end_epoch: 2", "end_epoch: 2.5")),
        num_train_epochs=5,
        save_strategy="epoch",
        eval_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="score",
        greater_is_better=True,
        eval_dataset=sentences(1, 32),
        compute_metrics=lambda _: {"score": next(scores)},
    )
    train.train()
    assert "carried out" not in caplog.text  # the best model is older than the end of the training
    assert train.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{4 * BATCHES}")
    best = library.BertForSequenceClassification.from_pretrained(train.state.best_model_checkpoint)
    assert same(weights(model), weights(best))
    assert share(model.state_dict()[FIRST]) == pytest.approx(0.8, abs=1e-3)


@pytest.mark.slow
def test_the_best_model_of_a_training_that_is_too_short_keeps_its_own_masks(
    library: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scores = iter([0.9, 0.8])
    model = bert(library)
    train = trainer(
        library,
        tmp_path,
        model,
        callback(FOUR_FIFTHS.replace("end_epoch: 2", "end_epoch: 4")),
        num_train_epochs=2,
        save_strategy="epoch",
        eval_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="score",
        greater_is_better=True,
        eval_dataset=sentences(1, 32),
        compute_metrics=lambda _: {"score": next(scores)},
    )
    with caplog.at_level(logging.WARNING, "gossamer"):
        train.train()
    assert "ends after 2 epochs and the recipe after 4" in caplog.text
    best = library.BertForSequenceClassification.from_pretrained(tmp_path / f"checkpoint-{BATCHES}")
    assert same(weights(model), weights(best))


def test_accumulated_batches_are_one_step(library: Any, tmp_path: Path) -> None:
    epochs: list[tuple[float, float]] = []

    class Watch(library.TrainerCallback):
        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            epochs.append((sparsity.manager.epoch, state.epoch))

    sparsity = callback(FOUR_FIFTHS)
    train = trainer(
        library, tmp_path, bert(library), sparsity, Watch(), num_train_epochs=2, gradient_accumulation_steps=3
    )
    train.train()
    assert epochs == [(1, 1), (2, 2)]  # 16 batches are 6 steps
    assert train.state.global_step == 12


def test_the_rates_of_the_recipe_win_and_are_what_is_logged(
    library: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rates: list[float] = []

    class Watch(library.TrainerCallback):
        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            rates.append(sparsity._rates.used)

    sparsity = callback(FOUR_FIFTHS + RATES)
    train = trainer(library, tmp_path, bert(library), sparsity, Watch(), max_steps=6, logging_steps=1)
    with caplog.at_level(logging.WARNING, "gossamer"):
        train.train()
    assert "LambdaLR has no effect" in caplog.text
    assert "parameter group" not in caplog.text
    assert f"6 of {4 * BATCHES} steps" in caplog.text
    expected = [0.002 - 0.0018 * step / (4 * BATCHES) for step in range(6)]
    assert rates == pytest.approx(expected)
    assert [entry["learning_rate"] for entry in train.state.log_history if "loss" in entry] == pytest.approx(expected)


def test_a_callback_that_joins_is_heard_by_those_that_report(library: Any, tmp_path: Path) -> None:
    heard: list[dict[str, float]] = []

    class Report(library.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            heard.append(dict(logs))

    train = trainer(library, tmp_path, bert(library), Report(), max_steps=2, logging_steps=1)
    callback(FOUR_FIFTHS).join(train)
    train.train()
    assert [0.05 < entry["sparsity"] < 0.5 for entry in heard if "loss" in entry] == [True, True]


def test_a_broken_off_training_goes_on_from_its_checkpoint_in_the_same_process(library: Any, tmp_path: Path) -> None:
    class Break(library.TrainerCallback):
        armed = True

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self.armed and state.global_step == 14:
                self.armed = False
                raise KeyboardInterrupt

    settings = {"save_strategy": "steps", "save_steps": 10, "num_train_epochs": 1}
    whole = bert(library)
    trainer(library, tmp_path / "a", whole, callback(FOUR_FIFTHS), **settings).train()
    model = bert(library)
    train = trainer(library, tmp_path / "b", model, callback(FOUR_FIFTHS), Break(), **settings)
    with pytest.raises(KeyboardInterrupt):
        train.train()
    train.train(resume_from_checkpoint=True)
    assert same(weights(whole), weights(model))


def test_a_teacher_is_heard_though_the_model_computes_its_loss_itself(library: Any, tmp_path: Path) -> None:
    recipe = "modifiers:\n  - !DistillationModifier {hardness: 1.0, temperature: 1.0}\n"

    def taught(labels: str, batch: int, accumulate: int) -> dict[str, Tensor]:
        model = bert(library, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        sparsity = callback(recipe, distillation_teacher=bert(library, seed=5))
        train = trainer(
            library,
            tmp_path,
            model,
            sparsity,
            max_steps=4,
            optim="sgd",
            learning_rate=0.5,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulate,
        )
        if labels == "wrong":
            train.train_dataset = [{**one, "labels": 1 - one["labels"]} for one in train.train_dataset]
        train.train()
        assert not model._forward_hooks
        return weights(model)

    right, wrong = taught("right", 16, 1), taught("wrong", 16, 1)
    assert same(right, wrong)  # with hardness 1 nothing but the teacher counts
    begun = weights(bert(library))
    assert not torch.allclose(right["classifier.bias"], begun["classifier.bias"], atol=1e-3)
    for name, weight in taught("right", 8, 2).items():
        torch.testing.assert_close(weight, right[name], atol=1e-5, rtol=1e-4)


def _in_two_processes(folder: Path) -> None:
    import transformers

    torch.set_num_threads(1)
    settings = {"save_strategy": "steps", "save_steps": 10, "num_train_epochs": 3}
    model = bert(transformers)
    train = trainer(transformers, folder, model, callback(FOUR_FIFTHS + RATES), **settings)
    train.train()
    again = bert(transformers, seed=1)
    trainer(transformers, folder, again, callback(FOUR_FIFTHS + RATES), **settings).train(
        resume_from_checkpoint=str(folder / "checkpoint-10")
    )
    step = torch.load(folder / "checkpoint-10" / "gossamer.pt", weights_only=True)["state"]["steps_per_epoch"]
    held = {"whole": weights(model), "again": weights(again), "steps_per_epoch": step}
    torch.save(held, folder / f"rank{train.args.process_index}.pt")
    # What the processes have to average needs the wrapped model, which only a trainer knows.
    taught = "modifiers: [!DistillationModifier {hardness: 0.5}]"
    with pytest.raises(GossamerError, match=r"callback\.join\(trainer\)"):
        trainer(transformers, folder, bert(transformers), callback(taught), max_steps=1).train()
    train = trainer(transformers, folder, bert(transformers), max_steps=2)
    callback(taught).join(train)
    train.train()


@pytest.mark.slow
def test_two_processes_train_one_sparse_model_and_go_on_with_it(library: Any, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    launch = f"debug_launcher(tests._in_two_processes, args=(Path({str(tmp_path)!r}),), num_processes=2)"
    in_a_new_process(__name__, f"from accelerate import debug_launcher\n{launch}")
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2))
    assert first["steps_per_epoch"] == BATCHES / 2
    assert same(first["whole"], second["whole"])
    assert same(first["whole"], first["again"])
    assert share(first["whole"][FIRST]) == pytest.approx(0.8, abs=1e-3)
