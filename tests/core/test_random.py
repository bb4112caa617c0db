"""Noise of several draws: kept or made anew, alone or together, it is what the draws' names say."""

from typing import Any

import pytest
import torch

from bayesify._core.random import BLOCK, FEW, Key, Mask, Noise, keyed_numbers, numbered_keys, shuffled, spread_keys


def naive(keys: list[Key], site: str, shape: list[int], distribution: Any, like: torch.Tensor) -> torch.Tensor:
    if isinstance(distribution, Mask):
        uniform = naive(keys, site, shape, "uniform", like)
        return torch.where(uniform < distribution.rate, 0, torch.ones_like(uniform) / distribution.divisor)
    block = max(1, BLOCK // torch.Size(shape).numel())
    if block == 1:
        return torch.stack([keyed_numbers(key, site, shape, like, distribution) for key in keys])
    whole = [
        keyed_numbers(Key(key.seed, key.index // block), site, [block, *shape], like, distribution) for key in keys
    ]
    return torch.stack([numbers[key.index % block] for numbers, key in zip(whole, keys, strict=True)])


@pytest.mark.parametrize("distribution", ["normal", "uniform", Mask(0.3), Mask(0.3, 0.7)], ids=str)
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


def test_masks_of_another_rate_are_not_those_that_were_kept():
    noise, like = Noise(), torch.zeros(2, dtype=torch.float64)
    keys = list(numbered_keys(20, 0))
    for mask in (Mask(0.1, 0.9), Mask(0.1, 0.9), Mask(0.6, 0.4), Mask(0.6)):
        assert torch.equal(noise.drawn(keys, "site", [784], mask, like), naive(keys, "site", [784], mask, like))


@pytest.mark.parametrize("parts", [1, 3, 7])
def test_draws_are_spread_evenly_over_parts(parts):
    assert list(numbered_keys(3, 5)) == [Key(5, 0), Key(5, 1), Key(5, 2)]
    found = spread_keys(10, 5, parts)
    assert [(key.seed, key.index) for key in found] == [(5, index) for index in range(10)]
    counts = [[key.path for key in found].count((part,)) for part in range(parts)]
    more = {part for part, count in enumerate(counts) if count > 10 // parts}
    assert sum(counts) == 10
    assert max(counts) - min(counts) <= 1
    assert more == set(shuffled(parts, 5)[: 10 % parts])
