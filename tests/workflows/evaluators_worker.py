"""What test_evaluation_machines.py runs in every process; arguments: the task, then folders in the working folder.

evaluate NAME…   evaluates an untrained policy on each folder's rows; rank 0 leaves the evaluation and the page there
broken NAME      the same, and the fault that REAGENT_LITE_FAULT asks for strikes at the first row that is scored
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from reagent_lite.config import DqnConfig, ParametricDqnConfig, load_config
from reagent_lite.console import log_as, logging_to_stderr
from reagent_lite.distributed.faults import fault_here
from reagent_lite.distributed.group import Group, Place, joined
from reagent_lite.distributed.worker import end_with_parent, report_failure
from reagent_lite.evaluation.page import gather_page
from reagent_lite.run.evaluators import Evaluation, LogEvaluator
from reagent_lite.run.figures import present_shares, sources_of
from reagent_lite.run.learner import build_learner
from reagent_lite.run.logged import prepare
from reagent_lite.run.publish import gate_of

CPU = torch.device("cpu")


def evaluator_of(name: str, group: Group) -> LogEvaluator:
    """Returns the evaluator of a policy whose weights are those it begins with, the same in every process."""
    tree = json.loads(Path(name, "config.json").read_text())
    config = load_config(DqnConfig if "actions" in tree else ParametricDqnConfig, f"{name}/config.json")
    data = prepare(config, group)
    torch.manual_seed(0)
    return LogEvaluator(config, data, build_learner(config, data.spec, CPU), group)


def evaluate(name: str, group: Group) -> None:
    evaluator = evaluator_of(name, group)
    evaluation = evaluator.evaluate(final=True)
    part, _ = evaluator._scored_part(evaluator._prepared(), final=False)
    page = gather_page(part, torch.from_numpy(evaluator._split.scored.sequence[evaluator._order]), group)
    data, config = evaluator._data, evaluator._config
    facts = {"present": present_shares(data), "found": str(sources_of(config, data)[0].rows)}
    print(json.dumps({"name": name, "rows": len(part), **facts}))
    if page is None:
        assert (evaluation.document, evaluation.scalars, evaluation.lines) == ({}, {}, ())
        return
    gate = gate_of(config, Evaluation(scalars={}, document=evaluation.document, lines=()),
                   data.scored.counts.get("propensity_absent_rows", 0))  # fmt: skip
    Path(name, "gate.txt").write_text("" if gate is None or gate.passed else gate.reason)
    Path(name, "evaluation.json").write_text(json.dumps(evaluation.document["cpe"]))
    columns = {column: getattr(page, column) for column in page.__slots__ if column != "names"}
    save_file({column: value.contiguous() for column, value in columns.items()}, Path(name, "page.safetensors"))


def broken(name: str, group: Group, place: Place) -> None:
    evaluator, fault = evaluator_of(name, group), fault_here(place)
    models = evaluator._prepared()

    def strike(*_: Any) -> None:
        if fault is not None and not torch.is_grad_enabled():  # rows are scored without gradients, fitted to with
            fault.before_step(0)

    models.heads.reward_network.register_forward_pre_hook(strike)
    evaluator.evaluate(final=True)
    group.barrier()


def main(task: str, *names: str) -> None:
    end_with_parent()
    place = Place.read()
    assert place is not None
    log_as(place.rank)
    with logging_to_stderr(), joined(place, CPU, timeout_seconds=120) as group:
        for name in names:
            if task == "evaluate":
                evaluate(name, group)
                continue
            try:
                broken(name, group, place)
            except Exception as error:
                report_failure(error, f"{type(error).__name__}: {error}")
                raise


if __name__ == "__main__":
    main(*sys.argv[1:])
