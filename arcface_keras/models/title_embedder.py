"""The embedder of titles: token ids in, unit vectors out."""

from typing import Any

import keras
from keras import layers, ops

from arcface_keras.models.embedder import embedding_layers


def build_title_embedder(
    encoder: keras.Model,
    pad: int = 0,
    *,
    embedding_size: int | None = None,
    batch_norm: bool = True,
    dropout: float = 0.0,
    name: str = "title_embedder",
) -> keras.Model:
    """Builds the model that turns the tokens of a title into its embedding.

    The mean of the last hidden states of the tokens that are no padding, then what an embedder of photos has
    after its pooling. The named layers are those of `build_embedder`, with an input `token_ids`: the
    `backbone` is the encoder and the mean, so `split_embedder`, `build_trainer` and `save_embedder` take both
    kinds. An encoder of keras_hub keeps its layers, so the saved file needs that package.

    Args:
        encoder: BERT-type model of keras_hub: a dictionary of `token_ids` (B, L), `padding_mask` and, where
            it has them, `segment_ids`, to the hidden states (B, L, C), alone or as `sequence_output`.
        pad: token id that fills up shorter titles.
        embedding_size: length of the embedding; None keeps the width C of the encoder.
        batch_norm: normalise the raw vector over the batch.
        dropout: share of the mean that is dropped in training, 0 to below 1.
        name: name of the model.

    Returns:
        A `keras.Model` from whole numbers (B, L), any B and L, to unit rows (B, D).

    Raises:
        ValueError: the model is no such encoder.
    """
    backbone = _mean_pooled(_sequence_model(encoder), pad)
    tokens = keras.Input((None,), name="token_ids", dtype="int32")
    x = layers.Identity(name="feature_map", dtype="float32")(backbone(tokens))
    x = layers.Identity(name="pooling", dtype="float32")(x)
    x = embedding_layers(x, embedding_size=embedding_size, batch_norm=batch_norm, dropout=dropout)
    return keras.Model(tokens, x, name=name)


def _sequence_model(encoder: keras.Model) -> keras.Model:
    """The encoder up to its hidden states: what it computes beside them would have no gradient."""
    inputs, output = encoder.input, encoder.output
    if isinstance(output, dict):
        output = output.get("sequence_output")
    names = set(inputs) if isinstance(inputs, dict) else set()
    odd = names - {"token_ids", "padding_mask", "segment_ids"}
    if odd or not {"token_ids", "padding_mask"} <= names or len(getattr(output, "shape", ())) != 3:
        raise ValueError(
            "an encoder of titles must take token_ids and padding_mask and give hidden states (B, L, C). "
            f"Received: {type(encoder).__name__} from {sorted(names) or 'one tensor'}."
        )
    return keras.Model(inputs, output, name="encoder")


def _mean_pooled(encoder: keras.Model, pad: int) -> keras.Model:
    tokens = keras.Input((None,), name="tokens", dtype="int32")
    present = ops.not_equal(tokens, pad)
    given: dict[str, Any] = {"token_ids": tokens, "padding_mask": ops.cast(present, "int32")}
    if "segment_ids" in encoder.input:
        given["segment_ids"] = ops.zeros_like(tokens)
    hidden = ops.cast(encoder(given), "float32")
    weights = ops.expand_dims(ops.cast(present, "float32"), -1)
    mean = ops.sum(hidden * weights, axis=1) / ops.maximum(ops.sum(weights, axis=1), 1.0)
    return keras.Model(tokens, mean, name="backbone")
