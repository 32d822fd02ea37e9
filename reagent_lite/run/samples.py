"""Samples of a run's rows for the check of the exported model, and facts about its data for the report."""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from reagent_lite.config import WorkflowConfig
from reagent_lite.config.paths import show_paths
from reagent_lite.data.log_shares import counts_in_words, shares_of_counts
from reagent_lite.data.rows.matrices import in_order
from reagent_lite.data.sampling.plan import apportion
from reagent_lite.data.sampling.shards import Shards
from reagent_lite.evaluation.candidates import gather_candidate_features
from reagent_lite.export.bundle_content import SampleRows
from reagent_lite.report.run import DataFacts, DataSource, FeatureFacts
from reagent_lite.run.environments import SAMPLE, Simulation
from reagent_lite.run.logged import Data
from reagent_lite.run.normalization import Normalization

_PRESENCE_ROWS = 4096  # a share of these rows has a standard error of at most 0.8 %


def logged_facts(config: WorkflowConfig, data: Data) -> DataFacts:
    """Returns the files of training and eval data, and statistics of the training data's features.

    The presence of a candidate feature is its share among all listed candidates. Each shard contributes its part of a
    sample of at most _PRESENCE_ROWS rows. Every rank calls the function and gets the result.
    """
    train = data.train.copy
    agreement = data.train.agreement
    pixels = data.spec.image is not None
    states = () if pixels else agreement.state_ids
    features = {
        "state": _describe(data.shards, train.state[: len(train)], train.state_ids, states),
        "action": _describe(data.shards, train.candidates, train.action_ids, agreement.action_ids),
    }
    for side, spec in data.normalization.sides.items():
        for feature in spec.features:
            if fact := features[side].get(feature.feature_id):
                fact = replace(fact, other=data.train.others[side].get(feature.feature_id, 0))
                features[side][feature.feature_id] = replace(fact, mean=None, stddev=None) if feature.levels else fact
    train.release()
    logs = (
        ("training data", config.training_data_path, data.train),
        ("eval data", config.eval_data_path, data.held_out),
    )
    sources = tuple(
        DataSource(
            use=use,
            path=show_paths(path or "by the timeline"),
            rows=sum(log.agreement.rows),
            counts=counts_in_words(log.agreement.counts),
            logs=tuple(shares_of_counts(path or "", log.agreement.counts)),
            copy=log.copy,
            on_node=data.shards.several,
        )
        for use, path, log in logs
        if log is not None
    )
    note = (
        f"In the units of the data, from at most {_PRESENCE_ROWS:,} rows spread over the training data. Other values "
        "are those of one-hot features that have no column of their own, counted in all rows."
    )
    return DataFacts(features=features, note=note, sources=sources, items=data.items, discounts=data.train.discounts)


def _describe(
    shards: Shards, values: NDArray[np.float32], ids: tuple[int, ...], wanted: tuple[int, ...]
) -> dict[int, FeatureFacts]:
    if not wanted:
        return {}
    counts = shards.counts(len(values))
    part = apportion(counts, min(_PRESENCE_ROWS, sum(counts)))[shards.own] if shards.is_first else 0
    numbers = np.unique(np.linspace(0, len(values) - 1, part).astype(np.int64)) if part else np.zeros(0, np.int64)
    sample = in_order(np.asarray(values[numbers]), ids, wanted, absent=np.nan)
    features = torch.from_numpy(sample.astype(np.float64))
    present = ~features.isnan()
    count, total = shards.group.all_reduce(torch.stack((present.double().sum(0), features.nansum(0))))
    mean = total / count
    square = shards.group.all_reduce(torch.where(present, (features - mean).square(), 0.0).sum(0))
    rows = max(sum(shards.group.all_gather(len(numbers))), 1)
    columns = zip((count / rows).tolist(), mean.tolist(), (square / count).sqrt().tolist(), strict=True)
    facts = [FeatureFacts(present=share, mean=mean, stddev=stddev) for share, mean, stddev in columns]
    return dict(zip(wanted, facts, strict=True))


def logged_sample(data: Data, count: int) -> SampleRows:
    """Returns raw rows spread over the evaluated data, in the model's column order; without data, one empty row."""
    copy = data.evaluated.copy or data.train.copy  # an empty copy is false
    if not len(copy):
        return _absent_row(data)
    numbers = np.unique(np.linspace(0, len(copy) - 1, min(count, len(copy))).astype(int))
    order = data.normalization.state.feature_ids
    values = np.array(in_order(copy.state[numbers], copy.state_ids, order, absent=np.nan))
    if data.normalization.action is None:
        mask = np.array(copy.mask[numbers], bool)
        copy.release()
        return SampleRows(values=values, mask=mask)
    ids = data.normalization.action.feature_ids
    lists = np.asarray(copy.actions_list[numbers])
    lengths = copy.list_offsets[lists + 1] - copy.list_offsets[lists]
    longest = max(int(lengths.max()), 1)
    candidates = gather_candidate_features(copy, numbers, ids, longest)
    copy.release()
    return SampleRows(values=values, candidates=candidates, mask=np.arange(longest) < lengths[:, None])


def _absent_row(data: Data) -> SampleRows:
    """Returns one row whose features are all missing and whose choices are all allowed."""
    state = data.normalization.state.feature_ids
    action = data.normalization.action
    values = np.full((1, len(state)), np.nan, np.float32)
    if data.spec.image is not None:
        values = np.zeros((1, len(state)), np.uint8)
    if action is None:
        return SampleRows(values=values, mask=np.ones((1, len(data.spec.action_names)), np.bool_))
    candidates = np.full((1, 1, len(action.feature_ids)), np.nan, np.float32)
    return SampleRows(values=values, candidates=candidates, mask=np.ones((1, 1), np.bool_))


def simulated_sample(simulation: Simulation, normalization: Normalization, count: int, kind: str) -> SampleRows:
    """Returns raw observations of a type of agents that play at random, in the model's column order."""
    env = simulation.envs(0, count, stream=SAMPLE)
    env.reset()
    agents = next(agent_type.agents for agent_type in simulation.types if agent_type.name == kind)
    recorded = [None if rows is None else rows[:count].clone() for rows in (env.observation, env.mask, env.features)]
    for step in range(count):  # environment i is recorded after i steps, so that the rows are of different steps
        row = step * env.spec.agents + agents[step % len(agents)]
        for kept, now in zip(recorded, (env.observation, env.mask, env.features), strict=True):
            if kept is not None and now is not None:
                kept[step] = now[row]
        env.act(None, epsilon=torch.ones(1, device=env.device))
        env.advance()
    state, mask, features = (None if rows is None else rows.cpu().numpy() for rows in recorded)
    assert state is not None
    values = state[:, list(normalization.state.feature_ids)]
    if features is None or normalization.action is None:
        return SampleRows(values=values, mask=mask)
    candidates = np.ascontiguousarray(features[:, :, list(normalization.action.feature_ids)])
    return SampleRows(
        values=values, candidates=candidates, mask=np.ones(features.shape[:2], bool) if mask is None else mask
    )
