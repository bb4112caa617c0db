"""A checkpoint belongs to one run: another is refused with a sentence, and the same always goes on."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import bayesify
from bayesify import APD, MAP, SGLD, SWAG, BayesAdapter, DeepEnsemble, Laplace, MCDropout, Posterior
from bayesify.likelihoods import Categorical, Custom
from tests.marks import slow_product

ROWS = 12


class StopError(Exception):
    """Breaks a run off."""


class Chain(nn.Module):
    """Two layers of one shape, in either order."""

    def __init__(self, *, reverse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.reverse = reverse

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self.b, self.a) if self.reverse else (self.a, self.b)
        return self.head(second(first(x).relu()).relu())


def _network(*, seed: int = 3, width: int = 6, activation: type[nn.Module] = nn.ReLU, p: float = 0.3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, width), nn.BatchNorm1d(width), activation(), nn.Dropout(p), nn.Linear(width, 3)
    )  # fmt: skip


def _data(seed: int = 0, rows: int = ROWS) -> TensorDataset:
    random = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(rows, 4, generator=random), torch.arange(rows) % 3)


def _loader(data: Dataset[Any] | None = None, **options: Any) -> DataLoader[Any]:
    return DataLoader(data or _data(), **{"batch_size": 4, "shuffle": True, **options})


def _start(network: nn.Module | None = None, method: Any = None, **options: Any) -> Posterior:
    return bayesify.convert(network or _network(), method or MAP(lr=0.1), **options)


def _fit(
    folder: Path, posterior: Posterior | None = None, *, stop: int | None = None, loader: Any = None, **options: Any
) -> Posterior:
    """Fit, up to the batch of the given number."""
    posterior = _start() if posterior is None else posterior
    if "likelihood" in options:
        posterior.set_likelihood(options.pop("likelihood"))
    plain, seen = type(posterior).loss, []

    def loss(self: Posterior, *args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        if len(seen) == stop:
            raise StopError
        return plain(self, *args, **kwargs)

    settings = {"epochs": 3, "progress": False, "accuracy_tolerance": 1.0, "checkpoint_steps": 1, **options}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(posterior), "loss", loss)
        bayesify.fit(posterior, _loader() if loader is None else loader, checkpoint=folder, **settings)
    return posterior


def _begin(folder: Path, finished: bool, *args: Any, **options: Any) -> None:
    if finished:
        _fit(folder, *args, **options)
    else:
        with pytest.raises(StopError):
            _fit(folder, *args, stop=5, **options)


def _same(one: nn.Module, other: nn.Module) -> None:
    assert one.state_dict().keys() == other.state_dict().keys()
    for name, tensor in one.state_dict().items():
        if isinstance(tensor, Tensor):
            assert torch.equal(tensor, other.state_dict()[name]), name


both = pytest.mark.parametrize("finished", [True, False], ids=["finished", "unfinished"])

# What a run is begun with and gone on with, each as arguments of `_fit`, and what the refusal says.
OTHERS: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[], dict[str, Any]], str]] = {
    "weights": (
        dict,
        lambda: {"posterior": _start(_network(seed=4))},
        r"'0.weight', '0.bias', '4.weight', '4.bias' have other values than it began with.*torch.manual_seed",
    ),
    "one weight": (
        dict,
        lambda: {"posterior": _start(_changed())},
        "'4.bias' has other values than it began with",
    ),
    "width": (
        dict,
        lambda: {"posterior": _start(_network(width=5))},
        r"modules.0 was 'Linear\(in_features=4, out_features=6.* and is 'Linear\(in_features=4, out_features=5",
    ),
    "activation": (
        dict,
        lambda: {"posterior": _start(_network(activation=nn.Tanh))},
        r"modules.2 was 'ReLU\(\)' and is 'Tanh\(\)'",
    ),
    "dropout": (
        dict,
        lambda: {"posterior": _start(_network(p=0.9))},
        "modules.3 was 'Dropout.p=0.3.* and is 'Dropout.p=0.9",
    ),
    "order of modules": (
        lambda: {"posterior": _start(Chain())},
        lambda: {"posterior": _start(Chain(reverse=True))},
        "computed other outputs from the same weights and inputs",
    ),
    "included modules": (
        lambda: {"posterior": _start(method=BayesAdapter(), include="0")},
        lambda: {"posterior": _start(method=BayesAdapter(), include="4")},
        "conversion.0 was .* and is 'not included'",
    ),
    "frozen": (dict, lambda: {"posterior": _frozen()}, "frozen.network.0.weight was not there and is True"),
    "ignored label": (
        dict,
        lambda: {"likelihood": Categorical(ignore_index=0)},
        "likelihood.ignore_index was -100 and is 0",
    ),
    "likelihood's function": (
        lambda: {"likelihood": Custom(_gauss)},
        lambda: {"likelihood": Custom(_cauchy)},
        "likelihood.function was '_gauss' and is '_cauchy'",
    ),
    "method": (dict, lambda: {"posterior": _start(method=MAP(lr=0.2))}, "method.lr was 0.1 and is 0.2"),
    "learning rate of the optimiser": (
        lambda: {"optimizer": partial(torch.optim.SGD, lr=0.1)},
        lambda: {"optimizer": partial(torch.optim.SGD, lr=0.2)},
        "optimiser.groups.0.lr was 0.1 and is 0.2",
    ),
    "optimizer": (
        dict,
        lambda: {"optimizer": partial(torch.optim.Adam, lr=0.1)},
        "optimiser was None and is not there, optimiser.type was not there and is 'Adam'",
    ),
    "order of the data": (
        dict,
        lambda: {"loader": _loader(shuffle=False)},
        "loader.sampler was 'RandomSampler' and is 'SequentialSampler'",
    ),
    "size of a batch": (
        lambda: {"loader": _loader(batch_size=5)},
        lambda: {"loader": _loader(batch_size=4)},
        "loader.batch_size was 5 and is 4",
    ),
    "data": (dict, lambda: {"loader": _loader(_data(1))}, "loader.examples was '.*' and is '"),
    "part of other data": (
        lambda: {"loader": _loader(Subset(_data(0, 20), range(12)))},
        lambda: {"loader": _loader(Subset(_data(1, 20), range(12)))},
        "loader.examples was '.*' and is '",
    ),
    "list of other batches": (
        lambda: {"loader": list(_loader(shuffle=False)), "num_data": ROWS},
        lambda: {"loader": list(_loader(_data(1), shuffle=False)), "num_data": ROWS},
        "loader.examples was '.*' and is '",
    ),
    "validation data": (
        lambda: {"val_loader": _loader(_data(5))},
        lambda: {"val_loader": _loader(_data(6))},
        "val_loader.examples was '.*' and is '",
    ),
    "OOD data": (
        lambda: {"posterior": _start(method=MCDropout()), "ood_loader": _loader(_data(5))},
        lambda: {"posterior": _start(method=MCDropout())},
        "ood_loader.batches was 3 and is not there",
    ),
}  # fmt: skip


def _changed() -> nn.Module:
    network = _network()
    network[4].bias.data[1] += 1e-6
    return network


def _frozen() -> Posterior:
    posterior = _start()
    posterior.network[0].weight.requires_grad_(False)
    return posterior


def _gauss(output: Tensor, target: Tensor) -> Tensor:
    return -(output[:, 0] - target).square()


def _cauchy(output: Tensor, target: Tensor) -> Tensor:
    return -(1 + (output[:, 0] - target).square()).log()


@pytest.mark.parametrize(("case", "finished"), slow_product(OTHERS, (False, True)))
@pytest.mark.slow
def test_another_run_is_refused_and_left_as_it_is(case: str, finished: bool, tmp_path: Path):
    """A finished folder once gave any network the posterior of the first, and an unfinished one went on with it."""
    first, second, said = OTHERS[case]
    _begin(tmp_path, finished, **first())
    options = second()
    posterior = options.pop("posterior") if "posterior" in options else _start()
    before = copy.deepcopy(posterior)
    content = (tmp_path / "checkpoint.safetensors").read_bytes()
    with pytest.raises(ValueError, match=f"belongs to another run: .*{said}.*begin anew"):
        _fit(tmp_path, posterior, **options)
    _same(posterior.network, before.network)
    assert (tmp_path / "checkpoint.safetensors").read_bytes() == content
    _fit(tmp_path, **first())  # while the run that it belongs to goes on


METHODS = [
    MAP(lr=0.1), MCDropout(), DeepEnsemble(members=2), SWAG(rank=2, num_bn_draws=2), BayesAdapter(), Laplace(),
    SGLD(samples_per_chain=2, chains=2, lr=0.01),
    APD(samples_per_chain=4, hidden=(4,), latent=2, steps=2, lr=0.01, num_bn_draws=2),
]  # fmt: skip


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@pytest.mark.slow
def test_a_finished_folder_never_gives_its_posterior_to_another_network(method: Any, tmp_path: Path):
    _fit(tmp_path, _start(method=method), epochs=1)
    with pytest.raises(ValueError, match="have other values than it began with"):
        _fit(tmp_path, _start(_network(seed=4), method), epochs=1)


@both
def test_a_network_that_is_loaded_anew_goes_on(finished: bool, tmp_path: Path):
    torch.save(_network().state_dict(), tmp_path / "weights.pt")
    expected = _fit(tmp_path / "whole", optimizer=partial(torch.optim.Adam, lr=0.01))
    _begin(tmp_path / "run", finished, optimizer=partial(torch.optim.Adam, lr=0.01))
    network = _network(seed=9)
    network.load_state_dict(torch.load(tmp_path / "weights.pt"))
    _same(_fit(tmp_path / "run", _start(network), optimizer=partial(torch.optim.Adam, lr=0.01)), expected)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@pytest.mark.slow
def test_a_cell_that_is_run_again_goes_on_with_the_posterior_as_it_is(method: Any, tmp_path: Path):
    """In a notebook: the same posterior, whose weights have moved since, after an interrupt and after the end."""
    expected = _fit(tmp_path / "whole", _start(method=method), epochs=1)
    posterior = _start(method=method)
    if method.epochs:
        with pytest.raises(StopError):
            _fit(tmp_path / "run", posterior, stop=3, epochs=1)
    for _ in range(2):
        _same(_fit(tmp_path / "run", posterior, epochs=1), expected)


def test_a_posterior_that_has_moved_begins_another_run(tmp_path: Path):
    """As above, but the folder is new: what is compared later is where that run began."""
    posterior = _fit(tmp_path / "first")
    moved = copy.deepcopy(posterior)
    with pytest.raises(StopError):
        _fit(tmp_path / "second", posterior, stop=5)
    expected = _fit(tmp_path / "whole", copy.deepcopy(moved))
    with pytest.raises(ValueError, match="other values than it began with"):
        _fit(tmp_path / "second")
    _same(_fit(tmp_path / "second", moved), expected)


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Shaken by a generator that nobody seeds, as some libraries' are."""

    def __init__(self) -> None:
        self.data = _data()
        self.random = torch.Generator()
        self.random.seed()

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        x, y = self.data[row]
        return x + torch.randn(x.shape, generator=self.random), y


