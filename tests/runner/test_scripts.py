"""scripts/train_sparse.sh: what it makes of its arguments, seen by a stand-in for `gossamer`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "train_sparse.sh"
DEFAULT = ROOT / "configs" / "cls" / "resnet" / "res18_amba_sparse.yaml"
FLOAT = "configs/det/faster_rcnn/faster_rcnn_r50_fpn_1x.yaml"


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """A program that tells its folder and its arguments, one in a line."""
    program = tmp_path / "a gossamer"
    program.write_text('#!/bin/sh\nfor word in "$(pwd)" "$@"; do echo "$word"; done\n')
    program.chmod(0o755)
    return program


def called(stand_in: Path, *arguments: str, folder: Path = SCRIPT.parent, **environment: str) -> list[str]:
    done = run(*arguments, folder=folder, GOSSAMER=str(stand_in), **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def run(*arguments: str, folder: Path = SCRIPT.parent, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["sh", os.path.relpath(SCRIPT, folder), *arguments]
    return subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


def test_without_arguments_the_defaults_at_its_top_are_trained(stand_in: Path):
    assert called(stand_in) == [str(ROOT), "train", str(DEFAULT), "--nproc", "1"]


@pytest.mark.parametrize("arguments", [("-e",), ("-e", FLOAT), (FLOAT, "-e"), (FLOAT, "4", "-e"), (FLOAT, "-e", "4")])
def test_e_evaluates_wherever_it_stands(stand_in: Path, arguments: tuple[str, ...]):
    words = called(stand_in, *arguments)
    assert words[-1] == "-e"
    assert words[2] == str(ROOT / FLOAT if FLOAT in arguments else DEFAULT)
    assert words[4] == ("4" if "4" in arguments else "1")


@pytest.mark.parametrize("path", [FLOAT, f"/{FLOAT}", str(ROOT / FLOAT), f"../{FLOAT}"])
def test_paths_as_the_documentation_has_them_work(stand_in: Path, path: str):
    assert Path(called(stand_in, path)[2]).resolve() == ROOT / FLOAT


def test_a_config_of_the_folder_where_it_is_called_comes_first(stand_in: Path, tmp_path: Path):
    (tmp_path / "own.yaml").write_text("net: {type: resnet18}\n")
    assert called(stand_in, "own.yaml", folder=tmp_path)[2] == str(tmp_path / "own.yaml")


def test_further_options_go_to_gossamer_unchanged(stand_in: Path):
    words = called(stand_in, FLOAT, "2", "--data", "tiny", "--set", "saver.save_dir=a b")
    assert words[3:] == ["--nproc", "2", "--data", "tiny", "--set", "saver.save_dir=a b"]


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (("configs/none.yaml",), "no config 'configs/none.yaml'"),
        ((FLOAT, "two"), "expected a number of processes, found 'two'"),
        ((FLOAT, "0"), "expected a number of processes, found '0'"),
        ((FLOAT, "1", "more"), "found also 'more'"),
    ],
)
def test_a_wrong_argument_is_reported_in_one_line(stand_in: Path, arguments: tuple[str, ...], reported: str):
    done = run(*arguments, GOSSAMER=str(stand_in))
    assert (done.returncode, done.stdout) == (2, "")
    assert reported in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_missing_program_is_reported(tmp_path: Path):
    done = run(GOSSAMER=str(tmp_path / "none"))
    assert done.returncode == 2
    assert "there is no program" in done.stderr


def test_the_exit_code_is_that_of_gossamer(tmp_path: Path):
    program = tmp_path / "failing"
    program.write_text("#!/bin/sh\nexit 7\n")
    program.chmod(0o755)
    assert run(GOSSAMER=str(program)).returncode == 7
