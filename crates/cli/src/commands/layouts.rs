//! `kvbaton layouts`.

use kvbaton::layout::{DType, LiveRows, Resolved, Sizes, presets};
use kvbaton::plan::plan;
use kvbaton::{Error, ErrorKind};
use serde_json::json;

use super::{MOST_TOKENS, cache_shape, layout};
use crate::Host;
use crate::args::{Layouts, LayoutsVerb};
use crate::printer::{Printer, bytes};

/// Reads and writes of one core, for an estimate that measures nothing.
const TYPICAL_GIGABYTES_PER_SECOND: f64 = 20.0;

pub(crate) fn run(verb: &Layouts, host: Option<&dyn Host>, printer: &Printer) -> Result<(), Error> {
    match verb.verb.as_ref().unwrap_or(&LayoutsVerb::List) {
        LayoutsVerb::List => list(printer),
        LayoutsVerb::Show { name } => show(name, printer),
        LayoutsVerb::Plan { source, target, shape, context, live, dtype, explain } => {
            // A plan of pages lists each of them.
            if *context > MOST_TOKENS {
                let message = format!("--context {context}: a plan is of {MOST_TOKENS} rows at most");
                return Err(Error::new(ErrorKind::Usage, message));
            }
            let cache = cache_shape(shape, host)?;
            let live_rows = live.unwrap_or(*context);
            let side = |name: &str, dtype| -> Result<Resolved, Error> {
                let layout = layout(name)?;
                let sizes = Sizes { capacity: *context, dtype, block_rows: 16, row_stride_bytes: None };
                let live = LiveRows::made_for(&layout, &sizes, live_rows);
                let tensors = layout.tensors(&cache, &sizes)?;
                Ok(layout.resolve(&cache, &tensors, &live)?)
            };
            let plan = plan(&side(source, DType::Float16)?, &side(target, dtype.dtype())?, &cache)?;
            let cost = plan.cost(TYPICAL_GIGABYTES_PER_SECOND);
            if printer.is_json() {
                printer.document(&json!({
                    "source": source, "target": target, "shape": shape, "context": context,
                    "live_rows": live_rows, "operations": cost.operations,
                    "bytes_read": cost.bytes_read, "bytes": cost.bytes_written,
                    "bytes_zeroed": cost.bytes_zeroed, "smallest_run_bytes": cost.smallest_run_bytes,
                    "explanation": explain.then(|| plan.explain()),
                }));
                return Ok(());
            }
            if *explain {
                printer.data(&plan.explain());
            }
            let runs = cost
                .smallest_run_bytes
                .map_or_else(String::new, |n| format!(", runs of {} at least", bytes(n)));
            printer.data(&format!(
                "{source} -> {target}: {} copies, {} read, {} written{runs}, about {:.1} ms at \
                 {TYPICAL_GIGABYTES_PER_SECOND} GB/s\n",
                cost.operations,
                bytes(cost.bytes_read),
                bytes(cost.bytes_written),
                cost.seconds * 1e3,
            ));
            Ok(())
        }
    }
}

fn list(printer: &Printer) -> Result<(), Error> {
    let layouts: Vec<_> = presets::names().map(presets::get).collect::<Result<_, _>>()?;
    if printer.is_json() {
        let entries: Vec<_> =
            layouts.iter().map(|l| json!({"name": l.name, "description": l.description})).collect();
        printer.document(&json!({ "layouts": entries }));
    } else {
        let width = layouts.iter().map(|l| l.name.len()).max().unwrap_or(0);
        let lines: Vec<String> =
            layouts.iter().map(|l| format!("{:width$}  {}\n", l.name, l.description)).collect();
        printer.data(&lines.concat());
    }
    Ok(())
}

fn show(name: &str, printer: &Printer) -> Result<(), Error> {
    let layout = layout(name)?;
    if printer.is_json() {
        printer.document(&layout);
    } else {
        printer.data(&layout.to_toml());
    }
    Ok(())
}
