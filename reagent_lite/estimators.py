"""The estimators of a policy's value: their names, and what they are in words."""

from typing import Final

ESTIMATORS_IN_WORDS: Final = {
    "Direct_Method_Reward": "the reward model's mean over the policy's choices",
    "IPS_Reward": "logged rewards, weighted by how much likelier the policy makes the logged action than the log did",
    "Self_Normalized_IPS_Reward": "IPS divided by the mean weight",
    "Doubly_Robust_Reward": "the reward model, corrected by the weighted errors that it makes on the log",
    "Self_Normalized_Doubly_Robust_Reward": "doubly robust, the correction divided by the mean weight",
    "Switch_Doubly_Robust_Reward": "doubly robust, without rows of large weights",
    "Shrunk_Doubly_Robust_Reward": "doubly robust, with smaller weights",
    "Fitted_Q_Evaluation": "the value model's mean at the starts of episodes",
    "Per_Decision_Importance_Sampling": "logged rewards, each weighted by all decisions up to it",
    "Weighted_Per_Decision_Importance_Sampling": "the same, divided by the mean weight of each step",
    "Sequential_Doubly_Robust": "the value model, corrected by the weighted errors that it makes on the log",
    "Weighted_Sequential_Doubly_Robust": "the same, divided by the mean weight of each step",
    "MAGIC": "a blend of the value model and weighted returns with the least estimated error",
}
"""By name, in the order of reports; formulas and papers are in rl.estimators, which has an entry for each."""
