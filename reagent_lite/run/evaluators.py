"""Evaluators of the learner during and after a run: estimates on logged rows, and returns in simulation.

logged      training rows ─► reward and value models of the current policy ─┐
            scored rows (evaluation.episodes) ──────────────────────────────┴─► page ─► estimates
simulation  episodes played by the network, divided among ranks ─► returns

The rows of all machines are used. Each process builds its part of the page; rank 0 joins the parts and computes the
estimates. It holds the rows of all scored episodes; see evaluation.max_episodes.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reagent_lite.algorithms.learners import Learner
from reagent_lite.algorithms.policy_learner import PolicyLearner, evaluating, network_settings
from reagent_lite.algorithms.reward_and_q_models import build_reward_and_q_models
from reagent_lite.config import WorkflowConfig
from reagent_lite.config.column_names import UNIT
from reagent_lite.config.paths import show_paths
from reagent_lite.console import logger, with_progress
from reagent_lite.data.sampling.plan import apportion
from reagent_lite.data.sampling.source import LoggedRows, rows_in_order
from reagent_lite.distributed.group import Group
from reagent_lite.errors import DataError, Problem, pluralize
from reagent_lite.evaluation.behavior import estimated_behavior, replaced_propensities, without_propensity
from reagent_lite.evaluation.cpe import CPEResult
from reagent_lite.evaluation.document import LEARNED_FROM, WARM_START, Evaluation, as_json, reward_model_scalars
from reagent_lite.evaluation.document import scalars as cpe_scalars
from reagent_lite.evaluation.entropy import PolicyEntropy, SoftmaxRows
from reagent_lite.evaluation.evaluation_rows import EvaluationRows
from reagent_lite.evaluation.evaluator import EpisodeColumns, EvaluationInput, PolicyEvaluator, own_seed
from reagent_lite.evaluation.explanation import Explanation, at_all_steps
from reagent_lite.evaluation.learner_figures import figures, mean_td_loss
from reagent_lite.evaluation.played import MODEL, RANDOM, Played
from reagent_lite.evaluation.policy_models import Learning, split_log
from reagent_lite.evaluation.returns import play
from reagent_lite.evaluation.scored_episodes import spread
from reagent_lite.memory import give_back_memory
from reagent_lite.report.sections import evaluation_notes
from reagent_lite.rl.policies import Softmax
from reagent_lite.run.environments import EPOCH, FINAL, ObservationEncoder, part_of
from reagent_lite.run.learner import rollout_capture, target_policy
from reagent_lite.run.logged import Data, single_step_rows
from reagent_lite.run.reward_model import reward_errors
from reagent_lite.run.simulated import RETURN, tag_of
from reagent_lite.sim.experience import ONLY
from reagent_lite.training.best import BEST, BestState
from reagent_lite.training.checkpoint_folder import Tree
from reagent_lite.types import Actions, NormalizationSpec, TransitionBatch

LOGS = "logs"
PLAY = "play"
"""Names of evaluators in checkpoints."""
VALIDATION_LOSS = "validation/td_loss/mean"
CHOOSING = "choosing/"
"""Prefix of the tags of scores that choose among runs; they are not those of the final evaluation, which decides."""
_STOPPED = "stopped"
_ROWS_AT_ONCE = 1 << 20
_FEWEST_FIGURE_ROWS = 256
_ENTROPY_ROWS = 8192
_STEPS_BETWEEN_ESTIMATES = 20
_FEWEST_ESTIMATES = 30


def choosing_scores(figures: Mapping[str, float]) -> dict[str, float]:
    """Returns figures of episodes that do not decide, by the tags of scores that choose among runs."""
    return {f"{CHOOSING}{tag}": value for tag, value in figures.items()}


def estimates_due(epoch: int, epochs: int, steps_per_epoch: int) -> bool:
    """Returns whether estimates are due after an epoch: after each, or after every few of many short ones.

    Args:
        epoch: number of epochs done.
        epochs: epochs of the run.
        steps_per_epoch: optimizer steps of one.
    """
    every = min(_STEPS_BETWEEN_ESTIMATES // steps_per_epoch, epochs // _FEWEST_ESTIMATES)
    return epoch % max(every, 1) == 0


class Evaluator(Protocol):
    """A way to evaluate the learner as it is now; every rank calls each method."""

    def state_dict(self) -> Tree:
        """Returns the evaluator's state for a checkpoint."""
        ...

    def load_state_dict(self, state: Tree) -> None:
        """Restores a state that `state_dict` returned."""
        ...

    def after_epoch(self, *, final: bool, estimates: bool = True) -> dict[str, float]:
        """Returns figures by TensorBoard tag.

        Args:
            final: whether this was the last epoch of the run.
            estimates: whether estimates from a log are due; see `estimates_due`.
        """
        ...

    def may_end(self) -> bool:
        """Returns whether the run may end early."""
        return False

    @property
    def temperature(self) -> float | None:
        """The policy's temperature if the evaluation chooses it, with rl.temperature "auto"; else None."""
        return None

    def evaluate(self, *, final: bool) -> Evaluation:
        """Returns the evaluation of the learner; `final` is true once, at the end of the run."""
        ...


