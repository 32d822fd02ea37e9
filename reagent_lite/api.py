"""The Python API: the commands as functions that run in this interpreter and take data frames as well as paths.

config: dict, path, object ─► checked as by the commands ─┐
data: path, or frame ─► a file named by its content ──────┴─► the command's function ─► its result

A run logs to the logger "reagent_lite"; `logging.basicConfig(level="INFO")` shows the messages.
"""

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from reagent_lite.config import DqnConfig, ParametricDqnConfig, WorkflowConfig, check, has_named_actions
from reagent_lite.config.compare_config import CompareConfig, choosing_run, default_score
from reagent_lite.config.evaluate_config import EvaluateConfig
from reagent_lite.config.inspect_config import InspectConfig
from reagent_lite.config.items import ITEM_ID
from reagent_lite.config.loader import Source, read_tree
from reagent_lite.config.rollout_config import RolloutConfig
from reagent_lite.config.score_config import ScoreConfig
from reagent_lite.config.section import Section
from reagent_lite.config.simulate_config import SimulateConfig
from reagent_lite.console import logger
from reagent_lite.data.formats.frames import PathOrFrame, PathsOrFrames, path_of, paths_of
from reagent_lite.distributed.group import ProcessRanks, join_group
from reagent_lite.distributed.launcher import Processes, choose_processes
from reagent_lite.errors import ConfigError, Problem, needing
from reagent_lite.run import runner as training
from reagent_lite.run.evaluators import CHOOSING
from reagent_lite.run.output_folder import TrainResult
from reagent_lite.tasks import compare as comparing
from reagent_lite.tasks import evaluate as evaluation
from reagent_lite.tasks import rollout as comparison
from reagent_lite.tasks import simulate as simulation

if TYPE_CHECKING:
    from optuna import Trial

    from reagent_lite.config.column_names import Columns
    from reagent_lite.data.formats.frames import Table
    from reagent_lite.data.inspection.inspected import Inspected

AnyConfig = TypeVar("AnyConfig", bound=Section)
_CPU = torch.device("cpu")
_TORCH = threading.RLock()  # torch's random state and tracing are those of the process, not of a thread
Folder = str | os.PathLike[str]


def train(
    config: Source,
    data: PathsOrFrames | None = None,
    eval_data: PathsOrFrames | None = None,
    *,
    items: PathOrFrame | None = None,
    callback: training.Callback | None = None,
) -> TrainResult:
    """Trains, evaluates and exports a policy, or continues a run, like `workflows.dqn` and `workflows.parametric_dqn`.

    Training takes place in this process. Signal handlers, logging, and torch's number of threads and random state are
    restored afterwards. Calls from several threads run one after the other, as torch's random state is common to them.

    Args:
        config: a DqnConfig or ParametricDqnConfig, a dict of the same keys, or the path of a JSON file. A dict or file
            that has data but no `actions` is a ParametricDqnConfig.
        data: log to learn from: a path, a frame of pandas, polars or Arrow, or a list of several logs. It replaces
            training_data_path, with a warning if they differ.
        eval_data: held-out log in place of eval_data_path.
        items: table of the items that the logs name by id, in place of data.items.
        callback: called during the run.

    Returns:
        the result of the run: folder of the model, decision, scores, and `metrics` and `estimates` as frames.

    Raises:
        ReagentLiteError: the error of the command, with the same message.
        Preempted: Ctrl-C or another signal ended the run; the same call continues from the last checkpoint.
    """
    if not isinstance(callback, training.Callback | None):
        expected = "an object of a class derived from reagent_lite.Callback"
        raise ConfigError(Problem("callback", expected, f"a {type(callback).__name__}"))
    given = {"training_data_path": (data, "data"), "eval_data_path": (eval_data, "eval_data")}
    tree: dict[str, Any] = {key: paths_of(log, name) for key, (log, name) in given.items() if log is not None}
    if items is not None:
        tree["data"] = {**_section(config, "data"), "items": path_of(items, "items")}
    model = type(config) if isinstance(config, WorkflowConfig) else _workflow_of({**read_tree(config)[0], **tree})
    checked = _check(model, config, tree)
    processes = choose_processes(checked)
    _require_one_process(checked, processes)
    device = processes.device(0)
    timeout = checked.rendezvous.startup_timeout_seconds
    with _torch_restored(device), join_group(ProcessRanks(), device, timeout, gpus=processes.gpus) as group:
        return training.train(checked, group, callback or training.Callback())


