"""What a folder or a file names as code is data until the user vouches for it, and names in files are no paths."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from gossamer.errors import GossamerError
from gossamer.export import save
from gossamer.io import as_name, name_fault
from gossamer.models import load_model
from gossamer.runner import trust
from gossamer.runner.builders import build_net, builder
from gossamer.runner.config.schema import Net
from gossamer.runner.lock import locked
from gossamer.runner.reporting import report
from gossamer.runner.runs import evaluate, export, resume
from gossamer.runner.trust import USER, Trust, imported, is_own, remember, remembered, state_folder
from gossamer.runner.weights import load_pretrained, load_weights
from tests.cli.conftest import Run, run  # noqa: F401
from tests.fuzz.harness import fingerprint
from tests.runner.running_on_digits import config, interrupted, trained

NETS = "tests.runner.nets"


@pytest.fixture(scope="module")
def own_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the user's own, with code of the user's own, which can be resumed."""
    place = tmp_path_factory.mktemp("own")
    interrupted(config(place, trainer={"max_epoch": 1}), 3)
    return place / "run"


@pytest.fixture
def copied(own_run: Path, tmp_path: Path) -> Path:
    """The same folder as somebody else would send it."""
    return Path(shutil.copytree(own_run, tmp_path / "theirs"))


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], bool]]:
    """A module that must not be imported; says whether it was."""
    (tmp_path / "trap.py").write_text("from tests.runner.nets import *\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield lambda: "trap" in sys.modules
    sys.modules.pop("trap", None)


def changed(folder: Path, old: str, new: str) -> Path:
    path = folder / "config.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return folder


def test_ones_own_run_needs_no_option(own_run: Path, tmp_path: Path) -> None:
    assert evaluate(own_run).iteration == 3
    assert export(own_run, formats=["safetensors"], output=tmp_path / "files").files
    shutil.copy(tmp_path / "files" / "model.safetensors", own_run)
    assert isinstance(load_model(str(own_run / "model.safetensors")).model, nn.Sequential)
    (own_run / "model.safetensors").unlink()


COMMANDS = [
    ("eval",),
    ("resume",),
    ("analyze", "--quick"),
    ("export", "-f", "safetensors"),
    ("check",),
    ("permute",),
    ("benchmark",),
    ("report", "--sensitivity"),
    ("create",),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_no_command_runs_what_a_copied_folder_names(
    copied: Path,
    trap: Callable[[], bool],
    run: Run,  # noqa: F811
    command: tuple[str, ...],
) -> None:
    changed(copied, f"{NETS}:small", "trap:small")
    done = run(command[0], copied, *command[1:])
    assert done.exit_code == 1, done.output
    assert not trap()
    message = " ".join(done.output.split())
    assert "theirs: names code to run: 'trap:small' (net.type)" in message
    assert "add --import trap" in message
    assert "Traceback" not in message


@pytest.mark.parametrize(
    ("key", "old", "new"),
    [
        ("runtime.runner.type", "type: base", "type: trap:Scripted"),
        ("hooks.0.type", f"{NETS}:Interrupt", "trap:Interrupt"),
    ],
)
def test_classes_that_a_folder_names_are_not_imported(
    copied: Path, trap: Callable[[], bool], key: str, old: str, new: str
) -> None:
    changed(copied, old, new)
    with pytest.raises(GossamerError, match=rf"'trap:\w+' \({key}\).*--import {NETS} --import trap|--import trap"):
        evaluate(copied)
    assert not trap()


def test_the_option_covers_a_package_and_nothing_beside_it(copied: Path, run: Run) -> None:  # noqa: F811
    refused = run("eval", copied, "--import", "tests.runner.netsx")
    assert "add --import tests.runner.nets" in " ".join(refused.output.split())
    assert run("eval", copied, "--import", NETS).exit_code == 0
    assert run("analyze", copied, "--quick", "--import", "tests").exit_code == 0
    assert "expected a package or a module" in run("eval", copied, "--import", "os:system").output


def test_a_run_that_was_resumed_with_the_option_is_ones_own(copied: Path) -> None:
    with pytest.raises(GossamerError, match=f"--import {NETS}"):
        resume(copied, ["hooks=[]"])
    assert resume(copied, ["hooks=[]"], imports=[NETS]).folder == copied
    assert evaluate(copied).iteration == 6


def test_what_the_command_line_sets_is_vouched_for(copied: Path) -> None:
    hook, net = f"hooks=[{{type: '{NETS}:Interrupt', kwargs: {{at: 5}}}}]", f"net.type={NETS}:small"
    with pytest.raises(GossamerError, match=r"\(net.type\), which"):
        evaluate(copied, [hook])
    assert evaluate(copied, [hook, net]).iteration == 3


def test_the_config_in_a_run_folder_stands_for_the_folder(copied: Path, own_run: Path) -> None:
    with pytest.raises(GossamerError, match=f"--import {NETS}"):
        evaluate(copied / "config.yaml")
    for picture in (own_run, copied):
        (picture / "evaluation.png").unlink(missing_ok=True)
    result = evaluate(copied / "config.yaml", imports=[NETS])
    assert result.folder == copied
    assert not (own_run / "evaluation.png").exists()


@pytest.mark.parametrize(
    ("name", "left", "command"), [("config.yaml", "checkpoints", "eval"), ("own.yaml", "metrics.jsonl", "check")]
)
def test_a_config_beside_files_of_a_run_is_data_whatever_its_first_line(
    copied: Path,
    trap: Callable[[], bool],
    run: Run,  # noqa: F811
    name: str,
    left: str,
    command: str,
) -> None:
    changed(copied, f"{NETS}:small", "trap:small")
    text = (copied / "config.yaml").read_text().partition("\n")[2]
    (copied / "config.yaml").unlink()
    (copied / name).write_text(text)
    for other in {"checkpoints", "metrics.jsonl"} - {left}:
        (copied / other).rename(copied / "other")
    done = run(command, copied / name)
    assert "names code to run: 'trap:small' (net.type)" in " ".join(done.output.split())
    assert not trap()


def test_ones_own_config_vouches_for_itself(own_run: Path, tmp_path: Path) -> None:
    """Written by hand, wherever its run is and whatever other folders are beside it."""
    path = config(tmp_path, saver={"save_dir": str(own_run)})
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "resnet.pth").touch()
    assert evaluate(path).iteration == 3


def test_a_config_that_is_trained_vouches_for_itself_only(copied: Path, trap: Callable[[], bool]) -> None:
    """A folder that is there already is gone on with; what its own config names stays data."""
    changed(copied, f"{NETS}:small", "trap:small")
    path = config(copied.parent, trainer={"max_epoch": 1}, saver={"save_dir": str(copied), "auto_resume": True})
    assert trained(path).complete
    assert not trap()


def test_a_package_does_not_vouch_for_what_it_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vouched.py").write_text("import os\nfrom os import system\ndef own(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    limited = Trust(packages=("vouched",), source="theirs")
    assert callable(imported("vouched:own", limited))
    for path in ("vouched:os.system", "vouched:system"):
        with pytest.raises(GossamerError, match=rf"theirs: '{path}' is not defined in what --import names"):
            imported(path, limited)
        assert imported(path, USER) is os.system


def test_names_of_models_are_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nobody = Trust(source="theirs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert build_net(Net(type="squeezenet1_1"), 3, trust=nobody)
    assert build_net(Net(type="retinanet_resnet18_fpn", kwargs={"min_size": 64}), 3, trust=nobody)
    assert str(tmp_path) not in sys.path  # a module in the working folder would be imported for a library's
    with pytest.raises(GossamerError, match="names code to run"):
        builder("gossamer.runner.detectors:retinanet_resnet18_fpn", nobody)


@pytest.mark.parametrize(
    ("type", "kwargs", "key"),
    [
        ("timm/tiny", {"checkpoint_path": "x.pth"}, "net.kwargs.checkpoint_path"),
        ("timm/tiny", {"pretrained_cfg_overlay": {"file": "x"}}, "net.kwargs.pretrained_cfg_overlay"),
        ("transformers/../x", {}, "net.type"),
        ("transformers//etc", {}, "net.type"),
        ("transformers/owner/name", {"attn_implementation": "owner/kernel"}, "net.kwargs.attn_implementation"),
        ("transformers/owner/name", {"weights_only": False}, "net.kwargs.weights_only"),
    ],
)
def test_a_library_loads_no_file_or_code_that_a_stranger_names(type: str, kwargs: dict[str, object], key: str) -> None:
    library = type.partition("/")[0]
    with pytest.raises(GossamerError, match=rf"'{library}' \({key}\).*--import {library}"):
        build_net(Net(type=type, kwargs=kwargs), 3, trust=Trust(source="theirs"))


def test_a_library_builds_a_model_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ModuleType("timm")
    fake.is_model = lambda name: name == "tiny"  # type: ignore[attr-defined]
    fake.create_model = lambda name, num_classes, **kwargs: nn.Linear(2, num_classes)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "timm", fake)
    assert build_net(Net(type="timm/tiny", kwargs={"drop_rate": 0.1}), 3, trust=Trust(source="theirs"))
    limited = Trust(packages=("timm",), source="theirs")
    assert build_net(Net(type="timm/tiny", kwargs={"checkpoint_path": "x"}), 3, trust=limited)


def test_a_folder_of_the_name_of_a_model_is_no_model_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers looks for a folder first."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    with pytest.raises(GossamerError, match=r"'transformers' \(net.type\).*--import transformers"):
        build_net(Net(type="transformers/owner/name"), 3, trust=Trust(source="theirs"))


@pytest.mark.parametrize("pretrained", [False, True])
@pytest.mark.parametrize("vouched", [False, True])
def test_the_config_of_a_model_names_no_kernel_unless_one_vouches_for_it(
    monkeypatch: pytest.MonkeyPatch, pretrained: bool, vouched: bool
) -> None:
    fake, seen = ModuleType("transformers"), list[object]()
    theirs = SimpleNamespace(_attn_implementation="kernels-community/evil")

    def make(*arguments: object, config: object = None, **kwargs: object) -> nn.Module:
        seen.append(config or (arguments[0] if not isinstance(arguments[0], str) else theirs))
        return nn.Linear(2, 3)

    fake.AutoConfig = SimpleNamespace(from_pretrained=lambda name, **kwargs: theirs)  # type: ignore[attr-defined]
    fake.AutoModelForImageClassification = SimpleNamespace(  # type: ignore[attr-defined]
        from_config=make, from_pretrained=make
    )
    monkeypatch.setitem(sys.modules, "transformers", fake)
    limited = Trust(packages=("transformers",) if vouched else (), source="theirs")
    build_net(Net(type="transformers/owner/name", kwargs={"pretrained": pretrained}), 3, trust=limited)
    assert seen == [theirs]
    assert theirs._attn_implementation == ("kernels-community/evil" if vouched else None)


# What is remembered


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(trust.STATE, str(tmp_path / "state"))
    return tmp_path / "state"


def note_of(folder: Path) -> Path:
    (note,) = (state_folder() / "runs").iterdir()
    assert json.loads(note.read_text())["folder"] == str(folder.resolve())
    return note


def test_runs_are_remembered_by_folder_and_import_path(state: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    remember(tmp_path / "link", ["a:b"])
    remember(tmp_path / "mine", ["c:d"])
    assert remembered(tmp_path / "mine") == remembered(tmp_path / "link") == {"a:b", "c:d"}
    assert remembered(tmp_path / "other") == frozenset()
    assert (state / "runs").stat().st_mode & 0o777 == 0o700
    assert note_of(tmp_path / "mine").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("text", ["{", '{"folder": 3}', "[" * 100_000, "x" * 200_000])
def test_a_damaged_note_vouches_for_nothing_and_is_written_again(state: Path, tmp_path: Path, text: str) -> None:
    remember(tmp_path, ["a:b"])
    note_of(tmp_path).write_text(text)
    assert remembered(tmp_path) == frozenset()
    remember(tmp_path, ["a:b"])
    assert remembered(tmp_path) == {"a:b"}


def test_a_note_that_others_can_write_or_of_another_folder_vouches_for_nothing(state: Path, tmp_path: Path) -> None:
    remember(tmp_path, ["a:b"])
    note = note_of(tmp_path)
    note.chmod(0o666)
    assert remembered(tmp_path) == frozenset()
    note.chmod(0o600)
    note.parent.chmod(0o777)
    assert remembered(tmp_path) == frozenset()
    note.parent.chmod(0o700)
    assert remembered(tmp_path) == {"a:b"}
    note.write_text(json.dumps({"folder": "/elsewhere", "imports": ["a:b"]}))
    assert remembered(tmp_path) == frozenset()


def test_only_so_many_runs_are_remembered(state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "MAX_RUNS", 3)
    for number in range(5):
        remember(tmp_path / str(number), ["a:b"])
        for note in (state / "runs").iterdir():
            os.utime(note, (note.stat().st_mtime - 10, note.stat().st_mtime - 10))
    known = [number for number in range(5) if remembered(tmp_path / str(number))]
    assert known == [2, 3, 4]


def test_a_run_continues_where_nothing_can_be_remembered(
    state: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING, "gossamer"):
        remember(tmp_path, [])
        assert not caplog.text
        remember(tmp_path, ["my.nets:small"])
    assert "cannot remember that this run is yours" in caplog.text
    assert "need --import my.nets" in caplog.text
    assert remembered(tmp_path) == frozenset()


def test_the_state_folder_is_the_systems(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(trust.STATE)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    assert state_folder() == tmp_path / "xdg" / "gossamer"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert state_folder() == tmp_path / ".local" / "state" / "gossamer"


# Text from files in paths


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("resnet18", None),
        ("my run (2)", None),
        ("größe-3.5", None),
        ("contract", None),
        ("", "empty"),
        ("..", "folder"),
        ("../../x", "contains '/'"),
        ("/etc/x", "contains '/'"),
        ("a\\b", "contains"),
        ("C:x", "contains ':'"),
        ("a\nb", "cannot be printed"),
        ("\u202egnp", "cannot be printed"),
        ("\ud800", "cannot be printed"),
        ("x" * 200, "longer"),
        ("ü" * 100, "longer"),
        ("x.", "ends in"),
        ("con", "reserved"),
    ],
)
def test_a_name_is_one_part_of_a_path_on_every_system(name: str, fault: str | None) -> None:
    found = name_fault(name)
    assert found is None if fault is None else fault in str(found)
    assert name_fault(as_name(name)) is None
    assert (as_name(name) == name) == (fault is None)


@pytest.mark.parametrize("name", ["{absolute}", "../../../x"])
def test_an_exported_file_writes_nothing_outside_of_the_output(name: str, tmp_path: Path, run: Run) -> None:  # noqa: F811
    name = name.replace("{absolute}", str(tmp_path / "victim"))
    target = tmp_path / "victim-bitmask.safetensors"
    target.write_text("precious")
    made = load_model("squeezenet1_1", input_shape="1,3,32,32")
    save(made.model, tmp_path / "f.safetensors", "safetensors", about={**made.describe(), "name": name})
    before = sorted(tmp_path.rglob("*"))
    done = run("export", "f.safetensors", "--format", "bitmask", "-o", "files/in/here")
    assert done.exit_code == 1
    assert "name: expected a name, found" in " ".join(done.output.split())
    assert sorted(tmp_path.rglob("*")) == before
    assert target.read_text() == "precious"


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("input", "[1, 3, -32, 32]", "expected the sizes of an input"),
        ("input", "[1, 3, 1000000, 1000000]", "expected the sizes of an input"),
        ("input", f"[{10**400}]", "expected the sizes of an input"),
        ("input", "[true]", "expected the sizes of an input"),
        ("input", "[" * 5000, "expected the sizes of an input"),
        ("num_classes", "-1", "expected a number of classes, found '-1'"),
        ("num_classes", "99999999999", "there are more classes than"),
        ("net", '{"type": 3}', "expected a type and its kwargs"),
        ("net", "[" * 5000, "expected a type and its kwargs"),
    ],
)
def test_what_a_file_says_of_its_model_is_checked_when_it_is_read(
    tmp_path: Path, key: str, text: str, message: str
) -> None:
    about = {"net": json.dumps({"type": "squeezenet1_1", "kwargs": {}}), "num_classes": "2", key: text}
    save(nn.Linear(2, 2), tmp_path / "f.safetensors", "bitmask", about=about)
    with pytest.raises(GossamerError) as error:
        load_model(str(tmp_path / "f.safetensors"))
    assert f"its description of the model cannot be read, {key}: {message}" in str(error.value)
    assert len(str(error.value)) < 600


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64], ids=str)
def test_weights_that_are_no_floats_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    path, model = tmp_path / "w.safetensors", nn.Linear(2, 2)
    save_file({"weight": torch.ones(2, 2).to(dtype), "bias": torch.zeros(2)}, path)
    word = str(dtype).removeprefix("torch.")
    for load in (load_weights, load_pretrained):
        before = fingerprint(model)
        with pytest.raises(GossamerError, match=f"'weight' is {word} in the file and float32 in the model"):
            load(model, path)
        assert fingerprint(model) == before


