"""Listings and their photos: read, checked and streamed."""

from arcface_keras.data.catalogue import Catalogue, CatalogueError, encode_labels, read_catalogue
from arcface_keras.data.images import ImageError, image_dataset, load_image, scan_images
from arcface_keras.data.titles import decode_title

__all__ = [
    "Catalogue",
    "CatalogueError",
    "ImageError",
    "decode_title",
    "encode_labels",
    "image_dataset",
    "load_image",
    "read_catalogue",
    "scan_images",
]
