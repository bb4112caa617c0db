"""Half precision by autocast; float64 is what the other tests use."""

import pytest
import torch
from torch.testing import assert_close

import bayesify
from tests.conformance.cases import CLASSES, EXAMPLES, Case, Example, fit, is_random
from tests.conformance.probe import require_bfloat16


def _batch(example: Example, rows: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    x = example.inputs(rows)
    return (x.float() if x.is_floating_point() else x), torch.arange(rows) % CLASSES


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This posterior has no uncertainty yet")
def test_bfloat16_autocast(case: Case, example: Example):
    require_bfloat16(next(name for name, other in EXAMPLES.items() if other is example))
    posterior = bayesify.convert(example.network().float(), case.silent)
    x, labels = _batch(example)
    with torch.no_grad():
        full = posterior.draw(0)(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = posterior.draw(0)(x)
            prediction = bayesify.predict(posterior, x, seed=0)
    # bfloat16 has eight bits: 2^-8 for each of a few layers.
    assert_close(half.float(), full, rtol=0.05, atol=0.05)
    assert_close(prediction.probs, full.softmax(-1), rtol=0.05, atol=0.05)
    assert_close(prediction.probs.sum(-1), torch.ones(6))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = posterior.loss((x, labels), num_data=10).total
    loss.backward()
    assert loss.dtype == torch.float32
    trained = [p for stage in posterior.method.stages(posterior) for group in stage.groups for p in group["params"]]
    assert any(p.grad is not None for p in trained)
    assert all(p.grad.isfinite().all() and p.grad.dtype == torch.float32 for p in trained if p.grad is not None)


@pytest.mark.slow
def test_noise_under_autocast(case: Case, mlp: Example):
    require_bfloat16()
    posterior = bayesify.convert(mlp.network().float(), case.noisy)
    x, labels = _batch(mlp, 12)
    bayesify.fit(posterior, [(x, labels)] * 4, num_data=12, precision="bf16", progress=False, accuracy_tolerance=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        prediction = bayesify.predict(posterior, x, seed=0)
    assert prediction.probs.isfinite().all()
    assert bool((prediction.epistemic > 0).any()) == is_random(posterior)


@pytest.mark.slow
def test_float64_stays_float64(case: Case, example: Example):
    posterior = bayesify.convert(example.network(), case.noisy)
    fit(posterior, example)
    floating = {name: t.dtype for name, t in posterior.state_dict().items() if t.is_floating_point()}
    widened = {name for name, dtype in floating.items() if dtype != torch.float64}
    assert widened <= {"likelihood.temperature"}
    assert bayesify.predict(posterior, example.inputs(2), seed=0).probs.dtype == torch.float64
