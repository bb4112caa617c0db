"""Predictors without draws as programs: torch's own, and ONNX."""

import shutil

import pytest
import torch
from torch import nn

from bayesify import ABNN, IBNN, SWAG, BayesAdapter, Gaussian, MCDropout, Streamlined, convert, export, predict
from bayesify.laws import InputFactorLaw
from bayesify.layers import Convolution, _gradients
from tests.prediction.linearised.networks import gaussian, randn
from tests.prediction.linearised.networks import transformer as small_transformer
from tests.test_architectures import timm
from tests.torchvision_stub import declare_torchvision_operators

pytestmark = pytest.mark.slow

CLASSES = ["probs", "total", "aleatoric", "epistemic"]


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 3))


def adapted(network, likelihood="classification"):
    posterior = convert(network, BayesAdapter(), likelihood=likelihood)
    with torch.no_grad():
        for _, log_std in posterior.law.log_std.named_parameters():
            log_std.fill_(-2.0)
    return posterior


def mixture(network):
    posterior = convert(network, IBNN(components=2, means_std=0.1, start_std=(0.1, 0.0)))
    assert isinstance(posterior.law, InputFactorLaw)
    return posterior


def dropped(network):
    return convert(nn.Sequential(network[0], nn.Dropout(0.3), *network[1:]), MCDropout())


@pytest.mark.parametrize("make", [adapted, mixture, dropped])
def test_the_program_gives_what_predict_gives(make, tmp_path):
    posterior = make(mlp())
    export(posterior, torch.randn(5, 4), tmp_path / "new" / "it.pt2", variance_scale=2.0)
    program = torch.export.load(tmp_path / "new" / "it.pt2")
    for rows in (1, 7):
        x = torch.randn(rows, 4)
        found = program.module()(x)
        expected = predict(posterior, x, how=Streamlined(engine="moments"), variance_scale=2.0)
        assert list(found) == CLASSES
        for name in CLASSES:
            torch.testing.assert_close(found[name], getattr(expected, name), rtol=1e-5, atol=1e-7)
        assert (found["epistemic"] > 0).all()
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["it.pt2"]


def test_onnx_runtime_gives_what_predict_gives(tmp_path):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    regression = adapted(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), Gaussian(0.5))
    cases = {
        "classes": (adapted(mlp()), 4, CLASSES),
        "regression": (regression, 4, ["mean", "variance", "aleatoric", "epistemic"]),
    }
    for case, (posterior, width, names) in cases.items():
        path = tmp_path / f"{case}.onnx"
        export(posterior, torch.randn(2, width), path)
        session = runtime.InferenceSession(path)
        assert [output.name for output in session.get_outputs()] == names
        for rows in (1, 6):
            x = torch.randn(rows, width)
            expected = predict(posterior, x, how="streamlined")
            found = session.run(None, {"input": x.numpy()})
            for name, value in zip(names, found, strict=True):
                torch.testing.assert_close(torch.from_numpy(value), getattr(expected, name), rtol=1e-4, atol=1e-6)


def test_a_transformer_with_named_inputs(tmp_path):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = small_transformer()

        def forward(self, tokens, shift):
            return self.inner(tokens + shift)

    posterior = gaussian(Named(), std=0.05)
    inputs = {"tokens": randn(4, 5, 8), "shift": randn(4, 1, 1)}
    found = export(posterior, inputs, how=Streamlined(engine="moments")).module()(**inputs)
    expected = predict(posterior, inputs, how=Streamlined(engine="moments"))
    torch.testing.assert_close(found["probs"], expected.probs)
    torch.testing.assert_close(found["epistemic"], expected.epistemic)


def test_a_backward_pass_is_traced_too():
    """Of a convolutional network; three channels and three examples are not taken for each other."""
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, stride=2), nn.ReLU(), nn.Flatten(1)]
    posterior = adapted(nn.Sequential(*layers, nn.Linear(16, 3)))
    program = export(posterior, torch.randn(3, 3, 6, 6))
    for rows in (1, 9):
        x = torch.randn(rows, 3, 6, 6)
        expected = predict(posterior, x, how="streamlined")
        assert "backward" in expected.predictor
        found = program.module()(x)
        for name in CLASSES:
            torch.testing.assert_close(found[name], getattr(expected, name), rtol=1e-5, atol=1e-7)


