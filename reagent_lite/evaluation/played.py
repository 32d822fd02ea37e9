"""What policies earned in simulation, beside each other and beside a log's estimates: figures, JSON, text, tags."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reagent_lite.config.evaluation import EvaluationConfig
from reagent_lite.errors import counted
from reagent_lite.evaluation.decision import Simulated
from reagent_lite.evaluation.interval import Interval, number
from reagent_lite.evaluation.returns import estimates
from reagent_lite.sim.spec import EnvSpec

MODEL, AGAINST, RANDOM = "model", "against", "random"
AIM = "what estimates of the reward's discounted return of an episode aim at, if the log is this environment's"
DIFFERENCES = {AGAINST: "difference", RANDOM: "difference_to_random"}
"""Under which key of the simulation the difference to a policy stands."""
_NEGLIGIBLE = 0.01  # what a step counts, against the first; and a share of episodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Earned:
    """Mean return and mean discounted return of an episode, or their differences."""

    total: Interval
    discounted: Interval

    def json(self) -> dict[str, Any]:
        """Returns both as in the report file."""
        return {"return": self.total.json(), "discounted_return": self.discounted.json()}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedPolicy(Earned):
    """What a policy earned.

    Attributes:
        length: mean steps.
        cut_share: of episodes that the time limit ended.
    """

    length: float
    cut_share: float

    def json(self) -> dict[str, Any]:
        """Returns a policy's part of the report file."""
        return {**Earned.json(self), "mean_length": self.length, "truncated_share": self.cut_share}


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What was played, and what it earned.

    Attributes:
        env: name of the environment.
        parameters: constants of its dynamics in force.
        time_limit: steps.
        episodes: of each policy.
        longest: steps of the longest episode of a model.
        policies: by key, the first of them MODEL; the others AGAINST and RANDOM, uniformly random actions.
        differences: by key, MODEL minus that policy, episode by episode.
    """

    env: str
    parameters: dict[str, float]
    time_limit: int
    episodes: int
    longest: int
    policies: dict[str, PlayedPolicy]
    differences: dict[str, Earned]

    @classmethod
    def of(
        cls, spec: EnvSpec, time_limit: int, tables: Mapping[str, Tensor], config: EvaluationConfig, seed: int
    ) -> "Played":
        """Returns means with intervals of `Returns.table` of each policy, all of them on the same starts."""
        model = tables[MODEL]
        others = {key: model[:2] - table[:2] for key, table in tables.items() if key != MODEL}
        figures = estimates(torch.cat([*(table[:2] for table in tables.values()), *others.values()]).T,
                            level=config.confidence_level, resamples=config.bootstrap_resamples, seed=seed)  # fmt: skip
        pairs = iter(zip(figures[::2], figures[1::2], strict=True))
        policies = {
            key: PlayedPolicy(total=total, discounted=discounted, length=float(table[2].mean()),
                              cut_share=float(table[3].mean()))
            for (key, table), (total, discounted) in zip(tables.items(), pairs, strict=False)
        }  # fmt: skip
        return cls(
            env=spec.name,
            parameters=parameters_of(spec),
            time_limit=time_limit,
            episodes=model.shape[1],
            longest=max(int(table[2].max()) for key, table in tables.items() if key != RANDOM),
            policies=policies,
            differences={
                key: Earned(total=total, discounted=discounted)
                for key, (total, discounted) in zip(others, pairs, strict=True)
            },
        )

    def json(self, beside: "Beside | None" = None) -> dict[str, Any]:
        """Returns what is of no single model: environment, random actions, differences, whether a log is comparable."""
        document: dict[str, Any] = {
            "env": self.env, "env_parameters": self.parameters, "time_limit": self.time_limit,
            "episodes": self.episodes, "random": self.policies[RANDOM].json(),
        }  # fmt: skip
        document |= {DIFFERENCES[key]: one.json() for key, one in self.differences.items()}
        if beside is not None:
            document |= {"comparable": not beside.apart, "remarks": [*beside.apart, *beside.remarks]}
        return document

    def scores(self) -> dict[str, float]:
        """Returns the model's figures, and the return of random actions if they were played, by TensorBoard tag."""
        model = self.policies[MODEL]
        scores = model.total.tags("simulation/return") | model.discounted.tags("simulation/discounted_return")
        if RANDOM in self.policies:
            scores |= self.policies[RANDOM].total.tags("simulation/random_return")
        return scores | {"simulation/length/mean": model.length, "simulation/truncated_share": model.cut_share}

    def lines(self, names: Mapping[str, str], gamma: float, level: float) -> list[str]:
        """Returns the simulation as text; `names` are those of the models."""
        text = [f"simulation of {self.env}: {counted(self.episodes, 'episode')} of each policy, of at most "
                f"{counted(self.time_limit, 'step')}; intervals at {level:.0%}"]  # fmt: skip
        for key, one in self.policies.items():
            text.append(f"  {names.get(key, 'uniformly random actions')}: return {one.total}, discounted return at "
                        f"{gamma:g} a step {one.discounted}; {number(one.length)} steps, {one.cut_share:.1%} end by "
                        "the limit")  # fmt: skip
        for key, difference in self.differences.items():
            text.append(f"  model minus {key}, on the same starts: return {difference.total}, "
                        f"discounted return {difference.discounted}")  # fmt: skip
        return text


