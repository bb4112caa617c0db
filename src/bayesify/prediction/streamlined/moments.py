"""The pair (mean, variance) that takes an activation's place, and the rules that operations have for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor

from bayesify._core.trees import map_tensors
from bayesify.laws.kronecker import Rotated
from bayesify.prediction.overrides import is_metadata, name_of, plain_call

if TYPE_CHECKING:
    from bayesify.prediction.streamlined.lineage import Lineage

__all__ = [
    "Correlated",
    "Kind",
    "Moments",
    "NoRuleError",
    "Settings",
    "centre",
    "moment_rule",
    "rule_kinds",
    "same_size",
    "settings",
    "using",
    "variance_of",
]

Rule = Callable[..., Any]
RuleT = TypeVar("RuleT", bound=Rule)
Kind = Literal["exact", "matched", "first order", "at the means"]
_RULES: dict[Any, Rule] = {}
_KINDS: dict[Any, Kind | None] = {}


class NoRuleError(NotImplementedError):
    """An operation has no rule for means and variances."""


@dataclass
class Settings:
    """How a pass treats nonlinear functions.

    Attributes:
        first_order: Linearise them at the mean; else match mean and variance of their outputs.
        covariance: Carry covariances, for stacks of linear layers and activations.
        per_head: Carry covariances within heads of attention into the output projection.
        attentions: How many attentions with random values there were in a pass.
        projected: How many of them had their covariances carried.
        derivatives: How many functions were differentiated by autograd, which a trace has to write down.
        writes: How many activations were written into.
        squares: Squares of weights that are not random, by identity, with the version that they were made of.
    """

    first_order: bool = False
    covariance: bool = False
    per_head: bool = False
    attentions: int = 0
    projected: int = 0
    derivatives: int = 0
    writes: int = 0
    squares: dict[int, tuple[Tensor, int, Tensor]] = field(default_factory=dict)

    def square(self, weight: Tensor) -> Tensor:
        """Return the square of a weight, made once."""
        version = 0 if weight.is_inference() else weight._version
        known = self.squares.get(id(weight))
        if known is None or known[0] is not weight or known[1] != version:
            known = (weight, version, weight.detach().square())
            self.squares[id(weight)] = known
        return known[2]


_SETTINGS: ContextVar[Settings] = ContextVar("settings", default=Settings())  # noqa: B039


def settings() -> Settings:
    """Return the settings of the present pass."""
    return _SETTINGS.get()


@contextmanager
def using(chosen: Settings) -> Iterator[None]:
    """Set the settings for a while."""
    token = _SETTINGS.set(chosen)
    try:
        yield
    finally:
        _SETTINGS.reset(token)


class Moments(Tensor):
    """Mean and variance of a random tensor, as a tensor that a network's forward takes for its own.

    Entries count as independent, but for one number for each example: `shared` is which part of the variance the
    positions (tokens, pixels) have in common, because a weight moves all of them together.

    Attributes:
        centre: The mean, a plain tensor.
        variance: The variance, a plain tensor of the same shape.
        shared: (B,), or None if nothing is in common.
        source: What a linear map or attention made it of, and where its entries lie in that; see `Origin`.
        lineage: Which tensor it is a function of, entry by entry; see `Lineage`.
    """

    centre: Tensor
    variance: Tensor
    shared: Tensor | None
    source: Origin | None
    lineage: Lineage | None

    @staticmethod
    def make(centre: Tensor, variance: Tensor, shared: Tensor | None = None, source: Origin | None = None) -> Moments:
        """Return the pair."""
        pair = _blank(centre)
        pair.centre, pair.variance, pair.shared, pair.source, pair.lineage = centre, variance, shared, source, None
        return pair

    def like(self, centre: Tensor, variance: Tensor) -> Moments:
        """Return another pair of the same examples."""
        return Moments.make(centre, variance, self.shared)

    @contextmanager
    def written(self) -> Iterator[None]:
        """Let both tensors be written into for a while: what is known of where they come from no longer holds."""
        for name in ("centre", "variance"):
            tensor = getattr(self, name)
            if any(step == 0 for step in tensor.stride()):  # entries that are one place of memory
                setattr(self, name, tensor.clone(memory_format=torch.contiguous_format))
        yield
        self.source = self.lineage = None
        settings().writes += 1

    def kept(self, name: str, make: Callable[[Moments], Any]) -> Any:
        """Return what is made of a random weight once, for all passes."""
        known = self.__dict__.setdefault("_kept", {})
        if name not in known:
            known[name] = make(self)
        return known[name]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation by its rule."""
        options = dict(kwargs or {})
        rule = _RULES.get(func)
        if Correlated in types and func not in _MAPS and not is_metadata(func):
            raise ValueError(_torn(func))
        if settings().covariance and not is_metadata(func):
            return _independent(func, args, options)
        if rule is None:
            if is_metadata(func):
                return plain_call(func, args, options)
            if (changed := _in_place(func, args, options)) is not None:
                return changed
        from bayesify.prediction.streamlined.elementwise import generic
        from bayesify.prediction.streamlined.lineage import descend, together

        joined = together(func, args, options)
        if joined is not None:
            return joined
        result = generic(func, args, options) if rule is None else rule(*args, **options)
        if result is NotImplemented:
            raise NoRuleError(_operation(func))
        descend(func, args, options, result)
        return result

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Show both."""
        return f"Moments(centre={self.centre}, variance={self.variance})"


class Correlated(Moments):
    """A weight, or its bias, with correlated entries; `variance` is that of single entries.

    Linear layers and convolutions have rules for both together; anything else is an error.
    """

    rotated: Rotated

    @staticmethod
    def turn(centre: Tensor, variance: Tensor, rotated: Rotated) -> Correlated:
        """Return one of the two tensors."""
        made = centre.detach().as_subclass(Correlated)
        made.centre, made.variance, made.rotated = centre, variance, rotated
        made.shared = made.source = made.lineage = None
        return made

    def with_bias(self, bias: Tensor | None) -> Rotated:
        """Return what makes the weight, after a look at the bias that it is used with."""
        own = bias.rotated.bias if isinstance(bias, Correlated) else None
        if own != self.rotated.bias or (isinstance(bias, Moments) and not isinstance(bias, Correlated)):
            raise ValueError(_torn(torch.nn.functional.linear))
        return self.rotated


_MAPS = (
    torch.nn.functional.linear,
    torch.nn.functional.conv1d,
    torch.nn.functional.conv2d,
    torch.nn.functional.conv3d,
)


def _torn(func: Callable[..., Any]) -> str:
    return (
        f"{_operation(func)} takes a weight whose entries are correlated, or its bias, apart from the other. Means and "
        "variances are carried through linear layers and convolutions of such weights alone: use how='linearised'."
    )


def _blank(like: Tensor) -> Moments:
    """Return a pair that is still empty, with the shape of a tensor; a tensor that is only traced has no data."""
    if type(like) in (Tensor, torch.nn.Parameter):
        return like.detach().as_subclass(Moments)
    return Tensor._make_wrapper_subclass(_Traced, like.shape, like.stride(), dtype=like.dtype, device=like.device)


class _Traced(Moments):
    """A pair of tensors without data, while a pass is traced for an export."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse what did not go through a rule."""
        raise NoRuleError(str(func))


