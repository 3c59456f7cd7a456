//! Equations that coremltools does not write, with sums worked out by hand.

use kvbaton_exec::{Array, Options};

use crate::{load, text};

fn einsum(equation: &str, y: &str, result: &str) -> Result<Vec<f32>, String> {
    let source = format!(
        "case equation hand\n\
         func CoreML8 (x: fp32[2, 2]) {{\n\
           r: fp32{result} = einsum(values = (x, {y}), equation = string(\"{equation}\"));\n\
           return r;\n\
         }}\n"
    );
    let program = load(&text::cases(&source)[0], &Options::with_threads(1))?;
    let x = Array::from_f32(&[2, 2], &[1.0, 2.0, 3.0, 4.0]).map_err(|e| e.to_string())?;
    let outputs = program.run(&[("x", x)]).map_err(|e| e.to_string())?;
    outputs[0].1.to_f32().ok_or_else(|| "no numbers".to_owned())
}

const Y: &str = "fp32[2, 2](5, 6, 7, 8)";

#[test]
fn any_equation_of_two_operands_is_summed() {
    // Rows by rows, and the transposed product.
    assert_eq!(einsum("ij,kj->ik", Y, "[2, 2]").unwrap(), [17.0, 23.0, 39.0, 53.0]);
    assert_eq!(einsum("ij,jk->ki", Y, "[2, 2]").unwrap(), [19.0, 43.0, 22.0, 50.0]);
    // A label of one operand alone is summed there.
    assert_eq!(einsum("ij,k->ik", "fp32[2](5, 6)", "[2, 2]").unwrap(), [15.0, 18.0, 35.0, 42.0]);
    // Labels of both operands and the result go together; without a result everything is summed.
    assert_eq!(einsum("ij,ij->i", Y, "[2]").unwrap(), [17.0, 53.0]);
    assert_eq!(einsum("ij,ij->", Y, "").unwrap(), [70.0]);
    assert_eq!(einsum(" i j , i j -> i j ", Y, "[2, 2]").unwrap(), [5.0, 12.0, 21.0, 32.0]);
}

#[test]
fn equations_that_mean_nothing_are_refused() {
    for equation in ["ij,jk", "ijjk->ik", "ii,ij->j", "ij,jk->iz", "i1,1k->ik"] {
        let error = einsum(equation, Y, "[2, 2]").unwrap_err();
        let expected = format!("function `main`: operation `einsum` (output `r`): equation `{equation}`");
        assert_eq!(error, expected);
    }
    let error = einsum("ij,jk->ik", "fp32[3, 2](1, 2, 3, 4, 5, 6)", "[2, 2]").unwrap_err();
    assert!(error.contains("equation `ij,jk->ik` of shapes [2, 2] and [3, 2]"), "{error}");
}
