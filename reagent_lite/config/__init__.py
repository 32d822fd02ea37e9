"""The JSON config: every key typed, checked and described."""

from reagent_lite.config.loader import changed_keys, check, expand_config, fingerprint, leaves, load_config, parameters
from reagent_lite.config.workflow import DqnConfig, ParametricDqnConfig, WorkflowConfig, has_named_actions

__all__ = [
    "DqnConfig",
    "ParametricDqnConfig",
    "WorkflowConfig",
    "changed_keys",
    "check",
    "expand_config",
    "fingerprint",
    "has_named_actions",
    "leaves",
    "load_config",
    "parameters",
]
