"""Posteriors in transformers' trainer, and loaders of texts and data sets."""

import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

import bayesify
from bayesify import IBNN, IVON, MAP, SGLD, SWAG, BayesAdapter, Gaussian, Laplace, MCDropout, convert
from tests.conformance.cases import CASES
from tests.fitting.test_learner import train
from tests.marks import slow_but

transformers = pytest.importorskip("transformers")
from bayesify.integrations.transformers import Trainer, loader  # noqa: E402
from tests.integrations.transformers_cases import arguments, bert, gpt2, rows, tokenizer  # noqa: E402

ROWS = rows(label=lambda ids: sum(ids) % 3)
CLASSES = {"num_labels": 3}


def accuracy(found):
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}


def trained(method, folder, *, network=None, resume=None, options=None, **settings):
    posterior = convert(bert(**CLASSES) if network is None else network, method)
    trainer = Trainer(
        posterior, arguments(folder, **settings), train_dataset=ROWS, eval_dataset=ROWS, **(options or {})
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def assert_same(one, other):
    assert one.state_dict().keys() == other.state_dict().keys()
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


TASKS = {
    "classes": (lambda: bert(**CLASSES), {"labels": lambda ids: sum(ids) % 3}, "classification"),
    "yes or no": (
        lambda: bert(problem_type="multi_label_classification", **CLASSES),
        {"labels": lambda ids: [float(ids[0] > 4), float(ids[1] > 4), 1.0]},
        "binary",
    ),
    "number": (lambda: bert(num_labels=1), {"labels": lambda ids: float(ids[0])}, Gaussian(0.5**0.5)),
    "tags": (
        lambda: bert("ForTokenClassification", **CLASSES),
        {"labels": lambda ids: [-100 if word > 8 else word % 3 for word in ids]},
        "classification",
    ),
    "span": (
        lambda: bert("ForQuestionAnswering"),
        {"start_positions": lambda ids: ids[0] % 3, "end_positions": lambda ids: 3 + ids[0] % 2},
        "classification",
    ),
    "masked": (
        lambda: bert("ForMaskedLM"),
        {"labels": lambda ids: [word if word > 5 else -100 for word in ids]},
        "classification",
    ),
    "causal": (gpt2, {"labels": lambda ids: [-100, *ids[1:]]}, "classification"),
}


@pytest.mark.parametrize("task", TASKS)
def test_the_evaluation_is_the_networks_own_where_nothing_is_random(task, tmp_path):
    make, columns, likelihood = TASKS[task]
    network, data = make().eval(), rows(**columns)
    seen = []

    def metrics(found):
        seen.append(found)
        return {"rows": float(len(data))}

    plain = transformers.Trainer(network, arguments(tmp_path), eval_dataset=data, compute_metrics=metrics)
    posterior = convert(network, MAP(), likelihood=likelihood)
    ours = Trainer(posterior, arguments(tmp_path), eval_dataset=data, compute_metrics=metrics)
    expected, found = plain.evaluate(), ours.evaluate()
    # A Gaussian with the variance 1/2 has the squared error plus a constant.
    constant = 0.5 * math.log(math.pi) if isinstance(likelihood, Gaussian) else 0.0
    assert found["eval_loss"] - constant == pytest.approx(expected["eval_loss"], rel=1e-6)
    assert found["eval_rows"] == expected["eval_rows"] == 12
    theirs, own = seen
    np.testing.assert_equal(own.label_ids, theirs.label_ids)
    pairs = (own.predictions, theirs.predictions) if task == "span" else ([own.predictions], [theirs.predictions])
    for one, other in zip(*pairs, strict=True):
        logits, given = torch.as_tensor(one), torch.as_tensor(other)
        if task not in ("yes or no", "number"):
            given = given.log_softmax(-1)
        torch.testing.assert_close(logits.squeeze(-1), given.squeeze(-1), rtol=0, atol=2e-6)
    if likelihood == "classification":
        nll = bayesify.evaluate(posterior, loader(posterior, data)).metrics["nll"]
        assert nll == pytest.approx(expected["eval_loss"], abs=1e-6)


@pytest.mark.slow
def test_encoder_decoders_take_the_inputs_that_their_collator_makes(tmp_path):
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    torch.manual_seed(0)
    network = transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=12, **sizes)).eval()
    collator = transformers.DataCollatorForSeq2Seq(tokenizer(), model=network)
    data = rows(labels=lambda ids: [*ids[:2], -100])
    posterior = convert(network, MAP(lr=0.01))
    settings = arguments(tmp_path, num_train_epochs=1)
    plain = transformers.Trainer(network, settings, eval_dataset=data, data_collator=collator)
    ours = Trainer(posterior, settings, train_dataset=data, eval_dataset=data, data_collator=collator)
    before = ours.evaluate()["eval_loss"]
    assert before == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-6)
    ours.train()
    assert ours.evaluate()["eval_loss"] < before


