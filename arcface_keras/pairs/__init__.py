"""A second stage: a classifier of candidate pairs, whose probability takes the place of the similarity."""

from arcface_keras.pairs.classifier import PairClassifier, PairPart, TreeOptions, fit_pair_classifier
from arcface_keras.pairs.features import PairFeatures, pair_features
from arcface_keras.pairs.folds import out_of_fold

__all__ = [
    "PairClassifier",
    "PairFeatures",
    "PairPart",
    "TreeOptions",
    "fit_pair_classifier",
    "out_of_fold",
    "pair_features",
]