def evaluate(
    model: Folder | Sequence[Folder],
    data: PathsOrFrames | None = None,
    *,
    against: Folder | None = None,
    env: str | None = None,
    items: PathOrFrame | None = None,
    config: Source | None = None,
) -> evaluation.Evaluated:
    """Evaluates a policy on a log, in simulation, or both, like `workflows.evaluate`.

    The result has frames of pandas: `estimates` of its value, `segments` that gain or lose, `segment_choices`, the
    policy as a small `policy_tree`, and the `importance` of features.

    Args:
        model: folder of an exported model; "uniform", "logged", or "column:NAME" with a column of the log. Or a list of
            several, of which the best is decided about.
        data: log to evaluate on: a path, a frame of pandas, polars or Arrow, or a list of several logs.
        against: a second model or policy; the difference between the two is estimated as well.
        env: environment to play in.
        items: table of the items that the log names by id; absent: the model's own.
        config: further keys; an argument replaces its key, with a warning if they differ.

    Returns:
        the decision and all figures, with the frames named above.

    Raises:
        ReagentLiteError: the error of the command, with the same message.
    """
    tree = {
        "model": [_folder("model", each) for each in model]
        if isinstance(model, list | tuple)
        else _folder("model", model),
        "against": None if against is None else _folder("against", against),
        "data_path": None if data is None else paths_of(data),
        "simulation": None if env is None else {**_section(config or {}, "simulation"), "env": env},
        "items": _table(items),
    }
    with _torch_restored():
        return evaluation.evaluate(_check(EvaluateConfig, config or {}, tree))


def inspect(
    data: PathOrFrame,
    *,
    rows: int = 100_000,
    columns: "Columns | None" = None,
    items: PathOrFrame | None = None,
    item_id: str = ITEM_ID,
) -> "Inspected":
    """Describes the columns of a log and returns a training config for it, like `workflows.inspect`.

    Args:
        data: a path, or a frame of pandas, polars or Arrow.
        rows: number of rows to read.
        columns: the log's own names for standard columns, as far as they are known.
        items: table of the items that actions name by id.
        item_id: the column of that table that has the ids.

    Returns:
        the description of each column, what is left to decide, and `config`, which is None if none could be written.

    Raises:
        ReagentLiteError: the log or the item table cannot be read.
    """
    with needing("data", "reagent_lite.inspect"):
        from reagent_lite.data.inspection.proposal import inspect_log
    tree: dict[str, Any] = {"data_path": path_of(data), "rows": rows, "columns": columns or {}}
    tree |= {"items": _table(items), "item_id": item_id}
    return inspect_log(check(InspectConfig, tree))


def simulate(config: Source) -> simulation.SimulatedLog:
    """Plays a policy in an environment and writes its log, like `workflows.simulate`.

    Args:
        config: a SimulateConfig, a dict of the same keys, or the path of a JSON file.

    Returns:
        path and size of the log, and its mean return.

    Raises:
        ReagentLiteError: the error of the command, with the same message.
    """
    with _torch_restored():
        return simulation.simulate(_check(SimulateConfig, config, {}))


def score(
    model: Folder, data: PathOrFrame, *, items: PathOrFrame | None = None, config: Source | None = None
) -> "Table":
    """Returns an Arrow table with an exported model's action and score for each row.

    The table has the columns of `workflows.score`; `to_pandas()` converts it to a frame.

    Args:
        model: folder of an exported model.
        data: rows to decide: a path, or a frame of pandas, polars or Arrow.
        items: table of items in place of the model's own, such as a newer one.
        config: further keys of a ScoreConfig; an argument replaces its key, with a warning if they differ.

    Returns:
        the table, with a row for each row of the data and in its order.

    Raises:
        ReagentLiteError: the error of the command, with the same message.
    """
    with needing("data", "reagent_lite.score"):
        from reagent_lite.tasks.scoring import scored_table
    tree = {"model": _folder("model", model), "data_path": path_of(data), "items": _table(items)}
    return scored_table(_check(ScoreConfig, config or {}, tree))


def rollout(log: PathsOrFrames, *, config: Source | None = None) -> comparison.ComparedPolicies:
    """Compares two policies that shared a server by its log, like `workflows.rollout`.

    Args:
        log: the log: a path, a frame of pandas, polars or Arrow, or a list of several logs.
        config: further keys of a RolloutConfig; absent: those that the server recorded in the log, or the defaults.

    Returns:
        the comparison, with a sentence, and `history` as a frame.

    Raises:
        ReagentLiteError: the error of the command, with the same message.
    """
    return comparison.compare(_check(RolloutConfig, config or {}, {"log": paths_of(log)}))


