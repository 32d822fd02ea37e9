"""Processes that answer on one port and log into one database.

 parent: lock of the log, socket, Parquet files of complete decisions ─► worker 0 ... n-1, each: model, log, uvicorn

A worker that ends by itself is started again, unless its start fails.
"""

import errno
import gc
import multiprocessing
import os
import resource
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import uvicorn
from prometheus_client import multiprocess

from reagent_lite.cli import exit_code, message_of
from reagent_lite.config.rollout_config import ServedRolloutConfig
from reagent_lite.config.serve_config import ServeConfig
from reagent_lite.console import log_json, logger, machine_logger
from reagent_lite.data.served_log import rollout_events
from reagent_lite.disk_room import require_writable
from reagent_lite.errors import ConfigError, Problem, pluralize
from reagent_lite.export.bundle import ChoiceKind
from reagent_lite.folder_lock import alone_in
from reagent_lite.serving.access import Access, require_certificate
from reagent_lite.serving.app import create_app
from reagent_lite.serving.decision_log import DecisionLog, open_log, require_usable
from reagent_lite.serving.open_connections import OpenConnections, TLSListening
from reagent_lite.serving.recent_steps import forget_old_episodes
from reagent_lite.serving.rollout_store import RolloutStore
from reagent_lite.serving.rollout_watch import RolloutWatch
from reagent_lite.serving.served_model import Interface, ServedModel
from reagent_lite.serving.worker_rollout import WorkerRollout
from reagent_lite.whole_files import scratch_folder

_CURRENT = "current"
_NEW = "new"
"""Folders of the models of a rollout, next to the workers' figures."""
_POLL_SECONDS = 0.5
_RESTART_SECONDS = 1.0
_GRACE_SECONDS = 5  # for requests in progress
_PORT_SECONDS = _GRACE_SECONDS + 10  # the workers of a killed server end with it, and have the port until then
_MOST_KILLED = 5  # times in a row that a worker may be killed before it serves
_SWITCH_SECONDS = 0.001  # after which the thread of large requests lets others work; Python's default is 0.005
_IDLE_SECONDS = 75  # longer than proxies keep connections (60): one that is closed as it is reused drops a request
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Server:
    """State that the workers of a server share.

    Attributes:
        config: the server's config.
        listening: the socket on which all workers accept connections.
        folder: folder of the workers' figures.
        interface: interface of the server's model, which every worker's model must have.
        choices, epoch, failure: arguments of each worker's `DecisionLog`.
        access: tokens and names of the server.
        rollout: number of the rollout of a second model; None without one.
    """

    config: ServeConfig
    listening: socket.socket
    folder: Path
    interface: Interface
    choices: ChoiceKind
    epoch: int
    failure: Any
    access: Access
    rollout: int | None


def run_workers(config: ServeConfig) -> tuple[int, int]:
    """Serves until SIGTERM or SIGINT; returns the numbers of restarts of workers, and of decisions that wait.

    Raises:
        FolderInUseError: another server uses the log.
        ConfigError: the log cannot be written, the port is in use, or a worker does not start.
        BundleError: the model fails its check.
    """
    folder = Path(config.log).expanduser()
    if config.log_format == "json":
        log_json()
    access = Access.of(config)
    require_certificate(config)
    require_usable(config)
    require_writable(folder, "log")
    model = ServedModel(config.model, config.items)
    with ExitStack() as resources:
        listening = resources.enter_context(_listening(config))
        require_writable(folder, "log", keep=True)
        resources.enter_context(alone_in(folder, "log"))
        log = resources.enter_context(open_log(config, choices=model.bundle.choices))
        shared = resources.enter_context(scratch_folder("serve"))
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(shared)  # read when workers import prometheus_client
        host, port = listening.getsockname()[:2]
        scheme = "https" if config.tls_certificate else "http"
        name = f"[{host}]" if ":" in host else host
        stopping = resources.enter_context(_stopped_by_signals())
        logger.info(f"serving {model} at {scheme}://{name}:{port}, log {folder}")
        model.warn_if_certain()
        watch = None if config.rollout is None else _begun_rollout(config, config.rollout, model, log, shared)
        server = _Server(
            config=config,
            listening=listening,
            folder=shared,
            interface=model.interface,
            choices=log.choices,
            epoch=log.epoch,
            failure=log.shared_failure,
            access=access,
            rollout=None if watch is None else watch.number,
        )
        restarts = _supervise(server, log, stopping, watch)
        log.rotate()
        _poll(config, log, watch)
        if log.waiting:
            waiting = pluralize(log.waiting, "decision waits", "decisions wait")
            logger.info(f"{folder}: {waiting} for rewards and in no file yet: the next server continues")
        return restarts, log.waiting


