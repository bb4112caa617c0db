"""Evaluations with known predictions, and a page's structure."""

from dataclasses import replace
from html.parser import HTMLParser

import torch
from torch import nn

from bayesify import Categorical, Gaussian, convert
from bayesify.conversion import Conversion, ConversionRow
from bayesify.evaluation.evaluation import Cost, evaluate

NASTY = '<script>alert("1")</script>'


def classification(name="plain", *, noise=0.0, sharpness=1.0, examples=80, cost=None, seed=0):
    """Return an evaluation of ten noisy draws on five classes; without noise, of a deterministic network."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(5, (examples,), generator=generator)
    logits = 3 * nn.functional.one_hot(targets, 5) + torch.randn(examples, 5, generator=generator)
    ood = torch.randn(40, 5, generator=generator)
    result = evaluate(
        convert(nn.Identity(), "map"), [(sharpness * logits, targets)], ood={"far & wide": sharpness * ood}
    )
    prediction, outside = result.prediction, result.ood
    if noise:
        shake = noise * torch.randn(10, 1, 5, generator=generator)
        prediction = Categorical().from_samples(sharpness * logits + shake)
        outside = {"far & wide": Categorical().from_samples(sharpness * ood + 2 * shake)}
    rows = (ConversionRow("conv<1>", "Conv2d", 1280, bool(noise), f"why {NASTY}"),)
    return replace(
        result,
        name=name,
        prediction=prediction,
        ood=outside,
        cost=cost or Cost(),
        conversion=Conversion(rows),
    )


def regression(name="plain", *, noise_std=0.5, spread=0.0, examples=60):
    """Return an evaluation of numbers with noise of 0.5, predicted with another."""
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(examples, 1, generator=generator)
    targets = mean[:, 0] + 0.5 * torch.randn(examples, generator=generator)
    result = evaluate(
        convert(nn.Identity(), "map", likelihood=Gaussian(noise_std)), [(mean, targets)], ood={"far": mean + 9}
    )
    if spread:
        result = replace(result, prediction=replace(result.prediction, epistemic=mean[:, 0].abs() * spread))
    return replace(result, name=name, cost=Cost(1.0, 2.0))


class Page(HTMLParser):
    """Collects what the tests ask about."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.links, self.ids, self.words, self.open = [], [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.tags.append((tag, values))
        self.open.append(tag)
        self.links += [values[name] for name in ("src", "href", "xlink:href", "data", "action") if name in values]
        self.ids += [values["id"]] if "id" in values else []

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data):
        if not {"style"} & set(self.open):
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())
