//! One error for the whole library: a kind, a line, a hint, and the values that disagree.

use std::fmt;
use std::path::Path;

use kvbaton_copy::CopyError;
use kvbaton_exec::{ArrayError, ExecError};
use kvbaton_layout::LayoutError;
use kvbaton_memory::LeaseError;
use kvbaton_mil::MilError;
use kvbaton_plan::PlanError;
use kvbaton_runtime::{Call, RuntimeError};
use serde_json::{Map, Value};

/// Declares the kinds and their names in one list.
macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident = $name:literal,)*) => {
        /// What kind of failure it is. The name goes into JSON and names the Python exception.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum ErrorKind {
            $($(#[$doc])* $kind,)*
        }

        impl ErrorKind {
            /// Every kind.
            pub const ALL: &[ErrorKind] = &[$(ErrorKind::$kind),*];

            /// The name in JSON.
            pub fn name(self) -> &'static str {
                match self {
                    $(ErrorKind::$kind => $name,)*
                }
            }
        }
    };
}

kinds! {
    /// The request itself is wrong: a flag, a value, a missing file.
    Usage = "usage",
    /// The prompt has no tokens.
    EmptyPrompt = "empty_prompt",
    /// The prompt does not fit the package.
    PromptTooLong = "prompt_too_long",
    /// Two things that must agree do not: model, package, cache.
    Incompatible = "incompatible",
    /// A package cannot be read.
    Package = "package",
    /// A package cannot be run: an operation is missing, an input is wrong.
    Program = "program",
    /// A model folder cannot be read.
    Model = "model",
    /// A layout cannot be read, or does not fit the tensors.
    Layout = "layout",
    /// More rows than the target holds.
    Capacity = "capacity",
    /// Values that the target's type cannot hold.
    Overflow = "overflow",
    /// A buffer is in use.
    Lease = "lease",
    /// Reading or writing a file failed.
    Io = "io",
    /// The verb needs something this installation lacks.
    Unavailable = "unavailable",
    /// Stopped from outside.
    Interrupted = "interrupted",
    /// kvbaton failed.
    Internal = "internal",
}

impl ErrorKind {
    /// The kind called `name`, as [`ErrorKind::name`] writes it.
    pub fn from_name(name: &str) -> Option<ErrorKind> {
        ErrorKind::ALL.iter().copied().find(|k| k.name() == name)
    }

    /// The exit code of a command that ends with it: 2 the request was wrong, 3 we failed.
    pub fn exit_code(self) -> u8 {
        match self {
            ErrorKind::Internal | ErrorKind::Io | ErrorKind::Interrupted => 3,
            _ => 2,
        }
    }
}

/// A failure, said in one line.
#[derive(Debug)]
pub struct Error(Box<Parts>);

#[derive(Debug)]
struct Parts {
    kind: ErrorKind,
    message: String,
    hint: Option<String>,
    fields: Map<String, Value>,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    /// A failure of `kind`.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Error {
        Error(Box::new(Parts { kind, message: message.into(), hint: None, fields: Map::new(), source: None }))
    }

    /// Adds what to do about it.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Error {
        self.0.hint = Some(hint.into());
        self
    }

    /// Adds a value for scripts.
    #[must_use]
    pub fn field(mut self, name: &str, value: impl Into<Value>) -> Error {
        self.0.fields.insert(name.to_owned(), value.into());
        self
    }

    /// Says which function of which package it is about.
    #[must_use]
    pub(crate) fn of_function(mut self, function: &str, package: &Path) -> Error {
        let package = package.display().to_string();
        self.0.message = format!("{} (function `{function}` of `{package}`)", self.0.message);
        self.field("package", package).field("function", function)
    }

    /// Its kind.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// What to do about it.
    pub fn get_hint(&self) -> Option<&str> {
        self.0.hint.as_deref()
    }

    /// The values for scripts.
    pub fn fields(&self) -> &Map<String, Value> {
        &self.0.fields
    }

    /// `{"error": {"kind", "message", "hint", "fields"}}`.
    pub fn to_json(&self) -> Value {
        serde_json::json!({"error": {
            "kind": self.0.kind.name(), "message": self.0.message, "hint": self.0.hint, "fields": self.0.fields,
        }})
    }

    fn caused(kind: ErrorKind, source: impl std::error::Error + Send + Sync + 'static) -> Error {
        let mut error = Error::new(kind, one_line(&source.to_string()));
        error.0.source = Some(Box::new(source));
        error
    }
}