def _listening(config: ServeConfig) -> socket.socket:
    """Returns a socket that listens; waits for a port that the workers of a killed server still have."""
    where = f"{config.host}:{config.port}"
    begun = time.monotonic()
    has_waited = False
    while True:
        try:
            family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
            listening = socket.create_server((config.host, config.port), family=family, backlog=1024)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and time.monotonic() - begun < _PORT_SECONDS:
                if not has_waited:
                    logger.info(f"port: {where} is in use; waiting {_PORT_SECONDS} s in case its server was killed")
                has_waited = True
                time.sleep(_POLL_SECONDS)
                continue
            got = error.strerror or str(error)
            todo = "Choose another host or port, or end the server that uses them"
            raise ConfigError(Problem("port", f"a free port of this machine at {where}", got, todo)) from error
        # connections inherit the option; without it an answer in two packets takes 40 ms
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening


def _begun_rollout(
    config: ServeConfig, section: ServedRolloutConfig, model: ServedModel, log: DecisionLog, folder: Path
) -> RolloutWatch:
    """Begins a rollout, or continues it; copies both models, so that a worker that is started again has the same.

    Raises:
        BundleError: the new model fails its check, or has another interface than the current one.
        ConfigError: both models are the same.
        DataError: the log's events are not those of a server.
    """
    new = ServedModel(section.model, config.items, model.interface)
    if new.version == model.version:
        raise ConfigError(Problem("rollout.model", "another model than model", section.model, "Name the new model"))
    for served, source, name in ((model, config.model, _CURRENT), (new, section.model, _NEW)):
        shutil.copytree(Path(source).expanduser(), folder / name)
        if ServedModel(str(folder / name), config.items).version != served.version:
            raise ConfigError(Problem(source, "a model that stays while the server starts", "another model meanwhile"))
    folder_of_log = Path(config.log).expanduser()
    store = RolloutStore.begun(log, section, model.version, new.version, rollout_events(str(folder_of_log)))
    state = store.state
    logger.info(f"rollout {state.id}: {new} and {model}, {state.state} with share {state.share:g}")
    new.warn_if_certain()
    return RolloutWatch(store, section, folder_of_log)


