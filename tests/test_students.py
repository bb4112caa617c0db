"""One network out of many: what a student is taught, and that it learns it."""

import copy

import pytest
import torch
from scipy.stats import spearmanr
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import (
    Bernoulli,
    DeepEnsemble,
    Gaussian,
    calibrate,
    convert,
    distill,
    ensemble,
    fit,
    load,
    predict,
    save,
)
from bayesify.data import read_digits
from bayesify.laws import Key, Posterior, StudentLaw
from bayesify.likelihoods.softmax_integrals import average_logs
from bayesify.students import Lesson, _class_terms, lesson_of, new_student

EYE = torch.eye(5, dtype=torch.float64)


def random(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def student_of(network, seed=1, *, layer="0", weight=0.3):
    law = StudentLaw(network, layer=layer)
    with torch.no_grad():
        law.head.weight.copy_(weight * random(*law.head.weight.shape, seed=seed))
    return Posterior(network, law).eval()


# -- the integrals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_average_logs_are_those_of_many_draws(classes):
    mean, std = 2 * random(4, classes), random(4, classes, seed=1).abs()
    log_mean, squares = average_logs(mean, std)
    p = (mean + std * random(200_000, 4, classes, seed=2)).softmax(-1)
    assert torch.allclose(log_mean.exp(), p.mean(0), atol=4e-3)
    assert torch.allclose(squares, (p * p.log()).mean(0), atol=4e-3)


@pytest.mark.parametrize("classes", [2, 4])
def test_gradients_of_average_logs_are_those_of_the_integral(classes):
    """The points turn with mean and spread, which the integral does not see: differences agree to the points' error."""
    mean, std = random(3, classes), 0.3 + random(3, classes, seed=1).abs()
    weights = random(2, 3, classes, seed=2)

    def value(m, s):
        return sum((w * part).sum() for w, part in zip(weights, average_logs(m, s), strict=True))

    leaves = [mean.requires_grad_(), std.requires_grad_()]
    gradients = torch.autograd.grad(value(*leaves), leaves)
    step = 1e-4
    for index, gradient in enumerate(gradients):
        for place in ((0, 0), (2, classes - 1)):
            moved = [leaf.detach().clone() for leaf in leaves]
            moved[index][place] += step
            up = value(*moved)
            moved[index][place] -= 2 * step
            assert abs(float((up - value(*moved)) / (2 * step) - gradient[place])) < 5e-3


# -- what is taught ---------------------------------------------------------------------------------------------------


def test_a_lesson_is_the_pooled_prediction_and_the_information_of_each_class():
    teacher = ensemble([nn.Linear(5, 3).double() for _ in range(4)])
    teacher.likelihood.temperature = torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=torch.float64)
    teacher.likelihood.exponent = 0.0
    lesson, prediction = lesson_of(teacher, EYE), predict(teacher, EYE)
    assert torch.equal(lesson.mean, prediction.probs)
    assert torch.allclose(lesson.spread.sum(-1), prediction.epistemic, atol=1e-12)
    temperature = teacher.likelihood.temperature[:, None, None]
    p = (torch.stack([teacher.evaluate(EYE, [Key(0, i, (i,))])[0] for i in range(4)]) / temperature).softmax(-1)
    expected = (p * p.log()).mean(0) - p.mean(0) * p.mean(0).log()
    assert torch.allclose(lesson.spread, expected, atol=1e-12)


