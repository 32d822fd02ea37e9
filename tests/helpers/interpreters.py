"""Python processes that begin with torch imported: each is a fork of one interpreter that waits.

    test ── socket ──► waiting interpreter ── fork ──► keeper ── fork ──► runs `-m workflows.dqn …` as python would

What a fork saves is the import of torch, of other libraries and of the product's modules that import no onnxruntime.
What libraries read from the environment when they are loaded is fixed, so that there is one waiting interpreter for
each value of those variables.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import itertools
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import psutil

FAULTS = Path(__file__).with_name("faults")
"""Folder of the module that makes runs fail where REAGENT_LITE_FAULT says so."""
FORKED_WORKERS = "FORKED_WORKERS"
"""Variable of a run whose workers are forks as well, if it is not empty."""
LAUNCHER = "REAGENT_LITE_LAUNCHER_PID"
"""Variable of a worker: the process that it ends with."""
READ_WHEN_LOADED = {"OMP_NUM_THREADS": None, "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Variables that libraries read when they are loaded, with the value that workflows sets where there is none."""
_LIBC = ctypes.CDLL(None, use_errno=True)
_numbers = itertools.count()
_folder = tempfile.TemporaryDirectory(prefix="interpreters_")


def python_path(*folders: Path) -> str:
    """Returns PYTHONPATH for a process: these folders, FAULTS, and those of this process, where wheels may be."""
    return os.pathsep.join([*map(str, folders), str(FAULTS), *filter(None, [os.environ.get("PYTHONPATH")])])


