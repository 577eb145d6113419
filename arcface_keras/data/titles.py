"""Titles of listings: literal byte escapes turned back into text."""

import re

_WRAPPER = re.compile(r"""b(['"])((?:\\.|(?!\1)[^\\])*)\1""", re.DOTALL)
# An escaped backslash in front makes `\\xe2` plain text, so a run never starts behind one.
_BYTE_RUN = re.compile(r"(?<!\\)(?:\\x[0-9a-fA-F]{2})+")
_BODY_ESCAPE = re.compile(r"""((?:\\x[0-9a-fA-F]{2})+)|\\([\\'"nrt])""")
_PLAIN = {"n": "\n", "r": "\r", "t": "\t"}


def decode_title(text: str) -> str:
    r"""Return `text` with literal `\xNN` byte escapes decoded as UTF-8.

    Product feeds hold titles that went through `str(bytes)`: an emoji arrives as the twelve characters
    `\xe2\x9c\x85`, sometimes inside a `b'...'` wrapper. Runs of such escapes are decoded as UTF-8 bytes;
    bytes that are no UTF-8 keep their escape, character for character, and so does everything else.
    Inside a wrapper, which is removed, the other escapes of a bytes literal (`\\ \' \" \n \r \t`) are
    decoded too.

    Args:
        text: a title as read from the file.

    Returns:
        The readable title. Never raises for any string.

    Example:
        >>> decode_title(r"\xe2\x9c\x85 Ready stock")
        '✅ Ready stock'
    """
    wrapper = _WRAPPER.fullmatch(text)
    if wrapper is None:
        return _BYTE_RUN.sub(lambda match: _decode_run(match[0]), text)
    return _BODY_ESCAPE.sub(
        lambda match: _decode_run(match[1]) if match[1] else _PLAIN.get(match[2], match[2]), wrapper[2]
    )


def _decode_run(run: str) -> str:
    """Decode a run of four-character `\\xNN` escapes; bytes that are no UTF-8 stay as written."""
    data = bytes.fromhex(run.replace("\\x", ""))
    parts = []
    start = 0
    while start < len(data):
        try:
            parts.append(data[start:].decode("utf-8"))
            break
        except UnicodeDecodeError as error:
            bad, resume = start + error.start, start + error.end
            parts += [data[start:bad].decode("utf-8"), run[4 * bad : 4 * resume]]
            start = resume
    return "".join(parts)
