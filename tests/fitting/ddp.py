"""What each of two processes runs: loops of one's own around DDP, for every method."""

import copy
import hashlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import bayesify
from bayesify import SGLD, Laplace, Learner, Method, Objective, Posterior
from bayesify._core.processes import gather
from bayesify.fitting.processes import add_up
from bayesify.fitting.shards import make_whole
from tests.conformance.cases import CASES, EXAMPLES, Case

ROWS = 8  # of a batch, half of them for each process
SEEDS = 500
TOGETHER = 8  # of them go through DDP; the others are averaged once
CALM = EXAMPLES["residual"]  # normalises each row alone, so that halves of a batch have the gradients of the whole
NOISY = EXAMPLES["mlp"]  # with batch normalisation, whose statistics each process sees otherwise
DIVIDED = {
    "deep-ensemble": bayesify.DeepEnsemble(members=2),
    "bayes-adapter": bayesify.BayesAdapter(),
    "swag": bayesify.SWAG(rank=2, snapshots_per_epoch=3, lr=0.1),
    "laplace": Laplace(structure="kronecker", prior_precision=1.0),
}
DRAWN = [case for case in CASES if case.noisy.trains_draws]
SILENT = [case for case in CASES if case.name != "ivon"]  # which learns from its noise


def work(rank: int, port: int, folder: str) -> None:
    """Train every method in this process, together with the other one, and write down what came out."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    found = {
        "silent": {case.name: outcome(silent(case, slice(rank * 4, rank * 4 + 4), ddp=True)) for case in SILENT},
        "equal": {case.name: _noisy(case, rank) for case in CASES},
        "gradients": {case.name: gradients(case, slice(rank * 4, rank * 4 + 4), 1000 * rank) for case in DRAWN},
        "fewer": _fewer(rank),
        "sharded": {case.name: _sharded(case, rank) for case in CASES},
        "transformer": {name: _transformer(method, rank) for name, method in DIVIDED.items()},
    }
    torch.save(found, Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def batches(example: Any, number: int = 3) -> list[tuple[Tensor, Tensor]]:
    """Return the batches of an epoch."""
    torch.manual_seed(2)
    return [(example.inputs(ROWS), torch.randint(3, (ROWS,))) for _ in range(number)]


def train(posterior: Posterior, data: list[Any], *, ddp: bool, look: Any = lambda: None) -> None:
    """Train for two epochs, as a user would."""
    objective = Objective(posterior, num_data=len(data) * ROWS)
    module = DistributedDataParallel(objective) if ddp else objective
    learner = Learner(objective, epochs=2, steps_per_epoch=len(data))
    for stage in range(len(learner.stages)):
        optimizer = learner.optimizer(stage)
        for _ in range(2):
            for batch in data:
                module(batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                learner.after_step()
                look()
    learner.finish(data)
    look()


# -- without noise ------------------------------------------------------------------------------------------------


def silent(case: Case, part: slice, *, ddp: bool) -> Posterior:
    """Train a method whose noise is zero on a part of each batch."""
    method = case.silent
    if isinstance(method, SGLD):
        method = replace(case.noisy, temperature=0.0)
    if isinstance(method, Laplace):
        method = replace(method, prior_precision=2.0)  # a search ends where it is near enough
    posterior = bayesify.convert(CALM.network(), method).eval()
    train(posterior, [(x[part], y[part]) for x, y in batches(CALM)], ddp=ddp)
    return posterior


def outcome(posterior: Posterior) -> dict[str, Tensor]:
    """Return what a run came to; of a curvature, whose eigenvectors are no numbers, what it says."""
    if isinstance(posterior.method, Laplace):
        inputs = batches(CALM)[0][0]
        found = bayesify.predict(posterior, inputs, how="streamlined")
        evidence = torch.tensor(posterior.law.log_marginal_likelihood())
        return {**dict(posterior.network.named_parameters()), "epistemic": found.epistemic, "evidence": evidence}
    return posterior.state_dict()


# -- with noise ---------------------------------------------------------------------------------------------------


def _noisy(case: Case, rank: int) -> list[bool]:
    """Return for each step, and the end, whether both processes have the same bits, though each has its own noise."""
    found: list[bool] = []
    torch.manual_seed(rank)
    posterior = bayesify.convert(NOISY.network(), case.noisy).train()
    data = [(x[rank * 4 : rank * 4 + 4], y[rank * 4 : rank * 4 + 4]) for x, y in batches(NOISY)]
    torch.manual_seed(100 + rank)

    def look() -> None:
        digest = hashlib.sha1(b"".join(t.numpy().tobytes() for t in posterior.state_dict().values())).digest()
        found.append(len(set(gather(digest))) == 1)

    train(posterior, data, ddp=True, look=look)
    return found


def gradients(case: Case, part: slice, seed: int) -> Tensor:
    """Return the gradients of one step, (SEEDS, D), each of other noise."""
    distributed = torch.distributed.is_initialized()
    posterior = bayesify.convert(_without_dropout(case.noisy), case.noisy).eval()
    objective = Objective(posterior, num_data=ROWS)
    module = DistributedDataParallel(objective) if distributed else objective
    x, y = batches(CALM, 1)[0]

    def gradient(index: int) -> Tensor:
        torch.manual_seed(seed + index)
        posterior.zero_grad()
        module((x[part], y[part])).backward()
        return torch.cat([p.grad.flatten() for p in posterior.parameters() if p.grad is not None])

    if not distributed:
        return torch.stack([gradient(index) for index in range(SEEDS)])
    averaged = torch.stack([gradient(index) for index in range(TOGETHER)])
    with module.no_sync():
        found = torch.stack([gradient(index) for index in range(SEEDS)])
    add_up([found], mean=True)
    torch.testing.assert_close(found[:TOGETHER], averaged, rtol=1e-9, atol=1e-12)
    return found


def _without_dropout(method: Method) -> nn.Module:
    network = CALM.network()
    if method.name != "mc-dropout":
        network.inner[1] = nn.Identity()
    return network


def _fewer(rank: int) -> str:
    posterior = bayesify.convert(nn.Linear(4, 3), bayesify.MAP())
    learner = Learner(Objective(posterior, num_data=20), epochs=2, steps_per_epoch=3 - rank)
    try:
        learner.optimizer()
    except ValueError as error:
        return str(error)
    return ""


def _sharded(case: Case, rank: int) -> str | float:
    """Return the largest difference of a run with `fully_shard` to one with DDP, or the sentence that refuses."""
    data = [(x[rank * 4 : rank * 4 + 4], y[rank * 4 : rank * 4 + 4]) for x, y in batches(CALM)]
    found = []
    for wrap in (fully_shard, DistributedDataParallel):
        posterior = bayesify.convert(_without_dropout(case.noisy), case.noisy).eval()
        objective = Objective(posterior, num_data=24)
        module = wrap(objective)
        try:
            learner = Learner(objective, epochs=1, steps_per_epoch=3)
        except ValueError as error:
            return str(error)
        optimizer = learner.optimizer(0)
        torch.manual_seed(rank)
        for batch in data:
            module(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            learner.after_step()
        if len(learner.stages) > 1:  # the others have not learned
            make_whole(objective)
            posterior.unfinished = False
        else:
            if wrap is fully_shard:
                _require_unfinished(posterior)
            learner.finish(data)
        found.append(_whole(posterior, rank, with_prediction=len(learner.stages) == 1))
    return max((one - other).abs().nan_to_num().max().item() for one, other in zip(*found, strict=True) if len(one))


def _require_unfinished(posterior: Posterior) -> None:
    with pytest.raises(ValueError, match="fully_shard"):
        bayesify.predict(posterior, CALM.inputs(2))


def _whole(posterior: Posterior, rank: int, *, with_prediction: bool) -> list[Tensor]:
    """Return the numbers of a posterior: weights and buffers, which files have too, and a prediction."""
    state = posterior.state_dict()
    assert not any(hasattr(tensor, "full_tensor") for tensor in state.values())
    copy.deepcopy(posterior)
    numbers = [tensor.double().flatten() for tensor in state.values()]
    if with_prediction:
        torch.manual_seed(0)
        found = bayesify.predict(posterior, [batches(CALM)[0]], num_draws=3)
        numbers += [found.probs.flatten(), found.epistemic]
    return numbers


def _transformer(method: Method, rank: int) -> str | float:
    """Return the same for a transformer whose layers are divided one by one, too."""
    data = [(x[rank * 4 : rank * 4 + 4], y[rank * 4 : rank * 4 + 4]) for x, y in batches(EXAMPLES["attention"])]
    found = []
    for divided in (True, False):
        torch.manual_seed(3)
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        network = nn.Sequential(nn.TransformerEncoder(layer, 2), _Pooled(), nn.Linear(8, 3)).double()
        posterior = bayesify.convert(network, method).eval()
        objective = Objective(posterior, num_data=24)
        if divided:
            for inner in posterior.network[0].layers:
                fully_shard(inner)
        module = fully_shard(objective) if divided else DistributedDataParallel(objective)
        learner = Learner(objective, epochs=1, steps_per_epoch=3)
        optimizer = learner.optimizer()
        torch.manual_seed(rank)
        try:
            for batch in learner.batches(data):
                module(batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                learner.after_step()
        except ValueError as error:
            return str(error)
        learner.finish(data)
        prediction = bayesify.predict(posterior, torch.ones(2, 5, 8, dtype=torch.float64))
        found.append([prediction.probs, *posterior.state_dict().values()])
    return max(
        (one.double() - other.double()).abs().nan_to_num().max().item() for one, other in zip(*found, strict=True)
    )


class _Pooled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)
