"""mlx-lm's caches: what each class keeps, how it is read, and how a fresh one is filled.

``slots`` lists what a list of caches keeps, ``decoder`` asks a loaded model, ``source`` and ``target`` have
one entry a cache class. Rules of construction were checked against mlx-lm 0.30, 0.31 and 0.32; attributes are
read and set, not ``state``, whose arity changed between versions.
"""
