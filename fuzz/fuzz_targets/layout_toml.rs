//! The layout language: read or refused, and what is read is written down so that it reads back the same.

#![no_main]

use kvbaton_layout::Layout;

libfuzzer_sys::fuzz_target!(|text: &str| {
    if let Ok(layout) = Layout::from_toml(text) {
        assert_eq!(Layout::from_toml(&layout.to_toml()).as_ref(), Ok(&layout));
    }
});
