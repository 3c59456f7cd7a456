//! `matmul`: products of matrices, the outer dimensions broadcast.

use kvbaton_kernels::rows::{self, Panels, Product, Source};
use kvbaton_mil::program::DataType;
use rayon::prelude::*;

use super::{Form, Op, Reason, broadcast_shape, half, int_product};
use crate::tensor::{Context, RowOffsets, Tensor, count, is_float};

/// The operation; attention takes it over when it can.
#[derive(Debug, Clone)]
pub(crate) struct Matmul {
    pub(crate) transpose_x: bool,
    pub(crate) transpose_y: bool,
    dtype: DataType,
}

pub(super) fn build(form: &mut Form<'_>) -> Result<Box<dyn Op>, Reason> {
    form.operand("x")?;
    form.operand("y")?;
    let (transpose_x, transpose_y) = (form.flag("transpose_x")?, form.flag("transpose_y")?);
    if form.argument_dtype("x")? == DataType::Int32 {
        return int_product::build(form, transpose_x, transpose_y, None);
    }
    Ok(Box::new(Matmul { transpose_x, transpose_y, dtype: form.float_dtype()? }))
}

/// Operands brought into one form: `[batch…, m, k]` and `[batch…, k, n]`.
pub(crate) struct Factors {
    pub(crate) x: Tensor,
    pub(crate) y: Tensor,
    /// The common outer dimensions.
    pub(crate) batch: Vec<usize>,
    pub(crate) m: usize,
    pub(crate) k: usize,
    pub(crate) n: usize,
}

/// Rows of a result that one task computes.
const ROWS: usize = 64;

fn swapped(t: &Tensor, swap: bool) -> Tensor {
    let mut order: Vec<usize> = (0..t.rank()).collect();
    if swap && t.rank() >= 2 {
        order.swap(t.rank() - 2, t.rank() - 1);
    }
    t.permuted(&order)
}

impl Matmul {
    pub(super) fn new(transpose_x: bool, transpose_y: bool, dtype: DataType) -> Matmul {
        Matmul { transpose_x, transpose_y, dtype }
    }

    pub(crate) fn dtype(&self) -> DataType {
        self.dtype
    }

    /// The factors for a left one of which only the shape is known yet: packed, and not transposed.
    pub(crate) fn factors_of_right(&self, x: &Tensor, y: &Tensor) -> Result<Factors, Reason> {
        let shape = self.shape(&x.shape, &y.shape)?;
        if x.rank() < 2 || y.rank() < 2 {
            return Err(format!("shapes {:?} and {:?}", x.shape, y.shape));
        }
        let y = swapped(y, self.transpose_y);
        let (m, k) = (x.shape[x.rank() - 2], x.shape[x.rank() - 1]);
        let batch = shape[..shape.len() - 2].to_vec();
        Ok(Factors { x: x.clone(), n: y.shape[y.rank() - 1], y, batch, m, k })
    }

    pub(crate) fn half(&self) -> bool {
        half(self.dtype)
    }

    /// The result's shape without the dimensions that a vector operand lacks.
    pub(super) fn shape(&self, x: &[usize], y: &[usize]) -> Result<Vec<usize>, Reason> {
        let refuse = || format!("shapes {x:?} and {y:?}");
        if x.is_empty() || y.is_empty() {
            return Err(refuse());
        }
        // A vector is a row on the left and a column on the right.
        let matrix = |s: &[usize], swap: bool, left: bool| match s {
            [n] if left => (vec![], 1, *n),
            [n] => (vec![], *n, 1),
            [lead @ .., a, b] if swap => (lead.to_vec(), *b, *a),
            [lead @ .., a, b] => (lead.to_vec(), *a, *b),
            [] => (vec![], 0, 0),
        };
        let (x_lead, m, k) = matrix(x, self.transpose_x, true);
        let (y_lead, depth, n) = matrix(y, self.transpose_y, false);
        if k != depth {
            return Err(refuse());
        }
        let mut shape = broadcast_shape(&x_lead, &y_lead).map_err(|_| refuse())?;
        shape.extend((x.len() > 1).then_some(m));
        shape.extend((y.len() > 1).then_some(n));
        Ok(shape)
    }

    /// The operands as matrices, of any type; neither is copied.
    pub(super) fn operands(&self, cx: &Context, x: &Tensor, y: &Tensor) -> Result<Factors, Reason> {
        self.shape(&x.shape, &y.shape)?;
        let x = if x.rank() == 1 { x.reshaped(cx, &[1, x.shape[0]])? } else { swapped(x, self.transpose_x) };
        let y = if y.rank() == 1 { y.reshaped(cx, &[y.shape[0], 1])? } else { swapped(y, self.transpose_y) };
        let (m, k, n) = (x.shape[x.rank() - 2], x.shape[x.rank() - 1], y.shape[y.rank() - 1]);
        let batch = broadcast_shape(&x.shape[..x.rank() - 2], &y.shape[..y.rank() - 2])?;
        Ok(Factors { x, y, batch, m, k, n })
    }