@pytest.mark.slow
@pytest.mark.parametrize("method", [SWAG(rank=2, lr=0.1), SGLD(samples_per_chain=3, lr=0.05, burn_in=0.3)], ids=str)
def test_the_best_checkpoint_is_loaded_and_finished(method, tmp_path):
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": False}
    trainer = trained(method, tmp_path, eval_strategy="epoch", save_strategy="epoch", **best)
    losses = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
    assert trainer.state.best_model_checkpoint.endswith(f"checkpoint-{min(losses, key=losses.get)}")
    assert trainer.posterior.learned is True
    assert math.isfinite(trainer.evaluate()["eval_loss"])


def test_a_trainer_ends_where_a_loop_of_ones_own_does(tmp_path):
    method = SWAG(rank=2, lr=0.1, snapshots_per_epoch=2, schedule="cosine")
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, **CLASSES}
    own = convert(bert(**still), method)
    train(own, loader(own, ROWS, batch_size=4), epochs=3)
    trainer = trained(method, tmp_path, network=bert(**still), train_sampling_strategy="sequential", max_grad_norm=0.0)
    assert_same(own, trainer.posterior)
    assert trainer.posterior.learned is True


@pytest.mark.slow
def test_accumulated_batches_are_one_step(tmp_path):
    network = bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **CLASSES)
    found = [
        trained(
            MAP(lr=0.1),
            tmp_path,
            network=network,
            train_sampling_strategy="sequential",
            per_device_train_batch_size=size,
            gradient_accumulation_steps=8 // size,
        ).posterior.state_dict()
        for size in (4, 8)
    ]
    first = bert(hidden_dropout_prob=0.0, **CLASSES).state_dict()
    for name, tensor in found[0].items():
        torch.testing.assert_close(tensor, found[1][name], rtol=1e-4, atol=1e-6, msg=name)
    moved = [name for name, tensor in first.items() if not torch.equal(tensor, found[0][f"network.{name}"])]
    assert len(moved) > 10


METHODS = [case for case in CASES if not case.variant or case.variant == ", kronecker"]
QUICK = [case for case in CASES if case.name == "swag"]


@pytest.mark.parametrize("case", slow_but(QUICK, METHODS), ids=str)
def test_every_method_is_trained_calibrated_and_saved(case, tmp_path):
    method = replace(case.noisy, prior_precision=1.0) if isinstance(case.noisy, Laplace) else case.noisy
    rate = {"lr": 0.05} if hasattr(method, "lr") else {}
    trainer = trained(
        replace(method, **rate),
        tmp_path / "run",
        options={"compute_metrics": accuracy, "calibrate": True},
        eval_strategy="epoch",
        num_train_epochs=2,
    )
    posterior = trainer.posterior
    history = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(history) == 2
    assert all(math.isfinite(entry["eval_loss"]) for entry in history)
    assert posterior.learned is True
    data = loader(posterior, ROWS)
    found, expected = trainer.evaluate(), bayesify.evaluate(posterior, data).metrics
    assert found["eval_loss"] == pytest.approx(expected["nll"], rel=1e-5)
    assert found["eval_accuracy"] == pytest.approx(expected["accuracy"])
    trainer.save_model(tmp_path / "posterior")
    loaded = bayesify.load(tmp_path / "posterior", bert(**CLASSES))
    torch.testing.assert_close(bayesify.predict(loaded, data).probs, bayesify.predict(posterior, data).probs)


