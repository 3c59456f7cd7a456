//! A plan as text.

use std::fmt::Write as _;

use kvbaton_layout::{BoundTensor, Role};

use crate::CopyPlan;
use crate::boxes::{Coded, CodedOp, CopyOp, Place, ZeroOp};

impl CopyPlan {
    /// One line a copy, in the order of the target: what moves, the box and how both sides step.
    ///
    /// A side is `tensor @ first byte (byte strides along the box)`.
    pub fn explain(&self) -> String {
        let mut text = String::new();
        for op in &self.ops {
            self.copy_line(op, &mut text);
        }
        for op in &self.coded {
            self.coded_line(op, &mut text);
        }
        for zero in &self.zeros {
            self.zero_line(zero, &mut text);
        }
        text
    }

    fn copy_line(&self, op: &CopyOp, text: &mut String) {
        let what = match op.role {
            Role::Elements => op.part.to_string(),
            role => format!("{} {}", op.part, role.name()),
        };
        let extents: Vec<usize> = op.extents.iter().copied().filter(|&n| n > 1).collect();
        let _ = writeln!(
            text,
            "layer {:>3} {what:<14} heads {:<6} rows {:<11} lanes {:<6} {:>14} of {:<18} {} -> {}",
            op.layer,
            span(&op.heads),
            span(&op.rows),
            span(&op.lanes),
            if extents.is_empty() { "1".to_owned() } else { join(&extents, " x ") },
            if op.src.dtype == op.dst.dtype {
                op.src.dtype.to_string()
            } else {
                format!("{} to {}", op.src.dtype, op.dst.dtype)
            },
            side(&op.src, op.extents, &self.sources),
            side(&op.dst, op.extents, &self.targets),
        );
    }

    fn coded_line(&self, op: &CodedOp, text: &mut String) {
        let extents = [op.heads.len(), op.row_count(), op.lanes];
        let coded = |c: &Coded, tensors: &[BoundTensor]| {
            let mut names = vec![side(&c.elements, extents, tensors)];
            names.extend([c.scale, c.bias].iter().flatten().map(|p| tensors[p.tensor].name.clone()));
            names.join(", ")
        };
        let sources: Vec<String> = op.sources.iter().map(|s| coded(&s.coded, &self.sources)).collect();
        let from = op.sources.first().map_or(op.dst.encoding, |s| s.coded.encoding);
        let _ = writeln!(
            text,
            "layer {:>3} {:<14} heads {:<6} rows {:<11} lanes {:<6} from {from} to {}: {} -> {}",
            op.layer,
            op.part.to_string(),
            span(&op.heads),
            span(&op.rows),
            span(&(0..op.lanes)),
            op.dst.encoding,
            sources.join("; "),
            coded(&op.dst, &self.targets),
        );
    }

    fn zero_line(&self, zero: &ZeroOp, text: &mut String) {
        let _ = writeln!(
            text,
            "layer {:>3} {:<14} rows {:<11} {} zeroed in {}",
            zero.layer,
            zero.part.to_string(),
            span(&zero.rows),
            join(&zero.extents, " x "),
            side(&zero.dst, zero.extents, &self.targets),
        );
    }
}

fn span<T: std::fmt::Display>(range: &std::ops::Range<T>) -> String {
    format!("{}..{}", range.start, range.end)
}

fn join(numbers: &[usize], between: &str) -> String {
    numbers.iter().map(ToString::to_string).collect::<Vec<_>>().join(between)
}

/// A place, with the strides of the axes that are longer than one.
fn side(place: &Place, extents: [usize; 3], tensors: &[BoundTensor]) -> String {
    let steps: Vec<usize> =
        place.strides_bytes.into_iter().zip(extents).filter(|(_, n)| *n > 1).map(|(s, _)| s).collect();
    let name = &tensors[place.tensor].name;
    format!("{name} @ {} ({})", place.offset_bytes, join(&steps, ", "))
}
