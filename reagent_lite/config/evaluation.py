"""`evaluation`: counterfactual policy evaluation (CPE) on logged episodes."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from reagent_lite.config.section import Count, Fraction, Positive, PositiveShare, Section


class GuardrailConfig(Section):
    """A limit on how much worse a metric may be than under the logging policy."""

    at_most_worse_by: Annotated[float, Field(ge=0)] = 0.0
    """Largest worsening of the metric, in its unit: per row or per episode, as the reward is compared."""
    better: Literal["lower", "higher"] = "lower"
    """Whether lower values of the metric are better, such as complaints, or higher ones, such as revenue."""


class EvaluationModelsConfig(Section):
    """Training of the reward model and the value model behind estimates."""

    learning_rate: Positive = 0.003
    """Learning rate of both models (Adam)."""
    target_update_rate: PositiveShare = 0.1
    """Soft update of the value model's target network, which gives the estimates."""
    minibatch_size: Count = 256
    """Rows per process and step."""
    fit_passes: Count | None = None
    """Passes over the training rows when the models are fitted after an epoch. Absent: one, over at most an eighth of
    the rows that the policy learns from in an epoch."""
    final_fit_passes: Count | None = None
    """Passes when the models are fitted at the end; fewer if the loss on held-out rows stops falling. Absent: 5, over
    at most a sixteenth of the rows that the policy learned from in all epochs, a quarter if no later reward counts, but
    at least 120 steps in at most 40 passes. With an effective sample size below evaluation.min_effective_episodes the
    models are not fitted: nothing could check them, and no decision could be based on them."""
    max_fit_rows: Count = 4_000_000
    """Largest number of rows that each process fits the models to, after an epoch and at the end, whatever the
    passes."""


class EvaluationConfig(Section):
    """Estimation of the learned policy's value from logged episodes."""

    calc_cpe_in_training: bool = True
    """true: evaluate after every epoch as well, with models.fit_passes, without MAGIC and intervals (with more than 30
    epochs of fewer than 20 optimizer steps: after every few epochs); false: only at the end."""
    propensities: Literal["logged", "estimate"] = "logged"
    """Source of the logging policy's probabilities in weights. logged: the log; without them there are no weighted
    estimates. estimate: a softmax of state and choice, curved where that helps, mixed with uniform choices, fitted to
    other episodes than it is used for. Weighted estimates are not used unless it is calibrated. It cannot account for
    information that the logging policy had and the log lacks."""
    figures_share: Positive = 1 / 32
    """Rows evaluated after an epoch, as a share of the rows it trained on, at least 256; the final evaluation uses all
    rows."""
    held_out_share: Fraction = 0.2
    """Share of training episodes that are scored if eval_data_path is absent; the models behind the estimates are
    fitted to the others."""
    learn_from_scored: bool | None = None
    """Whether the policy learns from scored episodes that are in the training data. true: estimates are then biased in
    its favor and cannot justify a decision to ship it; false: scored episodes are left out of learning. Absent: false,
    but true with eval_data_path. It must also have been false in the run of training.warm_start_model_path, if that run
    learned from the same log."""
    choosing_share: Fraction | None = None
    """Share of the scored episodes (of their units, if the log names units) that choose among runs, seeds and epochs
    instead of deciding. Estimates after an epoch and the scores `choosing/...` are of these episodes, and the final
    evaluation, which decides, is of the others; in simulation of the episodes after an epoch and of the final ones.
    `workflows.compare` sets it. Absent: all scored episodes are in both, and there are no such scores."""
    confidence_level: Fraction = 0.95
    """Confidence level of every interval."""
    reward_range: tuple[float, float] | None = None
    """Lowest and highest possible reward of a row. Intervals of weighted estimates allow for rewards and returns in
    this range, even if no scored row has them; absent: for the range of the scored rows."""
    guardrails: dict[str, GuardrailConfig] = {}
    """{metric: limit on how much worse it may be}. The decision is do not ship if a metric is worse by more, and
    discuss if the log does not show that it is not. The level of every interval is divided by one more than the number
    of guardrails."""
    bootstrap_resamples: Annotated[int, Field(ge=100)] = 2000
    """Resamples of episodes for the intervals of estimates by a fitted model."""
    max_episodes: Annotated[int, Field(ge=2)] | None = None
    """Largest number of scored episodes of all machines; of more episodes a sample is scored, drawn by seed and mdp_id.
    Absent: all, as long as they have at most 20 million choices (rows times actions or candidates, times reward and
    metrics), which takes a minute or two; else as many as have, but at least 10 000. Estimates after an epoch are of at
    most 10 000 episodes."""
    max_horizon: Count = 1000
    """Largest number of scored rows per episode, from its start; the report counts later rows."""
    min_effective_episodes: Annotated[float, Field(ge=1)] = 10.0
    """Effective sample size below which the verdict on weighted estimates is: do not use."""
    models: EvaluationModelsConfig = EvaluationModelsConfig()
    """How the reward model and the value model are trained; the defaults suit most logs."""

    renamed: ClassVar = {name: f"models.{name}" for name in EvaluationModelsConfig.model_fields}

    @property
    def level(self) -> float:
        """Level of each interval with which those of reward and guardrails hold together; Bonferroni (1936)."""
        return 1 - (1 - self.confidence_level) / (1 + len(self.guardrails))
