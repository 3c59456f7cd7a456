//! The command line's host: calls back into `kvbaton._host`.

use std::path::Path;

use kvbaton::bench::PrefillRow;
use kvbaton::layout::{DType, ModelSpec};
use kvbaton::verify::Rung;
use kvbaton::{CacheView, Error, ErrorKind, HandoffReport, PrefillReport, SharedPrefill};
use kvbaton_cli::{
    Adoption, Decoder, DecoderRequest, ExportRequest, Exported, Generated, Host, PrefillComparison,
    Prefiller, Progress, Token, Tokenizer, VerifyRequest,
};
use pyo3::prelude::*;
use pyo3::types::{PyCFunction, PyDict};
use serde_json::{Map, Value};

use crate::errors::from_python;
use crate::prefill::NativePrefill;
use crate::view::NativeView;

/// A `kvbaton._host.Host`.
pub(crate) struct PyHost(Py<PyAny>);

impl PyHost {
    pub(crate) fn new(host: Py<PyAny>) -> PyHost {
        PyHost(host)
    }
}

/// Calls a method and reads its answer.
fn call<T>(
    object: &Py<PyAny>,
    run: impl for<'py> FnOnce(&Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>>,
    read: impl for<'py> FnOnce(&Bound<'py, PyAny>) -> PyResult<T>,
) -> Result<T, Error> {
    Python::attach(|py| {
        run(object.bind(py)).and_then(|answer| read(&answer)).map_err(|e| from_python(py, &e))
    })
}

fn text(answer: &Bound<'_, PyAny>) -> PyResult<String> {
    answer.extract()
}

/// Reads the JSON that the Python side answers with.
fn parse<T: serde::de::DeserializeOwned>(json: &str) -> Result<T, Error> {
    serde_json::from_str(json)
        .map_err(|e| Error::new(ErrorKind::Internal, format!("the Python side answered {json}: {e}")))
}

impl Host for PyHost {
    fn model_spec(&self, folder: &Path) -> Result<ModelSpec, Error> {
        parse(&call(&self.0, |host| host.call_method1("model_spec", (folder,)), text)?)
    }

    fn decoder(&self, request: &DecoderRequest) -> Result<Box<dyn Decoder + '_>, Error> {
        let dtype = request.dtype.map(|d| d.name());
        let decoder = call(
            &self.0,
            |host| host.call_method1("decoder", (&request.folder, dtype)),
            |d| Ok(d.clone().unbind()),
        )?;
        Ok(Box::new(PyDecoder(decoder)))
    }

    fn prefiller(&self, request: &DecoderRequest) -> Result<Box<dyn Prefiller + '_>, Error> {
        let dtype = request.dtype.map(|d| d.name());
        let arguments = (request.folder.clone(), dtype);
        let model =
            call(&self.0, |host| host.call_method1("prefiller", arguments), |m| Ok(m.clone().unbind()))?;
        Ok(Box::new(PyPrefiller(model)))
    }

    fn tokenizer(&self, folder: &Path) -> Result<Option<Box<dyn Tokenizer + '_>>, Error> {
        let found = call(
            &self.0,
            |host| host.call_method1("tokenizer", (folder,)),
            |t| Ok((!t.is_none()).then(|| t.clone().unbind())),
        )?;
        Ok(found.map(|t| Box::new(PyTokenizer(t)) as Box<dyn Tokenizer>))
    }

    fn export(&self, request: &ExportRequest, progress: Progress) -> Result<Exported, Error> {
        let answer = call(
            &self.0,
            |host| {
                let report = PyCFunction::new_closure(host.py(), None, None, move |args, _| {
                    let (stage, done, total): (String, u64, u64) = args.extract()?;
                    progress(&stage, done, total);
                    Ok::<_, PyErr>(())
                })?;
                let options = PyDict::new(host.py());
                options.set_item("kind", &request.kind)?;
                options.set_item("buckets", request.buckets.clone())?;
                options.set_item("context", request.context.clone())?;
                options.set_item("chunk", request.chunk)?;
                options.set_item("split", request.split)?;
                options.set_item("kv_outputs", &request.kv_outputs)?;
                options.set_item("quantize", &request.quantize)?;
                options.set_item("force", request.force)?;
                options.set_item("progress", report)?;
                host.call_method("export", (&request.model, &request.out), Some(&options))
            },
            text,
        )?;
        Ok(Exported { report: parse(&answer)? })
    }

    fn compare_prefill(&self, request: &PrefillComparison) -> Result<Vec<PrefillRow>, Error> {
        let arguments = (request.folder.clone(), request.tokens, request.threads);
        parse(&call(&self.0, |host| host.call_method1("compare_prefill", arguments), text)?)
    }

    fn bench_page(&self, document: &Value) -> Result<String, Error> {
        call(&self.0, |host| host.call_method1("bench_page", (document.to_string(),)), text)
    }

    fn page(&self, document: &Value) -> Result<String, Error> {
        call(&self.0, |host| host.call_method1("page", (document.to_string(),)), text)
    }

    fn probe_adoption(&self) -> Result<Map<String, Value>, Error> {
        parse(&call(&self.0, |host| host.call_method0("probe_adoption"), text)?)
    }

    fn probe_inverse(&self) -> Result<Map<String, Value>, Error> {
        parse(&call(&self.0, |host| host.call_method0("probe_inverse"), text)?)
    }

    fn versions(&self) -> Result<Map<String, Value>, Error> {
        parse(&call(&self.0, |host| host.call_method0("versions"), text)?)
    }

    fn interrupted(&self) -> bool {
        Python::attach(|py| py.check_signals().is_err())
    }
}

