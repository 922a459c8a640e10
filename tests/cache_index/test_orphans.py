"""Orphans: bound where the engine's own names prove it, and nowhere else."""

from __future__ import annotations

import hashlib
import pickle
from collections import Counter
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_index import Root, chain_packed, pack_tokens
from cache_index.events import decode_batch
from cache_index.flights import Flight, Flights
from cache_index.groups import part_of
from cache_index.ledger import Ledger, NewEpoch, Operation, Remove, Store
from cache_index.proof import Schemes, same
from cache_index.types import SourceKey

from .captures import messages
from .publisher import CLEARED, MODEL, encode, removed, stored

KEY = SourceKey("r0", 0)
BLOCK = 16
Names = tuple[int, ...]


def digest(value: object) -> bytes:
    return hashlib.sha256(pickle.dumps(value, protocol=5)).digest()


def engine_names(tokens: list[int], salt: str, adapter: str, seed: str) -> list[int]:
    """Names as vLLM makes them, told again without the package's help."""
    parent, names = digest(seed), []
    for at in range(0, len(tokens) - BLOCK + 1, BLOCK):
        keys = [("lora", adapter, "/path")] if adapter else []
        keys += [("cache_salt", salt)] if salt and not at else []
        parent = digest((parent, tuple(tokens[at : at + BLOCK]), tuple(keys) or None))
        names.append(int.from_bytes(parent[-8:], "big"))
    return names


class Prompt:
    def __init__(
        self, tokens: list[int], salt: str = "", adapter: str = "", seed: str = ""
    ) -> None:
        self.tokens, self.salt, self.adapter = tokens, salt, adapter
        self.names = engine_names(tokens, salt, adapter, seed or "vllm-none-hash")

    @property
    def root(self) -> int:
        return Root(MODEL, self.adapter, self.salt).digest()

    def units(self) -> bytes:
        return chain_packed(self.root, pack_tokens(self.tokens), BLOCK)

    def event(self, start: int, end: int) -> dict[str, object]:
        keys = [[*filter(None, [self.adapter, self.salt if not i else ""])] for i in range(end)]
        event = stored(
            self.names[start:end],
            self.tokens[start * BLOCK : end * BLOCK],
            parent=self.names[start - 1] if start else None,
            extra_keys=[each or None for each in keys[start:]],
        )
        return event | ({"lora_name": self.adapter, "lora_id": 1} if self.adapter else {})


class Gateway:
    """One that knows what it has sent itself, and listens."""

    def __init__(self) -> None:
        self.flights = Flights()
        self.flights.follow(KEY)
        self.ledger = Ledger(MODEL, BLOCK)
        self.ledger.prompts = lambda: self.flights.of(KEY)
        self.held: set[bytes] = set()

    def send(self, prompt: Prompt) -> Flight:
        tokens = b"" if prompt.adapter else pack_tokens(prompt.tokens)
        flight = Flight(KEY, prompt.units(), 0, lambda *_: None, tokens, prompt.salt)
        self.flights.begin(flight)
        return flight

    def hear(self, *events: dict[str, object]) -> None:
        out: list[Operation] = []
        self.ledger.apply(decode_batch(encode(events)).events, out)
        for op in out:
            if isinstance(op, NewEpoch):
                self.held.clear()
            elif isinstance(op, Store):
                self.held |= {unit for block in op.blocks for unit in split(block.units)}
            elif isinstance(op, Remove):
                self.held -= set(split(op.block.units))

    def match(self, prompt: Prompt) -> int:
        units = split(prompt.units())
        return next((i for i, unit in enumerate(units) if unit not in self.held), len(units))


def split(units: bytes) -> list[bytes]:
    return [units[at : at + 8] for at in range(0, len(units), 8)]


def words(seed: object, blocks: int, rest: int = 0) -> list[int]:
    rng = Random(repr(seed))
    return [rng.randrange(100_000) for _ in range(blocks * BLOCK + rest)]


DOCUMENT = words("document", 6)


def listening(*, sample: Prompt | None = None) -> Gateway:
    """A gateway that came late, but has seen some prompt from its first block on."""
    gateway = Gateway()
    gateway.hear((sample or Prompt(words("sample", 2))).event(0, 2))
    return gateway


