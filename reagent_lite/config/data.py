"""`data`: where the training copy lies and how rows are read."""

from typing import ClassVar, Literal

from reagent_lite.config.columns import Columns
from reagent_lite.config.items import ITEM_ID, ItemId, Items
from reagent_lite.config.section import Count, LocalPath, NoEffect, Section


class DataConfig(Section):
    """Training copy and read plan."""

    columns: Columns = {}
    """The log's own names for columns of the contract, {"mdp_id": "session", "reward": "clicked", ...}; of features
    also the columns of the single ones, {"state_features": ["age", "income"]}, which are named after them."""
    items: Items = None
    item_id: ItemId = ITEM_ID
    training_copy_dir: LocalPath | None = None
    """Folder on this machine's disk for the memory-mapped copy; absent: beside the data, or the user's cache where that
    is not writable."""
    global_minibatch_size: Count | None = None
    """Rows per minibatch over all processes, instead of training.minibatch_size per process."""
    layout: Literal["shards", "replicas"] = "shards"
    """Rows of each of several machines at training_data_path: its own part of them, or all of them."""
    shards_path: str | None = None
    """Folder that all machines see, or URL of a bucket: node 0 divides the rows at training_data_path there by layout,
    and each machine fetches its part to its own disk; absent: each machine has its part at training_data_path."""
    residency: Literal["auto", "device", "host"] = "auto"
    """device: all rows in device memory; host: gathered from the memory-mapped copy; auto: device if it fits."""

    no_effect: ClassVar[tuple[NoEffect, ...]] = (
        NoEffect(lambda data: data.items is None, ("item_id",), "absent without items"),
    )
