"""The log of an evaluation: read, held against what the models read, and divided into fitted and scored episodes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reagent_lite.config.evaluate import EvaluateConfig
from reagent_lite.data.copy.facts import Facts
from reagent_lite.data.copy.training_copy import TrainingCopy
from reagent_lite.data.sampling.normalized import raw_columns
from reagent_lite.data.sampling.source import LoggedRows, build_rows
from reagent_lite.errors import DataError, Problem, counted
from reagent_lite.evaluation.episodes import drawn
from reagent_lite.evaluation.exported_model import Candidate
from reagent_lite.evaluation.page import held_out

_MOST_NAMED = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """The log as it is evaluated.

    Attributes:
        copy: its rows.
        rows: what batches are gathered from, raw.
        fitted, scored: [n] row numbers in order, of whole episodes that are on one side only.
        counts: episodes on each side, and left out, by name.
        warnings: what was found wrong.
    """

    copy: TrainingCopy
    rows: LoggedRows
    fitted: NDArray[np.int64]
    scored: NDArray[np.int64]
    counts: dict[str, int]
    warnings: tuple[str, ...]

    @property
    def without_propensity(self) -> int:
        """Rows without a propensity."""
        return self.copy.counts.get("propensity_absent_rows", 0)


def prepare_log(config: EvaluateConfig, candidates: Sequence[Candidate], copy: TrainingCopy) -> Log:
    """Returns the log for models that decide among the same choices.

    Raises:
        DataError: what is wrong with the rows; none of a model's features in them; no episode to score.
    """
    warnings = [*copy.notes]
    for candidate in candidates:
        warnings += _feature_warnings(candidate, copy)
        if candidate.bundle.manifest["data_hash"] == Facts.of(copy, 0, {}).manifest:
            warnings.append(f"{candidate.key} was trained on this very log: it has seen episodes that are scored")
    fitted, scored, counts, notes = _split(config, copy)
    if not len(scored):
        raise DataError(Problem(config.data_path, "an episode of which every action is known, to score", "none"))
    features = raw_columns(copy.candidates) if copy.parametric else None
    rows = build_rows(copy, candidates[0].spans(copy), np.arange(len(copy)), raw_columns(copy.state), features)
    return Log(copy=copy, rows=rows, fitted=fitted, scored=scored, counts=counts, warnings=(*warnings, *notes))


def _feature_warnings(candidate: Candidate, copy: TrainingCopy) -> list[str]:
    """Returns what differs between the features of the log and those that a model reads.

    Raises:
        DataError: they share none.
    """
    sides = [("state", copy.state_ids, candidate.bundle.state_feature_ids)]
    if candidate.bundle.parametric:
        sides.append(("candidate", copy.action_ids, candidate.bundle.action_feature_ids))
    warnings = []
    for side, have, reads in sides:
        unknown, missing = sorted(set(have) - set(reads)), sorted(set(reads) - set(have))
        if reads and len(missing) == len(reads):
            where = f"{candidate.key} {candidate.path}"
            raise DataError(Problem(where, f"a log with some of the {side} features {_listed(reads)}", _listed(have)))
        if unknown:
            warnings.append(f"{candidate.key} does not know {counted(len(unknown), f'{side} feature')} of the log, "
                            f"left out: {_listed(unknown)}")  # fmt: skip
        if missing:
            warnings.append(f"{len(missing)} of {len(reads)} {side} features that {candidate.key} reads are missing in "
                            f"every row of the log: {_listed(missing)}")  # fmt: skip
    return warnings


def _listed(ids: Sequence[int]) -> str:
    more = ", ..." if len(ids) > _MOST_NAMED else ""
    return ", ".join(map(str, ids[:_MOST_NAMED])) + more if len(ids) else "none"


def _split(
    config: EvaluateConfig, copy: TrainingCopy
) -> tuple[NDArray[np.int64], NDArray[np.int64], dict[str, int], list[str]]:
    """Returns row numbers to fit to and to score, counts of episodes, and sentences about those left out."""
    episode, hashes = np.asarray(copy.episode), np.asarray(copy.episode_hash)
    scored, notes = held_out(hashes, config.evaluation.held_out_share), []
    faults = {"with an unknown action": np.asarray(copy.action) < 0, "with rows that sum up several": copy.step > 1}
    usable = np.ones(len(hashes), bool)
    for reason, rows in faults.items():
        wrong = np.unique(episode[rows])
        usable[wrong] = False
        if len(wrong):
            notes.append(f"not scored: {counted(len(wrong), 'episode')} {reason}")
    if not (scored & usable).any() and usable.any():  # few episodes: one of them is scored all the same
        scored[np.flatnonzero(usable)[hashes[usable].argmin()]] = True
    fitted = ~scored
    scored &= usable
    if not fitted.any() and scored.sum() > 1:
        given = np.flatnonzero(scored)[hashes[scored].argmax()]
        fitted[given], scored[given] = True, False
    chosen, most = np.flatnonzero(scored), config.evaluation.max_episodes
    if len(chosen) > most:
        notes.append(f"{most:,} of {len(chosen):,} episodes are scored (evaluation.max_episodes)")
        scored &= np.isin(hashes, drawn(hashes[chosen], most, config.seed))
    counts = {"episodes": len(hashes), "fitted_episodes": int(fitted.sum()), "scored_episodes": int(scored.sum())}
    known = np.asarray(copy.action) >= 0
    return np.flatnonzero(fitted[episode] & known), np.flatnonzero(scored[episode]), counts, notes
