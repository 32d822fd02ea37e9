"""The contents of a bundle besides the model: origin, evaluation, and rows to check the model on."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reagent_lite.export.tolerance import Tolerance
from reagent_lite.item_table import ItemTable


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRows:
    """Raw rows such as the model will see, for example rows of the evaluation data.

    Attributes:
        values: [N, F] float32 state features, NaN where missing, N at least 1; uint8 if states are images.
        candidates: [N, K, F'] float32, NaN where missing (parametric), or None.
        mask: [N, K] bool, the choices that exist and are allowed; None if all are.
    """

    values: NDArray[Any]
    candidates: NDArray[np.float32] | None = None
    mask: NDArray[np.bool_] | None = None

    def __getitem__(self, rows: slice) -> "SampleRows":
        candidates = None if self.candidates is None else self.candidates[rows]
        return SampleRows(
            values=self.values[rows], candidates=candidates, mask=None if self.mask is None else self.mask[rows]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleContent:
    """The contents of a bundle without the predictor.

    Attributes:
        workflow: "dqn" or "parametric_dqn".
        normalization: {"state": ..., "action": ...}, each {feature id: JSON string of parameters}.
        config: the resolved config.
        evaluation: the evaluation's results; NaN and infinity are written as null.
        decision, findings: the advice on the policy, and the results, in Markdown for the model card; empty without an
            evaluation.
        steps: optimizer steps taken.
        data_hash: hash of the training data.
        config_hash: hash of the resolved config.
        versions: {"reagent-lite": ..., "torch": ..., ...}.
        git_revision: revision of the working tree, if there is one.
        tolerance: largest difference between an exported q and the live one.
        sample: raw rows for golden.json and for the check.
        score: meaning of q.
        items: the item table that candidates may be named by, or None.
    """

    workflow: str
    normalization: dict[str, dict[str, str]]
    config: dict[str, Any]
    evaluation: dict[str, Any]
    steps: int
    data_hash: str
    config_hash: str
    versions: dict[str, str]
    git_revision: str | None
    tolerance: Tolerance
    sample: SampleRows
    decision: str = ""
    findings: str = ""
    score: str = "value"
    items: ItemTable | None = None
