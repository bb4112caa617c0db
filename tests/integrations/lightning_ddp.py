"""What Lightning runs in two processes; it starts the second one itself."""

import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.torchvision_stub import declare_torchvision_operators

declare_torchvision_operators()

import pytorch_lightning as pl  # noqa: E402

import bayesify  # noqa: E402
from bayesify.integrations.lightning import LightningPosterior, PosteriorCallback  # noqa: E402
from tests.fitting.ddp import CALM  # noqa: E402

METHODS = (
    bayesify.SWAG(rank=2, snapshots_per_epoch=2, lr=0.1),
    bayesify.DeepEnsemble(members=2, start="perturbed", lr=0.1),
    bayesify.SGLD(samples_per_chain=3, temperature=0.0, weight_decay=0.0),
    bayesify.Laplace(structure="diagonal", prior_precision=2.0),
)


def run(method: bayesify.Method, folder: Path, *, processes: int = 1) -> dict[str, Any]:
    """Train a method, and return what came out."""
    torch.manual_seed(3)
    network = CALM.network()
    network.inner[1].p = 0.0
    data = TensorDataset(CALM.inputs(24), torch.arange(24) % 3)
    posterior = bayesify.convert(network, method)
    callback = PosteriorCallback(folder)
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = pl.Trainer(
        max_epochs=2, accelerator="cpu", devices=processes, strategy="ddp" if processes > 1 else "auto",
        callbacks=[callback], **dict.fromkeys(off, False),
    )  # fmt: skip
    trainer.fit(LightningPosterior(posterior), datamodule=_InOrder(data, processes))
    state, network = posterior.state_dict(), posterior.network.state_dict()
    return {"state": state, "network": network, "nll": callback.nll, "rank": trainer.global_rank}


class _InOrder(pl.LightningDataModule):
    """Batches of 8 in all processes together, in the order of the data: Lightning's own sampler shuffles."""

    def __init__(self, data: TensorDataset, processes: int) -> None:
        super().__init__()
        self.data, self.processes = data, processes

    def train_dataloader(self) -> DataLoader[Any]:
        order = DistributedSampler(self.data, self.processes, self.trainer.global_rank, shuffle=False)
        return DataLoader(self.data, batch_size=8 // self.processes, sampler=order)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.data, batch_size=6)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for one in METHODS:
        found = run(one, Path(sys.argv[1]) / one.name, processes=2)
        torch.save(found, Path(sys.argv[1]) / f"{one.name}-{found['rank']}.pt")
