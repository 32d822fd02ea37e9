"""What a run is judged by: figures on held-out rows each epoch, and counterfactual policy evaluation.

fitting rows   training episodes that are not scored ─► reward and value models of the policy as it is now
scored rows    eval episodes (or a share of the training episodes, by hash of mdp_id) ─► page ─► estimators

Every machine's rows are fitted to; the scored ones are those that rank 0 has.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reagent_lite.algorithms.cpe_heads import CPEHeads, build_cpe_heads, fit_heads
from reagent_lite.algorithms.dqn import DQN
from reagent_lite.config import WorkflowConfig
from reagent_lite.data.plan import apportion
from reagent_lite.data.source import LoggedSource, rows_in_order
from reagent_lite.data.training_copy import give_back_memory
from reagent_lite.distributed.group import Group
from reagent_lite.distributed.rehearsal import rehearse
from reagent_lite.evaluation import report
from reagent_lite.evaluation.cpe import evaluate_page
from reagent_lite.evaluation.figures import figures
from reagent_lite.evaluation.page import EvaluationPage, build_page, held_out
from reagent_lite.rl.policies import softmax_policy
from reagent_lite.training.tensors import Tree, load_optimizer, optimizer_state, plain
from reagent_lite.types import Actions, TransitionBatch
from workflows.learning import network_settings
from workflows.preparation import Data, single_step_rows
from workflows.reporting import say

_FEWEST_FIGURE_ROWS = 256
_EPOCH_RESAMPLES = 100  # [m] 2000 cost a second an epoch, most of it MAGIC's; an epoch's interval is to look at


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Result of a counterfactual evaluation; on ranks other than 0 everything is empty."""

    scalars: dict[str, float]
    document: dict[str, Any]
    lines: tuple[str, ...]


