"""Rows on disk in shards of a bounded size: what `embed` writes and machines exchange."""

from arcface_keras.shards.files import DTYPES, MANIFEST, SHARD_ROWS, write_shard
from arcface_keras.shards.parquet import is_own_parquet, parquet_to_shards, shards_to_parquet
from arcface_keras.shards.reader import Shards, open_shards
from arcface_keras.shards.writer import ShardWriter

__all__ = [
    "DTYPES",
    "MANIFEST",
    "SHARD_ROWS",
    "ShardWriter",
    "Shards",
    "is_own_parquet",
    "open_shards",
    "parquet_to_shards",
    "shards_to_parquet",
    "write_shard",
]
