"""Defaults of `"defaults": "2026"` that differ from those of ReAgent 2019, which are the fields' own.

They are filled in for absent keys before a config is checked. `epochs` null, `training.minibatch_size` null and
`rl.value_scale` "returns" become numbers once the data has been read.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from reagent_lite.config.section import Section

Tree = dict[str, Any]

MOST_LEVELS: Final = 1000
"""Largest number of one-hot columns of a feature."""
NETWORK: Final[Tree] = {
    "rl": {"gamma": 0.99, "target_update_rate": 0.01},
    "rainbow": {"dueling_architecture": False},
    "training": {"optimizer": "ADAMW", "l2_decay": 0.01, "layers": [-1, 128, 64, -1]},
}
"""For every algorithm with a network, on logs and in simulation."""
LOGGED: Final[Tree] = {
    "epochs": None,
    "training": {"lr_policy": "exponential", "lr_decay": None},
    "norm_params": {"whole_numbers": "continuous", "max_unique_enum_values": MOST_LEVELS},
}
"""Where there are logged rows."""
VALUES: Final[Tree] = {
    "rl": {"epsilon": 0.0, "softmax_policy": 0, "cql_alpha": None, "value_bounds": "rewards", "value_scale": "returns"},
}
"""For values that algorithm dqn learns from logged rows alone."""

DECISIONS: Final[Tree] = {
    "rl": {"gamma": 0.0, "softmax_policy": 0},
    "norm_params": LOGGED["norm_params"],
}
"""For algorithm boosting; rl.epsilon keeps its default, so that one decision in ten is drawn among all actions."""

_WITH_NETWORK = ("dqn", "crr", "iql")
LAST_LEARNING_RATE: Final = 0.05
"""Share of the learning rate at the end of a run on a log."""
CQL_ALPHA: Final = 0.1
"""Weight of the conservative term where rows are followed by others; where they are not, no value is propagated."""
CHECKPOINT_MINUTES: Final = 10.0
"""Minutes between two checkpoints of a run on several machines."""
_STEPS = 5_000
_STEPS_WITHOUT_EPISODES = 2_000
_SMALLEST_MINIBATCH = 128
_LARGEST_MINIBATCH = 4096


def with_defaults_of_2026(tree: Mapping[str, Any]) -> Tree:
    """Returns the keys of a config with those of 2026 that are absent, and have an effect together with the others."""
    algorithm = tree.get("algorithm", "dqn")
    levels_given = "max_unique_enum_values" in _keys(tree.get("norm_params"))
    if algorithm == "boosting":
        return _fill(tree, {"rl": DECISIONS["rl"]} if levels_given else DECISIONS)
    if algorithm not in _WITH_NETWORK:
        return dict(tree)
    result = _fill(tree, NETWORK)
    rl = _keys(tree.get("rl"))
    rainbow = _keys(tree.get("rainbow"))
    if not (tree.get("training_data_path") or _keys(tree.get("timeline")).get("inputTableName")):
        return result
    logged = dict(LOGGED)
    if levels_given:
        del logged["norm_params"]
    result = _fill(result, logged)
    if algorithm != "dqn" or _keys(tree.get("simulation")).get("share"):
        return result
    values = dict(VALUES["rl"])
    if rl.get("q_network_loss") == "bce_with_logits" or rainbow.get("categorical"):
        del values["value_bounds"], values["value_scale"]
    elif rainbow.get("quantile"):
        del values["value_scale"]
    if rl.get("gamma") == 1:  # without a discount, rewards of both signs have no bounds
        values.pop("value_bounds", None)
    return _fill(result, {"rl": values})


def keys_of_2026(algorithm: str) -> Iterator[str]:
    """Yields the paths of the keys that have another default in 2026 on a log."""
    trees: tuple[Tree, ...] = (DECISIONS,)
    if algorithm in _WITH_NETWORK:
        yield from ("epochs", "training.minibatch_size")
        trees = (NETWORK, VALUES, LOGGED)
    for tree in trees:
        yield from (f"{name}.{key}" for name, keys in tree.items() if isinstance(keys, dict) for key in keys)


def minibatch_of_2026(rows: int, parts: int) -> int:
    """Returns the rows of each of the `parts` of an optimizer step, a power of two, so that a pass has enough steps."""
    power_of_two: int = 2 ** round(math.log2(max(rows / _STEPS, 1)))
    return max(min(max(power_of_two, _SMALLEST_MINIBATCH), _LARGEST_MINIBATCH) // parts, 1)


def steps_of_2026(*, continues: bool) -> int:
    """Returns the fewest optimizer steps of a run; `continues`: whether rows are followed by others."""
    return _STEPS if continues else _STEPS_WITHOUT_EPISODES


def _fill(tree: Mapping[str, Any], defaults: Tree) -> Tree:
    result = dict(tree)
    for key, value in defaults.items():
        if not isinstance(value, dict):
            result.setdefault(key, value)
        elif isinstance(result.get(key, {}), Section | dict):
            result[key] = {**value, **_keys(result.get(key))}
    return result


def _keys(section: object) -> Tree:
    """Returns the keys that a section has been given."""
    if isinstance(section, Section):
        return {key: getattr(section, key) for key in section.model_fields_set}
    return section if isinstance(section, dict) else {}
