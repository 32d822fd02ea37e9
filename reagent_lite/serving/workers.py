"""Processes that answer on one port, and rewards that go from one to another.

 parent: lock of the log, socket ─► worker 0 ... n-1, each: lock of its journals, model, log, uvicorn
                                       └─ rewards of decisions of another worker by a Unix socket ─┘

A worker that ends by itself is started again and reads its journal.
"""

import asyncio
import json
import multiprocessing
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, closing, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, cast

import uvicorn
from prometheus_client import multiprocess

from reagent_lite.cli import exit_code
from reagent_lite.config.serve import ServeConfig
from reagent_lite.console import logger
from reagent_lite.errors import ConfigError, Problem
from reagent_lite.files import alone_in, require_writable, scratch_folder
from reagent_lite.serving.app import Join, create_app
from reagent_lite.serving.decision_log import DecisionLog, Joined, epoch_of_clock, open_log, worker_of
from reagent_lite.serving.refusals import TRY_LATER, RefusedError
from reagent_lite.serving.served_model import ServedModel

_POLL_SECONDS = 0.5
_RESTART_SECONDS = 1.0
_GRACE_SECONDS = 5  # for requests that are under way
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Server:
    """What the workers of a server share.

    Attributes:
        config: the server's.
        listening: the socket on which all of them accept connections.
        folder: the folder of their sockets and figures.
        epoch: see `open_log`.
        parametric: whether decisions are among candidates, for all workers alike.
    """

    config: ServeConfig
    listening: socket.socket
    folder: Path
    epoch: int
    parametric: bool


def serve(config: ServeConfig) -> int:
    """Serves until SIGTERM or SIGINT; returns how often a worker was started again.

    Raises:
        FolderInUseError: another server has the log.
        ConfigError: the log cannot be written, the port is taken, or a worker does not start.
        BundleError: the model fails its check.
    """
    folder = Path(config.log).expanduser()
    require_writable(folder, "log")
    model = ServedModel(config.model)
    with ExitStack() as open_now:
        listening = open_now.enter_context(_listening(config))
        require_writable(folder, "log", keep=True)
        open_now.enter_context(alone_in(folder, "log"))
        # a short name, as the paths of sockets are at most 107 characters long
        shared = open_now.enter_context(scratch_folder("serve"))
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(shared)  # workers import prometheus_client after that
        host, port = listening.getsockname()[:2]
        logger.info(f"serving model {model.version[:12]} at http://{host}:{port}, log {folder}")
        epoch = epoch_of_clock(folder)
        return _supervise(
            _Server(
                config=config,
                listening=listening,
                folder=shared,
                epoch=epoch,
                parametric=model.bundle.parametric,
            )
        )


def _listening(config: ServeConfig) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        listening = socket.create_server((config.host, config.port), family=family, backlog=1024)
        # its connections inherit it; without it an answer in two pieces takes 40 ms
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening
    except OSError as error:
        where, got = f"{config.host}:{config.port}", error.strerror or str(error)
        raise ConfigError(
            Problem("port", f"a free port at {where}", got, "Choose another, or end its server")
        ) from error


def _supervise(server: _Server) -> int:
    context, stopping = multiprocessing.get_context("spawn"), threading.Event()
    before = {one: signal.signal(one, lambda *_: stopping.set()) for one in _SIGNALS}
    ready = [context.Event() for _ in range(server.config.workers)]
    workers: list[SpawnProcess] = []
    restarts = 0

    def started(number: int) -> SpawnProcess:
        process = context.Process(target=_work, args=(server, number, ready[number]))
        process.start()
        return process

    try:
        workers.extend(map(started, range(server.config.workers)))
        while not stopping.is_set():
            wait([one.sentinel for one in workers], timeout=_POLL_SECONDS)
            for number, one in enumerate(workers):
                if one.is_alive() or stopping.is_set():
                    continue
                multiprocess.mark_process_dead(one.pid, str(server.folder))  # type: ignore[no-untyped-call]
                ended = f"ended with code {one.exitcode}"
                if not ready[number].is_set():
                    raise ConfigError(
                        Problem(
                            f"worker {number}", "a process that serves", f"one that {ended}", "See its message above"
                        )
                    )
                logger.warning(f"worker {number} {ended} and is started again")
                stopping.wait(_RESTART_SECONDS)
                restarts += 1
                workers[number] = started(number)
    finally:
        for one in workers:
            one.terminate()
        for one in workers:
            one.join()
        for number_of_signal, handler in before.items():
            signal.signal(number_of_signal, handler)
    return restarts


