//! Row programs: operations whose results at a row depend on that row of their operands alone.
//!
//! Elementwise arithmetic, softmax and norms over the last dimension, slices and joins of the last dimension are
//! all of this kind. A chain of them runs over a few rows at a time, in buffers that stay in the first-level cache,
//! and every step is the very kernel that runs when the operation stands alone: fusing changes no bit.

use kvbaton_kernels::rows::{self, Binary, Reduction, Source, Unary};
use rayon::prelude::*;

use crate::tensor::{Context, RowOffsets, Tensor, count};

/// Where a step's operand comes from.
#[derive(Clone, Debug)]
pub(crate) enum Operand {
    /// The result of an earlier step.
    Register(usize),
    /// An operand of the program, broadcast to `lead` and a last dimension. Its index, and whether it gives one value
    /// a row (its last dimension is 1 while the step's is longer).
    External { index: usize, lead: Vec<usize>, len: usize },
}

/// One operation of a row program. `half`: round to fp16.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    Unary {
        f: Unary,
        half: bool,
    },
    Binary {
        op: Binary,
        half: bool,
    },
    Softmax {
        half: bool,
    },
    LayerNorm {
        epsilon: f32,
        gamma: Option<Vec<f32>>,
        beta: Option<Vec<f32>>,
        half: bool,
    },
    Reduce {
        what: Reduction,
        half: bool,
    },
    /// Columns from `start` on, as many as the result has.
    Slice {
        start: usize,
    },
    /// Operands side by side.
    Concat,
}

/// A step and what it works on.
#[derive(Clone, Debug)]
pub(crate) struct Line {
    pub(crate) step: Step,
    pub(crate) operands: Vec<Operand>,
    /// The register that takes the result. It may be the first operand's, when its value is not needed again.
    pub(crate) result: usize,
}

/// A row program.
#[derive(Clone, Debug, Default)]
pub(crate) struct RowProgram {
    /// Rows.
    pub(crate) rows: usize,
    /// Values in a row, for each register.
    pub(crate) registers: Vec<usize>,
    pub(crate) lines: Vec<Line>,
    /// Registers whose values are the program's results.
    pub(crate) results: Vec<usize>,
}

/// An external operand, ready to be read by rows.
pub(crate) struct Reader<'a> {
    source: Source<'a>,
    rows: RowOffsets,
    /// Values in a row.
    len: usize,
    /// Whether one stored value serves the whole row.
    single: bool,
    /// Elements from a value of a row to the next.
    stride: usize,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(tensor: &'a Tensor, lead: &[usize], len: usize) -> Result<Reader<'a>, String> {
        let mut shape = lead.to_vec();
        shape.push(len);
        let view = tensor.broadcast(&shape)?;
        let stride = view.strides.last().copied().unwrap_or(1);
        let single = len == 1 || stride == 0;
        let rows = RowOffsets::new(lead, &view.strides[..lead.len()], view.offset);
        Ok(Reader { source: tensor.source()?, rows, len, single, stride })
    }

    /// Whether a row's values lie side by side.
    pub(crate) fn is_adjacent(&self) -> bool {
        self.single || self.stride == 1
    }

    /// Rows `first..first + rows` of `len` values as one source, if they are stored so.
    fn block(&self, first: usize, rows: usize, len: usize) -> Option<Source<'a>> {
        if self.single && (self.rows.stride() == Some(0) || rows == 1) {
            return Some(self.value(first));
        }
        if self.single && len > 1 {
            return None;
        }
        let at = self.rows.get(first);
        let packed = match self.rows.stride() {
            Some(stride) => stride == len,
            None => {
                rows > 0 && self.rows.get(first + rows - 1) == at + (rows - 1) * len && {
                    (1..rows).all(|r| self.rows.get(first + r) == at + r * len)
                }
            }
        };
        (packed || rows == 1).then(|| self.slice(at, rows * len))
    }

    /// Row `row`: `len` values, or one for all.
    pub(crate) fn row(&self, row: usize, len: usize) -> Source<'a> {
        if self.single { self.value(row) } else { self.slice(self.rows.get(row), len) }
    }

    fn value(&self, row: usize) -> Source<'a> {
        let at = self.rows.get(row);
        match self.source {
            Source::Singles(v) => Source::Scalar(v[at]),
            Source::Halves(v) => Source::Scalar(v[at].to_f32()),
            other => other,
        }
    }

    fn slice(&self, at: usize, len: usize) -> Source<'a> {
        match self.source {
            Source::Singles(v) => Source::Singles(&v[at..at + len]),
            Source::Halves(v) => Source::Halves(&v[at..at + len]),
            other => other,
        }
    }
}

