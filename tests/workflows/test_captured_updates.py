"""Updates and rollouts that a GPU replays as CUDA graphs, watched on a CPU: no call waits for the device.

Torch's operations of one update and one rollout step pass by a TorchDispatchMode, which refuses those whose result the
host has to look at, and counts those that a GPU computes, which are launches of kernels.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.logs import random_rows, write_lines
from helpers.runs import ALONE, Tree, checked, merged, quick
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from reagent_lite.distributed.group import Group, ProcessRanks
from reagent_lite.models import q_networks
from reagent_lite.run import evaluators, simulated
from reagent_lite.run.learner import captures
from reagent_lite.run.resolved import resolve
from reagent_lite.run.runner import Run
from reagent_lite.run.sources import logged_experience
from reagent_lite.training.capture import eager
from reagent_lite.training.loop import fit
from reagent_lite.training.stop import StopSignal

Work = Callable[[], None]
WAITS = {
    "nonzero",
    "_local_scalar_dense",
    "masked_select",
    "is_nonzero",
    "equal",
    "_unique2",
    "unique_dim",
    "lift_fresh",
}
NO_LAUNCH = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"}
ENVIRONMENTS = ("gridworld", "recommend", "tag_gridworld")
"""Named actions, candidates, two types of agents."""
VARIANTS: dict[str, tuple[Tree, tuple[int, int, int]]] = {
    "plain": ({}, (99, 104, 200)),
    "dueling": ({"rainbow": {"dueling_architecture": True}}, (156, 162, 314)),
    "dropout": ({"training": {"dropout_ratio": 0.1}}, (107, 112, 216)),
    "clipping": ({"training": {"clip_grad_norm": 1.0}}, (107, 112, 216)),
    "c51": ({"rainbow": {"categorical": True, "num_atoms": 5, "qmin": -1.0, "qmax": 1.0}}, (116, 121, 234)),
    "quantile": ({"rainbow": {"quantile": True, "num_atoms": 5}}, (114, 119, 230)),
    "bcq": ({"rainbow": {"bcq": True}}, (142, 149, 286)),
    "cql": ({"rl": {"cql_alpha": 0.5}}, (119, 125, 240)),
    "sarsa": ({"rl": {"maxq_learning": False}}, (97, 101, 196)),
    "n-step": ({"rl": {"multi_steps": 3}}, (99, 104, 200)),
    "prioritized": ({"simulation": {"replay": {"prioritized": True, "capacity": 4096}}}, (137, 142, 276)),
    "crr": ({"algorithm": "crr"}, (144, 150, 290)),
    "iql": ({"algorithm": "iql"}, (161, 167, 324)),
    "batch norm": ({"training": {"use_batch_norm": True}}, (130, 0, 262)),
}
"""Changes of a config with two hidden layers and double Q; launches of an update in each environment, at most.

These budgets may only fall: at small sizes the number of launches decides how long an update takes on a GPU.
"""
ROLLOUTS = {"plain": (44, 48, 112), "prioritized": (62, 66, 154)}
"""Likewise of a step of all environments."""
EVALUATIONS = {"plain": (20, 21, 41), "bcq": (32, 34, 65)}
"""Likewise of a step of an evaluation."""
EVERYWHERE = ("plain", "bcq", "prioritized", "n-step", "batch norm")
"""Variants whose code depends on how an environment's choices are given."""
GPU = Group(ProcessRanks(), torch.device("cuda", 0))


class Launches(TorchDispatchMode):
    """Counts launches, and refuses what waits."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        is_boolean = any(isinstance(index, Tensor) and index.dtype == torch.bool for index in indices)
        assert name not in WAITS, f"{func} waits for the device"
        assert not is_boolean, f"{func} by a mask waits for the device"
        self.count += not (func.is_view or name in NO_LAUNCH)
        return func(*args, **(kwargs or {}))


def watched(work: Work) -> Work:
    """Returns work that is refused if it waits."""

    def run() -> None:
        with Launches():
            work()

    return run


def opened(tree: Tree, workflow: str) -> Run:
    return Run(resolve(checked(tree, workflow), ALONE), StopSignal())


def learned(setup: Run, capture: Callable[[Work], Work] = eager) -> dict[str, Tensor]:
    """Trains, and returns the learner's state."""
    torch.manual_seed(0)  # dropout
    list(fit(setup.running, setup.stream.plan, ALONE, collect=setup.stream.before_step, capture=capture))
    return setup.running.learner.state_dict()


