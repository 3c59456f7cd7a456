//! `kvbaton plan`: which engine should do what.

use kvbaton::Error;
use kvbaton::plan::route::{Choice, Machine, Origin, RouteEstimate};
use serde_json::{Value, json};

use super::routes::{Question, decide, decode_package, named_machine, prefill_package, subject};
use crate::Host;
use crate::args::Plan;
use crate::printer::{Printer, bytes, seconds, table};

pub(crate) fn run(verb: &Plan, host: Option<&dyn Host>, printer: &Printer) -> Result<(), Error> {
    let machine = named_machine(&verb.circumstances)?;
    let subject = subject(&verb.model, verb.dtype.map(|d| d.dtype()), host)?;
    let prefill = verb.prefill.as_deref().map(|p| prefill_package(p, &subject, 0)).transpose()?;
    let decode = verb.decode_package.as_deref().map(|p| decode_package(p, &subject, 0)).transpose()?;
    let question = Question {
        subject: &subject,
        machine: &machine,
        context: verb.context,
        max_tokens: verb.max_tokens,
        prefill: prefill.as_ref(),
        decode: decode.as_ref(),
    };
    let choice = decide(&question, &verb.circumstances)?;
    if printer.is_json() {
        let mut document = json!({
            "model": verb.model,
            "context": verb.context,
            "max_tokens": verb.max_tokens,
            "machine": about(&machine),
        });
        merge(&mut document, &choice);
        printer.document(&document);
        return Ok(());
    }
    printer.data(&text(&choice, &machine));
    Ok(())
}

/// What a reader must know of a machine's figures.
pub(crate) fn about(machine: &Machine) -> Value {
    json!({"name": machine.name, "origin": machine.origin, "note": machine.note})
}

fn merge(document: &mut Value, choice: &Choice) {
    let Ok(Value::Object(fields)) = serde_json::to_value(choice) else { return };
    if let Value::Object(own) = document {
        own.extend(fields);
    }
}

fn text(choice: &Choice, machine: &Machine) -> String {
    let header = ["route", "prefill", "hand-off", "first token", "all", "energy", "memory", "hands over"];
    let mut rows = vec![header.map(str::to_owned).to_vec()];
    rows.extend(choice.routes.iter().map(|route| cells(route, choice.pick == Some(route.name))));
    let mut text = table(&rows);
    for route in &choice.routes {
        if let Some(why) = &route.unavailable {
            text.push_str(&format!("{}: {why}\n", route.name.name()));
        }
    }
    text.push_str(&format!("\n{}\n", choice.reason));
    match (choice.break_even_tokens, choice.ahead_until_tokens) {
        (Some(from), None) => {
            text.push_str(&format!("handing over beats MLX alone from prompts of {from} tokens on\n"));
        }
        (Some(from), Some(until)) => {
            text.push_str(&format!(
                "handing over beats MLX alone from prompts of {from} to {until} tokens\n"
            ));
        }
        (None, _) => {}
    }
    if machine.origin == Origin::Published {
        text.push_str(&format!(
            "figures of `{}` are published by others, never measured by kvbaton",
            machine.name
        ));
        text.push_str(&machine.note.as_ref().map_or_else(|| "\n".to_owned(), |note| format!(": {note}\n")));
    }
    text
}

fn cells(route: &RouteEstimate, picked: bool) -> Vec<String> {
    let time = |s: Option<f64>| s.map_or_else(|| "-".to_owned(), seconds);
    let mark = if picked { "  <--" } else { "" };
    let size = |n: u64| bytes(usize::try_from(n).unwrap_or(usize::MAX));
    vec![
        route.name.name().to_owned(),
        time(route.prefill_seconds),
        time(route.exposed_seconds),
        time(route.time_to_first_token_seconds),
        time(route.total_seconds),
        route.joules.map_or_else(|| "-".to_owned(), |j| format!("{j:.1} J")),
        size(route.peak_bytes),
        format!("{}{mark}", size(route.handoff_bytes)),
    ]
}