/// Values of a block of rows in one register.
#[derive(Debug, Default)]
pub(crate) enum Values<'a> {
    #[default]
    None,
    Own(Vec<f32>),
    Borrowed(&'a mut [f32]),
}

impl Values<'_> {
    pub(crate) fn slice(&self, len: usize) -> &[f32] {
        match self {
            Values::None => &[],
            Values::Own(v) => &v[..len],
            Values::Borrowed(v) => &v[..len],
        }
    }

    fn slice_mut(&mut self, len: usize) -> &mut [f32] {
        if matches!(self, Values::None) {
            *self = Values::Own(Vec::new());
        }
        match self {
            Values::None => &mut [],
            Values::Own(v) => {
                if v.len() < len {
                    v.resize(len, 0.0);
                }
                &mut v[..len]
            }
            Values::Borrowed(v) => &mut v[..len],
        }
    }
}

/// Values of all registers together that a block of rows may take: half of a small first-level cache.
const BLOCK_VALUES: usize = 6144;
/// Values a task handles at least.
const TASK_VALUES: usize = 1 << 14;

impl RowProgram {
    /// Removes lines whose result nobody reads.
    pub(crate) fn drop_unused(&mut self) {
        let mut needed = vec![false; self.registers.len()];
        self.results.iter().for_each(|r| needed[*r] = true);
        let mut kept: Vec<Line> = Vec::new();
        for line in self.lines.drain(..).rev() {
            if needed[line.result] {
                for o in &line.operands {
                    if let Operand::Register(r) = o {
                        needed[*r] = true;
                    }
                }
                kept.push(line);
            }
        }
        kept.reverse();
        self.lines = kept;
    }

    /// Lets elementwise steps and softmax write over an operand that is not needed again. Every register has been
    /// written once so far.
    pub(crate) fn reuse_registers(&mut self) {
        let mut last_use = vec![0; self.registers.len()];
        for (i, line) in self.lines.iter().enumerate() {
            for o in &line.operands {
                if let Operand::Register(r) = o {
                    last_use[*r] = i;
                }
            }
        }
        self.results.iter().for_each(|r| last_use[*r] = usize::MAX);
        // Where each register's value lives now.
        let mut place: Vec<usize> = (0..self.registers.len()).collect();
        for i in 0..self.lines.len() {
            let line = &mut self.lines[i];
            let in_place =
                matches!(line.step, Step::Unary { .. } | Step::Binary { .. } | Step::Softmax { .. });
            let free = line.operands.iter().find_map(|o| match o {
                Operand::Register(r) => {
                    (in_place && last_use[*r] == i && self.registers[*r] == self.registers[line.result])
                        .then_some(*r)
                }
                Operand::External { .. } => None,
            });
            for o in &mut line.operands {
                if let Operand::Register(r) = o {
                    *r = place[*r];
                }
            }
            if let Some(r) = free {
                place[line.result] = place[r];
                line.result = place[r];
            }
        }
        for r in &mut self.results {
            *r = place[*r];
        }
        // Registers nobody writes take no room.
        let mut written = vec![false; self.registers.len()];
        self.lines.iter().for_each(|l| written[l.result] = true);
        for (len, written) in self.registers.iter_mut().zip(written) {
            if !written {
                *len = 0;
            }
        }
    }

    /// Runs the program over all rows and returns its results, packed, `rows × len` values each.
    pub(crate) fn run(
        &self,
        cx: &Context,
        externals: &[Tensor],
    ) -> Result<Vec<crate::memory::FloatBuf>, String> {
        let packed = self.adjacent(cx, externals)?;
        let readers = self.readers(&packed)?;
        let mut results: Vec<_> =
            self.results.iter().map(|r| cx.pool.take(self.rows * self.registers[*r])).collect();
        let widest: usize = self.registers.iter().sum::<usize>().max(1);
        let block = (BLOCK_VALUES / widest).clamp(1, self.rows.max(1));
        // A task takes several blocks, so that its buffers are made once.
        let task = block * (TASK_VALUES / (block * widest)).max(1);
        let mut tasks: Vec<Vec<&mut [f32]>> = Vec::new();
        tasks.resize_with(self.rows.div_ceil(task), Vec::new);
        for (values, r) in results.iter_mut().zip(&self.results) {
            let mut rest: &mut [f32] = values;
            for parts in &mut tasks {
                let (part, later) = rest.split_at_mut(rest.len().min(task * self.registers[*r]));
                parts.push(part);
                rest = later;
            }
        }
        tasks.into_par_iter().with_max_len(1).enumerate().for_each_init(
            || self.registers.iter().map(|_| Vec::new()).collect::<Vec<Vec<f32>>>(),
            |scratch, (t, mut parts)| {
                let mut values: Vec<Values<'_>> =
                    scratch.iter_mut().map(|v| Values::Own(std::mem::take(v))).collect();
                let end = ((t + 1) * task).min(self.rows);
                let mut first = t * task;
                while first < end {
                    let rows = block.min(end - first);
                    for (part, r) in parts.iter_mut().zip(&self.results) {
                        let (now, later) = std::mem::take(part).split_at_mut(rows * self.registers[*r]);
                        *part = later;
                        values[*r] = Values::Borrowed(now);
                    }
                    self.block(cx, &readers, first, rows, None, &mut values);
                    first += rows;
                }
                for (scratch, v) in scratch.iter_mut().zip(values) {
                    if let Values::Own(v) = v {
                        *scratch = v;
                    }
                }
            },
        );
        Ok(results)
    }

