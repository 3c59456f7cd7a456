//! Attention by blocks of query rows.
//!
//! `matmul`, a row program with a softmax, `matmul`: the scores exist for a block of rows at a time, so memory grows with
//! the length and not with its square. Every rounding of the unfused program is kept, and products do not depend on
//! how they are cut, so the results are the same bits.
//!
//! Where the program adds a constant mask, the columns that it hides from a whole block are left out, if for the
//! values at hand that is exact: the bound `|q·k| ≤ ‖q‖‖k‖` must show that the exponential of every hidden score is
//! 0, and the hidden rows of the right factor must be finite.
//!
//! Where it adds a mask that is computed, trailing columns that −∞ hides are not read at all: in a cache they are rows
//! that hold nothing yet, and whatever is there is no data. Right factors that are joined for the product, a chunk's
//! rows and the past, are joined as far as they are shown.
//!
//! `find` finds attention in a graph, `masks` looks at constant masks; here it runs.

mod find;
mod masks;

use kvbaton_kernels::rows::{self, Reduction, Source};
use kvbaton_mil::program::DataType;
use rayon::prelude::*;
use std::sync::{Arc, Mutex, PoisonError};

use crate::ops::Matmul;
use crate::tensor::{Context, RowOffsets, Tensor, count};
use crate::tile::{Reader, RowProgram, Values};

pub(crate) use find::fuse;
use masks::Skip;

/// Two products and the rows between them.
#[derive(Debug)]
pub(crate) struct Attention {
    first: Matmul,
    second: Matmul,
    /// Reads the scores from `scores` and leaves the probabilities in `probabilities`.
    rows: RowProgram,
    scores: usize,
    probabilities: usize,
    /// Values in a row of scores.
    len: usize,
    /// Operands that are joined to either right factor.
    joined: usize,
    skip: Option<Skip>,
    computed: Option<ComputedMask>,
    shape: Vec<usize>,
    dtype: DataType,
}

/// A mask that is computed: which of the rows' operands, and the shape it is broadcast to.
#[derive(Clone, Debug)]
struct ComputedMask {
    index: usize,
    lead: Vec<usize>,
    len: usize,
}

/// What computed masks show, looked at once a run: layers share their masks.
#[derive(Debug, Default)]
pub(crate) struct Shown(Mutex<Vec<(Tensor, Arc<Vec<usize>>)>>);

impl Shown {
    /// For each row of `mask`, how many columns remain when the trailing ones of −∞ are left out.
    fn columns(&self, mask: &Tensor) -> Result<Arc<Vec<usize>>, String> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // The tensor is kept with its answer, so that no other takes its memory meanwhile.
        if let Some((_, columns)) = known.iter().find(|(tensor, _)| tensor.is_same(mask)) {
            return Ok(Arc::clone(columns));
        }
        let (lead, len) = crate::ops::split_last(&mask.shape);
        let reader = Reader::new(mask, lead, len)?;
        let shown = |row: usize| match reader.row(row, len) {
            Source::Singles(v) => v.iter().rposition(|v| *v != f32::NEG_INFINITY),
            Source::Halves(v) => v.iter().rposition(|v| *v != half::f16::NEG_INFINITY),
            Source::Scalar(_) | Source::Destination => None,
        };
        // A row that is hidden as a whole is left to the softmax.
        let columns = (0..count(lead)).into_par_iter().map(|row| shown(row).map_or(len, |last| last + 1));
        let columns = Arc::new(columns.collect());
        known.push((mask.clone(), Arc::clone(&columns)));
        Ok(columns)
    }
}

impl ComputedMask {
    /// Columns that each block of rows needs: at least one.
    fn extents(&self, cx: &Context, mask: &Tensor, blocks: &[(usize, usize)]) -> Result<Vec<usize>, String> {
        let columns = cx.shown.columns(mask)?;
        // The mask's row for each row of scores.
        let lead = crate::ops::split_last(&mask.shape).0.to_vec();
        let rows = Tensor::ints(DataType::Int32, lead, Vec::new()).broadcast(&self.lead)?;
        let rows = RowOffsets::new(&rows.shape, &rows.strides, 0);
        let shown = |row: usize| columns[rows.get(row)];
        Ok(blocks.iter().map(|(first, n)| (*first..first + n).map(shown).max().unwrap_or(self.len)).collect())
    }
}

