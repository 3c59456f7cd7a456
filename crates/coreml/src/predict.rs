//! One prediction.

use kvbaton_runtime::{Call, RuntimeError};
use objc2::AnyThread;
use objc2::rc::Retained;
use objc2::runtime::{AnyObject, ProtocolObject};
use objc2_core_ml::{
    MLDictionaryFeatureProvider, MLFeatureProvider, MLFeatureValue, MLModel, MLPredictionOptions, MLState,
};
use objc2_foundation::{NSDictionary, NSString};

use crate::arrays::Array;
use crate::failed;

/// Runs `model` and returns the arrays of all outputs.
pub(crate) fn predict(
    model: &MLModel,
    inputs: &[(String, Array)],
    backings: &[(String, Array)],
    state: Option<&MLState>,
) -> Result<Vec<(String, Array)>, RuntimeError> {
    let values = dictionary(inputs.iter().map(|(name, array)| {
        // SAFETY: a value that holds a valid array.
        let value = unsafe { MLFeatureValue::featureValueWithMultiArray(&array.multi) };
        (name.as_str(), Retained::<AnyObject>::from(value))
    }));
    // SAFETY: the dictionary's values are feature values.
    let features = unsafe {
        MLDictionaryFeatureProvider::initWithDictionary_error(MLDictionaryFeatureProvider::alloc(), &values)
    }
    .map_err(failed(Call::Predict))?;
    let features = ProtocolObject::from_ref(&*features);
    let proposed = dictionary(
        backings
            .iter()
            .map(|(name, array)| (name.as_str(), Retained::<AnyObject>::from(array.multi.clone()))),
    );
    // SAFETY: all objects are valid; the dictionary's values are multi-arrays whose bytes nobody holds, by custody; a
    // state exists only on a system that has the call, and is used on this thread alone.
    let outputs = unsafe {
        let options = MLPredictionOptions::new();
        options.setOutputBackings(&proposed);
        match state {
            None => model.predictionFromFeatures_options_error(features, &options),
            Some(state) => model.predictionFromFeatures_usingState_options_error(features, state, &options),
        }
    }
    .map_err(failed(Call::Predict))?;
    // SAFETY: a property of a valid provider.
    let names = unsafe { outputs.featureNames() };
    // SAFETY: as above, and of its values.
    let array = |name: &NSString| unsafe { outputs.featureValueForName(name)?.multiArrayValue() };
    Ok(names
        .iter()
        .filter_map(|name| {
            let multi = array(&name)?;
            // A result in memory that was proposed is read through that memory.
            let proposed = backings.iter().find(|(_, b)| std::ptr::eq(&*b.multi, &*multi));
            Some((name.to_string(), proposed.map_or_else(|| Array::own(multi), |(_, b)| b.clone())))
        })
        .collect())
}

fn dictionary<'a>(
    entries: impl Iterator<Item = (&'a str, Retained<AnyObject>)>,
) -> Retained<NSDictionary<NSString, AnyObject>> {
    let (keys, values): (Vec<_>, Vec<_>) =
        entries.map(|(name, value)| (NSString::from_str(name), value)).unzip();
    let keys: Vec<&NSString> = keys.iter().map(|k| &**k).collect();
    NSDictionary::from_retained_objects(&keys, &values)
}
