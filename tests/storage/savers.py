"""Processes that save to and load from one folder; forked from one that has imported everything."""

import torch
from torch import nn

import bayesify
from bayesify import MCDropout


def plain():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5), nn.Linear(3, 2)).eval()


def tagged(tag):
    """Return a posterior that says everywhere which one it is."""
    posterior = bayesify.convert(plain(), MCDropout())
    posterior.default_draws = tag
    with torch.no_grad():
        for tensor in posterior.state_dict().values():
            tensor.fill_(tag)
    return posterior


def read_tag(folder):
    """Load a posterior and return which one it is; raise where it is a mixture of several."""
    posterior = bayesify.load(folder, plain())
    tags = {float(n) for tensor in posterior.state_dict().values() for n in tensor.reshape(-1)}
    assert tags == {posterior.default_draws}, tags
    return posterior.default_draws


def save_all(folder, tags):
    torch.set_num_threads(1)
    for tag in tags:
        bayesify.save(tagged(tag), folder)


def read_often(folder, times):
    torch.set_num_threads(1)
    return [read_tag(folder) for _ in range(times)]


def save_for_ever(folder, started):
    torch.set_num_threads(1)
    posteriors = [tagged(tag) for tag in range(1, 5)]
    started.send(None)
    while True:
        for posterior in posteriors:
            bayesify.save(posterior, folder)
