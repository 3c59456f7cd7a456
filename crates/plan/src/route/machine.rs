//! What is known of a machine: figures, each with where it comes from.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::ModelWork;

/// Which program runs a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Engine {
    /// A Core ML package: on the Neural Engine of a Mac, on kvbaton's CPU executor elsewhere.
    CoreMl,
    /// MLX: on the GPU of a Mac, on the CPU elsewhere.
    Mlx,
}

impl Engine {
    /// The name in files and routes.
    pub fn name(self) -> &'static str {
        match self {
            Engine::CoreMl => "coreml",
            Engine::Mlx => "mlx",
        }
    }
}

/// Where a machine's figures come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    /// `kvbaton calibrate` measured them on the machine itself.
    Measured,
    /// Others published them. kvbaton never ran there.
    Published,
}

/// Seconds of a prefill.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PrefillFigure {
    /// What ran.
    pub engine: Engine,
    /// The model, by its name in the machine file or among the built-in shapes.
    pub model: String,
    /// Type of weights, such as `float16` or `4bit`.
    pub dtype: String,
    /// Tokens computed, padding included.
    pub tokens: usize,
    /// Seconds.
    pub seconds: f64,
    /// Who says so; needed for published figures.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
}

/// Seconds of one decode step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DecodeFigure {
    /// What ran.
    pub engine: Engine,
    /// The model.
    pub model: String,
    /// Type of weights.
    pub dtype: String,
    /// Rows in the cache.
    pub context: usize,
    /// Seconds of a step.
    pub seconds: f64,
    /// Who says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
}

/// Seconds that a whole hand-off exposed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HandoffFigure {
    /// Bytes read and written.
    pub bytes: usize,
    /// Whether the target's pages had been touched.
    pub warm: bool,
    /// Seconds from the prefill's last row until the target was ready.
    pub seconds: f64,
    /// Who says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
}

/// How fast copies are.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CopyRate {
    /// 10⁹ bytes read and written a second.
    pub gigabytes_per_second: f64,
    /// Who says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
}

/// When power was drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// While prefilling.
    Prefill,
    /// While decoding.
    Decode,
}

/// Power that an engine draws.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Power {
    /// What ran.
    pub engine: Engine,
    /// When.
    pub phase: Phase,
    /// Watts.
    pub watts: f64,
    /// Who says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
}

/// A machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// Its name.
    pub name: String,
    /// Where its figures come from.
    pub origin: Origin,
    /// Names of processors that it stands for.
    #[serde(default)]
    pub chips: Vec<String>,
    /// What a reader must know of the figures.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// Copies into touched memory.
    pub warm_copy: CopyRate,
    /// Copies into memory that was never touched; the warm rate when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cold_copy: Option<CopyRate>,
    /// Models that figures name and that are not built in.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub models: BTreeMap<String, ModelWork>,
    /// Prefills.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub prefill: Vec<PrefillFigure>,
    /// Decode steps.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub decode: Vec<DecodeFigure>,
    /// Hand-offs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub handoff: Vec<HandoffFigure>,
    /// Power.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub power: Vec<Power>,
}

/// A machine that makes no sense.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the messages name every field")]
pub enum MachineError {
    #[error("`{what}` of machine `{machine}` is {value}: a positive number is wanted")]
    NotPositive { machine: String, what: String, value: String },
    #[error("`{what}` of machine `{machine}` is published and names no source")]
    NoSource { machine: String, what: String },
    #[error(
        "`{what}` of machine `{machine}` names the model `{model}`, which is neither in the file nor built in"
    )]
    NoModel { machine: String, what: String, model: String },
}

impl Machine {
    /// Checks every figure; `built_in` knows the models that files need not describe, and those that are named are
    /// added to the machine.
    ///
    /// # Errors
    ///
    /// When a figure is not a positive number, a published one has no source, or a model is not known.
    pub fn check(&mut self, built_in: impl Fn(&str) -> Option<ModelWork>) -> Result<(), MachineError> {
        let machine = || self.name.clone();
        let figure = |what: String, value: f64, source: &Option<String>| {
            if !(value > 0.0 && value.is_finite()) {
                return Err(MachineError::NotPositive { machine: machine(), what, value: value.to_string() });
            }
            let named = source.as_ref().is_some_and(|s| !s.trim().is_empty());
            if self.origin == Origin::Published && !named {
                return Err(MachineError::NoSource { machine: machine(), what });
            }
            Ok(())
        };
        figure("warm_copy".to_owned(), self.warm_copy.gigabytes_per_second, &self.warm_copy.source)?;
        if let Some(cold) = &self.cold_copy {
            figure("cold_copy".to_owned(), cold.gigabytes_per_second, &cold.source)?;
        }
        for (n, f) in self.prefill.iter().enumerate() {
            figure(format!("prefill[{n}].seconds"), f.seconds, &f.source)?;
            figure(format!("prefill[{n}].tokens"), f.tokens as f64, &f.source)?;
        }
        for (n, f) in self.decode.iter().enumerate() {
            figure(format!("decode[{n}].seconds"), f.seconds, &f.source)?;
        }
        for (n, f) in self.handoff.iter().enumerate() {
            figure(format!("handoff[{n}].seconds"), f.seconds, &f.source)?;
        }
        for (n, f) in self.power.iter().enumerate() {
            figure(format!("power[{n}].watts"), f.watts, &f.source)?;
        }
        let named = self.prefill.iter().map(|f| ("prefill", &f.model));
        let named: Vec<(&str, String)> = named
            .chain(self.decode.iter().map(|f| ("decode", &f.model)))
            .map(|(w, m)| (w, m.clone()))
            .collect();
        for (what, model) in named {
            if self.models.contains_key(&model) {
                continue;
            }
            let Some(work) = built_in(&model) else {
                return Err(MachineError::NoModel { machine: machine(), what: what.to_owned(), model });
            };
            self.models.insert(model, work);
        }
        for (name, work) in &self.models {
            if !(work.active_weights > 0.0 && work.weight_bytes > 0.0) {
                let value = format!("{} weights of {} bytes", work.active_weights, work.weight_bytes);
                return Err(MachineError::NotPositive {
                    machine: machine(),
                    what: format!("models.{name}"),
                    value,
                });
            }
        }
        Ok(())
    }

    /// Watts of an engine.
    pub(crate) fn watts(&self, engine: Engine, phase: Phase) -> Option<f64> {
        self.power.iter().find(|p| (p.engine, p.phase) == (engine, phase)).map(|p| p.watts)
    }
}
