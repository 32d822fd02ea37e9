"""`image`: states that are images of bytes."""

from collections.abc import Iterator
from typing import Annotated, Final, Literal

from pydantic import Field

from reagent_lite.config.section import Count, Section
from reagent_lite.errors import Problem
from reagent_lite.types import ConvLayers, Image

_NATURE: Final[ConvLayers] = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
"""Layers of Mnih et al. (2015), "Human-level control through deep reinforcement learning", for 84 x 84 pixels."""
_MINATAR: Final[ConvLayers] = ((16, 3, 1),)
"""The layer of Young & Tian (2019), "MinAtar", for 10 x 10 pixels."""
_MOST_BYTES: Final = 1 << 20
_AXES: Final = range(2, 5)


class ImageConfig(Section):
    """States that are images: integers from 0 to 255, stored as bytes."""

    shape: Annotated[tuple[Count, ...], Field(min_length=1)]
    """Height and width in pixels, and channels if there are any, in the order of the log: [84, 84, 4], or [4, 84, 84].
    With stacked frames of several channels, their number comes first: [4, 84, 84, 3]."""
    channels: Literal["first", "last"] | None = None
    """Whether channels come before height and width, or after them. Absent: the shorter of both axes has the channels;
    last if they are equal."""

    def rules(self) -> Iterator[Problem]:
        """Yields Problems for a shape with too few or too many axes or pixels."""
        if len(self.shape) not in _AXES:
            expected = "2 to 4 sizes: height, width, channels, and frames before these"
            yield self.wrong("shape", expected, "States that are vectors are features, and need no data.image")
        elif self.image.size > _MOST_BYTES:
            todo = "Make images smaller, as gymnasium.wrappers.ResizeObservation does"
            yield self.wrong("shape", f"at most {_MOST_BYTES:,} bytes", todo, got=f"{self.image.size:,}")

    @property
    def image(self) -> Image:
        """The shape of a state."""
        is_shorter = self.shape[-3:][0] < self.shape[-1]
        channels_first = is_shorter if self.channels is None else self.channels == "first"
        return Image(shape=self.shape, channels_first=len(self.shape) > 2 and channels_first)

    @classmethod
    def of(cls, image: Image) -> "ImageConfig":
        """Returns the section of an image."""
        if len(image.shape) == 2:
            return cls(shape=image.shape)
        return cls(shape=image.shape, channels="first" if image.channels_first else "last")


def conv_layers_for(image: Image, layers: ConvLayers | None) -> ConvLayers:
    """Returns the given layers; without any those of Mnih et al., or the one of MinAtar for images too small for them.

    Images that are too small for either have no layers.
    """
    if layers is not None:
        return layers
    return next((fitting for fitting in (_NATURE, _MINATAR) if all(image.after(fitting))), ())
