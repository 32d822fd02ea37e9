"""One rank of a run that is compared with itself, stopped after every step: resume_worker.py CASES FOLDER.

CASES is a JSON file {name: {"model": ..., "tree": ..., "steps": ...}}; the differences go to FOLDER/differences.json.
"""

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from oracles.resuming import Laboratory

from reagent_lite.config import DqnConfig, ParametricDqnConfig
from reagent_lite.distributed.group import Group, Place, joined

MODELS = {"dqn": DqnConfig, "parametric_dqn": ParametricDqnConfig}


def differences(cases: Path, folder: Path, group: Group) -> dict[str, list[str]]:
    """Returns the differences of each case; empty lists on ranks other than 0."""
    found = {}
    for name, case in json.loads(cases.read_text()).items():
        laboratory = Laboratory(MODELS[case["model"]], case["tree"], group, folder / name)
        found[name] = laboratory.differences(case["steps"])
    return found


def main(cases: Path, folder: Path) -> None:
    """Joins the group that the environment describes."""
    torch.set_num_threads(1)
    with joined(Place.read() or Place(), torch.device("cpu"), timeout_seconds=120) as group:
        found = differences(cases, folder, group)
        if group.is_first:
            (folder / "differences.json").write_text(json.dumps(found))
        group.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
