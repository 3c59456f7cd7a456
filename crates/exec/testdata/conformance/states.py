"""States: what is read, what is written, and what the next run finds."""

import numpy as np
from coremltools.converters.mil import Builder as mb
from harness import F16, F32, ints, state_case


def noise(dtype, *shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def states():
    for label, dtype in (("f16", F16), ("f32", F32)):
        for shape in ((3,), (2, 3), (2, 1, 2, 1, 3)):
            reads(label, dtype, shape)
            writes(label, dtype, shape)
    for op in ("read_state", "write_state"):
        sums(op)
    rows()
    two()
    kept()


def reads(label, dtype, shape):
    """A state that nobody writes stays as it is: zeros, or what was set."""

    def build(cache, x):
        return mb.add(x=mb.read_state(input=cache), y=x)

    held, x = noise(dtype, *shape, seed=1), noise(dtype, 1, seed=2)
    calls = [
        ({"x": x}, [np.zeros(shape, dtype) + x], {"cache": np.zeros(shape, dtype)}),
        ({"cache": held, "x": x}, [held + x], {"cache": held}),
        ({"x": -x}, [held - x], {"cache": held}),
    ]
    name = f"rank_{len(shape)}_{label}"
    state_case("read_state", name, {"cache": (dtype, *shape)}, {"x": (dtype, 1)}, build, calls)


def writes(label, dtype, shape):
    """A write of a whole value, which the same run reads again."""

    def build(cache, x):
        old = mb.read_state(input=cache)
        new = mb.coreml_update_state(state=cache, value=mb.mul(x=x, y=dtype(2)))
        return mb.sub(x=new, y=old)

    first, second = noise(dtype, *shape, seed=3), noise(dtype, *shape, seed=4)
    two = dtype(2)
    calls = [
        ({"x": first}, [first * two], {"cache": first * two}),
        ({"x": second}, [second * two - first * two], {"cache": second * two}),
    ]
    name = f"rank_{len(shape)}_{label}"
    state_case("write_state", name, {"cache": (dtype, *shape)}, {"x": (dtype, *shape)}, build, calls)


def sums(op):
    """A value read before a write keeps what it was; one read after has the new one."""

    def build(total, x):
        before = mb.read_state(input=total)
        mb.coreml_update_state(state=total, value=mb.add(x=before, y=x))
        after = mb.read_state(input=total)
        return before, after

    given = [np.array(v, F16) for v in ([1, 2], [0.5, -4], [10, 20])]
    total, calls = np.zeros(2, F16), []
    for x in given:
        calls.append(({"x": x}, [total, total + x], {"total": total + x}))
        total = total + x
    state_case(op, "before_and_after", {"total": (F16, 2)}, {"x": (F16, 2)}, build, calls)


def rows():
    """Rows written into a cache at a position that is an input: what decoding does."""

    def build(cache, x, at):
        old = mb.read_state(input=cache)
        begin = mb.concat(values=(ints(0), at, ints(0)), axis=0)
        end = mb.concat(values=(ints(2), mb.add(x=at, y=ints(1)), ints(3)), axis=0)
        new = mb.slice_update(x=old, update=x, begin=begin, end=end)
        return mb.reduce_sum(x=mb.coreml_update_state(state=cache, value=new), axes=[1], keep_dims=False)

    cache, calls = np.zeros((2, 4, 3), F16), []
    for step, at in enumerate((0, 1, 3, 1)):
        x = np.round(4 * noise(F16, 2, 1, 3, seed=step)).astype(F16)
        cache = cache.copy()
        cache[:, at : at + 1] = x
        calls.append(({"x": x, "at": ints(at)}, [cache.sum(1)], {"cache": cache}))
    inputs = {"x": (F16, 2, 1, 3), "at": (np.int32, 1)}
    state_case("write_state", "rows", {"cache": (F16, 2, 4, 3)}, inputs, build, calls)


def two():
    """Two states, one moved into the other."""

    def build(now, last, x):
        moved = mb.read_state(input=now)
        mb.coreml_update_state(state=last, value=moved)
        new = mb.coreml_update_state(state=now, value=mb.add(x=x, y=F16(0)))
        return mb.sub(x=new, y=mb.read_state(input=last))

    given = [np.array(v, F16) for v in ([1, 2], [5, 7], [9, 9])]
    held, calls = np.zeros(2, F16), []
    for x in given:
        calls.append(({"x": x}, [x - held], {"now": x, "last": held}))
        held = x
    shapes = {"now": (F16, 2), "last": (F16, 2)}
    state_case("write_state", "two_states", shapes, {"x": (F16, 2)}, build, calls)


def kept():
    """Of several writes the last one stays."""

    def build(cache, x):
        first = mb.coreml_update_state(state=cache, value=mb.add(x=x, y=F16(1)))
        second = mb.coreml_update_state(state=cache, value=mb.mul(x=first, y=F16(3)))
        return mb.add(x=first, y=second)

    x = np.array([[1, -2, 0.5]], F16)
    calls = [({"x": x}, [(x + 1) * 4], {"cache": (x + 1) * 3})]
    state_case("write_state", "twice", {"cache": (F16, 1, 3)}, {"x": (F16, 1, 3)}, build, calls)
