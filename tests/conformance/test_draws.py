"""Draws: functions that differ from each other, and each of which is one function."""

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import bayesify
from bayesify import Posterior
from tests.conformance.cases import EXAMPLES, Case, Example, fitted, has_mean, is_random, several_keys

EXACT = {"rtol": 1e-11, "atol": 1e-11}


def _random(case: Case, example: Example) -> Posterior:
    posterior = fitted(case, example)
    if not is_random(posterior):
        pytest.skip("nothing in it is random")
    return posterior


def test_a_draw_is_one_function(case: Case, example: Example):
    posterior = fitted(case, example)
    draw = posterior.draw(3)
    one, two = example.inputs(3), example.inputs(5)
    together = draw(torch.cat([one, two]))
    assert_close(together, torch.cat([draw(one), draw(two)]), **EXACT)
    assert_close(draw(two[2:3]), together[5:6], **EXACT)
    assert torch.equal(draw(one), posterior.draw(3)(one))


def test_draws_differ(case: Case, example: Example):
    posterior = _random(case, example)
    x = example.inputs(4)
    first, second = posterior.keys(2, seed=0)
    outputs = posterior.evaluate(x, [first]), posterior.evaluate(x, [second])
    assert not torch.isclose(*outputs, rtol=1e-6).any()


def test_each_converted_layer_differs_between_draws_by_itself(case: Case, example: Example):
    posterior = _random(case, example)
    x = example.inputs(4)
    first, second = posterior.keys(2, seed=0)
    posterior.evaluate(x, [first])  # a first pass may look at the network with inputs of its own
    with _FixedInputs(posterior) as layers:
        posterior.evaluate(x, [first])
        outputs = dict(layers.outputs)
        posterior.evaluate(x, [first])
        again = dict(layers.outputs)
        posterior.evaluate(x, [second])
        others = dict(layers.outputs)
    assert layers.called, "no converted layer was called"
    for name in layers.called:
        assert torch.equal(outputs[name], again[name]), f"{name}: one draw gave two outputs"
        assert not torch.equal(outputs[name], others[name]), f"{name}: two draws gave one output"


class _FixedInputs:
    """Give each converted layer the inputs of its first call ever again, and keep what it returns."""

    def __init__(self, posterior: Posterior) -> None:
        self.inputs: dict[str, tuple] = {}
        self.outputs: dict[str, Tensor] = {}
        self.handles = []
        names = posterior.conversion.converted
        # What fused kernels read without calling: the projection inside attention.
        inside = {f"{n}.out_proj" for n, m in posterior.network.named_modules() if isinstance(m, nn.MultiheadAttention)}
        self.called = [name for name in names if name and name not in inside]
        for name in self.called:
            module = posterior.network.get_submodule(name)
            self.handles += [
                module.register_forward_pre_hook(self._before(name), with_kwargs=True, prepend=True),
                module.register_forward_hook(self._after(name)),
            ]

    def _before(self, name: str):
        return lambda module, args, kwargs: self.inputs.setdefault(name, (args, kwargs))

    def _after(self, name: str):
        def keep(module: nn.Module, args: tuple, output: Tensor | tuple) -> None:
            self.outputs[name] = (output if isinstance(output, Tensor) else output[0]).clone()

        return keep

    def __enter__(self) -> "_FixedInputs":
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self.handles:
            handle.remove()


def test_whether_there_is_noise_does_not_depend_on_train_and_eval(case: Case):
    # The one network whose own layers do nothing else in training, once its dropout is gone or converted.
    example = EXAMPLES["residual"]
    posterior = _random(case, example)
    for module in posterior.network.modules():
        if type(module) is nn.Dropout:
            module.p = 0.0
    x = example.inputs(4)
    key = posterior.keys(1, seed=0)[0]
    outputs = {}
    for mode in (True, False):
        posterior.train(mode)
        passes = torch.stack([posterior(x) for _ in range(8)])
        assert not torch.equal(passes.amax(0), passes.amin(0)), f"no noise with training={mode}"
        outputs[mode] = posterior.evaluate(x, [key])
        if has_mean(posterior):
            with posterior.mean():
                assert torch.equal(posterior(x), posterior(x)), f"noise in the mean with training={mode}"
    assert torch.equal(outputs[True], outputs[False])


@pytest.mark.slow
def test_predictions_do_not_depend_on_the_chunk_size(case: Case, example: Example):
    posterior = fitted(case, example)
    x = example.inputs(7)
    options = {"num_draws": len(several_keys(posterior, seed=5)), "seed": 5, "keep_samples": True}
    whole = bayesify.predict(posterior, x, **options)
    for chunk_size in (1, 3, 7, 100):
        parts = bayesify.predict(posterior, x, chunk_size=chunk_size, **options)
        for field in ("probs", "aleatoric", "model_variance", "variation_ratio", "logits_mean", "samples"):
            assert_close(getattr(parts, field), getattr(whole, field), **EXACT)
        # A difference of entropies: what is left of 1e-11 of each.
        assert_close(parts.epistemic, whole.epistemic, rtol=0, atol=1e-10)


def test_predictions_repeat_with_the_seed_and_not_without(posterior: Posterior, mlp: Example):
    x = mlp.inputs(6)
    options = {"num_draws": 1}
    one, same = (bayesify.predict(posterior, x, seed=7, **options).probs for _ in range(2))
    assert torch.equal(one, same)
    others = [bayesify.predict(posterior, x, seed=seed, **options).probs for seed in range(8)]
    assert any(not torch.equal(one, other) for other in others) == is_random(posterior)


def test_predictions_average_the_draws(posterior: Posterior, mlp: Example):
    x = mlp.inputs(6)
    prediction = bayesify.predict(posterior, x, seed=2)
    with torch.no_grad():
        outputs = [posterior.evaluate(x, [key])[0] for key in posterior.keys(None, seed=2)]
    assert_close(prediction.probs, torch.stack([output.softmax(-1) for output in outputs]).mean(0), **EXACT)


def test_predicting_leaves_modes_and_generators_alone(posterior: Posterior, mlp: Example):
    posterior.train()
    next(posterior.network.children()).eval()
    modes = [module.training for module in posterior.modules()]
    x = mlp.inputs(5)
    state = torch.get_rng_state()
    values = {name: tensor.clone() for name, tensor in posterior.state_dict().items()}
    bayesify.predict(posterior, x, seed=0)
    assert modes == [module.training for module in posterior.modules()]
    assert torch.equal(state, torch.get_rng_state())
    for name, tensor in posterior.state_dict().items():
        assert torch.equal(tensor, values[name]), name
