"""Folders of posteriors of files: whole or refused, and nothing in them runs."""

import contextlib
import json
import shutil

import pytest
import torch

import bayesify
from bayesify._core.files import FileError, digest
from bayesify.data import Labels, Records, TableEncoding, TextEncoding
from bayesify.files import MLP, RowWriter, Settings, is_named, load, make_network, read_settings, save, source_digest
from tests.files.makers import make_model

TABLE = [Records.of([{"n": i, "c": "ab"[i % 2], "label": "xy"[i % 2]} for i in range(20)])]


@pytest.fixture
def folder(tmp_path):
    encoding = TableEncoding.fit(TABLE, "label")
    network = MLP(encoding.width, 2, hidden=4)
    posterior = bayesify.convert(network, bayesify.MCDropout())
    save(tmp_path / "p", posterior, network, encoding, Settings("mlp", {}, {"hidden": 4}))
    return tmp_path / "p"


def test_a_posterior_comes_back_with_its_network_and_its_encoding(folder):
    fitted = load(folder)
    assert fitted.encoding == TableEncoding.fit(TABLE, "label")
    ((batch, prediction),) = fitted.predict(iter(TABLE), num_draws=3, seed=1)
    expected = bayesify.predict(fitted.posterior, fitted.encoding.encode(TABLE[0]).inputs, num_draws=3, seed=1)
    assert batch.rows == list(range(1, 21))
    assert torch.equal(prediction.probs, expected.probs)
    assert torch.equal(load(folder).network[0].weight, fitted.network[0].weight)


def changed(folder, change, *, signed=True):
    path = folder / "files.json"
    values = json.loads(path.read_text())
    mark = values.pop("digest")
    change(values)
    path.write_text(json.dumps({**values, "digest": digest(values) if signed else mark}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda v: v.update(model="os:system"), "network of your own: give it again, --model os:system"),
        (lambda v: v.update(model="timm:test_resnet"), "do not fit the network|cannot be made"),
        (lambda v: v["arguments"].update(checkpoint_path="evil.pth"), "could name files or code"),
        (lambda v: v["arguments"].update(hidden=8), "do not fit the network"),
        (lambda v: v["encoding"].update(kind="magic"), "no encoding 'magic'"),
        (lambda v: v["encoding"].pop("labels"), "is damaged"),
        (lambda v: v.pop("parts"), "is damaged"),
        (lambda v: v.update(format=2), "of format 2, and this version reads 1"),
    ],
)
def test_what_a_folder_says_is_checked(folder, change, said):
    changed(folder, change)
    with pytest.raises(ValueError, match=said):
        load(folder)


def test_a_changed_value_is_noticed(folder):
    changed(folder, lambda v: v["encoding"]["columns"][0].update(mean=1.0), signed=False)
    with pytest.raises(FileError, match="its values were changed"):
        load(folder)
    (folder / "files.json").write_text("{")
    with pytest.raises(FileError, match="not valid JSON"):
        load(folder)


def test_an_interrupted_save_leaves_no_settings(folder, monkeypatch):
    fitted = load(folder)

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("bayesify.storage.save", fail)
    with pytest.raises(KeyboardInterrupt):
        save(folder, fitted.posterior, fitted.network, fitted.encoding, fitted.settings)
    with pytest.raises(FileError, match="its fit was interrupted"):
        read_settings(folder)


def test_weights_of_another_network_are_refused(folder):
    from safetensors.torch import save_file

    save_file(MLP(3, 2, hidden=4).state_dict(), folder / "network.safetensors")
    with pytest.raises(ValueError, match="network"):
        load(folder)


def test_networks_by_name():
    network = make_network("mlp", inputs=3, outputs=2, arguments={"layers": 1, "hidden": 5})
    assert network(torch.zeros(4, 3)).shape == (4, 2)
    assert [is_named(name) for name in ("mlp", "timm:a", "hf:a", "a.b:c", "timm")] == [True, True, True, False, False]
    with pytest.raises(ValueError, match="mlp cannot be made: TypeError"):
        make_network("mlp", inputs=3, outputs=2, arguments={"depth": 1})
    with pytest.raises(ValueError, match="it is for tables"):
        make_network("mlp", outputs=2)


def test_a_digest_knows_files_and_folders(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.png").write_bytes(b"x")
    first = source_digest(tmp_path / "a"), source_digest(tmp_path / "a" / "1.png")
    assert first == (source_digest(tmp_path / "a"), source_digest(tmp_path / "a" / "1.png"))
    (tmp_path / "a" / "1.png").write_bytes(b"yy")
    assert not set(first) & {source_digest(tmp_path / "a"), source_digest(tmp_path / "a" / "1.png")}


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.parquet"])
def test_a_file_appears_when_it_is_whole(tmp_path, name):
    path = tmp_path / "new" / name
    with RowWriter(path, ("mean",)) as writer:
        writer.write([{"row": 1, "mean": 0.5, "error": None}])
        assert not path.exists()
    before = path.read_bytes()
    with contextlib.suppress(RuntimeError), RowWriter(path, ("mean",)) as writer:
        writer.write([{"row": 1, "mean": 1.5, "error": None}])
        raise RuntimeError
    assert path.read_bytes() == before
    assert [one.name for one in path.parent.iterdir()] == [name]
    with pytest.raises(ValueError, match=r"must end in \.csv, \.jsonl or \.parquet"):
        RowWriter(tmp_path / "a.txt", ())


@pytest.mark.slow
def test_texts_for_a_network_of_ones_own_keep_their_tokeniser(tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(make_model(tmp_path / "model"))
    encoding = TextEncoding("text", tokenizer, 8, Labels("label", ("a", "b")))
    network = torch.nn.Linear(2, 2)
    save(tmp_path / "p", bayesify.convert(network, "map"), network, encoding, Settings("my.nets:make", {}))
    rows = Records.of([{"text": "the weather was good"}, {"text": "bad"}])
    found = load(tmp_path / "p", network=network).encoding.encode(rows).inputs
    assert torch.equal(found["input_ids"], encoding.encode(rows).inputs["input_ids"])
    shutil.rmtree(tmp_path / "p" / "tokenizer")
    with pytest.raises(FileError, match="has no tokeniser of its texts"):
        load(tmp_path / "p", network=network)
