"""One rank of test_agreement.py: agreement_worker.py TASK FOLDER."""

import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from oracles.batches import random_batch

from reagent_lite.algorithms.dqn import DQN, DQNSettings
from reagent_lite.config.checkpoint import CheckpointConfig
from reagent_lite.config.rendezvous import RendezvousConfig
from reagent_lite.distributed.agreement import Agreement
from reagent_lite.distributed.group import Group, Place, joined
from reagent_lite.errors import PeerError
from reagent_lite.models.q_networks import NetworkSettings, build_q_network
from reagent_lite.models.value_heads import ScalarHead
from reagent_lite.training.checkpoint import CheckpointFolder, Checkpoints, CheckpointSchedule
from reagent_lite.training.loop import Hooks, Optimization, Running, fit
from reagent_lite.training.stop import StopSignal
from reagent_lite.types import SourceSpec, TransitionBatch

ASKED = 700


def agree(group: Group) -> dict[str, float]:
    """Rank 2 is asked to stop, rank 0's clock asks for a checkpoint; each rank says when it heard of it."""
    agreement, saves, seconds, start = Agreement(group), [], 0.0, time.perf_counter()
    for done in range(1, 10_000):
        time.sleep(0.001)
        stop = group.rank == 2 and done >= ASKED
        before = time.perf_counter()
        agreed = agreement.after_step(done, stop=stop, save=done == 1 or (group.rank == 1))
        seconds += time.perf_counter() - before
        saves += [done] if agreed.save else []
        if agreed.stop:
            whole = time.perf_counter() - start
            return {"stopped": done, "saves": saves, "share": seconds / whole, "step": whole / done}  # type: ignore[dict-item]
    return {}


class Rows:
    """The same random rows on every rank."""

    step = 0

    def __next__(self) -> TransitionBatch:
        self.step += 1
        return random_batch(8, 3, 2, self.step)

    def learned(self, row_errors: torch.Tensor) -> None:
        """Nothing is drawn by losses."""

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = int(state["step"])


class Plan:
    num_steps, steps_per_epoch, minibatches_per_step = 20, 20, 1

    def rows_of_step(self, step: int) -> int:
        return 8


def diverge(group: Group, folder: Path) -> dict[str, object]:
    """A bit of one parameter flips on rank 1 before step 3; every fifth step is compared."""
    torch.manual_seed(0)
    network = build_q_network(
        SourceSpec(num_state_features=3, action_names=("a", "b")), NetworkSettings(hidden=(8,), activations=("relu",))
    )
    learner = DQN(network, ScalarHead(), DQNSettings(gamma=0.9, target_update_rate=0.1))
    optimization = Optimization(optimizer=torch.optim.SGD(network.parameters(), lr=0.01))
    source = Rows()
    running = Running(learner=learner, optimization=optimization, source=source, evaluators=source)
    document = {"run": "r", "serial": 0, "world": {"processes": group.world_size}}
    schedule = CheckpointSchedule(
        CheckpointConfig(every_steps=2),
        RendezvousConfig(step_timeout_seconds=60, startup_timeout_seconds=60, checksum_every_steps=5),
        Checkpoints(CheckpointFolder(folder / "checkpoints"), group, running, document, keep=9),
        StopSignal(),
        print,
    )

    class Flip(Hooks):
        def before_step(self, step: int) -> None:
            if step == 4 and group.rank == 1:
                next(learner.q_network.parameters()).data.view(-1).view(torch.int32)[0] ^= 1

        def after_step(self) -> None:
            schedule.after_step()

    try:
        fit(running, Plan(), group, Flip())
    except PeerError as error:
        return {"error": str(error), "step": running.position.step}
    return {}


if __name__ == "__main__":
    with joined(Place.read() or Place(), torch.device("cpu"), timeout_seconds=60) as here:
        out = Path(sys.argv[2])
        result = agree(here) if sys.argv[1] == "agree" else diverge(here, out)
        (out / f"{here.rank}.json").write_text(json.dumps(result))
        here.barrier()
