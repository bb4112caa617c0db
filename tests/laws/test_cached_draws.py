"""A draw of a language model is one function: with a key-value cache, in any text, and as a plain network."""

import copy
import functools

import pytest
import torch
from torch import nn

from bayesify import ABNN, BayesAdapter, MCDropout, convert, ensemble, predict
from bayesify.laws import Refusal
from bayesify.laws.modal_network import Draw
from bayesify.methods import list_methods
from tests.test_architectures import configuration, fit_a_little

transformers = pytest.importorskip("transformers")
from tests.integrations.transformers_cases import gpt2 as small  # noqa: E402
from tests.integrations.transformers_cases import tokenizer  # noqa: E402

EXACT = {"rtol": 0, "atol": 1e-12}
TOKENS = torch.randint(22, (3, 7), generator=torch.Generator().manual_seed(0))
NETWORKS = ("gpt2", "llama")


def gpt2(**options):
    sizes = {"n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2, "initializer_range": 0.3}
    special = {"bos_token_id": 0, "eos_token_id": 22, "pad_token_id": 0}
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=23, **{**sizes, **special, **options})
    ).double()


def llama():
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=23, num_key_value_heads=1, initializer_range=0.3, **sizes)
    ).double()


@functools.cache
def posterior(name, architecture="gpt2"):
    network = (gpt2() if architecture == "gpt2" else llama()).eval()
    method = configuration(name, network)
    if name == "mc-dropout":
        method = MCDropout(p=0.2, insert_before=method.insert_before, masks="features")
    made = convert(network, method)
    fit_a_little(made, {"input_ids": TOKENS})
    return made.eval()


@torch.no_grad()
def step_by_step(function, tokens, first):
    """Read a text with a cache: some tokens, and then one after another."""
    found = function(input_ids=tokens[:, :first], use_cache=True)
    logits = [found.logits]
    for position in range(first, tokens.shape[1]):
        found = function(input_ids=tokens[:, position : position + 1], past_key_values=found.past_key_values)
        logits.append(found.logits)
    return torch.cat(logits, 1)


@pytest.mark.parametrize("name", sorted(list_methods()))
@pytest.mark.parametrize("architecture", NETWORKS)
def test_a_draw_with_a_cache_is_the_draw_without(name, architecture):
    made = posterior(name, architecture)
    assert made.law.continues is True
    draw, *others = (Draw(made, key) for key in made.keys(2, 3))
    with torch.no_grad():
        whole = draw(input_ids=TOKENS).logits
        assert name == "map" or (whole - others[0](input_ids=TOKENS).logits).abs().max() > 1e-3
    for rows in (1, 2, 3):  # copies of two and of three rows are what a dry run looks at
        torch.testing.assert_close(step_by_step(draw, TOKENS[:rows], 4), whole[:rows], **EXACT)


def test_a_draw_with_a_cache_reads_padding_and_heads_that_are_dropped():
    network = gpt2(attn_implementation="eager").eval()  # which calls its dropout of attention weights
    draw = convert(network, MCDropout(p=0.3, masks="features")).draw(1)
    mask = torch.ones_like(TOKENS)
    mask[0, :2] = 0
    with torch.no_grad():
        whole = draw(input_ids=TOKENS, attention_mask=mask)
        first = draw(input_ids=TOKENS[:, :5], attention_mask=mask[:, :5], use_cache=True)
        rest = draw(input_ids=TOKENS[:, 5:], attention_mask=mask, past_key_values=first.past_key_values)
        assert (whole.logits - network(input_ids=TOKENS, attention_mask=mask).logits).abs().max() > 0.1
    torch.testing.assert_close(rest.logits, whole.logits[:, 5:], **EXACT)


def test_masks_of_features_are_the_same_in_texts_of_any_length():
    draw = posterior("mc-dropout").draw(0)
    with torch.no_grad():
        torch.testing.assert_close(draw(input_ids=TOKENS[:, :3]).logits, draw(input_ids=TOKENS).logits[:, :3], **EXACT)


def test_the_linearised_variance_sums_over_the_positions_that_share_a_mask():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside, self.dropout, self.head = nn.Linear(4, 4), nn.Dropout(0.3), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.dropout(self.inside(x)).tanh().sum(1))

    network, x = Positions().double(), torch.randn(3, 5, 4, dtype=torch.float64)
    made = convert(network, MCDropout(masks="features"), likelihood="regression")
    with torch.no_grad():
        hidden = network.inside(x)
        each = torch.einsum("cd,btd->bcd", network.head.weight, (1 - hidden.tanh() ** 2) * hidden)
    expected = (each.square() * 0.3 / 0.7).sum(-1)
    torch.testing.assert_close(predict(made, x, how="linearised").epistemic, expected, **EXACT)


