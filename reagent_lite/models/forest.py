"""Regression trees as tensors: values of many trees of limited depth, summed by output.

A tree of depth D has 2^D - 1 tests x[feature] <= threshold, in the order of a heap (the children of test i are 2 i + 1,
if it holds, and 2 i + 2), and 2^D values.
"""

from typing import Final

import torch
from torch import Tensor, nn


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
        values: Tensor = _forest_values(x, self.feature, self.threshold, self.value, self.outputs)
        return values


def tree_values(x: Tensor, feature: Tensor, threshold: Tensor, value: Tensor) -> Tensor:
    """Returns the value of each tree, [N, T]; see `Forest` for the arguments."""
    tests = feature.shape[1]
    number = torch.arange(feature.shape[0], device=x.device)
    flat_feature = feature.flatten()
    flat_threshold = threshold.flatten()
    position = (x.index_select(1, feature[:, 0]) > threshold[:, 0]).long()  # in its level of the tree
    before = 1  # number of tests above the level
    while before < tests:
        test = (position + (number * tests + before)).flatten()  # index_select of flat indices is the fastest gather
        column = flat_feature.index_select(0, test).view(position.shape)
        position = 2 * position + (x.gather(1, column) > flat_threshold.index_select(0, test).view(position.shape))
        before = 2 * before + 1
    leaf = (position + number * value.shape[1]).flatten()
    return value.flatten().index_select(0, leaf).view(position.shape)


@torch.jit.script_if_tracing  # type: ignore[untyped-decorator]
def _forest_values(x: Tensor, feature: Tensor, threshold: Tensor, value: Tensor, outputs: int) -> Tensor:
    """Returns the sums of trees [N, G]; scripted in a trace, which would fix the number of blocks of rows."""
    sums = []
    for rows in x.split(1024):  # type: ignore[no-untyped-call]
        values = tree_values(rows, feature, threshold, value)
        sums.append(values.view([rows.shape[0], outputs, value.shape[0] // outputs]).sum(2))
    return torch.cat(sums)
