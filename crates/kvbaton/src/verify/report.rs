//! Results, and the verdict that they add up to.

use std::fmt;

use kvbaton_layout::{DType, Part};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::rows::PartRows;
use crate::{Error, ErrorKind};

/// A rung of the ladder, lowest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RungName {
    /// What arrived is what left.
    Bytes,
    /// It is what the reference computed.
    Values,
    /// The decoder's logits are the same from it.
    Logits,
    /// So is the likeliest token at every step of the reference's own continuation.
    TeacherForced,
    /// So is the continuation.
    FreeRunning,
}

impl RungName {
    /// All rungs, lowest first.
    pub const ALL: [RungName; 5] =
        [RungName::Bytes, RungName::Values, RungName::Logits, RungName::TeacherForced, RungName::FreeRunning];
}

impl fmt::Display for RungName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            RungName::Bytes => "bytes",
            RungName::Values => "values",
            RungName::Logits => "logits",
            RungName::TeacherForced => "teacher-forced",
            RungName::FreeRunning => "free-running",
        })
    }
}

/// How a rung came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// Within the thresholds.
    Pass,
    /// Not within them.
    Fail,
    /// It could not be run, which is no pass.
    NotRun,
}

/// The answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Every rung passed.
    Pass,
    /// Every rung passed, and tokens differ where the reference itself was undecided.
    Tie,
    /// A rung could not be run.
    Incomplete,
    /// A rung failed, or the producer is not deterministic.
    Fail,
}

impl Verdict {
    /// Whether the answer is yes.
    pub fn is_yes(self) -> bool {
        matches!(self, Verdict::Pass | Verdict::Tie)
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Verdict::Pass => "pass",
            Verdict::Tie => "tie",
            Verdict::Incomplete => "incomplete",
            Verdict::Fail => "fail",
        })
    }
}

/// A place in a cache; what does not apply is absent, and null in JSON.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Where {
    /// `key`, `value`, `conv` or `state`.
    pub tensor: Option<String>,
    /// Layer.
    pub layer: Option<usize>,
    /// Head.
    pub head: Option<usize>,
    /// Position of the token; of a state, its row.
    pub row: Option<i64>,
    /// Lane.
    pub lane: Option<usize>,
    /// Index of the prompt, in a report's own rungs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt: Option<usize>,
}

impl Where {
    pub(crate) fn of(part: Part, layer: usize) -> Where {
        let name = match part {
            Part::Key => "key",
            Part::Value => "value",
            Part::Conv => "conv",
            Part::State => "state",
        };
        Where { tensor: Some(name.to_owned()), layer: Some(layer), ..Where::default() }
    }

    /// The place of element `index` of some rows.
    pub(crate) fn element(part: Part, layer: usize, index: usize, rows: &PartRows) -> Where {
        let (row, lane) = (index / rows.lanes, index % rows.lanes);
        let (head, at) = (row / rows.rows.len(), row % rows.rows.len());
        Where { head: Some(head), row: Some(rows.rows[at]), lane: Some(lane), ..Where::of(part, layer) }
    }
}

impl fmt::Display for Where {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut words = Vec::new();
        let mut say = |name: &str, value: Option<String>| words.extend(value.map(|v| format!("{name}{v}")));
        say("prompt ", self.prompt.map(|n| n.to_string()));
        say("", self.tensor.clone());
        say("layer ", self.layer.map(|n| n.to_string()));
        say("head ", self.head.map(|n| n.to_string()));
        say("row ", self.row.map(|n| n.to_string()));
        say("lane ", self.lane.map(|n| n.to_string()));
        f.write_str(&words.join(", "))
    }
}

/// One rung's result.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rung {
    /// Which.
    pub name: RungName,
    /// How it came out.
    pub status: Status,
    /// Where it failed first.
    #[serde(rename = "where")]
    pub place: Option<Where>,
    /// Passed, but tokens differ at near ties.
    #[serde(default)]
    pub tie: bool,
    /// What was wrong, or why it was not run.
    #[serde(default)]
    pub note: Option<String>,
    /// Its figures.
    #[serde(flatten)]
    pub figures: Map<String, Value>,
}

