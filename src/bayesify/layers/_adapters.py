"""Adapters of peft, which is not imported: they are known by package and class name."""

from __future__ import annotations

from torch import nn

__all__ = ["adapter_layers", "adapter_modules"]


def adapter_layers(network: nn.Module) -> dict[str, nn.Module]:
    """Return the layers with an adapter, by name; none where the network has no adapter."""
    return {name: module for name, module in network.named_modules() if _is_a(module, "BaseTunerLayer")}


def adapter_modules(network: nn.Module) -> frozenset[str] | None:
    """Return the names of the modules that an adapter consists of, and of all inside; None where there is none.

    A head that is trained and saved with the adapter (`modules_to_save`) is not one of them.

    Raises:
        ValueError: The adapter has no effect, since it is merged or switched off; or it consists of virtual tokens.
    """
    layers = adapter_layers(network)
    if not layers:
        _refuse_prompts(network)
        return None
    merged = [name for name, layer in layers.items() if getattr(layer, "merged", False)]
    if merged:
        raise ValueError(
            f"The adapter is merged into the weights of {merged[0]!r}{_more(merged)}, so that nothing reads it and "
            "noise in it would change nothing. Call network.unmerge_adapter() first."
        )
    if all(getattr(layer, "disable_adapters", False) for layer in layers.values()):
        raise ValueError(
            "The adapter is switched off, so that noise in it would change nothing. Switch it on first: "
            "network.enable_adapter_layers()."
        )
    found: set[str] = set()
    for name, layer in layers.items():
        parts = (*layer.adapter_layer_names, *layer.other_param_names)  # type: ignore[misc]
        for part in parts:
            module = getattr(layer, part, None)
            if isinstance(module, nn.Module):
                found |= {f"{name}.{part}.{inner}".rstrip(".").lstrip(".") for inner, _ in module.named_modules()}
    return frozenset(found)


def _refuse_prompts(network: nn.Module) -> None:
    if _is_a(network, "PeftModel") and hasattr(network, "prompt_encoder"):
        raise ValueError(
            "The adapter consists of virtual tokens, before which the network's outputs have no labels. Use one of "
            "weights, such as LoRA; or name with include= what is to be random."
        )


def _is_a(module: nn.Module, name: str) -> bool:
    return any(kind.__name__ == name and kind.__module__.partition(".")[0] == "peft" for kind in type(module).__mro__)


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