class Interpreter:
    """A started process, with the part of subprocess.Popen that tests use; its output goes to files.

    Args of the constructor:
        arguments: as after `python`: -m and a module, -c and a program, or a file; and its own.
        cwd: working folder.
        env: all environment variables.
        outputs: files that standard output and standard error are written to; without them `communicate` has both.
        namespaces_of: a process whose network, mounts and host name it gets (Linux, root).
    """

    def __init__(
        self, arguments: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str],
        outputs: tuple[Path, Path] | None = None, namespaces_of: int | None = None,
    ) -> None:  # fmt: skip
        folder = Path(_folder.name) / f"{next(_numbers)}"
        self._files = outputs or (folder.with_suffix(".out"), folder.with_suffix(".err"))
        request = {"arguments": list(arguments), "cwd": str(cwd or Path.cwd()), "env": dict(env),
                   "outputs": list(map(str, self._files)), "namespaces_of": namespaces_of}  # fmt: skip
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(_waiting_for(*(env.get(name, usual) for name, usual in READ_WHEN_LOADED.items()))[0])
            connection.sendall(json.dumps(request).encode() + b"\n")
            self._answers = connection.makefile("rb", buffering=0)  # a line that is there already is left there
        self.pid = int(self._answers.readline())
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit status, -n after signal n.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        if self.returncode is None:
            if not select.select([self._answers], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("interpreter", timeout or 0)
            self.returncode = int(self._answers.readline())
            self._answers.close()
        return self.returncode

    def poll(self) -> int | None:
        """Returns the exit status, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Waits, and returns what it wrote to standard output and standard error."""
        self.wait(timeout)
        return self._files[0].read_text(errors="replace"), self.said

    @property
    def said(self) -> str:
        """What it has written to standard error so far."""
        return self._files[1].read_text(errors="replace") if self._files[1].exists() else ""

    def send_signal(self, number: int) -> None:
        """Sends a signal; nothing where it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends it at once, if it has not ended."""
        self.send_signal(signal.SIGKILL)
        self.wait()

    def children(self) -> list[psutil.Process]:
        """Returns its descendants, parents first; none where it has ended."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.pid).children(recursive=True) if self.poll() is None else []
        return []

    def close(self) -> None:
        """Ends it at once with its descendants, if it has not ended."""
        children = self.children()
        self.kill()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=30)


@functools.cache
def _waiting_for(*values: str | None) -> tuple[str, subprocess.Popen[bytes]]:
    """Starts an interpreter that waits until its standard input is closed, with this process; returns its socket."""
    path = f"{_folder.name}/socket_{next(_numbers)}"
    variables = os.environ | dict(zip(READ_WHEN_LOADED, values, strict=True))
    environment = {name: value for name, value in variables.items() if value is not None}
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen(64)
        process = subprocess.Popen(
            [sys.executable, __file__, str(listening.fileno())], env=environment, stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL, pass_fds=[listening.fileno()],
        )  # fmt: skip
    return path, process


def _wait_for_requests(listening: socket.socket) -> dict[str, Any]:
    """Returns the request in the process that is to be it; the waiting process ends when its parent has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers that have ended go away by themselves
    while sys.stdin not in select.select([listening, sys.stdin], [], [])[0]:
        connection, _ = listening.accept()
        if not os.fork():
            listening.close()
            return _kept(connection)
        connection.close()
    os._exit(0)


def _kept(connection: socket.socket) -> dict[str, Any]:
    """Returns in a child; the keeper tells how that ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request: dict[str, Any] = json.loads(connection.makefile("r").readline())
    pid = os.fork()
    if not pid:
        connection.close()
        return request
    connection.sendall(f"{pid}\n".encode())
    _, status = os.waitpid(pid, 0)
    connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _become(request: dict[str, Any]) -> None:
    """Turns this process into what `python <arguments>` would be."""
    for number, name in enumerate((os.devnull, *request["outputs"])):
        opened = os.open(name, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(opened, number)
        os.close(opened)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
    if request["namespaces_of"] is not None:
        _enter(request["namespaces_of"])
    if request["env"].pop(FORKED_WORKERS, ""):
        request = _with_workers(request)
    if LAUNCHER in request["env"]:  # a worker, whose parent is the launcher or its keeper
        request["env"][LAUNCHER] = str(os.getppid())
    if request.get("standard_output") is not None:
        os.dup2(request["standard_output"], 1)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    first, *others = request["arguments"]
    added = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[0:1] = [request["cwd"] if first.startswith("-") else str(Path(first).parent), *added]
    if str(FAULTS) in added:  # as Python does when it starts
        runpy.run_path(str(FAULTS / "sitecustomize.py"))
    sys.argv = request["arguments"] if first[0] != "-" else [first, *others[1:]]
    if first == "-m":
        runpy.run_module(others[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        exec(compile(others[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_path(first, run_name="__main__")


def _with_workers(request: dict[str, Any]) -> dict[str, Any]:
    """Returns in the run, whose workers will be forks, and returns a worker's request in each of them.

    run ─► child, forked before the run has threads ─► its child ─► worker: its parent ends, and so it is the run's,
    to which it then tells its number
    """
    run = os.getpid()
    connection, of_child = socket.socketpair()
    if os.fork():
        of_child.close()
        _LIBC.prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
        _Worker.connection = connection
        subprocess.Popen = _Worker  # type: ignore[misc]
        return request
    connection.close()
    handlers = [
        (number, signal.signal(number, signal.SIG_IGN))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP)
    ]
    for line in of_child.makefile():
        between = os.fork()
        if not between:
            parent = os.getpid()
            if os.fork():
                os._exit(0)
            for number, handler in handlers:
                signal.signal(number, handler)
            while os.getppid() == parent:
                time.sleep(0.001)
            if os.getppid() != run:
                os._exit(1)  # the run has ended
            of_child.sendall(f"{os.getpid()}\n".encode())
            os.close(of_child.detach())
            return {**request, **json.loads(line)}
        os.waitpid(between, 0)
    os._exit(0)


class _Worker(subprocess.Popen[bytes]):
    """A worker that a launcher starts, as a fork; any other process as always."""

    connection: ClassVar[socket.socket]

    def __init__(self, args: Any, **options: Any) -> None:
        command = [word for word in args if word != "-u"]  # torchrun asks for it
        of_workers = {"env", "stdout"}, {"env", "stdout", "stderr", "start_new_session"}
        if command[:2] != [sys.executable, "-m"] or options.keys() not in of_workers:
            super().__init__(args, **options)
            return
        self.connection.sendall(
            json.dumps({"arguments": command[1:], "env": options["env"], "standard_output": options["stdout"]}).encode()
            + b"\n"
        )
        self.__dict__ |= {
            "args": args, "pid": int(self.connection.recv(32)), "returncode": None, "stdin": None, "stdout": None,
            "stderr": None, "_child_created": True, "_communication_started": False, "_sigint_wait_secs": 0.25,
            "_waitpid_lock": threading.Lock(),
        }  # fmt: skip


def _enter(pid: int) -> None:
    for kind in ("net", "uts", "mnt"):
        with open(f"/proc/{pid}/ns/{kind}", "rb") as namespace:
            if _LIBC.setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"setns {kind}")


def _import_libraries() -> None:
    """Imports what takes long and starts no thread of its own, as onnxruntime does: threads do not survive a fork."""
    sys.path.insert(1, str(Path(__file__).resolve().parents[2]))
    import numpy.ma  # noqa: F401
    import onnx  # noqa: F401
    import tensorboard.compat.proto.event_pb2
    import tensorboard.plugins.hparams.summary_v2  # noqa: F401
    import torch._dynamo  # noqa: F401  # DistributedDataParallel needs it

    del sys.path[1]
    assert "onnxruntime" not in sys.modules
    gc.collect()
    gc.freeze()  # 1.5 s of a fork's time: its garbage collector does not touch, and so not copy, what is there now


def _end(code: object) -> None:
    """Ends as Python does, which frees every module in 0.3 s, or at once if there is no thread that this may abort."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if isinstance(code, int) and len(os.listdir("/proc/self/task")) == 1:
        os._exit(code)
    sys.exit(code)  # type: ignore[arg-type]


if __name__ == "__main__":
    _import_libraries()
    code: object = 0
    try:
        _become(_wait_for_requests(socket.socket(fileno=int(sys.argv[1]))))
    except SystemExit as error:
        code = error.code or 0
    _end(code)
