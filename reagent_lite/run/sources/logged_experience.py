"""Logged rows as the source of a run."""

from reagent_lite.algorithms.bcq import LoggingPolicy
from reagent_lite.algorithms.boosting import Boosting
from reagent_lite.algorithms.learners import Learner, learners_of
from reagent_lite.config import WorkflowConfig
from reagent_lite.data.sampling.plan import ReadPlan
from reagent_lite.data.sampling.source import LoggedSource
from reagent_lite.distributed.group import Group
from reagent_lite.evaluation.behavior import fit_logging_policy
from reagent_lite.export.bundle_content import SampleRows
from reagent_lite.item_table import ItemTable
from reagent_lite.report.run import DataFacts
from reagent_lite.run.evaluators import LOGS, VALIDATION_LOSS, Evaluators, LogEvaluator
from reagent_lite.run.learner import captures
from reagent_lite.run.logged import Data
from reagent_lite.run.normalization import write_fitted
from reagent_lite.run.reward_model import fit_reward_model
from reagent_lite.run.samples import logged_facts, logged_sample
from reagent_lite.run.sources.experience_source import Source
from reagent_lite.run.sources.stream import Stream, log_plan, order_of, warn_of_few_steps
from reagent_lite.run.value_bounds import ReturnBounds, return_bounds
from reagent_lite.sim.experience import ONLY
from reagent_lite.training.best import BestState
from reagent_lite.training.capture import FixedBatches
from reagent_lite.types import BatchSource


class LoggedExperience(Source):
    """Logged rows of all machines.

    Attributes:
        data: the rows; the other attributes are those of Source.
    """

    def __init__(self, config: WorkflowConfig, group: Group, data: Data) -> None:
        self.config = config
        self.group = group
        self.data = data
        self.spec = data.spec
        self.normalization = data.normalization
        self.identity = {"data": data.train.agreement.content, "env": ""}

    @property
    def items(self) -> ItemTable | None:
        """The table of data.items, or None."""
        return self.data.items

    def stream(self, learner: Learner) -> Stream:
        """Returns batches in the order of a read plan over all machines."""
        plan = logged_plan(self.config, self.data, self.config.minibatch_over(self.group.world_size))
        order = order_of(plan, plan, simulated=0, only_simulated=False)
        warning = None
        if self.config.takes_steps:
            log_plan(self.config, plan, self.group, continues=self.data.continues)
            warning = warn_of_few_steps(self.config, plan, order.rows, self.group)
        source: BatchSource = self._source(plan)
        if captures(self.config, self.group):
            source = FixedBatches(source, plan.rows_of_step(0))
        return Stream(source=source, plan=plan, order=order, group=self.group, warning=warning)

    def fit(self, learner: Learner) -> None:
        """Fits a model of the reward, or BCQ's logging policy, to the rows that the learner learns from."""
        learner = learners_of(learner)[ONLY]
        if isinstance(learner, Boosting):
            fit_reward_model(learner, self.config, self.data, self.group)
        logging_policy = getattr(learner, "behavior_cloning", None)
        if isinstance(logging_policy, LoggingPolicy):
            fit_logging_policy(logging_policy, self.data.train.copy, self.data.learned, self.spec, self.data.shards)

    def _source(self, plan: ReadPlan) -> LoggedSource:
        return LoggedSource(self.data.learned, plan, self.group.rank, self.group.device)

    def evaluators(self, learner: Learner) -> Evaluators:
        """Returns the evaluator on logged rows, by whose validation rows the best state is chosen."""
        logs = LogEvaluator(self.config, self.data, learners_of(learner)[ONLY], self.group)
        if self.data.validation is None:
            return Evaluators({LOGS: logs})
        rows = sum(self.data.shards.counts(self.data.validation.count))
        best = BestState(
            learner,
            tags=(VALIDATION_LOSS,),
            lowest=True,
            patience=self.config.checkpoint.patience,
            unit="epoch",
            described=f"lowest TD loss on {rows:,} validation rows",
        )
        return Evaluators({LOGS: logs}, best)

    def return_bounds(self) -> ReturnBounds | None:
        """Returns the range of values that the rewards of all machines allow."""
        return return_bounds(self.config, self.data.train.rows, self.group)

    def write_fitted(self) -> None:
        """Writes the normalization that was fitted to the training data."""
        write_fitted(self.config, self.normalization, self.data.given)

    def sample(self, count: int, kind: str = ONLY) -> SampleRows:
        """Returns rows spread over the evaluated data."""
        return logged_sample(self.data, count)

    def facts(self) -> DataFacts:
        """Returns how often each feature is present, and the files."""
        return logged_facts(self.config, self.data)


def logged_plan(config: WorkflowConfig, data: Data, minibatch: int) -> ReadPlan:
    """Returns the plan by which all processes together read `minibatch` training rows at a time."""
    return ReadPlan(
        shards=data.counts,
        minibatch=minibatch,
        epochs=config.num_epochs if config.takes_steps else 0,
        seed=config.seed,
        reads=data.shards.of_rank,
        minibatches_per_step=config.training.minibatches_per_step,
    )
