//! Compiling and loading.

use std::path::{Path, PathBuf};
use std::sync::mpsc;

use block2::RcBlock;
use kvbaton_runtime::{Call, LoadConfig, RuntimeError, Units};
use objc2::rc::Retained;
use objc2_core_ml::{
    MLComputeUnits, MLModel, MLModelConfiguration, MLOptimizationHints, MLReshapeFrequencyHint,
};
use objc2_foundation::{NSError, NSString, NSURL};

use crate::{failed, words};

/// Compiles a package into the system's temporary folder.
pub(crate) fn compile(package: &Path) -> Result<PathBuf, RuntimeError> {
    let url = url(package);
    let (done, wait) = mpsc::channel();
    let handler = RcBlock::new(move |compiled: *mut NSURL, error: *mut NSError| {
        // SAFETY: Core ML passes a valid URL, or null and a valid error; both live as long as this call.
        let (compiled, error) = unsafe { (compiled.as_ref(), error.as_ref()) };
        let result = match compiled.and_then(|url| url.path()) {
            Some(path) => Ok(PathBuf::from(path.to_string())),
            None => Err(error.map_or_else(String::new, words)),
        };
        let _ = done.send(result);
    });
    // SAFETY: the URL is a file's, and the block is copied by the callee, which calls it once.
    unsafe { MLModel::compileModelAtURL_completionHandler(&url, &handler) };
    wait.recv()
        .unwrap_or_else(|_| Err("it never answered".to_owned()))
        .map_err(|message| RuntimeError::failed(Call::Compile, message))
}

/// Loads a function of a compiled model.
pub(crate) fn load(compiled: &Path, config: &LoadConfig) -> Result<Retained<MLModel>, RuntimeError> {
    let (url, configuration) = (url(compiled), configuration(config));
    // SAFETY: both objects are valid; the model is used on this thread alone.
    unsafe { MLModel::modelWithContentsOfURL_configuration_error(&url, &configuration) }
        .map_err(failed(Call::Load))
}

/// The configuration that a load and its plan share.
pub(crate) fn configuration(config: &LoadConfig) -> Retained<MLModelConfiguration> {
    let units = match config.units {
        Units::All => MLComputeUnits::All,
        Units::CpuAndNe => MLComputeUnits::CPUAndNeuralEngine,
        Units::CpuAndGpu => MLComputeUnits::CPUAndGPU,
        Units::Cpu => MLComputeUnits::CPUOnly,
    };
    // SAFETY: setters of a fresh object; `LoadConfig::for_system` asks for a function or hints only of a system that
    // has the setter.
    unsafe {
        let configuration = MLModelConfiguration::new();
        configuration.setComputeUnits(units);
        if let Some(function) = &config.function {
            configuration.setFunctionName(Some(&NSString::from_str(function)));
        }
        if config.rare_shapes {
            let hints = MLOptimizationHints::new();
            hints.setReshapeFrequency(MLReshapeFrequencyHint::Infrequent);
            configuration.setOptimizationHints(&hints);
        }
        configuration
    }
}

/// A file's URL.
pub(crate) fn url(path: &Path) -> Retained<NSURL> {
    NSURL::fileURLWithPath(&NSString::from_str(&path.to_string_lossy()))
}
