"""From a network to a posterior: which parts become random, by exact type, and a table that says why."""

from __future__ import annotations

import copy
import fnmatch
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from bayesify._core.files import fingerprint
from bayesify.likelihoods import Likelihood

if TYPE_CHECKING:
    from bayesify.laws import Posterior
    from bayesify.methods import Method

__all__ = ["Conversion", "ConversionRow", "Patterns", "Selection", "convert"]

Pattern = str | type[nn.Module]
Patterns = Pattern | Sequence[Pattern]

_NOT_INCLUDED = "not included"


@dataclass(frozen=True)
class ConversionRow:
    """What happened to one module.

    Attributes:
        name: Its qualified name; empty for the network itself.
        type: Its type's name.
        parameters: How many numbers it owns itself.
        converted: Whether it is random now.
        reason: How, or why not.
    """

    name: str
    type: str
    parameters: int
    converted: bool
    reason: str


@dataclass(frozen=True)
class Conversion:
    """The table of a conversion: a row for each module that owns parameters or could have been random."""

    rows: tuple[ConversionRow, ...]

    @property
    def converted(self) -> tuple[str, ...]:
        """Return the names of the converted modules."""
        return tuple(row.name for row in self.rows if row.converted)

    def __str__(self) -> str:
        """Return the table as text."""
        cells = [("module", "type", "parameters", "random", "why")]
        cells += [
            (
                row.name or "(network)",
                row.type,
                f"{row.parameters:,}",
                "yes" if row.converted else "no",
                row.reason,
            )
            for row in self.rows
        ]
        widths = [max(len(line[column]) for line in cells) for column in range(4)]
        return "\n".join(
            "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[4]]).rstrip()
            for line in cells
        )


class Selection:
    """Which modules the caller wants: patterns on qualified names, or exact types.

    A pattern such as `"layer3"`, `"*.attention"` or `"blocks.1?.*"` selects the modules it matches and all inside
    them. A type selects modules of exactly that type.
    """

    def __init__(self, include: Patterns | None, exclude: Patterns | None) -> None:
        self.include = _listed(include, "include")
        self.exclude = _listed(exclude, "exclude")
        self.names: frozenset[str] | None = None

    @classmethod
    def exactly(cls, names: Iterable[str]) -> Selection:
        """Select the modules of these names and no others, as a saved posterior does."""
        selection = cls(None, None)
        selection.names = frozenset(names)
        return selection

    def reason_against(self, names: Sequence[str], module: nn.Module) -> str | None:
        """Return why a module is left out, or None when it is wanted; a shared module has several names."""
        if self.names is not None and self.names.isdisjoint(names):
            return _NOT_INCLUDED
        for pattern in self.exclude or ():
            if any(_matches(pattern, name, module) for name in names):
                return f"excluded by {_show(pattern)}"
        wanted = self.include is None or any(_matches(p, name, module) for p in self.include for name in names)
        return None if wanted else _NOT_INCLUDED

    def check(self, network: nn.Module) -> None:
        """Raise if a pattern matches no module at all."""
        modules = dict(network.named_modules(remove_duplicate=False))
        for word, patterns in (("include", self.include), ("exclude", self.exclude)):
            for pattern in patterns or ():
                if not any(_matches(pattern, name, module) for name, module in modules.items()):
                    raise ValueError(
                        f"{word}={_show(pattern)} matches no module. The network has: {_listing(modules)}."
                    )


