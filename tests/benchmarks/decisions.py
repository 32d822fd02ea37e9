"""How often is a decision of reagent_lite.evaluate false, and how often does a better policy ship?

    python -m tests.benchmarks.decisions [--logs 40] [--seed 0] [--only reminders]

Logs as a user has them, a frame with the probability of every action under a new policy in a column, through the public
API at its defaults. Nothing in the product was chosen by these logs.

permuted  rewards are permuted over episodes, so that every policy is worth the same: "ship" and "do not ship" are false
better    the new policy takes the better action more often than the logging policy

trusted   share of logs with at least one trustworthy estimate of the quantity that decides
"""

import logging
import tempfile
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

import reagent_lite
from tests.benchmarks.turns import options_of
from tests.oracles.regimes import drawn, softmax

Array = NDArray[np.float64]
_LOGGED_RETURN = ("Per_Decision_Importance_Sampling", "IPS_Reward")


def reminders(rng: np.random.Generator, *, permuted: bool) -> pd.DataFrame:
    """6 000 single decisions among 8 reminders by a softmax of two features; 5 % of the appointments are missed, -1.

    Of three kinds of people each has one reminder that leaves 1 % of the appointments missed.
    """
    features = rng.normal(size=(6_000, 2))
    kind = (features[:, 0] > 0).astype(int) + (features[:, 1] > 0)
    logged = softmax(0.8 * features @ rng.normal(size=(2, 8)))
    target = 0.3 * logged + 0.7 * np.eye(8)[2 * kind]
    action = drawn(logged, rng)
    missed = rng.random(len(kind)) < np.where(action == 2 * kind, 0.01, 0.05)
    return frame(features, action, logged, target, -missed.astype(float), rng, permuted=permuted)


def treatments(rng: np.random.Generator, *, permuted: bool) -> pd.DataFrame:
    """1 200 episodes of 2 to 6 decisions among 4 doses, 40 % of them the dose of a rule; noise of deviation 1 a step.

    The dose that fits the state adds 0.5; the new policy gives it in half of the decisions.
    """
    length = rng.integers(2, 7, size=1_200)
    features = rng.normal(size=(length.sum(), 3))
    rule, best = np.digitize(features[:, :2], (-0.7, 0.0, 0.7)).T
    logged = 0.4 * np.eye(4)[rule] + 0.6 / 4
    target = 0.75 * logged + 0.25 * np.eye(4)[best]
    action = drawn(logged, rng)
    reward = rng.normal(size=len(rule)) + 0.5 * (action == best)
    return frame(features, action, logged, target, reward, rng, permuted=permuted, length=length)


def catalog(rng: np.random.Generator, *, permuted: bool) -> pd.DataFrame:
    """15 000 single decisions among 25 items, half of them the bestseller of a group; 1 % buy, for 10, 20 or 50.

    In each of four groups one item is bought by 5 %; the new policy shows it in 60 % of the rows.
    """
    group = rng.integers(4, size=15_000)
    logged = 0.5 * np.eye(25)[group] + 0.5 / 25
    target = 0.4 * logged + 0.6 * np.eye(25)[10 + group]
    action = drawn(logged, rng)
    bought = rng.random(len(group)) < np.where(action == 10 + group, 0.05, 0.01)
    reward = bought * rng.choice((10.0, 20.0, 50.0), size=len(group))
    return frame(np.eye(4)[group], action, logged, target, reward, rng, permuted=permuted)


def frame(
    features: Array,
    action: NDArray[np.int64],
    logged: Array,
    target: Array,
    reward: Array,
    rng: np.random.Generator,
    *,
    permuted: bool,
    length: NDArray[np.int64] | None = None,
) -> pd.DataFrame:
    """Returns a log; `length` has the rows of each episode, absent if every row is an independent decision."""
    names = np.array([f"a{number}" for number in range(logged.shape[1])])
    columns = {
        "state_features": [dict(zip("0123", row, strict=False)) for row in features.tolist()],
        "action": names[action],
        "possible_actions": [names.tolist()] * len(action),
        "action_probability": logged[np.arange(len(action)), action],
        "reward": rng.permutation(reward) if permuted else reward,
        "target": [dict(zip(names, row, strict=True)) for row in target.tolist()],
    }
    if length is not None:
        step = np.concatenate([np.arange(rows) for rows in length])
        episode = np.repeat(np.arange(len(length)), length)
        columns |= {"mdp_id": episode.astype(str), "sequence_number": step, "terminal": step == length[episode] - 1}
    return pd.DataFrame(columns)


def decision(log: pd.DataFrame, evaluation: dict[str, Any]) -> tuple[str, bool]:
    """Returns the decision about the policy in column "target", and whether an estimate is trustworthy."""
    with tempfile.TemporaryDirectory() as folder:
        config = {
            "evaluation": evaluation,
            "actions": sorted(log["possible_actions"][0]),
            "output_path": f"{folder}/evaluation.json",
            **({"gamma": 1.0} if "mdp_id" in log else {}),
        }
        evaluated = reagent_lite.evaluate("column:target", log, config=config)
    estimates = evaluated.estimates
    decides = estimates[estimates["estimator"] == _LOGGED_RETURN["mdp_id" not in log]]
    return evaluated.decision["choice"], bool((decides["verdict"] == "trustworthy").any())


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    kinds: tuple[tuple[str, Callable[..., pd.DataFrame], dict[str, Any]], ...] = (
        ("reminders", reminders, {}),
        ("treatments", treatments, {}),
        ("catalog", catalog, {}),
        ("catalog with its prices", catalog, {"reward_range": [0.0, 50.0]}),  # the next step after "not enough to say"
    )
    options = options_of(__doc__, logs=40, seed=0, only="")
    print("| log | rewards | logs | trusted | ship | do not ship | not enough to say |\n|---|---|---|---|---|---|---|")
    chosen = options.only.split(",") if options.only else [name for name, *_ in kinds]
    for number, (name, kind, evaluation) in enumerate(kinds):
        for permuted in (True, False) if name in chosen else ():
            logs = options.logs if permuted else options.logs // 2
            generators = [np.random.default_rng([options.seed, number, permuted, index]) for index in range(logs)]
            results = [decision(kind(rng, permuted=permuted), evaluation) for rng in generators]
            choices = Counter(choice for choice, _ in results)
            counts = [choices[choice] for choice in ("ship", "do not ship", "not enough to say")]
            row = [name, "permuted" if permuted else "better", logs, sum(trusted for _, trusted in results)]
            print(f"| {' | '.join(str(value) for value in (*row, *counts))} |", flush=True)
