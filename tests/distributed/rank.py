"""One rank of test_group.py: rank.py FOLDER JOB…; what the jobs return is in FOLDER/<rank>.json, by job."""

import gc
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from oracles.batches import make_batch
from safetensors.torch import save_file
from torch import Tensor, nn

from reagent_lite.algorithms.dqn import DQN, DQNSettings
from reagent_lite.algorithms.learners import Learners, learners_of
from reagent_lite.config.checkpoint import CheckpointConfig
from reagent_lite.config.rendezvous import RendezvousConfig
from reagent_lite.data.sampling.plan import ReadPlan
from reagent_lite.distributed import agreement as agreement_module
from reagent_lite.distributed.agreement import StepAgreement
from reagent_lite.distributed.group import Group, ProcessRanks, joined
from reagent_lite.errors import PeerError
from reagent_lite.models.q_networks import NetworkSettings, build_q_network
from reagent_lite.models.value_heads import ScalarHead
from reagent_lite.training.checkpoint import CheckpointFolder, Checkpoints, CheckpointSchedule
from reagent_lite.training.loop import Optimization, Running, fit
from reagent_lite.training.stop import StopSignal
from reagent_lite.types import SourceSpec, TransitionBatch

SHARES = {"one": (1,), "even": (1, 1), "uneven": (3, 1), "three": (1, 1, 1), "agents": (1,), "agents of two": (3, 1)}


