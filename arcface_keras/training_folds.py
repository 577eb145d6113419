"""The folds of a training: labels, and which groups are held out together."""

import logging

import numpy as np

from arcface_keras.config import RunConfig
from arcface_keras.data.catalogue import Catalogue, encode_labels
from arcface_keras.data.folds import catalogue_links, linked_components
from arcface_keras.data.folds_file import shared_folds

__all__ = ["training_folds"]

logger = logging.getLogger(__name__)

_GROUPS_IN_A_FOLD = 3
_GROUPS = 4


def training_folds(
    config: RunConfig, catalogue: Catalogue, *, progress: bool = False
) -> tuple[np.ndarray, list[str], np.ndarray, np.ndarray]:
    """Number the groups of a catalogue and deal them to folds.

    Photos are compared only where the catalogue was read with its images; then a training of photos and one
    of titles get the same folds.

    Args:
        config: folds, folds_csv, seed, workers.
        catalogue: n labelled listings.
        progress: show a bar while files are compared.

    Returns:
        labels int64 (n,), the names of the classes, folds int64 (n,), and copies int64 (n,), equal for
        listings of one image file, equal bytes or one phash.

    Raises:
        ValueError: fewer than four groups that share nothing.
    """
    labels, classes = encode_labels(catalogue.label_groups)
    if all(path is not None for path in catalogue.paths):
        links = catalogue_links(catalogue, workers=config.workers, progress=progress)
    else:
        links = {"label_group": labels, "image": catalogue.images, "image_phash": catalogue.phashes}
    separate = int(linked_components(*links.values()).max()) + 1
    if separate < _GROUPS:
        raise ValueError(
            f"training needs at least {_GROUPS} groups that share no image and no image_phash, "
            "half of them at a time to choose the threshold on. "
            f"Received: {len(classes)} groups, {separate} of them separate, in {config.train}."
        )
    # Held-out groups are compared with each other: a fold of one has no false match to show.
    n_folds = max(2, min(config.folds, separate // _GROUPS_IN_A_FOLD))
    if n_folds < config.folds:
        logger.warning(
            "%d folds instead of %d: there are %d separate groups", n_folds, config.folds, separate
        )
    if separate < 10:
        logger.warning("the threshold will rest on %d groups only: check it, or give --threshold", separate)
    folds = shared_folds(
        catalogue.posting_ids, links, n_folds=n_folds, seed=config.seed, file=config.folds_csv
    )
    return labels, classes, folds, linked_components(*list(links.values())[1:])
