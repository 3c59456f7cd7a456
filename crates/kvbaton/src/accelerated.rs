//! Prefill on a runtime: Core ML, or a fake of it.

mod decode;
mod package;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use kvbaton_exec::Array;
use kvbaton_layout::{Layout, LiveRows, ModelSpec, Placement, TensorInfo};
use kvbaton_mil::PAST_KEY;
use kvbaton_runtime::{Counts, Loaded, Output, Runtime, Session, Units};

use crate::chunks::{Chain, RunStep, Step, steps};
use crate::compatible::check_vocabulary;
use crate::cpu::{agree, input_name};
use crate::functions::{PrefillFunctions, prefill_functions};
use crate::inputs::{self, Wanted};
use crate::prefill::ChunkSink;
use crate::{CacheView, Error, FunctionInfo, Prefill, PrefillReport, Prefilled, Stated};

pub use decode::RuntimeDecode;
pub(crate) use package::{RuntimePackage, copied, lent, logits};

/// A package behind a runtime's session.
pub struct RuntimePrefill<R: Runtime> {
    package: RuntimePackage<R>,
    layout: Layout,
    model: ModelSpec,
    functions: PrefillFunctions,
    /// The layout of the cache so far, where functions take one.
    past: Option<Layout>,
}

impl<R: Runtime> RuntimePrefill<R> {
    /// Opens a package, or a compiled model, of which the caller says what it does not say of itself. `units` are the
    /// compute units that somebody asked for.
    ///
    /// # Errors
    ///
    /// When it cannot be read, when nobody states its layout or its model, or when both do and disagree.
    pub fn open(
        session: Session<R>,
        path: &Path,
        units: Option<Units>,
        stated: Stated,
    ) -> Result<RuntimePrefill<R>, Error> {
        let package = RuntimePackage::open(session, path, units)?;
        let metadata = &package.described.metadata;
        let (layout, model) = agree(path, metadata, stated)?;
        let tokens_input = input_name(layout.inputs.tokens.as_deref(), "tokens")?;
        let functions = prefill_functions(&package.described.facts(tokens_input), tokens_input)?;
        let past = metadata.get(PAST_KEY).map(|text| Layout::from_toml(text)).transpose()?;
        Ok(RuntimePrefill { package, layout, model, functions, past })
    }

    /// Where all buffers are.
    pub fn counts(&self) -> Counts {
        self.package.session.counts()
    }

    /// What was loaded, by function: for which units, and what runs where.
    pub fn loaded(&self) -> &BTreeMap<String, Loaded> {
        self.package.loaded()
    }

    /// The runtime's session.
    pub fn session(&mut self) -> &mut Session<R> {
        &mut self.package.session
    }

    /// Runs one step.
    fn predict(
        &mut self,
        step: &Step,
        tokens: &[u32],
        past: &[(String, Array)],
    ) -> Result<Vec<Output>, Error> {
        let types = self.package.described.inputs(&step.function);
        let wanted: Vec<Wanted<'_>> = types.iter().map(|(name, ty)| Wanted { name, ty }).collect();
        let inputs = inputs::build_after(&self.layout, &wanted, tokens, step.length, step.first, past)?;
        self.package.run(&step.function, inputs, None)
    }

    /// Prefills with one function.
    fn whole(&mut self, tokens: &[u32], step: &Step) -> Result<Prefilled, Error> {
        let start = Instant::now();
        let outputs = self.predict(step, tokens, &[])?;
        let seconds = start.elapsed().as_secs_f64();
        let mut report = self.report(step, tokens.len(), seconds);
        let (mut tensors, mut last) = (Vec::new(), None);
        for output in outputs {
            if Some(&output.name) == self.layout.outputs.logits.as_ref() {
                last = Some(logits(&output)?);
            } else {
                tensors.extend(lent(output, &mut report.notes));
            }
        }
        let pad = (self.layout.placement == Placement::LeftPadded).then(|| step.length - tokens.len());
        let live = LiveRows { pad, ..LiveRows::seen(tokens.len()) };
        let cache = CacheView::new(self.layout.clone(), self.model.cache.clone(), tensors, live)?
            .with_model(Some(self.model.clone()))
            .with_tokens(tokens.to_vec());
        Ok(Prefilled { cache, logits: last, report })
    }

    fn report(&self, step: &Step, tokens: usize, seconds: f64) -> PrefillReport {
        let mut report = PrefillReport::new(R::NAME, step.function.clone(), tokens, seconds);
        if let Some(loaded) = self.loaded().get(&step.function) {
            report.compute_units = Some(loaded.units.name().to_owned());
            report.notes.clone_from(&loaded.notes);
        }
        report
    }

    /// Prefills in one or several steps, and tells `sink` of each one's rows.
    fn run(&mut self, tokens: &[u32], sink: Option<&mut ChunkSink<'_>>) -> Result<Prefilled, Error> {
        let steps = steps(&self.functions, tokens.len())?;
        check_vocabulary(tokens, self.model.vocab_size)?;
        self.prepare(tokens.len())?;
        let one = steps.iter().all(|s| s.context.is_none());
        let Some(past) = self.past.clone().filter(|_| !one) else {
            let done = self.whole(tokens, &steps[0])?;
            if let Some(sink) = sink {
                sink(&done.cache, 0..i64::try_from(tokens.len()).unwrap_or(i64::MAX))?;
            }
            return Ok(done);
        };
        let (rows, model) = (self.layout.clone(), self.model.clone());
        let chain = Chain { rows: &rows, past: &past, model: &model, threads: 0 };
        let done = chain.run(self, &steps, tokens, sink.unwrap_or(&mut |_, _| Ok(())))?;
        let report = self.report(&steps[steps.len() - 1], tokens.len(), done.seconds);
        Ok(Prefilled { cache: done.cache, logits: done.logits, report })
    }
}

impl<R: Runtime> RunStep for RuntimePrefill<R> {
    fn past_inputs(&mut self, function: &str, names: &[String]) -> Result<Vec<TensorInfo>, Error> {
        self.package.described.past_inputs(function, names)
    }

    fn run_step(
        &mut self,
        step: &Step,
        tokens: &[u32],
        past: &[(String, Array)],
    ) -> Result<Vec<(String, Array)>, Error> {
        // Out of the buffers that the next chunk writes.
        self.predict(step, tokens, past)?.into_iter().map(copied).collect()
    }
}

impl<R: Runtime> Prefill for RuntimePrefill<R> {
    fn engine(&self) -> &'static str {
        R::NAME
    }

    fn functions(&self) -> &[FunctionInfo] {
        &self.functions.whole
    }

    fn model(&self) -> Option<&ModelSpec> {
        Some(&self.model)
    }

    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn prepare(&mut self, tokens: usize) -> Result<(), Error> {
        for step in steps(&self.functions, tokens)? {
            self.package.load(&step.function)?;
        }
        Ok(())
    }

    fn settle(&mut self) {
        self.package.session.settle();
    }

    fn prefill(&mut self, tokens: &[u32]) -> Result<Prefilled, Error> {
        self.run(tokens, None)
    }

    fn prefill_streamed(&mut self, tokens: &[u32], sink: &mut ChunkSink<'_>) -> Result<Prefilled, Error> {
        self.run(tokens, Some(sink))
    }
}

#[cfg(test)]
mod tests;
