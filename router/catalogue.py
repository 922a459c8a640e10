"""The models that requests may name: what the replicas serve, and aliases for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from router.errors import ModelNotFound
from router.replicas import Fleet


class Catalogue:
    """Names and cards of models. `aliases` maps a name to the model it stands for."""

    def __init__(self, fleet: Fleet, aliases: Mapping[str, str]) -> None:
        self._fleet = fleet
        self._aliases = aliases

    def target(self, name: str) -> str | None:
        """The model that an alias stands for; None for a name that is no alias."""
        return self._aliases.get(name)

    def names(self) -> list[str]:
        """Every name a request may use, sorted."""
        return sorted({*self._fleet.model_names(), *self._aliases})

    def cards(self) -> list[dict[str, Any]]:
        """Cards of what is served now, and of the aliases for it."""
        cards = {card["id"]: card for card in self._fleet.model_cards()}
        for alias, target in self._aliases.items():
            if target in cards and alias not in cards:
                cards[alias] = {**cards[target], "id": alias, "root": target}
        return list(cards.values())

    def card(self, name: str) -> dict[str, Any]:
        """One model's card. Raises ModelNotFound."""
        for card in self.cards():
            if card["id"] == name:
                return card
        raise ModelNotFound(name, self.names())

    def check(self, model: str) -> None:
        """Raises ModelNotFound for a name that no replica is known to serve.

        While nothing is known of any replica, any name may yet turn out to be served.
        """
        if self._fleet.model_names() and not self._fleet.known(model):
            raise ModelNotFound(model, self.names())
