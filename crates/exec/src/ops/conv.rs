//! `conv`: convolutions in one to three dimensions, as matrix products.
//!
//! A group's weights are a matrix of outputs by (channel, kernel) values. With few positions, as in a decode step,
//! they are the right factor, read where they are; with many, positions are the right factor, packed once, so that
//! input and result keep their layout. A 1×1 convolution needs no other copy.

use kvbaton_kernels::rows::{self, Binary, Matrix, Panels, Product, Source};
use kvbaton_mil::program::DataType;
use rayon::prelude::*;

use super::linear::matrix;
use super::{Form, Op, Reason, half};
use crate::tensor::{Context, Tensor, count};

#[derive(Debug)]
struct Conv {
    bias: Option<Vec<f32>>,
    /// Empty: 1 in every dimension.
    strides: Vec<usize>,
    dilations: Vec<usize>,
    padding: Padding,
    groups: usize,
    dtype: DataType,
}

#[derive(Debug)]
enum Padding {
    /// Before and after each dimension; empty: none.
    Given(Vec<usize>),
    /// As much as keeps the size, for stride 1; an odd element goes to the end, or to the front if `lower`.
    Same { lower: bool },
}

pub(super) fn build(form: &mut Form<'_>) -> Result<Box<dyn Op>, Reason> {
    form.operand("x")?;
    form.operand("weight")?;
    let sizes = |name: &str| {
        let values = form.ints(name)?.unwrap_or_default();
        let sizes: Option<Vec<usize>> = values.iter().map(|v| usize::try_from(*v).ok()).collect();
        sizes.ok_or_else(|| format!("`{name}` is {values:?}"))
    };
    let (strides, dilations) = (sizes("strides")?, sizes("dilations")?);
    if strides.contains(&0) || dilations.contains(&0) {
        return Err(format!("strides {strides:?} and dilations {dilations:?}"));
    }
    let padding = match form.text("pad_type")?.unwrap_or("valid") {
        "valid" => Padding::Given(Vec::new()),
        "custom" => Padding::Given(sizes("pad")?),
        "same" => Padding::Same { lower: false },
        "same_lower" => Padding::Same { lower: true },
        other => return Err(format!("pad_type {other}")),
    };
    let groups = form.int("groups")?.unwrap_or(1);
    let groups = usize::try_from(groups).ok().filter(|g| *g > 0).ok_or_else(|| format!("{groups} groups"))?;
    let bias = form.floats("bias")?.filter(|b| b.iter().any(|v| *v != 0.0));
    Ok(Box::new(Conv { bias, strides, dilations, padding, groups, dtype: form.float_dtype()? }))
}

/// Sizes of one application.
#[derive(Debug)]
struct Sizes {
    batch: usize,
    /// Input channels and outputs of a group.
    channels: usize,
    outputs: usize,
    input: Vec<usize>,
    kernel: Vec<usize>,
    output: Vec<usize>,
    strides: Vec<usize>,
    dilations: Vec<usize>,
    /// Padding before each dimension.
    before: Vec<usize>,
}

