"""What runs inside a kernel: find the inputs, lay out the model, predict."""

from arcface_keras.kernel.inputs import find_file, find_file_if_any, find_gallery, find_images, find_model
from arcface_keras.kernel.layout import flat_files, lay_out, public_facts
from arcface_keras.kernel.predict import predict, train_here

__all__ = [
    "find_file",
    "find_file_if_any",
    "find_gallery",
    "find_images",
    "find_model",
    "flat_files",
    "lay_out",
    "predict",
    "public_facts",
    "train_here",
]
