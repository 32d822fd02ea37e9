"""What was earned in simulation: as JSON, as text, and as figures by the tags of training."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from reagent_lite.config.evaluate import EvaluateConfig
from reagent_lite.errors import counted
from reagent_lite.evaluation.comparison import Beside
from reagent_lite.evaluation.decision import Simulated
from reagent_lite.evaluation.interval import Interval, finite, number
from reagent_lite.evaluation.returns import RANDOM, Played, PlayedPolicy

if TYPE_CHECKING:
    from reagent_lite.evaluation.exported_model import ExportedModel

AGAINST = "against"
AIM = "what estimates of the reward's discounted return of an episode aim at, if the log is this environment's"
DIFFERENCES = {"against": "difference", "random": "difference_to_random"}
"""Under which key of the simulation the difference to a policy stands."""


def played_document(policy: PlayedPolicy) -> dict[str, Any]:
    """Returns a policy's part of the report file."""
    return {
        "return": policy.total.json(),
        "discounted_return": policy.discounted.json(),
        "mean_length": policy.length,
        "truncated_share": policy.cut_share,
    }


def simulation_document(played: Played, beside: Beside | None) -> dict[str, Any]:
    """Returns what is of no single model: environment, random actions, difference, whether a log is comparable."""
    document: dict[str, Any] = {
        "env": played.env,
        "env_parameters": played.parameters,
        "time_limit": played.time_limit,
        "episodes": played.episodes,
        "random": played_document(played.of(RANDOM)),
    }
    for key, (total, discounted) in played.differences.items():
        document[DIFFERENCES[key]] = {"return": total.json(), "discounted_return": discounted.json()}
    if beside is not None:
        document |= {"comparable": not beside.apart, "remarks": [*beside.apart, *beside.remarks]}
    return document


def simulation_lines(
    played: Played, beside: Beside | None, models: "Sequence[ExportedModel]", config: EvaluateConfig, gamma: float
) -> list[str]:
    """Returns the simulation as text."""
    text = [f"simulation of {played.env}: {counted(played.episodes, 'episode')} of each policy, "
            f"of at most {counted(played.time_limit, 'step')}; "
            f"intervals at {config.evaluation.confidence_level:.0%}"]  # fmt: skip
    names = {one.key: f"{one.key} {one.path}, {one.policy(config)}" for one in models}
    for one in played.policies:
        name = names.get(one.key, "uniformly random actions")
        text.append(f"  {name}: return {one.total}, discounted return at {gamma:g} a step {one.discounted}; "
                    f"{number(one.length)} steps, {one.cut_share:.1%} end by the limit")  # fmt: skip
    for key, (total, discounted) in played.differences.items():
        text.append(f"  model minus {key}, on the same starts: return {total}, "
                    f"discounted return {discounted}")  # fmt: skip
    if beside is not None:
        text += [f"  {sentence}" for sentence in (*beside.apart, *beside.remarks)]
    return text


def beside_line(policy: PlayedPolicy, beside: Beside) -> str:
    """Returns the line that stands with a model's estimates."""
    what = "not comparable, see below" if beside.apart else AIM
    return f"discounted return in simulation: {policy.discounted}; {what}"


def simulation_scores(played: Played) -> dict[str, float | None]:
    """Returns the model's figures, and the return of random actions, by the tags of training."""
    model, random = played.of("model"), played.of(RANDOM)
    scores: dict[str, float | None] = {}
    for name, one in (
        ("return", model.total),
        ("discounted_return", model.discounted),
        ("random_return", random.total),
    ):
        scores |= {tag: finite(value) for tag, value in one.tags(f"simulation/{name}").items()}
    return scores | {"simulation/length/mean": model.length, "simulation/truncated_share": model.cut_share}


def simulation_differences(played: Played) -> dict[str, list[float | None]]:
    """Returns {tag: [estimate, lower, upper]} of model minus against, empty for one model."""
    if AGAINST not in played.differences:
        return {}
    names = ("simulation/return", "simulation/discounted_return")
    return {name: list(one.json().values()) for name, one in zip(names, played.differences[AGAINST], strict=True)}


def simulated_of(document: Mapping[str, Any], name: str = "The model") -> tuple[Simulated, ...]:
    """Returns what the policies of a report file earned in simulation: the model, the other one, random actions."""
    simulation = document.get("simulation")
    if simulation is None:
        return ()
    found = [_simulated(f"{name}, {document['model']['policy']}", document["model"]["simulated"])]
    others = {
        "against": ("The other model", document.get("against", {}).get("simulated")),
        "random": ("Random actions", simulation["random"]),
    }
    for key, (name, played) in others.items():
        difference = simulation.get(DIFFERENCES[key])
        if difference is not None:
            paired = Interval.read(difference["return"])
            found.append(replace(_simulated(name, played), difference=paired, random=key == "random"))
    return tuple(found)


def _simulated(name: str, played: Mapping[str, Any]) -> Simulated:
    return Simulated(
        name=name,
        returns=Interval.read(played["return"]),
        discounted=Interval.read(played["discounted_return"]),
        length=played["mean_length"],
        cut_share=played["truncated_share"],
    )
