"""The command line of the workflows: arguments, processes, exit codes, and the one line on standard output.

arguments ─► config, checked ─┬─► training: processes of this machine ─► one: train here
                              │                                      └► several: a worker each, same command
                              └─► other work: here
"""

import argparse
import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from reagent_lite.config import WorkflowConfig, load_config, resolved
from reagent_lite.config.section import Section
from reagent_lite.distributed.group import Group, Place, joined
from reagent_lite.distributed.launcher import LaunchError, Processes, choose_processes, launch
from reagent_lite.distributed.nodes import find_node
from reagent_lite.distributed.workers import end_with_parent, is_worker, report_failure
from reagent_lite.errors import ConfigError, Problem, ReagentLiteError
from workflows.launching import prepare_rendezvous, restarts
from workflows.planning import look, plan

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Config = TypeVar("Config", bound=WorkflowConfig)
AnyConfig = TypeVar("AnyConfig", bound=Section)

_EPILOG = """\
exit codes: {codes}
standard output ends with one JSON line, all else is on standard error; the line's keys:
  {outcome}

examples:
  python -m {module} --config {example} --dry_run
  python -m {module} --config {example} {settings}
  python -m {module} --print_schema
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What the command line of a workflow says of it.

    Attributes:
        module: what stands after `python -m`.
        model: the config's class; its docstring is the description.
        example: a config for the help text.
        settings: overrides for the help text.
        outcome: keys of the last line of standard output.
        codes: exit codes with their meaning.
    """

    module: str
    model: type[Section]
    example: str
    settings: str
    outcome: str
    codes: str = "0 done, 1 unexpected error, 2 config or data error"


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
    command = Command(
        module=module,
        model=model,
        example=example,
        settings="--set training.learning_rate=0.01 --set num_processes_per_node=2",
        outcome="model, steps, rows, rows_per_second, seconds, scores",
        codes="0 done, 1 unexpected error or diverged, 2 config or data error, 3 rendezvous failed, 4 a peer failed, "
        "75 told to end, run again to continue",
    )
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = _parser(command)
    parser.add_argument("-ni", "--node-index", "--node_index", dest="node_index", type=int, metavar="N",
                        help="number of this machine, from 0; wins over node_index in the JSON")  # fmt: skip
    parser.add_argument(
        "--force", action="store_true", help="end a live run that holds the file of init_method, and take its place"
    )
    options = parser.parse_args(arguments)
    return _guarded(command, options, lambda: _run(module, model, train, options, arguments))


def main_alone(
    command: Command,
    model: type[AnyConfig],
    work: Callable[[AnyConfig], "DataclassInstance"],
    arguments: list[str] | None = None,
) -> int:
    """Runs a workflow that takes one process and returns its exit code.

    Args:
        command: how the command line presents it.
        model: the config's class, as in `command`.
        work: the workflow; what it returns is printed as the last line of standard output.
        arguments: of the command line; None takes the process's own.
    """
    options = _parser(command).parse_args(arguments)

    def body() -> int:
        config = _config(command.module, model, options, [])
        if options.dry_run:
            print(json.dumps(resolved(config), indent=2))
            return 0
        with contextlib.redirect_stdout(sys.stderr):
            outcome = work(config)
        print(json.dumps(asdict(outcome)), flush=True)
        return 0

    return _guarded(command, options, body)


def _guarded(command: Command, options: argparse.Namespace, body: Callable[[], int]) -> int:
    """Returns the body's exit code, or that of the error it ends with, which is reported."""
    if options.print_schema:
        print(json.dumps(command.model.model_json_schema(), indent=2))
        return 0
    try:
        return body()
    except LaunchError as error:
        _note(str(error))
        return error.exit_code
    except ReagentLiteError as error:
        _fail(error)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        _fail(error)
        return 4 if is_worker() else 1


def _config(module: str, model: type[AnyConfig], options: argparse.Namespace, overrides: list[str]) -> AnyConfig:
    if options.config is None:
        raise ConfigError(Problem("--config", "the path of a JSON file", "nothing", f"See python -m {module} --help"))
    return load_config(model, options.config, (*options.set, *overrides))


def _run(
    module: str,
    model: type[Config],
    train: Callable[[Config, Group], Outcome],
    options: argparse.Namespace,
    arguments: list[str],
) -> int:
    config = _config(module, model, options, [])
    index = config.node_index if options.node_index is None else options.node_index
    node = find_node(index=index, count=config.num_nodes, environment=os.environ)
    config = config.model_copy(update={"node_index": node.index, "num_nodes": node.count})
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
    if place is None and processes.count * node.count > 1:
        _note(processes.note)
        rendezvous = prepare_rendezvous(config, node, processes, force=options.force)
        launch([sys.executable, "-m", module, *arguments], processes.count, rendezvous, restarts=restarts(config))
        return 0
    place = place or Place()
    _note(processes.note if place.rank == 0 and not is_worker() else "")
    with (
        contextlib.redirect_stdout(sys.stderr),
        joined(place, processes.device(place.local_rank), config.rendezvous.startup_timeout_seconds) as group,
    ):
        try:
            outcome = train(config, group)
        except Exception as error:  # said before the process group is taken down, which may take long without peers
            if is_worker():
                _fail(error)
            raise
    if place.rank == 0:
        print(json.dumps(asdict(outcome)), flush=True)
    return 0


def _parser(command: Command) -> argparse.ArgumentParser:
    texts = {key: value for key, value in asdict(command).items() if key != "model"}
    parser = argparse.ArgumentParser(
        prog=f"python -m {command.module}",
        description=(command.model.__doc__ or "").splitlines()[0],
        epilog=_EPILOG.format(**texts),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_config(parser)
    parser.add_argument("--dry_run", action="store_true", help="check the config, print it resolved, and stop")
    parser.add_argument("--print_schema", action="store_true", help="print the JSON Schema of the config and stop")
    return parser


def add_config(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    """Adds the flags that name a config and override its keys."""
    parser.add_argument("-p", "--parameters", "--config", dest="config", metavar="FILE", required=required,
                        help="the JSON config")  # fmt: skip
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                        help="override one key, as in the examples; may be given several times")  # fmt: skip


def add_node_index(parser: argparse.ArgumentParser) -> None:
    """Adds the flag that numbers this machine."""
    parser.add_argument("-ni", "--node-index", "--node_index", dest="node_index", type=int, metavar="N",
                        help="number of this machine, from 0; wins over node_index in the JSON")  # fmt: skip


def _describe(config: WorkflowConfig, processes: Processes) -> None:
    _note(processes.note)
    for line in plan(config, processes, look(config)):
        _note(line)
    print(json.dumps(resolved(config), indent=2))


def _title(error: ReagentLiteError) -> str:
    name = type(error).__name__.removesuffix("Error").lower()
    return f"{name} error" + (f" ({len(error.problems)})" if len(error.problems) > 1 else "") + ":"


def _fail(error: BaseException) -> None:
    message = (
        f"{_title(error)}\n{error}"
        if isinstance(error, ReagentLiteError)
        else "".join(traceback.format_exception(error))
    )
    if is_worker():
        report_failure(error, message)
    else:
        _note(message)


def _note(text: str) -> None:
    if text:
        print(text, file=sys.stderr, flush=True)
