"""Gather, scatter and slice_update."""

import numpy as np
from harness import CLOSE, F16, F32, HALF, I32, case, ints, op


def indexed():
    for label, dtype in (("f16", F16), ("f32", F32), ("int32", I32)):
        table = (dtype, 5, 4)
        case("gather", label, op("gather", axis=0), table, ints(3, 0, 4))
        case("gather", f"matrix_{label}", op("gather", axis=0), table, ints(1, 2, 3, 4).reshape(2, 2))
        case("gather", f"axis_{label}", op("gather", axis=-1), (dtype, 2, 3, 5), ints(4, 4, 0))
        case(
            "gather",
            f"batch_{label}",
            op("gather", axis=1, batch_dims=1),
            (dtype, 2, 4, 3),
            ints(3, 0, 1, 2).reshape(2, 2),
            only=[16, 17],
        )
        between = op("gather", axis=2, batch_dims=1)
        case(
            "gather",
            f"batch_between_{label}",
            between,
            (dtype, 2, 2, 4),
            ints(3, 0, 1, 2).reshape(2, 2),
            only=[16, 17],
        )
        along = ints(3, 0, 1, 2, 2, 1).reshape(2, 3)
        case("gather_along_axis", label, op("gather_along_axis", axis=0), (dtype, 4, 3), along)
        case("gather_along_axis", f"last_{label}", op("gather_along_axis", axis=-1), (dtype, 2, 4), along)
        pairs = ints(1, 0, 0, 2).reshape(2, 2)
        case(
            "gather_nd",
            label,
            op("gather_nd"),
            (dtype, 2, 3, 4),
            pairs,
            want=lambda x, i: x[i[:, 0], i[:, 1]],
        )
        batch = lambda x, i: np.stack([x[b][i[b, :, 0]] for b in range(2)])
        case(
            "gather_nd",
            f"batch_{label}",
            op("gather_nd", batch_dims=1),
            (dtype, 2, 3, 4),
            ints(2, 0, 1, 1).reshape(2, 2, 1),
            want=batch,
        )
        for mode in ("update", "add", "sub", "mul", "div", "max", "min"):
            within = HALF if dtype is F16 else CLOSE
            data, indices, updates = (dtype, 4, 3), ints(2, 0), np.array([[1, 2, 3], [4, 5, 6]]).astype(dtype)
            case(
                "scatter",
                f"{mode}_{label}",
                op("scatter", axis=0, mode=mode),
                data,
                indices,
                updates,
                want=scattered(mode, 0),
                within=within,
            )
            tall = np.array([[1, 2], [3, 4], [5, 6], [7, 8]]).astype(dtype)
            case(
                "scatter",
                f"{mode}_axis_{label}",
                op("scatter", axis=1, mode=mode),
                data,
                ints(2, 0),
                tall,
                want=scattered(mode, 1),
                within=within,
            )
            case(
                "scatter_nd",
                f"{mode}_{label}",
                op("scatter_nd", mode=mode),
                data,
                ints(0, 1, 3, 2).reshape(2, 2),
                np.array([2, 3]).astype(dtype),
                want=scattered(mode, None),
                within=within,
            )
            case(
                "scatter_along_axis",
                f"{mode}_{label}",
                op("scatter_along_axis", axis=0, mode=mode),
                data,
                ints(1, 2, 3, 0, 1, 2).reshape(2, 3),
                updates,
                want=along_axis(mode),
                within=within,
            )
        twice = op("scatter", axis=0, mode="add")
        case(
            "scatter",
            f"twice_{label}",
            twice,
            (dtype, 3, 2),
            ints(1, 1),
            np.array([[1, 2], [3, 4]]).astype(dtype),
            want=scattered("add", 0),
            within=HALF,
        )
        rows = op("scatter_nd", mode="update")
        case(
            "scatter_nd",
            f"rows_{label}",
            rows,
            (dtype, 3, 2),
            ints(2, 0).reshape(2, 1),
            np.array([[1, 2], [3, 4]]).astype(dtype),
            want=scattered("update", None),
        )
    case("gather", "negative", op("gather", axis=0), (F16, 5, 2), ints(-1, -5), want=lambda x, i: x[i])
    case(
        "gather",
        "outside",
        op("gather", axis=1),
        (F16, 5, 2),
        ints(0, 2),
        fails="index 2 along axis 1 of size 2",
    )
    case(
        "gather",
        "validated",
        op("gather", axis=0, validate_indices=True),
        (F16, 5, 2),
        ints(-1),
        only=[17],
        fails="index -1 along axis 0 of size 5",
    )
    case("gather", "empty", op("gather", axis=0), (F16, 5, 2), np.zeros((0,), I32), want=lambda x, i: x[i])
    case("gather", "uint16", op("gather", axis=0), (F32, 5, 2), np.array([4, 1], np.uint16))
    case(
        "gather",
        "int8_table",
        op("gather", axis=0),
        np.arange(6, dtype=np.int8).reshape(3, 2) - 3,
        ints(2, 0),
        only=[17],
    )
    case(
        "gather_along_axis",
        "outside",
        op("gather_along_axis", axis=0),
        (F16, 2, 2),
        ints(0, 2).reshape(1, 2),
        fails="index 2 along axis 0 of size 2",
    )
    case(
        "gather_nd",
        "outside",
        op("gather_nd"),
        (F16, 2, 2),
        ints(1, -3).reshape(1, 2),
        fails="index -3 along axis 1 of size 2",
    )
    case(
        "scatter",
        "outside",
        op("scatter", axis=0, mode="add"),
        (F16, 2, 2),
        ints(2),
        (F16, 1, 2),
        fails="index 2 along axis 0 of size 2",
    )
    case(
        "scatter_nd",
        "validated",
        op("scatter_nd", mode="add", validate_indices=True),
        (F16, 2),
        ints(-1).reshape(1, 1),
        (F16, 1),
        only=[17],
        fails="index -1 along axis 0 of size 2",
    )


