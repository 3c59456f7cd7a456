//! Inputs of several shapes: what the package allows runs, everything else is refused by name.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::PathBuf;
use std::sync::Arc;

use half::f16;
use kvbaton_exec::{Array, ExecError, Executable, Options};
use kvbaton_mil::Package;

/// A package of `kvbaton-mil`: one `linear` on `[1, rows, 64]`.
fn load(name: &str) -> Executable {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../mil/testdata");
    let package = Package::open(&folder.join(format!("{name}.mlpackage"))).unwrap();
    Executable::load(Arc::new(package), "main", &Options::with_threads(1)).unwrap()
}

fn run(program: &Executable, shape: &[usize]) -> Result<Vec<usize>, ExecError> {
    let x = Array::from_f16(shape, &vec![f16::ONE; shape.iter().product()]).unwrap();
    Ok(program.run(&[("x", x)])?[0].1.shape().to_vec())
}

#[test]
fn an_enumerated_shape_is_one_of_those_listed() {
    let program = load("enumerated");
    assert_eq!(program.input_shapes()[0].to_string(), "[1, 4, 64] or [1, 16, 64]");
    for rows in [4, 16] {
        assert_eq!(run(&program, &[1, rows, 64]).unwrap()[..2], [1, rows]);
    }
    assert_eq!(
        run(&program, &[1, 8, 64]).unwrap_err().to_string(),
        "input `x` has shape [1, 8, 64], the function takes [1, 4, 64] or [1, 16, 64]"
    );
}

#[test]
fn a_ranged_shape_lies_within_its_bounds() {
    let program = load("ranged");
    for rows in [2, 8, 128] {
        assert_eq!(run(&program, &[1, rows, 64]).unwrap()[..2], [1, rows]);
    }
    for rows in [0, 1, 129] {
        assert_eq!(
            run(&program, &[1, rows, 64]).unwrap_err().to_string(),
            format!("input `x` has shape [1, {rows}, 64], the function takes [1, 2 to 128, 64]")
        );
    }
    let error = run(&program, &[1, 8, 32]).unwrap_err().to_string();
    assert_eq!(error, "input `x` is fp16[1, 8, 32], the function takes fp16[1, ?, 64]");
}
