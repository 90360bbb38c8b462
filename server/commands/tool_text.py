"""Text of a server or a model on a terminal: it can move no cursor and ring no bell. Imports nothing."""

_CONTROLS = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0)]) | {0x09: "\t", 0x0A: "\n"}


def printable(text: str) -> str:
    """Return text without control characters but tab and newline: an escape sequence could rewrite the screen."""
    return text.translate(_CONTROLS)


def one_line(text: str) -> str:
    """Return what is printable of a text, with a space for every tab and newline."""
    return printable(text).replace("\t", " ").replace("\n", " ")
