//! The command line: one program, one verb a file.
//!
//! Data goes to stdout, everything else to stderr. What only Python can do (tokenising, decoding with MLX,
//! exporting with coremltools) comes in through a [`Host`]; the bare binary has none and says so.

#![forbid(unsafe_code)]

mod args;
mod commands;
mod host;
mod package_decoder;
mod printer;

use std::ffi::OsString;

use clap::Parser;
use clap::error::ErrorKind as ClapKind;
use kvbaton::{Error, ErrorKind};

use args::{Args, Verb};
pub use host::{
    Adoption, Decoder, DecoderRequest, ExportRequest, Exported, Generated, Host, PrefillComparison,
    Prefiller, Progress, Token, Tokenizer, VerifyRequest,
};
use printer::Printer;

/// Runs the command line `arguments` (the program's name first) and returns its exit code: 0 done, 1 the answer
/// is no, 2 the request was wrong, 3 we failed.
pub fn run(arguments: impl IntoIterator<Item = OsString>, host: Option<&dyn Host>) -> u8 {
    let arguments: Vec<OsString> = arguments.into_iter().collect();
    let json = arguments.iter().any(|a| a == "--json");
    let printer = Printer::new(json);
    let args = match Args::try_parse_from(&arguments) {
        Ok(args) => args,
        Err(e) if matches!(e.kind(), ClapKind::DisplayHelp | ClapKind::DisplayVersion) => {
            printer.data(&e.render().to_string());
            return printer.finish(0);
        }
        Err(e) => {
            let text = e.render().to_string();
            if !json {
                printer.raw_error(&text);
                return 2;
            }
            // The lines up to the usage: what is missing, or what a value may be, stands below the first.
            let said: Vec<&str> = text.lines().map(str::trim).take_while(|line| !line.is_empty()).collect();
            let message = said.join(" ");
            let message = message.trim_start_matches("error: ");
            return printer.fail(&Error::new(ErrorKind::Usage, message).hint("see `kvbaton --help`"));
        }
    };
    let done = |result: Result<(), Error>| result.map(|()| true);
    let result = match args.verb {
        Verb::Run(verb) => done(commands::run::run(&verb, host, &printer)),
        Verb::Inspect(verb) => done(commands::inspect::run(&verb, host, &printer)),
        Verb::Export(verb) => done(commands::export::run(&verb, host, &printer)),
        Verb::Layouts(verb) => done(commands::layouts::run(&verb, host, &printer)),
        Verb::Bench(verb) => done(commands::bench::run(&verb, host, &printer)),
        Verb::Calibrate(verb) => done(commands::calibrate::run(&verb, host, &printer)),
        Verb::Plan(verb) => done(commands::plan::run(&verb, host, &printer)),
        Verb::Selftest(verb) => commands::selftest::run(&verb, host, &printer),
        Verb::Verify(verb) => commands::verify::run(&verb, &arguments, host, &printer),
    };
    printer.finish(match result {
        Ok(yes) => u8::from(!yes),
        Err(error) => printer.fail(&error),
    })
}
