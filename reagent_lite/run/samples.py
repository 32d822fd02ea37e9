"""Raw rows in the model's column order, on which the export is checked: of the evaluated log, or of random play."""

import numpy as np
import torch

from reagent_lite.data.rows.matrices import in_order
from reagent_lite.evaluation.candidates import candidate_features
from reagent_lite.export.content import SampleRows
from reagent_lite.run.environments import SAMPLE, Simulation
from reagent_lite.run.logged import Data
from reagent_lite.run.normalization import Normalization


def logged_sample(data: Data, count: int) -> SampleRows:
    """Returns raw rows spread over the evaluated data, in the model's column order; without rows, an absent one."""
    copy = data.held_out or data.train  # one that is empty counts as none
    if not len(copy):
        return _absent_row(data)
    numbers = np.unique(np.linspace(0, len(copy) - 1, min(count, len(copy))).astype(int))
    order = data.normalization.state.feature_ids
    values = np.array(in_order(copy.state[numbers], copy.state_ids, order, absent=np.nan), np.float32)
    if data.normalization.action is None:
        mask = np.array(copy.mask[numbers], bool)
        copy.release()
        return SampleRows(values=values, mask=mask)
    ids = data.normalization.action.feature_ids
    lists = np.asarray(copy.actions_list[numbers])
    lengths = copy.list_offsets[lists + 1] - copy.list_offsets[lists]
    longest = max(int(lengths.max()), 1)
    candidates = candidate_features(copy, numbers, ids, longest)
    copy.release()
    return SampleRows(values=values, candidates=candidates, mask=np.arange(longest) < lengths[:, None])


def _absent_row(data: Data) -> SampleRows:
    """Returns one row without any feature, every choice of which is allowed."""
    state, action = data.normalization.state.feature_ids, data.normalization.action
    values = np.full((1, len(state)), np.nan, np.float32)
    if action is None:
        return SampleRows(values=values, mask=np.ones((1, len(data.spec.action_names)), np.bool_))
    candidates = np.full((1, 1, len(action.feature_ids)), np.nan, np.float32)
    return SampleRows(values=values, candidates=candidates, mask=np.ones((1, 1), np.bool_))


def simulated_sample(simulation: Simulation, normalization: Normalization, count: int, kind: str) -> SampleRows:
    """Returns raw observations of a type of agents in random play, in the model's column order."""
    env = simulation.envs(0, count, stream=SAMPLE)
    env.reset()
    agents = next(one.agents for one in simulation.types if one.name == kind)
    seen = [None if t is None else t[:count].clone() for t in (env.observation, env.mask, env.features)]
    for step in range(count):  # environment i is recorded after i steps, so that states differ in age
        row = step * env.spec.agents + agents[step % len(agents)]
        for kept, now in zip(seen, (env.observation, env.mask, env.features), strict=True):
            if kept is not None and now is not None:
                kept[step] = now[row]
        env.act(None, epsilon=torch.ones(1, device=env.device))
        env.advance()
    state, mask, features = (None if t is None else t.cpu().numpy() for t in seen)
    assert state is not None
    values = state[:, list(normalization.state.feature_ids)]
    if features is None or normalization.action is None:
        return SampleRows(values=values, mask=mask)
    candidates = np.ascontiguousarray(features[:, :, list(normalization.action.feature_ids)])
    return SampleRows(
        values=values, candidates=candidates, mask=np.ones(features.shape[:2], bool) if mask is None else mask
    )
