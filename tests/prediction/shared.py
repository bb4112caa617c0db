"""What each of two processes runs: predictions that they share, of loaders of every kind."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
    WeightedRandomSampler,
)

import bayesify
from bayesify import MAP, BayesAdapter, DeepEnsemble, Laplace, Learner, MCDropout, Objective, Posterior, Views
from tests.processes import set_environment

ROWS, BATCH = 23, 4  # six batches, the last one short: three for each process; of seven one has four
METHODS = {
    "dropout": MCDropout(),
    "adapter": BayesAdapter(start_std=(0.2, 0.2)),
    "ensemble": DeepEnsemble(members=2, start="perturbed"),
}


def data(rows: int = ROWS) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, (x[:, :3] + torch.randn(rows, 3, generator=generator)).argmax(1))


class Stream(IterableDataset[Any]):
    """Examples in an order that torch's global generator gives."""

    def __iter__(self) -> Iterator[Any]:
        return (data()[index] for index in torch.randperm(ROWS).tolist())


class Broken(Dataset[Any]):
    """Fails at its last example, which is the second process's."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, row: int) -> Any:
        if row == 3:
            raise KeyError("the file is gone")
        return data()[row]


class Short(list[Any]):
    """Announces more batches than it has."""

    def __len__(self) -> int:
        return 3


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)).double()


def posterior(name: str = "dropout") -> Posterior:
    return bayesify.convert(network(), METHODS[name])


LOADERS: dict[str, Callable[[], Any]] = {
    "in order": lambda: DataLoader(data(), BATCH),
    "seven batches": lambda: DataLoader(data(27), BATCH),
    "shuffled": lambda: DataLoader(data(), BATCH, shuffle=True),
    "own generator": lambda: DataLoader(data(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(5)),
    "weighted": lambda: DataLoader(data(), BATCH, sampler=WeightedRandomSampler(torch.arange(1.0, ROWS + 1), ROWS)),
    "drop last": lambda: DataLoader(data(), BATCH, drop_last=True),
    "batches of the sampler": lambda: DataLoader(data(), None, sampler=BatchSampler(range(ROWS), BATCH, False)),
    "stream": lambda: DataLoader(Stream(), BATCH),
    "list": lambda: list(DataLoader(data(), BATCH)),
    "generator": lambda: (batch for batch in DataLoader(data(), BATCH)),
    "one batch": lambda: [data()[:]],
}
DIVIDED = ["distributed sampler", "accelerate", "accelerate's stream"]  # equal to "in order"


def divided() -> dict[str, Any]:
    """Return loaders of which this process has a part already."""
    from accelerate import Accelerator

    examples = [data()[row] for row in range(ROWS)]
    accelerator = Accelerator(cpu=True)
    sampler: DistributedSampler[Any] = DistributedSampler(data(), shuffle=False)
    stream = DataLoader(_Ordered(examples), BATCH)
    loaders = [DataLoader(data(), BATCH, sampler=sampler), *accelerator.prepare(DataLoader(data(), BATCH), stream)]
    return dict(zip(DIVIDED, loaders, strict=True))


class _Ordered(IterableDataset[Any]):
    def __init__(self, examples: list[Any]) -> None:
        self.examples = examples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.examples)


def measured(loader: Any, name: str = "dropout", **options: Any) -> dict[str, Tensor]:
    """Return what an evaluation says, and what a prediction of the same loader does."""
    torch.manual_seed(77)
    result = bayesify.evaluate(posterior(name), loader, num_draws=3, **options)
    found = {field: getattr(result.prediction, field) for field in ("probs", "epistemic")}
    return {**found, "targets": result.targets, "metrics": torch.tensor(list(result.metrics.values()))}


def chosen() -> dict[str, Any]:
    """Return the numbers of what goes by validation data, and a regression's."""
    loader, found = LOADERS["in order"](), {}
    calibrated = bayesify.calibrate(posterior("ensemble"), loader)
    found["temperature"] = calibrated.likelihood.temperature.detach()
    widened = bayesify.widen(posterior("adapter"), loader, num_draws=4)
    found["widen"] = torch.tensor([(one.factor, one.nll, one.error) for one in widened.widening.trials])
    best = bayesify.choose(network(), loader, passes=2, verbose=False)
    found["choose"] = torch.tensor([one.nll for one in best.choice.candidates])
    found["chosen"] = best.choice.chosen
    numbers = TensorDataset(data().tensors[0], data().tensors[0][:, 0])
    regression = bayesify.convert(network()[:1], Laplace(prior_precision=1.0), likelihood="regression")
    with bayesify.one_process():
        bayesify.fit(regression, [(x, x[:, :1].expand(-1, 8)) for x, _ in loader], num_data=ROWS, progress=False)
    seen = DataLoader(numbers, 5)
    prediction = bayesify.predict(regression, seen, how="streamlined")
    found["regression"] = torch.stack([prediction.mean, prediction.variance])
    more = TensorDataset(data().tensors[0], data().tensors[0][:, :1].expand(-1, 8))
    bayesify.update(regression, DataLoader(more, 5), progress=False)  # in every process, of all data
    found["updated"] = torch.cat([regression.network[0].weight.detach().flatten(), regression.law.seen[None]])
    found["views"] = measured(loader, views=Views("identity", lambda x: -x))["probs"]
    found["kept"] = bayesify.predict(posterior(), loader, num_draws=2, keep_samples=True).samples
    return found


