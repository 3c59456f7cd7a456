//! Intersecting two resolved layouts.

use std::ops::Range;

use kvbaton_layout::{Block, CacheSpec, Encoding, LayerSpec, Part, Resolved, Role};

use crate::CopyPlan;
use crate::boxes::{Coded, CodedOp, CodedSource, CopyOp, Place, ZeroOp};

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
    #[error("layer {layer}, {part}: rows {}..{} have no {role} beside their codes", rows.start, rows.end)]
    Companion { layer: usize, part: Part, role: &'static str, rows: Range<i64> },
    #[error("layer {layer}, {part}: a scale for each token needs all heads in one tensor of the target")]
    SharedScale { layer: usize, part: Part },
}

/// Plans the copies that fill every row of `target` from `source`.
///
/// Rows that no later token can attend to may be missing: in a sliding window of W, a decoder at position n
/// reads rows n − W + 1 and newer, so the row before them is copied where the source has it and zeroed where
/// not. All other rows must be there.
///
/// Between two sides of the same encoding, codes move as they are, scales and biases too or from one float type to
/// another. Between different encodings, rows are coded anew.
///
/// # Errors
///
/// When the source lacks a layer, a head, a lane or a row that the target wants, when an encoding cannot be
/// written there, or when the target's elements overlap.
pub fn plan(source: &Resolved, target: &Resolved, cache: &CacheSpec) -> Result<CopyPlan, PlanError> {
    let mut plan = CopyPlan {
        ops: Vec::with_capacity(target.blocks.len()),
        coded: Vec::new(),
        zeros: Vec::new(),
        sources: source.tensors.clone(),
        targets: target.tensors.clone(),
    };
    let sources = Index::new(&source.blocks);
    let mut targets = None;
    for want in &target.blocks {
        if !target.tensors[want.tensor].writable {
            return Err(PlanError::TargetOverlaps { tensor: target.tensors[want.tensor].name.clone() });
        }
        let (layer, part) = (want.layer, want.part);
        let elements = sources.get(layer, part, Role::Elements);
        let Some(first) = elements.first() else {
            return Err(PlanError::NoSource { layer, part });
        };
        let spec = cache.layers.get(layer);
        if first.encoding == want.encoding {
            moves(&mut plan, want, sources.get(layer, part, want.role), spec, target.tokens_seen)?;
        } else if want.role == Role::Elements {
            let targets = targets.get_or_insert_with(|| Index::new(&target.blocks));
            let pair = Pair { want, sources: &sources, targets, seen: target.tokens_seen };
            pair.recode(&mut plan, elements, spec)?;
        }
        if want.padding > 0 {
            let [heads, rows, _] = want.extents();
            let dst = place(want, 0, 0, want.lanes.len());
            let extents = [heads, rows, want.padding];
            plan.zeros.push(ZeroOp { layer, part, rows: want.rows.clone(), extents, dst });
        }
    }
    Ok(plan)
}

/// Blocks by what they hold.
struct Index<'a>(Vec<&'a Block>);

