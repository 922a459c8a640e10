"""Records what vLLM's own cache manager does with several cache groups: its events, its hits.

    <an environment with vllm>/bin/python tests/cache_index/record_groups.py

Needs no model and no GPU: only the bookkeeping runs, over a pool small enough to evict all the
time. A file of `captures/groups/` is an array of msgpack values: a batch as it would be published
(bytes), or a probe: [token ids, salt, tokens that the manager would reuse of them].
"""

from __future__ import annotations

import lzma
import random
from math import gcd, lcm
from pathlib import Path

import msgspec
import torch
from vllm.distributed.kv_events import KVEventBatch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

FOLDER = Path(__file__).parent / "captures" / "groups"
ATTENTION = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float16, "dcp_sharded": False}


def full(block):
    return FullAttentionSpec(block_size=block, **ATTENTION)


def window(block, tokens):
    return SlidingWindowSpec(block_size=block, sliding_window=tokens, **ATTENTION)


def chunked(block, tokens):
    return ChunkedLocalAttentionSpec(block_size=block, attention_chunk_size=tokens, **ATTENTION)


def state(block, mode="align"):
    return MambaSpec(
        block_size=block, shapes=((2,),), dtypes=(torch.float32,), mamba_cache_mode=mode
    )


# name: groups, blocks in the pool, retention interval
MODELS = {
    "window": ([full(16), window(16, 48)], 90, None),
    "windows_first": ([window(16, 50), window(16, 50), full(16)], 120, None),
    "wide_window": ([full(16), window(16, 512)], 100, None),
    "uneven_blocks": ([full(32), window(16, 64)], 110, None),
    "coarse_window": ([full(16), window(32, 100)], 90, None),
    "chunked": ([full(16), chunked(16, 64)], 90, None),
    "state": ([full(64), state(64)], 60, None),
    "states": ([state(48), full(48), state(48), state(48)], 100, None),
    "state_every_block": ([full(32), state(32, "all")], 80, None),
    "sparse_retention": ([full(16), window(16, 48), window(16, 48)], 120, 0),
    "retained_states": ([full(32), state(32), window(32, 60)], 90, 128),
}


class Engine:
    """The scheduler's part, as little as the manager needs."""

    def __init__(self, specs, blocks, retention, rng):
        self.rng = rng
        sizes = [spec.block_size for spec in specs]
        self.step = lcm(*sizes)
        states = [s for s in specs if isinstance(s, MambaSpec)]
        self.aligned = any(s.mamba_cache_mode == "align" for s in states)
        dense = any(s.mamba_cache_mode != "align" for s in states)
        self.hash_block = self.step if dense else gcd(*sizes)
        config = KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)],
            prefix_cache_retention_interval=retention,
        )
        self.manager = KVCacheManager(
            config,
            max_model_len=8192,
            scheduler_block_size=self.step,
            hash_block_size=self.hash_block,
            enable_caching=True,
            enable_kv_cache_events=True,
        )
        self.hasher = get_request_block_hasher(self.hash_block, sha256)
        self.number = 0

    def request(self, tokens, salt):
        self.number += 1
        params = SamplingParams(max_tokens=64)
        params.update_from_generation_config({}, eos_token_id=7)
        return Request(
            request_id=str(self.number),
            prompt_token_ids=list(tokens),
            sampling_params=params,
            pooling_params=None,
            cache_salt=salt or None,
            block_hasher=self.hasher,
        )

    def probe(self, tokens, salt):
        """Tokens that would be reused; asking changes nothing."""
        return self.manager.get_computed_blocks(self.request(tokens, salt))[1]

    def run(self, tokens, salt, answer, chunk):
        """Serve a request; yields a batch of events after every step."""
        manager = self.manager
        request = self.request(tokens, salt)
        blocks, hit, boundary = manager.get_computed_blocks(request)
        request.shared_prefix_boundary = boundary
        left = len(tokens) - hit
        while left or answer:
            step = min(chunk, left) if left else 1
            if self.aligned and left > step:
                step = max(step // self.step * self.step, self.step)
                step = min(step, left)
            if not left:
                request.append_output_token_ids(self.rng.randrange(1000))
                answer -= 1
            manager.new_step_starts()
            got = manager.allocate_slots(request, step, hit, blocks)
            if got is None:
                break
            request.num_computed_tokens += hit + step
            blocks, hit = None, 0
            left = max(0, left - step)
            yield manager.take_events()
        manager.free(request)


def prompts(rng):
    """Conversations that share beginnings, some salted."""
    stems = [[rng.randrange(1000) for _ in range(rng.randrange(100, 500))] for _ in range(3)]
    while True:
        stem = rng.choice(stems)
        cut = rng.choice([len(stem), rng.randrange(len(stem))])
        tail = [rng.randrange(1000) for _ in range(rng.choice([0, 3, 40, 200]))]
        yield stem[:cut] + tail or [1], rng.choice(["", "", "", "tenant"])


def record(name, seed, rounds=100):
    specs, blocks, retention = MODELS[name]
    rng = random.Random(seed)
    engine = Engine(specs, blocks, retention, rng)
    source = prompts(rng)
    asked, out = [], []
    encode = msgspec.msgpack.Encoder().encode
    for turn in range(rounds):
        tokens, salt = next(source)
        asked.append((tokens, salt))
        for events in engine.run(tokens, salt, rng.choice([0, 5, 60]), rng.choice([64, 128, 512])):
            if events:
                out.append(encode(KVEventBatch(ts=float(turn), events=events)))
        if turn == rounds // 2 and engine.manager.reset_prefix_cache():
            out.append(encode(KVEventBatch(ts=float(turn), events=engine.manager.take_events())))
        for again, its_salt in [*rng.sample(asked, min(2, len(asked))), next(source)]:
            out.append([again, its_salt, engine.probe(again, its_salt)])
        engine.manager.take_events()
    return out


def main():
    init_none_hash(sha256)
    for name in MODELS:
        values = record(name, seed=name)
        data = msgspec.msgpack.encode(values)
        hits = [value[2] for value in values if isinstance(value, list)]
        (FOLDER / f"{name}.msgpack.xz").write_bytes(lzma.compress(data, preset=9))
        print(name, len(values), "values,", sum(map(bool, hits)), "of", len(hits), "probes hit")


if __name__ == "__main__":
    main()