@dataclass(frozen=True)
class Origin:
    """An operation's output y that was not mixed with anything since.

    Attributes:
        index: A tensor without data whose strides say where in y each entry of the present tensor lies.
    """

    index: Tensor


@dataclass(frozen=True)
class Source(Origin):
    """A linear map y = x W' + b, at whose input attention looks.

    Attributes:
        x: Its input.
        weight: Its weight.
        bias: Its bias.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None


def _independent(func: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Run an operation that leaves independent entries independent; a linear one makes them a `Joint`."""
    from bayesify.prediction.streamlined.joint import joint_linear

    linear = func is torch.nn.functional.linear and args[0].ndim == 2
    if linear and (isinstance(args[0], Moments) or isinstance(args[1], Correlated)):
        return joint_linear(*args, **options)
    pairs = [value for value in (*args, *options.values()) if isinstance(value, Moments)]
    if linear or (len(pairs) == 1 and args[0] is pairs[0] and _alone(func)):
        with using(replace(settings(), covariance=False)):
            return func(*args, **options)
    raise NoRuleError(_operation(func))


def _alone(func: Callable[..., Any]) -> bool:
    """Return whether an operation acts on single entries."""
    from bayesify.prediction.streamlined.elementwise import is_pointwise

    return is_pointwise(func) or name_of(func) in ("dropout", "contiguous", "clone", "detach")


