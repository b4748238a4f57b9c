"""`gossamer.oneshot` on models in memory: every modifier, every kind of layer, stages, data and errors."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer import Manager
from gossamer.sparse import NM, Unstructured
from gossamer.sparse.reconstruction import Moments, sparsegpt, wanda_mask, wanda_scores
from tests.calibration.models import (
    encoder,
    images,
    llama,
    network,
    recipe,
    sequences,
    state,
    tokens,
    unchanged,
    zero_shares,
)

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PRUNING = [
    ("SparseGPTModifier: {sparsity: 0.5}", 0.5),
    ("SparseGPTModifier: {sparsity: 0.5, mask_structure: '2:4', preserve_sparsity_mask: true}", 0.5),
    ("SparseGPTModifier: {mask_structure: '4:8', percdamp: 0.1, block_size: 64}", 0.5),
    ("SparseGPTModifier: {sparsity: 0.75, mask_structure: block4}", 0.75),
    ("WandaPruningModifier: {sparsity: 0.5}", 0.5),
    ("WandaPruningModifier: {mask_structure: '8:16'}", 0.5),
    ("MagnitudePruningModifier: {sparsity: 0.75}", 0.75),
    ("ALPSPruningModifier: {sparsity: 0.75}", 0.75),
    ("ALPSPruningModifier: {mask_structure: '2:4'}", 0.5),
]
pruning = pytest.mark.parametrize(("modifier", "share"), PRUNING, ids=lambda value: str(value).split(":")[0])


@pruning
@pytest.mark.parametrize(
    ("build", "data", "layers"),
    [(llama, tokens, 14), (encoder, sequences, 8)],
    ids=["llama", "encoder"],
)
def test_every_method_makes_the_exact_zeros_in_every_layer(
    modifier: str, share: float, build: Any, data: Any, layers: int
) -> None:
    model = build()
    assert gossamer.oneshot(model, recipe=recipe(modifier), data=data()) is model
    found = zero_shares(model, "weight")
    assert len(found) == layers
    assert set(found.values()) == {share}


@pruning
def test_every_method_gives_the_same_bits_twice_and_keeps_modes(modifier: str, share: float) -> None:
    first, second = network(), network()
    second[1].eval()
    modes = [module.training for module in second.modules()]
    for model in (first, second):
        if "block4" not in modifier and "structure" not in modifier:
            gossamer.oneshot(model, recipe=recipe(modifier), data=images())
    assert all(torch.equal(one, other) for one, other in zip(first.parameters(), second.parameters(), strict=True))
    assert [module.training for module in second.modules()] == modes


@pytest.mark.parametrize("modifier", ["SparseGPTModifier", "WandaPruningModifier", "GPTQModifier"])
def test_one_shot_modifiers_refuse_a_training_loop(modifier: str) -> None:
    fields = "{scheme: W8A16}" if modifier == "GPTQModifier" else "{sparsity: 0.5}"
    model = network()
    manager = Manager(recipe(f"{modifier}: {fields}"))
    with pytest.raises(gossamer.GossamerError, match=f"{modifier}: acts in one shot, without training; call gossamer"):
        manager.modify(model, torch.optim.SGD(model.parameters(), 0.1), 4)


def test_each_layer_is_calibrated_on_what_the_pruned_layers_before_it_compute() -> None:
    model = llama()
    expected = deepcopy(model)
    data = tokens(4)
    gossamer.oneshot(model, recipe=recipe("SparseGPTModifier: {sparsity: 0.5}"), data=data)
    for block in range(2):
        for layer in LAYERS:
            name = f"model.layers.{block}.{'self_attn' if layer[0] in 'qkvo' else 'mlp'}.{layer}"
            linear = expected.get_submodule(name)
            moments = Moments(linear.in_features, products=True)
            hook = linear.register_forward_pre_hook(lambda _, args, moments=moments: moments.add(args[0].flatten(0, 1)))
            expected(torch.cat(data))
            hook.remove()
            linear.weight.data = sparsegpt(linear.weight, moments.gram, Unstructured(), 0.5).detach()
            torch.testing.assert_close(model.get_submodule(name).weight, linear.weight, rtol=1e-3, atol=1e-3)


def test_a_convolution_is_its_unfolded_input_and_groups_are_layers_of_their_own() -> None:
    model, dense = network(), network()
    data = torch.cat(images())
    gossamer.oneshot(model, recipe=recipe("WandaPruningModifier: {sparsity: 0.5, targets: ['0', '3']}"), data=images())
    windows = nn.functional.unfold(nn.functional.pad(data, (1, 1, 1, 1)), 3).transpose(1, 2).reshape(-1, 27)
    scores = wanda_scores(dense[0].weight.flatten(1), windows.norm(dim=0))
    scores = scores.view(16, 3, 9).transpose(1, 2).flatten(1)
    keep = wanda_mask(scores, Unstructured(), 0.5).view(16, 9, 3).transpose(1, 2).reshape(16, 3, 3, 3)
    assert torch.equal(model[0].weight != 0, keep)
    assert float((model[3].weight == 0).double().mean()) == 0.5
    assert NM(2, 4).violations(model[3].weight) > 0
    paired = network()
    gossamer.oneshot(
        paired, recipe=recipe("SparseGPTModifier: {mask_structure: '2:4', targets: ['3', '6']}"), data=images()
    )
    assert NM(2, 4).violations(paired[3].weight) == NM(2, 4).violations(paired[6].weight) == 0


def test_batch_norm_has_the_statistics_of_all_samples_behind_pruned_layers() -> None:
    model = network().eval()
    gossamer.oneshot(model, recipe=recipe("SparseGPTModifier: {sparsity: 0.6}"), data=images())
    inputs = torch.cat(images())
    for index, layer in enumerate(model):
        if isinstance(layer, nn.BatchNorm2d):
            torch.testing.assert_close(layer.running_mean, inputs.mean((0, 2, 3)), rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(layer.running_var, inputs.var((0, 2, 3)), rtol=1e-4, atol=1e-4)
        inputs = layer(inputs).detach()
        assert index < 20


def test_attention_of_torch_is_calibrated_on_what_its_projections_read() -> None:
    model, dense = encoder().eval(), encoder().eval()
    data = torch.cat(sequences())
    gossamer.oneshot(
        model, recipe=recipe("WandaPruningModifier: {sparsity: 0.5, targets: ['layers.0']}"), data=sequences()
    )
    attention = dense.layers[0].self_attn
    keep = wanda_mask(wanda_scores(attention.in_proj_weight, data.flatten(0, 1).norm(dim=0)), Unstructured(), 0.5)
    assert torch.equal(model.layers[0].self_attn.in_proj_weight != 0, keep)
    attention.in_proj_weight.data = model.layers[0].self_attn.in_proj_weight.data
    query, key, value = (data @ attention.in_proj_weight.t() + attention.in_proj_bias).chunk(3, -1)
    heads = [part.unflatten(-1, (4, 4)).transpose(1, 2) for part in (query, key, value)]
    attended = nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(-1, 16).detach()
    keep = wanda_mask(wanda_scores(attention.out_proj.weight, attended.norm(dim=0)), Unstructured(), 0.5)
    assert torch.equal(model.layers[0].self_attn.out_proj.weight != 0, keep)


def test_padding_does_not_count() -> None:
    whole, padded = llama(), llama()
    ids = torch.cat(tokens(3))
    mask = torch.ones_like(ids)
    batch = {"input_ids": torch.cat([ids, torch.zeros(3, 9, dtype=torch.long)], 1)}
    batch["attention_mask"] = torch.cat([mask, torch.zeros(3, 9, dtype=torch.long)], 1)
    method = recipe("WandaPruningModifier: {sparsity: 0.5, targets: ['re:.*layers.0.*_proj']}")
    gossamer.oneshot(whole, recipe=method, data=[ids])
    gossamer.oneshot(padded, recipe=method, data=[batch])
    different = [
        name for name, value in whole.named_parameters() if ((value == 0) != (padded.get_parameter(name) == 0)).any()
    ]
    assert different == []


TARGETS = [
    ("['re:.*q_proj.weight', 're:.*k_proj.weight']", {"q_proj", "k_proj"}),
    ("[model.layers.0]", set(LAYERS)),
    ("Linear", set(LAYERS)),
    ("[LlamaMLP]", {"gate_proj", "up_proj", "down_proj"}),
    ("[model.layers.1.mlp.down_proj.weight]", {"down_proj"}),
    ("__ALL_PRUNABLE__", set(LAYERS)),
]


@pytest.mark.parametrize(("targets", "layers"), TARGETS)
def test_targets_are_layers_modules_classes_or_weights(targets: str, layers: set[str]) -> None:
    model = llama()
    method = f"WandaPruningModifier: {{sparsity: 0.5, targets: {targets}, ignore: ['re:.*embed']}}"
    gossamer.oneshot(model, recipe=recipe(method), data=tokens())
    assert {name.split(".")[-2] for name in zero_shares(model)} == layers


def test_ignored_layers_and_tied_embeddings_stay_dense() -> None:
    model = llama(tie_word_embeddings=False)
    gossamer.oneshot(model, recipe=recipe("WandaPruningModifier: {sparsity: 0.5, ignore: [lm_head]}"), data=tokens())
    assert "lm_head.weight" not in zero_shares(model)
    gossamer.oneshot(model, recipe=recipe("WandaPruningModifier: {sparsity: 0.5, targets: [lm_head]}"), data=tokens())
    assert zero_shares(model)["lm_head.weight"] == 0.5
    assert "model.embed_tokens.weight" not in zero_shares(model)


def test_sparsities_are_given_for_each_target_or_by_name() -> None:
    model = llama()
    listed = "WandaPruningModifier: {sparsity: [0.25, 0.75], targets: ['re:model.layers.[0-9]$']}"
    gossamer.oneshot(model, recipe=recipe(listed), data=tokens())
    assert set(zero_shares(model, "layers.0").values()) == {0.25}
    assert set(zero_shares(model, "layers.1").values()) == {0.75}
    model = llama()
    named = "WandaPruningModifier: {sparsity: {'re:.*mlp': 0.75, 're:.*q_proj': 0.25}}"
    gossamer.oneshot(model, recipe=recipe(named), data=tokens())
    assert set(zero_shares(model, "mlp").values()) == {0.75}
    assert set(zero_shares(model, "self_attn").values()) == {0.25}
    with pytest.raises(gossamer.GossamerError, match="3 sparsities for 2 targets"):
        gossamer.oneshot(llama(), recipe=recipe(listed.replace("0.75]", "0.75, 0.5]")), data=tokens())


@pytest.mark.parametrize(
    "profile", ["owl, owl_m: 2, owl_lmbda: 0.1", "OWL", "alpha", "alpha, owl_lmbda: 0.1", "measured"]
)
def test_profiles_give_blocks_different_sparsities_with_the_same_total(profile: str) -> None:
    model = llama(num_hidden_layers=3)
    gossamer.oneshot(
        model,
        recipe=recipe(f"SparseGPTModifier: {{sparsity: 0.6, sparsity_profile: {profile}}}"),
        data=tokens(),
    )
    zeros = [sum(int((value == 0).sum()) for value in block.parameters()) for block in model.model.layers]
    sizes = [sum(value.numel() for value in block.parameters() if value.dim() > 1) for block in model.model.layers]
    assert len(set(zeros)) > 1
    assert sum(zeros) / sum(sizes) == pytest.approx(0.6, abs=1e-3)


@pytest.mark.parametrize("method", ["SparseGPTModifier", "WandaPruningModifier"])
@pytest.mark.parametrize(("build", "data"), [(llama, tokens), (network, images)], ids=["llama", "network"])
def test_permuted_two_of_four_loses_less_and_the_order_changes_no_output(method: str, build: Any, data: Any) -> None:
    kept = []
    targets = "targets: ['3', '6', '10']" if build is network else "targets: ['re:.*proj']"
    for extra in ("", ", permute: true"):
        model = build().eval()
        with torch.no_grad():
            before = torch.cat([model(batch)["logits"] if build is llama else model(batch) for batch in data()])
        fields = f"{{mask_structure: '2:4', {targets}{extra}}}"
        gossamer.oneshot(model, recipe=recipe(f"{method}: {fields}"), data=data())
        with torch.no_grad():
            after = torch.cat([model(batch)["logits"] if build is llama else model(batch) for batch in data()])
        kept.append(float((after - before).square().mean()))
        pruned = [
            value for name, value in model.named_parameters() if "proj" in name or name in ("6.weight", "10.weight")
        ]
        assert pruned
        assert all(NM(2, 4).violations(value) == 0 for value in pruned)
    assert kept[1] != kept[0]
    assert kept[1] < 1.1 * kept[0]


def test_an_allocation_is_measured_on_the_outputs_of_the_whole_model() -> None:
    errors = {}
    for profile in ("uniform", "measured"):
        model = network().eval()
        with torch.no_grad():
            model[6].weight.mul_(0.02)  # hardly matters
            model[6].bias.mul_(40)
        before = torch.cat([model(batch).detach() for batch in images()])
        method = f"WandaPruningModifier: {{sparsity: 0.5, sparsity_profile: {profile}}}"
        gossamer.oneshot(model, recipe=recipe(method), data=images())
        after = torch.cat([model(batch).detach() for batch in images()])
        errors[profile] = float((after - before).square().mean())
        if profile == "measured":
            sparsities = zero_shares(model, "weight")
    assert sparsities["6.weight"] == pytest.approx(0.6, abs=0.01)
    assert errors["measured"] < errors["uniform"]


def test_prune_and_quantize_in_one_pass_keeps_the_zeros() -> None:
    pruned, both = llama(), llama()
    method = "SparseGPTModifier: {sparsity: 0.5, mask_structure: '2:4'}"
    groups = (
        "GPTQModifier: {ignore: [lm_head], actorder: static, config_groups: {group_0: {targets: [Linear], weights: "
        "{num_bits: 4, type: int, symmetric: true, strategy: group, group_size: 16}}}}"
    )
    gossamer.oneshot(pruned, recipe=recipe(method), data=tokens())
    gossamer.oneshot(both, recipe=recipe(method, groups), data=tokens())
    first = "model.layers.0.self_attn.q_proj.weight"
    assert bool((both.get_parameter(first)[pruned.get_parameter(first) == 0] == 0).all())
    for name, value in both.named_parameters():
        if "proj" in name:
            assert NM(2, 4).violations(value) == 0
            assert max(len(row.unique()) for part in value.split(16, dim=1) for row in part) <= 16


def test_smoothing_changes_weights_and_no_output() -> None:
    model = llama()
    inputs = tokens()[0]
    with torch.no_grad():
        for block in model.model.layers:
            block.input_layernorm.weight[3] = 30.0
        before, weights = model(inputs).logits, state(model)
        gossamer.oneshot(model, recipe=recipe("SmoothQuantModifier: {smoothing_strength: 0.8}"), data=tokens())
        torch.testing.assert_close(model(inputs).logits, before, rtol=1e-3, atol=1e-4)
    assert sum(not torch.equal(value, weights[name]) for name, value in model.state_dict().items()) == 14
    wrong = "SmoothQuantModifier: {mappings: [[['re:.*down_proj'], 're:.*input_layernorm']]}"
    with pytest.raises(gossamer.GossamerError, match=r"does not read the output of 'model\.layers\.0"):
        gossamer.oneshot(model, recipe=recipe(wrong), data=tokens())


STAGES = Path(__file__).parents[1] / "data" / "oneshot" / "stages.yaml"


def test_stages_follow_each_other_and_training_keeps_the_zeros() -> None:
    model = llama()
    seen: list[float] = []

    def train(model: nn.Module, manager: Manager) -> None:
        before = {name: value == 0 for name, value in model.named_parameters() if "proj" in name}
        seen.append(float(before["model.layers.0.mlp.up_proj.weight"].double().mean()))
        optimizer = manager.modify(model, torch.optim.SGD(model.parameters(), 0.1), 3)
        for _ in range(3):
            model(input_ids=tokens()[0], labels=tokens()[0]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        manager.finalize()
        assert all(bool((model.get_parameter(name)[zero] == 0).all()) for name, zero in before.items())

    gossamer.oneshot(model, recipe=str(STAGES), data=tokens(), train=train)
    assert seen == [0.5]
    proj = [value for name, value in model.named_parameters() if "proj" in name]
    assert all(NM(2, 4).violations(value) == 0 for value in proj)
    assert max(len(row.unique()) for part in proj[0].split(16, dim=1) for row in part) <= 16
    alone = llama()
    gossamer.oneshot(alone, recipe=str(STAGES), data=tokens(), stage="sparsity")
    assert set(zero_shares(alone).values()) == {0.5}
    with pytest.raises(
        gossamer.RecipeError, match=r"stages.yaml: the stage 'recovery_stage' trains; give oneshot a function"
    ):
        gossamer.oneshot(alone, recipe=str(STAGES), data=tokens())
    with pytest.raises(gossamer.RecipeError, match="no stage 'other'; there are sparsity_stage, recovery_stage, quan"):
        gossamer.oneshot(alone, recipe=str(STAGES), data=tokens(), stage="other")


def test_run_types_survive_the_text_of_a_recipe() -> None:
    staged = gossamer.load(str(STAGES))
    assert dict(staged.run_types)["recovery_stage"] == "train"
    composed = gossamer.compose(staged, staged)
    assert gossamer.load(composed.text).run_types == composed.run_types
    assert len(composed.run_types) == 6
    with pytest.raises(gossamer.RecipeError, match=r"run_type: expected oneshot or train, found 'later'"):
        gossamer.load(recipe("WandaPruningModifier: {sparsity: 0.5}").replace("oneshot", "later"))


def test_llm_compressors_argument_names_are_accepted() -> None:
    model = llama()
    rows = [{"input_ids": row[0].tolist(), "attention_mask": [1] * 20, "text": "unused"} for row in tokens()]
    method = gossamer.load(recipe("WandaPruningModifier: {sparsity: 0.5}")).modifiers[0]
    gossamer.oneshot(model=model, recipe=method, dataset=rows, num_calibration_samples=8, max_seq_length=16)
    same = llama()
    gossamer.oneshot(same, recipe=[method], data=[row[:, :16] for row in tokens()[:8]])
    assert unchanged(model, state(same))


def test_data_may_be_tensors_pairs_or_dicts_in_batches_of_any_size() -> None:
    found = []
    ids = torch.cat(tokens())
    for data in (
        list(ids.split(1)),
        list(ids.split(5)),
        [(part, torch.zeros(1)) for part in ids.split(4)],
        [{"input_ids": part, "labels": part} for part in ids.split(3)],
    ):
        model = llama()
        gossamer.oneshot(model, recipe=recipe("WandaPruningModifier: {sparsity: 0.5}"), data=data)
        found.append({name: value == 0 for name, value in model.named_parameters()})
    for other in found[1:]:
        agreement = [float((other[name] == zero).double().mean()) for name, zero in found[0].items()]
        assert min(agreement) > 0.99


def test_progress_goes_from_layer_to_layer_up_to_one() -> None:
    steps: list[tuple[str, float]] = []
    gossamer.oneshot(
        network(),
        recipe=recipe("SparseGPTModifier: {sparsity: 0.5}"),
        data=images(),
        progress=lambda label, share: steps.append((label, share)),
    )
    assert [label for label, _ in steps] == ["0.weight", "3.weight", "6.weight", "10.weight"]
    assert [share for _, share in steps] == sorted(share for _, share in steps)
    assert steps[-1][1] == 1.0


def test_magnitude_needs_no_data_and_with_epochs_it_stays_gradual() -> None:
    model = network()
    gossamer.oneshot(model, recipe=recipe("MagnitudePruningModifier: {sparsity: 0.5, targets: [Conv2d]}"))
    assert zero_shares(model, "weight") == {"0.weight": 0.5, "3.weight": 0.5, "6.weight": 0.5}
    fields = "{start: 0, end: 1, init_sparsity: 0, final_sparsity: 0.5, update_frequency: 0.5, targets: __ALL__}"
    gradual = f"modifiers: [!MagnitudePruningModifier {fields}]"
    assert gossamer.load(gradual).modifiers[0].end_epoch == 1
    written = gossamer.load(gossamer.load(recipe("MagnitudePruningModifier: {sparsity: 0.5}")).text)
    assert written.modifiers[0].name == "MagnitudePruningModifier"


class Broken(nn.Module):
    """Fails in its second half."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if bool((x.abs() > 1e6).any()):
            raise ValueError("too large")
        return self.second(x / (x.amax() - x.amax()))


