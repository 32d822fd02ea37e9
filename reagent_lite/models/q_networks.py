"""Q-networks over [B, K] choices: fixed actions or candidates, plain or dueling, H outputs per choice.

discrete   state ─► MLP ─► [K * H]
candidates concat(state, candidate) ─► MLP ─► [H]            one pass per candidate
dueling    state ─► trunk ─► V [H];  A from the trunk's output (and the candidate);  Q = V + A - mean of allowed A
"""

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from reagent_lite.config.image_config import conv_layers_for
from reagent_lite.errors import ConfigError, Problem, first_line
from reagent_lite.models.embeddings import behind_tables, innermost
from reagent_lite.models.images import ImageNetwork
from reagent_lite.rl.td import select_choice
from reagent_lite.types import Actions, ConvLayers, SourceSpec

_GAINS: Final = {"elu": 2**0.5, "gelu": 2**0.5, "silu": 2**0.5}
_MOSTLY_ALLOWED: Final = 0.8  # share of allowed candidates above which skipping the others is not faster (measured)
_ACTIVATIONS: Final[dict[str, type[nn.Module]]] = {
    "linear": nn.Identity,
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "selu": nn.SELU,
    "silu": nn.SiLU,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSettings:
    """Shape and initial weights of a fully connected network.

    Attributes:
        hidden: widths of the hidden layers.
        activations: one per hidden layer.
        dueling: whether there are streams for value and advantage.
        outputs: H, numbers per choice.
        dropout: share of dropped outputs of each hidden layer.
        batch_norm: whether each linear layer has batch normalization before it.
        min_std: smallest standard deviation of initial weights.
        conv_layers: layers before these if states are images; None for those of image_config.conv_layers_for.
    """

    hidden: tuple[int, ...]
    activations: tuple[str, ...]
    dueling: bool = False
    outputs: int = 1
    dropout: float = 0.0
    batch_norm: bool = False
    min_std: float = 0.0
    conv_layers: ConvLayers | None = None


class MLP(nn.Sequential):
    """Fully connected layers; weights N(0, (gain / sqrt(fan_in))^2), biases 0."""

    def __init__(self, widths: tuple[int, ...], activations: tuple[str, ...], settings: NetworkSettings) -> None:
        layers: list[nn.Module] = []
        for i, activation in enumerate(activations):
            fan_in, fan_out = widths[i : i + 2]
            if settings.batch_norm:
                layers.append(BatchNorm(fan_in))
            linear = nn.Linear(fan_in, fan_out)
            gain = _GAINS.get(activation) or nn.init.calculate_gain(activation)  # type: ignore[arg-type]
            nn.init.normal_(linear.weight, std=max(gain / max(fan_in, 1) ** 0.5, settings.min_std))
            nn.init.zeros_(linear.bias)
            layers.append(linear)
            if activation != "linear":
                layers.append(_ACTIVATIONS[activation]())
            if settings.dropout and i < len(activations) - 1:
                layers.append(nn.Dropout(settings.dropout))
        super().__init__(*layers)


class BatchNorm(nn.SyncBatchNorm):
    """Batch normalization over the rows of all ranks; a batch of one row uses the running statistics."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalizes [..., W]; see torch.nn.SyncBatchNorm, which is torch.nn.BatchNorm1d in a single process."""
        rows = input.flatten(0, -2)
        # every rank takes part in the sums over ranks, even with a single row
        if self.training and (rows.shape[0] > 1 or (dist.is_initialized() and dist.get_world_size() > 1)):
            return super().forward(rows).view_as(input)
        return nn.functional.batch_norm(
            rows, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
        ).view_as(input)


class Dueling(nn.Module):
    """Q = V + A - mean of A over the allowed choices; Wang et al. (2016), eq. 9, restricted to allowed choices."""

    def forward(self, value: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
        """Joins value [B, 1, H] and advantage [B, K, H] under mask [B, K]."""
        allowed = mask.to(advantage.dtype).unsqueeze(2)
        mean = (advantage * allowed).sum(1, keepdim=True) / allowed.sum(1, keepdim=True).clamp(min=1)
        return value + advantage - mean


class DiscreteQNetwork(nn.Module):
    """Values of all K actions from the state."""

    needs_candidate_list: Final[bool] = False

    def __init__(self, spec: SourceSpec, settings: NetworkSettings) -> None:
        super().__init__()
        self.shape = (len(spec.action_names), settings.outputs)
        widths = (spec.num_state_features, *settings.hidden, len(spec.action_names) * settings.outputs)
        self.layers = MLP(widths, (*settings.activations, "linear"), settings)

    def forward(self, state: Tensor, mask: Tensor, features: Tensor | None = None) -> Tensor:
        """Returns [B, K, H] for state [B, S]."""
        return self.layers(state).view(-1, *self.shape)  # type: ignore[no-any-return]


class CandidateQNetwork(nn.Module):
    """Value of each candidate from the concatenation of state and candidate."""

    needs_candidate_list: Final[bool] = False

    def __init__(self, spec: SourceSpec, settings: NetworkSettings) -> None:
        super().__init__()
        self.batch_norm = settings.batch_norm  # its statistics must not include padding
        widths = (spec.num_state_features + spec.num_action_features, *settings.hidden, settings.outputs)
        self.layers = MLP(widths, (*settings.activations, "linear"), settings)

    def forward(
        self, state: Tensor, mask: Tensor, features: Tensor | None = None, *, only_allowed: bool = False
    ) -> Tensor:
        """Returns [B, K, H] for state [B, S], mask [B, K] and features [B, K, F].

        With `only_allowed`, values of candidates that are not allowed are undefined.
        """
        skip = only_allowed or (self.batch_norm and self.training)
        return _per_candidate(self.layers, state, features, mask if skip else None)


class _DuelingQNetwork(nn.Module):
    """A trunk over the state and two streams, for the value and for the advantages."""

    def __init__(self, spec: SourceSpec, settings: NetworkSettings, advantages: int) -> None:
        super().__init__()
        self.batch_norm = settings.batch_norm
        widths = (spec.num_state_features, *settings.hidden)
        self.trunk = MLP(widths, settings.activations, settings)
        self.value = _stream(widths[-1], settings.outputs, settings)
        self.advantage = _stream(widths[-1] + spec.num_action_features, advantages, settings)
        self.join = Dueling()


class DuelingDiscreteQNetwork(_DuelingQNetwork):
    """Values of all K actions from the state."""

    needs_candidate_list: Final[bool] = False

    def __init__(self, spec: SourceSpec, settings: NetworkSettings) -> None:
        super().__init__(spec, settings, len(spec.action_names) * settings.outputs)
        self.shape = (len(spec.action_names), settings.outputs)

    def forward(self, state: Tensor, mask: Tensor, features: Tensor | None = None) -> Tensor:
        """Returns [B, K, H] for state [B, S] and mask [B, K]."""
        hidden = self.trunk(state)
        advantage = self.advantage(hidden).view(-1, *self.shape)
        return self.join(self.value(hidden).unsqueeze(1), advantage, mask)  # type: ignore[no-any-return]


class DuelingCandidateQNetwork(_DuelingQNetwork):
    """Value from the state; advantage of each candidate from the trunk's output and the candidate."""

    needs_candidate_list: Final[bool] = True

    def __init__(self, spec: SourceSpec, settings: NetworkSettings) -> None:
        super().__init__(spec, settings, settings.outputs)

    def forward(
        self, state: Tensor, mask: Tensor, features: Tensor | None = None, *, only_allowed: bool = False
    ) -> Tensor:
        """Returns [B, K, H] for state [B, S], mask [B, K] and features [B, K, F]; see `CandidateQNetwork.forward`."""
        hidden = self.trunk(state)
        skip = only_allowed or (self.batch_norm and self.training)
        advantage = _per_candidate(self.advantage, hidden, features, mask if skip else None)
        return self.join(self.value(hidden).unsqueeze(1), advantage, mask)  # type: ignore[no-any-return]


def allowed_values(network: nn.Module, state: Tensor, actions: Actions) -> Tensor:
    """Returns [B, K, H] of a network; values of choices that are not allowed are undefined.

    On a CPU, other candidates are skipped if lists differ in length. On a GPU that would need a host synchronization.
    """
    if _skips_padding(network, actions):
        return network(state, actions.mask, actions.features, only_allowed=True)  # type: ignore[no-any-return]
    return network(state, actions.mask, actions.features)  # type: ignore[no-any-return]


def _skips_padding(network: nn.Module, actions: Actions) -> bool:
    mask = actions.mask
    features = actions.features
    return (
        isinstance(innermost(network), CandidateQNetwork | DuelingCandidateQNetwork)
        and features is not None
        and features.shape[1] > 1
        and features.device.type == "cpu"
        and int(mask.sum()) < _MOSTLY_ALLOWED * mask.numel()
    )


def chosen_values(network: nn.Module, state: Tensor, actions: Actions, choice: Tensor) -> Tensor:
    """Returns [B, H] of one choice per row, [B] int64; scores only this candidate if possible."""
    if actions.features is None or network.needs_candidate_list:
        return select_choice(allowed_values(network, state, actions), choice)
    single = only_choice(actions, choice)
    return network(state, single.mask, single.features).squeeze(1)  # type: ignore[no-any-return]


def only_choice(actions: Actions, choice: Tensor) -> Actions:
    """Returns lists of the chosen candidate alone, one per row; fixed actions stay as they are."""
    if actions.features is None:
        return actions
    mask = actions.mask.gather(1, choice.unsqueeze(1))
    return Actions(mask=mask, features=select_choice(actions.features, choice).unsqueeze(1))


def build_q_network(spec: SourceSpec, settings: NetworkSettings) -> nn.Module:
    """Returns the Q-network of a source, one of the four at the top of this file."""
    networks: dict[tuple[bool, bool], type[nn.Module]] = {
        (False, False): DiscreteQNetwork,
        (False, True): DuelingDiscreteQNetwork,
        (True, False): CandidateQNetwork,
        (True, True): DuelingCandidateQNetwork,
    }
    build = networks[spec.parametric, settings.dueling]
    return _behind_encoder(spec, settings, lambda inner: build(inner, settings))


def custom_network(name: str, spec: SourceSpec, settings: NetworkSettings) -> nn.Module:
    """Returns a network of a class outside this package, behind tables of vectors or convolutions if there are any."""
    return _behind_encoder(spec, settings, lambda inner: _checked_network(name, inner, settings))


def _behind_encoder(spec: SourceSpec, settings: NetworkSettings, build: Callable[[SourceSpec], nn.Module]) -> nn.Module:
    if spec.image is None:
        return behind_tables(spec, build)
    return ImageNetwork(spec, conv_layers_for(spec.image, settings.conv_layers), build)


def _checked_network(name: str, spec: SourceSpec, settings: NetworkSettings) -> nn.Module:
    """Returns a network of a class outside this package, after calls on an example of 3 rows, together and one by one.

    If a candidate's values depend only on the candidate and its state, `needs_candidate_list = False` in the class
    saves time.

    Raises:
        ConfigError: there is no such class, or it is not a Q-network for this source.
    """
    where = "training.network"
    choices = len(spec.action_names) or 2
    state = _example(3, spec.num_state_features)
    mask = torch.ones(3, choices).bool()
    features = _example(3, choices, spec.num_action_features) if spec.parametric else None
    module, _, attribute = name.partition(":")
    try:
        network = getattr(importlib.import_module(module), attribute)(spec, settings)
        with torch.no_grad():
            network.eval()
            values = network(state, mask, features)
            shape = list(values.shape)
            if features is not None:  # alone, a row has an excluded candidate as well, before the others
                features = nn.functional.pad(features, (0, 0, 1, 0), value=1.0)
                mask = nn.functional.pad(mask, (1, 0))
            alone = torch.cat(
                [network(state[[i]], mask[[i]], None if features is None else features[[i]]) for i in range(3)]
            )
    except Exception as error:
        got = f"{type(error).__name__}: {first_line(error)}"
        raise ConfigError(Problem(where, f"a module that can be created and called, {name}", got)) from error
    if shape != [3, choices, settings.outputs]:
        raise ConfigError(Problem(where, f"values {[3, choices, settings.outputs]} of 3 rows", str(shape)))
    alone = alone[:, -choices:]
    noise = 1e-4 * float(values.nan_to_num().abs().max())
    if alone.shape != values.shape or not torch.allclose(values, alone, rtol=1e-3, atol=noise, equal_nan=True):
        expected = "the same values of a row whether it is alone or among others"
        todo = "Give layers the rows as first dimension (batch_first=True), and draw no random numbers in evaluation"
        if spec.parametric:
            expected += ", with or without candidates that mask excludes, wherever they are in the list"
            todo += ". Where candidates are compared, leave out those with mask false"
        raise ConfigError(Problem(where, expected, "values that differ", todo))
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise ConfigError(Problem(where, "a module with parameters to learn", f"{name}, which has none"))
    if not hasattr(network, "needs_candidate_list"):
        network.needs_candidate_list = spec.parametric
    return network.train()  # type: ignore[no-any-return]


def _example(*shape: int) -> Tensor:
    return torch.linspace(-1.0, 1.0, math.prod(shape)).view(shape)


def _stream(width: int, outputs: int, settings: NetworkSettings) -> MLP:
    # one hidden layer of half the trunk's width
    return MLP((width, max(width // 2, 1), outputs), ("relu", "linear"), settings)


def _per_candidate(layers: nn.Module, state: Tensor, features: Tensor | None, only: Tensor | None) -> Tensor:
    """Returns [B, K, H] of layers for state [B, S] and features [B, K, F]; with a mask `only`, 0 outside it."""
    assert features is not None
    lists = features.shape[0]
    longest = features.shape[1]
    if only is None:
        return layers(torch.cat((state.unsqueeze(1).expand(-1, longest, -1), features), 2))  # type: ignore[no-any-return]
    scored = only.flatten().nonzero().squeeze(1)
    states = state.index_select(0, scored // longest)
    values: Tensor = layers(torch.cat((states, features.flatten(0, 1).index_select(0, scored)), 1))
    result = values.new_zeros(lists * longest, values.shape[1]).index_copy(0, scored, values)
    return result.view(lists, longest, values.shape[1])
