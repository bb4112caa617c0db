"""What tells that tensors have changed."""

import pytest
import torch
from torch import nn

from bayesify._core.state import state_of


@pytest.mark.parametrize("hiding", [0.0, torch.inf, -torch.inf, torch.nan])
def test_what_is_written_past_the_version_is_seen_beside_what_is_not_finite(hiding):
    weight, other = nn.Parameter(torch.tensor([hiding, 1.0, 2.0])), nn.Parameter(torch.ones(2))
    before = state_of([weight, other])
    assert state_of([weight, other]) == before
    weight.data[2] = 3.0
    assert state_of([weight, other]) != before