FEATURES = [torch.randn(3, 4) for _ in range(3)]
WANDA = "WandaPruningModifier: {sparsity: 0.5}"
BAD_DATA = [
    (None, "data: WandaPruningModifier needs calibration data"),
    ([], "data: expected at least one sample, found none"),
    (torch.randn(3, 4), "data: expected several batches, found one Tensor"),
    ([object()], "data: expected tensors with samples, found object"),
    ([torch.randn(3, 5)], r"data: the model does not run on batch 1 \(RuntimeError"),
    ([*FEATURES[:1], torch.full((3, 4), 1e9)], r"data: the model does not run on batch 1 \(ValueError: too large"),
    (FEATURES, "data: the inputs of 'second.weight' are NaN or infinite"),
    ("missing.txt", "missing.txt: cannot be read: No such file or directory"),
]


@pytest.mark.parametrize(("data", "message"), BAD_DATA)
def test_bad_data_is_one_error_and_the_model_is_as_before(data: Any, message: str) -> None:
    model = Broken()
    before = state(model)
    with pytest.raises(gossamer.GossamerError, match=message) as caught:
        gossamer.oneshot(model, recipe=recipe(WANDA), data=data)
    assert len(caught.value.problems) == 1
    assert unchanged(model, before)


def test_a_singular_matrix_is_an_error_that_names_layer_and_modifier() -> None:
    model = network()
    before = state(model)
    method = "SparseGPTModifier: {sparsity: 0.5, dampening_frac: 0}"
    data = [torch.ones(1, 3, 12, 12)]
    with pytest.raises(gossamer.GossamerError, match=r"SparseGPTModifier: '0.weight' cannot be changed: .*singular"):
        gossamer.oneshot(model, recipe=recipe(method), data=data)
    assert unchanged(model, before)


