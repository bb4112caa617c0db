"""The predictor that needs no draws, as a file that runs without this package."""

from __future__ import annotations

import logging
import math
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bayesify._core.files import write_atomically
from bayesify._core.modes import evaluation_mode
from bayesify._core.trees import batch_rows, call, map_tensors, repeat_rows, slice_rows, to_device
from bayesify.laws import Pass, Posterior, require_posterior, warn_unless_learned
from bayesify.likelihoods.prediction import Prediction
from bayesify.prediction import Mean, Predictor, Streamlined, Views, as_predictor, as_views, posterior_device
from bayesify.prediction.views import ONE

if TYPE_CHECKING:
    from torch.export import ExportedProgram

__all__ = ["export"]

Outputs = Callable[[Any], dict[str, Tensor]]

_SUFFIXES = (".pt2", ".onnx")
_SIZES = (3, 5, 7, 11, 13, 17, 19, 23)  # of the batch that is traced: more than one, and like no other size


def export(
    posterior: Posterior,
    example: Any,
    path: str | Path | None = None,
    *,
    how: str | Predictor = "streamlined",
    views: Views | Sequence[Any] | str | None = None,
    variance_scale: float = 1.0,
) -> ExportedProgram:
    """Turn a prediction without draws into one graph of torch's own operations, and write it to a file.

    The program takes what the network takes, in batches of any size, and returns tensors by name. Classes: `probs`
    (B, C), `total`, `aleatoric` and `epistemic`; regression: `mean`, `variance`, `aleatoric` and `epistemic`. The
    weights and their variances are in the file, and nothing of this package is. The file is put in place in one step.

    Args:
        posterior: A posterior that `predict(how=...)` takes.
        example: A batch, as for `predict`; its shapes, but for the number of examples, are the program's.
        path: `*.pt2` for `torch.export.load`, `*.onnx` for ONNX Runtime and others, which takes the extra
            `bayesify[export]`; None writes nothing.
        how: As in `predict`, but for "sampling"; see `capabilities`. Backward passes are traced as well.
        views: As in `predict`; the program sees the inputs as they are, and makes a pass for each view.
        variance_scale: From `fit_variance_scale`.

    Returns:
        The program. `program.module()` is a network that can be called, and compiled without a graph break:
        `torch.compile(program.module(), fullgraph=True)`.

    Example:
        >>> from bayesify import BayesAdapter, convert, predict
        >>> posterior = convert(nn.Linear(4, 3), BayesAdapter.example())
        >>> x = torch.randn(5, 4)
        >>> outputs = export(posterior, x).module()(x)
        >>> sorted(outputs), torch.equal(outputs["probs"], predict(posterior, x, how="streamlined").probs)
        (['aleatoric', 'epistemic', 'probs', 'total'], True)
    """
    require_posterior(posterior)
    warn_unless_learned(posterior)
    predictor = as_predictor(how, posterior, stacklevel=4)
    if predictor.random:
        raise ValueError(
            f"how={how!r} cannot be exported: a program holds one pass without draws. Use how='streamlined', "
            "how='linearised' or how='mean'; a posterior that only draws can predict with is distilled or replaced by "
            "one with a form of its own first."
        )
    if not 0 <= variance_scale < math.inf:
        raise ValueError(f"variance_scale must be at least 0 and finite, but it is {variance_scale}.")
    target = None if path is None else Path(path)
    if target is not None and target.suffix not in _SUFFIXES:
        raise ValueError(f"{target} must end in .pt2 (torch.export) or .onnx, which says what to write.")
    if target is not None and target.suffix == ".onnx":
        _require_onnx()
    example = _several(to_device(example, posterior_device(posterior)))
    with posterior.lock, evaluation_mode(posterior), torch.inference_mode(False), torch.no_grad():
        seen = as_views(views, posterior.views)
        predict, backward = _predicted(posterior, example, predictor, variance_scale, seen)
        names = list(predict(example))
        network = _Predictor(_flattened(predict, example) if backward() else predict, example)
        try:
            program = _traced(network, example)
        except torch._dynamo.exc.UserError as error:
            raise ValueError(
                "This prediction cannot be traced for every size of a batch: something in it makes the number of "
                f"examples a constant. {_advice(posterior, example)} torch says: {_plain(error)}"
            ) from error
    if target is not None and target.suffix == ".pt2":
        _write(target, lambda file: torch.export.save(program, file))
    elif target is not None:
        _write(target, lambda file: _save_onnx(program, example, names, file))
    return program