RESUMED = {
    "swag": SWAG(rank=2, lr=0.1, snapshots_per_epoch=2, schedule="cosine"),
    "sgld": SGLD(samples_per_chain=3, lr=0.05, burn_in=0.3),
    "ivon": IVON(start_std=0.05, lr=0.05),
    "ibnn": IBNN(components=2, lr=0.05),
}


@pytest.mark.parametrize("name", slow_but(["swag"], RESUMED))
def test_a_killed_run_ends_with_the_same_numbers(name, tmp_path):
    """The order of the rows, dropout and the noise of methods are random, and go on where they were."""

    class KilledError(Exception):
        pass

    class Kill(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 5:
                raise KilledError

    settings = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "epoch"}
    whole = trained(RESUMED[name], tmp_path / "whole", options={"calibrate": True}, **settings)
    with pytest.raises(KilledError):
        trained(RESUMED[name], tmp_path / "killed", options={"callbacks": [Kill()]}, **settings)
    torch.manual_seed(9)
    resumed = trained(RESUMED[name], tmp_path / "killed", options={"calibrate": True}, resume=True, **settings)
    assert resumed.state.global_step == whole.state.global_step == 9
    assert_same(whole.posterior, resumed.posterior)
    assert whole.evaluate()["eval_loss"] == resumed.evaluate()["eval_loss"]


def test_tied_weights_are_kept_in_checkpoints(tmp_path):
    data = rows(labels=lambda ids: ids)
    posteriors = []
    for resume in (None, str(tmp_path / "checkpoint-3")):
        posterior = convert(gpt2(), BayesAdapter(lr=0.05))
        settings = {"save_strategy": "epoch", "num_train_epochs": 2}
        trainer = Trainer(posterior, arguments(tmp_path, **settings), train_dataset=data)
        trainer.train(resume_from_checkpoint=resume)
        posteriors.append(posterior)
    assert_same(*posteriors)
    assert posteriors[1].network.lm_head.weight is posteriors[1].network.transformer.wte.weight


def test_a_pass_over_the_data_is_enough_for_laplace(tmp_path):
    network = bert(**CLASSES).double()
    trainer = trained(Laplace(prior_precision=1.0), tmp_path, network=network, num_train_epochs=0)
    posterior = trainer.posterior
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), posterior.network.parameters(), strict=True))
    own = convert(network, Laplace(prior_precision=1.0))
    bayesify.fit(own, loader(own, ROWS, batch_size=4), epochs=0, progress=False)
    data = loader(posterior, ROWS)
    torch.testing.assert_close(bayesify.predict(posterior, data).probs, bayesify.predict(own, data).probs)


def test_columns_are_those_of_the_network_and_terms_are_logged(tmp_path):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list([{**row, "text": "a film", "number": 3} for row in ROWS])
    posterior = convert(bert(**CLASSES), BayesAdapter(lr=0.05))
    settings = {"logging_strategy": "steps", "logging_steps": 1, "num_train_epochs": 1}
    trainer = Trainer(posterior, arguments(tmp_path, **settings), train_dataset=data, processing_class=tokenizer())
    batch = next(iter(trainer.get_train_dataloader()))
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    trainer.train()
    logged = next(entry for entry in trainer.state.log_history if "loss" in entry)
    assert {"train_nll", "train_kl"} <= logged.keys()
    found = bayesify.predict(posterior, loader(posterior, data, tokenizer()), num_draws=3)
    torch.testing.assert_close(found.probs, bayesify.predict(posterior, loader(posterior, ROWS), num_draws=3).probs)
    logits = trainer.predict(data).predictions
    torch.testing.assert_close(
        torch.as_tensor(logits), bayesify.predict(posterior, loader(posterior, data)).log_probs, rtol=0, atol=1e-5
    )


