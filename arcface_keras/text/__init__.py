"""Titles as a signal: TF-IDF rows and their neighbours, found sparsely; a sentence encoder."""

from arcface_keras.text.encoder import encode_titles
from arcface_keras.text.expansion import expand_titles
from arcface_keras.text.search import TEXT_ENGINES, find_text_neighbors
from arcface_keras.text.vectorizer import PRESETS, TermOptions, TitleVectorizer, normalize_title

__all__ = [
    "PRESETS",
    "TEXT_ENGINES",
    "TermOptions",
    "TitleVectorizer",
    "encode_titles",
    "expand_titles",
    "find_text_neighbors",
    "normalize_title",
]