class _Predictor(nn.Module):
    """What is traced: inputs to named tensors."""

    def __init__(self, predict: Outputs, example: Any) -> None:
        super().__init__()
        self.predict = predict
        if isinstance(example, Mapping):
            names = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in example]

            def forward(**inputs: Any) -> dict[str, Tensor]:
                return predict(inputs)

            forward.__signature__ = Signature(names)  # type: ignore[attr-defined] # the exporter asks for the names
            self.forward = forward  # type: ignore[assignment, method-assign]

    def forward(self, *args: Any) -> dict[str, Tensor]:
        """Predict."""
        return self.predict(args if len(args) > 1 else args[0])


def _tensors_of(prediction: Prediction) -> dict[str, Tensor]:
    if not prediction.answers:
        raise ValueError(f"There is no program for a {type(prediction).__name__}, only for classes and regression.")
    return {name: getattr(prediction, name).clone() for name in prediction.answers}


def _predicted(
    posterior: Posterior, example: Any, predictor: Predictor, scale: float, views: Views
) -> tuple[Outputs, Callable[[], bool]]:
    """Return the function to be traced, and whether it took a backward pass or derivatives when it was last run."""
    if isinstance(predictor, Mean):
        return lambda inputs: _tensors_of(_mean(posterior, inputs, views)), lambda: False
    from bayesify.prediction.one_pass import OnePass

    found = OnePass(posterior, predictor, example)
    if found.looped:
        other = None if predictor == Streamlined() else OnePass(posterior, Streamlined(), example)
        nearest = "mean" if other is None or other.looped else "streamlined"
        raise ValueError(
            "A weight is used in a way without a formula, as in an LSTM, so that examples are looped over, which a "
            f"program cannot do for batches of every size. Export how={nearest!r}, or call "
            f"predict(how={predictor.name!r})."
        )

    def run(inputs: Any) -> dict[str, Tensor]:
        return _tensors_of(found.predict(inputs, num_draws=None, seed=0, scale=scale, views=views))

    return run, lambda: found.differentiated


def _flattened(predict: Outputs, example: Any) -> Outputs:
    """Write the operations of a backward pass down as those of a forward pass."""
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from bayesify.prediction.backward_operations import BACKWARD, PlainPooling

    trace = make_fx(predict, BACKWARD, tracing_mode="symbolic", _allow_non_fake_inputs=True)
    # The derivatives of MATH are products and softmax, not an operation of torch's own.
    with PlainPooling(), sdpa_kernel(SDPBackend.MATH):
        made: Outputs = trace(example)
    return made


def _mean(posterior: Posterior, inputs: Any, views: Views) -> Prediction:
    stream, part = posterior.likelihood.stream(), posterior.present_part
    posterior.require_mean()
    for seen, one in views.streams(posterior.likelihood, inputs, stream):
        with posterior.patched(posterior.patch(Pass("mean", part=part))):
            one.add(posterior.read(call(posterior.network, seen))[None], part=part if isinstance(part, int) else 0)
    return stream.result()


def _several(example: Any) -> Any:
    """Return a batch of a few examples."""
    if not batch_rows(example):
        raise ValueError("The example holds no rows: give a batch as predict takes it.")
    sizes: set[int] = set()
    map_tensors(lambda tensor: sizes.update(tensor.shape[1:]), example)
    rows = next(size for size in _SIZES if size not in sizes)
    few = slice_rows(example, 0, rows)
    return slice_rows(repeat_rows(few, rows), 0, rows)


