"""The whole JSON of the two training workflows."""

from collections.abc import Iterator
from typing import Annotated, Self

from pydantic import Field, model_validator

from reagent_lite.config.checkpoint import CheckpointConfig
from reagent_lite.config.data import DataConfig
from reagent_lite.config.evaluation import EvaluationConfig
from reagent_lite.config.norm_params import NormParams
from reagent_lite.config.publish import PublishConfig
from reagent_lite.config.rainbow import RainbowConfig
from reagent_lite.config.rendezvous import RendezvousConfig
from reagent_lite.config.rl import RLConfig
from reagent_lite.config.section import Section, local_problems
from reagent_lite.config.simulation import SimulationConfig
from reagent_lite.config.timeline import QuerySection, TimelineSection
from reagent_lite.config.training import TrainingConfig
from reagent_lite.errors import Problem


class WorkflowConfig(Section):
    """Keys shared by `workflows.dqn` and `workflows.parametric_dqn`."""

    training_data_path: str = ""
    """JSON lines (plain, .gz, .bz2, .zst), Parquet, Arrow IPC, CSV, Minari, or a folder of files; same local path on
    every node. Transitions, or events, of which transitions are made first.

    May be absent where a simulation is trained on.
    """
    eval_data_path: str | None = None
    """Held-out data in the same format; absent: training figures only."""
    state_norm_data_path: str | None = None
    """Normalization file of state features; absent: fitted from the training data and written."""
    action_norm_data_path: str | None = None
    """Normalization file of candidate features (parametric); absent: fitted likewise."""
    model_output_path: str = ""
    """Folder of this machine or of a mounted share for the exported model, checkpoints, metrics and TensorBoard log."""
    use_gpu: bool = True
    """Train on a GPU; with none, one warning and then CPU."""
    use_all_avail_gpus: bool = False
    """One process per GPU; without a GPU num_processes_per_node CPU processes."""
    num_processes_per_node: Annotated[int, Field(ge=1)] | None = None
    """Explicit count of processes; absent: the GPUs found with use_all_avail_gpus, else 1."""
    num_nodes: Annotated[int, Field(ge=1)] = 1
    """Machines that train together; 1 leaves the word to a scheduler's variables."""
    node_index: Annotated[int, Field(ge=0)] | None = None
    """Number of this machine, from 0; --node_index wins over it, and a scheduler's variable stands in for it."""
    init_method: str | None = None
    """Where several machines meet: file:///share/run.rdzv, or tcp://host:port of node 0; not used by one."""
    epochs: Annotated[int, Field(ge=1)] = 1
    """Passes over the training data; simulation.total_steps is the length of a run without data."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Of initial weights, row order and resampling."""
    norm_params: NormParams = NormParams()
    rl: RLConfig = RLConfig()
    rainbow: RainbowConfig = RainbowConfig()
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    publish_if: PublishConfig | None = None
    """What the evaluation must show before the model is exported; absent: it always is."""
    data: DataConfig = DataConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    rendezvous: RendezvousConfig = RendezvousConfig()
    timeline: TimelineSection | None = None
    """How transitions are made of events at training_data_path and eval_data_path; absent: by its defaults."""
    query: QuerySection = QuerySection()
    """Which episodes of the events are taken; actions are those of this config."""
    simulation: SimulationConfig | None = None
    """Environments to learn from and to be judged in."""
    actions: tuple[str, ...] = ()
    """Action names; their order is the order of the network's outputs. Absent with a simulation: the environment's."""

    @model_validator(mode="after")
    def _events_of_the_timeline(self) -> Self:
        """Lets the timeline's input stand for the path of the data, as one file for both workflows has it."""
        if self.training_data_path or self.timeline is None or not self.timeline.inputTableName:
            return self
        return self.model_copy(update={"training_data_path": self.timeline.inputTableName})

    @property
    def simulated_share(self) -> float:
        """Share of each minibatch that comes from the simulation."""
        if self.simulation is None:
            return 0.0
        return 1.0 if not self.training_data_path else self.simulation.share or 0.0

    def problems(self, path: str = "") -> Iterator[Problem]:
        """Yields everything wrong beyond single keys, in this section and below."""
        if not self.model_output_path:
            yield Problem("model_output_path", "a path", "nothing")
        yield from local_problems("model_output_path", self.model_output_path)
        if not self.training_data_path and self.simulation is None:
            yield Problem("training_data_path", "a path", "nothing", "Or give a simulation section to train in")
        yield from self._source_problems()
        yield from self._stage_problems()
        if self.publish_if is not None and not self.training_data_path:
            yield Problem("publish_if", "absent without training_data_path", "a condition",
                          "It is about estimates from logged rows, and there are none")  # fmt: skip
        if self.data.global_minibatch_size is not None and "minibatch_size" in self.training.changed:
            yield Problem(
                "data.global_minibatch_size",
                "absent while training.minibatch_size is given",
                "both",
                "Keep one of them",
            )
        distributional = self.rainbow.categorical or self.rainbow.quantile
        if distributional and self.rl.q_network_loss != "mse":
            yield Problem(
                "rl.q_network_loss", "absent with categorical or quantile", repr(self.rl.q_network_loss),
                "The distributional head brings its own loss",
            )  # fmt: skip
        if self.rl.value_bounds is not None and self.rainbow.categorical:
            yield Problem("rl.value_bounds", "absent with categorical", str(self.rl.value_bounds),
                          "rainbow.qmin and rainbow.qmax bound the returns of C51")  # fmt: skip
        if self.rl.value_bounds is not None and self.rl.q_network_loss == "bce_with_logits":
            yield Problem("rl.value_bounds", "absent with bce_with_logits", str(self.rl.value_bounds),
                          "Its targets are the rewards themselves")  # fmt: skip
        if self.rl.value_bounds == "rewards" and (not self.training_data_path or self.simulated_share):
            yield Problem("rl.value_bounds", "[low, high] or null where a simulation is trained on", '"rewards"',
                          "What an environment may pay is not known before it is played")  # fmt: skip
        if self.rainbow.bcq and not self.rl.maxq_learning:
            yield Problem("rainbow.bcq", "false while rl.maxq_learning is false", "true",
                          "SARSA takes the logged next action: there is nothing to restrict")  # fmt: skip
        for name in ("norm_params", "rl", "rainbow", "training", "evaluation", "data", "checkpoint", "rendezvous",
                     "simulation", "publish_if"):  # fmt: skip
            section = getattr(self, name)
            if section is not None:
                yield from section.problems(name)

    def _stage_problems(self) -> Iterator[Problem]:
        """Yields contradictions of the stages before training with each other and with training."""
        if self.query.actions:
            yield Problem("query.actions", "absent beside actions", str(list(self.query.actions)), "They are the same")
        yield from self.query.problems("query")
        if self.timeline is None:
            return
        timeline = self.timeline
        yield from timeline.rule_problems("timeline")
        source = timeline.inputTableName
        if source and self.training_data_path not in (source, timeline.outputTableName):
            yield Problem("timeline.inputTableName", "the events of training_data_path, or absent", repr(source),
                          "One of them says where the events are")  # fmt: skip
        if not self.training_data_path:
            yield Problem("timeline", "absent without training_data_path", "a timeline", "There are no events")
        if timeline.evalTableName is not None and self.eval_data_path not in (None, timeline.evalTableName):
            yield Problem("timeline.evalTableName", "absent beside eval_data_path", repr(timeline.evalTableName))
        if timeline.steps == 1:
            return
        if timeline.gamma not in (None, self.rl.gamma):
            yield Problem("timeline.gamma", f"rl.gamma ({self.rl.gamma:g}), or absent", f"{timeline.gamma:g}")
        for key, wrong in (("multi_steps", self.rl.multi_steps not in (None, 1)),
                           ("use_seq_num_diff_as_time_diff", self.rl.use_seq_num_diff_as_time_diff)):  # fmt: skip
            if wrong:
                yield Problem(f"rl.{key}", f"its default, as timeline.steps is {timeline.steps}",
                              str(getattr(self.rl, key)), "Rows span several steps already")  # fmt: skip

    def _source_problems(self) -> Iterator[Problem]:
        """Yields keys that ask for data where there is none, and contradictions of data and simulation."""
        simulation = self.simulation
        if simulation is None:
            return
        if self.training_data_path:
            yield from self._beside_data(simulation)
        else:
            yield from self._without_data(simulation)
        if simulation.backend == "cuda" and not self.use_gpu:
            yield Problem("simulation.backend", "auto or cpu while use_gpu is false", '"cuda"',
                          "Environments run on the GPU that trains")  # fmt: skip
        if not self.simulated_share:
            return
        if self.rl.use_seq_num_diff_as_time_diff:
            yield Problem("rl.use_seq_num_diff_as_time_diff", "false while a simulation is trained on", "true",
                          "A simulated transition is one step long")  # fmt: skip
        if simulation.epsilon_end is None and simulation.epsilon_start < self.rl.epsilon:
            yield Problem("simulation.epsilon_start", f"at least rl.epsilon ({self.rl.epsilon:g}), where it ends",
                          f"{simulation.epsilon_start:g}", "Or give simulation.epsilon_end")  # fmt: skip
        fewest = self.fewest_slots * simulation.num_envs
        if simulation.replay.capacity < fewest:
            yield Problem("simulation.replay.capacity", f"at least {fewest}, {self.fewest_slots} steps of num_envs",
                          str(simulation.replay.capacity))  # fmt: skip

    @property
    def fewest_slots(self) -> int:
        """Steps of every environment that replay must hold: one window of multi_steps, and what follows it."""
        return (self.rl.multi_steps or 1) + 2

    @property
    def warmup_rounds(self) -> int:
        """Steps of every environment before learning starts."""
        assert self.simulation is not None
        return max(-(-self.simulation.warmup_steps // self.simulation.num_envs), self.fewest_slots - 1)

    @property
    def restarts(self) -> int:
        """How often the run may begin again after a failure: rendezvous.max_restarts, else 3 with checkpoints."""
        given = self.rendezvous.max_restarts
        return given if given is not None else 3 if self.checkpoint.periodic else 0

    def _beside_data(self, simulation: SimulationConfig) -> Iterator[Problem]:
        if simulation.share is None:
            yield Problem("simulation.share", "a number from 0 to 1 beside training_data_path", "nothing",
                          "0 trains on the data and plays in simulation, 1 trains on the simulation")  # fmt: skip
        for key in ("total_steps", "num_evaluations"):
            if key in simulation.changed:
                yield Problem(f"simulation.{key}", "absent beside training_data_path", str(getattr(simulation, key)),
                              "epochs says how long a run on data is; each ends with an evaluation")  # fmt: skip
        if simulation.share == 0:
            for key in simulation.learning_only:
                if key not in ("total_steps", "num_evaluations"):
                    yield Problem(f"simulation.{key}", "its default while share is 0", str(getattr(simulation, key)),
                                  "Nothing is learned in the simulation, so it would have no effect")  # fmt: skip

    def _without_data(self, simulation: SimulationConfig) -> Iterator[Problem]:
        advice = "It is about logged rows, and there are none"
        if self.epochs != 1:
            yield Problem("epochs", "absent without training_data_path", str(self.epochs),
                          "simulation.total_steps says how long a simulated run is")  # fmt: skip
        if self.eval_data_path is not None:
            yield Problem("eval_data_path", "absent without training_data_path", repr(self.eval_data_path), advice)
        if simulation.share not in (None, 1.0):
            yield Problem("simulation.share", "absent or 1 without training_data_path", f"{simulation.share:g}")
        used = {
            "norm_params": (), "data": ("global_minibatch_size",),
            "evaluation": ("confidence_level", "bootstrap_resamples"),
        }  # fmt: skip
        for name, keys in used.items():
            section: Section = getattr(self, name)
            for key in section.changed:
                if key not in keys:
                    yield Problem(f"{name}.{key}", "its default without training_data_path",
                                  str(getattr(section, key)), advice)  # fmt: skip
        least = (self.warmup_rounds + simulation.steps_per_rollout) * simulation.num_envs
        if simulation.total_steps < least:
            yield Problem("simulation.total_steps", f"at least {least}, for {simulation.num_envs} environments to warm "
                          "up and step once", str(simulation.total_steps))  # fmt: skip


class DqnConfig(WorkflowConfig):
    """`python -m workflows.dqn`: a fixed set of actions."""

    def problems(self, path: str = "") -> Iterator[Problem]:
        """Adds the rules of named actions."""
        if self.timeline is not None and not self.timeline.actionDiscrete:
            yield Problem("timeline.actionDiscrete", "true", "false", "Candidates are workflows.parametric_dqn's")
        if len(self.actions) < 2 and (self.simulation is None or self.actions or self.training_data_path):
            yield Problem("actions", "at least two action names", str(list(self.actions)))
        for name in sorted({name for name in self.actions if self.actions.count(name) > 1}):
            yield Problem("actions", "every name once", f"{name!r} {self.actions.count(name)} times")
        for name in self.rl.reward_boost or {}:
            if name not in self.actions and (self.actions or self.simulation is None):
                yield Problem(f"rl.reward_boost.{name}", f"one of {list(self.actions)}", repr(name))
        if self.action_norm_data_path is not None:
            yield Problem("action_norm_data_path", "absent", repr(self.action_norm_data_path),
                          "Named actions have no features; use workflows.parametric_dqn for candidates")  # fmt: skip
        fits = self.training_data_path and self.state_norm_data_path is None
        if fits and "state_features" not in self.norm_params.cols_to_norm:
            yield Problem("norm_params.cols_to_norm", "state_features among them, or state_norm_data_path",
                          str(list(self.norm_params.cols_to_norm)))  # fmt: skip
        yield from super().problems(path)


class ParametricDqnConfig(WorkflowConfig):
    """`python -m workflows.parametric_dqn`: candidates with features, a list per row."""

    def problems(self, path: str = "") -> Iterator[Problem]:
        """Adds the rules of candidate actions."""
        if self.actions:
            yield Problem("actions", "absent", str(list(self.actions)),
                          "Candidates come with each row; use workflows.dqn for named actions")  # fmt: skip
        if self.rl.reward_boost:
            yield Problem("rl.reward_boost", "absent", str(self.rl.reward_boost),
                          "Candidates have no names to boost; add the boost to the reward in the data")  # fmt: skip
        columns = (("state_features", "state_norm_data_path"), ("action", "action_norm_data_path"))
        for column, key in columns:
            fits = self.training_data_path and getattr(self, key) is None
            if fits and column not in self.norm_params.cols_to_norm:
                yield Problem("norm_params.cols_to_norm", f"{column} among them, or {key}",
                              str(list(self.norm_params.cols_to_norm)))  # fmt: skip
        yield from super().problems(path)
