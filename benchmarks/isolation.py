"""Two ways to put a pass's tensors and forwards into a network, compared by cost and by what comes out right.

lock:    they stand in the one shared network for the time of a pass, under a lock, and are taken out after it.
replica: they are put into a shallow copy of the module tree (modules copied, tensors shared), which is kept for each
         thread in prediction and made for each pass in training.

`OMP_NUM_THREADS=1 python -m benchmarks.isolation` prints, for four networks at two batch sizes, the processor's time of
either way as a multiple of the plain pass, interleaved, and whether cases that users meet come out right. All weights
are swapped and all layers that hold one have another forward; the tensors themselves are ready, so that what is timed
is the way in and out.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from experiments.networks import CifarResNet

RESULTS = Path(__file__).parent / "results" / "isolation.json"
Tensors = dict[str, Tensor]
Pass = Callable[..., Any]


# -- the two ways -----------------------------------------------------------------------------------------------


def replica(network: nn.Module) -> nn.Module:
    """Return a shallow copy of a module tree: modules copied, each once, tensors, hooks and other state shared."""
    copies: dict[int, nn.Module] = {}
    for module in network.modules():
        twin = object.__new__(type(module))  # not module.__new__, which fully_shard changes
        twin.__dict__ = module.__dict__.copy()
        twin.__dict__["_parameters"] = module._parameters.copy()
        twin.__dict__["_buffers"] = module._buffers.copy()
        copies[id(module)] = twin
    for module in network.modules():
        children = {name: None if child is None else copies[id(child)] for name, child in module._modules.items()}
        copies[id(module)].__dict__["_modules"] = children
    return copies[id(network)]


def places(network: nn.Module, names: Tensors) -> tuple[list[tuple[dict[str, Any], str, str]], list[nn.Module]]:
    """Return where the tensors are held, and the modules that hold them."""
    slots, sites = [], []
    for prefix, module in network.named_modules():
        found = [(module._parameters, k, f"{prefix}.{k}" if prefix else k) for k in module._parameters]
        found = [slot for slot in found if slot[2] in names]
        if found:
            slots += found
            sites.append(module)
    return slots, sites


def put(where: tuple[list[tuple[dict[str, Any], str, str]], list[nn.Module]], tensors: Tensors, forwards: bool) -> None:
    """Put tensors and forwards in."""
    slots, sites = where
    for held, key, name in slots:
        held[key] = tensors[name]
    for module in sites if forwards else ():
        module.__dict__["forward"] = partial(type(module).forward, module)


class Lock:
    """Tensors and forwards in the shared network, for one pass."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.known: dict[nn.Module, Any] = {}

    def __call__(self, network: nn.Module, tensors: Tensors, call: Any, forwards: bool = True) -> Any:
        """Run a pass, and put the network's own back in any case."""
        with self.lock:
            if network not in self.known:
                self.known[network] = places(network, tensors)
            slots, sites = where = self.known[network]
            own = [held[key] for held, key, _ in slots]
            before = [module.__dict__.get("forward") for module in sites]
            try:
                put(where, tensors, forwards)
                return call(network)
            finally:
                for (held, key, _), tensor in zip(slots, own, strict=True):
                    held[key] = tensor
                for module, forward in zip(sites, before, strict=True):
                    if forward is not None:
                        module.__dict__["forward"] = forward
                    elif forwards:
                        del module.__dict__["forward"]


class Replica:
    """Tensors and forwards in a copy of the module tree."""

    def __init__(self, *, kept: bool) -> None:
        self.kept, self.local = kept, threading.local()

    def __call__(self, network: nn.Module, tensors: Tensors, call: Any, forwards: bool = True) -> Any:
        """Run a pass."""
        if not self.kept:
            twin = replica(network)
            put(places(twin, tensors), tensors, forwards)
            return call(twin)
        known = self.local.__dict__
        if network not in known:
            twin = replica(network)
            known[network] = twin, places(twin, tensors)
        twin, where = known[network]
        put(where, tensors, forwards)
        return call(twin)


# -- cost -------------------------------------------------------------------------------------------------------


