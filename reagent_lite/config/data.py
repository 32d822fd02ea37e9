"""`data`: columns of the log, location of the training copy, and reading of rows."""

from typing import ClassVar, Literal

from reagent_lite.config.column_names import Columns
from reagent_lite.config.embedding_config import Embeddings
from reagent_lite.config.image_config import ImageConfig
from reagent_lite.config.items import ITEM_ID, WITHOUT_ITEMS, ItemId, Items, PossibleItems
from reagent_lite.config.paths import SameEpisodes
from reagent_lite.config.section import Count, LocalPath, NoEffect, Section


class DataConfig(Section):
    """Training copy and read plan."""

    columns: Columns = {}
    """The log's own names for standard columns, {"mdp_id": "session", "reward": "clicked", ...}. Features may
    have a column each, {"state_features": ["age", "income"]}, and are then named after their columns. An object in
    place of a name says how its values are written, such as dates; csv says how CSV files are, see docs/data.md."""
    same_episodes: SameEpisodes = None
    items: Items = None
    item_id: ItemId = ITEM_ID
    possible_items: PossibleItems = None
    embeddings: Embeddings = {}
    image: ImageConfig | None = None
    """Set if states are images. An environment whose observations are images needs no such key."""
    training_copy_dir: LocalPath | None = None
    """Folder on this machine's disk for the memory-mapped copy; absent: next to the data, or in the user's cache if
    that folder is not writable."""
    global_minibatch_size: Count | None = None
    """Rows per minibatch over all processes, instead of training.minibatch_size per process."""
    layout: Literal["shards", "replicas", "split"] = "shards"
    """Rows that each of several machines has at training_data_path. shards: its own part; replicas: all rows. split:
    all rows, as on a share or in a bucket, of which each machine keeps its own episodes while it reads them; its copy
    is in the user's cache if training_copy_dir is absent."""
    residency: Literal["auto", "device", "host"] = "auto"
    """device: all rows are in device memory; host: rows are gathered from the memory-mapped copy; auto: device if the
    rows fit."""

    no_effect: ClassVar[tuple[NoEffect, ...]] = (WITHOUT_ITEMS,)