def test_a_backward_pass_takes_batches_of_every_size(monkeypatch):
    """Derivatives are formed for a few examples at a time, which must not fix how many a program takes."""
    monkeypatch.setattr(_gradients, "CHUNK", 64)
    layers = [
        nn.Conv2d(3, 4, 3, 2, 1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(4, 4, 3, 2, 1, groups=2),
    ]
    layers += [nn.AvgPool2d(2), nn.Flatten(1), nn.Linear(4, 3)]
    torch.manual_seed(0)
    posterior = adapted(nn.Sequential(*layers))
    program = export(posterior, torch.randn(2, 3, 16, 16))
    for rows in (1, 40):
        x = torch.randn(rows, 3, 16, 16)
        expected = predict(posterior, x, how="streamlined")
        assert "backward" in expected.predictor
        found = program.module()(x)
        for name in CLASSES:
            torch.testing.assert_close(found[name], getattr(expected, name), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("dims", "groups"), [(1, 1), (2, 1), (2, 2), (3, 1)])
def test_gradients_of_convolutions_in_a_program_are_torchs(dims, groups):
    operation = Convolution((2,) * dims, (1,) * dims, (1,) * dims, False, (0,) * dims, groups)
    weight, x = randn(4, 6 // groups, *(3,) * dims), randn(5, 1, 6, *(6,) * dims)
    flow = randn(*operation.shared(x, weight).shape)
    of_x, of_weights = operation.each_backward(flow, x, weight.expand(5, *weight.shape), need_x=True)
    torch.testing.assert_close(operation.each_by_patches(flow, x, weight.shape), of_weights)
    torch.testing.assert_close(operation.input_by_transpose(flow[:, 0], x[:, 0], weight), of_x[:, 0])


def test_a_residual_network_of_timm_in_onnx_runtime(tmp_path):
    """Of maps that shrink to one pixel, with max and average pooling: a backward pass as ONNX."""
    for module in ("onnx", "onnxscript"):
        pytest.importorskip(module)
    runtime = pytest.importorskip("onnxruntime")
    declare_torchvision_operators()
    torch.manual_seed(0)
    network = timm("resnet10t", channels=(8, 8, 16, 16))().eval()
    posterior = adapted(network)
    program = export(posterior, torch.randn(2, 3, 32, 32), tmp_path / "it.onnx")
    session = runtime.InferenceSession(tmp_path / "it.onnx")
    for rows in (1, 6):
        x = torch.randn(rows, 3, 32, 32)
        expected = predict(posterior, x, how="streamlined")
        assert "backward" in expected.predictor
        by_torch, by_runtime = program.module()(x), session.run(None, {"input": x.numpy()})
        for name, value in zip(CLASSES, by_runtime, strict=True):
            torch.testing.assert_close(by_torch[name], getattr(expected, name), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(torch.from_numpy(value), getattr(expected, name), rtol=1e-4, atol=1e-5)


def test_derivatives_of_activations_are_written_down():
    """Of every activation to first order, and else of a root, whose nodes may leave its domain."""

    class Root(nn.Module):
        def forward(self, x):
            return (1 + x.abs()).sqrt()

    for activation, first_order in ((nn.Tanh(), True), (Root(), False)):
        torch.manual_seed(0)
        posterior = adapted(nn.Sequential(nn.Linear(4, 6), activation, nn.Linear(6, 3)))
        object.__setattr__(posterior.method, "first_order", first_order)
        program = export(posterior, torch.randn(2, 4), how=Streamlined(engine="moments"))
        x = torch.randn(5, 4)
        found, expected = program.module()(x), predict(posterior, x, how=Streamlined(engine="moments"))
        torch.testing.assert_close(found["epistemic"], expected.epistemic, rtol=1e-4, atol=1e-7)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # inductor's own
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiles_without_a_graph_break(backend):
    if backend == "inductor" and not any(shutil.which(name) for name in ("g++", "clang++", "c++")):
        pytest.skip("no compiler")
    posterior = adapted(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)))
    x = torch.randn(5, 4)
    compiled = torch.compile(export(posterior, x).module(), fullgraph=True, backend=backend)
    with torch.no_grad():
        found = compiled(x)
    expected = predict(posterior, x, how="streamlined")
    torch.testing.assert_close(found["epistemic"], expected.epistemic, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found["probs"], expected.probs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", [BayesAdapter(), IBNN.example(), ABNN.example(), SWAG(rank=2)])
@pytest.mark.filterwarnings("ignore:This posterior has no uncertainty yet")
def test_a_draw_compiles_without_a_graph_break(method):
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(1), nn.Linear(64, 3)]
    torch.manual_seed(0)
    draw = convert(nn.Sequential(*layers).eval(), method).draw(3)
    compiled = torch.compile(draw.network(), fullgraph=True, backend="eager")
    x = torch.randn(2, 3, 6, 6)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), draw(x), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:This posterior has no uncertainty yet")
def test_what_cannot_be_exported_says_what_to_do(tmp_path):
    x = torch.randn(2, 4)
    posterior = adapted(mlp())
    with pytest.raises(ValueError, match="without draws"):
        export(posterior, x, how="sampling")
    with pytest.raises(ValueError, match=r"\.pt2 \(torch.export\) or \.onnx"):
        export(posterior, x, tmp_path / "it.bin")
    with pytest.raises(ValueError, match="holds no rows"):
        export(posterior, x[:0])
    with pytest.raises(ValueError, match="variance_scale"):
        export(posterior, x, variance_scale=-1.0)
    with pytest.raises(ValueError, match="Weights move together here"):
        export(convert(mlp(), SWAG()), x, how=Streamlined(engine="moments"))
    assert list(tmp_path.iterdir()) == []

    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x):
            return self.linear(x.reshape(len(x), 4))

    with pytest.raises(ValueError, match=r"write x.shape\[0\] for len\(x\)"):
        export(adapted(Fixed()), x)


def test_the_mean_network():
    posterior, x = adapted(mlp()), torch.randn(3, 4)
    found = export(posterior, x, how="mean").module()(x)
    expected = predict(posterior, x, how="mean")
    torch.testing.assert_close(found["probs"], expected.probs, rtol=1e-5, atol=1e-6)
    assert (found["epistemic"] == 0).all()
