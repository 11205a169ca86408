"""Capabilities of models, such as `vision`: those that nodes report, or those of the catalogue."""

from helexa.core.catalogue import Catalogue
from helexa.cortex.fleet.fleet_view import FleetView

VISION = "vision"


def capabilities(view: FleetView, catalogue: Catalogue, model: str) -> list[str]:
    """Return the capabilities of a model. The list is empty if they are unknown.

    If any node reports capabilities of the model, the result contains the capabilities that the nodes report. Otherwise
    it contains those of the catalogue.
    """
    profile = catalogue.profile(model)
    reports = [node.models[model].capabilities for node in view.nodes if model in node.models]
    reported = list(dict.fromkeys(name for names in reports for name in names))
    return reported or (list(profile.capabilities) if profile else [])


def nodes_without_vision(view: FleetView, model: str) -> set[str]:
    """Return the names of the nodes on which a model accepts no images, for example because files are missing."""
    reports = {node.name: node.models[model].capabilities for node in view.nodes if model in node.models}
    return {name for name, names in reports.items() if names and VISION not in names}


def sees_images(view: FleetView, catalogue: Catalogue, model: str) -> bool | None:
    """Return whether a model accepts images, or None if its capabilities are unknown."""
    names = capabilities(view, catalogue, model)
    return VISION in names if names else None
