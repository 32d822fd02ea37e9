"""Builds a learner and its optimizer from the config."""

import inspect
import os
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from reagent_lite.algorithms.learners import Learner, Learners, learners_of
from reagent_lite.algorithms.optimizers import optimizer_class
from reagent_lite.algorithms.policy_learner import PolicyLearner
from reagent_lite.algorithms.registry import ALGORITHMS
from reagent_lite.config import WorkflowConfig
from reagent_lite.config.simulation import LEARN, RANDOM, SimulationConfig
from reagent_lite.distributed.group import Group
from reagent_lite.models.embeddings import RATE_FACTOR
from reagent_lite.rl.policies import EpsilonGreedy, Softmax, TargetPolicy
from reagent_lite.rl.td import Bounds
from reagent_lite.sim.experience import ONLY
from reagent_lite.training.capture import Captured, can_compile, eager
from reagent_lite.training.loop import Optimization, Update
from reagent_lite.types import SourceSpec

# On an H200 compiling takes 5 s, and 17 s the first time on a machine; it saves 0.2 to 0.4 ms of an update.
FEWEST_COMPILED_STEPS = 50_000
_OPERATIONS_PER_THREAD = 1e8  # with fewer, threads wait for each other longer than they save


def choose_threads(config: WorkflowConfig, spec: SourceSpec, group: Group) -> None:
    """Sets torch's number of threads by the size of a forward pass, at most this process's share of the cores.

    Does nothing if the user has set OMP_NUM_THREADS.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return
    widths = (spec.num_state_features + spec.num_action_features, *config.training.layers[1:-1], 1)
    rows = -(-config.minibatch_over(group.world_size) // group.world_size)
    torch.set_num_threads(threads_for(widths, rows, group.cores))


def threads_for(widths: Sequence[int], rows: int, cores: int) -> int:
    """Returns the number of threads for a forward pass of `rows` rows through layers of these widths."""
    operations = 2 * rows * sum(a * b for a, b in pairwise(widths))
    return int(min(cores, max(operations / _OPERATIONS_PER_THREAD, 1)))


def build_learner(
    config: WorkflowConfig, spec: SourceSpec, device: torch.device, return_bounds: Bounds = None
) -> PolicyLearner:
    """Returns a learner with initial weights drawn by the config's seed.

    Args:
        config: the run's config.
        spec: numbers of features and choices.
        device: device of the learner.
        return_bounds: bounds of the targets if rl.value_bounds is "rewards".
    """
    torch.manual_seed(config.seed)
    return ALGORITHMS[config.algorithm].build(config, spec, return_bounds).to(device)


def build_learners(
    config: WorkflowConfig, spec: SourceSpec, types: Sequence[str], device: torch.device, return_bounds: Bounds = None
) -> Learner:
    """Returns a learner for each type of agents, all with the same initial weights.

    With a single type, named "", returns the learner of `build_learner` itself.
    """
    by_type = {name: build_learner(config, spec, device, return_bounds) for name in types}
    return by_type[ONLY] if ONLY in by_type else Learners(by_type)


def target_policy(config: WorkflowConfig) -> TargetPolicy:
    """Returns the policy that a run evaluates on logs, plays in simulation and exports."""
    return Softmax(config.temperature) if config.rl.softmax_policy else EpsilonGreedy(config.rl.epsilon)


def build_optimization(config: WorkflowConfig, learner: Learner, *, captured: bool) -> Optimization:
    """Returns an optimizer over the learner's trainable parameters, with its schedule and gradient clipping.

    Args:
        config: the run's config.
        learner: the learner; with several types of agents, gradients are clipped for each separately.
        captured: whether steps are replayed as a CUDA graph, which reads the learning rate from device memory.
    """
    training = config.training
    groups = [group for part in learners_of(learner).values() for group in part.parameter_groups(config)]
    name = training.optimizer_class
    # one kernel for all parameters instead of several each saves a tenth of a small network's step on a CPU
    fused = {"fused": True} if name in ("Adam", "AdamW", "SGD") else {}
    rate: float | torch.Tensor = training.learning_rate
    if captured:
        device = groups[0]["params"][0].device
        rate = torch.tensor(rate, device=device)
        fused = fused | {"capturable": True}
    for group in groups:
        if factor := group.pop(RATE_FACTOR, None):
            group["lr"] = rate * factor
    optimizer = optimizer_class(name)(groups, lr=rate, **fused)
    schedule = None
    if training.lr_policy == "exponential":
        assert training.lr_decay is not None, "with_length_for comes first"
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, training.lr_decay)
    trained = [[p for p in part.parameters() if p.requires_grad] for part in learners_of(learner).values()]
    return Optimization(optimizer=optimizer, schedule=schedule, clip_norm=training.clip_grad_norm, clipped=trained)


def captures(config: WorkflowConfig, group: Group) -> bool:
    """Returns whether updates are replayed as CUDA graphs.

    They are if one process learns on one GPU from simulated rows only, or from logged rows only, with an optimizer that
    can be captured. Batch statistics of candidates leave padding out, so the host has to know how much there is.
    """
    simulation = config.simulation
    training = config.training
    name = config.training.optimizer_class
    if config.simulated_share == 1:
        assert simulation is not None
        wanted = _has_fixed_buffers(simulation) and not (config.parametric and training.use_batch_norm)
    else:
        fixed = not config.parametric and not training.use_batch_norm and training.minibatches_per_step == 1
        wanted = config.simulated_share == 0 and fixed
    return (
        wanted
        and training.cuda_graph
        and group.device.type == "cuda"
        and group.world_size == group.gpus == 1
        and "capturable" in inspect.signature(getattr(torch.optim, name)).parameters
    )


def compiles(config: WorkflowConfig, group: Group, steps: int) -> bool:
    """Returns whether torch.compile fuses the kernels of updates that are replayed as CUDA graphs.

    It does if enough steps are left to make it worthwhile; users' networks are not compiled.
    """
    worthwhile = steps >= FEWEST_COMPILED_STEPS and config.training.network is None
    return worthwhile and captures(config, group) and can_compile(group.device)


def update_capture(config: WorkflowConfig, group: Group) -> Callable[[Update], Update]:
    """Returns the wrapper of the run's updates: `Captured` if they are replayed as CUDA graphs, else `eager`."""
    return Captured if captures(config, group) else eager


def rollout_capture(config: WorkflowConfig, device: torch.device) -> Callable[[Update], Update]:
    """Returns the wrapper of the environments' steps: `Captured` on a GPU with training.cuda_graph, else `eager`.

    Ranks do not wait for each other in such a step, so any number of processes and logged rows may be used with it.
    """
    wanted = config.training.cuda_graph and _has_fixed_buffers(config.environments)
    return Captured if device.type == "cuda" and wanted else eager


def _has_fixed_buffers(simulation: SimulationConfig) -> bool:
    """Returns whether every policy is on the GPU; exported models run on the CPU."""
    return set(simulation.policies.values()) <= {LEARN, RANDOM}
