//! Intersecting two resolved layouts.

use std::ops::Range;

use kvbaton_layout::{Block, CacheSpec, Encoding, LayerSpec, Part, Resolved, Role};

use crate::boxes::{CopyOp, CopyPlan, Place, ZeroOp};

/// A source that cannot fill a target.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the messages name every field")]
pub enum PlanError {
    #[error("layer {layer}: the target wants {part}, the source has none")]
    NoSource { layer: usize, part: Part },
    #[error(
        "layer {layer}, {part}: the target wants rows {}..{}, the source has {}..{}",
        want.start, want.end, have.start, have.end
    )]
    MissingRows { layer: usize, part: Part, want: Range<i64>, have: Range<i64> },
    #[error("layer {layer}, {part}: the target wants {want} {axis}, the source has {have}")]
    Shape { layer: usize, part: Part, axis: &'static str, want: usize, have: usize },
    #[error("target tensor `{tensor}` overlaps itself: distinct elements share bytes")]
    TargetOverlaps { tensor: String },
    #[error("layer {layer}, {part}: no copy from {from:?} elements to {to:?} elements")]
    Encoding { layer: usize, part: Part, from: Encoding, to: Encoding },
}

/// Plans the copies that fill every row of `target` from `source`.
///
/// Rows that no later token can attend to may be missing: in a sliding window of W, a decoder at position n
/// reads rows n − W + 1 and newer, so the row before them is copied where the source has it and zeroed where
/// not. All other rows must be there.
///
/// # Errors
///
/// When the source lacks a layer, a head, a lane or a row that the target wants, when an encoding cannot be
/// copied to another, or when the target's elements overlap.
pub fn plan(source: &Resolved, target: &Resolved, cache: &CacheSpec) -> Result<CopyPlan, PlanError> {
    let mut ops = Vec::with_capacity(target.blocks.len());
    let mut zeros = Vec::new();
    let mut index: Vec<&Block> = source.blocks.iter().filter(|b| b.role == Role::Elements).collect();
    index.sort_by_key(|b| (b.layer, b.part, b.rows.start));
    for want in &target.blocks {
        if !target.tensors[want.tensor].writable {
            return Err(PlanError::TargetOverlaps { tensor: target.tensors[want.tensor].name.clone() });
        }
        let key = (want.layer, want.part);
        let first = index.partition_point(|b| (b.layer, b.part) < key);
        let have = &index[first..first + index[first..].partition_point(|b| (b.layer, b.part) == key)];
        check(want, have)?;
        let before = ops.len();
        let mut covered = 0;
        for source in have {
            if let Some(op) = intersect(source, want) {
                covered += op.elements();
                join_rows(&mut ops, before, op);
            }
        }
        if covered < want.extents().iter().product() {
            zeros.push(excuse(want, have, cache.layers.get(want.layer), target.tokens_seen)?);
        }
    }
    let ops = ops.into_iter().map(CopyOp::merged).collect();
    Ok(CopyPlan { ops, zeros, sources: source.tensors.clone(), targets: target.tensors.clone() })
}

/// Heads and lanes must be the same on both sides; encodings must be plain.
fn check(want: &Block, have: &[&Block]) -> Result<(), PlanError> {
    let (layer, part) = (want.layer, want.part);
    let Some(first) = have.first() else {
        return Err(PlanError::NoSource { layer, part });
    };
    if first.encoding != Encoding::Plain || want.encoding != Encoding::Plain {
        return Err(PlanError::Encoding { layer, part, from: first.encoding, to: want.encoding });
    }
    let heads = have.iter().map(|b| b.heads.end).max().unwrap_or(0);
    if want.heads.end > heads {
        return Err(PlanError::Shape { layer, part, axis: "heads", want: want.heads.end, have: heads });
    }
    if want.lanes.end != first.lanes.end {
        let (want, have) = (want.lanes.end, first.lanes.end);
        return Err(PlanError::Shape { layer, part, axis: "lanes", want, have });
    }
    Ok(())
}

