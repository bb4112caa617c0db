"""The pieces of adversarial distillation against autograd and linear algebra, in float64."""

import pytest
import torch
from torch import nn

from bayesify.laws import make_generator
from bayesify.methods import pca
from bayesify.methods.gan import CLIP, Game, gradient_penalty, make_moments, make_players
from bayesify.methods.pca import reduce_samples

EXACT = {"rtol": 1e-10, "atol": 1e-12}


def critic(columns: int = 30) -> nn.Sequential:
    torch.manual_seed(0)
    made = make_generator(columns, (7, 6, 5), 1).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return made


def naive_penalty(critic: nn.Module, real: torch.Tensor, fake: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    x = (real + mix * (fake - real)).requires_grad_()
    (gradient,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    return ((gradient.norm(dim=1) - 1) ** 2).mean()


def test_the_gram_form_is_the_penalty_with_its_gradients():
    network = critic()
    real, fake = torch.randn(2, 9, 30, dtype=torch.float64)
    mix = torch.rand(9, 1, dtype=torch.float64)
    expected = naive_penalty(network, real, fake, mix)
    gradients = torch.autograd.grad(expected, network.parameters(), allow_unused=True)
    found = gradient_penalty(network, network[0](real), network[0](fake), mix)
    torch.testing.assert_close(found, expected, **EXACT)
    for one, two in zip(torch.autograd.grad(found, network.parameters(), allow_unused=True), gradients, strict=True):
        # The biases' gradients are zero almost everywhere, which autograd may say by None.
        one, two = (torch.zeros(()) if g is None else g for g in (one, two))
        torch.testing.assert_close(one.sum() + 0 * two.sum(), two.sum(), check_dtype=False, **EXACT)
        if one.shape == two.shape:
            torch.testing.assert_close(one, two, check_dtype=False, **EXACT)


def test_a_linear_critic_of_norm_one_has_no_penalty():
    direction = torch.randn(1, 12, dtype=torch.float64)
    first, last = nn.Linear(12, 1).double(), nn.Linear(1, 1).double()
    with torch.no_grad():
        first.weight.copy_(direction / direction.norm())
        last.weight.fill_(1.0)
    network = nn.Sequential(first, last)
    real, fake = torch.randn(2, 4, 12, dtype=torch.float64)
    found = gradient_penalty(network, first(real), first(fake), torch.rand(4, 1, dtype=torch.float64))
    assert found.item() < 1e-20


def test_reduction_keeps_distances_and_critic_gradients():
    torch.manual_seed(1)
    samples = torch.randn(9, 60, dtype=torch.float64) + 3
    found = reduce_samples(samples)
    assert found.coordinates.shape == (9, 8)
    torch.testing.assert_close(found.basis @ found.basis.T, torch.eye(8, dtype=torch.float64), **EXACT)
    torch.testing.assert_close(found.mean + found.scale * found.coordinates @ found.basis, samples, **EXACT)
    assert found.coordinates.square().mean() == pytest.approx(1)
    assert not found.residual_variance.any()
    # A critic on coordinates is one on weights, with gradients of the same length but for the scale.
    network = critic(8)
    first = nn.Linear(60, 7).double()
    with torch.no_grad():
        first.weight.copy_(network[0].weight @ found.basis / found.scale)
        first.bias.copy_(network[0].bias - first.weight @ found.mean)
    whole = nn.Sequential(first, *network[1:])
    x = samples.clone().requires_grad_()
    c = found.coordinates.clone().requires_grad_()
    torch.testing.assert_close(whole(x), network(c), **EXACT)
    (gx,) = torch.autograd.grad(whole(x).sum(), x)
    (gc,) = torch.autograd.grad(network(c).sum(), c)
    torch.testing.assert_close(gx.norm(dim=1) * found.scale, gc.norm(dim=1), **EXACT)


def test_a_smaller_rank_takes_the_axes_of_largest_variance():
    torch.manual_seed(1)
    samples = torch.randn(20, 40, dtype=torch.float64)
    found = reduce_samples(samples, 5)
    back = found.mean + found.scale * found.coordinates @ found.basis
    left = torch.linalg.svdvals(samples - samples.mean(0))[5:]
    torch.testing.assert_close((samples - back).square().sum(), left.square().sum(), **EXACT)
    torch.testing.assert_close(found.residual_variance, (samples - back).var(0), **EXACT)


@pytest.mark.parametrize(("mean", "spread"), [(0.0, 1.0), (1.0, 1e-2), (3.0, 1.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("repeats", [1, 3])
def test_samples_of_deficient_rank_have_no_dead_coordinates(dtype, mean, spread, repeats, monkeypatch):
    """As a generator with five hidden units draws them, and with repeats: five coordinates in either precision."""
    monkeypatch.setattr(pca, "COLUMNS", 300)  # several blocks, and one that is not full
    torch.manual_seed(1)
    factors = torch.randn(32, 5, dtype=dtype), torch.randn(5, 2000, dtype=dtype)
    samples = (mean * torch.randn(2000, dtype=dtype) + spread * factors[0] @ factors[1]).repeat(repeats, 1)
    found = reduce_samples(samples)
    assert found.coordinates.shape == (32 * repeats, 5)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found.basis @ found.basis.T, torch.eye(5, dtype=dtype), rtol=0, atol=30 * eps)
    back = found.mean + found.scale * found.coordinates @ found.basis
    size = samples.abs().max()
    torch.testing.assert_close(back, samples, rtol=0, atol=float(10 * eps * size))
    exact, distances = (
        torch.cdist(x.double(), x.double(), compute_mode="donot_use_mm_for_euclid_dist")
        for x in (samples, found.coordinates * found.scale)
    )
    torch.testing.assert_close(distances, exact, rtol=0, atol=float(20 * eps * (exact.max() + size)))
    assert found.coordinates.square().mean() == pytest.approx(1, abs=1e-5)


def test_full_rank_in_single_precision_is_kept():
    """Sixteen directions whose deviations fall to a thousandth of the first's."""
    torch.manual_seed(1)
    samples = torch.randn(17, 400) * torch.logspace(0, -3, 17)[:, None]
    assert reduce_samples(samples).coordinates.shape == (17, 16)


def test_folding_is_exact():
    torch.manual_seed(1)
    found = reduce_samples(torch.randn(9, 60, dtype=torch.float64))
    last, into = nn.Linear(5, 8).double(), nn.Linear(5, 60).double()
    found.fold(last, into)
    h = torch.randn(3, 5, dtype=torch.float64)
    torch.testing.assert_close(into(h), found.mean + found.scale * last(h) @ found.basis, **EXACT)


def test_duplicates_and_few_samples():
    same = torch.ones(4, 6, dtype=torch.float64)
    found = reduce_samples(same)
    torch.testing.assert_close(found.mean + found.scale * found.coordinates @ found.basis, same, **EXACT)
    with pytest.raises(ValueError, match="At least two samples"):
        reduce_samples(torch.ones(1, 6))


def game(
    kind: str, size: int = 2, dtype: torch.dtype = torch.float64, latent: int = 4, lr: float | None = None
) -> Game:
    random = torch.Generator().manual_seed(0)
    players = make_players(size, latent, (32, 32), torch.zeros(0, dtype=dtype), random)
    return Game(*players, kind=kind, batch=64, lr=lr, random=random)


@pytest.mark.parametrize("kind", ["wgan-gp", "wgan", "gan"])
def test_the_critics_gradient_is_its_losss(kind: str):
    """One critic step by hand, with the same random numbers, from the same weights."""
    one, two = game(kind), game(kind)
    for a, b in zip(one.critic.parameters(), two.critic.parameters(), strict=True):
        assert torch.equal(a, b)
    samples = torch.randn(50, 2, dtype=torch.float64)
    one._critic_step(one.real(samples))
    real = two.real(samples)
    fake = two.fake().detach()
    on_real, on_fake = two.critic(real), two.critic(fake)
    if kind == "gan":
        loss = -on_real.sigmoid().log().mean() - (1 - on_fake.sigmoid()).log().mean()
    else:
        loss = on_fake.mean() - on_real.mean()
    if kind == "wgan-gp":
        mix = torch.rand(64, 1, generator=two.random, dtype=torch.float64)
        loss = loss + 10 * naive_penalty(two.critic, real, fake, mix)
    loss.backward()
    for a, b in zip(one.critic.parameters(), two.critic.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, **EXACT)
        assert kind != "wgan" or a.abs().max() <= CLIP
    assert not torch.equal(one.critic[0].weight, two.critic[0].weight), "the step was taken"


@pytest.mark.parametrize(("kind", "steps"), [("wgan-gp", 400), ("gan", 400)])
@pytest.mark.slow
def test_a_generator_finds_two_modes(kind: str, steps: int):
    """Half of the samples at -1, half at 1; a Gaussian fitted to them would put a third of its mass between."""
    torch.manual_seed(0)
    samples = torch.cat([torch.full((200, 1), -1.0), torch.full((200, 1), 1.0)]) + 0.1 * torch.randn(400, 1)
    # A latent number for a number: with more, a critic in one dimension makes the first steps swing for long.
    players = game(kind, size=1, lr=1e-3, dtype=torch.float32, latent=1 if kind == "wgan-gp" else 4)
    for _ in range(steps):
        players.step(samples)
    players.batch = 4000
    made = players.fake().detach()
    assert 0.3 < (made > 0).float().mean() < 0.7
    assert (made.abs() < 0.5).float().mean() < 0.2
    assert made.abs().mean() == pytest.approx(1, abs=0.25)


def test_generators_have_the_papers_size_and_rank():
    assert sum(p.numel() for p in make_generator(32, (20, 20, 20), 79_510).parameters()) == 1_671_210
    made = make_generator(6, (12, 5), 50).double()(torch.randn(100, 6, dtype=torch.float64))
    assert torch.linalg.matrix_rank(made - made[:1]) <= 5


@pytest.mark.parametrize("kind", ["wgan-gp", "wgan", "gan"])
def test_a_game_goes_on_from_its_modules(kind: str):
    """Two games of three steps on the same modules and moments are one game of six."""
    samples = torch.randn(50, 2, dtype=torch.float64)
    ends = []
    for parts in ((6,), (3, 3)):
        random = torch.Generator().manual_seed(0)
        players = make_players(2, 4, (8,), samples, random)
        moments = make_moments(*players, kind)
        for steps in parts:
            again = Game(*players, kind=kind, batch=16, random=random, moments=moments)
            for _ in range(steps):
                again.step(samples)
        assert moments.as_dict()["critic.0.weight.step"] == (6 if kind == "gan" else 30)
        ends.append(players[0].state_dict())
    for name, tensor in ends[0].items():
        assert torch.equal(tensor, ends[1][name]), name