def convert(
    network: nn.Module,
    method: Method | type[Method] | str,
    *,
    include: Patterns | None = None,
    exclude: Patterns | None = None,
    likelihood: str | Likelihood = "classification",
) -> Posterior:
    """Make a posterior of a trained network; the network itself is left untouched.

    Args:
        network: Any module: a bare layer, or a whole model. Its weights become the posterior's starting point.
        method: What becomes random and how it is learned: `MCDropout(p=0.1)`, or a method's name.
        include: Convert only these modules: patterns on qualified names (with all that is inside), or exact types.
        exclude: Leave these modules deterministic; wins over `include`.
        likelihood: What the outputs mean: "classification", "binary", "regression", or a likelihood object.

    Returns:
        The posterior. `posterior.conversion` says for each module whether it was converted, and why not.

    Raises:
        ValueError: A pattern matches nothing, or there is nothing to convert; the message lists what there is.

    Example:
        >>> from bayesify import MCDropout
        >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))
        >>> print(convert(network, MCDropout()).conversion)
        module  type     parameters  random  why
        0       Linear   40          no      not a dropout layer
        2       Dropout  0           yes     masks with p=0.1
        3       Linear   27          no      not a dropout layer
    """
    from bayesify.laws import Noise, Posterior
    from bayesify.methods import as_method

    resolved = as_method(method)
    if isinstance(network, Posterior):
        raise TypeError("The network is a posterior already. Convert the original network instead.")
    if not isinstance(network, nn.Module):
        raise TypeError(f"convert needs a torch.nn.Module, but got a {type(network).__name__}.")
    if any(isinstance(getattr(module, "noise", None), Noise) for module in network.modules()):
        raise TypeError(
            "The network is part of a posterior already, and holds its noisy layers. Convert the original network; to "
            "go on from fitted weights, load them into it: network.load_state_dict(posterior.network.state_dict())."
        )
    selection = Selection(include, exclude)
    selection.check(network)
    _warn_of_nan(network)
    return build(network, resolved, selection, likelihood)


def _warn_of_nan(network: nn.Module) -> None:
    broken = [
        name
        for name, tensor in (*network.named_parameters(), *network.named_buffers())
        if tensor.is_floating_point() and not is_lazy(tensor) and tensor.device.type != "meta" and tensor.isnan().any()
    ]
    if broken:
        more = f" and {len(broken) - 3} more" if len(broken) > 3 else ""
        warnings.warn(
            f"The network's {', '.join(map(repr, broken[:3]))}{more} hold NaN, and so will what it predicts. Its "
            "training probably diverged: load a checkpoint from before, or train again with a smaller learning rate.",
            stacklevel=3,
        )


def build(
    network: nn.Module,
    method: Method,
    selection: Selection,
    likelihood: str | Likelihood,
    *,
    frozen: Iterable[str] | None = None,
) -> Posterior:
    """Build a posterior on a copy of the network, and note what the network's own tensors are.

    `frozen` names the parameters that do not learn, which decides what can be random; None asks the network.
    """
    copied = copy.deepcopy(network)
    if frozen is not None:
        names = set(frozen)
        for name, parameter in copied.named_parameters():
            parameter.requires_grad_(name not in names)
    held = [name for name, parameter in copied.named_parameters() if not parameter.requires_grad]
    modes = [(module, module.training) for module in copied.modules()]
    posterior = method.build(copied, selection)
    posterior.frozen = held
    posterior.train(network.training)
    for module, training in modes:  # a layer that was frozen in evaluation mode stays so
        module.training = training
    posterior.set_likelihood(likelihood)
    # A state may also hold what `get_extra_state` gives, which can be anything.
    state = {name: value for name, value in network.state_dict().items() if isinstance(value, Tensor)}
    posterior.origin = {fingerprint(tensor): name for name, tensor in state.items()}
    return posterior


def replace_modules(
    network: nn.Module,
    decide: Callable[[str, nn.Module], nn.Module | str | None],
    selection: Selection,
) -> tuple[nn.Module, Conversion]:
    """Replace modules of a network, each once, however many names it has.

    Args:
        network: The network, which is changed.
        decide: Returns a replacement, or a reason why there is none, or None for modules not worth a row.
        selection: What the caller wants.

    Returns:
        The network (another object if the root itself was replaced) and the table.
    """
    replaced: dict[int, nn.Module] = {}
    rows: list[ConversionRow] = []
    aliases = _aliases(network)
    for name, module in list(network.named_modules()):
        if any(name.startswith(f"{row.name}.") for row in rows if row.converted and row.name):
            continue  # inside a module that was replaced whole
        against = selection.reason_against(aliases[module], module)
        answer = decide(name, module)
        if isinstance(answer, nn.Module) and against is None:
            replaced[id(module)] = answer
            rows.append(_row(name, module, converted=True, reason=_how(answer)))
        elif isinstance(answer, str) or (answer is not None and against is not None):
            rows.append(_row(name, module, converted=False, reason=against or str(answer)))
    for parent in list(network.modules()):
        for child_name, child in list(parent._modules.items()):  # named_children gives each child once only
            if id(child) in replaced:
                setattr(parent, child_name, replaced[id(child)])
    return replaced.get(id(network), network), Conversion(tuple(rows))