class Judge:
    """Judges the learner as it stands.

    Args:
        config: the run's config.
        data: training and held-out rows.
        learner: what is judged.
        group: ranks share the work.
    """

    def __init__(self, config: WorkflowConfig, data: Data, learner: DQN, group: Group) -> None:
        self._config, self._data, self._learner, self._group = config, data, learner, group
        self._scorer, self._restriction = learner.scorer, learner.restriction
        self._judged = data.train_rows if data.held_out_rows is None else data.held_out_rows
        self._heads: CPEHeads | None = None
        self._passes = 0
        self._saved: Tree = {}

    def state_dict(self) -> Tree:
        """Returns the models fitted so far; nothing before the first fit."""
        if self._heads is None:
            return self._saved
        moments, _ = optimizer_state(self._optimizer)
        return {"heads": plain(self._heads), "moments": moments, "passes": self._passes}

    def load_state_dict(self, state: Tree) -> None:
        """Goes on from there; the models are loaded when the rows that they are fitted to are."""
        self._saved, self._passes = state, int(state.get("passes", 0))

    def figures(self, *, final: bool) -> dict[str, float]:
        """Returns figures of this moment by TensorBoard tag; every rank calls it.

        Args:
            final: on all judged rows, else on a fixed sample that costs a fraction of an epoch.
        """
        judged, group = self._judged, self._group
        every = rows_in_order(judged, self._mine(sum(self._counts)), group.device) if final else self._sample
        return figures(
            every,
            self._learner,
            self._group,
            action_names=self._data.spec.action_names,
            temperature=self._config.rl.temperature,
        )

    @cached_property
    def _counts(self) -> tuple[int, ...]:
        """Judged rows of each shard."""
        return self._data.shards.counts(self._judged.count)

    @cached_property
    def _sample(self) -> list[TransitionBatch]:
        """This rank's part of a sample spread over the judged rows; gathered once."""
        most = max(round(self._config.evaluation.figures_share * sum(self._data.counts)), _FEWEST_FIGURE_ROWS)
        return list(rows_in_order(self._judged, self._mine(most), self._group.device))

    def _mine(self, most: int) -> NDArray[np.int64]:
        """Returns this rank's row numbers among at most so many that are spread over the judged rows of all shards."""
        rows, shards = self._judged, self._data.shards
        numbers = np.arange(len(rows.scalars)) if rows.usable is None else rows.usable.cpu().numpy()
        own = apportion(self._counts, min(most, sum(self._counts)))[shards.own]
        if own < len(numbers):
            numbers = numbers[np.linspace(0, len(numbers) - 1, own).astype(np.int64)]
        return shards.part(numbers)

    def evaluate(self, *, final: bool) -> Judgement:
        """Fits the models of the policy further and scores it; every rank calls it.

        Args:
            final: with the config's passes and resamples for the end of a run, else with those for an epoch.
        """
        settings = self._config.evaluation
        if not final:
            resamples = min(settings.bootstrap_resamples, _EPOCH_RESAMPLES)
            settings = settings.model_copy(update={"bootstrap_resamples": resamples})
        if self._heads is None:
            self._prepare()
        losses = self._fit(settings.final_fit_passes if final else settings.fit_passes)
        self._fit_rows.release()
        if not self._group.is_first:
            return Judgement(scalars={}, document={}, lines=())
        page = self._page()
        self._scored_rows.release()
        generator = torch.Generator().manual_seed(self._config.seed)
        result = evaluate_page(page, gamma=self._config.rl.gamma, config=settings, generator=generator)
        scalars = {"reward_loss/mean": losses["reward_loss"]} if losses else {}
        if len(page):
            scalars |= report.reward_model_scalars(page, self._data.spec.action_names)
        return Judgement(
            scalars=scalars | report.scalars(result),
            document=report.as_json(result),
            lines=tuple(report.lines(result)),
        )

    def _prepare(self) -> None:
        config, data = self._config, self._data
        scored = data.train if data.held_out is None else data.held_out
        self._scored_rows, self._scored = single_step_rows(config, scored, data, self._group), scored
        self._fit_rows = (
            self._scored_rows if scored is data.train else single_step_rows(config, data.train, data, self._group)
        )
        self._score_numbers = self._at_most(scored_rows(data, config.evaluation.held_out_share))
        scored_episodes = np.unique(scored.episode[self._score_numbers])
        if data.shards.several:
            say(self._group, f"evaluation: the {len(scored_episodes):,} episodes of node 0's shard are scored; other "
                             "nodes fit only")  # fmt: skip
        scored_hashes = _of_first(self._group, np.asarray(scored.episode_hash)[scored_episodes])
        apart = ~np.isin(np.asarray(data.train.episode_hash), scored_hashes)
        fit_numbers = np.flatnonzero(apart[data.train.episode] & (data.train.action >= 0))
        self._fit_rows = self._fit_rows.only(fit_numbers.astype(np.int32 if len(data.train) < 2**31 else np.int64))
        self._fit_counts = data.shards.counts(self._fit_rows.count)
        data.train.release()
        data.train_rows.release()
        give_back_memory()
        with _own_seed(config.seed + 1, self._group.device):
            self._heads = build_cpe_heads(
                data.spec, network_settings(config, outputs=1, dueling=False), gamma=config.rl.gamma,
                target_update_rate=config.evaluation.target_update_rate,
            ).to(self._group.device)  # fmt: skip
        self._wrapped = self._group.wrap(self._heads)
        trained = [p for p in self._heads.parameters() if p.requires_grad]
        self._optimizer = torch.optim.Adam(trained, lr=config.evaluation.learning_rate, fused=True)
        if sum(self._fit_counts):
            sums = [self._heads.scale_sums(batch) for batch in self._fit_batches(0, 1)]
            self._heads.set_scales(self._group.sum(torch.stack(sums).sum(0)))
            batch = next(self._fit_batches(0, 1))
            rehearse(
                self._wrapped,
                lambda: self._wrapped(batch, self._policy(batch.next_state, batch.next_actions))[0],
            )
        if self._saved:
            self._heads.load_state_dict(self._saved["heads"])
            load_optimizer(self._optimizer, self._saved.get("moments", {}), {"numbers": {}})

    def _at_most(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Draws max_episodes of the episodes to be scored before any of them is in memory, and says so."""
        episodes = np.unique(self._scored.episode[numbers])
        most = self._config.evaluation.max_episodes
        if len(episodes) <= most:
            return numbers
        say(self._group, f"evaluation: {most:,} of {len(episodes):,} episodes are scored (evaluation.max_episodes)")
        kept = np.random.default_rng(self._config.seed).choice(episodes, most, replace=False)
        return numbers[np.isin(self._scored.episode[numbers], kept)]

    def _fit_batches(self, first_pass: int, passes: int) -> Iterator[TransitionBatch]:
        plan = self._data.shards.plan(
            self._fit_counts,
            minibatch=self._config.evaluation.minibatch_size * self._group.world_size,
            epochs=first_pass + passes,
            seed=self._config.seed + 1,
        )
        shards = {self._data.shards.own: self._fit_rows}
        source = LoggedSource(shards, plan, self._group.rank, self._group.device)
        source.load_state_dict({"step": first_pass * plan.steps_per_epoch})
        for _ in range(passes * plan.steps_per_epoch):
            yield next(source)

    def _fit(self, passes: int) -> dict[str, float]:
        assert self._heads is not None
        if not sum(self._fit_counts):
            return {}
        self._learner.eval()
        batches = self._fit_batches(self._passes, passes)
        losses = fit_heads(self._heads, batches, self._policy, self._optimizer, loss=self._wrapped)
        self._learner.train()
        self._passes += passes
        return {name: float(self._group.sum(loss)) / self._group.world_size for name, loss in losses.items()}

    @torch.no_grad()
    def _policy(self, state: Tensor, actions: Actions) -> Tensor:
        q = self._scorer(state, actions.mask, actions.features)
        taken = self._restriction(state, actions.mask, actions.features)
        return softmax_policy(q, taken, self._config.rl.temperature)

    def _page(self) -> EvaluationPage:
        assert self._heads is not None
        self._learner.eval()
        page = build_page(
            rows_in_order(self._scored_rows, self._score_numbers, self._group.device),
            np.asarray(self._scored.episode[self._score_numbers], np.int64),
            policy=self._policy,
            models=self._heads,
            metric_names=self._data.spec.metric_names,
        )
        self._learner.train()
        return page


@contextmanager
def _own_seed(seed: int, device: torch.device) -> Iterator[None]:
    """Seeds torch's generators inside the block; dropout's stream does not depend on when a judge is first asked."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def scored_rows(data: Data, share: float) -> NDArray[np.int64]:
    """Returns the numbers of rank 0's rows to be scored, in order; none on the other ranks, which all call it too.

    They are whole episodes, disjoint from those fitted on: of eval data every episode that is not in the training data
    of any machine; of those that are, and of the training data where there is no eval data, about `share` by hash.
    Episodes with an unknown action are left out whole: without one row the weights of all later ones are wrong.
    Likewise those with a row that sums up several: what was done inside is not known.
    """
    scored, group = data.train if data.held_out is None else data.held_out, data.shards.group
    hashes = _of_first(group, np.asarray(scored.episode_hash))
    trained_on = torch.from_numpy(np.isin(hashes, np.asarray(data.train.episode_hash)).astype(np.int32))
    chosen = (group.sum(trained_on).numpy() == 0) | held_out(hashes, share)
    if not group.is_first:
        return np.empty(0, np.int64)
    chosen[np.unique(scored.episode[np.asarray(scored.action) < 0])] = False
    summed = np.unique(scored.episode[np.asarray(scored.step) > 1])
    if chosen[summed].any():
        say(group, f"warning: evaluation: {int(chosen[summed].sum()):,} episodes have rows that span several steps and "
                   "cannot be scored; give eval_data_path of a timeline with steps 1")  # fmt: skip
        chosen[summed] = False
    return np.flatnonzero(chosen[scored.episode])


def _of_first(group: Group, hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns rank 0's hashes on every rank."""
    return np.frombuffer(group.broadcast_bytes(hashes.tobytes() if group.is_first else None), np.uint64)
