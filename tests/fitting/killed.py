"""What each of two processes runs: a fit in which one of them may be killed."""

import os
import signal
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import bayesify
from tests.conformance.cases import EXAMPLES, loader
from tests.processes import set_environment

EXAMPLE, ROWS = EXAMPLES["mlp"], 22  # six batches of four, three for each process


def work(rank: int, port: int, folder: str, killed: int | None) -> None:
    """Fit in this process, together with the other one, and write down what it came to, or the sentence."""
    set_environment(rank, port)
    torch.set_num_threads(1)
    steps = 0

    def die(*_: object) -> None:
        nonlocal steps
        steps += 1
        if steps == 5 and rank == killed:
            os.kill(os.getpid(), signal.SIGKILL)

    register_optimizer_step_post_hook(die)
    posterior = bayesify.convert(EXAMPLE.network(), bayesify.SWAG(rank=2, num_bn_draws=2, lr=0.05))
    own = Path(folder)
    try:
        history = bayesify.fit(
            posterior, loader(EXAMPLE, ROWS), epochs=3, checkpoint=own / "run", checkpoint_steps=1, progress=False,
            accuracy_tolerance=1,
        )  # fmt: skip
    except ConnectionError as error:
        (own / f"{rank}.txt").write_text(str(error))
        os._exit(3)  # nothing is left to say to the other one
    torch.save({"state": posterior.state_dict(), "resumed": history.resumed_from}, own / f"{rank}.pt")
    torch.distributed.destroy_process_group()
