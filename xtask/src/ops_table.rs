//! `docs/ops.md`: which operations of MIL the CPU executor runs, from the cases that test them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;

const CASES: &str = "crates/exec/testdata/ops";
const PAGE: &str = "docs/ops.md";

const HEAD: &str = "# Operations of the CPU executor

Made from the executor's own tests by `cargo xtask ops-table`; `make lint` checks that it is current.

A case is a program, its inputs and the values it must give, in a text file under `crates/exec/testdata/ops`. Expected
values come from coremltools' `value_inference`, Apple's numpy definition of an operation, or from numpy where coremltools
has none (`crates/exec/testdata/conformance`). Every case runs twice: one operation after the other, and fused.

- **opsets**: the definitions that are tested, each by the first version of iOS that has it. Later versions without a
  definition of their own use the last one.
- **types** and **ranks**: of the first input, in the cases.
- **agreement**: the largest difference that a case allows, of the largest value expected: `exact`, or what rounding to the
  result's type once more can change.

No case has run on Apple's hardware.
";

type Result<T> = std::result::Result<T, String>;

fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).map_err(|e| format!("cannot read {}: {e}", path.display()))
}

/// What the cases of an operation cover.
#[derive(Default)]
struct Coverage {
    cases: usize,
    opsets: BTreeSet<u32>,
    types: BTreeSet<usize>,
    ranks: BTreeSet<usize>,
    oracles: BTreeSet<String>,
    refused: usize,
    within: f64,
}

const TYPES: [&str; 8] = ["fp16", "fp32", "int32", "int16", "uint16", "int8", "uint8", "bool"];

/// Writes the page, or with `check` compares it.
pub(crate) fn run(root: &Path, check: bool) -> Result<()> {
    let page = page(root)?;
    let path = root.join(PAGE);
    if !check {
        return std::fs::write(&path, page).map_err(|e| format!("cannot write {}: {e}", path.display()));
    }
    if read(&path)? == page {
        return Ok(());
    }
    Err(format!("{PAGE} is not what the cases say; run `cargo xtask ops-table`"))
}

fn page(root: &Path) -> Result<String> {
    let folder = root.join(CASES);
    let registry = read(&folder.join("registry.json"))?;
    let registry: BTreeMap<String, Vec<u32>> = serde_json::from_str(&registry).map_err(|e| e.to_string())?;
    let supported: BTreeSet<&str> = kvbaton_exec::supported_ops().collect();
    let mut page = format!(
        "{HEAD}\n{} of MIL's {} operations run.\n\n\
         | operation | opsets | types | ranks | cases | expected from | agreement |\n|---|---|---|---|---:|---|---|\n",
        registry.keys().filter(|op| supported.contains(op.as_str()) || *op == "const").count(),
        registry.len(),
    );
    let mut left = Vec::new();
    for op in registry.keys() {
        let file = folder.join(format!("{op}.mil"));
        match (supported.contains(op.as_str()), file.exists()) {
            (true, true) => {
                let coverage = coverage(&read(&file)?)
                    .ok_or_else(|| format!("{} is not in the form of cases", file.display()))?;
                let _ = writeln!(page, "| `{op}` {}", coverage.row());
            }
            (true, false) => {
                let opsets = list(registry[op].iter().map(ToString::to_string));
                let _ = writeln!(page, "| `{op}` | iOS {opsets} | | | | golden packages | exact |");
            }
            (false, true) => {
                return Err(format!("{} tests an operation that the executor does not have", file.display()));
            }
            (false, false) if op == "const" => {}
            (false, false) => left.push(format!("`{op}`")),
        }
    }
    let _ = writeln!(
        page,
        "\n`const` is read when a program is loaded. Not run, and refused by name at load: {}.",
        left.join(", ")
    );
    Ok(page)
}

fn list(items: impl Iterator<Item = String>) -> String {
    items.collect::<Vec<_>>().join(", ")
}

/// `None` when a line has another form than the cases'.
fn coverage(text: &str) -> Option<Coverage> {
    let mut coverage = Coverage::default();
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words.as_slice() {
            ["case", _, oracle] => {
                coverage.cases += 1;
                coverage.oracles.insert((*oracle).to_owned());
            }
            ["func", opset, ..] => {
                let number: u32 = opset.trim_start_matches("CoreML").parse().ok()?;
                // CoreML6 came with iOS 16.
                coverage.opsets.insert(number + 10);
                // `(x: fp16[2, 3], …` or `(x: bool, …`
                let (_, ty) = line.split_once(": ")?;
                let name = ty.split([',', '[', ')']).next()?;
                coverage.types.insert(TYPES.iter().position(|t| *t == name)?);
                let dims = ty.strip_prefix(name)?.strip_prefix('[').and_then(|d| d.split(']').next());
                coverage.ranks.insert(dims.map_or(0, |d| d.split(',').count()));
            }
            ["expect", _, "within", within, ..] => {
                coverage.within = coverage.within.max(within.parse().ok()?);
            }
            ["fails", ..] => coverage.refused += 1,
            _ => {}
        }
    }
    Some(coverage)
}

impl Coverage {
    fn row(&self) -> String {
        let opsets = list(self.opsets.iter().map(ToString::to_string));
        let types = list(self.types.iter().map(|t| TYPES[*t].to_owned()));
        let ranks = match (self.ranks.first(), self.ranks.last()) {
            (Some(a), Some(b)) if a != b => format!("{a}–{b}"),
            (Some(a), _) => a.to_string(),
            _ => String::new(),
        };
        let oracles = list(self.oracles.iter().cloned());
        let agreement =
            if self.within == 0.0 { "exact".to_owned() } else { format!("within {:e}", self.within) };
        let cases = match self.refused {
            0 => self.cases.to_string(),
            n => format!("{} ({n} refused)", self.cases),
        };
        format!("| iOS {opsets} | {types} | {ranks} | {cases} | {oracles} | {agreement} |")
    }
}
