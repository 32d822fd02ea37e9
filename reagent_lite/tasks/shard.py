"""Make a shard of the rows for each machine, and fetch one."""

from typing import TYPE_CHECKING

from reagent_lite.config.shard_config import ShardConfig
from reagent_lite.errors import needing

if TYPE_CHECKING:
    from reagent_lite.data.shards.sharing import Sharded


def shard(config: ShardConfig) -> "Sharded":
    """Makes the shards or waits for them, and fetches one; see data.shards.sharing.share_shards."""
    with needing("data", "shards_path"):
        from reagent_lite.data.shards import sharing
    return sharing.share_shards(config)