impl Rung {
    pub(crate) fn new(name: RungName, status: Status) -> Rung {
        Rung { name, status, place: None, tie: false, note: None, figures: Map::new() }
    }

    /// A rung that could not be run, and why.
    pub fn not_run(name: RungName, why: impl Into<String>) -> Rung {
        Rung { note: Some(why.into()), ..Rung::new(name, Status::NotRun) }
    }

    pub(crate) fn with<'a>(mut self, figures: impl IntoIterator<Item = (&'a str, Value)>) -> Rung {
        self.figures.extend(figures.into_iter().map(|(k, v)| (k.to_owned(), v)));
        self
    }
}

/// What is still a pass.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Thresholds {
    /// A token that the reference prefers by less than so much of a logit is a near tie.
    pub tie: f64,
    /// The smallest cosine of the keys or values of one head of one layer.
    pub min_cosine: f64,
    /// The largest difference of the norm of such a head from that of the reference, as a share of it.
    pub max_norm_error: f64,
    /// The largest error of one row of one head, as a share of the row's norm or the head's usual one.
    pub max_row_error: f64,
    /// The largest divergence of the next token's distribution at one step, in nats.
    pub max_kl: f64,
    /// The smallest share of steps of a prompt at which the likeliest token is the reference's, or nearly tied with
    /// it.
    pub min_agreement: f64,
}

impl Thresholds {
    /// What is usual for a decoder whose weights and cache are of `dtype`.
    ///
    /// A decoder in bfloat16 rounds 16 times as coarsely as one in float16, in its own prefill and in every logit, and
    /// differs by so much from any other cache, however exact. Its limits are those within which clean hand-offs of
    /// real models stay: `docs/study-token-agreement.md`. A row that is all zeros is off by 1, and beyond them.
    #[must_use]
    pub fn usual(dtype: DType) -> Thresholds {
        let fine = Thresholds {
            tie: 0.01,
            min_cosine: 0.999,
            max_norm_error: 0.01,
            max_row_error: 0.1,
            max_kl: 0.01,
            min_agreement: 1.0,
        };
        match dtype {
            DType::BFloat16 => Thresholds {
                tie: 0.3,
                min_cosine: 0.995,
                max_norm_error: 0.02,
                max_row_error: 0.9,
                max_kl: 0.05,
                ..fine
            },
            _ => fine,
        }
    }

    /// Refuses what is no threshold, by its name in JSON.
    ///
    /// # Errors
    ///
    /// When a value is negative or not a number, or a share is above 1.
    pub fn check(&self) -> Result<(), Error> {
        let named = serde_json::to_value(self).unwrap_or_default();
        for (name, value) in named.as_object().into_iter().flatten() {
            // JSON has no infinities: they come out as null.
            if !value.as_f64().is_some_and(|v| v >= 0.0) {
                let message = format!("{name} must be a number that is not negative");
                return Err(Error::new(ErrorKind::Usage, message).field("name", name.clone()));
            }
        }
        for (name, value) in [("min_cosine", self.min_cosine), ("min_agreement", self.min_agreement)] {
            if value > 1.0 {
                let message = format!("{name} is {value}, which nothing reaches: 1 is the most");
                return Err(Error::new(ErrorKind::Usage, message).field("name", name));
            }
        }
        Ok(())
    }
}

/// What is usual for a decoder in float32.
impl Default for Thresholds {
    fn default() -> Thresholds {
        Thresholds::usual(DType::Float32)
    }
}

/// One prompt's results.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PromptReport {
    /// The answer for this prompt.
    pub verdict: Verdict,
    /// The rungs, lowest first.
    pub rungs: Vec<Rung>,
    /// What else is known of it: its name, lengths, seconds, whether its producer is deterministic.
    #[serde(flatten)]
    pub facts: Map<String, Value>,
}

