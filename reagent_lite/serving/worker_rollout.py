"""A worker's part of a rollout: which model has a unit, both models' probabilities, and the propensity of a draw.

bodies ─► units: kept, or drawn with the present share ─► draw from the unit's model ─► mixed propensity ─► log
"""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reagent_lite.export.bundle import Bundle, Prediction
from reagent_lite.rl.two_policies import mixed_propensity
from reagent_lite.serving.rollout_store import RolloutState, RolloutStore, ServedUnit
from reagent_lite.serving.served_model import ServedModel


class WorkerRollout:
    """The rollout of a worker.

    Args:
        store: its state.
        model: the current model of the worker.
        new: the new model.
        folders: folders from which the current and the new model are replaced once the rollout has ended.

    Attributes:
        store, new: see above.
    """

    def __init__(self, store: RolloutStore, model: ServedModel, new: ServedModel, folders: tuple[str, str]) -> None:
        self.store = store
        self.new = new
        self._model = model
        self._versions = model.version, new.version
        self._folders = folders
        self._has_ended = False
        self._combined: tuple[Bundle, Bundle] | None = None

    def present(self) -> RolloutState | None:
        """Returns the state if the rollout runs; None if it has ended, from when on one model decides alone."""
        if self._has_ended:
            return None
        state = self.store.state
        if state.state == "running":
            return state
        if state.state == "promoted":
            self._model.take_over(self.new)
        self._model.follow(self._folders[state.state == "promoted"])
        self._has_ended = True
        return None

    def document(self) -> dict[str, Any]:
        """Returns the rollout as GET /rollout.json has it.

        Raises:
            OSError: the database cannot be read.
        """
        state = self.store.state
        events = [json.loads(event) for event in self.store.events]
        return {
            "rollout": state.id,
            "state": state.state,
            "share": state.share,
            "current": self._versions[0],
            "new": self._versions[1],
            **self.store.figures,
            "events": [
                {name: value for name, value in event.items() if name not in ("figures", "comparison")}
                for event in events
                if event["rollout"] == state.id
            ],
        }

    def new_bundle(self, bundle: Bundle) -> Bundle:
        """Returns the new model, with the item table of the current one.

        Raises:
            BundleError: the new model does not fit the table.
        """
        if bundle.items is None or bundle.items is self.new.bundle.items:
            return self.new.bundle
        if self._combined is None or self._combined[0] is not bundle:
            self._combined = bundle, self.new.bundle.with_items(bundle.items, "items")
        return self._combined[1]

    def give_up(self, cause: str) -> None:
        """Stops the rollout, as the new model cannot decide any more."""
        self.store.change("stop", cause, state="stopped", share=0.0)
        self.present()

    def units_of(self, episodes: Sequence[str | None], share: float, rng: np.random.Generator) -> list[ServedUnit]:
        """Returns the unit of each row; those that begin are drawn with this share."""
        begun = {unit.episode: unit for unit in self.store.units(dict.fromkeys(filter(None, episodes)))}
        units = []
        for episode, draw in zip(episodes, rng.random(len(episodes)).tolist(), strict=True):
            unit = begun.get(episode) if episode is not None else None
            if unit is None:
                unit = ServedUnit(episode, draw < share, share)
                if episode is not None:
                    begun[episode] = unit
            units.append(unit)
        return units


def have_same_inputs(bundle: Bundle, other: Bundle) -> bool:
    """Returns whether two models read the same arrays from a request."""
    if bundle.image_shape != other.image_shape:
        return False
    return (bundle.state_feature_ids, bundle.action_feature_ids, bundle.levels, bundle.id_features) == (
        other.state_feature_ids,
        other.action_feature_ids,
        other.levels,
        other.id_features,
    )


def drawn_from(
    current: Prediction, new: Prediction, is_new: NDArray[np.bool_], rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    """Draws an action of each row from the policy of its unit.

    A policy without an allowed choice, which another policy has, is that other policy in this row.

    Returns:
        The choices [N], -1 where neither has one; both policies' probabilities of them, [N] each.
    """
    first = current.propensities
    second = new.propensities
    totals = first.sum(1, dtype=np.float64), second.sum(1, dtype=np.float64)
    if not (totals[0].all() and totals[1].all()):
        has_choice = [(total > 0)[:, None] for total in totals]
        first = np.where(has_choice[0], first, second)
        second = np.where(has_choice[1], second, first)
        totals = first.sum(1, dtype=np.float64), second.sum(1, dtype=np.float64)
    choices, _ = replace(current, propensities=np.where(is_new[:, None], second, first)).draw(rng)
    rows = np.arange(len(choices))
    of_current, of_new = (
        each[rows, choices] / np.where(total > 0, total, 1) for each, total in zip((first, second), totals, strict=True)
    )
    return choices, of_current, of_new


def add_action(unit: ServedUnit, current: float, new: float) -> float:
    """Adds an action to a unit; returns its propensity.

    Args:
        unit: the unit.
        current: the current policy's probability of the action.
        new: the new policy's.
    """
    propensity = mixed_propensity(unit.share, unit.log_ratio, current, new)
    unit.log_ratio += _log(new) - _log(current)
    unit.steps += 1
    return propensity


def _log(probability: float) -> float:
    return math.log(probability) if probability > 0 else -math.inf


def columns_of(state: RolloutState, unit: ServedUnit, current: float, new: float) -> dict[str, Any]:
    """Returns the columns that a rollout adds to the row of the unit's newest action."""
    return {
        "rollout": state.id,
        "policy": "new" if unit.is_new else "current",
        "share": unit.share,
        "probability_current": current,
        "probability_new": new,
        "unit_step": unit.steps - 1,
    }
