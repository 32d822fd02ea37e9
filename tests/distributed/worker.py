"""What the launcher's tests run in each process."""

import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
from oracles.batches import make_batch
from safetensors.torch import save_file

from reagent_lite.algorithms.dqn import DQN, DQNSettings
from reagent_lite.data.sampling.plan import ReadPlan
from reagent_lite.distributed.group import Group, Place, joined
from reagent_lite.distributed.workers import end_with_parent, report_failure
from reagent_lite.errors import DataError, Problem, ReagentLiteError
from reagent_lite.models.q_networks import NetworkSettings, build_q_network
from reagent_lite.models.value_heads import ScalarHead
from reagent_lite.training.loop import Hooks, Optimization, Report, Running, fit
from reagent_lite.types import SourceSpec, TransitionBatch

SHARES = {"one": (1,), "even": (1, 1), "uneven": (3, 1)}


class Source:
    """Rows of a table by a plan, as data.source does it from files."""

    def __init__(self, plan: ReadPlan, rank: int) -> None:
        rng = torch.Generator().manual_seed(0)
        self.state, self.after = torch.randn(203, 3, generator=rng), torch.randn(203, 3, generator=rng)
        self.reward = torch.randn(203, generator=rng)
        self.plan, self.rank, self.step = plan, rank, 0

    def learned(self, row_errors: torch.Tensor) -> None:
        """Rows are read in the plan's order."""

    def __next__(self) -> TransitionBatch:
        plan = self.plan
        (((_, start, stop),),) = plan.parts(self.step, self.rank)
        rows = torch.from_numpy(plan.permutation(self.step // plan.steps_per_epoch)[start:stop].astype(np.int64))
        share = len(plan.shares) / plan.rows_of_step(self.step)
        self.step += 1
        return make_batch(self.state[rows], self.after[rows], rows % 2, self.reward[rows],
                          weight=torch.full((len(rows),), share))  # fmt: skip


def learn(task: str, group: Group, out: Path) -> None:
    plan = ReadPlan(shards=(203,), minibatch=16, epochs=8, shares=SHARES[task])
    torch.manual_seed(group.rank)  # initial weights differ: the first rank's count
    if group.world_size == 1:
        torch.manual_seed(0)
    network = build_q_network(
        SourceSpec(num_state_features=3, action_names=("a", "b")), NetworkSettings(hidden=(16,), activations=("relu",))
    )
    learner = DQN(network, ScalarHead(), DQNSettings(gamma=0.9, target_update_rate=0.1))
    optimization = Optimization(optimizer=torch.optim.Adam(learner.q_network.parameters(), lr=1e-3))
    reports: list[Report] = []

    class Reports(Hooks):
        def report(self, report: Report) -> None:
            reports.append(report)

    source = Source(plan, group.rank)
    running = Running(learner=learner, optimization=optimization, source=source, evaluators=source)
    fit(running, plan, group, Reports())
    assert running.position.step == 104
    assert [report.step for report in reports] == [13 * epoch for epoch in range(1, 9)]
    out.mkdir(parents=True, exist_ok=True)
    save_file(learner.state_dict(), out / f"rank{group.rank}.safetensors")


def talked(kind: type) -> list[object]:
    """Returns what three ranks give: [2, rank, 3 - rank] of their number, or whether that is 1."""
    return [[[[kind(rank == 1 if kind is bool else rank)] * (3 - rank)] * rank] * 2 for rank in range(3)]


def main(task: str, out: Path) -> None:
    end_with_parent()
    place = Place.read()
    assert place is not None
    if task == "wait":
        (out / f"pid_{place.rank}.tmp").write_text(str(os.getpid()))
        (out / f"pid_{place.rank}.tmp").rename(out / f"pid_{place.rank}")
        time.sleep(100)
    with joined(place, torch.device("cpu"), timeout_seconds=60) as group:
        if task in SHARES:
            learn(task, group, out)
        elif task == "talk":
            total = int(group.sum(torch.tensor([place.rank + 1])))
            text = group.broadcast_text("héllo" if group.is_first else None)
            last = group.broadcast_bytes(bytes([place.rank]), place.world_size - 1)[0]
            (out / str(place.rank)).write_text(f"{total} {text} {last}")
            own = torch.full((place.rank, 2, 3 - place.rank), place.rank).transpose(0, 1)  # none, and not contiguous
            gathered = [[one.tolist() for one in group.gather(column)] for column in (own, own == 1, own.double())]
            assert gathered == ([talked(kind) for kind in (int, bool, float)] if group.is_first else [[], [], []])
            print("rank 0") if place.rank == 0 else print("not on standard output")
        elif place.rank == 1 and task == "raise":
            raise DataError(Problem("file.json:3", "a number", "text"))
        elif place.rank == 1 and task == "kill":
            os.kill(os.getpid(), 9)
        group.barrier()


if __name__ == "__main__":
    try:
        main(sys.argv[1], Path(sys.argv[2]))
    except ReagentLiteError as error:
        report_failure(error, str(error))
        sys.exit(error.exit_code)
    except Exception as error:
        report_failure(error, repr(error))
        sys.exit(4)
