"""Request bodies however they come: coded, chunked, too large, broken. The replica's is plain."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import zlib
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.encoding import CODINGS, PIECE_BYTES, decoder_for
from router.errors import InvalidRequest
from tests.router.raw import Wire, chunked, head, post
from tests.router.support import answer_ok, chat, running_gateway, scripted

brotli = pytest.importorskip("brotli")
zstd = pytest.importorskip("backports.zstd")


def bare_deflate(data: bytes) -> bytes:
    encoder = zlib.compressobj(wbits=-15)
    return encoder.compress(data) + encoder.flush()


def in_two(encode: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    return lambda data: encode(data[: len(data) // 2]) + encode(data[len(data) // 2 :])


ENCODERS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "x-gzip": ("X-GZip", gzip.compress),
    "two members": ("gzip", in_two(gzip.compress)),
    "zlib": ("deflate", zlib.compress),
    "bare deflate": ("deflate", bare_deflate),
    "br": ("br", partial(brotli.compress, quality=5)),
    "zstd": ("zstd", zstd.compress),
    "two frames": ("zstd", in_two(zstd.compress)),
    "identity": ("identity", bytes),
}
CODED = [name for name in ENCODERS if name != "identity"]


def decode(coding: str, data: bytes, sizes: int) -> bytes:
    decoder = decoder_for([(b"content-encoding", coding.encode())])
    assert decoder is not None
    pieces = []
    for at in range(0, len(data), sizes):
        pieces += decoder.feed(data[at : at + sizes])
    decoder.end()
    assert all(len(piece) <= PIECE_BYTES for piece in pieces)
    return b"".join(pieces)


@pytest.mark.parametrize("name", CODED)
@given(data=st.binary(max_size=2000), sizes=st.integers(1, 2000), times=st.integers(1, 300))
def test_what_was_encoded_is_decoded(name: str, data: bytes, sizes: int, times: int) -> None:
    coding, encode = ENCODERS[name]
    assert decode(coding, encode(data * times), sizes) == data * times


@pytest.mark.parametrize("name", CODED)
@given(seed=st.integers(0, 1 << 32), sizes=st.integers(1, 500))
def test_damage_is_either_seen_or_without_effect(name: str, seed: int, sizes: int) -> None:
    drawn = random.Random(seed)
    coding, encode = ENCODERS[name]
    data = drawn.randbytes(200) * 3
    encoded = bytearray(encode(data))
    encoded[drawn.randrange(len(encoded))] ^= 1 << drawn.randrange(8)
    del encoded[drawn.choice((len(encoded), drawn.randrange(1, len(encoded)))) :]
    try:
        decoded = decode(coding, bytes(encoded), sizes)
    except InvalidRequest as error:
        assert error.message.startswith("The request body is not valid ")
    else:
        # Only gzip and zlib carry a checksum in any case. Cut between its members, gzip is whole.
        first = data[: len(data) // 2] if name == "two members" else data
        assert decoded in (data, first) or coding in ("br", "zstd") or name == "bare deflate"


def test_a_body_cut_between_its_members_is_whole() -> None:
    data = bytes(range(200))
    assert decode("gzip", gzip.compress(data[:100]), 7) == data[:100]


async def test_the_replica_gets_the_plain_body() -> None:
    body = chat(padding="long enough to be worth it " * 400, number=1e400)
    async with scripted(answer_ok) as (replica,), running_gateway(replica) as running:
        async with await Wire.to(running.port) as wire:
            for coding, encode in ENCODERS.values():
                header = b"content-encoding: " + coding.encode()
                for framed in (post(encode(body), header), chunked(encode(body), header)):
                    wire.send(framed)
                    assert (await wire.answer()).status == 200, coding
                    seen = replica.seen[-1]
                    assert seen.body == body
                    assert seen.header("content-encoding") is None
                    assert seen.header("content-length") == str(len(body))
        assert len(replica.seen) == 2 * len(ENCODERS)


@pytest.mark.parametrize("name", CODED)
async def test_a_bomb_is_refused_as_soon_as_it_is_one(name: str) -> None:
    coding, encode = ENCODERS[name]
    bomb = encode(b'{"model":"' + b"x" * (16 << 20) + b'"}')
    assert len(bomb) < 1 << 16
    async with scripted(answer_ok) as (replica,):
        async with running_gateway(replica, max_body_bytes=1 << 16) as running:
            answer = await running.post(bomb, headers={"content-encoding": coding})
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
            assert replica.seen == []


async def test_what_cannot_be_decoded_is_refused() -> None:
    whole = gzip.compress(chat())
    cases = {
        "cut": ("gzip", whole[:-1], 400),
        "empty": ("gzip", b"", 400),
        "plain": ("gzip", chat(), 400),
        "followed by something else": ("gzip", whole + b"more", 400),
        "followed, deflate": ("deflate", zlib.compress(chat()) + b"more", 400),
        "followed, br": ("br", brotli.compress(chat()) + b"more", 400),
        "another coding": ("br", whole, 400),
        "unknown": ("lzma", whole, 415),
        "twice": ("gzip, gzip", gzip.compress(whole), 415),
    }
    async with scripted(answer_ok) as (replica,), running_gateway(replica) as running:
        for what, (coding, body, status) in cases.items():
            answer = await running.post(body, headers={"content-encoding": coding})
            assert answer.status_code == status, what
            code = "invalid_request" if status == 400 else "unsupported_encoding"
            assert answer.json()["error"]["code"] == code
            if status == 415:
                assert answer.json()["error"]["message"].endswith(", ".join(CODINGS) + ".")
        assert replica.seen == []


async def test_chunks_of_any_size_and_trailers_make_one_body() -> None:
    body = chat(text="in pieces")
    async with scripted(answer_ok) as (replica,), running_gateway(replica) as running:
        async with await Wire.to(running.port) as wire:
            for sizes in (1, 2, 16, 1000):
                trailers = b"x-trailer: v\r\nauthorization: no\r\nx-data-parallel-rank: 7\r\n"
                wire.send(chunked(body, trailers=trailers, sizes=sizes))
                assert (await wire.answer()).status == 200
                seen = replica.seen[-1]
                assert seen.body == body
                named = {name for name, _ in seen.headers}
                assert named == {"host", "x-request-id", "traceparent", "content-length"}
            wire.send(head(b"transfer-encoding: chunked") + b'2;a=b;c="d"\r\n{}\r\n0;e\r\n\r\n')
            assert (await wire.answer()).code == "invalid_request"


async def test_a_body_byte_by_byte() -> None:
    body = chat()
    async with scripted(answer_ok) as (replica,), running_gateway(replica) as running:
        async with await Wire.to(running.port) as wire:
            for request in (post(body), chunked(body)):
                for at in range(len(request)):
                    wire.send(request[at : at + 1])
                    await asyncio.sleep(0)
                assert (await wire.answer()).status == 200
        assert [seen.body for seen in replica.seen] == [body, body]


async def test_a_body_longer_than_declared_is_no_second_request() -> None:
    async with scripted(answer_ok) as (replica,), running_gateway(replica) as running:
        async with await Wire.to(running.port) as wire:
            wire.send(post(chat()) + b'{"more": "than declared"}')
            assert (await wire.answer()).status == 200
            assert (await wire.answer()).code == "bad_http"
        assert len(replica.seen) == 1


async def test_many_large_bodies_at_once_leave_the_loop_to_others() -> None:
    content = {"model": "none", "messages": [], "x": "y" * 8_000_000}
    large = gzip.compress(json.dumps(content).encode())
    async with scripted(answer_ok) as (replica,), running_gateway(replica) as running:
        coded = {"content-encoding": "gzip"}
        posts = [asyncio.create_task(running.post(large, headers=coded)) for _ in range(4)]
        small = asyncio.create_task(running.post(chat()))
        done, _ = await asyncio.wait([*posts, small], return_when=asyncio.FIRST_COMPLETED)
        assert small in done
        assert {(await each).status_code for each in posts} == {404}
