"""multipart/form-data, read whole."""

from __future__ import annotations

import re
from typing import NamedTuple

from loadgen.replica.errors import RequestRefused
from loadgen.replica.http import HTTPRequest

_BOUNDARY = re.compile(r'boundary=(?:"([^"]{1,70})"|([^;,\s]{1,70}))', re.IGNORECASE)
_PARAMETER = re.compile(rb';\s*(name|filename)="((?:[^"\\]|\\.)*)"', re.IGNORECASE)
_DISPOSITION = b"content-disposition:"


class Part(NamedTuple):
    """One field; `filename` is None where it is no file."""

    filename: str | None
    data: bytes

    @property
    def text(self) -> str:
        """A plain field's value."""
        return self.data.decode("utf-8", "replace")


def read_form(http: HTTPRequest) -> dict[str, Part]:
    """The fields of a form, of equal names the last. Raises RequestRefused for what is none."""
    given = http.headers.get("content-type", "")
    boundary = _BOUNDARY.search(given)
    if boundary is None or not given.lower().startswith("multipart/form-data"):
        raise RequestRefused("expected multipart/form-data with a boundary", kind="Bad Request")
    mark = b"--" + (boundary[1] or boundary[2]).encode("latin-1")
    sections = (b"\r\n" + http.body).split(b"\r\n" + mark)
    if len(sections) < 2 or not sections[-1].startswith(b"--"):
        raise RequestRefused("the form does not end with its boundary", kind="Bad Request")
    return dict(_part(section) for section in sections[1:-1])


def required(form: dict[str, Part], name: str, *, file: bool = False) -> Part:
    """A field that must be there. Raises RequestRefused (400)."""
    part = form.get(name)
    if part is None or (file and part.filename is None):
        raise RequestRefused(
            f"validation error: {{'loc': ('body', '{name}'), 'msg': 'Field required'}}",
            kind="Bad Request",
            param=name,
        )
    return part


def _part(section: bytes) -> tuple[str, Part]:
    head, separator, data = section.partition(b"\r\n\r\n")
    names: dict[bytes, bytes] = {}
    for line in head.split(b"\r\n"):
        if line.lower().startswith(_DISPOSITION):
            names = {key.lower(): value for key, value in _PARAMETER.findall(line)}
    if not separator or b"name" not in names:
        raise RequestRefused("a part of the form has no name", kind="Bad Request")
    filename = names.get(b"filename")
    shown = None if filename is None else filename.decode("utf-8", "replace")
    return names[b"name"].decode("utf-8", "replace"), Part(shown, data)
