"""What each of two processes runs: every method, fitted together."""

from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import bayesify
from tests.conformance.cases import CASES, EXAMPLES, Case, loader
from tests.processes import set_environment

EXAMPLE = EXAMPLES["convolutions"]  # with batch normalisation, whose statistics each process sees otherwise
ROWS = 22  # six batches of four, three for each process, the last one short


def work(rank: int, port: int, folder: str) -> None:
    """Fit every method in this process, together with the other one, and write down what came out."""
    set_environment(rank, port)
    torch.set_num_threads(1)
    found: dict[str, Any] = {case.name: _run(case, rank, Path(folder) / case.name) for case in CASES}
    found["checkpoint"] = _again(rank, Path(folder) / CASES[0].name)
    torch.save(found, Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def _run(case: Case, rank: int, folder: Path) -> dict[str, Any]:
    data = loader(EXAMPLE, ROWS)
    options = _options()
    torch.manual_seed(100 + rank)  # what the caller's generator holds must not matter
    posterior = _convert(case)
    history = bayesify.fit(posterior, data, accuracy_tolerance=1, checkpoint=folder, checkpoint_steps=2, **options)
    untouched = data.sampler.generator is None
    return {
        "state": posterior.state_dict(),
        "history": [(r.stage, r.epoch, r.steps, r.terms, r.val_nll, r.lr) for r in history.epochs],
        "accuracy": (history.accuracy_before, history.accuracy_after),
        "sampler untouched": untouched,
        "resumed": _resume(case, data, folder.with_name(f"{case.name}-broken"), options),
    }


def _convert(case: Case) -> bayesify.Posterior:
    posterior = bayesify.convert(EXAMPLE.network(), case.noisy)
    posterior.default_draws = min(2, posterior.default_draws)  # Laplace tries 150 prior precisions with each of them
    return posterior


def _again(rank: int, folder: Path) -> dict[str, Any]:
    """Give a finished run other networks: in the second process only, which takes the first one's, and in both."""
    found: dict[str, Any] = {}
    for name, others in (("one other", (1,)), ("both others", (0, 1))):
        network = EXAMPLE.network()
        if rank in others:
            with torch.no_grad():
                next(network.parameters()).add_(1)
        posterior = bayesify.convert(network, CASES[0].noisy)
        try:
            bayesify.fit(posterior, loader(EXAMPLE, ROWS), accuracy_tolerance=1, checkpoint=folder, **_options())
            found[name] = posterior.state_dict()
        except ValueError as error:
            found[name] = str(error)
    return found


def _options() -> dict[str, Any]:
    return {"val_loader": loader(EXAMPLE, 10), "epochs": 2, "patience": 2, "progress": False}


def _resume(case: Case, data: Any, folder: Path, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Break the run off in its second epoch, in each process, and go on; return the state at the end."""
    steps = 0

    def break_off(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == 6:
            raise KeyboardInterrupt

    handle = register_optimizer_step_post_hook(break_off)
    try:
        posterior = _convert(case)
        bayesify.fit(posterior, data, accuracy_tolerance=1, checkpoint=folder, checkpoint_steps=2, **options)
    except KeyboardInterrupt:
        pass
    else:
        raise AssertionError("the run was to be broken off")
    finally:
        handle.remove()
    posterior = _convert(case)
    history = bayesify.fit(posterior, data, accuracy_tolerance=1, checkpoint=folder, checkpoint_steps=2, **options)
    assert history.resumed_from is not None
    return posterior.state_dict()