COMBINE = {
    "update": lambda a, b: b,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": lambda a, b: np.trunc(a / b) if a.dtype == I32 else a / b,
    "max": np.maximum,
    "min": np.minimum,
}


def scattered(mode, axis):
    """Updates one after the other, along an axis or by several indices."""

    def apply(data, indices, updates):
        result = data.copy()
        if axis is not None:
            for at, i in enumerate(indices):
                place = (slice(None),) * axis + (i,)
                result[place] = COMBINE[mode](result[place], np.take(updates, at, axis))
        else:
            for i, update in zip(indices, updates):
                result[tuple(i)] = COMBINE[mode](result[tuple(i)], update)
        return result

    return apply


def along_axis(mode):
    def apply(data, indices, updates):
        result = data.copy()
        for r, c in np.ndindex(*indices.shape):
            i = indices[r, c]
            result[i, c] = COMBINE[mode](result[i, c], updates[r, c])
        return result

    return apply


def updates():
    for label, dtype in (("f16", F16), ("f32", F32), ("int32", I32), ("bool", bool)):
        part = op("slice_update", begin=[0, 1, 2], end=[2, 3, 4])
        case("slice_update", label, part, (dtype, 2, 4, 5), (dtype, 2, 2, 2))
        strides = op(
            "slice_update", begin=[1, 0, 4], end=[0, 4, 0], stride=[-1, 2, -2], end_mask=[True, False, False]
        )
        case(
            "slice_update",
            f"stride_{label}",
            strides,
            (dtype, 2, 4, 5),
            (dtype, 2, 2, 2),
            want=lambda x, u: strided(x, u),
        )
        squeeze = op("slice_update", begin=[1, 0, 0], end=[2, 4, 5], squeeze_mask=[True, False, False])
        case("slice_update", f"squeeze_{label}", squeeze, (dtype, 2, 4, 5), (dtype, 4, 5))
    case("slice_update", "computed", op("slice_update"), (F16, 3, 4), (F16, 1, 2), ints(1, 1), ints(2, 3))
    case(
        "slice_update",
        "outside",
        op("slice_update"),
        (F16, 3, 4),
        (F16, 1, 2),
        ints(3, 1),
        ints(4, 3),
        fails="an update [1, 2] of a slice [0, 2]",
    )


def strided(x, update):
    result = x.copy()
    result[1::-1, 0:4:2, 4:0:-2] = update
    return result