def _split_anew() -> Subset[Any]:
    return Subset(_data(0, 20), torch.randperm(20)[:ROWS].tolist())


@pytest.mark.parametrize("data", [Augmented, _split_anew])
def test_data_that_are_random_or_split_anew_are_not_looked_at(data: Callable[[], Any], tmp_path: Path):
    with pytest.raises(StopError):
        _fit(tmp_path, stop=5, loader=_loader(data()))
    torch.manual_seed(100)
    _fit(tmp_path, loader=_loader(data()))


class Tokens(nn.Module):
    """Takes names, draws numbers of its own, and refuses inputs that are not sorted."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 3)
        self.kind = kind

    def forward(self, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        if self.kind == "picky" and bool((ids.diff(dim=1) < 0).any()):
            raise ValueError("the ids are not sorted")
        x = (self.embedding(ids) * mask[..., None]).sum(1)
        if self.kind == "random":
            x = nn.functional.dropout(x, 0.5, training=True)
        return {"logits": self.head(x)}


@pytest.mark.parametrize("kind", ["plain", "random", "picky"])
@pytest.mark.slow
def test_networks_that_no_probe_can_recognise_go_on(kind: str, tmp_path: Path):
    ids = torch.randint(7, (8, 5)).sort(dim=1).values
    batches = [{"ids": ids[i : i + 4], "mask": ids[i : i + 4] > 0, "labels": ids[i : i + 4, 0] % 3} for i in (0, 4)]
    options = {"loader": batches, "num_data": 8}
    with pytest.raises(StopError):
        _fit(tmp_path, _start(Tokens(kind)), stop=4, **options)
    expected = _fit(tmp_path / "whole", _start(Tokens(kind)), **options)
    _same(_fit(tmp_path, _start(Tokens(kind)), **options), expected)


class Noted(nn.Linear):
    """Keeps a note in its state that is no tensor."""

    def get_extra_state(self) -> dict[str, str]:
        return {"note": "mine"}

    def set_extra_state(self, state: dict[str, str]) -> None:
        assert state == {"note": "mine"}


def test_states_that_are_no_tensors_are_the_networks_own(tmp_path: Path):
    def start() -> Posterior:
        torch.manual_seed(0)
        return _start(nn.Sequential(Noted(4, 3)))

    options = {"val_loader": _loader(_data(5)), "patience": 2}
    expected = _fit(tmp_path / "whole", start(), **options)
    with pytest.raises(StopError):
        _fit(tmp_path / "run", start(), stop=5, **options)
    _same(_fit(tmp_path / "run", start(), **options), expected)