impl PromptReport {
    /// Adds up the rungs of a prompt. A rung that is missing was not run.
    pub fn new(rungs: Vec<Rung>, facts: Map<String, Value>) -> PromptReport {
        let rungs: Vec<Rung> = RungName::ALL
            .into_iter()
            .map(|name| {
                let given = rungs.iter().find(|r| r.name == name).cloned();
                given.unwrap_or_else(|| Rung::not_run(name, "it was not asked for"))
            })
            .collect();
        let mut prompt = PromptReport { verdict: Verdict::Pass, rungs, facts };
        prompt.verdict = verdict(&prompt.rungs);
        if prompt.unsteady() {
            prompt.verdict = Verdict::Fail;
        }
        prompt
    }

    /// Whether its producer gave different caches for the same tokens.
    fn unsteady(&self) -> bool {
        let deterministic = self.facts.get("producer").and_then(|p| p.get("deterministic"));
        deterministic == Some(&Value::Bool(false))
    }
}

fn verdict(rungs: &[Rung]) -> Verdict {
    let any = |status: Status| rungs.iter().any(|r| r.status == status);
    match () {
        () if any(Status::Fail) => Verdict::Fail,
        () if any(Status::NotRun) => Verdict::Incomplete,
        () if rungs.iter().any(|r| r.tie) => Verdict::Tie,
        () => Verdict::Pass,
    }
}

/// The whole document.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VerifyReport {
    /// The answer over all prompts.
    pub verdict: Verdict,
    /// One sentence on why.
    pub reason: String,
    /// The rungs over all prompts.
    pub rungs: Vec<Rung>,
    /// Every prompt.
    pub prompts: Vec<PromptReport>,
    /// What was still a pass.
    pub thresholds: Thresholds,
    /// What else is known of the run: its command, versions and fingerprints.
    #[serde(flatten)]
    pub facts: Map<String, Value>,
}

impl VerifyReport {
    /// Adds up prompts.
    pub fn new(
        prompts: Vec<PromptReport>,
        thresholds: Thresholds,
        facts: Map<String, Value>,
    ) -> VerifyReport {
        let rungs: Vec<Rung> = RungName::ALL.into_iter().map(|name| over_prompts(name, &prompts)).collect();
        let verdict = prompts.iter().map(|p| p.verdict).max().unwrap_or(Verdict::Incomplete);
        let reason = reason(verdict, &rungs, &prompts);
        VerifyReport { verdict, reason, rungs, prompts, thresholds, facts }
    }
}

