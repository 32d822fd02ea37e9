"""Train DQN and parametric DQN policies from logged decisions and from simulation.

    import reagent_lite

    run = reagent_lite.train({"actions": ["left", "right"], "model_output_path": "outputs/first"}, frame)
    reagent_lite.load_bundle(run.model).predict_rows([{"age": 41.0}]).greedy

Importing this package imports nothing else; each name below imports its module when it is first used.
"""

import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reagent_lite.api import compare as compare
    from reagent_lite.api import evaluate as evaluate
    from reagent_lite.api import inspect as inspect
    from reagent_lite.api import optuna_objective as optuna_objective
    from reagent_lite.api import rollout as rollout
    from reagent_lite.api import score as score
    from reagent_lite.api import simulate as simulate
    from reagent_lite.api import train as train
    from reagent_lite.config import DqnConfig as DqnConfig
    from reagent_lite.config import ParametricDqnConfig as ParametricDqnConfig
    from reagent_lite.config.evaluate_config import EvaluateConfig as EvaluateConfig
    from reagent_lite.config.score_config import ScoreConfig as ScoreConfig
    from reagent_lite.config.simulate_config import SimulateConfig as SimulateConfig
    from reagent_lite.data.inspection.inspected import Inspected as Inspected
    from reagent_lite.data.tables import read_log as read_log
    from reagent_lite.errors import Preempted as Preempted
    from reagent_lite.errors import ReagentLiteError as ReagentLiteError
    from reagent_lite.export import Bundle as Bundle
    from reagent_lite.export import Prediction as Prediction
    from reagent_lite.export import load_bundle as load_bundle
    from reagent_lite.run.output_folder import TrainResult as TrainResult
    from reagent_lite.run.runner import Callback as Callback
    from reagent_lite.tasks.evaluate import Evaluated as Evaluated
    from reagent_lite.tasks.rollout import ComparedPolicies as ComparedPolicies
    from reagent_lite.tasks.simulate import SimulatedLog as SimulatedLog

__version__ = "0.3.0"
_MODULES = {
    "Bundle": "export",
    "Callback": "run.runner",
    "ComparedPolicies": "tasks.rollout",
    "DqnConfig": "config",
    "Evaluated": "tasks.evaluate",
    "EvaluateConfig": "config.evaluate_config",
    "Inspected": "data.inspection.inspected",
    "TrainResult": "run.output_folder",
    "ParametricDqnConfig": "config",
    "Prediction": "export",
    "Preempted": "errors",
    "ReagentLiteError": "errors",
    "ScoreConfig": "config.score_config",
    "SimulateConfig": "config.simulate_config",
    "SimulatedLog": "tasks.simulate",
    "compare": "api",
    "evaluate": "api",
    "inspect": "api",
    "load_bundle": "export",
    "optuna_objective": "api",
    "read_log": "data.tables",
    "rollout": "api",
    "score": "api",
    "simulate": "api",
    "train": "api",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = f"{__name__}.{_MODULES[name]}"
    if importlib.util.find_spec(".".join(module.split(".")[:2])) is None:
        todo = "Run: pip uninstall reagent-lite-bundle, then pip install 'reagent-lite[data]'"
        raise ImportError(f"{__name__}.{name}: reagent-lite-bundle only loads models. {todo}")
    if name in ("read_log", "Inspected"):  # the only names whose modules need an extra
        from reagent_lite.errors import needing

        with needing("data", f"{__name__}.{name}"):
            return getattr(importlib.import_module(module), name)
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
