"""The command line of the training workflows: arguments, processes, exit codes, and the one line on standard output.

arguments ─► config, checked ─► processes of this machine ─► one: train here
└► several: a worker each, same command
"""

import argparse
import contextlib
import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TypeVar

import torch

from reagent_lite.config import WorkflowConfig, load_config, resolved
from reagent_lite.distributed.group import Group, Place, joined
from reagent_lite.distributed.launcher import (
    Processes,
    choose_processes,
    end_with_parent,
    is_worker,
    launch,
    report_failure,
)
from reagent_lite.errors import ConfigError, Problem, ReagentLiteError

Config = TypeVar("Config", bound=WorkflowConfig)

_EPILOG = """\
exit codes: 0 done, 1 unexpected error or diverged, 2 config or data error, 3 rendezvous failed, 4 a peer failed
standard output ends with one JSON line: model, steps, rows, rows_per_second, seconds, scores; all else is on
standard error

examples:
  python -m {module} --config {example} --dry_run
  python -m {module} --config {example} --set training.learning_rate=0.01 --set num_processes_per_node=2
  python -m {module} --print_schema
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run leaves; printed as the last line of standard output."""

    model: str
    steps: int
    rows: int
    rows_per_second: float
    seconds: float
    scores: dict[str, float | None]


def main(
    module: str,
    model: type[Config],
    train: Callable[[Config, Group], Outcome],
    example: str,
    arguments: list[str] | None = None,
) -> int:
    """Runs a training workflow and returns its exit code.

    Args:
        module: what stands after `python -m`.
        model: the config's class.
        train: the workflow; called on every process.
        example: a config for the help text.
        arguments: of the command line; None takes the process's own.
    """
    end_with_parent()
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser(module, model, example).parse_args(arguments)
    if options.print_schema:
        print(json.dumps(model.model_json_schema(), indent=2))
        return 0
    try:
        return _run(module, model, train, options, arguments)
    except ReagentLiteError as error:
        _fail(error, f"{_title(error)}\n{error}")
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        _fail(error, traceback.format_exc())
        return 4 if is_worker() else 1


def _run(
    module: str,
    model: type[Config],
    train: Callable[[Config, Group], Outcome],
    options: argparse.Namespace,
    arguments: list[str],
) -> int:
    if options.config is None:
        raise ConfigError(Problem("--config", "the path of a JSON file", "nothing", f"See python -m {module} --help"))
    overrides = list(options.set)
    if options.node_index is not None:
        overrides.append(f"node_index={options.node_index}")
    config = load_config(model, options.config, tuple(overrides))
    processes = choose_processes(
        use_gpu=config.use_gpu,
        use_all=config.use_all_avail_gpus,
        explicit=config.num_processes_per_node,
        gpus=torch.cuda.device_count() if config.use_gpu else 0,
    )
    if options.dry_run:
        _describe(config, processes)
        return 0
    place = Place.read()
    if place is None and processes.count > 1:
        _note(processes.note)
        launch([sys.executable, "-m", module, *arguments], processes.count)
        return 0
    place = place or Place()
    _note(processes.note if place.rank == 0 and not is_worker() else "")
    with (
        contextlib.redirect_stdout(sys.stderr),
        joined(place, processes.device(place.local_rank)) as group,
    ):
        outcome = train(config, group)
    if place.rank == 0:
        print(json.dumps(asdict(outcome)), flush=True)
    return 0


def _parser(module: str, model: type[WorkflowConfig], example: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=(model.__doc__ or "").splitlines()[0],
        epilog=_EPILOG.format(module=module, example=example),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("-p", "--parameters", "--config", dest="config", metavar="FILE", help="the JSON config")
    parser.add_argument("-ni", "--node-index", "--node_index", dest="node_index", type=int, metavar="N",
                        help="number of this machine; wins over node_index in the JSON")  # fmt: skip
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                        help="override one key, such as rl.gamma=0.99; may be given several times")  # fmt: skip
    parser.add_argument("--dry_run", action="store_true", help="check the config, print it resolved, and stop")
    parser.add_argument("--print_schema", action="store_true", help="print the JSON Schema of the config and stop")
    return parser


def _describe(config: WorkflowConfig, processes: Processes) -> None:
    _note(processes.note)
    per_process = config.training.minibatch_size
    rows = config.data.global_minibatch_size or per_process * processes.count
    _note(f"{processes.count} {processes.device_type} process(es), {rows} rows a minibatch over all")
    print(json.dumps(resolved(config), indent=2))


def _title(error: ReagentLiteError) -> str:
    name = type(error).__name__.removesuffix("Error").lower()
    return f"{name} error" + (f" ({len(error.problems)})" if len(error.problems) > 1 else "") + ":"


def _fail(error: BaseException, message: str) -> None:
    if is_worker():
        report_failure(error, message)
    else:
        _note(message)


def _note(text: str) -> None:
    if text:
        print(text, file=sys.stderr, flush=True)