# -- loaders ------------------------------------------------------------------------------------------------------


def test_texts_rows_and_data_sets_are_the_same():
    datasets = pytest.importorskip("datasets")
    posterior, words = convert(bert(**CLASSES), MCDropout()), tokenizer()
    texts = ["good film", "the very bad end . not good", "a plot"]
    encoded = words(texts, padding=True, return_tensors="pt")
    expected = bayesify.predict(posterior, encoded, num_draws=3)  # a BatchEncoding is a batch as it is
    assert expected.epistemic.min() > 0
    mean = bayesify.predict(posterior, encoded, how="mean")
    short = words(texts)
    listed = [
        {"input_ids": ids, "attention_mask": mask, "note": "-"} for ids, mask in zip(*short.values(), strict=True)
    ]
    for data in (texts, short, listed, datasets.Dataset.from_list(listed), encoded):
        found = bayesify.predict(posterior, loader(posterior, data, words), num_draws=3)
        torch.testing.assert_close(found.probs, expected.probs)
        apart = bayesify.predict(posterior, loader(posterior, data, words, batch_size=2), how="mean")
        torch.testing.assert_close(apart.probs, mean.probs)  # of texts that are padded less
    alone = loader(posterior, texts[0], words)
    assert [tuple(batch["input_ids"].shape) for batch in alone] == [(1, 2)]
    pairs = next(iter(loader(posterior, [("good film", "bad end"), ("a plot", "the end .")], words)))
    assert pairs["input_ids"].tolist() == [[2, 4, 3, 10, 0], [5, 9, 6, 10, 11]]


def test_labels_come_with_texts_and_those_of_tokens_are_padded():
    posterior, words = convert(bert(**CLASSES), MAP()), tokenizer()
    texts, labels = ["good film", "the very bad end", "a plot"], [0, 1, 2]
    metrics = bayesify.evaluate(posterior, loader(posterior, texts, words, labels=labels, batch_size=2)).metrics
    encoded = words(texts, padding=True, return_tensors="pt")
    own = posterior.network.eval()(**encoded, labels=torch.tensor(labels)).loss
    assert metrics["nll"] == pytest.approx(own.item(), abs=1e-6)
    tags = convert(bert("ForTokenClassification", **CLASSES), MAP())
    batch = next(iter(loader(tags, texts, words, labels=[[0, 1], [2, 2, 1, 0], [1, 1]])))
    assert batch["labels"].tolist() == [[0, 1, -100, -100], [2, 2, 1, 0], [1, 1, -100, -100]]
    words.padding_side = "left"
    batch = next(iter(loader(tags, texts, words, labels=[[0, 1], [2, 2, 1, 0], [1, 1]])))
    assert batch["labels"].tolist()[0] == [-100, -100, 0, 1]
    torch.testing.assert_close(
        bayesify.evaluate(tags, [batch]).metrics["nll"],
        tags.network.eval()(**{key: batch[key] for key in batch}).loss.item(),
        rtol=1e-6,
        atol=1e-6,
    )


# -- what cannot be -----------------------------------------------------------------------------------------------


