//! What each route costs.

use kvbaton_layout::CacheSpec;
use serde::Serialize;

use super::fit::{Fit, Point, correction};
use super::machine::{Engine, HandoffFigure, Machine, Origin, Phase};
use super::work::{ModelWork, cache_bytes};

/// Rows by which mlx-lm's caches grow.
const GROWTH_ROWS: usize = 256;

/// Who prefills and who decodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Route {
    /// A Core ML package prefills, MLX decodes.
    #[serde(rename = "coreml-mlx")]
    CoreMlMlx,
    /// MLX does both.
    Mlx,
    /// Core ML packages do both.
    #[serde(rename = "coreml")]
    CoreMl,
    /// MLX prefills, a Core ML package decodes.
    #[serde(rename = "mlx-coreml")]
    MlxCoreMl,
}

impl Route {
    /// All of them.
    pub const ALL: [Route; 4] = [Route::CoreMlMlx, Route::Mlx, Route::CoreMl, Route::MlxCoreMl];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Route::CoreMlMlx => "coreml-mlx",
            Route::Mlx => "mlx",
            Route::CoreMl => "coreml",
            Route::MlxCoreMl => "mlx-coreml",
        }
    }

    /// Who prefills.
    pub fn prefill(self) -> Engine {
        match self {
            Route::CoreMlMlx | Route::CoreMl => Engine::CoreMl,
            Route::Mlx | Route::MlxCoreMl => Engine::Mlx,
        }
    }

    /// Who decodes.
    pub fn decode(self) -> Engine {
        match self {
            Route::CoreMlMlx | Route::Mlx => Engine::Mlx,
            Route::CoreMl | Route::MlxCoreMl => Engine::CoreMl,
        }
    }
}

/// A Core ML package, as far as its cost goes.
#[derive(Clone, Debug, PartialEq)]
pub struct Package {
    /// Tokens that each of its functions takes at once: the rows that are computed, however few are asked for.
    pub lengths: Vec<usize>,
    /// Rows that it can hold when it works in chunks of its longest function.
    pub context: Option<usize>,
    /// Bytes of its weights.
    pub weight_bytes: f64,
    /// Type of its weights.
    pub dtype: String,
    /// Bytes of an element of its cache.
    pub element_bytes: usize,
}

impl Package {
    /// The longest prompt.
    pub fn limit(&self) -> usize {
        self.context.or_else(|| self.lengths.iter().copied().max()).unwrap_or(0)
    }

    /// Rows that are computed for `tokens` tokens, and the rows of the last piece to be handed over; `None` for more
    /// than it takes.
    fn computed(&self, tokens: usize) -> Option<(usize, usize)> {
        if let Some(&whole) = self.lengths.iter().filter(|&&l| l >= tokens).min() {
            return Some((whole, tokens));
        }
        let chunk = *self.lengths.iter().max().filter(|&&l| l > 0)?;
        let pieces = tokens.div_ceil(chunk);
        self.context.filter(|&c| tokens <= c).map(|_| (pieces * chunk, tokens - (pieces - 1) * chunk))
    }
}

/// What is to be done, and with what.
#[derive(Clone, Debug)]
pub struct Request<'a> {
    /// The machine.
    pub machine: &'a Machine,
    /// The model's work; its weights as the decoder holds them.
    pub work: &'a ModelWork,
    /// What each layer keeps.
    pub cache: &'a CacheSpec,
    /// Tokens of the prompt.
    pub context: usize,
    /// Tokens to generate.
    pub max_tokens: usize,
    /// The share of the GPU that others use, from 0 to below 1.
    pub gpu_busy: f64,
    /// Type of MLX's weights.
    pub dtype: &'a str,
    /// Bytes of an element of MLX's caches.
    pub element_bytes: usize,
    /// The package that prefills.
    pub prefill: Option<&'a Package>,
    /// The package that decodes.
    pub decode: Option<&'a Package>,
}

/// What an estimate rests on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Basis {
    /// This model was measured on this machine.
    Measured,
    /// Other models were measured on this machine; work is scaled.
    Scaled,
    /// Figures that others published for this model.
    Published,
    /// Figures that others published for other models; work is scaled.
    PublishedScaled,
}