impl<'a> Index<'a> {
    fn new(blocks: &'a [Block]) -> Index<'a> {
        let mut sorted: Vec<&Block> = blocks.iter().collect();
        sorted.sort_by_key(|b| (Index::key(b), b.rows.start));
        Index(sorted)
    }

    fn key(block: &Block) -> (usize, Part, Role) {
        (block.layer, block.part, block.role)
    }

    /// Blocks of one kind, by their first rows.
    fn get(&self, layer: usize, part: Part, role: Role) -> &[&'a Block] {
        let key = (layer, part, role);
        let from = self.0.partition_point(|b| Index::key(b) < key);
        let rest = &self.0[from..];
        let count = rest.iter().take_while(|b| Index::key(b) == key).count();
        &rest[..count]
    }
}

/// Copies between two sides of the same encoding.
fn moves(
    plan: &mut CopyPlan,
    want: &Block,
    have: &[&Block],
    spec: Option<&LayerSpec>,
    seen: usize,
) -> Result<(), PlanError> {
    check_shape(want, have, want.lanes.end, |b| b.lanes.end)?;
    let before = plan.ops.len();
    let mut covered = 0;
    for source in have {
        if let Some(op) = intersect(source, want) {
            covered += op.elements();
            join_rows(&mut plan.ops, before, op);
        }
    }
    if covered < want.extents().iter().product() {
        let rows = unread(want, have, spec, seen)?;
        plan.zeros.push(zero_rows(want, rows));
    }
    plan.ops[before..].iter_mut().for_each(CopyOp::merge);
    Ok(())
}

/// Heads and lanes must be the same on both sides.
fn check_shape(
    want: &Block,
    have: &[&Block],
    lanes: usize,
    lanes_of: impl Fn(&Block) -> usize,
) -> Result<(), PlanError> {
    let (layer, part) = (want.layer, want.part);
    let heads = have.iter().map(|b| b.heads.end).max().unwrap_or(0);
    if want.heads.end > heads {
        return Err(PlanError::Shape { layer, part, axis: "heads", want: want.heads.end, have: heads });
    }
    match have.iter().map(|b| lanes_of(b)).find(|&have| have != lanes) {
        Some(have) => Err(PlanError::Shape { layer, part, axis: "lanes", want: lanes, have }),
        None => Ok(()),
    }
}

fn overlap<T: Ord + Copy>(a: &Range<T>, b: &Range<T>) -> Option<Range<T>> {
    let both = a.start.max(b.start)..a.end.min(b.end);
    (both.start < both.end).then_some(both)
}

fn distance(from: i64, to: i64) -> usize {
    usize::try_from(to - from).expect("ranges run upwards")
}

/// The place of an element of `block`, counted from the starts of its ranges.
fn place(block: &Block, head: usize, row: usize, lane: usize) -> Place {
    let [by_head, by_row, by_lane] = block.strides_bytes;
    Place {
        tensor: block.tensor,
        offset_bytes: block.offset_bytes + head * by_head + row * by_row + lane * by_lane,
        strides_bytes: block.strides_bytes,
        dtype: block.dtype,
    }
}

/// The copy of what both blocks hold.
fn intersect(source: &Block, target: &Block) -> Option<CopyOp> {
    let heads = overlap(&source.heads, &target.heads)?;
    let rows = overlap(&source.rows, &target.rows)?;
    let lanes = overlap(&source.lanes, &target.lanes)?;
    let at = |b: &Block| {
        let (head, lane) = (heads.start - b.heads.start, lanes.start - b.lanes.start);
        place(b, head, distance(b.rows.start, rows.start), lane)
    };
    Some(CopyOp {
        layer: target.layer,
        part: target.part,
        role: target.role,
        extents: [heads.len(), distance(rows.start, rows.end), lanes.len()],
        src: at(source),
        dst: at(target),
        heads,
        rows,
        lanes,
    })
}

/// Adds `op`, or lengthens the last one where the rows go on in the same stride on both sides.
fn join_rows(ops: &mut Vec<CopyOp>, since: usize, op: CopyOp) {
    if let Some(last) = ops[since..].last_mut() {
        let rows = last.extents[1];
        // A single row has any stride: it takes the one that leads to the next.
        let step = |a: &Place, b: &Place, next: usize| {
            let stride =
                if rows == 1 { b.offset_bytes.checked_sub(a.offset_bytes)? } else { a.strides_bytes[1] };
            let same = a.tensor == b.tensor
                && (next == 1 || b.strides_bytes[1] == stride)
                && [a.strides_bytes[0], a.strides_bytes[2]] == [b.strides_bytes[0], b.strides_bytes[2]]
                && a.offset_bytes + rows * stride == b.offset_bytes;
            same.then_some(stride)
        };
        let next = op.extents[1];
        if last.heads == op.heads
            && last.lanes == op.lanes
            && last.rows.end == op.rows.start
            && let (Some(src), Some(dst)) = (step(&last.src, &op.src, next), step(&last.dst, &op.dst, next))
        {
            last.src.strides_bytes[1] = src;
            last.dst.strides_bytes[1] = dst;
            last.rows.end = op.rows.end;
            last.extents[1] += next;
            return;
        }
    }
    ops.push(op);
}

/// The rows of `want` that are missing, if no later token attends to them.
fn unread(
    want: &Block,
    have: &[&Block],
    spec: Option<&LayerSpec>,
    tokens_seen: usize,
) -> Result<Range<i64>, PlanError> {
    let span = have.iter().filter(|b| overlap(&b.rows, &want.rows).is_some()).fold(
        None,
        |span: Option<Range<i64>>, b| {
            let span = span.unwrap_or(b.rows.clone());
            Some(span.start.min(b.rows.start)..span.end.max(b.rows.end))
        },
    );
    let missing = PlanError::MissingRows {
        layer: want.layer,
        part: want.part,
        want: want.rows.clone(),
        have: span.clone().unwrap_or(0..0),
    };
    let Some(LayerSpec::Sliding { window, .. }) = spec else { return Err(missing) };
    let signed = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
    let unread = want.rows.start..span.map_or(want.rows.end, |s| s.start.min(want.rows.end));
    // Everything but the unread head of the block must be covered, by whole heads and lanes.
    let rows = distance(unread.end, want.rows.end);
    let covered: usize = have
        .iter()
        .filter_map(|b| {
            let rows = overlap(&b.rows, &want.rows)?;
            Some(overlap(&b.heads, &want.heads)?.len() * distance(rows.start, rows.end))
        })
        .sum();
    let oldest_read = signed(tokens_seen) - signed(window.size.saturating_sub(window.keep)) + 1;
    if unread.end > oldest_read || unread.start < signed(window.keep) || covered != rows * want.heads.len() {
        return Err(missing);
    }
    Ok(unread)
}

/// Zeroes rows at the head of a block.
fn zero_rows(want: &Block, rows: Range<i64>) -> ZeroOp {
    ZeroOp {
        layer: want.layer,
        part: want.part,
        extents: [want.heads.len(), distance(rows.start, rows.end), want.lanes.len()],
        dst: place(want, 0, distance(want.rows.start, rows.start), 0),
        rows,
    }
}

/// A target block whose source is encoded otherwise.
struct Pair<'a> {
    want: &'a Block,
    sources: &'a Index<'a>,
    targets: &'a Index<'a>,
    seen: usize,
}

