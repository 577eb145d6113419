"""ElasticFace: margins drawn anew for every row of every training step."""

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from arcface_keras._checks import check_choice, check_number
from arcface_keras.heads._numerics import Tensor
from arcface_keras.heads._rows import Rows
from arcface_keras.heads.arc_margin import BEYOND_PI
from arcface_keras.heads.base import MarginHead
from arcface_keras.heads.rules import additive_angular, additive_cosine


class ElasticHead(MarginHead):
    """What both ElasticFace heads share: the drawing of the margins."""

    has_state = True

    def __init__(
        self, n_classes: int, s: float, m: Any, std: float, plus: bool, seed: int | None, **kwargs: Any
    ) -> None:
        super().__init__(n_classes, s, m, **kwargs)
        self.std = check_number("std", std, low=0.0)
        self.plus = bool(plus)
        self.seed = seed
        self.seed_generator = keras.random.SeedGenerator(seed)

    def draw(self, cosine: Tensor, rows: Rows) -> Any:
        """Return the margins of a step: (B, 1) draws from N(m, std) in training, else m itself."""
        if not rows.training or self.std == 0.0:
            return rows.margin
        noise = keras.random.normal(
            ops.shape(cosine), stddev=self.std, dtype=cosine.dtype, seed=self.seed_generator
        )
        if self.plus:
            noise = ops.take(ops.sort(noise, axis=0)[:, 0], descending_ranks(cosine[:, 0]), axis=0)[:, None]
        noise = noise if self.margin_schedule is None else ops.convert_to_tensor(self.margin_factor) * noise
        return rows.margin + noise

    def save_own_variables(self, store: Any) -> None:
        super().save_own_variables(store)
        # Keras leaves the state of seed generators out of its files.
        store["seed_state"] = ops.convert_to_numpy(self.seed_generator.state)

    def load_own_variables(self, store: Any) -> None:
        keys = list(store.keys())
        if "seed_state" in keys:
            self.seed_generator.state.assign(store["seed_state"])
        super().load_own_variables({key: store[key] for key in keys if key != "seed_state"})

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"std": self.std, "plus": self.plus, "seed": self.seed}


def descending_ranks(values: Tensor) -> Tensor:
    """Return how many values are larger than each one (ties by position), as int32 (B,).

    The published ElasticFace+ uses the sorting order where this, its inverse, is needed.
    """
    order = ops.argsort(-ops.stop_gradient(values))
    return ops.cast(ops.argsort(order), "int32")


@keras.saving.register_keras_serializable(package="arcface_keras")
class ElasticArcFace(ElasticHead):
    """ElasticFace-Arc: T = cos(theta + E), with E drawn from N(m, std) for every row and step.

    The state of the generator is saved, so that resumed training draws what uninterrupted training would.
    Outside a training step (`training` not True) the margin is m.

    Args:
        n_classes: Number of classes.
        s: Scale of the logits.
        m: Mean margin in radians, or one per class.
        std: Standard deviation of the margin.
        plus: ElasticFace+: within the batch the row with the largest target cosine gets the smallest draw.
        beyond_pi: As in `ArcMarginProduct`.
        seed: Seed of the draws; None takes a random one.
        **kwargs: `sub_centers`, `ignore_label`, `kernel_initializer`, ... as in `MarginHead`.

    Call arguments, input shape, output shape and errors: see `MarginHead`.

    Example:

    >>> head = ElasticArcFace(n_classes=3)
    >>> tuple(head([np.eye(3, 4, dtype="float32"), np.array([0, 1, 2])]).shape)
    (3, 3)

    Reference:
        Boutros et al., "ElasticFace: Elastic Margin Loss for Deep Face Recognition", 2021,
        https://arxiv.org/abs/2109.09416, equations 6 and 8.
    """

    def __init__(
        self,
        n_classes: int,
        s: float = 64.0,
        m: float | Sequence[float] = 0.5,
        std: float = 0.05,
        plus: bool = False,
        beyond_pi: str = "arcface",
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(n_classes, s, m, std, plus, seed, **kwargs)
        self.beyond_pi = check_choice("beyond_pi", beyond_pi, BEYOND_PI)

    def modify_target(self, cosine: Tensor, rows: Rows) -> Tensor:
        return additive_angular(cosine, self.draw(cosine, rows), self.beyond_pi)

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"beyond_pi": self.beyond_pi}


@keras.saving.register_keras_serializable(package="arcface_keras")
class ElasticCosFace(ElasticHead):
    """ElasticFace-Cos: T = cos(theta) - E, with E drawn from N(m, std) for every row and step.

    The state of the generator is saved, so that resumed training draws what uninterrupted training would.
    Outside a training step (`training` not True) the margin is m.

    Args:
        n_classes: Number of classes.
        s: Scale of the logits.
        m: Mean margin in units of cosine, 0 <= m <= 1; or one per class.
        std: Standard deviation of the margin.
        plus: ElasticFace+: within the batch the row with the largest target cosine gets the smallest draw.
        seed: Seed of the draws; None takes a random one.
        **kwargs: `sub_centers`, `ignore_label`, `kernel_initializer`, ... as in `MarginHead`.

    Call arguments, input shape, output shape and errors: see `MarginHead`.

    Example:

    >>> head = ElasticCosFace(n_classes=3)
    >>> tuple(head([np.eye(3, 4, dtype="float32"), np.array([0, 1, 2])]).shape)
    (3, 3)

    Reference:
        Boutros et al., "ElasticFace: Elastic Margin Loss for Deep Face Recognition", 2021,
        https://arxiv.org/abs/2109.09416, equations 7 and 8.
    """

    margin_limit = 1.0

    def __init__(
        self,
        n_classes: int,
        s: float = 64.0,
        m: float | Sequence[float] = 0.35,
        std: float = 0.05,
        plus: bool = False,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(n_classes, s, m, std, plus, seed, **kwargs)

    def modify_target(self, cosine: Tensor, rows: Rows) -> Tensor:
        return additive_cosine(cosine, self.draw(cosine, rows))