/// The cost of one route.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RouteEstimate {
    /// Which.
    pub name: Route,
    /// Whether it can be taken: its packages are there and hold the prompt.
    pub available: bool,
    /// Why it cannot, or why it has no estimate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unavailable: Option<String>,
    /// Seconds of prefill.
    pub prefill_seconds: Option<f64>,
    /// Seconds that the hand-off adds.
    pub exposed_seconds: Option<f64>,
    /// Seconds of the first step.
    pub first_step_seconds: Option<f64>,
    /// Seconds of all steps.
    pub decode_seconds: Option<f64>,
    /// Prefill, hand-off and first step.
    pub time_to_first_token_seconds: Option<f64>,
    /// Prefill, hand-off and all steps.
    pub total_seconds: Option<f64>,
    /// Energy of prefill and decode, where the machine's power is known.
    pub joules: Option<f64>,
    /// Weights of the engines that are used, and their caches. Activations are not counted.
    pub peak_bytes: u64,
    /// Live bytes handed over.
    pub handoff_bytes: u64,
    /// What the seconds rest on.
    pub basis: Option<Basis>,
}

/// The costs of all routes.
pub fn estimate(request: &Request<'_>) -> Vec<RouteEstimate> {
    Route::ALL.map(|route| Estimator { request, route }.estimate()).into()
}

struct Estimator<'a> {
    request: &'a Request<'a>,
    route: Route,
}

