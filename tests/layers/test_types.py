"""The table of layer types, and what registering one does."""

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import bayesify
from bayesify import ABNN, IBNN, BayesAdapter, Laplace, MCDropout
from bayesify.laws import norm_kind, register_layer, register_norm
from bayesify.layers import DropoutLayer, LayerType, LinearLayer, NormLayer, layer_type


def fresh(*bases: type[nn.Module]) -> type[nn.Module]:
    """Return a type that nobody has registered."""
    return type("Mine", bases or (nn.Module,), {})


def named(package: str, name: str) -> type[nn.Module]:
    return type(name, (nn.Module,), {"__module__": f"{package}.layers"})


def test_laplace_takes_a_last_layer_that_is_registered_as_linear():
    class Mine(nn.Linear):
        pass

    bayesify.register_type(Mine, like=nn.Linear)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), Mine(5, 3)).double()
    plain = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    plain.load_state_dict(network.state_dict())
    x = torch.randn(12, 4, dtype=torch.float64)
    found = []
    for one in (network, plain):
        posterior = bayesify.convert(one, Laplace(prior_precision=1.0))
        bayesify.fit(posterior, [(x, torch.arange(12) % 3)], num_data=12, progress=False, accuracy_tolerance=1)
        found.append(bayesify.predict(posterior, x, how="streamlined").probs)
    assert torch.equal(*found)


def test_a_subclass_is_not_known():
    assert layer_type(fresh(nn.Linear)) == LayerType()
    assert layer_type(nn.Linear(1, 1)).family == "linear"


@pytest.mark.parametrize(
    ("package", "name", "expected"),
    [
        ("transformers", "Conv1D", LayerType(linear=LinearLayer(-1, 0))),
        ("transformers", "LlamaRMSNorm", LayerType(norm=NormLayer())),
        ("transformers", "T5LayerNorm", LayerType(norm=NormLayer())),
        ("torchvision", "FrozenBatchNorm2d", LayerType(norm=NormLayer(1))),
        ("timm", "Linear", layer_type(nn.Linear)),
        ("timm", "LayerNorm2d", LayerType(norm=NormLayer(1))),
        ("timm", "BatchNormAct2d", LayerType(norm=NormLayer(1, before="drop"))),
        ("timm", "LayerNormAct", LayerType(norm=NormLayer(before="drop"))),
        ("elsewhere", "LlamaRMSNorm", LayerType()),
        ("transformers", "RMSNormal", LayerType()),
    ],
)
def test_types_of_other_packages_are_known_by_name(package: str, name: str, expected: LayerType):
    assert layer_type(named(package, name)) == expected


def test_a_type_may_be_several_things_and_keeps_what_is_known():
    mine = fresh()
    bayesify.register_type(mine, NormLayer(1), LinearLayer(weight_dim=0))
    bayesify.register_type(mine, DropoutLayer())
    assert layer_type(mine) == LayerType(dropout=DropoutLayer(), norm=NormLayer(1), linear=LinearLayer(-1, 0))
    assert layer_type(fresh(mine)) == LayerType()


def test_like_another_type():
    mine, theirs = fresh(nn.Linear), fresh(nn.Conv2d)
    bayesify.register_type(mine, like=nn.Linear)
    bayesify.register_type(theirs, NormLayer(1), like=nn.Conv2d)
    assert layer_type(mine) == layer_type(nn.Linear)
    assert layer_type(theirs).family == "convolution"
    assert layer_type(theirs).norm == NormLayer(1)


@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
def test_a_type_like_another_has_its_curvature_and_its_noise(structure: str):
    mine = fresh(nn.Linear)
    bayesify.register_type(mine, like=nn.Linear)

    def network(kind: type[nn.Module]) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(kind(3, 4), nn.Tanh(), kind(4, 2)).double()

    x, y = torch.randn(6, 3, dtype=torch.float64), torch.arange(6) % 2
    predictions: list[Tensor] = []
    for kind in (nn.Linear, mine):
        posterior = bayesify.convert(network(kind), Laplace(structure=structure, prior_precision=1.0))
        bayesify.fit(posterior, [(x, y)], num_data=6, progress=False, accuracy_tolerance=1)
        predictions.append(bayesify.predict(posterior, x, how="linearised").probs)
        noisy = bayesify.convert(network(kind), BayesAdapter(start_std=(0.1, 0.3), estimator="exemplar"))
        torch.manual_seed(1)
        predictions.append(noisy(x).detach())
    assert_close(predictions[0], predictions[2], rtol=0, atol=0)
    assert_close(predictions[1], predictions[3], rtol=0, atol=0)


def test_sentences():
    mine = fresh()
    with pytest.raises(ValueError, match=r"Say what Mine is: register_type\(Mine, like=nn.LayerNorm\)"):
        bayesify.register_type(mine)
    with pytest.raises(ValueError, match="Nothing is known of ReLU"):
        bayesify.register_type(mine, like=nn.ReLU)
    with pytest.raises(TypeError, match="takes a type of module"):
        bayesify.register_type(nn.Linear(1, 1), like=nn.Linear)


def test_old_names_warn_and_work():
    mine = fresh()
    with pytest.warns(DeprecationWarning, match=r"register_type\(Mine, DropoutLayer\(channel_dim=1, alpha=False\)\)"):
        MCDropout.register_type(mine, channel_dim=1)
    with pytest.warns(DeprecationWarning, match=r"ABNN.register_type .* bayesify.register_type\(Mine, NormLayer\("):
        ABNN.register_type(mine, channel_dim=1, before="act")
    with pytest.warns(DeprecationWarning, match=r"IBNN.register_type .* bayesify.register_type\(Mine, LinearLayer\("):
        IBNN.register_type(mine, dim=1, weight_dim=0)
    assert layer_type(mine) == LayerType(
        dropout=DropoutLayer(1), norm=NormLayer(1, "act"), linear=LinearLayer(1, weight_dim=0)
    )
    with pytest.warns(DeprecationWarning, match="register_norm"):
        register_norm(mine, NormLayer(None))
    with pytest.warns(DeprecationWarning, match="register_layer"):
        register_layer(mine, dim=-1)
    with pytest.warns(DeprecationWarning, match=r"norm_kind\(kind\).*layer_type\(kind\)\.norm"):
        assert norm_kind(mine) == NormLayer()
    with pytest.warns(DeprecationWarning, match=r"bayesify\.laws\.NormKind .*bayesify\.layers\.NormLayer"):
        assert bayesify.laws.NormKind is NormLayer
    assert layer_type(mine).linear == LinearLayer()