class Evaluators:
    """The evaluators of a run, called together.

    Args:
        parts: evaluators by their names in checkpoints; those that may end the run come first.
        best: keeps the learner's best state, or None if the last one is evaluated.

    Attributes:
        parts, best: as given.
        stopped: whether a callback ended the run.
    """

    def __init__(self, parts: dict[str, Evaluator], best: BestState | None = None) -> None:
        self.parts = parts
        self.stopped = False
        self.best = best

    def state_dict(self) -> Tree:
        """Returns the states of all evaluators for a checkpoint."""
        state = {name: part.state_dict() for name, part in self.parts.items()}
        if self.best is not None:
            state[BEST] = self.best.state_dict()
        return state | ({_STOPPED: 1} if self.stopped else {})

    def load_state_dict(self, state: Tree) -> None:
        """Restores states that `state_dict` returned."""
        for name, part in self.parts.items():
            part.load_state_dict(state.get(name, {}))
        if self.best is not None:
            self.best.load_state_dict(state.get(BEST, {}))
        self.stopped = _STOPPED in state

    def after_epoch(self, *, final: bool, estimates: bool = True) -> dict[str, float]:
        """Returns the figures of all evaluators; an epoch is final too once one of them is satisfied."""
        scalars: dict[str, float] = {}
        for part in self.parts.values():
            scalars |= part.after_epoch(final=final, estimates=estimates)
            final |= part.may_end()
        if self.best is not None:
            self.best.compare(scalars)
        return scalars

    def may_end(self) -> bool:
        """Returns whether an evaluator, a callback or checkpoint.patience ends the run early."""
        exhausted = self.best is not None and self.best.exhausted
        return self.stopped or exhausted or any(part.may_end() for part in self.parts.values())

    def restore_best(self) -> dict[str, float]:
        """Puts the kept state into the learner; returns figures of all logged rows if the last ones are not final.

        They are not final if another state is kept than the last, or if the run ended early.
        """
        if self.best is not None:
            self.best.restore()
        final = not self.stopped and (self.best is None or self.best.is_last)
        logs = self.parts.get(LOGS)
        scalars = {} if final or logs is None else logs.after_epoch(final=True)
        scalars.pop(VALIDATION_LOSS, None)  # the last value of its curve is that of the last epoch
        return scalars

    @property
    def temperature(self) -> float | None:
        """The temperature that an evaluator has chosen, the same on every rank; None if the config gives it."""
        chosen = (part.temperature for part in self.parts.values())
        return next((temperature for temperature in chosen if temperature is not None), None)

    def at_end(self) -> Evaluation:
        """Returns the final evaluation, whose document has a section for each evaluator."""
        kept = {} if self.best is None else self.best.document()
        whole = Evaluation(document=kept)
        for evaluator in reversed(self.parts.values()):  # estimates before returns
            part = evaluator.evaluate(final=True)
            whole = Evaluation(
                scalars=whole.scalars | part.scalars,
                document=whole.document | part.document,
                result=whole.result or part.result,
                explanation=whole.explanation or part.explanation,
                seen=whole.seen or part.seen,
                played=whole.played or part.played,
                agents=whole.agents or part.agents,
            )
        of_types = {kind: replace(part, document=part.document | kept) for kind, part in whole.agents.items()}
        return replace(whole, agents=of_types)


