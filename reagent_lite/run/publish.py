"""The export gate: what `publish_if` holds back, and the file that says why."""

from pathlib import Path

from reagent_lite.config import WorkflowConfig
from reagent_lite.errors import ConfigError, Problem, nearest
from reagent_lite.evaluation.gate import Gate, decide
from reagent_lite.evaluation.page import REWARD_NAME
from reagent_lite.files import write_whole
from reagent_lite.manifest import canonical
from reagent_lite.run.evaluators import Judgement
from reagent_lite.run.experience import Experience

NOT_PUBLISHED = "not_published.json"


def require_outcome(config: WorkflowConfig, experience: Experience) -> None:
    """Refuses a condition on an outcome that the data does not have, before anything is learned.

    Raises:
        ConfigError: with the nearest outcome.
    """
    if config.publish_if is None:
        return
    known, asked = (REWARD_NAME, *experience.spec.metric_names), config.publish_if.outcome
    if asked not in known:
        expected = f"one of {', '.join(known)}"
        raise ConfigError(Problem("publish_if.outcome", expected, repr(asked), nearest(asked, known)))


def held_back(config: WorkflowConfig, experience: Experience, judgement: Judgement) -> Gate | None:
    """Returns the gate that keeps the model from being exported, or None; on rank 0."""
    if config.publish_if is None:
        return None
    assert experience.data is not None  # the config is refused without
    scored = experience.data.held_out_found or experience.data.found
    absent = scored.counts.get("propensity_absent_rows", 0)
    gate = decide(judgement.document["cpe"], config.publish_if, rows_without_propensity=absent)
    return None if gate.passed else gate


def write_reason(folder: Path, gate: Gate) -> None:
    """Writes why there is no new model."""
    write_whole(folder / NOT_PUBLISHED, canonical(gate.document))


def forget_reason(folder: Path) -> None:
    """Removes the reason of an earlier run into this folder."""
    (folder / NOT_PUBLISHED).unlink(missing_ok=True)
