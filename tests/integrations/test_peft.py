"""Adapters of peft: the adapter becomes random and nothing else; saved beside it; merged into the base."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import bayesify
from bayesify import ABNN, IBNN, IVON, SGLD, SWAG, BayesAdapter, DeepEnsemble, Laplace, MCDropout
from bayesify.prediction import capabilities
from tests.marks import slow_but, slow_product

peft = pytest.importorskip("peft")
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel  # noqa: E402

from bayesify.integrations.peft import merge  # noqa: E402

METHODS = {
    "bayes-adapter": BayesAdapter(epochs=1, start_std=(0.05, 0.06)),
    "ivon": IVON(epochs=1, start_std=1e-3),
    "laplace, diagonal": Laplace(structure="diagonal", prior_precision=10.0),
    "laplace, kronecker": Laplace(structure="kronecker", mc_labels=1, prior_precision=10.0),
    "swag": SWAG(epochs=1, lr=0.5, snapshots_per_epoch=3, rank=3),
    "sgld": SGLD(epochs=2, samples_per_chain=2),
    "ibnn": IBNN(epochs=1, components=2, draws_per_component=2),
    "deep-ensemble": DeepEnsemble(members=2, epochs=1, start="perturbed"),
}
KINDS = ("bert", "gpt2")


def model(kind, tuner=peft.LoraConfig, **options):
    torch.manual_seed(0)
    if kind == "bert":
        sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
        base = BertForSequenceClassification(
            BertConfig(vocab_size=30, num_labels=3, max_position_embeddings=16, initializer_range=0.5, **sizes)
        )
        given = {"task_type": "SEQ_CLS", "target_modules": ["query", "value"]}
    else:
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        base = GPT2LMHeadModel(GPT2Config(vocab_size=30, n_embd=8, n_layer=1, n_head=2, n_positions=16, **ends))
        given = {"task_type": "CAUSAL_LM", "target_modules": ["c_attn"], "fan_in_fan_out": True}
    if tuner is peft.LoraConfig:
        given |= {"r": 2, "lora_alpha": 3}
    made = peft.get_peft_model(base, tuner(**given | options))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_B" in name:  # zero at first
                parameter.normal_(0, 0.1)
    return made.eval()


def loader(kind):
    torch.manual_seed(1)
    rows = []
    for label in range(8):
        ids = torch.randint(1, 30, (6,))
        rows.append({"input_ids": ids, "labels": ids if kind == "gpt2" else torch.tensor(label % 3)})
    return DataLoader(rows, batch_size=4)


@pytest.mark.parametrize(("name", "kind"), slow_product(METHODS, KINDS))
def test_the_adapter_becomes_random_and_nothing_else(name, kind):
    network, data = model(kind), loader(kind)
    before = {key: tensor.clone() for key, tensor in network.state_dict().items()}
    posterior = bayesify.convert(network, METHODS[name])
    assert posterior.conversion.converted
    assert all(".lora_A." in module or ".lora_B." in module for module in posterior.conversion.converted)
    bayesify.fit(posterior, data, progress=False, accuracy_tolerance=1.0)
    prediction = bayesify.predict(posterior, data, num_draws=2, seed=0)
    assert prediction.epistemic.isfinite().all()
    assert prediction.epistemic.max() > 0
    for how in ("streamlined", "linearised"):
        if capabilities(posterior)[how]:
            assert bayesify.predict(posterior, data, how=how).probs.isfinite().all(), how
    inside = posterior.network.state_dict()
    for key, tensor in network.state_dict().items():
        assert torch.equal(tensor, before[key]), key
        if not any(part in key for part in ("lora_", "modules_to_save")):
            assert inside[key].data_ptr() == tensor.data_ptr(), key


def test_a_draw_is_the_base_plus_the_drawn_product():
    network = model("gpt2").double()
    posterior = bayesify.convert(network, METHODS["bayes-adapter"])
    weights = posterior.weights(posterior.keys(1, 5)[0])
    expected = model("gpt2").double().unload()
    (layer,) = (module for name, module in expected.named_modules() if name.endswith("c_attn"))
    (a,), (b,) = ([t for name, t in weights.items() if key in name] for key in ("lora_A", "lora_B"))
    with torch.no_grad():
        layer.weight += (3 / 2 * b @ a).T  # alpha / r; this layer's weights are transposed
    ids = next(iter(loader("gpt2")))["input_ids"]
    draw = posterior.draw(5)
    torch.testing.assert_close(draw(input_ids=ids).logits, expected(input_ids=ids).logits, rtol=1e-12, atol=1e-12)
    merged = merge(draw)
    assert type(merged) is GPT2LMHeadModel
    torch.testing.assert_close(merged(input_ids=ids).logits, expected(input_ids=ids).logits, rtol=1e-12, atol=1e-12)
    posterior.require_unchanged()
    with posterior.mean():
        torch.testing.assert_close(posterior(input_ids=ids).logits, network(input_ids=ids).logits, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["laplace, kronecker", "swag", "sgld", "ibnn"])
def test_draws_of_other_methods_merge_too(name):
    posterior = bayesify.convert(model("bert").double(), METHODS[name])
    data = loader("bert")
    bayesify.fit(posterior, data, progress=False, accuracy_tolerance=1.0)
    draw, ids = posterior.eval().draw(3), next(iter(data))["input_ids"]
    torch.testing.assert_close(merge(draw)(input_ids=ids).logits, draw(input_ids=ids).logits, rtol=1e-9, atol=1e-9)


def test_b_alone_is_an_option_and_excludes_count():
    network = model("bert")
    for options in ({"include": "*.lora_B"}, {"exclude": "*.lora_A"}):
        converted = bayesify.convert(network, BayesAdapter(), **options).conversion.converted
        assert len(converted) == 2
        assert all(".lora_B." in module for module in converted)


def test_widening_needs_no_training():
    data = loader("bert")
    posterior = bayesify.convert(model("bert"), BayesAdapter(epochs=0, start_std=(0.01, 0.01)))
    bayesify.widen(posterior, data, calibrated=False, num_draws=4)
    assert len(posterior.widening.trials) > 1
    assert all(".lora_" in name for name in posterior.law.names)


def test_a_head_learns_beside_the_adapter_and_stays_deterministic():
    network = model("bert")
    posterior = bayesify.convert(network, METHODS["bayes-adapter"])
    bayesify.fit(posterior, loader("bert"), progress=False, accuracy_tolerance=1.0)
    head = "base_model.model.classifier.modules_to_save.default.weight"
    assert not torch.equal(posterior.network.get_parameter(head), network.get_parameter(head))
    assert head not in posterior.law.names
    assert "not in the adapter" in str(posterior.conversion)
    last = bayesify.convert(network, Laplace())
    assert last.conversion.converted == (head.removesuffix(".weight"),)


@pytest.mark.parametrize(
    ("tuner", "options", "part"),
    [
        (peft.LoraConfig, {"use_dora": True}, "lora_magnitude_vector"),
        (peft.LoraConfig, {"use_rslora": True}, "lora_A"),
        (peft.IA3Config, {"feedforward_modules": []}, "ia3_l"),
        (peft.LoHaConfig, {"r": 2}, "hada_w1_a"),
        (peft.VeraConfig, {"r": 2}, "vera_lambda_b"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_other_tuners(tuner, options, part):
    posterior = bayesify.convert(model("bert", tuner, **options), METHODS["bayes-adapter"])
    assert any(part in name for name in posterior.conversion.converted)
    bayesify.fit(posterior, loader("bert"), progress=False, accuracy_tolerance=1.0)
    prediction = bayesify.predict(posterior, loader("bert"), num_draws=3)
    assert prediction.epistemic.max() > 0


def test_what_has_no_adapter_to_make_random_gets_a_sentence():
    network = model("gpt2")
    network.merge_adapter()
    with pytest.raises(ValueError, match=r"merged into the weights of 'base.*c_attn'.*unmerge_adapter"):
        bayesify.convert(network, BayesAdapter())
    network.unmerge_adapter()
    network.disable_adapter_layers()
    with pytest.raises(ValueError, match=r"switched off.*enable_adapter_layers"):
        bayesify.convert(network, BayesAdapter())
    network.enable_adapter_layers()
    for method in (MCDropout(), ABNN()):
        with pytest.raises(ValueError, match=r"Of a network with an adapter only this is converted; include=\['\*'\]"):
            bayesify.convert(network, method)
    assert bayesify.convert(network, MCDropout(), include="*").conversion.converted
    assert bayesify.convert(model("gpt2", lora_dropout=0.1), MCDropout()).conversion.converted == (
        "base_model.model.transformer.h.0.attn.c_attn.lora_dropout.default",
    )
    plain = network.merge_and_unload()  # frozen, as it was
    with pytest.raises(ValueError, match="parameters that are not frozen"):
        bayesify.convert(plain, BayesAdapter())
    plain.requires_grad_(True)
    draw = bayesify.convert(plain, BayesAdapter()).draw(0)
    with pytest.raises(ValueError, match=r"no adapter of peft.*draw.network\(\)"):
        merge(draw)
    with pytest.raises(TypeError, match="takes a draw"):
        merge(network)
    with pytest.raises(ValueError, match="no plain network"):
        merge(bayesify.convert(model("gpt2", lora_dropout=0.1), MCDropout()).draw(0))


def test_virtual_tokens_get_a_sentence():
    base = model("gpt2").unload()
    network = peft.get_peft_model(base, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ValueError, match=r"virtual tokens.*such as LoRA"):
        bayesify.convert(network, BayesAdapter())


@pytest.mark.parametrize("kind", slow_but(["bert"], KINDS))
def test_saved_beside_the_adapter_and_loaded_through_peft(kind, tmp_path):
    network, data = model(kind), loader(kind)
    posterior = bayesify.convert(network, METHODS["laplace, kronecker"])
    bayesify.fit(posterior, data, progress=False, accuracy_tolerance=1.0)
    network.save_pretrained(tmp_path)
    bayesify.save(posterior, tmp_path / "posterior")
    again = peft.PeftModel.from_pretrained(model(kind).unload(), tmp_path)  # which freezes the adapter
    loaded = bayesify.load(tmp_path / "posterior", again)
    expected, found = (bayesify.predict(one, data, num_draws=2, seed=0).probs for one in (posterior, loaded))
    assert torch.equal(expected, found)
    other = peft.PeftModel.from_pretrained(model(kind).unload(), tmp_path)
    with torch.no_grad():
        next(p for name, p in other.named_parameters() if "lora_A" in name).add_(1)
    with pytest.raises(ValueError, match="lora_A"):
        bayesify.load(tmp_path / "posterior", other)


class Int8Linear(nn.Linear):
    """A linear layer with weights of eight bits, which are scaled in each pass, as quantised bases have."""

    def __init__(self, layer):
        super().__init__(layer.in_features, layer.out_features)
        scale = layer.weight.detach().abs().max() / 127
        self.bias = layer.bias
        self.weight = nn.Parameter((layer.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


@pytest.mark.parametrize("name", slow_but(["swag"], ["bayes-adapter", "laplace, kronecker", "swag", "ibnn"]))
def test_a_quantised_base(name, tmp_path):
    base = model("bert").unload()
    for layer in (module for module in base.modules() if hasattr(module, "query")):
        layer.query, layer.value = Int8Linear(layer.query), Int8Linear(layer.value)
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
    network, data = peft.get_peft_model(base, config).eval(), loader("bert")
    posterior = bayesify.convert(network, METHODS[name])
    numbers = "base_model.model.bert.encoder.layer.0.attention.self.query.base_layer.weight"
    assert numbers in posterior.shared.names
    bayesify.fit(posterior, data, progress=False, accuracy_tolerance=1.0)
    bayesify.save(posterior, tmp_path)
    expected, found = (
        bayesify.predict(one, data, num_draws=2, seed=0).probs for one in (posterior, bayesify.load(tmp_path, network))
    )
    assert torch.equal(expected, found)
    assert posterior.network.get_parameter(numbers).data_ptr() == network.get_parameter(numbers).data_ptr()
