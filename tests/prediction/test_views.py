"""Views: what the network sees, who sees what, what goes back, and what the views disagree about."""

import pytest
import torch
from scipy import special
from torch import nn

import bayesify
from bayesify import IBNN, BayesAdapter, DeepEnsemble, MCDropout, Streamlined, View, Views
from bayesify._core.random import Key
from bayesify.likelihoods import Bernoulli, Categorical, Gaussian
from bayesify.prediction.views import as_views, dense_dims

F64 = torch.float64
BOTH = Views("identity", "mirror")


class Counted(nn.Module):
    """A small classifier of images that notes how many rows go through it."""

    def __init__(self, classes=3):
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(4 * 9, classes)
        )
        self.rows = 0

    def forward(self, x):
        logits = self.body(x)
        self.rows += len(logits)  # draws of noise in the input of a layer become rows there
        return logits


def images(rows=4):
    return torch.randn(rows, 2, 5, 5, dtype=F64, generator=torch.Generator().manual_seed(5))


def classifier():
    return Counted().double().eval()


# -- transformations ---------------------------------------------------------------------------------------------


def test_steps_are_those_of_their_names():
    x = torch.arange(12.0).view(1, 1, 3, 4)
    assert torch.equal(Views("mirror")[0](x), x.flip(-1))
    assert torch.equal(Views("flip")[0](x), x.flip(-2))
    down = Views("shift(1,0)")[0](x)
    assert torch.equal(down[..., 1:, :], x[..., :-1, :])
    assert torch.equal(down[..., 0, :], x[..., 0, :])  # the border again
    left = Views("shift(0, -2)")[0](x)
    assert torch.equal(left[..., :2], x[..., 2:])
    assert torch.equal(left[..., 2:], x[..., 3:].expand(1, 1, 3, 2))
    assert torch.equal(Views("mirror+shift(1,0)")[0](x), Views("shift(1,0)")[0](x.flip(-1)))


@pytest.mark.parametrize("name", ["identity", "mirror", "flip", "mirror+flip", "shift(1,-2)", "mirror+shift(1,0)+flip"])
def test_maps_come_back_to_where_they_were(name):
    view, x = Views(name)[0], torch.randn(2, 3, 7, 8)
    back = view.undo(view(x), (-2, -1))
    inside = (slice(None), slice(None), slice(2, -2), slice(2, -2))  # what a shift lost at the border is lost
    assert torch.equal(back[inside], x[inside])
    assert torch.equal(view.undo(x, None), x)  # one answer for an image has no place


def test_structured_inputs_have_their_image_moved():
    x, ids = torch.randn(2, 3, 4, 4), torch.arange(2)
    seen = Views("mirror")[0]({"ids": ids, "pixel_values": x})
    assert torch.equal(seen["pixel_values"], x.flip(-1))
    assert seen["ids"] is ids


def test_bad_views_get_a_sentence():
    with pytest.raises(ValueError, match="There is no view 'mirrored'"):
        Views("mirrored")
    with pytest.raises(ValueError, match="at least one view"):
        Views()
    with pytest.raises(TypeError, match="a function of the inputs"):
        Views(3)
    posterior = bayesify.convert(nn.Linear(4, 3), "map")
    with pytest.raises(ValueError, match="is for images"):
        bayesify.predict(posterior, torch.randn(2, 4), views=BOTH)
    posterior = bayesify.convert(classifier(), MCDropout())
    with pytest.raises(ValueError, match="1 draws cannot see 2 views"):
        bayesify.predict(posterior, images(), views=BOTH, num_draws=1)


def test_users_may_give_a_text_or_a_list():
    assert as_views("identity,mirror+shift(0,1)") == Views("identity", "mirror+shift(0,1)")
    assert as_views(["identity", "flip"]) == Views("identity", "flip")
    assert as_views(None, BOTH) is BOTH


# -- who sees what ------------------------------------------------------------------------------------------------


def test_every_function_of_few_sees_every_view():
    network, x = classifier(), images()
    with torch.no_grad():
        logits = torch.stack([network(x), network(x.flip(-1))])
    found = bayesify.predict(bayesify.convert(network, "map"), x, views=BOTH)
    expected = special.softmax(logits.numpy(), axis=-1)
    torch.testing.assert_close(found.probs, torch.from_numpy(expected.mean(0)))
    between = special.entr(expected.mean(0)).sum(-1) - special.entr(expected).sum(-1).mean(0)
    torch.testing.assert_close(found.epistemic, torch.from_numpy(between))
    torch.testing.assert_close(found.view_epistemic, torch.from_numpy(between))
    assert bayesify.predict(bayesify.convert(network, "map"), x).view_epistemic is None