class Source:
    """Rows of a table in the order of a plan, like data.source with files; ranks read parts by their shares."""

    def __init__(self, plan: ReadPlan, rank: int, shares: tuple[int, ...]) -> None:
        rng = torch.Generator().manual_seed(0)
        self.state = torch.randn(203, 3, generator=rng)
        self.after = torch.randn(203, 3, generator=rng)
        self.reward = torch.randn(203, generator=rng)
        self.plan = plan
        self.world = len(shares)
        self.step = 0
        self.ranks = range(sum(shares[:rank]), sum(shares[: rank + 1]))

    def learned(self, row_errors: Tensor) -> None:
        """Checks that rows are read in the plan's order."""

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]

    def __next__(self) -> TransitionBatch:
        plan = self.plan
        parts = [part for rank in self.ranks for part in plan.parts(self.step, rank)]
        start = parts[0][0]
        stop = parts[-1][1]
        rows = torch.from_numpy(plan.permutation(self.step // plan.steps_per_epoch)[start:stop].astype(np.int64))
        share = self.world / plan.rows_of_step(self.step)
        self.step += 1
        return make_batch(
            self.state[rows], self.after[rows], rows % 2, self.reward[rows], weight=torch.full((len(rows),), share)
        )


class OfTypes(Source):
    """The same rows for two agent types with opposite rewards."""

    def __next__(self) -> dict[str, TransitionBatch]:  # type: ignore[override]
        batch = super().__next__()
        return {"tagger": batch, "runner": replace(batch, reward=-batch.reward)}


def dqn() -> DQN:
    spec = SourceSpec(num_state_features=3, action_names=("a", "b"))
    network = build_q_network(spec, NetworkSettings(hidden=(16,), activations=("relu",)))
    return DQN(network, ScalarHead(), DQNSettings(gamma=0.9, target_update_rate=0.1))


def ready(group: Group, shares: tuple[int, ...], *, agents: bool = False) -> tuple[Running, ReadPlan]:
    plan = ReadPlan(shards=(203,), minibatch=16, epochs=8, reads=(0,) * sum(shares))
    torch.manual_seed(group.rank)  # initial weights differ: the first rank's count
    learner = Learners({"tagger": dqn(), "runner": dqn()}) if agents else dqn()
    trained = [[*part.q_network.parameters()] for part in learners_of(learner).values()]
    optimizer = torch.optim.Adam([p for each in trained for p in each], lr=1e-3)
    optimization = Optimization(optimizer=optimizer, clip_norm=0.5 if agents else None, clipped=trained)
    source = (OfTypes if agents else Source)(plan, group.rank, shares)
    return Running(learner=learner, optimization=optimization, source=source, evaluators=source), plan


def learn(job: str, group: Group, folder: Path) -> int:
    running, plan = ready(group, SHARES[job], agents="agents" in job)
    for _ in fit(running, plan, group):
        pass
    save_file(running.learner.state_dict(), folder / f"{job}_{group.rank}.safetensors")
    return running.position.step


def collectives(group: Group) -> dict[str, Any]:
    total = int(group.all_reduce(torch.tensor([group.rank + 1])))
    last = group.broadcast_bytes(bytes([group.rank]), group.world_size - 1)[0]
    matrix = torch.full((group.rank, 2, 3 - group.rank), group.rank).transpose(0, 1)  # none, and not contiguous
    return {
        "sum": [total, group.broadcast_text("héllo" if group.is_first else None), last],
        "texts": group.gather_text("é" * group.rank),
        "bytes": [entry.decode() for entry in group.gather_bytes(b"b" * group.rank)],
        "part": group.scatter_bytes(iter([b"0", b"", b"22"]) if group.is_first else None).decode(),
        "tensors": [
            [entry.tolist() for entry in group.gather(column)] for column in (matrix, matrix == 1, matrix.double())
        ],
    }


def agree(group: Group) -> dict[str, Any]:
    """Rank 2 is asked to stop, rank 0's clock asks for a checkpoint; each rank returns when it learnt of it.

    By this clock, a step takes 1 ms, and so does reading the clock.
    """
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.001
        return now

    with patch.object(agreement_module, "time", SimpleNamespace(perf_counter=clock)):
        agreement = StepAgreement(group)
        saves = []
        for done in range(1, 10_000):
            now += 0.001
            agreed = agreement.after_step(done, stop=group.rank == 2 and done >= 700, save=done == 1 or group.rank == 1)
            saves += [done] if agreed.save else []
            if agreed.stop:
                return {"stopped": done, "saves": saves}
    return {}


def diverge(group: Group, folder: Path) -> dict[str, Any]:
    """A bit of rank 1's parameters flips before step 4; ranks compare every 5 steps and save every 2."""
    running, plan = ready(group, SHARES["three"])
    document = {"run": "r", "serial": 0, "world": {"processes": group.world_size}}
    schedule = CheckpointSchedule(
        CheckpointConfig(every_steps=2),
        RendezvousConfig(step_timeout_seconds=60, startup_timeout_seconds=60, checksum_every_steps=5),
        Checkpoints(CheckpointFolder(folder / "checkpoints"), group, running, document, keep=9),
        StopSignal(),
    )

    def flip(step: int) -> None:
        if step == 4 and group.rank == 1:
            next(running.learner.q_network.parameters()).data.view(-1).view(torch.int32)[0] ^= 1

    try:
        for _ in fit(running, plan, group, collect=flip):
            schedule.after_step()
    except PeerError as error:
        return {"error": str(error), "step": running.position.step}
    return {}


def outlive(group: Group) -> nn.Module:
    """Returns a module that outlives its group; from then on no other thread gets Python's lock."""
    wrapped = group.wrap(nn.Linear(1, 1))
    wrapped(torch.ones(1, 1)).sum().backward()
    gc.freeze()  # collecting takes long enough for torch's thread, which has still to let go of what it averaged
    sys.setswitchinterval(60)
    return wrapped


def main(folder: Path, *jobs: str) -> None:
    returned: dict[str, Any] = {}
    with joined(ProcessRanks.read() or ProcessRanks(), torch.device("cpu"), timeout_seconds=60) as group:
        for job in jobs:
            if job in SHARES:
                returned[job] = learn(job, group, folder)
            elif job == "diverge":
                returned[job] = diverge(group, folder)
            else:
                returned[job] = {"collectives": collectives, "agree": agree, "outlive": outlive}[job](group)
        wrapped = returned.pop("outlive", None)
        (folder / f"{group.rank}.json").write_text(json.dumps(returned))
        if wrapped is None:
            group.barrier()
    if wrapped is None:  # one that lives when the interpreter ends may abort the process
        threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
        assert not [name for name in threads if "gloo" in name], threads
    del wrapped
    gc.collect()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
