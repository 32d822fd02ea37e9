"""Models of a policy in a checkpoint."""

from oracles.runs import ALONE

from reagent_lite.algorithms.cpe_heads import build_cpe_heads
from reagent_lite.config.evaluation import EvaluationConfig
from reagent_lite.evaluation.fitting import PolicyModels
from reagent_lite.models.q_networks import NetworkSettings
from reagent_lite.types import SourceSpec


def test_a_checkpoint_without_the_mean_outcome_has_zero() -> None:
    spec = SourceSpec(num_state_features=2, action_names=("a", "b"))
    heads = build_cpe_heads(spec, NetworkSettings(hidden=(), activations=()), gamma=0.9, target_update_rate=0.1)
    models = PolicyModels(heads, EvaluationConfig(), ALONE)
    saved = models.state_dict()
    heads.mean.fill_(3.0)
    del saved["heads"]["mean"]
    models.load_state_dict(saved)
    assert heads.mean.tolist() == [0.0]