fn overlap<T: Ord + Copy>(a: &Range<T>, b: &Range<T>) -> Option<Range<T>> {
    let both = a.start.max(b.start)..a.end.min(b.end);
    (both.start < both.end).then_some(both)
}

/// The copy of what both blocks hold.
fn intersect(source: &Block, target: &Block) -> Option<CopyOp> {
    let heads = overlap(&source.heads, &target.heads)?;
    let rows = overlap(&source.rows, &target.rows)?;
    let lanes = overlap(&source.lanes, &target.lanes)?;
    let place = |b: &Block| Place {
        tensor: b.tensor,
        offset_bytes: b.offset_bytes
            + (heads.start - b.heads.start) * b.strides_bytes[0]
            + distance(b.rows.start, rows.start) * b.strides_bytes[1]
            + (lanes.start - b.lanes.start) * b.strides_bytes[2],
        strides_bytes: b.strides_bytes,
        dtype: b.dtype,
    };
    let extents = [heads.len(), distance(rows.start, rows.end), lanes.len()];
    let (src, dst) = (place(source), place(target));
    Some(CopyOp { layer: target.layer, part: target.part, heads, rows, lanes, extents, src, dst })
}

fn distance(from: i64, to: i64) -> usize {
    usize::try_from(to - from).expect("ranges run upwards")
}

/// Adds `op`, or lengthens the last one where the rows go on in the same stride on both sides.
fn join_rows(ops: &mut Vec<CopyOp>, since: usize, op: CopyOp) {
    if let Some(last) = ops[since..].last_mut() {
        let follows = |a: &Place, b: &Place, rows: usize| {
            a.tensor == b.tensor
                && a.strides_bytes == b.strides_bytes
                && a.offset_bytes + rows * a.strides_bytes[1] == b.offset_bytes
        };
        let rows = last.extents[1];
        if last.heads == op.heads
            && last.lanes == op.lanes
            && last.rows.end == op.rows.start
            && follows(&last.src, &op.src, rows)
            && follows(&last.dst, &op.dst, rows)
        {
            last.rows.end = op.rows.end;
            last.extents[1] += op.extents[1];
            return;
        }
    }
    ops.push(op);
}

/// The rows of `want` that are missing, if no later token attends to them.
fn excuse(
    want: &Block,
    have: &[&Block],
    spec: Option<&LayerSpec>,
    tokens_seen: usize,
) -> Result<ZeroOp, PlanError> {
    let held = have.iter().filter(|b| overlap(&b.rows, &want.rows).is_some());
    let span = held.fold(None, |span: Option<Range<i64>>, b| {
        let span = span.unwrap_or(b.rows.start..b.rows.end);
        Some(span.start.min(b.rows.start)..span.end.max(b.rows.end))
    });
    let missing = PlanError::MissingRows {
        layer: want.layer,
        part: want.part,
        want: want.rows.clone(),
        have: span.clone().unwrap_or(0..0),
    };
    let Some(LayerSpec::Sliding { window, .. }) = spec else { return Err(missing) };
    let seen = i64::try_from(tokens_seen).expect("rows are fewer than 2^63");
    let size = i64::try_from(window.size).unwrap_or(i64::MAX);
    let unread = want.rows.start..span.map_or(want.rows.end, |s| s.start.min(want.rows.end));
    // Everything but the unread head of the block must have been covered: one box of whole heads and lanes.
    let head_only: usize =
        have.iter().filter_map(|b| intersect(b, want)).map(|op| op.elements()).sum::<usize>()
            + distance(unread.start, unread.end) * want.heads.len() * want.lanes.len();
    let keep = i64::try_from(window.keep).unwrap_or(i64::MAX);
    if unread.end > seen - size + 1 || unread.start < keep || head_only != want.extents().iter().product() {
        return Err(missing);
    }
    Ok(ZeroOp {
        layer: want.layer,
        part: want.part,
        extents: [want.heads.len(), distance(unread.start, unread.end), want.lanes.len()],
        rows: unread,
        dst: Place {
            tensor: want.tensor,
            offset_bytes: want.offset_bytes,
            strides_bytes: want.strides_bytes,
            dtype: want.dtype,
        },
    })
}