def _traced(network: nn.Module, example: Any) -> ExportedProgram:
    rows = batch_rows(example)

    def dynamic(tensor: Tensor) -> Any:
        return {0: torch.export.Dim.DYNAMIC} if tensor.ndim and tensor.shape[0] == rows else None

    args, kwargs = call(lambda *args, **kwargs: (args, kwargs), example)
    shapes: Any = map_tensors(dynamic, kwargs) if kwargs else {"args": map_tensors(dynamic, args)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter, about itself
        return torch.export.export(network, args, kwargs, dynamic_shapes=shapes, strict=False)


def _advice(posterior: Posterior, example: Any) -> str:
    """Say what makes the number of examples a constant: the network, if it cannot be traced on its own either."""
    try:
        _traced(_Predictor(lambda inputs: _tensors_of(_mean(posterior, inputs, ONE)), example), example)
    except torch._dynamo.exc.UserError:
        return "In the network's forward, write x.shape[0] for len(x) and no number that depends on the batch."
    return (
        "The network itself can be traced, so it is the prediction: export how=Streamlined(engine='moments') or "
        "how='mean'."
    )


def _require_onnx() -> None:
    from importlib.util import find_spec

    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if missing:
        raise ImportError(f"An ONNX file needs the module {missing[0]!r}: pip install 'bayesify[export]'")


def _save_onnx(program: ExportedProgram, example: Any, outputs: list[str], file: str) -> None:
    inputs = list(example) if isinstance(example, Mapping) else None
    if inputs is None:
        count = len(example) if isinstance(example, list | tuple) else 1
        inputs = ["input"] if count == 1 else [f"input_{index}" for index in range(count)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            made = torch.onnx.export(
                program, (), input_names=inputs, output_names=outputs, dynamo=True, verbose=False, optimize=False
            )
        except RuntimeError as error:
            raise ValueError(
                f"ONNX has no operation for {_missing(error)}, of its backward pass as a rule. Write a .pt2 "
                "file, or export how=Streamlined(engine='moments'), which has no backward pass; "
                "bayesify.check(posterior, loader, how=...) says whether it can be trusted. torch says: "
                f"{_plain(error)}"
            ) from error
        assert made is not None
        _shorten(made.model)
        made.save(file)


def _shorten(model: Any) -> None:
    """Take out what is constant and what nobody reads.

    The exporter's own optimiser also looks for patterns of operations, at every node for each: minutes for the
    thousands of a backward pass, where this takes a second, and runtimes look for patterns of their own.
    """
    from onnxscript import optimizer

    level = (log := logging.getLogger("onnxscript.optimizer")).level
    log.setLevel(logging.ERROR)  # it tells of what it leaves alone
    try:
        optimizer.inline(model)
        optimizer.fold_constants(model)
        optimizer.remove_unused_nodes(model)
    finally:
        log.setLevel(level)


def _missing(error: BaseException) -> str:
    """Return the operations that the exporter did not find, as far as its errors name them.

    >>> _missing(ValueError("No ONNX function found for <OpOverload(op='aten.grid_sampler_2d', overload='default')>."))
    'aten.grid_sampler_2d in this prediction'
    """
    found: dict[str, None] = {}
    cause: BaseException | None = error
    while cause is not None:
        found |= dict.fromkeys(re.findall(r"No ONNX function found for <OpOverload\(op='([\w.]+)'", str(cause)))
        cause = cause.__cause__ or cause.__context__
    return f"{', '.join(found)} in this prediction" if found else "a part of this prediction"


def _plain(error: Exception) -> str:
    """Return the first line of a message without the colours of a terminal."""
    return re.sub(r"\x1b\[\d+m", "", str(error).splitlines()[0])


def _write(target: Path, save: Callable[[str], None]) -> None:
    """Write to a file of another name first."""
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, f"program{target.suffix}")
        save(file)
        write_atomically(target, Path(file).read_bytes())
