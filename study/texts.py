"""Prompts of real text: passages of the language reference that ships with Python."""

from __future__ import annotations

from typing import Any


def passages(tokenizer: Any, tokens: int, count: int) -> list[list[int]]:
    """``count`` passages of ``tokens`` tokens, evenly spread over ``pydoc_data.topics``.

    They start at paragraphs, so that no passage starts within a word, and go on at the text's beginning where it
    ends. Which ones they are depends on the tokenizer and the count alone: a shorter prompt is the beginning of a
    longer one.
    """
    from pydoc_data.topics import topics

    paragraphs = [p for name in sorted(topics) for p in topics[name].split("\n\n") if p.strip()]
    begin = getattr(tokenizer, "bos_token_id", None)
    lead = [begin] if begin is not None and tokenizer.encode("a")[0] == begin else []
    found = []
    for number in range(count):
        at = number * len(paragraphs) // count
        ids: list[int] = []
        end = at
        # The last tokens may change with the text that follows, so that some are to spare.
        while len(ids) < tokens + 64:
            end += 512
            if end - at >= len(paragraphs):
                raise SystemExit(f"the text has fewer than {tokens} tokens")
            text = "\n\n".join([*paragraphs[at:end], *paragraphs[: max(0, end - len(paragraphs))]])
            ids = list(tokenizer.encode(text))[len(lead) :]
        found.append((lead + ids)[:tokens])
    return found
