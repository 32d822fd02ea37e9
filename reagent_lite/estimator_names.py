"""The estimators of a policy's value, by name and in words."""

from typing import Final

ESTIMATORS_IN_WORDS: Final = {
    "Direct_Method_Reward": "the reward model's mean over the policy's choices",
    "IPS_Reward": "logged rewards, weighted by the policy's probability of the action over the logging policy's",
    "Self_Normalized_IPS_Reward": "IPS divided by the mean weight",
    "Doubly_Robust_Reward": "the reward model, corrected by its weighted errors on the log",
    "Self_Normalized_Doubly_Robust_Reward": "doubly robust, the correction divided by the mean weight",
    "Switch_Doubly_Robust_Reward": "doubly robust, without rows of large weights",
    "Shrunk_Doubly_Robust_Reward": "doubly robust, with smaller weights",
    "Fitted_Q_Evaluation": "the value model's mean at the starts of episodes",
    "Per_Decision_Importance_Sampling": "logged rewards, each weighted by all decisions up to it",
    "Weighted_Per_Decision_Importance_Sampling": "the same, divided by the mean weight of each step",
    "Sequential_Doubly_Robust": "the value model, corrected by its weighted errors on the log",
    "Weighted_Sequential_Doubly_Robust": "the same, divided by the mean weight of each step",
    "MAGIC": "a blend of the value model and weighted returns with the least estimated error",
}
"""In the order of reports; rl.estimators has formulas and papers."""
