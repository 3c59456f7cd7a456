//! Row programs: operations whose results at a row depend on that row of their operands alone.
//!
//! Elementwise arithmetic, softmax and norms over the last dimension, slices and joins of the last dimension are
//! all of this kind. A chain of them runs over a few rows at a time, in buffers that stay in the first-level cache,
//! and every step is the very kernel that runs when the operation stands alone: fusing changes no bit.
//!
//! `read` has the operands, `step` what a step computes.

mod read;
mod step;

use kvbaton_kernels::rows::{Binary, Reduction, Unary};
use rayon::prelude::*;

use crate::tensor::{Context, Tensor, count};

use read::Input;
pub(crate) use read::{Reader, Values};

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
