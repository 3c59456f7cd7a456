//! The one place that writes to stdout and stderr.

use std::cell::RefCell;
use std::io::ErrorKind::BrokenPipe;
use std::io::{IsTerminal, Write};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use kvbaton::{Error, ErrorKind};
use serde::Serialize;

/// Decides what goes where.
pub(crate) struct Printer {
    json: bool,
    /// Why what was meant for stdout did not get there.
    lost: RefCell<Option<std::io::Error>>,
}

impl Printer {
    pub(crate) fn new(json: bool) -> Printer {
        Printer { json, lost: RefCell::new(None) }
    }

    /// Whether stdout takes one JSON document.
    pub(crate) fn is_json(&self) -> bool {
        self.json
    }

    /// Text for stdout, as it is. A closed pipe is no failure.
    pub(crate) fn data(&self, text: &str) {
        let mut out = std::io::stdout().lock();
        let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
        if let Err(error) = written.or_else(|e| if e.kind() == BrokenPipe { Ok(()) } else { Err(e) }) {
            self.lost.borrow_mut().get_or_insert(error);
        }
    }

    /// The exit code, unless output was lost: then that is said, and is our failure.
    pub(crate) fn finish(&self, code: u8) -> u8 {
        let Some(lost) = self.lost.take() else { return code };
        let error = Error::new(ErrorKind::Io, format!("cannot write to stdout: {lost}"));
        self.note(&format!("error: {error}"));
        error.kind().exit_code()
    }

    /// The document of a `--json` run.
    pub(crate) fn document(&self, document: &impl Serialize) {
        let text = serde_json::to_string_pretty(document)
            .unwrap_or_else(|e| format!("{{\"error\": {{\"kind\": \"internal\", \"message\": \"{e}\"}}}}"));
        self.data(&format!("{text}\n"));
    }

    /// A line for the person who watches.
    pub(crate) fn note(&self, line: &str) {
        self.raw_error(&format!("{line}\n"));
    }

    pub(crate) fn raw_error(&self, text: &str) {
        let _ = std::io::stderr().lock().write_all(text.as_bytes());
    }

    /// Reports a failure and returns the exit code.
    pub(crate) fn fail(&self, error: &Error) -> u8 {
        if self.json {
            self.document(&error.to_json());
        } else {
            self.note(&format!("error: {error}"));
            if let Some(hint) = error.get_hint() {
                self.note(&format!("hint: {hint}"));
            }
        }
        error.kind().exit_code()
    }

    /// A bar on stderr, hidden when that is no terminal.
    pub(crate) fn progress(&self) -> ProgressBar {
        let bar = ProgressBar::no_length();
        let visible = !self.json && std::io::stderr().is_terminal();
        bar.set_draw_target(if visible {
            ProgressDrawTarget::stderr()
        } else {
            ProgressDrawTarget::hidden()
        });
        if let Ok(style) = ProgressStyle::with_template("{msg:30} {bar:30} {pos}/{len}") {
            bar.set_style(style);
        }
        bar
    }
}

/// A number of bytes as a person reads it (10⁶, 10⁹).
pub(crate) fn bytes(n: usize) -> String {
    let n = n as f64;
    match n {
        n if n >= 1e9 => format!("{:.2} GB", n / 1e9),
        n if n >= 1e6 => format!("{:.1} MB", n / 1e6),
        n if n >= 1e3 => format!("{:.1} kB", n / 1e3),
        n => format!("{n:.0} B"),
    }
}

/// Seconds as a person reads them.
pub(crate) fn seconds(s: f64) -> String {
    match s {
        s if s >= 1.0 => format!("{s:.2} s"),
        s if s >= 1e-3 => format!("{:.2} ms", s * 1e3),
        s => format!("{:.1} µs", s * 1e6),
    }
}

/// Rows as aligned columns: the first to the left, the others to the right. A last
/// column of words stands to the left, too.
pub(crate) fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns)
        .map(|c| rows.iter().filter_map(|r| r.get(c)).map(|s| s.chars().count()).max().unwrap_or(0))
        .collect();
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (c, cell) in row.iter().enumerate() {
            let pad = " ".repeat(widths[c].saturating_sub(cell.chars().count()));
            if c > 0 {
                line.push_str("  ");
            }
            let left = c == 0 || cell.contains(' ') && c + 1 == columns;
            line.push_str(&if left { format!("{cell}{pad}") } else { format!("{pad}{cell}") });
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}
