"""convert: what becomes random, what does not, and that the network is left alone."""

import copy
import re

import pytest
import torch
from torch import nn

import bayesify
from bayesify import MAP, SWAG, DeepEnsemble, MCDropout, convert
from bayesify.laws import Key, Pass
from bayesify.layers import DropoutLayer
from tests.laws.networks import METHODS, configurations, spread


@pytest.fixture(params=sorted(configurations()))
def method(request):
    return configurations()[request.param]


def network():
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3)),
        nn.Linear(8, 3),
    )  # fmt: skip


# -- what is selected ---------------------------------------------------------------------------------------------


class MyDropout(nn.Dropout):
    pass


def test_types_are_exact():
    with pytest.raises(ValueError, match=r"found nothing to convert") as error:
        convert(nn.Sequential(nn.Linear(2, 2), MyDropout(0.5)), MCDropout())
    assert re.search(r"(?m)^1 +MyDropout ", str(error.value))
    assert "MyDropout is not registered; add it with bayesify.register_type" in str(error.value)

    class MyLinear(nn.Linear):
        pass

    both = nn.Sequential(nn.Linear(4, 4), MyLinear(4, 4))
    assert convert(both, MCDropout(p=0.1, insert_before="linear")).conversion.converted == ("0",)
    assert convert(both, SWAG(), include=nn.Linear).conversion.converted == ("0",)


def test_a_registered_type_is_converted():
    class Mine(nn.Dropout):
        pass

    bayesify.register_type(Mine, DropoutLayer(channel_dim=1))
    posterior = convert(nn.Sequential(Mine(0.5)), MCDropout())
    out = posterior(torch.ones(2, 64, 3))
    assert torch.equal(out, out[..., :1].expand_as(out))


@pytest.mark.parametrize(
    ("options", "converted"),
    [
        ({}, ("3", "4.1")),
        ({"include": "3"}, ("3",)),
        ({"include": "4"}, ("4.1",)),  # with what is inside
        ({"include": "4.*"}, ("4.1",)),
        ({"include": ["3", "4.?"]}, ("3", "4.1")),
        ({"exclude": "4"}, ("3",)),
        ({"include": nn.Dropout}, ("3", "4.1")),
        ({"include": nn.Dropout, "exclude": "3"}, ("4.1",)),
        ({"include": ["3", "4"], "exclude": ["4.1"]}, ("3",)),
    ],
)
def test_include_and_exclude_by_name_and_type(options, converted):
    assert convert(network(), MCDropout(), **options).conversion.converted == converted


@pytest.mark.parametrize(
    ("options", "converted"),
    [
        ({"include": "5"}, ("5",)),
        ({"include": nn.Linear}, ("0", "4.0", "5")),
        ({"exclude": nn.BatchNorm1d}, ("0", "4.0", "5")),
        ({"exclude": ["0", "4"]}, ("1", "5")),
    ],
)
@pytest.mark.parametrize("kind", [SWAG, DeepEnsemble])
def test_include_and_exclude_of_parameters(kind, options, converted):
    posterior = convert(network(), kind(), **options)
    assert posterior.conversion.converted == converted
    placed = posterior.patch(Pass("draw", posterior.keys(1, 0)[:1])).tensors
    random = {name.rpartition(".")[0] for name in placed if "running" not in name and "num_b" not in name}
    assert random == set(converted)


@pytest.mark.parametrize("word", ["include", "exclude"])
@pytest.mark.parametrize("pattern", ["layer9", "4.9", nn.Conv2d])
def test_a_pattern_that_matches_nothing_lists_what_there_is(word, pattern, method):
    with pytest.raises(ValueError, match=rf"{word}=.* matches no module. The network has: 0 \(Linear\), 1 \(Batch"):
        convert(network(), method, **{word: ["0", pattern]})


def test_a_pattern_that_is_neither_name_nor_type():
    with pytest.raises(TypeError, match="include takes patterns of names and module types, but 3 is neither"):
        convert(network(), MCDropout(), include=[3])


