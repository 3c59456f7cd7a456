//! `einsum`: products of two tensors, summed over the labels that the result does not have.

use super::matmul::Matmul;
use super::{Form, Op, Reason};
use crate::tensor::{Context, Tensor, count};
use kvbaton_mil::program::DataType;

/// An equation such as `bhqd,bhkd->bhqk`, any two operands and no repeated label within one of them.
#[derive(Debug)]
struct Einsum {
    equation: String,
    x: Vec<char>,
    y: Vec<char>,
    result: Vec<char>,
    dtype: DataType,
}

pub(super) fn build(form: &mut Form<'_>) -> Result<Box<dyn Op>, Reason> {
    let n = form.operand_list("values")?;
    if n != 2 {
        return Err(format!("of {n} tensors"));
    }
    let equation = form.text("equation")?.ok_or("`equation` is missing")?;
    let refuse = || format!("equation `{equation}`");
    let compact: String = equation.chars().filter(|c| !c.is_whitespace()).collect();
    let (inputs, result) = compact.split_once("->").ok_or_else(refuse)?;
    let (x, y) = inputs.split_once(',').ok_or_else(refuse)?;
    let labels = |text: &str| -> Result<Vec<char>, Reason> {
        let labels: Vec<char> = text.chars().collect();
        let once = |(i, c): (usize, &char)| c.is_ascii_alphabetic() && !labels[..i].contains(c);
        if labels.iter().enumerate().all(once) { Ok(labels) } else { Err(refuse()) }
    };
    let (x, y, result) = (labels(x)?, labels(y)?, labels(result)?);
    if !result.iter().all(|c| x.contains(c) || y.contains(c)) {
        return Err(refuse());
    }
    let equation = equation.to_owned();
    Ok(Box::new(Einsum { equation, x, y, result, dtype: form.float_dtype()? }))
}

/// Labels by what a product does with them.
struct Roles {
    /// In both operands and the result.
    batch: Vec<char>,
    /// In the first one and the result.
    rows: Vec<char>,
    /// In the second one and the result.
    columns: Vec<char>,
    /// Summed over.
    summed: Vec<char>,
}

impl Einsum {
    fn roles(&self) -> Roles {
        let of = |x: bool, y: bool, result: bool| {
            let mut labels: Vec<char> = Vec::new();
            for c in self.x.iter().chain(&self.y) {
                let fits = self.x.contains(c) == x && self.y.contains(c) == y;
                if fits && self.result.contains(c) == result && !labels.contains(c) {
                    labels.push(*c);
                }
            }
            labels
        };
        let summed = [of(true, true, false), of(true, false, false), of(false, true, false)].concat();
        Roles {
            batch: of(true, true, true),
            rows: of(true, false, true),
            columns: of(false, true, true),
            summed,
        }
    }

    /// The size of each label.
    fn size(&self, x: &[usize], y: &[usize], label: char) -> Result<usize, Reason> {
        let refuse = || format!("equation `{}` of shapes {x:?} and {y:?}", self.equation);
        if x.len() != self.x.len() || y.len() != self.y.len() {
            return Err(refuse());
        }
        let find =
            |labels: &[char], shape: &[usize]| labels.iter().position(|c| *c == label).map(|i| shape[i]);
        match (find(&self.x, x), find(&self.y, y)) {
            (Some(a), Some(b)) if a == b || b == 1 => Ok(a),
            (Some(1), Some(b)) => Ok(b),
            (Some(a), None) | (None, Some(a)) => Ok(a),
            _ => Err(refuse()),
        }
    }
}

/// The view with its dimensions in the order of `labels`; those it lacks are repeated.
fn arranged(tensor: &Tensor, own: &[char], labels: &[char], sizes: &[usize]) -> Result<Tensor, Reason> {
    let order: Vec<usize> = labels.iter().filter_map(|l| own.iter().position(|c| c == l)).collect();
    let mut view = tensor.permuted(&order);
    for (i, l) in labels.iter().enumerate() {
        if !own.contains(l) {
            view.shape.insert(i, 1);
            view.strides.insert(i, 0);
        }
    }
    view.broadcast(sizes)
}

impl Op for Einsum {
    fn infer(&self, shapes: &[&[usize]]) -> Result<Option<Vec<Vec<usize>>>, Reason> {
        // Labels that are summed must fit, too.
        self.x.iter().chain(&self.y).try_for_each(|c| self.size(shapes[0], shapes[1], *c).map(|_| ()))?;
        let shape = self.result.iter().map(|c| self.size(shapes[0], shapes[1], *c));
        Ok(Some(vec![shape.collect::<Result<_, _>>()?]))
    }

    fn eval(&self, cx: &Context, operands: &[Tensor]) -> Result<Vec<Tensor>, Reason> {
        let (x, y) = (&operands[0], &operands[1]);
        let roles = self.roles();
        let sizes = |labels: &[char]| {
            labels.iter().map(|c| self.size(&x.shape, &y.shape, *c)).collect::<Result<Vec<_>, _>>()
        };
        // [batch, rows, summed] and [batch, summed, columns].
        let left = [&roles.batch[..], &roles.rows, &roles.summed].concat();
        let right = [&roles.batch[..], &roles.summed, &roles.columns].concat();
        let batch = sizes(&roles.batch)?;
        let (rows, columns) = (sizes(&roles.rows)?, sizes(&roles.columns)?);
        let depth = count(&sizes(&roles.summed)?);
        let left = arranged(x, &self.x, &left, &sizes(&left)?)?;
        let right = arranged(y, &self.y, &right, &sizes(&right)?)?;
        let left = left.reshaped(cx, &[&batch[..], &[count(&rows), depth]].concat())?;
        let right = right.reshaped(cx, &[&batch[..], &[depth, count(&columns)]].concat())?;
        let product =
            Matmul::new(false, false, self.dtype).eval(cx, &[left, right])?.pop().ok_or("no product")?;
        let product = product.reshaped(cx, &[&batch[..], &rows, &columns].concat())?;
        let have = [&roles.batch[..], &roles.rows, &roles.columns].concat();
        let order: Vec<usize> = self.result.iter().filter_map(|l| have.iter().position(|c| c == l)).collect();
        Ok(vec![product.permuted(&order)])
    }
}