impl Conv {
    fn sizes(&self, x: &[usize], weight: &[usize]) -> Result<Sizes, Reason> {
        let refuse = || format!("x {x:?} and weight {weight:?} with {} groups", self.groups);
        let ([batch, channels, input @ ..], [outputs, depth, kernel @ ..]) = (x, weight) else {
            return Err(refuse());
        };
        let dims = input.len();
        let per = |values: &[usize]| match values.len() {
            0 => Ok(vec![1; dims]),
            n if n == dims => Ok(values.to_vec()),
            _ => Err(refuse()),
        };
        let (strides, dilations) = (per(&self.strides)?, per(&self.dilations)?);
        let divides = channels.is_multiple_of(self.groups) && outputs.is_multiple_of(self.groups);
        if !divides || channels / self.groups != *depth || kernel.len() != dims || kernel.contains(&0) {
            return Err(refuse());
        }
        if let Some(b) = self.bias.as_ref().filter(|b| b.len() != *outputs) {
            return Err(format!("{outputs} outputs and a bias of {}", b.len()));
        }
        let (mut output, mut before) = (Vec::new(), Vec::new());
        for d in 0..dims {
            let reach = (kernel[d] - 1) * dilations[d] + 1;
            let (first, last) = match &self.padding {
                Padding::Given(pad) if pad.is_empty() => (0, 0),
                Padding::Given(pad) if pad.len() == 2 * dims => (pad[2 * d], pad[2 * d + 1]),
                Padding::Given(pad) => return Err(format!("`pad` is {pad:?} for {dims} dimensions")),
                Padding::Same { lower } => {
                    let steps = input[d].div_ceil(strides[d]).max(1);
                    let total = ((steps - 1) * strides[d] + reach).saturating_sub(input[d]);
                    let first = if *lower { total.div_ceil(2) } else { total / 2 };
                    (first, total - first)
                }
            };
            let room = (input[d] + first + last).checked_sub(reach).ok_or_else(refuse)?;
            output.push(room / strides[d] + 1);
            before.push(first);
        }
        Ok(Sizes {
            batch: *batch,
            channels: *depth,
            outputs: outputs / self.groups,
            input: input.to_vec(),
            kernel: kernel.to_vec(),
            output,
            strides,
            dilations,
            before,
        })
    }

    fn result_shape(&self, s: &Sizes) -> Vec<usize> {
        [&[s.batch, s.outputs * self.groups], &s.output[..]].concat()
    }
}

impl Sizes {
    /// Values of a weight row.
    fn depth(&self) -> usize {
        self.channels * count(&self.kernel)
    }

    /// Whether every position reads its own input value alone.
    fn is_pointwise(&self) -> bool {
        count(&self.kernel) == 1 && self.input == self.output && self.before.iter().all(|b| *b == 0)
    }

    /// Writes values `from..from + width` of what weight value `row` meets at each position. `x` is one group's
    /// input, `[channel, input…]`.
    fn unfold(&self, x: &[f32], row: usize, from: usize, out: &mut [f32]) {
        let (channel, mut k) = (row / count(&self.kernel), row % count(&self.kernel));
        let dims = self.input.len();
        let mut at = vec![0; dims];
        for d in (0..dims).rev() {
            at[d] = k % self.kernel[d];
            k /= self.kernel[d];
        }
        let plane = &x[channel * count(&self.input)..][..count(&self.input)];
        for (i, out) in out.iter_mut().enumerate() {
            let (mut position, mut offset, mut stride, mut inside) = (from + i, 0, 1, true);
            for d in (0..dims).rev() {
                let step = position % self.output[d];
                position /= self.output[d];
                let reach = step * self.strides[d] + at[d] * self.dilations[d];
                match reach.checked_sub(self.before[d]).filter(|i| *i < self.input[d]) {
                    Some(index) => offset += index * stride,
                    None => inside = false,
                }
                stride *= self.input[d];
            }
            *out = if inside { plane[offset] } else { 0.0 };
        }
    }
}

/// Positions that are packed at a time.
const COLUMNS: usize = 128;
/// Rows of weights a task widens at a time.
const ROWS: usize = 64;
/// With fewer positions than this, weights are the right factor.
const FEW: usize = 16;

impl Op for Conv {
    fn infer(&self, shapes: &[&[usize]]) -> Result<Option<Vec<Vec<usize>>>, Reason> {
        Ok(Some(vec![self.result_shape(&self.sizes(shapes[0], shapes[1])?)]))
    }