def mlp() -> nn.Module:
    """Return a small MLP."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def distilbert() -> nn.Module:
    """Return a DistilBERT of two layers and 64 features."""
    from tests.torchvision_stub import declare_torchvision_operators

    declare_torchvision_operators()
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    config = DistilBertConfig(vocab_size=500, dim=64, n_layers=2, n_heads=4, hidden_dim=128, num_labels=4)
    return DistilBertForSequenceClassification(config)


def resnet18() -> nn.Module:
    """Return torchvision's ResNet-18."""
    from tests.torchvision_stub import import_torchvision

    network: nn.Module = import_torchvision().models.resnet18(num_classes=10)
    return network


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "MLP 64-128-10": (mlp, lambda b: torch.randn(b, 64)),
    "ResNet-20": (lambda: CifarResNet(3), lambda b: torch.randn(b, 3, 32, 32)),
    "ResNet-18, 64 x 64": (resnet18, lambda b: torch.randn(b, 3, 64, 64)),
    "DistilBERT, 2 layers": (distilbert, lambda b: torch.randint(1, 500, (b, 16))),
}


def logits(network: nn.Module, x: Any) -> Tensor:
    """Return the outputs."""
    out = network(x)
    return out if isinstance(out, Tensor) else out.logits


def other_weights(network: nn.Module, *, gradients: bool = False) -> Tensors:
    """Return a tensor for each parameter, like a draw's."""
    draws = {name: (p * 1.01).detach() for name, p in network.named_parameters()}
    return {name: tensor.requires_grad_(gradients) for name, tensor in draws.items()}


def medians(functions: dict[str, Callable[[], Any]], repeats: int, inner: int) -> dict[str, float]:
    """Return the median time of each over the first, in turn; the first in microseconds too."""
    for function in functions.values():
        function()
    rounds = []
    for _ in range(repeats):
        row = {}
        for name, function in functions.items():
            began = time.process_time()
            for _ in range(inner):
                function()
            row[name] = time.process_time() - began
        rounds.append(row)
    first = next(iter(functions))
    ratios = {n: round(statistics.median(r[n] / r[first] for r in rounds), 3) for n in functions if n != first}
    return {f"{first} (us)": round(1e6 * statistics.median(r[first] for r in rounds) / inner, 1), **ratios}


def cost(repeats: int) -> dict[str, dict[str, float]]:
    """Return the cost of either way as a multiple of the plain pass."""
    table = {}
    for name, (make, inputs) in NETWORKS.items():
        for batch in (1, 32):
            torch.manual_seed(0)
            network, x, y = make().eval(), inputs(batch), torch.zeros(batch, dtype=torch.long)
            tensors = other_weights(network)
            ways = {"lock": Lock(), "replica kept": Replica(kept=True), "replica made": Replica(kept=False)}

            def plain(network: nn.Module = network, x: Any = x) -> Tensor:
                with torch.no_grad():
                    return logits(network, x)

            def predicted(way: Any, network: nn.Module = network, x: Any = x, t: Tensors = tensors) -> Any:
                with torch.no_grad():
                    return way(network, t, partial(logits, x=x))

            inner = max(1, int(0.02 / _seconds(plain)))
            passes = {way: partial(predicted, run) for way, run in ways.items()}
            table[f"predict, {name}, batch {batch}"] = medians({"plain": plain, **passes}, repeats, inner)

            trained = other_weights(network, gradients=True)
            own = dict(network.named_parameters())

            def step(way: Any, t: Tensors, network: nn.Module = network, x: Any = x, y: Tensor = y) -> Any:
                loss = cross_entropy(way(network, t, partial(logits, x=x)), y)
                return torch.autograd.grad(loss, list(t.values()), allow_unused=True)

            first = partial(step, lambda network, t, call: call(network), own)
            inner = max(1, int(0.02 / _seconds(first)))
            passes = {way: partial(step, ways[way], trained) for way in ("lock", "replica made")}
            table[f"train, {name}, batch {batch}"] = medians({"plain": first, **passes}, repeats, inner)
    return table


def _seconds(function: Callable[[], Any]) -> float:
    for _ in range(3):
        function()
    began = time.process_time()
    for _ in range(5):
        function()
    return (time.process_time() - began) / 5


# -- what comes out right ---------------------------------------------------------------------------------------


