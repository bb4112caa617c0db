"""The Hugging Face hub: posteriors that are shared as a repository, with a card that says what they are worth."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from bayesify._core.files import write_atomically
from bayesify.evaluation.evaluation import Evaluation
from bayesify.laws import Posterior, require_posterior
from bayesify.storage import load, read_notes, save

try:
    from huggingface_hub import ModelCard, ModelCardData, ModelHubMixin, snapshot_download
except ImportError as error:
    raise ImportError("This needs huggingface_hub: pip install 'bayesify[hub]'.") from error

__all__ = ["SharedPosterior"]

FILES = ["config.json", "posterior-*.safetensors"]
BEGIN, END = "<!-- bayesify -->", "<!-- /bayesify -->"
# What makes timm read files or ask a server, which a folder from the hub must not be able to do.
READING = {"pretrained", "checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir", "scriptable"}


class SharedPosterior(ModelHubMixin, library_name="bayesify"):
    """A posterior that the hub's functions save, load and push: JSON, safetensors, and a model card.

    Nothing in such a folder is executed. It holds no code and no pickle, so that the network is either given when it is
    loaded, `from_pretrained(name, network=network)`, or made by a library that is installed and trusted: timm, by a
    name of its own registry.

    Args:
        posterior: Any posterior that can be saved.
        architecture: `{"timm": "resnet18", "num_classes": 10}`: the arguments of `timm.create_model`, without weights;
            None leaves it to who loads the posterior to make the network.
        evaluation: What it is worth, for the card, by `bayesify.evaluate`.
        command: What made these numbers; needed with them.
        whole: Whether the network's own weights are stored too. Without them the folder is small, and only a network
            with the weights that were converted fits; the fingerprints in it say so.

    Attributes:
        posterior: The posterior.
        measures: Name, number of examples, metrics and their intervals; None where nobody evaluated.

    Example:
        >>> import tempfile
        >>> from bayesify import SWAG, convert
        >>> network = nn.Linear(2, 3)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = SharedPosterior(convert(network, SWAG())).save_pretrained(folder)
        ...     shared = SharedPosterior.from_pretrained(folder, network=nn.Linear(2, 3))
        >>> shared.posterior.method.name
        'swag'
    """

    def __new__(cls, *_: Any, **__: Any) -> SharedPosterior:
        """Make the object alone: the mixin would copy the arguments into a configuration of its own."""
        return object.__new__(cls)

    def __init__(
        self,
        posterior: Posterior,
        *,
        architecture: Mapping[str, Any] | None = None,
        evaluation: Evaluation | None = None,
        command: str | None = None,
        whole: bool = True,
    ) -> None:
        require_posterior(posterior)
        if (evaluation is None) != (command is None):
            raise ValueError("A card shows measures with the command that made them: give evaluation= and command=.")
        self.posterior = posterior
        self.architecture = None if architecture is None else dict(architecture)
        self.measures = None if evaluation is None else _measures(evaluation)
        self.command = command
        self.whole = whole
        if self.architecture is not None:
            _check_architecture(self.architecture, posterior.network)

    # -- saving -------------------------------------------------------------------------------------------------------

    def save_pretrained(self, save_directory: str | Path, *, push_to_hub: bool = False, **options: Any) -> str | None:
        """Save the posterior and its card in a folder; with `push_to_hub` push it too.

        What else stands in an existing `README.md`, outside of the part between our marks, is left alone.

        Args:
            save_directory: The folder.
            push_to_hub: Whether to push it, to the repository `repo_id=`, else one of the folder's name.
            options: Of `push_to_hub`.
        """
        folder = Path(save_directory)
        self._save_pretrained(folder)
        if not push_to_hub:
            return None
        given = {name: value for name, value in options.items() if name not in ("config", "model_card_kwargs")}
        return str(self.push_to_hub(given.pop("repo_id", None) or folder.name, **given))

    def _save_pretrained(self, save_directory: Path) -> None:
        notes = {"architecture": self.architecture, "measures": self.measures, "command": self.command}
        save(self.posterior, save_directory, whole=self.whole, notes={"hub": notes, "whole": self.whole})
        path = save_directory / "README.md"
        card = str(self.generate_model_card())
        if path.exists():
            old = path.read_text(encoding="utf-8")
            own = card[card.index(BEGIN) : card.index(END) + len(END)]
            pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
            card = pattern.sub(lambda _: own, old) if pattern.search(old) else f"{old.rstrip()}\n\n{own}\n"
        write_atomically(path, card.encode())

    def generate_model_card(self, *_: Any, **__: Any) -> ModelCard:
        """Return the card: what is random, how it is loaded, what it measured and by which command."""
        posterior = self.posterior
        name = posterior.law.name if posterior.method is None else posterior.method.name
        data = ModelCardData(library_name="bayesify", tags=["bayesian", "uncertainty", name])
        return ModelCard(f"---\n{data.to_yaml()}\n---\n\n# A Bayesian network\n\n{BEGIN}\n{self._text(name)}{END}\n")

    def _text(self, name: str) -> str:
        posterior = self.posterior
        settings = "" if posterior.method is None else f"`{posterior.method}`"
        needs = "" if self.architecture is not None else ", network=network"
        given = "any weights: its own are here" if self.whole else "the weights that it was converted with"
        lines = [
            f"A posterior of the method {name}, with {posterior.default_draws} draws and the likelihood",
            f"`{posterior.likelihood}`. {settings}",
            "",
            "```python",
            "import bayesify",
            "from bayesify.integrations.hub import SharedPosterior",
            "",
            f'posterior = SharedPosterior.from_pretrained("this repository"{needs}).posterior',
            "prediction = bayesify.predict(posterior, inputs)  # .probs or .mean; .total, .aleatoric, .epistemic",
            "```",
            "",
        ]
        if self.architecture is None:
            lines += [f"`network` is a `{type(posterior.network).__name__}` with {given}.", ""]
        else:
            lines += [f"The network is made by timm: `{json.dumps(self.architecture)}`.", ""]
        if self.measures is not None:
            lines += [f"Measured on {self.measures['examples']:,} examples, with 95 % bootstrap intervals:", ""]
            lines += ["| measure | value | from | to |", "|---|---|---|---|"]
            for measure, value in self.measures["metrics"].items():
                ends = self.measures["intervals"].get(measure, {})
                row = (measure, _shown(value), _shown(ends.get("low")), _shown(ends.get("high")))
                lines.append(f"| {' | '.join(row)} |")
            lines += ["", "by", "", "```sh", str(self.command), "```", ""]
        return "\n".join(lines)

    # -- loading ------------------------------------------------------------------------------------------------------

    @classmethod
    def _from_pretrained(
        cls,
        *,
        model_id: str,
        network: nn.Module | None = None,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        force_download: bool = False,
        local_files_only: bool = False,
        token: str | bool | None = None,
        **unknown: Any,
    ) -> SharedPosterior:
        if unknown:
            raise TypeError(f"from_pretrained knows no {sorted(unknown)}; it takes network=, and the hub's options.")
        if Path(model_id).is_dir():
            return cls._loaded(Path(model_id), network)
        found = snapshot_download(
            model_id,
            revision=revision,
            cache_dir=cache_dir,
            force_download=force_download,
            local_files_only=local_files_only,
            token=token,
            allow_patterns=FILES,
        )
        # The hub's cache is made of links to other folders, which `load` does not follow.
        with TemporaryDirectory() as folder:
            for pattern in FILES:
                for path in Path(found).glob(pattern):
                    shutil.copyfile(path, Path(folder) / path.name)
            return cls._loaded(Path(folder), network)

    @classmethod
    def _loaded(cls, folder: Path, network: nn.Module | None) -> SharedPosterior:
        notes = read_notes(folder)
        about = notes.get("hub") or {}
        architecture = about.get("architecture")
        if network is None:
            if architecture is None:
                raise ValueError(
                    "The folder does not say how its network is made: give it one of the architecture that its card "
                    "names, from_pretrained(name, network=network)."
                )
            network = _make(architecture)
        made = cls(load(folder, network), whole=bool(notes.get("whole", False)))
        made.architecture, made.measures, made.command = architecture, about.get("measures"), about.get("command")
        return made


def _measures(evaluation: Evaluation) -> dict[str, Any]:
    found = evaluation.to_dict(intervals=0.95)
    return {name: found[name] for name in ("name", "examples", "metrics", "intervals")}


def _shown(value: Any) -> str:
    return "" if value is None else f"{value:.4g}"


def _make(architecture: Mapping[str, Any]) -> nn.Module:
    """Make the network that a folder names, of what timm itself registers, with arguments that read nothing."""
    name = architecture.get("timm")
    options = {key: value for key, value in architecture.items() if key != "timm"}
    if not isinstance(name, str):
        raise ValueError(f"An architecture is {{'timm': name, **options}}, but it is {dict(architecture)}.")
    if refused := sorted(READING & options.keys()):
        raise ValueError(f"An architecture is made without weights, and {refused} of it would read files.")
    try:
        import timm
    except ImportError as error:
        raise ImportError(f"The network is timm's {name!r}: pip install 'bayesify[timm]'.") from error
    if not timm.is_model(name):
        raise ValueError(f"timm has no model {name!r} of its own.")
    made: nn.Module = timm.create_model(name, pretrained=False, **options)
    return made.eval()


def _check_architecture(architecture: Mapping[str, Any], network: nn.Module) -> None:
    ours, theirs = (
        {name: tuple(t.shape) for name, t in n.state_dict().items()} for n in (network, _make(architecture))
    )
    if differing := sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name)):
        raise ValueError(
            f"architecture={dict(architecture)} makes another network than the posterior's: {differing[:3]} differ. "
            "Give the options that timm.create_model was given."
        )