    /// The externals, copied where the values of a row do not lie side by side.
    pub(crate) fn adjacent(&self, cx: &Context, externals: &[Tensor]) -> Result<Vec<Tensor>, String> {
        let mut packed = externals.to_vec();
        for (index, lead, len) in self.external_operands() {
            if !Reader::new(&packed[index], lead, len)?.is_adjacent() {
                packed[index] = packed[index].to_packed(cx)?;
            }
        }
        Ok(packed)
    }

    fn external_operands(&self) -> impl Iterator<Item = (usize, &[usize], usize)> {
        self.lines.iter().flat_map(|l| &l.operands).filter_map(|o| match o {
            Operand::External { index, lead, len } => Some((*index, lead.as_slice(), *len)),
            Operand::Register(_) => None,
        })
    }

    /// A reader for each external operand, in the order of the lines.
    pub(crate) fn readers<'a>(&self, externals: &'a [Tensor]) -> Result<Vec<Reader<'a>>, String> {
        self.external_operands().map(|(index, lead, len)| Reader::new(&externals[index], lead, len)).collect()
    }

    /// Runs the program over rows `first..first + rows`. With `limit`, every row is cut to its first values, as many
    /// as that: only for programs whose registers all have one length, and whose steps allow it.
    pub(crate) fn block(
        &self,
        cx: &Context,
        readers: &[Reader<'_>],
        first: usize,
        rows: usize,
        limit: Option<usize>,
        values: &mut [Values<'_>],
    ) {
        let length = |register: usize| limit.unwrap_or(self.registers[register]);
        let mut next_reader = 0;
        for line in &self.lines {
            let readers = {
                let n = line.operands.iter().filter(|o| matches!(o, Operand::External { .. })).count();
                next_reader += n;
                &readers[next_reader - n..next_reader]
            };
            let len = length(line.result);
            let mut result = std::mem::take(&mut values[line.result]);
            let out = result.slice_mut(rows * len);
            let inputs: Vec<Input<'_>> = {
                let mut readers = readers.iter();
                line.operands
                    .iter()
                    .map(|o| match o {
                        Operand::Register(r) if *r == line.result => Input::Result,
                        Operand::Register(r) => {
                            Input::Rows { values: values[*r].slice(rows * length(*r)), len: length(*r) }
                        }
                        Operand::External { .. } => {
                            Input::External(readers.next().expect("one reader for each external operand"))
                        }
                    })
                    .collect()
            };
            line.step.run(cx, &inputs, first, rows, len, out);
            drop(inputs);
            values[line.result] = result;
        }
    }
}

/// An operand of a step over a block of rows.
enum Input<'a> {
    /// The register that takes the result.
    Result,
    Rows {
        values: &'a [f32],
        len: usize,
    },
    External(&'a Reader<'a>),
}

impl<'a> Input<'a> {
    /// The whole block as one source for a result of `len` values a row, if it is one.
    fn block(&self, first: usize, rows: usize, len: usize) -> Option<Source<'a>> {
        match self {
            Input::Result => Some(Source::Destination),
            Input::Rows { values, len: have } => (*have == len).then_some(Source::Singles(values)),
            Input::External(reader) => reader.block(first, rows, len),
        }
    }

    /// Row `row` of the block, for a result of `len` values.
    fn row(&self, first: usize, row: usize, len: usize) -> Source<'a> {
        match self {
            Input::Result => Source::Destination,
            Input::Rows { values, len: 1 } if len != 1 => Source::Scalar(values[row]),
            Input::Rows { values, len: have } => Source::Singles(&values[row * have..][..*have]),
            Input::External(reader) => reader.row(first + row, len),
        }
    }

    /// Values in a row.
    fn len(&self, result: usize) -> usize {
        match self {
            Input::Result => result,
            Input::Rows { len, .. } => *len,
            Input::External(reader) => reader.len,
        }
    }

    /// Values `at..at + out.len()` of a row.
    fn copy(&self, cx: &Context, first: usize, row: usize, at: usize, out: &mut [f32]) {
        match self.row(first, row, at + out.len()) {
            Source::Singles(v) => out.copy_from_slice(&v[at..at + out.len()]),
            Source::Halves(v) => rows::widen(cx.isa, &v[at..at + out.len()], out),
            Source::Scalar(x) => out.fill(x),
            Source::Destination => {}
        }
    }
}

