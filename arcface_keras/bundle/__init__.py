"""Folders ready for upload to Kaggle."""

from arcface_keras.bundle.folders import Bundle, bundle
from arcface_keras.bundle.wheel import build_wheel

__all__ = ["Bundle", "build_wheel", "bundle"]
