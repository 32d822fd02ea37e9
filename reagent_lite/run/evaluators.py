"""What a run is judged by: figures on held-out rows each epoch, and counterfactual policy evaluation.

fitting rows   training episodes that are not scored ─► reward and value models of the policy as it is now
scored rows    eval episodes (or a share of the training episodes, by hash of mdp_id) ─► page ─► estimators

Every machine's rows are fitted to and scored. Each process builds its part of the page; rank 0 puts them together,
estimates, and is the only one that writes. It holds the rows of at most max_episodes episodes, the others their part.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reagent_lite.algorithms.cpe_heads import (
    CHECKED_ROWS,
    CHECKED_SHARE,
    FEWEST_STEPS,
    CPEHeads,
    EarlyStopping,
    build_cpe_heads,
    fit_heads,
)
from reagent_lite.algorithms.dqn import DQN
from reagent_lite.algorithms.optimizers import optimizer_class
from reagent_lite.config import WorkflowConfig
from reagent_lite.console import progress, with_progress
from reagent_lite.data.copy.training_copy import give_back_memory
from reagent_lite.data.rows.hashes import mix
from reagent_lite.data.sampling.plan import ReadPlan, apportion
from reagent_lite.data.sampling.source import LoggedSource, rows_in_order
from reagent_lite.distributed.group import Group, rehearse
from reagent_lite.evaluation import report
from reagent_lite.evaluation.candidates import candidate_choices
from reagent_lite.evaluation.cpe import evaluate_page
from reagent_lite.evaluation.episodes import episode_hashes, scored_episodes, spread
from reagent_lite.evaluation.figures import figures
from reagent_lite.evaluation.page import EvaluationPage, build_page, gather_page, held_out
from reagent_lite.run.learner import network_settings, target_policy
from reagent_lite.run.logged import Data, single_step_rows
from reagent_lite.training.checkpoint import Tree, load_optimizer, optimizer_state, plain
from reagent_lite.types import Actions, TransitionBatch

_FEWEST_FIGURE_ROWS = 256
_EPOCH_RESAMPLES = 100  # [m] 2000 cost 0.3 s an epoch for 10 000 episodes; an epoch's interval is to look at


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Result of a counterfactual evaluation; on ranks other than 0 everything is empty."""

    scalars: dict[str, float]
    document: dict[str, Any]
    lines: tuple[str, ...]


class Evaluator(Protocol):
    """One way to evaluate the learner as it stands; every rank calls its methods."""

    def state_dict(self) -> Tree:
        """Returns what was fitted and seen so far."""
        ...

    def load_state_dict(self, state: Tree) -> None:
        """Goes on from there."""
        ...

    def after_epoch(self, *, final: bool) -> dict[str, float]:
        """Returns figures by TensorBoard tag; `final` where the run ends with this epoch."""
        ...

    def satisfied(self) -> bool:
        """Whether the run may end."""
        ...

    def evaluate(self, *, final: bool) -> Judgement:
        """Returns the whole evaluation."""
        ...


