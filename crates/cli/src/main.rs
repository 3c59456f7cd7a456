//! The bare binary: what needs Python says how to get it.

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(kvbaton_cli::run(std::env::args_os(), None))
}