def best(lesson):
    """Return the Gaussian logits that a student with all freedom ends at, and the loss there."""
    mean = torch.zeros_like(lesson.mean).requires_grad_()
    log_variance = torch.zeros_like(lesson.mean).requires_grad_()
    optimizer = torch.optim.LBFGS([mean, log_variance], max_iter=300, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = sum(term.sum() for term in _class_terms(mean, log_variance.exp(), lesson).values())
        loss.backward()
        return loss

    optimizer.step(closure)
    return mean.detach(), log_variance.detach().exp(), float(closure().detach())


def test_gaussian_logits_are_found_again():
    mean, std = 1.5 * random(6, 4), 0.3 + random(6, 4, seed=1).abs()
    log_mean, squares = average_logs(mean, std)
    lesson = Lesson(log_mean.exp(), squares - log_mean.exp() * log_mean)
    found, variance, loss = best(lesson)
    assert loss < 1e-6
    assert torch.allclose(found - found.mean(-1, keepdim=True), mean - mean.mean(-1, keepdim=True), atol=0.02)
    assert torch.allclose(variance.sqrt(), std, atol=0.05)


def test_the_prediction_and_information_of_a_dirichlet_are_found():
    """No Gaussian logits are a Dirichlet, but both have a prediction and an information, in closed form here."""
    alpha = torch.tensor([[8.0, 1.0, 1.0], [2.0, 2.0, 2.0], [30.0, 20.0, 1.0]], dtype=torch.float64)
    total = alpha.sum(-1, keepdim=True)
    mean = alpha / total
    squares = mean * (torch.digamma(alpha + 1) - torch.digamma(total + 1))
    found, variance, _ = best(Lesson(mean, squares - mean * mean.log()))
    log_mean, own = average_logs(found, variance.sqrt())
    assert torch.allclose(log_mean.exp(), mean, atol=1e-3)
    information = (squares - mean * mean.log()).sum(-1)
    assert torch.allclose((own - log_mean.exp() * log_mean).sum(-1), information, atol=1e-3)


# -- the law ----------------------------------------------------------------------------------------------------------


def test_a_draw_is_one_function_and_many_have_the_variance():
    student = student_of(nn.Sequential(nn.Linear(5, 3)).double())
    x = random(7, 5, seed=3)
    draw = student.draw(4)
    assert torch.equal(draw(x)[2:], draw(x[2:]))
    noise = (draw(x) - student.network(x)) / student.law.variance(x).sqrt()
    assert torch.allclose(noise, noise[:1].expand_as(noise), atol=1e-10)
    outputs = torch.stack([student.evaluate(x, [Key(0, index)])[0] for index in range(2000)])
    assert torch.allclose(outputs.mean(0), student.network(x), atol=0.05)
    assert torch.allclose(outputs.var(0), student.law.variance(x), rtol=0.15)
    with student.mean():
        assert torch.equal(student(x), student.network(x))
    fresh = student(x[:1].expand(3000, -1)) - student.network(x[:1])
    assert torch.allclose(fresh.var(0), student.law.variance(x[0]), rtol=0.15)


@pytest.mark.slow
def test_one_pass_has_what_many_draws_have(tmp_path):
    plain = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    student = student_of(copy.deepcopy(plain), layer="2")
    x = random(6, 5, seed=3)
    one, many = predict(student, x, how="streamlined"), predict(student, x, num_draws=2000)
    assert torch.allclose(one.probs, many.probs, atol=0.01)
    assert torch.allclose(one.epistemic, many.epistemic, atol=0.01)
    program = bayesify.export(student, x).module()(x)
    assert torch.allclose(program["epistemic"], one.epistemic, atol=1e-9)
    seen = predict(student, x, how="streamlined", views=["identity", lambda t: t.flip(-1)])
    flipped = predict(student, x.flip(-1), how="streamlined")
    assert torch.allclose(seen.probs, (one.probs + flipped.probs) / 2, atol=1e-9)
    student.law.rescale(0.5)
    narrow = predict(student, x, how="streamlined").epistemic
    assert bool((narrow < one.epistemic).all())
    calibrate(student, [(x, x[:, :3].argmax(-1))])
    expected = predict(student, x, how="streamlined")
    save(student, tmp_path)
    again = predict(load(tmp_path, plain), x, how="streamlined")
    assert torch.equal(again.probs, expected.probs)
    assert torch.equal(again.epistemic, expected.epistemic)
    with pytest.raises(ValueError, match=r"'1' is a Tanh"):
        StudentLaw(plain, layer="1")


# -- the student ------------------------------------------------------------------------------------------------------


def taught(teacher, x, y, **options):
    loader = DataLoader(TensorDataset(x, y), batch_size=len(x))
    return distill(teacher, "network", loader=loader, progress=False, accuracy_tolerance=1.0, **options)


@pytest.mark.slow
def test_a_student_with_enough_freedom_has_its_teachers_prediction_and_information():
    torch.manual_seed(0)
    teacher = ensemble([nn.Linear(5, 3).double() for _ in range(6)])
    for part in teacher.law.laws:
        part.own.as_dict()["weight"].data.mul_(3)
    student = taught(teacher, EYE, torch.arange(5) % 3, epochs=300, lr=0.5, weight_decay=0.0, network=_bare(5, 3))
    wanted, found = predict(teacher, EYE), predict(student, EYE, how="streamlined")
    assert torch.allclose(found.probs, wanted.probs, atol=0.01)
    assert torch.allclose(found.epistemic, wanted.epistemic, atol=0.01)
    assert float(wanted.epistemic.max()) > 0.1


def _bare(inputs, outputs):
    return nn.Linear(inputs, outputs).double()


def test_mixed_inputs_are_shares_of_two_and_teach_what_the_teacher_says_of_them():
    torch.manual_seed(0)
    teacher = ensemble([nn.Linear(5, 3).double() for _ in range(3)])
    network, x, y = _bare(5, 3), random(7, 5), torch.arange(7) % 3
    mixing = new_student(teacher, network=network, mix=0.4)
    torch.manual_seed(1)
    found = mixing.method.objective(mixing, x, y, 7)
    torch.manual_seed(1)
    share = torch.distributions.Beta(0.4, 0.4).sample((7,)).double()
    order = torch.randperm(7).tolist()
    mixed = torch.stack([s * x[i] + (1 - s) * x[j] for i, (s, j) in enumerate(zip(share, order, strict=True))])
    still = new_student(teacher, network=network)
    wanted = still.method.objective(still, mixed, y, 7)
    assert torch.allclose(found.total, wanted.total, rtol=1e-12)
    assert not torch.allclose(found.total, still.method.objective(still, x, y, 7).total, rtol=1e-3)


@pytest.mark.slow
def test_a_student_of_numbers_has_mean_and_variance_of_its_teacher():
    torch.manual_seed(0)
    noise = Gaussian(noise_std=0.1)
    teacher = ensemble([nn.Linear(5, 2).double() for _ in range(6)], likelihood=noise)
    student = taught(teacher, EYE, torch.zeros(5, 2, dtype=torch.float64), epochs=400, lr=0.1, weight_decay=0.0)
    wanted, found = predict(teacher, EYE), predict(student, EYE, how="streamlined")
    assert torch.allclose(found.mean, wanted.mean, atol=0.01)
    assert torch.allclose(found.epistemic, wanted.epistemic, rtol=0.05)
    assert torch.allclose(found.aleatoric, wanted.aleatoric)


def test_a_student_learns_where_its_teacher_has_frozen_the_network():
    plain = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    teacher = convert(plain, DeepEnsemble.heads(2, epochs=1), include="2").eval()
    assert not teacher.network[0].weight.requires_grad
    student = taught(teacher, EYE, torch.arange(5) % 3, epochs=2)
    assert not torch.equal(student.network[0].weight, plain[0].weight)


@pytest.mark.parametrize("mix", [0.0, 1.0])
def test_an_interrupted_student_goes_on(tmp_path, mix):
    teacher = ensemble([nn.Linear(5, 3).double() for _ in range(3)])
    y = torch.arange(5) % 3
    whole = taught(teacher, EYE, y, epochs=4, mix=mix)
    taught(teacher, EYE, y, epochs=4, mix=mix, checkpoint=tmp_path)
    again = taught(teacher, EYE, y, epochs=4, mix=mix, checkpoint=tmp_path)
    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in again.state_dict().items())