class Block(nn.Module):
    """Three layers, the middle ones checkpointed, written in the ways that users write networks."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.a, self.b, self.last = nn.Linear(5, 6), nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 3)
        self.order = [self.a, self.b] if kind == "modules in a plain list" else None
        self.run = (lambda h: self.b(torch.tanh(self.a(h)))) if kind == "a closure over self" else None
        if kind == "a bound method as an attribute":
            self.run = self.block
        self.cache: Tensor | None = None
        self.calls = 0

    def block(self, h: Tensor) -> Tensor:
        """Run the layers in the middle."""
        return self.b(torch.tanh(self.a(h)))

    def forward(self, x: Tensor) -> Tensor:
        """Run all."""
        h = self.first(x)
        if self.kind.startswith("checkpoint"):
            h = checkpoint(self.block, h, use_reentrant="True" in self.kind)
            if "used twice" in self.kind:
                h = checkpoint(self.block, h, use_reentrant="True" in self.kind)
        elif self.order is not None:
            h = self.order[1](torch.tanh(self.order[0](h)))
        else:
            h = (self.run or self.block)(h)
            if "used twice" in self.kind:
                h = (self.run or self.block)(h)
        self.cache, self.calls = h.detach(), self.calls + 1
        return self.last(h)


X = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))


def gradients(way: Pass, network: nn.Module, inputs: Any = X) -> Tensors:
    """Return the gradients at means and standard deviations of Gaussian weights with fixed noise."""
    noise = torch.Generator().manual_seed(1)
    means = {n: p.detach().clone().requires_grad_() for n, p in network.named_parameters()}
    stds = {n: torch.full_like(p, 0.1).requires_grad_() for n, p in means.items()}
    drawn = {n: means[n] + stds[n] * torch.randn(means[n].shape, generator=noise) for n in means}
    logits_ = way(network, drawn, partial(logits, x=inputs))
    logits_.square().sum().backward()
    leaves = {**means, **{f"{n} std": std for n, std in stds.items()}}
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in leaves.items()}


def same(left: Tensors, right: Tensors) -> str:
    """Say whether gradients are equal."""
    worst = max((left[n] - right[n]).abs().max().item() for n in right)
    largest = max(g.abs().max().item() for g in right.values())
    return "right" if worst <= 1e-5 * largest else f"WRONG by {worst / largest:.2g} of the largest, no error"


def asked(question: Callable[[], str]) -> str:
    """Return an answer, or the error."""
    try:
        return question()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"


def written(kind: str, way: Pass) -> str:
    """Compare a network written in some way with the plainly written one."""
    torch.manual_seed(0)
    network = Block(kind)
    plain = Block("used twice" if "used twice" in kind else "plain")
    plain.load_state_dict(network.state_dict())
    return same(gradients(way, network), gradients(Lock(), plain))


def transformer(way: Pass) -> str:
    """Compare transformers' own gradient checkpointing with none."""
    torch.manual_seed(0)
    network = distilbert().train()
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    x = torch.randint(1, 500, (2, 8))
    right = gradients(Lock(), network, x)
    network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    return same(gradients(way, network, x), right)


def vision(way: Pass) -> str:
    """Compare timm's checkpointing with none."""
    from tests.torchvision_stub import declare_torchvision_operators

    declare_torchvision_operators()
    import timm

    torch.manual_seed(0)
    network = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=3).train()
    x = torch.randn(2, 3, 32, 32)
    right = gradients(Lock(), network, x)
    network.set_grad_checkpointing(True)
    return same(gradients(way, network, x), right)


def threads(way: Pass) -> str:
    """Run two threads, each with tensors of its own, and compare with one after the other."""
    torch.manual_seed(0)
    network = CifarResNet(1).eval()
    x = torch.randn(8, 3, 32, 32)
    draws = [{n: p.detach() * (1 + k) for n, p in network.named_parameters()} for k in range(2)]
    wrong = [0, 0]
    with torch.no_grad():
        right = [Lock()(network, draw, partial(logits, x=x)) for draw in draws]

        def work(k: int) -> None:
            with torch.no_grad():
                for _ in range(40):
                    wrong[k] += not torch.equal(way(network, draws[k], partial(logits, x=x)), right[k])

        workers = [threading.Thread(target=work, args=(k,)) for k in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    return "right" if not sum(wrong) else f"WRONG in {sum(wrong)} of 80"


def unlocked(network: nn.Module, tensors: Tensors, call: Any) -> Any:
    """Run a pass in the shared network without a lock: the check that the test of threads can fail."""
    return Lock()(network, tensors, call)


def state(way: Pass) -> str:
    """Ask whether what a forward assigns to its module is found there afterwards."""
    network = Block("plain")
    tensors = other_weights(network)
    for _ in range(2):
        way(network, tensors, partial(logits, x=X))
    return "right" if network.cache is not None and network.calls == 2 else f"LOST: calls = {network.calls} after two"


def counted_batches(way: Pass) -> str:
    """Ask whether batch norm's statistics arrive in the network."""
    network = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)).train()
    way(network, other_weights(network), partial(logits, x=X))
    return "right" if int(network[1].num_batches_tracked) == 1 else "LOST"  # type: ignore[arg-type]


