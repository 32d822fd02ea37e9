"""The whole JSON of the two training workflows."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, model_validator

from reagent_lite.config.algorithm import AlgorithmConfig, default_temperature
from reagent_lite.config.checkpoint import CheckpointConfig
from reagent_lite.config.data import DataConfig
from reagent_lite.config.defaults import (
    CHECKPOINT_MINUTES,
    CQL_ALPHA,
    LAST_LEARNING_RATE,
    keys_of_2026,
    minibatch_of_2026,
    steps_of_2026,
    with_defaults_of_2026,
)
from reagent_lite.config.evaluation import EvaluationConfig
from reagent_lite.config.image_config import conv_layers_for
from reagent_lite.config.norm_params import NormParams
from reagent_lite.config.paths import FOR_SEVERAL_LOGS, DataPath
from reagent_lite.config.publish import PublishConfig
from reagent_lite.config.rainbow import RainbowConfig
from reagent_lite.config.rendezvous import RendezvousConfig
from reagent_lite.config.rl import RLConfig
from reagent_lite.config.section import Count, LocalPath, Names, NoEffect, Number, Seed, keys_of
from reagent_lite.config.simulation import ALSO_WITHOUT_LEARNING, SimulationConfig
from reagent_lite.config.timeline_config import QuerySection, TimelineSection
from reagent_lite.config.tracking import TrackingConfig
from reagent_lite.config.training import TrainingConfig
from reagent_lite.errors import Problem

_STEPS_PER_EPOCH = 64  # approximately, if the minibatch depends on the number of rows
_SMALLEST_MINIBATCH = 64
_LARGEST_MINIBATCH = 4096


def _as_url(init_method: str) -> str:
    return Path(init_method).as_uri() if init_method.startswith("/") else init_method


class WorkflowConfig(AlgorithmConfig):
    """Keys of both `workflows.dqn` and `workflows.parametric_dqn`."""

    defaults: Literal["2019", "2026"] = "2019"
    """Defaults of absent keys. 2019: those of this page, as in ReAgent 2019. 2026: chosen by what is learned from logs
    of many sizes and kinds, [as listed](training.md#defaults); what depends on the rows becomes a number once they have
    been read, in the log and in config.json."""
    training_data_path: DataPath = ""
    """JSON lines (plain, .gz, .bz2, .zst), Parquet, Arrow IPC, CSV, Minari, or a folder of files; the same local path
    on every node. Transitions, or events, which are paired to transitions first. A list of paths is several logs read
    as one, each with episodes of its own unless data.same_episodes is true, such as an old log and the decisions served
    since. May be absent with a simulation. Also accepted: `timeline.inputTableName`."""
    eval_data_path: DataPath | None = None
    """Held-out data in the same format; absent: evaluation.held_out_share of the training episodes are scored."""
    state_norm_data_path: str | None = None
    """Normalization file of state features; absent: fitted to the training data and written."""
    action_norm_data_path: str | None = None
    """Normalization file of candidate features (parametric); absent: fitted to the training data and written."""
    model_output_path: LocalPath = ""
    """Folder on this machine or on a mounted share for the exported model, checkpoints, metrics and TensorBoard log."""
    use_gpu: bool = True
    """Train on a GPU; without a GPU, on the CPU with a warning."""
    use_all_avail_gpus: bool = False
    """Start one process per GPU; without a GPU, num_processes_per_node CPU processes."""
    num_processes_per_node: Count | None = None
    """Number of processes; absent: the number of GPUs with use_all_avail_gpus, else 1."""
    parallel: Literal["ddp", "dp", "none"] = "ddp"
    """ddp: processes average their gradients. dp: one process divides its minibatch over all GPUs of this machine.

    none: one process on one device. dp is torch's DataParallel; it is slower than ddp, for comparison and debugging.
    """
    num_nodes: Count = 1
    """Number of machines that train together; with 1, variables of a scheduler may give another number."""
    node_index: Number | None = None
    """Number of this machine, from 0; --node_index overrides it. Absent: a scheduler's variable."""
    init_method: Annotated[str, AfterValidator(_as_url)] | None = None
    """Meeting point of several machines: file:///share/run.rdzv, also as a path alone, or tcp://host:port of node 0;
    not used by one machine."""
    epochs: Count | None = 1
    """Passes over the training data; without data simulation.total_steps is the length of a run. null, which is the
    default of 2026: as many as give 5,000 optimizer steps, or 2,000 where each row is an independent decision; at least
    1."""
    seed: Seed = 0
    """Seed of initial weights, row order and resampling."""
    norm_params: NormParams = NormParams()
    rl: RLConfig = RLConfig()
    rainbow: RainbowConfig = RainbowConfig()
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    publish_if: PublishConfig | None = None
    """Condition on the evaluation for the export of the model; absent: the model is always exported."""
    data: DataConfig = DataConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    rendezvous: RendezvousConfig = RendezvousConfig()
    timeline: TimelineSection | None = None
    """Pairing of the events at training_data_path and eval_data_path to transitions; absent: the defaults of the
    section."""
    query: QuerySection = QuerySection()
    """Episodes of the events to use; actions are those of this config."""
    simulation: SimulationConfig | None = None
    """Environments for learning and evaluation."""
    tracking: TrackingConfig = TrackingConfig()
    actions: Names = ()
    """Names of the actions, in the order of the network's outputs; absent with a simulation: the environment's
    actions."""

    renamed: ClassVar = {"query.actions": "actions", "simulation.cuda_graph": "training.cuda_graph"}
    no_effect: ClassVar[tuple[NoEffect, ...]] = (
        NoEffect(
            lambda config: config.parallel != "ddp" and config.num_processes_per_node != 1,
            ("num_processes_per_node",),
            'absent or 1 with parallel "{0.parallel}"',
            "One process trains; several average their gradients by ddp",
        ),
        NoEffect(
            lambda config: config.parallel != "ddp",
            ("num_nodes",),
            'absent or 1 with parallel "{0.parallel}"',
            "One process trains; several average their gradients by ddp",
        ),
        NoEffect(
            lambda config: config.parallel == "none",
            ("use_all_avail_gpus",),
            'false with parallel "none"',
            "One process on one GPU trains",
        ),
        NoEffect(
            lambda config: config.parallel == "dp",
            ("training.use_batch_norm",),
            'false with parallel "dp"',
            "Statistics would cover the first GPU's rows only; with ddp they cover all rows",
        ),
        NoEffect(
            lambda config: config.rainbow.categorical or config.rainbow.quantile,
            ("rl.q_network_loss",),
            "absent with categorical or quantile",
            "The distributional head brings its own loss",
        ),
        NoEffect(
            lambda config: config.rainbow.categorical,
            ("rl.value_bounds",),
            "absent with categorical",
            "rainbow.qmin and rainbow.qmax bound the returns of C51",
        ),
        NoEffect(
            lambda config: config.rl.q_network_loss == "bce_with_logits",
            ("rl.value_bounds",),
            "absent with bce_with_logits",
            "Its targets are the rewards themselves",
        ),
        NoEffect(
            lambda config: (
                config.algorithm != "dqn"
                or config.rainbow.categorical
                or config.rainbow.quantile
                or config.rl.q_network_loss == "bce_with_logits"
            ),
            ("rl.value_scale",),
            "absent with distributions, bce_with_logits, and algorithms other than dqn",
            "Only values of algorithm dqn are scaled",
        ),
        NoEffect(
            lambda config: not config.rl.maxq_learning,
            ("rainbow.bcq",),
            "false while rl.maxq_learning is false",
            "SARSA uses the logged next action, so there is nothing to restrict",
        ),
        NoEffect(
            lambda config: isinstance(config.training_data_path, str) and isinstance(config.eval_data_path, str | None),
            ("data.same_episodes",),
            *FOR_SEVERAL_LOGS,
        ),
        NoEffect(
            lambda config: (
                config.timeline
                and config.training_data_path not in (config.timeline.inputTableName, config.timeline.outputTableName)
            ),
            ("timeline.inputTableName",),
            "the events of training_data_path, or absent",
            "Give the path of the events in one of them",
        ),
        NoEffect(
            lambda config: config.timeline and config.data.layout == "split",
            ("timeline.outputTableName", "timeline.evalTableName"),
            "absent with data.layout split",
            "Run workflows.timeline first and give its folders: their files are divided among the machines",
        ),
        NoEffect(
            lambda config: config.timeline and config.eval_data_path not in (None, config.timeline.evalTableName),
            ("timeline.evalTableName",),
            "absent with eval_data_path",
        ),
        NoEffect(
            lambda config: config.timeline and config.timeline.steps > 1 and config.timeline.gamma != config.rl.gamma,
            ("timeline.gamma",),
            "rl.gamma ({0.rl.gamma:g}), or absent",
        ),
        NoEffect(
            lambda config: config.timeline and config.timeline.steps > 1 and config.rl.multi_steps != 1,
            ("rl.multi_steps",),
            "its default, as timeline.steps is {0.timeline.steps}",
            "Rows span several steps already",
        ),
        NoEffect(
            lambda config: config.timeline and config.timeline.steps > 1,
            ("rl.use_seq_num_diff_as_time_diff",),
            "its default, as timeline.steps is {0.timeline.steps}",
            "Rows span several steps already",
        ),
        NoEffect(
            lambda config: config.simulation and config.simulation.mode != "both",
            ("training_data_path",),
            "absent with simulation.mode {0.simulation.mode}",
            "Put logs into `protected` of simulation.dataset to learn from them",
        ),
        NoEffect(
            lambda config: config.only_simulates and config.environments.share != 1,
            ("simulation.share",),
            "absent or 1 without training_data_path",
        ),
        NoEffect(
            lambda config: config.simulated_share,
            ("rl.use_seq_num_diff_as_time_diff",),
            "false while a simulation is trained on",
            "A simulated transition spans one step",
        ),
        NoEffect(
            lambda config: not config.training_data_path,
            ("timeline", "publish_if"),
            "absent without training_data_path",
            "There are no events, and no estimates from logged rows",
        ),
        NoEffect(
            lambda config: config.only_simulates,
            ("epochs",),
            "absent without training_data_path",
            "Set the length of a simulated run by simulation.total_steps",
        ),
        NoEffect(
            lambda config: config.only_simulates,
            (
                "eval_data_path",
                *keys_of("norm_params", NormParams),
                *keys_of("data", DataConfig, but=("global_minibatch_size", "history", "image")),
                *keys_of("evaluation", EvaluationConfig, but=("choosing_share", "confidence_level")),
            ),
            "absent without training_data_path",
            "Only used with logged rows",
        ),
        NoEffect(
            lambda config: config.only_simulates and config.environments.auto_scale,
            ("data.global_minibatch_size",),
            "absent while simulation.auto_scale is true",
            "Set training.minibatch_size, where the search begins",
        ),
        NoEffect(
            lambda config: config.simulates_beside_data,
            ("simulation.total_steps", "simulation.num_evaluations"),
            "absent with training_data_path",
            "Set the length of a run on data by epochs; each epoch ends with an evaluation",
        ),
        NoEffect(
            lambda config: config.simulates_beside_data,
            ("simulation.auto_scale",),
            "false with training_data_path",
            "It measures a run that only simulates",
        ),
        NoEffect(
            lambda config: config.simulates_beside_data and config.environments.share == 0,
            keys_of(
                "simulation",
                SimulationConfig,
                but=(*ALSO_WITHOUT_LEARNING, "total_steps", "num_evaluations", "auto_scale"),
            ),
            "its default while share is 0",
            "Only used to learn in the simulation",
        ),
    )

    @property
    def only_simulates(self) -> bool:
        """Whether there are no logged rows."""
        return self.simulation is not None and not self.training_data_path

    @property
    def simulates_beside_data(self) -> bool:
        """Whether there are logged rows and environments."""
        return bool(self.training_data_path) and self.simulation is not None and self.simulation.mode == "both"

    @model_validator(mode="after")
    def _events_of_the_timeline(self) -> Self:
        """Fills in the path of the data from the timeline, so that both workflows can use one file."""
        if self.training_data_path or self.timeline is None or not self.timeline.inputTableName:
            return self
        return self.model_copy(update={"training_data_path": self.timeline.inputTableName})

    @model_validator(mode="before")
    @classmethod
    def _temperature_of_the_algorithm(cls, tree: Any) -> Any:
        """Fills in rl.temperature, whose default depends on the algorithm."""
        if not isinstance(tree, dict):
            return tree
        rl = tree.get("rl", {})
        default = {"temperature": default_temperature(tree.get("algorithm"))}
        if isinstance(rl, dict) and rl.get("temperature") is None:
            return {**tree, "rl": {**rl, **default}}
        if isinstance(rl, RLConfig) and rl.temperature is None:
            return {**tree, "rl": rl.model_copy(update=default)}
        return tree

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_2026(cls, tree: Any) -> Any:
        """Fills in absent keys if the config asks for the defaults of 2026."""
        return with_defaults_of_2026(tree) if isinstance(tree, dict) and tree.get("defaults") == "2026" else tree

    @model_validator(mode="after")
    def _minibatch_without_rows(self) -> Self:
        """Fills in the minibatch of a run that only simulates."""
        return self if self.training_data_path else self.with_minibatch_for(None, world=1)

    @property
    def temperature(self) -> float:
        """rl.temperature with its default; with "auto" the default, until the temperature is computed."""
        given = self.rl.temperature
        assert given is not None
        return default_temperature(self.algorithm) if given == "auto" else given

    def with_temperature(self, temperature: float) -> Self:
        """Returns the config with a number as rl.temperature."""
        return self.with_rl(temperature=temperature)

    def with_rl(self, **changes: Any) -> Self:
        """Returns the config with other values in its rl section."""
        return self.model_copy(update={"rl": self.rl.model_copy(update=changes)})

    @property
    def learns_from_scored(self) -> bool:
        """Whether the policy learns from scored episodes that are in the training data."""
        given = self.evaluation.learn_from_scored
        return self.eval_data_path is not None if given is None else given

    @property
    def simulated_share(self) -> float:
        """Share of each minibatch that comes from the simulation."""
        if self.simulation is None:
            return 0.0
        if not self.training_data_path:
            return 1.0
        return self.simulation.share or 0.0

    def minibatch_over(self, world: int) -> int:
        """Returns the rows of a minibatch over `world` processes; the config must have a minibatch."""
        if self.data.global_minibatch_size is not None:
            return self.data.global_minibatch_size
        assert self.training.minibatch_size is not None, "with_minibatch_for comes first"
        return self.training.minibatch_size * world

    @property
    def has_minibatch(self) -> bool:
        """Whether the config has the size of a minibatch, per process or over all processes."""
        return self.data.global_minibatch_size is not None or self.training.minibatch_size is not None

    def with_training(self, **changes: Any) -> Self:
        """Returns the config with other values in its training section."""
        return self.model_copy(update={"training": self.training.model_copy(update=changes)})

    def with_minibatch(self, rows: int | None) -> Self:
        """Returns the config with another training.minibatch_size."""
        return self.with_training(minibatch_size=rows)

    def with_minibatch_for(self, rows: int | None, world: int) -> Self:
        """Returns the config with a minibatch for a number of rows, unless it has one.

        Args:
            rows: number of logged rows of all machines, or None without logged rows.
            world: number of processes, each with its own minibatch.
        """
        if self.has_minibatch:
            return self
        if rows is None:
            return self.with_minibatch(_LARGEST_MINIBATCH)
        rows_per_minibatch = rows / (_STEPS_PER_EPOCH * world * self.training.minibatches_per_step)
        power_of_two = 2 ** round(math.log2(max(rows_per_minibatch, 1)))
        return self.with_minibatch(min(max(power_of_two, _SMALLEST_MINIBATCH), _LARGEST_MINIBATCH))

    @property
    def num_epochs(self) -> int:
        """The epochs of a config that has a number, which `with_length_for` fills in."""
        assert self.epochs is not None, "with_length_for comes first"
        return self.epochs

    def with_length_for(self, rows: int, learned: int, world: int, *, continues: bool = True) -> Self:
        """Returns the config with minibatch, epochs, lr_decay and cql_alpha for a number of rows, unless it has them.

        Args:
            rows: number of logged rows of all machines.
            learned: number of those that the policy learns from.
            world: number of processes, each with its own minibatch.
            continues: whether a row is followed by another state; false if each is an independent decision.
        """
        parts = self.training.minibatches_per_step
        config = self
        if self.defaults == "2026" and not self.has_minibatch:
            config = self.with_minibatch(minibatch_of_2026(learned, world * parts))
        config = config.with_minibatch_for(rows, world)
        if config.epochs is None:
            steps_per_epoch = -(-learned // (config.minibatch_over(world) * parts)) or 1
            config = config.model_copy(update={"epochs": -(-steps_of_2026(continues=continues) // steps_per_epoch)})
        if config.rl.cql_alpha is None:
            config = config.with_rl(cql_alpha=CQL_ALPHA if continues else 0.0)
        if config.training.lr_decay is None:
            config = config.with_training(lr_decay=LAST_LEARNING_RATE ** (1 / config.num_epochs))
        return config

    @property
    def defaults_in_words(self) -> str:
        """The values of the keys that have another default in 2026."""
        return ", ".join(f"{key} {json.dumps(attrgetter(key)(self))}" for key in keys_of_2026(self.algorithm))

    def with_numbers_of(self, saved: Mapping[str, Any]) -> Self:
        """Returns the config with the numbers that an unfinished run has chosen by its rows, as in its resolved config.

        A resumed run keeps them even if the rows have changed.
        """
        config = self
        if self.training.minibatch_size is None:
            config = config.with_minibatch(saved["training"]["minibatch_size"])
        if self.epochs is None:
            config = config.model_copy(update={"epochs": saved["epochs"]})
        if self.training.lr_decay is None:
            config = config.with_training(lr_decay=saved["training"]["lr_decay"])
        scale = saved["rl"].get("value_scale")
        if self.rl.value_scale == "returns" and scale is not None:
            config = config.with_rl(value_scale=tuple(scale))
        if self.rl.cql_alpha is None:
            config = config.with_rl(cql_alpha=saved["rl"]["cql_alpha"])
        models = self.evaluation.models
        if "minibatch_size" not in models.changed:  # its default was another one before 0.3.0
            rows = saved["evaluation"].get("models", {}).get("minibatch_size", models.minibatch_size)
            models = models.model_copy(update={"minibatch_size": rows})
            config = config.model_copy(update={"evaluation": self.evaluation.model_copy(update={"models": models})})
        return config

    @property
    def collects(self) -> bool:
        """Whether this process writes episodes for learners, and learns nothing."""
        return self.simulation is not None and self.simulation.mode == "collect"

    @property
    def follows(self) -> bool:
        """Whether this run learns from the episodes of collectors."""
        return self.simulation is not None and self.simulation.mode == "learn"

    @property
    def fewest_slots(self) -> int:
        """Smallest number of steps per environment in replay: a window of multi_steps, and the steps after it."""
        return (self.rl.multi_steps or 1) + 2

    @property
    def folder(self) -> Path:
        """The folder at model_output_path."""
        return Path(self.model_output_path).expanduser()

    parametric: ClassVar[bool] = False
    """Whether choices are lists of candidates with features."""

    @property
    def environments(self) -> SimulationConfig:
        """The simulation section of a config that has one."""
        assert self.simulation is not None
        return self.simulation

    def with_environments(self, **changes: Any) -> Self:
        """Returns the config with other values in its simulation section."""
        return self.model_copy(update={"simulation": self.environments.model_copy(update=changes)})

    @property
    def warmup_rounds(self) -> int:
        """Steps of every environment before learning starts."""
        return max(-(-self.environments.warmup_steps // self.environments.num_envs), self.fewest_slots - 1)

    @property
    def restarts(self) -> int:
        """Largest number of restarts after a failure: rendezvous.max_restarts, else 3 with checkpoints."""
        if self.rendezvous.max_restarts is not None:
            return self.rendezvous.max_restarts
        return 3 if self.checkpoint.periodic else 0

    def on_node(self, index: int | None, count: int) -> Self:
        """Returns the config of machine `index` of `count`; with defaults 2026 several machines save regularly."""
        changes: dict[str, Any] = {"node_index": index, "num_nodes": count}
        is_given = {"every_steps", "every_minutes"} & self.checkpoint.model_fields_set
        if self.defaults == "2026" and count > 1 and not is_given:
            changes["checkpoint"] = self.checkpoint.model_copy(update={"every_minutes": CHECKPOINT_MINUTES})
        return self.model_copy(update=changes)

    def rules(self) -> Iterator[Problem]:
        """Yields a Problem for each contradiction between sections."""
        if not self.model_output_path and not self.collects:
            yield self.wrong("model_output_path", "a path")
        if not self.training_data_path and self.simulation is None:
            yield self.wrong("training_data_path", "a path", "Or give a simulation section to train in")
        yield from self.algorithm_rules()
        if not self.takes_steps:
            yield from self._fitted_rules()
        if self.data.image is not None and not list(self.data.image.rules()):
            yield from self.image_rules("data.image")
        yield from self._loss_rules()
        yield from self._network_rules()
        yield from self._parallel_rules()
        if self.simulation is not None:
            yield from self._simulation_rules(self.simulation)
        if self.data.global_minibatch_size is not None and "minibatch_size" in self.training.changed:
            expected = "absent while training.minibatch_size is given"
            yield self.wrong("data.global_minibatch_size", expected, "Keep one of them", got="both")

    def _fitted_rules(self) -> Iterator[Problem]:
        """Yields what a model of rewards that is fitted without steps cannot learn."""
        if self.rl.gamma != 0:
            todo = 'It learns the reward of a row, not later ones. Set rl.gamma to 0, or algorithm to "dqn"'
            yield self.wrong("rl.gamma", f"0 with algorithm {self.algorithm}", todo)
        if self.collects or self.follows or self.simulated_share:
            expected = "dqn, crr or iql where rows are simulated"
            yield self.wrong("algorithm", expected, "Or set simulation.share to 0")
        if self.data.embeddings:
            todo = "Vectors of ids are learned by steps. dqn with rl.gamma 0 learns the reward of single decisions"
            yield self.wrong("algorithm", "dqn, crr or iql with data.embeddings", todo)

    def image_rules(self, got: str) -> Iterator[Problem]:
        """Yields what does not go together with states that are images; `got` says in errors that they are."""
        assert self.data.image is not None
        image = self.data.image.image
        linear = "What would read the pixels is a linear model"
        log_them = f"{linear}. Log the probability of each action"
        bytes_only = "Images are not normalized: the network divides bytes by 255"
        by_step = (
            "Trees and linear models do not read images. dqn with rl.gamma 0 learns the reward of single decisions"
        )
        source = self.data.columns.get("state_features", "")
        for is_wrong, key, expected, todo in (
            (not self.takes_steps, "algorithm", "dqn, crr or iql", by_step),
            (self.rainbow.bcq, "rainbow.bcq", "false", f"{linear}: use rl.cql_alpha, or algorithm crr or iql"),
            (self.evaluation.propensities == "estimate", "evaluation.propensities", '"logged"', log_them),
            (self.rl.set_missing_value_to_zero, "rl.set_missing_value_to_zero", "false", "No byte is missing"),
            (self.state_norm_data_path, "state_norm_data_path", "absent", bytes_only),
            (self.data.embeddings, "data.embeddings", "absent", "A state is an image or has features"),
            (self.timeline, "timeline", "absent", "Events with images are paired as they are read"),
            (not isinstance(source, str), "data.columns.state_features", "one column", "An image is in one column"),
        ):
            if is_wrong:
                yield Problem(key, f"{expected} with images", got, todo)
        if self.parametric:
            yield Problem("data.image", "absent for candidates", got, "Number the choices, and use workflows.dqn")
        if not all(image.after(conv_layers_for(image, self.training.conv_layers))):
            _, height, width = image.pixels
            todo = "Each layer leaves (size - kernel size) // stride + 1 pixels"
            yield self.wrong("training.conv_layers", f"layers that fit {height} x {width} pixels", todo)

    def _loss_rules(self) -> Iterator[Problem]:
        rl = self.rl
        if rl.value_bounds == "rewards" and (not self.training_data_path or self.simulated_share):
            yield self.wrong(
                "rl.value_bounds",
                "[low, high] or null where a simulation is trained on",
                "Bounds of an environment's rewards are not known in advance",
            )
        if rl.value_scale == "returns" and (not self.training_data_path or self.simulated_share):
            yield self.wrong(
                "rl.value_scale",
                "[center, scale] or null where a simulation is trained on",
                "Returns of an environment are not known in advance",
            )
        if rl.cql_alpha is None and (not self.training_data_path or self.simulated_share):
            yield self.wrong("rl.cql_alpha", "a number where a simulation is trained on")
        if rl.temperature == "auto" and (self.simulation is not None or not rl.softmax_policy):
            yield self.wrong(
                "rl.temperature",
                "a number with a simulation or with rl.softmax_policy 0",
                "auto needs the logging policy's entropy on logged rows, and only a softmax has a temperature",
            )

    def _network_rules(self) -> Iterator[Problem]:
        """Yields an activation of the values, and convolutions without images."""
        *_, last = self.training.activations or ("linear",)
        if last != "linear" and not self.rainbow.dueling_architecture:
            where = f"training.activations.{len(self.training.activations) - 1}"
            yield Problem(where, '"linear"', repr(last), "Values have no bounds, so the last layer has no activation")
        if self.training.conv_layers is not None and self.data.image is None and self.simulation is None:
            yield self.wrong("training.conv_layers", "absent without data.image", "Convolutions read images")

    def _parallel_rules(self) -> Iterator[Problem]:
        """Yields contradictions of parallel "dp"."""
        if self.parallel != "dp":
            return
        if not self.use_gpu:
            yield self.wrong(
                "parallel",
                '"ddp" or "none" while use_gpu is false',
                "torch's DataParallel divides a minibatch over the GPUs of one machine",
            )
        elif not self.use_all_avail_gpus:
            yield self.wrong(
                "use_all_avail_gpus",
                'true with parallel "dp"',
                "It needs GPUs, and its one process uses all of them; CUDA_VISIBLE_DEVICES chooses some. "
                'On a machine without a GPU set parallel to "ddp" or "none"',
            )

    def _simulation_rules(self, simulation: SimulationConfig) -> Iterator[Problem]:
        """Yields contradictions between data and simulation."""
        if self.collects and (self.num_nodes > 1 or self.use_all_avail_gpus or (self.num_processes_per_node or 1) > 1):
            yield self.wrong(
                "simulation.mode",
                "both or learn with several processes",
                "A collector is one process; start several collectors instead",
            )
        if self.data.history > 1 and simulation.mode != "both":
            todo = "Rows of collectors have one step. Learn in one process, or from a log of simulated episodes"
            yield self.wrong("data.history", f"1 with simulation.mode {simulation.mode}", todo)
        if self.training_data_path and simulation.mode == "both" and simulation.share is None:
            yield self.wrong(
                "simulation.share",
                "a number from 0 to 1 with training_data_path",
                "0 trains on the data and plays in simulation, 1 trains on the simulation",
            )
        if not self.training_data_path:
            least = (self.warmup_rounds + simulation.steps_per_rollout) * simulation.num_envs
            if simulation.total_steps < least:
                expected = f"at least {least}, for {simulation.num_envs} environments to warm up and step once"
                yield self.wrong("simulation.total_steps", expected)
        if simulation.backend == "cuda" and not self.use_gpu:
            yield self.wrong(
                "simulation.backend", "auto or cpu while use_gpu is false", "Environments run on the GPU that trains"
            )
        if not self.simulated_share:
            return
        if self.data.embeddings:
            todo = "Features of environments are numbers. Train on the log alone, or set simulation.share to 0"
            yield self.wrong("data.embeddings", "absent where rows are simulated", todo, got="given")
        if simulation.epsilon_end is None and simulation.epsilon_start < self.rl.epsilon:
            yield self.wrong(
                "simulation.epsilon_start",
                f"at least rl.epsilon ({self.rl.epsilon:g}), where it ends",
                "Or give simulation.epsilon_end",
            )
        fewest = self.fewest_slots * simulation.num_envs
        if simulation.replay.capacity < fewest:
            expected = f"at least {fewest}, for {self.fewest_slots} steps of {simulation.num_envs} environments"
            yield self.wrong("simulation.replay.capacity", expected)

    def _normalization_rules(self, column: str, key: str) -> Iterator[Problem]:
        """Yields a problem if a column's normalization is neither fitted nor given by the file of a key."""
        if self.training_data_path and getattr(self, key) is None and column not in self.norm_params.cols_to_norm:
            yield self.wrong("norm_params.cols_to_norm", f"{column} among them, or {key}")


def has_named_actions(tree: Mapping[str, Any], overrides: Iterable[str] = ()) -> bool:
    """Whether a JSON object is a DqnConfig: it names actions, or has no data.

    A config with an environment and no data fits both workflows, unless the environment's candidates differ from step
    to step.

    Args:
        tree: the JSON object.
        overrides: further keys that `--set` gives.
    """
    keys = {*tree, *overrides}
    timeline = tree.get("timeline")
    keys |= {f"timeline.{key}" for key in timeline} if isinstance(timeline, Mapping) else set()
    return "actions" in keys or not keys & {"training_data_path", "timeline.inputTableName"}


class DqnConfig(WorkflowConfig):
    """`python -m workflows.dqn`: learns a policy over named actions, evaluates it and exports it."""

    no_effect: ClassVar[tuple[NoEffect, ...]] = (
        *WorkflowConfig.no_effect,
        NoEffect(
            lambda config: config.timeline,
            ("timeline.actionDiscrete",),
            "true",
            "Candidates are workflows.parametric_dqn's",
        ),
        NoEffect(
            lambda config: True,
            ("action_norm_data_path",),
            "absent",
            "Named actions have no features; use workflows.parametric_dqn for candidates",
        ),
        NoEffect(
            lambda config: True,
            ("data.items",),
            "absent with actions",
            "Items have features and no names in the config; leave actions out and use workflows.parametric_dqn",
        ),
    )

    def rules(self) -> Iterator[Problem]:
        """Adds the rules of named actions."""
        if len(self.actions) < 2 and (self.simulation is None or self.actions or self.training_data_path):
            yield self.wrong("actions", "at least two action names")
        for name in self.rl.reward_boost or {}:
            if name not in self.actions and (self.actions or self.simulation is None):
                yield Problem(f"rl.reward_boost.{name}", f"one of {list(self.actions)}", repr(name))
        yield from self._normalization_rules("state_features", "state_norm_data_path")
        yield from super().rules()


class ParametricDqnConfig(WorkflowConfig):
    """`python -m workflows.parametric_dqn`: learns a policy over candidates, evaluates it and exports it."""

    parametric: ClassVar[bool] = True

    no_effect: ClassVar[tuple[NoEffect, ...]] = (
        *WorkflowConfig.no_effect,
        NoEffect(
            lambda config: True,
            ("actions",),
            "absent",
            "Candidates come with each row; use workflows.dqn for named actions",
        ),
        NoEffect(
            lambda config: config.rl.reward_boost,
            ("rl.reward_boost",),
            "absent",
            "Candidates have no names to boost; add the boost to the reward in the data",
        ),
    )

    def rules(self) -> Iterator[Problem]:
        """Adds the rules of candidate actions."""
        yield from self._normalization_rules("state_features", "state_norm_data_path")
        yield from self._normalization_rules("action", "action_norm_data_path")
        yield from super().rules()
