//! `run --route`: which engines to use, and what was expected of them.

use kvbaton::plan::route::{Engine, Route, RouteEstimate};
use kvbaton::{Error, ErrorKind};
use serde::Serialize;

use super::routes::{Question, decide, decode_package, named_machine, prefill_package, subject};
use crate::Host;
use crate::args::{RouteChoice, Run};

impl RouteChoice {
    /// The route, unless it is to be picked.
    pub(crate) fn route(self) -> Option<Route> {
        match self {
            RouteChoice::Auto => None,
            RouteChoice::CoremlMlx => Some(Route::CoreMlMlx),
            RouteChoice::Mlx => Some(Route::Mlx),
            RouteChoice::Coreml => Some(Route::CoreMl),
            RouteChoice::MlxCoreml => Some(Route::MlxCoreMl),
        }
    }
}

/// The route that was picked, what it was to cost, and what it did.
#[derive(Serialize)]
pub(crate) struct Decision {
    pub(crate) pick: Route,
    pub(crate) reason: String,
    machine: serde_json::Value,
    pub(crate) estimated: Vec<RouteEstimate>,
    pub(crate) measured: Cost,
}

/// What a route did, under the names of its estimate.
#[derive(Default, Serialize)]
pub(crate) struct Cost {
    pub(crate) prefill_seconds: f64,
    pub(crate) exposed_seconds: f64,
    pub(crate) first_step_seconds: f64,
    pub(crate) decode_seconds: f64,
    pub(crate) time_to_first_token_seconds: f64,
    pub(crate) total_seconds: f64,
}

/// The route to take.
#[derive(Default)]
pub(crate) struct Taken {
    /// Absent where the engines are those that were named.
    pub(crate) route: Option<Route>,
    /// Absent where nothing was to be decided.
    pub(crate) decision: Option<Decision>,
}

/// The route that was named, or the one that `kvbaton plan` picks. `package` says whether `--prefill` is one.
pub(crate) fn taken(
    verb: &Run,
    package: bool,
    host: &dyn Host,
    prompt_tokens: usize,
) -> Result<Taken, Error> {
    let Some(choice) = verb.route else { return Ok(Taken::default()) };
    if !package {
        let message =
            "--route chooses between engines: --prefill must be a Core ML package or a chain of them";
        return Err(Error::new(ErrorKind::Usage, message));
    }
    if let Some(route) = choice.route() {
        if route.decode() == Engine::CoreMl && verb.decode_package.is_none() {
            let message = format!("--route {} needs --decode-package", route.name());
            return Err(Error::new(ErrorKind::Usage, message));
        }
        return Ok(Taken { route: Some(route), decision: None });
    }
    let machine = named_machine(&verb.circumstances)?;
    let subject = subject(&verb.decode.display().to_string(), verb.dtype.map(|d| d.dtype()), Some(host))?;
    let prefill = prefill_package(&verb.prefill, &subject, verb.threads)?;
    let decode =
        verb.decode_package.as_deref().map(|p| decode_package(p, &subject, verb.threads)).transpose()?;
    let question = Question {
        subject: &subject,
        machine: &machine,
        context: prompt_tokens,
        max_tokens: verb.max_tokens,
        prefill: Some(&prefill),
        decode: decode.as_ref(),
    };
    let choice = decide(&question, &verb.circumstances)?;
    let (machine, measured) = (super::plan::about(&machine), Cost::default());
    let pick = choice.pick.expect("`decide` fails without a pick");
    let decision = Decision { pick, reason: choice.reason, machine, estimated: choice.routes, measured };
    Ok(Taken { route: Some(pick), decision: Some(decision) })
}
