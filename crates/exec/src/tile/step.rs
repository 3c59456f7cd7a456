//! One step over a block of rows.

use kvbaton_kernels::rows::{self, Source, Unary};

use super::Step;
use super::read::Input;
use crate::tensor::Context;

impl Step {
    pub(super) fn run(
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
