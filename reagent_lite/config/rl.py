"""`rl`: the decision problem and the targets of learning."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from reagent_lite.config.section import Count, NoEffect, NotNegative, Number, Positive, PositiveShare, Section, Share
from reagent_lite.errors import Problem


class RLConfig(Section):
    """Discount, targets, loss, and the policy derived from the learned values or logits."""

    gamma: Share = 0.9
    """Discount per time step. 0: the value of an action is the reward of its row, without later rewards, and the
    decision compares rewards per row."""
    epsilon: Share = 0.1
    """With softmax_policy 0: share of uniformly random choices of the policy; 0 is greedy. In simulation it is also the
    share at the end of exploration, unless simulation.epsilon_end is given."""
    target_update_rate: PositiveShare = 0.001
    """Soft update: target <- rate * online + (1 - rate) * target after every optimizer step."""
    maxq_learning: bool = True
    """true: the best allowed next action (Q-learning); false: the logged next action (SARSA)."""
    reward_boost: dict[str, float] | None = None
    """{action name: reward added whenever the action is taken}; named actions only."""
    temperature: Positive | Literal["auto"] | None = None
    """With softmax_policy 1: the policy is softmax(Q / temperature) over the allowed actions; with algorithm crr and
    iql it is softmax(logits / temperature). Absent: 0.01 for values; 1 for logits, the policy as it was learned. auto:
    the temperature at which the policy has the logging policy's mean entropy, computed at each evaluation; the exported
    model has the number. auto needs propensities, logged or estimated, and no simulation."""
    softmax_policy: Literal[0, 1] | bool = 1
    """The policy of the run, which is evaluated on logs, played in simulation and exported. 1: softmax at temperature;
    0: epsilon-greedy at epsilon."""
    use_seq_num_diff_as_time_diff: bool = False
    """Discount by gamma ** (time_diff / time_diff_unit_length) instead of once per row. Every row that is not
    terminal then needs a time_diff."""
    time_diff_unit_length: Positive = 1.0
    """Divisor of time_diff, in its unit: microseconds where sequence_number is a time. A value with which nearly all
    discounts are below 0.001, or all are 1, is refused."""
    q_network_loss: Literal["mse", "huber", "bce_with_logits"] = "mse"
    """huber: smooth L1 with beta 1. bce_with_logits: needs gamma 0 and rewards in [0, 1]; values are then probabilities
    in figures, in the exported model and for temperature."""
    set_missing_value_to_zero: bool = False
    """Read an absent feature as the raw value 0 instead of as missing."""
    multi_steps: Count | None = None
    """Rows of an n-step return, consecutive in an episode; the end of the episode cuts it. With maxq_learning false a
    return ends before a row at a time limit, as no next action follows it."""
    cql_alpha: NotNegative | None = 0.0
    """Weight alpha of the conservative term logsumexp_a Q(s, a) - Q(s, logged a) in CQL's objective (Kumar et al.,
    2020, eq. 4), where the squared TD error has the factor 1/2. mse lacks this factor, so the term is then weighted by
    2 alpha; with other losses by alpha. null, which is the default of 2026 on a log: 0.1, or 0 where each row is a
    decision of its own."""
    value_bounds: Literal["rewards"] | tuple[float, float] | None = None
    """Clip targets to [low, high]. rewards: to the possible returns of the training data, [r_min, r_max] / (1 -
    gamma)."""
    value_scale: Literal["returns"] | tuple[float, Positive] | None = None
    """[center, scale]: the network learns (Q - center) / scale, so that learning rate, cql_alpha and clip_grad_norm
    mean the same for rewards of 0.01 and of 1000; TD losses are then in units of the scale. returns: mean and standard
    deviation of the discounted returns of the training data, from each row on."""
    tensorboard_logging_freq: Number | None = None
    """Optimizer steps between two additional reports; absent or 0: one report per epoch."""
    predictor_atol_check: NotNegative = 0.0
    """Absolute tolerance of the exported model against the live network."""
    predictor_rtol_check: NotNegative = 5e-5
    """Relative tolerance of the exported model against the live network."""
    ratio_different_predictions_tolerance: Share = 0.0
    """Share of predictions that may differ by more than these tolerances."""
    target_action_distribution: tuple[float, ...] | None = None
    """Not supported; null only."""
    state_feature_params: dict[str, object] | None = None
    """Not supported; null only."""

    unsupported: ClassVar = {
        "target_action_distribution": "Steering towards an action distribution is not supported; remove the key or use "
        "reward_boost",
        "state_feature_params": "The key is not supported; remove it, and declare features of ids and of lists of ids "
        "in data.embeddings",
    }

    no_effect: ClassVar[tuple[NoEffect, ...]] = (
        NoEffect(
            lambda rl: rl.use_seq_num_diff_as_time_diff,
            ("multi_steps",),
            "null while use_seq_num_diff_as_time_diff is true",
            "n-step returns count rows, time differences count time: choose one",
        ),
    )

    def rules(self) -> Iterator[Problem]:
        """Yields a Problem for each combination that contradicts itself."""
        if self.q_network_loss == "bce_with_logits" and self.gamma != 0:
            yield self.wrong(
                "q_network_loss",
                "mse or huber unless gamma is 0",
                "A cross-entropy needs targets in [0, 1]",
                got=f"bce_with_logits with gamma {self.gamma}",
            )
        if isinstance(self.value_bounds, tuple) and self.value_bounds[0] >= self.value_bounds[1]:
            yield self.wrong("value_bounds", "[low, high] with low < high")
