"""Models: the embedder, its halves, its trainer and its file."""

from arcface_keras.models.artefact import load_model, read_metadata, save_embedder
from arcface_keras.models.embedder import build_embedder, warn_if_unit_range
from arcface_keras.models.portable import load_portable, write_portable
from arcface_keras.models.recipe import rebuild_embedder
from arcface_keras.models.served import export_saved_model
from arcface_keras.models.split import block_names, split_backbone, split_embedder
from arcface_keras.models.title_embedder import build_title_embedder
from arcface_keras.models.trainer import ArcFaceTrainer, build_trainer

__all__ = [
    "ArcFaceTrainer",
    "block_names",
    "build_embedder",
    "build_title_embedder",
    "build_trainer",
    "export_saved_model",
    "load_model",
    "load_portable",
    "read_metadata",
    "rebuild_embedder",
    "save_embedder",
    "split_backbone",
    "split_embedder",
    "warn_if_unit_range",
    "write_portable",
]
