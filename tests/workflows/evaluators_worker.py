"""What test_evaluation_machines.py runs in every process; arguments: folders in the working folder.

Evaluates an untrained policy on each folder's rows; rank 0 leaves the evaluation and the page there.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from reagent_lite.config import DqnConfig, ParametricDqnConfig, load_config
from reagent_lite.console import log_as, logging_to_stderr
from reagent_lite.distributed.group import Group, Place, joined
from reagent_lite.evaluation.document import Evaluation
from reagent_lite.evaluation.page import gather_page
from reagent_lite.run.evaluators import LogEvaluator
from reagent_lite.run.learner import build_learner
from reagent_lite.run.logged import prepare
from reagent_lite.run.publish import gate_of
from reagent_lite.run.samples import present_shares, sources_of

CPU = torch.device("cpu")


def evaluate(name: str, group: Group) -> None:
    tree = json.loads(Path(name, "config.json").read_text())
    config = load_config(DqnConfig if "actions" in tree else ParametricDqnConfig, f"{name}/config.json")
    data = prepare(config, group)
    torch.manual_seed(0)  # the weights that a policy begins with are the same in every process
    evaluator = LogEvaluator(config, data, build_learner(config, data.spec, CPU), group)
    evaluation = evaluator.evaluate(final=True)
    part, _ = evaluator._scored_part(evaluator._prepared(), final=False)
    page = gather_page(part, torch.from_numpy(evaluator._divided.scored.sequence[evaluator._divided.order]), group)
    facts = {"present": present_shares(data), "found": str(sources_of(config, data)[0].rows)}
    print(json.dumps({"name": name, "rows": len(part), **facts}))
    if page is None:
        assert evaluation == Evaluation(scalars={}, document={})
        return
    gate = gate_of(config, evaluation)
    Path(name, "gate.txt").write_text("" if gate is None or gate.passed else gate.reason)
    Path(name, "evaluation.json").write_text(json.dumps(evaluation.document["cpe"]))
    columns = {column: getattr(page, column) for column in page.__slots__ if column != "names"}
    save_file({column: value.contiguous() for column, value in columns.items()}, Path(name, "page.safetensors"))


def main(*names: str) -> None:
    place = Place.read()
    assert place is not None
    log_as(place.rank)
    with logging_to_stderr(), joined(place, CPU, timeout_seconds=120) as group:
        for name in names:
            evaluate(name, group)


if __name__ == "__main__":
    main(*sys.argv[1:])
