//! What Core ML says would run where.

use std::path::Path;
use std::sync::mpsc;

use block2::RcBlock;
use kvbaton_runtime::{Call, LoadConfig, Operation, RuntimeError};
use objc2::ClassType;
use objc2::runtime::NSObjectProtocol;
use objc2_core_ml::{
    MLComputePlan, MLGPUComputeDevice, MLModelStructureProgramOperation, MLNeuralEngineComputeDevice,
};
use objc2_foundation::NSError;

use crate::model::{configuration, url};
use crate::{guarded, words};

/// The operations of the function that `config` names, or of the only one.
pub(crate) fn plan(compiled: &Path, config: &LoadConfig) -> Result<Vec<Operation>, RuntimeError> {
    let (done, wait) = mpsc::channel();
    let function = config.function.clone();
    let handler = RcBlock::new(move |plan: *mut MLComputePlan, error: *mut NSError| {
        // SAFETY: Core ML passes a valid plan, or null and a valid error; both live as long as this call.
        let (plan, error) = unsafe { (plan.as_ref(), error.as_ref()) };
        let result = match plan {
            // Outside the pool and the guard of the call that this answers.
            Some(plan) => guarded(Call::Plan, || operations(plan, function.as_deref()).map_err(failed)),
            None => Err(failed(error.map_or_else(String::new, words))),
        };
        let _ = done.send(result);
    });
    // SAFETY: valid objects, and the block is copied by the callee, which calls it once.
    unsafe {
        MLComputePlan::loadContentsOfURL_configuration_completionHandler(
            &url(compiled),
            &configuration(config),
            &handler,
        );
    }
    wait.recv().unwrap_or_else(|_| Err(failed("it never answered".to_owned())))
}

fn failed(message: String) -> RuntimeError {
    RuntimeError::failed(Call::Plan, message)
}

fn operations(plan: &MLComputePlan, function: Option<&str>) -> Result<Vec<Operation>, String> {
    // SAFETY: properties of valid objects.
    let functions =
        unsafe { plan.modelStructure().program().map(|p| p.functions()) }.ok_or("it is no ML program")?;
    let name = functions
        .keys()
        .find(|key| function.is_none_or(|f| key.to_string() == f))
        .ok_or("it has no such function")?;
    let function = functions.objectForKey(&name).ok_or("it has no such function")?;
    // SAFETY: as above.
    let operations = unsafe { function.block().operations() };
    Ok(operations.iter().map(|operation| described(plan, &operation)).collect())
}

fn described(plan: &MLComputePlan, operation: &MLModelStructureProgramOperation) -> Operation {
    // SAFETY: properties of valid objects, of which the plan made both.
    let (kind, usage, cost) = unsafe {
        (
            operation.operatorName().to_string(),
            plan.computeDeviceUsageForMLProgramOperation(operation),
            plan.estimatedCostOfMLProgramOperation(operation).map(|c| c.weight()),
        )
    };
    let device = usage.map(|usage| {
        // SAFETY: a property of a valid object.
        let device = unsafe { usage.preferredComputeDevice() };
        if device.isKindOfClass(MLNeuralEngineComputeDevice::class()) {
            "ne"
        } else if device.isKindOfClass(MLGPUComputeDevice::class()) {
            "gpu"
        } else {
            "cpu"
        }
    });
    Operation { kind, device, cost }
}
