"""What an answer tells of the objects that its replica keeps."""

from __future__ import annotations

import json

import pytest

from router.owners import object_ids
from router.routes import ROUTES


@pytest.mark.parametrize(
    ("chunk", "expected"),
    [
        (b'{"id": "resp_1", "output": [{"id": "msg_1"}]}', ["resp_1"]),
        (b'{"output": [{"id": "msg_1"}], "id": "resp_1"}', ["resp_1"]),
        (b'data: {"type":"response.created","response":{"id":"resp_1"}}\n\n', ["resp_1"]),
        (b'{"id": "resp_1", "output": [{"text": "cut', ["resp_1"]),
        (b'{"error": {"message": "no"}}', []),
        (b'[{"id": "x"}]', []),
        (b'{"id": 5}', []),
        (b'{"id": "with space"}', []),
        (b"", []),
    ],
)
def test_the_objects_of_an_answer(chunk: bytes, expected: list[str]) -> None:
    assert object_ids(chunk) == expected


def test_a_batch_names_the_files_it_has_made_and_its_metadata_name_nothing() -> None:
    batch = {
        "metadata": {"id": "file-other", "output_file_id": "file-other"},
        "input_file_id": "file-in",
        "id": "batch_1",
        "output_file_id": "file-out",
        "error_file_id": None,
    }
    assert object_ids(json.dumps(batch).encode()) == ["batch_1", "file-out"]


def test_the_content_of_a_file_names_nothing() -> None:
    (content,) = [each for each in ROUTES if each.path == "/v1/files/{object_id}/{rest:path}"]
    assert not content.makes