def _work(server: _Server, number: int, ready: Any) -> None:
    """Serves in a process of its own."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # else 1000 connections leave no file to the log
    stopping = threading.Event()
    for one in _SIGNALS:
        signal.signal(one, lambda *_: stopping.set())

    def body() -> int:
        asyncio.run(_answering(server, number, ready, stopping))
        return 0

    sys.exit(exit_code(body))


async def _answering(server: _Server, number: int, ready: Any, stopping: threading.Event) -> None:
    config = server.config
    model = ServedModel(config.model, server.parametric)
    with open_log(config, number, parametric=server.parametric, epoch=server.epoch) as log:
        async with _rewards(server, number, log) as join:
            app = create_app(config, number, model, log, join)
            settings = uvicorn.Config(
                app, log_config=None, access_log=False, proxy_headers=False, timeout_graceful_shutdown=_GRACE_SECONDS
            )
            http = uvicorn.Server(settings)
            loop = asyncio.get_running_loop()

            def stop(*_: object) -> None:
                http.should_exit = True

            for one in _SIGNALS:
                signal.signal(one, stop)
            if stopping.is_set():
                stop()
            parent = multiprocessing.parent_process()
            if parent is not None:  # a worker ends with its parent
                sentinel = parent.sentinel

                def orphaned() -> None:
                    stop()
                    loop.remove_reader(sentinel)

                loop.add_reader(sentinel, orphaned)
            ready.set()
            await http.serve(sockets=[server.listening])
            await log.close()


@asynccontextmanager
async def _rewards(server: _Server, number: int, log: DecisionLog) -> AsyncIterator[Join]:
    """Takes rewards that other workers pass on, and yields what takes a reward to the worker of its decision."""
    config = server.config

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, ValueError):
            decision_id, given = json.loads(await reader.readline())
            try:
                reply: dict[str, str] = {"joined": log.join(decision_id, given)}
            except OSError as error:
                reply = {"error": error.strerror or str(error)}
            writer.write(json.dumps(reply).encode() + b"\n")
            await writer.drain()
        writer.close()

    async def join(decision_id: str, given: dict[str, Any]) -> Joined:
        owner = worker_of(decision_id, config)
        if owner == number:
            return log.join(decision_id, given)
        line, missing = b"", f"worker {owner}, which is starting"
        try:
            async with asyncio.timeout(config.request_seconds):
                reader, writer = await asyncio.open_unix_connection(server.folder / f"{owner}.sock", limit=most)
                with closing(writer):
                    writer.write(json.dumps([decision_id, given]).encode() + b"\n")
                    line = await reader.readline()
        except TimeoutError:
            missing = f"no answer of worker {owner} in {config.request_seconds:g} s"
        except OSError:
            pass
        if not line:
            raise RefusedError(503, Problem("decision_id", "a decision of a worker that answers", missing, TRY_LATER))
        reply = json.loads(line)
        if "error" in reply:
            raise OSError(reply["error"])
        return cast(Joined, reply["joined"])

    path, most = server.folder / f"{number}.sock", int(config.max_body_kb * 2000)
    path.unlink(missing_ok=True)
    async with await asyncio.start_unix_server(answer, path, limit=most):
        yield join
