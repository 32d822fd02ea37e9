"""What the policy of a first run is worth, beside those that other tools learn from the same rows.

    python -m tests.benchmarks.policies [--part decisions|sequences] [--only shop,costs] [--seeds 5] [--large]
                                        [--alone: without running peers] [--peers: nothing but peers]
                                        [--keys '{"algorithm": "dqn"}': other keys of our config, for ablations]

Ours is the config that reagent_lite.inspect proposes, with nothing changed but the paths, trained by
reagent_lite.train. Values are true ones: of decisions the mean reward of the greedy choices on 20 000 further rows, of
sequences exact, or the mean return of 100 played episodes. All learn from the same rows, ours from those of them that
its run does not hold out. Worlds, loggers and peers are described in tests/benchmarks/worlds.

share   how far ours is on the way from the logged value to the best peer's, by means over seeds; empty where no peer is
        better than the log
above   whether ours is above the best peer
below   seeds for which ours is below the logged value

Peers live in environments of their own under outputs/, made where they are absent. Their values are kept in
outputs/policies.json by peer, its version, world, seed and a hash of the world's data, so that ours can be measured
again by itself; --alone leaves empty what has not been measured.
"""

import hashlib
import json
import logging
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pandas as pd
from numpy.typing import NDArray

import reagent_lite
from reagent_lite.export.bundle import Bundle
from tests.benchmarks.peers import interpreter
from tests.benchmarks.turns import ROOT, options_of
from tests.benchmarks.worlds import decisions, sequences
from tests.benchmarks.worlds.decisions import Columns, Ints
from tests.benchmarks.worlds.sequences import Finite

Arrays = Mapping[str, NDArray[Any]]
RESULTS = Path("outputs/policies.json")
BATCH = 5_000
LARGE = [name for name, world in decisions.WORLDS.items() if world.large]


class Case(Protocol):
    """A world and its log of one seed."""

    @property
    def best(self) -> float | None:
        """The value of the best policy; None if it is unknown."""

    @property
    def logged(self) -> float:
        """The value of the logging policy."""

    @property
    def frames(self) -> tuple[pd.DataFrame, pd.DataFrame | None]:
        """The log as a user has it, and the item table if there is one."""

    @property
    def arrays(self) -> Arrays:
        """What peers get."""

    def value_of(self, result: Arrays) -> float:
        """Returns the value of a peer's policy from what its program wrote."""

    def value(self, model: Bundle) -> float:
        """Returns the value of our policy."""


class Decisions:
    """A log of decisions with one reward each."""

    def __init__(self, name: str, seed: int) -> None:
        world = decisions.WORLDS[name]
        self.log = world.log(seed)
        self.test = world.test(seed)
        self.best, self.logged = self.test.best, self.test.logged
        self.names = [f"a{number:03}" for number in range(self.test.mean.shape[1])]

    @property
    def frames(self) -> tuple[pd.DataFrame, pd.DataFrame | None]:
        rows, items = self.log.rows, None
        columns: dict[str, Any] = dict(rows.state)
        if rows.candidates is None:
            columns["action"] = np.array(self.names)[self.log.action]
        else:
            possible = choices_of(rows)
            columns["action"] = [row[index] for row, index in zip(possible, self.log.action, strict=True)]
            columns["possible_actions"] = possible
        if rows.items is not None:
            items = pd.DataFrame({"item_id": item_ids(rows.items), **rows.items})
        columns |= {"reward": self.log.reward, "action_probability": self.log.propensity}
        return pd.DataFrame(columns), items

    @cached_property
    def arrays(self) -> Arrays:
        log = self.log
        arrays = {"log/action": log.action, "log/reward": log.reward, "log/propensity": log.propensity}
        arrays["actions"] = np.array(len(self.names))
        for part, rows in (("log", log.rows), ("test", self.test)):
            arrays |= {f"{part}/state/{name}": values for name, values in rows.state.items()}
            if rows.candidates is not None:
                arrays |= {f"{part}/candidate/{name}": values for name, values in rows.candidates.items()}
                arrays[f"{part}/present"] = rows.present
        return arrays

    def value_of(self, result: Arrays) -> float:
        return self.test.value(result["choice"])

    def value(self, model: Bundle) -> float:
        states = maps_of(self.test.state)
        possible = None if self.test.candidates is None else choices_of(self.test)
        greedy = [
            model.predict_rows(states[start : start + BATCH], possible and possible[start : start + BATCH]).greedy
            for start in range(0, len(states), BATCH)
        ]
        return self.test.value(indices(model, self.names, np.concatenate(greedy)))


