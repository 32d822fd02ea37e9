"""Figures of a training run, as its report takes them."""

import numpy as np
import torch
from numpy.typing import NDArray

from reagent_lite.config import WorkflowConfig
from reagent_lite.data.rows.matrices import in_order
from reagent_lite.data.sampling.plan import apportion
from reagent_lite.data.sampling.shards import Shards
from reagent_lite.errors import named_counts
from reagent_lite.report.run import Source
from reagent_lite.run.logged import Data

SAMPLE = 4096  # rows that say how often a feature is present: to 0.8 % at worst, whatever the size of the log

Presence = dict[str, dict[int, float]]


def present_shares(data: Data) -> Presence:
    """Returns in which share of the training rows each feature is, by column and id; of candidates, of all listed.

    Each shard gives its part of a sample of at most SAMPLE rows. Every rank calls it, and has the result.
    """
    train, found = data.train, data.found
    shares = {
        "state": _present(data.shards, train.state[: len(train)], train.state_ids, found.state_ids),
        "action": _present(data.shards, train.candidates, train.action_ids, found.action_ids),
    }
    train.release()
    return shares


def _present(
    shards: Shards, values: NDArray[np.float32], ids: tuple[int, ...], wanted: tuple[int, ...]
) -> dict[int, float]:
    if not wanted:
        return {}
    counts = shards.counts(len(values))
    own = apportion(counts, min(SAMPLE, sum(counts)))[shards.own] if shards.is_first else 0
    numbers = np.unique(np.linspace(0, len(values) - 1, own).astype(np.int64)) if own else np.zeros(0, np.int64)
    sample = in_order(np.asarray(values[numbers]), ids, wanted, absent=np.nan)
    present = torch.from_numpy((~np.isnan(sample)).sum(0).astype(np.float64))
    rows = max(sum(shards.group.each(len(numbers))), 1)
    return dict(zip(wanted, (shards.group.sum(present) / rows).tolist(), strict=True))


def sources_of(config: WorkflowConfig, data: Data) -> tuple[Source, ...]:
    """Returns the data of a run as its report shows it."""
    used = [("training data", config.training_data_path, data.found, data.train),
            ("eval data", config.eval_data_path, data.held_out_found, data.held_out)]  # fmt: skip
    return tuple(
        Source(use=use, path=path or "by the timeline", rows=sum(found.rows), counts=named_counts(found.counts),
               copy=copy, on_node=data.shards.several)
        for use, path, found, copy in used if found is not None and copy is not None
    )  # fmt: skip
