"""Real text that every Python has: the sentences of its own reference documentation."""

import re
from pydoc_data.topics import topics


def sentences() -> list[str]:
    """In the order of the text, so that neighbours speak of the same thing; tables, code and headings left out."""
    found = []
    for topic in topics.values():
        for paragraph in topic.split("\n\n"):
            if re.match(r"[A-Z]\S* [a-z\"]", paragraph) and not re.search(r"\n   |\n\*\*|\n==|::=", paragraph):
                words = " ".join(paragraph.split())
                found += [part for part in re.split(r"(?<=[.!?])\s+(?=[A-Z])", words) if 40 <= len(part) <= 160]
    return found