    /// Checks and broadcasts the operands; copies only what cannot be read in place.
    pub(crate) fn factors(&self, cx: &Context, x: &Tensor, y: &Tensor) -> Result<Factors, Reason> {
        let Factors { mut x, y, batch, m, k, n } = self.operands(cx, x, y)?;
        if !x.is_packed_from(x.rank() - 1) || !matches!(x.source()?, Source::Singles(_)) {
            x = x.to_packed(cx)?;
        }
        let x = x.broadcast(&[&batch[..], &[m, k]].concat())?;
        Ok(Factors { x, y, batch, m, k, n })
    }
}

impl Factors {
    /// Packs each distinct right factor once; returns them with, for each batch, which one it uses.
    pub(crate) fn pack(&self, cx: &Context) -> Result<(Vec<Panels>, Vec<usize>), Reason> {
        let y = &self.y;
        let (lead, strides) = (&y.shape[..y.rank() - 2], &y.strides[..y.rank() - 2]);
        let offsets = RowOffsets::new(lead, strides, 0);
        let (k_stride, n_stride) = (y.strides[y.rank() - 2], y.strides[y.rank() - 1]);
        let packed: Result<Vec<Panels>, Reason> = (0..count(lead))
            .into_par_iter()
            .map(|b| {
                let mut one = y.clone();
                one.offset += offsets.get(b);
                let mut panels = Panels::default();
                panels.pack(cx.isa, &super::linear::matrix(&one, k_stride, n_stride, self.k, self.n)?);
                Ok(panels)
            })
            .collect();
        let index = Tensor::ints(DataType::Int32, lead.to_vec(), Vec::new()).broadcast(&self.batch)?;
        Ok((packed?, index.indices().collect()))
    }

    /// Where the rows of the left factor of each batch start.
    pub(crate) fn left_offsets(&self) -> RowOffsets {
        let lead = self.batch.len();
        RowOffsets::new(&self.batch, &self.x.strides[..lead], self.x.offset)
    }
}

impl Op for Matmul {
    fn infer(&self, shapes: &[&[usize]]) -> Result<Option<Vec<Vec<usize>>>, Reason> {
        Ok(Some(vec![self.shape(shapes[0], shapes[1])?]))
    }

    fn eval(&self, cx: &Context, operands: &[Tensor]) -> Result<Vec<Tensor>, Reason> {
        let shape = self.shape(&operands[0].shape, &operands[1].shape)?;
        let f = self.factors(cx, &operands[0], &operands[1])?;
        let mut values = cx.pool.take(count(&shape));
        let (m, k, n) = (f.m, f.k, f.n);
        let constant = !matches!(operands[1].data, crate::tensor::Data::Float(_));
        if constant && count(&f.y.shape[..f.y.rank() - 2]) == 1 {
            // One right factor for all: weights, widened panel by panel.
            let x = f.x.to_packed(cx)?;
            let left = x.packed_singles().ok_or("not packed")?;
            let y = &f.y;
            let (k_stride, n_stride) = (y.strides[y.rank() - 2], y.strides[y.rank() - 1]);
            let right = super::linear::matrix(y, k_stride, n_stride, k, n)?;
            let m = m * count(&f.batch);
            let product = Product { left, left_stride: k, m, right, bias: None, half: self.half() };
            rows::multiply(cx.isa, &product, &mut values);
            return Ok(vec![Tensor::floats(self.dtype, shape, values)]);
        }
        if values.is_empty() {
            return Ok(vec![Tensor::floats(self.dtype, shape, values)]);
        }
        let (panels, which) = f.pack(cx)?;
        let offsets = f.left_offsets();
        let left_stride = f.x.strides[f.batch.len()];
        let Source::Singles(left) = f.x.source()? else { return Err("x is not stored as f32".to_owned()) };
        values.par_chunks_mut(m * n).enumerate().for_each(|(b, out)| {
            out.par_chunks_mut(ROWS * n).enumerate().for_each(|(i, out)| {
                let rows = out.len() / n;
                let left = &left[offsets.get(b) + i * ROWS * left_stride..];
                panels[which[b]].multiply(cx.isa, left, left_stride, rows, k, n, out, n, self.half());
            });
        });
        Ok(vec![Tensor::floats(self.dtype, shape, values)])
    }

    fn as_matmul(&self) -> Option<&Matmul> {
        is_float(self.dtype).then_some(self)
    }
}