/// Rows of a block: as many as keep the scores in a part of the second-level cache.
fn block_rows(len: usize) -> usize {
    (65_536 / len.max(1)).clamp(8, 64)
}

/// The blocks of `rows` rows that never cross a multiple of `chunk`: first row and number.
fn blocks(rows: usize, chunk: usize, size: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..rows).step_by(chunk.max(1)).flat_map(move |c| {
        let end = (c + chunk).min(rows);
        (c..end).step_by(size).map(move |b| (b, size.min(end - b)))
    })
}

/// Rows of a block whose columns were counted: the panels are read once for each block.
const LONG_BLOCK_ROWS: usize = 48;

impl Attention {
    /// Memory that each thread takes while it runs.
    pub(crate) fn thread_bytes(&self) -> usize {
        self.rows.registers.len() * block_rows(self.len) * self.len * 4
    }

    pub(crate) fn run(&self, cx: &Context, operands: &[Tensor]) -> Result<Vec<Tensor>, String> {
        let (factors, externals) = operands.split_at(1 + 2 * self.joined);
        let (keys, values) = factors[1..].split_at(self.joined);
        let externals = self.rows.adjacent(cx, externals)?;
        let chunk = {
            let rows = |shape: &[usize]| shape[shape.len() - 2];
            let left = &factors[0].shape;
            let m = if self.first.transpose_x { left[left.len() - 1] } else { rows(left) };
            m.min(rows(&self.shape))
        };
        let size = if self.computed.is_some() { LONG_BLOCK_ROWS } else { block_rows(self.len) };
        let blocks: Vec<(usize, usize)> = blocks(self.rows.rows, chunk, size).collect();
        let extents = match &self.computed {
            Some(mask) => Some(mask.extents(cx, &externals[mask.index], &blocks)?),
            None => None,
        };
        // Columns that any block needs.
        let reach = extents.as_ref().and_then(|e| e.iter().copied().max()).unwrap_or(self.len);

        let keys = join(cx, keys, if self.first.transpose_y { 2 } else { 1 }, reach)?;
        let scores = self.first.factors(cx, &factors[0], &keys)?;
        let (keys, which_keys) = scores.pack(cx)?;
        let (m, k, n) = (scores.m, scores.k, scores.n);
        let left_offsets = scores.left_offsets();
        let left_stride = scores.x.strides[scores.batch.len()];
        let Source::Singles(left) = scores.x.source()? else {
            return Err("x is not stored as f32".to_owned());
        };

        // The right factor of the second product, seen with a left one of the probabilities' shape.
        let probability_shape = &self.shape[..self.shape.len() - 1];
        let stand_in = Tensor {
            dtype: self.dtype,
            shape: [probability_shape, &[n]].concat(),
            strides: vec![0; self.shape.len()],
            offset: 0,
            data: operands[0].data.clone(),
        };
        let stand_in = Tensor { strides: crate::tensor::packed_strides(&stand_in.shape), ..stand_in };
        let values = join(cx, values, if self.second.transpose_y { 1 } else { 2 }, reach)?;
        let values = self.second.factors_of_right(&stand_in, &values)?;
        let (value_panels, which_values) = values.pack(cx)?;
        let (m2, n2) = (values.m, values.n);

        let readers = self.rows.readers(&externals)?;
        let skips: Vec<bool> = match &self.skip {
            None => Vec::new(),
            // The bound on the scores holds for sums in f32.
            Some(_) if cx.isa.has_half_sums() => vec![false; count(&scores.batch)],
            Some(skip) => {
                let finite: Vec<bool> = value_panels.par_iter().map(|p| p.is_finite(cx.isa)).collect();
                let key_norms: Vec<f32> = keys.par_iter().map(|p| p.largest_norm(cx.isa)).collect();
                // By batch of the first product; a batch of the second one inside it has the same values or is
                // looked at here, too.
                let all_finite = finite.iter().all(|f| *f);
                (0..count(&scores.batch))
                    .into_par_iter()
                    .map(|b| {
                        let norm = (0..m).map(|i| {
                            let at = left_offsets.get(b) + i * left_stride;
                            rows::reduce(cx.isa, Reduction::SumOfSquares, &left[at..at + k])
                        });
                        // Not `max`, which drops a NaN.
                        let norm = norm.fold(0.0, |a, x| if x > a || f32::is_nan(x) { x } else { a }).sqrt();
                        all_finite && skip.is_exact(norm * key_norms[which_keys[b]])
                    })
                    .collect()
            }
        };

        let mut out = cx.pool.take(count(&self.shape));
        let mut tasks = Vec::new();
        let mut rest: &mut [f32] = &mut out;
        for (i, (first, count)) in blocks.iter().enumerate() {
            let (part, later) = rest.split_at_mut(count * n2);
            tasks.push((*first, *count, extents.as_ref().map(|e| e[i]), part));
            rest = later;
        }
        tasks.into_par_iter().with_max_len(1).for_each_init(
            || self.rows.registers.iter().map(|_| Vec::new()).collect::<Vec<Vec<f32>>>(),
            |scratch, (row, rows, extent, out)| {
                let (b, b2) = (row / m, row / m2);
                let limit = extent.or_else(|| match &self.skip {
                    Some(skip) if skips[b] => skip.extents.get(&row).copied(),
                    _ => None,
                });
                let width = limit.unwrap_or(n);
                if scratch[self.scores].len() < rows * n {
                    scratch[self.scores].resize(rows * n, 0.0);
                }
                let left = &left[left_offsets.get(b) + row % m * left_stride..];
                let tile = &mut scratch[self.scores][..rows * width];
                keys[which_keys[b]].multiply(
                    cx.isa,
                    left,
                    left_stride,
                    rows,
                    k,
                    width,
                    tile,
                    width,
                    self.first.half(),
                );
                let mut values: Vec<Values<'_>> =
                    scratch.iter_mut().map(|v| Values::Own(std::mem::take(v))).collect();
                self.rows.block(cx, &readers, row, rows, limit, &mut values);
                let p = values[self.probabilities].slice(rows * width);
                value_panels[which_values[b2]].multiply(
                    cx.isa,
                    p,
                    width,
                    rows,
                    width,
                    n2,
                    out,
                    n2,
                    self.second.half(),
                );
                for (scratch, v) in scratch.iter_mut().zip(values) {
                    if let Values::Own(v) = v {
                        *scratch = v;
                    }
                }
            },
        );
        Ok(vec![Tensor::floats(self.dtype, self.shape.clone(), out)])
    }
}

