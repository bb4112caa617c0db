"""The posterior: a Bayesian network as an ordinary module."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from bayesify._core.deprecation import old_attribute, renamed, warn_renamed
from bayesify._core.inputs import in_network_type
from bayesify._core.labels import Convention, beside_outputs, convention_of
from bayesify._core.modes import evaluation_mode
from bayesify._core.random import Key
from bayesify._core.seen import InputsSeen
from bayesify._core.trees import batch_rows, call, repeat_rows, split_batch
from bayesify.laws.law import Component, Law
from bayesify.laws.norm_statistics import statistics_apart, statistics_kept, tracking_norms
from bayesify.laws.passes import Pass, Patch, Refusal, ShapeError
from bayesify.laws.patching import find_slots, patched_forward, swapped
from bayesify.laws.recomputation import without_guards
from bayesify.laws.runtime import Runtime
from bayesify.laws.statistics import Statistics
from bayesify.laws.tensors import batch_norms
from bayesify.laws.trace import Trace, signature, trace_network
from bayesify.laws.vectorised import vectorised_pass
from bayesify.likelihoods import Likelihood, as_likelihood

if TYPE_CHECKING:
    from bayesify.methods import Method, OODRegularizer
    from bayesify.selection import Conversion

__all__ = ["Draw", "LossTerms", "Posterior", "ShapeError", "require_posterior", "warn_unless_learned"]


class LossTerms(dict[str, Tensor]):
    """The terms of a loss by name, each in mean nats per example.

    >>> LossTerms(nll=torch.tensor(1.0), kl=torch.tensor(0.5)).total
    tensor(1.5000)
    """

    @property
    def total(self) -> Tensor:
        """Return the sum of the terms: what is minimised."""
        return torch.stack(list(self.values())).sum()


class Posterior(nn.Module):
    """A distribution over functions: a network, the law of what is random in it, and a likelihood.

    Its parameters and buffers are its whole state. `posterior(x)` is one stochastic pass, with independent noise
    for each example where the law has such; `posterior.draw(seed)` is one coherent function;
    `with posterior.mean():` has no noise. `train()` and `eval()` reach the network's own layers (batch
    normalisation, dropout that was not converted) and never change whether the posterior is random.

    Args:
        network: A copy of the user's network.
        law: What is random in it.
        method: How it is learned; None for laws that are made, not learned.
        likelihood: What the network's outputs mean.

    Attributes:
        conversion: What was converted, what was not, and why.
        output_key: Which entry of a structured output holds the logits or means; None finds it.
        statistics: Batch-normalisation statistics of drawn weights, for laws and networks that have such.
        learning: What only learning needs (chains, a critic); no part of what `save` writes.

    Example:
        >>> from bayesify.laws import GaussianLaw
        >>> network = nn.Linear(2, 1, bias=False)
        >>> posterior = Posterior(network, GaussianLaw(network, log_stds={"weight": torch.zeros(1, 2)}))
        >>> x = torch.eye(2)
        >>> torch.equal(posterior.draw(3)(x), posterior.draw(3)(x))
        True
    """

    def __init__(
        self,
        network: nn.Module,
        law: Law,
        *,
        method: Method | None = None,
        likelihood: str | Likelihood = "classification",
    ) -> None:
        super().__init__()
        without_guards(network)  # of a posterior that it was copied from
        self.network = network
        self.law = law
        self.method = method
        draws = law.statistics_rows if batch_norms(network) else 0
        self.statistics = Statistics(network, draws) if draws else None
        law.__dict__["statistics"] = self.statistics
        self.register_module("learning", None)
        self.likelihood: Likelihood = as_likelihood(likelihood)
        law.condition(self.likelihood)
        self.conversion: Conversion | None = None
        self.output_key: str | int | None = None
        self.origin: dict[str, str] = {}
        self.frozen: list[str] = []
        self.inputs_seen = InputsSeen()
        self.runtime = Runtime()
        self._convention: Convention | None = None
        self._asked = False  # whether somebody has looked at `learned`

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Leave behind what belongs to the posterior that this one is a copy of."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        without_guards(self.network)

    def __getattr__(self, name: str) -> Any:
        """Find what belongs to the law, as long as code still looks for it here."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            law = self.__dict__.get("_modules", {}).get("law")
            if law is None or name.startswith("_") or not hasattr(law, name):
                raise
            warnings.warn(
                f"posterior.{name} belongs to the law: posterior.law.{name}.", DeprecationWarning, stacklevel=2
            )
            return getattr(law, name)

    # -- passes ---------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run one pass in the present mode; arguments and outputs are the network's own."""
        return self.run(self.present(_rows(args, kwargs)), args, kwargs)

    def present(self, rows: int = 0) -> Pass:
        """Return the pass that the modes ask for which were entered with `with`: a fresh one outside of all."""
        modes = self.runtime.modes
        found = Pass(modes.present("kind", "fresh"), modes.present("keys", ()), modes.present("part", None), rows)
        if found.kind != "draw":
            found.keys = ()
        return found

    def run(self, p: Pass, args: tuple[Any, ...], kwargs: Mapping[str, Any], patch: Patch | None = None) -> Any:
        """Run one pass of the network.

        Args:
            p: The pass.
            args: Of the network's forward.
            kwargs: Of the network's forward.
            patch: What to put in the network's place; None asks the law.

        Returns:
            What the network returns.
        """
        runtime = self.runtime
        if patch is None and p.kind != "mean" and not p.rows:
            patch = Patch()  # of a batch without examples nothing is random, and it does not show where the batch is
        with runtime.modes.lock:
            before, runtime.runner = runtime.runner, threading.get_ident()
            known = None
            try:
                p.noise = runtime.noise
                if patch is None and p.trace is None and p.kind in self.law.traced:
                    known = signature((args, dict(kwargs)))
                    p.trace = self._trace(known, (args, dict(kwargs)))
                with self._prepared(p), self._placed(p, self.patch(p) if patch is None else patch):
                    output = self.network(*args, **kwargs)
            except BaseException:
                if known is not None and p.trace is not None:
                    runtime.forget(p.trace)
                raise
            finally:
                runtime.runner = before
            if p.trace is not None:
                p.trace.prove()
            if p.rows:
                self.inputs_seen.note(args, dict(kwargs))
            return output

    def patch(self, p: Pass) -> Patch:
        """Return what the law puts in the network's place, with the statistics that belong to drawn weights."""
        patch = self.law.patch(p)
        if self.statistics is None or (row := self.law.statistics_row(p)) is None:
            return patch
        return replace(patch, tensors={**patch.tensors, **self.statistics.of(self.network, row)})

    def components(self, trace: Trace | None = None) -> list[Component] | Refusal:
        """Return the law as a mixture of Gaussians, with the statistics that belong to its mean, or why it is none."""
        found = self.law.components(trace)
        if self.statistics is None or isinstance(found, Refusal):
            return found
        self.statistics.require_fresh()
        own = self.statistics.of(self.network, 0)
        return [replace(one, fixed={**one.fixed, **own}) for one in found]

    def weights(self, key: Key) -> dict[str, Tensor] | Refusal:
        """Return a draw as tensors of `plain_network`, where it is one."""
        found = self.law.weights(key)
        if self.statistics is None or isinstance(found, Refusal):
            return found
        return {**found, **self.statistics.of(self.network, self.law.row_of(key) + 1)}

    def plain_network(self) -> nn.Module:
        """Return a copy of the network, as a plain module."""
        with self.runtime.modes.lock:
            return without_guards(copy.deepcopy(self.network))

    @contextmanager
    def patched(self, patch: Patch) -> Iterator[None]:
        """Put a patch into the network for one pass, which the caller runs inside."""
        runtime = self.runtime
        with runtime.modes.lock:
            before, runtime.runner = runtime.runner, threading.get_ident()
            try:
                p = Pass("mean")
                with self._prepared(p), self._placed(p, patch):
                    yield
            finally:
                runtime.runner = before

    @contextmanager
    def _prepared(self, p: Pass) -> Iterator[None]:
        """Arrange for the statistics of normalisation, which the law's forwards build on."""
        network, keep = self.network, self.law.keep_statistics
        if not (keep or p.ood_rows):
            yield
            return
        if torch.is_grad_enabled():
            self.runtime.guard.watch("norms", lambda: tracking_norms(network).values(), self._again)
        with statistics_kept(network, keep), statistics_apart(network, p.ood_rows, p.rows):
            yield

    @contextmanager
    def _placed(self, p: Pass, patch: Patch) -> Iterator[None]:
        """Put tensors and forwards into the network."""
        runtime, network = self.runtime, self.network
        if torch.is_grad_enabled():
            runtime.modes_learned = runtime.modes_learned or p.kind != "fresh"
            if patch.tensors or patch.forwards:
                runtime.guard.watch("sites", self.law.sites, self._again)
        if patch.tensors and runtime.slots.keys() != patch.tensors.keys():
            runtime.slots = find_slots(network, patch.tensors)
        with (
            runtime.guard.at_rest(),
            patched_forward(patch.forwards) if patch.forwards else nullcontext(),
            swapped(runtime.slots, patch.tensors) if patch.tensors else nullcontext(),
        ):
            yield

    def guard(self) -> None:
        """Look at the random layers in the backward passes to come, as passes that `run` does not make need."""
        self.runtime.guard.watch("sites", self.law.sites, self._again)

    def _again(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Return the arguments of a layer that runs again in the backward pass; None where they cannot be known."""
        return None if self.runtime.modes_learned else self.law.recomputed(module, args)

    def trace(self, inputs: Any) -> Trace:
        """Return what a dry run tells of the network for such inputs, which is found out once."""
        arguments = _arguments(in_network_type(inputs, self.network))
        with self.runtime.modes.lock:
            return self._trace(signature(arguments), arguments)

    def _trace(self, known: Any, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Trace:
        traces = self.runtime.traces
        if known in traces:
            return traces[known]
        found = trace_network(self.network, arguments)
        if _rows(*arguments):  # copies of no row teach nothing
            self.runtime.keep(known, found)
        return found

    def independent_rows(self, inputs: Any) -> bool:
        """Return whether a fresh pass on such inputs draws for each row: copies of a row then are several draws."""
        return self.law.independent_rows(self.trace(inputs) if "fresh" in self.law.traced else None)

    def outputs(self, inputs: Any, p: Pass | None = None, *, patch: Patch | None = None) -> Tensor:
        """Run one pass on inputs of any structure and return the tensor of logits or means.

        Args:
            inputs: B examples.
            p: The pass; None takes the one that the modes ask for. How many rows there are is filled in.
            patch: As in `run`.
        """
        inputs = in_network_type(inputs, self.network)
        args, kwargs = _arguments(inputs)
        if p is None:
            return self.read(self.run(self.present(_rows(args, kwargs)), args, kwargs, patch))
        p.rows = p.rows or _rows(args, kwargs)
        return self.read(self.run(p, args, kwargs, patch))

    def evaluate(self, inputs: Any, keys: Sequence[Key], *, tiled: bool = False, prefix: Any = None) -> Tensor:
        """Evaluate one or several draws on the same inputs.

        Args:
            inputs: B examples.
            keys: The draws; more than one only where the law allows it for such inputs, see `Law.together`.
            tiled: Repeat the inputs before the pass instead of at the first noise, which networks need that
                join activations from before and after it.
            prefix: Remembers what is the same for every draw.

        Returns:
            Outputs (S, B, ...).
        """
        inputs = in_network_type(inputs, self.network)
        rows, draws = batch_rows(inputs), len(keys)
        law = self.law
        stacks = draws > 1 and not tiled and type(law).stacked is not Law.stacked
        if stacks and law.together(None) == "stack":
            return self._stacked(inputs, keys, rows)
        args, kwargs = _arguments(inputs)
        p = Pass("draw", tuple(keys), rows=rows, folded=tiled)
        if (tiled or prefix is not None) and "draw" in law.traced:
            with self.runtime.modes.lock:
                p.trace = self._trace(signature((args, kwargs)), (args, kwargs))
        if tiled:
            args, kwargs = repeat_rows((args, kwargs), draws)
        patch = None
        if prefix is not None:
            p.noise = self.runtime.noise
            made = self.patch(p)
            patch = replace(made, forwards=prefix.forwards(made.forwards))
        output = self.read(self.run(p, args, kwargs, patch))
        if output.shape[0] != draws * rows:
            raise ShapeError(
                f"The network returned {output.shape[0]} rows for {draws} draws of {rows} examples. Its first output "
                "dimension must be the batch."
            )
        return output.reshape(draws, rows, *output.shape[1:])

    def _stacked(self, inputs: Any, keys: Sequence[Key], rows: int) -> Tensor:
        """Evaluate draws whose tensors are stacked, in vectorised passes."""
        runtime, law = self.runtime, self.law
        if any(norm.training for norm in batch_norms(self.network).values()):
            return torch.cat([self.evaluate(inputs, [key]) for key in keys])
        found = []
        with runtime.modes.lock:
            before, runtime.runner = runtime.runner, threading.get_ident()
            try:
                if torch.is_grad_enabled():
                    runtime.guard.watch("sites", law.sites, self._again)
                for tensors, some in law.stacked(keys):
                    if self.statistics is not None:
                        places = [law.row_of(key) + 1 for key in some]
                        tensors |= {name: rows[places] for name, rows in self.statistics.rows.as_dict().items()}
                    found.append(vectorised_pass(self.network, tensors, self.read, inputs))
            finally:
                runtime.runner = before
        output = torch.cat(found)
        if output.ndim < 2 or output.shape[1] != rows:
            raise ShapeError(
                f"The network returned {tuple(output.shape[1:])} for {rows} examples. Its first output dimension must "
                "be the batch."
            )
        return output

    def reference(self, inputs: Any) -> Tensor:
        """Return what the network itself returns in evaluation mode, with its own tensors and without noise."""
        args, kwargs = _arguments(in_network_type(inputs, self.network))
        with self.runtime.modes.lock, evaluation_mode(self.network):
            return self.read(self.run(Pass("mean", rows=_rows(args, kwargs)), args, kwargs, Patch()))

    def read(self, output: Any) -> Tensor:
        """Find the tensor of logits or means in the network's output."""
        return self.likelihood.read(output, self.output_key)

    def split_batch(self, batch: Any) -> tuple[Any, Any]:
        """Split a batch into inputs and targets, each target beside the output that predicts it.

        Floating-point inputs are converted to the network's type, where it has one. Targets stay where they stand in
        the batch, except for causal language models of transformers: their `labels` are the tokens themselves, and the
        output at a token predicts the next one.

        Args:
            batch: `(inputs, targets)`, or a mapping with a target key.

        Returns:
            The inputs and the targets that `loss`, `evaluate` and `calibrate` compare the outputs with.
        """
        inputs, targets = split_batch(batch)
        if self._convention is None:
            self._convention = convention_of(self.network)
        targets = beside_outputs(self._convention, batch, inputs, targets, self.likelihood.ignore_index)
        return in_network_type(inputs, self.network), targets

    # -- modes ----------------------------------------------------------------------------------------------

    @property
    def lock(self) -> Any:
        """The lock that a pass holds."""
        return self.runtime.modes.lock

    @contextmanager
    def mean(self) -> Iterator[Posterior]:
        """Switch the noise off for the passes inside.

        The network then is the one at the posterior's mean; the mode before returns in any case. Like every mode, it is
        that of the thread or asyncio task which entered it, and of the tasks that this one starts inside; others are
        neither changed nor kept waiting. A generator that is suspended inside lends it to its caller meanwhile.
        """
        self.require_mean()
        with self.runtime.modes.enter(kind="mean", keys=()):
            yield self

    @contextmanager
    def drawn(self, *keys: Key) -> Iterator[Posterior]:
        """Fix the draws for the passes inside: each is the function named by the key.

        With several keys, a pass on B rows returns all draws together as (S B, ...) where
        `Law.together` says "rows".
        """
        with self.runtime.modes.enter(kind="draw", keys=keys):
            yield self

    @contextmanager
    def member(self, index: int) -> Iterator[Posterior]:
        """Fix the member, component or chain for the passes inside: losses and means are its own."""
        self.law.check_part(index)
        with self.runtime.modes.enter(part=index):
            yield self

    @property
    def present_part(self) -> Any:
        """The part of a mixture that was entered with `member`; None outside."""
        return self.runtime.modes.present("part", None)

    def draw(self, seed: int = 0) -> Draw:
        """Return one coherent function of the posterior.

        The same seed is the same function, on every input: a function draw costs no copy of the network.
        """
        return Draw(self, self.keys(1, seed)[0])

    @renamed(num_samples="num_draws")
    def keys(self, num_draws: int | None, seed: int) -> list[Key]:
        """Name `num_draws` draws of the posterior; None takes its own number.

        Laws with a finite number of functions, or with parts, balance them here.
        """
        if self.statistics is not None:
            self.statistics.require_fresh()
        return self.law.keys(num_draws, seed)

    default_samples = old_attribute("default_samples", "default_draws")

    @property
    def default_draws(self) -> int:
        """How many draws a prediction takes if the caller does not say."""
        return self.law.default_draws

    @default_draws.setter
    def default_draws(self, number: int) -> None:
        self.law.default_draws = number

    def require_mean(self) -> None:
        """Raise where the posterior has no mean network."""
        answer = self.has_mean()
        if answer is not True:
            raise ValueError(answer)

    def has_mean(self) -> Literal[True] | Refusal:
        """Return whether there is a mean network in the present mode, or why not."""
        answer = self.law.has_mean(self.present_part)
        if answer is True and self.statistics is not None and not bool(self.statistics.fresh[0]):
            return Refusal(
                "The mean network has no batch-normalisation statistics. Call "
                "posterior.refresh_statistics(train_loader) first, or use how='sampling'."
            )
        return answer

    # -- learning -------------------------------------------------------------------------------------------

    @property
    def learned(self) -> Literal[True] | Refusal:
        """True, or a sentence: why nothing is random yet, and what to call.

        Posteriors that are random as they are made (MC dropout, BayesAdapter) have nothing to wait for.
        """
        return self.law.learned

    def refresh_statistics(
        self,
        loader: Iterable[Any],
        *,
        max_batches: int | None = None,
        progress: Callable[[Iterable[int]], Iterable[int]] = iter,
    ) -> None:
        """Re-estimate the batch-normalisation statistics of drawn weights, of the mean and of each draw that has some.

        Costs a pass over the loader for each. Does nothing where the law or the network has no use for it.

        Args:
            loader: Training batches.
            max_batches: How many of them; None takes all.
            progress: Wraps the rows that are worked on.
        """
        if self.statistics is not None:
            rows = progress(self.law.rows_to_refresh())
            self.statistics.refresh(self.network, self.law.row_weights, loader, rows, max_batches=max_batches)

    @renamed(foreign="ood", regulariser="regularizer")
    def loss(
        self,
        batch: Any,
        *,
        num_data: int,
        ood: Any = None,
        regularizer: OODRegularizer | None = None,
        likelihood: str | Likelihood | None = None,
    ) -> LossTerms:
        """Return the loss of a batch, term by term, in mean nats per example.

        Args:
            batch: `(inputs, targets)`, or a mapping with a target key.
            num_data: The size n of the training set; terms that belong to the whole set are divided by it.
            ood: OOD inputs, without targets, on which the posterior is to be uncertain.
            regularizer: How that is asked for; None takes `OODRegularizer()`.
            likelihood: An old way to say what the outputs mean; `convert` takes it.

        Returns:
            The terms by name, with their sum as `.total`.
        """
        if num_data < 1:
            raise ValueError(f"num_data is the number of training examples, but it is {num_data}.")
        method = self.require_method()
        if likelihood is not None:
            self.set_likelihood(likelihood)
            warn_renamed("likelihood= of loss", "convert(network, method, likelihood=...)", stacklevel=4)
        inputs, targets = self.split_batch(batch)
        self.runtime.modes_learned = False  # what was looked at before with gradients on is not what is trained
        if ood is None:
            return method.objective(self, inputs, targets, num_data)
        return (regularizer or method.regularizer()).objective(self, inputs, targets, ood, num_data)

    def require_method(self) -> Method:
        """Return the method, or say why there is none."""
        if self.method is None:
            raise ValueError(
                f"{self.law.described()} is made from another posterior, not trained. Fit that one and make this anew: "
                "bayesify.sample_bank(posterior, n), bayesify.distill(bank)."
            )
        return self.method

    def set_likelihood(self, likelihood: str | Likelihood) -> None:
        """Say what the outputs mean; a likelihood with parameters must be set before the optimizer is made."""
        resolved = as_likelihood(likelihood)
        if isinstance(likelihood, str) and type(resolved) is type(self.likelihood):
            resolved = self.likelihood  # with what it has learned
        reference = next(iter(self.network.parameters()), None)
        if reference is not None:
            resolved = resolved.to(reference.device, torch.float64 if reference.dtype == torch.float64 else None)
        self.likelihood = resolved
        self.law.condition(resolved)

    def make_room(self, tensors: Mapping[str, Tensor]) -> None:
        """Give tensors whose shape only learning decides the shape that they have in a state that will be loaded."""
        self.law.make_room({n.removeprefix("law."): t for n, t in tensors.items() if n.startswith("law.")})
        learning = any(name.startswith("learning.") for name in tensors)
        if not learning:
            self.learning = None
        elif self.learning is None and self.method is not None:
            self.learning = self.method.state(self)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self.make_room({name.removeprefix(prefix): value for name, value in state_dict.items()})
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """Show the method."""
        return f"method={self.method}"


class Draw:
    """One coherent function of a posterior: the same weights for every input it is called on."""

    def __init__(self, posterior: Posterior, key: Key) -> None:
        self.posterior = posterior
        self.key = key

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate the function; arguments and outputs are the network's own."""
        return self.posterior.run(Pass("draw", (self.key,), rows=_rows(args, kwargs)), args, kwargs)

    def network(self) -> nn.Module:
        """Return the function as a plain network with memory of its own.

        Raises:
            ValueError: The randomness is in layers, and not in the network's weights alone.
        """
        tensors = self.posterior.weights(self.key)
        if isinstance(tensors, Refusal):
            raise ValueError(f"This draw is no plain network: {tensors}. Call the draw itself.")
        network = self.posterior.plain_network()
        state = {**dict(network.named_parameters()), **dict(network.named_buffers())}
        with torch.no_grad():
            for name, tensor in tensors.items():
                state[name].copy_(tensor)
        return network

    def __repr__(self) -> str:
        """Show the key."""
        return f"Draw({self.key})"


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    found: tuple[tuple[Any, ...], dict[str, Any]] = call(lambda *args, **kwargs: (args, kwargs), inputs)
    return found


def _rows(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    try:
        return batch_rows([list(args), dict(kwargs)])
    except ValueError:
        return 1  # inputs without tensors: nothing to fold


def require_posterior(value: object) -> None:
    """Raise, and say what to do, if somebody gives a plain network."""
    if not isinstance(value, Posterior):
        raise TypeError(
            f"This needs a posterior, but got a {type(value).__name__}. Make one of your network first: "
            "posterior = bayesify.convert(network, method)."
        )


def warn_unless_learned(posterior: Posterior, *, stacklevel: int = 3) -> None:
    """Warn, once for each posterior, if it is not random because it never learned."""
    if posterior._asked:
        return
    posterior._asked = True
    reason = posterior.learned
    if reason is not True:
        warnings.warn(f"This posterior has no uncertainty yet: {reason}", stacklevel=stacklevel)