    fn eval(&self, cx: &Context, operands: &[Tensor]) -> Result<Vec<Tensor>, Reason> {
        let s = self.sizes(&operands[0].shape, &operands[1].shape)?;
        let shape = self.result_shape(&s);
        let x = operands[0].to_packed(cx)?;
        let x = x.packed_singles().ok_or("not packed")?;
        let depth = s.depth();
        let weight = operands[1].reshaped(cx, &[s.outputs * self.groups, depth])?;
        let mut values = cx.pool.take(count(&shape));
        let positions = count(&s.output);
        if values.is_empty() || positions == 0 {
            return Ok(vec![Tensor::floats(self.dtype, shape, values)]);
        }
        let input = s.channels * count(&s.input);
        let parts = values.chunks_mut(s.outputs * positions).enumerate();
        // One (batch, group) after the other; each is computed with all threads.
        for (i, out) in parts {
            let (x, group) = (&x[i * input..][..input], i % self.groups);
            let rows = weight.narrowed(0, group * s.outputs, s.outputs, 1);
            let bias = self.bias.as_ref().map(|b| &b[group * s.outputs..][..s.outputs]);
            if positions < FEW {
                self.few(cx, &s, x, &rows, bias, out)?;
            } else {
                self.many(cx, &s, x, &rows, bias, out)?;
            }
        }
        Ok(vec![Tensor::floats(self.dtype, shape, values)])
    }
}

impl Conv {
    /// Weights are the right factor.
    fn few(
        &self,
        cx: &Context,
        s: &Sizes,
        x: &[f32],
        weight: &Tensor,
        bias: Option<&[f32]>,
        out: &mut [f32],
    ) -> Result<(), Reason> {
        let (depth, positions) = (s.depth(), count(&s.output));
        // A row for each position.
        let mut left = vec![0.0; positions * depth];
        let mut column = vec![0.0; positions];
        for k in 0..depth {
            s.unfold(x, k, 0, &mut column);
            column.iter().enumerate().for_each(|(p, v)| left[p * depth + k] = *v);
        }
        let right = matrix(weight, weight.strides[1], weight.strides[0], depth, s.outputs)?;
        let mut rows = vec![0.0; positions * s.outputs];
        let half = half(self.dtype);
        let product = Product { left: &left, left_stride: depth, m: positions, right, bias, half };
        rows::multiply(cx.isa, &product, &mut rows);
        for (o, out) in out.chunks_exact_mut(positions).enumerate() {
            out.iter_mut().enumerate().for_each(|(p, v)| *v = rows[p * s.outputs + o]);
        }
        Ok(())
    }

    /// Positions are the right factor.
    fn many(
        &self,
        cx: &Context,
        s: &Sizes,
        x: &[f32],
        weight: &Tensor,
        bias: Option<&[f32]>,
        out: &mut [f32],
    ) -> Result<(), Reason> {
        let (depth, positions) = (s.depth(), count(&s.output));
        let half = half(self.dtype);
        let panels: Vec<(usize, usize, Panels)> = (0..positions.div_ceil(COLUMNS))
            .into_par_iter()
            .map(|block| {
                let from = block * COLUMNS;
                let width = COLUMNS.min(positions - from);
                let mut panels = Panels::default();
                let unfolded: Vec<f32>;
                let (values, k_stride) = if s.is_pointwise() {
                    (&x[from..], positions)
                } else {
                    let mut columns = vec![0.0; depth * width];
                    for (k, row) in columns.chunks_exact_mut(width).enumerate() {
                        s.unfold(x, k, from, row);
                    }
                    unfolded = columns;
                    (&unfolded[..], width)
                };
                let right =
                    Matrix { values: Source::Singles(values), k: depth, n: width, k_stride, n_stride: 1 };
                panels.pack(cx.isa, &right);
                (from, width, panels)
            })
            .collect();
        out.par_chunks_mut(ROWS * positions).enumerate().try_for_each_init(Vec::new, |left, (i, out)| {
            let (first, rows) = (i * ROWS, out.len() / positions);
            left.resize(rows * depth, 0.0);
            weight.narrowed(0, first, rows, 1).copy_to(cx.isa, left)?;
            for (from, width, panels) in &panels {
                // A bias is added before the result is rounded.
                let half = half && bias.is_none();
                let out = &mut out[*from..];
                panels.multiply(cx.isa, left, depth, rows, depth, *width, out, positions, half);
            }
            for (o, out) in out.chunks_exact_mut(positions).enumerate() {
                if let Some(bias) = bias {
                    let bias = Source::Scalar(bias[first + o]);
                    rows::binary(cx.isa, Binary::Add, Source::Destination, bias, out, half);
                }
            }
            Ok(())
        })
    }
}
