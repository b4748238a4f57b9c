"""A process that has imported everything and forks a child for each command: a start costs milliseconds, not seconds.

Commands come as JSON lines on standard input, and each gets one line as its answer. A child runs `gossamer` with the
given arguments, under a fault: it is killed, stopped, or given an error by a file operation.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

IMPORTED = ("gossamer.cli", "gossamer.runner.runs", "numba", "sklearn.datasets", "torchvision.transforms.v2")
"""What a run would import otherwise."""
WRITES = {"os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.truncate"}
"""Audit events of operations that change a folder; `open` for writing and `fsync` are counted too."""


def main() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    children: dict[int, int] = {}
    """Of each process the pipe that has its output: a file would fall under a limit on the size of files."""
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any] = {}
        if request["do"] == "start":
            reading, writing = os.pipe()
            os.set_blocking(reading, False)
            pid = os.fork()
            if pid == 0:
                run_child(request, writing)
            os.close(writing)
            children[pid] = reading
            answer["pid"] = pid
        elif request["do"] == "wait":
            _, status = os.waitpid(request["pid"], os.WUNTRACED)
            if os.WIFSTOPPED(status):
                answer["stopped"] = os.WSTOPSIG(status)
            else:
                answer["exit"] = os.waitstatus_to_exitcode(status)
                answer["output"] = read_all(children.pop(request["pid"]))
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def read_all(pipe: int) -> str:
    """What a process that ended has written, up to what a pipe holds."""
    found = b""
    with contextlib.suppress(BlockingIOError):  # a process that it started may live
        while part := os.read(pipe, 1 << 16):
            found += part
    os.close(pipe)
    return found.decode(errors="replace")


def run_child(request: dict[str, Any], out: int) -> None:
    """Run one command in a process of its own; does not return."""
    code = 70
    try:
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(request["environment"])
        sys.argv = ["gossamer", *request["arguments"]]
        counted = install(request["fault"], Path(request["folder"]))
        from gossamer.cli import main as gossamer

        try:
            gossamer()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
        if request["fault"].get("count"):
            Path(request["fault"]["count"]).write_text(json.dumps(counted))
    except BaseException:  # noqa: BLE001 - nothing of a child may reach the server's loop
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def install(fault: dict[str, Any], folder: Path) -> list[str]:
    """Prepare what shall happen to this process; the file operations in `folder`, as they come.

    `steps`: after so many optimizer steps, and `microseconds` of processor time more. `event`: before the file
    operation of that number or that name, as `os.link a.txt`; with `bytes`, as soon as a file grows beyond them after
    that; with `on`, before all later operations of these kinds as well.
    """
    act = actions(fault)
    if "steps" in fault:
        after_steps(fault["steps"], act)
    seen: list[str] = []

    begun = False

    def count(name: str) -> None:
        nonlocal begun
        seen.append(name)
        begins = not begun and fault.get("event") in (len(seen), name)
        begun = begun or begins
        if begins or (begun and name.split(maxsplit=1)[0] in fault.get("on", ())):
            act()

    watch_files(folder, count)
    return seen


def actions(fault: dict[str, Any]) -> Callable[[], None]:
    """What happens to the process when its time has come."""
    action = fault.get("action", "kill")
    if action == "kill" and fault.get("microseconds"):

        def act() -> None:  # the default action of this signal: the kernel ends the process, wherever it is
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_PROF, fault["microseconds"] / 1e6)

    elif "bytes" in fault:

        def act() -> None:  # by the kernel too, in the middle of a write; or an error, if the signal is ignored
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL if action == "kill" else signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (fault["bytes"], resource.RLIM_INFINITY))

    elif action in ("kill", "stop"):

        def act() -> None:
            os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGSTOP)

    else:

        def act() -> None:  # raised by an audit hook, it is the error of the operation
            raise OSError(int(action), os.strerror(int(action)))

    return act


def after_steps(count: int, act: Callable[[], None]) -> None:
    if count == 0:
        act()
        return
    from torch.optim.optimizer import register_optimizer_step_post_hook

    done = 0

    def step(*_: object) -> None:
        nonlocal done
        done += 1
        if done == count:
            act()

    register_optimizer_step_post_hook(step)


def watch_files(folder: Path, count: Callable[[str], None]) -> None:
    """Call `count` before each operation that changes a file or a name in a folder."""
    inside = os.fspath(folder.resolve())
    own_fsync = os.fsync

    def is_inside(path: object) -> bool:
        if not isinstance(path, str | bytes | os.PathLike):
            return False
        return os.path.abspath(os.fsdecode(path)).startswith(inside)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = args
            if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and is_inside(path):
                count(f"open {name_of(path)}")
        elif event in WRITES and is_inside(args[0]):
            count(f"{event} {name_of(args[0])}")

    def fsync(handle: int) -> None:
        count("fsync")
        own_fsync(handle)

    sys.addaudithook(hook)
    os.fsync = fsync


def name_of(path: Any) -> str:
    """The name of a file; that of a temporary file is the name which it will get, behind a `+`."""
    return re.sub(r"^\.[0-9a-f]{32}\.", "+", os.path.basename(os.fsdecode(path)))


if __name__ == "__main__":
    main()
