"""The command line of the workflows: arguments, exit codes, and the one line on standard output.

arguments ─► config, checked ─┬─► training: tasks/train.py
                              └─► other work: here
"""

import argparse
import contextlib
import json
import resource
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from reagent_lite.config import changed_keys, expand_config, load_config
from reagent_lite.config.section import Section
from reagent_lite.console import logger, logging_to_stderr, outliving_terminal
from reagent_lite.distributed.worker import write_error
from reagent_lite.errors import ConfigError, Preempted, Problem, ReagentLiteError
from reagent_lite.training.stop import StopSignal

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

AnyConfig = TypeVar("AnyConfig", bound=Section)

_OPEN_FILES = 128  # a small run has 40 open; held-out data, candidates and peers need more

_EPILOG = """\
all keys of the config: docs/reference.md, or --print_schema

exit codes:
  {codes}

standard output ends with one JSON line, all else is on standard error; the line's keys:
  {outcome}

examples:
  python -m {module} --config {example} --dry_run
  python -m {module} --config {example} {settings}
  python -m {module} --print_schema
"""


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag that sets one key of the config and wins over the JSON.

    Attributes:
        name: name of the flag, such as `--data`; underscores may be written as dashes.
        help: description of the key.
        read: converts the flag's text to its value; bool: the flag has no text and means true.
        several: whether it may have several values, which become a list.
    """

    name: str
    help: str
    read: Callable[[str], int | str] = str
    several: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Command(Generic[AnyConfig]):
    """The command line of a workflow.

    Attributes:
        module: name after `python -m`.
        model: class of the config; its docstring is the description.
        example: path of a config, for an example in the help.
        settings: overrides of its keys, for another example.
        outcome: keys of the JSON line on standard output.
        codes: exit codes, each with its meaning.
        flags: {key of the config: its flag}.
        needs_config: whether a JSON file is required; if not, keys have their defaults without one.
        notes: further text in the help.
    """

    module: str
    model: type[AnyConfig]
    example: str
    settings: str
    outcome: str
    codes: tuple[str, ...] = (
        "0  done", "1  unexpected error", "2  config or data error", "75 stopped by a signal, run again"
    )  # fmt: skip
    flags: dict[str, Flag] = field(default_factory=dict)
    needs_config: bool = True
    notes: str = ""


def main_alone(
    command: Command[AnyConfig],
    work: Callable[[AnyConfig], "DataclassInstance"],
    arguments: list[str] | None = None,
    code_of: Callable[[Any], int] = lambda outcome: 0,
    *,
    check: Callable[[AnyConfig], object] | None = None,
) -> int:
    """Runs a workflow that is a single process, and returns its exit code.

    Args:
        command: the workflow.
        work: runs the workflow; its result is printed as one JSON line.
        arguments: arguments of the command line; None: those of this process.
        code_of: returns the exit code of a result.
        check: raises an error that the config alone does not show, such as a model that does not exist; for --dry_run.
    """
    options = options_of(parser_of(command), arguments)

    def body() -> int:
        flags = {key: getattr(options, key) for key in command.flags}
        overrides = [f"{key}={json.dumps(value)}" for key, value in flags.items() if value is not None]
        config = config_of(command, options, overrides)
        if options.dry_run:
            if check is not None:
                check(config)
            print_config(config, options)
            return 0
        with contextlib.redirect_stdout(sys.stderr), StopSignal(last=True) as stop:
            stop.standing = "no incomplete output is left; run the same command again"
            outcome = work(config)
        print(json.dumps(fields_of_outcome(outcome)), flush=True)
        return code_of(outcome)

    return run_guarded(command, options, body)


def print_config(config: Section, options: argparse.Namespace) -> None:
    """Prints the config that --dry_run asks for: the keys that are not defaults, or all."""
    tree = expand_config(config) if options.dry_run == "all" else changed_keys(config)
    print(json.dumps(tree, indent=2), flush=True)


def fields_of_outcome(outcome: "DataclassInstance") -> dict[str, Any]:
    """Returns the keys of the last line on standard output: the fields in the outcome's repr."""
    shown = {field.name for field in fields(outcome) if field.repr}
    return {name: value for name, value in asdict(outcome).items() if name in shown}


