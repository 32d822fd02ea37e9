"""`tracking`: other programs that follow a run."""

from collections.abc import Iterator
from typing import Literal
from urllib.parse import urlsplit

from reagent_lite.config.section import Section
from reagent_lite.errors import Problem


class MlflowConfig(Section):
    """A run of MLflow. User, password and token belong in its environment variables."""

    uri: str | None = None
    """Tracking server such as https://mlflow.example.org, or sqlite:///mlflow.db; absent: MLFLOW_TRACKING_URI."""
    experiment: str | None = None
    """Name of the experiment, which is created if it is new; absent: MLFLOW_EXPERIMENT_NAME, else Default."""

    def rules(self) -> Iterator[Problem]:
        """Yields an address with a user or password, which every copy of the config would show."""
        if self.uri is not None and "@" in urlsplit(self.uri).netloc:
            yield self.wrong(
                "uri",
                "an address without user and password",
                "Give them by MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or by MLFLOW_TRACKING_URI",
                got="one with them",
            )


class WandbConfig(Section):
    """A run of Weights & Biases. Its API key belongs in WANDB_API_KEY, or is that of `wandb login`."""

    project: str | None = None
    """Absent: WANDB_PROJECT, else what W&B chooses."""
    mode: Literal["online", "offline"] | None = None
    """offline: into ./wandb or WANDB_DIR, for `wandb sync`; absent: WANDB_MODE, else online."""


class TrackingConfig(Section):
    """Other programs that get the figures of metrics.jsonl, the config, the decision, the report and the model."""

    mlflow: MlflowConfig | None = None
    """A run of MLflow; {} for what its environment variables say."""
    wandb: WandbConfig | None = None
    """A run of Weights & Biases; {} for what its environment variables say."""
