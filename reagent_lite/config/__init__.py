"""The JSON contract: every key typed, checked and described."""

from reagent_lite.config.loader import check, fingerprint, load_config, resolved
from reagent_lite.config.workflow import DqnConfig, ParametricDqnConfig, WorkflowConfig, has_named_actions

__all__ = [
    "DqnConfig",
    "ParametricDqnConfig",
    "WorkflowConfig",
    "check",
    "fingerprint",
    "has_named_actions",
    "load_config",
    "resolved",
]
