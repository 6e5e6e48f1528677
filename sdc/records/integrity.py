"""Checksums of a record: of each JSON file, and of each line together with all lines before it.

A line that was lost, repeated, edited or put elsewhere no longer fits its checksum. The
checksum is a CRC-32, which finds every change of up to 32 neighbouring bits and misses one in 4e9 of all others. It
guards against accidents, not against somebody who computes it anew.
"""

import re
import zlib

FIELD = "checksum"
"""Name of the field; it is the last one of an object, and no other may have that name."""

_LINE = re.compile(rb', "checksum": "([0-9a-f]{8})"\}$')
_TEXT = re.compile(rb',\n "checksum": "([0-9a-f]{8})"\n\}\n')
_LENGTH = len(b',\n "checksum": "01234567"\n}\n')


def start(name: str) -> int:
    """The checksum that stands before the first line of a file of that name."""
    return zlib.crc32(name.encode())


def link(line: bytes, before: int) -> tuple[bytes, int]:
    """Adds its checksum to a line.

    Args:
        line: a JSON object with at least one field, as `json.dumps` writes it.
        before: checksum of the line before it.

    Returns:
        The line with its checksum, and the checksum.

    Example:
        >>> from sdc.records.integrity import link, start
        >>> link(b'{"step": 0}', start("steps.jsonl"))
        (b'{"step": 0, "checksum": "e1a6c1bf"}', 3785802175)
    """
    value = zlib.crc32(line, before)
    return b'%s, "%s": "%08x"}' % (line[:-1], FIELD.encode(), value), value


def unlink(line: bytes) -> tuple[bytes, int | None]:
    """A line as it was before `link`, and its checksum; None where it has none."""
    found = _LINE.search(line)
    return (line, None) if found is None else (line[: found.start()] + b"}", int(found[1], 16))


def check_line(line: bytes, before: int) -> int | None:
    """The checksum of a line if it is right; None if there is none or another."""
    bare, found = unlink(line)
    return found if found is not None and zlib.crc32(bare, before) == found else None


def end_of(content: bytes, before: int) -> int:
    """The checksum of the last whole line of a file; `before` where there is none."""
    whole = content[: content.rfind(b"\n") + 1]
    found = unlink(whole[whole.rfind(b"\n", 0, -1) + 1 : -1])[1]
    return before if found is None else found


def seal(text: bytes) -> bytes:
    """Adds its checksum to the text of a JSON file.

    Args:
        text: an object with at least one field, as `json.dumps` writes it with an indent of 1, and a newline.
    """
    return b'%s,\n "%s": "%08x"\n}\n' % (text[: -len(b"\n}\n")], FIELD.encode(), zlib.crc32(text))


def is_sound(text: bytes) -> bool:
    """Whether the text of a JSON file has a checksum, and the right one."""
    cut = max(0, len(text) - _LENGTH)
    found = _TEXT.fullmatch(text, cut)
    return found is not None and zlib.crc32(b"\n}\n", zlib.crc32(memoryview(text)[:cut])) == int(found[1], 16)