class Sequences:
    """A log of episodes."""

    def __init__(self, name: str, seed: int) -> None:
        self.seed = seed
        self.world = sequences.WORLDS[name]()
        self.log = self.world.log(np.random.default_rng([seed, *name.encode()]))
        self.best, self.logged = self.world.best, logged_value(name)
        self.names = [f"a{number:02}" for number in range(self.log.allowed.shape[1])]

    @property
    def frames(self) -> tuple[pd.DataFrame, None]:
        log = self.log
        columns: dict[str, Any] = {"episode": log.episode, "step": log.step, **log.columns}
        columns["action"] = np.array(self.names)[log.action]
        if not log.allowed.all():
            columns["possible_actions"] = [list(np.array(self.names)[row]) for row in log.allowed]
        columns |= {"reward": log.reward, "action_probability": log.propensity, "terminal": log.terminal}
        return pd.DataFrame(columns), None

    @cached_property
    def arrays(self) -> Arrays:
        log = self.log
        levels = self.world.columns if isinstance(self.world, Finite) else log.columns
        arrays = {name: getattr(log, name) for name in ("action", "reward", "terminal", "last")}
        arrays["observation"] = encoded(log.columns, levels)
        arrays |= {"actions": np.array(len(self.names)), "seed": np.array(self.seed)}
        if isinstance(self.world, Finite):
            return {**arrays, "state": encoded(levels, levels), "allowed": self.world.allowed}
        return {**arrays, "env": np.array(self.world.env)}

    def value_of(self, result: Arrays) -> float:
        return self.world.value(result["choice"]) if isinstance(self.world, Finite) else float(result["value"])

    def value(self, model: Bundle) -> float:
        if isinstance(self.world, Finite):
            index = [model.action_names.index(name) for name in self.names]
            mask = np.zeros(self.world.allowed.shape, dtype=np.bool_)
            mask[:, index] = self.world.allowed
            greedy = model.predict_rows(maps_of(self.world.columns), mask=mask).greedy
            return self.world.value(indices(model, self.names, greedy))
        features = self.world.names

        def decide(observations: NDArray[np.float64]) -> Ints:
            rows = [dict(zip(features, row, strict=True)) for row in observations.tolist()]
            return indices(model, self.names, model.predict_rows(rows).greedy)

        return self.world.value(decide)


@cache
def logged_value(name: str) -> float:
    return sequences.WORLDS[name]().logged


def item_ids(items: Columns) -> list[str]:
    return [f"item-{number}" for number in range(len(next(iter(items.values()))))]


def choices_of(rows: decisions.Rows) -> list[list[Any]]:
    """Returns each row's candidates, as maps of features or as ids of items."""
    assert rows.candidates is not None
    present = rows.present.tolist()
    if rows.item is not None and rows.items is not None:
        ids = item_ids(rows.items)
        choices = [[ids[number] for number in row] for row in rows.item.tolist()]
    else:
        each = [
            maps_of({name: values[:, k] for name, values in rows.candidates.items()}) for k in range(len(present[0]))
        ]
        choices = [list(row) for row in zip(*each, strict=True)]
    return [
        [choice for choice, there in zip(row, mask, strict=True) if there]
        for row, mask in zip(choices, present, strict=True)
    ]


