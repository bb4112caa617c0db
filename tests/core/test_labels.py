"""The loss of a posterior is the network's own, where the network has one: transformers' heads and conventions."""

import math
import warnings

import pytest
import torch
from torch import nn

from bayesify import ABNN, MAP, BayesAdapter, Categorical, Gaussian, Laplace, calibrate, check, convert, evaluate, fit
from bayesify._core.labels import convention_of

transformers = pytest.importorskip("transformers")

WORDS, LENGTH, ROWS = 23, 7, 6
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}


def bert(head, **options):
    config = transformers.BertConfig(vocab_size=WORDS, max_position_embeddings=16, **SMALL, **options)
    return getattr(transformers, f"Bert{head}")(config)


def distilbert(head, **options):
    sizes = {"n_layers": 1, "n_heads": 2, "dim": 16, "hidden_dim": 32}
    config = transformers.DistilBertConfig(vocab_size=WORDS, max_position_embeddings=16, **sizes, **options)
    return getattr(transformers, f"DistilBert{head}")(config)


def gpt2(head="LMHeadModel", **options):
    config = transformers.GPT2Config(vocab_size=WORDS, n_positions=16, n_embd=16, n_layer=1, n_head=2, **options)
    return getattr(transformers, f"GPT2{head}")(config)


def llama(head="ForCausalLM", **options):
    return getattr(transformers, f"Llama{head}")(transformers.LlamaConfig(vocab_size=WORDS, **SMALL, **options))


def batch_of(kind, *, padded, rows=ROWS, seed=0):
    """Make a batch as transformers' collators do: padding has the label -100."""
    random = torch.Generator().manual_seed(seed)

    def integers(high, *shape):
        return torch.randint(high, shape, generator=random)

    ids, mask = integers(WORDS, rows, LENGTH), torch.ones(rows, LENGTH, dtype=torch.long)
    if padded:
        mask = (torch.arange(LENGTH) < LENGTH - torch.arange(rows)[:, None] % 4).long()
    batch = {"input_ids": ids, "attention_mask": mask}
    if kind == "classes":
        return {**batch, "labels": integers(3, rows)}
    if kind == "answers":
        return {**batch, "labels": integers(2, rows, 3).float()}
    if kind == "number":
        return {**batch, "labels": torch.randn(rows, generator=random)}
    if kind == "span":
        start, end = integers(LENGTH, rows), integers(LENGTH, rows)
        start[0] = end[0] = LENGTH + 3  # the text was cut off before the answer
        return {**batch, "start_positions": start, "end_positions": end}
    if kind == "tags":
        return {**batch, "labels": integers(3, rows, LENGTH).where(mask == 1, -100)}
    if kind == "masked":
        return {**batch, "labels": ids.where((integers(2, rows, LENGTH) == 1) & (mask == 1), -100)}
    return {**batch, "labels": ids.where(mask == 1, -100)}


CASES = {
    "bert, one of three": (lambda: bert("ForSequenceClassification", num_labels=3), "classes", "classification"),
    "bert, yes or no": (
        lambda: bert("ForSequenceClassification", num_labels=3, problem_type="multi_label_classification"),
        "answers",
        "binary",
    ),
    "bert, a number": (lambda: bert("ForSequenceClassification", num_labels=1), "number", Gaussian(0.5**0.5)),
    "bert, tags": (lambda: bert("ForTokenClassification", num_labels=3), "tags", "classification"),
    "bert, a span": (lambda: bert("ForQuestionAnswering"), "span", "classification"),
    "bert, masked": (lambda: bert("ForMaskedLM"), "masked", "classification"),
    "bert, causal": (lambda: bert("LMHeadModel", is_decoder=True), "tokens", "classification"),
    "distilbert, one of three": (
        lambda: distilbert("ForSequenceClassification", num_labels=3),
        "classes",
        "classification",
    ),
    "distilbert, tags": (lambda: distilbert("ForTokenClassification", num_labels=3), "tags", "classification"),
    "distilbert, a span": (lambda: distilbert("ForQuestionAnswering"), "span", "classification"),
    "distilbert, masked": (lambda: distilbert("ForMaskedLM"), "masked", "classification"),
    "gpt2, causal": (gpt2, "tokens", "classification"),
    "gpt2, one of three": (
        lambda: gpt2("ForSequenceClassification", num_labels=3, pad_token_id=0),
        "classes",
        "classification",
    ),
    "gpt2, tags": (lambda: gpt2("ForTokenClassification", num_labels=3), "tags", "classification"),
    "gpt2, a span": (lambda: gpt2("ForQuestionAnswering"), "span", "classification"),
    "llama, causal": (llama, "tokens", "classification"),
}


class Wrapped(nn.Module):
    """A network around another, as peft's or a user's own."""

    def __init__(self, model):
        super().__init__()
        self.base_model = model

    def forward(self, **inputs):
        return {"logits": self.base_model(**inputs).logits}


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("case", CASES)
def test_the_loss_is_the_networks_own(case, padded):
    make, kind, likelihood = CASES[case]
    torch.manual_seed(0)
    network, batch = make().eval(), batch_of(kind, padded=padded)
    posterior = convert(network, MAP(), likelihood=likelihood).eval()
    # A Gaussian with the variance 1/2 has the squared error plus a constant.
    constant = 0.5 * math.log(math.pi) if isinstance(likelihood, Gaussian) else 0.0
    own = network(**batch).loss
    torch.testing.assert_close(posterior.loss(batch, num_data=ROWS).total - constant, own, rtol=0, atol=1e-6)