impl Estimator<'_> {
    fn estimate(&self) -> RouteEstimate {
        let r = self.request;
        // The last token of the prompt is the decoder's first.
        let rows = r.context.saturating_sub(1);
        let mut unavailable = self.missing(rows);
        let prefill = self.prefill(rows);
        let step = self.step(r.context);
        let later = self.step(r.context + r.max_tokens / 2);
        let exposed = self.exposed(rows);
        let available = unavailable.is_none();
        let lacks = [
            (prefill.is_none(), self.route.prefill(), "prefill"),
            (step.is_none(), self.route.decode(), "decode"),
        ];
        if let Some((_, engine, what)) = lacks.iter().find(|(lacks, ..)| *lacks)
            && available
        {
            let (machine, engine) = (&r.machine.name, engine.name());
            unavailable = Some(format!("machine `{machine}` has no {what} figure of {engine}"));
        }
        let seconds = prefill.zip(step).zip(later).map(|(((p, first), (s, second)), (l, _))| {
            (p, s, s + l * r.max_tokens.saturating_sub(1) as f64, first.max(second))
        });
        let first = seconds.map(|(p, s, ..)| p + exposed + s);
        RouteEstimate {
            name: self.route,
            available,
            unavailable,
            prefill_seconds: seconds.map(|s| s.0),
            exposed_seconds: seconds.map(|_| exposed),
            first_step_seconds: seconds.map(|s| s.1),
            decode_seconds: seconds.map(|s| s.2),
            time_to_first_token_seconds: first,
            total_seconds: seconds.map(|(p, _, all, _)| p + exposed + all),
            joules: seconds.and_then(|(p, _, all, _)| self.joules(p, all)),
            peak_bytes: self.peak_bytes(rows),
            handoff_bytes: self.handoff_bytes(rows) as u64,
            basis: seconds.map(|s| s.3),
        }
    }

    /// What the route lacks.
    fn missing(&self, rows: usize) -> Option<String> {
        let r = self.request;
        let sides = [
            (self.route.prefill(), r.prefill, rows, "--prefill"),
            (self.route.decode(), r.decode, r.context + r.max_tokens, "--decode-package"),
        ];
        sides.into_iter().filter(|(engine, ..)| *engine == Engine::CoreMl).find_map(
            |(_, package, want, flag)| match package {
                None => Some(format!("no {flag} was given")),
                Some(package) if package.limit() < want => {
                    Some(format!("the package of {flag} holds {} rows, {want} are wanted", package.limit()))
                }
                Some(_) => None,
            },
        )
    }

    /// Time stretched by what others do on the GPU.
    fn busy(&self, engine: Engine) -> f64 {
        if engine == Engine::Mlx { 1.0 / (1.0 - self.request.gpu_busy) } else { 1.0 }
    }

    /// The type of weights that an engine's figures should have.
    fn dtype(&self, engine: Engine, package: Option<&Package>) -> String {
        match (engine, package) {
            (Engine::CoreMl, Some(package)) => package.dtype.clone(),
            (Engine::CoreMl, None) => "float16".to_owned(),
            (Engine::Mlx, _) => self.request.dtype.to_owned(),
        }
    }

    fn prefill(&self, rows: usize) -> Option<(f64, Basis)> {
        let (r, engine) = (self.request, self.route.prefill());
        if rows == 0 {
            return Some((0.0, Basis::Measured));
        }
        let package = r.prefill.filter(|_| engine == Engine::CoreMl);
        let computed = package.and_then(|p| p.computed(rows)).map_or(rows, |(computed, _)| computed);
        let features =
            |work: &ModelWork, tokens: usize| [1.0, work.token_flops(tokens), work.attention_flops(tokens)];
        let figures = r.machine.prefill.iter().filter(|f| f.engine == engine);
        let known: Vec<Known<'_>> = figures
            .filter_map(|f| {
                let work = r.machine.models.get(&f.model)?;
                let point = Point { features: features(work, f.tokens), seconds: f.seconds };
                Some(Known { dtype: &f.dtype, own: work.is_like(r.work), length: f.tokens, point })
            })
            .collect();
        let (seconds, basis) =
            self.predict(known, &self.dtype(engine, package), features(r.work, computed), computed)?;
        Some((seconds * self.busy(engine), basis))
    }

    /// Seconds of a step with `context` rows in the cache.
    fn step(&self, context: usize) -> Option<(f64, Basis)> {
        let (r, engine) = (self.request, self.route.decode());
        let package = r.decode.filter(|_| engine == Engine::CoreMl);
        let element = package.map_or(r.element_bytes, |p| p.element_bytes);
        // Attention reads a row for each of its heads' groups: its width says how much, whatever the cache's type.
        let features = |work: &ModelWork, weight_bytes: f64, rows: usize, element: usize| {
            let read: f64 = work
                .attention
                .iter()
                .map(|a| (a.layers * a.width * rows.min(a.window.unwrap_or(rows)) * element) as f64)
                .sum();
            [1.0, weight_bytes, read]
        };
        let weight_bytes = package.map_or(r.work.weight_bytes, |p| p.weight_bytes);
        let wanted = features(r.work, weight_bytes, context, element);
        let figures = r.machine.decode.iter().filter(|f| f.engine == engine);
        let known: Vec<Known<'_>> = figures
            .filter_map(|f| {
                let work = r.machine.models.get(&f.model)?;
                let own = work.is_like(r.work);
                let bytes = if own { weight_bytes } else { work.weight_bytes };
                let point = Point { features: features(work, bytes, f.context, element), seconds: f.seconds };
                Some(Known { dtype: &f.dtype, own, length: f.context, point })
            })
            .collect();
        let (seconds, basis) = self.predict(known, &self.dtype(engine, package), wanted, context)?;
        Some((seconds * self.busy(engine), basis))
    }

    /// Seconds for `features`, from figures of the right type where there are any, and of this very model where they
    /// say enough.
    fn predict(
        &self,
        mut known: Vec<Known<'_>>,
        dtype: &str,
        features: [f64; 3],
        length: usize,
    ) -> Option<(f64, Basis)> {
        if known.iter().any(|k| k.dtype == dtype) {
            known.retain(|k| k.dtype == dtype);
        }
        let own: Vec<(usize, Point)> = known.iter().filter(|k| k.own).map(|k| (k.length, k.point)).collect();
        let points: Vec<Point> = if own.is_empty() {
            known.iter().map(|k| k.point).collect()
        } else {
            own.iter().map(|(_, p)| *p).collect()
        };
        let fit = Fit::of(&points)?;
        let basis = match (self.request.machine.origin, own.is_empty()) {
            (Origin::Measured, false) => Basis::Measured,
            (Origin::Measured, true) => Basis::Scaled,
            (Origin::Published, false) => Basis::Published,
            (Origin::Published, true) => Basis::PublishedScaled,
        };
        Some((fit.seconds(features) * correction(&fit, &own, length), basis))
    }

    /// Live bytes that the target gets.
    fn handoff_bytes(&self, rows: usize) -> usize {
        let r = self.request;
        let to = match self.route {
            Route::Mlx => return 0,
            Route::CoreMlMlx => r.element_bytes,
            Route::CoreMl | Route::MlxCoreMl => r.decode.map_or(2, |p| p.element_bytes),
        };
        cache_bytes(r.cache, rows, to)
    }

    /// Seconds that remain when the last rows are final.
    fn exposed(&self, rows: usize) -> f64 {
        let r = self.request;
        let read_element = match self.route {
            Route::Mlx => return 0.0,
            Route::CoreMlMlx | Route::CoreMl => r.prefill.map_or(2, |p| p.element_bytes),
            Route::MlxCoreMl => r.element_bytes,
        };
        if rows == 0 {
            return 0.0;
        }
        // Rows that MLX takes over move while the prefill runs: all but the last piece's are there when it ends, and
        // the target's pages have been touched.
        let streamed = self.route == Route::CoreMlMlx;
        let last =
            r.prefill.filter(|_| streamed).and_then(|p| p.computed(rows)).map_or(rows, |(_, last)| last);
        let moved = (cache_bytes(r.cache, rows, read_element) + self.handoff_bytes(rows)) as f64;
        let left = moved * last as f64 / rows as f64;
        handoff_seconds(r.machine, left, streamed)
    }

    fn joules(&self, prefill: f64, decode: f64) -> Option<f64> {
        let machine = self.request.machine;
        let watts = |engine, phase| machine.watts(engine, phase);
        let prefill = prefill * watts(self.route.prefill(), Phase::Prefill)?;
        Some(prefill + decode * watts(self.route.decode(), Phase::Decode)?)
    }

    fn peak_bytes(&self, rows: usize) -> u64 {
        let r = self.request;
        let total = r.context + r.max_tokens;
        let held = |package: Option<&Package>, rows: usize| {
            let (weights, element) =
                package.map_or((r.work.weight_bytes, 2), |p| (p.weight_bytes, p.element_bytes));
            weights + cache_bytes(r.cache, rows, element) as f64
        };
        let mlx = r.work.weight_bytes
            + cache_bytes(r.cache, (total + GROWTH_ROWS).next_multiple_of(GROWTH_ROWS), r.element_bytes)
                as f64;
        let computed = r.prefill.and_then(|p| p.computed(rows)).map_or(rows, |(computed, _)| computed);
        let prefill = held(r.prefill, computed);
        let decode = held(r.decode, r.decode.map_or(total, Package::limit));
        let bytes = match self.route {
            Route::CoreMlMlx => prefill + mlx,
            Route::Mlx => mlx,
            Route::CoreMl => prefill + decode,
            Route::MlxCoreMl => mlx + decode,
        };
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a number of bytes")]
        let whole = bytes as u64;
        whole
    }
}

/// A figure that may serve.
struct Known<'a> {
    dtype: &'a str,
    /// Whether it is of the model in question.
    own: bool,
    length: usize,
    point: Point,
}

/// Seconds of a hand-off that reads and writes `bytes`.
fn handoff_seconds(machine: &Machine, bytes: f64, warm: bool) -> f64 {
    let point = |f: &HandoffFigure| Point { features: [1.0, f.bytes as f64, 0.0], seconds: f.seconds };
    let points: Vec<Point> = machine.handoff.iter().filter(|f| f.warm == warm).map(point).collect();
    if let Some(fit) = Fit::of(&points) {
        return fit.seconds([1.0, bytes, 0.0]);
    }
    let cold = machine.cold_copy.as_ref().filter(|_| !warm);
    bytes / 1e9 / cold.unwrap_or(&machine.warm_copy).gigabytes_per_second
}
