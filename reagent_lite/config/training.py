"""`training`: network, optimizer and batches."""

import re
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from reagent_lite.config.section import Count, NotNegative, Positive, PositiveShare, Section
from reagent_lite.errors import Problem

Activation = Literal["linear", "relu", "leaky_relu", "tanh", "sigmoid", "elu", "gelu", "selu", "silu"]

# torch.optim's classes that take (params, lr, weight_decay) and need no closure, by their names in lower case
OPTIMIZERS = {name.lower(): name for name in (
    "Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "SGD"
)}  # fmt: skip


class TrainingConfig(Section):
    """Architecture and optimization of the Q-network."""

    minibatch_size: Count | None = None
    """Rows per process and minibatch. Absent: with logged rows the power of two that gives about 64 optimizer steps per
    epoch, at least 64 and at most 4096; without logged rows 4096. Algorithm boosting takes no
    steps: it warns if a number is given."""
    minibatches_per_step: Count = 1
    """Gradient accumulation: minibatches per optimizer step."""
    learning_rate: Positive = 0.001
    """Learning rate; it is not scaled by the number of processes."""
    optimizer: str = "ADAM"
    """A class of torch.optim, in upper or lower case: ADAM, SGD, AdamW, RMSprop, ..."""
    layers: tuple[int, ...] = (-1, 256, 128, 1)
    """Widths of the layers; the first and the last are placeholders for input and output."""
    activations: tuple[Activation, ...] = ("relu", "relu", "linear")
    """Activations, one fewer than layers. The last is linear; with rainbow.dueling_architecture it may be any and is
    not used, as the network ends with the two streams."""
    conv_layers: tuple[tuple[Count, Count, Count], ...] | None = None
    """If states are images, convolutional layers before the others: [channels, kernel size, stride] of each, such as
    [[32, 8, 4], [64, 4, 2], [64, 3, 1]]. Absent: these, of Mnih et al. (2015); for images too small for them
    [[16, 3, 1]]. []: none. See docs/images.md."""
    network: str | None = None
    """A Q-network of your own, "package.module:Class"; the class is called with (SourceSpec, NetworkSettings).

    forward(state [B, S], mask [B, K], features [B, K, F] or None) returns [B, K, outputs of the settings].
    """
    lr_policy: Literal["fixed", "exponential"] = "fixed"
    """exponential: the learning rate is multiplied by lr_decay after each epoch.

    Without data it is multiplied after each of simulation.num_evaluations.
    """
    lr_decay: PositiveShare | None = 0.999
    """Used by lr_policy exponential. null, which is the default of 2026 on a log: the learning rate ends at a twentieth
    of its first value."""
    dropout_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout after each hidden layer."""
    use_batch_norm: bool = False
    """Batch normalization before each linear layer."""
    weight_init_min_std: NotNegative = 0.0
    """Smallest standard deviation of initial weights, which is otherwise gain / sqrt(fan_in)."""
    l2_decay: NotNegative = 0.01
    """weight_decay of the Q-network's optimizer."""
    clip_grad_norm: Positive | None = None
    """Largest norm of the whole gradient."""
    cuda_graph: bool = True
    """Replay updates, and rollouts of environments that run on the GPU, as CUDA graphs.

    Updates are replayed in one process on one GPU with an optimizer that has `capturable`, if all rows are logged or
    all are simulated: on logged rows for named actions without batch normalization and with one minibatch per step; on
    simulated rows except for candidates with batch normalization. Code that waits for the GPU is not replayed; a
    warning names the call. Runs of at least 50,000 optimizer steps fuse the kernels of replayed updates by
    torch.compile, except for a user's network.
    """
    warm_start_model_path: str | None = None
    """Output folder, checkpoint or exported model of an earlier run with the same network and order of actions. Inputs
    count by their column: give the earlier run's normalization files too, as other levels or types of features shift
    columns. An exported model with other columns is refused; a checkpoint does not know its columns."""
    do_not_warm_start_optimizer: bool = False
    """Start with a new optimizer even if the warm start has its state."""
    cnn_parameters: dict[str, object] | None = None
    """Not supported; null only."""
    factorization_parameters: dict[str, object] | None = None
    """Not supported; null only."""

    unsupported: ClassVar = {
        "cnn_parameters": "These layers are not supported: images are data.image, their layers training.conv_layers",
        "factorization_parameters": "Factorized parametric networks are not supported; use dueling_architecture for a "
        "state stream",
    }

    def rules(self) -> Iterator[Problem]:
        """Yields Problems for layers that do not fit, and for an unknown optimizer."""
        if len(self.layers) < 2:
            yield self.wrong("layers", "at least two widths (input and output placeholders)")
        for i, width in enumerate(self.layers[1:-1], start=1):
            if width < 1:
                yield Problem(f"layers.{i}", "a width of at least 1", str(width), "Only the ends are placeholders")
        if len(self.activations) != len(self.layers) - 1:
            expected = f"{len(self.layers) - 1} names, one fewer than layers"
            yield self.wrong("activations", expected, got=str(len(self.activations)))
        if self.network is not None and not re.fullmatch(r"[\w.]+:\w+", self.network):
            yield self.wrong("network", "package.module:Class")
        if self.optimizer.lower() not in OPTIMIZERS:
            yield self.wrong("optimizer", f"one of {', '.join(OPTIMIZERS.values())}")

    @property
    def optimizer_class(self) -> str:
        """Name of the class in torch.optim."""
        return OPTIMIZERS[self.optimizer.lower()]
