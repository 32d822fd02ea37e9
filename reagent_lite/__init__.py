"""Train DQN and parametric DQN policies from logged decisions and from simulation.

    import reagent_lite

    run = reagent_lite.train({"actions": ["left", "right"], "model_output_path": "outputs/first"}, frame)
    reagent_lite.load_bundle(run.model).predict_rows([{"age": 41.0}]).greedy

Importing this package imports nothing else: each name below brings what it needs when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reagent_lite.api import evaluate, score, simulate, train
    from reagent_lite.config import DqnConfig, ParametricDqnConfig
    from reagent_lite.config.evaluate import EvaluateConfig
    from reagent_lite.config.score import ScoreConfig
    from reagent_lite.config.simulate import SimulateConfig
    from reagent_lite.data.tables import read_log
    from reagent_lite.errors import Preempted, ReagentLiteError
    from reagent_lite.export import load_bundle
    from reagent_lite.run.train import Callback

__version__ = "0.1.0"
__all__ = [
    "Callback",
    "DqnConfig",
    "EvaluateConfig",
    "ParametricDqnConfig",
    "Preempted",
    "ReagentLiteError",
    "ScoreConfig",
    "SimulateConfig",
    "evaluate",
    "load_bundle",
    "read_log",
    "score",
    "simulate",
    "train",
]

_MODULES = {
    "Callback": "run.train",
    "DqnConfig": "config",
    "EvaluateConfig": "config.evaluate",
    "ParametricDqnConfig": "config",
    "Preempted": "errors",
    "ReagentLiteError": "errors",
    "ScoreConfig": "config.score",
    "SimulateConfig": "config.simulate",
    "evaluate": "api",
    "load_bundle": "export",
    "read_log": "data.tables",
    "score": "api",
    "simulate": "api",
    "train": "api",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = f"{__name__}.{_MODULES[name]}"
    if name == "read_log":  # the only one that cannot even be imported without an extra
        from reagent_lite.errors import needing

        with needing("data", f"{__name__}.{name}"):
            return importlib.import_module(module).read_log
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if not module.startswith(str(error.name)):
            raise
        todo = "Run: pip uninstall reagent-lite-bundle, then pip install reagent-lite"
        raise ImportError(f"{__name__}.{name}: reagent-lite-bundle only loads models. {todo}") from None


def __dir__() -> list[str]:
    return [*globals(), *__all__]