class _Stream(IterableDataset):
    def __iter__(self):
        return iter(ROWS)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda p, w: loader(p, ["good film"]), "Texts need a tokenizer"),
        (lambda p, w: loader(p, ["good film"], w, labels=[0, 1]), "2 labels for 1 rows"),
        (lambda p, w: loader(p, [], w), "the data are empty"),
        (lambda p, w: next(iter(loader(p, [{"text": "good"}], w))), r"takes none of them.*data\.map"),
        (lambda p, w: next(iter(loader(p, [{"input_ids": [1]}, {"input_ids": [1, 2]}]))), "padding needs a tokenizer"),
        (lambda p, w: loader(p, {"input_ids": [[1], [2]], "labels": [0]}), "different numbers of rows"),
        (lambda p, w: loader(p, 3), "not a int"),
        (lambda p, w: next(iter(loader(p, [3, 4]))), "A row is a dictionary"),
        (lambda p, w: loader(p.network, ["good"], w), "convert"),
    ],
)
def test_a_loader_says_what_is_wrong(make, sentence):
    posterior = convert(bert(**CLASSES), MAP())
    with pytest.raises((TypeError, ValueError), match=sentence):
        make(posterior, tokenizer())


def test_core_functions_name_the_loader():
    posterior = convert(bert(**CLASSES), MAP())
    for data in ("good film", ROWS):
        with pytest.raises(TypeError, match=r"bayesify\.integrations\.transformers\.loader\(posterior"):
            bayesify.predict(posterior, data)


@pytest.mark.parametrize(
    ("network", "data", "sentence"),
    [
        (
            lambda: bert("ForTokenClassification", **CLASSES),
            rows(labels=lambda ids: ids[:-1]),
            r"targets must be \(4, 5\)",
        ),
        (lambda: bert(**CLASSES), rows(labels=lambda ids: [0, 1]), r"targets must be \(4,\)"),
        (lambda: bert(**CLASSES), rows(), "none of .*'labels'"),
        (lambda: bert("Model"), ROWS, "a model without a head"),
    ],
    ids=["labels of another length", "labels of another shape", "no labels", "no head"],
)
@pytest.mark.parametrize("by", ["fit", "trainer"])
def test_what_cannot_be_trained_gets_a_sentence(network, data, sentence, by, tmp_path):
    posterior = convert(network(), MAP(lr=0.1))
    run = {
        "fit": lambda: bayesify.fit(posterior, loader(posterior, data, batch_size=4), epochs=1, progress=False),
        "trainer": lambda: Trainer(posterior, arguments(tmp_path), train_dataset=data).train(),
    }
    with pytest.raises(ValueError, match=sentence):
        run[by]()


# The newest transformers has another name for it.
CHECKPOINTING = next(
    name
    for name in ("activation_checkpointing", "gradient_checkpointing")
    if name in {field.name for field in fields(transformers.TrainingArguments)}
)


@pytest.mark.parametrize(
    ("options", "settings", "sentence"),
    [
        ({"train_dataset": _Stream()}, {}, "num_data="),
        ({"compute_loss_func": print}, {}, "compute_loss_func is not for posteriors"),
        ({"calibrate": True}, {}, "needs an eval_dataset"),
        ({}, {CHECKPOINTING: True}, rf"TrainingArguments\({CHECKPOINTING}="),
        ({}, {"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
    ],
)
def test_what_a_trainer_cannot_do_gets_a_sentence(options, settings, sentence, tmp_path):
    posterior = convert(bert(**CLASSES), MAP())
    with pytest.raises(ValueError, match=sentence):
        Trainer(posterior, arguments(tmp_path, **settings), **options)


def test_settings_that_nobody_reads_are_warned_of(tmp_path):
    posterior = convert(bert(**CLASSES), SWAG())
    with pytest.warns(UserWarning, match=r"learning_rate=\.\.\..*SWAG\(lr="):
        Trainer(posterior, arguments(tmp_path, learning_rate=1e-3), train_dataset=ROWS)
    args = arguments(tmp_path, learning_rate=1e-3, num_train_epochs=1)
    trainer = Trainer(posterior, args, train_dataset=ROWS, optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-3))
    trainer.train()
    assert type(trainer.optimizer.optimizer) is torch.optim.AdamW
    with pytest.raises(TypeError, match="convert"):
        Trainer(bert(**CLASSES), args)