/// The first `reach` rows (dimension `from_end` from the end) of `parts`, one after the other. One part is a view.
fn join(cx: &Context, parts: &[Tensor], from_end: usize, reach: usize) -> Result<Tensor, String> {
    let d = parts[0].rank() - from_end;
    if let [whole] = parts {
        return Ok(whole.narrowed(d, 0, reach.min(whole.shape[d]), 1));
    }
    let mut shape = parts[0].shape.clone();
    shape[d] = parts.iter().map(|p| p.shape[d]).sum();
    let (outer, row) = (count(&shape[..d]), count(&shape[d + 1..]));
    // As long as all of it, so that the next call finds it again; what is not shown is not written.
    let mut values = cx.pool.take(count(&shape));
    for (o, out) in values.chunks_mut((shape[d] * row).max(1)).enumerate().take(outer) {
        let mut rest = &mut out[..reach * row];
        for part in parts {
            let rows = part.shape[d].min(rest.len() / row.max(1));
            let (now, later) = rest.split_at_mut(rows * row);
            let mut one = part.narrowed(d, 0, rows, 1);
            one.offset += RowOffsets::new(&part.shape[..d], &part.strides[..d], 0).get(o);
            one.shape[..d].fill(1);
            one.copy_to(cx.isa, now)?;
            rest = later;
        }
    }
    Ok(Tensor::floats(parts[0].dtype, shape, values).narrowed(d, 0, reach, 1))
}