@contextmanager
def _stopped_by_signals() -> Iterator[threading.Event]:
    """Yields an event that SIGTERM and SIGINT set, in place of what they did before."""
    stopping = threading.Event()
    before = {number: signal.signal(number, lambda *_: stopping.set()) for number in _SIGNALS}
    try:
        yield stopping
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _supervise(server: _Server, log: DecisionLog, stopping: threading.Event, watch: RolloutWatch | None) -> int:
    """Runs the workers and polls the log until a signal; returns the number of restarts."""
    context = multiprocessing.get_context("spawn")
    ready = [context.Event() for _ in range(server.config.workers)]
    workers: list[SpawnProcess] = []
    killed = [0] * server.config.workers
    restarts = 0
    polled = time.monotonic()

    def start_worker(number: int) -> SpawnProcess:
        process = context.Process(target=_work, args=(server, number, ready[number]))
        process.start()
        return process

    try:
        workers.extend(map(start_worker, range(server.config.workers)))
        while not stopping.is_set():
            wait([worker.sentinel for worker in workers], timeout=min(_POLL_SECONDS, server.config.poll_seconds))
            if time.monotonic() - polled > server.config.poll_seconds:
                _poll(server.config, log, watch)
                polled = time.monotonic()
            for number, worker in enumerate(workers):
                if worker.is_alive() or stopping.is_set():
                    continue
                multiprocess.mark_process_dead(worker.pid, str(server.folder))  # type: ignore[no-untyped-call]
                got = f"exit code {worker.exitcode}"
                is_ready = ready[number].is_set()
                killed[number] = 0 if is_ready else killed[number] + 1
                if (not is_ready and (worker.exitcode or 0) >= 0) or killed[number] > _MOST_KILLED:
                    raise ConfigError(
                        Problem(f"worker {number}", "a process that serves", got, "See its message above")
                    )
                logger.warning(f"worker {number} ended with {got} and is started again")
                stopping.wait(_RESTART_SECONDS)
                restarts += 1
                ready[number].clear()
                workers[number] = start_worker(number)
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.join()
    return restarts


def _poll(config: ServeConfig, log: DecisionLog, watch: RolloutWatch | None) -> None:
    try:
        log.poll()
        forget_old_episodes(log, config.waiting_decisions)
        if watch is not None:
            watch.poll()
    except OSError as error:  # a full disk, which has no traceback
        machine_logger.warning(f"log: {error}")
    except Exception as error:  # the next poll may succeed, and without polls no file is written
        machine_logger.warning(message_of(error))


def _work(server: _Server, number: int, ready: Any) -> None:
    """Runs a worker in its process."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))  # otherwise 1000 connections leave no file for the log
    sys.setswitchinterval(_SWITCH_SECONDS)
    if server.config.log_format == "json":
        log_json()
    for signal_number in _SIGNALS:  # until uvicorn sets its handlers, which answer requests in progress
        signal.signal(signal_number, lambda *_: os._exit(0))  # an exception in an import would be reported
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.exit(exit_code(lambda: _answer(server, number, ready)))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


def _answer(server: _Server, number: int, ready: Any) -> int:
    config = server.config
    has_rollout = server.rollout is not None
    model = ServedModel(str(server.folder / _CURRENT) if has_rollout else config.model, config.items, server.interface)
    log = DecisionLog(config, choices=server.choices, epoch=server.epoch, failure=server.failure)
    with closing(log):
        rollout = None
        if server.rollout is not None and config.rollout is not None:
            new = ServedModel(str(server.folder / _NEW), config.items, server.interface)
            folders = config.model, config.rollout.model
            rollout = WorkerRollout(RolloutStore(log, server.rollout), model, new, folders)
            rollout.present()
        app = create_app(config, number, model, log, server.access, rollout)
        open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        connections = OpenConnections(config, app.state.worker.figures, open_files)
        settings = uvicorn.Config(
            app,
            loop="asyncio",  # another one would not accept by the methods of TLSListening
            http=connections.protocol,  # type: ignore[arg-type] # a function that makes one, for a class
            log_config=None,
            log_level="error",  # a warning for each wrong request would fill the log
            ssl_certfile=_path(config.tls_certificate),
            ssl_keyfile=_path(config.tls_key),
            access_log=False,
            proxy_headers=False,
            timeout_keep_alive=_IDLE_SECONDS,
            timeout_graceful_shutdown=_GRACE_SECONDS,
        )
        gc.collect()
        gc.freeze()  # collections would go through all libraries, about 40 us of a request
        ready.set()
        listening = TLSListening.of(server.listening, connections) if config.tls_certificate else server.listening
        uvicorn.Server(settings).run(sockets=[listening])
    return 0


def _path(file: str) -> Path | None:
    return Path(file).expanduser() if file else None
