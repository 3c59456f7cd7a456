//! What developers run beside `cargo test`: `cargo xtask TASK`.
//!
//! Most tasks are scripts, because they unpack other compilers and emulators; this is where they are listed.

#![expect(clippy::print_stderr, reason = "a developers' tool talks on stderr")]

mod ops_table;

use std::path::Path;
use std::process::{Command, ExitCode};

/// A task's name, the script it runs, and what it is for.
const TASKS: [(&str, &str, &str); 4] = [
    ("check-macos", "scripts/check-macos.sh", "type-check for aarch64-apple-darwin on Linux"),
    ("test-aarch64", "scripts/test-aarch64.sh", "run tests, NEON included, under qemu"),
    ("sanitize", "scripts/sanitize.sh", "run the tests of crates with unsafe code under AddressSanitizer"),
    ("fuzz", "fuzz/run.sh", "run a fuzz target: fuzz TARGET [-max_total_time=SECONDS]"),
];

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let wanted = arguments.next().unwrap_or_default();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("."));
    if wanted == "ops-table" {
        return match ops_table::run(root, arguments.next().as_deref() == Some("--check")) {
            Ok(()) => ExitCode::SUCCESS,
            Err(e) => {
                eprintln!("error: {e:#}");
                ExitCode::FAILURE
            }
        };
    }
    let Some((_, script, _)) = TASKS.iter().find(|(name, ..)| *name == wanted) else {
        eprintln!("usage: cargo xtask TASK [arguments]\n");
        for (name, _, purpose) in TASKS {
            eprintln!("  {name:14}{purpose}");
        }
        eprintln!("  {:14}write docs/ops.md from the executor's cases; --check compares", "ops-table");
        return ExitCode::from(2);
    };
    match Command::new(root.join(script)).args(arguments).current_dir(root).status() {
        Ok(status) => ExitCode::from(u8::try_from(status.code().unwrap_or(3)).unwrap_or(3)),
        Err(e) => {
            eprintln!("error: cannot run {script}: {e}");
            ExitCode::from(3)
        }
    }
}
