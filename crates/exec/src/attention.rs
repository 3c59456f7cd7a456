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

use kvbaton_kernels::rows::{self, Binary, Reduction, Source};
use kvbaton_mil::program::{DataType, ValueId};
use rayon::prelude::*;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};

use crate::graph::{Graph, Node, Work};
use crate::ops::{Matmul, Op, Operand};
use crate::tensor::{Context, RowOffsets, Tensor, count};
use crate::tile::{self, Reader, RowProgram, Step, Values};

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

/// What a constant mask hides.
#[derive(Clone, Debug)]
struct Skip {
    /// What the scores are multiplied with before the mask is added.
    scale: f32,
    /// The largest factor on the way there.
    peak: f32,
    /// Columns each block of [`block_rows`] rows needs, by the block's first row.
    extents: HashMap<usize, usize>,
    /// The largest mask value left out.
    hidden: f32,
    /// Over the rows, the smallest of the largest mask value of a row.
    shown: f32,
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

impl Skip {
    /// Whether, for products of at most `bound` in size, the exponential of every hidden score is 0.
    ///
    /// A shown score is at least `shown - bound`, a hidden one at most `hidden + bound`; `e^-104` is 0 in `f32`. The
    /// rest pays for the roundings to fp16 on the way, each within 2⁻¹¹ of a value.
    fn is_exact(&self, bound: f32) -> bool {
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

/// Replaces every attention of the graph by one node.
pub(crate) fn fuse(graph: &mut Graph) {
    let mut masks = Masks::default();
    while let Some((nodes, node)) = find(graph, &mut masks) {
        let last = nodes.iter().copied().max().expect("attention has nodes");
        graph.nodes[last] = node;
        let mut i = 0;
        graph.nodes.retain(|_| {
            i += 1;
            i - 1 == last || !nodes.contains(&(i - 1))
        });
    }
}

/// The first attention of the graph: which nodes it takes the place of, and the node.
fn find(graph: &Graph, masks: &mut Masks) -> Option<(Vec<usize>, Node)> {
    let producer = graph.producers();
    let mut readers: HashMap<ValueId, Vec<usize>> = HashMap::new();
    for (i, node) in graph.nodes.iter().enumerate() {
        for id in node.reads() {
            readers.entry(id).or_default().push(i);
        }
    }
    let kept: HashSet<ValueId> = graph.kept().collect();
    // The one node that reads a value, if it is one and the value is no output.
    let only_reader = |id: ValueId| match readers.get(&id).map(Vec::as_slice) {
        Some([reader]) if !kept.contains(&id) => Some(*reader),
        _ => None,
    };
    (0..graph.nodes.len()).find_map(|i| candidate(graph, &producer, &only_reader, i, masks))
}

fn matmul(node: &Node) -> Option<&Matmul> {
    match &node.work {
        Work::Op(op) => op.as_matmul(),
        _ => None,
    }
}

/// Whether a node only shows its operand's rows under another shape.
fn keeps_rows(graph: &Graph, node: &Node) -> bool {
    match (&node.work, graph.operand_shapes(&node.operands)) {
        (Work::Op(op), Some(shapes)) => op.keeps_rows(&shapes),
        _ => false,
    }
}

fn candidate(
    graph: &Graph,
    producer: &HashMap<ValueId, usize>,
    only_reader: &impl Fn(ValueId) -> Option<usize>,
    middle: usize,
    masks: &mut Masks,
) -> Option<(Vec<usize>, Node)> {
    let node = &graph.nodes[middle];
    let mut nodes = vec![middle];
    let program = match &node.work {
        Work::Rows(program, _) => program.clone(),
        // A softmax alone is a row program of one line.
        Work::Op(op) if node.kind == "softmax" => alone(graph, node, op.as_ref())?,
        _ => return None,
    };
    let softmax_like = |l: &tile::Line| matches!(l.step, Step::Softmax { .. } | Step::Reduce { .. });
    if !program.lines.iter().any(softmax_like) || node.outputs.len() != 1 || program.results.len() != 1 {
        return None;
    }
    // Forward, past changes of shape, to the second product.
    let mut probabilities = node.outputs[0];
    let second = loop {
        let next = only_reader(probabilities)?;
        nodes.push(next);
        if matmul(&graph.nodes[next]).is_some() {
            break next;
        }
        if !keeps_rows(graph, &graph.nodes[next]) {
            return None;
        }
        probabilities = graph.nodes[next].outputs[0];
    };
    let second_node = &graph.nodes[second];
    let second_matmul = matmul(second_node)?.clone();
    if second_matmul.transpose_x || !is_value(&second_node.operands[0], probabilities) {
        return None;
    }
    // Backward from each operand that only this node reads to the first product.
    let (index, first, between) = (0..node.operands.len()).find_map(|index| {
        let Operand::Value(mut id) = node.operands[index] else { return None };
        let mut between = Vec::new();
        let mut reader = middle;
        loop {
            if only_reader(id)? != reader {
                return None;
            }
            let source = *producer.get(&id)?;
            between.push(source);
            if matmul(&graph.nodes[source]).is_some() {
                return Some((index, source, between));
            }
            if !keeps_rows(graph, &graph.nodes[source]) {
                return None;
            }
            reader = source;
            id = graph.nodes[source].reads().next()?;
        }
    })?;
    nodes.extend(between);
    let first_node = &graph.nodes[first];
    let first_matmul = matmul(first_node)?.clone();
    let constant = |o: &Operand| matches!(o, Operand::Fixed(_));
    if first_node.operands.iter().any(constant) || second_node.operands.iter().any(constant) {
        return None;
    }
    let shape = |id: ValueId| graph.known_shape(id).map(<[usize]>::to_vec);
    let (scores_shape, p_shape) = (shape(first_node.outputs[0])?, shape(probabilities)?);
    let out_shape = shape(second_node.outputs[0])?;
    let len = *scores_shape.last()?;
    let ranks = scores_shape.len() >= 2 && p_shape.len() >= 2 && out_shape.len() == p_shape.len();
    // The second product must not repeat the probabilities, and blocks must lie in one batch of either.
    if !ranks
        || p_shape.last() != Some(&len)
        || p_shape[..p_shape.len() - 1] != out_shape[..out_shape.len() - 1]
    {
        return None;
    }
    let (m, m2) = (scores_shape[scores_shape.len() - 2], p_shape[p_shape.len() - 2]);
    if m.min(m2) == 0 || !m.max(m2).is_multiple_of(m.min(m2)) || count(&scores_shape) != program.rows * len {
        return None;
    }
    let (rows, scores) = take_scores(program, index, len)?;
    let probabilities = rows.results[0];
    let dtype = second_matmul.dtype();
    // Right factors that a concat joins for this product alone.
    let joined = |node: &Node, rows_at: usize| {
        let Operand::Value(id) = node.operands[1] else { return None };
        only_reader(id)?;
        let at = *producer.get(&id)?;
        let source = &graph.nodes[at];
        let axis = match &source.work {
            Work::Op(op) => op.joins(&graph.operand_shapes(&source.operands)?)?,
            _ => return None,
        };
        let rank = graph.known_shape(id)?.len();
        (axis + rows_at == rank && rows_at == 2).then(|| (at, source.operands.clone()))
    };
    let parts = (
        joined(first_node, if first_matmul.transpose_y { 2 } else { 1 }),
        joined(second_node, if second_matmul.transpose_y { 1 } else { 2 }),
    );
    let mut operands = vec![first_node.operands[0].clone()];
    let joined = match parts {
        (Some((k, keys)), Some((v, values))) if keys.len() == values.len() => {
            nodes.extend([k, v]);
            let joined = keys.len();
            operands.extend(keys);
            operands.extend(values);
            joined
        }
        _ => {
            operands.extend([first_node.operands[1].clone(), second_node.operands[1].clone()]);
            1
        }
    };
    let first_external = operands.len();
    operands.extend(node.operands.iter().enumerate().filter(|(i, _)| *i != index).map(|(_, o)| o.clone()));
    let externals = &operands[first_external..];
    let skip = masks.skip(&rows, scores, len, m.min(m2), externals);
    let computed = computed_mask(&rows, scores, externals);
    let attention = Attention {
        first: first_matmul,
        second: second_matmul,
        rows,
        scores,
        probabilities,
        len,
        joined,
        skip,
        computed,
        shape: out_shape,
        dtype,
    };
    debug_assert_eq!(attention.len, len);
    let work = Work::Attention(Box::new(attention));
    let outputs = second_node.outputs.clone();
    Some((nodes, Node::new(&second_node.kind, work, operands, outputs)))
}

fn is_value(operand: &Operand, id: ValueId) -> bool {
    matches!(operand, Operand::Value(v) if *v == id)
}

fn alone(graph: &Graph, node: &Node, op: &dyn Op) -> Option<RowProgram> {
    let shapes = graph.operand_shapes(&node.operands)?;
    let step = op.by_rows(&shapes)?.pop()?;
    let (lead, len) = crate::ops::split_last(shapes[0]);
    let operand = tile::Operand::External { index: 0, lead: lead.to_vec(), len };
    let lines = vec![tile::Line { step, operands: vec![operand], result: 0 }];
    Some(RowProgram { rows: count(lead), registers: vec![len], lines, results: vec![0] })
}

/// The program with its external operand `index` turned into a register that the caller fills. `None` when the operand
/// is not read row for row.
fn take_scores(mut program: RowProgram, index: usize, len: usize) -> Option<(RowProgram, usize)> {
    program.registers.push(len);
    let scores = program.registers.len() - 1;
    for line in &mut program.lines {
        for o in &mut line.operands {
            if let tile::Operand::External { index: i, lead, len: width } = o {
                if *i == index {
                    if count(lead) != program.rows || *width != len {
                        return None;
                    }
                    *o = tile::Operand::Register(scores);
                } else if *i > index {
                    *i -= 1;
                }
            }
        }
    }
    // If the scores are read once, the step that reads them may write over them.
    let reads = |l: &tile::Line| {
        l.operands.iter().filter(|o| matches!(o, tile::Operand::Register(r) if *r == scores)).count()
    };
    if program.lines.iter().map(reads).sum::<usize>() == 1
        && let Some(i) = program.lines.iter().position(|l| reads(l) == 1)
    {
        let line = &program.lines[i];
        let in_place = matches!(line.step, Step::Unary { .. } | Step::Binary { .. } | Step::Softmax { .. });
        if in_place && program.registers[line.result] == len {
            let old = line.result;
            for line in &mut program.lines {
                if line.result == old {
                    line.result = scores;
                }
                for o in &mut line.operands {
                    if matches!(o, tile::Operand::Register(r) if *r == old) {
                        *o = tile::Operand::Register(scores);
                    }
                }
            }
            program.results.iter_mut().filter(|r| **r == old).for_each(|r| *r = scores);
            program.registers[old] = 0;
        }
    }
    Some((program, scores))
}

/// The mask of a program of the form scale, add a computed mask, softmax, all in the register of scores.
fn computed_mask(program: &RowProgram, scores: usize, operands: &[Operand]) -> Option<ComputedMask> {
    let in_place = |l: &tile::Line| {
        let reads = l.operands.iter().any(|o| matches!(o, tile::Operand::Register(r) if *r == scores));
        l.result == scores && reads
    };
    let [scales @ .., mask, last] = program.lines.as_slice() else { return None };
    let scaled = |l: &tile::Line| matches!(l.step, Step::Binary { op: Binary::Mul | Binary::Div, .. });
    let of_the_form = program.lines.iter().all(in_place)
        && scales.iter().all(scaled)
        && matches!(mask.step, Step::Binary { op: Binary::Add, .. })
        && matches!(last.step, Step::Softmax { .. });
    if !of_the_form {
        return None;
    }
    mask.operands.iter().find_map(|o| match o {
        tile::Operand::External { index, lead, len } if matches!(operands[*index], Operand::Value(_)) => {
            Some(ComputedMask { index: *index, lead: lead.clone(), len: *len })
        }
        _ => None,
    })
}

/// Masks looked at so far: layers share them.
#[derive(Default)]
struct Masks(Vec<(MaskKey, Option<Skip>)>);

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
    fn skip(
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