def hooks(way: Pass) -> str:
    """Ask whether a forward hook finds its module by identity."""
    network = Block("plain")
    names = {module: name for name, module in network.named_modules()}
    found: list[str] = []
    network.a.register_forward_hook(lambda module, args, out: found.append(names[module]))
    way(network, other_weights(network), partial(logits, x=X))
    return "right" if found == ["a"] else f"WRONG: {found}"


def mode_after(way: Pass) -> str:
    """Ask whether eval() reaches passes after the first."""
    network = nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.5)).train()
    tensors = other_weights(network)
    way(network, tensors, partial(logits, x=X))
    network.eval()
    out = way(network, tensors, partial(logits, x=X))
    return "right" if bool((out != 0).all()) else "WRONG: dropout is still on after eval()"


def copied(way: Pass) -> str:
    """Ask whether a deep copy that is made while a pass runs is the network."""
    torch.manual_seed(0)
    network = Block("plain")
    tensors = {n: p.detach() + 1 for n, p in network.named_parameters()}
    copies: list[nn.Module] = []
    network.b.register_forward_pre_hook(lambda module, args: copies.append(copy.deepcopy(network)))
    way(network, tensors, partial(logits, x=X))
    same_ = all(torch.equal(p, q) for p, q in zip(copies[0].parameters(), network.parameters(), strict=True))
    return "right" if same_ else "WRONG: it has the pass's tensors (a copy must wait for the lock)"


class Stateless(Block):
    """The same without anything that its forward assigns."""

    def forward(self, x: Tensor) -> Tensor:
        """Run all."""
        return self.last(self.block(self.first(x)))


def compiled(way: Pass, how: str, forwards: bool) -> str:
    """Count the graphs that ten training passes compile, and check the gradients."""
    import torch._dynamo as dynamo

    dynamo.reset()
    graphs = [0]

    def backend(graph: Any, inputs: Any) -> Any:
        del inputs
        graphs[0] += 1
        return graph.forward

    torch.manual_seed(0)
    network = Stateless("plain")
    right = gradients(Lock(), network)
    run = torch.compile(lambda module, x: module(x), backend=backend)
    whole = torch.compile(lambda network, t, x: way(network, t, lambda n: n(x), forwards), backend=backend)
    ways: dict[str, Pass] = {
        "network": lambda network, t, call: way(network, t, call, forwards),
        "call": lambda network, t, call: way(network, t, lambda changed: run(changed, X), forwards),
        "whole": lambda network, t, call: whole(network, t, X),
    }
    if how == "network":
        network.compile(backend=backend)
    answers = [gradients(ways[how], network) for _ in range(10)]
    dynamo.reset()
    return f"{same(answers[-1], right)}; {graphs[0]} graphs for 10 passes"


def sharded(way: Pass) -> str:
    """Run a pass under fully_shard, of one process, and compare."""
    import os

    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29533", RANK="0", WORLD_SIZE="1")
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    network, plain = Block("plain"), Block("plain")
    plain.load_state_dict(network.state_dict())
    right = Lock()(plain, {n: p.detach() + 1 for n, p in plain.named_parameters()}, partial(logits, x=X))
    fully_shard(network, mesh=dist.init_device_mesh("cpu", (1,)))
    network(X).sum().backward()  # fully_shard looks in its first pass which tensors there are; backward shards again
    tensors = {n: p.detach() + 1 for n, p in network.named_parameters()}  # sharded as the network's own
    out = way(network, tensors, partial(logits, x=X))
    return "right" if torch.allclose(out, right) else "WRONG: the pass's tensors were not used, no error"


def references(network: nn.Module) -> list[str]:
    """Return the plain attributes through which a module reaches modules of the tree, which a replica would not own."""
    tree = {id(module) for module in network.modules()}

    def reaches(value: Any, depth: int = 0) -> bool:
        if isinstance(value, nn.Module):
            return id(value) in tree
        if depth > 3:
            return False
        if isinstance(value, list | tuple | set):
            return any(reaches(v, depth + 1) for v in value)
        if isinstance(value, dict):
            return any(reaches(v, depth + 1) for v in value.values())
        if isinstance(value, partial):
            return reaches([value.func, value.args, value.keywords], depth + 1)
        closure = inspect.getclosurevars(value).nonlocals if inspect.isfunction(value) else {}
        inside = [getattr(value, "__self__", None), *closure.values()]
        return any(v is not None and reaches(v, depth + 1) for v in inside)

    own = {"_parameters", "_buffers", "_modules"}
    return [
        f"{type(module).__name__}.{key}"
        for module in network.modules()
        for key, value in module.__dict__.items()
        if key not in own and reaches(value)
    ]