def _operation(func: Callable[..., Any]) -> str:
    """Return an operation as one would write it."""
    try:
        found = torch.overrides.resolve_name(func)
    except Exception:
        found = None
    return found or name_of(func)


def _in_place(func: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Run the plain version of an operation that changes its first argument, and write the result there."""
    name = name_of(func)
    plain = None
    if name.startswith("__i") and name.endswith("__"):
        plain = getattr(Tensor, f"__{name[3:-2]}__", None)
    elif name.endswith("_") and not name.endswith("__"):
        plain = getattr(Tensor, name[:-1], None) or getattr(torch, name[:-1], None)
        plain = plain or getattr(torch.nn.functional, name[:-1], None)
    if plain is None or not args:
        return None
    result = plain(*args, **options)
    target = args[0]
    if not isinstance(target, Moments):
        raise NoRuleError(f"{_operation(func)} of a tensor that is not random with one that is")
    with target.written():
        target.centre.copy_(centre(result))
        target.variance.copy_(variance_of(result))
    if isinstance(result, Moments):
        target.shared = result.shared
    return target


def moment_rule(*operations: Any, kind: Kind | None = None) -> Callable[[RuleT], RuleT]:
    """Register how operations act on means and variances.

    The function gets the operation's own arguments, some of them `Moments` (with `centre` and `variance`), and returns
    `Moments`, or `NotImplemented` for a case that it does not cover.

    Args:
        operations: What the rule is for: `torch.relu`, `torch.Tensor.relu`, `torch.nn.functional.relu`.
        kind: How right it is: "exact" for independent Gaussian entries, "matched" (mean and variance of the outputs,
            nearly), "first order", or "at the means" for what has no variance. `rule_kinds` lists it; nothing else
            depends on it.

    Example:
        >>> from torch.special import expit
        >>> @moment_rule(expit, kind="first order")
        ... def rule(x):
        ...     y = expit(x.centre)
        ...     return x.like(y, (y * (1 - y)).square() * x.variance)
    """

    def register(rule: RuleT) -> RuleT:
        for operation in operations:
            _RULES[operation], _KINDS[operation] = rule, kind
        return rule

    return register


def rule_kinds() -> dict[Any, tuple[Rule, Kind | None]]:
    """Return the rule of every operation that has one, and how right it is.

    Example:
        >>> from bayesify.prediction.streamlined import rule_kinds
        >>> rule_kinds()[torch.relu][1], rule_kinds()[torch.softmax][1]
        ('exact', 'first order')
    """
    return {operation: (rule, _KINDS.get(operation)) for operation, rule in _RULES.items()}


def centre(x: Any) -> Any:
    """Return the mean of a pair, and anything else as it is."""
    return x.centre if isinstance(x, Moments) else x


def variance_of(x: Tensor) -> Tensor:
    """Return the variance of a pair, and zeros for a plain tensor."""
    return x.variance if isinstance(x, Moments) else torch.zeros_like(x)


def same_size(one: int, other: int) -> bool:
    """Return whether two sizes are equal; while a pass is traced, whether they are for every size of the batch."""
    if isinstance(one, int) and isinstance(other, int):
        return one == other
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(one == other)


def centres(tree: Any) -> Any:
    """Replace every pair in a structure by its mean."""
    return map_tensors(centre, tree)
