"""`tracking`: MLflow and Weights & Biases."""

from collections.abc import Iterator
from typing import Literal
from urllib.parse import urlsplit

from reagent_lite.config.section import Section
from reagent_lite.errors import Problem


class MlflowConfig(Section):
    """A run of MLflow. Give user, password and token by its environment variables."""

    uri: str | None = None
    """Tracking server such as https://mlflow.example.org, or sqlite:///mlflow.db; absent: MLFLOW_TRACKING_URI."""
    experiment: str | None = None
    """Name of the experiment, which is created if it is new; absent: MLFLOW_EXPERIMENT_NAME, else Default."""

    def rules(self) -> Iterator[Problem]:
        """Yields a Problem for an address with a user or password, which every copy of the config would reveal."""
        if self.uri is not None and "@" in urlsplit(self.uri).netloc:
            yield self.wrong(
                "uri",
                "an address without user and password",
                "Give them by MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or by MLFLOW_TRACKING_URI",
                got="an address with them",
            )


class WandbConfig(Section):
    """A run of Weights & Biases. Give the API key by WANDB_API_KEY or `wandb login`."""

    project: str | None = None
    """Name of the project; absent: WANDB_PROJECT, else the default of W&B."""
    mode: Literal["online", "offline"] | None = None
    """offline: write to ./wandb or WANDB_DIR, for `wandb sync`; absent: WANDB_MODE, else online."""


class TrackingConfig(Section):
    """Trackers, which get the figures of metrics.jsonl, the config, the decision, the report and the model."""

    mlflow: MlflowConfig | None = None
    """A run of MLflow; {} uses its environment variables."""
    wandb: WandbConfig | None = None
    """A run of Weights & Biases; {} uses its environment variables."""
