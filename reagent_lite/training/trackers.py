"""Trackers: MLflow, and Weights & Biases.

 MetricsWriter ─► Tracker ─► queue ─► its thread ─► MLflow's client, or W&B's process

A run starts only if its trackers start. A later failure is one warning, and training continues.
"""

import importlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Any, Protocol

from reagent_lite.config import WorkflowConfig, expand_config, parameters
from reagent_lite.config.section import Section
from reagent_lite.config.tracking import MlflowConfig, WandbConfig
from reagent_lite.console import logger
from reagent_lite.errors import ConfigError, Preempted, Problem, install, is_installed
from reagent_lite.training.metrics import RunSummary, Sink

_RUN_TAG = "reagent_lite.run"
_FINISHED = "FINISHED"
_STOPPED = "KILLED"
_FAILED = "FAILED"
"""MLflow's statuses of a run that has ended."""
_START = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
"""Limits of MLflow's requests while a run starts: a wrong address is refused after 13 s, not after 4 min."""
_END = {"MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true"}
"""Standard output is for the run's result, and the address that MLflow would print there may contain a password."""
_END_SECONDS = 300.0
_STOP_SECONDS = 10.0
"""Seconds for which a run that has ended, or was stopped, waits for a tracker to send its figures."""


class _Client(Protocol):
    """A run in another program; any method may raise, and may take long."""

    def write(self, step: int, scalars: Mapping[str, float], seconds: float) -> None: ...
    def conclude(self, conclusion: RunSummary) -> None: ...
    def finish(self, status: str) -> None: ...


