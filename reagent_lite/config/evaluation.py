"""`evaluation`: counterfactual policy evaluation (CPE) on logged episodes."""

from typing import Annotated, Literal

from pydantic import Field

from reagent_lite.config.section import Count, Fraction, Positive, PositiveShare, Section


class EvaluationConfig(Section):
    """How the learned policy's value is estimated from logged episodes."""

    calc_cpe_in_training: bool = True
    """Evaluate after every epoch too, by fit_passes, all estimates but MAGIC, without intervals (of more than 30 epochs
    with fewer than 20 optimizer steps each: after every few); false: only once, at the end."""
    propensities: Literal["logged", "estimate"] = "logged"
    """Where weights take the logging policy's probabilities from. logged: the log, without which weighted estimates are
    undefined; estimate: a softmax of state and choice, mixed with uniform choices, fitted to other episodes than it is
    used for. Estimates by weights are not used unless it is calibrated, and what the logging policy saw and the log
    lacks cannot be checked."""
    figures_share: Positive = 1 / 32
    """Rows evaluated after an epoch, as a share of those it trained on, at least 256; all are evaluated at the end."""
    held_out_share: Fraction = 0.2
    """Share of training episodes that are scored where eval_data_path is absent; the models behind the estimates are
    fitted to the others."""
    learn_from_scored: bool | None = None
    """Whether the policy learns from scored episodes that are in the training data. Estimates flatter it then, and no
    decision to ship it rests on them; false: they are kept out of learning. Absent: false, but true with
    eval_data_path. It must have been false in the run of training.warm_start_model_path too, if that learned from the
    same log."""
    confidence_level: Fraction = 0.95
    """Confidence level of every interval."""
    reward_range: tuple[float, float] | None = None
    """Lowest and highest reward of a row that are possible. Intervals of weighted estimates allow for rewards and
    returns that the evaluated policy has not met; absent: for those that the scored rows have."""
    bootstrap_resamples: Annotated[int, Field(ge=100)] = 2000
    """Resamples of episodes behind the intervals of estimates by a fitted model and of returns in simulation."""
    max_episodes: Annotated[int, Field(ge=2)] = 10_000
    """Episodes scored, of all machines together: when there are more, a draw by seed and mdp_id."""
    max_horizon: Count = 1000
    """Rows of an episode that are scored, from its start; the report counts what lies beyond."""
    min_effective_episodes: Annotated[float, Field(ge=1)] = 10.0
    """With an effective sample size below this the verdict on weighted estimates is: do not use."""
    learning_rate: Positive = 0.003
    """Learning rate of the reward model and the value model (Adam)."""
    target_update_rate: PositiveShare = 0.1
    """Soft update of the value model's target network, which is also the one that is scored."""
    minibatch_size: Count = 1024
    """Rows per process and step when the two models are fitted."""
    fit_passes: Count | None = None
    """Passes over the training rows when the models are fitted after an epoch. Absent: one, of at most an eighth of the
    rows that the policy learns from in an epoch."""
    final_fit_passes: Count | None = None
    """Passes when they are fitted at the end; fewer where the loss on rows kept apart no longer falls. Absent: 40, with
    at most a quarter of the rows that the policy learned from in all epochs (at least 200 steps), and none where the
    weights of the scored episodes leave fewer than min_effective_episodes: nothing could check the models then, and no
    decision rests on them."""
    max_fit_rows: Count = 4_000_000
    """Rows that each process fits them to at most, after an epoch and at the end, whatever the passes."""