def select_parameters(network: nn.Module, selection: Selection, *, how: str) -> tuple[list[str], Conversion]:
    """Choose the parameters that become random: those of the wanted modules that are not frozen.

    Returns:
        Their names, each parameter once, and the table.

    Raises:
        ValueError: A module that is excluded shares a parameter with one that is not.
    """
    aliases = _aliases(network)
    reasons: dict[str, str | None] = {}
    names: dict[int, str] = {}
    for name, module in network.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if not own:
            continue
        free = {key: p for key, p in own.items() if p.requires_grad}
        reasons[name] = selection.reason_against(aliases[module], module)
        if reasons[name] is None and not free:
            reasons[name] = "frozen (requires_grad is False)"
        if reasons[name] is None:
            for key, parameter in free.items():
                names.setdefault(id(parameter), f"{name}.{key}" if name else key)
    rows: list[ConversionRow] = []
    for name, reason in reasons.items():
        module = network.get_submodule(name)
        shared = [names[id(p)] for p in module.parameters(recurse=False) if id(p) in names]
        if reason == _NOT_INCLUDED and shared:
            reason = f"not included, but shares {shared[0]!r}, which is random"
        elif reason is not None and shared:
            raise ValueError(
                f"Module {name!r} is {reason}, but it shares {shared[0]!r} with a module that is converted, and a "
                "shared parameter cannot be both. Exclude both modules, or neither."
            )
        rows.append(_row(name, module, converted=reason is None, reason=reason or how))
    return list(names.values()), Conversion(tuple(rows))


def require_something(conversion: Conversion, network: nn.Module, method: str, needs: str) -> None:
    """Raise, listing what there is, if nothing was converted."""
    if not conversion.converted:
        table = f"\n{conversion}" if conversion.rows else ""
        left = any(row.reason.startswith(("not included", "excluded")) for row in conversion.rows)
        raise ValueError(
            f"{method} found nothing to convert: it needs {needs}. "
            f"{'include and exclude leave out what the table shows. ' if left else ''}The network has: "
            f"{_listing(dict(network.named_modules()))}.{table}"
        )


def _row(name: str, module: nn.Module, *, converted: bool, reason: str) -> ConversionRow:
    count = sum(p.numel() for p in module.parameters(recurse=False))
    return ConversionRow(name, type(module).__name__, count, converted, reason)


def _aliases(network: nn.Module) -> dict[nn.Module, list[str]]:
    names: dict[nn.Module, list[str]] = {}
    for name, module in network.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return names


def _how(module: nn.Module) -> str:
    return str(getattr(module, "conversion_note", type(module).__name__))


def _listed(patterns: Patterns | None, word: str) -> tuple[Pattern, ...] | None:
    if patterns is None:
        return None
    found: Iterable[Any] = [patterns] if isinstance(patterns, str | type) else patterns
    listed = tuple(found)
    for pattern in listed:
        if not isinstance(pattern, str) and not (isinstance(pattern, type) and issubclass(pattern, nn.Module)):
            raise TypeError(f"{word} takes patterns of names and module types, but {pattern!r} is neither.")
    return listed


def _matches(pattern: Pattern, name: str, module: nn.Module) -> bool:
    if not isinstance(pattern, str):
        return type(module) is pattern
    parts = name.split(".")
    return any(fnmatch.fnmatchcase(".".join(parts[: n + 1]), pattern) for n in range(len(parts)))


def _show(pattern: Pattern) -> str:
    return repr(pattern) if isinstance(pattern, str) else pattern.__name__


def _listing(modules: dict[str, nn.Module], most: int = 40) -> str:
    names = [f"{name} ({type(module).__name__})" for name, module in modules.items() if name]
    if not names:
        return f"only itself, a {type(modules['']).__name__}"
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
