"""Policies that other people's tools learn from a log of decisions: python decision_peers.py log.npz choices.npz peer

Runs in an environment that has scikit-learn and vowpalwabbit, and none of this project. The log has arrays by name:
log/state/<feature> [N], log/action, log/reward, log/propensity [N], test/state/<feature> [M] and, for candidates,
log/candidate/<feature> and log/present [N, K], and test/... of the same. The result is `choice` [M], by index.

ridge     RidgeCV, penalties of 0.01 to 10 000: one model per action on one-hot and standardized features. Candidates:
          one model on features of state and candidate and their products.
boosting  HistGradientBoostingRegressor at its defaults, one model per action, categories as such (of more than 255
          levels, which it does not take, as numbers). Candidates: one model on features of state and candidate.
vw        Vowpal Wabbit's cb_adf, -q of state and action, standardized numbers, four passes without a holdout.
"""

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.linear_model import RidgeCV
from vowpalwabbit import Workspace

PENALTIES = np.logspace(-2, 4, 13)
MOST_LEVELS = 255  # of a category in HistGradientBoosting


class Encoder:
    """How a column is given to learners, fitted to its values in the log."""

    def __init__(self, values: np.ndarray) -> None:
        self.levels = np.unique(values) if values.dtype.kind == "U" else None
        self.mean, self.deviation = (0, 1) if self.levels is not None else (values.mean(), values.std() + 1e-12)

    def dense(self, values: np.ndarray) -> np.ndarray:
        """[..., C] one-hot, or one standardized column."""
        if self.levels is not None:
            return (values[..., None] == self.levels).astype(float)
        return ((values - self.mean) / self.deviation)[..., None]

    def code(self, values: np.ndarray) -> np.ndarray:
        """The index of a level, NaN for others; numbers as they are."""
        if self.levels is None:
            return values.astype(float)
        index = np.searchsorted(self.levels, values).clip(max=len(self.levels) - 1)
        return np.where(self.levels[index] == values, index, np.nan)

    def words(self, name: str, values: np.ndarray) -> np.ndarray:
        """Vowpal Wabbit's text of a feature."""
        if self.levels is not None:
            return np.char.add(f"{name}=", values)
        scaled = (values - self.mean) / self.deviation
        return np.char.add(f"{name}:", np.char.mod("%.5g", scaled))


class Data:
    """A log and its test rows."""

    def __init__(self, arrays: Any) -> None:
        self.action, self.reward = arrays["log/action"], arrays["log/reward"]
        self.propensity = arrays["log/propensity"]
        self.parts = {
            part: {
                kind: {key.split("/")[2]: arrays[key] for key in arrays if key.startswith(f"{part}/{kind}/")}
                for kind in ("state", "candidate")
            }
            for part in ("log", "test")
        }
        self.present = {part: arrays.get(f"{part}/present") for part in ("log", "test")}
        self.num_actions = int(arrays["actions"])
        self.encoders = {
            kind: {name: Encoder(values) for name, values in columns.items()}
            for kind, columns in self.parts["log"].items()
        }

    @property
    def parametric(self) -> bool:
        return bool(self.encoders["candidate"])

    def matrix(self, part: str, kind: str, form: Callable[[Encoder, np.ndarray], np.ndarray]) -> np.ndarray:
        """Columns of state [N, F] or of candidates [N, K, F]."""
        columns = self.parts[part][kind]
        made = [form(self.encoders[kind][name], values) for name, values in columns.items()]
        dims = 2 if kind == "state" else 3
        return np.concatenate([column if column.ndim == dims else column[..., None] for column in made], -1)

    def categories(self, kind: str) -> list[bool]:
        encoders = self.encoders[kind].values()
        return [encoder.levels is not None and len(encoder.levels) <= MOST_LEVELS for encoder in encoders]

    def best(self, values: np.ndarray) -> np.ndarray:
        """Index of the largest value [M, K] among the actions that are there."""
        present = self.present["test"]
        return (values if present is None else np.where(present, values, -np.inf)).argmax(1)