def run_guarded(command: Command[Any], options: argparse.Namespace, body: Callable[[], int]) -> int:
    """Runs the body and returns its exit code; with --print_schema, prints the schema instead."""

    def work() -> int:
        if options.print_schema:
            print(json.dumps(command.model.model_json_schema(), indent=2))
            return 0
        _require_open_files()
        return body()

    return exit_code(work)


def exit_code(body: Callable[[], int]) -> int:
    """Runs the body and returns its exit code; logs an error and returns the error's exit code."""
    with outliving_terminal(), logging_to_stderr():
        try:
            return body()
        except KeyboardInterrupt:
            return 130
        except (Exception, Preempted) as error:
            message = message_of(error)
            logger.error(message)
            write_error(message)
            return error.exit_code if isinstance(error, ReagentLiteError | Preempted) else 1


def _require_open_files() -> None:
    """Checks the limit on open files: below it, any library could fail at any time."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= limit < _OPEN_FILES:  # -1: no limit
        raise ConfigError(Problem("ulimit -n", f"at least {_OPEN_FILES} open files", str(limit), "Raise it first"))


def config_of(command: Command[AnyConfig], options: argparse.Namespace, overrides: Sequence[str] = ()) -> AnyConfig:
    """Loads the config that the command line names; `overrides` are applied after those of `--set`."""
    if options.config is None and command.needs_config:
        todo = f"See python -m {command.module} --help"
        raise ConfigError(Problem("--config", "the path of a JSON file", "nothing", todo))
    return load_config(command.model, options.config, (*options.set, *overrides))


def parser_of(command: Command[Any]) -> argparse.ArgumentParser:
    """Returns a parser for a workflow's arguments."""
    texts = {key: value for key, value in asdict(command).items() if isinstance(value, str)}
    purpose = (command.model.__doc__ or "").splitlines()[0].partition(": ")[2]
    codes = "\n  ".join(command.codes)
    parser = argparse.ArgumentParser(
        prog=f"python -m {command.module}",
        description=f"{purpose[:1].upper()}{purpose[1:]}",
        epilog=(f"{command.notes}\n\n" if command.notes else "") + _EPILOG.format(**texts, codes=codes),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_config(parser)
    for key, flag in command.flags.items():
        names = dict.fromkeys((f"--{flag.name[2:].replace('_', '-')}", flag.name))
        metavar = "N" if flag.read is int else flag.name[2:].upper()
        text = f"{flag.help}; overrides {key} in the JSON"
        if flag.read is bool:
            parser.add_argument(*names, dest=key, action="store_true", default=None, help=text)
        else:
            count = "+" if flag.several else None
            parser.add_argument(*names, dest=key, type=flag.read, metavar=metavar, help=text, nargs=count)
    parser.add_argument(
        "--dry_run",
        nargs="?",
        const="changed",
        choices=("changed", "all"),
        help="check the config, print the keys that are not defaults (all: every key), and stop",
    )
    parser.add_argument("--print_schema", action="store_true", help="print the JSON Schema of the config and stop")
    return parser


def options_of(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Returns the parsed arguments; exits with code 2 if some are unknown."""
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        hint = next((f". Did you mean --config {argument}?" for argument in unknown if argument.endswith(".json")), "")
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    return options


def add_config(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    """Adds the flags that name a config and override its keys."""
    parser.add_argument(
        "-p", "--parameters", "--config", dest="config", metavar="FILE", required=required, help="the JSON config"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key; VALUE is JSON or text; may be repeated",
    )


def add_node_index(parser: argparse.ArgumentParser) -> None:
    """Adds the flag that numbers this machine."""
    parser.add_argument(
        "-ni",
        "--node-index",
        "--node_index",
        dest="node_index",
        type=int,
        metavar="N",
        help="number of this machine, from 0; overrides node_index in the JSON",
    )


def message_of(error: BaseException) -> str:
    """Returns the message of an error: all problems of a ReagentLiteError, or the traceback of another error."""
    if isinstance(error, Preempted):
        return f"{error.title}:\n{error}"
    if isinstance(error, ReagentLiteError):
        number = f" ({len(error.problems)})" if len(error.problems) > 1 else ""
        return f"{error.title}{number}:\n{error}"
    return "".join(traceback.format_exception(error))
