"""Trains configs with several seeds each, and chooses one of them by episodes that do not decide.

config ─► runs: {config}-{seed} ─► queue in the folder ─► processes of all machines ─┬─► curves, table, choice ─► page
                                                                                     └─► decision: the chosen run's own

folder    comparison/  configs, queue      runs/  a folder for each run      logs/  their messages
          compare.json, compare.html, once every run has ended
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from reagent_lite.config import leaves
from reagent_lite.config.compare_config import CompareConfig
from reagent_lite.config.loader import read_tree
from reagent_lite.console import logger
from reagent_lite.disk_room import require_writable
from reagent_lite.distributed.work_queue import WorkQueue, fill_queue
from reagent_lite.distributed.worker import ending_with_me, writing_error_to
from reagent_lite.errors import ConfigError, PeerError, Preempted, Problem, needing, raise_any
from reagent_lite.manifest import canonical
from reagent_lite.report.compared import (
    CURVE_LEVEL,
    TABLE_LEVEL,
    ComparedConfig,
    ComparedRuns,
    report_of_comparison,
)
from reagent_lite.report.html_page import render
from reagent_lite.report.result import Brief, Result
from reagent_lite.run.evaluators import CHOOSING
from reagent_lite.training.stop import StopSignal
from reagent_lite.whole_files import work_folder, write_synced, write_whole

_FOLDER = "comparison"
_ROUND_SECONDS = 0.25
_ENDING_SECONDS = 120.0  # for a run to save a checkpoint
_MESSAGE_LINES = 12
_ONCE_MORE = (Preempted.exit_code, 5)  # a signal to the run itself; a run of a lost worker that has not ended yet

Tree = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared(Result):
    """The comparison; printed as the last line of standard output.

    Attributes:
        chosen: name of the chosen run, of the config with the highest interquartile mean.
        decision: recommendation for its policy, from episodes that did not choose it: choice, reason, next.
        model: folder of its exported model; None if publish_if blocked the export.
        compared: number of runs that it was chosen from.
        failed: {name: error} of the runs that failed.
        page, report: paths of the HTML page and of the JSON file with all figures.
        seconds: total wall-clock time of this command.
        comparison: all figures; not printed.
    """

    chosen: str
    decision: dict[str, str]
    model: str | dict[str, str] | None
    compared: int
    failed: dict[str, str]
    page: str
    report: str
    seconds: float
    comparison: ComparedRuns = field(repr=False)

    @property
    def exit_code(self) -> int:
        """The exit code of the command: 4 if a run failed."""
        return PeerError.exit_code if self.failed else 0

    @property
    def runs(self) -> Any:
        """The runs as a frame of pandas: config, seed, score, final, decision, steps, seconds, model, folder, error.

        `score` is of the episodes that choose, `final` of those that decide.
        """
        return _frame(self.comparison.run_rows())

    @property
    def curves(self) -> Any:
        """The learning curves as a frame of pandas: config, step, value, low, high, over the runs of each config."""
        return _frame(self.comparison.curve_rows())

    @property
    def table(self) -> Any:
        """The configs as a frame of pandas, the best first: config, runs, interquartile_mean, mean, low, high.

        The intervals of the means hold together.
        """
        return _frame(self.comparison.config_rows())


def _frame(rows: list[Tree]) -> Any:
    from reagent_lite.data.result_frames import frame_of

    return frame_of(rows)


def compare_runs(config: CompareConfig) -> Compared:
    """Trains the runs that are not finished yet, together with other machines, and compares all of them.

    Raises:
        ConfigError: the folder has other runs, or a run lacks the score.
        PeerError: all runs failed.
        Preempted: a signal ended the command; the same one continues.
    """
    start = time.monotonic()
    with needing("data", "workflows.compare"):
        import reagent_lite.tasks.run_statistics  # noqa: F401
    folder = Path(config.output_path).expanduser()
    trees = {
        f"{name}-{seed}": {**tree, "seed": seed, "model_output_path": str(_run_folder(folder, f"{name}-{seed}"))}
        for name, tree in config.trees.items()
        for seed in config.seeds
    }
    require_writable(folder, "output_path", keep=True)
    _begin(folder, trees)
    queue = WorkQueue(folder / _FOLDER, config.lost_after_seconds, polled_every=_ROUND_SECONDS)
    queue.retry_failed()
    with StopSignal() as signal:
        signal.standing = "runs have saved what they learned; the same command continues"
        _Workers(config, folder, queue, [*trees]).work()
    comparison = _compared_runs(config, folder, queue, [*trees])
    return _conclude(folder, comparison, time.monotonic() - start)


def _run_folder(folder: Path, name: str) -> Path:
    return folder / "runs" / name


def _begin(folder: Path, trees: dict[str, Tree]) -> None:
    """Writes configs and queue of a new comparison; an earlier one is continued.

    Raises:
        ConfigError: the earlier one has other runs.
    """
    target = folder / _FOLDER
    if not target.exists():
        with work_folder(folder, _FOLDER) as temporary:
            fill_queue(temporary, trees)
            (temporary / "configs").mkdir()
            for name, tree in trees.items():
                write_synced(temporary / "configs" / f"{name}.json", canonical(tree))
            with suppress(OSError):  # another machine was faster
                temporary.rename(target)
    earlier = {path.stem: read_tree(path)[0] for path in (target / "configs").iterdir()}
    todo = "All runs of a comparison count. Name another output_path for other runs"
    problems = [
        Problem(f"run {name}", "a run of this comparison, as when it began", "none" if name in earlier else "a new one",
                todo)
        for name in sorted(earlier.keys() ^ trees.keys())
    ]  # fmt: skip
    for name in sorted(earlier.keys() & trees.keys()):
        before, now = (leaves(each[name]) for each in (earlier, trees))
        changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
        problems += [
            Problem(f"run {name}: {key}", f"{json.dumps(before.get(key))}, as when the comparison began",
                    json.dumps(now.get(key)), todo)
            for key in changed if key != "model_output_path"  # machines may see the folder by different paths
        ]  # fmt: skip
    raise_any(problems, ConfigError)


def _command_of(workflow: str, folder: Path, name: str) -> list[str]:
    """Returns the command of a run, as a user would type it."""
    config = folder / _FOLDER / "configs" / f"{name}.json"
    output = f"model_output_path={json.dumps(str(_run_folder(folder, name)))}"
    return [sys.executable, "-m", f"workflows.{workflow}", "--config", str(config), "--set", output]


@dataclass(frozen=True, slots=True)
class _Process:
    """A started run: its process, its standard output, and the files of its messages and of its error."""

    process: "subprocess.Popen[bytes]"
    output: IO[bytes]
    log: Path
    error_file: Path

    def outcome(self) -> Tree:
        """Returns the last line of its standard output."""
        self.output.seek(0)
        outcome: Tree = json.loads(self.output.read().splitlines()[-1])
        return outcome

    @property
    def error(self) -> str:
        """The error that ended it; the last messages of a run that has not named its error."""
        if self.process.returncode < 0:
            return f"ended by signal {-self.process.returncode}"
        if self.error_file.exists():
            return self.error_file.read_text()
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-_MESSAGE_LINES:])


class _Workers:
    """Runs of a queue as processes of this machine, until every run of the queue has ended.

    Args:
        config: the comparison.
        folder: its folder.
        queue: the queue.
        names: names of all runs.
    """

    def __init__(self, config: CompareConfig, folder: Path, queue: WorkQueue, names: list[str]) -> None:
        self._folder = folder
        self._queue = queue
        self._workflows = {name: config.workflow_of(config.trees[name.rpartition("-")[0]]) for name in names}
        self._slots = config.processes or len(os.sched_getaffinity(0))
        self._running: dict[str, _Process] = {}
        (folder / "logs").mkdir(exist_ok=True)

    def work(self) -> None:
        """Starts, watches and ends processes; on an error or a signal it ends them, and their runs wait again."""
        total = len(self._workflows)
        try:
            while self._running or len(self._queue.names("done")) + len(self._queue.names("failed")) < total:
                for name in self._queue.take_over():
                    logger.warning(f"{name}: its machine is silent; the run continues here or elsewhere")
                while len(self._running) < self._slots and (claimed := self._queue.claim()) is not None:
                    self._start(claimed)
                time.sleep(_ROUND_SECONDS)
                for name in [*self._running]:
                    self._watch(name)
        finally:
            self._end_all()

    def _start(self, name: str) -> None:
        logger.info(f"{name}: started")
        path = self._folder / "logs" / f"{name}.log"
        error_file = path.with_suffix(".error")
        error_file.unlink(missing_ok=True)
        output = tempfile.TemporaryFile()  # noqa: SIM115  as long as the process
        with path.open("ab") as log:
            process = subprocess.Popen(
                _command_of(self._workflows[name], self._folder, name),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=log,
                process_group=0,  # Ctrl-C is passed on as SIGTERM, once
                env={"OMP_NUM_THREADS": "1", **os.environ, **ending_with_me(), **writing_error_to(error_file)},
            )
        self._running[name] = _Process(process, output, path, error_file)

    def _watch(self, name: str) -> None:
        """Gives a sign of life for a run, or records its end."""
        if self._running[name].process.poll() is not None:
            self._end(name)
        elif not self._queue.beat(name):
            logger.warning(f"{name}: taken over by another machine, as this one was silent")
            self._end(name, again=True)

    def _end(self, name: str, *, again: bool = False) -> None:
        """Records the end of a run, which is killed unless it has ended; `again`: it waits unless it has finished."""
        running = self._running.pop(name)
        with running.output:
            if running.process.poll() is None:
                running.process.kill()
            code = running.process.wait()
            if code == 0:
                if self._queue.finish(name, running.outcome()):
                    logger.info(f"{name}: done")
            elif again or code in _ONCE_MORE:
                self._queue.release(name)
            else:
                error = running.error
                if self._queue.finish(name, {"exit_code": code, "error": error}, failed=True):
                    logger.error(f"{name}: failed with exit code {code}: {error}")

    def _end_all(self) -> None:
        processes = [running.process for running in self._running.values()]
        for process in processes:
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + _ENDING_SECONDS
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            time.sleep(_ROUND_SECONDS / 5)
            for name in self._running:
                self._queue.beat(name)
        for name in [*self._running]:
            self._end(name, again=True)


def _compared_runs(config: CompareConfig, folder: Path, queue: WorkQueue, names: list[str]) -> ComparedRuns:
    """Returns the figures of all runs.

    Runs without a value of the score count as failed, if others have it.

    Raises:
        PeerError: all runs failed.
        ConfigError: no run has the score.
    """
    from reagent_lite.tasks.run_statistics import bootstrap_interval, interquartile_mean, mean_interval

    done = set(queue.names("done"))
    outcomes = {name: queue.record(name) for name in names if name in done}
    failed = {name: str(queue.record(name)["error"]) for name in names if name not in done}
    if not outcomes:
        raise PeerError([Problem(f"run {name}", "a result", error) for name, error in failed.items()])
    score = config.score_tag
    tag = f"{CHOOSING}{score}"
    lacking = [name for name, outcome in outcomes.items() if outcome["scores"].get(tag) is None]
    if len(lacking) == len(outcomes):
        tags = (each for each, value in outcomes[lacking[0]]["scores"].items() if value is not None)
        available = [each.removeprefix(CHOOSING) for each in tags if each.startswith(CHOOSING)]
        expected = f"a score of every run: {', '.join(available) or 'none'}"
        raise ConfigError(Problem("score", expected, f"{score}, which {lacking[0]} lacks"))
    for name in lacking:
        del outcomes[name]
        failed[name] = f"no value of {score} on the episodes that choose; the run itself has ended, and is not repeated"
    curves = {
        name: {outcome["steps"]: outcome["scores"][tag]} | _curve(_run_folder(folder, name) / "metrics.jsonl", score)
        for name, outcome in outcomes.items()
    }
    runs: dict[str, dict[str, float]] = {config_name: {} for config_name in config.configs}
    for name, outcome in outcomes.items():
        runs[name.rpartition("-")[0]][name] = outcome["scores"][tag]
    finished = {config_name: scores for config_name, scores in runs.items() if scores}
    level = 1 - (1 - TABLE_LEVEL) / len(finished)
    configs = [
        ComparedConfig(
            name=config_name,
            runs=scores,
            middle=interquartile_mean([*scores.values()]),
            mean=mean_interval([*scores.values()], level),
            curve={
                step: bootstrap_interval([[curves[name][step]] for name in scores], CURVE_LEVEL)
                for step in sorted(set.intersection(*({*curves[name]} for name in scores)))
            },
        )
        for config_name, scores in finished.items()
    ]
    return ComparedRuns(
        score=score,
        configs=tuple(sorted(configs, key=lambda each: each.middle, reverse=True)),
        seeds={f"{config_name}-{seed}": seed for config_name in config.configs for seed in config.seeds},
        outcomes=outcomes,
        failed=failed,
        folders={name: str(_run_folder(folder, name)) for name in names},
    )


def _curve(file: Path, tag: str) -> dict[int, float]:
    """Returns the values of a tag by step, from the evaluations during a run, without the final one."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return {int(line["step"]): line[tag] for line in lines if "epoch" in line and line.get(tag) is not None}


def _conclude(folder: Path, comparison: ComparedRuns, seconds: float) -> Compared:
    report = report_of_comparison(comparison, seconds)
    page = folder / "compare.html"
    target = folder / "compare.json"
    write_whole(page, render(report).encode())
    write_whole(target, canonical(comparison.document()))
    logger.info(f"{report.decision}; see {page}")
    outcome = comparison.outcomes[comparison.chosen]
    return Compared(
        chosen=comparison.chosen,
        decision=report.decision.json(),
        model=outcome["model"],
        compared=len(comparison.outcomes),
        failed=comparison.failed,
        page=str(page),
        report=str(target),
        seconds=round(seconds, 3),
        brief=Brief.of(report),
        comparison=comparison,
    )
