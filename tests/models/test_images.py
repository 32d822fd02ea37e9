"""Images in front of a network: scale, layouts, convolutions by hand, shapes of Mnih et al., TorchScript and ONNX."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from reagent_lite.config.image_config import ImageConfig, conv_layers_for
from reagent_lite.export.formats import FORMATS
from reagent_lite.export.predictor import ImagePredictor
from reagent_lite.models.images import ImageEncoder, ImageNetwork
from reagent_lite.models.q_networks import NetworkSettings, build_q_network
from reagent_lite.models.value_heads import ScalarHead, Scorer
from reagent_lite.rl.policies import EpsilonGreedy
from reagent_lite.types import Image, SourceSpec

SETTINGS = NetworkSettings(hidden=(8,), activations=("relu",))
pytestmark = pytest.mark.filterwarnings(r"ignore:`torch\.jit\.:DeprecationWarning")


def image_of(*shape: int, channels: str | None = None) -> Image:
    return ImageConfig.model_validate({"shape": list(shape), "channels": channels}).image


@pytest.mark.parametrize(
    ("shape", "channels", "order"),
    [
        ((3, 4), None, (0, 1, 2)),
        ((3, 4, 2), None, (0, 3, 1, 2)),
        ((2, 3, 4), None, (0, 1, 2, 3)),
        ((2, 2, 2), None, (0, 3, 1, 2)),
        ((2, 3, 4), "last", (0, 3, 1, 2)),
        ((4, 3, 2), "first", (0, 1, 2, 3)),
        ((5, 3, 4, 2), None, (0, 1, 4, 2, 3)),
        ((5, 2, 3, 4), None, (0, 1, 2, 3, 4)),
    ],
)
def test_without_layers_the_features_are_bytes_over_255_channel_by_channel(
    shape: tuple[int, ...], channels: str | None, order: tuple[int, ...]
) -> None:
    image = image_of(*shape, channels=channels)
    states = np.arange(2 * image.size, dtype=np.uint8).reshape(2, *shape)
    states[0].flat[0] = 255
    encoded = ImageEncoder(image, ())(torch.from_numpy(states).flatten(1))
    expected = states.transpose(order).reshape(2, -1).astype(np.float32) / np.float32(255)
    assert encoded.dtype == torch.float32
    np.testing.assert_array_equal(encoded.numpy(), expected)
    assert encoded[0, 0] == 1.0


def test_a_convolution_by_hand() -> None:
    encoder = ImageEncoder(image_of(3, 3), ((2, 2, 1),))
    convolution = encoder.layers[0]
    with torch.no_grad():
        convolution.weight.copy_(torch.tensor([[[[1.0, 2.0], [0.0, -1.0]]], [[[-1.0, 0.0], [0.0, 0.0]]]]))
        convolution.bias.copy_(torch.tensor([0.5, 2.0]))
    board = torch.tensor([[255, 0, 51], [0, 102, 0], [0, 0, 255]], dtype=torch.uint8)
    # pixels 1, 0, .2 | 0, .4, 0 | 0, 0, 1: at each corner a + 2 b - d + .5, below 0 nothing, and 2 - a
    first = [1 + 0 - 0.4 + 0.5, 0 + 0.4 - 0 + 0.5, 0 + 0.8 - 0 + 0.5, max(0.4 + 0 - 1 + 0.5, 0)]
    second = [2 - 1, 2 - 0, 2 - 0, 2 - 0.4]
    np.testing.assert_allclose(encoder(board.view(1, 9)).detach().numpy()[0], [*first, *second], atol=1e-6)


def test_the_layers_of_mnih_et_al() -> None:
    """Table 1 of the methods: 84 x 84 x 4, then 20 x 20 x 32, 9 x 9 x 64 and 7 x 7 x 64, which are 3,136 features."""
    image = image_of(84, 84, 4)
    layers = conv_layers_for(image, None)
    assert [image.after(layers[:count]) for count in range(4)] == [(4, 84, 84), (32, 20, 20), (64, 9, 9), (64, 7, 7)]
    network = build_q_network(SourceSpec(num_state_features=image.size, action_names=("a", "b"), image=image), SETTINGS)
    assert isinstance(network, ImageNetwork)
    sizes = [sum(p.numel() for p in part.parameters()) for part in network.encoder.layers]
    assert sizes == [32 * (4 * 64 + 1), 0, 64 * (32 * 16 + 1), 0, 64 * (64 * 9 + 1), 0]
    assert network.network.layers[0].weight.shape == (8, 3136)
    assert network(torch.zeros(3, image.size, dtype=torch.uint8), torch.ones(3, 2).bool()).shape == (3, 2, 1)


@pytest.mark.parametrize(("side", "count"), [(36, 3), (35, 1), (3, 1), (2, 0)])
def test_small_images_have_the_layer_of_minatar(side: int, count: int) -> None:
    assert len(conv_layers_for(image_of(side, side, 1), None)) == count


def test_layers_that_do_not_fit_leave_nothing() -> None:
    for side, kernel, stride in ((5, 3, 2), (6, 3, 2), (2, 3, 1), (7, 7, 3)):
        wanted = len(range(0, side - kernel + 1, stride))
        assert image_of(side, side).after(((4, kernel, stride),)) == (4, wanted, wanted)


@pytest.mark.parametrize("shape", [(9, 8, 2), (2, 9, 8), (9, 8), (2, 9, 8, 3)])
def test_every_format_has_the_values_of_a_numpy_convolution(tmp_path: Path, shape: tuple[int, ...]) -> None:
    image = image_of(*shape)
    spec = SourceSpec(num_state_features=image.size, action_names=("a", "b"), image=image)
    settings = NetworkSettings(hidden=(), activations=(), conv_layers=((3, 3, 2), (2, 2, 1)))
    network = build_q_network(spec, settings).eval()
    predictor = ImagePredictor(
        Scorer(network, ScalarHead()), image=image, action_names=("a", "b"), policy=EpsilonGreedy(0.1)
    ).eval()
    states = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (5, *shape), np.uint8))
    mask = torch.ones(5, 2).bool()
    arrays = [parameter.detach().numpy() for parameter in network.parameters()]
    expected = by_numpy(states.numpy(), image, arrays)
    for name, export_format in FORMATS.items():
        export_format.write(predictor, tmp_path / name)
        with torch.inference_mode():
            live, written = export_format.replay(predictor, tmp_path / name)((states, mask))
        np.testing.assert_allclose(live, expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(written, expected, rtol=1e-4, atol=1e-5)


def by_numpy(states: np.ndarray, image: Image, parameters: list[np.ndarray]) -> np.ndarray:
    """Values of convolutions of strides 2 and 1 and a linear layer, in float64."""
    x = states.transpose(image.axes).reshape(len(states), *image.pixels) / 255.0
    for (weight, bias), stride in zip(list(pairwise(parameters))[:4:2], (2, 1), strict=True):
        kernel = weight.shape[2]
        windows = np.lib.stride_tricks.sliding_window_view(x, (kernel, kernel), axis=(2, 3))[:, :, ::stride, ::stride]
        x = np.maximum(np.einsum("nchwij,fcij->nfhw", windows, weight) + bias[:, None, None], 0)
    return x.reshape(len(x), -1) @ parameters[-2].T + parameters[-1]