def zoo() -> dict[str, Any]:
    """Count the published architectures whose modules reach each other by plain attributes: one of each family."""
    from tests.torchvision_stub import import_torchvision

    models = import_torchvision().models
    import timm
    from timm.models import _registry as registry

    makers: dict[str, Callable[[], nn.Module]] = {
        f"torchvision {name}": partial(models.get_model, name, weights=None) for name in models.list_models(models)
    }
    families = {module: sorted(names)[0] for module, names in registry._module_to_models.items() if names}
    makers |= {f"timm {name}": partial(timm.create_model, name) for name in families.values()}
    from transformers import AutoConfig, AutoModel
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    makers |= {
        f"transformers {name}": (lambda name=name: AutoModel.from_config(AutoConfig.for_model(name)))
        for name in MODEL_MAPPING_NAMES
    }
    found, made, failed = {}, 0, 0
    for name, make in makers.items():
        try:
            with torch.device("meta"):
                network = make()
        except Exception:
            failed += 1
            continue
        made += 1
        if reached := references(network):
            found[name] = sorted(set(reached))[:4]
    return {"made": made, "could not be made": failed, "with such attributes": found}


def cases(way: Pass) -> dict[str, str]:
    """Return what comes out, by case."""
    kinds = ("plain", "checkpoint, use_reentrant=False", "checkpoint, use_reentrant=True",
             "checkpoint, used twice, use_reentrant=False", "checkpoint, used twice, use_reentrant=True",
             "modules in a plain list", "a closure over self", "a bound method as an attribute")  # fmt: skip
    questions: dict[str, Callable[[], str]] = {kind: partial(written, kind, way) for kind in kinds}
    questions |= {
        "transformers, gradient checkpointing": partial(transformer, way),
        "timm, gradient checkpointing": partial(vision, way),
        "two threads": partial(threads, way),
        "state assigned in forward": partial(state, way),
        "statistics of batch norm": partial(counted_batches, way),
        "hook keyed by module": partial(hooks, way),
        "eval() between passes": partial(mode_after, way),
        "deepcopy inside a pass": partial(copied, way),
        "network.compile(), tensors only": partial(compiled, way, "network", False),
        "network.compile(), new forwards in each pass": partial(compiled, way, "network", True),
        "compiled call, tensors only": partial(compiled, way, "call", False),
        "compiled call, new forwards in each pass": partial(compiled, way, "call", True),
        "compiled pass, tensors only": partial(compiled, way, "whole", False),
        "fully_shard": partial(sharded, way),
    }
    return {name: asked(question) for name, question in questions.items()}


def main() -> None:
    """Print the tables and keep them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", choices=("cases", "cost", "zoo"), default=("cases", "cost"))
    parser.add_argument("--repeats", type=int, default=25)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    record = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    made = {
        "command": "OMP_NUM_THREADS=1 python -m benchmarks.isolation " + " ".join(sys.argv[1:]),
        "commit": subprocess.check_output(git, text=True).strip(),
        "versions": {name: version(name) for name in ("torch", "torchvision", "timm", "transformers")},
        "python": platform.python_version(),
    }
    if "cases" in arguments.parts:
        ways: dict[str, Pass] = {"lock": Lock(), "kept": Replica(kept=True), "made": Replica(kept=False)}
        answers = {f"replica {n}" if n != "lock" else n: cases(way) for n, way in ways.items()}
        answers["no lock, no replica"] = {"two threads": asked(partial(threads, unlocked))}
        record["what comes out"] = {**made, "answers": answers}
        for name, rows in answers.items():
            print(f"\n{name}", *(f"  {case:46}{answer}" for case, answer in rows.items()), sep="\n")
    if "cost" in arguments.parts:
        table = cost(arguments.repeats)
        record["multiples of the plain pass"] = {**made, "repeats": arguments.repeats, "rows": table}
        for name, row in table.items():
            print(f"{name:42}" + "  ".join(f"{key} {value:<8}" for key, value in row.items()))
    if "zoo" in arguments.parts:
        record["published architectures"] = {**made, **zoo()}
        print(json.dumps(record["published architectures"], indent=1))
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
