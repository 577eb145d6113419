"""A trainer for photos that hold a patch of another: the margin on one label, the loss on both."""

from typing import Any

import keras

from arcface_keras.models import ArcFaceTrainer

__all__ = ["MixTrainer"]


@keras.saving.register_keras_serializable(package="arcface_keras")
class MixTrainer(ArcFaceTrainer):
    """An `ArcFaceTrainer` that also takes what `cut_mix` makes.

    The logits carry the margin on the label with the larger part. The loss is the sum of their losses for
    both labels, weighed by the parts; two label vectors say it, no matrix over the classes is made.

    Call arguments:
        images: pixels (B, S, S, 3), or a dictionary of "images", "other" (B,) and "share" (B,).
    """

    def call(self, images: Any, training: bool | None = None) -> Any:
        return super().call(images["images"] if isinstance(images, dict) else images, training=training)

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        if not isinstance(x, dict) or not isinstance(y_pred, dict):
            return super().compute_loss(x, y, y_pred, sample_weight, training)
        logits = self.head([y_pred["embedding"], y], training=True)
        share = x["share"]
        parts = [share, 1.0 - share]
        if sample_weight is not None:
            parts = [part * sample_weight for part in parts]
        larger = super().compute_loss(x, y, logits, parts[0], training)
        return larger + self.loss(x["other"], logits, sample_weight=parts[1])