def work(rank: int, port: int, folder: str) -> None:
    """Predict in this process, together with the other one, and write down what came out."""
    set_environment(rank, port)
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    found: dict[str, Any] = {name: measured(make()) for name, make in LOADERS.items()}
    found |= {name: measured(loader) for name, loader in divided().items()}
    found |= {f"method {name}": measured(LOADERS["in order"](), name) for name in METHODS}
    found["chosen"] = chosen()
    x, y = data()[:]
    found["tensor"] = len(bayesify.predict(posterior(), x[rank:]))  # is each process's own
    counted = bayesify.convert(network(), MAP())
    passes: list[int] = []
    counted.network.register_forward_hook(lambda module, args, output: passes.append(len(args[0])))
    bayesify.predict(counted, LOADERS["in order"]())
    found["passes"] = passes
    seeds = bayesify.predict(posterior(), LOADERS["list"](), seed=None).probs
    found["seedless"] = seeds
    found["other data"] = _refused(lambda: bayesify.predict(posterior(), [(x + rank, y)]))
    found["fewer"] = _refused(lambda: bayesify.predict(posterior(), [(x, y)] * (1 + rank)))
    found["broken"] = _refused(lambda: bayesify.predict(posterior(), DataLoader(Broken(), 2)))
    found["other weights"] = _refused(lambda: bayesify.predict(_moved(rank), [(x, y)]))
    found["short fit"] = _refused(lambda: bayesify.fit(posterior(), Short([(x, y)] * (3 - rank)), **_SHORT))
    found["short loop"] = _refused(lambda: _loop([(x, y)] * (3 - rank)))
    if rank == 0:
        with bayesify.one_process():
            found["alone"] = len(bayesify.predict(posterior(), [(x, y)]))
    torch.distributed.barrier()
    torch.save(found, Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()


_SHORT: dict[str, Any] = {"num_data": ROWS, "epochs": 1, "progress": False, "accuracy_tolerance": 1}


def _moved(rank: int) -> Posterior:
    moved = network()
    with torch.no_grad():
        moved[0].weight.add_(0.1 * rank)
    return bayesify.convert(moved, MAP())


def _loop(batches: list[Any]) -> None:
    objective = Objective(posterior(), num_data=ROWS)
    module = nn.parallel.DistributedDataParallel(objective)
    learner = Learner(objective, epochs=1, steps_per_epoch=3)
    optimizer = learner.optimizer()
    for batch in learner.batches(batches):
        module(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        learner.after_step()


def _refused(function: Callable[[], Any]) -> str:
    try:
        function()
    except (ValueError, RuntimeError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"
