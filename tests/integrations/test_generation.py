"""Text from all draws together, against a loop over draws that reads everything anew for each token."""

import pytest
import torch

from bayesify import ABNN, IBNN, MAP, BayesAdapter, MCDropout, convert
from bayesify.laws.modal_network import Draw
from tests.laws.test_cached_draws import TOKENS, posterior

transformers = pytest.importorskip("transformers")
from bayesify.integrations.transformers import generate  # noqa: E402
from tests.integrations.transformers_cases import bert, tokenizer  # noqa: E402
from tests.integrations.transformers_cases import gpt2 as small  # noqa: E402

EXACT = {"rtol": 0, "atol": 1e-10}


@torch.no_grad()
def naive(made, tokens, mask, number, draws, seed):
    """Choose each token by the average of draws, which are called on the whole text, without a cache."""
    steps = []
    keys = made.keys(draws, seed)
    for _ in range(number):
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        logits = torch.stack(
            [
                Draw(made, key)(input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits
                for key in keys
            ]
        )[:, :, -1]
        log_probs = (logits / made.likelihood.temperature).log_softmax(-1)
        average = log_probs.exp().mean(0)
        total = -torch.special.xlogy(average, average).sum(-1)
        aleatoric = -(log_probs * log_probs.exp()).sum(-1).mean(0)
        chosen = average.argmax(-1, keepdim=True)
        own = log_probs.gather(-1, chosen.expand(len(keys), -1, -1))[..., 0]
        steps.append((total, aleatoric, total - aleatoric, own))
        tokens = torch.cat([tokens, chosen], 1)
        mask = torch.cat([mask, torch.ones_like(chosen)], 1)
    return tokens, [torch.stack(part, -1) for part in zip(*steps, strict=True)]


@pytest.mark.parametrize("cached", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("name", ["bayes-adapter", "mc-dropout", "deep-ensemble", "swag"])
def test_tokens_and_answers_are_those_of_a_loop_over_draws(name, cached):
    made, draws = posterior(name), 3
    mask = torch.ones_like(TOKENS)
    mask[1, :3] = 0  # padded on the left
    tokens, (total, aleatoric, epistemic, own) = naive(made, TOKENS, mask, 5, draws, 7)
    found = generate(
        made,
        {"input_ids": TOKENS, "attention_mask": mask, "labels": TOKENS},
        num_draws=draws,
        seed=7,
        max_new_tokens=5,
        do_sample=False,
        use_cache=cached,
        keep_weights=cached,
        eos_token_id=-1,
    )
    assert torch.equal(found.sequences, tokens)
    assert torch.equal(found.token_ids, tokens[:, 7:])
    assert bool(found.mask.all())
    for one, other in zip((total, aleatoric, epistemic), vars(found.tokens).values(), strict=True):
        torch.testing.assert_close(other, one, **EXACT)
    for one, other in zip((total, aleatoric, epistemic), vars(found.answer).values(), strict=True):
        torch.testing.assert_close(other, one.sum(-1), **EXACT)
    torch.testing.assert_close(found.log_probs, own.sum(-1), **EXACT)
    torch.testing.assert_close(found.log_prob, own.sum(-1).exp().mean(0).log(), **EXACT)
    assert found.answer.epistemic.min() > 1e-3


def test_an_answer_ends_with_its_first_end():
    made = posterior("bayes-adapter")
    free = generate(made, TOKENS, num_draws=3, max_new_tokens=6, do_sample=False, eos_token_id=-1)
    end = int(free.token_ids[0, 2])
    found = generate(made, TOKENS, num_draws=3, max_new_tokens=6, do_sample=False, eos_token_id=end)
    for row in range(len(TOKENS)):
        ids = free.token_ids[row].tolist()
        length = ids.index(end) + 1 if end in ids else 6
        assert found.mask[row].tolist() == [index < length for index in range(found.token_ids.shape[1])]
        torch.testing.assert_close(found.answer.total[row], free.tokens.total[row, :length].sum(), **EXACT)
        assert not found.tokens.epistemic[row, length:].any()
    assert not found.mask.all()


def test_sampled_answers_estimate_the_entropy_of_all():
    """Two tokens of a vocabulary of 12: the chain rule's sum, on average over answers, is the entropy of all pairs."""
    made = convert(small().double(), BayesAdapter(start_std=(0.2, 0.2))).eval()  # dropout is no part of the truth
    prompt = torch.tensor([[3, 4]])
    keys = made.keys(2, 0)
    with torch.no_grad():
        first = torch.stack([Draw(made, key)(input_ids=prompt).logits[0, -1].softmax(-1) for key in keys]).mean(0)
        pairs = torch.cat([prompt.expand(12, 2), torch.arange(12)[:, None]], 1)
        second = torch.stack([Draw(made, key)(input_ids=pairs).logits[:, -1].softmax(-1) for key in keys]).mean(0)
    joint = first[:, None] * second
    entropy = -(joint * joint.log()).sum()
    torch.manual_seed(0)
    found = generate(
        made, prompt, num_draws=2, max_new_tokens=2, do_sample=True, top_k=0, num_return_sequences=400, eos_token_id=-1
    )
    error = found.answer.total.std() / 20
    assert 0 < error < 0.05
    assert abs(found.answer.total.mean() - entropy) < 4 * error  # one false alarm in 16,000


def test_texts_come_and_go_and_calibration_counts():
    made, words = convert(small(), MCDropout(p=0.3, masks="features")), tokenizer()
    found = generate(made, ["good film", "the very bad"], tokenizer=words, num_draws=4, max_new_tokens=3)
    assert len(found.texts) == 2
    assert set(" ".join(found.texts).split()) <= set(words.get_vocab())
    alone = generate(made, "good film", tokenizer=words, num_draws=4, max_new_tokens=3)
    torch.testing.assert_close(alone.tokens.total[0], found.tokens.total[0, : alone.tokens.total.shape[1]])
    made.likelihood.temperature.fill_(0.2)
    sharper = generate(made, "good film", tokenizer=words, num_draws=4, max_new_tokens=3)
    assert (sharper.answer.aleatoric < alone.answer.aleatoric).all()


@pytest.mark.parametrize(
    ("make", "options", "sentence"),
    [
        (lambda: convert(small(), MCDropout()), {}, "masks='features'"),
        (lambda: convert(small(), ABNN(noise="element")), {}, "sample-channel"),
        (lambda: convert(small("Model"), MAP()), {}, "generates no text"),
        (lambda: convert(bert(num_labels=3), MAP()), {}, "generates no text"),
        (lambda: convert(small(), MAP()), {"num_beams": 2}, "num_beams=1"),
        (lambda: convert(small(), MAP(), likelihood="regression"), {}, "Tokens are classes"),
        (lambda: convert(small(), MAP()), {"past_key_values": ()}, "Leave it out"),
        (lambda: convert(small(), MAP()), {"inputs": "good film"}, "Texts need a tokenizer"),
        (lambda: convert(small(), MAP()), {"inputs": [1, 2]}, "generate takes tokens"),
        (small, {}, "convert"),
    ],
)
def test_what_cannot_be_generated_gets_a_sentence(make, options, sentence):
    with pytest.raises((TypeError, ValueError), match=sentence):
        generate(make(), options.pop("inputs", TOKENS[:, :2] % 12), max_new_tokens=2, **options)


def test_encoder_decoders_are_refused_and_their_draws_generate():
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    torch.manual_seed(0)
    network = transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=12, **sizes)).eval()
    made = convert(network, IBNN())
    with pytest.raises(ValueError, match=r"posterior\.draw\(seed\)\.network\(\)\.generate"):
        generate(made, TOKENS[:, :2] % 12)
    draw = made.draw(2)
    found = draw.network().generate(TOKENS % 12, max_new_tokens=2, do_sample=False)
    with torch.no_grad():
        logits = draw(input_ids=TOKENS % 12, decoder_input_ids=found[:, :1]).logits
    assert torch.equal(logits[:, -1].argmax(-1), found[:, 1])
