import json

import httpx
import openai
import pytest

from loadgen.replica.errors import RequestRefused
from loadgen.replica.forms import read_form
from loadgen.replica.http import HTTPRequest

SOUND = bytes(range(256)) * 300
PATH = "/v1/audio/transcriptions"


async def test_transcription_through_the_sdk(sdk: openai.AsyncOpenAI) -> None:
    asked = {"model": "sim-model", "file": ("a.wav", SOUND)}
    brief = await sdk.audio.transcriptions.create(**asked)
    verbose = await sdk.audio.transcriptions.create(**asked, response_format="verbose_json")
    text = await sdk.audio.transcriptions.create(**asked, response_format="text")
    assert brief.text == verbose.text == text != ""
    assert verbose.segments[0].end == float(verbose.duration) == len(SOUND) / 32000
    other = await sdk.audio.transcriptions.create(model="sim-model", file=("a.wav", SOUND[1:]))
    assert other.text != brief.text


@pytest.mark.parametrize("task", ["transcription", "translation"])
async def test_streams_carry_the_same_text(client: httpx.AsyncClient, task: str) -> None:
    path = f"/v1/audio/{task}s"
    fields = {"model": "sim-model", "stream": "true", "stream_include_usage": "true"}
    files = {"file": ("a.wav", SOUND)}
    lines = (await client.post(path, data=fields, files=files)).text.splitlines()
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line[6:]) for line in lines[:-2] if line]
    assert {chunk["object"] for chunk in chunks} == {f"{task}.chunk"}
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    usage = chunks.pop()["usage"]
    assert usage["prompt_tokens"] == len(SOUND) // 640
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
    whole = await client.post(path, data={"model": "sim-model"}, files=files)
    assert text == whole.json()["text"]


@pytest.mark.parametrize(
    ("fields", "files", "status"),
    [
        ({"model": "sim-model"}, {"other": ("a", b"x")}, 400),
        ({}, {"file": ("a.wav", SOUND)}, 400),
        ({"model": "sim-model", "response_format": "srt"}, {"file": ("a.wav", SOUND)}, 400),
        ({"model": "other"}, {"file": ("a.wav", SOUND)}, 404),
    ],
)
async def test_refused_forms(
    client: httpx.AsyncClient, fields: dict[str, str], files: dict[str, object], status: int
) -> None:
    answer = await client.post(PATH, data=fields, files=files)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == status


async def test_json_is_no_form(client: httpx.AsyncClient) -> None:
    assert (await client.post(PATH, json={"model": "sim-model"})).status_code == 400


def form(body: bytes, boundary: str = "b") -> HTTPRequest:
    kind = f'multipart/form-data; boundary="{boundary}"'
    return HTTPRequest("POST", "/", {"content-type": kind}, body, True, False)


def test_a_form_may_hold_what_looks_like_its_frame() -> None:
    data = b"\r\n--\r\n\r\n--x\r\nmore\r\n"
    body = b"".join([
        b"preamble\r\n--b\r\nContent-Type: text/plain\r\n",
        b'Content-Disposition: form-data; filename="n.bin"; name="file"\r\n\r\n', data,
        b'\r\n--b\r\ncontent-disposition: form-data; name="model"\r\n\r\nm\r\n--b--\r\n',
    ])  # fmt: skip
    read = read_form(form(body))
    assert read["file"] == ("n.bin", data)
    assert read["model"] == (None, b"m")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--b\r\n",
        b'--b\r\ncontent-disposition: form-data; name="a"\r\n\r\n',
        b"--b\r\n\r\n\r\n--b--",
    ],
)
def test_broken_forms_are_refused(body: bytes) -> None:
    with pytest.raises(RequestRefused):
        read_form(form(body))