def compare(config: Source, data: PathsOrFrames | None = None) -> comparing.Compared:
    """Trains configs with several seeds each in processes of this machine, and chooses one, like `workflows.compare`.

    Args:
        config: a CompareConfig, a dict of the same keys, or the path of a JSON file.
        data: log to learn from, in place of training_data_path of `base`: a path, a frame of pandas, polars or Arrow,
            or a list of several logs.

    Returns:
        The comparison, with frames of pandas: `table` of the configs, `runs`, and `curves`.

    Raises:
        ReagentLiteError: the error of the command, with the same message.
        Preempted: Ctrl-C or another signal ended the runs; the same call continues.
    """
    tree, problems = read_tree(config)
    if data is not None:
        tree["base"] = {**read_tree(tree.get("base", {}))[0], "training_data_path": paths_of(data)}
    return comparing.compare_runs(check(CompareConfig, tree, problems))


def optuna_objective(
    config: Source,
    suggest: Callable[["Trial"], Mapping[str, Any]],
    data: PathsOrFrames | None = None,
    *,
    score: str | None = None,
) -> Callable[["Trial"], float]:
    """Makes the objective of an Optuna study that maximizes the score of a run.

    Trials are compared by episodes that do not decide. The decision of a trial's own report rests on others, of which
    no trial's score has any; it is in the user attributes of the trial: `decision`, `model`, and `folder`. Report the
    decision of `study.best_trial` only. Trials report each evaluation, so that a pruner can end them.

    Args:
        config: a training config; a trial's folder is that of its number in model_output_path.
        suggest: returns changes of the config for a trial, such as {"training.learning_rate": 0.01}.
        data: log to learn from, in place of training_data_path.
        score: tag of the score; absent: as in `workflows.compare`.

    Returns:
        A function that trains the run of a trial and returns its score.
    """
    import optuna

    def objective(trial: "Trial") -> float:
        tree = choosing_run(config, suggest(trial))
        tree["model_output_path"] = os.path.join(tree.get("model_output_path", ""), str(trial.number))
        tag = score or default_score(check(_workflow_of(tree), tree))

        class Report(training.Callback):
            def on_epoch(self, figures: Mapping[str, float]) -> None:
                if tag in figures:
                    trial.report(figures[tag], int(figures["step"]))
                    if trial.should_prune():
                        raise optuna.TrialPruned

        outcome = train(tree, data, callback=Report())
        for name in ("decision", "model", "folder"):
            trial.set_user_attr(name, getattr(outcome, name))
        value = outcome.scores.get(f"{CHOOSING}{tag}")
        if value is None:
            available = [each.removeprefix(CHOOSING) for each in outcome.scores if each.startswith(CHOOSING)]
            raise ConfigError(Problem("score", f"a score of the run: {', '.join(available) or 'none'}", tag))
        return value

    return objective


def _section(config: Source, key: str) -> dict[str, Any]:
    """Returns a section of a config; {} if there is none."""
    section = read_tree(config)[0].get(key)
    return section if isinstance(section, dict) else {}


def _workflow_of(tree: Mapping[str, Any]) -> type[WorkflowConfig]:
    return DqnConfig if has_named_actions(tree) else ParametricDqnConfig


def _folder(key: str, model: object) -> str:
    if isinstance(model, str | os.PathLike):
        return os.fspath(model)
    todo = "Use the attribute `model` of a run; it is None if no model was exported"
    raise ConfigError(Problem(key, "the folder of an exported model", f"a {type(model).__name__}", todo))


def _table(items: PathOrFrame | None) -> str | None:
    return None if items is None else path_of(items, "items")


def _check(model: type[AnyConfig], config: Source, given: dict[str, Any]) -> AnyConfig:
    tree, problems = read_tree(config)
    arguments, _ = read_tree({key: value for key, value in given.items() if value is not None})
    for key in (arguments.keys() & tree.keys()) - {"simulation", "data"}:
        if tree[key] not in (arguments[key], None, ""):
            logger.warning(f"{key}: the config has {tree[key]!r}; the argument of the call is used")
    return check(model, {**tree, **arguments}, problems)


def _require_one_process(config: WorkflowConfig, processes: Processes) -> None:
    """Checks that the config is for a single process.

    Raises:
        ConfigError: the config needs the command line.
    """
    workflow = "dqn" if isinstance(config, DqnConfig) else "parametric_dqn"
    todo = f"train is one process in this interpreter; run python -m workflows.{workflow} --config x.json"
    if config.num_nodes > 1:
        raise ConfigError(config.wrong("num_nodes", "1", todo))
    if processes.count > 1:
        raise ConfigError(
            Problem("num_processes_per_node, use_all_avail_gpus", "one process", f"{processes.count}", todo)
        )
    if config.collects:
        raise ConfigError(config.wrong("simulation.mode", "both or learn", todo))


@contextmanager
def _torch_restored(device: torch.device = _CPU) -> Iterator[None]:
    """Runs the block in one thread at a time, and restores torch's number of threads and random state after it."""
    with _TORCH, torch.random.fork_rng([device] if device.type == "cuda" else ()):
        threads = torch.get_num_threads()
        try:
            yield
        finally:
            torch.set_num_threads(threads)