@pytest.mark.parametrize("method", [MCDropout(), ABNN(noise="element")], ids=["dropout", "abnn"])
def test_noise_of_positions_is_refused_with_a_cache_and_leaves_it_alone(method):
    made = convert(gpt2(), method)
    assert isinstance(made.law.continues, Refusal)
    assert ensemble([made, posterior("map")]).law.continues == made.law.continues
    draw = made.draw(0)
    found = draw(input_ids=TOKENS[:, :4], use_cache=True)
    with pytest.raises(ValueError, match=r"MCDropout\(masks='features'\)"):
        draw(input_ids=TOKENS[:, 4:], past_key_values=found.past_key_values)
    assert found.past_key_values.get_seq_length() == 4
    with pytest.raises(ValueError, match="'entries' or 'features'"):
        MCDropout(masks="tokens")


def test_a_pass_with_a_cache_is_no_input_that_files_remember():
    made = copy.deepcopy(posterior("mc-dropout"))
    predict(made, {"input_ids": TOKENS}, num_draws=2)
    seen = made.inputs_seen.form
    step_by_step(made.draw(0), TOKENS, 4)
    assert seen is not None
    assert [form["shape"] for form in made.inputs_seen.form["tensors"]] == [[2, 4]]  # the first part, without a cache


@pytest.mark.parametrize("name", sorted(list_methods()))
def test_a_draw_as_a_plain_network_shares_what_is_not_random(name):
    made = posterior(name)
    draw = made.draw(3)
    if name == "mc-dropout":
        with pytest.raises(ValueError, match="its randomness is in layers"):
            draw.network()
        return
    before = {key: tensor.clone() for key, tensor in made.network.state_dict().items()}
    network = draw.network()
    assert type(network) is transformers.GPT2LMHeadModel
    random = made.weights(draw.key)
    assert (name == "map") == (not random)
    for key, parameter in network.named_parameters():
        shared = parameter.data_ptr() == made.network.get_parameter(key).data_ptr()
        assert shared == (key not in random), key
    assert network.lm_head.weight is network.transformer.wte.weight  # tied, as it was
    with torch.no_grad():
        expected = draw(input_ids=TOKENS).logits
        torch.testing.assert_close(network(input_ids=TOKENS).logits, expected, **EXACT)
    if name != "abnn":  # whose other weights are frozen
        network(input_ids=TOKENS).logits.sum().backward()
    assert all(parameter.grad is None for parameter in made.network.parameters())
    assert all(torch.equal(tensor, before[key]) for key, tensor in made.network.state_dict().items())


def test_a_draw_as_a_plain_network_generates():
    draw = posterior("swag").draw(1)
    found = draw.network().generate(TOKENS, max_new_tokens=3, min_new_tokens=3, do_sample=False, eos_token_id=None)
    tokens = TOKENS
    with torch.no_grad():
        for _ in range(3):
            tokens = torch.cat([tokens, draw(input_ids=tokens).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(found, tokens)


@pytest.mark.slow
def test_a_draw_as_a_plain_network_serves():
    pipeline = transformers.pipeline("text-generation", model=small().eval(), tokenizer=tokenizer())
    made = convert(pipeline.model, BayesAdapter(start_std=(0.3, 0.3)))
    found = []
    for seed in range(3):
        network = made.draw(seed).network()
        (row,) = transformers.pipeline("text-generation", model=network, tokenizer=tokenizer())(
            "good film", max_new_tokens=4, do_sample=False, return_tensors=True
        )
        tokens = torch.tensor([row["generated_token_ids"]])
        with torch.no_grad():
            logits = made.draw(seed)(input_ids=tokens).logits
        assert torch.equal(logits[0, 1:-1].argmax(-1), tokens[0, 2:])
        found.append(tuple(row["generated_token_ids"]))
    assert len(set(found)) > 1


@pytest.mark.slow
def test_a_draw_as_a_plain_network_compiles():
    draw = posterior("bayes-adapter").draw(1)
    with torch.no_grad():
        found = torch.compile(draw.network(), backend="eager")(input_ids=TOKENS).logits
        torch.testing.assert_close(found, draw(input_ids=TOKENS).logits, **EXACT)
