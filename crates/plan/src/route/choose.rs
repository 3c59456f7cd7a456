//! The pick, and why.

use serde::Serialize;

use super::estimate::{Request, Route, RouteEstimate, estimate};

/// What is to be least.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Objective {
    /// Time to the first token.
    Ttft,
    /// Time to the last token.
    Total,
    /// Energy.
    Energy,
}

impl Objective {
    /// What a route has of it.
    pub fn of(self, route: &RouteEstimate) -> Option<f64> {
        match self {
            Objective::Ttft => route.time_to_first_token_seconds,
            Objective::Total => route.total_seconds,
            Objective::Energy => route.joules,
        }
    }

    fn words(self, value: f64) -> String {
        match self {
            Objective::Ttft => format!("{} to the first token", seconds(value)),
            Objective::Total => format!("{} in all", seconds(value)),
            Objective::Energy => format!("{value:.1} J"),
        }
    }
}

/// A pick among routes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Choice {
    /// The route to take; `None` where no available route has an estimate.
    pub pick: Option<Route>,
    /// All routes, estimated.
    pub routes: Vec<RouteEstimate>,
    /// Why, in a sentence.
    pub reason: String,
    /// The shortest prompt from which handing over from Core ML to MLX beats MLX alone; `None` where it never does,
    /// or one of the two has no estimate. Whether the package is at hand does not matter here.
    pub break_even_tokens: Option<usize>,
    /// The longest prompt up to which it stays ahead, where it falls behind again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ahead_until_tokens: Option<usize>,
}

/// Estimates all routes and picks the one with the least `objective`. On a tie, the one that hands nothing over.
pub fn choose(request: &Request<'_>, objective: Objective) -> Choice {
    let routes = estimate(request);
    let mut ranked: Vec<(&RouteEstimate, f64)> =
        routes.iter().filter(|r| r.available).filter_map(|r| Some((r, objective.of(r)?))).collect();
    ranked.sort_by(|a, b| a.1.total_cmp(&b.1).then((a.0.name != Route::Mlx).cmp(&(b.0.name != Route::Mlx))));
    let pick = ranked.first().map(|(r, _)| r.name);
    let (break_even_tokens, ahead_until_tokens) = break_even(request, objective);
    let reason = reason(&routes, &ranked, objective);
    Choice { pick, reason, routes: routes.clone(), break_even_tokens, ahead_until_tokens }
}

fn reason(routes: &[RouteEstimate], ranked: &[(&RouteEstimate, f64)], objective: Objective) -> String {
    let Some((first, least)) = ranked.first() else {
        let why = routes.iter().find(|r| r.available).or(routes.first());
        let why = why.and_then(|r| r.unavailable.clone());
        return match objective {
            Objective::Energy if routes.iter().any(|r| r.available && r.total_seconds.is_some()) => {
                "no route can be picked by energy: the machine's power is not known".to_owned()
            }
            _ => format!(
                "no route can be estimated: {}",
                why.unwrap_or_else(|| "none is available".to_owned())
            ),
        };
    };
    let verb = match first.name {
        Route::CoreMlMlx => "hand over from Core ML to MLX",
        Route::Mlx => "do not hand over: MLX alone",
        Route::CoreMl => "do not hand over to MLX: Core ML alone",
        Route::MlxCoreMl => "hand over from MLX to Core ML",
    };
    let Some((second, next)) = ranked.get(1) else {
        let missing = routes.iter().find(|r| !r.available).and_then(|r| r.unavailable.as_deref());
        let only = missing.map_or_else(String::new, |m| format!("; no other route could be taken ({m})"));
        return format!("{verb} takes {}{only}", objective.words(*least));
    };
    let margin = 1.0 - least / next;
    let close = if margin < 0.1 { ", which is within the estimate's own error" } else { "" };
    format!(
        "{verb} takes {}, {:.0} % less than {} ({}){close}",
        objective.words(*least),
        100.0 * margin,
        second.name.name(),
        objective.words(*next),
    )
}

/// The first prompt length at which the split wins, and the last.
fn break_even(request: &Request<'_>, objective: Objective) -> (Option<usize>, Option<usize>) {
    let limit = request.prefill.map_or(131_072, |p| p.limit() + 1).max(2);
    let wins = |context: usize| {
        let at = Request { context, ..request.clone() };
        let routes = estimate(&at);
        let of = |name| routes.iter().find(|r| r.name == name).and_then(|r| objective.of(r));
        of(Route::CoreMlMlx).zip(of(Route::Mlx)).is_some_and(|(split, alone)| split < alone)
    };
    let lengths = lengths(request, limit);
    let Some(first) = lengths.iter().position(|&n| wins(n)) else { return (None, None) };
    // Between two lengths of the grid neither side jumps: functions' ends are on it.
    let before = if first == 0 { 1 } else { lengths[first - 1] };
    let from = bisect(before, lengths[first], &wins);
    let until = lengths[first..].iter().position(|&n| !wins(n)).map(|lost| {
        let lost = first + lost;
        bisect(lengths[lost - 1], lengths[lost], &|n| !wins(n)) - 1
    });
    (Some(from), until)
}

/// Prompt lengths to look at: geometric, and each side of where a function ends.
fn lengths(request: &Request<'_>, limit: usize) -> Vec<usize> {
    let mut lengths = Vec::new();
    let mut n = 2;
    while n < limit {
        lengths.push(n);
        n += (n / 16).max(1);
    }
    lengths.push(limit);
    if let Some(package) = request.prefill {
        lengths.extend(package.lengths.iter().flat_map(|&l| [l + 1, l + 2]).filter(|&n| n <= limit));
    }
    lengths.sort_unstable();
    lengths.dedup();
    lengths
}

/// The least length in `(no, yes]` at which `holds`, which does not at `no`.
fn bisect(mut no: usize, mut yes: usize, holds: &impl Fn(usize) -> bool) -> usize {
    while yes - no > 1 {
        let middle = no + (yes - no) / 2;
        if holds(middle) { yes = middle } else { no = middle }
    }
    yes
}

fn seconds(s: f64) -> String {
    match s {
        s if s >= 1.0 => format!("{s:.2} s"),
        s => format!("{:.1} ms", s * 1e3),
    }
}

#[cfg(test)]
mod tests;
