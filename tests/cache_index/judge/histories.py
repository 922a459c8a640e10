"""Random histories by seed, and their shrinking to the few operations that matter."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random

from tests.cache_index.judge.blocks import PICTURE, Prompt, Root
from tests.cache_index.judge.engine import EngineConfig
from tests.cache_index.judge.groups import RECURRENT, WINDOW, Group
from tests.cache_index.judge.stage import History, Op
from tests.cache_index.judge.wire import VERSIONS, shows_groups

ROOTS = (
    Root(),
    Root(salt="tenant-a"),
    Root(salt="tenant-b"),
    Root(adapter="french"),
    Root(adapter="legal", salt="tenant-a"),
)
LAYOUTS = (
    (Group(), Group(WINDOW, 8)),
    (Group(WINDOW, 9), Group()),
    (Group(), Group(RECURRENT)),
    (Group(RECURRENT), Group(WINDOW, 12), Group()),
)
WAITS_S = (0.0, 0.05, 0.2, 1.0, 3.0, 4.9, 5.3, 11.0)


class Features(frozenset[str]):
    """Switched-off parts: groups, again, pictures, placeholders, garbage, adapters,
    late (notices of a reconnect after the first messages), units (blocks of several)."""


NOTHING_OFF = Features()


def history(seed: int, off: Features = NOTHING_OFF) -> History:
    """The history of this seed, without the features in `off`."""
    rng = Random(seed)
    ranks = rng.choice((1, 1, 1, 2, 3))
    prompts = tuple(_prompt(rng, off) for _ in range(6))
    asked = tuple(dict.fromkeys((*prompts, *(_variant(rng, p) for p in prompts[:3]))))
    asked = tuple(p for p in asked if not p.has_pictures())
    ops: list[Op] = [("join", r) for r in range(ranks) if rng.random() < 0.8]
    size = rng.choice((6, 12, 25, 50))
    while len(ops) < size:
        ops += _phrase(rng, rng.randrange(ranks), off)
    return History(
        tuple(_config(rng, off) for _ in range(ranks)),
        tuple(rng.choice((2, 4, 1000, 1000)) for _ in range(ranks)),
        prompts,
        asked,
        tuple(ops),
    )


def _config(rng: Random, off: Features) -> EngineConfig:
    version = rng.choice((*VERSIONS, "0.24.0", "0.32.0", "0.32.0", "0.32.0"))
    hybrid = shows_groups(version) and "groups" not in off and rng.random() < 0.35
    again = version == "0.32.0" and not hybrid and "again" not in off and rng.random() < 0.2
    return EngineConfig(
        version=version,
        hash_kind=rng.choice(("int", "int", "signed", "bytes")),
        block_units=1 if "units" in off else rng.choice((1, 1, 2)),
        groups=rng.choice(LAYOUTS) if hybrid else (Group(),),
        host=rng.choice(
            ("none", "described") + (() if "placeholders" in off else ("placeholder",))
        ),
        reports_again=again,
        media_keys=rng.choice(("pair", "plain")),
        named_group=hybrid or again or rng.random() < 0.7,
    )


def _prompt(rng: Random, off: Features) -> Prompt:
    roots = [r for r in ROOTS if "adapters" not in off or r.adapter is None]
    root = rng.choice(roots) if rng.random() < 0.5 else ROOTS[0]
    letters = [rng.choice((0, 0, 1)) for _ in range(rng.randint(1, 7))]
    if rng.random() < 0.25:
        pictures = (PICTURE,) if "pictures" in off else (PICTURE, PICTURE + 1, PICTURE + 2)
        letters[rng.randrange(len(letters))] = rng.choice(pictures)
    return Prompt(root, tuple(letters))


def _variant(rng: Random, prompt: Prompt) -> Prompt:
    plain = tuple(min(letter, PICTURE) for letter in prompt.letters)
    return rng.choice(
        (
            Prompt(prompt.root, (*plain, rng.randrange(2), rng.randrange(2))),
            Prompt(rng.choice(ROOTS), plain),
            Prompt(prompt.root, plain),
            Prompt(prompt.root, (*plain[:-1], rng.randrange(3))),
        )
    )


def _phrase(rng: Random, r: int, off: Features) -> list[Op]:
    """A few operations that belong together."""
    roll = rng.random()
    if roll < 0.5:
        return _work(rng, r)
    if roll < 0.62:
        return [("wait", rng.choice(WAITS_S))]
    return list(
        rng.choice((_gap, _gap, _reconnect, _restart, _restart, _reorder, _rest))(rng, r, off)
    )


def _work(rng: Random, r: int) -> list[Op]:
    ops: list[Op] = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        roll = rng.random()
        if roll < 0.5:
            op: Op = ("compute", r, rng.randrange(6), rng.randint(1, 7), rng.random() < 0.3)
        elif roll < 0.75:
            op = ("evict", r, rng.randrange(50), rng.choice((1, 1, 2, 5)), rng.random() < 0.2)
        elif roll < 0.92:
            op = ("offload", r, rng.randrange(6), rng.randrange(3), rng.randint(1, 7))
        else:
            op = ("clear", r, rng.random() < 0.5)
        ops.append(op)
        if rng.random() < 0.6:
            ops.append(("step", r))
    return [*ops, ("step", r)]


def _gap(rng: Random, r: int, off: Features) -> Iterator[Op]:
    """Live messages are lost, in the middle or at the end of what is sent."""
    name = "damage" if rng.random() < 0.2 else "lose"
    yield (
        "replays",
        r,
        rng.choice(("full", "full", "torn", "no_end", "silent")),
        rng.randint(0, 3),
    )
    yield (name, r, rng.choice((1, 1, 2, 5)))
    for _ in range(rng.randint(1, 3)):
        yield from _work(rng, r)
    if rng.random() < 0.5:
        yield ("wait", rng.choice(WAITS_S))
    if rng.random() < 0.7:
        yield ("replays", r, "full", 1)


def _reconnect(rng: Random, r: int, off: Features) -> Iterator[Op]:
    yield ("cut", r, rng.random() < 0.7)
    for _ in range(rng.randint(0, 2)):
        yield from _work(rng, r)
    if rng.random() < 0.5:
        yield ("wait", rng.choice(WAITS_S))
    yield ("join", r)


def _restart(rng: Random, r: int, off: Features) -> Iterator[Op]:
    """Fast or slow; hashes as before or new; often just at the sequence of the old life."""
    seed = rng.choice((0, 0, rng.randrange(1, 99)))
    slow = rng.random() < 0.4
    late = "late" not in off and rng.random() < 0.3
    yield ("die", r, seed) if slow else ("restart", r, seed, late, rng.random() < 0.6)
    if rng.random() < 0.6:
        yield ("regain", r, rng.choice((0, 1, 1, 2)), rng.randrange(6))
    if slow:
        yield ("wait", rng.choice(WAITS_S))
        yield ("join", r)
    if rng.random() < 0.7:
        yield from _work(rng, r)


def _reorder(rng: Random, r: int, off: Features) -> Iterator[Op]:
    """A gap whose replay and the live messages after it arrive in any mixture."""
    yield ("hold", r, True, False)
    if rng.random() < 0.7:
        yield ("lose", r, rng.choice((1, 2)))
    for _ in range(rng.randint(1, 4)):
        yield from _work(rng, r)
        yield ("deliver", r, rng.random() < 0.4, rng.randint(1, 3))
        if rng.random() < 0.7:
            yield ("answer", r)
        if rng.random() < 0.15:
            yield ("restart", r, 0, False, rng.random() < 0.5)
    yield ("hold", r, False, rng.random() < 0.5)


def _rest(rng: Random, r: int, off: Features) -> Iterator[Op]:
    roll = rng.random()
    if roll < 0.5:
        yield ("redeliver", r, rng.choice((1, 2)))
    elif roll < 0.85 or "garbage" in off:
        yield ("noise", r, rng.randrange(9), rng.randrange(6))
        yield ("step", r)
    else:
        yield ("garbage", r)
        yield from _work(rng, r)


def shrunk(failing: History, fails: Callable[[History], bool]) -> History:
    """The fewest operations, prompts and peculiarities of a history that still fails."""
    ops = list(failing.ops)
    size = max(len(ops) // 2, 1)
    while size:
        at = 0
        while at < len(ops):
            less = ops[:at] + ops[at + size :]
            if fails(failing._replace(ops=tuple(less))):
                ops = less
            else:
                at += size
        size //= 2
    small = failing._replace(ops=tuple(ops))
    for simpler in _simpler(small):
        candidate = simpler(small)
        if candidate != small and fails(candidate):
            small = candidate
    return small


def _simpler(small: History) -> Iterator[Callable[[History], History]]:
    plain = EngineConfig()
    for name in plain.__dataclass_fields__:
        for r in range(len(small.configs)):
            yield lambda h, name=name, r=r: h._replace(
                configs=tuple(
                    replace(c, **{name: getattr(plain, name)}) if i == r else c
                    for i, c in enumerate(h.configs)
                )
            )
    yield lambda h: h._replace(buffers=(1000,) * len(h.buffers))
    for prompt in small.asked:
        yield lambda h, prompt=prompt: h._replace(asked=tuple(p for p in h.asked if p != prompt))
