"""Prompts of real text, all of one length: passages of the language reference that ships with Python."""

from __future__ import annotations

from typing import Any


def passages(tokenizer: Any, tokens: int, count: int) -> list[list[int]]:
    """``count`` passages of ``tokens`` tokens, evenly spread over ``pydoc_data.topics``.

    They start at paragraphs, so that no passage starts within a word. Passages overlap where the text is too
    short for as many; which ones they are depends on the tokenizer, the length and the count alone.
    """
    from pydoc_data.topics import topics

    paragraphs = [p for name in sorted(topics) for p in topics[name].split("\n\n") if p.strip()]
    begin = getattr(tokenizer, "bos_token_id", None)
    lead = [begin] if begin is not None and tokenizer.encode("a")[0] == begin else []
    found = []
    for number in range(count):
        at = number * len(paragraphs) // count
        ids: list[int] = []
        # A token is a few characters: text is added until there are enough.
        end = at
        while len(ids) < tokens - len(lead):
            end = min(len(paragraphs), end + 8)
            if end - at >= len(paragraphs):
                raise SystemExit(f"the text has fewer than {tokens} tokens")
            if end == len(paragraphs):
                at, end = 0, 8
            text = "\n\n".join(paragraphs[at:end])
            ids = list(tokenizer.encode(text))[len(lead) :]
        found.append((lead + ids)[:tokens])
    return found
