"""A convolutional network in front of a network: states are images of bytes, and become features.

state [B, S] uint8 ─► [B, channels, height, width] ─► / 255 ─► convolutions ─► [B, W] ─► network
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor, nn

from reagent_lite.types import ConvLayers, Image, SourceSpec

_LARGEST: Final = 255.0


class ImageEncoder(nn.Module):
    """Convolutional layers with ReLU and without padding; weights N(0, 2 / fan_in), biases 0.

    Args:
        image: shape of a state.
        layers: the layers; without any, the result is the scaled pixels.
    """

    def __init__(self, image: Image, layers: ConvLayers) -> None:
        super().__init__()
        self.shape = image.shape
        self.axes = image.axes
        self.pixels = image.pixels
        channels, _, _ = image.pixels
        parts: list[nn.Module] = []
        for filters, kernel, stride in layers:
            convolution = nn.Conv2d(channels, filters, kernel, stride)
            nn.init.normal_(convolution.weight, std=(2 / (channels * kernel**2)) ** 0.5)
            nn.init.zeros_(convolution.bias)  # type: ignore[arg-type]
            parts += [convolution, nn.ReLU()]
            channels = filters
        self.layers = nn.Sequential(*parts)

    def forward(self, state: Tensor) -> Tensor:
        """Returns [B, W] float32 for state [B, S] uint8."""
        frames = state.view(-1, *self.shape).permute(self.axes)
        scaled = frames.reshape(-1, *self.pixels).to(torch.float32) / _LARGEST
        return self.layers(scaled).flatten(1)  # type: ignore[no-any-return]


class ImageNetwork(nn.Module):
    """A network behind an encoder of images.

    Args:
        spec: counts of features, with an image.
        layers: layers of the encoder.
        build: returns the network for the features that the encoder makes.

    Attributes:
        encoder: from bytes to features.
        network: forward(features, mask, features of candidates).
    """

    def __init__(self, spec: SourceSpec, layers: ConvLayers, build: Callable[[SourceSpec], nn.Module]) -> None:
        super().__init__()
        assert spec.image is not None
        channels, height, width = spec.image.after(layers)
        self.encoder = ImageEncoder(spec.image, layers)
        self.network = build(replace(spec, num_state_features=channels * height * width, image=None))
        self.needs_candidate_list: bool = self.network.needs_candidate_list  # type: ignore[assignment]

    def forward(self, state: Tensor, mask: Tensor, features: Tensor | None = None) -> Tensor:
        """Returns the network's result for state [B, S] uint8 and mask [B, K]."""
        return self.network(self.encoder(state), mask, features)  # type: ignore[no-any-return]