@pytest.mark.parametrize("how", ["sampling", "streamlined"])
def test_members_see_every_view(how):
    posterior = bayesify.convert(classifier(), DeepEnsemble(members=3, start="perturbed", perturb_std=1.0))
    x = images()
    with torch.no_grad():
        each = torch.stack(
            [torch.stack([posterior.evaluate(y, [key])[0] for key in posterior.keys(3, 0)]) for y in (x, x.flip(-1))]
        )
    probs = each.softmax(-1)  # (V, M, B, C)
    found = bayesify.predict(posterior, x, how=how, views=BOTH)
    torch.testing.assert_close(found.probs, probs.mean((0, 1)), rtol=1e-6, atol=1e-8)
    total = special.entr(probs.mean((0, 1)).numpy()).sum(-1)
    of_views = total - special.entr(probs.mean(1).numpy()).sum(-1).mean(0)
    epistemic = total - special.entr(probs.numpy()).sum(-1).mean((0, 1))
    torch.testing.assert_close(found.view_epistemic, torch.from_numpy(of_views), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(found.epistemic, torch.from_numpy(epistemic), rtol=1e-6, atol=1e-8)
    assert bool((found.view_epistemic < found.epistemic).all())


def test_draws_take_turns_within_each_part():
    keys = [Key(0, index, (part,)) for index, part in enumerate([0] * 4 + [1] * 3 + [2])]
    plan = dict(Views("identity", "mirror").plan(keys, finite=False))
    assert sorted(key.index for keys in plan.values() for key in keys) == list(range(8))
    paths = {view: [key.path[0] for key in keys] for view, keys in plan.items()}
    for part, number in ((0, 4), (1, 3)):
        counts = sorted(paths[view].count(part) for view in paths)
        assert counts == [number // 2, number - number // 2]
    assert abs(len(plan[0]) - len(plan[1])) <= 1


def test_no_view_is_left_out():
    keys = [Key(0, index, (part,)) for index, part in enumerate([0, 0, 1, 2])]
    plan = Views("identity", "mirror", "flip", "mirror+flip").plan(keys, finite=False)
    assert [len(some) for _, some in plan] == [1, 1, 1, 1]


def test_draws_on_views_are_the_average_by_hand():
    posterior, x = bayesify.convert(classifier(), MCDropout()), images()
    found = bayesify.predict(posterior, x, views=BOTH, num_draws=5, seed=7)
    keys = posterior.keys(5, 7)
    with torch.no_grad():
        probs = [posterior.evaluate((x, x.flip(-1))[i % 2], [key])[0].softmax(-1) for i, key in enumerate(keys)]
    torch.testing.assert_close(found.probs, torch.stack(probs).mean(0))
    again = bayesify.predict(posterior, x, views=BOTH, num_draws=5, seed=7, chunk_size=2)
    torch.testing.assert_close(found.probs, again.probs)


@pytest.mark.parametrize(
    ("method", "how", "passes"),
    [
        ("map", "sampling", 2),
        ("map", "mean", 2),
        (DeepEnsemble(members=3, start="perturbed"), "sampling", 6),
        (BayesAdapter(start_std=(0.1, 0.1)), "sampling", 8),
        (BayesAdapter(start_std=(0.1, 0.1)), Streamlined(engine="moments"), 2),
        (IBNN(components=2, means_std=0.1), "sampling", 8),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*never:UserWarning", "ignore:.*learned:UserWarning")
def test_views_cost_their_passes_and_no_more(method, how, passes):
    posterior, x = bayesify.convert(classifier(), method), images(6)
    options = {} if passes < 8 else {"num_draws": 8}
    bayesify.predict(posterior, x, views=BOTH, how=how, **options)  # the dry runs
    posterior.network.rows = 0
    bayesify.predict(posterior, x, views=BOTH, how=how, **options)
    assert posterior.network.rows == passes * 6


@pytest.mark.filterwarnings("ignore:.*never:UserWarning", "ignore:.*learned:UserWarning")
@pytest.mark.slow
def test_without_draws_a_view_is_a_component():
    posterior, x = bayesify.convert(classifier(), BayesAdapter(start_std=(0.05, 0.05))), images()
    each = [bayesify.predict(posterior, y, how="streamlined") for y in (x, x.flip(-1))]
    found = bayesify.predict(posterior, x, how="streamlined", views=BOTH)
    mixed = posterior.likelihood.mixture(each, [0.5, 0.5], views=True)
    for name in ("log_probs", "epistemic", "aleatoric", "view_epistemic"):
        torch.testing.assert_close(getattr(found, name), getattr(mixed, name))
    drawn = bayesify.predict(posterior, x, views=BOTH, num_draws=4000)
    torch.testing.assert_close(found.probs, drawn.probs, rtol=0, atol=0.02)


@pytest.mark.filterwarnings("ignore:.*never:UserWarning", "ignore:.*learned:UserWarning")
@pytest.mark.parametrize("directions", [1, 2])
def test_moments_over_views_and_members_are_those_of_a_loop(directions):
    """Mean of means, and mean of variances plus variance of means, over two views of two members with noise."""
    torch.manual_seed(0)
    members = [bayesify.convert(classifier().double(), BayesAdapter(start_std=(0.05, 0.05))) for _ in range(2)]
    with torch.no_grad():
        for parameter in members[1].network.parameters():
            parameter.mul_(1.3)
    posterior, x = bayesify.ensemble(members), images().double()
    posterior.views = BOTH
    how = bayesify.Streamlined(engine="principal", directions=directions)
    found = bayesify.predict(posterior, x, how=how)
    each = [bayesify.predict(one, y, how=how, views="identity") for y in (x, x.flip(-1)) for one in members]
    means, variances, probs = (
        torch.stack([getattr(one, name) for one in each]) for name in ("logits_mean", "logits_variance", "probs")
    )
    exact = {"rtol": 1e-9, "atol": 1e-12}
    torch.testing.assert_close(found.logits_mean, means.mean(0), **exact)
    torch.testing.assert_close(found.logits_variance, variances.mean(0) + means.var(0, correction=0), **exact)
    torch.testing.assert_close(found.probs, probs.mean(0), **exact)
    total = special.entr(probs.mean(0).numpy()).sum(-1)
    within = torch.stack([one.aleatoric for one in each]).mean(0)
    torch.testing.assert_close(found.epistemic, torch.from_numpy(total) - within, **exact)
    of_views = special.entr(probs.view(2, 2, *probs.shape[1:]).mean(1).numpy()).sum(-1).mean(0)
    torch.testing.assert_close(found.view_epistemic, torch.from_numpy(total - of_views), rtol=1e-7, atol=1e-12)
    assert bool((means.var(0).sum(-1) > 1e-6).all())


# -- maps and numbers ---------------------------------------------------------------------------------------------


class Edges(nn.Module):
    """Sees only what is left of a pixel, so that a mirrored image says something else of it."""

    def __init__(self, outputs=2):
        super().__init__()
        self.conv = nn.Conv2d(1, outputs, (1, 3), padding=(0, 1))
        with torch.no_grad():
            self.conv.weight.copy_(torch.tensor([2.0, -1.0, 0.0]).expand(outputs, 1, 1, 3))
            self.conv.weight[0].neg_()

    def forward(self, x):
        return self.conv(x)


def test_a_map_is_mirrored_back():
    network = Edges().double()
    x = torch.randn(3, 1, 4, 6, dtype=F64)
    found = bayesify.predict(bayesify.convert(network, "map"), x, views=BOTH)
    with torch.no_grad():
        maps = torch.stack([network(x), network(x.flip(-1)).flip(-1)])
    torch.testing.assert_close(found.probs, maps.softmax(2).mean(0).movedim(1, -1))
    own = Views("identity", View(lambda x: x.flip(-1), inverse=lambda y: y.flip(-1)))
    torch.testing.assert_close(bayesify.predict(bayesify.convert(network, "map"), x, views=own).probs, found.probs)
    with pytest.raises(ValueError, match="give the view its inverse"):
        bayesify.predict(bayesify.convert(network, "map"), x, views=Views("identity", lambda x: x.flip(-1)))


@pytest.mark.filterwarnings("ignore:.*never:UserWarning", "ignore:.*learned:UserWarning")
@pytest.mark.slow
def test_variances_of_a_map_are_mirrored_back_too():
    posterior = bayesify.convert(Edges().double(), BayesAdapter(start_std=(0.1, 0.1)))
    x = torch.randn(2, 1, 3, 5, dtype=F64)
    how = Streamlined(engine="moments")
    found, drawn = (bayesify.predict(posterior, x, views=BOTH, **o) for o in ({"how": how}, {"num_draws": 6000}))
    torch.testing.assert_close(found.probs, drawn.probs, rtol=0, atol=0.02)
    torch.testing.assert_close(found.logits_variance, drawn.logits_variance, rtol=0.15, atol=1e-3)


def test_where_a_map_has_height_and_width():
    image = torch.zeros(2, 3, 4, 5)
    assert dense_dims(Categorical(), torch.zeros(2, 7, 4, 5), image) == (-2, -1)
    assert dense_dims(Categorical(class_dim=-1), torch.zeros(2, 4, 5, 7), image) == (-3, -2)
    assert dense_dims(Categorical(), torch.zeros(2, 7), image) is None
    assert dense_dims(Categorical(), torch.zeros(2, 9, 7), image) is None  # tokens
    assert dense_dims(Gaussian(1.0), torch.zeros(2, 4, 5), image) == (-2, -1)
    assert dense_dims(Gaussian(1.0), torch.zeros(2, 4, 6), image) is None
    assert dense_dims(Gaussian(1.0), torch.zeros(2, 1, 4, 5), image) == (-2, -1)
    assert dense_dims(Gaussian(1.0), torch.zeros(2, 4, 5, 3), image) == (-3, -2)  # channels last
    assert dense_dims(Bernoulli(), torch.zeros(2, 4, 5, 1), image) == (-3, -2)
    assert dense_dims(Bernoulli(), torch.zeros(2, 8, 10, 3), image) == (-3, -2)  # finer
    assert dense_dims(Gaussian("head"), torch.zeros(2, 4, 5, 2), image) == (-3, -2)
    assert dense_dims(Gaussian("head"), torch.zeros(2, 4, 10), image) == (-2, -1)  # two maps side by side
    assert dense_dims(Gaussian("head"), torch.zeros(2, 10), image) is None


class Heads(nn.Module):
    """Means and log variances of every pixel: in two tensors, or in the last dimension of one."""

    def __init__(self, together):
        super().__init__()
        self.edges, self.together = Edges(2).double(), together

    def forward(self, x):
        mean, log_variance = self.edges(x).unbind(1)
        return torch.stack([mean, log_variance], -1) if self.together else (mean, log_variance)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("own", [False, True])
def test_a_noise_heads_maps_are_mirrored_back_each_on_its_own(together, own):
    network, x = Heads(together), torch.randn(3, 1, 4, 6, dtype=F64)
    posterior = bayesify.convert(network, "map", likelihood="heteroscedastic")
    width = -2 if together else -1
    views = Views("identity", View(lambda x: x.flip(-1), inverse=lambda y: y.flip(width))) if own else BOTH
    found = bayesify.predict(posterior, x, views=views)
    with torch.no_grad():
        maps = torch.stack([network.edges(x), network.edges(x.flip(-1)).flip(-1)])
    torch.testing.assert_close(found.mean, maps[:, :, 0].mean(0))
    torch.testing.assert_close(found.aleatoric, maps[:, :, 1].exp().mean(0))


def test_answers_for_pixels_in_the_last_dimension_are_mirrored_back():
    edges, x = Edges(1).double(), torch.randn(3, 1, 4, 6, dtype=F64)
    last = nn.Sequential(edges, Permuted())
    found = bayesify.predict(bayesify.convert(last, "map", likelihood="binary"), x, views=BOTH)
    with torch.no_grad():
        by_hand = (edges(x).sigmoid() + edges(x.flip(-1)).flip(-1).sigmoid())[:, 0] / 2
    torch.testing.assert_close(found.probs[..., 1], by_hand)


class Permuted(nn.Module):
    def forward(self, x):
        return x.movedim(1, -1)


def test_a_shift_is_taken_back_in_places_of_a_coarser_map():
    pooled = nn.Sequential(nn.Conv2d(1, 3, 1), nn.AvgPool2d(2)).double()
    posterior, x = bayesify.convert(pooled, "map"), torch.randn(2, 1, 8, 8, dtype=F64)
    plain, moved = (bayesify.predict(posterior, x, views=view).probs for view in ("identity", "shift(2,-4)"))
    torch.testing.assert_close(moved[:, :3, 2:], plain[:, :3, 2:])  # the rest was out of the image
    with pytest.raises(ValueError, match="no whole number"):
        bayesify.predict(posterior, x, views="shift(1,0)")


@pytest.mark.filterwarnings("ignore:.*never:UserWarning", "ignore:.*learned:UserWarning")
@pytest.mark.slow
def test_an_inverse_that_changes_numbers_has_draws_alone():
    network = nn.Linear(2, 1, bias=False).double()
    posterior = bayesify.convert(network, BayesAdapter(start_std=(0.5, 0.5)), likelihood=Gaussian(0.1))
    x, views = torch.randn(3, 2, dtype=F64), Views("identity", View(torch.neg, inverse=torch.neg))
    found = bayesify.predict(posterior, x, views=views, num_draws=4000)
    torch.testing.assert_close(found.epistemic, 0.25 * x.square().sum(1), rtol=0.1, atol=0)
    with pytest.raises(ValueError, match="not their places alone"):
        bayesify.predict(posterior, x, views=views, how="streamlined")


def test_the_views_of_numbers_differ_by_a_variance():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 1)).double()
    posterior = bayesify.convert(
        network, DeepEnsemble(members=2, start="perturbed", perturb_std=1.0), likelihood=Gaussian(0.5)
    )
    posterior.likelihood.variance_scale.fill_(1.7)
    x = torch.randn(5, 1, 3, 4, dtype=F64)
    with torch.no_grad():
        each = torch.stack(
            [torch.stack([posterior.evaluate(y, [k])[0, :, 0] for k in posterior.keys(2, 0)]) for y in (x, x.flip(-1))]
        )
    for how in ("sampling", "streamlined"):
        found = bayesify.predict(posterior, x, how=how, views=BOTH)
        torch.testing.assert_close(found.mean, each.mean((0, 1)))
        torch.testing.assert_close(found.epistemic, 1.7 * each.flatten(0, 1).var(0, correction=0))
        torch.testing.assert_close(found.view_epistemic, 1.7 * each.mean(1).var(0, correction=0))


# -- through the house --------------------------------------------------------------------------------------------


def test_calibrated_views_become_the_posteriors_own(tmp_path):
    network, x = classifier(), images(60)
    y = torch.randint(3, (60,), generator=torch.Generator().manual_seed(0))
    posterior = bayesify.convert(network, "map")
    bayesify.calibrate(posterior, [(x, y)], views=BOTH, pooling="log-probs")
    assert posterior.views == BOTH
    found = bayesify.predict(posterior, x)
    assert torch.equal(found.log_probs, bayesify.predict(posterior, x, views=BOTH).log_probs)
    alone = bayesify.predict(posterior, x, views="identity")
    assert not torch.equal(alone.log_probs, found.log_probs)
    bayesify.save(posterior, tmp_path / "kept")
    loaded = bayesify.load(tmp_path / "kept", network)
    assert loaded.views == BOTH
    assert torch.equal(bayesify.predict(loaded, x).log_probs, found.log_probs)
    result = bayesify.evaluate(loaded, [(x, y)], views=BOTH)
    assert result.metrics["nll"] == pytest.approx(-found.log_prob(y).mean().item(), rel=1e-9)


def test_functions_are_in_no_file(tmp_path):
    posterior = bayesify.convert(classifier(), "map")
    posterior.views = Views("identity", lambda x: 2 * x)
    with pytest.raises(ValueError, match="a function among its views"):
        bayesify.save(posterior, tmp_path / "kept")


@pytest.mark.parametrize("how", ["mean", "streamlined"])
@pytest.mark.filterwarnings("ignore:.*never:UserWarning", "ignore:.*learned:UserWarning")
@pytest.mark.slow
def test_a_program_has_its_views(how):
    posterior = bayesify.convert(classifier().body, BayesAdapter(start_std=(0.05, 0.05)))  # nothing that counts rows
    posterior.likelihood.exponent = 0.5
    x = images(6)
    program = bayesify.export(posterior, x, how=how, views=BOTH)
    expected = bayesify.predict(posterior, x, how=how, views=BOTH)
    outputs = program.module()(x)
    for name in ("probs", "total", "epistemic"):
        torch.testing.assert_close(outputs[name], getattr(expected, name), rtol=1e-5, atol=1e-7)


@pytest.mark.filterwarnings("ignore:.*never:UserWarning", "ignore:.*learned:UserWarning")
def test_check_compares_on_the_same_views():
    posterior = bayesify.convert(classifier(), BayesAdapter(start_std=(0.05, 0.05)))
    found = bayesify.check(posterior, [images(16)], views=BOTH, num_draws=400)
    assert found.variance_ratio == pytest.approx(1, abs=0.2)


def test_features_are_averaged_over_views():
    network, x = classifier(), images()
    found = bayesify.predict(bayesify.convert(network, "map"), x, output="features", views=BOTH)
    with torch.no_grad():
        expected = torch.stack([network.body[:4](y) for y in (x, x.flip(-1))]).mean(0)
    torch.testing.assert_close(found.features, expected)
