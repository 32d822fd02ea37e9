"""The best of many policies on one log, and many looks at a growing log; what is done makes no difference."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from reagent_lite.evaluation.cpe import MODELED, evaluate_page
from reagent_lite.evaluation.decision import Choice, Evidence, compare_with_log, decide_findings

from .gridworld import Array
from .regimes import CONFIG, drawn, page_of, softmax


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """A kind of choice among evaluations; policies are columns of numbers, so that only weights count.

    Attributes:
        kind: "columns" (policies on one log) or "looks" (one policy at a log that grows by equal parts).
        number: of policies or looks.
        rows: of the whole log.
        outcome: "normal" or "event".
        rate: of events.
    """

    kind: str
    number: int = 20
    rows: int = 600
    outcome: str = "normal"
    rate: float = 0.1

    def choices(self, seed: int) -> list[tuple[Choice, Choice]]:
        """Returns the decision of each evaluation of one log: at the whole level, and with the level divided.

        `workflows.evaluate` divides it among several models, and among `looks`.
        """
        rng = np.random.default_rng(seed)
        state = rng.normal(size=(self.rows, 4))
        mu = softmax(0.5 * state @ rng.normal(size=(4, 3)))
        action = drawn(mu, rng)
        base = state @ rng.normal(size=4) / 2
        reward = base + rng.normal(size=self.rows)
        if self.outcome == "event":
            reward = (rng.random(self.rows) < np.clip(self.rate * np.exp(base - 0.5), 0, 0.9)).astype(float)
        policies = self.number if self.kind == "columns" else 1
        columns = [softmax(state @ rng.normal(size=(4, 3))) for _ in range(policies)]
        at = np.arange(self.rows), action
        stops = [self.rows] if self.kind == "columns" else np.arange(1, self.number + 1) * self.rows // self.number
        choices = []
        for pi, stop in ((pi, int(stop)) for pi in columns for stop in stops):
            part = (pi[at][:stop], mu[at][:stop], reward[:stop])
            whole = self._choice(*part, 1, seed)
            divided = whole if whole is Choice.NOT_ENOUGH else self._choice(*part, self.number, seed)
            choices.append((whole, divided))
        return choices

    def _choice(self, taken: Array, propensity: Array, reward: Array, parts: int, seed: int) -> Choice:
        level = 1 - (1 - CONFIG.confidence_level) / parts
        zero = np.zeros_like(reward)
        result = evaluate_page(
            page_of(*(column[:, None] for column in (taken, propensity, reward, zero, zero, zero))),
            gamma=0.0,
            config=CONFIG.model_copy(update={"confidence_level": level, "bootstrap_resamples": 100}),
            generator=torch.Generator().manual_seed(seed),
            missing=dict.fromkeys(MODELED, "a column of numbers"),
        )
        return decide_findings(Evidence(result=result, comparisons=tuple(compare_with_log(result)))).choice


def measure(regime: Selection, logs: int, seed: int) -> dict[str, float]:
    """Returns the shares of logs with any decision to ship, and with any not to; all of them are false."""
    choices = [tuple(zip(*regime.choices(seed + number), strict=True)) for number in range(logs)]
    return {
        f"{choice}{words}": float(np.mean([choice in of_log[index] for of_log in choices]))
        for index, words in enumerate((", whole level", ", level divided"))
        for choice in (Choice.SHIP, Choice.DO_NOT_SHIP)
    }