def with_products(state: np.ndarray, candidate: np.ndarray) -> np.ndarray:
    products = state[:, :, None] * candidate[:, None, :]
    return np.concatenate([state, candidate, products.reshape(len(state), -1)], 1)


def ridge(data: Data) -> np.ndarray:
    def fitted(x: np.ndarray, y: np.ndarray) -> RidgeCV:
        return RidgeCV(PENALTIES).fit(x, y)

    if data.parametric:
        return of_candidates(data, Encoder.dense, with_products, fitted)
    return of_actions(data, Encoder.dense, fitted)


def boosting(data: Data) -> np.ndarray:
    categories = data.categories("state") + data.categories("candidate")

    def fitted(x: np.ndarray, y: np.ndarray) -> HistGradientBoostingRegressor:
        return HistGradientBoostingRegressor(categorical_features=categories, random_state=0).fit(x, y)

    if data.parametric:
        return of_candidates(data, Encoder.code, lambda *both: np.concatenate(both, 1), fitted)
    return of_actions(data, Encoder.code, fitted)


def of_actions(data: Data, form: Callable[..., np.ndarray], fitted: Callable[..., Any]) -> np.ndarray:
    log, test = data.matrix("log", "state", form), data.matrix("test", "state", form)
    values = np.empty((len(test), data.num_actions))
    for action in range(data.num_actions):
        rows = data.action == action
        values[:, action] = fitted(log[rows], data.reward[rows]).predict(test)
    return data.best(values)


def of_candidates(
    data: Data, form: Callable[..., np.ndarray], joined: Callable[..., np.ndarray], fitted: Callable[..., Any]
) -> np.ndarray:
    log, test = ([data.matrix(part, kind, form) for kind in ("state", "candidate")] for part in ("log", "test"))
    model = fitted(joined(log[0], log[1][np.arange(len(data.action)), data.action]), data.reward)
    each = [model.predict(joined(test[0], test[1][:, number])) for number in range(test[1].shape[1])]
    return data.best(np.stack(each, 1))


def vw(data: Data) -> np.ndarray:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("log", "test"):
            with open(folder / part, "w") as file:
                file.writelines(examples(data, part))
        learning = f"--cb_adf -q SA --passes 4 --holdout_off --cache_file {folder}/cache -k --quiet"
        Workspace(f"{learning} -d {folder}/log -f {folder}/model", enable_logging=False).finish()
        testing = f"-t -i {folder}/model -d {folder}/test -p {folder}/scores --quiet"
        Workspace(testing, enable_logging=False).finish()
        lines = (folder / "scores").read_text().split("\n")
    first = np.array([int(line.split(":", 1)[0]) for line in lines if line])  # it has the least cost
    present = data.present["test"]
    return first if present is None else (present.cumsum(1) > first[:, None]).argmax(1)


def examples(data: Data, part: str) -> Iterator[str]:
    """Yields Vowpal Wabbit's lines of each row: what is shared, one per action, and an empty one."""

    def words(kind: str) -> np.ndarray:
        columns = data.parts[part][kind].items()
        texts = [data.encoders[kind][name].words(name, values) for name, values in columns]
        joined = texts[0]
        for text in texts[1:]:
            joined = np.char.add(np.char.add(joined, " "), text)
        return joined

    shared = words("state")
    candidates = words("candidate") if data.parametric else None
    names = [f"a{number}" for number in range(data.num_actions)]
    for row, state in enumerate(shared.tolist()):
        texts = names if candidates is None else candidates[row].tolist()
        lines = [f"|A {text}\n" for text in texts]
        if part == "log":
            taken = data.action[row]
            lines[taken] = f"0:{-data.reward[row]:.6g}:{data.propensity[row]:.6g} {lines[taken]}"
        present = data.present[part]
        if present is not None:
            lines = [line for line, there in zip(lines, present[row], strict=True) if there]
        yield f"shared |S {state}\n{''.join(lines)}\n"


if __name__ == "__main__":
    log, choices, peer = sys.argv[1:]
    with np.load(log) as arrays:
        data = Data(dict(arrays))
    np.savez(choices, choice={"ridge": ridge, "boosting": boosting, "vw": vw}[peer](data))
