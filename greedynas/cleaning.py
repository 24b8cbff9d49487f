"""Text from outside, made fit for a terminal or a log.

Names of files, classes and models, values in configs, checkpoints and JSON files come from outside. They may hold escape
sequences that recolour or rewrite the screen, line breaks that forge a line of ours, or characters that turn the direction of
reading. `clean` shows such characters as escapes. All that the package logs is cleaned here, all that it prints in
`terminal`.
"""

import logging
import unicodedata

# Invisible, but without them words are spelt wrongly in some languages, and some emoji fall into parts.
JOINERS = "\u200c\u200d"


def clean(text: str, lines: bool = False) -> str:
    r"""Return the text with everything that is not a letter, mark, digit, symbol or space written as an escape.

    With `lines`, line breaks stay. A byte of a file name that is not UTF-8 becomes `\xff`.

    >>> clean("a\x1b[2J\nb\u202e")
    'a\\x1b[2J\\nb\\u202e'
    """
    if text.isprintable():
        return text
    return "".join(letter if _is_harmless(letter, lines) else _escape(letter) for letter in text)


def _is_harmless(letter: str, lines: bool) -> bool:
    return (
        letter.isprintable()
        or letter in JOINERS
        or (lines and letter == "\n")
        or unicodedata.category(letter) == "Zs"  # the spaces of other scripts, and those that do not break
    )


def _escape(letter: str) -> str:
    if "\udc80" <= letter <= "\udcff":  # how Python keeps a byte that it could not decode
        return f"\\x{ord(letter) - 0xDC00:02x}"
    return letter.encode("unicode_escape").decode("ascii")


def _clean_record(record: logging.LogRecord) -> bool:
    record.msg, record.args = clean(record.getMessage()), ()
    return True


logger = logging.getLogger("greedynas")
logger.addFilter(_clean_record)  # of the logger: whatever handlers it gets, they see clean records
