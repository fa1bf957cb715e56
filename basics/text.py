"""Values as text: sizes, numbers, sums of money, similar names, text from outside in Markdown."""

import difflib
import math
import re
from collections.abc import Iterable

from basics.errors import one_line, visible

# What makes a link of a bare address too: ://, www. and @.
MARKUP = re.compile(r"[\\`\[\]|@]|:(?=//)|(?<=www)\.", re.IGNORECASE)

LEAST_DOLLARS = 1e-6  # a smaller sum is shown as less than that


def gib(size: float) -> str:
    """Format a number of bytes with three digits, in GiB, MiB or KiB."""
    return _with_unit(size, ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")))


def gb(size: float) -> str:
    """Format a number of bytes with three digits, in GB, MB or kB."""
    return _with_unit(size, ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")))


def _with_unit(size: float, units: tuple[tuple[float, str], ...]) -> str:
    factor, name = next((unit for unit in units if abs(size) >= unit[0]), units[-1])
    value = abs(size) / factor
    digits = 0
    if value < 9.995:
        digits = 2
    elif value < 99.95:
        digits = 1
    return f"{size / factor:,.{digits}f} {name}"


def short_count(value: float) -> str:
    """Format a count of tokens with three digits."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.2f}{letter}"
    return f"{value:.0f}"


def counted(number: int, noun: str, nouns: str = "") -> str:
    """Return "1 step", "2 steps"."""
    return f"{number:,} {noun if number == 1 else nouns or noun + 's'}"


def dollars(value: float) -> str:
    """Format US dollars: small sums with two digits that say something, down to 0.000001."""
    if value >= 1:
        return f"{value:,.2f}"
    if 0 < value < LEAST_DOLLARS:
        return f"<{LEAST_DOLLARS:f}"
    digits = max(4, 1 - math.floor(math.log10(value))) if value > 0 else 4
    return f"{value:.{digits}f}"


def nearest(word: str, known: Iterable[str], *, similarity: float = 0.6) -> str:
    """Return the known name that is most similar to a word; empty if none is similar enough."""
    found = difflib.get_close_matches(word[:60], known, n=1, cutoff=similarity)  # slow if long
    return found[0] if found else ""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return what to add after a word that is not known; empty without a similar one."""
    found = nearest(word, known)
    return f" (did you mean {found}?)" if found else ""


def escaped(text: str) -> str:
    """Escape what could begin a link, an image, a tag, code, a further cell or a further line."""
    return visible(MARKUP.sub(r"\\\g<0>", text)).replace("<", "&lt;").replace("\n", " ")


def code(text: str) -> str:
    """Format text as code on one line; in code, nothing but a backtick needs an escape."""
    return "`{}`".format(one_line(text).replace("`", "'"))