def test_a_file_names_code_only_where_one_vouches_for_it(tmp_path: Path, trap: Callable[[], bool]) -> None:
    made = load_model(f"{NETS}:small", num_classes=3)
    about = {**made.describe(), "net": json.dumps({"type": "trap:small", "kwargs": {"num_classes": 3}})}
    path = tmp_path / "f.safetensors"
    save(made.model, path, "safetensors", about=about)
    with pytest.raises(GossamerError, match=r"f.safetensors: names code to run: 'trap:small'.*add --import trap"):
        load_model(str(path))
    assert not trap()
    with pytest.raises(GossamerError, match=rf"is not defined in what --import names; add --import {NETS} too"):
        load_model(str(path), imports=["trap"])
    assert load_model(str(path), imports=["trap", NETS]).num_classes == 3


def test_a_link_in_a_folder_is_not_written_through(copied: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("text")
    (copied / "evaluation.png").unlink(missing_ok=True)
    (copied / "evaluation.png").symlink_to(precious)
    with pytest.raises(GossamerError, match=r"evaluation.png: is a link to .*precious, outside of the folder"):
        evaluate(copied, imports=[NETS])
    with pytest.raises(GossamerError, match="is a link to"):
        report([copied])
    assert precious.read_text() == "text"


@pytest.mark.parametrize("name", ["pictures", "tensorboard"])
def test_a_folder_of_others_is_not_written_through_a_link(copied: Path, tmp_path: Path, name: str) -> None:
    """Where the link leads there is a link to a file, as an archive can hold both."""
    precious, beside = tmp_path / "precious", tmp_path / "beside"
    precious.write_text("text")
    beside.mkdir()
    for file in ("evaluation.png", "weights.json", "plan.json", "start.json"):
        (beside / file).symlink_to(precious)
    shutil.rmtree(copied / name, ignore_errors=True)
    (copied / name).symlink_to(Path("..") / "beside")
    for act in (evaluate, resume):
        with pytest.raises(GossamerError, match=rf"{name}: is a link to .*beside, outside of the folder"):
            act(copied, ["hooks=[]"], imports=[NETS])
    assert precious.read_text() == "text"
    assert all(path.is_symlink() for path in beside.iterdir())


@pytest.mark.parametrize("pipe", [False, True])
def test_a_log_is_not_written_through_a_link_or_to_a_pipe(tmp_path: Path, pipe: bool) -> None:
    """Also in a folder that one names to train in."""
    (tmp_path / "precious").write_text("text")
    (tmp_path / "run").mkdir()
    if pipe:
        os.mkfifo(tmp_path / "run" / "log.txt")
    else:
        (tmp_path / "run" / "log.txt").symlink_to(tmp_path / "precious")
    with pytest.raises(GossamerError, match="run: cannot be written: "):
        trained(config(tmp_path, trainer={"max_epoch": 1}))
    assert (tmp_path / "precious").read_text() == "text"


def test_checkpoints_of_another_run_are_not_removed_through_a_link(copied: Path, own_run: Path) -> None:
    before = sorted(path.name for path in (own_run / "checkpoints").iterdir())
    shutil.rmtree(copied / "checkpoints")
    (copied / "checkpoints").symlink_to(own_run / "checkpoints")
    with pytest.raises(GossamerError, match="checkpoints: is a link to"):
        resume(copied, ["hooks=[]", "saver.keep=1"], imports=[NETS])
    assert sorted(path.name for path in (own_run / "checkpoints").iterdir()) == before


def test_ones_own_run_may_have_its_checkpoints_elsewhere(copied: Path, tmp_path: Path) -> None:
    """A folder where one trained; a run that shares its checkpoints with it waits for its lock."""
    remember(copied, [f"{NETS}:small", f"{NETS}:Interrupt"])
    (tmp_path / "large disk").mkdir()
    shutil.move(copied / "checkpoints", tmp_path / "large disk")
    (copied / "checkpoints").symlink_to(tmp_path / "large disk" / "checkpoints")
    assert evaluate(copied).iteration == 3
    with (
        locked(tmp_path / "large disk" / "checkpoints"),
        pytest.raises(GossamerError, match=r"checkpoints: process .* has been training here"),
    ):
        resume(copied, ["hooks=[]"])
    (tmp_path / "large disk" / "config.yaml").touch()
    with locked(tmp_path / "large disk"), pytest.raises(GossamerError, match="large disk: process"):
        resume(copied, ["hooks=[]"])
    assert resume(copied, ["hooks=[]"]).iteration == 6
    assert not list((tmp_path / "large disk").rglob("train.lock"))


def test_a_run_without_code_of_ones_own_is_remembered_too(tmp_path: Path) -> None:
    assert not is_own(tmp_path)
    remember(tmp_path, [])
    assert is_own(tmp_path)
    assert remembered(tmp_path) == frozenset()


def test_a_folder_of_others_holds_files_and_folders_only(copied: Path) -> None:
    os.mkfifo(copied / "checkpoints" / "iter_00000009.safetensors")
    with pytest.raises(GossamerError, match=r"iter_00000009.safetensors: is neither a file nor a folder; remove it"):
        evaluate(copied, imports=[NETS])


def test_pipes_and_devices_of_others_are_not_read(copied: Path, tmp_path: Path, run: Run) -> None:  # noqa: F811
    os.mkfifo(tmp_path / "pipe")
    (copied / "metrics.jsonl").unlink()
    os.mkfifo(copied / "metrics.jsonl")
    assert "cannot be read: it is a pipe" in " ".join(run("compare", copied).output.split())
    (copied / "metrics.jsonl").unlink()
    for source in ("json_lines, path", "image_list, path", "npz, path"):
        with pytest.raises(GossamerError, match="it is a pipe or a device"):
            evaluate(copied, [f"dataset.test={{type: {source}: /dev/zero}}"], imports=[NETS])
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        (tmp_path / "including.yaml").write_text(f"net: !include {path}\n")
        with pytest.raises(GossamerError, match="it is a pipe or a device"):
            evaluate(tmp_path / "including.yaml")
    (copied / "analysis" / "plan.json").unlink(missing_ok=True)
    os.mkfifo(copied / "analysis" / "plan.json")
    assert "analysis/plan.json: it is a pipe" in report([copied], output=tmp_path / "page.html").read_text()


def test_names_of_others_are_no_markup_in_a_report(copied: Path) -> None:
    evil = "<script>alert(1)</script>"
    folder = copied.rename(copied.with_name("<img src=x onerror=alert(2)>"))
    for path in folder.rglob("*"):
        if path.suffix in (".json", ".jsonl", ".yaml"):
            path.write_text(path.read_text().replace("3.weight", evil).replace("top1", evil).replace("SGD", evil))
    page = report([folder]).read_text()
    assert page.count("<script") == 1
    assert "<img src=x" not in page
    assert "&lt;script&gt;alert(1)" in page


def test_names_of_others_are_no_markup_in_a_terminal(copied: Path, run: Run) -> None:  # noqa: F811
    (copied / "metrics.jsonl").write_text('{"kind": "test", "iteration": 3, "epoch": 1.0, "[/x]": 9.5}\n')
    done = run("compare", copied)
    assert done.exit_code == 0, done.output
    assert "[/x]" in done.output
    changed(copied, f"{NETS}:small", "\\u001b[31mx:y")
    done = run("eval", copied)
    assert done.exit_code == 1
    assert "\x1b" not in done.output


def test_external_data_of_an_onnx_file_is_beside_it(tmp_path: Path) -> None:
    import onnx
    from onnx.external_data_helper import set_external_data

    from gossamer.export.onnx.model_files import read_model

    (tmp_path / "secret").write_bytes(bytes(16))
    (tmp_path / "theirs").mkdir()
    weight = onnx.helper.make_tensor("w", onnx.TensorProto.FLOAT, [4], bytes(16), raw=True)
    result = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [4])
    node = onnx.helper.make_node("Identity", ["w"], ["y"])
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "g", [], [result], [weight]))
    set_external_data(model.graph.initializer[0], "../secret", length=16)
    model.graph.initializer[0].ClearField("raw_data")
    path = tmp_path / "theirs" / "model.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(GossamerError, match="its external data cannot be read"):
        read_model(path)


def test_a_copied_run_writes_into_its_folder_only(tmp_path: Path) -> None:
    """Wherever its config says that it saves, and that its method does."""
    elsewhere = tmp_path / "elsewhere"
    table = {"sparsity_table": [30, 60], "save_dir": str(elsewhere / "a"), "do_sparse_analysis": True}
    kwargs = {**table, "output_dir": str(elsewhere / "b")}
    path = config(tmp_path, "amba", trainer={"max_epoch": 2}, saver={"save_dir": str(elsewhere)})
    interrupted(path, 3, f"sparsity.scheduler.kwargs={json.dumps(kwargs)}")
    theirs = Path(shutil.move(elsewhere, tmp_path / "theirs"))
    resume(theirs, ["hooks=[]"], imports=[NETS])
    evaluate(theirs)
    assert not elsewhere.exists()
    assert len(list((theirs / "levels").iterdir())) == 2
