//! Times a package's prefill with fixed pseudo-random tokens, and can write its outputs for comparison:
//!
//! `cargo run --release -p kvbaton-exec --example prefill -- PACKAGE [--threads N] [--runs N] [--function F]
//! [--plain] [--profile] [--dump FOLDER]`
#![expect(clippy::print_stdout, reason = "an example prints")]

use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use kvbaton_exec::{Array, Executable, Options};
use kvbaton_mil::Package;
use kvbaton_mil::program::DataType;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let (mut package, mut options, mut runs, mut function) = (None, Options::default(), 5, None);
    let (mut profile, mut dump) = (false, None::<PathBuf>);
    while let Some(a) = arguments.next() {
        let mut value = || arguments.next().ok_or(format!("{a} needs a value"));
        match a.as_str() {
            "--threads" => options.threads = value()?.parse()?,
            "--runs" => runs = value()?.parse::<usize>()?.max(1),
            "--function" => function = Some(value()?),
            "--plain" => options = options.fused(false),
            "--profile" => profile = true,
            "--dump" => dump = Some(value()?.into()),
            _ => package = Some(a),
        }
    }
    let package = package.ok_or("which package?")?;
    let start = Instant::now();
    let package = Arc::new(Package::open(Path::new(&package))?);
    let function = function.unwrap_or_else(|| package.program().default_function.clone());
    let program = Executable::load(package, &function, &options)?;
    println!("loaded in {:.3} s, {} threads", start.elapsed().as_secs_f64(), program.threads());
    println!("{:?}", program.census());

    let inputs: Vec<(String, Array)> = program
        .inputs()
        .iter()
        .map(|f| {
            let shape = f.ty.fixed_shape().ok_or(format!("`{}` has no fixed shape", f.name))?;
            let n: usize = shape.iter().product();
            let array = match (f.ty.dtype, n) {
                // The last row's index.
                (DataType::Int32, 1) => Array::from_i32(&shape, &[i32::try_from(tokens(&program))? - 1])?,
                (DataType::Int32, _) => {
                    let ids: Vec<i32> =
                        (0..n).map(|i| i32::try_from((i * 7919 + 13) % 500)).collect::<Result<_, _>>()?;
                    Array::from_i32(&shape, &ids)?
                }
                (dtype, _) => return Err(format!("no value for `{}`, {dtype}", f.name).into()),
            };
            Ok((f.name.clone(), array))
        })
        .collect::<Result<_, Box<dyn Error>>>()?;
    let inputs: Vec<(&str, Array)> = inputs.iter().map(|(n, a)| (n.as_str(), a.clone())).collect();

    let mut times = Vec::new();
    let mut outputs = Vec::new();
    for _ in 0..runs {
        let start = Instant::now();
        outputs = program.run(&inputs)?;
        times.push(start.elapsed().as_secs_f64());
    }
    let first = times[0];
    times.sort_by(f64::total_cmp);
    let (best, median) = (times[0], times[times.len() / 2]);
    println!(
        "{} tokens: first {first:.3} s, best {best:.3} s, median {median:.3} s, {:.0} tokens/s, peak {:.0} MB",
        tokens(&program),
        tokens(&program) as f64 / median,
        program.peak_bytes() as f64 / 1e6
    );
    if profile {
        let (_, seconds) = program.profile(&inputs)?;
        for (name, s) in seconds {
            println!("{:8.2} ms  {name}", s * 1e3);
        }
    }
    if let Some(folder) = dump {
        std::fs::create_dir_all(&folder)?;
        for (name, array) in outputs {
            let values = array.to_f32().ok_or("no floats")?;
            let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            std::fs::write(folder.join(format!("{name}.f32")), bytes)?;
        }
    }
    Ok(())
}

/// The length of the longest integer input.
fn tokens(program: &Executable) -> usize {
    let lens = program.inputs().iter().filter(|f| f.ty.dtype == DataType::Int32);
    lens.filter_map(|f| f.ty.fixed_shape()).map(|s| s.iter().product()).max().unwrap_or(0)
}
