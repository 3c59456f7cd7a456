//! `docs/ops.md`: which operations of MIL the CPU executor runs, from the cases that test them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;

#[expect(dead_code, reason = "the table has no use for values")]
#[path = "../../crates/exec/tests/conformance/text.rs"]
mod text;

use text::{Case, Type};

const CASES: &str = "crates/exec/testdata/ops";
const PAGE: &str = "docs/ops.md";

const HEAD: &str = "# Operations of the CPU executor

Made from the executor's own tests by `cargo xtask ops-table`; `make lint` checks that it is current.

A case is a program, its inputs and the values it must give, in a text file under `crates/exec/testdata/ops`. Expected
values come from coremltools' `value_inference`, Apple's numpy definition of an operation, or from numpy where coremltools
has none (`crates/exec/testdata/conformance`). Every case runs three times: one operation after the other, fused, and with
streamed weights.

- **opsets**: the definitions that are tested, each by the first version of iOS that has it. Later versions without a
  definition of their own use the last one.
- **types** and **ranks**: of the operation's first operand, in the cases. Every type that MIL allows of any operand has a
  case (`types.json`).
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
    states: bool,
    ranks: BTreeSet<usize>,
    oracles: BTreeSet<String>,
    refused: usize,
    within: f64,
}

const TYPES: [&str; 14] = [
    "fp16", "fp32", "int32", "int16", "uint16", "int8", "uint8", "int4", "uint6", "uint4", "uint3", "uint2",
    "uint1", "bool",
];

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
    let operands = first_operands(&read(&folder.join("types.json"))?)?;
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
                let first = operands.get(op).map_or("input", String::as_str);
                let coverage = coverage(&text::cases(&read(&file)?), op, first)?;
                let _ = writeln!(page, "| `{op}` {}", coverage.row());
            }
            (true, false) => return Err(format!("`{op}` has no cases in {}", file.display())),
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

/// The first operand of each operation.
fn first_operands(types: &str) -> Result<BTreeMap<String, String>> {
    type Operands = serde_json::Map<String, serde_json::Value>;
    let types: BTreeMap<String, BTreeMap<u32, Operands>> =
        serde_json::from_str(types).map_err(|e| e.to_string())?;
    let first = |versions: BTreeMap<u32, Operands>| versions.into_values().next()?.into_iter().next();
    Ok(types.into_iter().filter_map(|(op, versions)| Some((op, first(versions)?.0))).collect())
}

/// `first`: the operand of `op` whose types and ranks are noted.
fn coverage(cases: &[Case], op: &str, first: &str) -> Result<Coverage> {
    let mut coverage = Coverage { cases: cases.len(), ..Coverage::default() };
    for case in cases {
        coverage.oracles.insert(case.oracle.clone());
        coverage.opsets.insert(case.version());
        coverage.refused += usize::from(case.fails.is_some());
        let expected = case.calls.iter().flat_map(|call| &call.expected);
        coverage.within = expected.fold(coverage.within, |most, value| most.max(value.within));
        let operations = case.operands(op);
        if operations.is_empty() {
            return Err(format!("case `{}` of `{op}` has no such operation", case.name));
        }
        for ty in operations.iter().flat_map(|operands| operands.get(first)).flatten() {
            coverage.note(ty)?;
        }
    }
    Ok(coverage)
}

impl Coverage {
    fn note(&mut self, ty: &Type) -> Result<()> {
        let known = TYPES.iter().position(|t| *t == ty.dtype);
        self.types.insert(known.ok_or_else(|| format!("a first operand of type {}", ty.dtype))?);
        self.ranks.insert(ty.dims.len());
        self.states |= ty.state;
        Ok(())
    }

    fn row(&self) -> String {
        let opsets = list(self.opsets.iter().map(ToString::to_string));
        let states = if self.states { "states of " } else { "" };
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
        format!("| iOS {opsets} | {states}{types} | {ranks} | {cases} | {oracles} | {agreement} |")
    }
}