class LogEvaluator(Evaluator):
    """Evaluates the learner on logged rows. Every rank builds it, as the ranks agree on the rows to score.

    Args:
        config: the run's config.
        data: training and held-out rows.
        learner: the learner to evaluate.
        group: ranks that divide the work.
    """

    def __init__(self, config: WorkflowConfig, data: Data, learner: PolicyLearner, group: Group) -> None:
        self._config = config
        self._data = data
        self._learner = learner
        self._group = group
        self._scorer = learner.scorer
        self._restriction = learner.restriction
        self._target = target_policy(config)
        self._evaluated = data.evaluated.rows
        self.policy = self._policy_evaluator()
        self._logged_entropy = self._mean_entropy_of_the_log()
        if config.rl.temperature == "auto" and self._logged_entropy is None:
            todo = 'Log the propensities, set evaluation.propensities to "estimate", or give a number'
            where = show_paths(config.eval_data_path or config.training_data_path)
            raise DataError(Problem(where, 'propensities in all rows with rl.temperature "auto"', "not all", todo))

    def state_dict(self) -> Tree:
        """Returns the models fitted so far and the number of passes over the rows."""
        chosen = {} if self.temperature is None else {"temperature": self.temperature}
        return {**self.policy.models.state_dict(), **chosen}

    def load_state_dict(self, state: Tree) -> None:
        """Restores a state that `state_dict` returned; an empty one changes nothing."""
        if "temperature" in state:
            self._target = Softmax(float(state["temperature"]))
        if state:
            self.policy.models.load_state_dict(state)

    def after_epoch(self, *, final: bool, estimates: bool = True) -> dict[str, float]:
        """Returns figures by TensorBoard tag, with estimates if evaluation.calc_cpe_in_training is true.

        Args:
            final: whether to compute the figures from all evaluated rows instead of a fixed sample, without estimates,
                which `evaluate` computes next.
            estimates: whether estimates are due.
        """
        self._find_temperature()
        batches: Iterable[TransitionBatch] = self._sample
        if final:
            numbers = self._part_of_rows(sum(self._counts))
            rows = rows_in_order(self._evaluated, numbers, self._group.device)
            batches = with_progress("valuing rows", rows, len(numbers), enabled=self._group.is_first)
        names = self._data.spec.action_names
        scalars = figures(batches, self._learner, self._group, action_names=names, policy=self._target)
        if self._data.validation is not None:
            scalars[VALIDATION_LOSS] = self._validation_loss(self._data.validation)
        if self._config.evaluation.calc_cpe_in_training and estimates and not final:
            scalars |= self.evaluate(final=False).scalars
        return scalars

    def _validation_loss(self, rows: LoggedRows) -> float:
        """Returns the mean TD loss on the validation rows of all machines."""
        assert rows.usable is not None
        numbers = self._data.shards.part(rows.usable.cpu().numpy().astype(np.int64))
        return mean_td_loss(rows_in_order(rows, numbers, self._group.device), self._learner, self._group)

    @cached_property
    def _counts(self) -> tuple[int, ...]:
        """Number of evaluated rows in each shard."""
        return self._data.shards.counts(self._evaluated.count)

    @cached_property
    def _sample(self) -> list[TransitionBatch]:
        """This rank's part of a sample spread over the evaluated rows, read once."""
        most = max(round(self._config.evaluation.figures_share * sum(self._data.counts)), _FEWEST_FIGURE_ROWS)
        return list(rows_in_order(self._evaluated, self._part_of_rows(most), self._group.device))

    def _part_of_rows(self, most: int) -> NDArray[np.integer[Any]]:
        """Returns this rank's part of at most `most` row numbers, spread evenly over the rows of all shards."""
        rows = self._evaluated
        shards = self._data.shards
        numbers = rows.learnable_numbers
        part = apportion(self._counts, min(most, sum(self._counts)))[shards.own]
        return shards.part(spread(numbers, part))

    def evaluate(self, *, final: bool) -> Evaluation:
        """Fits the models of the policy further and returns its estimates; empty except on rank 0.

        Args:
            final: whether to make the fits that the config asks for at the end of a run, and to compute all estimators
                with intervals and verdicts. Otherwise makes the fits of an epoch and computes only the cheap estimates.
        """
        self._find_temperature()
        self._learner.eval()  # no dropout, fixed batch statistics
        entropy = None
        if final and isinstance(self._target, Softmax):
            entropy = PolicyEntropy.of(self._softmax_rows(), self._target, self._logged_entropy)
        rewards = None
        if final and self._config.takes_steps:
            numbers = self.policy.log.split.scored.numbers
            rewards = reward_errors(self._learner, self._config, self._data, numbers, self._group)
        losses = self.policy.fit(final=final)
        page, choices = self.policy.page(final=final)
        choosing = {}
        if final and self._config.evaluation.choosing_share is not None:
            part, _ = self.policy.page(final=False)
            choosing = {} if part is None or not len(part) else choosing_scores(self.policy.values(part))
        self._learner.train()
        if page is None:
            return Evaluation()
        scalars = {"reward_loss/mean": losses["reward_loss"]} if losses else {}
        if len(page):
            scalars |= reward_model_scalars(page, self._data.spec.action_names)
        if not final:
            return Evaluation(scalars=scalars | self.policy.values(page))
        result = self.policy.result(page).without_bases()
        scalars |= cpe_scalars(result) | choosing
        policy = {} if entropy is None else {"policy": entropy.json()}
        notes = () if entropy is None else entropy.notes
        seen = self._data.seen and result.overlap is not None
        warm_start = [WARM_START] if self._config.training.warm_start_model_path else []
        warnings = [LEARNED_FROM] if seen else warm_start
        explanation = self._explanation(page, result)
        errors = {} if rewards is None else {"reward_model": rewards.json()}
        if rewards is not None and rewards.warning is not None:
            warnings.append(f"{rewards.warning[0].upper()}{rewards.warning[1:]}.")
        for sentence in (*warnings, *notes, *evaluation_notes(result)):
            logger.warning(sentence)
        return Evaluation(
            scalars=scalars,
            document={
                "cpe": as_json(result) | choices,
                "explanation": explanation.json(),
                "warnings": warnings,
                **policy,
                **errors,
            },
            result=result,
            explanation=explanation,
            seen=seen,
        )

    def _explanation(self, page: EvaluationRows, result: CPEResult) -> Explanation:
        """Returns who gets what, who gains and who loses; only on rank 0."""
        copy = self._data.sides.scored
        normalization = self._data.normalization
        columns = _columns_of(copy.state_ids, normalization.state)
        of_candidates = [] if normalization.action is None else _columns_of(copy.action_ids, normalization.action)
        with evaluating(self._learner):
            return self.policy.explanation(page, result, seen=self._data.seen, columns=(columns, of_candidates))

    @property
    def temperature(self) -> float | None:
        """The temperature of the last evaluation; None unless rl.temperature is "auto"."""
        return self._target.temperature if self._config.rl.temperature == "auto" else None

    def _mean_entropy_of_the_log(self) -> float | None:
        """Returns the logging policy's mean entropy in nats, mean(-log propensity); None if some are missing."""
        if self.policy.log.without_propensity:
            return None
        numbers = torch.from_numpy(self._part_of_rows(sum(self._counts)))
        propensity = self._evaluated.propensity.cpu()
        surprise = [
            -propensity.index_select(0, part).double().log().sum() for part in torch.split(numbers, _ROWS_AT_ONCE)
        ]
        sums = torch.stack((torch.stack(surprise).sum(), torch.tensor(float(len(numbers)), dtype=torch.float64)))
        total, count = self._group.all_reduce(sums).tolist()
        return float(total / max(count, 1.0))

    def _find_temperature(self) -> None:
        """Sets the temperature at which the policy has the logging policy's mean entropy, if the config asks for it."""
        if self._config.rl.temperature == "auto":
            assert self._logged_entropy is not None
            self._target = Softmax(self._softmax_rows().temperature(self._logged_entropy))

    def _softmax_rows(self) -> SoftmaxRows:
        """Returns the scores of a sample of the evaluated rows."""

        @torch.no_grad()
        def parts() -> Iterator[tuple[Tensor, Tensor]]:
            numbers = self._part_of_rows(_ENTROPY_ROWS)
            for batch in rows_in_order(self._evaluated, numbers, self._group.device):
                arguments = (batch.state, batch.actions.mask, batch.actions.features)
                yield self._scorer(*arguments), self._restriction(*arguments)

        with evaluating(self._learner):
            return SoftmaxRows(parts(), self._group)

    def _policy_evaluator(self) -> PolicyEvaluator:
        """Returns the evaluator of the policy, with models of it in the units of the rows."""
        config = self._config
        data = self._data
        group = self._group
        train = data.train
        scored = data.evaluated
        rows = single_step_rows(config, scored, data, group)
        continues = data.continues and config.rl.gamma > 0
        learning = Learning(rows=sum(data.counts), epochs=config.num_epochs, continues=continues)
        units = _units(config, data)
        split = split_log(data.sides, data.scored, config.evaluation, learning, units)
        behavior = None
        if config.evaluation.propensities == "estimate":
            normalization = data.normalization.action or data.normalization.state
            behavior = estimated_behavior(data.sides, rows, data.spec, features=normalization.column_names)
            logger.info(f"evaluation: {behavior.problem or behavior.calibration}")
            rows = rows.with_propensity(behavior.propensity)
            self._evaluated = self._evaluated.with_propensity(behavior.propensity)
        counts = scored.agreement.counts
        num_rows = sum(scored.agreement.rows)
        for note in replaced_propensities(behavior, counts, num_rows) if group.is_first else ():
            logger.warning(note)
        log = EvaluationInput(
            sides=data.sides,
            split=split,
            rows=rows,
            train_rows=rows if scored is train else single_step_rows(config, train, data, group),
            metric_names=data.spec.metric_names,
            num_rows=num_rows,
            without_propensity=without_propensity(behavior, counts, num_rows),
            gamma=config.rl.gamma,
            settings=config.evaluation,
            seed=config.seed,
            learning=learning,
            behavior=behavior,
            items=data.items,
            by_episode=EpisodeColumns(units=units, weights=scored.weights),
        )
        for note in data.scored.notes:
            logger.info(f"evaluation: {note}")
        if config.evaluation.choosing_share is not None:
            deciding = pluralize(len(split.scored.hashes), "scored episode decides", "scored episodes decide")
            logger.info(f"evaluation: {deciding}, and {len(split.choosing.hashes):,} others choose among runs")
        with own_seed(config.seed + 1, group.device):
            heads = build_reward_and_q_models(
                data.spec,
                network_settings(config.training),
                gamma=config.rl.gamma,
                target_update_rate=config.evaluation.models.target_update_rate,
            ).to(group.device)
        action = data.normalization.action
        features = () if action is None else action.features
        evaluator = PolicyEvaluator(log, self._policy, heads, candidate_features=features)
        scored.copy.release()
        train.copy.release()
        train.rows.release()
        give_back_memory()
        return evaluator

    @torch.no_grad()
    def _policy(self, state: Tensor, actions: Actions) -> Tensor:
        q = self._scorer(state, actions.mask, actions.features)
        choosable = self._restriction(state, actions.mask, actions.features)
        return self._target.propensities(q, choosable)


