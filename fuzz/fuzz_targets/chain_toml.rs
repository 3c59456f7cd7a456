//! `chain.toml`: read or refused; what is read has a stage, and its layouts read back the same.

#![no_main]

use kvbaton::{ChainFile, StatedLayout};
use kvbaton_layout::Layout;

libfuzzer_sys::fuzz_target!(|text: &str| {
    let Ok(chain) = ChainFile::parse(text) else { return };
    assert!(!chain.stages.is_empty());
    let layouts = chain.stages.iter().filter_map(|stage| stage.layout.as_ref()).chain(&chain.layout);
    for layout in layouts {
        if let StatedLayout::Written(layout) = layout {
            assert_eq!(Layout::from_toml(&layout.to_toml()).as_ref(), Ok(layout.as_ref()));
        }
    }
});
