//! What constant masks hide, and when leaving that out is exact.

use std::collections::HashMap;

use kvbaton_kernels::rows::{self, Binary, Reduction, Source};

use super::{block_rows, blocks};
use crate::ops::Operand;
use crate::tensor::Tensor;
use crate::tile::{self, Reader, RowProgram, Step};

/// What a constant mask hides.
#[derive(Clone, Debug)]
pub(super) struct Skip {
    /// What the scores are multiplied with before the mask is added.
    pub(super) scale: f32,
    /// The largest factor on the way there.
    pub(super) peak: f32,
    /// Columns each block of [`block_rows`] rows needs, by the block's first row.
    pub(super) extents: HashMap<usize, usize>,
    /// The largest mask value left out.
    pub(super) hidden: f32,
    /// Over the rows, the smallest of the largest mask value of a row.
    pub(super) shown: f32,
}

impl Skip {
    /// Whether, for products of at most `bound` in size, the exponential of every hidden score is 0.
    ///
    /// A shown score is at least `shown - bound`, a hidden one at most `hidden + bound`; `e^-104` is 0 in `f32`. The
    /// rest pays for the roundings to fp16 on the way, each within 2⁻¹¹ of a value.
    pub(super) fn is_exact(&self, bound: f32) -> bool {
        // No score overflows fp16 on its way.
        let peak = bound * self.peak * 1.01;
        if peak.is_nan() || peak >= 60_000.0 {
            return false;
        }
        let bound = bound * self.scale.abs() * 1.01;
        let slack = (self.hidden.max(f32::MIN).abs() + self.shown.abs()) * 2e-3 + 110.0;
        self.hidden == f32::NEG_INFINITY || self.hidden + 2.0 * bound + slack < self.shown
    }
}

/// Masks looked at so far: layers share them.
#[derive(Default)]
pub(super) struct Masks(Vec<(MaskKey, Option<Skip>)>);

/// Where a mask is stored, how it is read, and in which blocks.
#[derive(Clone, PartialEq, Eq)]
struct MaskKey {
    address: usize,
    offset: usize,
    shape: Vec<usize>,
    lead: Vec<usize>,
    len: usize,
    chunk: usize,
}

impl Masks {
    /// What can be skipped in a program of the form scale, add a constant mask, softmax, all in the register of
    /// scores.
    pub(super) fn skip(
        &mut self,
        program: &RowProgram,
        scores: usize,
        len: usize,
        chunk: usize,
        operands: &[Operand],
    ) -> Option<Skip> {
        let fixed = |o: &tile::Operand| match o {
            tile::Operand::External { index, lead, len } => match &operands[*index] {
                Operand::Fixed(t) => Some((t, lead.clone(), *len)),
                Operand::Value(_) => None,
            },
            tile::Operand::Register(_) => None,
        };
        let in_place = |l: &tile::Line| {
            l.result == scores
                && l.operands.iter().any(|o| matches!(o, tile::Operand::Register(r) if *r == scores))
        };
        if !program.lines.iter().all(in_place) {
            return None;
        }
        let (last, before) = program.lines.split_last()?;
        let (mask_line, scales) = before.split_last()?;
        let Step::Softmax { .. } = last.step else { return None };
        let Step::Binary { op: Binary::Add, .. } = mask_line.step else { return None };
        let (mut scale, mut peak) = (1.0f32, 1.0f32);
        for line in scales {
            let (factor, ..) = line.operands.iter().find_map(fixed).filter(|(t, ..)| t.count() == 1)?;
            let factor = *factor.float_values(rows::Isa::best()).ok()?.first()?;
            match line.step {
                Step::Binary { op: Binary::Mul, .. } => scale *= factor,
                Step::Binary { op: Binary::Div, .. } if fixed(&line.operands[1]).is_some() => scale /= factor,
                _ => return None,
            }
            peak = peak.max(scale.abs());
        }
        let (mask, lead, width) = mask_line.operands.iter().find_map(fixed)?;
        let address = match mask.source().ok()? {
            Source::Singles(v) => v.as_ptr().addr(),
            Source::Halves(v) => v.as_ptr().addr(),
            Source::Scalar(_) | Source::Destination => return None,
        };
        let key =
            MaskKey { address, offset: mask.offset, shape: mask.shape.clone(), lead, len: width, chunk };
        let known = self.0.iter().find(|(k, _)| *k == key).map(|(_, skip)| skip.clone());
        let skip = known.unwrap_or_else(|| {
            let skip = hidden(mask, &key, program.rows, len);
            self.0.push((key, skip.clone()));
            skip
        })?;
        Some(Skip { scale, peak, ..skip })
    }
}

/// A mask value so far below its row's largest hides its column.
const HIDES: f32 = 5_000.0;

/// Which trailing columns a mask hides from whole blocks; `None` when it hides none.
fn hidden(mask: &Tensor, key: &MaskKey, rows: usize, len: usize) -> Option<Skip> {
    let isa = rows::Isa::best();
    let reader = Reader::new(mask, &key.lead, key.len).ok().filter(Reader::is_adjacent)?;
    let mut row_values = vec![0.0; len];
    let mut skip = Skip {
        scale: 1.0,
        peak: 1.0,
        extents: HashMap::new(),
        hidden: f32::NEG_INFINITY,
        shown: f32::INFINITY,
    };
    for (first, count) in blocks(rows, key.chunk, block_rows(len)) {
        let mut extent = 0;
        let mut tops = Vec::with_capacity(count);
        let load = |row: usize, values: &mut [f32]| {
            rows::unary(isa, &rows::Unary::Identity, reader.row(row, len), values, false);
        };
        for row in first..first + count {
            load(row, &mut row_values);
            let top = rows::reduce(isa, Reduction::Max, &row_values);
            if !top.is_finite() {
                return None;
            }
            tops.push(top);
            let last = row_values.iter().rposition(|v| *v > top - HIDES).map_or(0, |c| c + 1);
            extent = extent.max(last);
        }
        let extent = extent.next_multiple_of(32).min(len);
        if extent < len {
            for (row, top) in (first..first + count).zip(tops) {
                load(row, &mut row_values);
                skip.hidden = skip.hidden.max(rows::reduce(isa, Reduction::Max, &row_values[extent..]));
                skip.shown = skip.shown.min(top);
            }
            skip.extents.insert(first, extent);
        }
    }
    (!skip.extents.is_empty()).then_some(skip)
}
