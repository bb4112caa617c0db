"""Images and texts by path, with networks of timm and transformers that are made here."""

import csv
import json

import numpy as np
import pytest
import torch

import bayesify as library
from bayesify.data import Records
from bayesify.files import load
from tests.files.makers import make_images, make_model, make_texts

TIMM = ("--model", "timm:test_resnet", "--model-arg", "pretrained=False", "--image-size", 32, "--quiet")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return make_images(tmp_path_factory.mktemp("images"), 40)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    return make_texts(folder / "reviews.jsonl", 60), make_model(folder / "model")


@pytest.mark.slow
def test_images_of_a_folder(bayesify, images, tmp_path):
    (images / "dark" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n and no more")
    out = tmp_path / "posterior"
    words = ("fit", "--data", images, *TIMM, "--train-epochs", 5, "--train-lr", 0.01, "--batch-size", 8)
    code, text, error = bayesify(*words, "--method", "mc-dropout", "--mc-dropout.p", 0.1, "--mc-dropout.insert-before",
                                 "linear", "--epochs", 0, "--out", out, "--json")  # fmt: skip
    assert code == 0, error
    assert "1 row(s) could not be used" in error
    assert "broken.png cannot be read as an image" in error
    code, text, error = bayesify(
        "evaluate", "--posterior", out, "--data", images, "--quiet", "--json", "--split", "all"
    )
    assert code == 0, error
    assert json.loads(text)["metrics"]["accuracy"] > 0.9
    # New images lie in one folder, without labels.
    code, text, error = bayesify("predict", "--posterior", out, "--data", images / "light", "--quiet", "--json")
    assert code == 0, error
    rows = json.loads(text)["predictions"]
    assert len(rows) == 20
    fitted = load(out, root=images / "light")
    assert fitted.encoding.size == (32, 32)
    first = sorted(path.name for path in (images / "light").iterdir())[0]
    found = library.predict(fitted.posterior, fitted.encoding.encode(Records.of([{"file": first}])).inputs)
    assert rows[0]["confidence"] == pytest.approx(found.confidence.item(), abs=1e-4)
    (images / "dark" / "broken.png").unlink()


def test_pixels_are_read_as_timm_wants_them(images):
    from PIL import Image

    from bayesify.data import ImageEncoding
    from bayesify.files.networks import image_settings, make_network

    network = make_network("timm:test_resnet", outputs=2, arguments={"pretrained": False})
    settings = image_settings(network)
    assert settings["size"] == tuple(network.pretrained_cfg["input_size"][1:])
    encoding = ImageEncoding("file", images, **{**settings, "size": (8, 8)})
    name = "dark/0.png"
    pixels = np.asarray(Image.open(images / name).convert("RGB").resize((8, 8), Image.Resampling.BILINEAR)) / 255
    expected = (torch.tensor(pixels).permute(2, 0, 1) - torch.tensor(settings["mean"])[:, None, None]).double()
    expected = expected / torch.tensor(settings["std"])[:, None, None]
    torch.testing.assert_close(
        encoding.encode(Records.of([{"file": name}])).inputs[0].double(), expected, atol=1e-6, rtol=0
    )


def test_pixels_beyond_the_room_for_them_are_read_again(images, monkeypatch):
    from bayesify.data import ImageEncoding, Labels, load_records, read_records

    labels = Labels("label", ("dark", "light"))
    encoding = ImageEncoding("file", images, (8, 8), labels=labels)
    whole = load_records(read_records(images), encoding)
    monkeypatch.setattr("bayesify.data.images.KEPT", 10 * 8 * 8 * 3)
    some = load_records(read_records(images, size=7), encoding)
    assert sum(picture.pixels is not None for picture in some.pictures) == 10
    assert all(torch.equal(whole[i][0], some[i][0]) for i in (0, 9, 10, 39))


def test_images_of_a_list(bayesify, images, tmp_path):
    path = images.parent / "list.csv"
    names = [f"{images.name}/{label}/{i}.png,{label}" for i in range(20) for label in ("dark", "light")]
    path.write_text("\n".join(["file,label", *names, f"{images.name}/none.png,dark"]))
    words = ("fit", "--data", path, *TIMM, "--method", "map", "--out", tmp_path / "p", "--strict", "--train-epochs", 1)
    code, _, error = bayesify(*words)
    assert code == 1
    assert "row 41:" in error
    code, text, error = bayesify("predict", "--posterior", tmp_path / "p", "--data", path, "--quiet", "--json")
    assert [row["row"] for row in json.loads(text)["predictions"] if row["error"]] == [41]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_texts(bayesify, texts, tmp_path):
    path, model = texts
    out = tmp_path / "posterior"
    words = ("fit", "--data", path, "--model", f"hf:{model}", "--train-epochs", 12, "--train-lr", 0.01, "--quiet")
    code, text, error = bayesify(*words, "--batch-size", 8, "--method", "laplace", "--out", out, "--json")
    assert code == 0, error
    assert "they are random, until they are trained" in error
    assert json.loads(text)["after"]["accuracy"] > 0.8
    new = tmp_path / "new.jsonl"
    new.write_text('{"text": "a good and fine day"}\n{"text": ""}\nno json\n{"text": "bad and ugly weather"}\n')
    code, text, error = bayesify("predict", "--posterior", out, "--data", new, "--out", tmp_path / "new.csv", "--quiet")
    assert code == 0, error
    rows = list(csv.DictReader((tmp_path / "new.csv").read_text().splitlines()))
    assert [row["label"] for row in rows] == ["positive", "", "", "negative"]
    assert "holds no text" in rows[1]["error"]
    assert "no JSON" in rows[2]["error"]


def test_tokens_are_padded_and_cut(texts):
    from transformers import AutoTokenizer

    from bayesify.data import TextEncoding

    tokenizer = AutoTokenizer.from_pretrained(texts[1])
    encoding = TextEncoding("text", tokenizer, 4)
    batch = encoding.encode(Records.of([{"text": "good"}, {"text": "good and fine and bad and ugly"}, {"text": 3}]))
    expected = tokenizer(["good", "good and fine and bad and ugly"], padding=True, truncation=True, max_length=4,
                         return_tensors="pt")  # fmt: skip
    assert torch.equal(batch.inputs["input_ids"], expected["input_ids"])
    assert torch.equal(batch.inputs["attention_mask"], expected["attention_mask"])
    assert [(error.row, error.text) for error in batch.errors] == [(3, "the column 'text' holds no text but '3'")]


def test_classes_follow_the_outputs_of_a_trained_model(bayesify, texts, tmp_path):
    path, _ = texts
    model = make_model(tmp_path / "trained", names=("positive", "neutral", "negative"))
    words = ("fit", "--data", path, "--model", f"hf:{model}", "--method", "map", "--quiet", "--out", tmp_path / "p")
    code, _, error = bayesify(*words)
    assert code == 0, error
    assert "random" not in error
    assert load(tmp_path / "p").encoding.labels.classes == ("positive", "neutral", "negative")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--model", "timm:resnet_nobody"), "timm has no model 'resnet_nobody'"),
        (("--model", "timm:test_resnet"), "published weights cannot be fetched"),
        (("--model", "tests.cli.nets:dense"), "Say --image-size 224"),
        ((), "holds images: name a network, --model timm:resnet18"),
    ],
)
def test_networks_that_cannot_be_had(bayesify, images, tmp_path, words, said):
    code, out, error = bayesify("fit", "--data", images, *words, "--method", "map", "--out", tmp_path / "p", "--quiet")
    assert (code in (1, 2), out) == (True, "")
    assert said in error


def test_code_of_a_models_folder_is_never_run(bayesify, texts, tmp_path):
    model = make_model(tmp_path / "evil", names=("positive", "negative"))
    config = json.loads((model / "config.json").read_text())
    names = dict.fromkeys(("AutoConfig", "AutoModelForSequenceClassification"), "evil.Evil")
    (model / "config.json").write_text(json.dumps({**config, "model_type": "evil", "auto_map": names}))
    (model / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    words = ("fit", "--data", texts[0], "--model", f"hf:{model}", "--method", "map", "--quiet", "--out", tmp_path / "p")
    code, _, error = bayesify(*words)
    assert code == 1
    assert "cannot be read" in error
    assert not (tmp_path / "ran").exists()


def test_a_model_that_is_not_there(bayesify, texts, tmp_path):
    words = (
        "fit",
        "--data",
        texts[0],
        "--model",
        f"hf:{tmp_path}",
        "--method",
        "map",
        "--quiet",
        "--out",
        tmp_path / "p",
    )
    code, _, error = bayesify(*words)
    assert code == 1
    assert f"hf:{tmp_path}" in error
    assert "Traceback" not in error
