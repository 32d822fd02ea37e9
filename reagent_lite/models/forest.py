"""Regression trees as tensors: values of many trees of limited depth, summed by output.

A tree of depth D has 2^D - 1 tests x[feature] <= threshold, in the order of a heap (the children of test i are 2 i + 1,
if it holds, and 2 i + 2), and 2^D values.
"""

from typing import Final

import torch
from torch import Tensor, nn

_ROWS_AT_ONCE: Final = 1024


class Forest(nn.Module):
    """Sums of regression trees, the same number of trees for each of G outputs.

    Args:
        feature: [G R, 2^D - 1] int64, columns of the input; the trees of an output are adjacent.
        threshold: [G R, 2^D - 1] float32.
        value: [G R, 2^D] float32.
        outputs: G.
    """

    def __init__(self, feature: Tensor, threshold: Tensor, value: Tensor, *, outputs: int) -> None:
        super().__init__()
        self.outputs: Final[int] = outputs
        self.feature = nn.Buffer(feature)
        self.threshold = nn.Buffer(threshold)
        self.value = nn.Buffer(value)

    def forward(self, x: Tensor) -> Tensor:
        """Returns [N, G] for x [N, W] without NaN."""
        return forest_values(x, self.feature, self.threshold, self.value, self.outputs)


def forest_values(x: Tensor, feature: Tensor, threshold: Tensor, value: Tensor, outputs: int) -> Tensor:
    """Returns the sums of trees [N, G]; see `Forest` for the arguments."""
    parts = [
        tree_values(rows, feature, threshold, value).view(-1, outputs, value.shape[0] // outputs).sum(2)
        for rows in x.split(_ROWS_AT_ONCE)
    ]
    return torch.cat(parts)


def tree_values(x: Tensor, feature: Tensor, threshold: Tensor, value: Tensor) -> Tensor:
    """Returns the value of each tree, [N, T]; see `Forest` for the arguments."""
    tests = feature.shape[1]
    first = torch.arange(len(feature), device=x.device) * tests
    flat_feature = feature.flatten()
    flat_threshold = threshold.flatten()
    node = torch.zeros(len(x), len(feature), dtype=torch.int64, device=x.device)
    for _ in range(value.shape[1].bit_length() - 1):
        test = node + first
        fails = x.gather(1, flat_feature[test]) > flat_threshold[test]
        node = 2 * node + 1 + fails
    leaf = node - tests + torch.arange(len(feature), device=x.device) * value.shape[1]
    return value.flatten()[leaf]