def test_nothing_to_convert_shows_a_module_of_each_kind():
    deep = nn.Sequential(*[nn.Linear(2, 2) for _ in range(30)], nn.LayerNorm(2))
    with pytest.raises(ValueError, match="found nothing to convert") as error:
        convert(deep, MCDropout())
    head, _, *rows, last = str(error.value).splitlines()
    assert head.endswith("The network has:")
    assert [row.split()[:2] for row in rows] == [["0", "Linear"], ["30", "LayerNorm"]]
    assert last == "and 29 more like these"


def test_nothing_to_convert_says_what_there_was():
    with pytest.raises(ValueError, match=r"MCDropout found nothing to convert.*insert_before='linear'"):
        convert(nn.Linear(2, 2), MCDropout())
    for kind in (SWAG, DeepEnsemble):
        with pytest.raises(ValueError, match="found nothing to convert: it needs parameters that are not frozen"):
            convert(nn.Sequential(nn.ReLU()), kind())
        with pytest.raises(ValueError, match=r"(?s)found nothing.*frozen \(requires_grad is False\)"):
            convert(nn.Linear(2, 2).requires_grad_(False), kind())


def test_what_is_not_a_network():
    with pytest.raises(TypeError, match=r"needs a torch.nn.Module, but got a dict"):
        convert({}, MAP())
    with pytest.raises(TypeError, match="a posterior already"):
        convert(convert(nn.Linear(2, 2), MAP()), MAP())
    with pytest.raises(ValueError, match=r"There is no method 'swagg'.*'swag'"):
        convert(nn.Linear(2, 2), "swagg")


def test_frozen_parameters_stay_deterministic(method):
    plain = network()
    plain[0].requires_grad_(False)
    plain[5].bias.requires_grad_(False)
    posterior = spread(convert(plain, method))
    if method.name in ("swag", "deep-ensemble"):
        row = next(row for row in posterior.conversion.rows if row.name == "0")
        assert (row.converted, row.reason) == (False, "frozen (requires_grad is False)")
        placed = posterior.patch(Pass("draw", (posterior.keys(1, 0)[0],))).tensors
        assert {"0.weight", "0.bias", "5.bias"}.isdisjoint(placed)
        assert "5.weight" in placed


def test_the_table():
    table = convert(network(), MCDropout(), exclude="4").conversion
    assert [(row.name, row.type, row.parameters, row.converted, row.reason) for row in table.rows] == [
        ("0", "Linear", 40, False, "not a dropout layer"),
        ("1", "BatchNorm1d", 16, False, "not a dropout layer"),
        ("3", "Dropout", 0, True, "masks with p=0.2"),
        ("4.0", "Linear", 72, False, "excluded by '4'"),
        ("4.1", "Dropout", 0, False, "excluded by '4'"),
        ("5", "Linear", 27, False, "not a dropout layer"),
    ]
    assert str(table).splitlines()[3] == "3       Dropout      0           yes     masks with p=0.2"


# -- what is shared -----------------------------------------------------------------------------------------------


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = self.first
        self.dropout = nn.Dropout(0.5)
        self.again = self.dropout
        self.norm = nn.LayerNorm(4)
        self.other_norm = self.norm
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.again(self.other_norm(self.second(self.dropout(self.norm(self.first(x)))))))


def test_shared_modules_stay_shared(method):
    posterior = spread(convert(Shared().eval(), method))
    assert posterior.network.first is posterior.network.second
    assert posterior.network.dropout is posterior.network.again
    assert posterior.network.norm is posterior.network.other_norm
    posterior.draw(0)(torch.randn(2, 4))


@pytest.mark.parametrize("name", ["first", "second"])
def test_a_shared_module_goes_by_any_of_its_names(name):
    for kind in (SWAG(), DeepEnsemble(), MCDropout(p=0.5, insert_before="linear")):
        assert convert(Shared(), kind, include=name).conversion.converted == ("first",)
        assert "first" not in convert(Shared(), kind, exclude=name).conversion.converted
    other = "dropout" if name == "first" else "again"
    assert convert(Shared(), MCDropout(), include=other).conversion.converted == ("dropout",)