class SimulationEvaluator(Evaluator):
    """Plays the learner's policy in simulation; every rank plays its part of the episodes.

    The network plays as it is in memory, on all ranks. An exported model makes the same decisions: the export compares
    every format with the network on observations of this environment. workflows.evaluate plays exported models.

    Args:
        encoder: converts observations of the environment to the network's input.
        learner: the learner to evaluate.
        group: ranks that divide the episodes.
    """

    def __init__(self, encoder: ObservationEncoder, learner: Learner, group: Group) -> None:
        self._config = encoder.config
        self._simulation = encoder.simulation
        self._group = group
        self._encoder = encoder
        self._learner = learner
        self._target = target_policy(encoder.config)
        self.latest = float("nan")

    def state_dict(self) -> Tree:
        """Returns the latest mean return, which may end the run early."""
        return {"latest": self.latest}

    def load_state_dict(self, state: Tree) -> None:
        """Restores a state that `state_dict` returned."""
        self.latest = float(state["latest"])

    def after_epoch(self, *, final: bool, estimates: bool = True) -> dict[str, float]:
        """Returns the policy's returns by TensorBoard tag, from the same episodes after each epoch."""
        return self.evaluate(final=False).scalars

    def may_end(self) -> bool:
        """Returns whether the latest mean return reached simulation.stop_at_return."""
        threshold = self._simulation.config.stop_at_return
        return threshold is not None and self.latest >= threshold

    def evaluate(self, *, final: bool) -> Evaluation:
        """Returns the returns of each learned policy with their intervals, the same on every rank.

        Args:
            final: whether to play episodes that no earlier evaluation has used, and to compare each learned policy with
                uniformly random actions of its type of agents, while the other types play their policies.
        """
        spec = self._simulation.backend.spec
        settings = self._simulation.config
        stream = FINAL if final else EPOCH
        tables = self._play(stream)
        evaluations = {}
        choosing = {}
        if final and self._config.evaluation.choosing_share is not None:
            choosing = choosing_scores(self.evaluate(final=False).scalars)
        for kind in self._simulation.learning:
            compared = {MODEL: tables[kind]} | ({RANDOM: self._play(stream, random=kind)[kind]} if final else {})
            evaluations[kind] = self._evaluation_of(kind, compared, settings.time_limit or spec.time_limit)
        whole = evaluations[ONLY] if ONLY in evaluations else self._combine(evaluations, tables)
        return replace(whole, scalars=whole.scalars | choosing)

    def _evaluation_of(self, kind: str, tables: dict[str, Tensor], limit: int) -> Evaluation:
        """Returns the evaluation of one type of agents.

        Args:
            kind: name of the type.
            tables: results of its policy, and of random actions in the final evaluation, from `_play`.
            limit: largest number of steps of an episode.
        """
        spec = self._simulation.backend.spec
        played = Played.of(spec, limit, tables, level=self._config.evaluation.confidence_level)
        earned = played.policies[MODEL]
        self.latest = earned.total.value
        scores = {tag_of(kind, tag): value for tag, value in played.scores().items()}
        if RANDOM not in tables:
            return Evaluation(scalars=scores)
        document = {"simulated": earned.json(), "simulation": played.json()}
        return Evaluation(scalars=scores, document=document, played=played)

    def _combine(self, evaluations: dict[str, Evaluation], tables: dict[str, Tensor]) -> Evaluation:
        """Returns the evaluations of several types of agents as one, with figures of the episodes they share."""
        ended = 1 - float(next(iter(tables.values()))[3].mean())
        returns = {kind: float(table[0].mean()) for kind, table in tables.items()}
        scalars = {tag_of(kind, RETURN): value for kind, value in returns.items()}
        scalars |= {tag: value for evaluation in evaluations.values() for tag, value in evaluation.scalars.items()}
        agents = {"terminated_share": ended, "returns": returns}
        played = {agent_type.name: agent_type.played for agent_type in self._simulation.types}
        others = {kind: ", ".join(text for name, text in played.items() if name != kind) for kind in evaluations}
        return Evaluation(
            scalars=scalars | {"simulation/terminated_share": ended},
            document={"agents": agents},
            agents={
                kind: replace(part, document=part.document | {"agents": {**agents, "others": others[kind]}})
                for kind, part in evaluations.items()
            },
        )

    def _play(self, stream: int, random: str | None = None) -> dict[str, Tensor]:
        """Plays the evaluation's episodes and returns the table of `play`, [4, E], by type of agents.

        Args:
            stream: number of the stream of random numbers.
            random: a type whose actions are uniformly random, or None.
        """
        count = self._simulation.config.evaluation_episodes
        first, stop = part_of(count, self._group)
        tables = torch.zeros(len(self._simulation.types), 4, count, dtype=torch.float64)
        if stop > first:
            env = self._simulation.envs(first, stop, stream=stream)
            actors = self._encoder.actors(
                env,
                self._learner,
                epsilon=torch.tensor([self._target.epsilon], device=env.device),
                temperature=self._target.temperature,
                random=random,
            )
            capture = rollout_capture(self._config, env.device)
            played = play(env, tuple(actors.values()), gamma=self._config.rl.gamma, capture=capture)
            tables[:, :, first:stop] = torch.stack(played)
        tables = self._group.all_reduce(tables)
        return {agent_type.name: table for agent_type, table in zip(self._simulation.types, tables, strict=True)}


def _columns_of(ids: Sequence[int], spec: NormalizationSpec) -> list[Sequence[int]]:
    """Returns the normalized columns of each feature at all steps, none of one that is not normalized."""
    stops = np.cumsum([feature.width for feature in spec.features])
    columns: dict[int, Sequence[int]] = {}
    for feature, stop in zip(spec.features, stops.tolist(), strict=True):
        filled = range(stop - feature.width, stop)
        several = feature.embedding is not None
        columns |= {name: [filled[index]] if several else filled for index, name in enumerate(feature.raw_ids)}
    return at_all_steps([columns.get(feature, range(0)) for feature in ids], spec.step.width, spec.history)


def _units(config: WorkflowConfig, data: Data) -> NDArray[np.int64] | None:
    """Returns the code of the unit of each episode of the scored data; None unless data.columns names units."""
    if UNIT not in config.data.columns:
        return None
    from reagent_lite.data.copy.policy_column import read_unit_column  # needs the extra `data`

    return read_unit_column(data.evaluated.log, data.evaluated.copy)