def test_an_orphan_of_a_prompt_in_flight_is_bound_with_all_before_it() -> None:
    prompt = Prompt(words("system", 10) + DOCUMENT)
    gateway = listening()
    gateway.send(prompt)
    gateway.hear(prompt.event(10, 16))
    assert gateway.match(prompt) == 16
    assert not gateway.ledger.orphaned
    gateway.hear(removed([prompt.names[4]]))
    assert gateway.match(prompt) == 4


@pytest.mark.parametrize("salt", ["", "tenant"])
@pytest.mark.parametrize("seed", ["vllm-none-hash", "0"])
def test_salts_and_seeds_are_part_of_the_proof(salt: str, seed: str) -> None:
    prompt = Prompt(words("system", 3) + DOCUMENT, salt, seed=seed)
    stranger = Prompt(prompt.tokens, "another", seed=seed)
    gateway = listening(sample=Prompt(words("sample", 2), seed=seed))
    gateway.send(stranger)
    gateway.hear(prompt.event(3, 9))
    assert gateway.match(stranger) == 0
    assert gateway.ledger.orphaned
    gateway.send(prompt)
    gateway.hear(prompt.event(3, 9))
    assert (gateway.match(prompt), gateway.match(stranger)) == (9, 0)


def test_the_same_document_behind_another_beginning_proves_nothing() -> None:
    """Another gateway's prompt: this one knows nothing of it."""
    own, other = Prompt(words("own", 4) + DOCUMENT), Prompt(words("other", 4) + DOCUMENT)
    gateway = listening()
    gateway.send(own)
    gateway.hear(other.event(4, 10))
    assert gateway.match(own) == 0
    assert gateway.ledger.orphaned


def test_an_adapters_weights_cannot_be_proven() -> None:
    adapted = Prompt(words("system", 4) + DOCUMENT, adapter="fr")
    plain = Prompt(adapted.tokens)
    gateway = listening()
    gateway.send(adapted)
    gateway.send(plain)
    gateway.hear(adapted.event(4, 10))
    assert (gateway.match(adapted), gateway.match(plain)) == (0, 0)


def test_an_engine_with_a_random_seed_proves_nothing() -> None:
    prompt = Prompt(words("system", 4) + DOCUMENT, seed="random")
    gateway = listening(sample=Prompt(words("sample", 2), seed="random"))
    gateway.send(prompt)
    gateway.hear(prompt.event(4, 10))
    assert gateway.match(prompt) == 0


def test_work_is_bounded_and_goes_on_with_the_next_batch() -> None:
    prompt = Prompt(words("long", 1500) + DOCUMENT)
    gateway = listening()
    gateway.send(prompt)
    gateway.hear(prompt.event(1500, 1503))
    assert gateway.match(prompt) == 0
    gateway.hear(prompt.event(1503, 1506))
    assert gateway.match(prompt) == 1506


def test_what_has_ended_is_forgotten_after_a_while() -> None:
    now_s = [0.0]
    flights = Flights(lambda: now_s[0])
    flights.follow(KEY)
    flight = Flight(KEY, b"", 0, lambda *_: None, b"tokens")
    flights.begin(flight)
    flights.end(flight)
    rank = flights.of(KEY)
    assert rank is not None
    assert rank.prompts(9) == [flight]
    now_s[0] = 60.0
    assert rank.prompts(9) == []


