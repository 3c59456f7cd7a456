//! Which way a box is moved, decided from its strides alone.

use super::BoxMove;

/// One axis of a box.
#[derive(Clone, Copy, Debug)]
pub(super) struct Axis {
    /// Which of `[head, row, lane]` it is.
    pub index: usize,
    pub extent: usize,
    pub src: isize,
    pub dst: isize,
}

/// The ways to move a box.
#[derive(Clone, Copy, Debug)]
pub(super) enum Route {
    /// Elements are neighbours along `lane` on both sides.
    Lines { outer: Axis, middle: Axis, lane: Axis },
    /// Elements are neighbours along `col` in the source and along `row` in the destination.
    Transpose { outer: Axis, row: Axis, col: Axis },
    /// Elements have no neighbours on one side.
    Scattered,
}

/// Picks the route.
pub(super) fn choose(mv: &BoxMove) -> Route {
    let axes: [Axis; 3] = [0, 1, 2].map(|index| Axis {
        index,
        extent: mv.extents[index],
        src: mv.src_strides[index],
        dst: mv.dst_strides[index],
    });
    let packed_src = |axis: &Axis| axis.src == mv.src.bytes().cast_signed();
    let packed_dst = |axis: &Axis| axis.dst == mv.dst.bytes().cast_signed();

    // An axis of one element has any stride one likes; the longest axis that fits makes the longest lines.
    let lane = axes
        .iter()
        .filter(|axis| axis.extent == 1 || (packed_src(axis) && packed_dst(axis)))
        .max_by_key(|axis| axis.extent);
    if let Some(&lane) = lane
        && (lane.extent > 1 || mv.elements() == 1)
    {
        let (outer, middle) = others(axes, lane.index, None);
        return Route::Lines { outer, middle, lane };
    }
    let col = axes.iter().find(|axis| axis.extent > 1 && packed_src(axis));
    let row = axes.iter().find(|axis| axis.extent > 1 && packed_dst(axis));
    if let (Some(&col), Some(&row)) = (col, row) {
        let (outer, _) = others(axes, row.index, Some(col.index));
        return Route::Transpose { outer, row, col };
    }
    Route::Scattered
}

/// The axes left beside one or two others. Of two, the second is the one with shorter steps in the destination: writes
/// then run forward.
fn others(axes: [Axis; 3], one: usize, two: Option<usize>) -> (Axis, Axis) {
    let mut left = axes.into_iter().filter(|axis| axis.index != one && Some(axis.index) != two);
    let a = left.next().expect("three axes less at most two");
    let b = left.next().unwrap_or(a);
    if a.dst.unsigned_abs() < b.dst.unsigned_abs() && b.extent > 1 { (b, a) } else { (a, b) }
}
