"""Passes: one call of the network, with what its law puts in the places of its own tensors and forwards."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from bayesify._core.inputs import in_network_type
from bayesify._core.modes import all_tensors, evaluation_mode
from bayesify._core.random import Key
from bayesify._core.seen import InputsSeen
from bayesify._core.sharing import Shared, alias, copied
from bayesify._core.state import state_of
from bayesify._core.trees import CACHE, arguments_of, batch_rows, batch_tensor, repeat_rows, without_cache
from bayesify.laws.components import Component
from bayesify.laws.law import Law
from bayesify.laws.norm_statistics import statistics_apart, statistics_kept, tracking_norms
from bayesify.laws.passes import Pass, Patch, Refusal, ShapeError
from bayesify.laws.patching import compilable, find_slots, patched_forward, swapped
from bayesify.laws.recomputation import without_guards
from bayesify.laws.runtime import Runtime
from bayesify.laws.stacking import Stack, Stacking
from bayesify.laws.statistics import Statistics
from bayesify.laws.tensors import batch_norms, tensor_of
from bayesify.laws.trace import Trace, signature, trace_network
from bayesify.likelihoods import Likelihood

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing from Python 3.11 on

__all__ = ["RandomNetwork", "rows_of"]

_NOTHING = nullcontext()


def _module(name: str) -> property:
    """Return a property for a module that each pass asks for many times, and that torch looks for last."""

    def get(self: nn.Module) -> Any:
        try:
            return self._modules[name]
        except KeyError:
            raise AttributeError(name) from None

    return property(get)


class RandomNetwork(nn.Module):
    """A network, the law of what is random in it, and the passes that are made of both.

    A pass is given what it needs and leaves nothing behind: what a law puts into the network is there under a lock,
    for one pass. `Posterior` adds what such a network is for.

    Args:
        network: The network.
        law: What is random in it.

    Attributes:
        likelihood: What the outputs mean; whoever inherits sets it.
        output_key: Which entry of a structured output holds the logits or means; None finds it.
        statistics: Batch-normalisation statistics of drawn weights, for laws and networks that have such.
        inputs_seen: How the inputs of the last pass were built, without their values.
        shared: Which of the network's tensors have their memory in common with another network.
        runtime: The lock, the modes and the dry runs, which no copy takes over.
    """

    if TYPE_CHECKING:
        network: nn.Module
        law: Law
        likelihood: Likelihood
    else:
        network, law, likelihood = (_module(name) for name in ("network", "law", "likelihood"))

    def __init__(self, network: nn.Module, law: Law) -> None:
        super().__init__()
        without_guards(network)  # of a posterior that it was copied from
        self.network = network
        self.law = law
        draws = law.statistics_rows if batch_norms(network) else 0
        self.statistics = Statistics(network, draws) if draws else None
        law.__dict__["statistics"] = self.statistics
        self.output_key: str | int | None = None
        self.inputs_seen = InputsSeen()
        self.shared = Shared(network)
        self.runtime = Runtime()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy, which has the same memory in common."""
        self.shared.own(self.network)
        for name in self.shared.names:
            alias(tensor_of(self.network, name), memo)
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__setstate__(copy.deepcopy(self.__dict__, memo))
        return made

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Leave behind what belongs to the posterior that this one is a copy of."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        without_guards(self.network)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run one pass in the present mode; arguments and outputs are the network's own."""
        return self.run(self.present(rows_of(args, kwargs)), args, kwargs)

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
                if p.kind == "draw" and not (answer := self._continues(kwargs)):
                    raise ValueError(answer)
                if patch is None and p.trace is None and p.kind in self.law.traced:
                    arguments = (args, without_cache(kwargs))
                    known = signature(arguments)
                    p.trace = self._trace(known, arguments)
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
            if p.rows and kwargs.get(CACHE) is None:
                self.inputs_seen.note(args, dict(kwargs))
            return output

    def _continues(self, kwargs: Mapping[str, Any]) -> Literal[True] | Refusal:
        """Return whether a draw can go on from a key-value cache, where there is one."""
        return True if kwargs.get(CACHE) is None else self.law.continues

    def patch(self, p: Pass) -> Patch:
        """Return what the law puts in the network's place, with the statistics that belong to drawn weights."""
        stacking = self.law.stacking(p.trace) if len(p.keys) > 1 else None
        if stacking is not None:
            return self._stacked(p, stacking)
        patch = self.law.patch(p)
        if self.statistics is None or (row := self.law.statistics_row(p)) is None:
            return patch
        return replace(patch, tensors={**patch.tensors, **self.statistics.of(self.network, row)})

    def _stacked(self, p: Pass, stacking: Stacking) -> Patch:
        """Return layers that have the tensors of several draws."""
        stacks = self._drawn(p.keys, stacking)
        if self.statistics is not None:
            places = [self.law.row_of(key) + 1 for key in p.keys]
            stacks |= {name: rows[places] for name, rows in self.statistics.rows.as_dict().items()}
        return Patch(self.law.own.as_dict(), stacking.forwards(p, stacks))

    def _drawn(self, keys: tuple[Key, ...], stacking: Stacking) -> dict[str, Stack]:
        """Return the tensors of several draws; from memory if they are those of before."""
        law = self.law
        if not law.made or torch.is_grad_enabled():
            return law.stacked(keys)
        state = state_of([*stacking.held(), *all_tensors(law), *all_tensors(self.likelihood)])
        return self.runtime.kept.get(keys, state, len(keys) * stacking.size, lambda: law.stacked(keys))

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

    def plain_network(self, tensors: Mapping[str, Tensor] | None = None, *, share: bool = False) -> nn.Module:
        """Return a copy of the network, as a plain module.

        Args:
            tensors: What stands in the places of the network's own parameters and buffers, by name. Where it is given,
                parameters that are not among them share their memory with this network's; None copies all.
            share: Whether tensors whose memory this network has in common with another are not copied even so.
        """
        with self.runtime.modes.lock:
            self.shared.own(self.network)
            if tensors is None:
                return without_guards(copied(self.network, self.shared.names if share else ()))
            return without_guards(copy.deepcopy(self.network, _shared(self.network, tensors)))

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

    def _prepared(self, p: Pass) -> AbstractContextManager[None]:
        """Arrange for the statistics of normalisation, which the law's forwards build on."""
        return self._norms_prepared(p) if self.law.keep_statistics or p.ood_rows else _NOTHING

    @contextmanager
    def _norms_prepared(self, p: Pass) -> Iterator[None]:
        network, keep = self.network, self.law.keep_statistics
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
            runtime.guard.at_rest() if runtime.guard.layers else _NOTHING,
            patched_forward(compilable(network, patch.forwards)) if patch.forwards else _NOTHING,
            swapped(runtime.slots, patch.tensors) if patch.tensors else _NOTHING,
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
        arguments = arguments_of(in_network_type(inputs, self.network))
        with self.runtime.modes.lock:
            return self._trace(signature(arguments), arguments)

    def _trace(self, known: Any, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Trace:
        traces = self.runtime.traces
        if known in traces:
            return traces[known]
        found = trace_network(self.network, arguments)
        if rows_of(*arguments):  # copies of no row teach nothing
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
        args, kwargs = arguments_of(inputs)
        if p is None:
            return self.read(self.run(self.present(rows_of(args, kwargs)), args, kwargs, patch))
        p.rows = p.rows or rows_of(args, kwargs)
        return self.read(self.run(p, args, kwargs, patch))

    def evaluate(
        self,
        inputs: Any,
        keys: Sequence[Key],
        *,
        tiled: bool = False,
        prefix: Any = None,
        trace: Trace | None = None,
    ) -> Tensor:
        """Evaluate one or several draws on the same inputs.

        Args:
            inputs: B examples.
            keys: The draws; more than one only where the law allows it for such inputs, see `Law.together`.
            tiled: Repeat the inputs before the pass instead of at the first noise, which networks need that
                join activations from before and after it.
            prefix: Remembers what is the same for every draw.
            trace: `self.trace(inputs)`, where it is known.

        Returns:
            Outputs (S, B, ...).
        """
        inputs = in_network_type(inputs, self.network)
        example, draws = batch_tensor(inputs), len(keys)
        rows = example.shape[0]
        args, kwargs = arguments_of(inputs)
        p = Pass("draw", tuple(keys), rows=rows, folded=tiled, noise=self.runtime.noise, example=example)
        if draws > 1 or ((tiled or prefix is not None) and "draw" in self.law.traced):
            p.trace = trace or self.trace(inputs)
        if tiled:
            args, kwargs = repeat_rows((args, kwargs), draws)
        patch = None
        if prefix is not None or draws > 1:
            patch = self.patch(p)
        if patch is not None and prefix is not None:
            patch = replace(patch, forwards=prefix.forwards(patch.forwards))
        output = self.read(self.run(p, args, kwargs, patch))
        if output.shape[0] != draws * rows:
            raise ShapeError(
                f"The network returned {output.shape[0]} rows for {draws} draws of {rows} examples. Its first output "
                "dimension must be the batch; one example alone is a batch of one, x[None]."
            )
        return output.reshape(draws, rows, *output.shape[1:])

    def reference(self, inputs: Any) -> Tensor:
        """Return what the network itself returns in evaluation mode, with its own tensors and without noise."""
        args, kwargs = arguments_of(in_network_type(inputs, self.network))
        with self.runtime.modes.lock, evaluation_mode(self.network):
            return self.read(self.run(Pass("mean", rows=rows_of(args, kwargs)), args, kwargs, Patch()))

    def read(self, output: Any) -> Tensor:
        """Find the tensor of logits or means in the network's output."""
        return self.likelihood.read(output, self.output_key)


def _shared(network: nn.Module, tensors: Mapping[str, Tensor]) -> dict[int, Any]:
    """Return what a copy takes for the network's tensors, by their `id`: new ones, or parameters of the same memory."""
    made: dict[int, Any] = {}
    for parameter in network.parameters():
        plain = type(parameter) is nn.Parameter  # others, as quantised ones, know more than their numbers
        made[id(parameter)] = nn.Parameter(parameter.detach(), parameter.requires_grad) if plain else parameter
    for name, tensor in tensors.items():
        own = tensor_of(network, name)
        value = tensor.detach().to(own.dtype, copy=True).contiguous()
        made[id(own)] = nn.Parameter(value, own.requires_grad) if isinstance(own, nn.Parameter) else value
    return made


def rows_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Return how many examples there are in the arguments of the network's forward."""
    try:
        return batch_rows([list(args), dict(kwargs)])
    except ValueError:
        return 1  # inputs without tensors: nothing to fold