impl Step {
    fn run(
        &self,
        cx: &Context,
        inputs: &[Input<'_>],
        first: usize,
        rows: usize,
        len: usize,
        out: &mut [f32],
    ) {
        let isa = cx.isa;
        if out.is_empty() {
            return;
        }
        match self {
            Step::Unary { f, half } => match inputs[0].block(first, rows, len) {
                Some(x) => rows::unary(isa, f, x, out, *half),
                None => {
                    for (i, out) in out.chunks_exact_mut(len).enumerate() {
                        rows::unary(isa, f, inputs[0].row(first, i, len), out, *half);
                    }
                }
            },
            Step::Binary { op, half } => {
                match (inputs[0].block(first, rows, len), inputs[1].block(first, rows, len)) {
                    (Some(x), Some(y)) => rows::binary(isa, *op, x, y, out, *half),
                    _ => {
                        for (i, out) in out.chunks_exact_mut(len).enumerate() {
                            let (x, y) = (inputs[0].row(first, i, len), inputs[1].row(first, i, len));
                            rows::binary(isa, *op, x, y, out, *half);
                        }
                    }
                }
            }
            Step::Softmax { half } => {
                for (i, out) in out.chunks_exact_mut(len).enumerate() {
                    if !matches!(inputs[0], Input::Result) {
                        inputs[0].copy(cx, first, i, 0, out);
                    }
                    rows::softmax(isa, out, *half);
                }
            }
            Step::LayerNorm { epsilon, gamma, beta, half } => {
                let mut row = Vec::new();
                for (i, out) in out.chunks_exact_mut(len).enumerate() {
                    let x = match inputs[0].row(first, i, len) {
                        Source::Singles(x) => x,
                        _ => {
                            row.resize(len, 0.0);
                            inputs[0].copy(cx, first, i, 0, &mut row);
                            &row
                        }
                    };
                    rows::layer_norm(isa, x, *epsilon, gamma.as_deref(), beta.as_deref(), out, *half);
                }
            }
            Step::Reduce { what, half } => {
                let n = inputs[0].len(len);
                let isa = isa.with_half_sums(*half && isa.has_half_sums());
                let mut row = Vec::new();
                for (i, out) in out.iter_mut().enumerate() {
                    let x = match inputs[0].row(first, i, n) {
                        Source::Singles(x) => x,
                        _ => {
                            row.resize(n, 0.0);
                            inputs[0].copy(cx, first, i, 0, &mut row);
                            &row
                        }
                    };
                    *out = rows::reduce(isa, *what, x);
                }
                if *half {
                    rows::unary(isa, &Unary::Identity, Source::Destination, out, true);
                }
            }
            Step::Slice { start } => {
                for (i, out) in out.chunks_exact_mut(len).enumerate() {
                    inputs[0].copy(cx, first, i, *start, out);
                }
            }
            Step::Concat => {
                for (i, out) in out.chunks_exact_mut(len).enumerate() {
                    let mut at = 0;
                    for input in inputs {
                        let n = input.len(len);
                        input.copy(cx, first, i, 0, &mut out[at..at + n]);
                        at += n;
                    }
                }
            }
        }
    }
}

/// A program of one step, for an operation that stands alone: operands broadcast to `lead` and their own last
/// dimension.
pub(crate) fn single(
    cx: &Context,
    step: Step,
    operands: &[Tensor],
    lens: &[usize],
    lead: &[usize],
    len: usize,
) -> Result<crate::memory::FloatBuf, String> {
    let program = RowProgram {
        rows: count(lead),
        registers: vec![len],
        lines: vec![Line {
            step,
            operands: lens
                .iter()
                .enumerate()
                .map(|(index, len)| Operand::External { index, lead: lead.to_vec(), len: *len })
                .collect(),
            result: 0,
        }],
        results: vec![0],
    };
    Ok(program.run(cx, operands)?.pop().expect("one result"))
}