class Tied(nn.Module):
    """A language model's output projection: the embedding's weight, owned twice."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.body(self.embedding(tokens)).mean(1))


@pytest.mark.parametrize("include", [None, "head", "embedding"])
@pytest.mark.parametrize("name", ["swag", "deep-ensemble"])
def test_tied_weights_stay_tied(name, include):
    posterior = spread(convert(Tied().eval(), METHODS[name], include=include))
    assert posterior.network.head.weight is posterior.network.embedding.weight
    key = posterior.keys(1, 0)[0]
    with posterior.drawn(key):
        tensors = posterior.patch(posterior.present()).tensors
        tied = [tensor for tensor_name, tensor in tensors.items() if tensor.shape == (5, 4)]
        assert len(tied) == 1
        tokens = torch.tensor([[0, 1], [2, 4]])
        naive = copy.deepcopy(posterior.network)
        with torch.no_grad():
            naive.embedding.weight.copy_(tied[0])
            if include is None:
                naive.body.load_state_dict({key: tensors[f"body.{key}"] for key in ("weight", "bias")})
        torch.testing.assert_close(posterior(tokens), naive(tokens))
    if include == "head":
        row = next(row for row in posterior.conversion.rows if row.name == "embedding")
        assert row.reason == "not included, but shares 'head.weight', which is random"


def test_a_tied_weight_cannot_be_excluded_by_half():
    with pytest.raises(ValueError, match=r"'head' is excluded by 'head', but it shares 'embedding.weight'"):
        convert(Tied(), SWAG(), exclude="head")
    assert convert(Tied(), SWAG(), exclude=["head", "embedding"]).conversion.converted == ("body",)


# -- what is left alone -------------------------------------------------------------------------------------------


def test_the_network_is_untouched(method):
    plain = network().train()
    plain[1].eval()
    plain[0].weight.requires_grad_(False)
    plain.note = object.__new__(object)
    state = {name: (tensor, tensor.clone()) for name, tensor in plain.state_dict(keep_vars=True).items()}
    modules = dict(plain.named_modules())
    modes = {name: module.training for name, module in modules.items()}
    generator = torch.get_rng_state()

    posterior = convert(plain, method)
    assert torch.equal(torch.get_rng_state(), generator)
    posterior.eval()(torch.randn(3, 4))
    posterior.train().loss((torch.randn(3, 4), torch.tensor([0, 1, 2])), num_data=3).total.backward()

    assert dict(plain.named_modules()) == modules
    for name, tensor in plain.state_dict(keep_vars=True).items():
        assert tensor is state[name][0]
        assert torch.equal(tensor, state[name][1])
        assert tensor.grad is None
    assert {name: module.training for name, module in plain.named_modules()} == modes
    assert all(not module._forward_pre_hooks for module in plain.modules())
    shared = {t.data_ptr() for t in posterior.state_dict().values() if t.numel()}
    own = {name: t.data_ptr() for name, t in plain.state_dict().items() if t.numel()}
    assert {name for name, place in own.items() if place in shared} == {"0.weight"}, "what is frozen, and no more"
    alone = {t.data_ptr() for t in convert(plain, method, share=False).state_dict().values() if t.numel()}
    assert alone.isdisjoint(own.values())


def test_each_layer_keeps_its_own_mode(method):
    plain = network().train()
    plain[1].eval()
    posterior = convert(plain, method)
    assert posterior.training
    assert posterior.network.training
    assert not posterior.network[1].training


class WithExtraState(nn.Linear):
    def get_extra_state(self):
        return {"anything": 1}

    def set_extra_state(self, state):
        assert state == {"anything": 1}


def test_extra_state_is_no_obstacle(method):
    x = torch.randn(3, 4)
    plain = nn.Sequential(WithExtraState(4, 8), nn.LayerNorm(8), nn.Dropout(0.5), nn.Linear(8, 3)).eval()
    convert(plain, method)(x)


def test_the_key_names_the_draw():
    posterior = convert(network().eval(), MCDropout())
    x = torch.randn(3, 4)
    with posterior.drawn(Key(0)):
        assert torch.equal(posterior(x), posterior.draw(0)(x))