def maps_of(columns: Columns) -> list[dict[str, Any]]:
    """Returns {feature: value} of each row."""
    rows = zip(*(values.tolist() for values in columns.values()), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def indices(model: Bundle, names: list[str], greedy: Ints) -> Ints:
    """Returns a model's choices as indices of `names`; of candidates they are those of the list."""
    if not model.action_names:
        return greedy
    order = {name: number for number, name in enumerate(names)}
    return np.array([order[name] for name in model.action_names])[greedy]


def encoded(columns: Columns, levels: Columns) -> NDArray[np.float32]:
    """Returns [N, F] numbers as they are and categories one-hot."""
    parts = [
        (values[:, None] == np.unique(levels[name])) if values.dtype.kind == "U" else values[:, None]
        for name, values in columns.items()
    ]
    return np.concatenate([part.astype(np.float32) for part in parts], 1)


@dataclass(frozen=True, kw_only=True)
class Part:
    """Worlds of one kind, and who else learns from their logs.

    Attributes:
        case: returns a world and its log by name and seed.
        peers: {name: version}; a peer that changes gets another version, and is measured again.
        program: how an interpreter runs peers.
        environment: name and packages of the peers' environment.
    """

    worlds: tuple[str, ...]
    case: type[Decisions] | type[Sequences]
    peers: Mapping[str, int]
    program: tuple[str, ...]
    environment: tuple[str, ...]

    def peer_values(self, name: str, seed: int, case: Case, *, alone: bool) -> dict[str, float]:
        """Returns the peers' values, measured where they are not known; `alone` leaves those out."""
        digest = digest_of(case.arrays)
        result = {}
        for peer, version in self.peers.items():
            key = f"{peer} {version} {name} {seed} {digest}"
            if key not in known() and not alone and (python := interpreter(*self.environment)):
                value = case.value_of(self._run(python, peer, case.arrays))
                keep({**known(), key: value})
            if key in known():
                result[peer] = known()[key]
        return result

    def _run(self, python: str, peer: str, arrays: Arrays) -> Arrays:
        with tempfile.TemporaryDirectory() as folder:
            log, result = f"{folder}/log.npz", f"{folder}/result.npz"
            np.savez(log, **arrays)
            command = [python, *self.program, log, result, peer]
            finished = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
            if finished.returncode:
                raise SystemExit(f"{peer}: {finished.stderr[-2000:]}")
            with np.load(result) as written:
                return dict(written)


PARTS = {
    "decisions": Part(
        worlds=tuple(decisions.WORLDS),
        case=Decisions,
        peers={"ridge": 1, "boosting": 1, "vw": 1},
        program=("tests/benchmarks/worlds/decision_peers.py",),
        environment=("policies", "numpy", "pandas", "scipy", "scikit-learn", "vowpalwabbit"),
    ),
    "sequences": Part(
        worlds=tuple(sequences.WORLDS),
        case=Sequences,
        peers={"double_dqn": 1, "cql": 1, "bcq": 1},
        program=("-m", "tests.benchmarks.worlds.sequence_peers"),
        environment=("d3rlpy", "torch", "d3rlpy"),
    ),
}


def known() -> dict[str, float]:
    """Returns the values that are kept; read each time, as several of these programs may run at once."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def keep(values: Mapping[str, float]) -> None:
    RESULTS.parent.mkdir(exist_ok=True)
    writing = RESULTS.with_suffix(".new")
    writing.write_text(json.dumps(values, indent=1, sort_keys=True))
    writing.replace(RESULTS)


def digest_of(arrays: Arrays) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(name.encode() + np.ascontiguousarray(arrays[name]).tobytes())
    return digest.hexdigest()[:12]


def ours(case: Case, keys: Mapping[str, Any]) -> tuple[float, float]:
    """Returns the value of a first run's policy, and the run's seconds; `keys` take the place of its own."""
    frame, items = case.frames
    inspected = reagent_lite.inspect(frame, items=items)
    if inspected.config is None:
        raise SystemExit(f"inspect proposes no config: {inspected.problems}")
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        run = reagent_lite.train({**inspected.config, **keys, "model_output_path": folder})
        seconds = time.perf_counter() - start
        if run.model is None:
            raise SystemExit("the run exported no model")
        return case.value(reagent_lite.load_bundle(run.model)), seconds


@dataclass(frozen=True, kw_only=True)
class Row:
    """A world's line of the table; a list has one value a seed."""

    world: str
    best: list[float | None]
    logged: list[float]
    ours: list[float]
    seconds: list[float]
    peers: list[dict[str, float]]

    def peer(self, name: str) -> float | None:
        values = [values[name] for values in self.peers if name in values]
        return statistics.mean(values) if len(values) == len(self.peers) else None

    @property
    def best_peer(self) -> float | None:
        return max((value for name in self.peers[0] if (value := self.peer(name)) is not None), default=None)

    @property
    def share(self) -> float | None:
        logged = statistics.mean(self.logged)
        if not self.ours or self.best_peer is None or self.best_peer <= logged:
            return None
        return (statistics.mean(self.ours) - logged) / (self.best_peer - logged)

    @property
    def above(self) -> bool | None:
        return None if not self.ours or self.best_peer is None else statistics.mean(self.ours) > self.best_peer

    @property
    def below(self) -> int:
        return sum(value < logged for value, logged in zip(self.ours, self.logged, strict=False))


def measured(part: Part, name: str, options: Any) -> Row:
    row = Row(world=name, best=[], logged=[], ours=[], seconds=[], peers=[])
    for seed in range(options.seeds):
        case = part.case(name, seed)
        row.best.append(case.best)
        row.logged.append(case.logged)
        row.peers.append(part.peer_values(name, seed, case, alone=options.alone))
        if not options.peers:
            value, seconds = ours(case, json.loads(options.keys))
            row.ours.append(value)
            row.seconds.append(seconds)
    return row


def header(part: Part, seeds: int) -> str:
    ours_of = [f"ours, seed {seed}" for seed in range(seeds)]
    names = ["world", "best", "logged", *ours_of, "ours", *part.peers, "share", "above", "below", "seconds"]
    return f"| {' | '.join(names)} |\n|{'---|' * len(names)}"


def line(row: Row, part: Part, seeds: int) -> str:
    best = None if None in row.best else mean(row.best)
    values = [best, mean(row.logged), *(row.ours or [None] * seeds), mean(row.ours), *map(row.peer, part.peers)]
    verdict = ["" if row.above is None else ("no", "yes")[row.above], row.below if row.ours else ""]
    cells = [*map(shown, (*values, row.share)), *verdict, f"{mean(row.seconds):.1f}" if row.ours else ""]
    return f"| {' | '.join(map(str, (row.world, *cells)))} |"


def mean(values: Sequence[Any]) -> float | None:
    return statistics.mean(values) if values else None


def shown(value: float | None) -> str:
    return "" if value is None else f"{value:#.4g}"


def summary(rows: Sequence[Row]) -> str:
    shares = [row.share for row in rows if row.share is not None]
    if not shares:
        return ""
    compared = [row for row in rows if row.above is not None]
    above = sum(bool(row.above) for row in compared)
    below = sum(row.below for row in rows)
    return (
        f"share: mean {statistics.mean(shares):.3f}, least {min(shares):.3f}; above the best peer in {above} of "
        f"{len(compared)} worlds; below the log in {below} of {sum(len(row.ours) for row in rows)} runs"
    )


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    options = options_of(__doc__, part="", only="", seeds=5, large=False, alone=False, peers=False, keys="{}")
    for name, part in PARTS.items():
        usual = [world for world in part.worlds if options.large or world not in LARGE]
        named = options.only.split(",")
        worlds = [world for world in part.worlds if world in named] if options.only else usual
        if not worlds or options.part not in ("", name):
            continue
        print(header(part, options.seeds))
        rows = []
        for world in worlds:
            rows.append(measured(part, world, options))
            print(line(rows[-1], part, options.seeds), flush=True)
        print(f"{summary(rows)}\n", flush=True)