def test_an_interruption_leaves_the_model_as_before_and_no_thread() -> None:
    import threading

    model, count = network(), threading.active_count()
    before = state(model)

    def interrupt(label: str, share: float) -> None:
        if share > 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gossamer.oneshot(model, recipe=recipe(WANDA), data=images(), progress=interrupt)
    assert unchanged(model, before)
    assert threading.active_count() == count


def test_layers_that_no_batch_reaches_are_reported_and_stay_dense(caplog: pytest.LogCaptureFixture) -> None:
    class Partial(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    model = Partial()
    gossamer.oneshot(model, recipe=recipe(WANDA), data=FEATURES)
    assert zero_shares(model) == {"used.weight": 0.5}
    assert "'unused.weight' is left as it is: no batch of the data reaches it" in caplog.messages


def test_batches_may_take_different_ways() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
            self.last = nn.Linear(4, 4)

        def forward(self, x: Tensor, way: Tensor) -> Tensor:
            for number, expert in enumerate(self.experts):
                if int(way[0]) in (number, number + 1):
                    x = expert(x)
            return self.last(x)

    torch.manual_seed(0)
    model = Routed()
    data = [{"x": torch.randn(40 + way, 4), "way": torch.full((1,), way)} for way in (2, 0, 1, 2)]
    gossamer.oneshot(model, recipe=recipe("SparseGPTModifier: {sparsity: 0.5}"), data=data)
    assert set(zero_shares(model, "weight").values()) == {0.5}
    assert len(zero_shares(model, "weight")) == 4


FIELDS = [
    ("SparseGPTModifier: {}", "SparseGPTModifier.sparsity: expected a number between 0 and 1"),
    ("SparseGPTModifier: {sparsity: 0.7, mask_structure: '2:4'}", "mask_structure 2:4 means 0.5, found 0.7"),
    ("SparseGPTModifier: {sparsity: 0.5, mask_structure: filter}", "mask_structure: expected 0:0"),
    ("SparseGPTModifier: {sparsity: 0.5, owl_m: 5}", "owl_m: used with 'sparsity_profile: owl' only"),
    ("SparseGPTModifier: {sparsity: [0.5], sparsity_profile: owl}", "sparsity: expected one number for a profile"),
    ("WandaPruningModifier: {sparsity: 0.5, permute: true}", "permute: expected N:M as mask_structure"),
    ("ALPSPruningModifier: {sparsity: 0.5, preserve_sparsity_mask: true}", "use SparseGPTModifier"),
    ("GPTQModifier: {ignore: [lm_head]}", "config_groups: expected config_groups, or a scheme such as W4A16"),
    ("GPTQModifier: {scheme: W4A17}", "scheme: unknown scheme 'W4A17'; nearest: 'W4A16'"),
    (
        "GPTQModifier: {config_groups: {a: {weights: {strategy: group}}}}",
        r"config_groups.a.weights.group_size: 'strategy: group' needs it",
    ),
]


@pytest.mark.parametrize(("modifier", "message"), FIELDS)
def test_fields_that_contradict_each_other_are_refused(modifier: str, message: str) -> None:
    with pytest.raises(gossamer.RecipeError, match=message):
        gossamer.load(recipe(modifier))


def test_a_target_that_is_not_there_names_the_nearest_one() -> None:
    with pytest.raises(gossamer.GossamerError, match="targets: nothing matches 'Linaer'; nearest: 'Linear'"):
        gossamer.oneshot(llama(), recipe=recipe(WANDA.replace("0.5", "0.5, targets: [Linaer]")), data=tokens())