@pytest.mark.parametrize("make", [gpt2, llama])
def test_a_wrapped_language_model_keeps_its_convention(make):
    network, batch = make().eval(), batch_of("tokens", padded=True)
    posterior = convert(Wrapped(network), MAP()).eval()
    torch.testing.assert_close(posterior.loss(batch, num_data=ROWS).total, network(**batch).loss, rtol=0, atol=1e-6)


def test_a_language_model_without_its_head_keeps_the_targets_of_the_head_around_it():
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = gpt2("Model"), nn.Linear(16, 3)

        def forward(self, input_ids, attention_mask):
            return self.head(self.body(input_ids, attention_mask=attention_mask).last_hidden_state)

    network, batch = Tagger().eval(), batch_of("tags", padded=False)
    logits = network(batch["input_ids"], batch["attention_mask"])
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    torch.testing.assert_close(convert(network, MAP()).eval().loss(batch, num_data=ROWS).total, expected)


def test_tokens_that_come_next_may_be_given_as_such():
    network, batch = gpt2().eval(), batch_of("tokens", padded=True)
    posterior = convert(network, MAP()).eval()
    labels = batch.pop("labels")
    following = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], dim=1)
    loss = posterior.loss({**batch, "shift_labels": following}, num_data=ROWS).total
    torch.testing.assert_close(loss, network(**batch, labels=labels).loss, rtol=0, atol=1e-6)


@pytest.mark.parametrize("key", [None, "targets", "y"])
def test_targets_that_may_be_shifted_or_not_are_refused(key):
    batch = batch_of("tokens", padded=False)
    labels = batch.pop("labels")
    posterior = convert(gpt2(), MAP())
    with pytest.raises(ValueError, match=r"'labels', the tokens themselves .* or 'shift_labels'"):
        posterior.loss((batch, labels) if key is None else {**batch, key: labels}, num_data=ROWS)


def test_a_language_model_whose_own_loss_is_not_known_is_refused():
    config = transformers.BartConfig(
        vocab_size=WORDS, d_model=16, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=16, is_decoder=True,
        is_encoder_decoder=False, max_position_embeddings=16,
    )  # fmt: skip
    network = transformers.BartForCausalLM(config).eval()  # it compares a token with itself
    assert convention_of(network) == "unknown"
    with pytest.raises(ValueError, match="Give a mapping with 'shift_labels'"):
        convert(network, MAP()).loss(batch_of("tokens", padded=False), num_data=ROWS)


def test_an_encoder_decoder_needs_the_inputs_of_its_decoder():
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    network, batch = transformers.T5ForConditionalGeneration(config).eval(), batch_of("tokens", padded=True)
    posterior = convert(network, MAP()).eval()
    with pytest.raises(ValueError, match="prepare_decoder_input_ids_from_labels"):
        posterior.loss(batch, num_data=ROWS)
    batch["decoder_input_ids"] = network.prepare_decoder_input_ids_from_labels(batch["labels"])
    torch.testing.assert_close(posterior.loss(batch, num_data=ROWS).total, network(**batch).loss, rtol=0, atol=1e-6)


def test_an_untrained_language_model_is_right_by_chance_only():
    torch.manual_seed(0)
    network = gpt2(tie_word_embeddings=True).eval()
    loader = [batch_of("tokens", padded=True, rows=100, seed=seed) for seed in range(4)]
    found = evaluate(convert(network, MAP()), loader)
    own = torch.stack([network(**batch).loss for batch in loader]).mean().item()
    assert found.prediction.probs.shape == (400, LENGTH, WORDS)  # every position is predicted
    assert abs(found.metrics["accuracy"] - 1 / WORDS) < 0.03  # of about 1,800 tokens: five standard deviations
    assert abs(found.metrics["nll"] - own) < 0.01  # batches have about equal numbers of tokens


@pytest.mark.slow
def test_all_that_looks_at_targets_sees_the_same_ones():
    torch.manual_seed(0)
    network = gpt2().eval()
    loader = [batch_of("tokens", padded=True, rows=20, seed=seed) for seed in range(2)]
    posterior = convert(network, Laplace(structure="diagonal", prior_precision=1e4), include=["*ln_f"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        history = fit(posterior, loader, num_data=40, val_loader=loader, progress=False)
    counted = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in loader)
    own = sum(network(**b).loss.item() * int((b["labels"][:, 1:] != -100).sum()) for b in loader)
    torch.testing.assert_close(posterior.law.log_likelihood.item(), -own, rtol=1e-5, atol=0)
    right = sum(int((network(**b).logits[:, :-1].argmax(-1) == b["labels"][:, 1:]).sum()) for b in loader)
    assert history.accuracy_before == pytest.approx(right / counted)
    calibrate(posterior, loader, num_draws=3)
    found = check(posterior, loader, how="linearised", num_draws=8)
    assert found.nll_difference is not None
    assert abs(found.nll_difference) < 0.5


@pytest.mark.parametrize("method", [BayesAdapter(epochs=1), ABNN(epochs=1, members=2)])
def test_other_methods_are_shifted_too(method):
    torch.manual_seed(0)
    posterior = convert(gpt2().eval(), method).eval()
    batch = batch_of("tokens", padded=True)
    inputs, targets = posterior.split_batch(batch)
    assert "labels" not in inputs
    assert torch.equal(targets[:, :-1], batch["labels"][:, 1:])
    assert bool((targets[:, -1] == -100).all())


def test_the_last_position_is_left_out_by_the_likelihoods_own_label():
    posterior = convert(gpt2(), MAP(), likelihood=Categorical(ignore_index=-1))
    _, targets = posterior.split_batch(batch_of("tokens", padded=False))
    assert bool((targets[:, -1] == -1).all())