/// One rung over all prompts: counts, the first failure, and the worst of its figures.
fn over_prompts(name: RungName, prompts: &[PromptReport]) -> Rung {
    let of = |p: &PromptReport| p.rungs.iter().find(|r| r.name == name).cloned();
    let all: Vec<(usize, Rung)> = prompts.iter().enumerate().filter_map(|(i, p)| Some((i, of(p)?))).collect();
    let count = |status: Status| all.iter().filter(|(_, r)| r.status == status).count();
    let status = match (count(Status::Fail), count(Status::NotRun)) {
        (0, 0) if !all.is_empty() => Status::Pass,
        (0, _) => Status::NotRun,
        _ => Status::Fail,
    };
    let first = all.iter().find(|(_, r)| r.status == status && status != Status::Pass);
    let place = first.filter(|_| status == Status::Fail).map(|(index, rung)| {
        let place = rung.place.clone().unwrap_or_default();
        Where { prompt: (prompts.len() > 1).then_some(*index), ..place }
    });
    let mut rung = Rung::new(name, status).with([
        ("passed", json!(count(Status::Pass))),
        ("failed", json!(count(Status::Fail))),
        ("not_run", json!(count(Status::NotRun))),
        ("ties", json!(all.iter().filter(|(_, r)| r.tie).count())),
    ]);
    rung.place = place;
    rung.note = first.and_then(|(_, r)| r.note.clone());
    rung.tie = status == Status::Pass && all.iter().any(|(_, r)| r.tie);
    let numbers = |figure: &str| {
        let found = all.iter().filter_map(|(_, r)| r.figures.get(figure)?.as_f64());
        found.collect::<Vec<f64>>()
    };
    // A figure that is no number in one prompt, as what is infinite is in JSON, is none over all.
    let unbounded = |figure: &str| all.iter().any(|(_, r)| r.figures.get(figure) == Some(&Value::Null));
    let mut keep = |figure: &str, fold: &dyn Fn(&[f64]) -> f64| {
        let found = numbers(figure);
        if unbounded(figure) {
            rung.figures.insert(figure.to_owned(), Value::Null);
        } else if !found.is_empty() {
            rung.figures.insert(figure.to_owned(), json!(fold(&found)));
        }
    };
    let least = |v: &[f64]| v.iter().copied().fold(f64::INFINITY, f64::min);
    let most = |v: &[f64]| v.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum = |v: &[f64]| v.iter().sum::<f64>();
    for figure in ["min_cosine", "top1_agreement", "top5_overlap"] {
        keep(figure, &least);
    }
    for figure in ["max_norm_error", "max_row_error", "max_abs", "max_kl", "max_difference"] {
        keep(figure, &most);
    }
    let mut counts = |figure: &str| {
        let found: Vec<u64> = all.iter().filter_map(|(_, r)| r.figures.get(figure)?.as_u64()).collect();
        if !found.is_empty() {
            rung.figures.insert(figure.to_owned(), json!(found.iter().sum::<u64>()));
        }
    };
    for figure in ["elements", "differing", "nan", "infinity", "overflow", "steps", "agreed", "near_ties"] {
        counts(figure);
    }
    if name == RungName::TeacherForced
        && let (agreed, steps) = (numbers("agreed"), numbers("steps"))
        && !steps.is_empty()
    {
        rung.figures.insert("agreement".to_owned(), json!(sum(&agreed) / sum(&steps).max(1.0)));
    }
    if name == RungName::FreeRunning {
        let same =
            all.iter().filter(|(_, r)| r.figures.get("first_difference") == Some(&Value::Null)).count();
        rung.figures.insert("identical".to_owned(), json!(same));
    }
    rung
}

fn reason(verdict: Verdict, rungs: &[Rung], prompts: &[PromptReport]) -> String {
    let total = prompts.len();
    let of = |v: Verdict| prompts.iter().filter(|p| p.verdict == v).count();
    let s = if total == 1 { "" } else { "s" };
    if let Some(index) = prompts.iter().position(PromptReport::unsteady) {
        return format!(
            "the producer is not deterministic: for prompt {index} it gave different caches for the same tokens; \
             what the hand-off changes cannot be told from that"
        );
    }
    match verdict {
        Verdict::Pass => format!("every rung passed on {total} prompt{s}"),
        Verdict::Tie => format!(
            "every rung passed; of {total} prompt{s}, {} differ in a token that the reference held nearly tied",
            of(Verdict::Tie)
        ),
        Verdict::Incomplete => {
            let first = rungs.iter().find(|r| r.status == Status::NotRun);
            let which = first.map(|r| {
                let why = r.note.as_deref().unwrap_or("no prompt was run");
                format!("{} was not run: {why}", r.name)
            });
            which.unwrap_or_else(|| "nothing was run".to_owned())
        }
        Verdict::Fail => {
            let first = rungs.iter().find(|r| r.status == Status::Fail);
            let which = first.map(|r| {
                let place = r.place.as_ref().map(|p| format!(" at {p}")).unwrap_or_default();
                let note = r.note.as_ref().map(|n| format!(": {n}")).unwrap_or_default();
                format!("{} failed{place}{note}", r.name)
            });
            let which = which.unwrap_or_default();
            let failed = of(Verdict::Fail);
            if total == 1 { which } else { format!("{failed} of {total} prompts failed; the first: {which}") }
        }
    }
}
