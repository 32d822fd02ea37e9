"""The doctor: looks at what a run needs, on each machine and between them, and says what to do.

config ─► this machine alone ─► all machines together ─► table on standard error, JSON line on standard output
"""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from reagent_lite.cli import add_config, add_node_index
from reagent_lite.config import DqnConfig, ParametricDqnConfig, WorkflowConfig, load_config
from reagent_lite.distributed.launcher import Processes
from reagent_lite.distributed.nodes import Node, find_node
from reagent_lite.doctor import machine as machine
from reagent_lite.doctor.checks import Row, checked, of_error, ok, show, skipped, summary
from reagent_lite.doctor.machines import Here, meet
from reagent_lite.doctor.share import share
from reagent_lite.errors import ConfigError, ReagentLiteError
from reagent_lite.run.dry_run import dry_run

_EPILOG = """\
run it on every machine at once, with the arguments that the run will have. Machines meet through a file beside that of
init_method, so that a run that uses it is not disturbed; a tcp:// port is used as it is.

exit codes: 0 nothing failed, 2 something failed here, 3 the machines do not meet, reach each other or fit together
standard output ends with one JSON line: ok, counts, node, rows (name, state, found, todo)

examples:
  python -m workflows.doctor --config x.json --node_index 0
  python -m workflows.doctor --config x.json --alone
"""


_WORKFLOWS: dict[str, type[WorkflowConfig]] = {"dqn": DqnConfig, "parametric_dqn": ParametricDqnConfig}


@dataclass(frozen=True, slots=True, kw_only=True)
class Patient:
    """What the first checks establish for the others.

    Attributes:
        config: checked.
        node: this machine among all.
        source: who said so.
    """

    config: WorkflowConfig
    node: Node
    source: str


def main(arguments: list[str] | None = None) -> int:
    """Examines and reports; returns the exit code."""
    options = _parser().parse_args(arguments)
    with contextlib.redirect_stdout(sys.stderr):
        rows, together, node = examine(options)
        title = f"doctor: node {node.index} of {node.count}" if node is not None else "doctor"
        show(title, [*rows, *together])
    print(summary([*rows, *together], node=None if node is None else node.index), flush=True)
    if any(row.state == "FAILED" for row in together):
        return 3
    return 2 if any(row.state == "FAILED" for row in rows) else 0


def examine(options: argparse.Namespace) -> tuple[list[Row], list[Row], Node | None]:
    """Returns rows on this machine, rows on all machines together, and who this machine is."""
    rows = [*checked("versions", machine.versions)]
    name = options.workflow or choose_workflow(options.config, options.set)
    model, workflow = _WORKFLOWS[name], f"workflows.{name}"
    try:
        config: WorkflowConfig = load_config(model, options.config, tuple(options.set))
        rows.append(ok("config", f"{options.config} is valid for {workflow}"))
    except ConfigError as error:
        return (
            [*rows, of_error(f"config of {workflow}", error), skipped("all else", "there is no valid config")],
            [],
            None,
        )
    try:
        patient = _patient(config, options.node_index)
        processes = machine.processes_here(config)
    except ReagentLiteError as error:
        return [*rows, of_error("machines", error), skipped("all else", "who this machine is must be known")], [], None
    rows += _local(patient, processes)
    node = patient.node
    if node.count == 1 or options.alone:
        why = "there is one machine" if node.count == 1 else "--alone"
        return rows, [skipped("machines meet", why)], node
    here = Here(
        config=patient.config, node=node, processes=processes,
        failed=tuple(row.name for row in rows if row.state == "FAILED"),
    )  # fmt: skip
    return rows, [*checked("machines meet", lambda: meet(here, options.wait))], node


def choose_workflow(path: str, overrides: list[str]) -> str:
    """Returns whose config a file is: one that names actions, or has no data, is workflows.dqn's.

    An environment without data fits both workflows, unless its candidates differ from step to step.
    """
    try:
        tree = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
        keys = {override.partition("=")[0] for override in overrides} | set(tree)
        keys |= {f"timeline.{key}" for key in tree.get("timeline") or {}}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return "dqn"  # load_config says what is wrong with the file
    has_data = keys & {"training_data_path", "timeline.inputTableName"}
    return "dqn" if "actions" in keys or not has_data else "parametric_dqn"


def _patient(config: WorkflowConfig, flag: int | None) -> Patient:
    index = config.node_index if flag is None else flag
    node = find_node(index=index, count=config.num_nodes, environment=os.environ)
    by = "--node_index" if flag is not None else "the JSON" if index is not None else "the scheduler's variable"
    of = "the JSON" if config.num_nodes == node.count else "the scheduler's variable"
    source = "one machine" if node.count == 1 else f"node {node.index} by {by}, of {node.count} by {of}"
    return Patient(
        config=config.model_copy(update={"node_index": node.index, "num_nodes": node.count}), node=node, source=source
    )


def _local(patient: Patient, processes: Processes) -> Iterator[Row]:
    config, node = patient.config, patient.node
    yield ok("machines", patient.source)
    yield from checked("processes", lambda: machine.devices(processes))
    yield from checked("network", lambda: machine.network(config, node))
    yield from checked("share", lambda: share(config, node))
    for key, path in (("training data", config.training_data_path), ("eval data", config.eval_data_path)):
        if path:
            yield from checked(key, partial(machine.data, config, node, key, path))
    if config.training_data_path:
        yield from checked("training copy", lambda: machine.copy_folder(config, config.training_data_path))
    yield from checked("environment", lambda: machine.simulation(config, processes))
    try:
        run = dry_run(config, processes)
    except ReagentLiteError:
        return  # the row of the environment says it
    yield from checked("model_output_path", lambda: machine.model_folder(config, node, run.inputs.spec))
    yield from checked("memory", lambda: machine.memory(run))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m workflows.doctor",
        description="Look at what a training run needs, on this machine and between machines, and say what to do.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_config(parser, required=True)
    add_node_index(parser)
    parser.add_argument(
        "--workflow", choices=list(_WORKFLOWS), help="whose config it is; absent: found from the config"
    )
    parser.add_argument("--wait", type=float, default=60.0, metavar="SECONDS",
                        help="for the other machines to come, and for a file of theirs to show")  # fmt: skip
    parser.add_argument("--alone", action="store_true", help="look at this machine only")
    return parser