def test_what_cannot_be_taught_is_refused():
    teacher = ensemble([nn.Linear(5, 3) for _ in range(2)])
    with pytest.raises(ValueError, match="loader=train_loader"):
        distill(teacher, "network")
    with pytest.raises(ValueError, match="this network has none"):
        taught(ensemble([nn.Conv1d(1, 1, 3) for _ in range(2)]), EYE.float(), torch.arange(5))
    with pytest.raises(ValueError, match="for classes"):
        taught(ensemble([nn.Linear(5, 3)], likelihood=Bernoulli()), EYE.float(), torch.arange(5))
    mixing = new_student(ensemble([nn.Embedding(5, 3), nn.Embedding(5, 3)]), network=nn.Linear(5, 3), mix=1.0)
    with pytest.raises(ValueError, match="one tensor of real numbers"):
        mixing.method.objective(mixing, torch.arange(5), torch.arange(5) % 3, 5)
    with pytest.raises(ValueError, match="but it is -1"):
        new_student(teacher, mix=-1)
    doubled = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 3))
    with pytest.raises(ValueError, match="not the network's"):
        taught(ensemble([doubled, doubled]), EYE.float(), torch.arange(5) % 3, epochs=1, layer="0", network=_Twice())


class _Twice(nn.Module):
    """Calls its last layer twice."""

    def __init__(self):
        super().__init__()
        self.add_module("0", nn.Linear(5, 5))

    def forward(self, x):
        return self._modules["0"](self._modules["0"](x))[:, :3]


@pytest.mark.slow
def test_a_student_of_digits_has_most_of_the_gain_and_the_order_of_the_information():
    train, test = read_digits("train"), read_digits("test")
    x, y = test.inputs.flatten(1), test.targets
    loader = DataLoader(TensorDataset(train.inputs.flatten(1), train.targets), 64, shuffle=True)
    plain = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    teacher = convert(plain, DeepEnsemble(members=5, epochs=20))
    fit(teacher, loader, progress=False, accuracy_tolerance=1.0)
    with teacher.member(0):
        alone = predict(teacher, x, how="mean")
    student = distill(teacher, "network", loader=loader, network=teacher.draw(0).network(), epochs=20, progress=False)
    many, own = predict(teacher, x), predict(student, x, how="streamlined")
    one, best_nll, nll = (-float(each.log_prob(y).mean()) for each in (alone, many, own))
    assert nll < (one + best_nll) / 2, (one, best_nll, nll)
    assert spearmanr(many.epistemic, own.epistemic).statistic > 0.85
