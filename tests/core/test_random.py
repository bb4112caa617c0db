"""Noise of several draws: kept or made anew, alone or together, it is what the draws' names say."""

import pytest
import torch

from bayesify._core.random import BLOCK, FEW, Key, Noise, keyed_numbers


def naive(keys: list[Key], site: str, shape: list[int], distribution: str, like: torch.Tensor) -> torch.Tensor:
    block = max(1, BLOCK // torch.Size(shape).numel())
    if block == 1:
        return torch.stack([keyed_numbers(key, site, shape, like, distribution) for key in keys])
    whole = [
        keyed_numbers(Key(key.seed, key.index // block), site, [block, *shape], like, distribution) for key in keys
    ]
    return torch.stack([numbers[key.index % block] for numbers, key in zip(whole, keys, strict=True)])


@pytest.mark.parametrize("distribution", ["normal", "uniform"])
def test_noise_of_draws_is_that_of_their_names_whatever_was_kept(distribution):
    noise, like = Noise(), torch.zeros(2, dtype=torch.float64)
    many, others = [Key(0, index) for index in range(20)], [Key(3, index, (1,)) for index in range(5, 25)]
    for keys in (many, many, others, many[:1], many[7:13], many, [Key(1, 19)]):
        for shape in ([784], [784], [2, 392], [4096], [3]):
            for site in ("one", "other"):
                found = noise.drawn(keys, site, shape, distribution, like)
                assert torch.equal(found, naive(keys, site, shape, distribution, like))
    assert noise.drawn(many, "one", [784], distribution, like.float()).dtype == torch.float32


def test_draws_of_several_blocks_are_kept_together_up_to_a_limit():
    noise, like = Noise(), torch.zeros(2)
    few, many = ([Key(0, index) for index in range(count)] for count in (20, FEW // 784 + 1))
    first = noise.drawn(few, "site", [784], "normal", like)
    assert noise.drawn(list(few), "site", [784], "normal", like) is first
    assert noise.drawn(many, "site", [784], "normal", like) is not noise.drawn(many, "site", [784], "normal", like)
    assert noise.drawn(few, "site", [784], "normal", like) is first  # of what is too much nothing was kept