/// Errors are one line; some libraries' texts (TOML's, above all) are several.
fn one_line(text: &str) -> String {
    text.split('\n').map(str::trim).filter(|l| !l.is_empty() && *l != "|").collect::<Vec<_>>().join("; ")
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source.as_deref().and_then(|s| s.source())
    }
}

impl From<MilError> for Error {
    fn from(e: MilError) -> Error {
        Error::caused(ErrorKind::Package, e)
    }
}

impl From<ExecError> for Error {
    fn from(e: ExecError) -> Error {
        match &e {
            ExecError::Memory { needed_bytes, limit_bytes, .. } => {
                let (needed, limit) = (*needed_bytes, *limit_bytes);
                Error::caused(ErrorKind::Capacity, e)
                    .field("needed_bytes", needed)
                    .field("limit_bytes", limit)
                    .hint("raise --max-memory, keep compressed weights with --weights streamed, or use a shorter function")
            }
            _ => Error::caused(ErrorKind::Program, e),
        }
    }
}

impl From<ArrayError> for Error {
    fn from(e: ArrayError) -> Error {
        Error::caused(ErrorKind::Program, e)
    }
}

impl From<LayoutError> for Error {
    fn from(e: LayoutError) -> Error {
        match &e {
            LayoutError::Capacity { layer, want, capacity } => {
                let (layer, want, capacity) = (*layer, *want, *capacity);
                Error::caused(ErrorKind::Capacity, e)
                    .field("layer", layer)
                    .field("rows", want)
                    .field("capacity", capacity)
            }
            _ => Error::caused(ErrorKind::Layout, e),
        }
    }
}

impl From<PlanError> for Error {
    fn from(e: PlanError) -> Error {
        Error::caused(ErrorKind::Incompatible, e)
    }
}

impl From<CopyError> for Error {
    fn from(e: CopyError) -> Error {
        match &e {
            CopyError::Overflow { count, to, place } => {
                let place = serde_json::to_value(place).unwrap_or(Value::Null);
                let (count, to) = (*count, to.name());
                Error::caused(ErrorKind::Overflow, e)
                    .field("count", count)
                    .field("dtype", to)
                    .field("first", place)
                    .hint("clamp the values (on_overflow=\"clamp\") or hand over in a wider type")
            }
            _ => Error::caused(ErrorKind::Internal, e),
        }
    }
}

impl From<LeaseError> for Error {
    fn from(e: LeaseError) -> Error {
        Error::caused(ErrorKind::Lease, e)
    }
}

impl From<RuntimeError> for Error {
    fn from(e: RuntimeError) -> Error {
        let kind = match &e {
            RuntimeError::Custody(_) => ErrorKind::Lease,
            RuntimeError::Failed { .. }
            | RuntimeError::MissingOutput { .. }
            | RuntimeError::NotLoaded { .. }
            | RuntimeError::StateLost => ErrorKind::Program,
            RuntimeError::TooOld { .. } => ErrorKind::Unavailable,
            RuntimeError::Compiled { .. } => ErrorKind::Package,
            RuntimeError::File { .. } => ErrorKind::Io,
            _ => ErrorKind::Internal,
        };
        let hint = match &e {
            RuntimeError::TimedOut { call: Call::Compile | Call::Load | Call::Plan, .. } => {
                Some("allow more with --engine-timeout, or take other --compute-units")
            }
            RuntimeError::TimedOut { .. } => {
                Some("allow more with --prediction-timeout, or take other --compute-units")
            }
            RuntimeError::StateLost => Some("hand the cache over again, or start from nothing"),
            RuntimeError::Stuck { .. } => Some("start the program again, with other --compute-units"),
            _ => None,
        };
        let error = Error::caused(kind, e);
        match hint {
            Some(hint) => error.hint(hint),
            None => error,
        }
    }
}