class Evaluators:
    """Everything that evaluates the learner, as one evaluator.

    Args:
        parts: evaluators by their section of evaluation.json; those that may end the run come first.
    """

    _STATES: ClassVar = {"cpe": "logs", "simulation": "play"}  # sections by the name that checkpoints have for them

    def __init__(self, parts: dict[str, Evaluator]) -> None:
        self._parts = parts

    def state_dict(self) -> Tree:
        """Returns what was fitted and seen so far."""
        return {self._STATES[name]: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state: Tree) -> None:
        """Goes on from there."""
        for name, part in self._parts.items():
            part.load_state_dict(state.get(self._STATES[name], {}))

    def after_epoch(self, *, final: bool) -> dict[str, float]:
        """Returns figures by TensorBoard tag; the epoch is also final where an evaluator is satisfied."""
        scalars: dict[str, float] = {}
        for part in self._parts.values():
            scalars |= part.after_epoch(final=final)
            final |= part.satisfied()
        return scalars

    def satisfied(self) -> bool:
        """Whether the run may end."""
        return any(part.satisfied() for part in self._parts.values())

    def at_end(self) -> Judgement:
        """Returns the run's evaluation; the document has a section for each evaluator."""
        parts = {name: self._parts[name].evaluate(final=True) for name in self._STATES if name in self._parts}
        return Judgement(
            scalars={name: value for part in parts.values() for name, value in part.scalars.items()},
            document={name: part.document for name, part in parts.items()},
            lines=tuple(line for part in parts.values() for line in part.lines),
        )


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
        self._target = target_policy(config.rl)
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

    def after_epoch(self, *, final: bool) -> dict[str, float]:
        """Returns figures, and with evaluation.calc_cpe_in_training estimates, unless these follow at the end."""
        scalars = self.figures(final=final)
        if self._config.evaluation.calc_cpe_in_training and not final:
            scalars |= self.evaluate(final=False).scalars
        return scalars

    def satisfied(self) -> bool:
        """Returns False: estimates end no run."""
        return False

    def figures(self, *, final: bool) -> dict[str, float]:
        """Returns figures of this moment by TensorBoard tag; every rank calls it.

        Args:
            final: on all judged rows, else on a fixed sample that costs a fraction of an epoch.
        """
        judged, group = self._judged, self._group
        every: Iterable[TransitionBatch] = self._sample
        if final:
            numbers = self._mine(sum(self._counts))
            every = self._shown("valuing rows", rows_in_order(judged, numbers, group.device), len(numbers))
        return figures(
            every,
            self._learner,
            self._group,
            action_names=self._data.spec.action_names,
            policy=self._target,
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
        return shards.part(spread(numbers, own))

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
        losses = self._fit(final=final)
        self._fit_rows.release()
        part, order = self._part()
        choices = self._choices(part, order) if final else {}
        page = self._gathered(part, order)
        self._scored_rows.release()
        if page is None:
            return Judgement(scalars={}, document={}, lines=())
        generator = torch.Generator().manual_seed(self._config.seed)
        with progress("estimating", "outcomes", enabled=True, brief=True) as show:
            result = evaluate_page(page, gamma=self._config.rl.gamma, config=settings, generator=generator, show=show)
        scalars = {"reward_loss/mean": losses["reward_loss"]} if losses else {}
        if len(page):
            scalars |= report.reward_model_scalars(page, self._data.spec.action_names)
        return Judgement(
            scalars=scalars | report.scalars(result),
            document=report.as_json(result) | choices,
            lines=tuple(report.lines(result)),
        )

    def _prepare(self) -> None:
        config, data = self._config, self._data
        self._scored_copy = copy = data.train if data.held_out is None else data.held_out
        self._scored_rows = single_step_rows(config, copy, data, self._group)
        self._fit_rows = (
            self._scored_rows if copy is data.train else single_step_rows(config, data.train, data, self._group)
        )
        self._scored = scored_episodes(data, config.evaluation, config.seed)
        apart = ~np.isin(episode_hashes(data, data.train), self._scored.hashes)
        rows = self._fit_rows
        checked = np.zeros_like(apart)
        counts = data.shards.counts(int(apart[data.train.episode].sum()))
        if self._steps(counts, config.evaluation.final_fit_passes) > FEWEST_STEPS:
            checked = apart & held_out(mix(episode_hashes(data, data.train)), CHECKED_SHARE)
        known = np.asarray(data.train.action) >= 0
        unfitted = data.shards.part(spread(np.flatnonzero(checked[data.train.episode] & known), CHECKED_ROWS))
        self._checked = list(rows_in_order(rows, unfitted, self._group.device))
        fit_numbers = np.flatnonzero((apart & ~checked)[data.train.episode] & known)
        self._fit_rows = rows.only(fit_numbers.astype(np.int32 if len(data.train) < 2**31 else np.int64))
        self._fit_counts = data.shards.counts(self._fit_rows.count)
        copy.release()
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
        self._optimizer = optimizer_class("Adam")(trained, lr=config.evaluation.learning_rate, fused=True)
        if sum(self._fit_counts):
            first = self._fit_batches(0, self._steps(self._fit_counts, 1))
            seen = self._shown("measuring outcomes", first, self._fit_rows.count)
            self._heads.set_scales(self._group.sum(torch.stack([self._heads.scale_sums(one) for one in seen]).sum(0)))
            batch = next(self._fit_batches(0, 1))
            rehearse(
                self._wrapped,
                lambda: self._wrapped(batch, self._policy(batch.next_state, batch.next_actions))[0],
            )
        if self._saved:
            self._heads.load_state_dict(self._saved["heads"])
            load_optimizer(self._optimizer, self._saved.get("moments", {}), {"numbers": {}})

    def _plan(self, counts: tuple[int, ...], passes: int) -> ReadPlan:
        minibatch = self._config.evaluation.minibatch_size * self._group.world_size
        return self._data.shards.plan(counts, minibatch=minibatch, epochs=passes, seed=self._config.seed + 1)

    def _steps(self, counts: tuple[int, ...], passes: int) -> int:
        """Returns how many steps a fit to so many rows of each shard takes at most."""
        settings = self._config.evaluation
        return min(self._plan(counts, passes).num_steps, max(settings.max_fit_rows // settings.minibatch_size, 1))

    def _fit_batches(self, first_pass: int, steps: int) -> Iterator[TransitionBatch]:
        plan = self._plan(self._fit_counts, first_pass + steps)  # no pass is shorter than a step
        shards = {self._data.shards.own: self._fit_rows}
        source = LoggedSource(shards, plan, self._group.rank, self._group.device)
        source.load_state_dict({"step": first_pass * plan.steps_per_epoch})
        for _ in range(steps):
            yield next(source)

    def _fit(self, *, final: bool) -> dict[str, float]:
        assert self._heads is not None
        if not sum(self._fit_counts):
            return {}
        settings = self._config.evaluation
        passes = settings.final_fit_passes if final else settings.fit_passes
        steps = self._steps(self._fit_counts, passes)
        checked = final and sum(self._group.each(len(self._checked))) > 0
        stop = EarlyStopping(self._heads, self._held_out_loss) if checked else None
        self._learner.eval()
        rows = min(steps * settings.minibatch_size, passes * self._fit_rows.count)
        batches = self._shown("fitting models of the policy", self._fit_batches(self._passes, steps), rows)
        losses = fit_heads(self._heads, batches, self._policy, self._optimizer, loss=self._wrapped, stop=stop)
        self._learner.train()
        self._passes += passes
        return {name: float(self._group.sum(loss)) / self._group.world_size for name, loss in losses.items()}

    def _shown(self, title: str, batches: Iterable[TransitionBatch], rows: int) -> Iterator[TransitionBatch]:
        return with_progress(title, batches, rows, enabled=self._group.is_first)

    @torch.no_grad()
    def _held_out_loss(self) -> float:
        """Returns the mean loss on the rows of all ranks that are kept apart for it; every rank calls it."""
        assert self._heads is not None
        total = torch.zeros(2, dtype=torch.float64, device=self._group.device)
        for batch in self._checked:
            loss, _ = self._heads(batch, self._policy(batch.next_state, batch.next_actions))
            total += torch.stack((loss.double(), batch.weight.sum().double()))
        loss, rows = self._group.sum(total).tolist()
        return float(loss / rows)

    @torch.no_grad()
    def _policy(self, state: Tensor, actions: Actions) -> Tensor:
        q = self._scorer(state, actions.mask, actions.features)
        taken = self._restriction(state, actions.mask, actions.features)
        return self._target.propensities(q, taken)

    def _part(self) -> tuple[EvaluationPage, NDArray[np.int64]]:
        """Returns the page of this rank's scored rows, and the order [R] of the rows in it."""
        assert self._heads is not None
        self._learner.eval()
        scored = self._scored
        rows = rows_in_order(self._scored_rows, scored.numbers, self._group.device)
        part = build_page(
            self._shown("scoring rows", rows, len(scored.numbers)),
            scored.episode,
            policy=self._policy,
            models=self._heads,
            metric_names=self._data.spec.metric_names,
        )
        self._learner.train()
        return part, np.argsort(scored.episode, kind="stable")

    def _gathered(self, part: EvaluationPage, order: NDArray[np.int64]) -> EvaluationPage | None:
        """Returns the page of all ranks' scored rows on rank 0, and None on the others; every rank calls it."""
        return gather_page(part, torch.from_numpy(self._scored.sequence[order]), self._group)

    def _choices(self, part: EvaluationPage, order: NDArray[np.int64]) -> dict[str, Any]:
        """Returns what the policy chooses among candidates, which have no tags of their own; every rank calls it."""
        normalization = self._data.normalization.action
        if normalization is None:
            return {}
        ids, numbers = normalization.feature_ids, self._scored.numbers[order]
        return {"candidates": candidate_choices(part, self._scored_copy, numbers, ids, self._group)}


@contextmanager
def _own_seed(seed: int, device: torch.device) -> Iterator[None]:
    """Seeds torch's generators inside the block; dropout's stream does not depend on when a judge is first asked."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
