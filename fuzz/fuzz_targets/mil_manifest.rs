//! `Manifest.json`: read or refused, and what is read stays in the package.

#![no_main]

use std::path::Component;

libfuzzer_sys::fuzz_target!(|text: &[u8]| {
    if let Ok(manifest) = kvbaton_mil::Manifest::parse(text) {
        let inside = |c: Component<'_>| matches!(c, Component::Normal(_) | Component::CurDir);
        assert!(manifest.model.components().all(inside), "{}", manifest.model.display());
    }
});
