import pytest
import torch
from safetensors.torch import save_file
from torch.utils.data import DataLoader

from bayesify import MAP, convert, fit
from bayesify.data import read_digits
from tests.cli.nets import make_network


@pytest.fixture(scope="session")
def network():
    """A network that knows digits well."""
    torch.manual_seed(0)
    posterior = convert(make_network(), MAP(lr=0.1, epochs=15))
    fit(posterior, DataLoader(read_digits("train"), batch_size=64, shuffle=True), progress=False)
    return posterior.network.eval()


@pytest.fixture(scope="session")
def weights(network, tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "network.safetensors"
    save_file(network.state_dict(), path)
    return path


@pytest.fixture
def bayesify(capsys):
    """Run the command line in this process; returns exit code, stdout and stderr."""
    from bayesify.cli import main

    def run(*words):
        code = main([str(word) for word in words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def model(weights):
    return ("--model", "tests.cli.nets:make_network", "--weights", weights, "--quiet")
