"""Wishes that this package does not fulfil, by the words in keys and values that ask for them.

docs/not_included.md has a section for each, with what to use instead; a test compares the two.
"""

import re
from typing import Final

PAGE: Final = "docs/not_included.md"
NOT_INCLUDED: Final[dict[str, tuple[str, ...]]] = {
    "Continuous actions": (
        *("continuous", "ddpg", "td3", "sac", "naf", "tqc", "awac", "gaussian", "squashed"),
        *("action_low", "action_high", "action_bounds", "action_noise", "target_entropy"),
        *("action_space", "action_dim", "action_size"),
    ),
    "Policy gradients": (
        *("ppo", "a2c", "a3c", "trpo", "reinforce", "impala", "gae", "grpo"),
        *("policy_gradient", "clip_range", "clip_ratio", "ent_coef", "entropy_coef", "vf_coef", "value_coef"),
        *("entropy_coefficient", "entropy_bonus", "actor", "critic", "critics", "actor_critic", "num_critics"),
    ),
    "Slates and rankings": (
        *("slate", "slates", "slateq", "ranking", "rankings", "ranker", "top_k", "seq2slate"),
        *("listwise", "pairwise", "rerank", "reranking", "position_bias", "cascade", "num_positions"),
    ),
    "Agents of PettingZoo": (
        *("pettingzoo", "marl", "mappo", "ippo", "maddpg", "qmix", "vdn", "multi_agent"),
        *("n_agents", "num_agents", "coma", "parallel_env", "aec_env"),
    ),
    "Recurrent policies": (
        "recurrent",
        "lstm",
        "gru",
        "rnn",
        "drqn",
        "r2d2",
        "burn_in",
        "hidden_state",
        "unroll_length",
    ),
    "Models of the environment and of sequences": (
        *("dreamer", "muzero", "mcts", "mpc", "cem", "mopo", "morel", "world_model", "model_based"),
        *("decision_transformer", "trajectory_transformer", "transformer", "context_length"),
    ),
}
"""{section of the page: words}. A word with an underscore is part of a key, others are whole words of it."""


def advise(text: str) -> str:
    """Returns advice on a key or value that asks for something of the page, or ""."""
    words = "_".join(re.findall(r"[a-z0-9]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", text).lower()))
    for section, wishes in NOT_INCLUDED.items():
        if any(f"_{wish}_" in f"_{words}_" for wish in wishes):
            return f"{section} are not included; {PAGE} says what to use instead"
    return ""
