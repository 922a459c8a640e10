"""From a prompt to a rank: what is looked up, what is credited, who is asked."""

from __future__ import annotations

from random import Random

import pytest

from cache_index.blocks import chain_hashes, pack_tokens
from cache_index.identity import ModelIdentity, Root
from cache_index.types import Holder
from router.config import ReplicaConfig, Settings
from router.engines import served_models
from router.load import FleetLoad
from router.placement import NO_MATCH, Placer, Prompt
from router.policy import POLICIES
from router.replicas import Replica
from tests.router.support import TaughtIndex

CARDS = {"data": [{"id": "base"}, {"id": "alias"}, {"id": "tuned", "parent": "base"}]}


def replica(name: str, ranks: tuple[int, ...] = (0,)) -> Replica:
    made = Replica.from_config(ReplicaConfig(url=f"http://{name}:1", name=name), Settings())
    made.models = served_models(CARDS)
    made.ranks = ranks
    return made


def placer(index: TaughtIndex, policy: str = "cost") -> Placer:
    load = FleetLoad(1000.0, lambda: 0.0)
    return Placer(
        index,
        load,
        POLICIES[policy],
        base_unit_tokens=16,
        running_share=0.25,
        random=Random(1),
    )


def prompt(tokens: int, model: str = "base", salt: str = "") -> Prompt:
    ids = list(range(tokens))
    return Prompt(model, salt, pack_tokens(ids), tokens)


def test_the_last_token_is_never_credited() -> None:
    index = TaughtIndex(lambda root, hashes: {Holder("a", 0, "device"): len(hashes)})
    one = [replica("a")]
    assert placer(index).match(prompt(64), one)[0] == {("a", 0): 48}
    assert placer(index).match(prompt(65), one)[0] == {("a", 0): 64}
    assert placer(index).match(prompt(17), one)[0] == {("a", 0): 16}


def test_prompts_below_one_unit_or_unknown_are_not_looked_up() -> None:
    index = TaughtIndex()
    assert placer(index).match(prompt(16), [replica("a")]) == NO_MATCH
    assert placer(index).match(Prompt("base", "", None, 5000), [replica("a")]) == NO_MATCH
    assert index.asked == []


def test_root_is_base_model_adapter_and_salt() -> None:
    seen: list[int] = []

    def holds(root: int, hashes: object) -> dict[Holder, int]:
        seen.append(root)
        return {}

    place = placer(TaughtIndex(holds))
    for model, salt in (("base", ""), ("alias", ""), ("tuned", ""), ("base", "s")):
        place.match(prompt(40, model, salt), [replica("a"), replica("b")])
    base = ModelIdentity("base")
    expected = [Root(base), Root(base), Root(base, "tuned"), Root(base, "", "s")]
    assert seen == [root.digest() for root in expected]


def test_hashes_are_the_chain_of_the_prompt() -> None:
    seen: list[list[int]] = []

    def holds(root: int, hashes: list[int]) -> dict[Holder, int]:
        seen.append(list(hashes))
        return {}

    placer(TaughtIndex(holds)).match(prompt(70), [replica("a")])
    root = Root(ModelIdentity("base")).digest()
    assert seen == [chain_hashes(root, pack_tokens(range(64)), 16)]


def test_other_tiers_give_no_credit_yet() -> None:
    index = TaughtIndex(lambda root, hashes: {Holder("a", 0, "host"): 3})
    found = placer(index).match(prompt(64), [replica("a")])
    assert found[0] == {}
    assert [dict(held) for *_, held in found[1]] == [{Holder("a", 0, "host"): 3}]


def test_the_chosen_rank_carries_its_own_credit() -> None:
    index = TaughtIndex(lambda root, hashes: {Holder("b", 1, "device"): 2})
    place = placer(index)
    fleet = [replica("a"), replica("b", (0, 1))]
    one = prompt(64)
    placement = place.place(one, fleet, place.match(one, fleet)[0])
    assert (placement.replica.name, placement.rank) == ("b", 1)
    assert (placement.matched_tokens, placement.uncached_tokens) == (32, 32)
    assert len(placement.choice.scores) == 3


def test_a_request_in_flight_counts_a_share_of_a_mean_prefill() -> None:
    load = FleetLoad(1000.0, lambda: 0.0)
    made = Placer(
        TaughtIndex(),
        load,
        POLICIES["cost"],
        base_unit_tokens=16,
        running_share=0.25,
        random=Random(1),
    )
    load.placed(0.4)
    with load.rank("a", 0).take(0, True) as ticket:
        ticket.first_token()
        placement = made.place(prompt(100), [replica("a"), replica("b")], {})
    assert placement.replica.name == "b"
    assert placement.choice.scores == pytest.approx((0.105 + 0.25 * 0.4, 0.105))
