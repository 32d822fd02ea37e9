"""Checks before a run: this machine alone, then all machines together.

config ─► this machine alone ─► all machines together ─► rows of a table
"""

import argparse
import os
from collections.abc import Iterator
from functools import partial

from reagent_lite.config import WorkflowConfig, load_config
from reagent_lite.config.tracking import TrackingConfig
from reagent_lite.distributed.launcher import Processes, choose_processes
from reagent_lite.distributed.nodes import Node, find_node
from reagent_lite.doctor import machine
from reagent_lite.doctor.checks import CheckResult, of_error, ok, run_check, skip
from reagent_lite.doctor.machines import meet
from reagent_lite.doctor.share import check_share
from reagent_lite.errors import ConfigError, ReagentLiteError
from reagent_lite.run.dry_run import dry_run
from reagent_lite.tasks.train import WORKFLOWS, choose_workflow


def examine(options: argparse.Namespace) -> tuple[list[CheckResult], list[CheckResult], Node | None]:
    """Returns rows on this machine, rows on all machines together, and the number of this machine."""
    rows = [*run_check("versions", machine.check_versions)]
    name = options.workflow or choose_workflow(options.config, options.set)
    workflow = f"workflows.{name}"
    try:
        config: WorkflowConfig = load_config(WORKFLOWS[name], options.config, tuple(options.set))
        rows.append(ok("config", f"{options.config} is valid for {workflow}"))
    except ConfigError as error:
        rows += [of_error(f"config of {workflow}", error), skip("all else", "there is no valid config")]
        return rows, [], None
    try:
        config, node, source = _of_this_machine(config, options.node_index)
        processes = choose_processes(config)
    except ReagentLiteError as error:
        rows += [of_error("machines", error), skip("all else", "the number of this machine must be known")]
        return rows, [], None
    rows += [ok("machines", source), *_alone(config, node, processes)]
    if node.count == 1 or options.alone:
        why = "there is one machine" if node.count == 1 else "--alone"
        return rows, [skip("machines meet", why)], node
    failed = tuple(row.name for row in rows if row.state == "FAILED")
    return rows, [*run_check("machines meet", lambda: meet(config, node, processes, failed, options.wait))], node


def _of_this_machine(config: WorkflowConfig, flag: int | None) -> tuple[WorkflowConfig, Node, str]:
    """Returns the config for this machine, the machine's number, and where number and count come from, in words."""
    index = config.node_index if flag is None else flag
    node = find_node(index=index, count=config.num_nodes, environment=os.environ)
    given_by = "the JSON" if index is not None else "the scheduler's variable"
    index_source = given_by if flag is None else "--node_index"
    count_source = "the JSON" if config.num_nodes == node.count else "the scheduler's variable"
    source = f"node {node.index} by {index_source}, of {node.count} by {count_source}"
    config = config.on_node(node.index, node.count)
    return config, node, source if node.count > 1 else "one machine"


def _alone(config: WorkflowConfig, node: Node, processes: Processes) -> Iterator[CheckResult]:
    yield from run_check("processes", lambda: machine.devices(processes))
    yield from run_check("network", lambda: machine.network(config, node))
    yield from run_check("share", lambda: check_share(config, node))
    for key, path in (("training data", config.training_data_path), ("eval data", config.eval_data_path)):
        if path:
            yield from run_check(key, partial(machine.data, config, node, key, path))
    if config.training_data_path:
        yield from run_check("training copy", lambda: machine.copy_folder(config, config.training_data_path))
    yield from run_check("environment", lambda: machine.simulation(config, processes))
    if node.index == 0 and config.tracking != TrackingConfig():
        yield from run_check("tracking", lambda: machine.tracking(config))
    try:
        run = dry_run(config, processes)
    except ReagentLiteError:
        return  # the row of the environment has the error
    if config.collects or config.follows:
        yield from run_check("simulation.dataset", lambda: machine.dataset_folder(config))
    if not config.collects:
        yield from run_check("model_output_path", lambda: machine.check_model_folder(config, node, run.spec))
    yield from run_check("memory", lambda: machine.memory(run))