impl Pair<'_> {
    fn recode(
        &self,
        plan: &mut CopyPlan,
        have: &[&Block],
        spec: Option<&LayerSpec>,
    ) -> Result<(), PlanError> {
        let (want, layer, part) = (self.want, self.want.layer, self.want.part);
        let lanes = want.encoding.lanes(want.lanes.len());
        check_shape(want, have, lanes, |b| b.encoding.lanes(b.lanes.len()))?;
        let all_heads = spec.and_then(LayerSpec::attention).map(|(heads, ..)| heads);
        if want.encoding == Encoding::Int8PerToken && all_heads.is_some_and(|h| want.heads != (0..h)) {
            return Err(PlanError::SharedScale { layer, part });
        }
        let mut missing: Option<Range<i64>> = None;
        for rows in self.segments(have) {
            let held: Vec<&Block> = have
                .iter()
                .copied()
                .filter(|b| overlap(&b.rows, &rows).is_some() && overlap(&b.heads, &want.heads).is_some())
                .collect();
            if held.is_empty() {
                missing = Some(missing.map_or(rows.start, |m| m.start)..rows.end);
                continue;
            }
            let mut sources = Vec::with_capacity(held.len());
            for block in held {
                let heads = overlap(&block.heads, &want.heads).expect("filtered above");
                let coded = coded(self.sources, block, &heads, &rows)?;
                sources.push(CodedSource { heads, coded });
            }
            if sources.iter().map(|s| s.heads.len()).sum::<usize>() != want.heads.len() {
                return Err(self.missing_rows(have));
            }
            let dst = coded(self.targets, want, &want.heads, &rows)?;
            plan.coded.push(CodedOp { layer, part, heads: want.heads.clone(), rows, lanes, sources, dst });
        }
        let Some(missing) = missing else { return Ok(()) };
        let unread = unread(want, have, spec, self.seen)?;
        if missing != unread {
            return Err(self.missing_rows(have));
        }
        for &role in want.encoding.roles() {
            for block in self.targets.get(layer, part, role) {
                let Some(rows) = overlap(&block.rows, &unread) else { continue };
                if role != Role::Elements || block.tensor == want.tensor {
                    plan.zeros.push(zero_rows(block, rows));
                }
            }
        }
        Ok(())
    }

    fn missing_rows(&self, have: &[&Block]) -> PlanError {
        let start = have.iter().map(|b| b.rows.start).min().unwrap_or(0);
        let end = have.iter().map(|b| b.rows.end).max().unwrap_or(0);
        let Block { layer, part, rows, .. } = self.want;
        PlanError::MissingRows { layer: *layer, part: *part, want: rows.clone(), have: start..end }
    }

    /// The target's rows, cut wherever a run of any tensor ends.
    fn segments(&self, have: &[&Block]) -> Vec<Range<i64>> {
        let want = self.want;
        let mut cuts = vec![want.rows.start, want.rows.end];
        let mut cut = |blocks: &[&Block]| {
            cuts.extend(
                blocks.iter().filter_map(|b| overlap(&b.rows, &want.rows)).flat_map(|r| [r.start, r.end]),
            );
        };
        cut(have);
        for role in [Role::Scale, Role::Bias] {
            cut(self.sources.get(want.layer, want.part, role));
            cut(self.targets.get(want.layer, want.part, role));
        }
        cuts.sort_unstable();
        cuts.dedup();
        cuts.windows(2).map(|w| w[0]..w[1]).collect()
    }
}

/// Some heads and rows of a block, with what its encoding keeps beside them.
fn coded(
    index: &Index<'_>,
    block: &Block,
    heads: &Range<usize>,
    rows: &Range<i64>,
) -> Result<Coded, PlanError> {
    // The scale that all heads of a row share has a stride of 0 along heads, and starts at head 0.
    let at = |b: &Block| {
        place(b, heads.start.saturating_sub(b.heads.start), distance(b.rows.start, rows.start), 0)
    };
    let shared = block.encoding == Encoding::Int8PerToken;
    let companion = |role: Role| {
        if !block.encoding.roles().contains(&role) {
            return Ok(None);
        }
        let found = index.get(block.layer, block.part, role).iter().find(|b| {
            let has_heads = shared || (b.heads.start <= heads.start && heads.end <= b.heads.end);
            has_heads && b.rows.start <= rows.start && rows.end <= b.rows.end
        });
        match found {
            Some(block) => Ok(Some(at(block))),
            None => Err(PlanError::Companion {
                layer: block.layer,
                part: block.part,
                role: role.name(),
                rows: rows.clone(),
            }),
        }
    };
    Ok(Coded {
        encoding: block.encoding,
        elements: at(block),
        scale: companion(Role::Scale)?,
        bias: companion(Role::Bias)?,
    })
}

#[cfg(test)]
mod tests;
