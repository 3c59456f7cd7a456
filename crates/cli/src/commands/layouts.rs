//! `kvbaton layouts`.

use kvbaton::Error;
use kvbaton::layout::{DType, LiveRows, Resolved, Sizes, presets};
use kvbaton::plan::plan;
use serde_json::json;

use super::{cache_shape, layout};
use crate::args::{Layouts, LayoutsVerb};
use crate::printer::{Printer, bytes};

pub(crate) fn run(verb: &Layouts, printer: &Printer) -> Result<(), Error> {
    match verb.verb.as_ref().unwrap_or(&LayoutsVerb::List) {
        LayoutsVerb::List => list(printer),
        LayoutsVerb::Show { name } => show(name, printer),
        LayoutsVerb::Plan { source, target, shape, context, live, dtype, explain } => {
            let cache = cache_shape(shape, None)?;
            let live_rows = live.unwrap_or(*context);
            let blocks = u32::try_from(context.div_ceil(16)).unwrap_or(u32::MAX);
            let live = LiveRows {
                pad: Some(context.saturating_sub(live_rows)),
                block_table: Some((0..blocks).collect()),
                ..LiveRows::seen(live_rows)
            };
            let side = |name: &str, dtype| -> Result<Resolved, Error> {
                let layout = layout(name)?;
                let sizes = Sizes { capacity: *context, dtype, block_rows: 16, row_stride_bytes: None };
                let tensors = layout.tensors(&cache, &sizes)?;
                Ok(layout.resolve(&cache, &tensors, &live)?)
            };
            let plan = plan(&side(source, DType::Float16)?, &side(target, dtype.dtype())?, &cache)?;
            if printer.is_json() {
                printer.document(&json!({
                    "source": source, "target": target, "shape": shape, "context": context,
                    "live_rows": live_rows, "operations": plan.operations(),
                    "bytes_read": plan.bytes_read(), "bytes": plan.bytes_written(),
                    "explanation": explain.then(|| plan.explain()),
                }));
                return Ok(());
            }
            if *explain {
                printer.data(&plan.explain());
            }
            printer.data(&format!(
                "{source} -> {target}: {} copies, {} read, {} written\n",
                plan.operations(),
                bytes(plan.bytes_read()),
                bytes(plan.bytes_written()),
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