/// A `kvbaton._host.MlxPrefiller`.
struct PyPrefiller(Py<PyAny>);

impl Prefiller for PyPrefiller {
    fn engine(&self) -> String {
        call(&self.0, |m| m.getattr("engine"), text).unwrap_or_else(|_| "mlx".to_owned())
    }

    fn prefill(&mut self, tokens: &[u32]) -> Result<CacheView, Error> {
        let read = |view: &Bound<'_, PyAny>| Ok(view.extract::<PyRef<'_, NativeView>>()?.0.clone());
        call(&self.0, |m| m.call_method1("prefill", (tokens.to_vec(),)), read)
    }
}

/// A `kvbaton._host.Tokenizer`.
struct PyTokenizer(Py<PyAny>);

impl Tokenizer for PyTokenizer {
    fn encode(&self, prompt: &str, ignore_chat_template: bool) -> Result<Vec<u32>, Error> {
        call(&self.0, |t| t.call_method1("encode", (prompt, ignore_chat_template)), |ids| ids.extract())
    }

    fn ends(&self) -> Result<Vec<u32>, Error> {
        call(&self.0, |t| t.getattr("ends"), |ids| ids.extract())
    }

    fn add(&mut self, token: u32) -> Result<String, Error> {
        call(&self.0, |t| t.call_method1("add", (token,)), text)
    }

    fn finish(&mut self) -> Result<String, Error> {
        call(&self.0, |t| t.call_method0("finish"), text)
    }
}

/// A `kvbaton._host.MlxDecoder`.
struct PyDecoder(Py<PyAny>);

impl Decoder for PyDecoder {
    fn engine(&self) -> String {
        call(&self.0, |d| d.getattr("engine"), text).unwrap_or_else(|_| "mlx".to_owned())
    }

    fn dtype(&self) -> Result<DType, Error> {
        Ok(call(&self.0, |d| d.getattr("dtype"), text)?.parse()?)
    }

    fn adoption(&self) -> Result<Adoption, Error> {
        parse(&call(&self.0, |d| d.call_method0("adoption"), text)?)
    }

    fn adopt(&mut self, cache: CacheView, tokens: &[u32]) -> Result<HandoffReport, Error> {
        parse(&call(&self.0, |d| d.call_method1("adopt", (NativeView(cache), tokens.to_vec())), text)?)
    }