def tree_of(folder: Path, env: str, variant: Tree) -> Tree:
    tree = {
        "model_output_path": str(folder / "out"), "use_gpu": False, "rl": {"gamma": 0.9, "epsilon": 0.1},
        "rainbow": {"dueling_architecture": False},
        "training": {"layers": [-1, 16, 16, -1], "activations": ["relu", "relu", "linear"], "minibatch_size": 32},
        "simulation": {"env": env, "num_envs": 16, "total_steps": 240, "warmup_steps": 160, "num_evaluations": 1,
                       "evaluation_episodes": 8, "replay": {"capacity": 4096}},
    }  # fmt: skip
    return merged(tree, variant)


@pytest.mark.parametrize(
    "variant",
    ["plain", "bcq", "crr", *(pytest.param(name, marks=pytest.mark.slow) for name in ("c51", "cql", "sarsa", "iql"))],
)
def test_logged_rows_in_fixed_buffers_teach_the_same(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 rows in minibatches of 48: the last one of an epoch has 8, and 40 rows of weight 0."""
    log = write_lines(tmp_path / "log.jsonl", random_rows(200))
    tree = merged(quick(log, tmp_path / "out", epochs=3), VARIANTS[variant][0])
    tree["training"] |= {"minibatch_size": 48, "cuda_graph": True}
    assert captures(checked(tree, "dqn"), GPU)
    monkeypatch.setattr(logged_experience, "captures", lambda config, group: False)
    expected = learned(opened(tree, "dqn"))
    monkeypatch.setattr(logged_experience, "captures", lambda config, group: True)
    for name, tensor in learned(opened(tree, "dqn"), watched).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("env", "variant"),
    [
        pytest.param(env, name, marks=[] if env == "gridworld" or name in EVERYWHERE else pytest.mark.slow)
        for env in ENVIRONMENTS
        for name in VARIANTS
    ],
)
def test_what_is_recorded_never_waits(env: str, variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts the launches of one rollout step, one evaluation step and one update, each the third of its kind."""
    workflow = "parametric_dqn" if env == "recommend" else "dqn"
    tree, number = tree_of(tmp_path, env, VARIANTS[variant][0]), ENVIRONMENTS.index(env)
    waits = workflow == "parametric_dqn" and variant == "batch norm"
    assert captures(checked(tree, workflow), GPU) is not waits
    runs, modes = Counter[str](), defaultdict[str, Launches](Launches)

    def counted(name: str, work: Work) -> Work:
        def run() -> None:
            runs[name] += 1
            with modes[name] if runs[name] == 3 else nullcontext():
                work()

        return run

    monkeypatch.setattr(simulated, "rollout_capture", lambda config, device: partial(counted, "rollout"))
    monkeypatch.setattr(evaluators, "rollout_capture", lambda config, device: partial(counted, "evaluation"))
    monkeypatch.setattr(q_networks, "_skips_padding", lambda network, actions: False)  # as on a GPU
    setup = opened(tree, workflow)
    with pytest.raises(AssertionError, match="nonzero") if waits else nullcontext():
        learned(setup, partial(counted, "update"))
        setup.evaluators.after_epoch(final=False)
    for name, budgets in (("update", VARIANTS[variant][1]), ("evaluation", EVALUATIONS.get(variant)),
                          ("rollout", ROLLOUTS.get(variant))):  # fmt: skip
        assert waits or budgets is None or 0 < modes[name].count <= budgets[number]


@pytest.mark.parametrize(
    ("env", "variant", "backend"),
    [
        ("gridworld", "prioritized", "eager"),
        ("recommend", "n-step", "eager"),
        ("tag_gridworld", "clipping", "eager"),
        *(
            pytest.param(env, name, "inductor", marks=pytest.mark.slow)
            for env in ENVIRONMENTS
            for name in VARIANTS
            if (env, name) != ("recommend", "batch norm")  # which is not recorded
        ),
    ],
)
@pytest.mark.filterwarnings("default::DeprecationWarning")  # of torch's own imports
def test_compiled_updates_teach_the_same(
    env: str, variant: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing breaks what torch.compile traces; "inductor" makes kernels for the CPU of it."""
    workflow = "parametric_dqn" if env == "recommend" else "dqn"
    tree = tree_of(tmp_path, env, VARIANTS[variant][0])
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    monkeypatch.setattr(q_networks, "_skips_padding", lambda network, actions: False)  # as on a GPU
    usual, compiled = opened(tree, workflow), opened(tree, workflow)
    expected = learned(usual)
    torch.compiler.reset()
    counters.clear()
    compiled.compile()
    got = learned(compiled)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] >= 4  # the loss, the optimizer's step, writes and draws
    if variant != "dropout":  # whose random numbers are others
        # the gradient of a single bias that shifts all choices alike is a rounding error, which Adam makes a step of
        for name in (name for name, tensor in got.items() if tensor.numel() > 1):
            torch.testing.assert_close(got[name], expected[name], rtol=1e-3, atol=1e-4)