@settings(deadline=None)
@given(seed=st.integers(0, 2**32))
def test_nothing_is_ever_credited_that_the_engine_does_not_hold(seed: int) -> None:
    """Two gateways' prompts out of few parts at equal places; events are lost, blocks evicted."""
    rng = Random(seed)
    parts = [words((seed, i), 3) for i in range(3)]
    roots = [("", ""), ("tenant", ""), ("", "fr")]
    made = []
    for i in range(5):
        tokens = [token for part in rng.choices(parts, k=rng.randrange(1, 4)) for token in part]
        made.append(Prompt(tokens + words(i, 1), *rng.choice(roots)))
    gateway = listening()
    engine = Counter(Prompt(words("sample", 2)).names)
    for _ in range(60):
        prompt = rng.choice(made)
        flight = gateway.send(prompt) if rng.random() < 0.5 else None
        happens = rng.choice(["serve", "serve", "serve", "evict", "evict", "gap", "clear"])
        if happens == "serve":
            # What is not reused from the start is computed, and kept as another copy if need be.
            hit = next((i for i, n in enumerate(prompt.names) if not engine[n]), 0)
            engine.update(prompt.names[hit:])
            # A store that is lost on the way; a gap drops what was known before the next one.
            if rng.random() < 0.7:
                gateway.hear(prompt.event(hit, len(prompt.names)))
        elif happens == "evict":
            name = rng.choice(sorted(+engine) or [0])
            engine[name] -= 1
            gateway.hear(removed([name]))
        elif happens == "gap" and rng.random() < 0.3:
            gateway.ledger.clear()
            gateway.held.clear()
        elif happens == "clear" and rng.random() < 0.1:
            engine.clear()
            gateway.hear(CLEARED)
        if flight is not None:
            gateway.flights.end(flight)
        truth = {
            unit
            for each in made
            for name, unit in zip(each.names, split(each.units()), strict=True)
            if engine[name] > 0
        }
        known = {unit for each in made for unit in split(each.units())}
        assert gateway.held & known <= truth


@pytest.mark.parametrize("name", ["run1_A", "sha256_bytes_noseed_A"])
def test_recorded_engines_are_proven(name: str) -> None:
    """The real engine's names, joined late: what is bound is what its own parents say."""
    chains: dict[object, tuple[str, list[int]]] = {}
    gateway = Gateway()
    bound = 0
    for number, (_, _, payload) in enumerate(messages(name)):
        raw = msgspec.msgpack.decode(payload)[1]
        for event in raw:
            if event["type"] != "BlockStored" or event["medium"] != "GPU":
                continue
            parent, size = event["parent_block_hash"], event["block_size"]
            salt, tokens = chains.get(parent) or ((event["extra_keys"][0] or [""])[0], [])
            for i, named in enumerate(event["block_hashes"]):
                tokens = tokens + event["token_ids"][i * size : (i + 1) * size]
                chains[named] = (salt, tokens)
            units = chain_packed(Root(MODEL, salt=salt).digest(), pack_tokens(tokens), 16)
            flight = Flight(KEY, units, 0, lambda *_: None, pack_tokens(tokens), salt)
            gateway.flights.begin(flight)
            if parent is None or number % 3:
                continue
            # Everything before this event is lost; then some prompt is seen from its beginning.
            gateway.ledger.clear()
            first = next(iter(each for each in raw_roots(name)))
            gateway.ledger.apply(decode_batch(encode([first])).events, [])
            out: list[Operation] = []
            gateway.ledger.apply(decode_batch(encode([event])).events, out)
            found = b"".join(
                block.units
                for op in out
                if isinstance(op, Store) and part_of(op.tier)[0] == "device"
                for block in op.blocks
            )
            assert found in (b"", units) or units.endswith(found)
            bound += bool(found)
    assert bound


def raw_roots(name: str) -> list[dict[str, object]]:
    for _, _, payload in messages(name):
        for event in msgspec.msgpack.decode(payload)[1]:
            if event["type"] == "BlockStored" and event["parent_block_hash"] is None:
                return [event]
    return []


@pytest.mark.parametrize(
    ("name", "salt"),
    [
        (12687895063098490012, ""),
        (2233398808101521225, ""),
        (3262291359910021016, ""),
        (8020952614053081591, "tenant-a"),
        (437527039463953821, "tenant-a"),
    ],
)
def test_schemes_are_found_from_one_block(name: int, salt: str) -> None:
    schemes = Schemes()
    tokens = pack_tokens(range(32))
    schemes.remember(name, tokens[:64], salt)
    scheme = schemes.candidates(salt)[0]
    assert same(name, scheme.names(tokens, 16, salt, [], 2)[0])


def test_an_unknown_scheme_is_none() -> None:
    schemes = Schemes()
    schemes.remember(123, pack_tokens(range(16)), "")
    assert schemes.candidates("") == []
