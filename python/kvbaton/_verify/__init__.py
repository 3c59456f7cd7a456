"""The rungs of the ladder that need a decoder: logits, teacher-forced and free-running tokens.

Bytes and values are compared by the native module, and so is the verdict made: one structure for both halves.
"""
