//! `scaled_dot_product_attention`: two products and a softmax, as nodes of their own, which fusing makes one again.
//!
//! Scores and probabilities stay in `f32`; only the result is rounded.

use kvbaton_kernels::rows::Binary;
use kvbaton_mil::program::{DataType, ValueId};

use super::arithmetic::binary;
use super::matmul::Matmul;
use super::softmax::softmax;
use super::{Form, Op, Operand, Reason, broadcast_shape};
use crate::graph::{Node, Work};
use crate::memory::FloatBuf;
use crate::tensor::{Context, Data, Tensor};

/// MIL's name of the operation.
pub(crate) const NAME: &str = "scaled_dot_product_attention";

/// The operation, checked.
pub(crate) struct Plan {
    query: Operand,
    key: Operand,
    value: Operand,
    mask: Option<Mask>,
    dtype: DataType,
    /// Shape of the query and rows of the key, where they are known at load.
    scores: Option<Vec<usize>>,
    width: Option<usize>,
}

/// A mask, and what is known of it at load.
struct Mask {
    operand: Operand,
    dtype: DataType,
    shape: Option<Vec<usize>>,
}

/// Checks the operation.
pub(crate) fn plan(form: &mut Form<'_>) -> Result<Plan, Reason> {
    for name in ["query", "key", "value"] {
        form.operand(name)?;
    }
    let mask = if form.has("attn_mask") {
        form.operand("attn_mask")?;
        Some(form.argument_dtype("attn_mask")?)
    } else {
        None
    };
    let dtype = form.float_dtype()?;
    let shapes = ["query", "key", "value"].map(|name| form.argument_shape(name));
    let mut scores = None;
    if let [Some(query), Some(key), Some(value)] = &shapes {
        let refuse = || format!("query {query:?}, key {key:?}, value {value:?}");
        let ([qb @ .., l, e], [kb @ .., s, ke], [vb @ .., vs, _]) =
            (query.as_slice(), key.as_slice(), value.as_slice())
        else {
            return Err(refuse());
        };
        if qb != kb || qb != vb || e != ke || s != vs {
            return Err(refuse());
        }
        let shape = [qb, &[*l, *s]].concat();
        if let Some(mask) = form.argument_shape("attn_mask")
            && broadcast_shape(&mask, &shape)? != shape
        {
            return Err(format!("a mask {mask:?} for scores {shape:?}"));
        }
        scores = Some(shape);
    }
    let width =
        shapes[0].as_ref().and_then(|s| s.last()).or(shapes[1].as_ref().and_then(|s| s.last())).copied();
    let mut operands = std::mem::take(&mut form.operands).into_iter();
    let mut next = || operands.next().ok_or_else(|| "an operand is missing".to_owned());
    let (query, key, value) = (next()?, next()?, next()?);
    let shape = form.argument_shape("attn_mask");
    let mask = mask.map(|dtype| Ok::<_, Reason>(Mask { operand: next()?, dtype, shape })).transpose()?;
    Ok(Plan { query, key, value, mask, dtype, scores, width })
}

impl Plan {
    /// The nodes that compute `outputs`, with values between them from `fresh`.
    pub(crate) fn nodes(
        self,
        outputs: &[ValueId],
        fresh: &mut impl FnMut(DataType, Option<Vec<usize>>) -> ValueId,
    ) -> Vec<Node> {
        const F32: DataType = DataType::Float32;
        let mut nodes = Vec::new();
        let mut add = |op: Box<dyn Op>, operands: Vec<Operand>, shape: Option<Vec<usize>>| {
            let id = fresh(F32, shape);
            nodes.push(Node::new(NAME, Work::Op(op), operands, vec![id]));
            Operand::Value(id)
        };
        let scores = &self.scores;
        let product = Box::new(Matmul::new(false, true, F32));
        let mut x = add(product, vec![self.query.clone(), self.key], scores.clone());
        let scale = match self.width {
            Some(width) => Operand::Fixed(scale_of(width)),
            None => add(Box::new(Scale), vec![self.query], Some(Vec::new())),
        };
        x = add(Box::new(binary(Binary::Mul, F32)), vec![x, scale], scores.clone());
        if let Some(Mask { operand, dtype, shape }) = self.mask {
            let mask = match operand {
                mask if dtype != DataType::Bool => mask,
                Operand::Fixed(t) => match t.bool_values() {
                    Ok(values) => Operand::Fixed(hidden(t.shape.clone(), &values)),
                    Err(_) => Operand::Fixed(t),
                },
                mask @ Operand::Value(_) => add(Box::new(Hidden), vec![mask], shape),
            };
            x = add(Box::new(binary(Binary::Add, F32)), vec![x, mask], scores.clone());
        }
        x = add(Box::new(softmax(-1, F32)), vec![x], scores.clone());
        let product = Work::Op(Box::new(Matmul::new(false, false, self.dtype)));
        nodes.push(Node::new(NAME, product, vec![x, self.value], outputs.to_vec()));
        nodes
    }
}

/// What scores are multiplied with, for queries of so many values.
fn scale_of(width: usize) -> Tensor {
    #[expect(clippy::cast_precision_loss, reason = "heads are far narrower than 2^24")]
    let scale = 1.0 / (width as f32).sqrt();
    Tensor::floats(DataType::Float32, Vec::new(), FloatBuf::owned(vec![scale]))
}

/// 0 where a mask is true, -inf where it hides.
fn hidden(shape: Vec<usize>, mask: &[bool]) -> Tensor {
    let values = mask.iter().map(|shown| if *shown { 0.0 } else { f32::NEG_INFINITY }).collect();
    Tensor::floats(DataType::Float32, shape, FloatBuf::owned(values))
}

/// The scale, for queries whose width is not known at load.
#[derive(Debug)]
struct Scale;

impl Op for Scale {
    fn infer(&self, _: &[&[usize]]) -> Result<Option<Vec<Vec<usize>>>, Reason> {
        Ok(Some(vec![Vec::new()]))
    }

    fn eval(&self, _: &Context, operands: &[Tensor]) -> Result<Vec<Tensor>, Reason> {
        Ok(vec![scale_of(operands[0].shape.last().copied().ok_or("a query without dimensions")?)])
    }
}

/// A mask of truth values as one to add.
#[derive(Debug)]
struct Hidden;

impl Op for Hidden {
    fn infer(&self, shapes: &[&[usize]]) -> Result<Option<Vec<Vec<usize>>>, Reason> {
        Ok(Some(vec![shapes[0].to_vec()]))
    }

    fn eval(&self, _: &Context, operands: &[Tensor]) -> Result<Vec<Tensor>, Reason> {
        let Data::Bool(_) = operands[0].data else { return Err("a mask of no truth values".to_owned()) };
        Ok(vec![hidden(operands[0].shape.clone(), &operands[0].bool_values()?)])
    }
}