class _Mlflow:
    def __init__(self, config: MlflowConfig, run: str, workflow: WorkflowConfig) -> None:
        mlflow = importlib.import_module("mlflow")
        self._entities = mlflow.entities
        self._client = mlflow.MlflowClient(tracking_uri=config.uri)
        experiment = self._experiment(config.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default"))
        started = self._client.search_runs([experiment], f"tags.`{_RUN_TAG}` = '{run}'", max_results=1)
        self._last_steps: dict[str, int] = {}
        """Last step of each metric in earlier starts; MLflow would keep two values of the same step."""
        if started:
            self._run = started[0].info.run_id
            self._last_steps = {metric.key: metric.step for metric in started[0].data.to_proto().metrics}
            self._client.update_run(self._run, status="RUNNING")
            return
        tags = importlib.import_module("mlflow.tracking.context.registry").resolve_tags({_RUN_TAG: run})
        self._run = self._client.create_run(experiment, tags=tags, run_name=workflow.folder.name).info.run_id
        params = [self._entities.Param(_legal(key), str(value)) for key, value in parameters(workflow).items()]
        self._client.log_batch(self._run, params=params)

    def _experiment(self, name: str) -> str:
        experiment = self._client.get_experiment_by_name(name)
        try:
            return str(self._client.create_experiment(name) if experiment is None else experiment.experiment_id)
        except importlib.import_module("mlflow.exceptions").MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":  # otherwise another run has just created it
                raise
        return str(self._client.get_experiment_by_name(name).experiment_id)

    def write(self, step: int, scalars: Mapping[str, float], seconds: float) -> None:
        milliseconds = int(1000 * seconds)
        legal = {_legal(name): value for name, value in scalars.items()}
        new = {name: value for name, value in legal.items() if step > self._last_steps.get(name, -1)}
        metrics = [self._entities.Metric(name, value, milliseconds, step) for name, value in new.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def conclude(self, conclusion: RunSummary) -> None:
        self._client.set_tag(self._run, "decision", conclusion.decision)
        self._client.set_tag(self._run, "mlflow.note.content", conclusion.text)
        for file in conclusion.files:
            if file.is_dir():
                self._client.log_artifacts(self._run, str(file), file.name)
            else:
                self._client.log_artifact(self._run, str(file))

    def finish(self, status: str) -> None:
        with _environment(_END):
            self._client.set_terminated(self._run, status)


class _Wandb:
    def __init__(self, config: WandbConfig, run: str, workflow: WorkflowConfig) -> None:
        self._wandb = importlib.import_module("wandb")
        self._run = self._wandb.init(
            project=config.project,
            mode=config.mode,
            id=run,
            resume="allow",
            name=workflow.folder.name,
            config=expand_config(workflow),
            allow_val_change=True,  # of config keys that may change when a run is resumed
            settings=self._wandb.Settings(reinit="create_new", finish_timeout=_END_SECONDS),
        )

    def write(self, step: int, scalars: Mapping[str, float], seconds: float) -> None:
        self._run.log(dict(scalars), step=step)

    def conclude(self, conclusion: RunSummary) -> None:
        self._run.summary["decision"] = conclusion.decision
        self._run.notes = conclusion.text
        artifact = self._wandb.Artifact(f"run-{self._run.id}", type="run")
        for file in conclusion.files:
            if file.is_dir():
                artifact.add_dir(str(file), file.name)
            else:
                artifact.add_file(str(file))
        self._run.log_artifact(artifact)

    def finish(self, status: str) -> None:
        self._run.finish(exit_code=int(status != _FINISHED))


class Tracker(Sink):
    """A run in another program, updated by a separate thread: a server that does not answer delays no step.

    Args:
        name: key of the program in the section tracking.
        client: the run.
    """

    def __init__(self, name: str, client: _Client) -> None:
        self._name = name
        self._client = client
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name=f"tracking.{name}", daemon=True)
        self._thread.start()

    def write(self, step: int, scalars: Mapping[str, float | None]) -> None:
        """Hands over the scalars that are finite."""
        finite = {name: value for name, value in scalars.items() if value is not None}
        self._calls.put(partial(self._client.write, step, finite, time.time()))

    def conclude(self, conclusion: RunSummary) -> None:
        """Hands over decision and files."""
        self._calls.put(partial(self._client.conclude, conclusion))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits until everything is sent: a few minutes at most, or seconds if the run was stopped."""
        failed = _STOPPED if isinstance(error, Preempted) else _FAILED
        self._calls.put(partial(self._client.finish, _FINISHED if error is None else failed))
        self._calls.put(None)
        seconds = _END_SECONDS if error is None else _STOP_SECONDS
        self._thread.join(seconds)
        if self._thread.is_alive():
            logger.warning(f"tracking.{self._name}: not everything was sent within {seconds:.0f} s")

    def _work(self) -> None:
        has_failed = False
        while (call := self._calls.get()) is not None:
            try:
                if not has_failed:
                    call()
            except Exception as error:
                has_failed = True
                logger.warning(f"tracking.{self._name} has stopped: {_reason(error)}; metrics.jsonl has all figures")


_CLIENTS: dict[str, Callable[[Any, str, WorkflowConfig], _Client]] = {"mlflow": _Mlflow, "wandb": _Wandb}
"""Trackers by the names of their packages, which are also their keys in the section tracking."""


def require_trackers(config: WorkflowConfig) -> None:
    """Checks that the packages of a run's trackers are installed, before data is read.

    Raises:
        ConfigError: a package is missing; the error has the command that installs it.
    """
    for name in _sections(config):
        if not is_installed(name):  # a run needs only one package of the extra
            todo = f"Run: {install('tracking')}, or remove the key"
            raise ConfigError(Problem(f"tracking.{name}", "the packages of the extra tracking", f"no {name}", todo))


def trackers(config: WorkflowConfig, run: str) -> Iterator[Tracker]:
    """Starts the trackers of a run one after the other, or continues their records of it.

    Args:
        config: the run's config.
        run: id of the run, the same in all its starts.

    Raises:
        ConfigError: a tracker cannot be started.
    """
    for name, section in _sections(config).items():
        logger.info(f"tracking.{name}: starting")
        try:
            with _environment(_START):
                client = _CLIENTS[name](section, run, config)
        except Exception as error:
            todo = f"Fix this, or remove the key; {install('tracking')} installs the packages that databases need"
            # without the error itself: its traceback may show an address with a password
            raise ConfigError(Problem(f"tracking.{name}", "a run to write to", _reason(error), todo)) from None
        yield Tracker(name, client)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets variables inside the block unless the environment already has them."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _sections(config: WorkflowConfig) -> dict[str, Section]:
    sections = {name: getattr(config.tracking, name) for name in _CLIENTS if not config.collects}
    return {name: section for name, section in sections.items() if section is not None}


def _reason(error: Exception) -> str:
    """Returns type and first line of an error, without the user and password of an address."""
    text = re.sub(r"//[^/\s]*@", "//", str(error)).strip()
    return f"{type(error).__name__}: {text.partition(chr(10))[0]}"


def _legal(name: str) -> str:
    """Returns a name that MLflow accepts; actions and metrics of a log may have any name."""
    illegal = re.compile(r"^\.*$|[^\w.\- ]")
    return "/".join(illegal.sub(lambda match: f"_{match[0].encode().hex()}_", part) for part in name.split("/"))
