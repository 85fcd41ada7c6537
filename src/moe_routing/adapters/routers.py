"""Finding the routers of a Hugging Face model by the library's own record of where router logits appear."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn

from moe_routing.adapters.families import FAMILIES, RouterFamily, family_name
from moe_routing.router import Activation

KEY = "router_logits"


@dataclass(frozen=True)
class RouterSite:
    """One router of a model.

    Attributes:
        name: its path in the model that was searched.
        module: the router; ``parent`` is the module that owns it.
        index: position of the logits in its output, for routers without ``source``.
        source: the submodule whose output is the logits, or None.
    """

    name: str
    module: nn.Module
    parent: nn.Module
    family_name: str
    family: RouterFamily
    activation: Activation
    index: int
    source: nn.Module | None

    def logits(self, output: Any) -> Float[Tensor, "..."]:
        """The tensor that the scores are computed from; a bare tensor is taken whole."""
        found: Tensor = output[self.index] if isinstance(output, tuple) else output
        return found

    def selected(self, output: Any, logits: Float[Tensor, "..."]) -> Int[Tensor, "tokens k"]:
        """The experts that this forward selected, leading axes flattened."""
        flat = logits.detach().reshape(-1, logits.shape[-1])
        return self.family.selected(self.module, self.parent, output, flat)


def find_routers(model: nn.Module) -> list[RouterSite]:
    """The routers below ``model`` in the order of its modules, each once.

    Any wrapper will do (PEFT, DDP, FSDP), since the search goes through the submodules. The encoder of an
    encoder-decoder does not count: it generates nothing.

    Raises:
        ValueError: if there is none.
        NotImplementedError: for a family that is refused or not known; the message names the class and says why.
    """
    names = {id(module): name for name, module in model.named_modules()}
    sites: dict[int, RouterSite] = {}
    for owner in model.modules():
        for target, index, layer_name in _recorders(type(owner)):
            for module in owner.modules():
                if isinstance(module, target) and _matches(names[id(module)], layer_name):
                    site = _site(owner, module, target, index, model, names)
                    if site is not None:
                        sites.setdefault(id(site.module), site)
    if not sites:
        raise ValueError(
            f"{type(model).__name__} has no router: none of its submodules is recorded as {KEY!r} in the "
            "_can_record_outputs of a transformers model"
        )
    order = {key: position for position, key in enumerate(names)}
    return sorted(sites.values(), key=lambda site: order[id(site.module)])


def _recorders(owner: type) -> Iterator[tuple[type, int, str]]:
    """Class, output index and layer name of every recorder of router logits that a model class declares."""
    recorders = (getattr(owner, "_can_record_outputs", None) or {}).get(KEY, [])
    for recorder in recorders if isinstance(recorders, list) else [recorders]:
        if isinstance(recorder, type):  # the library's shorthand for index 1
            yield recorder, 1, ""
        elif recorder.target_class is not None:
            yield recorder.target_class, recorder.index, recorder.layer_name or ""


def _matches(name: str, layer_name: str) -> bool:
    if "original_module" in name.split("."):  # PEFT keeps it beside the copy that it trains in its place
        return False
    return not layer_name or f".{layer_name.strip('.')}." in f".{name}."


def _site(
    owner: nn.Module, module: nn.Module, target: type, index: int, model: nn.Module, names: dict[int, str]
) -> RouterSite | None:
    known = family_name(target)
    if known not in FAMILIES:
        raise NotImplementedError(
            f"{type(owner).__name__} records router logits of {target.__name__}, a family ({known}) that "
            "RoutingControl does not know; add it to moe_routing.adapters.families.FAMILIES"
        )
    family = FAMILIES[known]
    if family.refused:
        raise NotImplementedError(f"RoutingControl cannot steer {type(owner).__name__}: {family.refused}")
    config: Any = getattr(owner, "config", None)
    name = names[id(module)]
    in_encoder = bool(getattr(config, "is_encoder_decoder", False)) and ".encoder." in f".{name}."
    if in_encoder or (family.routers and target.__name__ not in family.routers):
        return None
    if getattr(module, "second_expert_policy", "") == "sampling":
        raise NotImplementedError(
            f"RoutingControl cannot steer {type(owner).__name__} with second_expert_policy='sampling': the router "
            "adds its noise to the recorded logits in place, after the scores were computed"
        )
    if family.attach:
        module, name, index = module.get_submodule(family.attach), f"{name}.{family.attach}".lstrip("."), 0
    parent = model.get_submodule(name.rpartition(".")[0]) if name else module
    if type(parent).__name__.startswith("Mxfp4"):
        raise NotImplementedError(
            f"RoutingControl cannot steer {type(owner).__name__} with fused mxfp4 experts, which compute the logits "
            "without the router and have no backward pass; load it with Mxfp4Config(dequantize=True)"
        )
    source = module.get_submodule(family.source) if family.source else None
    activation = family.activation_of(module, config)
    return RouterSite(name, module, parent, known, family, activation, index, source)