def parameters_of(spec: EnvSpec) -> dict[str, float]:
    """Returns the constants of an environment as float32 has them."""
    return {name: float(str(np.float32(value))) for name, value in spec.parameters.items()}


def simulated_of(document: Mapping[str, Any], name: str = "The model") -> tuple[Simulated, ...]:
    """Returns what the policies of a report file earned in simulation: the model, the other one, random actions."""
    simulation = document.get("simulation")
    if simulation is None:
        return ()
    found = [_simulated(f"{name}, {document['model']['policy']}", document["model"]["simulated"])]
    others = {
        AGAINST: ("The other model", document.get("against", {}).get("simulated")),
        RANDOM: ("Random actions", simulation["random"]),
    }
    for key, (name, played) in others.items():
        difference = simulation.get(DIFFERENCES[key])
        if difference is not None:
            paired = Interval.read(difference["return"])
            found.append(replace(_simulated(name, played), difference=paired, random=key == RANDOM))
    return tuple(found)


def _simulated(name: str, played: Mapping[str, Any]) -> Simulated:
    return Simulated(
        name=name,
        returns=Interval.read(played["return"]),
        discounted=Interval.read(played["discounted_return"]),
        length=played["mean_length"],
        cut_share=played["truncated_share"],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What estimates of an episode's return count.

    Attributes:
        gamma: discount per step.
        by_time: whether the discount goes by the time between rows instead.
        horizon: steps of an episode that are scored.
        longest: steps of the longest logged episode.
        cut_share: of scored episodes, those that were cut before their end.
    """

    gamma: float
    by_time: bool
    horizon: int
    longest: int
    cut_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Whether simulated discounted returns are of the same quantity as estimates of an episode's return.

    Attributes:
        apart: sentences that say why they are not; empty where they are, if the log is the environment's.
        remarks: sentences on parts of the estimates that are not.
    """

    apart: tuple[str, ...]
    remarks: tuple[str, ...]


def beside(counted: Counted, played: Played) -> Beside:
    """Returns how far a log's estimates and simulated returns may be held against each other."""
    return Beside(apart=tuple(_apart(counted, played)), remarks=tuple(_remarks(counted, played)))


def _apart(counted: Counted, played: Played) -> Iterator[str]:
    if counted.by_time:
        yield "Estimates discount by time_diff, as the model was trained, simulated returns by steps."
    if played.longest > counted.horizon and counted.gamma**counted.horizon > _NEGLIGIBLE:
        yield (f"Estimates count {counted.horizon:,} steps of an episode (evaluation.max_horizon), simulated episodes "
               f"have up to {played.longest:,}.")  # fmt: skip
    limit = played.time_limit
    if counted.longest > limit and counted.gamma**limit > _NEGLIGIBLE:
        yield f"Logged episodes have up to {counted.longest:,} steps, simulated ones end at {limit:,}."
    if (
        counted.cut_share > _NEGLIGIBLE
        and counted.longest < min(played.longest, counted.horizon)
        and counted.gamma**counted.longest > _NEGLIGIBLE
    ):
        yield (f"{counted.cut_share:.1%} of the scored episodes were cut, none after more than {counted.longest:,} "
               f"steps; simulated episodes have up to {played.longest:,}.")  # fmt: skip


def _remarks(counted: Counted, played: Played) -> Iterator[str]:
    cut = max(one.cut_share for key, one in played.policies.items() if key != RANDOM)
    left = counted.gamma**played.time_limit
    if cut and left > _NEGLIGIBLE:
        yield (f"The time limit ends {cut:.1%} of the simulated episodes at step {played.time_limit:,}, where a reward "
               f"still counts {left:.2g}: estimates that rest on a value model go on beyond it.")  # fmt: skip
    if counted.cut_share:
        yield (f"{counted.cut_share:.1%} of the scored episodes were cut before their end: estimates by weights alone "
               "stop there.")  # fmt: skip