    fn encode(&self, prompt: &str, ignore_chat_template: bool) -> Result<Vec<u32>, Error> {
        call(&self.0, |d| d.call_method1("encode", (prompt, ignore_chat_template)), |ids| ids.extract())
    }

    fn receive(&mut self, cache: Option<CacheView>, tokens: &[u32]) -> Result<HandoffReport, Error> {
        let cache = cache.map(NativeView);
        parse(&call(&self.0, |d| d.call_method1("receive", (cache, tokens.to_vec())), text)?)
    }

    fn receive_streamed(
        &mut self,
        engine: &SharedPrefill,
        tokens: &[u32],
    ) -> Result<(PrefillReport, HandoffReport), Error> {
        let arguments = (NativePrefill(engine.clone()), tokens.to_vec());
        let reports = call(
            &self.0,
            |d| d.call_method1("receive_streamed", arguments),
            |reports| reports.extract::<(String, String)>(),
        )?;
        Ok((parse(&reports.0)?, parse(&reports.1)?))
    }

    fn prefill(&mut self, tokens: &[u32]) -> Result<PrefillReport, Error> {
        parse(&call(&self.0, |d| d.call_method1("prefill", (tokens.to_vec(),)), text)?)
    }

    fn forget(&mut self, memory: bool) -> Result<(), Error> {
        call(&self.0, |d| d.call_method1("forget", (memory,)), |_| Ok(()))
    }

    fn generate(
        &mut self,
        remaining: &[u32],
        max_tokens: usize,
        temperature: f64,
        emit: &mut dyn FnMut(&Token) -> bool,
    ) -> Result<Generated, Error> {
        let steps = call(
            &self.0,
            |d| d.call_method1("generate", (remaining.to_vec(), max_tokens, temperature)),
            |steps| Ok(steps.clone().unbind()),
        )?;
        // The generator yields (id, text) a token and ends with the summary as its only str.
        loop {
            let step = call(&steps, |s| s.call_method0("__next__"), |s| Ok(s.clone().unbind()))?;
            let token = Python::attach(|py| {
                let step = step.bind(py);
                if let Ok(summary) = step.extract::<String>() {
                    return Ok(Err(summary));
                }
                let (id, text) = step.extract().map_err(|e| from_python(py, &e))?;
                Ok::<_, Error>(Ok(Token { id, text }))
            })?;
            match token {
                Ok(token) if emit(&token) => {}
                Ok(_) => return Err(Error::new(ErrorKind::Interrupted, "interrupted")),
                Err(summary) => return generated(&summary),
            }
        }
    }

    fn verify(&mut self, request: VerifyRequest) -> Result<Vec<Rung>, Error> {
        let options = verify_options(&request);
        let (cache, reference) = (request.cache.map(NativeView), request.reference.map(NativeView));
        let arguments = (cache, reference, request.tokens, options);
        parse(&call(&self.0, |d| d.call_method1("verify", arguments), text)?)
    }
}

/// What `MlxDecoder.verify` reads.
fn verify_options(request: &VerifyRequest) -> String {
    serde_json::json!({"max_tokens": request.max_tokens, "thresholds": request.thresholds}).to_string()
}

fn generated(summary: &str) -> Result<Generated, Error> {
    let value: Value = parse(summary)?;
    let missing = || Error::new(ErrorKind::Internal, format!("the Python side answered {summary}"));
    let number = |name: &str| value.get(name).and_then(Value::as_f64).ok_or_else(missing);
    let copied = value.get("first_step_copied_bytes").and_then(Value::as_u64).ok_or_else(missing)?;
    let copied = usize::try_from(copied).unwrap_or(usize::MAX);
    Ok(Generated {
        tokens: serde_json::from_value(value.get("tokens").cloned().unwrap_or_default())
            .map_err(|_| missing())?,
        text: value.get("text").and_then(Value::as_str).ok_or_else(missing)?.to_owned(),
        first_step_seconds: number("first_step_seconds")?,
        seconds: number("seconds")?,
        first_step_copied_bytes: Some(copied),
    })
}
