//! `kvbaton export`.

use kvbaton::Error;

use super::need_host;
use crate::Host;
use crate::args::{Export, ExportKind, KvOutputs, Quantize};
use crate::host::ExportRequest;
use crate::printer::{Printer, bytes};

pub(crate) fn run(verb: &Export, host: Option<&dyn Host>, printer: &Printer) -> Result<(), Error> {
    let host = need_host(host, "export")?;
    let kv_outputs = match verb.kv_outputs {
        KvOutputs::Stacked => "stacked",
        KvOutputs::Grouped => "grouped",
        KvOutputs::PerLayer => "per-layer",
    };
    let kind = match verb.kind {
        ExportKind::Prefill => "prefill",
        ExportKind::Decode => "decode",
    };
    let request = ExportRequest {
        model: verb.model.clone(),
        out: verb.out.clone(),
        kind: kind.to_owned(),
        buckets: verb.buckets.clone(),
        context: verb.context.clone(),
        chunk: verb.chunk,
        split: verb.split,
        kv_outputs: kv_outputs.to_owned(),
        quantize: verb.quantize.map(|q| {
            let name = match q {
                Quantize::Int8 => "int8",
                Quantize::Int4Block32 => "int4-block32",
                Quantize::Int4Block32Int8 => "int4-block32-int8",
                Quantize::Lut6 => "lut6",
            };
            name.to_owned()
        }),
        force: verb.force,
    };
    let bar = printer.progress();
    let shown = bar.clone();
    let progress = move |stage: &str, done: u64, total: u64| {
        shown.set_length(total);
        shown.set_position(done);
        shown.set_message(stage.to_owned());
    };
    let exported = host.export(&request, Box::new(progress))?;
    bar.finish_and_clear();
    if printer.is_json() {
        printer.document(&exported.report);
    } else {
        let size = exported.report.get("bytes").and_then(|b| b.as_u64()).unwrap_or(0);
        let took = exported.report.get("seconds").and_then(|s| s.as_f64()).unwrap_or(0.0);
        let size = bytes(usize::try_from(size).unwrap_or(usize::MAX));
        printer.data(&format!("{}\n", verb.out.display()));
        printer.note(&format!("wrote {size} in {took:.1} s"));
    }
    Ok(())
}
