"""The embeddings as points of a plane."""

import numpy as np

__all__ = ["plane", "sample_rows"]

_FEWEST_FOR_TSNE = 12


def sample_rows(rows: np.ndarray, labels: np.ndarray | None, most: int, seed: int = 0) -> np.ndarray:
    """Positions of at most `most` rows that are not zero: of groups in random order, or any without labels.

    Args:
        rows: (n, d).
        labels: (n,) groups or None.
        most: bound of the rows; the group that crosses it is cut.
        seed: of the order.
    """
    known = np.flatnonzero(rows.any(axis=1))
    if len(known) <= most:
        return known
    rng = np.random.default_rng(seed)
    if labels is None:
        return np.sort(rng.choice(known, most, replace=False))
    rank = rng.permutation(int(labels.max()) + 1)
    order = known[np.argsort(rank[labels[known]], kind="stable")]
    return np.sort(order[:most])


def plane(rows: np.ndarray, seed: int = 0) -> tuple[np.ndarray, str]:
    """Points (n, 2) of rows (n, d), and how they were found: t-SNE, or principal components of a few rows.

    t-SNE (van der Maaten and Hinton, 2008) of cosine distances, begun from the principal components, keeps
    neighbours together; distances between far clusters mean nothing.
    """
    flat = _principal(rows)
    spread = float(flat[:, 0].std()) if len(rows) else 0.0
    if len(rows) < _FEWEST_FOR_TSNE or spread < 1e-6:
        return flat, "principal components"
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    tsne = TSNE(
        metric="cosine",
        perplexity=min(30.0, (len(rows) - 1) / 3),
        init=(flat * (1e-4 / spread)).astype(np.float32),
        learning_rate="auto",
        random_state=seed,
    )
    # On a busy machine threads that wait for each other make so few points ten times slower.
    with threadpool_limits(1):
        return np.asarray(tsne.fit_transform(rows), dtype=np.float64), "t-SNE"


def _principal(rows: np.ndarray) -> np.ndarray:
    """(n, 2) coordinates along the two directions of largest variance; missing ones are 0."""
    points = np.zeros((len(rows), 2))
    if len(rows) > 1:
        centred = rows.astype(np.float64) - rows.mean(axis=0, dtype=np.float64)
        u, scale, _ = np.linalg.svd(centred, full_matrices=False)
        found = (u * scale)[:, :2]
        points[:, : found.shape[1]] = found
    return points
